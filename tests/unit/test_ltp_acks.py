"""What is acknowledged and when, at the receiver; what is acknowledged and what is lost, at the sender."""

from __future__ import annotations

import math

import numpy as np
import pytest

from atoll.ltp.acks import ACK_EVERY, Arrivals
from atoll.ltp.flights import KeyPhase
from atoll.ltp.metering import Meter
from atoll.ltp.sent import ACK, CONTROL, Mark, SentRecords, SettledDatagrams
from atoll.wire.datagrams import Acknowledgement

NO_MARK = Mark(0, -1.0, 0.0, 0, False)


def numbers(*given: int) -> np.ndarray:
    return np.array(given, dtype=np.int64)


def take(arrivals: Arrivals, now: float, *given: int, asks: bool = True) -> None:
    arrivals.handle_numbers(now, numbers(*given), asks=asks, longest_delay=0.005)


# -- at the receiver -----------------------------------------------------------------------------------------


def test_what_comes_in_order_waits_for_more() -> None:
    arrivals = Arrivals(8000)
    take(arrivals, 1.0, 0, 1, 2)
    take(arrivals, 1.002, 3)
    assert arrivals.due == pytest.approx(1.005)
    assert arrivals.poll_ack(1.004, 0, 9) is None
    ack = arrivals.poll_ack(1.005, 0, 99)
    assert ack is not None
    assert (ack.largest, ack.base, ack.delivered, ack.received.tolist()) == (3, 0, 99, [True] * 4)
    assert ack.delay == pytest.approx(0.003)
    assert arrivals.due == math.inf


def test_so_many_are_acknowledged_at_once() -> None:
    arrivals = Arrivals(8000)
    take(arrivals, 1.0, *range(ACK_EVERY - 1))
    assert arrivals.due > 1.0
    take(arrivals, 1.0, ACK_EVERY - 1)
    assert arrivals.due == 1.0


@pytest.mark.parametrize("given", [(1,), (0, 2), (1, 0)])
def test_a_gap_is_told_at_once(given: tuple[int, ...]) -> None:
    arrivals = Arrivals(8000)
    take(arrivals, 1.0, *given)
    assert arrivals.due == 1.0


def test_acks_alone_ask_for_none_but_are_told() -> None:
    arrivals = Arrivals(8000)
    take(arrivals, 1.0, 0, asks=False)
    assert arrivals.due == math.inf
    take(arrivals, 1.0, 1)
    ack = arrivals.poll_ack(2.0, 0, 0)
    assert ack is not None
    assert ack.received.tolist() == [True, True]


def test_what_was_told_is_told_again_and_what_comes_late_too() -> None:
    arrivals = Arrivals(8000)
    take(arrivals, 1.0, *range(2000))
    assert arrivals.poll_ack(1.0, 0, 0) is not None
    take(arrivals, 1.1, *range(2001, 5000))
    second = arrivals.poll_ack(1.1, 0, 0)
    assert second is not None
    assert second.base == 2001  # all that is untold, however much
    take(arrivals, 1.2, 2000)
    late = arrivals.poll_ack(1.2, 0, 0)
    assert late is not None
    assert late.base == 2000
    assert late.received.all()
    assert arrivals.reorder == pytest.approx(3000)


def test_an_ack_has_a_bound_and_numbers_may_leap() -> None:
    arrivals = Arrivals(800)
    take(arrivals, 1.0, *range(500))
    take(arrivals, 1.0, 2**40)
    ack = arrivals.poll_ack(1.0, 0, 0)
    assert ack is not None
    assert (ack.largest, len(ack.received), ack.received.sum()) == (2**40, 800, 1)
    take(arrivals, 1.1, 3)  # from before the leap: it is too late to tell
    take(arrivals, 1.1, 2**40 + 1)
    ack = arrivals.poll_ack(1.2, 0, 0)
    assert ack is not None
    assert ack.received.sum() == 2


# -- at the sender -------------------------------------------------------------------------------------------


def acked(
    largest: int, base: int, bits: list[bool], arrived: float = 0.0, delivered: int = 0
) -> Acknowledgement:
    return Acknowledgement(
        of=0,
        largest=largest,
        arrived=arrived,
        delay=0.0,
        base=base,
        received=np.array(bits, dtype=bool),
        delivered=delivered,
    )


