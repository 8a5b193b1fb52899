"""Who is there: ranks, incarnations and heartbeats, as the hub knows them."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, TypeAlias

from atoll.core.config import SITE_VARIABLE
from atoll.store.replicas import Half, Pair, PairState
from atoll.store.silence import Patience

RANKS = 2**17  # the most workers
FLOOR_SECONDS = 3.5  # of silence that is always borne: a process that was stopped for 3 s goes on
# Times the patience: for a site's shard that may be started again to come back, or for a site's workers.
RETURN_PATIENCES = 3.0
SUSPECT_BEATS, SUSPECT_SECONDS = 2.0, 1.0  # heartbeats that a suspect may miss, and silence that it may keep


def suspect_seconds(heartbeat: float) -> float:
    """For how many seconds a suspect may be silent, where heartbeats come every `heartbeat`: on a loaded
    machine a thread may not run for half a second."""
    return max(SUSPECT_BEATS * heartbeat, SUSPECT_SECONDS)


def broken_seconds(heartbeat: float) -> float:
    """For how many seconds a member may be silent whose connections have broken: a second for them to come
    back, a heartbeat that was due as they broke, and one for the way."""
    return suspect_seconds(heartbeat) + 2 * heartbeat


@dataclass(frozen=True)
class Admission:
    """The answer to a Hello: what goes into Welcome, or one line for Refused. `reason` is for the record.
    `waits`: a shard's place is taken, by a process that may be dead."""

    worker: int = -1
    incarnation: int = 0
    refused: str = ""
    reason: str = ""
    waits: bool = False


@dataclass
class MemberState:
    """A worker or a shard, as plain data."""

    incarnation: int
    iteration: int
    address: str
    token: str
    launcher: str = ""


@dataclass
class MembershipState:
    """What `Membership` knows, as plain data: workers by rank, shards by index, sites' shards by site; where
    shards are held twice, their processes by incarnation. When each was heard is not part of it."""

    incarnations: int
    workers: dict[int, MemberState]
    shards: dict[int, MemberState]
    sites: dict[str, MemberState]
    ended: list[str]
    halves: dict[int, MemberState] = field(default_factory=dict)
    pairs: dict[int, PairState] = field(default_factory=dict)


_Kind: TypeAlias = Literal["worker", "shard", "half", "site"]
_IN_ORDER: dict[_Kind, int] = {"worker": 0, "shard": 1, "half": 2, "site": 3}  # as deaths are told


@dataclass
class _Member:
    kind: _Kind
    place: int  # its rank, the index of its shard, or that of its site
    incarnation: int
    heard: float  # when it last gave a sign of life, in the caller's seconds
    patience: Patience  # for how long its silence is borne
    iteration: int = 0
    address: str = ""
    token: str = ""
    launcher: str = ""  # that may pass its heartbeats on
    suspected: bool = False
    broken: bool = False  # its connections are
    due: float = 0.0  # when its silence is to be looked at next

    def hear(self, now: float) -> None:
        """A sign of life; one from before the latest changes nothing."""
        if now < self.heard:
            return
        if now > self.heard:
            self.patience.note(now - self.heard)
            self.heard = now
        self.suspected = self.broken = False

    def state(self) -> MemberState:
        return MemberState(self.incarnation, self.iteration, self.address, self.token, self.launcher)


