"""A storm of mutated datagrams against two live sessions, which meanwhile send each other transfers.

Who has no keys alters, cuts, joins, repeats and forges what he sees on the way, and sends it from wherever he
likes; none of it may reach a session, but for copies that come before their originals. Who has the keys (a
peer that is hostile or broken) gets as far as the sessions: they raise nothing and stay small. The million of
each is a soak test; a share of it runs with the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

import numpy as np
import numpy.typing as npt
import pytest
from ltp_hostile import EXTENTS, STRIPES, Victim, closed, genuine, held, slices_of
from mutations import change_bytes

from atoll.ltp.events import Lost, Refused
from atoll.ltp.settings import LtpSettings
from atoll.wire.datagrams import (
    ACK,
    CODED_FROM,
    HEADER,
    NO_GROUP,
    SEAL_BYTES,
    SLICE,
    Acknowledgement,
    Bytes,
    Datagrams,
    Flow,
    Kind,
    ack_datagram,
    control_datagram,
    headers_untrusted,
)
from atoll.wire.linkcontrol import (
    Answer,
    Ask,
    Challenge,
    Early,
    Grant,
    Hello,
    Need,
    Ping,
    encode,
)
from support.ltp import SESSION, End, Ledger, Pair, Passing, whole_numbers
from support.sim import LinkModel

Sizes = npt.NDArray[np.int64]
WIDTH = 320  # of the arena: the genuine ones have up to 300 bytes
POOL = 600  # genuine datagrams of each way that the attacker remembers
BATCH = 500  # mutated ones of each way in a turn
LINK = LinkModel(rate=2.5e6, delay=0.005, loss=0.01, reorder=0.02, reorder_by=0.002)
VICTIMS = [("victim", port, 0) for port in range(6)]  # addresses whose owners know nothing of all this
MOST_HELD = 12e6  # bytes that the two ends hold at any time: records, bitmaps, windows, open transfers
SORTS = 10


def mutated(rng: np.random.Generator, frames: Bytes, sizes: Sizes) -> tuple[Bytes, Sizes]:
    """Copies of these rows, each with a mutation of one of ten sorts (one of them is none)."""
    frames, sizes = frames.copy(), sizes.copy()
    rows, sort = np.arange(len(frames)), rng.integers(0, SORTS, len(frames))

    def of(which: int) -> npt.NDArray[np.int64]:
        return rows[sort == which]

    change_bytes(rng, frames, of(0), of(1), of(2))
    sizes[of(3)] = rng.integers(0, sizes[of(3)] + 1)  # cut
    sizes[of(4)] = rng.integers(sizes[of(4)], WIDTH + 1)  # drawn out
    frames[of(5), 16:] = rng.integers(0, 256, (len(of(5)), WIDTH - 16))  # a header, and noise
    some = of(6)  # one's header and another's body
    frames[some, :16] = frames[rng.permutation(some), :16]
    frames[of(7), 8:12] = rng.integers(0, 256, (len(of(7)), 4))  # another number
    some = of(8)  # the last bits: the seal's
    frames[some, sizes[some] - 1] ^= (1 << rng.integers(0, 8, len(some))).astype(np.uint8)
    return frames, sizes


class Stormy(Pair):
    """Two sessions, the genuine datagrams of which an attacker sees; what comes in is compared with what was
    sent."""

    def __init__(self, seed: int) -> None:
        settings = LtpSettings(datagram_bytes=300, initial_rate=1.5e6)
        super().__init__(settings, LINK, seed, stripes=STRIPES)
        self.pool: dict[str, Bytes] = {way: np.zeros((0, WIDTH), np.uint8) for way in ("up", "down")}
        self.pool_sizes: dict[str, Sizes] = {way: np.zeros(0, np.int64) for way in ("up", "down")}
        self._plain: dict[tuple[str, int], dict[int, bytes]] = {}
        self._seen: dict[tuple[str, int], set[int]] = {}
        self.injected: Counter[Hashable] = Counter()  # bytes, by the address that they say they come from
        self.forged = 0
        self.opened_taps.append(self._remember)
        self.sealed_taps.append(self._watch_way)

    def _remember(self, passing: Passing) -> Bytes:
        plain = self._plain.setdefault((passing.way, passing.stripe), {})
        for frame in passing.frames:
            plain[int(frame[8:16].view("<u8")[0])] = frame[:-SEAL_BYTES].tobytes()
        return passing.frames

    def _watch_way(self, passing: Passing) -> Bytes:
        if passing.path in VICTIMS:  # who can read what comes there would be believed, as its owner
            return passing.frames
        rows = np.zeros((len(passing.frames), WIDTH), np.uint8)
        rows[:, : passing.frames.shape[1]] = passing.frames
        sizes = np.full(len(rows), passing.frames.shape[1])
        self.pool[passing.way] = np.concatenate((self.pool[passing.way], rows))[-POOL:]
        self.pool_sizes[passing.way] = np.concatenate((self.pool_sizes[passing.way], sizes))[-POOL:]
        return passing.frames

    def inject(self, way: str, source: Hashable, frames: Bytes, sizes: Sizes) -> None:
        """Datagrams that come to the end to which this way leads."""
        end = self.server if way == "up" else self.client
        self.injected[source] += int(sizes.sum())
        self.forged += len(frames)
        for flow in headers_untrusted(frames, sizes, end.drops):
            if flow.session == SESSION and flow.stripe < STRIPES:
                self._open(self.now, end, source, flow)

    def _open(self, now: float, end: End, source: Hashable, flow: Flow) -> None:
        if end.session is not None and not hasattr(end.session, "watched"):
            self._check_what_comes(end)
        super()._open(now, end, source, flow)

    def _check_what_comes(self, end: End) -> None:
        """From now on: each datagram that the session is given was sent so by the other end, and is new."""
        session = end.session
        assert session is not None
        way = "up" if end is self.server else "down"
        handle = session.handle_datagrams

        def checked(now: float, path: Hashable, stripe: int, batch: Datagrams) -> None:
            plain = self._plain[way, stripe]
            seen = self._seen.setdefault((way, stripe), set())
            for frame, number in zip(batch.frames, batch.headers["number"].tolist(), strict=True):
                assert plain[number] == frame.tobytes(), "a forgery is accepted"
                assert number not in seen, "a replay is accepted"
                seen.add(number)
            handle(now, path, stripe, batch)

        session.handle_datagrams = checked  # type: ignore[method-assign]
        session.watched = True  # type: ignore[attr-defined]


def storm_from_outside(count: int, seed: int) -> None:
    pair = Stormy(seed)
    rng = np.random.default_rng(seed)
    ledgers = [Ledger(pair, "up"), Ledger(pair, "down")]
    for chunk in range(2):
        for ledger in ledgers:
            ledger.send(chunk, whole_numbers(rng, 10_000))
    most = 0
    while pair.forged < count:
        pair.run(0.01)
        for way in ("up", "down"):
            genuine_source = ("client" if way == "up" else "server", int(rng.integers(STRIPES)), 0)
            source = genuine_source if rng.random() < 0.3 else VICTIMS[int(rng.integers(len(VICTIMS)))]
            if len(pair.pool[way]):
                some = rng.integers(0, len(pair.pool[way]), BATCH)
                pair.inject(way, source, *mutated(rng, pair.pool[way][some], pair.pool_sizes[way][some]))
        for ledger in ledgers:
            if ledger.done and pair.forged < count:
                for chunk in range(2):
                    ledger.send(chunk, whole_numbers(rng, 10_000))
        if pair.forged % (20 * BATCH) == 0 or pair.forged >= count:
            most = max(most, held(*(part for end in (pair.client, pair.server)
                                    for part in (vars(end.session), end.replay, end.openers))))  # fmt: skip
            assert most < MOST_HELD
        _check_amplification(pair)
    pair.run_until(lambda: all(ledger.done for ledger in ledgers), 120.0)
    for ledger in ledgers:
        ledger.check()
        assert len(ledger.sent) >= 2
    _check_amplification(pair)
    for end in (pair.client, pair.server):
        assert not [event for event in end.events if isinstance(event, (Lost, Refused))]
        assert end.drops["seal"] > count / 50, end.drops
        assert end.drops["replayed"] > count / 50, end.drops


def _check_amplification(pair: Stormy) -> None:
    for end in (pair.client, pair.server):
        for victim in VICTIMS:
            assert end.sent_bytes[victim] <= 3 * end.received_bytes[victim] <= 3 * pair.injected[victim]


def test_a_storm_from_outside_changes_nothing() -> None:
    storm_from_outside(6_000, 1)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_million_from_outside_change_nothing() -> None:
    for seed in range(4):
        storm_from_outside(250_000, seed + 10)


# -- from inside -------------------------------------------------------------------------------------------


def arena(bursts: list[Bytes]) -> tuple[Bytes, Sizes]:
    """Bursts of different sizes as rows of one width."""
    sizes = np.concatenate([np.full(len(each), each.shape[1]) for each in bursts])
    frames = np.zeros((len(sizes), WIDTH), np.uint8)
    at = 0
    for each in bursts:
        frames[at : at + len(each), : each.shape[1]] = each
        at += len(each)
    return frames, sizes


def spoiled(rng: np.random.Generator, frames: Bytes, sizes: Sizes, kind: Kind) -> tuple[Bytes, Sizes]:
    """Copies, mutated in what stands before the elements (or in a whole message), and a few in their sizes:
    so what was said of a block's values is known."""
    frames, sizes = frames.copy(), sizes.copy()
    rows = np.arange(len(frames))
    start = HEADER.itemsize
    end = start + (SLICE.itemsize if kind in (Kind.DATA, Kind.PARITY) else ACK.itemsize + 8)
    sort = rng.integers(0, 6, len(frames))  # 4 and 5: as they are
    some = rows[sort == 0]
    frames[some, rng.integers(start, end, len(some))] ^= (1 << rng.integers(0, 8, len(some))).astype(np.uint8)
    some = rows[sort == 1]
    for _ in range(3):
        frames[some, rng.integers(start, end, len(some))] = rng.integers(0, 256, len(some))
    some = rows[sort == 2]
    at, length = rng.integers(start, end, len(some)), rng.choice([1, 2, 4, 8], len(some))
    inside = (np.arange(WIDTH) >= at[:, None]) & (np.arange(WIDTH) < np.minimum(at + length, end)[:, None])
    values = rng.choice([0, 1, 0x7F, 0x80, 0xFF], len(some)).astype(np.uint8)
    frames[some] = np.where(inside, values[:, None], frames[some])
    some = rows[(sort == 3) & (rng.random(len(rows)) < 0.1)]
    sizes[some] = rng.integers(0, WIDTH + 1, len(some))
    return frames, sizes


