"""What a peer may do that has the keys: one test for each thing that it may get wrong, or wishes to.

The honest end (`Victim`) raises nothing, hands nothing on that was not said, stays small, sends no more than
it may, and sleeps when there is nothing to do; the checks for that are in the harness. docs/ltp.md, "Bounds".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ltp_hostile import BLOCK, EXTENTS, SETTINGS, Victim, closed, genuine, held, slices_of

from atoll.ltp import arriving, leaving, outbox, sent
from atoll.ltp.arriving import MOST_TRANSFERS
from atoll.ltp.events import Arrived, Delivered, Lost, Refused
from atoll.wire.datagrams import (
    HEADER,
    HIGH,
    MOST_NUMBER,
    NO_GROUP,
    SEAL_BYTES,
    SLICE,
    Acknowledgement,
    Bytes,
    Datagrams,
    Element,
    Kind,
    control_datagram,
    records_of,
)
from atoll.wire.linkcontrol import (
    Answer,
    Ask,
    Bye,
    Challenge,
    Closed,
    Early,
    Grant,
    Hello,
    Need,
    Ping,
    Range,
)

MARGIN = 64 * 1024  # bytes by which an end may grow over a flood: tables that grow by steps


@pytest.fixture(autouse=True)
def _small_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept is bounded by some thousands; here by less, so that floods may be short."""
    for module, names in (
        (sent, ("_ROOM", "_KEPT")),
        (outbox, ("MOST_HANDLED", "MOST_WAITING")),
        (arriving, ("MOST_TOLD", "MOST_RANGES")),
        (leaving, ("MOST_BURNT", "MOST_SAID")),
    ):
        for name in names:
            assert getattr(module, name) >= 2**10
            monkeypatch.setattr(module, name, 2**9)


def rng() -> np.random.Generator:
    return np.random.default_rng(5)


def met(**options: Any) -> Victim:
    """A server whose client's address is validated, or a client."""
    victim = Victim(**options)
    if not victim.client:
        victim.say(Ping(sequence=0))
        victim.drain()
        victim.believe()
        victim.drain()
    victim.taken = 0
    return victim


def serves(victim: Victim, transfer: int) -> None:
    """A transfer that is sent honestly is handed on, exact."""
    values, bursts = genuine(transfer, 0, rng())
    before = len(victim.got(Arrived))
    for frames in bursts:
        victim.take(frames)
    victim.drain()
    arrived = victim.got(Arrived)
    assert len(arrived) == before + 1, victim.events[-3:]
    assert arrived[-1].values.tobytes() == values.tobytes()


def alone(frames: Bytes) -> Bytes:
    """Data that is in no group of forward error correction."""
    frames = frames.copy()
    slices = slices_of(frames)
    slices["group"] = NO_GROUP
    slices["place"] = slices["data"] = slices["parity"] = 0
    return frames


def acknowledge_all(victim: Victim) -> None:
    """The peer acknowledges all that was sent; the tests read from the bursts how much that is."""
    for stripe in (0, 1):
        sent = [burst for burst in victim.bursts if burst.stripe == stripe]
        if sent:
            last = int(sent[-1].frames[-1, 8:16].view("<u8")[0])
            base = max(last - 1999, 0)
            came = np.ones(last - base + 1, dtype=bool)
            victim.acknowledge(Acknowledgement(stripe, last, victim.now, 0.0, base, came, 10**6), stripe)


# -- slices ------------------------------------------------------------------------------------------------


def resized(frames: Bytes, payload: int) -> Bytes:
    """The same with so many bytes of elements."""
    start = HEADER.itemsize + SLICE.itemsize
    wide = np.zeros((len(frames), start + payload + SEAL_BYTES), dtype=np.uint8)
    kept = min(payload, frames.shape[1] - SEAL_BYTES - start)
    wide[:, : start + kept] = frames[:, : start + kept]
    return wide


