"""Snapshots of a shard to disk, taken while it serves.

A snapshot shows the shard as it was between two entries of the log. It is taken a chunk at a time, each
between two messages: one chunk is copied, and a thread of its own writes the copy. A chunk that is about to
change before its turn is copied first. So no message waits for longer than one chunk's copy, and never for
the disk.

    FOLDER/snapshot-000000000042/          42: the log's sequence; written beside, renamed when whole
        snapshot.json                      what it is of, each chunk's version, checksums, per-slot states
        chunk-7.safetensors                "values" and each element-wise state of the optimizer, and under
                                           "open." what a step that is open is made again from, and under
                                           "then." what contributors went on from
"""

from __future__ import annotations

import contextlib
import queue
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from atoll.core.decoding import decoded
from atoll.core.descriptors import files_in, opened
from atoll.core.errors import CheckpointError, UserError
from atoll.core.points import reach
from atoll.tensors.shardoptimizer import ShardOptimizer
from atoll.tensors.tensorfile import checksum_of, flush, read_tensors, write_tensors
from atoll.tensors.wholechunk import OPEN, THEN, OpenRecord, WholeChunk

_VALUES = "values"
_FILE = "snapshot.json"
_PARTIAL = ".partial"
_LOOKS = 10  # at a folder whose snapshots are replaced meanwhile
_JOURNAL_SECONDS = 60.0  # for what the snapshot goes with to be in the journal


class ChunkRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A chunk in a snapshot: `size` in bytes and CRC-32 of its file, and its slots' states."""

    chunk: int
    version: int
    size: int
    checksum: int
    slots: list[dict[str, Any]]
    open: OpenRecord | None = None


