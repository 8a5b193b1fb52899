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
from typing import TypeAlias

import msgspec

from atoll.core.errors import UserError
from atoll.wire.messages import Enter, Reform, Reformed

_NO_STATE = "those who held the training's state are gone"

Peer: TypeAlias = Hashable  # identifies an asker to the caller
Answer: TypeAlias = tuple[Peer, Reformed]


@dataclass
class RegroupState:
    """The state of `Regroup`, as plain data: all that a restart must not lose.

    Requests are part of it: an asker may have had its answer by the time that the state is read, and does not
    ask again.

    Attributes:
        group: the current ring's number; 0 if there was none.
        workers: living members, incarnation -> rank in the run, in order of rank.
        broken: True if a member was lost, and the next ring is not formed yet.
        over: True once a member has come to the end of its session: nobody enters any more.
        lost: ranks in the run of members lost since the ring was formed.
        left: ranks in the run of members that said goodbye since then.
        answered: incarnation -> number of its latest request, and the answer.
        reports: the members' Reform, by incarnation.
        entering: the newcomers' rank in the run and Enter, by incarnation, in the order in which they came.
    """

    group: int = 0
    workers: dict[int, int] = field(default_factory=dict)
    broken: bool = False
    over: bool = False
    lost: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    answered: dict[int, tuple[int, Reformed]] = field(default_factory=dict)
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
        state: the ring's state, for `restore`. It is not a copy: encode it at once.
    """

    def __init__(
        self, form: Callable[[Sequence[int], int], int], at_least: int = 1, *, of_group: bool = False
    ) -> None:
        self.state = RegroupState()
        self._form, self._at_least, self._of_group = form, at_least, of_group
        self._peers: dict[int, Peer] = {}  # the askers that wait for an answer, by incarnation

    @property
    def under_way(self) -> bool:
        """True while a late worker may enter a ring."""
        return bool(self.state.workers) and not self.state.over

    @property
    def waiting(self) -> int:
        """The number of newcomers that wait to enter."""
        return len(self.state.entering)

    @property
    def awaited(self) -> list[int]:
        """The living members that have not asked for the next ring yet, if others have."""
        return [member for member in self.state.workers if self.awaits(member)]

    def awaits(self, member: int) -> bool:
        """True if others have asked for the next ring, and this living member has not yet."""
        reports = self.state.reports
        return bool(reports) and member in self.state.workers and member not in reports

    def handle_formed(self, group: int, workers: Mapping[int, int]) -> None:
        """Note a ring that was formed from nothing. `workers` maps incarnation -> rank in the run, in order
        of rank."""
        self.state.over = False
        self._is_formed(group, workers)

    def _is_formed(self, group: int, workers: Mapping[int, int]) -> None:
        state = self.state
        state.group, state.workers, state.broken = group, dict(workers), False
        state.lost, state.left, state.reports = [], [], {}

    def handle_reform(self, peer: Peer, reform: Reform, live: Mapping[int, int]) -> list[Answer]:
        """Take a member's request for the next ring.

        A hub that was started again knows no ring: it takes the ring to have all living workers except
        newcomers.

        Args:
            live: the run's living workers, incarnation -> rank in the run.

        Raises UserError for a member that is in no ring, or in an earlier one.
        """
        state, told = self.state, self._told_before(peer, reform)
        if told is not None:
            return told
        if not state.group:
            in_order = sorted(live.items(), key=lambda each: each[1])
            there = {member: rank for member, rank in in_order if member not in state.entering}
            self.handle_formed(reform.group, there)
        if reform.incarnation not in state.workers:
            if reform.group < state.group:
                raise UserError(
                    f"ring {reform.group} has gone on, as ring {state.group}, without this member"
                )
            raise UserError(f"incarnation {reform.incarnation} is no member of ring {reform.group}")
        if reform.group != state.group:
            raise UserError(f"ring {reform.group} is no more: the run's is ring {state.group}")
        state.reports[reform.incarnation], self._peers[reform.incarnation] = reform, peer
        state.broken = state.broken or not reform.admits
        return self._go_on()

    def handle_enter(self, peer: Peer, worker: int, enter: Enter) -> list[Answer]:
        """Take the request of a late worker that is ready. Raises UserError if there is no ring to enter."""
        told = self._told_before(peer, enter)
        if told is not None:
            return told
        if not self.under_way:
            raise UserError("there is no ring that could be entered: it has ended")
        self.state.entering[enter.incarnation], self._peers[enter.incarnation] = (worker, enter), peer
        return []

    def restore(self, state: RegroupState, peer: Peer = None) -> None:
        """Take over `state`. `peer` stands for the askers until they ask again."""
        self.state, self._peers = state, dict.fromkeys([*state.reports, *state.entering], peer)

    def _told_before(self, peer: Peer, message: Reform | Enter) -> list[Answer] | None:
        """Return the answer to a repeated request again; None for a new request."""
        number, answer = self.state.answered.get(message.incarnation, (0, None))
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
        state = self.state
        for known in (state.entering, state.answered, state.reports, self._peers):
            known.pop(incarnation, None)
        rank = state.workers.pop(incarnation, None)
        if rank is None:
            return []
        (state.left if said_goodbye else state.lost).append(rank)
        state.over, state.broken = state.over or finished, True
        if not state.workers:
            return self._end(_NO_STATE) if state.entering else []
        return self._go_on() if state.reports else []

    def _go_on(self) -> list[Answer]:
        """Form the next ring, if every living member has asked for it."""
        state = self.state
        if len(state.reports) < len(state.workers) or not state.workers:  # only members' reports are kept
            return []
        if all(report.fresh for report in state.reports.values()):
            if not self._of_group:
                return self._end(_NO_STATE)
            first = min(state.reports.values(), key=_rank)
            state.reports[first.incarnation] = msgspec.structs.replace(first, fresh=False)
        # Members keep their order, so the first living member is the first of the next ring.
        reports = sorted(state.reports.values(), key=_rank)
        if len(reports) < self._at_least and not state.over:  # when one has ended, all are at the end
            return self._end(f"{len(reports)} of its workers are left, and at least {self._at_least} must be")
        workers = {each.incarnation: state.workers[each.incarnation] for each in reports}
        admitted: list[Enter] = []
        if all(report.admits for report in reports):
            admitted = [enter for _, enter in state.entering.values()]
            workers |= {member: rank for member, (rank, _) in state.entering.items()}
            state.entering = {}
        answer = Reformed(
            group=self._form(list(workers), state.group),
            workers=list(workers.values()),
            newcomers=len(admitted) + sum(report.fresh for report in reports),
            round=next_round(reports),
            lost=sorted(state.lost),
            left=sorted(state.left),
        )
        self._is_formed(answer.group, workers)
        asked: list[Reform | Enter] = [*reports, *admitted]
        return self._answer(asked, answer)

    def _end(self, reason: str) -> list[Answer]:
        state = self.state
        asked: list[Reform | Enter] = [*state.reports.values()]
        asked += [enter for _, enter in state.entering.values()]
        answer = Reformed(group=0, reason=reason, lost=sorted(state.lost), left=sorted(state.left))
        state.workers, state.reports, state.entering, state.over = {}, {}, {}, True
        return self._answer(asked, answer)

    def _answer(self, asked: Sequence[Reform | Enter], answer: Reformed) -> list[Answer]:
        for each in asked:
            self.state.answered[each.incarnation] = each.number, answer
        return [(self._peers.pop(each.incarnation), answer) for each in asked]


def _rank(reform: Reform) -> tuple[bool, int]:
    """Return the sort key of a request: members without state come last."""
    return reform.fresh, reform.rank


def next_round(reports: Sequence[Reform]) -> int:
    """Return the round that the next ring makes, from all living members' reports. See the module."""
    states = [(each.round, each.holds) for each in reports if not each.fresh]
    first, last = min(states)[0], max(states)[0]
    if first < last:  # some are past the confirmation of round `first`: all hold its result
        return last
    return first + 1 if all(holds for _, holds in states) else first
