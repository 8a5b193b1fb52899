"""Which links are measured when, under a virtual clock: each pair once, in time, whatever fails."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import UserError
from atoll.groups.probing import LATE, LinkMeasurement, LinkProbe, Measure, pairs_in_rounds

LINK = LinkMeasurement(1e6, 0.01)


@given(st.integers(0, 40))
def test_each_pair_comes_once_and_rounds_are_whole(count: int) -> None:
    workers = [3 * number + 1 for number in range(count)]
    pairs = pairs_in_rounds(workers)
    assert sorted(pairs) == sorted(combinations(workers, 2))
    size = count // 2
    for start in range(0, len(pairs), size or 1):
        met = [worker for pair in pairs[start : start + size] for worker in pair]
        assert len(set(met)) == 2 * size


@given(st.integers(3, 40))
def test_two_rounds_join_all_workers(count: int) -> None:
    probe = LinkProbe(0.0, range(count), 100.0)
    for first, second in pairs_in_rounds(range(count))[: 2 * -(-count // 2)]:
        probe.handle_measured(0.0, first, second, LINK)
    found = probe.found()
    assert (found.links.workers, found.without) == (tuple(range(count)), ())


@dataclass
class World:
    """Pairs that take as long as is drawn, up to for ever, and end well or not."""

    probe: LinkProbe
    takes: list[float]  # the n-th pair's seconds, as parts of what it is given
    fails: set[int]
    leaves: dict[int, int]  # before the n-th pair begins, this worker leaves
    now: float = 0.0
    asked: list[Measure] = field(default_factory=list)
    going: list[tuple[float, Measure, bool]] = field(default_factory=list)  # (when it ends, what, well)
    gone: set[int] = field(default_factory=set)

    def run(self) -> None:
        while not self.probe.over:
            for ask in self.probe.poll(self.now):
                if {ask.first, ask.second} & self.gone:  # by one that was to begin with it
                    continue
                number = len(self.asked)
                self.asked.append(ask)
                busy = {w for _, m, _ in self.going for w in (m.first, m.second)}
                assert busy.isdisjoint({ask.first, ask.second}), "a worker measures one link at a time"
                takes = self.takes[number % len(self.takes)] * ask.seconds
                self.going.append((self.now + takes, ask, number not in self.fails))
                if (worker := self.leaves.get(number)) is not None:
                    self.gone.add(worker)
                    self.probe.handle_left(self.now, worker)
                    self.going = [
                        each for each in self.going if worker not in (each[1].first, each[1].second)
                    ]
            deadline = self.probe.next_deadline()
            if deadline is None:
                return
            end = min([deadline, *(at for at, _, _ in self.going)])
            assert end >= self.now
            self.now = end
            for one in [each for each in self.going if each[0] <= end]:
                self._finish(one)
            # Whom the probe has given up does not hold up the others.
            self.going = [each for each in self.going if each[0] <= self.now + (LATE - 1) * each[1].seconds]

    def _finish(self, one: tuple[float, Measure, bool]) -> None:
        self.going.remove(one)
        _, ask, well = one
        if {ask.first, ask.second} & self.gone:
            return
        if well:
            link = LinkMeasurement(
                1e6 * (1 + ask.first + 2 * ask.second), 1e-3 * (1 + ask.first * ask.second)
            )
            self.probe.handle_measured(self.now, ask.first, ask.second, link)
        else:
            self.probe.handle_failed(self.now, ask.first, ask.second)


@given(
    count=st.integers(0, 12),
    seconds=st.floats(0.01, 100.0),
    together=st.integers(1, 4),
    takes=st.lists(st.floats(0.0, 1.9) | st.just(math.inf), min_size=1, max_size=20),
    fails=st.sets(st.integers(0, 60), max_size=20),
    leaves=st.dictionaries(st.integers(0, 30), st.integers(0, 11), max_size=4),
)
def test_it_ends_in_time_whatever_happens(
    count: int,
    seconds: float,
    together: int,
    takes: list[float],
    fails: set[int],
    leaves: dict[int, int],
) -> None:
    world = World(LinkProbe(0.0, range(count), seconds, together=together), takes, fails, leaves)
    world.run()
    assert world.now <= seconds * (1 + 1e-9)
    pairs = [(ask.first, ask.second) for ask in world.asked]
    assert len(set(pairs)) == len(pairs)
    found = world.probe.found()
    assert world.gone.isdisjoint(found.links.workers)
    assert sorted([*found.links.workers, *found.without]) == sorted(set(range(count)) - world.gone)
    assert np.array_equal(found.links.bandwidth, found.links.bandwidth.T)
    assert np.array_equal(found.links.latency, found.links.latency.T)


@given(st.integers(2, 12), st.floats(0.1, 100.0), st.integers(1, 4))
def test_where_all_keep_to_their_time_all_are_measured(count: int, seconds: float, together: int) -> None:
    world = World(LinkProbe(0.0, range(count), seconds, together=together), [1.0], set(), {})
    world.run()
    found = world.probe.found()
    if together == 1:
        assert len(world.asked) == count * (count - 1) // 2
        assert found.reason.endswith("links measured")
    for ask in world.asked:
        row, column = (found.links.workers.index(worker) for worker in (ask.first, ask.second))
        assert found.links.bandwidth[row, column] == 1e6 * (1 + ask.first + 2 * ask.second)
        assert found.links.latency[row, column] == pytest.approx(1e-3 * (1 + ask.first * ask.second))


def test_who_is_quick_leaves_more_to_the_others() -> None:
    probe = LinkProbe(0.0, range(4), 6.0, most=3.0)
    (ask,) = probe.poll(0.0)
    assert ask == Measure(0, 3, 1.0)
    probe.handle_measured(0.0, 0, 3, LINK)
    (ask,) = probe.poll(0.0)
    assert ask.seconds == 6.0 / 5
    probe.handle_failed(5.5, ask.first, ask.second)
    (ask,) = probe.poll(5.5)
    assert ask.seconds == 0.5 / 4


def test_what_was_not_measured_follows_from_the_best_ways() -> None:
    probe = LinkProbe(0.0, [0, 1, 2, 7], 10.0, name=lambda worker: f"w{worker}")
    probe.handle_measured(0.0, 1, 0, LinkMeasurement(5e6, 0.01))
    probe.handle_measured(0.0, 1, 2, LinkMeasurement(2e6, 0.03))
    found = probe.found()
    assert (found.links.workers, found.without) == ((0, 1, 2), (7,))
    assert found.links.bandwidth[0].tolist() == [math.inf, 5e6, 2e6]
    assert found.links.latency[0].tolist() == [0.0, 0.01, 0.04]
    assert found.reason == (
        "2 of 6 links measured; the others estimated from these; nothing is known of the links to w7"
    )


def test_a_link_is_what_was_measured_though_a_way_round_is_better() -> None:
    probe = LinkProbe(0.0, range(3), 10.0)
    probe.handle_measured(0.0, 0, 1, LinkMeasurement(9e6, 0.01))
    probe.handle_measured(0.0, 1, 2, LinkMeasurement(9e6, 0.01))
    probe.handle_measured(0.0, 0, 2, LinkMeasurement(1e6, 0.5))
    links = probe.found().links
    assert (links.bandwidth[2, 0], links.latency[2, 0]) == (1e6, 0.5)


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(UserError, match="above 0"):
        LinkProbe(0.0, [0, 1], 0.0)
    with pytest.raises(UserError, match="at least 1"):
        LinkProbe(0.0, [0, 1], 1.0, together=0)
    probe = LinkProbe(0.0, [0, 1], 1.0)
    with pytest.raises(UserError, match="does not measure their link"):
        probe.handle_measured(0.0, 0, 2, LINK)
    with pytest.raises(UserError, match="bytes/s must be above 0"):
        probe.handle_measured(0.0, 0, 1, LinkMeasurement(math.nan, 0.01))
