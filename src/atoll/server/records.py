"""Records of a shard's journal: what the shard was told, in the order in which it took effect.

A standby is sent the same records (wire/shards.py: Copy). On disk a record is a frame (`logs/frames.py`): its
header is the record as MessagePack, its payload a chunk. The stamp of a segment's frames has the segment's
number in its lower half: a file that was another segment before, and is not written yet, has no record.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias, Union

import msgspec

from atoll.core.decoding import decoded
from atoll.logs.frames import Buffer, Kind, encode_frame
from atoll.logs.logfile import replay
from atoll.store.outcomes import StoreError
from atoll.wire.messages import HEADER_BYTES, Count, Name

SHARD = Kind(b"ATJ3", HEADER_BYTES + 2**16, "segment of a journal")
_HALF = 2**32


class Told(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, tag="told"):
    """A message that was handled: `message` is one of wire's, as it came from this peer. The payload is its.

    `role` is the sender's, "worker", "shard" or "hub"; `index` the worker's rank or the shard's index;
    `member` whose connection it was, of a worker that is a group.
    """

    role: Name
    index: int
    incarnation: Count
    message: msgspec.Raw
    member: Count = 0


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


def stamp_of(segment: int, drawn: int) -> int:
    """The stamp of a segment's frames; `drawn` is 32 random bits."""
    return drawn % _HALF * _HALF + segment % _HALF


def encode_header(record: Record) -> bytes:
    """The record as a frame's header."""
    return _encoder.encode(record)


def encode_record(
    record: Record, payload: Buffer | None = None, summed: bool = True, stamp: int = 0
) -> list[Buffer]:
    """The record's bytes, in pieces; the payload's are not copied. `summed`: with the payload's sum."""
    return encode_frame(SHARD, stamp, encode_header(record), payload, summed)


def records(
    journal: memoryview, segment: int | None = None
) -> Iterator[tuple[Record, memoryview | None, int]]:
    """Each whole record of a segment, its payload in place, and the offset of its end.

    Ends before the first that is cut off, or of another use of the file: with `segment`, of another segment.
    Nothing is allocated for what a length says. Raises StoreError for a record that is whole and yet none of
    these, and DamagedLogError as `replay` does.
    """
    for frame in replay(journal, SHARD, lambda stamp: segment is None or stamp % _HALF == segment % _HALF):
        yield decode_record(frame.header), frame.payload, frame.end


def decode_record(header: bytes | memoryview) -> Record:
    """The record in a frame's header; raises StoreError for what is none."""
    return decoded(_decoder, header, StoreError, "no record of a journal")
