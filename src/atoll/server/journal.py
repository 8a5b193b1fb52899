"""A shard's journal: what it was told, written down before anybody is answered out of it.

    FOLDER/shard.json                 whose folder this is, and as whom the shard is known to the hub
    FOLDER/journal-000000.bin         records (store/records.py), in the order in which they took effect
    FOLDER/journal-000001.bin         begins with the whole state at some moment; snapshots belong to one
    FOLDER/lock                       held while a shard is at work here

Records are written by a thread of its own, so that the shard takes in the next messages meanwhile; what is
to leave the shard waits until all that it may tell of is written (`when_written`). Written means that the
system has it: that survives a `kill -9` of the shard. With `sync` it is also on the disk, and survives the
machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import queue
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from atoll.core.errors import CheckpointError, RunError, UserError
from atoll.store.outcomes import StoreError
from atoll.store.records import Begun, Part, Record, encode_record, records

Payload: TypeAlias = Any
Item: TypeAlias = tuple[Record, Payload]

_IDENTITY, _LOCK = "shard.json", "lock"
_BACKLOG = 2**28  # bytes that wait to be written; beyond, the shard takes no more messages
_WAIT_SECONDS = 60.0  # for the thread, at the end


class JournalError(RunError):
    """The journal cannot be written: what the shard would acknowledge, it could not keep."""


class Identity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whose folder this is. `token` is its own name, by which the hub knows it again; `incarnation` is what
    the hub gave this shard last; `over`: the run has ended. With `site`, it is that site's shard."""

    format: int = 1
    run: str
    shard: int
    site: str = ""
    token: str = ""
    incarnation: int = 0
    over: bool = False


class Folder:
    """The folder of shard `shard` of `run`, or of the shard of `site`, and nobody else's while this is open.

    Raises UserError where it is another run's or another shard's, or a shard is at work there.
    """

    def __init__(self, path: Path, run: str, shard: int, site: str = "") -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise UserError(f"{path}: cannot keep a shard's journal there: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.identity = self._read(run, shard, site)
            if self.identity.over:  # that run has ended: begin anew
                self.clear()
            if self.identity.over or not self.identity.token:
                self.remember(over=False, incarnation=0, token=secrets.token_hex(8))
        except BlockingIOError:
            os.close(self._lock)
            raise UserError(
                f"{path}: another shard is at work there, or was stopped and holds it: end that one first, "
                "or give this one another --directory"
            ) from None
        except BaseException:
            os.close(self._lock)
            raise

    def _read(self, run: str, shard: int, site: str) -> Identity:
        path = self.path / _IDENTITY
        try:
            found = msgspec.json.decode(path.read_bytes(), type=Identity)
        except FileNotFoundError:
            return Identity(run=run, shard=shard, site=site)
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path}: not a shard's: {error}") from None
        if (found.run, found.shard, found.site) != (run, shard, site):
            raise UserError(
                f"{self.path}: holds {_who(found.shard, found.site)} of run {found.run!r}; this is "
                f"{_who(shard, site)} of run {run!r}: give it another --directory, or remove that one"
            )
        return found

    def remember(self, **changes: Any) -> None:
        """Write what has changed of the identity, all of it or nothing."""
        self.identity = msgspec.structs.replace(self.identity, **changes)
        path, beside = self.path / _IDENTITY, self.path / f"{_IDENTITY}.new"
        try:
            beside.write_bytes(msgspec.json.encode(self.identity))
            beside.replace(path)
        except OSError as error:
            raise JournalError(f"{path}: cannot be written: {error.strerror}") from None

    def segments(self) -> dict[int, Path]:
        """The journal's files, by number."""
        found = {int(path.stem.partition("-")[2]): path for path in self.path.glob("journal-*.bin")}
        return dict(sorted(found.items()))

    def segment(self, number: int) -> Path:
        return self.path / f"journal-{number:06d}.bin"

    def clear(self) -> None:
        """Remove the journal of a run that is over."""
        for path in self.segments().values():
            path.unlink()

    def close(self) -> None:
        os.close(self._lock)


def _who(shard: int, site: str) -> str:
    return f"the shard of site {site!r}" if site else f"shard {shard}"


def read_segments(folder: Folder, first: int) -> Iterator[Item]:
    """All records from segment `first` on, in order.

    What a crash has left of the last record is cut off the last segment. Raises CheckpointError where a
    record is missing or damaged before that.
    """
    paths = folder.segments()
    wanted = [number for number in paths if number >= first]
    if wanted != list(range(first, first + len(wanted))):
        raise CheckpointError(
            f"{folder.segment(first)}: the journal has gaps; the shard cannot go on from it"
        )
    for number in wanted:
        yield from _read_segment(paths[number], last=number == wanted[-1])


