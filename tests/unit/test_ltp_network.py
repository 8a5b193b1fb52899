"""Two sessions over the virtual network: whatever it does, high-priority blocks come whole and exact, and of
each low-priority block what was sent is what was applied and what is held back."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from atoll.ltp.events import Lost, Migrated, Opened, StripeChanged
from atoll.ltp.settings import Fill, LtpSettings
from atoll.wire.datagrams import ACK, HEADER, SEAL_BYTES, SLICE, Bytes, Kind, payload_bytes, records_of
from atoll.wire.linkcontrol import Closed, decode_untrusted
from support.ltp import (
    End,
    Ledger,
    Pair,
    Passing,
    Tap,
    Way,
    held_bytes,
    lose,
    whole_numbers,
)
from support.sim import LinkModel

pytestmark = pytest.mark.check

SMALL = LtpSettings(datagram_bytes=256)  # so that a few kilobytes are a transfer of many datagrams
BLOCK = payload_bytes(256) // 4  # elements
LINK = LinkModel(rate=12.5e6, delay=0.02)  # 100 Mbit/s
LONG = 60.0  # virtual seconds in which everything must be over
WAYS: tuple[Way, Way] = ("up", "down")
NODES = (("client", "server"), ("server", "client"))
VALUES = ("bit", "zero", "most", "next")  # what a field is changed to: see `change`
SMALL_IDLE = 2.0


def opened(pair: Pair) -> Pair:
    pair.run_until(lambda: all(has(end, Opened) for end in (pair.client, pair.server)), 20)
    return pair


def has(end: End, kind: type) -> bool:
    return any(isinstance(event, kind) for event in end.events)


def the(end: End, kind: type) -> Any:
    return next(event for event in end.events if isinstance(event, kind))


def blocks(pair: Pair, count: int, seed: int = 0) -> npt.NDArray[np.float32]:
    """A gradient of so many blocks, the last of which is not full."""
    return whole_numbers(np.random.default_rng(seed), count * BLOCK - 5)


def transfers(pair: Pair, count: int = 2, size: int = 24, way: Way = "up", **how: Any) -> Ledger:
    """Transfers of one chunk, one after the other so that what was held goes along with the next, and
    checked."""
    ledger = Ledger(pair, way)
    for index in range(count):
        ledger.send(0, blocks(pair, size, index), **how)
        pair.run_until(lambda: ledger.done, LONG)
    ledger.check()
    return ledger


def settled(pair: Pair) -> None:
    """Nothing goes on any more: both ends wait for input, or for the silence of the other to become too
    long."""
    pair.run(2.0)
    sent = pair.client.sent + pair.server.sent
    pair.run(5.0)
    assert pair.client.sent + pair.server.sent - sent <= 2, "a pair that has nothing to do goes on sending"


# -- the handshake -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stripes", [1, 3, 8])
def test_a_session_opens_in_a_round_trip(stripes: int) -> None:
    pair = Pair(SMALL, LINK, stripes=stripes)
    assert pair.run_until(lambda: has(pair.client, Opened) and has(pair.server, Opened), 1) < 0.05
    transfers(pair, size=100)
    settled(pair)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("nth", range(4))
def test_the_loss_of_any_datagram_of_the_handshake_is_made_good(way: Way, nth: int) -> None:
    pair = Pair(SMALL, LINK)
    pair.sealed_taps.append(lose(way, nth=lambda places: places == nth))
    pair.run_until(lambda: has(pair.client, Opened) and has(pair.server, Opened), 5)
    transfers(pair, 1)
    transfers(pair, 1, way="down")


def test_a_session_opens_where_most_is_lost() -> None:
    pair = Pair(SMALL, replace(LINK, loss=0.6), seed=3)
    opened(pair)
    transfers(pair, 1, size=10)


def test_data_may_be_sent_before_the_session_is_open() -> None:
    pair = Pair(SMALL, LINK)
    transfers(pair, 1)


def test_nobody_answers() -> None:
    settings = replace(SMALL, idle_seconds=5.0)
    pair = Pair(settings, LINK)
    pair.kill(pair.server)
    assert 4.9 < pair.run_until(lambda: has(pair.client, Lost), 10) < 6
    assert pair.client.sent < 20
    assert_over(pair, pair.client)


# -- keys --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["client", "server", "both"])
def test_keys_change_in_mid_transfer(who: str) -> None:
    pair = opened(Pair(SMALL, LINK, stripes=2))
    ledger = Ledger(pair)
    for round_ in range(4):
        ledger.send(0, blocks(pair, 200, round_))
        pair.run(0.01)
        for end in (pair.client, pair.server):
            if who in (end.name, "both") and end.session:
                end.session.change_keys()
        pair.run_until(lambda: ledger.done, LONG)
    ledger.check()
    assert max(sealer.phase for sealer in pair.client.sealers) >= 4 or who == "server"
    assert max(sealer.phase for sealer in pair.server.sealers) >= 4 or who == "client"
    assert not pair.client.drops["seal"]
    assert not pair.server.drops["seal"]


@pytest.mark.parametrize("nth", range(6))
def test_keys_change_though_the_first_datagrams_under_the_new_ones_are_lost(nth: int) -> None:
    pair = opened(Pair(SMALL, replace(LINK, reorder=0.2, reorder_by=0.01)))
    phases: set[int] = set()

    def tap(passing: Passing) -> Bytes:
        phase = int(passing.frames[0, 2])
        if phase and phase not in phases:  # all of the first burst, but for one
            phases.add(phase)
            return passing.frames[nth : nth + 1]
        return passing.frames

    pair.sealed_taps.append(tap)
    ledger = Ledger(pair)
    ledger.send(0, blocks(pair, 200))
    pair.run(0.005)
    for end in (pair.client, pair.server):
        assert end.session
        end.session.change_keys()
    pair.run_until(lambda: ledger.done, LONG)
    transfers(pair, 1)
    ledger.check()
    assert phases == {1}


# -- the loss of single datagrams --------------------------------------------------------------------------


def lost_in_turn(way: Way, size: int = 16, **how: Any) -> Iterator[tuple[int, float, Pair]]:
    """A transfer for each of its datagrams of this way, in which that one is lost; with how long it took."""
    whole = opened(Pair(SMALL, LINK))
    first = whole.ends[way].sent
    transfers(whole, 2, size, **how)
    for nth in range(first, whole.ends[way].sent):
        pair = opened(Pair(SMALL, LINK))
        lost: list[int] = []

        def which(places: npt.NDArray[np.int64], nth: int = nth, lost: list[int] = lost) -> Any:
            lost += places[places == nth].tolist()
            return places == nth

        pair.sealed_taps.append(lose(way, nth=which))
        begun = pair.now
        transfers(pair, 2, size, **how)
        assert lost or nth > first + size, nth
        yield nth, pair.now - begun, pair


@pytest.mark.parametrize("mode", ["lossy", "reliable", "all low", "without redundancy"])
@pytest.mark.parametrize("way", WAYS)
def test_the_loss_of_every_single_datagram_in_turn(way: Way, mode: str) -> None:
    how: dict[str, dict[str, Any]] = {"reliable": {"reliable": True}, "all low": {"share": None}}
    count = 0
    for nth, seconds, _ in lost_in_turn(way, **how.get(mode, {})):
        assert seconds < 0.5, f"datagram {nth} lost: {seconds:.3f} s"  # two round trips, and two for a probe
        count += 1
    assert count > (16 if way == "up" else 3)


@pytest.mark.soak
def test_the_loss_of_every_two_datagrams_in_turn() -> None:
    for first in range(60):
        for second in range(first + 1, 60):
            pair = opened(Pair(SMALL, LINK))
            pair.sealed_taps.append(
                lose(nth=lambda places, a=first, b=second: (places == a + 3) | (places == b + 3))
            )
            transfers(pair, 2)


# -- bursts, and blackouts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("fill", ["zero", "last"])
@pytest.mark.parametrize(("loss", "burst"), [(0.01, 1.0), (0.05, 10.0), (0.2, 30.0)])
def test_bursts_of_loss(loss: float, burst: float, fill: Fill) -> None:
    pair = opened(Pair(replace(SMALL, fill=fill), replace(LINK, loss=loss, burst=burst), seed=5))
    ledger = transfers(pair, 6, 300)
    assert ledger.missing or loss < 0.05


@pytest.mark.parametrize("way", WAYS)
def test_a_burst_at_each_place(way: Way) -> None:
    for start in range(0, 48, 6):
        pair = opened(Pair(SMALL, LINK))
        first = pair.ends[way].sent + start
        pair.sealed_taps.append(lose(way, nth=lambda nth, first=first: (nth >= first) & (nth < first + 12)))
        transfers(pair, 2, 48)


@pytest.mark.parametrize("ways", [("up",), ("down",), WAYS])
def test_a_blackout_of_five_seconds(ways: tuple[Way, ...]) -> None:
    pair = opened(Pair(SMALL, LINK))
    ledger = Ledger(pair)
    for chunk in range(4):
        ledger.send(chunk, blocks(pair, 400, chunk))
    pair.run(0.025)
    assert not ledger.done
    for way in ways:
        nodes = ("client", "server") if way == "up" else ("server", "client")
        pair.network.outage(*nodes, 5.0)
    before = pair.client.sent + pair.server.sent
    pair.run(4.9)
    assert pair.client.sent + pair.server.sent - before < 900, "a dead path is flooded"
    assert not ledger.done
    assert pair.run_until(lambda: ledger.done, LONG) < 3  # a probe's second, and what the transfer takes
    ledger.check()
    assert not has(pair.client, Lost)
    assert not has(pair.server, Lost)


# -- stripes -----------------------------------------------------------------------------------------------


def dead(stripe: int, ways: Sequence[Way] = WAYS) -> Tap:
    """A tap by which nothing comes through on this stripe."""

    def tap(passing: Passing) -> Bytes:
        gone = passing.stripe == stripe and passing.way in ways
        return passing.frames[:0] if gone else passing.frames

    return tap


def used(end: End) -> list[tuple[int, bool]]:
    """Which stripes this end has told not to be used, or to be used again."""
    return [(event.stripe, event.used) for event in end.events if isinstance(event, StripeChanged)]


@pytest.mark.parametrize("stripe", [0, 1])
@pytest.mark.parametrize("ways", [("up",), ("down",), WAYS])
@pytest.mark.parametrize("at", [-1.0, 0.01])
def test_a_stripe_that_is_dead_is_not_used(stripe: int, ways: tuple[Way, ...], at: float) -> None:
    """From the beginning, or from amidst a transfer on: what went over it goes again over the others."""
    settings = replace(SMALL, idle_seconds=3.0, initial_rate=12e6)
    pair = Pair(settings, LINK, stripes=3)
    if at < 0:
        pair.sealed_taps.append(dead(stripe, ways))
    opened(pair)
    ledgers = Ledger(pair), Ledger(pair, "down")
    for ledger in ledgers:
        for chunk in range(2):
            ledger.send(chunk, blocks(pair, 800, chunk))
    if at > 0:
        pair.run(at)
        pair.sealed_taps.append(dead(stripe, ways))
    assert not any(sent.arrived for ledger in ledgers for sent in ledger.sent.values())
    assert pair.run_until(lambda: all(ledger.done for ledger in ledgers), LONG) < 3.0
    for ledger in ledgers:
        ledger.check()
    pair.run(5.0)
    assert used(pair.client) == [(stripe, False)]
    assert f"stripe {stripe}" in the(pair.client, StripeChanged).reason
    before = pair.client.sent + pair.server.sent
    pair.run(20.0)  # many times the silence that ends a session
    assert pair.client.sent + pair.server.sent - before < 200  # a Challenge each half second among them
    again = transfers(pair, 1, 200), transfers(pair, 1, 200, way="down")
    assert not any(has(end, Lost) for end in (pair.client, pair.server))
    assert all(ledger.done for ledger in again)


def test_transfers_over_a_stripe_that_is_known_to_be_dead_take_no_longer() -> None:
    pair = opened(Pair(SMALL, LINK, stripes=2))
    transfers(pair, 2, 200)
    begun = pair.now
    transfers(pair, 2, 200)
    whole = pair.now - begun
    pair.sealed_taps.append(dead(1))
    transfers(pair, 2, 200)
    pair.run(3.0)
    begun = pair.now
    transfers(pair, 2, 200)
    assert pair.now - begun < 1.5 * whole


@pytest.mark.parametrize("stripe", [0, 1])
def test_a_stripe_that_answers_again_is_used_again(stripe: int) -> None:
    pair = opened(Pair(SMALL, LINK, stripes=2))
    transfers(pair, 1, 200)
    pair.sealed_taps.append(tap := dead(stripe))
    transfers(pair, 1, 400)
    pair.run(5.0)
    assert used(pair.client) == [(stripe, False)]
    pair.sealed_taps.remove(tap)
    pair.run_until(lambda: used(pair.client) == [(stripe, False), (stripe, True)], 3.0)
    where = ("server", stripe, 0)
    before = pair.client.sent_bytes[where]
    transfers(pair, 1, 400)
    assert pair.client.sent_bytes[where] - before > 400 * 256 / 4
    settled(pair)


@pytest.mark.parametrize("seconds", [0.3, 5.0])
def test_when_all_stripes_are_silent_none_is_told_to_be_dead(seconds: float) -> None:
    pair = opened(Pair(SMALL, LINK, stripes=3))
    ledger = Ledger(pair)
    ledger.send(0, blocks(pair, 2000))
    pair.run(0.025)
    taps = [dead(stripe) for stripe in range(3)]
    pair.sealed_taps += taps
    pair.run(seconds)
    pair.sealed_taps.clear()
    pair.run_until(lambda: ledger.done, LONG)
    ledger.check()
    assert used(pair.client) == used(pair.server) == []


def test_loss_alone_does_not_make_a_stripe_dead() -> None:
    pair = opened(Pair(replace(SMALL, idle_seconds=60.0), replace(LINK, loss=0.2), stripes=4))
    for turn in range(4):
        transfers(pair, 2, 300, way=WAYS[turn % 2])
        pair.run(10.0)
    assert used(pair.client) == used(pair.server) == []


# -- order, duplicates -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "by"), [(0.02, 0.001), (0.2, 0.02), (0.5, 0.005), (1.0, 0.02)], ids=lambda value: f"{value:g}"
)
def test_reordering(share: float, by: float) -> None:
    pair = opened(Pair(SMALL, replace(LINK, reorder=share, reorder_by=by)))
    ledger = transfers(pair, 3, 300)
    assert ledger.missing <= 0.03 * 3 * 300


def test_reordering_by_a_whole_window() -> None:
    """Every third datagram comes a window later than its neighbours."""
    pair = opened(Pair(SMALL, LINK))

    def late(passing: Passing) -> Bytes:
        later = passing.nth % 3 == 0
        held, source = passing.frames[later], pair.ends[passing.way].addresses[passing.stripe]
        pair.clock.call_at(pair.now + 0.03, lambda: pair.transmit(passing.way, source, passing.path, held))
        return passing.frames[~later]

    pair.sealed_taps.append(late)
    ledger = transfers(pair, 3, 300)
    assert ledger.missing <= 0.03 * 3 * 300


def test_every_burst_backwards() -> None:
    pair = opened(Pair(SMALL, LINK))
    pair.sealed_taps.append(lambda passing: passing.frames[::-1])
    ledger = transfers(pair, 3, 300)
    assert not ledger.missing


@pytest.mark.parametrize("copies", [2, 5])
def test_every_datagram_comes_more_than_once(copies: int) -> None:
    pair = opened(Pair(SMALL, replace(LINK, duplicate=0.5)))

    def again(passing: Passing) -> Bytes:
        source = pair.ends[passing.way].addresses[passing.stripe]
        pair.clock.call_at(
            pair.now + 0.1, lambda: pair.transmit(passing.way, source, passing.path, passing.frames)
        )
        return np.repeat(passing.frames, copies, axis=0)

    pair.sealed_taps.append(again)
    transfers(pair, 3, 200)
    assert pair.server.drops["replayed"] > 600
    assert pair.client.drops["replayed"] > 3
    settled(pair)


# -- damage ------------------------------------------------------------------------------------------------


def test_a_bit_flipped_anywhere_in_a_sealed_datagram_is_seen() -> None:
    pair = opened(Pair(SMALL, replace(LINK, corrupt=0.05)))
    transfers(pair, 3, 300)
    counters = pair.network.counters("client", "server")
    assert counters.corrupted > 20
    assert pair.server.drops.total() == counters.corrupted


@pytest.mark.parametrize("kind", list(Kind))
def test_a_changed_field_of_a_sealed_header_is_refused(kind: Kind) -> None:
    """Every field of the header in turn, of every fourth datagram of this kind, either way."""
    pair = opened(Pair(SMALL, replace(LINK, loss=0.02), seed=2))
    todo = [(field, value) for field in HEADER.names or () for value in VALUES]
    changed = Counter[tuple[str, str]]()

    def tap(passing: Passing) -> Bytes:
        if passing.kind is kind:
            for row in np.flatnonzero(passing.nth_of_kind % 4 == 0):
                field, value = todo[changed.total() % len(todo)]
                change(passing.frames, HEADER, 0, field, value, np.array([row]))
                changed[field, value] += 1
        return passing.frames

    pair.sealed_taps.append(tap)
    counters = [pair.network.counters(*way) for way in NODES]
    while len(changed) < len(todo):
        transfers(pair, 2, 60)
        transfers(pair, 1, 10, way="down")
    pair.run(0.5)
    refused = pair.client.drops.total() + pair.server.drops.total()
    harmless = sum(changed[field, "zero"] for field in ("phase", "stripe"))  # these were 0
    assert harmless <= changed.total() - refused <= harmless + sum(one.loss for one in counters)
    pair.sealed_taps.clear()
    transfers(pair, 1)


def change(
    frames: Bytes, layout: np.dtype[Any], start: int, field: str, value: str, rows: npt.NDArray[np.int64]
) -> int:
    """Write something else into a field of these rows; returns in how many it was not so before."""
    before = frames.copy()
    column = records_of(frames, layout, start)[field]
    bits = column.view(f"u{column.itemsize}") if column.dtype.kind == "f" else column
    most = np.iinfo(bits.dtype).max
    one = bits.dtype.type(1)
    bits[rows] = {
        "bit": bits[rows] ^ one,
        "zero": np.zeros_like(bits[rows]),
        "most": np.full_like(bits[rows], most),
        "next": bits[rows] + one,
    }[value]
    return int((before != frames).any(axis=1).sum())


class Forge:
    """A tap that changes a field before datagrams of a kind are sealed: an insider's. Of every third one, or
    of all parity, of which there is little."""

    def __init__(self, kind: Kind, way: Way, field: str, value: str) -> None:
        self.kind, self.way, self.field, self.value = kind, way, field, value
        self.changed = 0
        self.done = False

    def __call__(self, passing: Passing) -> Bytes:
        if passing.kind is self.kind and passing.way == self.way:
            layout = ACK if self.kind is Kind.ACK else SLICE
            rows = np.flatnonzero(passing.nth_of_kind % (1 if self.kind is Kind.PARITY else 3) == 0)
            self.changed += change(passing.frames, layout, HEADER.itemsize, self.field, self.value, rows)
            self.done = bool(self.changed or (len(rows) and self.value == "zero"))  # some fields are 0 anyway
        return passing.frames


def endured(pair: Pair, taps: Sequence[Tap], strict: bool = True) -> None:
    """Under each of these taps in turn some transfers are sent, of which anything may become; afterwards the
    session lives, has not grown, and what is sent honestly comes whole."""
    assert pair.client.session
    assert pair.server.session
    for index, tap in enumerate(taps):
        pair.opened_taps.append(tap)
        for again in range(40):  # until there was one to be changed
            if again and getattr(tap, "done", True):
                break
            pair.client.session.send(
                pair.now, again % 2, index, blocks(pair, 30, again), high=np.arange(30) % 5 == 0
            )
            pair.run(0.1)
        pair.opened_taps.remove(tap)
        pair.client.session.send(pair.now, 0, index, blocks(pair, 4))  # whose id the forger may have used
        pair.run(SMALL_IDLE + 0.5)  # what of them has no end is given up
        for end in (pair.client, pair.server):
            assert not has(end, Lost), the(end, Lost).reason
        if strict:
            transfers(pair, 1, 12)
        else:  # forged ids may be past the honest ones, whose sender is told so
            ledger = Ledger(pair)
            ledger.send(0, blocks(pair, 12))
            pair.run_until(lambda ledger=ledger: all(sent.delivered for sent in ledger.sent.values()), LONG)
    transfers(pair, 2, 60, way="down")
    for end in (pair.client, pair.server):
        assert held_bytes(end.session) < 8_000_000


@pytest.mark.parametrize("kind", [Kind.DATA, Kind.PARITY])
@pytest.mark.parametrize("value", VALUES[:3])
def test_a_changed_slice_under_a_good_seal_does_no_harm(kind: Kind, value: str) -> None:
    pair = opened(Pair(replace(SMALL, idle_seconds=SMALL_IDLE), replace(LINK, loss=0.05), seed=2))
    transfers(pair, 2, 60)  # so that loss is known, and there is parity
    taps = [Forge(kind, "up", field, value) for field in SLICE.names or ()]
    endured(pair, taps)
    assert [tap.field for tap in taps if not tap.done] == []


@pytest.mark.parametrize("value", VALUES[:3])
def test_a_changed_acknowledgement_under_a_good_seal_does_no_harm(value: str) -> None:
    pair = opened(Pair(replace(SMALL, idle_seconds=SMALL_IDLE), LINK))
    taps = [Forge(Kind.ACK, "down", field, value) for field in ACK.names or ()]
    endured(pair, taps)
    assert [tap.field for tap in taps if not tap.done] == []


@pytest.mark.parametrize("way", WAYS)
def test_control_messages_that_are_none_under_a_good_seal_do_no_harm(way: Way) -> None:
    pair = opened(Pair(replace(SMALL, idle_seconds=SMALL_IDLE), replace(LINK, loss=0.02), seed=2))
    rng = np.random.default_rng(5)

    def scramble(passing: Passing) -> Bytes:
        if passing.kind is Kind.CONTROL and passing.way == way:
            for row in passing.frames[passing.nth_of_kind % 3 == 0]:
                row[int(rng.integers(HEADER.itemsize, len(row) - SEAL_BYTES))] = rng.integers(256)
        return passing.frames

    endured(pair, [scramble] * 20)


def mutated(rng: np.random.Generator, frames: Bytes, start: int, stop: int) -> Bytes:
    """A copy in which each row has one to three other bytes between these places."""
    frames, rows = frames.copy(), np.arange(len(frames))
    for _ in range(int(rng.integers(1, 4))):
        frames[rows, rng.integers(start, stop, len(frames))] ^= rng.integers(1, 256, len(frames)).astype(
            np.uint8
        )
    return frames


def fuzz_sealed(count: int) -> None:
    """Beside each datagram come mutated copies of it, some before it and some after; none of them is
    taken."""
    pair, rng = opened(Pair(SMALL, replace(LINK, queue=10**8))), np.random.default_rng(1)
    copies = 0

    def tap(passing: Passing) -> Bytes:
        nonlocal copies
        bad = mutated(rng, np.repeat(passing.frames, 40, axis=0), 0, passing.frames.shape[1])
        bad = bad[(bad != np.repeat(passing.frames, 40, axis=0)).any(axis=1)]
        copies += len(bad)
        half = len(bad) // 2
        return np.concatenate([bad[:half], passing.frames, bad[half:]])

    pair.sealed_taps.append(tap)
    before = held_bytes(pair.server.session)
    while copies < count:
        transfers(pair, 1, 100)
    pair.sealed_taps.clear()
    transfers(pair, 1, 100)
    settled(pair)
    assert pair.client.drops.total() + pair.server.drops.total() == copies
    assert held_bytes(pair.server.session) < before + 1_000_000


def test_mutated_datagrams_are_never_taken() -> None:
    fuzz_sealed(10_000)


@pytest.mark.soak
def test_a_million_mutated_datagrams_are_never_taken() -> None:
    fuzz_sealed(1_000_000)


def fuzz_opened(count: int) -> None:
    """An insider's datagrams, with anything in their bodies: the session lives on."""
    settings = replace(SMALL, idle_seconds=SMALL_IDLE)
    pair, rng = opened(Pair(settings, replace(LINK, loss=0.05), seed=2)), np.random.default_rng(1)
    seen = 0

    def tap(passing: Passing) -> Bytes:
        nonlocal seen
        seen += len(passing.frames)
        bad = rng.random(len(passing.frames)) < 0.3
        size = passing.frames.shape[1] - SEAL_BYTES
        passing.frames[bad] = mutated(
            rng, passing.frames[bad], HEADER.itemsize, min(HEADER.itemsize + 60, size)
        )
        return passing.frames

    while seen < count:
        endured(pair, [tap, tap], strict=False)


