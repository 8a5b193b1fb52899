"""Two sessions with each other: what is sent is what is handed on, whatever is lost on the way."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from atoll.core.errors import UserError
from atoll.ltp import arriving, flights
from atoll.ltp.arriving import Receiver
from atoll.ltp.outbox import Handled
from atoll.ltp.sending import Outgoing
from atoll.ltp.session import Arrived, Asked, Burst, Delivered, Lost, LtpSession, Migrated, Opened, Refused
from atoll.ltp.settings import Fill, LtpSettings
from atoll.wire.datagrams import HEADER, NOT_SAID, SEAL_BYTES, SLICE, Datagrams, Kind, records_of
from atoll.wire.linkcontrol import Closed, decode_untrusted
from ltp_wire import EXTENTS, Wire

BLOCK = 330  # elements of float32 in a datagram of 1,400 B


def some_values(count: int = 40_000, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).normal(size=count).astype(np.float32)
    values[np.abs(values) < 0.2] = 0.0  # so that blocks differ in how many are not
    return values


def every_fifth(count: int = 40_000) -> np.ndarray:
    high = np.zeros(-(-count // BLOCK), dtype=bool)
    high[::5] = True
    return high


def losing(share: float, seed: int = 3):
    rng = np.random.default_rng(seed)
    return lambda client, burst, now: rng.random(len(burst.frames)) < share


def check(arrived: Arrived, delivered: Delivered, values: np.ndarray) -> None:
    """High blocks complete and exact; of the low ones, what is missing here is what is told there."""
    present = np.repeat(arrived.present, arrived.block)[: len(values)]
    assert arrived.present[arrived.high].all()
    assert arrived.values[present].tobytes() == values[present].tobytes()
    assert (delivered.missing == ~arrived.present).all()
    counts = [
        np.count_nonzero(values[at : at + arrived.block]) for at in range(0, len(values), arrived.block)
    ]
    assert (arrived.nonzero == np.where(arrived.high, counts, NOT_SAID)).all()
    assert (delivered.transfer, delivered.fill) == (arrived.transfer, arrived.fill)


@pytest.mark.parametrize("loss", [0.0, 0.02, 0.3])
@pytest.mark.parametrize("reliable", [False, True])
def test_transfers_arrive(loss: float, reliable: bool) -> None:
    wire = Wire(drop=losing(loss))
    for iteration in range(4):
        values = some_values(seed=iteration)
        wire.client.send(wire.now, 0, iteration, values, high=every_fifth(), reliable=reliable)
        wire.run(lambda count=iteration + 1: len(wire.got(True, Delivered)) == count)
        arrived, delivered = wire.got(False, Arrived)[-1], wire.got(True, Delivered)[-1]
        check(arrived, delivered, values)
        assert arrived.iteration == iteration
        if reliable or loss == 0.0:
            assert arrived.present.all()
    sent = [burst for client, burst in wire.sent if client]
    assert all(len(burst.frames) <= 178 for burst in sent)
    assert all(before.stripe == after.stripe == 0 for before, after in pairwise(sent))


def start(wire: Wire, chunk: int = 0, client: bool = True, **how: object) -> np.ndarray:
    """Sends a chunk; returns its values."""
    count = EXTENTS[chunk]
    values = some_values(count, seed=len(wire.sent))
    high = every_fifth(count) if not how.get("reliable") else None
    wire.end(client).send(wire.now, chunk, 5, values, high=high, **how)  # type: ignore[arg-type]
    return values


def both_done(wire: Wire, count: int, client: bool = True) -> bool:
    return len(wire.got(client, Delivered)) == count == len(wire.got(not client, Arrived))


def opened(wire: Wire) -> Wire:
    wire.run(lambda: bool(wire.got(True, Opened) and wire.got(False, Opened)))
    wire.run(lambda: wire.client.status().in_flight == wire.server.status().in_flight == 0)
    return wire


# -- opening, idling, ending ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stripes", [1, 3, 8])
def test_a_session_opens_in_a_round_trip_and_may_send_before(stripes: int) -> None:
    wire = Wire(stripes=stripes)
    values = start(wire)
    wire.run(lambda: both_done(wire, 1))
    check(wire.got(False, Arrived)[0], wire.got(True, Delivered)[0], values)
    assert len(wire.got(True, Opened)) == len(wire.got(False, Opened)) == 1
    used = {burst.stripe for client, burst in wire.sent if client and burst.frames[0, 1] == Kind.DATA}
    assert used == set(range(stripes))
    assert len(wire.got(False, Migrated)) == stripes  # the first address of each


@pytest.mark.parametrize("lost", range(6))
def test_an_opening_of_which_datagrams_are_lost_comes_in_the_end(lost: int) -> None:
    count = iter(range(10**6))
    wire = Wire(drop=lambda client, burst, now: np.array([next(count) <= lost for _ in burst.frames]))
    wire.run(lambda: bool(wire.got(True, Opened) and wire.got(False, Opened)), limit=8.0)


def test_an_idle_session_is_kept_alive() -> None:
    wire = opened(Wire(LtpSettings(idle_seconds=3.0)))
    sent = len(wire.sent)
    wire.run(lambda: wire.now > 30.0)
    assert not wire.got(True, Lost)
    assert not wire.got(False, Lost)
    assert len(wire.sent) - sent < 150


def test_no_answer_ends_the_session_and_says_so() -> None:
    wire = Wire(LtpSettings(idle_seconds=2.0), drop=losing(1.1))
    start(wire)
    wire.run(lambda: bool(wire.got(True, Lost)))
    (lost,) = wire.got(True, Lost)
    assert wire.now == pytest.approx(2.0, abs=0.01)
    assert lost.reason == "no answer came from the other end for 2 s"
    assert lost.sent == (1,)
    assert wire.client.poll_deadline() == math.inf
    with pytest.raises(UserError, match="ended"):
        start(wire)


def test_a_transfer_with_all_high_blocks_is_handed_on_when_nothing_comes_any_more() -> None:
    settings = LtpSettings(datagram_bytes=256, idle_seconds=2.0)
    outgoing = Outgoing(settings, 1, 0, 0, some_values(40_000), None, False)
    taken = outgoing.take(0.0, 2000)
    assert taken is not None
    kind, items = taken
    frames = np.zeros((len(items), outgoing.size), dtype=np.uint8)
    outgoing.bodies.write(kind, items, frames)
    receiver, now = Receiver(settings, None, Counter()), 0.0
    only = int(np.flatnonzero(outgoing._high_at)[0])  # in the middle; with 14 blocks a second the end is far
    for index in range(only - 60, only + 1):
        now += 0.07
        batch = Datagrams(kind, frames[index : index + 1, :-SEAL_BYTES])
        receiver.handle_slices(now, batch, 0.04)
        assert receiver.poll(now, 1, 3.0, 0.04, 0.01).event is None
    assert receiver.deadline == pytest.approx(now + 2.0)
    event = receiver.poll(receiver.deadline, 1, 3.0, 0.04, 0.01).event
    assert isinstance(event, Arrived)
    assert event.how == "deadline"
    assert event.present.sum() == 61


@pytest.mark.parametrize(
    "wrong",
    [{"fill": "lats"}]
    + [{name: bad} for name in ("initial_rate", "idle_seconds") for bad in (0.0, -1.0, math.nan, math.inf)],
)
def test_settings_out_of_range_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"^{next(iter(wrong))} = "):
        LtpSettings(**wrong)


@pytest.mark.parametrize(("chunk", "iteration"), [(-1, 0), (2**32, 0), (0, -1), (0, 2**32)])
def test_numbers_that_a_header_cannot_hold_are_refused(chunk: int, iteration: int) -> None:
    wire = Wire()
    with pytest.raises(UserError, match="between 0 and"):
        wire.client.send(wire.now, chunk, iteration, some_values(10))
    assert wire.client.send(wire.now, 2, 0, some_values(1)) == 1  # no id was used


def test_transfer_ids_run_out_in_words() -> None:
    wire = Wire()
    wire.client._sender._next = 2**32 - 1
    assert wire.client.send(wire.now, 2, 0, some_values(1)) == 2**32 - 1
    with pytest.raises(UserError, match="open another"):
        wire.client.send(wire.now, 2, 0, some_values(1))


def test_a_window_does_not_begin_before_there_is_an_address() -> None:
    wire = Wire()
    wire.server.send(wire.now, 2, 0, some_values(1))
    assert wire.server.poll_datagrams(wire.now) is None
    assert not wire.server._sender._begun
    wire.run(lambda: both_done(wire, 1, client=False))


@pytest.mark.parametrize("client", [True, False])
def test_an_end_that_dies_is_noticed_and_its_transfers_are_dropped(client: bool) -> None:
    wire = opened(Wire(LtpSettings(idle_seconds=2.0)))
    start(wire, client=client)
    wire.run(lambda: sum(len(burst.frames) for end, burst in wire.sent if end == client) > 60)
    wire.drop = lambda end, burst, now: np.full(len(burst.frames), end == client)
    wire.run(lambda: bool(wire.got(not client, Lost)), limit=4.0)
    assert wire.got(not client, Lost)[0].dropped == (1,)


def test_closing_tells_the_other_end_why() -> None:
    wire = opened(Wire())
    start(wire)
    wire.client.close(wire.now, "the run is over")
    wire.run(lambda: bool(wire.got(False, Lost)))
    assert "the run is over" in wire.got(False, Lost)[0].reason
    assert wire.got(True, Lost)[0].sent == (1,)
    assert wire.client.poll_datagrams(wire.now + 100) is None


def without_the_word_on(transfer: int):
    """Loses the server's Closed of this transfer, always."""

    def drop(client: bool, burst: Burst, now: float) -> np.ndarray:
        lost = False
        if not client and burst.frames[0, 1] == Kind.CONTROL:
            message = decode_untrusted(burst.frames[0, HEADER.itemsize : -SEAL_BYTES])
            lost = isinstance(message, Closed) and message.transfer == transfer
        return np.full(len(burst.frames), lost)

    return drop