def _read_segment(path: Path, last: bool) -> Iterator[Item]:
    with path.open("r+b") as file:
        size = os.fstat(file.fileno()).st_size
        # Payloads stay in place: the mapping lives as long as one of them does.
        whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if size else b"")
        end = 0
        try:
            for record, payload, end in records(whole):  # noqa: B007
                yield record, payload
        except StoreError as error:
            raise CheckpointError(f"{path}: {error}") from None
        if end < size:
            if not last:
                raise CheckpointError(f"{path}: damaged at byte {end}; the shard cannot go on from it")
            file.truncate(end)


class Journal:
    """Appends to the segments of `folder`, beginning with segment `number`.

    All calls come from the shard's thread. `fileno` can be read from whenever `release` has something to do.
    """

    def __init__(self, folder: Folder, number: int, *, sync: bool = False) -> None:
        self.folder, self.number, self._sync = folder, number, sync
        self.appended = 0  # records
        self.size = 0  # bytes of this segment
        self._written = 0  # set by the thread
        self._bytes_appended, self._bytes_written = 0, 0
        self._error = ""
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._items: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._file, self._count = -1, 0  # the thread's: the segment, and how many records are in the system
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._work, name="atoll-journal", daemon=True)
        self._thread.start()

    @property
    def fileno(self) -> int:
        return self._woken

    @property
    def is_full(self) -> bool:
        """Whether as much waits to be written as may."""
        return self._bytes_appended - self._bytes_written > _BACKLOG

    def begin_segment(
        self,
        state: bytes = b"",
        parts: Sequence[tuple[Part, Payload]] = (),
        *,
        fresh: bool = False,
    ) -> int:
        """Have later records go to a new segment, which begins as Begun says; returns its number."""
        self.number += self.size > 0
        self.size = 0
        path, number = self.folder.segment(self.number), self.number
        self._items.put(lambda: self._open(path))
        identity = self.folder.identity
        self.append(Begun(identity.run, identity.shard, fresh, state, len(parts)))
        for part, payload in parts:
            self.append(part, payload)
        return number

    def append(self, record: Record, payload: Payload = None) -> None:
        """Write this after all before; nobody may change the payload any more."""
        size = 64 + (memoryview(payload).nbytes if payload is not None else 0)
        self.appended += 1
        self.size += size
        self._bytes_appended += size
        self._items.put(lambda: self._write(record, payload, size))

    def drop_before(self, number: int) -> None:
        """Remove the segments below `number`: a snapshot has what they led to."""
        for each, path in self.folder.segments().items():
            if each < number:
                self._items.put(lambda path=path: path.unlink(missing_ok=True))  # type: ignore[misc]

    def when_written(self, act: Callable[[], None]) -> None:
        """Call `act` once all that was appended so far is written: at once, or in a `release`."""
        if not self._waiting and self._written == self.appended:
            act()
        else:
            self._waiting.append((self.appended, act))

    def release(self) -> None:
        """Do what has waited and may be done now. Raises JournalError when the journal cannot be written."""
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self._woken, 4096)) == 4096:
                pass
        if self._error:
            raise JournalError(self._error)
        while self._waiting and self._waiting[0][0] <= self._written:
            self._waiting.popleft()[1]()

    def close(self) -> None:
        """Write what is left, and end the thread."""
        self._items.put(None)
        self._thread.join(_WAIT_SECONDS)
        if not self._thread.is_alive():
            for each in (self._woken, self._wake, self._file):
                if each >= 0:
                    os.close(each)

    # -- the thread ---------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (do := self._items.get()) is not None:
            if self._error:
                continue
            try:
                do()
                if self._written < self._count and self._items.empty():
                    self._publish()
            except OSError as error:
                path, identity = self.folder.segment(self.number), self.folder.identity
                who = _who(identity.shard, identity.site)
                self._error = (
                    f"{who} cannot write its journal {path}: {error.strerror}; "
                    "it ends rather than acknowledge what it could not keep. Nothing that it has "
                    "acknowledged is lost: put that right, and start it again with the same --directory"
                )
                self._tell()

    def _open(self, path: Path) -> None:
        if self._file >= 0:
            if self._sync:
                os.fdatasync(self._file)
            os.close(self._file)
        self._file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def _write(self, record: Record, payload: Payload, size: int) -> None:
        pieces = [memoryview(piece) for piece in encode_record(record, payload, self._sync)]
        while pieces:
            wrote = os.writev(self._file, pieces)
            while pieces and wrote >= pieces[0].nbytes:
                wrote -= pieces.pop(0).nbytes
            if wrote:
                pieces[0] = pieces[0][wrote:]
        self._bytes_written += size
        self._count += 1
        if not self._sync:  # else there is one wait for the disk for all that has come meanwhile
            self._publish()

    def _publish(self) -> None:
        if self._sync:
            os.fdatasync(self._file)
        self._written = self._count
        self._tell()

    def _tell(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake, b"\0")
