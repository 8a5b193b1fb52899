"""The scratch file of the disk tier: blocks that threads read and write, each with a checksum.

The file has no name: it is opened without one (O_TMPFILE), or loses its name at once on a file system without
such files. So it ends with the process, however that ends, and nobody ever loads its content; the checksums
are in this process's memory. It is preallocated, and read and written past the page cache (O_DIRECT), if the
file system allows both.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import mmap
import os
import queue
import secrets
import threading
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from atoll.core.errors import AtollError, DeadlineError, RunError, UserError
from atoll.core.units import format_bytes, format_seconds
from atoll.memory.arena import exactly

PAGE = 4096  # bytes: direct transfers move whole pages, in memory and in the file
DISK_SECONDS = 120.0  # the longest wait for a transfer and those before it
THREADS = 2  # one computes a checksum while the other transfers
_PREFIX = ".atoll-scratch-"
_NEVER = -1  # the size of a block that was never written
_WAY_OUT = "go on from a checkpoint, with memory.disk in a folder of another disk"


class Transfer:
    """A read or a write that is under way; `name` describes it in errors."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._done = threading.Event()
        self._error: AtollError | None = None

    @property
    def done(self) -> bool:
        """True once the transfer has ended, well or badly."""
        return self._done.is_set()

    def wait(self, seconds: float = DISK_SECONDS) -> None:
        """Wait until it is done. Raises its error (see DiskFile), or DeadlineError after `seconds`."""
        self.wait_over(seconds)
        if self._error is not None:
            raise self._error

    def wait_over(self, seconds: float = DISK_SECONDS) -> None:
        """Wait until it is done, well or badly. Raises DeadlineError after `seconds`."""
        if not self._done.wait(seconds):
            raise DeadlineError(
                f"{self.name} has not come to an end in {format_seconds(seconds)}: the disk is too slow or "
                "stands still"
            )

    def end(self, error: AtollError | None) -> None:
        """Mark the transfer as done, on the thread that made it."""
        self._error = error
        self._done.set()


