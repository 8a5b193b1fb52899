"""Records of a shard's journal: what the shard was told, in the order in which it took effect.

A record is a header (MessagePack) and perhaps a payload (a chunk). On disk, little-endian:

    4 bytes   "ATJ1"
    4 bytes   the header's length, in bytes
    8 bytes   the payload's length, in bytes; all ones: no payload
    8 bytes   the sum of the payload's 64-bit words, and of the bytes that are left; all ones: not made
    4 bytes   CRC-32 of the 24 bytes above and the header
    the header, the payload

What is cut off, or damaged, is where the journal ends. When a process is killed, what it wrote is whole up to
the last record, which the lengths tell. The sum is for the crash of a machine, which may lose pages in
between; a CRC of the payload would take five times as long.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Any, TypeAlias, Union

import msgspec
import numpy

from atoll.store.outcomes import StoreError
from atoll.wire.messages import HEADER_BYTES, Count, Name

Buffer: TypeAlias = Any  # whatever has the buffer protocol

_PREFIX = struct.Struct("<4sIQQ")
_CHECK = struct.Struct("<I")
_MAGIC = b"ATJ1"
_NONE = 2**64 - 1  # in the place of a payload's length, or of its sum
PREFIX_BYTES = _PREFIX.size + _CHECK.size
MOST_HEADER = HEADER_BYTES + 2**16  # bytes


class Told(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, tag="told"):
    """A message that was handled: `message` is one of wire's, as it came from this peer. The payload is its.

    `role` is the sender's, "worker", "shard" or "hub"; `index` the worker's rank or the shard's index.
    """

    role: Name
    index: int
    incarnation: Count
    message: msgspec.Raw


class Begun(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, tag="begun"):
    """A segment's first record: whose it is, and from what its records go on: from nothing (`fresh`), from
    `state`, whose payloads follow as `parts` records of Part, or from the end of the segment before."""

    run: Name
    shard: Count
    fresh: bool = False
    state: bytes = b""
    parts: Count = 0


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, tag="part"):
    """The payload is a part of the state: `kind` says of what, `key` which of them."""

    kind: Name
    key: Count


Record: TypeAlias = Union[Told, Begun, Part]

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


def encode_record(record: Record, payload: Buffer | None = None, summed: bool = True) -> list[Buffer]:
    """The record's bytes, in pieces; the payload's are not copied. `summed`: with the payload's sum."""
    header = _encoder.encode(record)
    pieces: list[Buffer] = [header]
    size, total = _NONE, 0
    if payload is not None:
        view = memoryview(payload)
        body = view.cast("B") if view.nbytes else memoryview(b"")
        size, total = body.nbytes, _sum(body) if summed else _NONE
        pieces.append(body)
    prefix = _PREFIX.pack(_MAGIC, len(header), size, total)
    return [prefix + _CHECK.pack(zlib.crc32(header, zlib.crc32(prefix))), *pieces]


def records(journal: memoryview) -> Iterator[tuple[Record, memoryview | None, int]]:
    """Each whole record of a segment, its payload in place, and the offset of its end.

    Ends before the first that is cut off or damaged. Nothing is allocated for what a length says. Raises
    StoreError for a record that is whole and yet none of these.
    """
    offset = 0
    while (found := _read(journal, offset)) is not None:
        header, payload, offset = found
        try:
            yield _decoder.decode(header), payload, offset
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise StoreError(f"no record of a journal: {str(error)[:200]}") from None


def _read(journal: memoryview, offset: int) -> tuple[memoryview, memoryview | None, int] | None:
    start = offset + PREFIX_BYTES
    if start > journal.nbytes:
        return None
    magic, length, size, total = _PREFIX.unpack_from(journal, offset)
    (check,) = _CHECK.unpack_from(journal, offset + _PREFIX.size)
    end = start + length + (0 if size == _NONE else size)
    if magic != _MAGIC or length > MOST_HEADER or end > journal.nbytes:
        return None
    header = journal[start : start + length]
    if zlib.crc32(header, zlib.crc32(journal[offset : offset + _PREFIX.size])) != check:
        return None
    if size == _NONE:
        return header, None, end
    payload = journal[start + length : end]
    return (header, payload, end) if total in (_NONE, _sum(payload)) else None


def _sum(payload: memoryview) -> int:
    whole = payload.nbytes // 8 * 8
    words = numpy.frombuffer(payload[:whole], "<u8") if whole else numpy.zeros(0, "<u8")
    rest = int.from_bytes(payload[whole:], "little")
    return (int(numpy.add.reduce(words, dtype=numpy.uint64)) + rest) % _NONE
