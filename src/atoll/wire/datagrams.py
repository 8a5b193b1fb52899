"""The datagrams of the loss-tolerant transport: layouts, writers and parsers, by whole arrays.

A burst of datagrams is one array of bytes, a row each, and all of a burst have one length: so headers are
written, and payloads scattered, without a step of Python for each. Numbers are little-endian. A datagram is a
header in clear, which the seal covers, and a body, which it hides. docs/ltp.md has the same as tables. Source:
S3, "The sender", 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from atoll.wire.base import WireError

Bytes: TypeAlias = npt.NDArray[np.uint8]  # (datagrams, bytes of each), or (bytes,)
Records: TypeAlias = npt.NDArray[Any]  # structured, (datagrams,)

LTP_VERSION = 1
DATAGRAM_BYTES = 1400  # a datagram's own default, seal included; IPv4 and UDP add 28
LEAST_DATAGRAM_BYTES, MOST_DATAGRAM_BYTES = 256, 65_000
SEAL_BYTES = 16  # AES-GCM's tag, at a datagram's end
NO_GROUP = 0xFFFF
NOT_SAID = 0xFFFF
ACK_BITS = 8000  # the most that one Ack tells of


class Kind(IntEnum):
    """What a datagram's body is."""

    DATA = 1  # a slice of a chunk: SLICE, then the elements
    PARITY = 2  # of a group of DATA: SLICE, whose second half is coded as the elements are
    ACK = 3  # ACK, then a bit for each datagram
    CONTROL = 4  # one message in MessagePack: atoll.wire.linkcontrol


class Element(IntEnum):
    """What a slice's elements are."""

    FLOAT32 = 1
    FLOAT64 = 2
    FLOAT16 = 3
    BFLOAT16 = 4  # numpy has none: uint16 that hold it
    BYTE = 5


ELEMENT_BYTES = {
    Element.FLOAT32: 4,
    Element.FLOAT64: 8,
    Element.FLOAT16: 2,
    Element.BFLOAT16: 2,
    Element.BYTE: 1,
}

HEADER = np.dtype(
    [
        ("version", "u1"),
        ("kind", "u1"),
        ("phase", "u1"),  # counts changes of keys, modulo 256
        ("stripe", "u1"),  # which of the session's ports
        ("session", "<u4"),
        ("number", "<u8"),  # rises by one with each datagram of a direction and a stripe; never twice
    ]
)
# The first half is alike in the datagrams of a group of forward error correction but for `place`; the second
# half is what differs, and is coded with the elements: so what is restored tells where it belongs.
SLICE = np.dtype(
    [
        ("transfer", "<u4"),
        ("chunk", "<u4"),
        ("iteration", "<u4"),
        ("blocks", "<u4"),  # datagrams of data that the transfer has
        ("highs", "<u4"),  # how many of them are of high priority
        ("group", "<u2"),  # of forward error correction; NO_GROUP: none
        ("place", "u1"),  # in its group: data from 0 on, parity after them
        ("data", "u1"),  # datagrams of data in the group
        ("parity", "u1"),  # and of parity
        ("element", "u1"),
        ("flags", "u1"),
        ("reserved", "u1"),  # 0
        ("offset", "<u4"),  # of the first element in the chunk
        ("index", "<u4"),  # in the transfer's order of sending, from 0
        ("scale", "<f4"),  # what the elements are to be multiplied by
        ("count", "<u2"),  # elements
        ("nonzero", "<u2"),  # how many of them are not 0; NOT_SAID: a slice of low priority
    ]
)
CODED_FROM = SLICE.fields["offset"][1] if SLICE.fields is not None else 0  # bytes of SLICE that are not coded
HIGH = 1  # a flag: of high priority
RELIABLE = 2  # a flag: of a transfer in full-reliability mode
FLAGS = HIGH | RELIABLE

ACK = np.dtype(
    [
        ("largest", "<u8"),  # number that has come
        ("arrived", "<u8"),  # when that one came, by the receiver's own clock, microseconds
        ("delay", "<u4"),  # from then until this Ack was made, microseconds
        ("of", "u1"),  # the stripe whose datagrams these are
        ("reserved", "u1"),  # 0
        ("bits", "<u2"),  # that follow
        ("base", "<u8"),  # the first bit's number; of lower ones nothing is told
        ("delivered", "<u8"),  # bytes of datagrams that came whole, over all stripes, since the session began
        ("duplicates", "<u4"),  # datagrams that came twice
        ("late", "<u4"),  # that came after a later one had been acknowledged past them
    ]
)


def payload_bytes(datagram_bytes: int) -> int:
    """Bytes of elements that a DATA datagram of this size, seal included, has room for (a multiple of 8)."""
    return (datagram_bytes - HEADER.itemsize - SLICE.itemsize - SEAL_BYTES) // 8 * 8


@dataclass(frozen=True)
class Datagrams:
    """Opened datagrams of one kind, in the order in which they came: `frames` is (n, size), header and body
    without the seal, and `headers` a view of the headers, (n,)."""

    kind: Kind
    frames: Bytes

    def __len__(self) -> int:
        return len(self.frames)

    @property
    def headers(self) -> Records:
        return records_of(self.frames, HEADER, 0)

    @property
    def slices(self) -> Records:
        """Of DATA and PARITY, (n,)."""
        return records_of(self.frames, SLICE, HEADER.itemsize)

    @property
    def elements(self) -> Bytes:
        """Of DATA and PARITY, (n, payload bytes)."""
        return self.frames[:, HEADER.itemsize + SLICE.itemsize :]

    @property
    def coded(self) -> Bytes:
        """What forward error correction works on, (n, bytes)."""
        return self.frames[:, HEADER.itemsize + CODED_FROM :]


def records_of(frames: Bytes, layout: np.dtype[Any], start: int) -> Records:
    """The records that stand at byte `start` of each row: a view, (n,). A row's bytes lie side by side."""
    return frames[:, start : start + layout.itemsize].view(layout)[:, 0]