class DiskFile:
    """`nbytes // block_bytes` blocks in a file without a name in `folder`, which is made if need be.

    A block is used as `take`, `write` and `read` in turn, `give`. Transfers begin in the order of the calls,
    on `threads` threads. Two transfers of one block, or of one place in memory, must follow each other. A
    transfer fails if one that it is `after` fails. It begins when those that it is `behind` have ended, well
    or badly. Both must be earlier transfers of this file.

    Errors of transfers are RunErrors that name folder and block: a full disk (only if the file system could
    not promise the room before), a disk that cannot be read or written, a block that is cut off, and a block
    with another content than was last written to it.

    Args:
        block_bytes: rounded up to whole pages.
        reserved: bytes of room to take on the disk at first; `reserve` takes the rest. None: all.

    Attributes:
        direct: True if transfers go past the page cache.
        reason: why they do or do not.
        peak: the most bytes that were in use at once.

    Raises UserError if the folder cannot be written to, or has no room for all blocks.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        nbytes: int,
        block_bytes: int,
        *,
        threads: int = THREADS,
        reserved: int | None = None,
    ) -> None:
        self.folder, self.block_bytes = Path(folder), -(-block_bytes // PAGE) * PAGE
        self.blocks = nbytes // self.block_bytes
        if self.blocks < 1:
            raise UserError(
                f"memory.disk: {nbytes} bytes are less than a block of the model; raise it to at least "
                f"{exactly(self.block_bytes)}"
            )
        self._reserved = 0  # bytes
        self._file = self._make()
        try:
            self.reserve(reserved)
        except UserError:
            os.close(self._file)
            raise
        self.direct, self.reason = try_direct(self._file)
        self._free = list(range(self.blocks - 1, -1, -1))  # the lowest is taken first
        self._sizes = array.array("q", [_NEVER]) * self.blocks  # bytes written last, by block
        self._sums = array.array("L", [0]) * self.blocks
        self.peak = 0
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=_serve, args=(self._jobs,), name=f"atoll-disk-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def _make(self) -> int:
        """Return the descriptor of a new file."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _remove_left(self.folder)
            file = open_nameless(self.folder)
        except OSError as error:
            raise UserError(
                f"memory.disk: {self.folder} cannot be used: {error.strerror}; name a folder that can be "
                "written to"
            ) from None
        return file

    def reserve(self, nbytes: int | None = None) -> None:
        """Take room on the disk for `nbytes` in all; None for all blocks. Raises UserError if there is too
        little."""
        wanted = self.nbytes if nbytes is None else min(nbytes, self.nbytes)
        if wanted <= self._reserved:
            return
        try:
            os.posix_fallocate(self._file, self._reserved, wanted - self._reserved)
            self._reserved = wanted
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                room = os.statvfs(self.folder)
                why = f"{error.strerror}, {format_bytes(room.f_bavail * room.f_frsize)} are free"
            else:
                why = str(error.strerror)
            raise UserError(
                f"memory.disk: {self.folder} does not take {format_bytes(self.nbytes)}: {why}; lower the "
                "budget, or name another folder"
            ) from None

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self.blocks * self.block_bytes

    @property
    def used(self) -> int:
        """Bytes of the blocks that are in use."""
        return (self.blocks - len(self._free)) * self.block_bytes

    @property
    def free_blocks(self) -> int:
        """The number of blocks that can still be taken."""
        return len(self._free)

    def take(self) -> int:
        """Return a free block, which holds nothing yet. Raises UserError if none is left."""
        if not self._free:
            raise UserError(
                f"memory.disk: all of {format_bytes(self.nbytes)} in {self.folder} are in use; raise it to "
                f"at least {exactly(self.nbytes + self.block_bytes)}"
            )
        block = self._free.pop()
        self.peak = max(self.peak, self.used)
        return block

    def give(self, block: int) -> None:
        """Free `block`, of which no transfer may be under way. Its content cannot be read any more."""
        self._sizes[block] = _NEVER
        self._free.append(block)

    def write(
        self, block: int, source: Tensor, after: Sequence[Transfer] = (), behind: Sequence[Transfer] = ()
    ) -> Transfer:
        """Begin to write `source`: 1-D, uint8, whole pages that begin on a page, at most a block.

        Nobody may change it until the transfer is done.
        """
        bytes_ = self._bytes(block, source)
        name = f"{self.folder}: writing block {block} of the disk tier"
        return self.begin(name, lambda: self._write(block, bytes_), after, behind)

    def read(
        self, block: int, into: Tensor, after: Sequence[Transfer] = (), behind: Sequence[Transfer] = ()
    ) -> Transfer:
        """Begin to fill `into`, which must have the size that was written last."""
        bytes_ = self._bytes(block, into)
        name = f"{self.folder}: reading block {block} of the disk tier"
        return self.begin(name, lambda: self._read(block, bytes_), after, behind)

    def _bytes(self, block: int, memory: Tensor) -> memoryview:
        nbytes = memory.nbytes
        if not 0 <= block < self.blocks or nbytes > self.block_bytes:
            raise ValueError(f"{nbytes} bytes, block {block}: there are {self.blocks} of {self.block_bytes}")
        if nbytes % PAGE or memory.data_ptr() % PAGE:
            raise ValueError(f"{nbytes} bytes at {memory.data_ptr():#x} are not whole pages of {PAGE}")
        return memory.numpy().data

    def begin(
        self,
        name: str,
        job: Callable[[], object],
        after: Sequence[Transfer] = (),
        behind: Sequence[Transfer] = (),
    ) -> Transfer:
        """Let a thread of this file call `job` in its turn, as if it were a transfer."""
        transfer = Transfer(name)

        def run() -> None:
            error: AtollError | None = None
            try:
                # Each was begun earlier, so the earliest transfer under way waits for none.
                for each in behind:
                    each.wait_over(DISK_SECONDS)
                for each in after:
                    each.wait(DISK_SECONDS)
                job()
            except AtollError as raised:
                error = raised
            except BaseException as raised:  # raised to whoever waits for the transfer
                error = RunError(f"{name}: {_why(raised)}")
            finally:
                transfer.end(error)

        self._jobs.put(run)
        return transfer

    def _write(self, block: int, source: memoryview) -> None:
        self._sizes[block] = _NEVER  # a half-written block is never read
        checksum = zlib.crc32(source)
        done = 0
        while done < len(source):
            done += os.pwrite(self._file, source[done:], block * self.block_bytes + done)
        self._sums[block], self._sizes[block] = checksum, len(source)

    def _read(self, block: int, into: memoryview) -> None:
        what = f"{self.folder}: block {block} of the disk tier"
        if self._sizes[block] != len(into):
            held = "nothing" if self._sizes[block] == _NEVER else f"{self._sizes[block]} bytes"
            raise RunError(f"{what} holds {held}, and {len(into)} bytes were to be read")
        done = 0
        while done < len(into):
            count = os.preadv(self._file, [into[done:]], block * self.block_bytes + done)
            if not count:
                raise RunError(f"{what} is cut off: {done} of its {len(into)} bytes are there; {_WAY_OUT}")
            done += count
        checksum = zlib.crc32(into)
        if checksum != self._sums[block]:
            raise RunError(
                f"{what} is damaged: the checksum of its {len(into)} bytes is {checksum:08x}, and was "
                f"{self._sums[block]:08x} when they were written; {_WAY_OUT}"
            )

    def close(self, seconds: float = DISK_SECONDS) -> None:
        """End the threads, after the transfers that were begun, and delete the file.

        Raises DeadlineError if a transfer does not end within `seconds`; the file then ends with the process.
        """
        if self._file < 0:
            return
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(seconds)
            if thread.is_alive():
                raise DeadlineError(
                    f"{self.folder}: transfers of the disk tier have not come to an end in "
                    f"{format_seconds(seconds)}: the disk is too slow or stands still"
                )
        os.close(self._file)
        self._file = -1