class Heading(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a snapshot is of; `sequence` is how many entries of the log had been applied."""

    run: str
    shard: int
    digest: str
    optimizer: str
    hyperparameters: list[dict[str, Any]]
    sequence: int
    steps: int
    journal: int = -1  # the segment whose records go on from here


class Contents(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """snapshot.json."""

    format: int = 1
    heading: Heading
    chunks: list[ChunkRecord]


_contents = msgspec.json.Decoder(Contents)


class Snapshots:
    """Takes a snapshot of a shard every `seconds`, in `folder`, and keeps the latest.

    Raises UserError if the folder holds one of another run or of another shard. `failed(line)` is told, on
    the shard's thread, when one could not be written; the shard serves on.
    """

    def __init__(
        self, folder: Path, *, run: str, shard: int, seconds: float, failed: Callable[[str], None]
    ) -> None:
        self.folder, self._run, self._shard = folder, run, shard
        self._seconds, self._failed = seconds, failed
        self._due: float | None = None  # by the loop's clock
        self._taking: _Taking | None = None
        self._has_failed = False
        self.may_end = threading.Event()  # until it is set, what is being taken gets no name
        self.may_end.set()
        self.taken: Callable[[Heading], None] = lambda _heading: None  # told of each that is whole
        _refuse_others(folder, run, shard)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for left in folder.glob(f"snapshot-*{_PARTIAL}"):  # by a shard that was killed
                shutil.rmtree(left)
        except OSError as error:
            raise UserError(f"{folder}: cannot keep snapshots there: {error.strerror}") from None

    def poll(
        self,
        now: float,
        optimizer: ShardOptimizer,
        versions: Mapping[int, int],
        heading: Callable[[], Heading],
        wanted: bool = False,
    ) -> None:
        """Do the next bit of work, if any is due; between two messages, at the monotonic time `now`.

        `wanted`: one is due at once, unless the latest has failed, which is tried again in its time."""
        if self._taking is not None:
            self._taking.copy_one()
            self._finish(now)
        elif self._due is None:
            self._due = now + self._seconds
        elif now >= self._due or (wanted and not self._has_failed):
            self.take(optimizer, versions, heading())

    def take(
        self,
        optimizer: ShardOptimizer,
        versions: Mapping[int, int],
        heading: Heading,
    ) -> None:
        """Begin one now, of the shard as it stands; `poll` goes on with it."""
        if self._taking is None:
            self._taking = _Taking(self.folder, optimizer, dict(versions), heading, self.may_end)

    def before_change(self, chunk: int) -> None:
        """A chunk is about to be stepped."""
        if self._taking is not None:
            self._taking.copy_now(chunk)

    def abandon(self) -> None:
        """The shard gets other contents: drop what is under way."""
        if self._taking is not None:
            self._taking.abandon()
            self._taking = None
        self._due = None

    @property
    def busy(self) -> bool:
        """Whether `poll` has something to do at once: a chunk to copy."""
        return self._taking is not None and self._taking.wants_to_copy

    def next_deadline(self) -> float | None:
        """When `poll` is next due, while nothing is under way."""
        return self._due if self._taking is None else None

    def close(self) -> None:
        """Give up what is under way; the latest whole snapshot stays."""
        self.abandon()

    def _finish(self, now: float) -> None:
        taking = self._taking
        if taking is None or not taking.over.is_set():
            return
        self._has_failed = bool(taking.error)
        if taking.error:
            self._failed(f"no snapshot of shard {self._shard} could be written: {taking.error}")
        else:
            self.taken(taking.heading)
        self._taking, self._due = None, now + self._seconds


@dataclass(frozen=True)
class _Copy:
    chunk: int
    values: Tensor
    whole: WholeChunk


class _Taking:
    """One snapshot under way, and the thread that writes it."""

    def __init__(
        self,
        folder: Path,
        optimizer: ShardOptimizer,
        versions: dict[int, int],
        heading: Heading,
        may_end: threading.Event,
    ) -> None:
        self._optimizer, self._versions, self.heading = optimizer, versions, heading
        self._may_end = may_end
        self._left = dict.fromkeys(optimizer.chunks)  # in order, not copied yet
        self._copies: queue.SimpleQueue[_Copy | None] = queue.SimpleQueue()
        self._folder, self._final = folder, folder / f"snapshot-{heading.sequence:012d}"
        if self._final.exists():  # of another Setup, or of an earlier life: it stays until this one is whole
            self._final = folder / f"{self._final.name}-{max(0, heading.journal)}"
        self._stop = False
        self.over = threading.Event()
        self.error = ""
        self._ended = False
        threading.Thread(target=self._write, name="atoll-snapshot", daemon=True).start()

    @property
    def wants_to_copy(self) -> bool:
        # One copy waits for the writer at most, but for those of chunks that were about to change.
        return bool(self._left) and self._copies.empty()

    def copy_one(self) -> None:
        if self.wants_to_copy:
            self.copy_now(next(iter(self._left)))
        if not self._left and not self._ended:
            self._ended = True
            self._copies.put(None)

    def copy_now(self, chunk: int) -> None:
        if chunk in self._left:
            del self._left[chunk]
            values = self._optimizer.values(chunk).clone()
            self._copies.put(_Copy(chunk, values, WholeChunk.of(self._optimizer, chunk)))

    def abandon(self) -> None:
        self._stop = True
        self._copies.put(None)
        self.over.wait(60.0)

    def _write(self) -> None:
        """On the thread: every copy to its file, then the heading, then the new name."""
        writing = self._final.with_name(self._final.name + _PARTIAL)
        try:
            _remove_partial(writing)
            writing.mkdir(parents=True)
            records = []
            while (copied := self._copies.get()) is not None and not self._stop:
                file_name = f"chunk-{copied.chunk}.safetensors"
                tensors = {_VALUES: copied.values, **copied.whole.tensors}
                size, checksum = opened(partial(write_tensors, writing / file_name, tensors))
                records.append(
                    ChunkRecord(
                        chunk=copied.chunk,
                        version=self._versions[copied.chunk],
                        size=size,
                        checksum=checksum,
                        slots=copied.whole.slots,
                        open=copied.whole.open,
                    )
                )
            if self._stop:
                _remove_partial(writing)
                return
            with opened(lambda: (writing / _FILE).open("xb")) as file:
                file.write(msgspec.json.encode(Contents(heading=self.heading, chunks=records)))
                flush(file)
            if not self._may_end.wait(_JOURNAL_SECONDS):
                raise OSError(f"the journal was not written within {_JOURNAL_SECONDS:g} s")
            if self._final.exists():
                _remove(self._final)
            writing.rename(self._final)
            reach("shard.snapshot")
            for older in _wholes(self._folder):
                if older != self._final:
                    _remove(older)
        except Exception as error:  # a full disk, say: told by the shard, which serves on
            self.error = str(error) or type(error).__name__
            with contextlib.suppress(OSError):
                _remove_partial(writing)
        finally:
            self.over.set()


def latest(folder: Path) -> Path | None:
    """The newest whole snapshot in a shard's folder; the shard may be at work, and take another's place."""
    for _ in range(_LOOKS):
        wholes, found = _wholes(folder), []
        for path in wholes:
            with contextlib.suppress(FileNotFoundError):
                found.append((path.stat().st_mtime, path.name, path))
        if found or not wholes:  # else those that were there have been replaced by one that was not listed
            return max(found)[2] if found else None
    return None


def whole_snapshots(folder: Path) -> list[tuple[Path, Heading]]:
    """The whole snapshots in a shard's folder that have a segment of its journal, the oldest first."""
    found = [(path, read_contents(path).heading) for path in _wholes(folder)]
    return sorted((each for each in found if each[1].journal >= 0), key=lambda each: each[1].journal)


def read_contents(snapshot: Path) -> Contents:
    """What a snapshot is of; raises CheckpointError if that cannot be read."""
    try:
        raw = (snapshot / _FILE).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{snapshot / _FILE}: cannot read the snapshot: {error.strerror}") from None
    return decoded(_contents, raw, CheckpointError, f"{snapshot / _FILE}: not a shard's snapshot")


def restore(snapshot: Path, optimizer: ShardOptimizer) -> Contents:
    """Put a snapshot's chunks into `optimizer`; raises CheckpointError if it is damaged or of others."""
    contents = read_contents(snapshot)
    if sorted(record.chunk for record in contents.chunks) != sorted(optimizer.chunks):
        raise CheckpointError(f"{snapshot}: a snapshot of other chunks than this shard's")
    for record in contents.chunks:
        file = snapshot / f"chunk-{record.chunk}.safetensors"
        if not file.is_file() or file.stat().st_size != record.size or checksum_of(file) != record.checksum:
            raise CheckpointError(f"{file}: damaged or missing; the snapshot cannot be used")
        tensors = read_tensors(file)
        values = tensors.pop(_VALUES, None)
        whole = WholeChunk(tensors, record.slots, record.open)
        step = whole.named(OPEN)
        held = optimizer.values(record.chunk)
        of_values = [values] if record.open is None else [values, step.get("values"), step.get("mean")]
        of_values += whole.named(THEN).values()
        if any(v is None or v.shape != held.shape or v.dtype != held.dtype for v in of_values):
            raise CheckpointError(f"{file}: of another model than this shard's")
        assert values is not None
        whole.put_into(optimizer, record.chunk, values)
    return contents


def _remove(snapshot: Path) -> None:
    """Remove a whole snapshot; half removed, it has the name of one that is none."""
    going = snapshot.with_name(snapshot.name + ".old" + _PARTIAL)
    _remove_partial(going)
    snapshot.rename(going)
    _remove_partial(going)


def _remove_partial(folder: Path) -> None:
    if folder.exists():
        opened(lambda: shutil.rmtree(folder))


def _wholes(folder: Path) -> list[Path]:
    paths = [folder / name for name in files_in(folder, "snapshot-*")]
    return [path for path in paths if path.suffix != _PARTIAL and path.is_dir()]


def _refuse_others(folder: Path, run: str, shard: int) -> None:
    for snapshot in _wholes(folder):
        found = read_contents(snapshot).heading
        if found.run != run or found.shard != shard:
            raise UserError(
                f"{folder}: holds a snapshot of run {found.run!r}, shard {found.shard}; this is run {run!r}, "
                f"shard {shard}: give it another --directory, or remove that one"
            )
