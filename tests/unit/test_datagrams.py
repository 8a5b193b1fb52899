"""The loss-tolerant transport's datagrams: what the writers write, the parsers read, and nothing else."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from atoll.wire import linkcontrol
from atoll.wire.base import WireError
from atoll.wire.datagrams import (
    ACK,
    ACK_BITS,
    HEADER,
    HIGH,
    LTP_VERSION,
    MOST_NUMBER,
    NO_GROUP,
    NOT_SAID,
    RELIABLE,
    SEAL_BYTES,
    SLICE,
    Acknowledgement,
    Bytes,
    Datagrams,
    Element,
    Kind,
    ack_bits,
    ack_datagram,
    control_datagram,
    headers_untrusted,
    new_frames,
    payload_bytes,
    read_ack,
    records_of,
    restored_untrusted,
    split_untrusted,
    write_headers,
)

SIZE = 256
DEFAULTS = {
    "transfer": 7, "chunk": 3, "iteration": 41, "blocks": 20, "highs": 5, "group": NO_GROUP, "place": 0,
    "data": 0, "parity": 0, "element": Element.FLOAT32, "flags": 0, "reserved": 0, "offset": 1000,
    "scale": 1.0, "count": 42, "nonzero": NOT_SAID,
}  # fmt: skip


def data(rows: int = 4, size: int = SIZE, kind: Kind = Kind.DATA, **fields: Any) -> Bytes:
    """Good datagrams of data, but for `fields` of SLICE."""
    frames = new_frames(rows, size - HEADER.itemsize - SEAL_BYTES)
    write_headers(frames, kind, phase=0, stripe=1, session=9, first_number=100)
    slices = records_of(frames, SLICE, HEADER.itemsize)
    slices["index"] = np.arange(rows)
    for name, value in (DEFAULTS | fields).items():
        slices[name] = value
    frames[:, HEADER.itemsize + SLICE.itemsize : -SEAL_BYTES] = np.arange(rows)[:, None] + 1
    return frames


def sizes_of(frames: Bytes) -> npt.NDArray[np.int64]:
    return np.full(len(frames), frames.shape[1])


def split(frames: Bytes) -> tuple[list[Datagrams], Counter[str]]:
    drops: Counter[str] = Counter()
    return split_untrusted(frames, sizes_of(frames), drops), drops


def headers(frames: Bytes, **fields: Any) -> tuple[list[Any], Counter[str]]:
    drops: Counter[str] = Counter()
    for name, value in fields.items():
        records_of(frames, HEADER, 0)[name] = value
    return headers_untrusted(frames, sizes_of(frames), drops), drops


def stacked(*bursts: Bytes) -> tuple[Bytes, npt.NDArray[np.int64]]:
    """Bursts of several sizes as one arena."""
    width = max(burst.shape[1] for burst in bursts)
    frames = np.full((sum(map(len, bursts)), width), 0xEE, dtype=np.uint8)
    sizes = np.concatenate([sizes_of(burst) for burst in bursts])
    at = 0
    for burst in bursts:
        frames[at : at + len(burst), : burst.shape[1]] = burst
        at += len(burst)
    return frames, sizes


# -- headers -------------------------------------------------------------------------------------------------


def test_headers_are_read_as_they_were_written() -> None:
    frames = new_frames(3, 100)
    write_headers(frames, Kind.PARITY, phase=258, stripe=7, session=2**32 - 1, first_number=2**40)
    (flow,), drops = headers(frames)
    assert (flow.session, flow.stripe, flow.phase) == (2**32 - 1, 7, 2)
    assert flow.numbers.tolist() == [2**40, 2**40 + 1, 2**40 + 2]
    assert np.shares_memory(flow.frames, frames)  # so that a burst is opened where it came
    assert not drops


def test_flows_are_told_apart_in_the_order_of_their_coming() -> None:
    frames = new_frames(6, 50)
    write_headers(frames, Kind.DATA, phase=1, stripe=0, session=5, first_number=0)
    flows, drops = headers(
        frames, session=[8, 5, 8, 5, 8, 8], phase=[1, 1, 1, 1, 2, 1], stripe=[0, 0, 0, 0, 0, 3]
    )
    told = [(flow.session, flow.stripe, flow.phase, flow.numbers.tolist()) for flow in flows]
    assert told == [(8, 0, 1, [0, 2]), (5, 0, 1, [1, 3]), (8, 0, 2, [4]), (8, 3, 1, [5])]
    assert not drops


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("version", LTP_VERSION + 1, "another version"),
        ("version", 0, "another version"),
        ("kind", 0, "unknown kind"),
        ("kind", 5, "unknown kind"),
        ("stripe", 8, "stripe"),
        ("number", MOST_NUMBER, "number"),
    ],
)
def test_a_header_out_of_bounds_is_dropped_by_its_reason(field: str, value: int, reason: str) -> None:
    frames = data()
    records_of(frames, HEADER, 0)[field][2] = value
    (flow,), drops = headers(frames)
    assert flow.numbers.tolist() == [100, 101, 103]
    assert drops == {reason: 1}


def test_short_long_and_empty_ones_are_dropped() -> None:
    frames = data(5)
    drops: Counter[str] = Counter()
    sizes = np.array([0, 32, 33, SIZE + 1, -1])
    (flow,) = headers_untrusted(frames, sizes, drops)
    assert flow.numbers.tolist() == [102]
    assert drops == {"too short": 4}
    assert headers_untrusted(np.zeros((2, 9), np.uint8), np.array([9, 9]), drops) == []
    assert headers_untrusted(np.zeros((0, SIZE), np.uint8), np.zeros(0, np.int64), drops) == []
    assert drops == {"too short": 6}


def test_one_that_is_longer_than_any_is_dropped() -> None:
    drops: Counter[str] = Counter()
    arena = np.zeros((2, 65_507), np.uint8)
    arena[:, :SIZE] = data(2)
    (flow,) = headers_untrusted(arena, np.array([65_001, 65_000]), drops)
    assert flow.numbers.tolist() == [101]
    assert drops == {"too long": 1}
    assert headers_untrusted(arena, np.array([65_001, 65_001]), drops) == []


# -- data and parity -----------------------------------------------------------------------------------------


def test_data_is_read_as_it_was_written() -> None:
    (batch,), drops = split(data())
    assert (batch.kind, len(batch), not drops) == (Kind.DATA, 4, True)
    assert batch.slices["index"].tolist() == [0, 1, 2, 3]
    assert batch.slices["chunk"].tolist() == [3] * 4
    assert batch.elements.shape == (4, SIZE - 76)
    assert batch.elements[3].tolist() == [4] * (SIZE - 76)
    assert payload_bytes(SIZE) == (SIZE - 76) // 8 * 8


def test_a_burst_of_many_kinds_and_sizes_is_split_by_them() -> None:
    said = control_datagram(linkcontrol.encode(linkcontrol.Ping(sequence=4)))
    write_headers(said, Kind.CONTROL, 0, 1, 9, 500)
    frames, sizes = stacked(data(2), said, data(1, 200, count=10), data(2, index=[5, 6]))
    drops: Counter[str] = Counter()
    batches = split_untrusted(frames, sizes, drops)
    assert [(batch.kind, len(batch), batch.frames.shape[1]) for batch in batches] == [
        (Kind.DATA, 4, SIZE - SEAL_BYTES),
        (Kind.CONTROL, 1, said.shape[1] - SEAL_BYTES),
        (Kind.DATA, 1, 200 - SEAL_BYTES),
    ]
    assert batches[0].slices["index"].tolist() == [0, 1, 5, 6]
    assert linkcontrol.decode_untrusted(batches[1].bodies[0]) == linkcontrol.Ping(sequence=4)
    assert not drops


BAD_SLICES = [
    ({"reserved": 1}, "reserved"),
    ({"element": 0}, "element"),
    ({"element": 6}, "element"),
    ({"flags": 4}, "flags"),
    ({"flags": 0x80 | HIGH, "nonzero": 0}, "flags"),
    ({"blocks": 0, "highs": 0}, "blocks"),
    ({"highs": 21}, "blocks"),
    ({"flags": HIGH, "nonzero": 1, "highs": 0}, "flags"),  # a high block of none
    ({"flags": 0, "highs": 20}, "flags"),  # a low block where all are high
    ({"flags": RELIABLE}, "flags"),
    ({"flags": RELIABLE | HIGH, "nonzero": 1, "highs": 19}, "flags"),
    ({"group": 0}, "group"),
    ({"group": 0, "data": 4, "parity": 2, "place": 4}, "group"),  # parity's place
    ({"group": 0, "data": 4, "parity": 2, "place": 6}, "group"),
    ({"parity": 1}, "group"),
    ({"place": 1}, "group"),
    ({"index": 20}, "index"),
    ({"count": 0}, "count"),
    ({"count": 46}, "count"),  # 45 have room
    ({"count": 23, "element": Element.FLOAT64}, "count"),
    ({"offset": 2**32 - 42}, "offset"),
    ({"scale": np.nan}, "scale"),
    ({"scale": -np.inf}, "scale"),
    ({"flags": HIGH, "nonzero": 43}, "nonzero"),
    ({"flags": HIGH, "nonzero": NOT_SAID}, "nonzero"),
    ({"nonzero": 43}, "nonzero"),
]


@pytest.mark.parametrize(("fields", "reason"), BAD_SLICES, ids=str)
def test_a_slice_out_of_bounds_is_dropped_by_its_reason(fields: dict[str, Any], reason: str) -> None:
    frames = data(3)
    frames[1] = data(3, **fields)[1]
    (batch,), drops = split(frames)
    assert batch.headers["number"].tolist() == [100, 102]
    assert drops == {reason: 1}
    assert restored_untrusted(Datagrams(Kind.DATA, frames[:, :-SEAL_BYTES]), drops).tolist() == [
        True,
        False,
        True,
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"flags": HIGH, "nonzero": 42},
        {"flags": HIGH | RELIABLE, "nonzero": 0, "highs": 20},
        {"group": 65534, "data": 200, "parity": 55, "place": 199},
        {"index": 19},
        {"count": 45},
        {"count": 180, "element": Element.BYTE},
        {"offset": 2**32 - 43},
        {"nonzero": 42},
    ],
    ids=str,
)
def test_a_slice_at_its_bounds_is_taken(fields: dict[str, Any]) -> None:
    (batch,), drops = split(data(**fields))
    assert len(batch) == 4
    assert not drops


def test_parity_is_checked_by_what_is_not_coded() -> None:
    good: dict[str, Any] = {"group": 2, "data": 3, "parity": 2, "place": 4, "flags": HIGH}
    coded: dict[str, Any] = {
        "index": 2**32 - 1,
        "scale": np.nan,
        "count": 0,
        "offset": 2**32 - 1,
    }  # says nothing yet
    (batch,), drops = split(data(kind=Kind.PARITY, **good, **coded))
    assert (batch.kind, len(batch), not drops) == (Kind.PARITY, 4, True)
    assert batch.coded.shape == (4, SIZE - SEAL_BYTES - HEADER.itemsize - 28)
    for fields in ({"place": 2}, {"place": 5}, {"group": NO_GROUP}, {"data": 0}):
        assert split(data(kind=Kind.PARITY, **(good | fields)))[0] == []


def test_what_is_too_short_for_its_kind_is_dropped() -> None:
    frames = data(2)
    for kind, least in ((Kind.DATA, SLICE.itemsize), (Kind.PARITY, SLICE.itemsize), (Kind.ACK, ACK.itemsize)):
        write_headers(frames, kind, 0, 0, 0, 0)
        cut = frames[:, : HEADER.itemsize + least - 1 + SEAL_BYTES]
        assert split(cut) == ([], {"too short": 2})
    assert split(frames[:, : HEADER.itemsize]) == ([], {"too short": 2})


# -- acknowledgements ----------------------------------------------------------------------------------------


def ack(**changes: Any) -> Acknowledgement:
    received = np.array([True, False, True, True, False, False, True, True, True, False, True])
    told = {
        "of": 3, "largest": 1010, "arrived": 12.345678, "delay": 0.000125, "base": 1000, "received": received,
        "delivered": 2**40,
    }  # fmt: skip
    return Acknowledgement(**(told | changes))


def ack_frame(told: Acknowledgement) -> Bytes:
    frames = ack_datagram(told)
    write_headers(frames, Kind.ACK, 0, 0, 9, 77)
    return frames


def test_an_ack_is_read_as_it_was_written() -> None:
    (batch,), drops = split(ack_frame(ack()))
    assert not drops
    told = read_ack(batch.frames[0])
    assert told.numbers.tolist() == [1000, 1002, 1003, 1006, 1007, 1008, 1010]
    assert told.received.tolist() == ack().received.tolist()
    for name in ("of", "largest", "arrived", "delay", "base", "delivered"):
        assert getattr(told, name) == getattr(ack(), name), name


@pytest.mark.parametrize("bits", [0, 1, 7, 8, 9, ACK_BITS])
def test_an_ack_may_tell_of_none_and_of_many(bits: int) -> None:
    received = np.arange(bits) % 3 == 0
    (batch,), drops = split(ack_frame(ack(received=received, largest=1000 + bits)))
    assert not drops
    assert read_ack(batch.frames[0]).received.tolist() == received.tolist()


def test_an_ack_is_no_longer_than_a_datagram() -> None:
    for size in (256, 1400, 65_000):
        told = ack(received=np.ones(ack_bits(size), bool), largest=2**40)
        assert ack_datagram(told).shape[1] <= size
    assert ack_bits(256) == 1472


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("reserved", 1, "reserved"),
        ("of", 8, "stripe"),
        ("bits", 17, "bits"),
        ("bits", 8, "bits"),
        ("bits", 9, "bits"),  # the last byte has a bit more
        ("bits", 65535, "bits"),
        ("largest", 1009, "number"),
        ("largest", 2**64 - 1, "number"),
        ("base", 1001, "number"),
        ("base", 2**64 - 5, "number"),
        ("arrived", MOST_NUMBER, "arrived"),
        ("delivered", 2**64 - 1, "delivered"),
    ],
)
def test_an_ack_out_of_bounds_is_dropped(field: str, value: int, reason: str) -> None:
    frames = ack_frame(ack())
    records_of(frames, ACK, HEADER.itemsize)[field] = value
    assert split(frames) == ([], {reason: 1})


# -- control messages ----------------------------------------------------------------------------------------

TOKEN = bytes(range(8))
MESSAGES = [
    linkcontrol.Hello(sequence=0),
    linkcontrol.Challenge(sequence=1, token=TOKEN),
    linkcontrol.Answer(sequence=2, token=TOKEN),
    linkcontrol.Ping(sequence=2**53 - 1),
    linkcontrol.Early(sequence=4, transfer=2**32 - 1),
    linkcontrol.Need(sequence=5, transfer=0, ranges=[(0, 1), (3, 9), (2**32 - 2, 2**32 - 1)]),
    linkcontrol.Closed(
        sequence=6, transfer=1, part=1, parts=2, first=8, missing=b"\x01\xff", fill="zero", how="enough"
    ),
    linkcontrol.Ask(sequence=7, size=20_000_000),
    linkcontrol.Grant(sequence=7, rate=1.25e8, seconds=0.5),
    linkcontrol.Bye(sequence=8, reason="the run is over"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_is_read_as_it_was_written(message: linkcontrol.AnyControl) -> None:
    frames = control_datagram(linkcontrol.encode(message))
    write_headers(frames, Kind.CONTROL, 0, 0, 9, 1)
    (batch,), _ = split(frames)
    assert linkcontrol.decode_untrusted(batch.bodies[0]) == message


CLOSED = {
    "m": "Closed", "transfer": 0, "part": 0, "parts": 1, "first": 0, "missing": b"", "fill": "none",
    "how": "enough",
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"m": "Hello", "version": 256},
        {"m": "Challenge", "token": TOKEN[:7]},
        {"m": "Challenge", "token": TOKEN + b"x"},
        {"m": "Ping", "sequence": -1},
        {"m": "Ping", "sequence": 2**53},
        {"m": "Ping", "more": 1},
        {"m": "Pong"},
        {"m": "Early", "transfer": 2**32},
        {"m": "Early"},
        {"m": "Need", "transfer": 0, "ranges": []},
        {"m": "Need", "transfer": 0, "ranges": [[1, 1]]},
        {"m": "Need", "transfer": 0, "ranges": [[1, 3], [3, 4]]},
        {"m": "Need", "transfer": 0, "ranges": [[5, 6], [1, 2]]},
        {"m": "Need", "transfer": 0, "ranges": [[2 * i, 2 * i + 1] for i in range(4097)]},
        CLOSED | {"part": 2, "parts": 2},
        CLOSED | {"parts": 0},
        CLOSED | {"first": 4},
        CLOSED | {"first": 2**32 - 8, "missing": b"ab"},
        CLOSED | {"fill": "noise"},
        CLOSED | {"how": "so"},
        {"m": "Grant", "rate": 0.0, "seconds": 1.0},
        {"m": "Grant", "rate": float("inf"), "seconds": 1.0},
        {"m": "Grant", "rate": float("nan"), "seconds": 1.0},
        {"m": "Grant", "rate": 1.0, "seconds": float("nan")},
        {"m": "Grant", "rate": 1.0, "seconds": 1e9},
        {"m": "Bye", "reason": "x" * 129},
    ],
    ids=str,
)  # fmt: skip
def test_a_message_out_of_bounds_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(WireError, match="no control message: ") as error:
        linkcontrol.decode_untrusted(msgspec.msgpack.encode({"sequence": 0} | changes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "body",
    [b"", b"\xc1", b"\x80" * 3, b"\x91" * 60_000, linkcontrol.encode(MESSAGES[0]) + b"\0", bytes(70_000)],
)
def test_what_is_no_message_is_refused(body: bytes) -> None:
    with pytest.raises(WireError):
        linkcontrol.decode_untrusted(body)


@pytest.mark.parametrize("size", [256, 300, 313, 314, 500, 571, 572, 573, 1400, 9000, 65_000])
def test_a_hello_fills_a_datagram(size: int) -> None:
    hello = linkcontrol.padded(linkcontrol.Hello(sequence=0), size)
    assert size - 2 <= control_datagram(linkcontrol.encode(hello)).shape[1] <= size


def test_need_asks_for_ranges_that_fit() -> None:
    missing = np.zeros(100, bool)
    assert linkcontrol.need_of(3, 7, missing, 1400) is None
    missing[[0, 1, 5, 99]] = True
    assert linkcontrol.need_of(3, 7, missing, 1400) == linkcontrol.Need(
        sequence=3, transfer=7, ranges=[(0, 2), (5, 6), (99, 100)]
    )
    scattered = np.zeros(2**20, bool)
    scattered[2**20 - 10_000 :: 2] = True
    for size in (256, 1400, 65_000):
        need = linkcontrol.need_of(2**53 - 1, 2**32 - 1, scattered, size)
        assert need is not None
        assert need.ranges[0] == (2**20 - 10_000, 2**20 - 9999)
        assert len(control_datagram(linkcontrol.encode(need))[0]) <= size


@pytest.mark.parametrize(
    ("blocks", "size"), [(0, 256), (1, 256), (64, 256), (14_923, 256), (14_923, 1400), (2**20, 1400)]
)
def test_closed_tells_of_all_blocks(blocks: int, size: int) -> None:
    missing = np.random.default_rng(blocks).random(blocks) < 0.1
    parts = linkcontrol.closed_of(2**53 - 10_000, 2**32 - 1, missing, "rescaled", "complete", size)
    told = np.zeros(blocks, bool)
    for part in parts[::-1]:
        encoded = linkcontrol.encode(part)
        assert len(control_datagram(encoded)[0]) <= size
        decoded = linkcontrol.decode_untrusted(encoded)
        assert isinstance(decoded, linkcontrol.Closed)
        linkcontrol.mark_missing(decoded, told)
    assert told.tolist() == missing.tolist()
    assert [part.sequence for part in parts] == list(range(parts[0].sequence, parts[0].sequence + len(parts)))
    assert {part.parts for part in parts} == {len(parts)}


@pytest.mark.parametrize(("first", "missing"), [(0, b"\0\0\x04"), (0, bytes(4)), (24, b"\0"), (800, b"\1")])
def test_closed_of_blocks_that_are_none_is_refused(first: int, missing: bytes) -> None:
    closed = linkcontrol.Closed(
        sequence=0, transfer=0, part=0, parts=1, first=first, missing=missing, fill="zero", how="enough"
    )
    told = np.zeros(18, bool)
    with pytest.raises(WireError, match="past 18"):
        linkcontrol.mark_missing(closed, told)
    assert not told.any()
