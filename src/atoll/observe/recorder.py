"""The recorder of a run: reads the journals, writes metrics.jsonl, and makes the summary at the end."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec

from atoll.core.appending import Appender
from atoll.core.characters import encoded
from atoll.core.errors import UserError
from atoll.core.events import (
    AnyEvent,
    Decided,
    Ended,
    Expected,
    Failed,
    Finished,
    Gone,
    Joining,
    LinkSeen,
    Lost,
    Regrouped,
    SamplesCounted,
    Saved,
    SharesChosen,
    Skipped,
    Started,
    StepDone,
    Warned,
)
from atoll.core.runclock import record_time
from atoll.core.units import format_bytes
from atoll.observe.groups import GroupRecords
from atoll.observe.journal import JournalReader
from atoll.observe.links import LinkRecords
from atoll.observe.memory import MemoryRecords
from atoll.observe.metrics import Line, Merger
from atoll.observe.nodes import NodeRecords
from atoll.observe.rundir import RunDirectory
from atoll.observe.samples import SampleRecords
from atoll.observe.summary import Summary, WorkerTotals, write_summary

MOST_EVENTS = 500  # events in the summary: a run that skips every step must not fill the disk
MOST_NAMES = 10_000  # logged names with a last value in the summary
RATE_SECONDS = 10.0  # span of step time over which rates are measured
_RATE_BINS = 20  # bins in that span
_LOOK_BYTES = 2**22  # bytes of all journals in one look; the next look goes on from there
_LEAST_LOOK_BYTES = 2**16  # bytes of each journal in one look, at least
_KEPT = (Decided, Skipped, Warned, Failed, Saved)


class Writer(Protocol):
    """A receiver of each merged line."""

    def write(self, line: Line) -> None: ...

    def close(self) -> None: ...


@dataclass
class Status:
    """The status of a run, for a display. Rates are of the last `RATE_SECONDS`, counts of the whole run."""

    workers: int
    started: int = 0  # workers that have joined
    strategy: str = ""
    iteration: int = 0  # the latest step's
    expected: int | None = None  # the iteration at which the run will end, if known
    samples: float = 0.0
    bytes_sent: int = 0
    samples_per_second: float = 0.0
    steps_per_second: float = 0.0
    bytes_per_second: float = 0.0
    waiting_share: float = 0.0
    parts: list[int] = field(default_factory=list)  # each worker's samples of a global batch, if chosen
    last: dict[str, float | None] = field(default_factory=dict)

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds to the end; None if the number of steps or the rate is unknown."""
        if self.expected is None or self.steps_per_second <= 0:
            return None
        return max(0, self.expected - self.iteration) / self.steps_per_second


@dataclass
class _Bin:
    """The steps of a worker that ended within `RATE_SECONDS / _RATE_BINS` seconds from `begin` on."""

    begin: float
    steps: int = 0
    seconds: float = 0.0
    samples: float = 0.0
    bytes_sent: int = 0
    waiting: float = 0.0


class _Rates:
    """One worker's rates over the last `RATE_SECONDS`; time between steps does not count.

    Steps are added up in bins, so that memory and time do not depend on the worker's speed.
    """

    def __init__(self) -> None:
        self._bins: deque[_Bin] = deque()

    def add(self, step: StepDone) -> None:
        if not self._bins or not 0.0 <= step.time - self._bins[-1].begin < RATE_SECONDS / _RATE_BINS:
            self._bins.append(_Bin(step.time))
        last = self._bins[-1]
        last.steps += 1
        last.seconds += step.seconds
        last.samples += step.samples
        last.bytes_sent += step.bytes_sent
        last.waiting += step.waiting
        # After the wall clock was set back, bins must not pile up until it has caught up.
        while len(self._bins) > 2 and not 0.0 <= step.time - self._bins[0].begin <= RATE_SECONDS:
            self._bins.popleft()

    def add_to(self, status: Status) -> None:
        busy = sum(each.seconds for each in self._bins)
        if busy > 0:
            status.samples_per_second += sum(each.samples for each in self._bins) / busy
            status.bytes_per_second += sum(each.bytes_sent for each in self._bins) / busy
            steps = sum(each.steps for each in self._bins)
            status.steps_per_second = max(status.steps_per_second, steps / busy)
            status.waiting_share += sum(each.waiting for each in self._bins) / busy / status.workers


