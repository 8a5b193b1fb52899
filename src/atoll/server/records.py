"""Records of a shard's journal: messages that the shard handled, in the order in which they took effect.

A standby is sent the same records (wire/shards.py: Copy). On disk a record is a frame (`logs/frames.py`): the
header is the record as MessagePack, the payload a chunk. A frame's stamp has the segment's number in its
lower half, so leftovers in a file that was another segment before are not taken for records.
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

SHARD = Kind(b"ATJ5", HEADER_BYTES + 2**16, "segment of a journal")
_HALF = 2**32


class HandledMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, tag="told"):
    """A message that was handled: one of wire's, in `message`, with its payload.

    `role` is the sender's ("worker", "shard" or "hub"), `index` the worker's rank or the shard's index, and
    `member` the member of a group that sent it.
    """

    role: Name
    index: int
    incarnation: Count
    message: msgspec.Raw
    member: Count = 0


class Begun(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, tag="begun"):
    """A segment's first record. The segment continues from nothing (`fresh`), from `state`, whose payloads
    follow as `parts` records of StatePayload, or from the end of the segment before."""

    run: Name
    shard: Count
    fresh: bool = False
    state: bytes = b""
    parts: Count = 0


class StatePayload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, tag="part"):
    """A payload that belongs to the state: `kind` is its kind, `key` its number within that kind."""

    kind: Name
    key: Count


Record: TypeAlias = Union[HandledMessage, Begun, StatePayload]

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


def stamp_of(segment: int, drawn: int) -> int:
    """Stamp of a segment's frames; `drawn` is 32 random bits."""
    return drawn % _HALF * _HALF + segment % _HALF


def encode_header(record: Record) -> bytes:
    """Encode a record as a frame's header."""
    return _encoder.encode(record)


def encode_record(
    record: Record, payload: Buffer | None = None, summed: bool = True, stamp: int = 0
) -> list[Buffer]:
    """Encode a record in pieces, without copying the payload. With `summed` the frame has the payload's
    checksum."""
    return encode_frame(SHARD, stamp, encode_header(record), payload, summed)


def records(
    journal: memoryview, segment: int | None = None
) -> Iterator[tuple[Record, memoryview | None, int]]:
    """Yield each whole record of a segment, its payload in place, and the offset of its end.

    Stops before a record that is cut off or, with `segment`, of another segment. Allocates nothing by stored
    lengths. Raises StoreError for a whole but invalid record, and DamagedLogError as `replay` does.
    """
    for frame in replay(journal, SHARD, lambda stamp: segment is None or stamp % _HALF == segment % _HALF):
        yield decode_record(frame.header), frame.payload, frame.end


def decode_record(header: bytes | memoryview) -> Record:
    """Decode the record in a frame's header; raises StoreError if it is invalid."""
    return decoded(_decoder, header, StoreError, "no record of a journal")
