"""Mutated datagrams against the parsers, the seals and the replay window.

Nothing but counted drops: no exception, no row that a plain reading of the layouts would refuse, no forgery,
no replay, and no memory that grows. Mutations are made on whole arrays: a million take half a minute.
"""

from __future__ import annotations

import gc
import math
import struct
import tracemalloc
from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest
from mutations import change_bytes

from atoll.ltp.replay import ReplayWindow
from atoll.net.seals import Opener, Sealer
from atoll.wire import datagrams, linkcontrol
from atoll.wire.base import WireError
from atoll.wire.datagrams import (
    HEADER,
    HIGH,
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
    ack_datagram,
    control_datagram,
    headers_untrusted,
    new_frames,
    read_ack,
    records_of,
    split_untrusted,
    write_headers,
)

Sizes = npt.NDArray[np.int64]
WIDTH = 320  # of the arena
SECRET = bytes(range(32))
MESSAGES: list[linkcontrol.AnyControl] = [
    linkcontrol.Hello(sequence=0, padding=bytes(100)),
    linkcontrol.Challenge(sequence=1, token=bytes(8)),
    linkcontrol.Answer(sequence=2, token=bytes(8)),
    linkcontrol.Ping(sequence=3),
    linkcontrol.Early(sequence=4, transfer=5),
    linkcontrol.Need(sequence=5, transfer=0, ranges=[(0, 1), (3, 9)]),
    linkcontrol.Closed(
        sequence=6, transfer=1, part=0, parts=1, first=8, missing=b"\1", fill="zero", how="enough"
    ),
    linkcontrol.Ask(sequence=7, size=1),
    linkcontrol.Grant(sequence=7, rate=1.25e8, seconds=0.5),
    linkcontrol.Bye(sequence=8, reason="the run is over"),
]  # fmt: skip


def genuine(rng: np.random.Generator, count: int) -> tuple[Bytes, Sizes]:
    """An arena of good datagrams of each kind, numbered from 0, unsealed; what lies behind them is noise."""
    frames = rng.integers(0, 256, (count, WIDTH), dtype=np.uint8)
    sizes = np.zeros(count, dtype=np.int64)
    slices = np.zeros(1, dtype=SLICE)
    for row in range(count):
        choice = rng.integers(0, 7)
        if choice < 4:
            burst, kind = new_frames(1, int(rng.choice([200, 244, 60]))), Kind.DATA
            burst[0, HEADER.itemsize :] = frames[row, HEADER.itemsize : burst.shape[1]]
            slices["flags"], slices["nonzero"] = (HIGH, 3) if choice % 2 else (0, NOT_SAID)
            slices["transfer"], slices["blocks"], slices["highs"], slices["index"] = 7, 50, 10, row % 50
            slices["element"], slices["count"], slices["scale"] = Element.FLOAT16, 8, 1.0
            slices["offset"] = 2**32 - 9  # with one element more it would be past the end
            slices["group"], slices["place"], slices["data"], slices["parity"] = NO_GROUP, 0, 0, 0
            if choice > 1:
                slices["group"], slices["place"], slices["data"], slices["parity"] = 1, row % 8, 8, 2
            if choice == 3:
                kind, slices["place"] = Kind.PARITY, 8 + row % 2
            records_of(burst, SLICE, HEADER.itemsize)[:] = slices
        elif choice < 5:
            received = rng.random(int(rng.integers(0, 900))) < 0.9
            told = Acknowledgement(2, 5000, 1.5, 0.001, 5001 - len(received), received, 10**9)
            burst, kind = ack_datagram(told), Kind.ACK
        else:
            message = MESSAGES[int(rng.integers(len(MESSAGES)))]
            burst, kind = control_datagram(linkcontrol.encode(message)), Kind.CONTROL
        write_headers(burst, kind, 0, 1, 9, row)
        frames[row, : burst.shape[1]], sizes[row] = burst[0], burst.shape[1]
    return frames, sizes


def mutated(rng: np.random.Generator, frames: Bytes, sizes: Sizes) -> tuple[Bytes, Sizes]:
    """Copies, each with a mutation of one of eight sorts."""
    frames, sizes = frames.copy(), sizes.copy()
    rows = np.arange(len(frames))
    sort = rng.integers(0, 8, len(frames))

    def of(which: int) -> npt.NDArray[np.int64]:
        return rows[sort == which]

    change_bytes(rng, frames, of(0), of(1), of(2))
    sizes[of(3)] = rng.integers(-1, sizes[of(3)] + 1)  # cut
    sizes[of(4)] = rng.integers(sizes[of(4)], WIDTH + 5)  # drawn out, by noise
    frames[of(5)] = rng.integers(0, 256, (len(of(5)), WIDTH))  # noise
    frames[of(6), 1] = rng.integers(0, 6, len(of(6)))  # another kind
    some = of(7)  # the head of one on the body of another
    other = rng.integers(0, len(frames), len(some))
    behind = np.arange(WIDTH) >= rng.integers(1, 70, len(some))[:, None]
    frames[some] = np.where(behind, frames[other], frames[some])
    return frames, sizes