class _Lines:
    """Appends whole lines to a new file; on a full disk lines are lost and counted."""

    def __init__(self, path: Path) -> None:
        self._path, self._waiting = path, list[bytes]()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC
        self._lines = Appender(partial(os.open, path, flags, 0o644))
        self.lost = 0

    def add(self, line: bytes) -> None:
        self._waiting.append(line + b"\n")

    def flush(self) -> str:
        """Write the waiting lines; returns a warning at the first loss, else an empty text."""
        waiting, self._waiting = self._waiting, []
        written, trouble = self._lines.write(waiting)
        left, is_first = len(waiting) - written, not self.lost
        self.lost += left
        missing = f"{self._path}: {trouble}; the run goes on, and lines are missing there"
        return missing if left and is_first else ""

    def close(self) -> str:
        """Write the waiting lines, and close the file; returns a text on the lost lines, if any."""
        self.flush()
        self._lines.close()
        return f"{self._path}: {self.lost} lines were lost" if self.lost else ""


class Recorder:
    """Merges the journals of `workers` workers in `run`.

    Call `poll` as often as a display wants news, and `close` once. Each merged line goes to metrics.jsonl and
    to `writers`.
    """

    def __init__(
        self,
        run: RunDirectory,
        workers: int,
        strategy: str,
        writers: Sequence[Writer] = (),
        heard: Callable[[AnyEvent], None] | None = None,
    ) -> None:
        """`heard` is called with each event that is read."""
        self._heard = heard
        self.run = run
        self.failures: list[Failed] = []
        self._workers, self._strategy, self._groups = workers, strategy, 1
        self._writers = list(writers)
        self._readers = {worker: JournalReader(run.journal(worker)) for worker in range(workers)}
        self._grouped = GroupRecords()
        self.links = LinkRecords()
        self._nodes = NodeRecords()
        self._memory = MemoryRecords()
        self._samples = SampleRecords()
        self._merger = Merger(workers)
        self._totals = {worker: WorkerTotals(worker) for worker in range(workers)}
        self._rates = {worker: _Rates() for worker in range(workers)}
        self._iteration = self._furthest = 0
        self._expected: int | None = None
        self._parts: list[dict[int, int]] = []  # the latest choice of each group, by worker
        self._started: set[int] = set()
        self._first, self._end = math.inf, -math.inf
        self._last: dict[str, float | None] = {}
        self._has_more_names = False  # more logged names than `_last` holds
        self._events: list[AnyEvent] = []
        self._seen: set[bytes] = set()
        self._dropped = 0
        self._metrics = _Lines(run.metrics)
        self._own: list[AnyEvent] = []  # events of the recorder and its caller, for the next `poll`
        self._words: list[AnyEvent] = []  # events given to `hear` since the last look
        self._has_read = False  # the last look read new bytes
        self._lost: dict[int, Lost] = {}  # by worker: sums of events that could not be written
        self._missing: list[str] = []  # the run's own records that could not be written

    def poll(self, last: bool = False) -> list[AnyEvent]:
        """Read new events; returns those to show the user, each once, however many workers sent it.

        Reads at most `_LOOK_BYTES`, to bound memory and time; with `last`, repeats until nothing is left.
        """
        news = self._look()
        while last and self._has_read:
            news += self._look()
        return news

    def _look(self) -> list[AnyEvent]:
        most = max(_LEAST_LOOK_BYTES, _LOOK_BYTES // max(1, len(self._readers)))
        before = self._bytes_read()
        fresh, self._words = self._words, []
        fresh += [event for reader in self._readers.values() for event in reader.read(most)]
        self._has_read = self._bytes_read() > before
        news: list[AnyEvent] = []
        for event in sorted(fresh, key=lambda event: event.time):
            self._take(event)
            if isinstance(event, _KEPT) and self._keep(event):
                news.append(event)
        for line in self._merger.whole():
            self._write(line)
        if line_lost := self._metrics.flush():
            self.warn(line_lost)
        own, self._own = self._own, []
        return news + own

    def hear(self, event: AnyEvent) -> None:
        """Take an event that has come by another way than the worker's journal, which may be on a full disk.

        A failure that the journal has too counts once.
        """
        failures = ((failure.worker, failure.time) for failure in self.failures)
        if not isinstance(event, Failed) or (event.worker, event.time) not in failures:
            self._words.append(event)

    def _bytes_read(self) -> int:
        return sum(reader.read_bytes for reader in self._readers.values())

    def warn(self, message: str) -> None:
        """Add a warning that no worker gave to the summary's events; the next `poll` returns it."""
        self.note(Warned(time=record_time(), worker=-1, message=message))

    def note(self, event: AnyEvent) -> None:
        """Add an event that no worker gave to the summary's events; the next `poll` returns it.

        A repeated event is added again.
        """
        self._put(event)
        self._own.append(event)

    def status(self) -> Status:
        status = Status(
            workers=self._workers,
            started=len(self._started),
            strategy=self._strategy,
            iteration=self._iteration,
            # A worker's expectation is an estimate: a faster worker is dealt more samples.
            expected=self._expected if self._furthest <= (self._expected or 0) else None,
            samples=sum(totals.samples for totals in self._totals.values()),
            bytes_sent=sum(totals.bytes_sent for totals in self._totals.values()),
            parts=[each[worker] for each in self._parts for worker in sorted(each)],
            last={**self._last, **self._merger.newest()},
        )
        for rates in self._rates.values():
            rates.add_to(status)
        return status

    summary: Summary  # set by `close`

    def close(self) -> Summary:
        """Read the rest, write the last lines and summary.json, and close the writers.

        Raises nothing: `missing` tells of records that cannot be written.
        """
        self.poll(last=True)
        for line in self._merger.rest():
            self._write(line)
        if lines_lost := self._metrics.close():
            self.warn(lines_lost)
            self._missing.insert(0, f"{self._metrics.lost} lines of {self.run.metrics.name}")
        for writer in list(self._writers):
            self._try(writer, writer.close)
        for reader in self._readers.values():
            if reader.unreadable:
                self.warn(f"{reader.path}: {reader.unreadable} lines hold no event and were passed over")
        self.summary = self._summary()
        try:
            write_summary(self.summary, self.run.summary)
        except UserError as error:
            self._missing.insert(0, self.run.summary.name)
            self.warn(str(error))
        return self.summary

    def missing(self) -> str:
        """Return a line on records that could not be written; empty if all were."""
        each = [
            f"{lost.events} events of worker {worker}" for worker, lost in self._lost.items() if lost.events
        ]
        each += [
            f"{format_bytes(lost.printed)} that worker {worker} printed"
            for worker, lost in self._lost.items()
            if lost.printed
        ]
        what = [*self._missing, *each]
        return (
            f"missing in {self.run.path}, because it could not be written: {', '.join(what)}" if what else ""
        )

    def _take(self, event: AnyEvent) -> None:
        if self._heard is not None:
            self._heard(event)
        self._samples.take(event)
        # These tell of a process before and after its part in the run, or of earlier steps:
        if isinstance(event, (Joining, Ended, Gone, SamplesCounted)):
            if isinstance(event, Gone):
                self._merger.end(event.worker, event.time)
            return
        self._first, self._end = min(self._first, event.time), max(self._end, event.time)
        self._grouped.take(event)
        self._nodes.take(event)
        self._memory.take(event)
        for line in self._merger.add(event):
            self._write(line)
        totals = self._totals.setdefault(event.worker, WorkerTotals(event.worker))
        if isinstance(event, StepDone):
            self._iteration, self._furthest = event.iteration, max(self._furthest, event.iteration)
            self._rates.setdefault(event.worker, _Rates()).add(event)
            _add(totals, event, 1)
        elif isinstance(event, Started):
            self._started.add(event.worker)
            self._strategy, self._groups, totals.device = event.strategy, event.groups, event.device
        elif isinstance(event, SharesChosen):
            kept = [each for each in self._parts if each.keys().isdisjoint(event.parts)]
            self._parts = sorted([*kept, event.parts], key=min)
            for worker, part in event.parts.items():
                each = self._totals.setdefault(worker, WorkerTotals(worker))
                each.part, each.speed = part, event.speeds.get(worker, 0.0)
        elif isinstance(event, Regrouped):  # its members' former groups are no more
            there = set(event.workers)
            self._parts = [each for each in self._parts if each.keys() == there or there.isdisjoint(each)]
        elif isinstance(event, LinkSeen):
            self.links.take(event)
        elif isinstance(event, Expected):
            self._expected = event.steps
        elif isinstance(event, Lost):
            _add(totals, event, event.steps)  # whose own events could not be written
            before = self._lost.get(event.worker, Lost(time=event.time, worker=event.worker))
            self._lost[event.worker] = msgspec.structs.replace(
                before, events=before.events + event.events, printed=before.printed + event.printed
            )
        elif isinstance(event, (Finished, Failed)):
            self._merger.end(event.worker, event.time)
            if isinstance(event, Failed):
                self.failures.append(event)

    def _keep(self, event: AnyEvent) -> bool:
        """Keep the event for the summary, once; a decision that every worker reports is one event."""
        key = msgspec.json.encode(
            {**_plain(event), "time": 0, "worker": event.worker if isinstance(event, Failed) else 0}
        )
        if key in self._seen:
            return False
        if not self._put(event):
            return False
        self._seen.add(key)
        return True

    def _put(self, event: AnyEvent) -> bool:
        """Add the event to the summary if there is room; returns False if there is none."""
        if len(self._events) >= MOST_EVENTS and not isinstance(event, Failed):
            self._dropped += 1
            return False
        self._events.append(event)
        return True

    def _write(self, line: Line) -> None:
        self._metrics.add(msgspec.json.encode(line))
        for name, value in line.values.items():
            if name in self._last or len(self._last) < MOST_NAMES:
                self._last[name] = value
            elif not self._has_more_names:
                self._has_more_names = True
                self.warn(
                    f"more than {MOST_NAMES} names were logged: the summary has the first ones' last values; "
                    f"{self.run.metrics} has all"
                )
        for writer in list(self._writers):
            self._try(writer, partial(writer.write, line))

    def _try(self, writer: Writer, act: Callable[[], None]) -> None:
        """Call `act`, and drop the writer if its disk is full."""
        try:
            act()
        except OSError as error:
            self._writers.remove(writer)
            self._missing.append(f"the rest of {type(writer).__name__}'s")
            self.warn(f"{type(writer).__name__}: {error.strerror or error}; it gets no more lines")

    def _steps(self) -> int:
        return max((totals.steps for totals in self._totals.values()), default=0)

    def _summary(self) -> Summary:
        samples, is_exact = self._samples.total(sum(totals.samples for totals in self._totals.values()))
        each = [self._totals[worker] for worker in sorted(self._totals)]
        events = [_plain(event) for event in self._events]
        groupings, each_group = self._grouped.shown(self._first)
        if self._dropped:
            events.append(
                {"event": "warned", "message": f"{self._dropped} more events are in {self.run.workers}"}
            )
        return Summary(
            strategy=self._strategy,
            workers=self._workers,
            groups=self._groups,
            steps=self._steps(),
            samples=samples,
            samples_exact=is_exact,
            seconds=max(0.0, self._end - self._first) if each and self._end > -math.inf else 0.0,
            bytes_sent=sum(totals.bytes_sent for totals in each),
            seconds_waiting=sum(totals.waiting for totals in each) / max(1, len(each)),
            last=self._last,
            events=events,
            each_worker=each,
            groupings=groupings,
            each_group=each_group,
            links=self.links.shown(),
            nodes=self._nodes.shown(),
            memory=self._memory.shown(),
        )


def _plain(event: AnyEvent) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(event)
    # A path in the event may not be UTF-8, which JSON requires.
    return {key: encoded(value).decode() if isinstance(value, str) else value for key, value in plain.items()}


def _add(totals: WorkerTotals, event: StepDone | Lost, steps: int) -> None:
    """Add an event of `steps` steps to a worker's totals."""
    totals.steps += steps
    totals.samples += event.samples
    totals.seconds += event.seconds
    totals.waiting += event.waiting
    totals.bytes_sent += event.bytes_sent
    totals.exchange += event.exchange
