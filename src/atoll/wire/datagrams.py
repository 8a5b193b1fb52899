"""The datagrams of the loss-tolerant transport: layouts, writers and parsers, by whole arrays.

A burst of datagrams is one array of bytes, a row each, and all of a burst have one length: headers are
written, and payloads scattered, without a step of Python for each. Numbers are little-endian. A datagram is a
header in clear, which the seal authenticates, and a body, which the seal encrypts. Source: docs/ltp.md,
"Datagrams", which has the layouts as tables.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Bytes: TypeAlias = npt.NDArray[np.uint8]  # (datagrams, bytes of each), or (bytes,)
Records: TypeAlias = npt.NDArray[Any]  # structured, (datagrams,)

LTP_VERSION = 1
DATAGRAM_BYTES = 1400  # a datagram's own default, seal included; IPv4 and UDP add 28
LEAST_DATAGRAM_BYTES, MOST_DATAGRAM_BYTES = 256, 65_000
SEAL_BYTES = 16  # AES-GCM's tag, at a datagram's end
NO_GROUP = 0xFFFF
NOT_SAID = 0xFFFF
ACK_BITS = 8000  # datagrams that one Ack covers, at most
MOST_STRIPES = 8
MOST_NUMBER = (
    2**62
)  # numbers of datagrams, times and counts stay below it: their sums fit into signed integers


class Kind(IntEnum):
    """The kind of a datagram's body."""

    DATA = 1  # a slice of a chunk: SLICE, then the elements
    PARITY = 2  # of a group of DATA: SLICE, whose second half is coded as the elements are
    ACK = 3  # ACK, then a bit for each datagram
    CONTROL = 4  # one message in MessagePack: atoll.wire.linkcontrol


class Element(IntEnum):
    """The type of a slice's elements."""

    FLOAT32 = 1
    FLOAT64 = 2
    FLOAT16 = 3
    BFLOAT16 = 4  # numpy has no such type: uint16 holds it
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
SESSION_AT = 4  # the byte of a datagram at which HEADER has the session
_HEADER_OF_ONE = struct.Struct("<BBBBIQ")  # HEADER, without numpy
_FIRST_KIND, _LAST_KIND = int(Kind.DATA), int(Kind.CONTROL)
# The first half is equal in the datagrams of a group of forward error correction but for `place`; the second
# half differs, and is coded with the elements: so a restored datagram has its own place.
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
        ("scale", "<f4"),  # factor to multiply the elements by
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
        ("largest", "<u8"),  # number that has arrived
        ("arrived", "<u8"),  # time of its arrival, by the receiver's own clock, microseconds
        ("delay", "<u4"),  # from its arrival until this Ack was made, microseconds
        ("of", "u1"),  # the stripe whose datagrams these are
        ("reserved", "u1"),  # 0
        ("bits", "<u2"),  # that follow
        ("base", "<u8"),  # the first bit's number; the Ack covers no lower ones
        ("delivered", "<u8"),  # bytes of datagrams that came whole, over all stripes, since the session began
    ]
)


def payload_bytes(datagram_bytes: int) -> int:
    """Return the room for elements in a DATA datagram of this size, seal included, in bytes (a multiple of
    8)."""
    return (datagram_bytes - HEADER.itemsize - SLICE.itemsize - SEAL_BYTES) // 8 * 8


@dataclass(frozen=True)
class Datagrams:
    """Opened datagrams of one kind, in order of arrival. `frames` is (n, size), header and body without
    the seal, and `headers` a view of the headers, (n,)."""

    kind: Kind
    frames: Bytes

    def __len__(self) -> int:
        return len(self.frames)

    @property
    def headers(self) -> Records:
        return records_of(self.frames, HEADER, 0)

    @property
    def slices(self) -> Records:
        """The slices of DATA and PARITY, (n,)."""
        return records_of(self.frames, SLICE, HEADER.itemsize)

    @property
    def bodies(self) -> Bytes:
        """The bytes behind the header, (n, bytes); for CONTROL, the message."""
        return self.frames[:, HEADER.itemsize :]

    @property
    def elements(self) -> Bytes:
        """The elements of DATA and PARITY, (n, payload bytes)."""
        return self.frames[:, HEADER.itemsize + SLICE.itemsize :]

    @property
    def coded(self) -> Bytes:
        """The bytes that forward error correction works on, (n, bytes)."""
        return self.frames[:, HEADER.itemsize + CODED_FROM :]


