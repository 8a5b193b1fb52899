"""The samples of a run in iterations that count, each once, from the reports of its workers."""

from __future__ import annotations

import bisect
import math
from typing import Literal, TypeAlias

from atoll.core.events import AnyEvent, Finished, Gone, SamplesCounted, Started

# A worker's process joins the run, has reported all of its steps, or has ended.
Mark: TypeAlias = Literal["joined", "reported", "gone"]


class SampleRecords:
    """Finds a run's number of samples.

    Each worker reports its own samples with its steps. A worker that is killed has yet to report its steps of
    the last `FLUSH_SECONDS` (`observe/journal.py`). Therefore each worker also reports the count of all
    workers' samples, as far as it knows that count. Where a worker was killed, the count is the run's number.
    """

    def __init__(self) -> None:
        # By the time of the latest load of a checkpoint: the counted samples, as intervals in order that do
        # not touch, and the times up to which a worker knew every sample.
        self._counted: dict[float, list[tuple[float, float]]] = {}
        self._whole_at: dict[float, list[float]] = {}
        self._is_partial = False  # a worker could not know the count of all
        self._marks: list[tuple[float, int, Mark]] = []  # times and workers

    def take(self, event: AnyEvent) -> None:
        """Take an event of a worker; an event that tells nothing of counts or lives is ignored."""
        if isinstance(event, SamplesCounted):
            if event.end > event.begin:
                _add(self._counted.setdefault(event.loaded, []), event.begin, event.end)
            if event.whole_at:
                self._whole_at.setdefault(event.loaded, []).append(event.whole_at)
            self._is_partial |= event.partial
            if event.ends:
                self._mark(event, "reported")
        elif isinstance(event, Finished):
            self._mark(event, "reported")
        elif isinstance(event, Started):
            self._mark(event, "joined")
        elif isinstance(event, Gone):
            self._mark(event, "gone")

    def _mark(self, event: AnyEvent, mark: Mark) -> None:
        # A launcher's news come by another way than the worker's own, so not in order.
        bisect.insort(self._marks, (event.time, event.worker, mark), key=lambda each: each[0])

    def total(self, reported: float) -> tuple[float, bool]:
        """Return the number of samples, and False if there may be more.

        `reported` is the sum of all workers' reports of their own steps.
        """
        cuts, begins = self._cuts()
        if not cuts:
            return reported, True
        counted = sum(end - begin for each in self._counted.values() for begin, end in each)
        unknown = [load for load, time in cuts if not self._is_known(load, time, begins)]
        if self._is_partial or any(load not in self._counted for load in unknown):
            return max(reported, counted), False
        return counted, not unknown

    def _is_known(self, load: float, time: float, begins: list[float]) -> bool:
        """True if a worker knew every sample after `time`, before the run began again at one of `begins`."""
        until = min((begin for begin in begins if begin > time), default=math.inf)
        return any(time <= whole_at < until for whole_at in self._whole_at.get(load, ()))

    def _latest_load(self, time: float) -> float:
        """Return the time of the latest load before `time`; 0 if there is none."""
        return max((load for load in (*self._counted, *self._whole_at) if load <= time), default=0.0)

    def _cuts(self) -> tuple[list[tuple[float, float]], list[float]]:
        """Return the times by which processes of workers had ended that had steps left to report, each after
        the time of its latest load, and the times at which a worker joined when no process was left.
        """
        found: list[float] = []
        begins: list[float] = []
        has_more: dict[int, bool] = {}  # the living processes: True if a process has steps left to report
        for time, worker, mark in self._marks:
            if mark != "reported" and has_more.pop(worker, False):
                found.append(time)
            if mark == "joined":
                begins += [] if has_more else [time]
                has_more[worker] = True
            elif mark == "reported" and worker in has_more:
                has_more[worker] = False
        found += [math.inf] * sum(has_more.values())
        return [(self._latest_load(time), time) for time in found], begins


def _add(intervals: list[tuple[float, float]], begin: float, end: float) -> None:
    """Add the interval from `begin` to `end` to `intervals`, which are in order and do not touch."""
    first = bisect.bisect_left(intervals, begin, key=lambda each: each[1])
    last = bisect.bisect_right(intervals, end, key=lambda each: each[0])
    if first < last:
        begin, end = min(begin, intervals[first][0]), max(end, intervals[last - 1][1])
    intervals[first:last] = [(begin, end)]