@pytest.mark.parametrize("fill", ["zero", "last"])
def test_what_waits_for_an_earlier_word_is_told_at_the_end(fill: Fill) -> None:
    settings = LtpSettings(fill=fill, fill_above=0.0, target_loss=0.0, usable=0.5, repair_low=False)
    wire, word, some = opened(Wire(settings)), without_the_word_on(2), losing(0.1)
    start(wire)
    wire.run(lambda: both_done(wire, 1))
    wire.drop = word
    start(wire)
    wire.run(lambda: len(wire.got(False, Arrived)) == 2)
    wire.drop = lambda client, burst, now: (
        word(client, burst, now) | (some(client, burst, now) & (burst.frames[0, 1] == Kind.DATA))
    )
    start(wire)
    wire.run(lambda: len(wire.got(False, Arrived)) == 3)
    wire.run(lambda until=wire.now + 0.2: wire.now > until)
    assert [each.transfer for each in wire.got(True, Delivered)] == [1]
    wire.server.close(wire.now, "the run is over")
    wire.run(lambda: bool(wire.got(True, Lost)))
    third = wire.got(False, Arrived)[2]
    told = [each.transfer for each in wire.got(True, Delivered)]
    assert third.fill == fill
    assert told == ([1, 3] if fill == "zero" else [1])
    assert wire.got(True, Lost)[0].sent == ((2,) if fill == "zero" else (2, 3))


