"""The hub's groups: workers' moves between groups, and sample leases within a group.

Source: docs/grouping.md; docs/notes/ps-hra.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from atoll.core.decoding import from_msgpack
from atoll.core.errors import UserError
from atoll.core.units import format_seconds
from atoll.groups import formation
from atoll.groups.formation import Formation, FormationState
from atoll.groups.grouping import Grouping, show
from atoll.groups.probing import LinkMeasurement
from atoll.hub.book import GLOBAL, Fences
from atoll.hub.decisions import Decisions
from atoll.hub.links import LinkDesk
from atoll.hub.placement import Placement
from atoll.hub.planner import GroupingSettings
from atoll.hub.records import Decided, InGroups, Linked, Paced, TimePassed
from atoll.hub.rings import Rings
from atoll.hub.turn import Turn
from atoll.store.blocks import Blocks, EpochBlocks
from atoll.store.leases import Key, Leases
from atoll.store.members import Membership
from atoll.wire.messages import (
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

_REASONS = 256  # the most groupings whose reasons are retained


class _Asker(NamedTuple):
    peer: bytes
    number: int


@dataclass
class _State:
    """State that must survive a restart, apart from the book's."""

    formation: FormationState
    blocks: dict[Key, dict[tuple[int, int], EpochBlocks]]
    asked: dict[int, JoinGroup]
    groups: dict[int, Grouped]
    paces: dict[int, float]
    wanted: list[list[int]]
    placed: bool
    sites: dict[int, str]
    links: dict[tuple[str, str], LinkMeasurement] = field(default_factory=dict)
    hosts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)


