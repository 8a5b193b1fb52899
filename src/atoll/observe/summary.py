"""summary.json: the whole run in one object."""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any

import msgspec

from atoll.core.decoding import decoded, json_decoder
from atoll.core.errors import UserError
from atoll.core.events import LinkFigures
from atoll.core.memory import MemoryFigures
from atoll.core.pipes import write_through

_SUMMARY_BYTES = 2**17  # enough for most runs' summaries


class WorkerTotals(msgspec.Struct):
    """Totals of one worker: `seconds` is the time of its steps, `waiting` the part blocked on others."""

    worker: int
    device: str = ""
    steps: int = 0
    samples: float = 0.0
    seconds: float = 0.0
    waiting: float = 0.0
    bytes_sent: int = 0
    exchange: float = 0.0  # strategy peers: seconds of work to hand gradients over and take parameters
    part: int = 0  # sync.shares auto: its samples of a global batch, as chosen last
    speed: float = 0.0  # and the samples a second that it computes, as measured then


class Staleness(msgspec.Struct):
    """Staleness of a group's contributions as measured by the shards, in global iterations."""

    median: float
    p95: float
    most: float
    contributions: int  # number of reports: each member reports each contribution


class GroupTotals(msgspec.Struct):
    """Totals of a group: workers that shared a ring, or one alone.

    `since` and `until` are in seconds from the run's start. `seconds` is the sum of its members' steps. Parts
    of it are waits in the `ring`, in the `exchange` between groups, and for `other` reasons; the rest is
    computing.
    """

    group: int
    workers: list[int]
    since: float
    until: float
    steps: int = 0  # of the member with the most steps
    samples: float = 0.0
    seconds: float = 0.0
    ring: float = 0.0
    exchange: float = 0.0
    other: float = 0.0
    staleness: Staleness | None = None

    @property
    def computing(self) -> float:
        return max(0.0, self.seconds - self.ring - self.exchange - self.other)


class GroupingShown(msgspec.Struct):
    """The groups of workers from `since` (seconds from the run's start) on, and the reason for them.

    `grouping` counts the hub's decisions; 0 means each alone, while speeds are measured.
    """

    grouping: int
    since: float
    groups: list[list[int]]
    reason: str


class LinkTotals(LinkFigures, frozen=True, kw_only=True):
    """The latest figures of a loss-tolerant link: see core's event LinkSeen."""

    who: str
    held: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.who} to {self.peer}"


class NodeTotals(msgspec.Struct):
    """The latest figures of a node of strategy peers; core's event NodeSeen explains the counts.

    `staleness_...` are mean, 95th percentile and most of the node's iterations. `exchange_share` and
    `waiting_share` are the parts of the step time that its (first) device's process spent in the exchange and
    waiting.
    """

    node: int
    devices: int = 1
    applied: int = 0
    rounds: int = 0
    joined: int = 0
    refusals: int = 0
    fetched: int = 0
    waits: int = 0
    no_room: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    applying: float = 0.0
    overlaying: float = 0.0
    staleness_mean: float = 0.0
    staleness_p95: int = 0
    staleness_most: int = 0
    exchange_share: float = 0.0
    waiting_share: float = 0.0


class MemoryTotals(MemoryFigures, frozen=True, kw_only=True):
    """The latest figures of a worker's chunked memory: see core's `MemoryFigures`."""

    worker: int


class Summary(msgspec.Struct, omit_defaults=True):
    """The contents of summary.json.

    Attributes:
        steps: iterations of this run.
        samples: samples of all workers in iterations that count, each once.
        samples_exact: False if there may be more: a worker ended before it had reported all of its steps, and
            no other one knows the count of all.
        seconds: time from the first worker's start to the last event.
        bytes_sent: sum over workers.
        seconds_waiting: the workers' mean of the time blocked on others.
        last: last logged value of each name; null for NaN and infinities.
        events: decisions, warnings, checkpoints, skipped iterations and failures, as plain objects.
        groupings, each_group: of a run whose workers were in groups; else empty.
        links: loss-tolerant links.
        nodes: of a run without a server; else empty.
        memory: of workers whose model lies in tiers of memory.
    """

    strategy: str
    workers: int
    groups: int
    steps: int
    samples: float
    seconds: float
    bytes_sent: int
    seconds_waiting: float
    last: dict[str, float | None]
    events: list[dict[str, Any]]
    each_worker: list[WorkerTotals]
    groupings: list[GroupingShown] = []
    each_group: list[GroupTotals] = []
    links: list[LinkTotals] = []
    nodes: list[NodeTotals] = []
    memory: list[MemoryTotals] = []
    samples_exact: bool = True

    @property
    def samples_per_second(self) -> float:
        """Samples of all workers per second of step time; start and evaluation do not count."""
        busy = max((totals.seconds for totals in self.each_worker), default=0.0)
        return self.samples / busy if busy > 0 else 0.0

    @property
    def waiting_share(self) -> float:
        """The share of the steps' time that workers spent blocked on others, 0 to 1."""
        busy = sum(totals.seconds for totals in self.each_worker)
        return sum(totals.waiting for totals in self.each_worker) / busy if busy > 0 else 0.0


def reserve_summary(path: Path) -> None:
    """Reserve disk space for `write_summary`, so that it succeeds even on a full disk."""
    with contextlib.suppress(OSError):
        _beside(path).write_bytes(bytes(_SUMMARY_BYTES))


def write_summary(summary: Summary, path: Path) -> None:
    """Write `summary` to `path`, indented, whole or not at all; raises UserError if that fails."""
    text = json.dumps(msgspec.to_builtins(summary), indent=2, allow_nan=False) + "\n"
    beside = _beside(path)
    try:
        if path.exists() and not path.is_file():  # a pipe, or /dev/stdout
            write_through(path, text.encode())
            return
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        with os.fdopen(descriptor, "wb", buffering=0) as file:  # into the reserved blocks, if any
            _write_all(file, text.encode())
            file.truncate()
        beside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise UserError(f"{path}: cannot write the summary: {error.strerror}") from None


def _write_all(file: io.FileIO, data: bytes) -> None:
    done = 0
    while done < len(data):
        done += file.write(data[done:])


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.new")


def read_summary(path: Path) -> Summary:
    """Read the summary in `path`; raises UserError if it is missing or no summary."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot read the summary: {error.strerror}") from None
    return decoded(json_decoder(Summary), raw, UserError, f"{path}: not the summary of a run")