@pytest.mark.parametrize(
    ("stripes", "client", "paths"), [(0, True, []), (9, True, ["a"] * 9), (2, True, ["a"]), (1, False, ["a"])]
)
def test_stripes_and_paths_must_fit(stripes: int, client: bool, paths: list[str]) -> None:
    with pytest.raises(UserError):
        LtpSession(
            LtpSettings(), session=1, client=client, stripes=stripes, extents=None,
            rng=np.random.default_rng(0), now=0.0, paths=paths,
        )  # fmt: skip


# -- losses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reliable", [False, True])
def test_a_blackout_is_survived(reliable: bool) -> None:
    wire = opened(Wire())
    begun = wire.now
    wire.drop = lambda client, burst, now: np.full(len(burst.frames), 0.005 < now - begun < 5.0)
    values = start(wire, reliable=reliable)
    wire.run(lambda: both_done(wire, 1), limit=begun + 6.6)  # probes are at most a second apart
    check(wire.got(False, Arrived)[0], wire.got(True, Delivered)[0], values)


@pytest.mark.parametrize("kind", [Kind.ACK, Kind.CONTROL])
def test_most_of_what_is_not_data_may_be_lost(kind: Kind) -> None:
    lost = losing(0.7)
    wire = opened(Wire())
    wire.drop = lambda client, burst, now: lost(client, burst, now) & (burst.frames[0, 1] == kind)
    for count in range(1, 5):
        values = start(wire)
        wire.run(lambda count=count: both_done(wire, count))
        check(wire.got(False, Arrived)[-1], wire.got(True, Delivered)[-1], values)


