"""Shares by speed: whole samples, the earliest end, and changes that pay for themselves."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from atoll.groups.shares import ShareChange, ShareChooser, SpeedModel, are_held, even, scaled, share_out

SECONDS = st.floats(0, 5, allow_subnormal=False)
EACH = st.floats(1e-4, 5, allow_subnormal=False)
WORKERS = st.lists(st.tuples(SECONDS, EACH), min_size=1, max_size=12)


def arrays(workers: list[tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
    fixed, each = np.array(workers).T
    return fixed, each


def one_by_one(total: int, fixed: np.ndarray, each: np.ndarray, low: list[int], high: list[int]) -> float:
    """Give each sample to the worker that then finishes first; return when the last one finishes."""
    parts = list(low)
    ends = [(fixed[i] + each[i] * (part + 1), i) for i, part in enumerate(parts) if part < high[i]]
    heapq.heapify(ends)
    for _ in range(total - sum(parts)):
        _, i = heapq.heappop(ends)
        parts[i] += 1
        if parts[i] < high[i]:
            heapq.heappush(ends, (fixed[i] + each[i] * (parts[i] + 1), i))
    return max(fixed + each * np.array(parts))


CAPS = st.lists(st.integers(0, 60), min_size=12, max_size=12)  # of each worker; 0: none


@given(WORKERS, st.integers(1, 300), st.integers(1, 3), st.integers(0, 60) | CAPS)
@example([(0.0, 1.0)] * 7, 19, 3, 3)  # neither six nor seven workers can take them
@example([(0.0, 1.0)] * 3, 5, 2, [1, 1, 0] * 4)  # whose memory holds fewer than the least
def test_no_sample_could_be_elsewhere_and_the_batch_end_earlier(workers, total, least, caps):
    fixed, each = arrays(workers)
    count = len(workers)
    most = caps and max(caps, least) if isinstance(caps, int) else np.array(caps[:count])
    limits = np.minimum(np.where(np.broadcast_to(most, count), most, total), total)
    if limits.sum() < total:
        with pytest.raises(ValueError, match="at most"):
            share_out(total, fixed, each, least=least, most=most)
        return
    parts = share_out(total, fixed, each, least=least, most=most)
    assert parts.sum() == total
    assert (parts <= limits).all()
    if least * count > total:
        return
    low = np.minimum(least, limits)
    assert (parts >= low).all()
    ends = fixed + each * parts
    for i in np.flatnonzero(parts > low):
        for j in np.flatnonzero(parts < limits):
            assert i == j or fixed[j] + each[j] * (parts[j] + 1) >= ends[i] * (1 - 1e-9)
    assert ends.max() == pytest.approx(one_by_one(total, fixed, each, low.tolist(), limits.tolist()))


@given(WORKERS, st.integers(1, 11), st.integers(2, 4))
def test_too_few_samples_go_to_those_that_finish_first(workers, total, least):
    fixed, each = arrays(workers)
    parts = share_out(total, fixed, each, least=least)
    assert parts.sum() == total
    if least * len(workers) <= total:
        return
    taking = parts > 0
    assert taking.sum() <= max(1, total // least)
    assert total < least or parts[taking].min() >= least
    ends = fixed + each * least
    if taking.any() and not taking.all():
        assert ends[taking].max() <= ends[~taking].min()


PARTS = st.lists(st.integers(0, 50), min_size=1, max_size=9).filter(any)


@given(PARTS, st.integers(0, 200))
def test_scaled_parts_keep_the_sum_and_the_proportion(parts, total):
    given = np.array(parts)
    found = scaled(given, total)
    assert found.sum() == total
    assert not found[given == 0].any()
    assert np.abs(found - given * total / given.sum()).max() < 1


@given(PARTS, st.integers(0, 200), st.integers(1, 4))
def test_scaled_parts_are_the_least_or_none(parts, total, least):
    found = scaled(np.array(parts), total, least)
    assert found.sum() == total
    assert (found > 0).sum() <= max(1, total // least)
    assert total < least or all(part == 0 or part >= least for part in found)
    assert not found[np.array(parts) == 0].any()
    if total >= least * np.count_nonzero(parts):
        assert np.count_nonzero(found) == np.count_nonzero(parts)


@given(PARTS, st.integers(0, 200), st.integers(0, 4), st.lists(st.integers(0, 60), min_size=9, max_size=9))
@example([1, 1, 1], 8, 2, [1, 4, 0, *[0] * 6])  # what one may not take goes to all others
def test_scaled_parts_are_within_the_caps_and_else_in_proportion(parts, total, least, caps):
    given, most = np.array(parts), np.array(caps[: len(parts)])
    if not are_held(total, given, most):
        with pytest.raises(ValueError, match="at most"):
            scaled(given, total, least, most)
        return
    found = scaled(given, total, least, most)
    assert found.sum() == total
    assert not found[given == 0].any()
    assert (found <= np.where(most > 0, most, total)).all()
    takers = np.count_nonzero(given)
    if total < least * takers:
        return
    low = np.minimum(np.where(most > 0, most, total), least)
    assert (found >= low)[given > 0].all()
    # Two workers that are neither at the least nor at their cap have parts in proportion.
    free = np.flatnonzero((given > 0) & (found > low) & (found < np.where(most > 0, most, total)))
    for i in free:
        for j in free:
            exact = given[i] * (found[i] + found[j]) / (given[i] + given[j])
            assert abs(found[i] - exact) < 1 + 1e-9


def test_even_parts_are_those_of_a_deal_without_shares():
    assert even(14, 4).tolist() == [4, 4, 3, 3]


def after(seconds, samples, times: int) -> SpeedModel:
    model = SpeedModel(len(samples))
    for _ in range(times):
        model.observe(np.array(seconds, dtype=float), np.array(samples, dtype=float))
    return model


def test_before_sizes_differ_seconds_are_in_proportion_to_samples():
    model = after([1.0, 4.0], [32, 32], 4)
    assert model.is_known
    assert model.seconds_for(np.array([32, 32])) == pytest.approx([1.0, 4.0])
    assert model.fixed == pytest.approx([0, 0])


def test_two_sizes_tell_the_fixed_seconds():
    model = after([0.5 + 0.01 * 32], [32], 6)
    for _ in range(6):
        model.observe(np.array([0.5 + 0.01 * 12]), np.array([12.0]))
    assert model.fixed == pytest.approx([0.5], rel=0.1)
    assert model.seconds_for(np.array([20])) == pytest.approx([0.7], rel=0.02)


@given(st.sampled_from([0.05, 0.3, 3.0, 50.0]))
def test_one_odd_iteration_counts_for_nothing_and_three_are_a_new_speed(factor):
    model = after([1.0, 1.0], [32, 32], 8)
    for number in range(3):
        assert model.seconds_for(np.array([32, 32])) == pytest.approx([1.0, 1.0]), number
        model.observe(np.array([factor, 1.0]), np.array([32.0, 32.0]))
    assert model.seconds_for(np.array([32, 32])) == pytest.approx([factor, 1.0])


def test_odd_iterations_with_others_between_them_are_no_new_speed():
    model = after([1.0], [32], 8)
    for _ in range(10):
        model.observe(np.array([3.0]), np.array([32.0]))
        model.observe(np.array([1.0]), np.array([32.0]))
    assert model.seconds_for(np.array([32])) == pytest.approx([1.0])


def test_iterations_of_which_nothing_is_known_change_nothing():
    model = after([1.0, 2.0], [32, 32], 5)
    before = model.fixed.copy(), model.each.copy()
    model.observe(np.array([0.0, np.inf]), np.array([32.0, 32.0]))
    model.observe(np.array([1.0, 2.0]), np.array([0.0, 0.0]))
    assert np.array_equal(model.fixed, before[0])
    assert np.array_equal(model.each, before[1])


class Worlds:
    """Workers of given seconds, in lockstep: each iteration takes the slowest's time."""

    def __init__(self, total: int, fixed, each, noise: float = 0.0) -> None:
        self.fixed, self.each = np.array(fixed, dtype=float), np.array(each, dtype=float)
        self.chooser = ShareChooser(len(self.each), total)
        self.parts, self._coming = self.chooser.parts, self.chooser.parts
        self._random, self._noise = np.random.default_rng(1), noise
        self.changes = 0

    def step(self) -> float:
        """Make an iteration; return the part of the workers' sum of speeds that it uses."""
        parts, self.parts = self.parts, self._coming
        seconds = self.fixed + self.each * parts
        seconds = seconds * (1 + self._noise * self._random.standard_normal(len(seconds)))
        change = self.chooser.observe(seconds, parts.astype(float))
        if change is not None:
            self._coming, self.changes = change.parts, self.changes + 1
        return float(parts.sum() / ((1 / self.each).sum() * seconds.max()))


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_one_of_four_at_quarter_speed_soon_uses_the_sum_of_speeds(noise):
    world = Worlds(256, [0.0] * 4, [0.01, 0.01, 0.01, 0.04], noise)
    assert world.step() < 0.35
    for _ in range(9):
        world.step()
    used = [world.step() for _ in range(50)]
    assert np.mean(used) > 0.97 - 1.5 * noise
    assert world.changes <= 6


