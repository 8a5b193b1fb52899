"""The workers that the log counts with: waiting to enter, live, or fenced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from atoll.wire.messages import Count

_NAMED = 4  # workers at most that a line names


def fenced_out(fenced: Mapping[int, int], worker: int, incarnation: int) -> str:
    """Return why nothing is taken from this incarnation of a worker; empty if something is.

    `fenced` has the highest fenced incarnation of each worker.
    """
    if incarnation <= fenced.get(worker, 0):
        return f"worker {worker} of incarnation {incarnation} is fenced: it was given up, or it has left"
    return ""


class Roster(msgspec.Struct, forbid_unknown_fields=True):
    """The log's workers. A worker is in `live` or in `waiting`, at most in one of them.

    The run begins when `workers` workers are there at one time. A worker that was fenced before that may be
    started again, and is waited for. Once the run has begun, no worker is waited for.

    Attributes:
        live: worker -> incarnation.
        waiting: worker -> incarnation.
        fenced: the highest fenced incarnation of each worker.
    """

    workers: Count
    begun: bool = False
    live: dict[int, Count] = {}
    waiting: dict[int, Count] = {}
    fenced: dict[int, Count] = {}

    def refusal(self, worker: int, incarnation: int) -> str:
        """Return why nothing is taken from this incarnation; empty if something is."""
        return fenced_out(self.fenced, worker, incarnation)

    def incarnation(self, worker: int) -> int:
        """Return the incarnation of a worker that is live or waiting; 0 if it is neither."""
        return self.live.get(worker, 0) or self.waiting.get(worker, 0)

    def unknown(self, worker: int, incarnation: int) -> str:
        """Return why this incarnation may not commit now; empty if it is live."""
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
        """True if enough workers have come to begin the run, and always once it has begun."""
        return self.begun or len(self.waiting) >= self.workers

    def enter(self, only: Mapping[int, int] | None = None) -> list[tuple[int, int]]:
        """Make waiting workers live: all, or those in `only`.

        Returns their (worker, incarnation), in order of worker.
        """
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
        """Take nothing from an incarnation any more. False if that is not new."""
        if self.refusal(worker, incarnation):
            return False
        self.fenced[worker] = incarnation
        for group in (self.live, self.waiting):
            if group.get(worker, incarnation + 1) <= incarnation:
                del group[worker]
        return True

    def missing(self) -> str:
        """Return, in words, the workers that have yet to come before the run begins; empty if none has."""
        if self.is_quorate():
            return ""
        count = self.workers - len(self.waiting)
        absent = [worker for worker in range(self.workers) if worker not in self.waiting]
        named = len(absent) == count <= _NAMED  # else a worker of another number has come
        who = _names(absent) if named else f"{count} workers"
        there = f"{len(self.waiting)} of {self.workers} workers are there"
        gone = sorted(set(self.fenced) - set(self.waiting))
        if gone:
            there += f"; {_names(gone)} died or left before the run began"
        return f"{who} to join ({there})"


def _names(workers: Sequence[int]) -> str:
    more = f" and {len(workers) - _NAMED} more" if len(workers) > _NAMED else ""
    return " and ".join(f"worker {worker}" for worker in workers[:_NAMED]) + more
