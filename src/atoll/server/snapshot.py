"""Snapshots of a shard on disk, taken while the shard serves.

A snapshot shows the shard between two entries of the log. Chunks are copied one at a time, between two
messages; a thread writes the copies. A chunk that is about to change is copied first. So a message waits for
one chunk's copy at most, and never for the disk.

    FOLDER/snapshot-000000000042/          42: the log's sequence number; renamed from .partial when complete
        snapshot.json                      heading, each chunk's version, checksum and per-slot states
        chunk-7.safetensors                "values" and each element-wise state of the optimizer; "open.":
                                           inputs of an open step; "then.": values that contributors
                                           continued from
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
from typing import Any, Literal

import msgspec
from torch import Tensor

from atoll.core.decoding import decoded
from atoll.core.descriptors import files_in, opened
from atoll.core.errors import CheckpointError, UserError
from atoll.core.optimizerkind import OptimizerKind
from atoll.core.points import reach
from atoll.tensors.shardoptimizer import ShardOptimizer
from atoll.tensors.tensorfile import checksum_of, flush, read_tensors, write_tensors
from atoll.tensors.wholechunk import OPEN, THEN, OpenRecord, WholeChunk

_VALUES = "values"
_FILE = "snapshot.json"
_PARTIAL = ".partial"
_LOOKS = 10  # attempts to read a folder whose snapshots are being replaced
_JOURNAL_SECONDS = 60.0  # most seconds to wait for the snapshot's records to be in the journal


class ChunkRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A chunk in a snapshot: its version, the size in bytes and CRC-32 of its file, and its per-slot
    states."""

    chunk: int
    version: int
    size: int
    checksum: int
    slots: list[dict[str, Any]]
    open: OpenRecord | None = None


class Heading(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Identity of a snapshot. `sequence` is the number of entries of the log that were applied."""

    run: str
    shard: int
    digest: str
    optimizers: list[OptimizerKind]
    hyperparameters: list[dict[str, Any]]
    sequence: int
    steps: int
    journal: int = -1  # the segment whose records follow this snapshot


class Contents(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Contents of snapshot.json."""

    format: Literal[1] = 1  # another one is refused
    heading: Heading
    chunks: list[ChunkRecord]


_contents = msgspec.json.Decoder(Contents)


class Snapshots:
    """Takes a snapshot of a shard every `seconds` in `folder`, and keeps the latest.

    Raises UserError if the folder has a snapshot of another run or shard. `failed(line)` is called on the
    shard's thread when a snapshot could not be written; the shard serves on.
    """

    def __init__(
        self, folder: Path, *, run: str, shard: int, seconds: float, failed: Callable[[str], None]
    ) -> None:
        self.folder, self._run, self._shard = folder, run, shard
        self._seconds, self._failed = seconds, failed
        self._due: float | None = None  # monotonic
        self._taking: _Taking | None = None
        self._has_failed = False
        self.may_end = threading.Event()  # until set, a finished snapshot is not renamed
        self.may_end.set()
        _refuse_others(folder, run, shard)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for left in folder.glob(f"snapshot-*{_PARTIAL}"):  # left by a killed shard
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
    ) -> Heading | None:
        """Do the next bit of work, if any is due, between two messages, at the monotonic time `now`. Returns
        the heading of a snapshot that is complete since the last call.

        `wanted`: start one at once, unless the latest failed; then the next starts at its usual time.
        """
        if self._taking is not None:
            self._taking.copy_one()
            return self._finish(now)
        if self._due is None:
            self._due = now + self._seconds
        elif now >= self._due or (wanted and not self._has_failed):
            self.take(optimizer, versions, heading())
        return None

    def take(
        self,
        optimizer: ShardOptimizer,
        versions: Mapping[int, int],
        heading: Heading,
    ) -> None:
        """Begin a snapshot of the present state; `poll` continues it."""
        if self._taking is None:
            self._taking = _Taking(self.folder, optimizer, dict(versions), heading, self.may_end)

    def before_change(self, chunk: int) -> None:
        """Copy a chunk that is about to be stepped, if a snapshot in progress still needs it."""
        if self._taking is not None:
            self._taking.copy_now(chunk)

    def abandon(self) -> None:
        """Drop the snapshot in progress, because the shard gets other contents."""
        if self._taking is not None:
            self._taking.abandon()
            self._taking = None
        self._due = None

    @property
    def busy(self) -> bool:
        """True if `poll` has a chunk to copy at once."""
        return self._taking is not None and self._taking.wants_to_copy

    def next_deadline(self) -> float | None:
        """Monotonic time at which `poll` starts a snapshot; None while one is in progress."""
        return self._due if self._taking is None else None

    def close(self) -> None:
        """Drop the snapshot in progress; the latest complete one stays."""
        self.abandon()

    def _finish(self, now: float) -> Heading | None:
        taking = self._taking
        if taking is None or not taking.over.is_set():
            return None
        self._has_failed = bool(taking.error)
        if taking.error:
            self._failed(f"no snapshot of shard {self._shard} could be written: {taking.error}")
        self._taking, self._due = None, now + self._seconds
        return None if taking.error else taking.heading


@dataclass(frozen=True)
class _Copy:
    chunk: int
    values: Tensor
    whole: WholeChunk


class _Taking:
    """A snapshot in progress, with the thread that writes it."""

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
        if self._final.exists():  # from another Setup or process: it stays until this one is complete
            self._final = folder / f"{self._final.name}-{max(0, heading.journal)}"
        self._stop = False
        self.over = threading.Event()
        self.error = ""
        self._ended = False
        threading.Thread(target=self._write, name="atoll-snapshot", daemon=True).start()

    @property
    def wants_to_copy(self) -> bool:
        # At most one copy waits for the writer, apart from chunks copied before a change.
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
        """Body of the thread: write each copy to a file, then the contents, then rename the folder."""
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
        except Exception as error:  # a full disk, say: the shard reports it and serves on
            self.error = str(error) or type(error).__name__
            with contextlib.suppress(OSError):
                _remove_partial(writing)
        finally:
            self.over.set()


def latest(folder: Path) -> Path | None:
    """Return the newest complete snapshot in a shard's folder, even while the shard replaces snapshots; None
    if there is none."""
    for _ in range(_LOOKS):
        wholes, found = _wholes(folder), []
        for path in wholes:
            with contextlib.suppress(FileNotFoundError):
                found.append((path.stat().st_mtime, path.name, path))
        if found or not wholes:  # else a newer snapshot replaced all listed ones
            return max(found)[2] if found else None
    return None


def whole_snapshots(folder: Path) -> list[tuple[Path, Heading]]:
    """Complete snapshots in a shard's folder that belong to a journal segment, the oldest first."""
    found = [(path, read_contents(path).heading) for path in _wholes(folder)]
    return sorted((each for each in found if each[1].journal >= 0), key=lambda each: each[1].journal)


def read_contents(snapshot: Path) -> Contents:
    """Read a snapshot's contents file; raises CheckpointError if it cannot be read."""
    try:
        raw = (snapshot / _FILE).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{snapshot / _FILE}: cannot read the snapshot: {error.strerror}") from None
    return decoded(_contents, raw, CheckpointError, f"{snapshot / _FILE}: not a shard's snapshot")


def restore(snapshot: Path, optimizer: ShardOptimizer) -> Contents:
    """Put a snapshot's chunks into `optimizer`. Raises CheckpointError if the snapshot is damaged, or of
    another model."""
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
    """Remove a complete snapshot. It is renamed first, so that a half-removed one is never taken for
    complete."""
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