def test_early_stops_the_low_blocks_that_are_not_sent() -> None:
    settings = LtpSettings(usable=0.5, initial_rate=2e5)
    wire = opened(Wire(settings))
    high = np.zeros(122, dtype=bool)
    values = some_values()
    wire.client.send(wire.now, 0, 5, values, high=high)
    wire.run(lambda: both_done(wire, 1))
    arrived, delivered = wire.got(False, Arrived)[0], wire.got(True, Delivered)[0]
    check(arrived, delivered, values)
    data = sum(len(burst.frames) for client, burst in wire.sent if client and burst.frames[0, 1] == Kind.DATA)
    assert 61 <= data < 122
    assert delivered.missing.sum() >= 122 - data


def test_several_transfers_follow_one_another_and_repairs_go_first() -> None:
    wire = opened(Wire(LtpSettings(redundancy=False), drop=losing(0.1)))
    sent = [start(wire) for _ in range(20)]
    wire.run(lambda: both_done(wire, 20))
    arrived = sorted(wire.got(False, Arrived), key=lambda each: each.transfer)
    delivered = wire.got(True, Delivered)
    assert [each.transfer for each in delivered] == [each.transfer for each in wire.got(False, Arrived)]
    for values, one in zip(sent, arrived, strict=True):
        check(one, next(each for each in delivered if each.transfer == one.transfer), values)
    begun: list[int] = []
    for client, burst in wire.sent:
        if client and burst.frames[0, 1] == Kind.DATA:
            transfers = set(records_of(burst.frames, SLICE, HEADER.itemsize)["transfer"].tolist())
            assert len(transfers) == 1
            if not transfers & set(begun):
                begun += transfers
    assert begun == list(range(1, 21))
    assert wire.client.status().retransmitted > 0


def test_a_window_of_unclosed_transfers_is_not_passed() -> None:
    wire = opened(Wire())
    wire.drop = lambda client, burst, now: np.full(len(burst.frames), not client)  # the receiver is not heard
    for _ in range(40):
        wire.client.send(wire.now, 2, 0, np.ones(1, dtype=np.float32))
    wire.run(lambda: wire.now > 5.0)
    begun = {
        int(records_of(burst.frames, SLICE, HEADER.itemsize)["transfer"][0])
        for client, burst in wire.sent
        if client and burst.frames[0, 1] == Kind.DATA
    }
    assert begun == set(range(1, 17))
    wire.drop = None
    wire.run(lambda: both_done(wire, 40))


def test_last_values_fill_as_the_sender_knows_them() -> None:
    settings = LtpSettings(fill="last", fill_above=0.0, target_loss=0.0, repair_low=False)
    wire = opened(Wire(settings, drop=losing(0.1)))
    kept = np.zeros(40_000, dtype=np.float32)
    for count in range(1, 5):
        values = start(wire)
        wire.run(lambda count=count: both_done(wire, count))
        arrived, delivered = wire.got(False, Arrived)[-1], wire.got(True, Delivered)[-1]
        missing = np.repeat(delivered.missing, BLOCK)[:40_000]
        if missing.any():
            assert delivered.fill == ("last" if count > 1 else "zero")
        kept = np.where(missing, kept if delivered.fill == "last" else 0, values).astype(np.float32)
        assert arrived.values.tobytes() == kept.tobytes()


# -- what is refused -----------------------------------------------------------------------------------------


def test_an_unknown_chunk_and_one_of_another_length_are_refused_and_nothing_else() -> None:
    wire = opened(Wire())
    wire.client.send(wire.now, 77, 0, some_values(100))
    wire.client.send(wire.now, 1, 0, some_values(5000))
    start(wire, chunk=1)
    wire.run(lambda: len(wire.got(True, Delivered)) == 3)
    reasons = [event.reason for event in wire.got(False, Refused)]
    assert "no chunk 77" in reasons[0]
    assert "331 elements" in reasons[1]
    assert [event.missing.all() for event in wire.got(True, Delivered)] == [True, True, False]
    assert [event.transfer for event in wire.got(False, Arrived)] == [3]


