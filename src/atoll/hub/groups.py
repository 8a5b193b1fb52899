"""The hub's part in groups: what workers compute, who is to share a ring, and how they move there.

Source: docs/grouping.md; docs/notes/ps-hra.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from atoll.core.errors import DeadlineError, UserError
from atoll.core.units import format_seconds
from atoll.groups import formation
from atoll.groups.formation import Formation, FormationState
from atoll.groups.grouping import Grouping, show
from atoll.groups.probe import Formed, Late, ProbeQueue
from atoll.groups.probing import Measured
from atoll.hub.book import GLOBAL, Book
from atoll.hub.decisions import Decisions
from atoll.hub.links import LinkDesk
from atoll.hub.planner import GroupingSettings, Planner
from atoll.hub.records import Decided, InGroups, Linked, Paced, TimePassed
from atoll.hub.rings import Rings
from atoll.net.endpoint import host_and_port, is_path
from atoll.store.blocks import Blocks, EpochBlocks
from atoll.store.leases import Key
from atoll.wire.messages import (
    AnyMessage,
    Beat,
    Grouped,
    Heartbeat,
    InGroup,
    JoinGroup,
    Lease,
    Leased,
    LinkMeasured,
    LinkPlace,
)

_LEAST_PATIENCE = 2.0  # seconds that a group may take to come together, however fast its members are
_ITERATIONS = 4.0  # of its slowest member, for which the others wait
_CHOOSE_AGAIN = 10.0  # seconds after a choice that could not be made
_REASONS = 256  # of so many groupings, which may still be on their way
_PACE_MOVED = 0.05  # by what share a pace has changed that is worth writing down


class _Asker(NamedTuple):
    peer: bytes
    number: int


@dataclass
class _State:
    """What a restart must not lose, beside what the book knows."""

    formation: FormationState
    blocks: dict[Key, dict[tuple[int, int], EpochBlocks]]
    asked: dict[int, JoinGroup]
    groups: dict[int, Grouped]
    paces: dict[int, float]
    wanted: list[list[int]]
    placed: bool
    sites: dict[int, str]
    links: dict[tuple[str, str], Measured] = field(default_factory=dict)
    hosts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)


@dataclass
class _Progress:
    """How long a worker's iterations take, as its heartbeats tell."""

    iteration: int
    since: float
    seconds: float = 0.0


