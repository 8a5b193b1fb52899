"""Gatherings of all live workers: everyone brings a part, everyone gets all parts."""

from __future__ import annotations

import msgspec

from atoll.store.outcomes import Draft, Meeting
from atoll.store.roster import Roster
from atoll.wire.messages import Count, Text


class MeetingPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a worker has brought to a meeting."""

    incarnation: Count
    what: Text
    handle: Count


class MeetingsState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that Meetings remember."""

    next: Count
    parts: dict[int, dict[int, MeetingPart]]
    bound: dict[int, Count]
    since: dict[int, Count]


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

    def state(self) -> MeetingsState:
        """For a journal; `restored` makes the same of it."""
        parts = {number: dict(each) for number, each in self._parts.items()}
        return MeetingsState(next=self._next, parts=parts, bound=dict(self._bound), since=dict(self._since))

    @classmethod
    def restored(cls, state: MeetingsState, roster: Roster) -> Meetings:
        meetings = cls(roster)
        meetings._next, meetings._bound = state.next, dict(state.bound)
        meetings._since = dict(state.since)
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

    def meet(self, worker: int, incarnation: int, number: int, what: str, handle: int, draft: Draft) -> None:
        """A live worker's part. Refused, or come twice: its handle is released."""
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
        if draft.refused or taken is not None or number < self._next:
            draft.released.append(handle)
            return
        self._bound[worker] = incarnation
        self._parts.setdefault(number, {})[worker] = MeetingPart(incarnation, what, handle)

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
                )
            )
            self._next += 1

    def _is_complete(self) -> bool:
        return self._roster.is_quorate() and not self._missing()

    def _missing(self) -> list[int]:
        bound = {worker for worker in self._bound if self._since.get(worker, 0) <= self._next}
        return sorted(bound - set(self._parts[self._next]))

    def waiting_for(self) -> list[str]:
        """Who is waited for, in words."""
        if not self._parts.get(self._next):
            return []
        what = next(iter(self._parts[self._next].values())).what
        return [f"worker {worker}, to come to {what!r}" for worker in self._missing()]
