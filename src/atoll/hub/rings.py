"""The hub's rings: workers' requests, answers to them, and news for ring members."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple, Protocol

import msgspec

from atoll.core.decoding import from_msgpack
from atoll.core.errors import UserError
from atoll.hub.decisions import Decisions
from atoll.hub.records import InRing
from atoll.hub.turn import Turn
from atoll.store.members import Membership
from atoll.store.regroup import Regroup, RegroupState
from atoll.store.rendezvous import Rendezvous, RendezvousState
from atoll.wire.messages import (
    AnyMessage,
    Enter,
    Gather,
    Gathered,
    Reform,
    Reformed,
    RingNews,
    StoreAnswer,
    StoreCall,
)


class _Asker(NamedTuple):
    """The receiver of an answer: its connection, and the number of the request, which the answer repeats."""

    peer: bytes
    number: int


_NOBODY = _Asker(b"", 0)  # receiver of answers that are not sent
_NAMED = 16  # the most workers named in a decision
_LOOK_SECONDS = 0.05  # seconds between searches for members lost to their rings
_CHANGES = ("set", "add", "append", "compare_set", "delete")  # journalled operations of the store


@dataclass
class _State:
    meeting: RendezvousState
    regroup: RegroupState
    of_groups: list[RegroupState] = field(default_factory=list)


class GroupNews(Protocol):
    """News of groups for a worker (`hub/contributors.py`: Contributors)."""

    def grouping_of(self, incarnation: int) -> int:
        """The number of the latest grouping for a worker."""

    def wants_links(self, incarnation: int) -> bool:
        """True if a worker's links are to be measured."""