class Groups:
    """Takes what workers say about groups, and puts them into some as `settings` say; `now` gives the hub's
    seconds, `send` and `refuse` its answers. `keep` is told of what a restarted hub has to know."""

    def __init__(
        self,
        settings: GroupingSettings,
        book: Book,
        rings: Rings,
        decisions: Decisions,
        now: Callable[[], float],
        send: Callable[[bytes, AnyMessage], None],
        refuse: Callable[[bytes, str, str, int], None],
        keep: Callable[[Paced | Linked | Decided | InGroups | TimePassed], None],
    ) -> None:
        self._settings, self._book, self._rings, self._decisions = settings, book, rings, decisions
        self._members, self._leases = book.members, book.leases
        self._now, self._send, self._refuse, self._keep = now, send, refuse, keep
        self._lockstep = settings.consistency == "bsp"
        self._formation = Formation(
            self._members.workers.count, self._members.roll.new_incarnation, lockstep=self._lockstep
        )
        self._blocks = Blocks(self._leases)
        self._planner = Planner(settings)
        self._desk = LinkDesk(settings.links, keep) if settings.by_links else None
        self._asked: dict[int, JoinGroup] = {}  # by rank: who waits for its group
        self._askers: dict[int, _Asker] = {}
        self._groups: dict[int, Grouped] = {}  # by contributor: what its members are told
        self._paces: dict[int, float] = {}  # by rank: seconds for a sample
        self._reasons: dict[int, str] = {}  # of the latest groupings, for those who move by them
        self._wanted: list[list[int]] = []  # all who were ever to be in a group
        self._placed = False  # the start is over
        self._progress: dict[int, _Progress] = {}  # by rank
        self._queue: ProbeQueue | None = None
        self._began: float | None = None  # when the probe did
        self._not_before = -math.inf  # the next choice
        self._follows = False  # the planner knows how workers are grouped
        self._told: set[int] = set()  # newcomers that the planner was told of
        self._failed = ""  # why no groups were chosen, as it was said last
        self._use(self._formation)
        self._members.grouped = True
        book.groups = self
        rings.grouping_of = self._grouping_of
        rings.wants_links = self._wants_links

    def _use(self, known: Formation) -> None:
        self._members.workers.not_ranks = known.numbers

    def _grouping_of(self, incarnation: int) -> int:
        rank = self._members.workers.rank_of(incarnation)
        return self._formation.grouping_of(rank) if rank is not None else 0

    @property
    def measures_links(self) -> bool:
        """Whether a worker that comes is to wait for its links to be measured."""
        return self._desk is not None

    def _wants_links(self, incarnation: int) -> bool:
        """Whether a worker's links are to be measured: at first, once all are there."""
        rank = self._members.workers.rank_of(incarnation)
        if self._desk is None or rank is None:
            return False
        return not self._book.begun or self._desk.wants(rank)

    # -- who is there -------------------------------------------------------------------------------------

    def joined(self, rank: int, incarnation: int, site: str = "") -> None:
        """A worker has come, which is at `site`, if it says so."""
        self._planner.sites[rank] = site
        if self._desk is not None:
            self._desk.handle_live(self._members.workers.live())
        if (rank, incarnation) not in self._formation.contributors_of(rank):
            self._apply(self._formation.handle_joined(rank, incarnation))

    def left(self, now: float, rank: int, *, finished: bool = False) -> None:
        """A worker is no more."""
        planner = self._planner
        of_ranks = (self._asked, self._askers, self._paces, self._progress, planner.sites)
        for known in (*of_ranks, planner.sizes, planner.batches):
            known.pop(rank, None)
        if self._desk is not None:
            self._desk.handle_left(now, rank)
        self._wanted = [rest for group in self._wanted if (rest := [w for w in group if w != rank])]
        self._told.discard(rank)
        if self._queue is not None:
            self._queue.handle_left(now, rank)
        self._planner.handle_left(now, rank)
        self._apply(self._formation.handle_left(now, rank, finished=finished))

    def name(self, contributor: int, life: int) -> str:
        """A contributor, as a person reads it."""
        if contributor in self._formation.numbers:
            return f"group {contributor}"
        return f"worker {contributor}, incarnation {life}"

    def contributors(self, rank: int) -> list[Key]:
        """Whom a worker speaks for, and whom it is about to."""
        return self._formation.contributors_of(rank)

    def looked_for(self, rank: int) -> Key | None:
        """As whom the log knows a worker's connection, where that is nobody else's too."""
        keys = self._formation.contributors_of(rank)
        alone = len(keys) == 1 and self._formation.members(keys[0][0]) == (rank,)
        return keys[0] if alone else None

    def worker_of(self, contributor: int) -> int | None:
        """The incarnation of the only member of a contributor."""
        members = self._formation.members(contributor)
        return self._members.workers.live().get(members[0]) if len(members) == 1 else None

    # -- what workers say ---------------------------------------------------------------------------------

    def handle(self, peer: bytes, message: JoinGroup | InGroup) -> None:
        """A worker asks for its group, or has moved to it."""
        rank = self._members.workers.rank_of(message.incarnation)
        if rank is None:
            number = message.number if isinstance(message, JoinGroup) else 0
            reason = f"the hub knows no incarnation {message.incarnation}, or has given it up"
            self._refuse(peer, reason, type(message).__name__, number)
            return
        now = self._now()
        if isinstance(message, JoinGroup):
            if rank in self._asked and message.number < self._asked[rank].number:
                return  # it went out late, over another connection than what was asked after it
            self._askers[rank] = _Asker(peer, message.number)
            word = InGroups(at=now, message=message, patience=self._patience(rank))
        elif any(number == message.contributor for number, _ in self._formation.contributors_of(rank)[1:]):
            word = InGroups(at=now, message=message)
        else:
            return  # it is known by now
        self._keep(word)
        self._take(word)

    def _take(self, word: InGroups) -> None:
        message = word.message
        rank = self._members.workers.rank_of(message.incarnation)
        if rank is None:
            return
        if isinstance(message, InGroup):
            self._apply(self._formation.handle_arrived(word.at, rank, message.contributor))
            return
        self._asked[rank] = message
        self._apply(
            self._formation.handle_asked(word.at, rank, message.grouping, message.iteration, word.patience)
        )

    def _patience(self, rank: int) -> float:
        """For how long a worker that asks may be let wait: in lock step all come at once, or are dead."""
        if self._lockstep:
            return self._members.roll.patience
        now = self._now()
        mates = next((group for group in self._wanted if rank in group), [rank])
        slowest = max(
            (max(each.seconds, now - each.since) for mate in mates if (each := self._progress.get(mate))),
            default=0.0,
        )
        return min(max(_LEAST_PATIENCE, _ITERATIONS * slowest), self._settings.patience)

    def handle_links(self, word: LinkPlace | LinkMeasured) -> None:
        """A worker says where its links are measured, or what it has measured."""
        rank = self._members.workers.rank_of(word.incarnation)
        if self._desk is None or rank is None:
            return
        if isinstance(word, LinkPlace):
            self._desk.handle_place(self._now(), rank, word)
        else:
            self._desk.handle_measured(self._now(), rank, word)

    def beat(self, rank: int, beat: Heartbeat | Beat) -> None:
        """A worker's heartbeat says how many iterations it has made, and how long it computes a sample."""
        incarnation, iteration, pace = beat.incarnation, beat.iteration, beat.pace
        now, known = self._now(), self._progress.get(rank)
        self._planner.sizes[rank], self._planner.batches[rank] = beat.size, beat.batch
        if known is None:
            known = self._progress[rank] = _Progress(iteration, now)
        moved = iteration > known.iteration
        if moved:
            seconds = (now - known.since) / (iteration - known.iteration)
            self._progress[rank] = _Progress(iteration, now, seconds)
        if not 0 < pace < math.inf:
            return
        before = self._paces.get(rank)
        if before is None or abs(pace / before - 1) > _PACE_MOVED:
            paced = Paced(at=now, incarnation=incarnation, pace=pace)
            self._keep(paced)
            self._take_pace(paced)
        if moved and self._follows:
            self._planner.handle_measured(now, rank, pace)

    def _take_pace(self, paced: Paced) -> None:
        rank = self._members.workers.rank_of(paced.incarnation)
        if rank is not None:
            self._paces[rank] = paced.pace
            self._formation.handle_trains(rank)

    def lease(self, rank: int, lease: Lease) -> Leased:
        """A worker asks for samples: for itself, or its part of its group's. Raises UserError for a group
        that is not the worker's."""
        keys = self._formation.contributors_of(rank)
        if not lease.block and not lease.contributor:
            keys = keys[:1]
        else:
            keys = [key for key in keys if key[0] == lease.contributor]
        if not keys:
            raise UserError(f"worker {rank} asks for samples of group {lease.contributor}, and is not in it")
        members = self._formation.members(keys[0][0])
        if lease.block:
            return self._blocks.handle_lease(keys[0], rank, members, lease)
        if len(members) > 1:
            raise UserError(
                f"worker {rank} asks for samples by itself, and is one of {len(members)} in group "
                f"{keys[0][0]}"
            )
        return self._leases.handle_lease(*keys[0], lease)

    def fenced(self, key: Key) -> None:
        """A log has answered to a fence."""
        self._blocks.handle_fenced(key)

    @property
    def changes(self) -> int:
        """Grows with each part of a block of samples that is given for the first time."""
        return self._blocks.changes

    # -- what follows -------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Decide who is to be in which group, when it is time to, and give up those that take too long."""
        now = self._now()
        self.pass_time(now)
        if not self._book.begun:
            return
        self._poll_links(now)
        if not self._placed:
            self._poll_start(now)
        elif not self._follows:
            self._follow(now)
        else:
            self._place_newcomers(now)
        for plan in self._planner.poll(now):
            if plan.grouping is not None:
                self._follows = True
                self.decide(plan.grouping, plan.reason, placed=True)
            elif plan.reason != self._failed:
                self._failed = plan.reason
                self._decisions.add("groups", "none chosen", plan.reason)

    def pass_time(self, now: float) -> None:
        """Give up groups that have not come together by now, and open those that are due."""
        deadline = self._formation.next_deadline()
        if deadline is not None and deadline <= now:
            self._keep(TimePassed(at=now))
            self._apply(self._formation.poll(now))

    def soon(self, seconds: float) -> float:
        """How long the hub may wait for messages, of up to `seconds`, before `poll` has something to do."""
        deadlines = [self._formation.next_deadline(), self._desk.next_deadline() if self._desk else None]
        now = self._now()
        return max(0.0, min([seconds, *(each - now for each in deadlines if each is not None)]))

    def _poll_links(self, now: float) -> None:
        """Have links measured, and tell what was found."""
        if self._desk is None:
            return
        live = self._members.workers.live()
        asks, found = self._desk.poll(now, live)
        for ask in asks:
            self._rings.say(live[ask.worker], ask.message)
        if found is None:
            return
        self._decisions.add("links", found.summary, found.reason)
        shards = self._members.shards.addresses() or [""]
        here = "127.0.0.1" if is_path(shards[0]) else ""
        self._planner.server = (host_and_port(shards[0]) or (here,))[0]
        self._planner.links, self._planner.hosts = found.links, dict(self._desk.hosts)
        self._planner.measured = found.summary
        for incarnation in live.values():
            self._rings.tell(incarnation)

    def _poll_start(self, now: float) -> None:
        if self._began is None:
            self._began = now
        if self._settings.queued:
            self._poll_queue(now)
        elif not self._planner.busy and now >= self._not_before and (self._desk is None or self._desk.over):
            live = self._members.workers.live()
            over = now >= self._began + self._settings.patience
            reported = {rank: 1 / pace for rank, pace in self._paces.items() if rank in live}
            if reported and (over or len(reported) == len(live)):
                for rank in live.keys() - reported.keys():
                    span = format_seconds(self._settings.patience)
                    reason = f"its probe did not end within {span}; it is placed when it reports"
                    self._decisions.add("groups", f"without worker {rank}", reason)
                self._not_before = now + _CHOOSE_AGAIN
                self._planner.choose(now, reported)

    def _poll_queue(self, now: float) -> None:
        """The probe's queue; after a restart it goes on with those who are in no group."""
        placed = {rank for group in self._wanted for rank in group}
        waiting = [rank for rank in self._members.workers.live() if rank not in placed]
        if self._queue is None:
            if not waiting:
                self.decide(Grouping([]), "each worker is in a group", placed=True)
                return
            groups = max(1, min(self._settings.count - len(self._wanted), len(waiting)))
            self._queue = ProbeQueue(now, waiting, groups, patience=self._settings.patience)
        for rank in waiting:
            self._queue.handle_begun(now, rank)
            if rank in self._paces:
                self._queue.handle_probed(now, rank, self._paces[rank])
        try:
            outcomes = self._queue.poll(now)
        except DeadlineError as error:
            self._decisions.add("groups", "none yet", str(error))
            self._queue = None  # and once more
            return
        for outcome in outcomes:
            if isinstance(outcome, Formed):
                self.decide(Grouping([outcome.group]), outcome.reason)
            elif not isinstance(outcome, Late):  # who is late is placed as a newcomer is
                self._decisions.add("groups", f"without worker {outcome.worker}", outcome.reason)
        if self._queue.over and self._wanted:
            self.decide(Grouping([]), "the probe is over", placed=True)

    def _follow(self, now: float) -> None:
        """Tell the planner how workers are grouped: after the queue, and after a restart."""
        groups = [[rank for rank in group if rank in self._paces] for group in self._wanted]
        grouping = Grouping(group for group in groups if group)
        speeds = {rank: 1 / self._paces[rank] for rank in grouping.workers}
        if speeds:
            self._planner.follow(now, grouping, speeds)
            self._follows = True

    def _place_newcomers(self, now: float) -> None:
        placed = {rank for group in self._wanted for rank in group} | self._told
        for rank in self._members.workers.live():
            measured = self._desk is None or not self._desk.wants(rank)
            if rank not in placed and rank in self._paces and measured:
                self._told.add(rank)
                self._planner.handle_joined(now, rank, self._paces[rank])

    def decide(self, grouping: Grouping, reason: str, *, placed: bool = False) -> None:
        """These are to be groups; with `placed` the start is over."""
        now = self._now()
        groups = [list(group) for group in grouping]
        decided = Decided(at=now, groups=groups, reason=reason, placed=placed)
        self._keep(decided)
        self._take_decision(decided)

    def _take_decision(self, decided: Decided) -> None:
        live = self._members.workers.live()
        groups = [rest for group in decided.groups if (rest := [rank for rank in group if rank in live])]
        moved = {rank for group in groups for rank in group}
        rests = ([rank for rank in group if rank not in moved] for group in self._wanted)
        self._wanted = [rest for rest in rests if rest] + groups
        self._told -= moved
        self._placed = self._placed or decided.placed
        if not groups:
            return
        outcomes = self._formation.handle_decided(decided.at, groups, decided.reason)
        if decided.placed and not outcomes:
            self._decisions.add("groups", f"workers {show(Grouping(groups))}", decided.reason)
        self._apply(outcomes)

    def _apply(self, outcomes: Iterable[formation.Outcome]) -> None:
        """Do what follows from the contributors' machine."""
        for outcome in outcomes:
            if isinstance(outcome, formation.Opened):
                self._decisions.add("groups", f"workers {show(Grouping(outcome.groups))}", outcome.reason)
                self._reasons[outcome.grouping] = outcome.reason
                self._reasons.pop(outcome.grouping - _REASONS, None)
                for incarnation in self._members.workers.live().values():
                    self._rings.tell(incarnation)
            elif isinstance(outcome, formation.Formed):
                self._form(outcome)
            elif isinstance(outcome, formation.Placed):
                self._answer(outcome.worker, self._groups[outcome.contributor])
            elif isinstance(outcome, formation.Stays):
                self._answer(outcome.worker, Grouped(number=0, grouping=0, group=0, reason=outcome.reason))
            elif isinstance(outcome, formation.GivenUp):
                who = f"workers {show(Grouping([outcome.group]))} stay where they are"
                again = format_seconds(outcome.again - self._now())
                self._decisions.add("groups", who, f"{outcome.reason}; once more in {again}")
            else:
                self._groups.pop(outcome.contributor, None)
                self._book.fences[GLOBAL].add((outcome.contributor, outcome.life))

    def _form(self, formed: formation.Formed) -> None:
        """A group has come together: its ring, its leases, and the answers to its members."""
        live = self._members.workers.live()
        number = self._rings.form_group({live[rank]: rank for rank in formed.workers})
        for rank in formed.workers:
            old = self._formation.contributors_of(rank)[0]
            new = (formed.contributor, formed.life)
            self._leases.handle_moved(old, new, self._asked[rank].held)
        grouped = Grouped(
            number=0,
            grouping=formed.grouping,
            group=number,
            contributor=formed.contributor,
            life=formed.life,
            workers=list(formed.workers),
            newcomers=formed.newcomers,
            reason=self._reasons.get(formed.grouping, ""),
        )
        self._groups[formed.contributor] = grouped
        for rank in formed.workers:
            self._answer(rank, grouped)
        self._tell_formed(formed, number)

    def _tell_formed(self, formed: formation.Formed, ring: int) -> None:
        who = f"worker {formed.workers[0]}" + (" alone" if len(formed.workers) == 1 else "")
        if len(formed.workers) > 1:
            who = f"workers {show(Grouping([formed.workers]))}"
        behind = formed.workers[len(formed.workers) - formed.newcomers :]
        if behind:
            names = ", ".join(f"worker {rank}" for rank in behind)
            state = f"; {names} had fewer iterations, and takes worker {formed.workers[0]}'s state"
        else:
            state = ""
        self._decisions.add("group", f"group {formed.contributor}: {who}", f"ring {ring}{state}")

    def _answer(self, rank: int, grouped: Grouped) -> None:
        asked, asker = self._asked.pop(rank, None), self._askers.pop(rank, None)
        if asked is not None and asker is not None:
            answer = msgspec.structs.replace(grouped, number=asker.number)
            if not answer.group:
                answer = msgspec.structs.replace(answer, grouping=asked.grouping)
            self._send(asker.peer, answer)

    # -- after a restart ----------------------------------------------------------------------------------

    def replay(self, record: Paced | Linked | Decided | InGroups | TimePassed) -> None:
        """Take again what was written before: nobody is there yet who could be answered."""
        if isinstance(record, Paced):
            self._take_pace(record)
        elif isinstance(record, Linked):
            if self._desk is not None:
                self._desk.take(record)
        elif isinstance(record, Decided):
            self._take_decision(record)
        elif isinstance(record, InGroups):
            self._take(record)
        else:
            self._apply(self._formation.poll(record.at))

    def state(self) -> bytes:
        """All that is known of groups, as MessagePack."""
        desk = self._desk
        return msgspec.msgpack.encode(
            _State(
                self._formation.state(),
                self._blocks.state(),
                self._asked,
                self._groups,
                self._paces,
                self._wanted,
                self._placed,
                self._planner.sites,
                desk.known if desk else {},
                desk.hosts if desk else {},
                self._reasons,
            )
        )

    def restore(self, now: float, state: bytes) -> None:
        """Know what `state` says."""
        del now  # deadlines are the clock's, which goes on
        found = msgspec.msgpack.decode(state, type=_State)
        self._formation.restore(found.formation)
        self._use(self._formation)
        self._blocks.restore(found.blocks)
        self._asked, self._groups, self._paces = found.asked, found.groups, found.paces
        self._wanted, self._placed = found.wanted, found.placed
        self._planner.sites, self._reasons = found.sites, found.reasons
        if self._desk is not None:
            self._desk.known, self._desk.hosts = found.links, found.hosts
            self._desk.handle_live(self._members.workers.live())
