"""The hub's journal: a file to which records are appended before anybody is answered out of them.

Each record is a frame (`store/frames.py`) without a payload. Records are written whole by one call where the
system lets them, and not synced: what was written outlives the process (kill -9), and not a loss of power.
Votes alone are synced: a hub that forgot one could vote twice differently. A record at the end that is not
whole was answered to nobody, and is cut off.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from atoll.core.descriptors import opened
from atoll.core.errors import UserError
from atoll.core.points import reach
from atoll.hub.records import AnyRecord, Began, DamagedError, Voted, decode_record, encode_record
from atoll.store.frames import Kind, encode_frame, frames, is_damaged, is_other_kind

FILE = "hub.journal"  # in the hub's directory
SHARD_FILE = "shard.json"  # in a shard's
_FORSAKEN = f"{FILE}.incomplete"  # its name while records are missing at its end
KIND = Kind(b"ATH3", 2**30)
_COMPACT_BYTES = 2**20  # of records since the last compact state, and at least as much as that


class HubJournal:
    """The journal in `folder`, opened; `records` are those that were in it. No other process has it open.

    Raises UserError when the folder cannot be used, another hub has the journal, or it is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.path, self._forsaken = folder / FILE, folder / _FORSAKEN
        if (folder / SHARD_FILE).exists():
            raise UserError(f"{folder}: holds a shard of a run; give the hub another --directory")
        if self._forsaken.exists() and not self.path.exists():
            raise UserError(
                f"{self._forsaken}: the hub before this one went on while the disk was full, and what it "
                "decided then is not known: the run cannot go on; begin another one from a checkpoint, with "
                "another --directory"
            )
        self.cut = 0  # bytes at the end that were no whole record
        self.commits = 0  # writes, by this process
        self.records: list[AnyRecord] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = _open(self.path)
            raw = self.path.read_bytes()
        except OSError as error:
            raise UserError(f"{self.path}: cannot use the hub's journal: {error.strerror}") from None
        try:
            self.records, self._end, self._stamp = _parse(memoryview(raw), self.path)
            self.cut = len(raw) - self._end
            self.began = _first(self.records, self.path)  # None where it is new
            os.ftruncate(self._file, self._end)
        except BaseException:
            os.close(self._file)
            raise
        self._compacted = 0  # the size after the last compact state

    def begin(self, began: Began) -> None:
        """Write a new journal's first record. Raises UserError when the disk does not take it."""
        self.began = began
        try:
            self.append([began])
        except OSError as error:
            raise UserError(f"{self.path}: cannot write the hub's journal: {error.strerror}") from None

    @property
    def is_long(self) -> bool:
        """Whether it is time to put a compact state in the place of what is there."""
        return self._end - self._compacted > max(_COMPACT_BYTES, self._compacted)

    def append(self, records: Sequence[AnyRecord]) -> None:
        """Write these. Raises OSError, and the file is as it was before, when the disk does not take them."""
        self.commits += 1
        reach("hub.record", self.commits)
        raw = _encode(records, self._stamp)
        try:
            _write(self._file, raw)
            if any(isinstance(record, Voted) for record in records):
                os.fsync(self._file)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._end)
            raise
        self._end += len(raw)
        reach("hub.recorded", self.commits)

    def replace(self, records: Sequence[AnyRecord]) -> None:
        """Let these stand for all that is there: written beside it, and renamed. Raises OSError, and what
        was there still is, when the disk does not take them."""
        beside, stamp = self.path.with_name(f"{FILE}.new"), _new_stamp()
        raw = _encode(records, stamp)
        file = _open(beside)
        try:
            os.ftruncate(file, 0)
            _write(file, raw)
            os.fsync(file)  # votes are in it
            reach("hub.compacted", self.commits)
            beside.replace(self.path)
        except OSError:
            os.close(file)
            raise
        with contextlib.suppress(FileNotFoundError):
            self._forsaken.unlink()
        os.close(self._file)
        self._file, self._stamp = file, stamp
        self._end = self._compacted = len(raw)

    def forsake(self) -> None:
        """Records are missing at its end: nobody is to go on from it, until `replace` makes it whole. Raises
        OSError where the disk does not even take a new name."""
        if self.path.exists():
            self.path.replace(self._forsaken)

    def close(self) -> None:
        """Close the file; closing twice does no harm."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _first(records: Sequence[AnyRecord], path: Path) -> Began | None:
    if records and not isinstance(records[0], Began):
        raise UserError(f"{path}: does not begin as a hub's journal does; give another --directory")
    return records[0] if records and isinstance(records[0], Began) else None


def _open(path: Path) -> int:
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    file = opened(lambda: os.open(path, flags, 0o600))
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it goes with the process, however that ends
    except BlockingIOError:
        os.close(file)
        raise UserError(
            f"{path}: another hub serves this directory; give another, or stop that one"
        ) from None
    return file


def _new_stamp() -> int:
    return secrets.randbits(64)


def _encode(records: Sequence[AnyRecord], stamp: int) -> bytes:
    return b"".join(
        piece
        for record in records
        for piece in encode_frame(KIND, stamp, encode_record(record), summed=False)
    )


def _write(file: int, raw: bytes) -> None:
    while raw:
        raw = raw[os.write(file, raw) :]


def _parse(raw: memoryview, path: Path) -> tuple[list[AnyRecord], int, int]:
    """The whole records at the beginning, where they end, and the file's stamp. Raises UserError for a file
    of another format, and for one that is damaged before its end."""
    if is_other_kind(raw, KIND):
        raise UserError(
            f"{path}: no hub's journal that this version of Atoll can read, or damaged at byte 0; give "
            "another --directory"
        )
    records: list[AnyRecord] = []
    end, stamp = 0, _new_stamp()
    for frame in frames(raw, KIND):
        try:
            records.append(decode_record(bytes(frame.header)))
        except DamagedError as error:
            raise UserError(f"{path}: damaged at byte {end}: {error}; give another --directory") from None
        end, stamp = frame.end, frame.stamp
    if is_damaged(raw, end, KIND):
        raise UserError(f"{path}: damaged at byte {end}; give another --directory")
    return records, end, stamp