def test_mutated_bodies_under_a_good_seal_do_no_harm() -> None:
    fuzz_opened(500)


@pytest.mark.soak
def test_many_mutated_bodies_under_a_good_seal_do_no_harm() -> None:
    fuzz_opened(30_000)


def test_replays_are_refused_from_wherever_they_come() -> None:
    """Everything that was sent comes again, a second later and from somebody else's address: to whom nothing
    is sent."""
    pair = opened(Pair(SMALL, LINK))

    def again(passing: Passing) -> Bytes:
        copies, path = passing.frames.copy(), passing.path
        if passing.way == "up":
            pair.clock.call_at(pair.now + 1.0, lambda: pair.transmit("up", ("victim", 0, 0), path, copies))
        return passing.frames

    pair.sealed_taps.append(again)
    transfers(pair, 3, 200)
    pair.run(3.0)
    assert pair.server.drops["replayed"] > 600
    assert pair.server.sent_bytes["victim", 0, 0] == 0
    assert not any(isinstance(event, Migrated) and event.path[0] == "victim" for event in pair.server.events)


# -- changes of the path -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (LINK, replace(LINK, rate=2.5e6)),
        (replace(LINK, rate=2.5e6), LINK),
        (LINK, replace(LINK, delay=0.08)),
        (replace(LINK, delay=0.08), LINK),
        (LINK, replace(LINK, rate=1.25e6, delay=0.1, loss=0.02)),
    ],
    ids=["slower", "faster", "longer", "shorter", "worse"],
)
def test_rate_and_delay_change_in_mid_transfer(before: LinkModel, after: LinkModel) -> None:
    settings = LtpSettings()
    pair = opened(Pair(settings, before))
    ledger, elements = Ledger(pair), 200_000
    ledger.send(0, whole_numbers(np.random.default_rng(1), elements))  # warms it up
    pair.run_until(lambda: ledger.done, LONG)
    begun = pair.now
    for way in NODES:
        pair.network.change(*way, after, at=pair.now + 0.05)
    ledger.send(0, whole_numbers(np.random.default_rng(2), elements))
    ledger.send(1, whole_numbers(np.random.default_rng(3), elements))
    pair.run_until(lambda: ledger.done, LONG)
    ledger.check()
    slower = min(before.rate, after.rate)
    assert pair.now - begun < 2 * (4 * 2 * elements / slower) + 4 * max(before.delay, after.delay)


