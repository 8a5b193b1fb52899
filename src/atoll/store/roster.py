"""Which workers the log counts with: waiting to enter, live, or fenced."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from atoll.wire.messages import Count


class Roster(msgspec.Struct, forbid_unknown_fields=True):
    """`live` and `waiting` are worker -> incarnation; a worker stands in one of them at most. `fenced` has
    the highest incarnation of each worker that is fenced.

    The run begins when `workers` are there at the same time. One that was fenced before is not: it may be
    started again, and is waited for. Once the run has begun, nobody is.
    """

    workers: Count
    begun: bool = False
    live: dict[int, Count] = {}
    waiting: dict[int, Count] = {}
    fenced: dict[int, Count] = {}

    def refusal(self, worker: int, incarnation: int) -> str:
        """Why nothing is taken from this incarnation; empty where it may speak."""
        if incarnation <= self.fenced.get(worker, 0):
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
        """Note a new worker, which enters when the consistency lets it."""
        self.waiting[worker] = incarnation

    def is_quorate(self) -> bool:
        """True if enough workers have come to begin the run; always so once it has begun."""
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
        self.fenced[worker] = incarnation
        for group in (self.live, self.waiting):
            if group.get(worker, incarnation + 1) <= incarnation:
                del group[worker]
        return True

    def missing(self) -> str:
        """In words, who has yet to come before the run begins; empty once nobody has."""
        if self.is_quorate():
            return ""
        line = f"{self.workers - len(self.waiting)} of {self.workers} workers, to join"
        gone = sorted(set(self.fenced) - set(self.waiting))
        if gone:
            who = f"worker{'s' if len(gone) > 1 else ''} {', '.join(map(str, gone))}"
            line += f" (of those who came, {who} died or left before the run began)"
        return line