def _serve(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()


def _why(error: BaseException) -> str:
    if not isinstance(error, OSError):
        return f"{type(error).__name__}: {error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{error.strerror}: the file system has not kept the room that it gave when the file was made"
    return str(error.strerror)


def open_nameless(folder: Path) -> int:
    """Open a new file in `folder` that has no name, or loses it at once, so that it ends with its process."""
    flags = os.O_RDWR | os.O_CLOEXEC
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(folder, flags | os.O_TMPFILE, 0o600)
        except OSError as error:
            # A kernel that does not know the flag reports an attempt to write to a folder.
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
    path = folder / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
    file = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    with contextlib.suppress(FileNotFoundError):  # another process may have removed the name as a left-over
        path.unlink()
    return file


def _remove_left(folder: Path) -> None:
    """Remove files whose process died between making the file and unlinking its name.

    Such a file has our prefix, is this user's, ordinary and empty, as a file is until it has lost its name.
    The owner of a file made at this moment was about to remove the name itself.
    """
    for path in folder.glob(f"{_PREFIX}*"):
        found = path.lstat()
        if found.st_uid == os.getuid() and found.st_size == 0 and path.is_file() and not path.is_symlink():
            with contextlib.suppress(OSError):
                path.unlink()


def try_direct(file: int) -> tuple[bool, str]:
    """Let transfers of an open file go past the page cache, if the file system allows it.

    Returns:
        Whether they do, and why.
    """
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return False, "this system has no direct transfers"
    before = fcntl.fcntl(file, fcntl.F_GETFL)
    page = mmap.mmap(-1, PAGE)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, before | flag)
        if os.pwrite(file, page, 0) == PAGE == os.preadv(file, [page], 0):
            return True, "the file system makes direct transfers of whole pages"
        why = "a page was not transferred whole"
    except OSError as error:
        why = str(error.strerror)
    fcntl.fcntl(file, fcntl.F_SETFL, before)
    return False, f"the file system makes no direct transfers of whole pages: {why}"
