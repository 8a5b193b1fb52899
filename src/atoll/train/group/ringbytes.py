"""Numbers, and byte strings of any length, over a channel's collectives, which take tensors of one size.

A short byte string, as nearly all are, takes one collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec
import torch

from atoll.core.decoding import from_msgpack
from atoll.core.errors import RunError
from atoll.train.group.channel import Channel

_Word = TypeVar("_Word", bound=msgspec.Struct)
_FIRST = 248  # bytes of the string that travel with its length
_COUNT = 8  # bytes of the length


def gather_bytes(channel: Channel, payload: bytes, what: str) -> list[bytes]:
    """Return each member's byte string, in the order of ranks. A collective; `what` names it for errors."""
    parts, work = channel.all_gather(_head(payload))
    channel.wait(work, what)
    sizes = [_size(part) for part in parts]
    longest = max(sizes)
    if longest <= _FIRST:
        return [_bytes(part[_COUNT : _COUNT + size]) for part, size in zip(parts, sizes, strict=True)]
    parts, work = channel.all_gather(_padded(payload, longest))
    channel.wait(work, what)
    return [_bytes(part[:size]) for part, size in zip(parts, sizes, strict=True)]


def gather_words(channel: Channel, own: _Word, what: str) -> list[_Word]:
    """Return every member's word, by rank. Words are structs of one type. A collective; `what` names it for
    errors.

    Raises RunError for a word of another type.
    """
    try:
        words = gather_bytes(channel, msgspec.msgpack.encode(own), what)
        return [from_msgpack(each, type(own)) for each in words]
    except msgspec.DecodeError as error:
        raise RunError(
            f"worker {channel.place.name} cannot read a worker's word on {what}: {error}"
        ) from None


def sum_values(channel: Channel, values: Sequence[float], what: str) -> list[float]:
    """Return the sums of the members' `values`. A collective; `what` names it for errors."""
    summed = torch.tensor(values)
    channel.wait(channel.sum(summed), what)
    sums: list[float] = summed.tolist()
    return sums


def broadcast_bytes(channel: Channel, payload: bytes | None, what: str, root: int = 0) -> bytes:
    """Return the byte string of the member of rank `root`; the others give None. A collective; `what` names
    it for errors."""
    first = _head(payload or b"")
    channel.wait(channel.broadcast(first, root), what)
    size = _size(first)
    if size <= _FIRST:
        return _bytes(first[_COUNT : _COUNT + size])
    whole = _padded(payload or b"", size)
    channel.wait(channel.broadcast(whole, root), what)
    return _bytes(whole)


def _head(payload: bytes) -> torch.Tensor:
    return _padded(len(payload).to_bytes(_COUNT, "little") + payload[:_FIRST], _COUNT + _FIRST)


def _padded(payload: bytes, size: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(payload.ljust(size, b"\0")), dtype=torch.uint8)


def _size(head: torch.Tensor) -> int:
    return int.from_bytes(head[:_COUNT].numpy().tobytes(), "little")


def _bytes(part: torch.Tensor) -> bytes:
    return part.numpy().tobytes()