# -- addresses ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stripes", [1, 2])
def test_the_clients_address_changes_in_mid_transfer(stripes: int) -> None:
    pair = opened(Pair(SMALL, LINK, stripes=stripes))
    ledger, answers = Ledger(pair), Ledger(pair, "down")
    ledger.send(0, blocks(pair, 600))
    answers.send(1, blocks(pair, 600), reliable=True)
    pair.run(0.025)
    assert not ledger.done
    moved = [pair.move(pair.client, stripe) for stripe in range(stripes)]
    pair.run_until(lambda: ledger.done and answers.done, LONG)
    ledger.check()
    answers.check()
    told = [event for event in pair.server.events if isinstance(event, Migrated)]
    assert {event.path for event in told[-stripes:]} == set(moved)
    for address in moved:
        assert pair.server.sent_bytes[address] > 0
    before = dict(pair.server.sent_bytes)
    transfers(pair, 1, 200)
    assert all(pair.server.sent_bytes[a] == before[a] for a in before if a not in moved)


def test_an_address_that_has_not_answered_gets_three_times_its_bytes_at_most() -> None:
    """Somebody on the way takes datagrams and sends them on from the address of somebody else."""
    pair = opened(Pair(SMALL, LINK))
    victim = ("victim", 0, 0)
    ratios: list[float] = []
    stolen = 0

    def steal(passing: Passing) -> Bytes:
        nonlocal stolen
        if passing.way == "up" and stolen < 40:
            stolen += len(passing.frames)
            pair.transmit("up", victim, passing.path, passing.frames)
            return passing.frames[:0]
        if passing.path == victim:
            sent = pair.server.sent_bytes[victim] + passing.frames.size
            ratios.append(sent / max(pair.server.received_bytes[victim], 1))
        return passing.frames

    answers = Ledger(pair, "down")
    pair.sealed_taps.append(steal)
    answers.send(1, blocks(pair, 2000), reliable=True)
    transfers(pair, 2, 200)
    pair.run_until(lambda: answers.done, LONG)
    answers.check()
    assert ratios, "nothing was sent to the victim: no test of the bound"
    assert max(ratios) <= 3
    assert not any(event.path == victim for event in pair.server.events if isinstance(event, Migrated))