def records_of(frames: Bytes, layout: np.dtype[Any], start: int) -> Records:
    """Return the records at byte `start` of each row, (n,), as a view. A row's bytes must be contiguous."""
    return frames[:, start : start + layout.itemsize].view(layout)[:, 0]


# -- writing -------------------------------------------------------------------------------------------------


def new_frames(datagrams: int, body_bytes: int) -> Bytes:
    """Return room for that many datagrams, all zeros: header, body and seal, (n, size)."""
    return np.zeros((datagrams, HEADER.itemsize + body_bytes + SEAL_BYTES), dtype=np.uint8)


def write_headers(
    frames: Bytes, kind: Kind, phase: int, stripe: int, session: int, first_number: int
) -> None:
    """Write the headers of a burst, with numbers that rise from `first_number`."""
    headers = records_of(frames, HEADER, 0)
    headers["version"] = LTP_VERSION
    headers["kind"] = kind
    headers["phase"] = phase & 0xFF
    headers["stripe"] = stripe
    headers["session"] = session
    headers["number"] = np.arange(first_number, first_number + len(frames), dtype=np.uint64)


def control_datagram(message: bytes) -> Bytes:
    """Return a datagram with an encoded control message, (1, size); the caller writes its header."""
    frames = new_frames(1, len(message))
    frames[0, HEADER.itemsize : HEADER.itemsize + len(message)] = np.frombuffer(message, dtype=np.uint8)
    return frames


@dataclass(frozen=True)
class Acknowledgement:
    """The contents of an Ack, in seconds and numbers; times are by the receiver's own clock."""

    of: int  # the stripe
    largest: int
    arrived: float  # time of arrival of `largest`
    delay: float  # from that arrival until the Ack was made
    base: int
    received: npt.NDArray[np.bool_]  # of the numbers from `base` on, at most ACK_BITS
    delivered: int  # bytes, over all stripes, since the session began

    @property
    def numbers(self) -> npt.NDArray[np.int64]:
        """The numbers that arrived, rising."""
        return np.flatnonzero(self.received).astype(np.int64) + self.base


def ack_bits(datagram_bytes: int) -> int:
    """Return the number of datagrams that one Ack of this size, seal included, covers."""
    return min((datagram_bytes - HEADER.itemsize - ACK.itemsize - SEAL_BYTES) * 8, ACK_BITS)


def ack_bytes(bits: int) -> int:
    """Return the size in bytes of an Ack of so many datagrams, seal included."""
    return HEADER.itemsize + ACK.itemsize + (bits + 7) // 8 + SEAL_BYTES


def ack_datagram(told: Acknowledgement) -> Bytes:
    """Return a datagram with this Ack, (1, size); the caller writes its header."""
    bits = np.packbits(told.received, bitorder="little")
    frames = new_frames(1, ACK.itemsize + len(bits))
    record = records_of(frames, ACK, HEADER.itemsize)
    record["largest"] = told.largest
    record["arrived"] = min(max(round(told.arrived * 1e6), 0), MOST_NUMBER - 1)
    record["delay"] = min(max(round(told.delay * 1e6), 0), 2**32 - 1)
    record["of"] = told.of
    record["bits"] = len(told.received)
    record["base"] = told.base
    record["delivered"] = told.delivered
    start = HEADER.itemsize + ACK.itemsize
    frames[0, start : start + len(bits)] = bits
    return frames


def read_ack(frame: Bytes) -> Acknowledgement:
    """Return the Ack in a row of an ACK's Datagrams, which split_untrusted has checked."""
    record = records_of(frame[None], ACK, HEADER.itemsize)[0]
    bits = np.unpackbits(
        frame[HEADER.itemsize + ACK.itemsize :], count=int(record["bits"]), bitorder="little"
    ).view(np.bool_)
    return Acknowledgement(
        of=int(record["of"]),
        largest=int(record["largest"]),
        arrived=int(record["arrived"]) / 1e6,
        delay=int(record["delay"]) / 1e6,
        base=int(record["base"]),
        received=bits,
        delivered=int(record["delivered"]),
    )


# -- reading what came from outside --------------------------------------------------------------------------


@dataclass(frozen=True)
class Flow:
    """Sealed datagrams of one session, stripe and phase, in order of arrival, not to be believed before
    the seal is opened. Rows of `frames` (n, width) are filled to `sizes`, seal included."""

    session: int
    stripe: int
    phase: int
    frames: Bytes
    sizes: npt.NDArray[np.int64]
    numbers: npt.NDArray[np.int64]