def test_fixed_seconds_are_found_and_all_finish_together():
    world = Worlds(256, [0.2, 0.2, 0.2, 0.8], [0.01, 0.01, 0.01, 0.04])
    for _ in range(30):
        world.step()
    ends = world.fixed + world.each * world.parts
    assert ends.max() / ends.min() < 1.06


def test_equal_workers_keep_even_shares():
    world = Worlds(256, [0.1] * 4, [0.01] * 4, noise=0.04)
    for _ in range(200):
        world.step()
    assert world.changes == 0


def test_a_worker_that_slows_down_by_half_has_the_right_share_within_ten_iterations():
    world = Worlds(256, [0.0] * 4, [0.01] * 4)
    for _ in range(40):
        world.step()
    world.each[2] *= 2
    for _ in range(10):
        world.step()
    assert world.step() > 0.95


@given(
    st.lists(st.tuples(st.floats(1e-9, 1e6), st.integers(0, 10**6)), min_size=1, max_size=40),
    st.floats(1e-9, 1e6),
)
def test_whatever_is_measured_the_line_is_one_of_seconds(measured, other):
    model, measured_any = SpeedModel(2), False
    for seconds, samples in measured:
        measured_any |= samples > 0
        model.observe(np.array([seconds, other]), np.array([float(samples), 32.0]))
        for fixed, each in ((model.fixed, model.each), model.careful_line()):
            assert np.isfinite([fixed, each]).all()
            assert (fixed >= 0).all()
            assert each[1] > 0
            assert each[0] > 0 or not measured_any