def test_a_transfer_that_contradicts_itself_is_refused_and_nothing_else() -> None:
    wire = opened(Wire())

    def forge(client: bool, burst: Burst, now: float) -> np.ndarray:
        if burst.frames[0, 1] == Kind.DATA:
            slices = records_of(burst.frames, SLICE, HEADER.itemsize)
            slices["iteration"][(slices["transfer"] == 1) & (slices["index"] == 50)] += 1
        return np.zeros(len(burst.frames), dtype=bool)

    send = wire._send
    wire._send = lambda client, burst: (forge(client, burst, 0.0), send(client, burst))[1]  # type: ignore
    start(wire)
    second = start(wire)
    wire.run(lambda: len(wire.got(True, Delivered)) == 2)
    assert "iteration" in wire.got(False, Refused)[0].reason
    assert wire.got(True, Delivered)[0].missing.all()
    check(wire.got(False, Arrived)[0], wire.got(True, Delivered)[1], second)


# -- keys and addresses --------------------------------------------------------------------------------------


def test_keys_change_one_phase_at_a_time() -> None:
    wire = opened(Wire(stripes=2))
    for count in range(1, 6):
        wire.client.change_keys()
        wire.client.change_keys()  # the present ones are not yet acknowledged: nothing more happens
        values = start(wire)
        wire.run(lambda count=count: both_done(wire, count))
        check(wire.got(False, Arrived)[-1], wire.got(True, Delivered)[-1], values)
    for stripe in range(2):
        phases = [burst.phase for client, burst in wire.sent if client and burst.stripe == stripe]
        assert all(0 <= after - before <= 1 for before, after in pairwise(phases))
        assert phases[-1] == 5
        headers = [burst.frames[0, 2] for client, burst in wire.sent if client and burst.stripe == stripe]
        assert phases == headers


def test_keys_change_by_themselves_after_so_many_datagrams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flights, "PHASE_DATAGRAMS", 100)
    monkeypatch.setattr(flights, "PHASE_LARGE_DATAGRAMS", 100)
    wire = opened(Wire())
    for count in range(1, 4):
        values = start(wire)  # 122 blocks
        wire.run(lambda count=count: both_done(wire, count))
        check(wire.got(False, Arrived)[-1], wire.got(True, Delivered)[-1], values)
    phases = [burst.phase for client, burst in wire.sent if client]
    assert 2 <= max(phases) <= 4
    assert all(0 <= after - before <= 1 for before, after in pairwise(phases))


def test_a_phase_waits_until_the_one_before_was_seen() -> None:
    wire = opened(Wire())
    wire.drop = lambda client, burst, now: np.full(len(burst.frames), client)
    for _ in range(5):
        wire.client.change_keys()
        start(wire)
        wire.run(lambda until=wire.now + 0.5: wire.now > until)
    assert {burst.phase for client, burst in wire.sent if client} == {0, 1}


def test_keys_change_where_an_end_sends_nothing_but_acks() -> None:
    wire = opened(Wire(stripes=2))
    for count in range(1, 4):
        wire.server.change_keys()
        values = start(wire, reliable=True)
        wire.run(lambda count=count: both_done(wire, count))
        wire.run(lambda until=wire.now + 0.1: wire.now > until)
        check(wire.got(False, Arrived)[-1], wire.got(True, Delivered)[-1], values)
    for stripe in range(2):
        phases = [burst.phase for client, burst in wire.sent if not client and burst.stripe == stripe]
        assert all(0 <= after - before <= 1 for before, after in pairwise(phases))
        assert phases[-1] == 3


def test_an_ack_that_its_path_may_not_take_yet_is_not_lost() -> None:
    wire = Wire()
    wire.drop = lambda client, burst, now: np.full(len(burst.frames), not client)
    wire.run(lambda: bool(wire.got(False, Opened)))
    paths = wire.server._ways.paths[0]
    paths.handle_sent(paths.active, paths.allowance(paths.active) - 40)
    wire.server._arrivals[0].handle_numbers(wire.now, np.array([7]), asks=True, longest_delay=0.0)
    assert wire.server.poll_datagrams(wire.now) is None
    assert wire.server.poll_deadline() > wire.now  # and it does not turn round and round
    paths.handle_received(wire.now, paths.active, 60, 8)
    assert wire.server.poll_deadline() <= wire.now
    burst = wire.server.poll_datagrams(wire.now)
    assert burst is not None
    assert burst.frames[0, 1] == Kind.ACK


