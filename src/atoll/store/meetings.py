"""Gatherings of all live workers: everyone brings a part, everyone gets all parts."""

from __future__ import annotations

import msgspec

from atoll.core.stands import are_consistent
from atoll.store.outcomes import Draft, Meeting
from atoll.store.roster import Roster
from atoll.store.waits import Waits, line_of
from atoll.wire.messages import Count, Text, WorkerStand


class MeetingPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a worker has brought to a meeting."""

    incarnation: Count
    what: Text
    handle: Count
    stand: WorkerStand | None = None


class EndedScript(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worker whose script has left its session, and the incarnations that took part in meetings at that
    time.
    """

    stand: WorkerStand
    others: dict[int, Count]


class MeetingsState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that Meetings remember."""

    next: Count
    parts: dict[int, dict[int, MeetingPart]]
    bound: dict[int, Count]
    since: dict[int, Count]
    ended: dict[int, EndedScript] = {}


class Meetings:
    """Numbered by the workers; they take place in order.

    A worker that joins later is not waited for before its own first Meet, for it cannot know the number.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._next = 0  # all numbers below are over
        self._parts: dict[int, dict[int, MeetingPart]] = {}  # number -> worker -> part
        self._bound: dict[int, int] = {}  # worker -> incarnation that is waited for
        self._since: dict[int, int] = {}  # worker -> the first meeting that waits for it, if not 0
        self._ended: dict[int, EndedScript] = {}

    def state(self) -> MeetingsState:
        """For a journal; `restored` makes the same of it."""
        parts = {number: dict(each) for number, each in self._parts.items()}
        return MeetingsState(
            next=self._next,
            parts=parts,
            bound=dict(self._bound),
            since=dict(self._since),
            ended=dict(self._ended),
        )

    @classmethod
    def restored(cls, state: MeetingsState, roster: Roster) -> Meetings:
        meetings = cls(roster)
        meetings._next, meetings._bound = state.next, dict(state.bound)
        meetings._since, meetings._ended = dict(state.since), dict(state.ended)
        meetings._parts = {number: dict(each) for number, each in state.parts.items()}
        return meetings

    @property
    def next(self) -> int:
        """The number of the next to take place."""
        return self._next

    def bind(self, worker: int, incarnation: int, since: int = 0) -> None:
        """Every meeting from number `since` on waits for this worker: it is here from the beginning, or knows
        the number from one who is."""
        self._bound[worker] = incarnation
        self._since[worker] = since

    def skip_to(self, number: int) -> None:
        """Where nobody has brought anything: the next to take place is this one, or a later one."""
        if not any(self._parts.values()):
            self._next = max(self._next, number)

    def is_bound(self, worker: int, incarnation: int) -> bool:
        """Whether meetings wait for this incarnation."""
        return self._bound.get(worker) == incarnation

    def meet(
        self,
        worker: int,
        incarnation: int,
        number: int,
        what: str,
        handle: int,
        draft: Draft,
        stand: WorkerStand | None = None,
    ) -> None:
        """Add a live worker's part to a meeting; `stand` is the worker's place in its script.

        The handle is released if the part is refused, a duplicate, or from an inconsistent place.
        """
        taken = self._parts.get(number, {}).get(worker)
        others = [part for part in self._parts.get(number, {}).values() if part.what != what]
        if number < self._next and self._bound.get(worker) != incarnation:
            draft.refused = f"meeting {number} is over; worker {worker} comes late: the next is {self._next}"
        elif number > self._next + 1:
            draft.refused = f"worker {worker} comes to meeting {number}, while {self._next} is the next"
        elif others and taken is None:
            draft.refused = (
                f"worker {worker} comes to meeting {number} for {what!r}, others for {others[0].what!r}: "
                "all workers must make the same calls in the same order"
            )
        is_new = taken is None and number >= self._next
        if stand is not None and is_new:
            draft.mismatch = self._mismatch(worker, incarnation, number, stand)
        if draft.mismatch:
            draft.refused = ""
        if draft.refused or draft.mismatch or not is_new:
            draft.released.append(handle)
            return
        self._bound[worker] = incarnation
        self._parts.setdefault(number, {})[worker] = MeetingPart(incarnation, what, handle, stand)
        self._ended.pop(worker, None)

    def _mismatch(self, worker: int, incarnation: int, number: int, stand: WorkerStand) -> str:
        """Return the line for inconsistent places, or an empty string.

        A place is inconsistent with other places in this meeting, or with workers that have ended and never
        come.
        """
        here = [part.stand for part in self._parts.get(number, {}).values() if part.stand is not None]
        gone = [
            each.stand
            for other, each in self._ended.items()
            if other != worker and each.others.get(worker) == incarnation
        ]
        if not gone and are_consistent(each.stand for each in (*here, stand)):
            return ""
        return line_of([*here, *gone, stand])

    def end(self, worker: int, incarnation: int, stand: WorkerStand, draft: Draft) -> None:
        """Record that a worker's script has left its session and comes to no further meeting.

        Others that wait for the worker in a meeting, now or later, stand at places inconsistent with its end.
        """
        if self._bound.get(worker) != incarnation or self._since.get(worker, 0) > self._next:
            return
        waiting = [part.stand for part in self._parts.get(self._next, {}).values() if part.stand is not None]
        if waiting:
            draft.mismatch = line_of([*waiting, stand])
            return
        del self._bound[worker]
        others = {
            other: each for other, each in self._bound.items() if self._since.get(other, 0) <= self._next
        }
        self._ended[worker] = EndedScript(stand, others)

    def leave(self, worker: int, incarnation: int, draft: Draft) -> None:
        """A worker is fenced: it is not waited for, and its parts are released."""
        if self._bound.get(worker, incarnation + 1) <= incarnation:
            del self._bound[worker]
            self._since.pop(worker, None)
        for parts in self._parts.values():
            part = parts.get(worker)
            if part is not None and part.incarnation <= incarnation:
                draft.released.append(parts.pop(worker).handle)

    def advance(self, draft: Draft) -> None:
        """Let the meetings take place that are complete."""
        while self._parts.get(self._next) and self._is_complete():
            parts = sorted(self._parts.pop(self._next).items())
            draft.met.append(
                Meeting(
                    number=self._next,
                    what=parts[0][1].what,
                    workers=[worker for worker, _ in parts],
                    incarnations=[part.incarnation for _, part in parts],
                    handles=[part.handle for _, part in parts],
                    stand=next((part.stand for _, part in parts if part.stand is not None), None),
                )
            )
            self._next += 1

    def _is_complete(self) -> bool:
        return self._roster.is_quorate() and not self._missing()

    def _missing(self) -> list[int]:
        bound = {worker for worker in self._bound if self._since.get(worker, 0) <= self._next}
        return sorted(bound - set(self._parts[self._next]))

    def waits(self) -> Waits:
        """Return the workers needed for the next meeting, and the places of workers that have come."""
        parts = self._parts.get(self._next, {})
        needed = {worker for worker in self._bound if self._since.get(worker, 0) <= self._next}
        stands = {worker: part.stand for worker, part in parts.items() if part.stand is not None}
        return Waits(frozenset(needed if self._roster.begun else ()), stands)

    def waiting_for(self) -> list[str]:
        """Who is waited for, in words."""
        if not self._parts.get(self._next):
            return []
        what = next(iter(self._parts[self._next].values())).what
        return [f"worker {worker}, to come to {what!r}" for worker in self._missing()]