def sent_some(count: int = 10, size: int = 100) -> SentRecords:
    sent = SentRecords()
    for number in range(count):
        assert sent.add(number * 0.001, 5, numbers(number), size, NO_MARK) == number
    return sent


def test_acknowledged_is_what_the_bits_tell() -> None:
    sent = sent_some()
    told = sent.handle_ack(0.05, acked(3, 0, [True, False, True, True]))
    assert told.acked[5].tolist() == [0, 2, 3]
    assert (told.acked_bytes, sent.in_flight) == (300, 700)
    assert told.rtt == pytest.approx(0.047)
    again = sent.handle_ack(0.06, acked(3, 0, [True, False, True, True]))
    assert not again.acked
    assert again.rtt is None


def test_an_ack_of_what_was_never_sent_says_nothing() -> None:
    sent = sent_some()
    told = sent.handle_ack(0.05, acked(10, 0, [True] * 11))
    assert not told.acked
    assert sent.largest_acked == -1


def test_lost_is_what_later_ones_have_passed() -> None:
    sent = sent_some(20)
    told = sent.handle_ack(0.02, acked(9, 0, [False] + [True] * 9))
    sent.detect(0.02, 10.0, 0.0, 1, told)  # 9 later, where 3 bursts of one datagram each are the threshold
    assert told.lost[5].tolist() == [0]
    assert sent.in_flight == 1000
    assert sent.loss_at == math.inf


def test_lost_is_what_is_overdue_after_a_later_one_came() -> None:
    sent = sent_some(3)
    told = sent.handle_ack(0.041, acked(1, 0, [False, True]))
    sent.detect(0.041, 0.04, 0.004, 50, told)
    assert not told.lost
    assert sent.loss_at == pytest.approx(0.049)
    sent.detect(sent.loss_at, 0.04, 0.004, 50, told)
    assert told.lost[5].tolist() == [0]  # number 2 was sent later than what came: it is not lost
    assert sent.in_flight == 100


def test_what_was_taken_for_lost_wrongly_raises_the_threshold() -> None:
    sent = sent_some(60)
    told = sent.handle_ack(0.06, acked(20, 0, [False] + [True] * 20))
    sent.detect(0.06, 10.0, 0.0, 1, told)
    assert told.lost[5].tolist() == [0]
    told = sent.handle_ack(0.07, acked(30, 0, [True] * 31))
    assert 0 in told.acked[5]
    assert sent.reorder >= 20
    told = sent.handle_ack(0.08, acked(50, 31, [False] + [True] * 19))
    sent.detect(0.08, 10.0, 0.0, 1, told)
    assert not told.lost


def test_runs_of_losses_and_several_transfers_are_told_apart() -> None:
    sent = SentRecords()
    for number in range(10):
        sent.add(0.0, 5 if number < 5 else 6, numbers(number), 100, NO_MARK)
    sent.add(0.0, CONTROL, numbers(77), 100, NO_MARK)
    told = SettledDatagrams()
    sent.largest_acked = 10
    sent.handle_ack(0.1, acked(10, 0, [True, False, False, True, True, False] + [True] * 5))
    sent.detect(0.1, 0.04, 0.0, 1, told)
    assert {transfer: items.tolist() for transfer, items in told.lost.items()} == {5: [1, 2], 6: [5]}
    assert (told.lost_count, told.runs) == (3, 2)


def test_acks_are_not_in_flight() -> None:
    sent = SentRecords()
    sent.add(0.0, ACK, numbers(0), 100, NO_MARK)
    assert sent.in_flight == 0
    assert sent.oldest_in_flight() is None
    told = sent.handle_ack(0.1, acked(0, 0, [True]))
    assert not told.acked


def test_the_records_move_down_and_forget_nothing_that_is_on_its_way() -> None:
    sent = SentRecords()
    sent.add(0.0, 5, numbers(0), 100, NO_MARK)  # its Ack does not come for long
    for start in range(1, 200_001, 100):
        first = sent.add(1.0, 6, np.arange(start, start + 100), 100, NO_MARK)
        sent.handle_ack(1.1, acked(first + 99, first, [True] * 100))
    assert sent.next == 200_001
    assert sent.oldest_in_flight() == (5, 0)
    told = sent.handle_ack(2.0, acked(0, 0, [True]))
    assert told.acked[5].tolist() == [0]
    assert sent.in_flight == 0