class Rings:
    """Handles workers' messages about rings. `heard_until(now)` returns the time up to which all members'
    messages have been read, by which silences are judged.

    A run without shards has one ring. In a run with groups each group has its own (`form_group`), and
    `groups` has news for its members.

    A call names its worker by incarnation, since it comes over another connection than the worker's Hello.
    All holders of the run's keys are trusted with that.
    """

    def __init__(
        self,
        members: Membership,
        decisions: Decisions,
        turn: Turn,
        groups: GroupNews | None = None,
        *,
        at_least: int = 1,
        heard_until: Callable[[float], float] = lambda now: now,
    ) -> None:
        turn.handlers |= dict.fromkeys((Gather, StoreCall, Reform, Enter), self.handle)
        self._heard_until = heard_until
        self._members, self._decisions, self._turn, self._groups = members, decisions, turn, groups
        self._rendezvous = Rendezvous(members.workers.count)
        self._regroup = Regroup(self._rendezvous.form, at_least)  # the run's ring
        self._of_groups: dict[int, Regroup] = {}  # groups' rings, by the incarnation of each member
        self._told: dict[Regroup, tuple[int, bool, int]] = {}  # the latest announced state of each ring
        self._stirred: dict[Regroup, None] = {}  # rings to be announced at the turn's end, in order
        self._look_at = -math.inf  # when to search next for lost members
        self._beats: dict[int, bytes] = {}  # incarnation -> the connection of its heartbeats

    def handle(self, peer: bytes, message: Gather | StoreCall | Reform | Enter) -> None:
        """Handle a request to form, re-form or enter a ring, or a call of the ring's store."""
        now = self._turn.now()
        try:
            self._take(now, _Asker(peer, message.number), message)
        except UserError as error:
            self._turn.refuse(peer, str(error), type(message).__name__, message.number)
        else:
            if not isinstance(message, StoreCall) or message.operation in _CHANGES:
                self._turn.keep(InRing(at=now, message=message))

    def _take(self, now: float, asker: _Asker, message: Gather | StoreCall | Reform | Enter) -> None:
        rank = self._members.workers.rank_of(message.incarnation)
        if rank is None:
            raise UserError(f"the hub knows no incarnation {message.incarnation}, or has given it up")
        if isinstance(message, StoreCall):
            self._answer(self._rendezvous.handle_call(now, asker, message))
        elif isinstance(message, Gather):
            self._gather(now, asker, rank, message)
        elif isinstance(message, Reform):
            self._reform(asker, rank, message)
        else:
            self._regrouped(self._regroup, self._regroup.handle_enter(asker, rank, message))
            self._stirred[self._regroup] = None

    def _gather(self, now: float, asker: _Asker, rank: int, gather: Gather) -> None:
        if self._regroup.under_way and gather.incarnation not in self._regroup.state.workers:
            self._answer([(asker, Gathered(group=self._regroup.state.group, late=True))])
            return
        before = self._rendezvous.state.formed
        self._answer(self._rendezvous.handle_gather(now, asker, rank, gather))
        if self._rendezvous.state.formed != before:
            ranks = self._members.workers.ranks
            members = {each: ranks[each] for each in self._rendezvous.members() if each in ranks}
            self._regroup.handle_formed(self._rendezvous.state.formed, members)
            self._members.workers.open = True
            self._decisions.add(
                "ring",
                f"ring {self._rendezvous.state.formed} of {len(members)} workers",
                f"all are there: {_who(members)}",
            )

    def _reform(self, asker: _Asker, rank: int, reform: Reform) -> None:
        regroup = self._regroup_of(reform.incarnation)
        if self._groups is not None and regroup is self._regroup:
            raise UserError(f"incarnation {reform.incarnation} is in no group, and so in no ring")
        quiet = not regroup.state.broken
        self._regrouped(regroup, regroup.handle_reform(asker, reform, self._members.workers.ranks))
        if regroup.state.broken and quiet:
            self._decisions.add(
                "ring broken", f"ring {reform.group}", f"worker {rank} lost touch with another member"
            )
            self._free_waiting(regroup)

    def _regroup_of(self, incarnation: int) -> Regroup:
        """The ring of a worker: its group's, else the run's."""
        return self._of_groups.get(incarnation, self._regroup)

    def form_group(self, members: Mapping[int, int]) -> int:
        """Form a ring of `members` (incarnation -> rank in the run), in this order; returns its number. They
        leave their present rings, whose other members go on without them."""
        for member in members:
            self._leave(member, said_goodbye=True)
        regroup = Regroup(self._rendezvous.form, of_group=True)
        number = self._rendezvous.form(list(members))
        regroup.handle_formed(number, members)
        self._of_groups |= dict.fromkeys(members, regroup)
        return number

    def _regrouped(self, regroup: Regroup, answers: Sequence[tuple[object, Reformed]]) -> None:
        """Send the answers, if there are any, and record the next ring, or that there is none."""
        self._answer(answers)
        if not answers:
            return
        ring = answers[0][1]
        if regroup is self._regroup:
            self._members.workers.open = regroup.under_way
        came = ring.workers[len(ring.workers) - ring.newcomers :]
        told = ((ring.lost, "died"), (ring.left, "left"), (came, "entered"))
        changes = [f"worker {rank} {how}" for ranks, how in told for rank in ranks[:_NAMED]]
        changes += [f"{len(ranks) - _NAMED} others {how}" for ranks, how in told if len(ranks) > _NAMED]
        self._decisions.add(
            "ring",
            f"ring {ring.group} of {len(ring.workers)} workers" if ring.group else "no next ring",
            ring.reason
            or f"{', '.join(changes) or 'a connection broke'}; it goes on at its round {ring.round}",
        )

    def _free_waiting(self, regroup: Regroup) -> None:
        """Free members that wait for a lost one, and announce the break at the turn's end, so that many
        deaths at once cost each member one message."""
        self._answer(self._rendezvous.handle_broken(regroup.state.group))
        self._stirred[regroup] = None

    def _tell_stirred(self) -> None:
        """Announce this turn's changes to the members of the rings."""
        stirred, self._stirred = self._stirred, {}
        for regroup in stirred:
            if not regroup.state.workers or self._told.get(regroup) == _stand(regroup):
                continue  # already announced, when an earlier member died
            self._told[regroup] = _stand(regroup)
            for member in regroup.state.workers:
                self.tell(member)

    def tell(self, incarnation: int) -> None:
        """Send a worker the state of its ring and its grouping, over the connection of its heartbeats."""
        self.say(incarnation, self._news(incarnation))

    def say(self, incarnation: int, message: AnyMessage) -> None:
        """Send a worker a message over the connection of its heartbeats."""
        if incarnation in self._beats:
            self._turn.send(self._beats[incarnation], message)

    def _news(self, incarnation: int) -> RingNews:
        regroup = self._regroup_of(incarnation)
        grouping = self._groups.grouping_of(incarnation) if self._groups is not None else 0
        links = self._groups is not None and self._groups.wants_links(incarnation)
        if incarnation not in regroup.state.workers:
            return RingNews(group=0, grouping=grouping, links=links)
        return RingNews(
            group=regroup.state.group,
            broken=regroup.state.broken,
            waiting=regroup.waiting,
            grouping=grouping,
            links=links,
        )

    def beat(self, peer: bytes, incarnation: int) -> None:
        """Handle a heartbeat over the member's own connection."""
        self._beats[incarnation] = peer
        self.hear(incarnation)

    def hear(self, incarnation: int) -> None:
        """Answer a heartbeat with the news that the member needs, over its own connection."""
        regroup = self._regroup_of(incarnation)
        stirs = incarnation in regroup.state.workers and (regroup.state.broken or regroup.waiting)
        if stirs or self._groups is not None:
            self.tell(incarnation)

    def left(self, incarnation: int, *, said_goodbye: bool = False, finished: bool = False) -> None:
        """Handle a worker that left or died; `finished`: at the end of its session."""
        self._beats.pop(incarnation, None)
        self._leave(incarnation, said_goodbye=said_goodbye, finished=finished)
        self._members.workers.open = self._regroup.under_way

    def _leave(self, incarnation: int, *, said_goodbye: bool = False, finished: bool = False) -> None:
        """Remove a worker from its ring."""
        regroup = self._regroup_of(incarnation)
        self._of_groups.pop(incarnation, None)
        was_member = incarnation in regroup.state.workers
        # First form the next ring: the store's keys go with this ring's last member.
        answers = regroup.handle_left(incarnation, said_goodbye=said_goodbye, finished=finished)
        self._regrouped(regroup, answers)
        self._rendezvous.handle_left(incarnation)
        if was_member and regroup.state.broken:
            self._free_waiting(regroup)
        if not regroup.state.workers:
            self._told.pop(regroup, None)

    def replay(self, now: float, message: AnyMessage) -> None:
        """Apply a recorded message again after a restart, without answering."""
        assert isinstance(message, (Gather, StoreCall, Reform, Enter))
        with contextlib.suppress(UserError):
            self._take(now, _Asker(b"", message.number), message)

    def state(self) -> bytes:
        """Encode the state of rings as MessagePack."""
        of_groups = [regroup.state for regroup in self._rings_of_groups()]
        return msgspec.msgpack.encode(_State(self._rendezvous.state, self._regroup.state, of_groups))

    def restore(self, now: float, state: bytes) -> None:
        """Restore an encoded state."""
        del now  # deadlines refer to the hub's clock, which continues
        found = from_msgpack(state, _State)
        self._rendezvous.restore(found.meeting, _NOBODY)
        self._regroup.restore(found.regroup, _NOBODY)
        self._of_groups = {}
        for state_of_it in found.of_groups:
            regroup = Regroup(self._rendezvous.form, of_group=True)
            regroup.restore(state_of_it, _NOBODY)
            self._of_groups |= dict.fromkeys(regroup.state.workers, regroup)
        self._members.workers.open = self._regroup.under_way

    def poll(self) -> None:
        """Answer requests whose time is over, and announce changes to members."""
        self._answer(self._rendezvous.poll(self._turn.now()))
        self._tell_stirred()

    def _rings_of_groups(self) -> list[Regroup]:
        return list(dict.fromkeys(self._of_groups.values()))

    def silent(self) -> Iterator[tuple[int, str]]:
        """Yield (incarnation, reason) of silent members that their rings have lost. Each must be declared
        dead, and so `left`, before the next is requested."""
        now, roll = self._turn.now(), self._members.roll
        if now < self._look_at:
            return
        self._look_at = now + _LOOK_SECONDS
        for regroup in [self._regroup, *self._rings_of_groups()]:
            for member in regroup.awaited if regroup.state.broken else ():
                if not regroup.awaits(member):
                    break  # the next ring has formed since the death just reported
                if not roll.suspect(now, member):
                    continue
                heard_until = self._heard_until(now)
                if roll.suspect(heard_until, member):  # else its messages may be unread yet
                    silence = roll.silence_of(heard_until, member) or 0.0
                    yield member, f"the others lost touch with it, and it was silent for {silence:.1f} s"

    def soon(self, seconds: float) -> float:
        """Seconds, up to `seconds`, that the hub may wait for messages before `poll` has work."""
        deadline = self._rendezvous.next_deadline()
        return seconds if deadline is None else max(0.0, min(seconds, deadline - self._turn.now()))

    def _answer(self, answers: Sequence[tuple[object, Gathered | Reformed | StoreAnswer]]) -> None:
        for asker, message in answers:
            assert isinstance(asker, _Asker)
            self._turn.send(asker.peer, msgspec.structs.replace(message, number=asker.number))


def _who(members: Mapping[int, int]) -> str:
    """Describe the members of a ring, incarnation -> rank."""
    names = [f"worker {rank}, incarnation {each}" for each, rank in islice(members.items(), _NAMED)]
    return ", ".join(names) + (f", and {len(members) - _NAMED} others" if len(members) > _NAMED else "")


def _stand(regroup: Regroup) -> tuple[int, bool, int]:
    """State of a ring as announced to its members."""
    return regroup.state.group, regroup.state.broken, regroup.waiting