class Membership:
    """Workers by rank and shards by index. `patience` is for how many seconds silence is borne at the most;
    who was heard regularly is borne for less, as measured, but never for less than `least` and 3 heartbeats.
    `heartbeat` is how often members are to be heard, in seconds. `sites` has the number of workers of each
    site, where the run has levels; each site has a shard of its own. With `replicas` 2 each shard is held by
    two processes (store/replicas.py).

    A run without shards is a ring, whose ranks are those below `workers` until it is formed (`open`). Else
    any number may come.
    Incarnations come from one counter, from 1; who comes back has a higher one. Shards have them too, so that
    their heartbeats can be told apart.

    A Hello, a heartbeat and a goodbye cost the same however many members there are, and `poll_deaths` costs
    what has become due: no call that is made for each member looks at all of them.
    """

    def __init__(
        self,
        workers: int,
        patience: float,
        shards: int = 1,
        sites: Mapping[str, int] | None = None,
        heartbeat: float = 1.0,
        replicas: int = 1,
        least: float = FLOOR_SECONDS,
    ) -> None:
        self.workers, self.heartbeat = workers, heartbeat
        self._least = least
        self.replicas = replicas
        self.pairs = {index: Pair() for index in range(shards)} if replicas > 1 else {}
        self._halves: dict[int, _Member] = {}  # of all pairs, by incarnation
        self.sites = dict(sites or {})
        self._site_shards: dict[str, _Member] = {}
        self._ended_sites: set[str] = set()
        self.patience = patience
        self._workers: dict[int, _Member] = {}
        self._shards: dict[int, _Member] = {}
        self.shards = shards
        self._open = False
        self.vacancies = 0  # grows whenever a rank becomes free, or a ring opens for late workers
        self._incarnations = 0
        self._known: dict[int, _Member] = {}  # everyone who is there, by incarnation
        self._ranks: dict[int, int] = {}  # of workers, by incarnation
        self._tokens: dict[str, _Member] = {}  # workers, by theirs
        self._freed: list[int] = []  # a heap of ranks that were given back; some may be taken again
        self._fresh = 0  # all ranks below are taken, or among the freed
        self._due: list[tuple[float, int]] = []  # a heap: when to look at whose silence; some are outdated
        self.grouped = False  # workers may say at which site they are, though no site has a shard
        self.not_ranks: Collection[int] = ()  # numbers of groups: no worker may have one as its rank

    @property
    def open(self) -> bool:
        """Whether a ring is under way, which late workers may enter: any rank is good then."""
        return self._open

    @open.setter
    def open(self, is_open: bool) -> None:
        self.vacancies += is_open and not self._open
        self._open = is_open

    def handle_hello(
        self,
        now: float,
        role: str,
        wish: int = -1,
        shard: int = -1,
        address: str = "",
        site: str = "",
        token: str = "",
        incarnation: int = 0,
        launcher: str = "",
    ) -> Admission:
        """A worker wishes for a rank (-1: any), or a shard, or a site's shard, says where it is; a shard
        that was started again says which `incarnation` its forerunner was, and has its `token`. A worker
        whose `token` is known is there already: its answer was lost. `launcher` is who may pass its
        heartbeats on."""
        if role == "worker":
            refused = self._wrong_site(site)
            return Admission(refused=refused) if refused else self._admit_worker(now, wish, token, launcher)
        if role == "shard":
            return self._admit_shard(now, shard, address, incarnation, token)
        if role == "site":
            return self._admit_site(now, site, address, token)
        return Admission(refused=f"the hub knows no role {role!r}: worker, shard, site")

    def _wrong_site(self, site: str) -> str:
        """Why a worker of this site may not come in; empty where it may."""
        if not self.sites:
            if self.grouped:
                return ""
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

    def _admit_site(self, now: float, site: str, address: str, token: str) -> Admission:
        """It keeps its incarnation when it comes back, here or elsewhere: to the logs it is the same one."""
        if not self.sites:
            return Admission(refused="the run has no sites; start the hub with --site NAME=WORKERS for each")
        if site not in self.sites:
            return Admission(refused=f"there is no site {site!r}: the run has {', '.join(self.sites)}")
        if site in self._ended_sites:
            return Admission(refused=f"site {site!r} has ended, and cannot come back")
        if not address:
            return Admission(refused=f"the shard of site {site!r} does not say where it is")
        there = self._site_shards.get(site)
        moved = there is not None and there.address != address
        if there is not None and moved and not (token and there.token == token):
            return Admission(refused=f"site {site!r} has a shard already, at {there.address}")
        index = list(self.sites).index(site)
        if there is None:
            there = self._site_shards[site] = self._new(now, "site", index, address=address, token=token)
            there.patience = self._patience_for_site(token)
        there.address = address
        there.hear(now)
        how = "was started again, and " if moved else ""
        return Admission(index, there.incarnation, reason=f"its shard {how}is at {address}")

    def _patience_for_site(self, token: str) -> Patience:
        """A site's shard that keeps a journal is waited for while it is started again."""
        seconds = RETURN_PATIENCES * self.patience
        return Patience(seconds, seconds) if token else self._fresh_patience()

    def has_ended(self, site: str) -> bool:
        """Whether a site is no more: its shard does not come back."""
        return site in self._ended_sites

    @property
    def newest(self) -> int:
        """The highest incarnation that anybody was ever given; 0: nobody was."""
        return self._incarnations

    def new_incarnation(self) -> int:
        """One that nobody has: of a group of workers, that is to be told apart from others as workers are."""
        self._incarnations += 1
        return self._incarnations

    def _new(self, now: float, kind: _Kind, place: int, address: str = "", token: str = "") -> _Member:
        """With the next incarnation."""
        incarnation, patience = self.new_incarnation(), self._fresh_patience()
        return self._enter(_Member(kind, place, incarnation, now, patience, address=address, token=token))

    def _enter(self, member: _Member) -> _Member:
        """It is there from now on."""
        self._known[member.incarnation] = member
        if member.kind == "worker":
            self._ranks[member.incarnation] = member.place
            if member.token:
                self._tokens[member.token] = member
        self._look_at(member, member.heard + member.patience.floor)
        return member

    def _remove(self, member: _Member) -> None:
        """It is there no longer."""
        self._known.pop(member.incarnation, None)
        self._ranks.pop(member.incarnation, None)
        if self._tokens.get(member.token) is member:
            del self._tokens[member.token]

    def _look_at(self, member: _Member, when: float) -> None:
        """Look at its silence then, and not at the time that was meant before."""
        member.due = when
        heapq.heappush(self._due, (when, member.incarnation))

    def _fresh_patience(self) -> Patience:
        return Patience(max(self._least, 3 * self.heartbeat), self.patience)

    def worker_of(self, token: str) -> Admission | None:
        """The place of the worker that calls itself so, where it is there."""
        member = self._tokens.get(token)
        if member is None:
            return None
        return Admission(member.place, member.incarnation, reason="it is there already")

    def _admit_worker(self, now: float, wish: int, token: str, launcher: str) -> Admission:
        there = self.worker_of(token)
        if there is not None:
            return there
        if wish in self._workers:
            return Admission(refused=f"rank {wish} is taken: its worker lives")
        if wish in self.not_ranks:
            return Admission(refused=f"{wish} is the number of a group, and so no rank; wish for another one")
        rank = wish if wish >= 0 else self._lowest_free()
        if not self.shards and rank >= self.workers and not self.open:
            return Admission(refused=self._beyond(wish))
        if rank >= RANKS:
            return Admission(refused=f"rank {rank} is beyond {RANKS - 1}, the highest")
        self._workers[rank] = self._new(now, "worker", rank, token=token)
        self._workers[rank].launcher = launcher
        reason = "the rank it wished for" if wish >= 0 else "the lowest free rank"
        return Admission(rank, self._incarnations, reason=reason)

    def _lowest_free(self) -> int:
        """The lowest rank that is nobody's."""
        while self._freed and self._freed[0] in self._workers:
            heapq.heappop(self._freed)
        while self._fresh in self._workers:
            self._fresh += 1
        lowest = min([*self._freed[:1], self._fresh])
        while lowest in self._workers or lowest in self.not_ranks:
            lowest += 1
        return lowest

    def _beyond(self, wish: int) -> str:
        """Why a worker cannot be in the run's ring."""
        what = f"there is no rank {wish}" if wish >= 0 else "all of them are there"
        return f"the run is a ring of {self.workers} workers, and {what}; `atoll hub --workers` sets how many"

    def must_wait(self, wish: int) -> bool:
        """Whether a worker with this wish (-1: any rank) has to wait until another one leaves or is dead."""
        if wish >= 0 or self.shards or self.open:
            return wish in self._workers
        return len(self._workers) >= self.workers

    def _admit_shard(self, now: float, shard: int, address: str, before: int, token: str) -> Admission:
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
        # Its forerunner is to go; it may have been killed before it noted which incarnation it was given.
        again = (
            there is not None and elsewhere and (before == there.incarnation or there.token == token != "")
        )
        if there is not None and elsewhere and not again:
            return Admission(refused=f"shard {shard} is there already, at {there.address}")
        if there is None or again:
            if there is not None:
                self._remove(there)
            there = self._shards[shard] = self._new(now, "shard", shard, address=address, token=token)
        there.hear(now)
        how = "was started again, and " if before or again else ""
        return Admission(incarnation=there.incarnation, reason=f"shard {shard} {how}is at {address}")

    # -- shards that are held twice -----------------------------------------------------------------------

    def handle_half(
        self,
        now: float,
        shard: int,
        address: str,
        token: str = "",
        life: str = "",
        since: int = 0,
        before: int = 0,
    ) -> Admission:
        """One of a shard's two processes says Hello; `since` and `before` are what it was given in this life,
        and before its directory was left."""
        if not 0 <= shard < self.shards:
            return Admission(refused=f"there is no shard {shard}: the run has {self.shards}, from 0")
        if not address or not life:
            return Admission(refused=f"shard {shard} does not say where it is, or who")
        if max(before, since) > self._incarnations:
            return Admission(
                refused=f"shard {shard} goes on from a run that this hub knows nothing of, though it has its "
                "name: remove what is in its --directory, or give it another one"
            )
        pair = self.pairs[shard]
        known = pair.known(life)
        if known is not None:
            self._halves[known.incarnation].hear(now)
            return Admission(incarnation=known.incarnation, reason="it is there already")
        refused = pair.refusal(since)
        if refused:
            return Admission(
                refused=f"shard {shard}, incarnation {since}: {refused}, so it cannot go on; start it again, "
                "and it is the standby"
            )
        if pair.role_for(token, since, before > 0) == "third":
            return Admission(refused=f"shard {shard} has two processes already", waits=True)
        member = self._new(now, "half", shard, address=address, token=token)
        role = pair.come(Half(member.incarnation, life, token), since, before > 0)
        self._halves[member.incarnation] = member
        return Admission(incarnation=member.incarnation, reason=f"shard {shard}'s {role} is at {address}")

    def half_at(self, incarnation: int) -> str:
        """The address of a process of a shard that is held twice; empty where it is not there."""
        there = self._halves.get(incarnation)
        return there.address if there is not None else ""

    def pair_of(self, incarnation: int) -> int | None:
        """The shard that this is a process of, where shards are held twice."""
        there = self._halves.get(incarnation)
        return there.place if there is not None else None

    def elsewhere(self, shard: int, address: str) -> int | None:
        """The incarnation of a shard that is there, at another address than this one."""
        there = self._shards.get(shard)
        return there.incarnation if there is not None and there.address != address else None

    def handle_heartbeat(self, now: float, incarnation: int, iteration: int = 0, age: float = 0.0) -> bool:
        """A sign of life, given `age` seconds ago; False from one who is not there (any more)."""
        member = self._known.get(incarnation)
        if member is None:
            return False
        member.hear(now - age)
        member.iteration = max(iteration, member.iteration)
        return True

    def handle_suspect(self, now: float, incarnation: int) -> bool:
        """Another member has lost touch with this one: if it is silent for `suspect_seconds` too, it counts
        as dead, without more patience. A sign of life clears it. Gives whether it counts as dead by now."""
        member = self._known.get(incarnation)
        if member is None:
            return False
        if not member.suspected:
            member.suspected = True
            self._hasten(member)
        return now - member.heard >= self._borne(member)

    def handle_broken(self, incarnation: int, broken: bool) -> None:
        """Whether all of a member's connections have broken, as far as is known: then it counts as dead after
        `broken_seconds` of silence, without more patience. A sign of life says that they have not."""
        member = self._known.get(incarnation)
        if member is not None and member.broken != broken:
            member.broken = broken
            self._hasten(member)

    def _hasten(self, member: _Member) -> None:
        """Its silence is borne for less from now on, perhaps."""
        end = member.heard + self._borne(member)
        if end < member.due:
            self._look_at(member, end)

    def silence_of(self, now: float, incarnation: int) -> float | None:
        """For how many seconds a member was not heard; None where it is not there."""
        member = self._known.get(incarnation)
        return now - member.heard if member is not None else None

    def launcher_of(self, incarnation: int) -> str:
        """Return the name of the launcher that may pass a member's heartbeats on; empty where there is
        none, or no such member."""
        member = self._known.get(incarnation)
        return member.launcher if member is not None else ""

    def token_of(self, incarnation: int) -> str:
        """The token that a member came with; empty where it had none, or is not there."""
        member = self._known.get(incarnation)
        return member.token if member is not None else ""

    def handle_return(self, now: float) -> None:
        """The caller was gone, and heard nobody: silence is counted from now on."""
        for member in self._everyone():
            member.heard, member.suspected, member.broken = now, False, False

    def _everyone(self) -> Collection[_Member]:
        return self._known.values()

    def handle_site_goodbye(self, incarnation: int) -> str:
        """All workers of a site have left; gives its name, or nothing where this is no site's shard."""
        member = self._known.get(incarnation)
        if member is None or member.kind != "site":
            return ""
        site = list(self.sites)[member.place]
        del self._site_shards[site]
        self._remove(member)
        self._ended_sites.add(site)
        return site

    def handle_goodbye(self, incarnation: int) -> int | None:
        """A worker leaves; gives its rank, which is free then, or None where it is not there."""
        member = self._known.get(incarnation)
        if member is None or member.kind != "worker":
            return None
        del self._workers[member.place]
        self._remove(member)
        heapq.heappush(self._freed, member.place)
        self.vacancies += 1
        return member.place

    def handle_shard_goodbye(self, incarnation: int) -> int | None:
        """A shard ends, or one of its two processes; gives its index, or None where it is not there."""
        member = self._known.get(incarnation)
        if member is None or member.kind not in ("shard", "half"):
            return None
        if member.kind == "half":
            self.pairs[member.place].die(incarnation)
            del self._halves[incarnation]
        else:
            del self._shards[member.place]
        self._remove(member)
        return member.place

    def poll_deaths(self, now: float) -> list[tuple[int, str]]:
        """(incarnation, reason) of those who were silent for too long; again until their goodbye is said.
        `now` may be earlier than it was in a call before: whoever was dead then and not by `now` is left out.

        A member that is heard now is alive for its patience's floor at least, so it is looked at again no
        earlier, and no later: its patience may become less with what is heard.
        """
        dead = []
        while self._due and self._due[0][0] <= now:
            due, incarnation = heapq.heappop(self._due)
            member = self._known.get(incarnation)
            if member is None or member.due != due:
                continue  # gone, or to be looked at at another time
            floor = member.heard + member.patience.floor
            if (
                now < floor and not member.suspected and not member.broken
            ):  # as most are: patience is not asked
                self._look_at(member, floor)
            elif silence := self._fatal_silence(now, member):
                dead.append((member, silence))
            else:
                self._look_at(member, min(member.heard + self._borne(member), now + member.patience.floor))
        dead.sort(key=lambda each: (_IN_ORDER[each[0].kind], each[0].place))
        for member, _ in dead:
            self._look_at(member, member.heard + self._borne(member))
        return [(member.incarnation, self._word_on(member, silence)) for member, silence in dead]

    def _word_on(self, member: _Member, silence: str) -> str:
        """Return a line that says who is dead, and why."""
        if member.kind == "worker":
            return f"worker {member.place} {silence}; it had committed {member.iteration} iterations"
        which = "its shard" if member.kind == "site" else f"shard {member.place}"
        return f"{which} at {member.address} {silence}"

    def _fatal_silence(self, now: float, member: _Member) -> str:
        """In words, a silence for which the member counts as dead; empty where it is shorter."""
        silence, most = now - member.heard, self._borne(member)
        if now < member.heard + most:  # not by `silence`, whose rounding could make a look that never ends
            return ""
        if member.suspected and most < member.patience.seconds:
            return f"was silent for {silence:.1f} s, and another member has lost touch with it"
        if member.broken and most < member.patience.seconds:
            return f"was silent for {silence:.1f} s, and its connections are broken"
        return f"was silent for {silence:.1f} s, and {most:.3g} s are borne"

    def _borne(self, member: _Member) -> float:
        """For how many seconds this member's silence is borne."""
        if member.suspected:
            return min(suspect_seconds(self.heartbeat), member.patience.seconds)
        if member.broken:
            return min(broken_seconds(self.heartbeat), member.patience.seconds)
        return member.patience.seconds

    def next_deadline(self) -> float | None:
        """When `poll_deaths` may next find someone, if nobody is heard until then."""
        return min((member.heard + self._borne(member) for member in self._everyone()), default=None)

    def live(self) -> dict[int, int]:
        """The workers that are there: rank -> incarnation."""
        return {rank: member.incarnation for rank, member in sorted(self._workers.items())}

    def live_shards(self) -> list[int]:
        """The shards that are there, by index; one that is held twice while either process is."""
        return sorted([*self._shards, *(index for index, pair in self.pairs.items() if pair.halves())])

    def shard_incarnations(self) -> list[int]:
        """Those of the shards that are there, of both processes where they are held twice."""
        return [member.incarnation for member in (*self._shards.values(), *self._halves.values())]

    def live_sites(self) -> list[str]:
        """The sites whose shards are there."""
        return list(self._site_shards)

    def incarnations(self) -> set[int]:
        """Those of everyone who is there, shards too."""
        return set(self._known)

    def is_there(self, incarnation: int) -> bool:
        """Whether somebody of this incarnation is there: a worker, a shard or a site's shard."""
        return incarnation in self._known

    @property
    def live_count(self) -> int:
        """How many workers are there."""
        return len(self._workers)

    def iterations(self) -> dict[int, int]:
        """How many iterations each has committed, by its last heartbeat."""
        return {rank: member.iteration for rank, member in sorted(self._workers.items())}

    def silence(self, now: float, incarnation: int) -> float:
        """For how many seconds a worker that is there was not heard."""
        return now - self._known[incarnation].heard

    def rank_of(self, incarnation: int) -> int | None:
        """The rank of a worker that is there."""
        return self._ranks.get(incarnation)

    @property
    def ranks(self) -> Mapping[int, int]:
        """The ranks of the workers that are there, by incarnation; a view of what changes."""
        return MappingProxyType(self._ranks)

    def incarnation_of(self, rank: int) -> int | None:
        """Whose rank this is; None where it is nobody's."""
        member = self._workers.get(rank)
        return member.incarnation if member is not None else None

    def shard_addresses(self) -> list[str] | None:
        """All shards' addresses, by index, once all are there; where they are held twice, once each has had a
        standby in sync, and while each has a primary that knows it."""
        if self.pairs:
            primaries = [pair.primary for pair in self.pairs.values() if pair.whole and pair.serves]
            there = [self._halves[each.incarnation].address for each in primaries if each is not None]
            return there if len(there) == self.shards else None
        if len(self._shards) < self.shards:
            return None
        return [self._shards[index].address for index in range(self.shards)]

    def missing_shards(self) -> list[str]:
        """Why `shard_addresses` gives none: for each shard that is not there what is to be done, in words."""
        if not self.pairs:
            absent = [index for index in range(self.shards) if index not in self._shards]
            return [f"shard {index} is not there: start `atoll server --shard {index}`" for index in absent]
        words = []
        for index in range(self.shards):
            pair = self.pairs.get(index)
            there = len(pair.halves()) if pair is not None else 0
            again = f"`atoll server --shard {index}`"
            if pair is not None and pair.begun and pair.primary is None:
                words.append(
                    f"shard {index} has no primary, and nobody else holds all that was acknowledged: start "
                    "the one that served last again, in its --directory"
                )
            elif pair is None or not pair.whole:
                missing = {
                    0: f"is not there: start {again} twice",
                    1: f"has one of its two processes: start {again} once more",
                }
                words.append(f"shard {index} {missing.get(there, 'has a standby that is not in sync yet')}")
        return words

    def site_address(self, site: str) -> str:
        """Where a site's shard is; empty while it is not there."""
        there = self._site_shards.get(site)
        return there.address if there is not None else ""

    # -- as plain data ------------------------------------------------------------------------------------

    def state(self) -> MembershipState:
        """All that a restart must not lose, for `restore`."""
        return MembershipState(
            self._incarnations,
            {rank: member.state() for rank, member in sorted(self._workers.items())},
            {index: member.state() for index, member in sorted(self._shards.items())},
            {site: member.state() for site, member in self._site_shards.items()},
            sorted(self._ended_sites),
            {incarnation: member.state() for incarnation, member in sorted(self._halves.items())},
            {index: pair.state() for index, pair in self.pairs.items()},
        )

    def restore(self, now: float, state: MembershipState) -> None:
        """Be as `state` says; everyone in it counts as heard now."""

        self._known, self._ranks, self._tokens, self._due = {}, {}, {}, []
        self._freed, self._fresh = [], 0

        def alive(kind: _Kind, place: int, each: MemberState) -> _Member:
            patience = self._patience_for_site(each.token) if kind == "site" else self._fresh_patience()
            here = (each.incarnation, now, patience, each.iteration, each.address, each.token, each.launcher)
            return self._enter(_Member(kind, place, *here))

        self._incarnations = state.incarnations
        self._workers = {rank: alive("worker", rank, each) for rank, each in state.workers.items()}
        self._shards = {index: alive("shard", index, each) for index, each in state.shards.items()}
        places = {site: index for index, site in enumerate(self.sites)}
        self._site_shards = {site: alive("site", places[site], each) for site, each in state.sites.items()}
        self._ended_sites = set(state.ended)
        if state.pairs:
            self.pairs = {index: Pair(pair) for index, pair in state.pairs.items()}
        index_of = {half.incarnation: index for index, pair in self.pairs.items() for half in pair.halves()}
        self._halves = {
            incarnation: alive("half", index_of[incarnation], each)
            for incarnation, each in state.halves.items()
        }
