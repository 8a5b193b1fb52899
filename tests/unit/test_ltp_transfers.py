"""A transfer at both of its ends, without a session: what is sent (again), taken, restored, refused."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from atoll.core.errors import UserError
from atoll.ltp.closing import least
from atoll.ltp.order import Extent, high_indices, places_of
from atoll.ltp.receiving import ArrivalRate, BadTransferError, Incoming
from atoll.ltp.sending import Outgoing
from atoll.ltp.settings import LtpSettings
from atoll.wire.datagrams import (
    HEADER,
    HIGH,
    SEAL_BYTES,
    SLICE,
    Datagrams,
    Kind,
    records_of,
    write_headers,
)
from atoll.wire.linkcontrol import closed_of

SETTINGS = LtpSettings(datagram_bytes=256)
BLOCK = 44  # elements of float32
RTT = 0.04


def values_of(count: int, dtype: type = np.float32) -> np.ndarray:
    return (np.random.default_rng(count).normal(size=count) * 100).astype(dtype)


def some_high(blocks: int, every: int = 5) -> np.ndarray:
    high = np.zeros(blocks, dtype=bool)
    high[::every] = True
    return high


def outgoing(
    blocks: int = 40,
    settings: LtpSettings = SETTINGS,
    loss: float = 0.0,
    tail: int = 10**6,
    apart: float = 0.0,
    **kw: bool,
) -> Outgoing:
    count = BLOCK * blocks - 7
    made = Outgoing(settings, 1, 3, 9, values_of(count), some_high(blocks), kw.get("reliable", False))
    made.begin(loss, 1.0, tail, apart)
    return made


def sent_by(transfer: Outgoing, most: int = 7) -> list[tuple[np.ndarray, Datagrams]]:
    """All that it sends now: items and datagrams."""
    bursts = []
    while (taken := transfer.take(0.0, most)) is not None:
        kind, items = taken
        frames = np.zeros((len(items), transfer.size), dtype=np.uint8)
        transfer.bodies.write(kind, items, frames)
        write_headers(frames, kind, 0, 0, 7, 0)
        bursts.append((items, Datagrams(kind, frames[:, :-SEAL_BYTES])))
    return bursts


def some_rows(batch: Datagrams, rows: np.ndarray) -> Datagrams:
    return Datagrams(batch.kind, batch.frames[rows])


def incoming(
    batch: Datagrams, settings: LtpSettings = SETTINGS, elements: int | None = None, most: int = 2**20
) -> Incoming:
    extent = None if elements is None else Extent(elements, np.dtype(np.float32))
    return Incoming(settings, batch.slices[0], batch.elements.shape[1], extent, most, 0.0)


def judge(
    transfer: Incoming, now: float = 0.0, rates: ArrivalRate | None = None, reorder: float = 3.0
) -> str:
    return transfer.poll_verdict(now, reorder, rates or ArrivalRate(), RTT, 0.001).name


# -- the order of sending ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("blocks", "highs"), [(1, 1), (7, 7), (100, 20), (101, 33), (1000, 1), (5, 0)])
def test_high_blocks_are_spread_and_each_place_has_its_turn(blocks: int, highs: int) -> None:
    high = np.zeros(blocks, dtype=bool)
    high[np.random.default_rng(1).permutation(blocks)[:highs]] = True
    places = places_of(high)
    assert sorted(places.tolist()) == list(range(blocks))
    turns = high_indices(blocks, highs)
    assert (np.flatnonzero(high[places]) == turns).all()
    share = np.cumsum(high[places]) - np.arange(1, blocks + 1) * highs / blocks
    assert np.abs(share).max() <= 1  # the shares of high and low rise together


# -- what is sent --------------------------------------------------------------------------------------------


def test_each_block_goes_once_and_tells_where_it_belongs() -> None:
    transfer = outgoing()
    values = transfer.bodies.values
    seen = np.zeros(40, dtype=bool)
    for items, batch in sent_by(transfer):
        for row, item in enumerate(items.tolist()):
            record = batch.slices[row]
            assert (record["index"], record["transfer"], record["chunk"], record["iteration"]) == (
                item,
                1,
                3,
                9,
            )
            start, count = int(record["offset"]), int(record["count"])
            part = values[start : start + count]
            assert batch.elements[row].view(np.float32)[:count].tobytes() == part.tobytes()
            high = bool(record["flags"] & HIGH)
            assert record["nonzero"] == (np.count_nonzero(part) if high else 0xFFFF)
            assert high == transfer.high[start // BLOCK]
            seen[start // BLOCK] = True
    assert seen.all()
    assert transfer.high[-1]  # the last block alone tells where the chunk ends
    assert transfer.whole
    assert not transfer.ready


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.uint16, np.uint8])
def test_every_type_comes_as_it_was_sent(dtype: type) -> None:
    values = values_of(1000, dtype)
    transfer = Outgoing(SETTINGS, 1, 0, 0, values, None, True)
    transfer.begin(0.0, 1.0, 10)
    bursts = sent_by(transfer)
    taken = incoming(bursts[0][1])
    for _, batch in bursts:
        taken.handle_datagrams(0.0, batch, Counter())
    assert judge(taken) == "complete"
    arrived = taken.finish(0.0, None)
    assert arrived.values.dtype == dtype
    assert arrived.values.tobytes() == values.tobytes()


@pytest.mark.parametrize(
    ("values", "high"),
    [
        (np.zeros((2, 2), dtype=np.float32), None),
        (np.zeros(0, dtype=np.float32), None),
        (np.zeros(4, dtype=np.int64), None),
        (np.zeros(400, dtype=np.float32), np.zeros(3, dtype=bool)),
    ],
)
def test_what_cannot_be_sent_is_refused(values: np.ndarray, high: np.ndarray | None) -> None:
    with pytest.raises(UserError):
        Outgoing(SETTINGS, 1, 0, 0, values, high, False)


def test_lost_high_blocks_go_again_and_low_ones_only_below_usable() -> None:
    transfer = outgoing()  # 9 high blocks, 31 low ones, none of which may be missing at 0.97
    transfer.settings = SETTINGS
    sent_by(transfer)
    high = high_indices(40, 9)
    transfer.handle_lost(high[:2])
    ((items, batch),) = sent_by(transfer)
    assert items.tolist() == high[:2].tolist()
    assert batch.slices["index"].tolist() == high[:2].tolist()
    low = np.setdiff1d(np.arange(40), high)
    transfer.handle_lost(low[:3])
    ((items, _),) = sent_by(transfer)
    assert items.tolist() == low[:3].tolist()


@pytest.mark.parametrize(("lost", "again"), [(2, 0), (3, 0), (4, 1), (6, 3)])
def test_of_low_blocks_no_more_go_again_than_make_it_usable(lost: int, again: int) -> None:
    transfer = outgoing(blocks=128)  # 26 high, and the last; 101 low: 98 are usable, so 3 may be missing
    low = np.setdiff1d(np.arange(128), high_indices(128, transfer.highs))
    sent_by(transfer)
    transfer.handle_lost(low[:lost])
    assert sum(len(items) for items, _ in sent_by(transfer)) == again
    strict = outgoing(blocks=128, settings=LtpSettings(datagram_bytes=256, repair_low=False))
    sent_by(strict)
    strict.handle_lost(low[:50])
    assert not sent_by(strict)


def test_what_came_by_its_second_copy_is_not_sent_a_third_time() -> None:
    transfer = outgoing()
    sent_by(transfer)
    item = high_indices(40, 9)[:1]
    transfer.handle_lost(item)
    transfer.handle_acked(item)  # it was only late
    assert not sent_by(transfer)
    transfer.handle_lost(item)  # the copy that was wanted went nowhere
    assert not sent_by(transfer)


def test_early_ends_low_blocks_and_not_high_ones() -> None:
    transfer = outgoing()
    transfer.take(0.0, 10)
    transfer.handle_early("test")
    rest = np.concatenate([items for items, _ in sent_by(transfer)])
    high = high_indices(40, transfer.highs)
    assert rest.tolist() == high[high >= 10].tolist()
    transfer.handle_lost(np.setdiff1d(np.arange(10), high))
    assert not sent_by(transfer)


@pytest.mark.parametrize(("close_high", "again"), [(1.0, 0), (0.5, 1)])
def test_after_early_a_lost_high_block_goes_only_if_not_all_were_there(close_high: float, again: int) -> None:
    transfer = outgoing(settings=LtpSettings(datagram_bytes=256, close_high=close_high))
    sent_by(transfer)
    transfer.handle_early("test")
    transfer.handle_lost(high_indices(40, transfer.highs)[:1])
    assert len(sent_by(transfer)) == again


def test_need_has_sent_again_what_is_not_on_its_way() -> None:
    transfer = outgoing()
    sent_by(transfer)
    transfer.handle_acked(np.arange(20))
    transfer.handle_need(0.01, [(5, 6), (30, 31)], RTT)
    assert [items.tolist() for items, _ in sent_by(transfer)] == [[5]]  # 30 went out just now
    transfer.handle_need(RTT, [(30, 31), (39, 99)], RTT)
    assert [items.tolist() for items, _ in sent_by(transfer)] == [[30, 39]]


@pytest.mark.parametrize("parts", [1, 3])
def test_closed_tells_which_places_are_missing(parts: int) -> None:
    transfer = outgoing(blocks=2000)
    missing = np.random.default_rng(2).random(2000) < 0.1
    said = closed_of(1, 1, missing, "borne", "enough", 4000 if parts == 1 else 256 + 16)
    assert (len(said) > 1) == (parts > 1)
    told = [transfer.handle_closed(part) for part in reversed(said)]
    assert told[:-1] == [None] * (len(said) - 1)
    delivered = told[-1]
    assert delivered is not None
    assert (delivered.missing[places_of(transfer.high)] == missing).all()
    assert not transfer.ready


# -- forward error correction --------------------------------------------------------------------------------


def test_what_the_code_can_restore_is_restored_and_not_sent_again() -> None:
    transfer = outgoing(blocks=200, loss=0.05)
    bursts = sent_by(transfer)
    parity = [batch for _, batch in bursts if batch.kind is Kind.PARITY]
    assert parity
    groups = parity[0].slices["group"]
    per_group = int(parity[0].slices["parity"][0])
    high = high_indices(200, transfer.highs)
    members = high[: per_group * len(np.unique(groups)) : 1][:per_group]  # at most so many of any group
    drops: Counter[str] = Counter()
    taken = incoming(bursts[0][1])
    for items, batch in bursts:
        there = ~np.isin(items, members)
        if there.any():
            taken.handle_datagrams(0.0, some_rows(batch, there), drops)
        transfer.handle_acked(items[there])
    assert taken.restored == len(members)
    assert judge(taken) == "complete"
    assert taken.finish(0.0, None).values.tobytes() == transfer.bodies.values.tobytes()
    assert not drops
    transfer.handle_lost(members)
    assert not sent_by(transfer)  # the receiver restores them


def test_parity_covers_only_what_could_not_be_repaired_in_time() -> None:
    transfer = outgoing(blocks=200, loss=0.05, tail=50)
    for _, batch in sent_by(transfer):
        grouped = batch.slices["group"] != 0xFFFF
        if batch.kind is Kind.DATA:
            assert (grouped == (batch.slices["index"] >= 150)).all()


def test_low_blocks_are_restored_until_the_transfer_is_usable() -> None:
    transfer = outgoing(blocks=200, loss=0.1)
    bursts = sent_by(transfer)
    low = np.setdiff1d(np.arange(200), high_indices(200, transfer.highs))
    lost = low[:7]  # no two of neighbours are of one group
    drops: Counter[str] = Counter()
    taken = incoming(bursts[0][1])
    for items, batch in bursts:
        there = ~np.isin(items, lost)
        if there.any():
            taken.handle_datagrams(0.0, some_rows(batch, there), drops)
        transfer.handle_acked(items[there])
    borne = 200 - transfer.highs - least(0.97, 200 - transfer.highs)
    assert 0 < borne < len(lost)
    assert taken.restored == len(lost) - borne  # and not what can be borne
    arrived = taken.finish(0.0, None)
    assert np.count_nonzero(~arrived.present) == borne
    whole = np.repeat(arrived.present, arrived.block)[: len(transfer.bodies.values)]
    assert (arrived.values == transfer.bodies.values)[whole].all()
    assert not drops
    transfer.handle_lost(lost)
    assert not sent_by(transfer)


def test_a_repair_within_the_last_round_trip_goes_in_copies() -> None:
    transfer = outgoing(blocks=200, loss=0.03, tail=50, apart=0.01)
    high = high_indices(200, transfer.highs)
    for _ in range(15):
        transfer.take(0.0, 10)
    early, late = high[:2], high[2:4]
    transfer.handle_lost(early)
    taken = transfer.take(0.0, 2)  # 50 blocks and their parity are to follow: more than the tail
    assert taken is not None
    assert (taken[1] == early).all()
    sent_by(transfer)
    transfer.handle_lost(late)
    copies: Counter[int] = Counter()
    for turn in range(100):
        now = 0.001 * turn
        transfer.poll(now)
        taken = transfer.take(now, 7)
        copies.update(taken[1].tolist() if taken else [])
        if turn == 5:
            transfer.handle_acked(late[:1])
    assert copies == {int(late[0]): 1, int(late[1]): 3}  # one has come before the second copy went


def test_what_the_last_round_trip_may_lose_is_not_borne_before_it() -> None:
    """Else a transfer that has lost all it may is not usable once its end has lost some too."""
    blocks, tail = 2000, 200
    transfer = outgoing(blocks=blocks, loss=0.02, tail=tail)
    sent_by(transfer)
    low = np.setdiff1d(np.arange(blocks), high_indices(blocks, transfer.highs))
    before = low[low < blocks - tail]
    borne = len(low) - least(0.97, len(low))
    transfer.handle_lost(before[:borne])
    again = sum(len(items) for items, _ in sent_by(transfer))
    likely = 0.02 * np.count_nonzero(low >= blocks - tail)
    assert likely < again < 6 * likely
    transfer.handle_lost(low[low >= blocks - tail][:again])  # as many as were reckoned with
    assert not sent_by(transfer)


def test_lost_low_blocks_go_again_where_their_group_cannot_be_restored_any_more() -> None:
    transfer = outgoing(blocks=200, loss=0.1)
    bursts = sent_by(transfer)
    high = high_indices(200, transfer.highs)
    groups: dict[int, list[int]] = {}
    for items, batch in bursts:
        for item, group in zip(items.tolist(), batch.slices["group"].tolist(), strict=True):
            groups.setdefault(group, []).append(item)
    members = np.array(next(each for each in groups.values() if not np.isin(each, high).any()))
    low, parity = members[members < 200], members[members >= 200]
    transfer.handle_lost(low[: len(parity)])
    assert not sent_by(transfer)  # its parity may yet come
    transfer.handle_lost(parity[:1])
    borne = 200 - transfer.highs - least(0.97, 200 - transfer.highs)
    again = np.concatenate([items for items, _ in sent_by(transfer)])
    assert len(again) == len(parity) - borne
    assert np.isin(again, low).all()


@pytest.mark.parametrize(("redundancy", "loss"), [(False, 0.05), (True, 0.0)])
def test_there_is_no_parity_where_none_is_wanted(redundancy: bool, loss: float) -> None:
    transfer = outgoing(settings=LtpSettings(datagram_bytes=256, redundancy=redundancy), loss=loss)
    assert all(batch.kind is Kind.DATA for _, batch in sent_by(transfer))


# -- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("blocks", 41),
        ("highs", 10),
        ("chunk", 4),
        ("iteration", 8),
        ("element", 5),
        ("flags", 0),
        ("flags", 3),
        ("offset", 1),
        ("offset", 0),  # where another block lies
        ("offset", BLOCK * 40),
        ("count", BLOCK - 1),
        ("count", BLOCK + 1),
    ],
)
def test_a_datagram_that_contradicts_refuses_the_transfer(field: str, value: int) -> None:
    transfer = outgoing()
    (_, first), (_, second) = sent_by(transfer, 20)
    taken = incoming(first)
    taken.handle_datagrams(0.0, first, Counter())
    row = int(np.flatnonzero(second.slices["flags"] & HIGH)[0])
    frames = second.frames.copy()
    records_of(frames, SLICE, HEADER.itemsize)[field][row] = value
    with pytest.raises(BadTransferError):
        taken.handle_datagrams(0.0, Datagrams(second.kind, frames), Counter())


@pytest.mark.parametrize(
    ("elements", "most"), [(40 * BLOCK - 7 - BLOCK, 2**20), (40 * BLOCK + 1, 2**20), (None, 7000)]
)
def test_a_transfer_out_of_its_bounds_is_refused_before_memory_is_taken(
    elements: int | None, most: int
) -> None:
    (_, batch) = sent_by(outgoing())[0]
    with pytest.raises(BadTransferError):
        incoming(batch, elements=elements, most=most)


def test_a_chunk_of_another_length_in_as_many_blocks_is_refused() -> None:
    bursts = sent_by(outgoing(), 40)
    taken = incoming(bursts[0][1], elements=40 * BLOCK - 6)
    with pytest.raises(BadTransferError, match="elements"):
        taken.handle_datagrams(0.0, bursts[0][1], Counter())


@pytest.mark.parametrize("dtype", [np.float64, np.uint16])
def test_a_chunk_of_another_type_is_refused_though_its_blocks_are_as_many(dtype: type) -> None:
    count = 40 * BLOCK * 4 // np.dtype(dtype).itemsize
    transfer = Outgoing(SETTINGS, 1, 3, 9, values_of(count, dtype), None, False)
    (_, batch) = sent_by(transfer)[0]
    assert incoming(batch).dtype == dtype
    with pytest.raises(BadTransferError, match=r"1 of chunk 3: .* type .*, where the chunk's are float32"):
        incoming(batch, elements=40 * BLOCK)


@pytest.mark.parametrize(("elements", "dtype"), [(10, np.int32), (0, np.float32), (2**32, np.float32)])
def test_an_extent_that_no_transfer_has_is_refused(elements: int, dtype: type) -> None:
    with pytest.raises(UserError, match="a transfer has 1 to "):
        Extent(elements, np.dtype(dtype))


@pytest.mark.parametrize(("field", "value"), [("group", 50_000), ("data", 1)])
def test_groups_that_contradict_are_refused(field: str, value: int) -> None:
    bursts = sent_by(outgoing(blocks=200, loss=0.05), 200)
    taken = incoming(bursts[0][1])
    taken.handle_datagrams(0.0, some_rows(bursts[0][1], np.arange(100)), Counter())
    parity = bursts[-1][1]
    assert parity.kind is Kind.PARITY
    parity.slices[field] = value
    with pytest.raises(BadTransferError):
        taken.handle_datagrams(0.0, parity, Counter())


# -- when it is handed on ------------------------------------------------------------------------------------


def arriving(rows: np.ndarray, rates: ArrivalRate | None = None) -> tuple[Outgoing, Incoming]:
    """A transfer of 128 blocks of which these indices came, a block each millisecond."""
    transfer = outgoing(blocks=128)
    ((_, batch),) = sent_by(transfer, 1000)
    taken = incoming(batch)
    for index in rows.tolist():
        taken.handle_datagrams(index * 0.001, some_rows(batch, np.array([index])), Counter())
        if rates is not None:
            rates.handle_blocks(index * 0.001, 1, RTT)
    return transfer, taken


def test_enough_is_handed_on_once_the_rest_was_passed_by() -> None:
    low = np.setdiff1d(np.arange(128), high_indices(128, 27))
    _, taken = arriving(np.setdiff1d(np.arange(128), low[[3, 9]]))
    assert judge(taken, 0.13) == "enough"
    assert judge(taken, 0.13, reorder=1000.0) == "early"


def test_enough_waits_for_the_grace_where_the_rest_may_come() -> None:
    rates = ArrivalRate()
    _, taken = arriving(np.arange(126), rates)  # the last two, of which one is high
    high = high_indices(128, 27)
    assert high[-1] == 125
    assert judge(taken, 0.125, rates) == "early"
    assert judge(taken, 0.1255, rates) == "wait"
    assert 0.126 < taken.deadline < 0.135
    assert judge(taken, taken.deadline, rates) == "enough"


def test_low_blocks_are_waited_for_to_the_deadline_and_no_longer() -> None:
    rates = ArrivalRate()
    high = high_indices(128, 27)
    _, taken = arriving(np.union1d(high, np.arange(60)), rates)
    assert judge(taken, 0.125, rates) == "wait"
    assert taken.deadline == pytest.approx(0.125 + 0.002 + RTT / 2, abs=0.012)
    assert judge(taken, taken.deadline - 1e-6, rates) == "wait"
    assert judge(taken, taken.deadline, rates) == "deadline"
    arrived = taken.finish(0.2, None)
    assert arrived.present[arrived.high].all()
    assert arrived.fill == "zero"
    lost = np.repeat(~arrived.present, BLOCK)[: len(arrived.values)]
    assert not arrived.values[lost].any()


def test_a_high_block_that_was_passed_by_is_asked_for_and_asked_for_again() -> None:
    high = high_indices(128, 27)
    transfer, taken = arriving(np.setdiff1d(np.arange(128), high[[4, 7]]))
    assert judge(taken, 0.128) == "wait"  # the sender has two round trips to see it by itself
    assert taken.deadline == pytest.approx(0.128 + 2 * RTT, abs=0.01)
    assert judge(taken, taken.deadline) == "need"
    asked = taken.poll_need(0.3, RTT, 0.001)
    assert np.flatnonzero(asked).tolist() == high[[4, 7]].tolist()
    assert judge(taken, 0.3) == "wait"
    assert judge(taken, 0.4) == "need"
    ((_, batch),) = sent_by(outgoing(blocks=128), 1000)
    taken.handle_datagrams(0.41, some_rows(batch, high[[4, 7]]), Counter())
    assert judge(taken, 0.41) == "complete"
    assert taken.finish(0.41, None).values.tobytes() == transfer.bodies.values.tobytes()


def test_the_end_that_never_comes_is_asked_for() -> None:
    _, taken = arriving(np.arange(5))
    assert judge(taken, 0.005) == "wait"
    assert taken.deadline < math.inf
    assert judge(taken, taken.deadline) == "need"
    asked = taken.poll_need(1.0, RTT, 0.001)
    assert np.flatnonzero(asked).tolist() == [index for index in high_indices(128, 27).tolist() if index >= 5]


def test_scales_multiply_what_came() -> None:
    ((_, batch),) = sent_by(outgoing(), 1000)
    batch.slices["scale"] = 0.5
    taken = incoming(batch)
    taken.handle_datagrams(0.0, batch, Counter())
    assert judge(taken) == "complete"
    assert taken.finish(0.0, None).values == pytest.approx(values_of(40 * BLOCK - 7) * 0.5)


def test_the_rate_of_arrival_leaves_out_the_time_between_transfers() -> None:
    rates = ArrivalRate()
    for start in (0.0, 10.0):
        for each in range(100):
            rates.handle_blocks(start + each * 0.001, 10, RTT)
    assert rates.rate == pytest.approx(10_000, rel=0.05)
    assert rates.expected(100) == pytest.approx(0.01, rel=0.05)


def test_a_low_block_that_goes_again_no_longer_counts_as_lost() -> None:
    transfer = outgoing(blocks=128)  # 3 low blocks may be missing
    low = np.setdiff1d(np.arange(128), high_indices(128, transfer.highs))
    sent_by(transfer)
    for lost in (low[:4], low[4:5], low[5:6]):
        transfer.handle_lost(lost)
        assert sum(len(items) for items, _ in sent_by(transfer)) == 1