def headers_untrusted(frames: Bytes, sizes: npt.NDArray[np.int64], drops: Counter[str]) -> list[Flow]:
    """Return sealed datagrams by flow, as their headers name it. Bad ones are counted in `drops` by
    reason, "another version" apart from the rest. Flows share memory with `frames` if all are of one flow."""
    width = frames.shape[1]
    sizes = np.asarray(sizes, dtype=np.int64)
    if len(frames) == 1 and (flow := _flow_of_one(frames, sizes)) is not None:
        return [flow]
    if _are_one_good_flow(frames, sizes):
        return [_flow_of(frames, sizes)]
    keep = np.ones(len(frames), dtype=bool)
    _drop(keep, (sizes <= HEADER.itemsize + SEAL_BYTES) | (sizes > width), "too short", drops)
    _drop(keep, sizes > MOST_DATAGRAM_BYTES, "too long", drops)
    if not keep.any():
        return []
    headers = records_of(frames, HEADER, 0)
    _drop(keep, headers["version"] != LTP_VERSION, "another version", drops)
    _drop(keep, (headers["kind"] < Kind.DATA) | (headers["kind"] > Kind.CONTROL), "unknown kind", drops)
    _drop(keep, headers["stripe"] >= MOST_STRIPES, "stripe", drops)
    _drop(keep, headers["number"] >= MOST_NUMBER, "number", drops)
    frames, sizes = frames[keep], sizes[keep]
    if not len(frames):
        return []
    # Bytes 2 to 7 of the header: phase, stripe and session.
    flows = (frames[:, :8].view("<u8")[:, 0] >> np.uint64(16)).astype(np.int64)
    return [_flow_of(frames[rows], sizes[rows]) for _, rows in _groups(flows)]


def _flow_of(frames: Bytes, sizes: npt.NDArray[np.int64]) -> Flow:
    headers = records_of(frames, HEADER, 0)
    first, numbers = headers[0], headers["number"].astype(np.int64)
    return Flow(int(first["session"]), int(first["stripe"]), int(first["phase"]), frames, sizes, numbers)


def _flow_of_one(frames: Bytes, sizes: npt.NDArray[np.int64]) -> Flow | None:
    """Read a single good datagram in a tenth of the time: acknowledgements arrive singly, and many hostile
    ones."""
    size, width = int(sizes[0]), frames.shape[1]
    if not HEADER.itemsize + SEAL_BYTES < size <= min(width, MOST_DATAGRAM_BYTES):
        return None
    version, kind, phase, stripe, session, number = _HEADER_OF_ONE.unpack_from(frames[0].data)
    if (
        version != LTP_VERSION
        or not _FIRST_KIND <= kind <= _LAST_KIND
        or stripe >= MOST_STRIPES
        or number >= MOST_NUMBER
    ):
        return None
    return Flow(session, stripe, phase, frames, sizes, np.array([number], dtype=np.int64))


def _are_one_good_flow(frames: Bytes, sizes: npt.NDArray[np.int64]) -> bool:
    """True if all are good and of one flow, as in most bursts; takes a third of the time of the single
    checks. What passes here passes the single checks too."""
    if not len(frames) or frames.shape[1] < HEADER.itemsize:
        return False
    words, kinds = frames[:, :8].view("<u8")[:, 0] | np.uint64(0xFF00), frames[:, 1]
    return bool(
        (words == words[0]).all()
        and frames[0, 0] == LTP_VERSION
        and frames[0, 3] < MOST_STRIPES
        and kinds.min() >= _FIRST_KIND
        and kinds.max() <= _LAST_KIND
        and sizes.min() > HEADER.itemsize + SEAL_BYTES
        and sizes.max() <= min(frames.shape[1], MOST_DATAGRAM_BYTES)
        and frames[:, 8:16].view("<u8").max() < MOST_NUMBER
    )


