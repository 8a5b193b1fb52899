"""A shard's journal: all messages that change the shard, written before any answer leaves.

    FOLDER/shard.json                 the folder's run and shard, and the shard's identity at the hub
    FOLDER/journal-000000.bin         records (server/records.py), in the order in which they took effect
    FOLDER/journal-000001.bin         begins with the state at some moment; a snapshot names a segment
    FOLDER/spare.bin                  a retired segment, to be overwritten
    FOLDER/lock                       locked while a shard uses the folder
    FOLDER/standby                    of a standby that does not hold the whole shard yet

Outgoing messages wait until the records that they depend on are written (`when_written`). The journal's own
thread writes chunks, so that the shard meanwhile takes the next messages. Waking that thread costs more than
writing a few small records: while the thread is idle, the shard's thread writes those. "Written" means handed
to the system, which survives a `kill -9` of the shard. With `sync` the data is also on the disk, and survives
a crash of the machine.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import queue
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from atoll.core.decoding import decoded
from atoll.core.descriptors import files_in, opened
from atoll.core.errors import CheckpointError, RunError, UserError
from atoll.logs.frames import FRAME_BYTES, encode_frame
from atoll.logs.logfile import DamagedLogError, LogFile, open_locked
from atoll.logs.waiting import Waiting
from atoll.server.records import (
    SHARD,
    Begun,
    Record,
    StatePayload,
    encode_header,
    records,
    stamp_of,
)
from atoll.store.outcomes import StoreError

Payload: TypeAlias = Any
Item: TypeAlias = tuple[Record, Payload]
Pending: TypeAlias = tuple[int, bytes, Payload]  # stamp, header, payload

_IDENTITY, _LOCK, _SPARE, _INCOMPLETE = "shard.json", "lock", "spare.bin", "standby"
_HUBS = "hub.journal"  # in a hub's directory
_BACKLOG = 2**28  # unwritten bytes beyond which the shard takes no more messages
_SMALL = 2**18  # bytes of pending records that the shard's thread writes itself
_WAIT_SECONDS = 60.0  # seconds for the thread to end


class JournalError(RunError):
    """The journal cannot be written, so the shard cannot keep what it would acknowledge."""


class Identity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The owner of a folder: shard `shard` of `run`, or the shard of `site`. `token` is the folder's random
    name, by which the hub recognizes the shard; `incarnation` is the hub's latest number for this shard;
    `over`: the run has ended."""

    format: Literal[1] = 1  # another one is refused
    run: str
    shard: int
    site: str = ""
    token: str = ""
    incarnation: int = 0
    over: bool = False


_identities = msgspec.json.Decoder(Identity)