@pytest.mark.parametrize("payload", [1, 4, 8, 216, 232])
@pytest.mark.parametrize("kind", [Kind.DATA, Kind.PARITY])
def test_datagrams_of_another_width_are_refused(payload: int, kind: Kind) -> None:
    victim = met()
    _, bursts = genuine(1, 0, rng())
    victim.take(bursts[0][:3])
    victim.take(bursts[-1][:1])
    other = resized(bursts[0][3:6] if kind is Kind.DATA else bursts[-1][1:3], payload)
    slices = slices_of(other)
    slices["count"] = np.minimum(slices["count"], max(payload // 4, 1))
    slices["element"] = Element.FLOAT32 if payload >= 4 else Element.BYTE
    slices["nonzero"] = np.where(slices["flags"] & HIGH != 0, 0, slices["nonzero"])
    victim.take(other)
    victim.drain()
    assert victim.got(Refused)
    serves(victim, 2)


@pytest.mark.parametrize("payload", [1, 2, 7, 8, 100, 175, 177])
@pytest.mark.parametrize("element", list(Element))
def test_a_width_that_no_honest_end_has_is_refused_at_once(payload: int, element: Element) -> None:
    """It is no multiple of the elements' size; or so small that a block's place takes more than the block."""
    victim = met(extents=None)
    _, bursts = genuine(1, 0, rng())
    frames = resized(alone(bursts[0][:1]), payload)
    slices = slices_of(frames)
    slices["element"], slices["count"], slices["nonzero"] = element, 1, 1
    slices["blocks"] = 10**7
    slices["highs"], slices["flags"], slices["index"] = 10**7 - 1, HIGH, 1
    before = held(victim.session)
    victim.take(frames)
    victim.drain()
    assert victim.got(Refused) or not victim.taken  # where the parser let it pass
    assert held(victim.session) < before + MARGIN


@pytest.mark.parametrize("highs", [0, 1, 13])
def test_a_transfer_whose_last_block_is_low_is_refused(highs: int) -> None:
    """It alone tells how long the chunk is."""
    victim = met(extents=None)
    _, bursts = genuine(1, 0, rng())
    frames = alone(bursts[0])
    slices = slices_of(frames)
    blocks = len(frames)
    at = (2 * np.arange(highs) + 1) * blocks // (2 * max(highs, 1))
    slices["highs"], slices["flags"] = highs, 0
    slices["flags"][at] = HIGH
    slices["nonzero"] = np.where(slices["flags"] & HIGH != 0, 0, 0xFFFF)
    slices["offset"] = np.arange(blocks) * BLOCK  # so the last index, a low one, is the last place
    slices["count"] = BLOCK
    victim.take(frames[:-1])
    victim.drain()
    victim.pass_time(1.0)
    assert victim.got(Refused)
    assert not victim.got(Arrived)
    serves(victim, 2)


CHANGES: dict[str, Callable[[np.ndarray], None]] = {
    "blocks": lambda slices: slices.__setitem__("blocks", slices["blocks"] + 1),
    "highs": lambda slices: slices.__setitem__("highs", slices["highs"] + 1),
    "chunk": lambda slices: slices.__setitem__("chunk", 3),
    "iteration": lambda slices: slices.__setitem__("iteration", 77),
    "an extent beyond": lambda slices: slices.__setitem__("offset", slices["offset"] + 40 * BLOCK),
    "not at a block": lambda slices: slices.__setitem__("offset", slices["offset"] + 1),
    "all at one place": lambda slices: slices.__setitem__("offset", 0),
    "high ones low": lambda slices: slices.__setitem__("flags", slices["flags"] ^ HIGH),
    "short": lambda slices: slices.__setitem__("count", 1),
    "data of a group": lambda slices: slices.__setitem__("data", slices["data"] + 1),
    "more groups than highs": lambda slices: slices.__setitem__("group", 60_000),
    "elements": lambda slices: slices.__setitem__("element", Element.BYTE),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("first", [True, False])
def test_slices_that_contradict_others_have_the_transfer_refused(what: str, first: bool) -> None:
    """Whichever come first, those that are changed or the others."""
    victim = met()
    _, bursts = genuine(1, 0, rng())
    high = bursts[0][slices_of(bursts[0])["flags"] & HIGH != 0]
    changed = high[:6].copy()
    changed[:, 1] = Kind.DATA
    CHANGES[what](slices_of(changed))
    slices = slices_of(changed)
    slices["nonzero"] = np.where(slices["flags"] & HIGH != 0, 0, 0xFFFF)
    for frames in (changed, high[6:]) if first else (high[6:], changed):
        victim.take(frames.copy())
        victim.drain()
    if victim.taken > len(high) - 6:  # where the parser let any of those changed pass
        assert victim.got(Refused)
    assert not victim.got(Arrived)
    serves(victim, 2)


def test_parity_without_end_is_bounded() -> None:
    """No more is kept than there are blocks, and that is counted as the transfer's memory is."""
    victim = met()
    _, bursts = genuine(1, 3, rng())
    one = next(frames for frames in bursts if frames[0, 1] == Kind.PARITY)[:1]
    blocks = int(slices_of(one)["blocks"][0])
    before = held(victim.session)
    places = np.arange(128, 254)
    for group in range(blocks):  # none of them can be restored: of each two are missing
        frames = np.repeat(one, len(places), axis=0)
        slices = slices_of(frames)
        slices["group"], slices["data"], slices["parity"] = group, 128, 127
        slices["place"] = places
        victim.take(frames)
        victim.drain()
    assert not victim.got(Refused)
    assert held(victim.session) < before + 4 * EXTENTS[3] * 4 + MARGIN
    (incoming,) = victim.session._receiver._open.values()
    width = one.shape[1] - SEAL_BYTES - HEADER.itemsize - SLICE.itemsize
    assert 2 * blocks * width < incoming.bytes < 3 * blocks * width
    serves(victim, 2)


def test_what_parity_restores_is_checked_as_what_comes_is() -> None:
    for seed in range(30):
        noise = np.random.default_rng(seed)
        victim = met()
        _, bursts = genuine(1, 0, rng())
        frames, parity = bursts[0].copy(), bursts[-1].copy()
        at = HEADER.itemsize + 28  # the coded half of SLICE
        parity[:, at : at + 16] = noise.integers(0, 256, (len(parity), 16))
        missing = slices_of(frames)["group"] == 0
        missing &= np.cumsum(missing) <= 2
        victim.take(frames[~missing])
        victim.take(parity)
        victim.drain()
        victim.pass_time(0.5)
        assert victim.got(Refused)
        assert not victim.got(Arrived)
        serves(victim, 2)


@pytest.mark.check
def test_slots_are_bounded_and_freed() -> None:
    victim = met()
    victim.keeps = True
    one = genuine(1, 1, rng())[1][0][:1]
    for transfer in range(1, 200):
        frames = one.copy()
        slices_of(frames)["transfer"] = transfer
        victim.take(frames)
        victim.drain()
        acknowledge_all(victim)
        victim.bursts = victim.bursts[-20:]
    refused = victim.got(Refused)
    assert len(refused) == 199 - MOST_TRANSFERS
    assert f"the limit of {MOST_TRANSFERS} open transfers" in refused[0].reason
    for _ in range(8):  # the peer lives, and sends nothing of them any more
        victim.say(Ping(sequence=0))
        victim.pass_time(SETTINGS.idle_seconds / 6)
        acknowledge_all(victim)
    assert not victim.got(Lost)
    assert len(victim.got(Refused)) == 199
    serves(victim, 500)


def test_declared_sizes_are_bounded_over_all_transfers() -> None:
    """4 GiB over all that are open, of which nothing is touched before it comes."""
    victim = met(extents=None)
    before = held(victim.session)
    for transfer in range(1, 9):
        frames = alone(genuine(transfer, 0, rng())[1][0][:1])
        slices = slices_of(frames)
        slices["blocks"], slices["highs"] = 8 * 10**6, 10**5
        slices["flags"], slices["nonzero"], slices["index"] = 0, 0xFFFF, 0
        victim.take(frames)
        victim.drain()
    refused = victim.got(Refused)
    assert len(refused) == 6
    assert "are the most" in refused[0].reason
    assert held(victim.session) < before + 2 * 8 * 10**6 * (224 + 40)


# -- floods ------------------------------------------------------------------------------------------------


def flood(victim: Victim, count: int, step: Callable[[int], None], *, acknowledged: bool = True) -> list[int]:
    """Bytes that the victim holds after each third of so many steps."""
    victim.keeps = True
    sizes = []
    for turn in range(count):
        step(turn)
        if turn % 10 == 9:
            victim.now += 0.0005
            if victim.session.ended:
                break
            victim.drain()
            if acknowledged:
                acknowledge_all(victim)
            victim.events.clear()
            victim.bursts, victim.told = victim.bursts[-20:], []
        if turn % (count // 3) == count // 3 - 1:
            sizes.append(held(victim.session))
    return sizes


@pytest.mark.check
def test_transfers_of_unknown_chunks_leave_nothing() -> None:
    victim = met()
    one = genuine(1, 1, rng())[1][0][:1]

    def step(turn: int) -> None:
        frames = one.copy()
        slices_of(frames)["transfer"], slices_of(frames)["chunk"] = 10 + turn, 99
        victim.take(frames)

    sizes = flood(victim, 2100, step)
    assert sizes[2] - sizes[1] < MARGIN
    serves(victim, 5)


def test_who_acknowledges_nothing_is_left() -> None:
    """What waits for an acknowledgement is bounded."""
    victim = met()
    one = genuine(1, 1, rng())[1][0][:1]

    def step(turn: int) -> None:
        frames = one.copy()
        slices_of(frames)["transfer"], slices_of(frames)["chunk"] = 10 + turn, 99
        victim.take(frames)

    flood(victim, 3000, step, acknowledged=False)
    assert victim.session.ended
    assert held(victim.session) < 3e6


def test_who_acknowledges_nothing_for_long_is_left() -> None:
    victim = met(client=True)
    victim.session.send(0.0, 0, 1, np.ones(EXTENTS[0], np.float32))
    for _ in range(100):
        victim.say(Ping(sequence=0))
        victim.pass_time(0.1)
        if victim.session.ended:
            break
    assert "acknowledged nothing" in victim.got(Lost)[0].reason
    assert 5.0 <= victim.now <= 5.3


def test_a_stripe_on_which_nothing_but_acks_go_keeps_no_records() -> None:
    victim = met()
    sizes = flood(victim, 2100, lambda turn: victim.say(Ping(sequence=0), stripe=1))
    assert sizes[2] - sizes[1] < MARGIN


@pytest.mark.check
def test_challenges_from_nowhere_leave_nothing() -> None:
    """Their datagrams are late, so their addresses are not kept; or they are, and forgotten later."""
    victim = met()

    def late(turn: int) -> None:
        number, victim.numbers[0] = victim.numbers[0], 0
        victim.say(Challenge(sequence=0, token=bytes(8)), path=("late", turn))
        victim.numbers[0] = number

    sizes = flood(victim, 1500, late)
    assert sizes[2] - sizes[1] < MARGIN
    sizes = flood(
        victim, 6000, lambda turn: victim.say(Challenge(sequence=0, token=bytes(8)), path=("new", turn))
    )
    assert sizes[2] - sizes[1] < MARGIN


def test_words_of_the_peer_are_no_reasons() -> None:
    victim = met()

    def step(turn: int) -> None:
        for body in (
            b"\x82\xa1m\xa5%05d\xa8sequence\x01" % turn,
            b"\x83\xa1m\xa4Ping\xa8sequence\x01\xa5%05d\x01" % turn,
        ):
            frames = control_datagram(body)
            frames[:, 1] = Kind.CONTROL
            victim.take(frames)
        victim.say(Need(sequence=0, transfer=turn, ranges=[(turn, turn + 1)]))
        victim.say(closed(1, missing=b"\xff" * (turn % 100), first=8 * turn))

    flood(victim, 600, step)
    assert len(victim.session.drops) < 20


@pytest.mark.parametrize("kind", [Early, Need, Closed, Answer, Grant, Ask, Hello])
@pytest.mark.parametrize("client", [True, False])
def test_messages_without_end_leave_nothing(kind: type, client: bool) -> None:
    victim = met(client=client)
    made: dict[type, Callable[[int], Any]] = {
        Early: lambda turn: Early(sequence=0, transfer=turn),
        Need: lambda turn: Need(sequence=0, transfer=turn, ranges=[(0, 2**32 - 1)]),
        Closed: lambda turn: closed(turn, part=turn % 7, parts=65536, order=turn * 2**20),
        Answer: lambda turn: Answer(sequence=0, token=turn.to_bytes(8, "little")),
        Grant: lambda turn: Grant(sequence=0, rate=1e15 / (1 + turn), seconds=3600.0),
        Ask: lambda turn: Ask(sequence=0, size=turn),
        Hello: lambda turn: Hello(sequence=0, padding=bytes(200)),
    }
    sizes = flood(victim, 2100, lambda turn: victim.say(made[kind](turn)))
    assert sizes[2] - sizes[1] < MARGIN
    if not client:
        serves(victim, 5)


def test_a_message_is_handled_once_and_gaps_are_bounded() -> None:
    victim = met()

    def step(turn: int) -> None:
        victim.sequence = turn * 1000
        victim.say(Ping(sequence=0))

    sizes = flood(victim, 2100, step)
    assert sizes[2] - sizes[1] < MARGIN
    asked = len(victim.session.poll_events())
    victim.say(Ask(sequence=0, size=5))
    victim.sequence -= 1
    victim.say(Ask(sequence=0, size=5))
    assert len(victim.session.poll_events()) == asked + 1


# -- control messages --------------------------------------------------------------------------------------


def sending(count: int = 3) -> tuple[Victim, list[int]]:
    """A client that sends transfers of 300 blocks; and their ids."""
    victim = met(client=True)
    victim.keeps = True
    values = np.arange(EXTENTS[3], dtype=np.float32)
    transfers = [victim.session.send(0.0, 3, turn, values) for turn in range(count)]
    victim.drain()
    return victim, transfers


HUGE: list[Range] = [(0, 2**32 - 1)]
MANY: list[Range] = [(2 * each, 2 * each + 1) for each in range(4096)]
FAR: list[Range] = [(2**32 - 2, 2**32 - 1)]


@pytest.mark.parametrize("ranges", [HUGE, MANY, FAR])
def test_a_need_of_more_than_there_is(ranges: list[Range]) -> None:
    """It is asked again and again; what goes out is bounded by the rate and the window."""
    victim, transfers = sending()
    for turn in range(30):
        for transfer in [*transfers, 0, 99, 2**32 - 1]:
            victim.say(Need(sequence=0, transfer=transfer, ranges=ranges))
        victim.now += 0.001
        victim.drain()
        assert victim.session.status().in_flight <= victim.session.control.in_flight_limit + 2 * 300, turn
    finishes(victim, transfers)


def finishes(victim: Victim, transfers: list[int]) -> None:
    """The peer becomes honest, acknowledges, and closes the transfers: the victim hears it, and goes on with
    the next ones."""
    for _ in range(2000):
        acknowledge_all(victim)
        victim.bursts = victim.bursts[-200:]
        victim.pass_time(0.01)
        done = {each.transfer for each in victim.got(Delivered)}
        if done >= set(transfers):
            break
        for transfer in sorted(set(transfers) - done):
            victim.say(closed(transfer, missing=b"\0" * 38, how="complete"))
    assert {each.transfer for each in victim.got(Delivered)} == set(transfers), victim.session.status()
    status = victim.session.status()
    assert 0 < status.rate < 1e24
    assert status.in_flight >= 0


@pytest.mark.parametrize("turns", [1, 2, 5])
def test_early_twice_and_for_what_is_not(turns: int) -> None:
    victim, transfers = sending()
    for _ in range(turns):
        for transfer in [*transfers, 0, 50, 2**32 - 1]:
            victim.say(Early(sequence=0, transfer=transfer))
            victim.drain()
    finishes(victim, transfers)
    more = victim.session.send(victim.now, 0, 1, np.ones(EXTENTS[0], np.float32))
    victim.drain()
    victim.say(closed(more, missing=bytes(5)))
    assert victim.session.poll_events()[-1].transfer == more  # type: ignore[union-attr]


BAD_CLOSED: list[dict[str, Any]] = [
    {"transfer": 77},
    {"transfer": 0},
    {"transfer": 1, "missing": b"\xff" * 1000},
    {"transfer": 1, "first": 2**32 - 8},
    {"transfer": 1, "first": 2**31, "missing": b"\1"},
    {"transfer": 1, "part": 65535, "parts": 65536},
    {"transfer": 1, "order": 2**53 - 1},
]


@pytest.mark.parametrize("fields", BAD_CLOSED)
def test_a_closed_that_cannot_be(fields: dict[str, Any]) -> None:
    victim, transfers = sending()
    for _ in range(3):
        victim.say(closed(**fields))
        victim.drain()
    finishes(victim, transfers)


def test_a_closed_before_anything_was_sent_or_twice() -> None:
    victim, transfers = sending()
    late = victim.session.send(0.0, 0, 9, np.ones(EXTENTS[0], np.float32))
    victim.say(closed(late, how="refused"))
    for transfer in (*transfers, *transfers):
        victim.say(closed(transfer, how="refused"))
    victim.pass_time(0.1)
    told = [each.transfer for each in victim.got(Delivered)]
    assert sorted(told) == sorted([*transfers, late])
    assert all(each.missing.all() for each in victim.got(Delivered))


@pytest.mark.parametrize("rate", [5e-324, 1e-300, 1.0, 1e15])
@pytest.mark.parametrize("seconds", [0.0, 1e-9, 3600.0])
def test_a_grant_of_nearly_nothing_or_of_everything(rate: float, seconds: float) -> None:
    """It is not believed for ever."""
    victim, transfers = sending()
    victim.say(Grant(sequence=0, rate=rate, seconds=seconds))
    victim.drain()
    finishes(victim, transfers)


@pytest.mark.parametrize("client", [True, False])
def test_hello_again_and_bye(client: bool) -> None:
    victim = met(client=client)
    for _ in range(3):
        victim.say(Hello(sequence=0))
        victim.drain()
    victim.say(Bye(sequence=0, reason="x" * 128))
    for message in (
        Hello(sequence=0),
        Bye(sequence=0, reason=""),
        Ping(sequence=0),
    ):
        victim.say(message)
        victim.drain()
    assert len(victim.got(Lost)) == 1


# -- acknowledgements --------------------------------------------------------------------------------------


def told(last: int, **fields: Any) -> Acknowledgement:
    count = min(last + 1, 1500)
    return Acknowledgement(
        **{
            "of": 0,
            "largest": last,
            "arrived": 1.0,
            "delay": 0.0,
            "base": last + 1 - count,
            "received": np.ones(count, bool),
            "delivered": 10**6,
            **fields,
        }
    )


@pytest.mark.parametrize("beyond", [1, 64, 10**9, MOST_NUMBER // 2])
def test_numbers_that_were_never_sent_acknowledge_nothing(beyond: int) -> None:
    """An Ack that names one is not believed at all: its maker guesses."""
    victim, transfers = sending()
    before = victim.session.status()
    last = int(victim.bursts[-1].frames[-1, 8:16].view("<u8")[0])
    for stripe in (0, 1):
        victim.acknowledge(told(last + beyond + 4000, of=stripe))
    after = victim.session.status()
    assert (after.in_flight, after.rate, after.rtt) == (before.in_flight, before.rate, before.rtt)
    victim.drain()
    finishes(victim, transfers)


def test_stripes_that_are_not_acknowledge_nothing() -> None:
    victim, transfers = sending()
    before = victim.session.status()
    victim.acknowledge(told(10, of=7))
    assert victim.session.status().in_flight == before.in_flight
    finishes(victim, transfers)


def test_a_round_trip_of_nothing() -> None:
    """The peer acknowledges at the moment of sending, as where clocks differ by more than the way takes."""
    victim, transfers = sending()
    for _ in range(20):
        acknowledge_all(victim)
        victim.drain()
    assert victim.session.status().rate > 0
    finishes(victim, transfers)


COUNTERS: dict[str, Callable[[int], dict[str, Any]]] = {
    "delivered jumps": lambda turn: {"delivered": turn * 2**50},
    "delivered jumps once": lambda turn: {"delivered": 2**61 if turn == 3 else turn * 1000},
    "delivered falls": lambda turn: {"delivered": 2**61 - turn * 10**6},
    "delivered swings": lambda turn: {"delivered": MOST_NUMBER - 1 if turn % 2 else 0},
    "time stands": lambda turn: {"arrived": 5.0, "delivered": turn * 10**6},
    "time runs back": lambda turn: {"arrived": 1e6 - turn, "delivered": turn * 10**6},
    "time jumps": lambda turn: {"arrived": turn * 1e9, "delivered": turn * 10**3},
    "delay": lambda turn: {"delay": 4000.0 * (turn % 2)},
    "bits are none": lambda turn: {"received": np.zeros(0, bool)},
    "largest alone": lambda turn: {"received": np.zeros(5, bool), "base": 0},
}


@pytest.mark.parametrize("what", COUNTERS)
def test_counters_and_times_that_no_clock_gives(what: str) -> None:
    """The rate stays a number, and what comes later is sent."""
    victim, transfers = sending(6)
    for turn in range(60):
        last = int(victim.bursts[-1].frames[-1, 8:16].view("<u8")[0])
        stripe = victim.bursts[-1].stripe
        victim.acknowledge(told(last, of=stripe, **COUNTERS[what](turn)))
        victim.now += 0.004
        victim.drain()
        status = victim.session.status()
        assert 0 < status.rate < 1e24
        assert status.in_flight >= 0
    finishes(victim, transfers)


@pytest.mark.parametrize("reason", ["over", "x" * 128])
def test_the_last_word_keeps_to_what_an_address_may_get(reason: str) -> None:
    victim = Victim()
    victim.say(Ping(sequence=0))  # small, and the address has not answered
    victim.drain()
    victim.session.close(victim.now, reason)
    victim.drain()
    path = ("peer", 0)
    assert victim.sent[path] <= 3 * victim.received[path]


def test_an_address_that_answered_gets_the_last_word() -> None:
    victim = met()
    victim.session.close(victim.now, "x" * 128)
    before = sum(victim.sent.values())
    victim.drain()
    assert sum(victim.sent.values()) > before + 3 * 128


def closes(receiver: arriving.Receiver, one: Bytes, transfer: int) -> arriving.Done | None:
    """What is done about this datagram, as one of that transfer; None: it is of one that is over."""
    frames = one.copy()
    records_of(frames, SLICE, HEADER.itemsize)["transfer"] = transfer
    touched = receiver.handle_slices(0.0, Datagrams(Kind.DATA, frames), 0.04)
    return receiver.poll(0.0, transfer, 3.0, 0.04, 0.01) if touched else None


@pytest.mark.parametrize("step", [1, 2])
def test_what_is_remembered_of_closed_transfers_is_bounded_and_none_comes_twice(step: int) -> None:
    """In a transfer of one block its only datagram is all of it: it may come again whenever it likes."""
    receiver = arriving.Receiver(SETTINGS, None, Counter())
    one = genuine(1, 1, rng(), elements=BLOCK, loss=0.0)[1][0][:1, :-SEAL_BYTES]
    for transfer in range(1, 4 * arriving.MOST_TOLD, step):
        done = closes(receiver, one, transfer)
        assert done is not None
        assert isinstance(done.event, Arrived)
    for transfer in range(1, 4 * arriving.MOST_TOLD, step):
        assert closes(receiver, one, transfer) is None
    assert len(receiver._notices) == arriving.MOST_TOLD
    assert len(receiver._closed) <= (1 if step == 1 else arriving.MOST_RANGES)


def test_a_transfer_that_is_open_in_a_gap_that_is_taken_for_full_is_handed_on() -> None:
    receiver = arriving.Receiver(SETTINGS, None, Counter())
    one = genuine(1, 1, rng(), elements=BLOCK, loss=0.0)[1][0][:1, :-SEAL_BYTES]
    first, *rest = genuine(2, 0, rng(), elements=100 * BLOCK, loss=0.0)[1]
    assert closes(receiver, first[:, :-SEAL_BYTES], 2) == arriving.Done()
    for transfer in range(1, 4 * arriving.MOST_RANGES, 2):
        closes(receiver, one, transfer)
    for burst in rest:
        done = closes(receiver, burst[:, :-SEAL_BYTES], 2)
    assert done is not None
    assert isinstance(done.event, Arrived)
    assert receiver.deadline == np.inf
    assert closes(receiver, first[:, :-SEAL_BYTES], 2) is None


def test_the_words_of_large_transfers_take_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arriving, "MOST_TOLD_BYTES", 1000)
    receiver = arriving.Receiver(SETTINGS, None, Counter())
    frames = genuine(1, 1, rng(), elements=300 * BLOCK, loss=0.0)[1]
    for transfer in range(1, 20):
        for burst in frames:
            done = closes(receiver, burst[:, :-SEAL_BYTES], transfer)
        assert done is not None
        assert isinstance(done.event, Arrived)
    assert len(receiver._notices) == 3
