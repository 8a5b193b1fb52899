"""Merging of the workers' steps and logged values into one line per iteration."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path

import msgspec

from atoll.core.events import AnyEvent, Logged, StepDone

LATE_SECONDS = 0.5  # a session reads its logged tensors at the first step after this time
# Limits of what waits for a worker that is far behind or gone; beyond them the oldest is written unfinished.
MOST_PENDING = 10_000  # iterations
MOST_NUMBERS = 100_000  # steps and logged values of these iterations, for each worker and each name
_ROOM = 0.95  # of a limit, kept after an overflow, so that not every new iteration sorts all
_PIECE = 2**18  # bytes of metrics.jsonl in one read
_LONGEST_LINE = 2**24  # bytes; longer lines are not Atoll's


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of metrics.jsonl: an iteration, all workers together.

    Attributes:
        iteration: number of the iteration.
        time: time of the last worker's step, in seconds since the epoch.
        samples: sum over the workers.
        seconds: time since the previous step, of the slowest worker.
        waiting: seconds of that spent blocked on others, mean over the workers.
        bytes_sent: sum over the workers.
        values: logged values, as weighted means over workers and calls; None if one was NaN or infinite.
        phases: parts of the waiting, if it has parts, as means over the workers.
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
    """A running weighted mean; None after a value that is not finite."""

    __slots__ = ("finite", "total", "weight")

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

    __slots__ = (
        "bytes_sent",
        "ends",
        "phases",
        "samples",
        "seconds",
        "time",
        "values",
        "waiting",
        "waits_for",
    )

    def __init__(self) -> None:
        self.ends: dict[int, float] = {}  # worker -> time at which its step ended
        self.samples, self.seconds, self.waiting, self.bytes_sent = 0.0, 0.0, 0.0, 0
        self.phases: dict[str, float] = {}  # sums over the workers
        self.values: dict[str, _Mean] = {}
        self.time = 0.0  # of the last step; without a step, of the last logged value
        self.waits_for: int | None = None  # a worker that may still send events of the iteration

    @property
    def numbers(self) -> int:
        return len(self.ends) + len(self.values)

    def add(self, step: StepDone) -> None:
        self.time = max(self.time, step.time) if self.ends else step.time
        self.ends[step.worker] = step.time
        self.samples += step.samples
        self.seconds = max(self.seconds, step.seconds)
        self.waiting += step.waiting
        self.bytes_sent += step.bytes_sent
        for name, seconds in step.phases.items():
            self.phases[name] = self.phases.get(name, 0.0) + seconds

    def line(self, iteration: int) -> Line:
        workers = max(1, len(self.ends))
        return Line(
            iteration=iteration,
            time=self.time,
            samples=self.samples,
            seconds=self.seconds,
            waiting=self.waiting / workers,
            bytes_sent=self.bytes_sent,
            values={name: mean.value for name, mean in self.values.items()},
            phases={name: total / workers for name, total in self.phases.items()},
        )


class Merger:
    """Merges the events of `workers` workers by iteration.

    A session reads logged tensors late, to avoid a wait for the accelerator: an iteration's values come at
    the latest with the first step that ends `LATE_SECONDS` or more after the iteration. An iteration is whole
    when every worker has gone on from such a step, or has ended. Iterations may start anywhere and may go
    back when a checkpoint is loaded; the number then gets a second line.

    The cost of `whole` is proportional to the news since the last call: an iteration that waits for a worker
    is checked again only after news of that worker or that iteration.
    """

    def __init__(self, workers: int) -> None:
        self._workers = set(range(workers))
        self._latest: dict[int, tuple[int, float]] = {}  # each worker's latest step: iteration, time
        self._before: dict[int, float] = {}  # time of each worker's step before the latest
        self._ended: dict[int, float] = {}  # worker -> time of its end
        self._pending: dict[int, _Entry] = {}
        self._numbers = 0  # in all of `_pending`
        self._touched: set[int] = set()  # iterations with news since the last `whole`
        self._moved: set[int] = set()  # workers with news since the last `whole`
        self._waiting: dict[int, set[int]] = {}  # worker -> the iterations that wait for it
        self._newest: dict[str, tuple[int, _Mean]] = {}  # name -> its latest pending iteration and value
        self._names: dict[str, str] = {}  # one copy of each name, to save memory

    def add(self, event: AnyEvent) -> list[Line]:
        """Take a step or a logged value; other events are ignored.

        Returns a line only if a worker makes an iteration again before the first one was whole.
        """
        if not isinstance(event, (StepDone, Logged)):
            return []
        self._workers.add(event.worker)
        again: list[Line] = []
        if isinstance(event, StepDone):
            pending = self._pending.get(event.iteration)
            if pending is not None and event.worker in pending.ends:
                again.append(self._take(event.iteration))
            self._step(event)
        else:
            self._log(event)
        return again

    def _step(self, event: StepDone) -> None:
        entry = self._entry(event.iteration)
        entry.add(event)
        self._numbers += 1
        if event.worker in self._latest:
            self._before[event.worker] = self._latest[event.worker][1]
        self._latest[event.worker] = event.iteration, event.time
        self._moved.add(event.worker)
        if event.time > self._ended.get(event.worker, math.inf):
            del self._ended[event.worker]  # the worker was started again

    def _log(self, event: Logged) -> None:
        entry = self._entry(event.iteration)
        for name, value in event.values.items():
            mean = entry.values.get(name)
            if mean is None:
                name = self._one_copy(name)
                mean = entry.values[name] = _Mean()
                self._numbers += 1
                if name not in self._newest or self._newest[name][0] <= event.iteration:
                    self._newest[name] = event.iteration, mean
            mean.add(value, event.weight)
        if not entry.ends:
            entry.time = max(entry.time, event.time)

    def _one_copy(self, name: str) -> str:
        if len(self._names) > MOST_NUMBERS:  # names that never come again
            self._names.clear()
        return self._names.setdefault(name, name)

    def _entry(self, iteration: int) -> _Entry:
        self._touched.add(iteration)
        return self._pending.setdefault(iteration, _Entry())

    def _take(self, iteration: int) -> Line:
        """Remove a pending iteration, and return its line."""
        entry = self._pending.pop(iteration)
        self._numbers -= entry.numbers
        if entry.waits_for is not None:
            self._waiting[entry.waits_for].discard(iteration)
        for name, mean in entry.values.items():
            if name in self._newest and self._newest[name][1] is mean:
                del self._newest[name]
        return entry.line(iteration)

    def end(self, worker: int, time: float) -> None:
        """Note that the worker ended at `time`. It sends no later events, unless it is started again."""
        self._ended[worker] = time
        self._moved.add(worker)

    def newest(self) -> dict[str, float | None]:
        """Return the newest value of each name, from iterations that are not whole yet."""
        return {name: mean.value for name, (_, mean) in self._newest.items()}

    def whole(self) -> Iterator[Line]:
        """Remove whole iterations and yield their lines, in order; the oldest too if too many wait."""
        looked = self._touched
        for worker in self._moved:
            looked |= self._waiting.pop(worker, set())
        self._touched, self._moved = set(), set()
        whole = {
            iteration for iteration in looked if iteration in self._pending and self._is_whole(iteration)
        }
        for iteration in sorted(whole | self._overflow(whole)):
            yield self._take(iteration)

    def _is_whole(self, iteration: int) -> bool:
        entry = self._pending[iteration]
        if entry.waits_for in self._waiting:
            self._waiting[entry.waits_for].discard(iteration)
        entry.waits_for = next(
            (each for each in self._workers if not self._is_past(each, iteration, entry)), None
        )
        if entry.waits_for is not None:
            self._waiting.setdefault(entry.waits_for, set()).add(iteration)
        return entry.waits_for is None

    def _is_past(self, worker: int, iteration: int, entry: _Entry) -> bool:
        """True if all events of the worker on the iteration have come."""
        if worker in self._ended:
            return True
        if worker not in self._before:
            return False
        if worker not in entry.ends and self._latest[worker][0] <= iteration:
            return False  # the worker has not come to this iteration
        return self._before[worker] >= entry.ends.get(worker, entry.time) + LATE_SECONDS

    def _overflow(self, whole: set[int]) -> set[int]:
        """Return the oldest pending iterations that are not `whole`, if more wait than are kept."""
        count = len(self._pending) - len(whole)
        numbers = self._numbers - sum(self._pending[iteration].numbers for iteration in whole)
        if count <= MOST_PENDING and numbers <= MOST_NUMBERS:
            return set()
        oldest: set[int] = set()
        for iteration in sorted(self._pending.keys() - whole):
            if count <= _ROOM * MOST_PENDING and numbers <= _ROOM * MOST_NUMBERS:
                break
            oldest.add(iteration)
            count, numbers = count - 1, numbers - self._pending[iteration].numbers
        return oldest

    def rest(self) -> Iterator[Line]:
        """Remove all pending iterations, whole or not, and yield their lines in order."""
        for iteration in sorted(self._pending):
            yield self._take(iteration)


_decoder = msgspec.json.Decoder(Line)


def read_lines(path: Path) -> Iterator[Line]:
    """Yield the lines of a metrics.jsonl; torn and foreign lines are skipped."""
    if path.exists():
        with path.open("rb") as file:
            rest = b""
            while data := file.read(_PIECE):
                *lines, rest = (rest + data).split(b"\n")
                yield from _decoded(lines)
                rest = rest if len(rest) <= _LONGEST_LINE else b""
            yield from _decoded([rest])


def _decoded(lines: list[bytes]) -> Iterator[Line]:
    for raw in lines:
        with contextlib.suppress(msgspec.DecodeError):  # the last line of a run that was killed
            yield _decoder.decode(raw)