def test_an_address_that_changes_all_the_time() -> None:
    pair = opened(Pair(SMALL, LINK))
    for tenth in range(1, 20):
        pair.clock.call_at(pair.now + 0.1 * tenth, lambda: pair.move(pair.client) and None)
    transfers(pair, 12, 200)
    transfers(pair, 2, 200, way="down")


def test_the_servers_address_changes_while_it_sends() -> None:
    pair = opened(Pair(SMALL, LINK))
    ledger = Ledger(pair, "down")
    ledger.send(0, blocks(pair, 600))
    pair.run(0.025)
    pair.move(pair.server)
    pair.run_until(lambda: ledger.done, LONG)
    ledger.check()
    transfers(pair, 1)


# -- the end -----------------------------------------------------------------------------------------------


def assert_over(pair: Pair, end: End) -> None:
    """This end has said that the session is lost, wants nothing more, and holds nothing any more."""
    assert [type(event) for event in end.events].count(Lost) == 1
    assert end.session
    assert end.session.poll_deadline() == math.inf
    assert end.session.poll_datagrams(pair.now + 1000) is None
    fresh = Pair(end.session.settings, stripes=len(end.addresses)).client.session
    assert held_bytes(end.session) < held_bytes(fresh) + 100_000, "what the session held is not given back"


