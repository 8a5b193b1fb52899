"""The samples of a run in iterations that count, each once, from what its workers report."""

from __future__ import annotations

import bisect
import math
from typing import Literal, TypeAlias

from atoll.core.events import AnyEvent, Counted, Finished, Gone, Started

# A worker's process joins the run, has reported all of its steps, and is no more.
Mark: TypeAlias = Literal["joined", "reported", "gone"]


class SampleRecords:
    """Finds a run's number of samples.

    Each worker reports its own samples with its steps. A worker that is killed has yet to report its steps of
    the last `FLUSH_SECONDS` (`observe/journal.py`). Therefore each worker also reports the count of all
    workers' samples, as far as it knows that count. Where a worker was killed, the count is the run's number.
    """

    def __init__(self) -> None:
        # By the time of the latest load of a checkpoint: the counted samples, as intervals in order that do
        # not touch, and the time of the latest report of a whole count.
        self._counted: dict[float, list[tuple[float, float]]] = {}
        self._whole: dict[float, float] = {}
        self._marks: dict[int, list[tuple[float, Mark]]] = {}  # by worker, with their times

    def take(self, event: AnyEvent) -> None:
        """Take an event of a worker; an event that tells nothing of counts or lives is ignored."""
        if isinstance(event, Counted):
            if event.end > event.begin:
                _add(self._counted.setdefault(event.loaded, []), event.begin, event.end)
            if event.whole:
                self._whole[event.loaded] = max(event.time, self._whole.get(event.loaded, -math.inf))
            if event.ends:
                self._mark(event, "reported")
        elif isinstance(event, Finished):
            self._mark(event, "reported")
        elif isinstance(event, Started):
            self._mark(event, "joined")
        elif isinstance(event, Gone):
            self._mark(event, "gone")

    def _mark(self, event: AnyEvent, mark: Mark) -> None:
        self._marks.setdefault(event.worker, []).append((event.time, mark))

    def total(self, reported: float) -> tuple[float, bool]:
        """Return the number of samples, and False if there may be more.

        `reported` is the sum of what all workers report of their own steps.
        """
        cuts = [(self._latest_load(time), time) for time in self._cuts()]
        if not cuts:
            return reported, True
        counted = sum(end - begin for each in self._counted.values() for begin, end in each)
        unknown = [load for load, time in cuts if time > self._whole.get(load, -math.inf)]
        if all(load in self._counted for load in unknown):
            return counted, not unknown
        return max(reported, counted), False

    def _latest_load(self, time: float) -> float:
        """Return the time of the latest load before `time`; 0 if there is none."""
        return max((load for load in (*self._counted, *self._whole) if load <= time), default=0.0)

    def _cuts(self) -> list[float]:
        """Return the times by which processes of workers had ended that had steps left to report."""
        found = []
        for marks in self._marks.values():
            has_more = False
            # A launcher's news come by another way than the worker's own, so not in order.
            for time, mark in sorted(marks, key=lambda each: each[0]):
                if has_more and mark != "reported":
                    found.append(time)
                has_more = mark == "joined"
            if has_more:
                found.append(math.inf)
        return found


def _add(intervals: list[tuple[float, float]], begin: float, end: float) -> None:
    """Add the interval from `begin` to `end` to `intervals`, which are in order and do not touch."""
    first = bisect.bisect_left(intervals, begin, key=lambda each: each[1])
    last = bisect.bisect_right(intervals, end, key=lambda each: each[0])
    if first < last:
        begin, end = min(begin, intervals[first][0]), max(end, intervals[last - 1][1])
    intervals[first:last] = [(begin, end)]