def split_untrusted(frames: Bytes, sizes: npt.NDArray[np.int64], drops: Counter[str]) -> list[Datagrams]:
    """Return the opened datagrams of one flow by kind and size, in order of arrival within each; `sizes`
    include the seal. Datagrams out of bounds are counted in `drops` by reason."""
    if not len(frames) or frames.shape[1] <= HEADER.itemsize:
        drops["too short"] += len(frames)
        return []
    kinds = frames[:, 1].astype(np.int64)
    batches = []
    for key, rows in _groups(np.asarray(sizes, dtype=np.int64) << 8 | kinds):
        kind, size = key & 0xFF, (key >> 8) - SEAL_BYTES
        check = _CHECKS.get(kind)
        if check is None or not HEADER.itemsize < size <= frames.shape[1] - SEAL_BYTES:
            drops["unknown kind" if check is None else "too short"] += len(kinds[rows])
            continue
        batch = Datagrams(Kind(kind), frames[rows, :size])
        keep = check(batch, drops)
        if not keep.all():
            batch = Datagrams(batch.kind, batch.frames[keep])
        if len(batch):
            batches.append(batch)
    return batches


def restored_untrusted(batch: Datagrams, drops: Counter[str]) -> npt.NDArray[np.bool_]:
    """Return which restored rows of DATA are within bounds, (n,): a sender's parity may be of anything."""
    return _check_data(batch, drops)


def _groups(keys: npt.NDArray[np.int64]) -> list[tuple[int, Any]]:
    """Return each key and its rows, by first appearance; for a single key, a slice of all rows, without a
    copy."""
    if (keys == keys[0]).all():
        return [(int(keys[0]), slice(None))]
    order = np.argsort(keys, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(keys[order])) + 1)
    return [(int(keys[rows[0]]), rows) for rows in sorted(groups, key=lambda rows: int(rows[0]))]


def _drop(keep: npt.NDArray[np.bool_], bad: npt.NDArray[np.bool_], reason: str, drops: Counter[str]) -> None:
    """Take bad rows out of `keep`, and count each once, by its first reason."""
    bad = bad & keep
    if bad.any():
        drops[reason] += int(np.count_nonzero(bad))
        keep &= ~bad


def _check_slices(batch: Datagrams, drops: Counter[str]) -> npt.NDArray[np.bool_]:
    """Check the half of SLICE that is not coded, for DATA and PARITY."""
    keep = np.ones(len(batch), dtype=bool)
    if batch.frames.shape[1] < HEADER.itemsize + SLICE.itemsize:
        _drop(keep, keep.copy(), "too short", drops)
        return keep
    slices = batch.slices
    flags, blocks, highs = slices["flags"], slices["blocks"], slices["highs"]
    in_group = slices["group"] != NO_GROUP
    members = slices["data"].astype(np.int64) + slices["parity"]
    reliable = flags & RELIABLE != 0
    _drop(keep, slices["reserved"] != 0, "reserved", drops)
    _drop(keep, (slices["element"] < 1) | (slices["element"] > len(ELEMENT_BYTES)), "element", drops)
    _drop(keep, flags & ~np.uint8(FLAGS) != 0, "flags", drops)
    _drop(keep, (blocks == 0) | (highs > blocks), "blocks", drops)
    _drop(keep, np.where(flags & HIGH != 0, highs == 0, highs == blocks), "flags", drops)
    _drop(keep, reliable & ((flags & HIGH == 0) | (highs != blocks)), "flags", drops)
    _drop(keep, in_group & ((slices["data"] == 0) | (slices["place"] >= members)), "group", drops)
    _drop(keep, ~in_group & ((members != 0) | (slices["place"] != 0)), "group", drops)
    return keep


def _are_good_data(batch: Datagrams) -> bool:
    """True if all rows are good, full data of one transfer, not in groups, as in most bursts; takes a
    third of the time of the single checks. What passes here passes the single checks too."""
    start, end = HEADER.itemsize, HEADER.itemsize + SLICE.itemsize
    if batch.frames.shape[1] < end:
        return False
    words = batch.frames[:, start:end].view("<u4")  # (n, 11)
    ones, anywhere = (
        np.bitwise_and.reduce(words, axis=0).tolist(),
        np.bitwise_or.reduce(words, axis=0).tolist(),
    )
    blocks, highs, count = ones[3], ones[4], ones[10] & 0xFFFF
    element, flags = ones[6] >> 8 & 0xFF, ones[6] >> 16 & 0xFF
    alike = (
        ones[:5] == anywhere[:5]
        and (anywhere[6] ^ ones[6]) & ~(HIGH << 16) == 0
        and count == anywhere[10] & 0xFFFF
    )
    if not (
        alike
        and ones[5] == anywhere[5] == NO_GROUP  # and place and data are 0
        and 0 < highs < blocks  # so HIGH may be set or not, and RELIABLE may not
        and ones[6] & 0xFF0000FF == 0  # parity and reserved
        and flags & ~HIGH == 0
        and 0 < count * int(_ELEMENT_SIZES[element]) <= batch.elements.shape[1]
        and ones[9] == anywhere[9] == _ONE
    ):
        return False
    if int(words[:, 7].max()) + count >= 2**32 or int(words[:, 8].max()) >= blocks:
        return False
    over = words[:, 10] >> np.uint32(16) > count
    low = words[:, 6] & np.uint32(HIGH << 16) == 0
    return bool((~over | (low & (words[:, 10] >> np.uint32(16) == NOT_SAID))).all())


