"""The parts that a site's workers bring to a meeting, packed as one part of a meeting of sites.

Format: 4 bytes, little-endian, with the size of the heading; the heading (MessagePack) with workers and sizes
of their parts; the parts.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from atoll.core.decoding import decoded
from atoll.core.errors import RunError
from atoll.wire.messages import Count

_SIZE = 4  # bytes


class _Heading(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    workers: list[Count]
    sizes: list[Count]


_decoder = msgspec.msgpack.Decoder(_Heading)


def pack(workers: Sequence[int], parts: Sequence[memoryview | None]) -> bytes:
    """Pack these workers' parts, in order."""
    sizes = [0 if part is None else part.nbytes for part in parts]
    heading = msgspec.msgpack.encode(_Heading(list(workers), sizes))
    return b"".join(
        [len(heading).to_bytes(_SIZE, "little"), heading, *(part for part in parts if part is not None)]
    )


def unpack_untrusted(payload: memoryview) -> list[tuple[int, memoryview]]:
    """Return the (worker, part) pairs that were packed. Raises RunError, in one line, for invalid data."""
    size = int.from_bytes(payload[:_SIZE], "little")
    heading = decoded(
        _decoder, payload[_SIZE : _SIZE + size], RunError, "a site's part of a meeting cannot be read"
    )
    body = payload[_SIZE + size :]
    if len(heading.workers) != len(heading.sizes) or sum(heading.sizes) != body.nbytes:
        raise RunError(f"a site's part of a meeting names {sum(heading.sizes)} bytes and has {body.nbytes}")
    parts, offset = [], 0
    for worker, nbytes in zip(heading.workers, heading.sizes, strict=True):
        parts.append((worker, body[offset : offset + nbytes]))
        offset += nbytes
    return parts


def merge_untrusted(payload: memoryview | None, sizes: Sequence[int]) -> list[tuple[int, memoryview]]:
    """Return (worker, part) of all sites, sorted by worker. `sizes` are the bytes of each site's part. Raises
    RunError for invalid data."""
    whole = memoryview(b"") if payload is None else payload.cast("B")
    if sum(sizes) != whole.nbytes:
        raise RunError(f"a meeting of sites names {sum(sizes)} bytes and has {whole.nbytes}")
    parts, offset = [], 0
    for size in sizes:
        parts += unpack_untrusted(whole[offset : offset + size])
        offset += size
    return sorted(parts, key=lambda part: part[0])
