"""A file for values that do not fit in memory while a model is built: pieces of any size, each with a
checksum."""

from __future__ import annotations

import contextlib
import os
import tempfile
import zlib
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from atoll.core.errors import RunError, UserError
from atoll.core.units import format_bytes


class Piece(NamedTuple):
    """The place of `nbytes` bytes in the file, and their CRC-32."""

    begin: int
    nbytes: int
    checksum: int


class SpillFile:
    """At most `budget` bytes in a file of `folder` that has no name there, so that none is left behind.

    Tensors given to it are contiguous, on the CPU, of any dtype.

    Attributes:
        end: the length of the file in bytes: the end of its last piece.
    """

    def __init__(self, folder: str | os.PathLike[str], budget: int) -> None:
        self.folder, self.budget = Path(folder), budget
        self.end = 0
        self._free: dict[int, list[int]] = {}  # begins of free places, by size
        self._sizes: dict[int, int] = {}  # sizes of free places, by end
        try:
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise UserError(
                f"memory.disk: no file can be made in {folder}: {error.strerror}; name another folder"
            ) from None

    def keep(self, memory: Tensor) -> Piece:
        """Write a copy of a tensor. Raises UserError if the budget or the disk has no more room."""
        raw = raw_bytes(memory)
        free = self._free.get(len(raw))
        if free:
            begin = free.pop()
            del self._sizes[begin + len(raw)]
        else:
            begin = self.end
        if begin + len(raw) > self.budget:
            raise UserError(
                f"memory.disk: the budget of {format_bytes(self.budget)} in {self.folder} does not hold the "
                f"parameters; give at least {format_bytes(begin + len(raw))}, and what training adds"
            )
        self.end = max(self.end, begin + len(raw))
        try:
            done = 0
            while done < len(raw):
                done += os.pwrite(self._file.fileno(), raw[done:], begin + done)
        except OSError as error:
            raise UserError(
                f"memory.disk: {self.folder} cannot be written to: {error.strerror}; name another folder"
            ) from None
        return Piece(begin, len(raw), zlib.crc32(raw))

    def copy_into(self, piece: Piece, into: Tensor) -> None:
        """Fill `into`, of the piece's size. Raises RunError if the bytes are not those that were written."""
        raw = raw_bytes(into)
        done, why = 0, "its checksum is not that of what was written"
        try:
            while done < len(raw):
                got = os.preadv(self._file.fileno(), [raw[done:]], piece.begin + done)
                if not got:
                    break
                done += got
        except OSError as error:
            why = str(error.strerror)
        if done < len(raw) or zlib.crc32(raw) != piece.checksum:
            raise RunError(
                f"memory.disk: {piece.nbytes} bytes at {piece.begin} of a file in {self.folder} are damaged: "
                f"{why}; build the model again, on another disk"
            )

    def free(self, piece: Piece) -> None:
        """Free a piece. Its place is used again for a piece of the same size; at the end of the file it goes
        back to the disk."""
        if not piece.nbytes:  # its place may be another piece's
            return
        self._free.setdefault(piece.nbytes, []).append(piece.begin)
        self._sizes[piece.begin + piece.nbytes] = piece.nbytes
        end = self.end
        while (nbytes := self._sizes.pop(self.end, 0)) > 0:
            self.end -= nbytes
            self._free[nbytes].remove(self.end)
        if self.end < end:
            with contextlib.suppress(OSError):  # the file then stays longer, and right
                os.ftruncate(self._file.fileno(), self.end)


def raw_bytes(memory: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    raw: memoryview = memory.detach().reshape(-1).view(torch.uint8).numpy().data
    return raw
