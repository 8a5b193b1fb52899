"""What a trial of a ring's order costs, by a clock of its own: sums take what their links make them take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from atoll.rings.order import MARGIN, LinkSpeed, Order, Topology
from atoll.train.api.place import Place
from atoll.train.group.ordertrial import OrderTrial, TrialResult
from atoll.train.group.ringpair import RingPair
from atoll.train.group.solo import SoloChannel
from atoll.train.group.sumtimer import SumTimer

MILLISECOND, MBIT = 1e-3, 1e6 / 8


class Lab:
    """Rings over two sites, whose members share the line between them; `now` is its clock.

    A sum takes 2 (n - 1) steps, each of which waits for its latest link and for its fullest line. A sum over
    two rings sends half as much over each line, in each direction.
    """

    def __init__(self, sites: str, latency: float, bandwidth: float) -> None:
        self.sites, self.latency, self.bandwidth = sites, latency, bandwidth
        self.now, self.connected = 0.0, 0

    def seconds(self, order: Order, size: float) -> float:
        at = [self.sites[rank] for rank in order]
        crossings = sum(one < other for one, other in zip(at, at[1:] + at[:1], strict=True))
        step = self.latency + crossings * size / len(order) / self.bandwidth
        return 2 * (len(order) - 1) * step

    def sum(self, order: Order, tensor: Tensor) -> Any:
        size = tensor.numel() * tensor.element_size()
        return lambda: self._pass(self.seconds(order, size))

    def _pass(self, seconds: float) -> None:
        self.now += seconds

    def connect(self, _purpose: str, order: Order) -> Any:
        self.now += 4 * self.latency
        self.connected += 1
        return Ring(self, order)

    def trial(self, margin: float = MARGIN, before: TrialResult | None = None) -> tuple[OrderTrial, Any]:
        """The trial that is over, and what it returned."""
        figures = {
            (one, other): LinkSpeed(self.bandwidth, self.latency)
            if self.sites[one] != self.sites[other]
            else LinkSpeed(100 * self.bandwidth, self.latency / 100)
            for other in range(len(self.sites))
            for one in range(other)
        }
        topology = Topology(range(len(self.sites)), figures)
        natural: Any = Ring(self, topology.natural)
        timer = SumTimer(SoloChannel(Place(0, 1), 1.0), lambda: self.now)
        made = OrderTrial(
            lambda rank: rank,
            timer,
            self.connect,
            natural,
            [natural],
            topology,
            list(self.sites),
            margin,
            TrialResult() if before is None else before,
        )
        return made, made.open()


class Ring:
    """A channel of the lab's, in an order."""

    def __init__(self, lab: Lab, order: Order) -> None:
        self.lab, self.order = lab, order

    def sum(self, tensor: Tensor) -> Any:
        return self.lab.sum(self.order, tensor)

    def wait(self, work: Callable[[], None], _what: str) -> float:
        work()
        return 0.0

    def close(self) -> None: ...


@pytest.fixture(autouse=True)
def _pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rings at once take what the slower one takes for its part."""

    def sum_both(pair: Any, tensor: Tensor) -> Any:
        lab, size = pair.first.lab, tensor.numel() * tensor.element_size()
        parts = (pair.share * size, (1 - pair.share) * size)
        rings = zip((pair.first, pair.second), parts, strict=True)
        took = max(lab.seconds(ring.order, part) for ring, part in rings)
        return lambda: lab._pass(took)

    monkeypatch.setattr(RingPair, "sum", sum_both)


@pytest.mark.parametrize("bandwidth", [1, 30, 300])
def test_where_bytes_set_the_pace_the_better_order_wins(bandwidth: float) -> None:
    lab = Lab("ababab", MILLISECOND, bandwidth * MBIT)
    trial, sums = lab.trial()
    assert isinstance(sums, RingPair), "two rings share the line's two directions"
    order: Order = sums.first.order  # type: ignore[attr-defined]
    at = "".join(lab.sites[rank] for rank in order)
    assert (at + at[0]).count("ab") == 1, trial.choice
    assert trial.choice.endswith(", and 50 % of the bytes the other way round")
    assert trial.found.gain > 2
    assert trial.found.share == pytest.approx(0.5)


def test_where_latency_sets_the_pace_nothing_is_connected_and_it_is_said() -> None:
    lab = Lab("ababab", 40 * MILLISECOND, 10_000 * MBIT)
    trial, sums = lab.trial()
    assert trial.choice == "natural: 0-1-2-3-4-5"
    assert "times as fast at most, since latency stays: at least 1.1 is asked for" in trial.reasons[0]
    assert (sums.order, lab.connected, trial.found.share) == ((0, 1, 2, 3, 4, 5), 0, 1.0)
    again, _ = Lab("ababab", 40 * MILLISECOND, 10_000 * MBIT).trial(before=trial.found)
    assert "in the trial before" in again.reasons[0]


@pytest.mark.parametrize(("bandwidth", "most"), [(10_000, 3.0), (100, 9.0), (30, 15.0)])
def test_over_a_late_line_the_trial_takes_a_few_seconds(bandwidth: float, most: float) -> None:
    """Eight members, 40 ms: a sum waits 0.56 s for its links alone."""
    lab = Lab("abababab", 40 * MILLISECOND, bandwidth * MBIT)
    lab.trial()
    assert lab.now < most


@pytest.mark.parametrize("latency", [0.1, 5, 40])
@pytest.mark.parametrize("bandwidth", [1, 10, 100, 1000, 10_000])
@pytest.mark.parametrize("sites", ["abab", "aabbab", "abababab"])
def test_what_the_bound_leaves_out_would_not_have_won(sites: str, latency: float, bandwidth: float) -> None:
    """The trial decides as one that tries everything with one large sum over each ring."""
    lab = Lab(sites, latency * MILLISECOND, bandwidth * MBIT)
    trial, sums = lab.trial()
    natural = tuple(range(len(sites)))
    first = sums.first if isinstance(sums, RingPair) else sums
    best = tuple(sorted(natural, key=lambda rank: (sites[rank] != sites[0], rank)))
    size = trial._timer.size
    if first.order == natural:
        assert lab.seconds(natural, size) < MARGIN * lab.seconds(best, size) * 1.001
    else:
        assert lab.seconds(natural, size) >= MARGIN * lab.seconds(first.order, size)
    half = lab.seconds(first.order, size / 2)
    assert isinstance(sums, RingPair) == (lab.seconds(first.order, size) >= MARGIN * half)


def test_the_shortest_sum_that_tells_anything_is_short_where_bytes_take_long() -> None:
    lab = Lab("abab", MILLISECOND, 0.1 * MBIT)
    timer = SumTimer(SoloChannel(Place(0, 1), 1.0), lambda: lab.now)
    ring: Any = Ring(lab, (0, 1, 2, 3))
    timer.fit(ring)
    assert timer.size == 2**16
    assert timer.most(ring, MARGIN, 2.0) > 1.9
