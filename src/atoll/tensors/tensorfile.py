"""Writer of safetensors files, one tensor at a time, and helpers for files of checkpoints.

The format (https://github.com/huggingface/safetensors) is eight bytes of length, a header of that many bytes
of JSON, and the tensors' bytes. The library's own `save_file` first copies every tensor into host memory;
this writer never holds more than one.
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
from atoll.tensors.wrapped import flattened, is_wrapped

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip
CHECKSUM = "atoll.crc32"  # metadata key: CRC-32 of all the file's bytes, with "00000000" in its own place
_NO_CHECKSUM = "00000000"
_COMPLEX = {torch.complex64, torch.complex128}  # the format lacks these: stored as pairs of reals
_BLOCK = 2**20  # bytes


def check_tensor(tensor: Tensor, where: str) -> None:
    """Raise CheckpointError, naming the tensor's place `where`, if the format cannot hold the tensor."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        raise CheckpointError(f"{where}: a checkpoint holds dense tensors only, and this one is {kind}")
    if tensor.device.type == "meta":
        raise CheckpointError(f"{where}: the tensor is on the meta device and has no values to save")
    if tensor.dtype not in DTYPES and tensor.dtype not in _COMPLEX:
        raise CheckpointError(f"{where}: a checkpoint cannot hold tensors of {tensor.dtype}")


def storage_key(tensor: Tensor) -> object:
    """Return a key that is equal for tensors of identical elements in memory, such as tied parameters."""
    if is_wrapped(tensor):
        return tuple(map(storage_key, flattened(tensor)[0].values()))
    if tensor.numel() == 0 or tensor.layout != torch.strided or isinstance(tensor, LazyTensor):
        return id(tensor)
    storage = tensor.untyped_storage().data_ptr()
    return tensor.device, storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    """Write tensors that passed `check_tensor` to a new file, and flush the file to the disk.

    Returns:
        The file's size in bytes, and its CRC-32.
    """
    with path.open("xb") as file:
        size, checksum = put_tensors(file, tensors)
        flush(file)
    return size, checksum


def put_tensors(file: BinaryIO, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    """Write tensors that passed `check_tensor` at the file's position.

    Returns:
        The number of bytes written, and their CRC-32.
    """
    names, head = _head(tensors, {"format": "pt"})
    size, checksum = len(head), _put(file, head, 0)
    for name in names:
        data = _bytes(_stored(tensors[name]))
        size += len(data)
        checksum = _put(file, data, checksum)
    return size, checksum


def put_checked_tensors(file: BinaryIO, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors that passed `check_tensor` to a new file, with a checksum in the file's metadata."""
    names, head = _head(tensors, {"format": "pt", CHECKSUM: _NO_CHECKSUM})
    checksum = _put(file, head, 0)
    for name in names:
        checksum = _put(file, _bytes(_stored(tensors[name])), checksum)
    file.seek(checksum_place(head))
    file.write(f"{checksum:08x}".encode())


def checksum_place(head: bytes) -> int:
    """Return the offset of a file's checksum in its first bytes `head`; -1 if there is none."""
    key = f'"{CHECKSUM}":"'.encode()
    found = head.find(key)
    return -1 if found < 0 else found + len(key)


def _head(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> tuple[list[str], bytes]:
    """Return the names in the order of the tensors in the file, and the bytes before the tensors."""
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
    """Read the tensors of a safetensors file into host memory, by name.

    Raises CheckpointError, one line that begins with `path`, if the file is not of the format.
    """
    try:
        return safetensors.torch.load_file(path)
    except Exception as error:  # the library's errors share no narrower base class over its versions
        raise CheckpointError(f"{path}: not a file of tensors: {_first_line(error)}") from None


def parse_tensors(raw: bytes, what: str) -> dict[str, Tensor]:
    """Return the tensors in the bytes of a safetensors file, by name.

    The library compares every offset with the length of `raw` before it makes a tensor. Raises
    CheckpointError, one line that begins with `what`, if the bytes are damaged.
    """
    try:
        return safetensors.torch.load(raw)
    except Exception as error:
        raise CheckpointError(f"{what}: not tensors: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    """Return the text of an error of torch's, without the stack of C++ that may follow."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def as_complex(tensor: Tensor) -> Tensor:
    """Return the complex tensor that was stored as pairs of reals, shape (..., 2)."""
    return torch.view_as_complex(tensor.clone())  # a clone is aligned to pairs; a file's memory may not be


def flush(file: BinaryIO) -> None:
    """Flush a file's bytes to the disk, so that they survive a crash of the machine."""
    file.flush()
    os.fsync(file.fileno())


def open_regular(path: str | os.PathLike[str], *, buffering: int = -1) -> BinaryIO:
    """Open a regular file, or a link to one, for reading.

    Raises OSError for everything else: to open a named pipe could wait for ever, and a device may have no
    end.
    """
    _require_regular(Path(path).stat())
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _require_regular(os.fstat(descriptor))  # the path may lead elsewhere by now
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
    """Return the CRC-32 of a file, which detects damage, not malice; SHA-256 is several times slower.

    Raises OSError for anything but a regular file. If the file grows meanwhile, only its first length counts.
    """
    checksum = 0
    with open_regular(path) as file:
        left = os.fstat(file.fileno()).st_size
        while left > 0 and (block := file.read(min(_BLOCK, left))):
            checksum = zlib.crc32(block, checksum)
            left -= len(block)
    return checksum


def _stored(tensor: Tensor) -> Tensor:
    """Return the tensor with elements in the file's form; complex numbers become a view as pairs."""
    tensor = tensor.detach()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.dtype in _COMPLEX else tensor


def _bytes(tensor: Tensor) -> memoryview:
    flat = read_whole(tensor).resolve_neg().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _put(file: BinaryIO, data: bytes | memoryview, checksum: int) -> int:
    """Write `data` and return `checksum` updated with it; works in blocks that fit the cache."""
    view = memoryview(data)
    for begin in range(0, len(view), _BLOCK):
        block = view[begin : begin + _BLOCK]
        file.write(block)
        checksum = zlib.crc32(block, checksum)
    return checksum