def dying(pair: Pair) -> tuple[Ledger, Ledger]:
    """Two transfers each way, in their midst."""
    ledgers = Ledger(pair), Ledger(pair, "down")
    for chunk in range(2):
        for ledger in ledgers:
            ledger.send(chunk, whole_numbers(np.random.default_rng(chunk), 1_000_000))
    pair.run(0.1)
    assert not any(sent.arrived for ledger in ledgers for sent in ledger.sent.values())
    return ledgers


@pytest.mark.parametrize("who", ["client", "server"])
def test_an_end_dies_and_the_other_says_so(who: str) -> None:
    settings = LtpSettings(idle_seconds=3.0)
    pair = opened(Pair(settings, LINK))
    ledgers = dying(pair)
    dead, left = (pair.client, pair.server) if who == "client" else (pair.server, pair.client)
    pair.kill(dead)
    seconds = pair.run_until(lambda: has(left, Lost), 10)
    assert 2.8 < seconds < 3.3
    lost = the(left, Lost)
    assert "3" in lost.reason or "silent" in lost.reason
    mine, theirs = ledgers if who == "server" else ledgers[::-1]
    assert set(lost.sent) == set(mine.sent)
    assert set(lost.dropped) <= set(theirs.sent)
    assert lost.dropped
    for ledger in ledgers:
        ledger.sent.clear()
    del ledgers, mine, theirs
    assert_over(pair, left)
    pair.watchers.clear()
    assert not pair.step(pair.now + 1000), "something is still to be done"


