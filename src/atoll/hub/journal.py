"""The hub's journal: records appended to a file before any answer that depends on them.

Each record is a frame (`logs/frames.py`) without a payload. The records of a turn are written in one call
where the system allows, and not synced: they survive a kill of the process, not a loss of power. Votes alone
are synced, since a hub that forgot one could vote twice. An incomplete record at the end was never answered,
and is cut off.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from pathlib import Path

from atoll.core.errors import UserError
from atoll.core.points import reach
from atoll.hub.records import AnyRecord, Began, DamagedError, Voted, decode_record, encode_record
from atoll.logs.frames import Kind, encode_frame
from atoll.logs.logfile import DamagedLogError, LogFile, open_locked, replay

FILE = "hub.journal"  # in the hub's directory
SHARD_FILE = "shard.json"  # in a shard's directory
_FORSAKEN = f"{FILE}.incomplete"  # the journal's name while it lacks its latest records
KIND = Kind(b"ATH5", 2**30, "hub's journal")
_COMPACT_BYTES = 2**20  # bytes since the last compact state; also at least that state's size


class HubJournal:
    """The journal in `folder`, open and locked; `records` has those found in it.

    Raises UserError if the folder cannot be used, another hub has the journal, or the journal is damaged.
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
        self.cut = 0  # bytes of an incomplete record cut off the end
        self.commits = 0  # writes, by this process
        self.records: list[AnyRecord] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = _open(self.path)
            raw = self.path.read_bytes()
        except OSError as error:
            raise UserError(f"{self.path}: cannot use the hub's journal: {error.strerror}") from None
        try:
            self.records, self._file.end, self._stamp = _parse(memoryview(raw), self.path)
            self.cut = len(raw) - self._file.end
            self.began = _first(self.records, self.path)  # None if the journal is new
            self._file.truncate()
        except BaseException:
            self._file.close()
            raise
        self._compacted = 0  # the size after the last compact state

    def begin(self, began: Began) -> None:
        """Write a new journal's first record. Raises UserError if the disk does not take it."""
        self.began = began
        try:
            self.append([began])
        except OSError as error:
            raise UserError(f"{self.path}: cannot write the hub's journal: {error.strerror}") from None

    @property
    def is_long(self) -> bool:
        """True if a compact state should replace the records."""
        return self._file.end - self._compacted > max(_COMPACT_BYTES, self._compacted)

    def append(self, records: Sequence[AnyRecord]) -> None:
        """Append records. Raises OSError if the disk does not take them; the file is then unchanged."""
        self.commits += 1
        reach("hub.record", self.commits)
        voted = any(isinstance(record, Voted) for record in records)
        self._file.append([_encode(records, self._stamp)], sync=voted)
        reach("hub.recorded", self.commits)

    def replace(self, records: Sequence[AnyRecord]) -> None:
        """Replace the journal by these records, written to another file and renamed. On OSError the old
        journal remains."""
        beside, stamp = self.path.with_name(f"{FILE}.new"), _new_stamp()
        file = _open(beside)
        try:
            file.truncate()
            file.append([_encode(records, stamp)], sync=True)  # synced because it contains votes
            reach("hub.compacted", self.commits)
            beside.replace(self.path)
        except OSError:
            file.close()
            raise
        with contextlib.suppress(FileNotFoundError):
            self._forsaken.unlink()
        self._file.close()
        self._file, self._stamp, self._compacted = file, stamp, file.end

    def forsake(self) -> None:
        """Rename the journal, which lacks records at its end, so that no hub resumes from it until `replace`
        succeeds. Raises OSError if the disk does not take the new name."""
        if self.path.exists():
            self.path.replace(self._forsaken)

    def close(self) -> None:
        """Close the file; closing twice does no harm."""
        self._file.close()


def _first(records: Sequence[AnyRecord], path: Path) -> Began | None:
    if records and not isinstance(records[0], Began):
        raise UserError(f"{path}: does not begin as a hub's journal does; give another --directory")
    return records[0] if records and isinstance(records[0], Began) else None


def _open(path: Path) -> LogFile:
    try:
        return LogFile(open_locked(path, 0o600))
    except BlockingIOError:
        raise UserError(
            f"{path}: another hub serves this directory; give another, or stop that one"
        ) from None


def _new_stamp() -> int:
    return secrets.randbits(64)


def _encode(records: Sequence[AnyRecord], stamp: int) -> bytes:
    return b"".join(
        piece
        for record in records
        for piece in encode_frame(KIND, stamp, encode_record(record), summed=False)
    )


def _parse(raw: memoryview, path: Path) -> tuple[list[AnyRecord], int, int]:
    """Return the whole records at the beginning, their end, and the file's stamp. Raises UserError for
    another format, and for damage before the end."""
    records: list[AnyRecord] = []
    end, stamp = 0, _new_stamp()
    try:
        for frame in replay(raw, KIND):
            records.append(decode_record(bytes(frame.header)))
            end, stamp = frame.end, frame.stamp
    except DamagedError as error:
        raise UserError(f"{path}: damaged at byte {end}: {error}; give another --directory") from None
    except DamagedLogError as error:
        raise UserError(f"{path}: {error}; give another --directory") from None
    return records, end, stamp