def test_another_path_has_the_target_begin_anew() -> None:
    wire = opened(Wire())
    start(wire, client=False)
    wire.run(lambda: both_done(wire, 1, client=False))
    assert "path has changed" not in wire.server.status().target_reason
    wire.from_path = ("client", 1)
    wire.run(lambda: len(wire.got(False, Migrated)) == 2)
    assert "the path has changed: the other end has another address" in wire.server.status().target_reason
    assert "path has changed" not in wire.client.status().target_reason


def test_data_moves_to_the_address_that_answers() -> None:
    wire = opened(Wire())
    first = start(wire, client=False)
    wire.run(lambda: both_done(wire, 1, client=False))
    wire.from_path = ("client", 1)
    wire.run(lambda: wire.now > 3.0)
    start(wire)
    second = start(wire, client=False)
    wire.run(lambda: both_done(wire, 2, client=False) and both_done(wire, 1))
    for values, one in zip((first, second), wire.got(True, Arrived), strict=True):
        present = np.repeat(one.present, one.block)[: len(values)]
        assert (one.values[present] == values[present]).all()
    assert [event.path for event in wire.got(False, Migrated)] == [("client", 0), ("client", 1)]
    last = [burst for client, burst in wire.sent if not client][-1]
    assert last.path == ("client", 1)


def test_an_address_that_does_not_answer_gets_three_times_its_bytes() -> None:
    wire = Wire()
    wire.server.send(0.0, 0, 0, some_values())
    for _ in range(200):
        wire.server.grant(1e6, 1.0)
    blocked = False

    def drop(client: bool, burst: Burst, now: float) -> np.ndarray:
        return np.full(len(burst.frames), client and blocked)

    wire.drop = drop
    wire.run(lambda: any(client for client, _ in wire.sent))
    blocked = True
    received = sum(burst.frames.size for client, burst in wire.sent if client)
    wire.run(lambda: wire.now > 5.0)
    sent = sum(burst.frames.size for client, burst in wire.sent if not client)
    assert received < sent <= 3 * received


# -- control messages ----------------------------------------------------------------------------------------


def test_who_was_granted_a_share_once_asks_while_there_is_more_than_a_burst_and_says_when_not() -> None:
    wire = opened(Wire())
    start(wire)
    wire.run(lambda: both_done(wire, 1))
    assert not wire.got(False, Asked)  # nobody has said that the other end shares out its link
    wire.server.grant(2e5, 0.1, kept=False)
    wire.run(lambda: wire.client.control.decision.row == "grant")
    start(wire, 2)  # one datagram: a burst
    wire.run(lambda: both_done(wire, 2))
    assert not wire.got(False, Asked)
    wire.server.grant(2e5, 3600.0)
    wire.run(lambda: wire.client.control.rate <= 2e5)
    begun = wire.now
    start(wire, reliable=True)  # 0.9 s by the grant
    wire.run(lambda: both_done(wire, 3))
    asked = [event.size for event in wire.got(False, Asked)]
    assert sorted(asked, reverse=True) == asked
    assert asked[0] > 160_000
    assert asked.count(0) == 1
    assert 2 <= len(asked) - 1 <= 2 + (wire.now - begun) / 0.5


def test_a_share_of_the_link_is_asked_for_and_granted() -> None:
    wire = opened(Wire())
    wire.client.ask(20_000_000)
    wire.run(lambda: bool(wire.got(False, Asked)))
    assert wire.got(False, Asked)[0].size == 20_000_000
    wire.server.grant(5e5, 3600.0)
    start(wire, reliable=True)
    begun = wire.now
    wire.run(lambda: both_done(wire, 1))
    assert wire.client.status().rate <= 5e5
    assert wire.now - begun > 0.25  # 160 kB