def _check_data(batch: Datagrams, drops: Counter[str]) -> npt.NDArray[np.bool_]:
    if _are_good_data(batch):
        return np.ones(len(batch), dtype=bool)
    keep = _check_slices(batch, drops)
    if not keep.any():
        return keep
    slices = batch.slices
    count, nonzero = slices["count"].astype(np.int64), slices["nonzero"]
    sizes = _ELEMENT_SIZES[slices["element"]]
    said = (nonzero != NOT_SAID) | (slices["flags"] & HIGH != 0)
    _drop(keep, (slices["group"] != NO_GROUP) & (slices["place"] >= slices["data"]), "group", drops)
    _drop(keep, slices["index"] >= slices["blocks"], "index", drops)
    _drop(keep, (count == 0) | (count * sizes > batch.elements.shape[1]), "count", drops)
    _drop(keep, slices["offset"] + count >= 2**32, "offset", drops)
    _drop(keep, ~np.isfinite(slices["scale"]), "scale", drops)
    _drop(keep, said & (nonzero > count), "nonzero", drops)
    return keep


def _check_parity(batch: Datagrams, drops: Counter[str]) -> npt.NDArray[np.bool_]:
    keep = _check_slices(batch, drops)
    if not keep.any():
        return keep
    slices = batch.slices
    _drop(keep, (slices["group"] == NO_GROUP) | (slices["place"] < slices["data"]), "group", drops)
    return keep


def _check_acks(batch: Datagrams, drops: Counter[str]) -> npt.NDArray[np.bool_]:
    keep = np.ones(len(batch), dtype=bool)
    bitmap = batch.frames.shape[1] - HEADER.itemsize - ACK.itemsize
    if bitmap < 0:
        _drop(keep, keep.copy(), "too short", drops)
        return keep
    acks = records_of(batch.frames, ACK, HEADER.itemsize)
    bits = acks["bits"].astype(np.uint64)
    _drop(keep, acks["reserved"] != 0, "reserved", drops)
    _drop(keep, acks["of"] >= MOST_STRIPES, "stripe", drops)
    _drop(keep, (bits > ACK_BITS) | ((bits + 7) // 8 != bitmap), "bits", drops)
    for field in ("largest", "base"):
        _drop(keep, acks[field] >= MOST_NUMBER, "number", drops)
    for field in ("arrived", "delivered"):
        _drop(keep, acks[field] >= MOST_NUMBER, field, drops)
    _drop(keep, keep & (acks["base"] + bits > acks["largest"] + np.uint64(1)), "number", drops)
    if bitmap:
        unused = (
            batch.frames[:, -1] >> ((bits - np.uint64(1)) % np.uint64(8) + np.uint64(1)).astype(np.uint16)
        ) != 0
        _drop(keep, unused, "bits", drops)
    return keep


def _check_controls(batch: Datagrams, drops: Counter[str]) -> npt.NDArray[np.bool_]:  # noqa: ARG001
    """Keep all: linkcontrol.decode_untrusted checks each message as it is decoded."""
    return np.ones(len(batch), dtype=bool)


_ONE = int(np.float32(1.0).view(np.uint32))  # the scale that nearly all have
_ELEMENT_SIZES = np.zeros(256, dtype=np.int64)
_ELEMENT_SIZES[list(ELEMENT_BYTES)] = list(ELEMENT_BYTES.values())
_CHECKS: dict[int, Callable[[Datagrams, Counter[str]], npt.NDArray[np.bool_]]] = {
    Kind.DATA: _check_data,
    Kind.PARITY: _check_parity,
    Kind.ACK: _check_acks,
    Kind.CONTROL: _check_controls,
}