def test_both_ends_die() -> None:
    pair = opened(Pair(LtpSettings(idle_seconds=3.0), LINK))
    dying(pair)
    pair.kill(pair.client)
    pair.kill(pair.server)
    pair.run(1.0)
    assert not pair.step(pair.now + 1000), "something is still to be done"


def test_the_path_dies_and_both_ends_say_so() -> None:
    pair = opened(Pair(LtpSettings(idle_seconds=3.0), LINK))
    dying(pair)
    pair.network.change("client", "server", replace(LINK, down=True))
    pair.network.change("server", "client", replace(LINK, down=True))
    assert pair.run_until(lambda: has(pair.client, Lost) and has(pair.server, Lost), 10) < 3.5
    pair.run(1.0)
    assert_over(pair, pair.client)
    assert_over(pair, pair.server)


@pytest.mark.parametrize("who", ["client", "server"])
@pytest.mark.parametrize("lost", [False, True])
def test_an_end_closes_and_the_other_knows_why(who: str, lost: bool) -> None:
    pair = opened(Pair(LtpSettings(idle_seconds=3.0), LINK))
    dying(pair)
    closer, other = (pair.client, pair.server) if who == "client" else (pair.server, pair.client)
    assert closer.session
    closer.session.close(pair.now, "the run has ended")
    if lost:
        pair.sealed_taps.append(lose(closer.way, nth=lambda nth: nth < closer.sent + 1))
    pair.run_until(lambda: has(other, Lost) and has(closer, Lost), 4)
    assert "the run has ended" in the(other, Lost).reason or lost
    pair.run(3.5)
    assert_over(pair, pair.client)
    assert_over(pair, pair.server)


