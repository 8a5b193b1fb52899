"""Reader of safetensors files, one tensor at a time.

Every offset and shape in a file is compared with the file's length before memory is allocated for it.
"""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atoll.core.errors import CheckpointError
from atoll.tensors.lazy import LazyTensor
from atoll.tensors.tensorfile import CHECKSUM, DTYPES, checksum_place, open_regular

_LENGTH = 8  # bytes of the header's length, at the file's beginning
_LONGEST_HEADER = 100_000_000  # bytes, the safetensors library's limit
_BLOCK = 2**22  # bytes
_MOST_BYTES = 2**62  # of one tensor: torch counts strides and bytes in 64 bits
_KNOWN = {name: dtype for dtype, name in DTYPES.items()}


class TensorEntry(NamedTuple):
    """One tensor of a file, in the file's bytes `begin` to `end`."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class TensorFile:
    """An open safetensors file, with its tensors' `entries` by name; as a context manager, closes the file.

    Raises CheckpointError, one line that begins with `path`, if the file is missing, cut off or damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self._file = open_regular(self.path, buffering=0)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
        try:
            self.nbytes = os.fstat(self._file.fileno()).st_size
            self._head = self._read_head()
            self.entries, self._metadata = self._parsed(self._head)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def tensor(self, name: str) -> Tensor:
        """Read a tensor of the file into host memory."""
        entry = self.entries[name]
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        self._fill(tensor.reshape(-1).view(torch.uint8).numpy().data, entry.begin)
        return tensor

    def lazy(self, name: str) -> LazyTensor:
        """Return a tensor of the file that each use reads; the file must still be open then."""
        entry = self.entries[name]
        return LazyTensor(lambda: self.tensor(name), entry.shape, entry.dtype)

    def verify(self) -> None:
        """Read the whole file, and compare its checksum if it has one (`put_checked_tensors`)."""
        place = checksum_place(self._head)
        expected = self._metadata.get(CHECKSUM)
        head = bytearray(self._head)
        if expected is not None:
            head[place : place + 8] = b"00000000"
        checksum = zlib.crc32(head)
        block = memoryview(bytearray(min(_BLOCK, self.nbytes)))
        for begin in range(len(head), self.nbytes, _BLOCK):
            part = block[: min(_BLOCK, self.nbytes - begin)]
            self._fill(part, begin)
            checksum = zlib.crc32(part, checksum)
        if expected is not None and expected != f"{checksum:08x}":
            raise self._damaged("its checksum differs from the recorded one")

    def _fill(self, into: memoryview, begin: int) -> None:
        done = 0
        while done < len(into):
            try:
                got = os.preadv(self._file.fileno(), [into[done:]], begin + done)
            except OSError as error:
                raise self._damaged(str(error.strerror)) from None
            if not got:
                raise self._damaged(
                    f"it ends at {begin + done} bytes, and had {self.nbytes} when it was opened"
                )
            done += got

    def _read_head(self) -> bytes:
        if self.nbytes < _LENGTH:
            raise self._damaged(f"{self.nbytes} bytes are no file of tensors")
        length = bytearray(_LENGTH)
        self._fill(memoryview(length), 0)
        header = int.from_bytes(length, "little")
        if header > min(_LONGEST_HEADER, self.nbytes - _LENGTH):
            raise self._damaged(f"a header of {header} bytes in a file of {self.nbytes}")
        head = bytearray(_LENGTH + header)
        self._fill(memoryview(head), 0)
        return bytes(head)

    def _parsed(self, head: bytes) -> tuple[dict[str, TensorEntry], dict[str, str]]:
        try:
            header = json.loads(head[_LENGTH:], object_pairs_hook=_without_twice)
            metadata = header.pop("__metadata__", {})
            entries = {str(name): _entry(fields, len(head)) for name, fields in header.items()}
            checksum = metadata.get(CHECKSUM)
            if checksum is not None and not (
                checksum_place(head) > 0 and re.fullmatch("[0-9a-f]{8}", checksum)
            ):
                raise ValueError("its checksum is not 8 hexadecimal digits")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise self._damaged(f"its header is not one of tensors: {error}") from None
        end = len(head)
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
            if entry.begin != end:
                raise self._damaged(f"{name!r} begins at {entry.begin} bytes, where {end} was expected")
            end = entry.end
        if end != self.nbytes:
            raise self._damaged(f"{self.nbytes} bytes, and its header speaks of {end}")
        return entries, metadata

    def _damaged(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: damaged: {why}; take another file")


def read_lazily(path: Path) -> dict[str, LazyTensor]:
    """Return the tensors of a file, each read when used. The file stays open while any of them lives."""
    file = TensorFile(path)
    return {name: file.lazy(name) for name in file.entries}


def _entry(fields: Any, start: int) -> TensorEntry:
    dtype, shape = _KNOWN[fields["dtype"]], fields["shape"]
    begin, end = fields["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in [*shape, begin, end]):
        raise ValueError("sizes and places are whole numbers")
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{shape} of {fields['dtype']} in {end - begin} bytes")
    # A size of 0 must not hide others that are too large for a stride.
    if math.prod(max(1, size) for size in shape) * dtype.itemsize > _MOST_BYTES:
        raise ValueError("a shape of more bytes than any machine has")
    return TensorEntry(dtype, tuple(shape), start + begin, start + end)


def _without_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found