def test_the_seconds_that_do_not_depend_on_samples_are_known_for_as_long_as_the_size_stays():
    """Load comes and goes meanwhile: it scales all of a worker's seconds."""
    model, random = SpeedModel(1), np.random.default_rng(3)
    for number in range(24):
        samples = (32.0, 12.0)[number // 3 % 2]
        model.observe(np.array([0.3 + 0.01 * samples]), np.array([samples]))
    load = 1.0
    for number in range(300):
        if number % 30 == 0:
            load = 1 + 2 * random.random()
        noise = 1 + 0.1 * abs(random.standard_normal())
        model.observe(np.array([load * noise * (0.3 + 0.01 * 12)]), np.array([12.0]))
    assert model.seconds_for(np.array([60])) == pytest.approx([load * (0.3 + 0.01 * 60)], rel=0.2)


class Loaded:
    """Workers that have other work to do for a stretch, then none, and are disturbed from time to time.

    Other work delays a worker's fixed seconds alone if `sleeps`: its samples then take time, not a processor.
    """

    def __init__(self, seed: int, total: int, fixed, each, *, sleeps: bool) -> None:
        self._random, self._sleeps = np.random.default_rng(seed), sleeps
        self.fixed, self.each, self.load = np.array(fixed), np.array(each), np.ones(len(each))
        self.chooser = ShareChooser(len(each), total)
        self._coming = [self.chooser.parts] * 2  # parts hold two iterations after the report

    def step(self) -> tuple[float, ShareChange | None]:
        """Make an iteration; return the slowest worker's seconds, and the change that follows."""
        workers, random = len(self.each), self._random
        new = 1 + 3 * random.random(workers) * (random.random(workers) < 0.5)
        self.load = np.where(random.random(workers) < 1 / 40, new, self.load)
        noise = np.exp(0.1 * np.abs(random.standard_normal(workers)))
        noise = noise * np.where(random.random(workers) < 0.05, 1 + 3 * random.random(workers), 1.0)
        parts = self._coming.pop(0)
        slower = noise * self.load
        seconds = self.fixed * slower + self.each * parts * (1.0 if self._sleeps else slower)
        change = self.chooser.observe(seconds, parts.astype(float))
        self._coming.append(self.chooser.parts)
        return float(seconds.max()), change


LOADED = {
    "two that sleep": (14, [0.015] * 2, [0.002, 0.008], True),
    "four that sleep": (28, [0.015] * 4, [0.002, 0.002, 0.002, 0.008], True),
    "mostly fixed": (14, [0.06] * 2, [0.004, 0.008], True),
    "two that compute": (64, [0.05] * 2, [0.008, 0.008], False),
    "eight that compute": (256, [0.1] * 8, [0.01] * 4 + [0.02, 0.02, 0.03, 0.04], False),
}


@pytest.mark.parametrize("case", LOADED)
def test_under_load_that_comes_and_goes_no_part_is_expected_to_take_less_than_it_can(case):
    total, fixed, each, sleeps = LOADED[case]
    took = without = 0.0
    for seed in range(6):
        world = Loaded(seed, total, fixed, each, sleeps=sleeps)
        even_one = Loaded(seed, total, fixed, each, sleeps=sleeps)
        even_one.chooser = ShareChooser(len(each), total, by_speed=False)
        for _ in range(200):
            seconds, change = world.step()
            took += seconds
            without += even_one.step()[0]
            if change is not None:
                # Without other work and noise, with a margin: before sizes have differed, lines go through 0.
                assert change.after > 0.8 * (world.fixed + world.each * change.parts).max(), (seed, change)
    assert took < 1.02 * without


def test_two_workers_under_load_that_comes_and_goes_do_not_exchange_parts():
    """The one takes 8 ms for a sample, whatever else its machine does, and never gets most of a batch."""
    for seed in range(12):
        world = Loaded(seed, 14, [0.015] * 2, [0.002, 0.008], sleeps=True)
        for _ in range(300):
            world.step()
            assert world.chooser.parts[1] <= 7, seed


def test_a_change_that_costs_more_than_it_brings_is_not_made_again():
    world = Worlds(256, [0.0] * 2, [0.01, 0.02])
    while not world.changes:
        world.step()
    world.step()
    model = world.chooser
    # The first iteration with other sizes compiles for a minute.
    assert model.observe(np.array([60.0, 60.0]), world.parts.astype(float)) is None
    world.each = np.array([0.01, 0.022])
    for _ in range(20):
        world.step()
    assert world.changes == 1


def test_the_least_samples_are_kept():
    chooser = ShareChooser(3, 30, least=2)
    for _ in range(6):
        change = chooser.observe(np.array([0.1, 0.1, 90.0]), chooser.parts.astype(float))
        if change is not None:
            assert change.slowest == 2
            assert change.after < change.before
    assert chooser.parts.tolist() == [14, 14, 2]


def test_a_cap_that_a_worker_finds_changes_its_part_at_once_and_holds():
    chooser = ShareChooser(3, 30, least=2)
    assert chooser.cap(np.array([0, 0, 0])) is None
    assert chooser.cap(np.array([12, 0, 0])) is None  # more than its part
    change = chooser.cap(np.array([12, 4, 0]))
    assert change is not None
    assert (change.parts.tolist(), change.capped, change.held) == ([12, 4, 14], 1, 30)
    assert chooser.cap(np.array([12, 4, 0])) is None
    for _ in range(12):  # of which the second is as fast as the others together
        chooser.observe(np.array([0.1, 0.05, 0.1]) * chooser.parts, chooser.parts.astype(float))
    assert chooser.parts[1] == 4
    change = chooser.cap(np.array([12, 4, 7]))  # which hold 23
    assert change is not None
    assert (change.parts.tolist(), change.capped, change.held) == ([16, 5, 9], 2, 23)
    assert chooser.observe(np.array([9.0, 0.1, 0.1]), chooser.parts.astype(float)) is None


def test_parts_that_do_not_follow_speeds_follow_caps():
    chooser = ShareChooser(3, 30, least=2, parts=np.array([15, 5, 10]), by_speed=False)
    for _ in range(8):
        assert chooser.observe(np.array([1.0, 9.0, 1.0]), chooser.parts.astype(float)) is None
    change = chooser.cap(np.array([9, 0, 0]))
    assert change is not None
    assert change.parts.tolist() == [9, 7, 14]


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=6), st.integers(0, 2**45), st.integers(0, 2**40))
@example([2**40 - 1] * 6, 2**40, 2**39)
@example([2**31 - 1, 2**31 - 1], 2**31, 0)
def test_large_numbers_are_split_as_python_would_or_refused(parts: list[int], total: int, least: int) -> None:
    """They neither overflow nor take for ever."""
    if total * max(sum(parts), len(parts), 1) >= 2**62 * 1.001:
        with pytest.raises(ValueError, match="are too many for parts of"):
            scaled(np.array(parts), total, least)
    elif any(parts) and total * max(sum(parts), len(parts)) < 2**62 * 0.999:
        found = scaled(np.array(parts), total, least).tolist()
        assert sum(found) == total
        assert all(part >= 0 for part in found)
        if not least:
            assert all(
                abs(part * sum(parts) - total * given) < sum(parts)
                for part, given in zip(found, parts, strict=True)
            )