def test_an_idle_session_lives() -> None:
    """Nothing is sent for minutes: neither end takes that for death."""
    pair = opened(Pair(replace(SMALL, idle_seconds=3.0), LINK))
    pair.run(120.0)
    assert not has(pair.client, Lost)
    assert not has(pair.server, Lost)
    assert pair.client.sent + pair.server.sent < 1000
    transfers(pair, 1)


# -- several at once, and both ways ------------------------------------------------------------------------


def test_the_word_on_a_transfer_is_lost_and_comes_after_that_on_the_next() -> None:
    """What took the place of its lost blocks is known by the order in which transfers were handed on."""
    pair = opened(Pair(replace(SMALL, fill="last", repair_low=False), LINK))
    ledger = transfers(pair, 1, 60)
    lost: list[int] = []

    def lose_word(passing: Passing) -> Bytes:
        if passing.way == "down" and passing.kind is Kind.CONTROL and not lost:
            message = decode_untrusted(passing.frames[0, HEADER.itemsize : -SEAL_BYTES])
            if isinstance(message, Closed) and message.fill == "last":
                lost.append(message.transfer)
                return passing.frames[:0]
        return passing.frames

    pair.opened_taps += [lose("up", Kind.DATA, lambda nth: nth % 7 == 3), lose_word]
    for turn in range(4):
        ledger.send(0, blocks(pair, 60, turn))
        pair.run(0.011)
    pair.run_until(lambda: ledger.done, LONG)
    assert lost
    assert [sent.arrived.fill for sent in ledger.sent.values() if sent.arrived].count("last") > 2
    ledger.check()


