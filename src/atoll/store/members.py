"""Who is there: ranks, incarnations and heartbeats, as the hub knows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from atoll.core.config import SITE_VARIABLE

RANKS = 4096  # the most workers


@dataclass(frozen=True)
class Admission:
    """The answer to a Hello: what goes into Welcome, or one line for Refused. `reason` is for the record."""

    worker: int = -1
    incarnation: int = 0
    refused: str = ""
    reason: str = ""


@dataclass
class _Member:
    incarnation: int
    heard: float  # when it last gave a sign of life, in the caller's seconds
    iteration: int = 0
    address: str = ""


class Membership:
    """Workers by rank and shards by index. `patience` is for how many seconds silence is borne. `sites` has
    the number of workers of each site, where the run has levels; each site has a shard of its own.

    A run without shards is a ring, whose ranks are those below `workers` until it is formed (`open`). Else
    any number may come.
    Incarnations come from one counter, from 1; who comes back has a higher one. Shards have them too, so that
    their heartbeats can be told apart.
    """

    def __init__(
        self, workers: int, patience: float, shards: int = 1, sites: Mapping[str, int] | None = None
    ) -> None:
        self.workers = workers
        self.sites = dict(sites or {})
        self._site_shards: dict[str, _Member] = {}
        self._ended_sites: set[str] = set()
        self.patience = patience
        self._workers: dict[int, _Member] = {}
        self._shards: dict[int, _Member] = {}
        self.shards = shards
        self.open = False  # a ring is under way, which late workers may enter: any rank is good then
        self._incarnations = 0

    def handle_hello(
        self,
        now: float,
        role: str,
        wish: int = -1,
        shard: int = -1,
        address: str = "",
        site: str = "",
        incarnation: int = 0,
    ) -> Admission:
        """A worker wishes for a rank (-1: any), or a shard, or a site's shard, says where it is; a shard that
        was started again says which `incarnation` its forerunner was."""
        if role == "worker":
            refused = self._wrong_site(site)
            return Admission(refused=refused) if refused else self._admit_worker(now, wish)
        if role == "shard":
            return self._admit_shard(now, shard, address, incarnation)
        if role == "site":
            return self._admit_site(now, site, address)
        return Admission(refused=f"the hub knows no role {role!r}: worker, shard, site")

    def _wrong_site(self, site: str) -> str:
        """Why a worker of this site may not come in; empty where it may."""
        if not self.sites:
            return (
                f"the run has no sites, and this worker is of site {site!r}: unset {SITE_VARIABLE}, or start "
                "the hub with --site NAME=WORKERS"
                if site
                else ""
            )
        if site in self._ended_sites:
            return f"site {site!r} has ended, and takes no workers any more"
        if site in self.sites:
            return ""
        said = f"there is no site {site!r}" if site else "this worker names no site"
        return f"{said}; set {SITE_VARIABLE} to one of: {', '.join(self.sites)}"

    def _admit_site(self, now: float, site: str, address: str) -> Admission:
        if not self.sites:
            return Admission(refused="the run has no sites; start the hub with --site NAME=WORKERS for each")
        if site not in self.sites:
            return Admission(refused=f"there is no site {site!r}: the run has {', '.join(self.sites)}")
        if site in self._ended_sites:
            return Admission(refused=f"site {site!r} has ended, and cannot come back")
        if not address:
            return Admission(refused=f"the shard of site {site!r} does not say where it is")
        there = self._site_shards.get(site)
        if there is not None and there.address != address:
            return Admission(refused=f"site {site!r} has a shard already, at {there.address}")
        if there is None:
            self._incarnations += 1
            there = self._site_shards[site] = _Member(self._incarnations, now, address=address)
        there.heard = now
        index = list(self.sites).index(site)
        return Admission(index, there.incarnation, reason=f"its shard is at {address}")

    def _admit_worker(self, now: float, wish: int) -> Admission:
        if wish in self._workers:
            return Admission(refused=f"rank {wish} is taken: its worker lives")
        rank = wish if wish >= 0 else next(r for r in range(RANKS + 1) if r not in self._workers)
        if not self.shards and rank >= self.workers and not self.open:
            return Admission(refused=self._beyond(wish))
        if rank >= RANKS:
            return Admission(refused=f"rank {rank} is beyond {RANKS - 1}, the highest")
        self._incarnations += 1
        self._workers[rank] = _Member(self._incarnations, now)
        reason = "the rank it wished for" if wish >= 0 else "the lowest free rank"
        return Admission(rank, self._incarnations, reason=reason)

    def _beyond(self, wish: int) -> str:
        """Why a worker cannot be in the run's ring."""
        what = f"there is no rank {wish}" if wish >= 0 else "all of them are there"
        return f"the run is a ring of {self.workers} workers, and {what}; `atoll hub --workers` sets how many"

    def must_wait(self, wish: int) -> bool:
        """Whether a worker with this wish (-1: any rank) has to wait until another one leaves or is dead."""
        if wish >= 0 or self.shards or self.open:
            return wish in self._workers
        return len(self._workers) >= self.workers

    def _admit_shard(self, now: float, shard: int, address: str, before: int) -> Admission:
        if not self.shards:
            return Admission(refused="the run has no shards: its hub was started with --shards 0")
        if not 0 <= shard < self.shards:
            return Admission(refused=f"there is no shard {shard}: the run has {self.shards}, from 0")
        if not address:
            return Admission(refused=f"shard {shard} does not say where it is")
        if before > self._incarnations:
            return Admission(
                refused=f"shard {shard} goes on from a run that this hub knows nothing of, though it has its "
                "name: remove what is in its --directory, or give it another one"
            )
        there = self._shards.get(shard)
        elsewhere = there is not None and there.address != address
        again = there is not None and elsewhere and before == there.incarnation  # its forerunner is to go
        if there is not None and elsewhere and not again:
            return Admission(refused=f"shard {shard} is there already, at {there.address}")
        if there is None or again:
            self._incarnations += 1
            there = self._shards[shard] = _Member(self._incarnations, now, address=address)
        there.heard = now
        how = "was started again, and " if before else ""
        return Admission(incarnation=there.incarnation, reason=f"shard {shard} {how}is at {address}")

    def handle_heartbeat(self, now: float, incarnation: int, iteration: int = 0) -> bool:
        """A sign of life; False from one who is not there (any more)."""
        for member in self._everyone():
            if member.incarnation == incarnation:
                member.heard = max(now, member.heard)
                member.iteration = max(iteration, member.iteration)
                return True
        return False

    def _everyone(self) -> list[_Member]:
        return [*self._workers.values(), *self._shards.values(), *self._site_shards.values()]

    def handle_site_goodbye(self, incarnation: int) -> str:
        """All workers of a site have left; gives its name, or nothing where this is no site's shard."""
        for site, member in self._site_shards.items():
            if member.incarnation == incarnation:
                self._end_site(site)
                return site
        return ""

    def _end_site(self, site: str) -> None:
        del self._site_shards[site]
        self._ended_sites.add(site)

    def handle_goodbye(self, incarnation: int) -> int | None:
        """A worker leaves; gives its rank, which is free then, or None where it is not there."""
        for rank, member in self._workers.items():
            if member.incarnation == incarnation:
                del self._workers[rank]
                return rank
        return None

    def handle_shard_goodbye(self, incarnation: int) -> int | None:
        """A shard ends; gives its index, or None where it is not there."""
        for index, member in self._shards.items():
            if member.incarnation == incarnation:
                del self._shards[index]
                return index
        return None

    def poll_deaths(self, now: float) -> list[tuple[int, int, str]]:
        """(rank, incarnation, reason) of the workers that have been silent for too long; each once."""
        dead = []
        for rank, member in sorted(self._workers.items()):
            silence = now - member.heard
            if silence >= self.patience:
                dead.append(
                    (
                        rank,
                        member.incarnation,
                        f"worker {rank} was silent for {silence:.1f} s, and {self.patience:g} s are borne; "
                        f"it had committed {member.iteration} iterations",
                    )
                )
        for rank, _, _ in dead:
            del self._workers[rank]
        return dead

    def poll_shard_deaths(self, now: float) -> list[tuple[int, str]]:
        """(index, reason) of the shards that have been silent for too long; each once."""
        dead = []
        for index, member in sorted(self._shards.items()):
            silence = now - member.heard
            if silence >= self.patience:
                reason = f"shard {index} at {member.address} was silent for {silence:.1f} s"
                dead.append((index, f"{reason}, and {self.patience:g} s are borne"))
        for index, _ in dead:
            del self._shards[index]
        return dead

    def poll_site_deaths(self, now: float) -> list[tuple[str, int, str]]:
        """(site, incarnation, reason) of the sites' shards that have been silent for too long; each once."""
        dead = []
        for site, member in self._site_shards.items():
            silence = now - member.heard
            if silence >= self.patience:
                reason = f"its shard at {member.address} was silent for {silence:.1f} s"
                dead.append((site, member.incarnation, f"{reason}, and {self.patience:g} s are borne"))
        for site, _, _ in dead:
            self._end_site(site)
        return dead

    def next_deadline(self) -> float | None:
        """When one of the polls for deaths may next find someone, if nobody is heard until then."""
        heard = [member.heard for member in self._everyone()]
        return min(heard) + self.patience if heard else None

    def live(self) -> dict[int, int]:
        """The workers that are there: rank -> incarnation."""
        return {rank: member.incarnation for rank, member in sorted(self._workers.items())}

    def live_shards(self) -> list[int]:
        """The shards that are there, by index."""
        return sorted(self._shards)

    def live_sites(self) -> list[str]:
        """The sites whose shards are there."""
        return list(self._site_shards)

    def iterations(self) -> dict[int, int]:
        """How many iterations each has committed, by its last heartbeat."""
        return {rank: member.iteration for rank, member in sorted(self._workers.items())}

    def silence(self, now: float, incarnation: int) -> float:
        """For how many seconds a worker that is there was not heard."""
        member = next(member for member in self._workers.values() if member.incarnation == incarnation)
        return now - member.heard

    def rank_of(self, incarnation: int) -> int | None:
        """The rank of a worker that is there."""
        return next((r for r, member in self._workers.items() if member.incarnation == incarnation), None)

    def shard_addresses(self) -> list[str] | None:
        """All shards' addresses, by index, once all are there."""
        if len(self._shards) < self.shards:
            return None
        return [self._shards[index].address for index in range(self.shards)]

    def site_address(self, site: str) -> str:
        """Where a site's shard is; empty while it is not there."""
        there = self._site_shards.get(site)
        return there.address if there is not None else ""
