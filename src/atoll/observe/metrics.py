"""The workers' steps and logged values, merged into one line per iteration."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from atoll.core.events import AnyEvent, Logged, StepDone

LATE_SECONDS = 0.5  # a session reads what it logged at the first step after so long
MOST_PENDING = 10_000  # iterations held for a worker that is far behind; then the oldest is written as it is


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of metrics.jsonl: an iteration, all workers together.

    `samples` and `bytes_sent` are sums over the workers; `seconds` (since the step before) is the slowest
    worker's; `waiting` (seconds of it spent blocked on others) is their mean; `values` are what the script
    logged, weighted means over workers and calls, None where one of them was NaN or infinite. `phases` are
    the parts of the waiting, where it has some, as means too. `time` is in seconds since the epoch.
    """

    iteration: int
    time: float
    samples: float
    seconds: float
    waiting: float
    bytes_sent: int
    values: dict[str, float | None]
    phases: dict[str, float] = {}


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
        self.steps: dict[int, StepDone] = {}  # by worker
        self.values: dict[str, _Mean] = {}
        self.time = 0.0  # of the last step; without one, of the last logged value

    def line(self, iteration: int) -> Line:
        steps = self.steps.values()
        return Line(
            iteration=iteration,
            time=self.time,
            samples=sum(step.samples for step in steps),
            seconds=max((step.seconds for step in steps), default=0.0),
            waiting=sum(step.waiting for step in steps) / max(1, len(steps)),
            bytes_sent=sum(step.bytes_sent for step in steps),
            values={name: mean.value for name, mean in self.values.items()},
            phases=_phases([step.phases for step in steps]),
        )


def _phases(of: Sequence[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for phases in of for name in phases)
    return {name: sum(phases.get(name, 0.0) for phases in of) / len(of) for name in names}


class Merger:
    """Merges the events of `workers` workers by iteration.

    A session reads logged tensors late, so that no accelerator is waited for: an iteration's values come at
    the latest with the first step that ends `LATE_SECONDS` or more after it. An iteration is whole when every
    worker has gone on from such a step, or has ended. Iterations may start anywhere and may go back (a
    checkpoint was loaded): then the same number gets a second line.
    """

    def __init__(self, workers: int) -> None:
        self._workers = set(range(workers))
        self._latest: dict[int, StepDone] = {}  # each worker's latest step, and the time of the one before
        self._before: dict[int, float] = {}
        self._ended: set[int] = set()
        self._pending: dict[int, _Entry] = {}

    def add(self, event: AnyEvent) -> list[Line]:
        """Take a step or a logged value; other events are none of its business.

        Returns a line only when a worker makes an iteration again before the first was whole.
        """
        if not isinstance(event, (StepDone, Logged)):
            return []
        self._workers.add(event.worker)
        again: list[Line] = []
        if isinstance(event, StepDone):
            pending = self._pending.get(event.iteration)
            if pending is not None and event.worker in pending.steps:
                again.append(self._pending.pop(event.iteration).line(event.iteration))
            self._step(event)
        else:
            entry = self._entry(event.iteration)
            for name, value in event.values.items():
                entry.values.setdefault(name, _Mean()).add(value, event.weight)
            if not entry.steps:
                entry.time = max(entry.time, event.time)
        return again

    def _step(self, event: StepDone) -> None:
        entry = self._entry(event.iteration)
        entry.time = max(entry.time, event.time) if entry.steps else event.time
        entry.steps[event.worker] = event
        if event.worker in self._latest:
            self._before[event.worker] = self._latest[event.worker].time
        self._latest[event.worker] = event

    def _entry(self, iteration: int) -> _Entry:
        return self._pending.setdefault(iteration, _Entry())

    def end(self, worker: int) -> None:
        """The worker will send no more."""
        self._ended.add(worker)

    def newest(self) -> dict[str, float | None]:
        """The values of the iterations that are not whole yet, the newest of each name."""
        values: dict[str, float | None] = {}
        for iteration in sorted(self._pending):
            values.update({name: mean.value for name, mean in self._pending[iteration].values.items()})
        return values

    def whole(self) -> Iterator[Line]:
        """Take out the lines of the iterations that are whole, in order."""
        for iteration in sorted(self._pending):
            if len(self._pending) > MOST_PENDING or self._is_whole(iteration):
                yield self._pending.pop(iteration).line(iteration)

    def _is_whole(self, iteration: int) -> bool:
        entry = self._pending[iteration]
        return all(
            worker in self._ended or self._is_past(worker, iteration, entry) for worker in self._workers
        )

    def _is_past(self, worker: int, iteration: int, entry: _Entry) -> bool:
        """Whether everything that the worker had to say of the iteration has come."""
        if worker not in self._before:
            return False
        if worker not in entry.steps and self._latest[worker].iteration <= iteration:
            return False  # it is behind
        done = entry.steps[worker].time if worker in entry.steps else entry.time
        return self._before[worker] >= done + LATE_SECONDS

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
