"""Meetings of all live workers: each brings a part, and gets all parts."""

from __future__ import annotations

import msgspec

from atoll.core.stands import are_consistent
from atoll.store.outcomes import Draft, Meeting
from atoll.store.roster import Roster
from atoll.store.waits import Waits, line_of
from atoll.wire.messages import Count, Text, WorkerStand


class MeetingPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One worker's part in a meeting.

    Attributes:
        what: the call, in words.
        handle: the handle of its payload.
        stand: the worker's place in its script.
    """

    incarnation: Count
    what: Text
    handle: Count
    stand: WorkerStand | None = None


class EndedScript(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worker whose script has left its session.

    Attributes:
        stand: the worker's place in its script.
        others: the workers that took part in meetings at that time, with their incarnations.
    """

    stand: WorkerStand
    others: dict[int, Count]


class Meetings(msgspec.Struct, forbid_unknown_fields=True):
    """The meetings, which workers number, and which take place in order.

    A meeting does not wait for a worker that joined late and has not come to one before, as it cannot know
    the number.

    Attributes:
        next: the number of the next meeting; all below are over.
        parts: number -> worker -> part.
        bound: the workers that meetings wait for, with their incarnations.
        since: the first meeting that waits for each of them, if not 0.
        ended: workers whose script has left its session.
    """

    next: Count = 0
    parts: dict[int, dict[int, MeetingPart]] = {}
    bound: dict[int, Count] = {}
    since: dict[int, Count] = {}
    ended: dict[int, EndedScript] = {}

    def bind(self, worker: int, incarnation: int, since: int = 0) -> None:
        """Let every meeting from number `since` on wait for this worker.

        It has been here from the beginning, or knows the number from a worker that was.
        """
        self.bound[worker] = incarnation
        self.since[worker] = since

    def skip_to(self, number: int) -> None:
        """Let meeting `number`, or a later one, be the next, unless a worker has already brought a part."""
        if not any(self.parts.values()):
            self.next = max(self.next, number)

    def is_bound(self, worker: int, incarnation: int) -> bool:
        """True if meetings wait for this incarnation."""
        return self.bound.get(worker) == incarnation

    def waits_in(self, worker: int, incarnation: int) -> bool:
        """True if this incarnation waits in a meeting for the others."""
        parts = (parts.get(worker) for parts in self.parts.values())
        return any(part is not None and part.incarnation == incarnation for part in parts)

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
        """Add a live worker's part to a meeting.

        The handle is released if the part is refused, a duplicate, or from an inconsistent place.

        Args:
            stand: the worker's place in its script.
        """
        taken = self.parts.get(number, {}).get(worker)
        others = [part for part in self.parts.get(number, {}).values() if part.what != what]
        if number < self.next and self.bound.get(worker) != incarnation:
            draft.refused = f"meeting {number} is over; worker {worker} comes late: the next is {self.next}"
        elif number > self.next + 1:
            draft.refused = f"worker {worker} comes to meeting {number}, while {self.next} is the next"
        elif others and taken is None:
            draft.refused = (
                f"worker {worker} comes to meeting {number} for {what!r}, others for {others[0].what!r}: "
                "all workers must make the same calls in the same order"
            )
        is_new = taken is None and number >= self.next
        if stand is not None and is_new:
            draft.mismatch = self._mismatch(worker, incarnation, number, stand)
        if draft.mismatch:
            draft.refused = ""
        if draft.refused or draft.mismatch or not is_new:
            draft.released.append(handle)
            return
        self.bound[worker] = incarnation
        self.parts.setdefault(number, {})[worker] = MeetingPart(incarnation, what, handle, stand)
        self.ended.pop(worker, None)

    def _mismatch(self, worker: int, incarnation: int, number: int, stand: WorkerStand) -> str:
        """Return the line for inconsistent places, or an empty string.

        A place is inconsistent with other places in this meeting, or with workers that have ended and never
        come.
        """
        here = [part.stand for part in self.parts.get(number, {}).values() if part.stand is not None]
        gone = [
            each.stand
            for other, each in self.ended.items()
            if other != worker and each.others.get(worker) == incarnation
        ]
        if not gone and are_consistent(each.stand for each in (*here, stand)):
            return ""
        return line_of([*here, *gone, stand])

    def end(self, worker: int, incarnation: int, stand: WorkerStand, draft: Draft) -> None:
        """Record that a worker's script has left its session and comes to no further meeting.

        Others that wait for the worker in a meeting, now or later, stand at places inconsistent with its end.
        """
        if self.bound.get(worker) != incarnation or self.since.get(worker, 0) > self.next:
            return
        waiting = [part.stand for part in self.parts.get(self.next, {}).values() if part.stand is not None]
        if waiting:
            draft.mismatch = line_of([*waiting, stand])
            return
        del self.bound[worker]
        others = {other: each for other, each in self.bound.items() if self.since.get(other, 0) <= self.next}
        self.ended[worker] = EndedScript(stand, others)

    def leave(self, worker: int, incarnation: int, draft: Draft) -> None:
        """Stop waiting for a fenced worker, and release its parts."""
        if self.bound.get(worker, incarnation + 1) <= incarnation:
            del self.bound[worker]
            self.since.pop(worker, None)
        for parts in self.parts.values():
            part = parts.get(worker)
            if part is not None and part.incarnation <= incarnation:
                draft.released.append(parts.pop(worker).handle)

    def advance(self, draft: Draft, roster: Roster) -> None:
        """Hold the meetings that are complete."""
        while self.parts.get(self.next) and roster.is_quorate() and not self._missing():
            parts = sorted(self.parts.pop(self.next).items())
            draft.met.append(
                Meeting(
                    number=self.next,
                    what=parts[0][1].what,
                    workers=[worker for worker, _ in parts],
                    incarnations=[part.incarnation for _, part in parts],
                    handles=[part.handle for _, part in parts],
                    stand=next((part.stand for _, part in parts if part.stand is not None), None),
                )
            )
            self.next += 1

    def _missing(self) -> list[int]:
        bound = {worker for worker in self.bound if self.since.get(worker, 0) <= self.next}
        return sorted(bound - set(self.parts[self.next]))

    def waits(self, begun: bool) -> Waits:
        """Return the workers needed for the next meeting, and the places of workers that have come.

        Args:
            begun: False before the run has begun, when nobody is needed.
        """
        parts = self.parts.get(self.next, {})
        needed = {worker for worker in self.bound if self.since.get(worker, 0) <= self.next}
        stands = {worker: part.stand for worker, part in parts.items() if part.stand is not None}
        return Waits(frozenset(needed if begun else ()), stands)

    def waiting_for(self) -> list[str]:
        """Return, in words, the workers that the next meeting waits for."""
        if not self.parts.get(self.next):
            return []
        what = next(iter(self.parts[self.next].values())).what
        return [f"worker {worker}, to come to {what!r}" for worker in self._missing()]