class Folder:
    """The folder of shard `shard` of `run`, or of the shard of `site`, locked while open.

    Raises UserError if the folder belongs to another run or shard, or another shard is at work there.
    """

    def __init__(self, path: Path, run: str, shard: int, site: str = "") -> None:
        self.path = path
        if (path / _HUBS).exists():
            raise UserError(f"{path}: holds a hub's journal; give the shard another --directory")
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = open_locked(path / _LOCK)
        except BlockingIOError:
            raise UserError(
                f"{path}: another shard is at work there, or was stopped and holds it: end that one first, "
                "or give this one another --directory"
            ) from None
        except OSError as error:
            raise UserError(f"{path}: cannot keep a shard's journal there: {error.strerror}") from None
        try:
            self.identity = self._read(run, shard, site)
            if self.identity.over:  # that run has ended: start with an empty folder
                self.clear()
            if self.identity.over or not self.identity.token:
                self.remember(over=False, incarnation=0, token=secrets.token_hex(8))
        except BaseException:
            os.close(self._lock)
            raise

    def _read(self, run: str, shard: int, site: str) -> Identity:
        path = self.path / _IDENTITY
        try:
            raw = path.read_bytes()
        except FileNotFoundError:
            return Identity(run=run, shard=shard, site=site)
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from None
        found = decoded(_identities, raw, CheckpointError, f"{path}: not a shard's")
        if (found.run, found.shard, found.site) != (run, shard, site):
            raise UserError(
                f"{self.path}: holds {_who(found.shard, found.site)} of run {found.run!r}; this is "
                f"{_who(shard, site)} of run {run!r}: give it another --directory, or remove that one"
            )
        return found

    def remember(self, **changes: Any) -> None:
        """Change fields of the identity on disk, atomically."""
        self.identity = msgspec.structs.replace(self.identity, **changes)
        path, beside = self.path / _IDENTITY, self.path / f"{_IDENTITY}.new"
        try:
            opened(lambda: beside.write_bytes(msgspec.json.encode(self.identity)))
            beside.replace(path)
        except OSError as error:
            raise JournalError(f"{path}: cannot be written: {error.strerror}") from None

    def segments(self) -> dict[int, Path]:
        """The journal's segment files, by number, sorted."""
        paths = [self.path / name for name in files_in(self.path, "journal-*.bin")]
        found = {int(path.stem.partition("-")[2]): path for path in paths}
        return dict(sorted(found.items()))

    def segment(self, number: int) -> Path:
        return self.path / f"journal-{number:06d}.bin"

    @property
    def spare(self) -> Path:
        """Path of the spare segment. Overwriting its allocated pages is cheaper than allocating new ones."""
        return self.path / _SPARE

    @property
    def incomplete(self) -> Path:
        """Path of a file that is there while the folder does not hold the whole shard: no shard can start
        from it."""
        return self.path / _INCOMPLETE

    def retire_before(self, number: int, first: int = 0) -> None:
        """Retire the segments below `number`. The largest becomes the spare. Segments below `first` are only
        unlinked: payloads read from them may still be in use, in place."""
        for each, path in [(each, path) for each, path in self.segments().items() if each < number]:
            small = self.spare.exists() and self.spare.stat().st_size >= path.stat().st_size
            if small or each < first:
                path.unlink()
            else:
                path.replace(self.spare)

    def clear(self) -> None:
        """Remove all segments and the spare."""
        for path in [*self.segments().values(), self.spare]:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        os.close(self._lock)


def _who(shard: int, site: str) -> str:
    return f"the shard of site {site!r}" if site else f"shard {shard}"


def read_segments(folder: Folder, first: int) -> Iterator[Item]:
    """Yield all records from segment `first` on, in order.

    The incomplete record that a crash left at the end of the last segment is cut off. Raises CheckpointError
    if a record before that is missing or damaged.
    """
    paths = folder.segments()
    wanted = [number for number in paths if number >= first]
    if wanted != list(range(first, first + len(wanted))):
        raise CheckpointError(
            f"{folder.segment(first)}: the journal has gaps; the shard cannot go on from it"
        )
    for number in wanted:
        yield from _read_segment(paths[number], number, last=number == wanted[-1])


def _read_segment(path: Path, number: int, last: bool) -> Iterator[Item]:
    with path.open("r+b") as file:
        size = os.fstat(file.fileno()).st_size
        # Payloads stay in place: the mapping lives as long as one of them does.
        whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if size else b"")
        end = 0
        try:
            for record, payload, end in records(whole, number):  # noqa: B007
                yield record, payload
            if end < size and not last:
                raise DamagedLogError(f"damaged at byte {end}")
        except StoreError as error:
            raise CheckpointError(f"{path}: {error}") from None
        except DamagedLogError as error:
            raise CheckpointError(f"{path}: {error}; the shard cannot go on from it") from None
        if end < size:
            file.truncate(end)