# -- what it measures ----------------------------------------------------------------------------------------


def test_the_rate_is_the_receivers_from_the_first_ack_after_idling_on() -> None:
    meter, sent = Meter(), SentRecords()
    for burst in range(10):
        now = burst * 0.01
        sent.add(now, 5, np.arange(burst * 10, burst * 10 + 10), 1000, meter.mark(not sent.in_flight))
    samples = []
    for burst in range(10):  # 10,000 B each 20 ms: half of the rate at which they were sent
        ack = acked(burst * 10 + 9, 0, [True] * (burst * 10 + 10), 100 + burst * 0.02, 10_000 * (burst + 1))
        told = sent.handle_ack(0.1 + burst * 0.02, ack)
        samples.append(meter.handle_ack(ack, told, 0.04)[0])
    assert samples[0] is None  # the first is what the others are measured from
    rates = [sample.delivered / sample.seconds for sample in samples if sample is not None]
    assert len(rates) == 9
    assert rates == pytest.approx([500_000.0] * 9)
    assert not any(sample.app_limited for sample in samples if sample is not None)


def test_what_is_sent_while_there_is_too_little_to_send_is_said_to_be() -> None:
    meter = Meter()
    assert not meter.mark(True).limited
    meter.handle_limited(5000)
    assert meter.mark(False).limited
    ack = acked(0, 0, [True])
    meter.handle_ack(ack, SettledDatagrams(acked_bytes=5000), 0.04)
    assert not meter.mark(False).limited


def test_a_round_ends_when_what_was_sent_after_the_last_one_ended_is_acknowledged() -> None:
    meter, sent = Meter(), SentRecords()
    ended = []
    for number in range(3):
        sent.add(0.0, 5, numbers(number), 1000, meter.mark(not number))
    for number in range(6):
        ack = acked(number, number, [True], number * 1.0, 1000 * number)
        ended.append(meter.handle_ack(ack, sent.handle_ack(number * 1.0, ack), 0.04)[1])
        sent.add(0.0, 5, numbers(number + 3), 1000, meter.mark(False))
    assert ended == [True, False, False, True, False, False]  # three are always on their way


def test_what_the_other_end_says_that_it_had_is_bounded_by_what_it_acknowledged() -> None:
    meter, sent = Meter(), SentRecords()
    for number in range(100):
        sent.add(number * 0.001, 5, numbers(number), 1000, meter.mark(not number))
    ack = acked(0, 0, [True], 100.0, 1000)
    meter.handle_ack(ack, sent.handle_ack(0.1, ack), 0.04)
    ack = acked(99, 0, [True] * 100, 100.1, 2**61)
    sample, _ = meter.handle_ack(ack, sent.handle_ack(0.2, ack), 0.04)
    assert sample is not None
    assert sample.delivered <= 2 * 100_000 + 2**16


# -- keys ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "most"), [(1400, 2**28), (2048, 2**28), (2049, 2**23), (65_000, 2**23)])
def test_a_key_seals_no_more_than_what_keeps_it_safe(size: int, most: int) -> None:
    sent, phase = SentRecords(), KeyPhase(size)
    sent.largest_acked = 0
    sent.next = most - 1
    assert phase.of(sent) == 0
    sent.next = most
    assert phase.of(sent) == 1
    assert phase.of(sent) == 1


def test_a_change_of_keys_asks_for_an_acknowledgement_where_nothing_else_does() -> None:
    sent, phase = SentRecords(), KeyPhase(1400)
    phase.wanted = True
    assert not phase.asks(sent)  # nothing was sealed with it
    sent.add(0.0, ACK, numbers(0), 100, NO_MARK)
    assert phase.asks(sent)
    phase.handle_asked()
    assert not phase.asks(sent)
    assert phase.of(sent) == 0
    sent.add(0.0, 5, numbers(0), 100, NO_MARK)
    sent.handle_ack(0.1, acked(1, 1, [True]))
    assert phase.of(sent) == 1
    assert not phase.asks(sent)