class Groups:
    """Moves workers between groups as `placement` decides. Each group gets its own ring from `rings`."""

    def __init__(
        self,
        settings: GroupingSettings,
        members: Membership,
        leases: Leases,
        fences: Fences,
        formation: Formation,
        desk: LinkDesk,
        rings: Rings,
        decisions: Decisions,
        turn: Turn,
    ) -> None:
        self._members, self._leases, self._fences = members, leases, fences
        self._formation, self._desk, self._rings = formation, desk, rings
        self._decisions, self._turn = decisions, turn
        turn.handlers |= dict.fromkeys((JoinGroup, InGroup), self.handle)
        turn.handlers |= dict.fromkeys((LinkPlace, LinkMeasured), self.handle_links)
        self._lockstep = settings.consistency == "bsp"
        self._placement = Placement(settings, members, desk, decisions)
        self._blocks = Blocks(self._leases)
        self._asked: dict[int, JoinGroup] = {}  # by rank: requests of workers that wait for their group
        self._askers: dict[int, _Asker] = {}
        self._groups: dict[int, Grouped] = {}  # by contributor: the answer to its members
        self._reasons: dict[int, str] = {}  # of the latest groupings, by number, for their members
        self._members.workers.not_ranks = formation.numbers
        self._members.grouped = True

    # -- members ------------------------------------------------------------------------------------------

    def joined(self, rank: int, incarnation: int, site: str = "") -> None:
        """Handle a worker that joined, at `site` if it named one."""
        self._placement.joined(rank, site)
        self._desk.handle_live(self._members.workers.members)
        if (rank, incarnation) not in self._formation.contributors_of(rank):
            self._apply(self._formation.handle_joined(rank, incarnation))

    def left(self, now: float, rank: int, *, finished: bool = False) -> None:
        """Handle a worker that left or died."""
        self._asked.pop(rank, None)
        self._askers.pop(rank, None)
        self._desk.handle_left(now, rank)
        self._placement.left(now, rank)
        self._apply(self._formation.handle_left(now, rank, finished=finished))

    # -- workers' messages --------------------------------------------------------------------------------

    def handle(self, peer: bytes, message: JoinGroup | InGroup) -> None:
        """Handle a worker's request for its group, or its arrival there."""
        rank = self._members.workers.rank_of(message.incarnation)
        if rank is None:
            number = message.number if isinstance(message, JoinGroup) else 0
            reason = f"the hub knows no incarnation {message.incarnation}, or has given it up"
            self._turn.refuse(peer, reason, type(message).__name__, number)
            return
        now = self._turn.now()
        if isinstance(message, JoinGroup):
            if rank in self._asked and message.number < self._asked[rank].number:
                return  # an old request, overtaken on another connection
            self._askers[rank] = _Asker(peer, message.number)
            # In lock step all members ask at about the same time, or are dead.
            patience = self._members.roll.patience if self._lockstep else self._placement.patience(now, rank)
            word = InGroups(at=now, message=message, patience=patience)
        elif any(number == message.contributor for number, _ in self._formation.contributors_of(rank)[1:]):
            word = InGroups(at=now, message=message)
        else:
            return  # already known
        self._turn.keep(word)
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

    def handle_links(self, _peer: bytes, word: LinkPlace | LinkMeasured) -> None:
        """Handle a worker's address for measuring links, or a measurement."""
        rank = self._members.workers.rank_of(word.incarnation)
        if not self._desk.measures or rank is None:
            return
        if isinstance(word, LinkPlace):
            self._desk.handle_place(self._turn.now(), rank, word)
        else:
            self._desk.handle_measured(self._turn.now(), rank, word)

    def beat(self, rank: int, beat: Heartbeat | Beat) -> None:
        """Take progress and seconds per sample from a worker's heartbeat."""
        paced = self._placement.beat(self._turn.now(), rank, beat)
        if paced is not None:
            self._turn.keep(paced)
            self._take_pace(paced)

    def _take_pace(self, paced: Paced) -> None:
        rank = self._members.workers.rank_of(paced.incarnation)
        if rank is not None:
            self._placement.paces[rank] = paced.pace
            self._formation.handle_trains(rank)

    def lease(self, rank: int, lease: Lease) -> Leased:
        """Handle a request for samples, for a worker alone or for its part of the group's.

        A worker for which a new group waits does not wait itself for samples that others hold: one of those
        who wait may hold them.

        Raises UserError if the worker is not in the group that it names.
        """
        keys = self._formation.contributors_of(rank)
        if not lease.block and not lease.contributor:
            keys = keys[:1]
        else:
            keys = [key for key in keys if key[0] == lease.contributor]
        if not keys:
            raise UserError(f"worker {rank} asks for samples of group {lease.contributor}, and is not in it")
        members = self._formation.members(keys[0][0])
        may_wait = not self._formation.is_awaited(rank)
        if lease.block:
            return self._blocks.handle_lease(keys[0], rank, members, lease, may_wait)
        if len(members) > 1:
            raise UserError(
                f"worker {rank} asks for samples by itself, and is one of {len(members)} in group "
                f"{keys[0][0]}"
            )
        return self._leases.handle_lease(*keys[0], lease, may_wait)

    def fenced(self, key: Key) -> None:
        """Note a log's answer to a fence."""
        self._blocks.handle_fenced(key)

    @property
    def changes(self) -> int:
        """Counter of parts of sample blocks that were given out for the first time."""
        return self._blocks.changes

    @property
    def cuts(self) -> int:
        """Counter of sample blocks that were cut."""
        return self._blocks.cuts

    # -- decisions ----------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Decide on groups if due, and give up groups that take too long to form."""
        now = self._turn.now()
        self.pass_time(now)
        if not self._members.begun:
            return
        if self._desk.measures:
            self._poll_links(now)
        for decided in self._placement.poll(now):
            self.decide(decided)

    def pass_time(self, now: float) -> None:
        """Give up groups whose deadline has passed, and open those that are due."""
        deadline = self._formation.next_deadline()
        if deadline is not None and deadline <= now:
            self._turn.keep(TimePassed(at=now))
            self._apply(self._formation.poll(now))

    def soon(self, seconds: float) -> float:
        """Seconds, up to `seconds`, that the hub may wait for messages before `poll` has work."""
        deadlines = (self._formation.next_deadline(), self._desk.next_deadline())
        now = self._turn.now()
        return max(0.0, min([seconds, *(each - now for each in deadlines if each is not None)]))

    def _poll_links(self, now: float) -> None:
        """Request measurements of links, and announce the results."""
        live = self._members.workers.live()
        asks, found = self._desk.poll(now, live)
        for ask in asks:
            self._rings.say(live[ask.worker], ask.message)
        if found is not None:
            self._decisions.add("links", found.summary, found.reason)
            self._placement.take_links(found)
            for incarnation in live.values():
                self._rings.tell(incarnation)

    def decide(self, decided: Decided) -> None:
        """Record and apply a decision on groups; one that is `placed` ends the start."""
        self._turn.keep(decided)
        self._take_decision(decided)

    def _take_decision(self, decided: Decided) -> None:
        groups = self._placement.take(decided)
        if not groups:
            return
        outcomes = self._formation.handle_decided(decided.at, groups, decided.reason)
        if decided.placed and not outcomes:
            self._decisions.add("groups", f"workers {show(Grouping(groups))}", decided.reason)
        self._apply(outcomes)

    def _apply(self, outcomes: Iterable[formation.FormationEvent]) -> None:
        """Carry out outcomes of the formation."""
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
                again = format_seconds(outcome.again - self._turn.now())
                self._decisions.add("groups", who, f"{outcome.reason}; once more in {again}")
            else:
                self._groups.pop(outcome.contributor, None)
                self._fences[GLOBAL].add((outcome.contributor, outcome.life))

    def _form(self, formed: formation.Formed) -> None:
        """Give a complete group its ring and leases, and answer its members."""
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
            self._turn.send(asker.peer, answer)

    # -- after a restart ----------------------------------------------------------------------------------

    def replay(self, record: Paced | Linked | Decided | InGroups | TimePassed) -> None:
        """Apply a record again after a restart, without answering."""
        if isinstance(record, Paced):
            self._take_pace(record)
        elif isinstance(record, Linked):
            self._desk.take(record)
        elif isinstance(record, Decided):
            self._take_decision(record)
        elif isinstance(record, InGroups):
            self._take(record)
        else:
            self._apply(self._formation.poll(record.at))

    def state(self) -> bytes:
        """Encode the state of groups as MessagePack."""
        placement = self._placement
        return msgspec.msgpack.encode(
            _State(
                self._formation.state,
                self._blocks.epochs,
                self._asked,
                self._groups,
                placement.paces,
                placement.wanted,
                placement.placed,
                placement.sites,
                self._desk.known,
                self._desk.hosts,
                self._reasons,
            )
        )

    def restore(self, now: float, state: bytes) -> None:
        """Restore an encoded state."""
        del now  # deadlines refer to the hub's clock, which continues
        found = from_msgpack(state, _State)
        self._formation.state = found.formation
        self._members.workers.not_ranks = self._formation.numbers
        self._blocks.epochs = found.blocks
        self._asked, self._groups, self._reasons = found.asked, found.groups, found.reasons
        self._placement.restore(found.paces, found.wanted, found.placed, found.sites)
        self._desk.known, self._desk.hosts = found.links, found.hosts
        self._desk.handle_live(self._members.workers.members)
