"""Who is there: ranks, incarnations and heartbeats, as the hub knows them."""

from __future__ import annotations

from dataclasses import dataclass

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
    """Workers by rank and shards by index. `patience` is for how many seconds silence is borne.

    A run without shards is a ring, whose ranks are those below `workers`. Elsewhere any number may come.
    Incarnations come from one counter, from 1; who comes back has a higher one. Shards have them too, so that
    their heartbeats can be told apart.
    """

    def __init__(self, workers: int, patience: float, shards: int = 1) -> None:
        self.workers = workers
        self.patience = patience
        self._workers: dict[int, _Member] = {}
        self._shards: dict[int, _Member] = {}
        self.shards = shards
        self._incarnations = 0

    def handle_hello(
        self, now: float, role: str, wish: int = -1, shard: int = -1, address: str = ""
    ) -> Admission:
        """A worker wishes for a rank (-1: any), or a shard says where it is."""
        if role == "worker":
            return self._admit_worker(now, wish)
        if role == "shard":
            return self._admit_shard(now, shard, address)
        return Admission(refused=f"the hub knows no role {role!r}: worker, shard")

    def _admit_worker(self, now: float, wish: int) -> Admission:
        if wish in self._workers:
            return Admission(refused=f"rank {wish} is taken: its worker lives")
        rank = wish if wish >= 0 else next(r for r in range(RANKS + 1) if r not in self._workers)
        if not self.shards and rank >= self.workers:
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
        if wish >= 0 or self.shards:
            return wish in self._workers
        return len(self._workers) >= self.workers

    def _admit_shard(self, now: float, shard: int, address: str) -> Admission:
        if not self.shards:
            return Admission(refused="the run has no shards: its hub was started with --shards 0")
        if not 0 <= shard < self.shards:
            return Admission(refused=f"there is no shard {shard}: the run has {self.shards}, from 0")
        if not address:
            return Admission(refused=f"shard {shard} does not say where it is")
        there = self._shards.get(shard)
        if there is not None and there.address != address:
            return Admission(refused=f"shard {shard} is there already, at {there.address}")
        if there is None:
            self._incarnations += 1
            there = self._shards[shard] = _Member(self._incarnations, now, address=address)
        there.heard = now
        return Admission(incarnation=there.incarnation, reason=f"shard {shard} is at {address}")

    def handle_heartbeat(self, now: float, incarnation: int, iteration: int = 0) -> bool:
        """A sign of life; False from one who is not there (any more)."""
        for member in (*self._workers.values(), *self._shards.values()):
            if member.incarnation == incarnation:
                member.heard = max(now, member.heard)
                member.iteration = max(iteration, member.iteration)
                return True
        return False

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

    def next_deadline(self) -> float | None:
        """When `poll_deaths` and `poll_shard_deaths` may next find someone, if nobody is heard until then."""
        heard = [member.heard for member in (*self._workers.values(), *self._shards.values())]
        return min(heard) + self.patience if heard else None

    def live(self) -> dict[int, int]:
        """The workers that are there: rank -> incarnation."""
        return {rank: member.incarnation for rank, member in sorted(self._workers.items())}

    def live_shards(self) -> list[int]:
        """The shards that are there, by index."""
        return sorted(self._shards)

    def iterations(self) -> dict[int, int]:
        """How many iterations each has committed, by its last heartbeat."""
        return {rank: member.iteration for rank, member in sorted(self._workers.items())}

    def silences(self, now: float) -> list[float]:
        """For how many seconds each rank below `workers` was not heard; -1 where nobody has it."""
        there = {rank: now - member.heard for rank, member in self._workers.items()}
        return [there.get(rank, -1.0) for rank in range(self.workers)]

    def rank_of(self, incarnation: int) -> int | None:
        """The rank of a worker that is there."""
        return next((r for r, member in self._workers.items() if member.incarnation == incarnation), None)

    def shard_addresses(self) -> list[str] | None:
        """All shards' addresses, by index, once all are there."""
        if len(self._shards) < self.shards:
            return None
        return [self._shards[index].address for index in range(self.shards)]
