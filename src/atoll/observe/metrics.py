"""The workers' steps and logged values, merged into one line per iteration."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import msgspec

from atoll.core.events import AnyEvent, Logged, StepDone

MOST_PENDING = 10_000  # iterations held for a worker that is far behind; then the oldest is written as it is


class Line(msgspec.Struct, frozen=True):
    """One line of metrics.jsonl: an iteration, all workers together.

    `samples` and `bytes_sent` are sums over the workers; `seconds` (since the step before) is the slowest
    worker's; `waiting` (seconds of it spent blocked on others) is their mean; `values` are what the script
    logged, weighted means over workers and calls, None where one of them was NaN or infinite.
    `time` is in seconds since the epoch.
    """

    iteration: int
    time: float
    samples: float
    seconds: float
    waiting: float
    bytes_sent: int
    values: dict[str, float | None]


class _Mean:
    """A weighted mean as it comes in; None once anything that is not finite came."""

    def __init__(self) -> None:
        self.total, self.weight, self.finite = 0.0, 0.0, True

    def add(self, value: float | None, weight: float) -> None:
        if value is None or not math.isfinite(value):
            self.finite = False
        elif weight > 0:
            self.total += value * weight
            self.weight += weight

    @property
    def value(self) -> float | None:
        return self.total / self.weight if self.finite and self.weight > 0 else None


class _Entry:
    """An iteration whose line is not written yet."""

    def __init__(self) -> None:
        self.steps: list[StepDone] = []
        self.values: dict[str, _Mean] = {}
        self.time = 0.0
        self.left: set[int] = set()  # workers that have gone on to another iteration

    def line(self, iteration: int) -> Line:
        return Line(
            iteration=iteration,
            time=self.time,
            samples=sum(step.samples for step in self.steps),
            seconds=max((step.seconds for step in self.steps), default=0.0),
            waiting=sum(step.waiting for step in self.steps) / max(1, len(self.steps)),
            bytes_sent=sum(step.bytes_sent for step in self.steps),
            values={name: mean.value for name, mean in self.values.items()},
        )


class Merger:
    """Merges the events of `workers` workers by iteration.

    A script logs an iteration's values before or after its step, so an iteration is whole when every worker
    has gone on to another one, or has ended. Iterations may start anywhere and may go back (a checkpoint was
    loaded): then the same number gets a second line.
    """

    def __init__(self, workers: int) -> None:
        self._workers = set(range(workers))
        self._at: dict[int, int] = {}  # worker -> the iteration that it is in
        self._ended: set[int] = set()
        self._pending: dict[int, _Entry] = {}

    def add(self, event: AnyEvent) -> None:
        """Take a step or a logged value; other events are none of its business."""
        if not isinstance(event, (StepDone, Logged)):
            return
        self._workers.add(event.worker)
        self._move(event.worker, event.iteration)
        entry = self._pending.setdefault(event.iteration, _Entry())
        entry.left.discard(event.worker)
        entry.time = max(entry.time, event.time)
        if isinstance(event, StepDone):
            entry.steps.append(event)
        else:
            for name, value in event.values.items():
                entry.values.setdefault(name, _Mean()).add(value, event.weight)

    def _move(self, worker: int, iteration: int) -> None:
        before = self._at.get(worker)
        self._at[worker] = iteration
        if before is not None and before != iteration and before in self._pending:
            self._pending[before].left.add(worker)

    def end(self, worker: int) -> None:
        """The worker will send no more."""
        self._ended.add(worker)

    def whole(self) -> Iterator[Line]:
        """Take out the lines of the iterations that are whole, in order."""
        for iteration in sorted(self._pending):
            if len(self._pending) > MOST_PENDING or self._is_whole(iteration):
                yield self._pending.pop(iteration).line(iteration)

    def _is_whole(self, iteration: int) -> bool:
        left = self._pending[iteration].left
        return all(
            worker in left or worker in self._ended or self._at.get(worker, iteration) > iteration
            for worker in self._workers
        )

    def rest(self) -> Iterator[Line]:
        """Take out everything that is left, whole or not, in order."""
        for iteration in sorted(self._pending):
            yield self._pending.pop(iteration).line(iteration)


_decoder = msgspec.json.Decoder(Line)


def read_lines(path: Path) -> list[Line]:
    """The lines of a metrics.jsonl; what is torn or not such a line is passed over."""
    lines: list[Line] = []
    if path.exists():
        for raw in path.read_bytes().split(b"\n"):
            try:
                lines.append(_decoder.decode(raw))
            except msgspec.DecodeError:
                continue  # the last line of a run that was killed
    return lines
