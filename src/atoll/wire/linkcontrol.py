"""The control messages of the loss-tolerant transport, one in each datagram of kind CONTROL.

A message is a MessagePack map, whose key `m` names it. Each has a `sequence`, which rises by one with every
message of its sender: a lost message is sent again under its sequence, and handled once. Sizes and counts are
bounded here. Source: docs/ltp.md, "Control messages".
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias, Union

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from atoll.core.decoding import decoded
from atoll.wire.base import Count, WireError
from atoll.wire.datagrams import HEADER, MOST_DATAGRAM_BYTES, SEAL_BYTES

TOKEN_BYTES = 8  # unguessable: a sender that returns it receives at the address to which it was sent
MOST_RANGES = 4096  # in one Need: 10 bytes each at most, so that it goes into the largest datagram
FRAME_BYTES = 160  # the most that a Need takes beside its ranges, and a Closed beside its bitmap
RANGE_BYTES = 11  # the most that one range takes

U32: TypeAlias = Annotated[int, Meta(ge=0, lt=2**32)]
Token: TypeAlias = Annotated[bytes, Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
Range: TypeAlias = tuple[U32, U32]  # from, and up to but not with
Filled: TypeAlias = Literal["none", "borne", "zero", "last", "rescaled"]  # values in place of lost blocks
# The rule by which a transfer was handed on; or it was "refused" for its bounds, or "dropped", being silent.
How: TypeAlias = Literal["complete", "enough", "deadline", "refused", "dropped"]


class Control(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="m", tag=True):
    """Base of all control messages."""

    sequence: Count


class Hello(Control, frozen=True):
    """The client's first message, which the server answers with a Challenge to validate its address.
    `padding` makes the datagram as long as the path allows: the server may then answer three times as
    much."""

    padding: Annotated[bytes, Meta(max_length=MOST_DATAGRAM_BYTES)] = b""


class Challenge(Control, frozen=True):
    """A challenge to an address to be validated: 8 random bytes."""

    token: Token


class Answer(Control, frozen=True):
    """The token of a Challenge, sent from the challenged address."""

    token: Token


class Ping(Control, frozen=True):
    """A message that only needs an acknowledgement."""


class Early(Control, frozen=True):
    """The receiver has enough: the sender drops the transfer's unsent low blocks."""

    transfer: U32


class Need(Control, frozen=True):
    """The receiver still lacks these blocks, by their index in the order of sending: ranges that rise and do
    not touch."""

    transfer: U32
    ranges: Annotated[list[Range], Meta(min_length=1, max_length=MOST_RANGES)]

    def __post_init__(self) -> None:
        end = -1
        for start, stop in self.ranges:
            if not end < start < stop:
                raise ValueError(f"a Need's range {start} to {stop} after {end}")
            end = stop


class Closed(Control, frozen=True):
    """The receiver is done with a transfer, the `order`-th that it is done with, from 0 on: its sender tells
    of them in that order. `missing` has a bit for each block from `first` on (a multiple of 8), by index, the
    lowest bit first: 1 is missing. All `parts` of them tell of all blocks."""

    transfer: U32
    part: Annotated[int, Meta(ge=0, lt=2**16)]
    parts: Annotated[int, Meta(ge=1, le=2**16)]
    first: U32
    missing: Annotated[bytes, Meta(max_length=MOST_DATAGRAM_BYTES)]
    fill: Filled
    how: How
    order: Count = 0

    def __post_init__(self) -> None:
        if self.part >= self.parts:
            raise ValueError(f"part {self.part} of {self.parts}")
        if self.first % 8 or self.first + 8 * len(self.missing) > 2**32:
            raise ValueError(f"a bitmap of {len(self.missing)} bytes from block {self.first} on")


class Ask(Control, frozen=True):
    """The sender has this many bytes to send, and asks for a share of the receiver's link; 0: no more."""

    size: Count


class Grant(Control, frozen=True):
    """The receiver gives the sender a share of its link: bytes per second, for so many seconds."""

    rate: Annotated[float, Meta(gt=0, le=1e15)]
    seconds: Annotated[float, Meta(ge=0, le=3600)]


class Bye(Control, frozen=True):
    """The session ends, and why: one line."""

    reason: Annotated[str, Meta(max_length=128)]


AnyControl: TypeAlias = Union[Hello, Challenge, Answer, Ping, Early, Need, Closed, Ask, Grant, Bye]

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyControl] = msgspec.msgpack.Decoder(AnyControl)


def encode(message: AnyControl) -> bytes:
    """Return the body of a datagram of kind CONTROL."""
    return _encoder.encode(message)


def decode_untrusted(body: bytes | memoryview | npt.NDArray[np.uint8]) -> AnyControl:
    """Return the message in `body`, which may be a row of Datagrams.bodies. Raises WireError, with one
    line, for anything else."""
    return decoded(_decoder, body, WireError, "no control message")


def padded(hello: Hello, datagram_bytes: int) -> Hello:
    """Return the Hello with padding that makes its datagram, seal included, exactly so long (at least
    256)."""
    room = datagram_bytes - HEADER.itemsize - SEAL_BYTES
    padding = b""
    for _ in range(3):  # MessagePack says a length with 2, 3 or 5 bytes
        padding = bytes(max(len(padding) + room - len(encode(_with(hello, padding))), 0))
    return _with(hello, padding)


def _with(hello: Hello, padding: bytes) -> Hello:
    return msgspec.structs.replace(hello, padding=padding)


def need_of(sequence: int, transfer: int, missing: npt.NDArray[np.bool_], datagram_bytes: int) -> Need | None:
    """Return a Need of the missing blocks (bool, by index), or of as many of the first ranges as a
    datagram holds; None: nothing is missing."""
    room = (datagram_bytes - HEADER.itemsize - SEAL_BYTES - FRAME_BYTES) // RANGE_BYTES
    edges = np.flatnonzero(np.diff(missing, prepend=False, append=False))
    ranges = [(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)[: min(room, MOST_RANGES)]]
    return Need(sequence=sequence, transfer=transfer, ranges=ranges) if ranges else None


def closed_of(
    sequence: int,
    transfer: int,
    missing: npt.NDArray[np.bool_],
    fill: Filled,
    how: How,
    datagram_bytes: int,
    order: int = 0,
) -> list[Closed]:
    """Return the parts that list the missing blocks (bool, by index), with consecutive sequences."""
    room = datagram_bytes - HEADER.itemsize - SEAL_BYTES - FRAME_BYTES
    bitmap = np.packbits(missing, bitorder="little").tobytes()
    parts = max(-(-len(bitmap) // room), 1)
    return [
        Closed(
            sequence=sequence + part,
            transfer=transfer,
            part=part,
            parts=parts,
            first=8 * part * room,
            missing=bitmap[part * room : (part + 1) * room],
            fill=fill,
            how=how,
            order=order,
        )
        for part in range(parts)
    ]


def mark_missing(closed: Closed, missing: npt.NDArray[np.bool_]) -> None:
    """Copy one part into `missing` (bool, by index). Raises WireError if it has blocks beyond the
    transfer's."""
    bits = np.unpackbits(np.frombuffer(closed.missing, dtype=np.uint8), bitorder="little").astype(bool)
    there = missing[closed.first : closed.first + len(bits)]
    if bits[len(there) :].any() or len(bits) - len(there) >= 8:
        raise WireError(f"a Closed of transfer {closed.transfer} tells of blocks past {len(missing)}")
    there[:] = bits[: len(there)]