def test_the_last_word_that_was_acknowledged_and_not_understood_is_said_again() -> None:
    wire = opened(Wire())
    send, spoilt = wire._send, []

    def spoil(client: bool, burst: Burst) -> None:
        if b"Closed" in burst.frames.tobytes() and not spoilt:
            spoilt.append(burst)
            burst.frames[0, HEADER.itemsize] = 0xC1  # of no message in MessagePack
        send(client, burst)

    wire._send = spoil  # type: ignore[method-assign]
    values = [start(wire), start(wire)]
    begun = wire.now
    wire.run(lambda: both_done(wire, 2))
    assert spoilt
    assert 1.0 < wire.now - begun < 1.5  # by a reminder
    for sent, arrived, delivered in zip(
        values, wire.got(False, Arrived), wire.got(True, Delivered), strict=True
    ):
        check(arrived, delivered, sent)


def words_on(wire: Wire, transfer: int, spoils: bool) -> None:
    """The server's Closed of this transfer is lost, or spoilt before it is sealed; not one that says that the
    transfer was dropped."""
    send, lose = wire._send, without_the_word_on(transfer)

    def intercept(client: bool, burst: Burst) -> None:
        hits = bool(lose(client, burst, wire.now)[0]) and b"dropped" not in burst.frames.tobytes()
        if hits and spoils:
            burst.frames[0, HEADER.itemsize] = 0xC1
        elif hits:
            wire.drop = lambda client, burst, now: np.ones(len(burst.frames), dtype=bool)
        send(client, burst)
        wire.drop = None

    wire._send = intercept  # type: ignore[method-assign]


@pytest.mark.parametrize("spoils", [False, True])
def test_a_transfer_whose_word_was_forgotten_is_not_told_as_lost(
    spoils: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arriving, "MOST_TOLD", 8)
    wire = opened(Wire())
    send = wire._send
    words_on(wire, 1, spoils)
    sent = [start(wire, 1) for _ in range(20)]
    wire.run(lambda: len(wire.got(False, Arrived)) == 20)
    wire.run(lambda until=wire.now + 5.0: wire.now > until)  # some reminders
    assert 1 not in [each.transfer for each in wire.got(True, Delivered)]
    wire._send = send  # type: ignore[method-assign]
    if spoils:  # it was acknowledged, so it does not come again
        wire.client.close(wire.now, "over")
        wire.pump()
        assert wire.got(True, Lost)[0].sent == (1,)
    wire.run(lambda: len(wire.got(True, Delivered)) == (19 if spoils else 20), limit=wire.now + 5.0)
    arrived = {each.transfer: each for each in wire.got(False, Arrived)}
    for delivered in wire.got(True, Delivered):
        check(arrived[delivered.transfer], delivered, sent[delivered.transfer - 1])


def test_a_message_is_handled_once_and_the_memory_of_it_is_bounded() -> None:
    handled = Handled()
    assert handled.fresh(0)
    assert not handled.fresh(0)
    assert handled.fresh(2)
    assert handled.fresh(1)
    assert not any(handled.fresh(each) for each in range(3))
    for each in range(10, 50_000, 2):  # what is sent once may never come
        assert handled.fresh(each)
    assert len(handled._past) <= 4096
    assert not handled.fresh(49_998)


def test_a_session_that_is_over_keeps_nothing() -> None:
    wire = opened(Wire())
    start(wire)
    start(wire, client=False)
    wire.run(lambda: wire.now > 0.1)
    wire.client.close(wire.now, "over")
    wire.run(lambda: bool(wire.got(False, Lost)))
    for end in (wire.client, wire.server):
        assert not end._sender._transfers
        assert not end._receiver._open
        assert end.poll_deadline() == math.inf or end.poll_datagrams(wire.now) is not None


def test_a_message_that_is_lost_goes_again_within_a_few_round_trips() -> None:
    lost: list[float] = []

    def drop(client: bool, burst: Burst, now: float) -> np.ndarray:
        first = b"Closed" in burst.frames.tobytes() and not lost
        lost.extend([now] * first)
        return np.full(len(burst.frames), first)

    wire = opened(Wire())
    wire.drop = drop
    begun = wire.now
    start(wire)
    wire.run(lambda: both_done(wire, 1))
    assert lost
    assert wire.now - begun < 0.5


def test_the_end_of_a_transfer_is_acknowledged_at_once() -> None:
    wire = opened(Wire())
    start(wire, chunk=2)  # one datagram
    wire.run(lambda: bool(wire.got(False, Arrived)))
    at = wire.now
    wire.run(lambda: any(not client and burst.frames[0, 1] == Kind.ACK for client, burst in wire.sent[-2:]))
    assert wire.now == at
