"""The whole run in one object: summary.json."""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any

import msgspec

from atoll.core.decoding import decoded
from atoll.core.errors import UserError
from atoll.core.events import LinkFigures
from atoll.core.memory import MemoryFigures
from atoll.core.pipes import write_through

_SUMMARY_BYTES = 2**17  # of most runs' summaries


class WorkerTotals(msgspec.Struct):
    """What one worker did: `seconds` is the time of its steps, `waiting` the part of it blocked on others."""

    worker: int
    device: str = ""
    steps: int = 0
    samples: float = 0.0
    seconds: float = 0.0
    waiting: float = 0.0
    bytes_sent: int = 0
    exchange: float = 0.0  # strategy peers: of `seconds`, in handing over and taking, and no waiting


class Staleness(msgspec.Struct):
    """Of a group's contributions, as the shards measured it; in global iterations."""

    median: float
    p95: float
    most: float
    contributions: int  # each member's word of one counts


class GroupTotals(msgspec.Struct):
    """What a group did: workers that shared a ring, or one alone. `since` and `until` are in seconds from the
    run's start. `seconds` is the time of its members' steps, added up; of that they waited in the `ring`, in
    the `exchange` between groups, and for `other` things; the rest they computed.
    """

    group: int
    workers: list[int]
    since: float
    until: float
    steps: int = 0  # of the member that made most
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
    """Who was with whom, from `since` (seconds from the run's start) on, and why. `grouping` counts the hub's
    decisions; 0: each alone, while speeds are measured."""

    grouping: int
    since: float
    groups: list[list[int]]
    reason: str


class LinkTotals(LinkFigures, frozen=True, kw_only=True):
    """A loss-tolerant link as it was seen last: see core's event LinkSeen."""

    who: str
    held: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.who} to {self.peer}"


class NodeTotals(msgspec.Struct):
    """A node of strategy peers as it was seen last: see core's event NodeSeen, which says what each is. Of
    its own iterations' staleness the mean, the 95th percentile and the most; `exchange_share` is the part of
    its steps' time that its device's process gave to the exchange, `waiting_share` the part that it waited
    (of several devices, the first one's).
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
    """A worker's chunked memory as it was seen last: see core's `MemoryFigures`."""

    worker: int


class Summary(msgspec.Struct, omit_defaults=True):
    """summary.json.

    `steps` counts the iterations of this run; `samples` and `bytes_sent` are sums over workers;
    `seconds` is the time from the first worker's start to the last event; `seconds_waiting` is the
    workers' mean of the time spent blocked on others; `last` has the last logged value of each name (null:
    NaN or infinite); `events` are the decisions, warnings, checkpoints, skipped iterations and failures, as
    plain objects. A run whose workers were in groups has `groupings` and `each_group`; others have neither.
    `links` are those over which parts of gradients may be lost. `nodes` are those of a run without a server.
    `memory` has the workers whose model lies in chunks over tiers of memory.
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

    @property
    def samples_per_second(self) -> float:
        """Over the time of the steps, so that start and evaluation do not count."""
        busy = max((totals.seconds for totals in self.each_worker), default=0.0)
        return self.samples / busy if busy > 0 else 0.0

    @property
    def waiting_share(self) -> float:
        """The share of the steps' time that workers spent blocked on others, 0 to 1."""
        busy = sum(totals.seconds for totals in self.each_worker)
        return sum(totals.waiting for totals in self.each_worker) / busy if busy > 0 else 0.0


def reserve_summary(path: Path) -> None:
    """Take the room that `write_summary` needs, so that it can write on a full disk, too."""
    with contextlib.suppress(OSError):
        _beside(path).write_bytes(bytes(_SUMMARY_BYTES))


def write_summary(summary: Summary, path: Path) -> None:
    """Write `summary` to `path`, indented for people, whole or not at all. Raises UserError when the file
    cannot be written."""
    text = json.dumps(msgspec.to_builtins(summary), indent=2, allow_nan=False) + "\n"
    beside = _beside(path)
    try:
        if path.exists() and not path.is_file():  # a pipe, or /dev/stdout
            write_through(path, text.encode())
            return
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        with os.fdopen(descriptor, "wb", buffering=0) as file:  # over its own blocks, where it has some
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
    """The summary in `path`. Raises UserError when it is not there or not a summary."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot read the summary: {error.strerror}") from None
    return decoded(msgspec.json.Decoder(Summary), raw, UserError, f"{path}: not the summary of a run")