def messages(rng: np.random.Generator, victim: Victim, transfers: list[int]) -> list[Bytes]:
    """Control messages, whole but hostile, with the next sequences."""
    transfer = int(rng.choice([*transfers, 0, 2**32 - 1, int(rng.integers(2**32))]))
    edge = int(rng.choice([0, 1, 39, 40, 41, 2**31, 2**32 - 2]))
    made = [
        Ping(sequence=0),
        Early(sequence=0, transfer=transfer),
        Need(sequence=0, transfer=transfer, ranges=[(edge, edge + 1 + int(rng.integers(3)))]),
        Need(sequence=0, transfer=transfer, ranges=[(0, 2**32 - 1)]),
        closed(transfer, first=min(edge, 2**32 - 64) // 8 * 8, missing=rng.bytes(int(rng.integers(0, 8)))),
        closed(transfer, how="refused", order=int(rng.integers(2**40))),
        Grant(sequence=0, rate=float(10 ** rng.uniform(-5, 15)), seconds=float(rng.uniform(0, 3600))),
        Hello(sequence=0),
        Answer(sequence=0, token=rng.bytes(8)),
        Challenge(sequence=0, token=rng.bytes(8)),
        Ask(sequence=0, size=int(rng.integers(2**50))),
    ]
    bursts = []
    for one in made:
        fields = {name: getattr(one, name) for name in one.__struct_fields__} | {"sequence": victim.sequence}
        victim.sequence += 1
        frames = control_datagram(encode(type(one)(**fields)))
        frames[:, 1] = Kind.CONTROL
        bursts.append(frames)
    return bursts


def acknowledgements(rng: np.random.Generator, victim: Victim) -> list[Bytes]:
    """Some of what the victim sent, some of what it never sent; clocks and counters that run as they like."""
    bursts = []
    for stripe in range(STRIPES):
        sent = [burst for burst in victim.bursts if burst.stripe == stripe]
        last = int(sent[-1].frames[-1, 8:16].view("<u8")[0]) if sent else 0
        largest = max(last + int(rng.choice([0, 0, 0, -1, -30, 1, 10**6])), 0)
        count = int(rng.integers(0, min(largest + 1, 1500) + 1))
        told = Acknowledgement(
            of=stripe,
            largest=largest,
            arrived=float(rng.choice([victim.now, 0.0, rng.uniform(0, 1e6)])),
            delay=float(rng.choice([0.0, 0.001, 4000.0])),
            base=largest + 1 - count,
            received=rng.random(count) < rng.choice([1.0, 0.9, 0.1]),
            delivered=int(rng.choice([int(victim.now * 1e6), 0, 2**50, int(rng.integers(2**60))])),
        )
        frames = ack_datagram(told)
        frames[:, 1] = Kind.ACK
        bursts.append(frames)
    return bursts


def storm_from_inside(count: int, seed: int, client: bool) -> None:
    """`count` datagrams at least, half of them spoiled; lives follow each other where one is ended."""
    rng = np.random.default_rng(seed)
    done, lives = 0, 0
    while done < count:
        lives += 1
        victim = Victim(client=client, seed=lives)
        victim.keeps = True
        done += _one_life(victim, rng, min(count - done, 40_000))
        assert held(vars(victim.session)) < MOST_HELD
        assert len(victim.session.drops) < 20
    assert lives <= 2 + count // 2_000


def _one_life(victim: Victim, rng: np.random.Generator, count: int) -> int:
    done, transfer = 0, 1
    while done < count and not victim.session.ended:
        bursts: list[tuple[Kind, list[Bytes]]] = []
        for _ in range(3):
            chunk = int(rng.choice([0, 0, 1, 2, 3]))
            values, sent = genuine(transfer, chunk, rng, reliable=bool(rng.random() < 0.2))
            victim.say_all(transfer, values)
            bursts += [(Kind(int(each[0, 1])), [each]) for each in sent]
            transfer += 1
        if victim.client and len(victim.session.status().reason) and rng.random() < 0.5:
            own = int(rng.choice([0, 3]))
            victim.session.send(victim.now, own, 1, np.ones(EXTENTS[own], np.float32))
        own_ids = list(range(1, 30))
        bursts.append((Kind.CONTROL, messages(rng, victim, own_ids)))
        bursts.append((Kind.ACK, acknowledgements(rng, victim)))
        for kind, some in bursts:
            frames, sizes = arena(some)
            spoiled_frames, spoiled_sizes = spoiled(rng, frames, sizes, kind)
            if kind in (Kind.DATA, Kind.PARITY):
                # What is restored from these is what a hostile peer says, and nobody else.
                head, coded = HEADER.itemsize, HEADER.itemsize + CODED_FROM
                differs = frames[:, : head + SLICE.itemsize] != spoiled_frames[:, : head + SLICE.itemsize]
                changed = differs[:, coded:].any(axis=1)
                grouped = slices_of(frames)["group"] != NO_GROUP  # it may be put into another's group
                changed |= grouped & differs[:, head:].any(axis=1)
                victim.coded.update(slices_of(frames)["transfer"][changed].tolist())
                victim.coded.update(slices_of(spoiled_frames)["transfer"][changed].tolist())
            keep = rng.random(len(frames)) < 0.9
            victim.take(spoiled_frames[keep], spoiled_sizes[keep], stripe=int(rng.integers(STRIPES)))
            done += int(keep.sum())
            if victim.session.ended:
                break
            victim.drain()
            victim.believe()
            victim.now += float(rng.choice([0.0, 1e-4, 0.003]))
        if victim.session.ended:
            break
        victim.drain()
        victim.pass_time(float(rng.choice([0.0, 0.005, 0.05])))
        victim.forget(transfer - 60)
    return done


@pytest.mark.parametrize("client", [True, False])
def test_a_storm_from_inside_breaks_nothing(client: bool) -> None:
    storm_from_inside(5_000, 3, client)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("client", [True, False])
def test_a_million_from_inside_break_nothing(client: bool) -> None:
    storm_from_inside(500_000, 4, client)
