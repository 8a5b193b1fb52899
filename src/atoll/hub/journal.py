"""The hub's journal: a file to which records are appended before anybody is answered out of them.

Each record stands behind its length and its CRC-32, eight bytes in all, little-endian. Records are written
whole by one call where the system lets them, and not synced: what was written outlives the process (kill -9),
and not a loss of power. A record at the end that is not whole was answered to nobody, and is cut off.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

from atoll.core.errors import UserError
from atoll.core.points import reach
from atoll.hub.records import AnyRecord, Began, DamagedError, decode_record, encode_record

FILE = "hub.journal"  # in the hub's directory
_FORSAKEN = f"{FILE}.incomplete"  # its name while records are missing at its end
LARGEST = 2**30  # bytes of a record
_COMPACT_BYTES = 2**20  # of records since the last compact state, and at least as much as that
_HEAD = struct.Struct("<II")


class HubJournal:
    """The journal in `folder`, opened; `records` are those that were in it. No other process has it open.

    Raises UserError when the folder cannot be used, another hub has the journal, or it is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.path, self._forsaken = folder / FILE, folder / _FORSAKEN
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
            self.records, self._end = _parse(raw, self.path)
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
        frames = b"".join(map(_frame, records))
        try:
            _write(self._file, frames)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._end)
            raise
        self._end += len(frames)
        reach("hub.recorded", self.commits)

    def replace(self, records: Sequence[AnyRecord]) -> None:
        """Let these stand for all that is there: written beside it, and renamed. Raises OSError, and what
        was there still is, when the disk does not take them."""
        beside = self.path.with_name(f"{FILE}.new")
        frames = b"".join(map(_frame, records))
        file = _open(beside)
        try:
            os.ftruncate(file, 0)
            _write(file, frames)
            reach("hub.compacted", self.commits)
            beside.replace(self.path)
        except OSError:
            os.close(file)
            raise
        with contextlib.suppress(FileNotFoundError):
            self._forsaken.unlink()
        os.close(self._file)
        self._file = file
        self._end = self._compacted = len(frames)

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
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it goes with the process, however that ends
    except BlockingIOError:
        os.close(file)
        raise UserError(
            f"{path}: another hub serves this directory; give another, or stop that one"
        ) from None
    return file


def _frame(record: AnyRecord) -> bytes:
    raw = encode_record(record)
    return _HEAD.pack(len(raw), zlib.crc32(raw)) + raw


def _write(file: int, raw: bytes) -> None:
    while raw:
        raw = raw[os.write(file, raw) :]


def _parse(raw: bytes, path: Path) -> tuple[list[AnyRecord], int]:
    """The whole records at the beginning, and where they end. Raises UserError for one in the middle that is
    damaged."""
    records: list[AnyRecord] = []
    at = 0
    while at + _HEAD.size <= len(raw):
        size, checksum = _HEAD.unpack_from(raw, at)
        stop = at + _HEAD.size + size
        body = raw[at + _HEAD.size : stop]
        if size > LARGEST or stop > len(raw):
            break
        try:
            if zlib.crc32(body) != checksum:
                raise DamagedError("its checksum is wrong")
            records.append(decode_record(body))
        except DamagedError as error:
            if stop == len(raw):
                break
            raise UserError(f"{path}: damaged at byte {at}: {error}; give another --directory") from None
        at = stop
    return records, at