class Journal:
    """Appends records to the segments of `folder`, starting with segment `number`.

    All calls come from the shard's thread. `fileno` is readable when `release` has something to do. A write
    error is raised as JournalError by `append`, `when_written` or `release`, by the next `release` at the
    latest.

    A journal that is not `required` breaks instead (`is_broken`, `trouble`). Its segments are removed, since
    they lack later records; waiting actions run, and nothing is written until `begin_segment` starts again
    from the whole state.
    """

    def __init__(self, folder: Folder, number: int, *, sync: bool = False, required: bool = True) -> None:
        self.folder, self.number, self._sync = folder, number, sync
        self.required = required
        self._first = number  # segments below were written by an earlier process
        self.appended = 0  # records
        self.size = 0  # bytes of this segment
        self._stamp = 0
        self._pending: list[Pending] = []  # appended, not given to a writer yet
        self._pending_bytes = 0
        self._bytes_appended, self._bytes_written = 0, 0
        self._error = ""
        self._waiting = Waiting()
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # Owned by the journal's thread; by the shard's thread while that one has no job.
        self._written = 0  # records that are durable
        self._file: LogFile | None = None  # the segment
        self._count = 0  # records written
        # Jobs, each with the number of repairs before it.
        self._items: queue.SimpleQueue[tuple[int, Callable[[], None]] | None] = queue.SimpleQueue()
        self._given, self._done = 0, 0  # jobs
        self._mended = 0  # repairs of a broken journal
        self._thread = threading.Thread(target=self._work, name="atoll-journal", daemon=True)
        self._thread.start()

    @property
    def fileno(self) -> int:
        return self._woken

    @property
    def is_full(self) -> bool:
        """True if the backlog of unwritten bytes is at its limit."""
        return not self.is_broken and self._bytes_appended - self._bytes_written > _BACKLOG

    @property
    def is_broken(self) -> bool:
        """True if nothing is written, and the shard cannot be restored from this journal."""
        return bool(self._error) and not self.required

    @property
    def owner(self) -> str:
        """The shard, for people."""
        return _who(self.folder.identity.shard, self.folder.identity.site)

    @property
    def trouble(self) -> str:
        """Why the journal is broken."""
        return self._error

    def begin_segment(
        self,
        state: bytes = b"",
        parts: Sequence[tuple[StatePayload, Payload]] = (),
        *,
        fresh: bool = False,
    ) -> int:
        """Direct later records to a new segment, which starts with a Begun record; returns its number."""
        if self.is_broken:
            self._mend()
        self._hand_over()
        self.number += self.size > 0
        self.size = 0
        path, number = self.folder.segment(self.number), self.number
        self._stamp = stamp_of(number, secrets.randbits(32))
        self._give(lambda: self._open(path))
        identity = self.folder.identity
        self.append(Begun(identity.run, identity.shard, fresh, state, len(parts)))
        for part, payload in parts:
            self.append(part, payload)
        self._hand_over()
        return number

    def begin_anew(self) -> int:
        """Remove all earlier segments and begin a new one; returns its number."""
        self._hand_over()
        self._give(self.folder.clear)
        return self.begin_segment()

    def append(self, record: Record, payload: Payload = None) -> None:
        """Append a record. The payload must not change any more."""
        if self.is_broken:
            return
        header = encode_header(record)
        size = FRAME_BYTES + len(header) + (memoryview(payload).nbytes if payload is not None else 0)
        self.appended += 1
        self.size += size
        self._bytes_appended += size
        self._pending.append((self._stamp, header, payload))
        self._pending_bytes += size
        if self._pending_bytes > _SMALL:
            self._hand_over()

    def drop_before(self, number: int) -> None:
        """Retire the segments below `number`, which a snapshot replaces."""
        self._give(lambda: self.folder.retire_before(number, self._first))

    def when_written(self, act: Callable[[], None]) -> None:
        """Call `act` once all records so far are written: at once, or in a later `release`."""
        if self._pending:
            if self._sync or self._done < self._given:
                self._hand_over()
            else:
                self._write_here()
        if self.is_broken:
            self._let_go()
            act()
            return
        if not self._waiting and self._written == self.appended:
            act()
            return
        self._waiting.add(self.appended, act)
        if self._written == self.appended:  # the thread checked `_waiting` just before this act was added
            self.release()

    def release(self) -> None:
        """Run the waiting actions whose records are written. Raises JournalError if the journal cannot be
        written."""
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self._woken, 4096)) == 4096:
                pass
        if self._has_failed():
            self._let_go()
        self._waiting.release(self._written)

    def _has_failed(self) -> bool:
        """True if the journal is broken. Raises JournalError if it cannot be written and is required."""
        error = self._error  # read once: the thread may set it at any moment
        if error and self.required:
            raise JournalError(error)
        return bool(error)

    def _let_go(self) -> None:
        """Drop pending records of a broken journal and run all waiting actions."""
        self._pending, self._pending_bytes = [], 0
        self._waiting.release(None)

    def _mend(self) -> None:
        """Leave the broken state for a new segment. The thread skips the jobs from before."""
        self._let_go()
        self.size = max(1, self.size)  # a snapshot may refer to this number
        self._mended += 1
        self._error = ""
        records, size = self.appended, self._bytes_appended
        self._give(lambda: self._count_as_written(records, size))

    def _count_as_written(self, records: int, size: int) -> None:
        """Count all records from before the journal was mended, which nobody waits for any more."""
        self._count, self._bytes_written = records, size
        self._tell()

    def close(self) -> None:
        """Write pending records and end the thread."""
        self._hand_over()
        self._items.put(None)
        self._thread.join(_WAIT_SECONDS)
        if not self._thread.is_alive():
            with contextlib.suppress(OSError):
                self._seal()
            for each in (self._woken, self._wake):
                os.close(each)

    # -- writing ------------------------------------------------------------------------------------------

    def _hand_over(self) -> None:
        """Give pending records to the thread."""
        if self._pending:
            pending, size = self._pending, self._pending_bytes
            self._pending, self._pending_bytes = [], 0
            self._give(lambda: self._write(pending, size))

    def _give(self, job: Callable[[], None]) -> None:
        self._given += 1
        self._items.put((self._mended, job))

    def _write_here(self) -> None:
        """Write pending records on the shard's thread, while the journal's thread is idle."""
        pending, size = self._pending, self._pending_bytes
        self._pending, self._pending_bytes = [], 0
        if not self._error:
            try:
                self._write(pending, size)
            except OSError as error:
                self._fail(error)
        if not self._has_failed():
            self._written = self._count

    def _work(self) -> None:
        """Body of the journal's thread."""
        while (item := self._items.get()) is not None:
            written, (mended, job) = self._written, item
            try:
                if not self._error and mended == self._mended:  # in this order: see `_mend`
                    job()
                    if not self._sync or self._items.empty():  # one sync for all queued jobs
                        self._publish()
            except OSError as error:
                self._fail(error)
            news = self._written > written
            self._done += 1  # from here on the shard's thread may write itself
            if self._error or (news and self._waiting):  # else nothing waits for it
                self._tell()

    def _publish(self) -> None:
        if self._sync and self._written < self._count and self._file is not None:
            self._file.sync()
        self._written = self._count

    def _fail(self, error: OSError) -> None:
        path = self.folder.segment(self.number)
        said = f"{self.owner} cannot write its journal {path}: {error.strerror}; "
        if not self.required:
            try:
                self._forsake()
            except OSError:  # a restarted shard would resume from the remaining files
                self.required = True
        if self.required:
            said += (
                "it ends rather than acknowledge what it could not keep. Nothing that it has "
                "acknowledged is lost: put that right, and start it again with the same --directory"
            )
        else:
            said += (
                "it goes on without one: if it is killed before there is room, the run goes on from a "
                'checkpoint only (server.journal = "required" ends the run instead)'
            )
        self._error = said

    def _forsake(self) -> None:
        """Remove all segments, which will lack records acknowledged from now on."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()
        self.folder.clear()

    def _open(self, path: Path) -> None:
        """Continue in a new segment, in the spare file if there is one."""
        self._seal()
        try:
            if path.exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
            self.folder.spare.rename(path)
            file = opened(lambda: os.open(path, os.O_WRONLY | os.O_CLOEXEC))
        except FileNotFoundError:
            flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
            file = opened(lambda: os.open(path, flags, 0o644))
        self._file = LogFile(file)
        if self._sync:
            self._sync_folder()

    def _sync_folder(self) -> None:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        folder = opened(lambda: os.open(self.folder.path, flags))
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _seal(self) -> None:
        """Close the segment, and cut off leftovers of an earlier use behind its end."""
        file, self._file = self._file, None
        if file is not None:
            file.seal(sync=self._sync)

    def _write(self, pending: Sequence[Pending], size: int) -> None:
        assert self._file is not None
        self._file.append(
            [
                piece
                for stamp, header, payload in pending
                for piece in encode_frame(SHARD, stamp, header, payload, self._sync)
            ]
        )
        was_full = self.is_full
        self._bytes_written += size
        self._count += len(pending)
        if was_full:
            self._tell()

    def _tell(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake, b"\0")
