"""Files of tensors in the safetensors format, written one tensor at a time.

The format (https://github.com/huggingface/safetensors) is eight bytes of length, that many of JSON, and the
tensors' bytes. The library's own `save_file` first copies every tensor into host memory; this writer never
holds more than one.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import safetensors.torch
import torch
from torch import Tensor

from atoll.core.errors import CheckpointError
from atoll.tensors.lazy import LazyTensor, read_whole

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip
CHECKSUM = "atoll.crc32"  # in a file's metadata: of all its bytes, with zeros in the place of this
_NO_CHECKSUM = "00000000"
_COMPLEX = {torch.complex64, torch.complex128}  # the format has no name for both: stored as pairs of reals
_BLOCK = 2**20  # bytes


def check_tensor(tensor: Tensor, where: str) -> None:
    """Raise CheckpointError, naming the tensor, where the format cannot hold it."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        raise CheckpointError(f"{where}: a checkpoint holds dense tensors only, and this one is {kind}")
    if tensor.device.type == "meta":
        raise CheckpointError(f"{where}: the tensor is on the meta device and has no values to save")
    if tensor.dtype not in DTYPES and tensor.dtype not in _COMPLEX:
        raise CheckpointError(f"{where}: a checkpoint cannot hold tensors of {tensor.dtype}")


def storage_key(tensor: Tensor) -> object:
    """Equal for two tensors that are the same elements of the same memory, as tied parameters are."""
    if tensor.numel() == 0 or isinstance(tensor, LazyTensor):
        return id(tensor)
    storage = tensor.untyped_storage().data_ptr()
    return tensor.device, storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    """Write `tensors`, already checked, to a new file, through to the disk; returns its bytes and CRC-32."""
    with path.open("xb") as file:
        size, checksum = put_tensors(file, tensors)
        flush(file)
    return size, checksum


def put_tensors(file: BinaryIO, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    """Write `tensors`, already checked, where the file is; returns how many bytes, and their CRC-32."""
    names, head = _head(tensors, {"format": "pt"})
    size, checksum = len(head), _put(file, head, 0)
    for name in names:
        data = _bytes(_stored(tensors[name]))
        size += len(data)
        checksum = _put(file, data, checksum)
    return size, checksum


def put_checked_tensors(file: BinaryIO, tensors: Mapping[str, Tensor]) -> None:
    """Write `tensors`, already checked, to a new file, with its checksum in its metadata."""
    names, head = _head(tensors, {"format": "pt", CHECKSUM: _NO_CHECKSUM})
    checksum = _put(file, head, 0)
    for name in names:
        checksum = _put(file, _bytes(_stored(tensors[name])), checksum)
    file.seek(checksum_place(head))
    file.write(f"{checksum:08x}".encode())


def checksum_place(head: bytes) -> int:
    """Where in a file's first bytes its checksum is written; -1 where it has none."""
    key = f'"{CHECKSUM}":"'.encode()
    found = head.find(key)
    return -1 if found < 0 else found + len(key)


def _head(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> tuple[list[str], bytes]:
    """The names in the order in which the tensors follow, and what comes before them."""
    # Wide elements first, as the library does: then every tensor begins on a multiple of its element's size.
    names = sorted(tensors, key=lambda name: -_stored(tensors[name]).element_size())
    header: dict[str, object] = {"__metadata__": metadata}
    begin = 0
    for name in names:
        stored = _stored(tensors[name])
        end = begin + stored.numel() * stored.element_size()
        header[name] = {
            "dtype": DTYPES[stored.dtype],
            "shape": list(stored.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return names, len(text).to_bytes(8, "little") + text


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, on the CPU; raises CheckpointError if it is not of the format."""
    try:
        return safetensors.torch.load_file(path)
    except Exception as error:  # the library's errors share no narrower base class over its versions
        raise CheckpointError(f"{path}: not a file of tensors: {_first_line(error)}") from None


def parse_tensors(raw: bytes, what: str) -> dict[str, Tensor]:
    """As `read_tensors`, of a file's bytes; `what` names them in the error. The library holds every offset
    against the length of `raw` before it makes a tensor."""
    try:
        return safetensors.torch.load(raw)
    except Exception as error:
        raise CheckpointError(f"{what}: not tensors: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    """Return the text of an error of torch's, without the stack of C++ that may follow."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def as_complex(tensor: Tensor) -> Tensor:
    """The complex tensor that was stored as pairs of reals, shape (..., 2)."""
    return torch.view_as_complex(tensor.clone())  # in the file's memory it may not begin on a pair's multiple


def flush(file: BinaryIO) -> None:
    """Bring a file's bytes to the disk: a crash of the machine after this keeps them."""
    file.flush()
    os.fsync(file.fileno())


def open_regular(path: str | os.PathLike[str], *, buffering: int = -1) -> BinaryIO:
    """Open a regular file, or a link to one, for reading.

    Raises OSError for everything else. Opening a named pipe would wait without end, and a device may have no
    end.
    """
    _require_regular(Path(path).stat())
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _require_regular(os.fstat(descriptor))  # nothing else has taken its place meanwhile
        return os.fdopen(descriptor, "rb", buffering)
    except BaseException:
        os.close(descriptor)
        raise


def kind_of(mode: int) -> str:
    """Return the common word for a file system entry of this `st_mode`."""
    kinds = {
        stat.S_IFREG: "a file", stat.S_IFDIR: "a folder", stat.S_IFLNK: "a symbolic link",
        stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }  # fmt: skip
    return kinds.get(stat.S_IFMT(mode), "no file")


def _require_regular(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, f"it is {kind_of(found.st_mode)}, and not a file")


def checksum_of(path: Path) -> int:
    """The CRC-32 of a file. (SHA-256 is several times slower; damage, not malice, is what it is to find.)

    Raises OSError for anything but a regular file. A file that grows meanwhile is read to its first length.
    """
    checksum = 0
    with open_regular(path) as file:
        left = os.fstat(file.fileno()).st_size
        while left > 0 and (block := file.read(min(_BLOCK, left))):
            checksum = zlib.crc32(block, checksum)
            left -= len(block)
    return checksum


def _stored(tensor: Tensor) -> Tensor:
    """The tensor with its elements as the file has them, still where it is in memory."""
    tensor = tensor.detach()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.dtype in _COMPLEX else tensor


def _bytes(tensor: Tensor) -> memoryview:
    flat = read_whole(tensor).resolve_neg().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _put(file: BinaryIO, data: bytes | memoryview, checksum: int) -> int:
    """Write in blocks, each summed while it is in the cache."""
    view = memoryview(data)
    for begin in range(0, len(view), _BLOCK):
        block = view[begin : begin + _BLOCK]
        file.write(block)
        checksum = zlib.crc32(block, checksum)
    return checksum