@pytest.mark.parametrize("fill", ["zero", "last"])
def test_transfers_of_a_chunk_overlap_on_a_bad_link_both_ways(fill: Fill) -> None:
    bad = replace(
        LINK, loss=0.05, burst=6.0, reorder=0.05, reorder_by=0.01, duplicate=0.02, corrupt=0.01, jitter=0.004
    )
    pair = opened(Pair(replace(SMALL, fill=fill), bad, seed=11, stripes=2))
    ledgers = Ledger(pair), Ledger(pair, "down")
    for turn in range(5):
        for ledger in ledgers:
            for chunk in range(2):
                ledger.send(chunk, blocks(pair, 120, turn))
        pair.run(0.03)
    pair.run_until(lambda: all(ledger.done for ledger in ledgers), LONG)
    for ledger in ledgers:
        ledger.check()
    assert ledgers[0].missing


# -- for hours ---------------------------------------------------------------------------------------------


def any_link(rng: np.random.Generator) -> LinkModel:
    """A link as bad as links get, or a good one."""
    rate, delay = float(np.exp(rng.uniform(np.log(1e6), np.log(25e6)))), float(rng.uniform(0.002, 0.15))
    loss = float(rng.choice([0.0, 0.001, 0.01, 0.05, 0.15]))
    return LinkModel(
        rate=rate,
        delay=delay,
        jitter=float(rng.choice([0.0, 0.2])) * delay,
        queue=int(max(rate * delay * rng.choice([0.2, 1.0, 3.0]), 30_000)),
        loss=loss,
        burst=float(rng.choice([1.0, 5.0, 20.0])),
        reorder=float(rng.choice([0.0, 0.05, 0.3])),
        reorder_by=delay * float(rng.uniform(0.05, 1.0)),
        duplicate=float(rng.choice([0.0, 0.01])),
        corrupt=float(rng.choice([0.0, 0.01])),
    )


def endure(seed: int, seconds: float) -> None:
    """Transfers without an end over a link that becomes another one again and again, and now and then
    none."""
    rng = np.random.default_rng(seed)
    pair = opened(Pair(replace(SMALL, fill=("zero", "last")[seed % 2]), LINK, seed, stripes=1 + seed % 3))
    ledgers = Ledger(pair), Ledger(pair, "down")
    sizes: list[int] = []
    while pair.now < seconds:
        for way in NODES:
            pair.network.change(*way, any_link(rng))
            if rng.random() < 0.2:
                pair.network.outage(
                    *way, float(rng.uniform(0.1, 5.0)), at=pair.now + float(rng.uniform(0, 5))
                )
        if rng.random() < 0.2:
            pair.move(pair.client)
        if rng.random() < 0.2 and pair.server.session:
            pair.server.session.change_keys()
        for _ in range(5):
            chunk = int(rng.integers(3))
            gradient = blocks(pair, 100 * (chunk + 1), int(rng.integers(1000)))
            ledgers[0].send(chunk, gradient)
            ledgers[1].send(chunk, gradient, reliable=bool(chunk))
            pair.run(float(rng.exponential(6.0)))
        pair.run_until(lambda: all(ledger.done for ledger in ledgers), 10 * LONG)
        for ledger in ledgers:
            ledger.check()
            ledger.sent.clear()
        pair.client.events.clear()
        pair.server.events.clear()
        sizes.append(sum(held_bytes(end.session) for end in (pair.client, pair.server)))
    assert max(sizes) < 2 * (1_000_000 + 3_000_000 * len(pair.client.addresses))
    if len(sizes) > 20:
        assert max(sizes[len(sizes) // 2 :]) < 1.2 * max(sizes[: len(sizes) // 2]), "the sessions grow"


def test_half_a_minute_of_a_link_that_changes() -> None:
    endure(1, 30.0)


@pytest.mark.soak
@pytest.mark.timeout(1800)  # three minutes of a core
@pytest.mark.parametrize("seed", range(6))
def test_an_hour_of_a_link_that_changes(seed: int) -> None:
    endure(seed, 3600.0)
