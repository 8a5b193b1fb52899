"""Which workers the log counts with: waiting to enter, live, or fenced."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from atoll.wire.messages import Count


class RosterState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that a Roster remembers."""

    workers: Count
    begun: bool
    live: dict[int, Count]
    waiting: dict[int, Count]
    fenced: dict[int, Count]


class Roster:
    """`live` and `waiting` are worker -> incarnation; a worker stands in one of them at most.

    The run begins when `workers` are there at the same time. One that was fenced before is not: it may be
    started again, and is waited for. Once the run has begun, nobody is.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.begun = False
        self.live: dict[int, int] = {}
        self.waiting: dict[int, int] = {}
        self._fenced: dict[int, int] = {}  # worker -> the highest incarnation that is fenced

    def state(self) -> RosterState:
        """For a journal; `restored` makes the same roster of it."""
        return RosterState(
            workers=self.workers,
            begun=self.begun,
            live=dict(self.live),
            waiting=dict(self.waiting),
            fenced=dict(self._fenced),
        )

    @classmethod
    def restored(cls, state: RosterState) -> Roster:
        roster = cls(state.workers)
        roster.begun, roster._fenced = state.begun, dict(state.fenced)
        roster.live, roster.waiting = dict(state.live), dict(state.waiting)
        return roster

    def refusal(self, worker: int, incarnation: int) -> str:
        """Why nothing is taken from this incarnation; empty where it may speak."""
        if incarnation <= self._fenced.get(worker, 0):
            return f"worker {worker} of incarnation {incarnation} is fenced: it was given up, or it has left"
        return ""

    def incarnation(self, worker: int) -> int:
        """The incarnation that is live or waiting; 0 where there is none."""
        return self.live.get(worker, 0) or self.waiting.get(worker, 0)

    def unknown(self, worker: int, incarnation: int) -> str:
        """Why this incarnation may not commit now; empty where it is live."""
        refusal = self.refusal(worker, incarnation)
        if refusal or self.live.get(worker) == incarnation:
            return refusal
        if self.waiting.get(worker) == incarnation:
            return f"worker {worker} waits to enter, and has no iteration yet"
        return f"worker {worker} of incarnation {incarnation} has not joined"

    def wait(self, worker: int, incarnation: int) -> None:
        """It has come, and enters when the consistency lets it."""
        self.waiting[worker] = incarnation

    def is_quorate(self) -> bool:
        """Whether as many are there as the run begins with; always so once it has begun."""
        return self.begun or len(self.waiting) >= self.workers

    def enter(self, only: Mapping[int, int] | None = None) -> list[tuple[int, int]]:
        """All who wait become live, or those of them in `only`; (worker, incarnation) in order of worker."""
        entering = sorted(
            (worker, incarnation)
            for worker, incarnation in self.waiting.items()
            if only is None or only.get(worker) == incarnation
        )
        self.live.update(entering)
        for worker, _ in entering:
            del self.waiting[worker]
        self.begun = self.begun or bool(entering)
        return entering

    def fence(self, worker: int, incarnation: int) -> bool:
        """Take nothing from it any more; False where that was so before."""
        if self.refusal(worker, incarnation):
            return False
        self._fenced[worker] = incarnation
        for group in (self.live, self.waiting):
            if group.get(worker, incarnation + 1) <= incarnation:
                del group[worker]
        return True

    def missing(self) -> str:
        """In words, who has yet to come before the run begins; empty once nobody has."""
        if self.is_quorate():
            return ""
        line = f"{self.workers - len(self.waiting)} of {self.workers} workers, to join"
        gone = sorted(set(self._fenced) - set(self.waiting))
        if gone:
            who = f"worker{'s' if len(gone) > 1 else ''} {', '.join(map(str, gone))}"
            line += f" (of those who came, {who} died or left before the run began)"
        return line
