"""The decisions on a ring that lost a member, or that newcomers enter: who is in the next ring, and which
collective it makes next.

Every collective of a ring is a numbered **round**. Its members make it, and then confirm to one another that
they hold its result. So a member that has passed a round's confirmation knows that all held the result, and
no member of a ring is more than one round before another. When a ring breaks, each living member reports the
round that it is in, and whether it holds that round's result. The next ring follows from the reports:

- If all hold the round's result, or some are past it, all take it. It counts, with the dead member's part, as
  the dead member itself may have gone on with it.
- Otherwise no member has gone on with it. All make the round again from what they keep, without the dead
  member's part.

A member that dies meanwhile is another break, of the ring before or of the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from atoll.core.errors import UserError
from atoll.wire.messages import Enter, Reform, Reformed

_NO_STATE = "those who held the training's state are gone"

Peer: TypeAlias = Hashable  # identifies an asker to the caller
Answer: TypeAlias = tuple[Peer, Reformed]
_Wish = TypeVar("_Wish", Reform, Enter)


@dataclass(frozen=True)
class _Asked(Generic[_Wish]):
    peer: Peer
    message: _Wish


@dataclass
class RegroupState:
    """The state of `Regroup`, as plain data.

    Requests are part of it: an asker may have had its answer by the time that the state is read, and does not
    ask again.

    Attributes:
        workers: incarnation -> rank in the run, of the members in order of rank.
        reports: the members' Reform, by incarnation.
        entering: the newcomers' rank in the run and Enter, by incarnation.
    """

    group: int
    workers: dict[int, int]
    broken: bool
    over: bool
    lost: list[int]
    left: list[int]
    answered: dict[int, tuple[int, Reformed]]
    reports: dict[int, Reform] = field(default_factory=dict)
    entering: dict[int, tuple[int, Enter]] = field(default_factory=dict)


class Regroup:
    """The ring of a run, from break to break. Members are known by incarnation, and reported by their ranks
    in the run.

    Args:
        form: makes a ring of these incarnations, in order of rank, and returns its number, which is above the
            second argument.
        at_least: a ring of fewer members does not go on.
        of_group: True if members trained before the ring was formed. If those whose state they were to take
            are gone, each has a state of its own.

    Attributes:
        group: the current ring's number; 0 if there was none.
        members: living incarnations, in order of rank.
        broken: True if a member was lost, and the next ring is not formed yet.
        over: True once a member has come to the end of its session: nobody enters any more.
    """

    def __init__(
        self, form: Callable[[Sequence[int], int], int], at_least: int = 1, *, of_group: bool = False
    ) -> None:
        self.group = 0
        self.members: dict[int, None] = {}
        self.broken = False
        self.over = False
        self._form, self._at_least, self._of_group = form, at_least, of_group
        self._workers: dict[int, int] = {}  # incarnation -> rank in the run
        self._reports: dict[int, _Asked[Reform]] = {}  # by incarnation
        self._entering: dict[int, _Asked[Enter]] = {}  # in the order in which they came
        self._lost: list[int] = []  # ranks in the run of members lost since the ring was formed
        self._left: list[int] = []
        self._answered: dict[int, tuple[int, Reformed]] = {}  # incarnation -> number of its request, answer

    @property
    def under_way(self) -> bool:
        """True while a late worker may enter a ring."""
        return bool(self.members) and not self.over

    @property
    def waiting(self) -> int:
        """The number of newcomers that wait to enter."""
        return len(self._entering)

    @property
    def awaited(self) -> list[int]:
        """The living members that have not asked for the next ring yet, if others have."""
        return [member for member in self.members if self.awaits(member)]

    def awaits(self, member: int) -> bool:
        """True if others have asked for the next ring, and this living member has not yet."""
        return bool(self._reports) and member in self.members and member not in self._reports

    def handle_formed(self, group: int, workers: Mapping[int, int]) -> None:
        """Note a ring that was formed from nothing. `workers` maps incarnation -> rank in the run, in order
        of rank."""
        self.group, self.members, self._workers = group, dict.fromkeys(workers), dict(workers)
        self.broken = self.over = False
        self._reports.clear()
        self._lost, self._left = [], []

    def handle_reform(self, peer: Peer, reform: Reform, live: Mapping[int, int]) -> list[Answer]:
        """Take a member's request for the next ring.

        A hub that was started again knows no ring: it takes the ring to have all living workers except
        newcomers.

        Args:
            live: the run's living workers, incarnation -> rank in the run.

        Raises UserError for a member that is in no ring, or in an earlier one.
        """
        told = self._told_before(peer, reform)
        if told is not None:
            return told
        if not self.group:
            in_order = sorted(live.items(), key=lambda each: each[1])
            there = {member: rank for member, rank in in_order if member not in self._entering}
            self.handle_formed(reform.group, there)
        if reform.incarnation not in self.members:
            if reform.group < self.group:
                raise UserError(f"ring {reform.group} has gone on, as ring {self.group}, without this member")
            raise UserError(f"incarnation {reform.incarnation} is no member of ring {reform.group}")
        if reform.group != self.group:
            raise UserError(f"ring {reform.group} is no more: the run's is ring {self.group}")
        self._reports[reform.incarnation] = _Asked(peer, reform)
        self.broken = self.broken or not reform.admits
        return self._go_on()

    def handle_enter(self, peer: Peer, worker: int, enter: Enter) -> list[Answer]:
        """Take the request of a late worker that is ready. Raises UserError if there is no ring to enter."""
        told = self._told_before(peer, enter)
        if told is not None:
            return told
        if not self.under_way:
            raise UserError("there is no ring that could be entered: it has ended")
        self._workers[enter.incarnation] = worker
        self._entering[enter.incarnation] = _Asked(peer, enter)
        return []

    def state(self) -> RegroupState:
        """Return all that a restart must not lose."""
        workers = {member: self._workers[member] for member in self.members}
        return RegroupState(
            self.group,
            workers,
            self.broken,
            self.over,
            list(self._lost),
            list(self._left),
            dict(self._answered),
            {member: asked.message for member, asked in self._reports.items()},
            {member: (self._workers[member], asked.message) for member, asked in self._entering.items()},
        )

    def restore(self, state: RegroupState, peer: Peer = None) -> None:
        """Take over a state that `state` has returned. `peer` stands for the askers until they ask again."""
        self.handle_formed(state.group, state.workers)
        self.broken, self.over = state.broken, state.over
        self._lost, self._left = list(state.lost), list(state.left)
        self._answered = dict(state.answered)
        self._reports = {member: _Asked(peer, reform) for member, reform in state.reports.items()}
        for member, (worker, enter) in state.entering.items():
            self._workers[member] = worker
            self._entering[member] = _Asked(peer, enter)

    def _told_before(self, peer: Peer, message: Reform | Enter) -> list[Answer] | None:
        """Return the answer to a repeated request again; None for a new request."""
        number, answer = self._answered.get(message.incarnation, (0, None))
        if answer is None or message.number > number:
            return None
        return [(peer, answer)] if message.number == number else []

    def handle_left(
        self, incarnation: int, *, said_goodbye: bool = False, finished: bool = False
    ) -> list[Answer]:
        """Remove a worker that died or said goodbye.

        Args:
            finished: True if it said goodbye at the end of its session.
        """
        self._entering.pop(incarnation, None)
        self._answered.pop(incarnation, None)
        if incarnation not in self.members:
            return []
        del self.members[incarnation]
        self._reports.pop(incarnation, None)
        (self._left if said_goodbye else self._lost).append(self._workers[incarnation])
        self.over = self.over or finished
        self.broken = True
        if not self.members:
            return self._end(_NO_STATE) if self._entering else []
        return self._go_on() if self._reports else []

    def _go_on(self) -> list[Answer]:
        """Form the next ring, if every living member has asked for it."""
        if len(self._reports) < len(self.members) or not self.members:  # only members' reports are kept
            return []
        if all(asked.message.fresh for asked in self._reports.values()):
            if not self._of_group:
                return self._end(_NO_STATE)
            first = min(self._reports.values(), key=_rank)
            own = msgspec.structs.replace(first.message, fresh=False)
            self._reports[own.incarnation] = _Asked(first.peer, own)
        reports = [asked.message for asked in self._reports.values()]
        if len(reports) < self._at_least and not self.over:  # when one has ended, all are at the end
            return self._end(f"{len(reports)} of its workers are left, and at least {self._at_least} must be")
        admitted = list(self._entering) if all(report.admits for report in reports) else []
        # Members keep their order, so the first living member is the first of the next ring.
        asked: list[_Asked[Any]] = sorted(self._reports.values(), key=_rank)
        asked += [self._entering.pop(member) for member in admitted]
        members = [each.message.incarnation for each in asked]
        answer = Reformed(
            group=self._form(members, self.group),
            workers=[self._workers[member] for member in members],
            newcomers=len(admitted) + sum(report.fresh for report in reports),
            round=next_round(reports),
            lost=sorted(self._lost),
            left=sorted(self._left),
        )
        self.group, self.members = answer.group, dict.fromkeys(members)
        self.broken = False
        self._lost, self._left = [], []
        self._reports.clear()
        return self._answer(asked, answer)

    def _end(self, reason: str) -> list[Answer]:
        asked: list[_Asked[Any]] = [*self._reports.values(), *self._entering.values()]
        answer = Reformed(group=0, reason=reason, lost=sorted(self._lost), left=sorted(self._left))
        self.members, self.over = {}, True
        self._reports.clear()
        self._entering.clear()
        return self._answer(asked, answer)

    def _answer(self, asked: Sequence[_Asked[Any]], answer: Reformed) -> list[Answer]:
        for each in asked:
            self._answered[each.message.incarnation] = (each.message.number, answer)
        return [(each.peer, answer) for each in asked]


def _rank(asked: _Asked[Reform]) -> tuple[bool, int]:
    """Return the sort key of a request: members without state come last."""
    return asked.message.fresh, asked.message.rank


def next_round(reports: Sequence[Reform]) -> int:
    """Return the round that the next ring makes, from all living members' reports. See the module."""
    states = [(each.round, each.holds) for each in reports if not each.fresh]
    first, last = min(states)[0], max(states)[0]
    if first < last:  # some are past the confirmation of round `first`: all hold its result
        return last
    return first + 1 if all(holds for _, holds in states) else first