def is_good(frame: bytes) -> bool:
    """Whether docs/ltp.md allows this opened datagram, header and body: read plainly, field by field."""
    kind, body = frame[1], frame[16:]
    if kind == Kind.CONTROL:
        return len(body) > 0
    if kind == Kind.ACK:
        if len(body) < 40:
            return False
        largest, arrived, _, of, reserved, bits, base, delivered = struct.unpack_from("<QQIBBHQQ", body)
        bitmap = int.from_bytes(body[40:], "little")
        return (
            max(largest, arrived, base, delivered) < MOST_NUMBER
            and of < 8 and reserved == 0 and bits <= 8000
            and len(body) - 40 == -(-bits // 8) and bitmap < 1 << bits
            and base + bits <= largest + 1
        )  # fmt: skip
    if kind not in (Kind.DATA, Kind.PARITY) or len(body) < 44:
        return False
    fields = struct.unpack_from("<IIIIIHBBBBBBIIfHH", body)
    _, _, _, blocks, highs, group, place, data, parity, element, flags, reserved = fields[:12]
    offset, index, scale, count, nonzero = fields[12:]
    good = reserved == 0 and 1 <= element <= 5 and flags <= 3 and blocks >= 1 and highs <= blocks
    good = good and (highs > 0 if flags & HIGH else highs < blocks)
    good = good and (not flags & RELIABLE or (bool(flags & HIGH) and highs == blocks))
    if group == NO_GROUP:
        good = good and place == data == parity == 0 and kind == Kind.DATA
    else:
        good = good and data > 0
        good = good and (place < data if kind == Kind.DATA else data <= place < data + parity)
    if kind == Kind.PARITY:
        return good
    size = {1: 4, 2: 8, 3: 2, 4: 2, 5: 1}.get(element, 0)
    good = good and index < blocks and count > 0 and count * size <= len(body) - 44 and offset + count < 2**32
    return good and math.isfinite(scale) and (nonzero <= count or (nonzero == NOT_SAID and not flags & HIGH))


def check_opened(frames: Bytes, sizes: Sizes) -> Counter[str]:
    """The parser takes what a plain reading takes, and counts the rest."""
    drops: Counter[str] = Counter()
    batches = split_untrusted(frames, sizes, drops)
    taken = Counter(row.tobytes() for batch in batches for row in batch.frames)
    expected = Counter(
        frame
        for row, size in zip(frames, sizes.tolist(), strict=True)
        if 32 < size <= WIDTH and is_good(frame := row[: size - SEAL_BYTES].tobytes())
    )
    assert taken == expected
    assert taken.total() + drops.total() == len(frames)
    for batch in batches:
        for row in batch.frames if batch.kind is Kind.ACK else ():
            told = read_ack(row)
            assert ((told.numbers >= told.base) & (told.numbers <= told.largest)).all()
        for row in batch.bodies if batch.kind is Kind.CONTROL else ():
            try:
                message = linkcontrol.decode_untrusted(row)
            except WireError:
                continue
            assert linkcontrol.decode_untrusted(linkcontrol.encode(message)) == message
    return drops


def fuzz_opened(seed: int, datagrams_in_all: int) -> Counter[str]:
    rng = np.random.default_rng(seed)
    drops: Counter[str] = Counter()
    frames, sizes = genuine(rng, 500)
    assert not check_opened(frames, sizes)  # before any mutation all are good
    for _ in range(0, datagrams_in_all, 500):
        drops += check_opened(*mutated(rng, frames, sizes))
    return drops


def fuzz_sealed(seed: int, datagrams_in_all: int) -> Counter[str]:
    """Whole bursts as a port gives them, mutated, doubled and replayed: what is taken is genuine to the bit,
    and comes once."""
    rng = np.random.default_rng(seed)
    plain, sizes = genuine(rng, 500)
    sealer = Sealer(SECRET, client=True, stripe=1)
    sealed = plain.copy()
    for row, size in enumerate(sizes.tolist()):
        sealer.seal(sealed[row : row + 1, :size])
    originals = [row[: size - SEAL_BYTES].tobytes() for row, size in zip(plain, sizes.tolist(), strict=True)]
    drops: Counter[str] = Counter()
    opener, window, seen = Opener(SECRET, client=False, stripe=1), ReplayWindow(), set[int]()
    for at in range(0, datagrams_in_all, 500):
        if at % 10_000 == 0:
            opener, window, seen = Opener(SECRET, client=False, stripe=1), ReplayWindow(), set()
        frames, lengths = mutated(rng, sealed, sizes)
        again = rng.integers(0, 500, 20)  # and a few that are genuine, or come again
        frames[again], lengths[again] = sealed[again], sizes[again]
        for flow in headers_untrusted(frames, lengths, drops):
            fresh = window.fresh(flow.numbers)
            numbers, rows, row_sizes = flow.numbers[fresh], flow.frames[fresh], flow.sizes[fresh]
            good = opener.open(rows, row_sizes)
            taken = window.mark(numbers[good])
            drops["replayed"] += int((~fresh).sum()) + int((~taken).sum())
            drops["forged"] += int((~good).sum())
            for number, row, size in zip(
                numbers[good][taken].tolist(), rows[good][taken], row_sizes[good][taken].tolist(), strict=True
            ):
                assert row[: size - SEAL_BYTES].tobytes() == originals[number]
                assert number not in seen
                seen.add(number)
                drops["taken"] += 1
        assert window.highest < 500
    return drops


REASONS = {
    "too short", "unknown kind", "reserved", "element", "flags", "blocks", "group", "index", "count",
    "offset", "scale", "nonzero", "stripe", "bits", "number", "arrived", "delivered",
}  # fmt: skip


def test_mutated_datagrams_are_taken_or_counted() -> None:
    drops = fuzz_opened(1, 30_000)
    assert set(drops) == REASONS  # so each check was tried


def test_forged_and_replayed_ones_are_refused() -> None:
    drops = fuzz_sealed(2, 20_000)
    assert (
        min(drops[each] for each in ("taken", "forged", "replayed", "another version", "stripe", "number"))
        > 0
    )
    assert drops.total() >= 20_000


def test_the_quick_checks_let_nothing_pass_that_the_others_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bursts of one transfer with one row mutated: with the quick checks, and without."""
    rng = np.random.default_rng(3)
    burst = new_frames(8, 200)
    slices = records_of(burst, SLICE, HEADER.itemsize)
    slices["blocks"], slices["highs"], slices["group"], slices["element"] = 50, 10, NO_GROUP, Element.FLOAT32
    slices["count"], slices["scale"], slices["index"] = 30, 1.0, np.arange(8)
    slices["flags"], slices["nonzero"] = np.arange(8) % 2, np.where(np.arange(8) % 2, 7, NOT_SAID)
    write_headers(burst, Kind.DATA, 0, 1, 9, 100)
    sizes = np.full(8, burst.shape[1])
    good = Datagrams(Kind.DATA, burst[:, :-SEAL_BYTES])
    assert datagrams._are_good_data(good)
    assert datagrams._are_one_good_flow(burst, sizes)
    found = Counter[str]()
    for _ in range(1500):
        copy, lengths = burst.copy(), sizes.copy()
        at, row = int(rng.integers(0, 60)), int(rng.integers(0, 8))
        value = int(rng.choice([0, 1, 2, 3, 7, 8, 30, 50, 0x7F, 0x80, 0xFF]))
        if rng.random() < 0.3:
            copy[:, at] = value
        else:
            copy[row, at] = value
        if rng.random() < 0.1:
            lengths[row] = int(rng.integers(0, burst.shape[1] + 2))
        results = []
        for quick in (True, False):
            with monkeypatch.context() as patch:
                if not quick:
                    patch.setattr(datagrams, "_are_good_data", lambda batch: False)
                    patch.setattr(datagrams, "_are_one_good_flow", lambda frames, sizes: False)
                else:
                    found["flow"] += datagrams._are_one_good_flow(copy, lengths)
                    found["data"] += datagrams._are_good_data(Datagrams(Kind.DATA, copy[:, :-SEAL_BYTES]))
                drops: Counter[str] = Counter()
                flows = headers_untrusted(copy, lengths, drops)
                told = [(flow.session, flow.stripe, flow.phase, flow.numbers.tolist()) for flow in flows]
                batches = [
                    batch for flow in flows for batch in split_untrusted(flow.frames, flow.sizes, drops)
                ]
                results.append((told, drops, [(batch.kind, batch.frames.tobytes()) for batch in batches]))
        assert results[0] == results[1]
    assert 150 < found["flow"] < 1450
    assert 150 < found["data"] < 1450


@pytest.mark.soak
def test_memory_does_not_grow() -> None:
    rng = np.random.default_rng(4)
    frames, sizes = genuine(rng, 500)
    noise = rng.integers(0, 256, (500, WIDTH), dtype=np.uint8)
    noise[:, 0], noise[:, 1], noise[:, 3], noise[:, 15] = 1, 1 + noise[:, 1] % 4, noise[:, 3] % 8, 0
    opener, window = Opener(SECRET, client=False, stripe=1), ReplayWindow()
    drops: Counter[str] = Counter()
    tracemalloc.start()
    try:
        for round_ in range(5):
            for burst, lengths in (mutated(rng, frames, sizes), (noise, rng.integers(33, WIDTH, 500))):
                for flow in headers_untrusted(burst, lengths, drops):  # nearly 500 of noise
                    window.mark(flow.numbers[opener.open(flow.frames, flow.sizes)])
                split_untrusted(burst, lengths, drops)
            if round_ == 1:
                gc.collect()
                before, _ = tracemalloc.get_traced_memory()
        gc.collect()
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 200_000
    assert peak < 20 * frames.nbytes


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(10))
def test_a_million_mutated_datagrams(seed: int) -> None:
    opened = fuzz_opened(100 + seed, 50_000)
    assert set(opened) == REASONS
    sealed = fuzz_sealed(200 + seed, 50_000)
    assert sealed["forged"] > 10_000
