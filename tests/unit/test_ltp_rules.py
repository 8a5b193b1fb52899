"""Rules whose removal no other test of their module sees: each was found by removing it."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from atoll.ltp.filling import LastValues
from atoll.ltp.order import high_indices
from atoll.ltp.rates import PathLoss, decide
from atoll.ltp.receiving import ArrivalRate, Incoming
from atoll.ltp.sending import Outgoing
from atoll.ltp.settings import LtpSettings
from atoll.ltp.target import Target, _fit
from atoll.wire.datagrams import SEAL_BYTES, Datagrams, Kind

RTT = 0.04


# -- the rate table ----------------------------------------------------------------------------------------


def test_loss_above_the_fill_threshold_is_halved_whatever_the_target() -> None:
    """A target above the threshold does not make the row of small losses hold beside that of large ones."""
    row = decide(PathLoss(lost=300, counted=1000, quiet_rounds=0, target=0.5, fill_above=0.03))
    assert row.action == "halved"


def test_of_nothing_nothing_is_lost() -> None:
    assert PathLoss(lost=0, counted=0, quiet_rounds=0, target=0.01, fill_above=0.03).loss == 0.0


# -- early close -------------------------------------------------------------------------------------------


class Stream:
    """A transfer of 400 blocks, 40 of them high, that comes a block each millisecond (10 ms between the high
    ones) but for those that are left out."""

    def __init__(self, settings: LtpSettings = LtpSettings(datagram_bytes=256)) -> None:  # noqa: B008
        values = np.arange(400 * 44, dtype=np.float32)
        high = np.zeros(400, dtype=bool)
        high[9::10] = True
        outgoing = Outgoing(settings, 1, 3, 1, values, high, False)
        taken = outgoing.take(0.0, 400)
        assert taken is not None
        frames = np.zeros((400, outgoing.size), dtype=np.uint8)
        outgoing.bodies.write(*taken, frames)
        self.high = high_indices(400, 40)
        self.batch = Datagrams(Kind.DATA, frames[:, :-SEAL_BYTES])
        self.incoming = Incoming(
            settings, self.batch.slices[0], self.batch.elements.shape[1], None, 2**30, 0.0
        )
        self.rates = ArrivalRate()

    def come(self, start: int, stop: int, left_out: tuple[int, ...] = ()) -> list[str]:
        """What is said after each of these blocks."""
        said = []
        for index in range(start, stop):
            if index not in left_out:
                self.take(index, index * 0.001)
            said.append(self.judge(index * 0.001))
        return said

    def take(self, index: int, now: float) -> None:
        one = Datagrams(Kind.DATA, self.batch.frames[index : index + 1])
        self.incoming.handle_datagrams(now, one, Counter())
        self.rates.handle_blocks(now, 1, SHORT)

    def judge(self, now: float) -> str:
        return self.incoming.poll_verdict(now, 3.0, self.rates, SHORT, 0.001).name


SHORT = 0.01  # a round trip: a Need comes two of them, and what arrivals vary by, after a block was passed


def test_a_need_is_said_while_later_blocks_come_and_asks_only_for_what_was_passed() -> None:
    """Neither the end of the transfer is waited for, nor does each datagram begin the wait anew."""
    stream = Stream()
    first, second = int(stream.high[3]), int(stream.high[9])
    said = stream.come(0, first + 60, (first, second))
    assert "need" in said[: first + 50]
    asked = stream.incoming.poll_need((first + 60) * 0.001, SHORT, 0.001)
    assert np.flatnonzero(asked).tolist() == [first]


def test_what_is_passed_later_is_watched_anew() -> None:
    stream = Stream()
    first, second = int(stream.high[3]), int(stream.high[12])
    stream.come(0, first + 10, (first,))
    stream.take(first, (first + 10) * 0.001)
    assert "need" not in stream.come(first + 10, second + 5, (second,))
    assert "need" in stream.come(second + 5, second + 60)


def test_who_varies_more_is_waited_for_longer() -> None:
    """Before a block that was passed by is asked for."""
    steady, varying = Stream(), Stream()
    for stream in (steady, varying):
        stream.come(0, 20, (int(stream.high[0]),))
    varying.rates.gap_deviation = 0.05
    for stream in (steady, varying):
        stream.incoming._watched = None  # the wait begins here
        stream.incoming._need_at = np.inf
        stream.judge(0.02)
    assert varying.incoming.deadline - steady.incoming.deadline == pytest.approx(0.2, abs=0.01)


def test_usable_is_said_to_be_when_it_is() -> None:
    """And not when the high blocks are whole: low ones count too."""
    stream = Stream()
    late = tuple(index for index in range(100, 130) if index not in set(stream.high.tolist()))
    stream.come(0, 400, late)
    for index in late:
        stream.take(index, 0.5)
    assert stream.judge(0.5) == "complete"
    assert stream.incoming.finish(0.5, None).usable_after == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("srtt", "gap", "counts"), [(0.001, 0.05, True), (1.0, 2.0, True), (0.001, 0.2, False)]
)
def test_a_pause_is_one_by_the_longer_of_round_trip_and_span(srtt: float, gap: float, counts: bool) -> None:
    rates = ArrivalRate()
    for turn in range(3):
        rates.handle_blocks(turn * gap, 10, srtt)
    assert (rates.rate < np.inf) == counts


@pytest.mark.parametrize(("elements", "fill"), [(400 * 44, "last"), (400 * 44 - 1, "zero"), (0, "zero")])
def test_last_values_fill_only_a_chunk_of_the_same_length(elements: int, fill: str) -> None:
    stream = Stream(LtpSettings(datagram_bytes=256, fill="last"))
    stream.come(0, 400, tuple(set(range(200)) - set(stream.high.tolist())))
    assert stream.judge(9.0) == "deadline"
    last = np.full(elements, 7, np.float32) if elements else None
    arrived = stream.incoming.finish(9.0, last)
    assert arrived.fill == fill
    lost = np.repeat(~arrived.present, arrived.block)
    assert (arrived.values[lost] == (7 if fill == "last" else 0)).all()


# -- filling -----------------------------------------------------------------------------------------------


def test_last_values_of_another_length_are_forgotten() -> None:
    last = LastValues()
    last.keep(0, np.ones(6, np.float32), np.ones(3, bool), 2)
    last.keep(0, np.full(4, 5, np.float32), np.array([True, False]), 2)
    assert last.of(0) is not None
    np.testing.assert_array_equal(last.of(0), [5, 5, 0, 0])


# -- the target's safe value -------------------------------------------------------------------------------


def observed(losses: np.ndarray, throughput: np.ndarray, delay: np.ndarray) -> Target:
    target = Target(0.01, 0.03)
    for loss, rate, late in zip(losses, throughput, delay, strict=True):
        target.handle_observation(float(loss), float(rate), float(late), RTT)
    return target


SPREAD = np.random.default_rng(2).uniform(0.0, 0.03, 64)


@pytest.mark.parametrize("which", ["throughput", "delay"])
def test_a_fit_that_is_not_positive_leaves_the_safe_value(which: str) -> None:
    """What falls to nothing early is below nothing in the middle of the parabola through it."""
    falls, flat = np.exp(-400 * SPREAD), np.ones(len(SPREAD))
    target = observed(SPREAD, 1e8 * (falls if which == "throughput" else flat),
                      RTT * (falls if which == "delay" else flat))  # fmt: skip
    assert target.choice.value == 0.01
    assert "not positive" in target.choice.reason


def test_two_rates_of_loss_alone_can_be_fitted() -> None:
    """A parabola through two points is none: the ridge keeps its coefficients small, the line is taken."""
    losses = np.tile([0.0, 0.02], 32)
    target = observed(losses, 1e8 * (1 + 10 * losses), np.full(64, RTT))
    assert target.choice.fitted
    assert target.choice.value == pytest.approx(0.02, abs=1e-4)


def test_a_line_is_taken_where_a_parabola_explains_no_more() -> None:
    """With noise on a line a parabola bends, and its top would be inside of the range."""
    x, taken = SPREAD / 0.03, {"line": 0, "parabola": 0}
    for seed in range(20):
        noise = 0.02 * np.random.default_rng(seed).standard_normal(len(x))
        taken["line"] += len(_fit(x, 1 + 0.2 * x + noise).coefficients) == 2
        taken["parabola"] += len(_fit(x, 1 + 0.2 * x - 0.3 * x * x + noise).coefficients) == 3
    assert taken["line"] >= 15
    assert taken["parabola"] == 20


def test_a_path_that_changes_by_small_steps_is_another_in_the_end() -> None:
    """The least round trip of all is what the next one is compared with, not the one before."""
    target = observed(SPREAD, 1e8 * (1 + 30 * SPREAD), np.full(64, RTT))
    assert target.choice.fitted
    for step in (1.1, 1.2, 1.3):
        target.handle_observation(0.01, 1e8, RTT, RTT * step)
    assert "the path has changed" in target.choice.reason


@pytest.mark.parametrize(
    ("loss", "throughput", "delay"),
    [(-0.01, 1e8, RTT), (1.01, 1e8, RTT), (0.01, -1.0, RTT), (0.01, 1e8, 0.0)],
)
def test_each_sort_of_nonsense_is_not_taken(loss: float, throughput: float, delay: float) -> None:
    target = Target(0.01, 0.03)
    for _ in range(100):
        target.handle_observation(loss, throughput, delay, RTT)
    assert target.choice.reason == "the safe value: nothing was seen yet"
