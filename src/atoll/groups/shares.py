"""Shares of a global batch that all workers finish at the same time; pure.

A worker takes `fixed + each * n` seconds for n samples: a kernel launch or a step costs the same for one
sample as for many, so time is not in proportion to samples. `SpeedModel` fits both numbers to what workers
report of their iterations, `share_out` makes the largest of the times as small as whole samples allow, and
`ShareChooser` says when a change pays for itself. Source: docs/shares.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Whole: TypeAlias = NDArray[np.int64]
Flags: TypeAlias = NDArray[np.bool_]

_KEPT = 0.85  # weight of an earlier iteration, against the one after it
_PRIOR = 0.5  # of a worker's seconds, the standard deviation of what is fixed, before sizes have differed
_TURN = 1e-3  # part by which an iteration returns the variance of the slope to that
_NOISE = 0.05  # of an iteration's seconds, as a part of them, before it is known
_LEAST_NOISE = 1e-3
_NOISE_KEPT = 0.9  # weight of the noise as known before, against an iteration's
_LEAST_EACH = 0.05  # of a worker's seconds per sample, the least part that grows with samples
_ODD = 1.4  # an iteration that takes this many times what is expected, or the inverse, is odd
_LASTS = 3  # odd iterations in a row after which the worker's speed has changed
_KNOWN = 2  # iterations that count, of each worker, before shares are chosen
_UNEVEN = 0.05  # shares leave even ones if the batch then takes at least this part less time
_WORTH = 0.02  # and change again for this part; both beside what noise may show
_REST = 3  # iterations between two changes
_HORIZON = 32  # iterations for which a change is expected to last at least
_MOST = 2.0**62  # the largest product of whole numbers, of 64 bits


class SpeedModel:
    """The seconds that each worker takes for n samples, from its own iterations: a Kalman filter of a line.

    Two things change a worker's seconds. Load changes often, and scales the line as a whole. The proportion
    of `fixed` to `each` hardly changes, and shows only when n does. So the filter follows the scale from
    iteration to iteration, keeps the proportion for as long as n stays, and trusts neither more than the
    worker's noise allows.

    A single odd iteration (a checkpoint, another process) counts for nothing. Several in a row mean that the
    worker's speed has changed. They scale the line, and its proportion is uncertain again.

    Attributes:
        fixed: seconds that do not depend on samples, (workers,).
        each: seconds for each sample, (workers,).
    """

    def __init__(self, workers: int) -> None:
        def zeros() -> Floats:
            return np.zeros(workers)

        self.fixed, self.each = zeros(), zeros()
        self._counted: Whole = np.zeros(workers, dtype=np.int64)
        self._latest: Floats = np.ones(workers)  # the samples of the latest iteration that counted
        # The covariance of the line: of `fixed`, of `fixed` and `each`, of `each`.
        self._var_fixed, self._var_both, self._var_each = zeros(), zeros(), zeros()
        self._noise: Floats = np.full(workers, _NOISE**2)  # mean square of errors, as a part of the seconds
        self._odd: Whole = np.zeros(workers, dtype=np.int64)  # odd iterations in a row; below 0: faster ones
        self._ratios: Floats = np.ones((_LASTS, workers))  # of the latest odd ones' to the expected seconds

    @property
    def is_known(self) -> bool:
        """True once each worker has reported enough iterations."""
        return bool((self._counted >= _KNOWN).all())

    @property
    def error(self) -> float:
        """By what part the expected seconds of the worker that is off the most may be off."""
        of_mean = math.sqrt(float(self._noise.mean()) * (1 - _KEPT) / (1 + _KEPT))
        return of_mean * math.sqrt(2 * math.log(max(2, len(self.each))))

    def seconds_for(self, samples: Whole | Floats) -> Floats:
        """Return the expected seconds of each worker for its number of samples."""
        return self.fixed + self.each * samples

    def careful_line(self) -> tuple[Floats, Floats]:
        """Return each worker's `fixed` and `each` with a slope that is steeper by its standard deviation.

        The line passes through the expected seconds for the latest samples, and is at most in proportion to
        samples. The steeper the lines, the smaller the change of parts that lets all workers finish together.
        """
        seconds = self.seconds_for(self._latest)
        each = np.minimum(self.each + np.sqrt(self._var_each), seconds / self._latest)
        return np.maximum(seconds - each * self._latest, 0.0), each

    def observe(self, seconds: Floats, samples: Floats) -> None:
        """Take an iteration of each worker; 0 seconds or 0 samples: nothing is known of this one."""
        there = (seconds > 0) & (samples > 0) & np.isfinite(seconds)
        if not there.all():
            seconds, samples = np.where(there, seconds, 1.0), np.where(there, samples, 1.0)
        known = there & (self._counted > 0)
        self._drift()
        expected = self.seconds_for(samples)
        # How far the seconds may be off for a size that is new: by two standard deviations of the slope.
        unsure = 2 * np.sqrt(self._var_each) * np.abs(samples - self._latest)
        slower, lower = seconds > _ODD * (expected + unsure), expected - unsure
        odd = known & (slower | (_ODD * seconds < lower))
        usual = there & ~odd
        self._odd[usual] = 0
        self._correct(known, known & ~odd, seconds - expected, expected, samples)
        if odd.any():
            which = np.flatnonzero(odd)
            usually = np.where(slower[which], expected[which] + unsure[which], lower[which])
            self._note_odd(which, np.where(slower[which], 1, -1), seconds[which] / usually)
        self._latest = np.where(usual, samples, self._latest)
        self._counted += usual
        if (begins := np.flatnonzero(usual & ~known)).size:
            self.each[begins] = seconds[begins] / samples[begins]
            self._doubt(begins)
        self._limit()

    def _drift(self) -> None:
        """Let an iteration's time pass: scales change by themselves, and proportions hardly do."""
        drift = (1 - _KEPT) ** 2 / _KEPT * self._noise  # with which the filter forgets as _KEPT says
        fixed, each = self.fixed, self.each
        spread = np.square(_PRIOR * (fixed / self._latest + each))
        turn = _TURN * np.maximum(spread - self._var_each, 0.0)
        self._var_fixed = self._var_fixed + drift * fixed**2 + turn * self._latest**2
        self._var_both = self._var_both + drift * fixed * each - turn * self._latest
        self._var_each = self._var_each + drift * each**2 + turn

    def _correct(self, known: Flags, usual: Flags, off: Floats, expected: Floats, samples: Floats) -> None:
        """Learn from how far the seconds are `off`: the noise of workers that are `known`, and the lines of
        those whose iteration is `usual`."""
        with_fixed = self._var_fixed + self._var_both * samples
        with_each = self._var_both + self._var_each * samples
        of_noise = self._noise * np.square(expected)
        whole = with_fixed + with_each * samples + of_noise
        inverse = np.divide(1.0, whole, out=np.zeros_like(whole), where=known)
        # An odd iteration counts as noise too, as far as a usual one can be off.
        square = np.minimum(np.square(off), np.square((_ODD - 1) * expected)) * self._noise * inverse
        noise = _NOISE_KEPT * self._noise + (1 - _NOISE_KEPT) * square
        self._noise = np.where(known, np.maximum(noise, _LEAST_NOISE**2), self._noise)
        inverse = np.where(usual, inverse, 0.0)
        gain = inverse * off
        self.fixed, self.each = self.fixed + with_fixed * gain, self.each + with_each * gain
        self._var_fixed = self._var_fixed - with_fixed**2 * inverse
        self._var_both = self._var_both - with_fixed * with_each * inverse
        self._var_each = np.maximum(self._var_each - with_each**2 * inverse, 0.0)

    def _note_odd(self, which: Whole, way: Whole, ratio: Floats) -> None:
        """Count odd iterations of some workers; where they last, scale the line by their median ratio."""
        before = self._odd[which]
        self._odd[which] = np.where(before * way > 0, before, 0) + way
        self._ratios[:-1, which] = self._ratios[1:, which]
        self._ratios[-1, which] = ratio
        lasting = which[np.abs(self._odd[which]) >= _LASTS]
        if lasting.size:
            factor = np.sort(self._ratios[:, lasting], axis=0)[_LASTS // 2]
            self.fixed[lasting] *= factor
            self.each[lasting] *= factor
            self._odd[lasting] = 0
            self._doubt(lasting)

    def _doubt(self, which: Whole) -> None:
        """Take the scale of some workers' lines to be known by one iteration, and their proportion not."""
        samples, noise = self._latest[which], self._noise[which]
        fixed, each = self.fixed[which], self.each[which]
        slope = np.square(_PRIOR * (fixed / samples + each))
        self._var_fixed[which] = noise * fixed**2 + slope * samples**2
        self._var_both[which] = noise * fixed * each - slope * samples
        self._var_each[which] = noise * each**2 + slope

    def _limit(self) -> None:
        """Turn lines about their latest samples until neither number is below what is possible."""
        seconds = np.maximum(self.seconds_for(self._latest), 0.0)
        rate = seconds / self._latest
        self.each = np.minimum(np.maximum(self.each, _LEAST_EACH * rate), rate)
        self.fixed = np.maximum(seconds - self.each * self._latest, 0.0)


def share_out(total: int, fixed: Floats, each: Floats, *, least: int = 1, most: Whole | int = 0) -> Whole:
    """Return each worker's whole samples of `total`, so that the last worker finishes as early as it can.

    Of workers that finish alike, the lower one takes a sample. If there are too few samples for all, those
    that would finish last get none; where `most` needs them all the same, `least` gives way. Raises
    ValueError if the workers' `most` samples together are fewer than `total`.

    Args:
        total: the samples.
        fixed: seconds of each worker that do not depend on samples, at least 0, (workers,).
        each: seconds for each sample, above 0, (workers,).
        least: the least samples of a worker that gets any.
        most: the most samples of each worker, (workers,), or of any; 0: no limit.
    """
    workers, most = len(fixed), _limits(most, total, len(fixed))
    able = min(workers, max(1, total // max(least, 1)), total)
    if able == workers:
        return _fill(total, fixed, each, np.minimum(min(least, total // max(1, workers)), most), most)
    order = np.argsort(fixed + each * max(least, 1), kind="stable")
    able = max(able, _needed(total, most[order])) if total else 0
    parts = np.zeros(workers, dtype=np.int64)
    chosen = np.sort(order[:able])  # in the order of their numbers again
    if able:
        low, high = np.minimum(min(least, total // able), most[chosen]), most[chosen]
        parts[chosen] = _fill(total, fixed[chosen], each[chosen], low, high)
    return parts


def _limits(most: Whole | int, total: int, workers: int) -> Whole:
    """Return the most samples of each worker, (workers,). Raises ValueError if they hold fewer than
    `total`."""
    given = np.broadcast_to(np.asarray(most, dtype=np.int64), (workers,))
    found = np.where(given > 0, np.minimum(given, total), total)
    if (held := int(found.sum())) < total:
        raise ValueError(f"{workers} workers take at most {held} samples together, and there are {total}")
    return found


def _needed(total: int, most: Whole) -> int:
    """Return how many of the first workers, with their `most` samples, take `total` together."""
    return int(np.searchsorted(np.cumsum(most), total)) + 1


def _fill(total: int, fixed: Floats, each: Floats, least: Whole, most: Whole) -> Whole:
    """Return parts between `least` and `most`, for workers that can take `total` together."""
    time = _common_time(total, fixed, each, least, most)
    parts = np.clip(np.floor((time - fixed) / each), least, most).astype(np.int64)
    while (left := total - int(parts.sum())) > 0:
        after = np.where(parts < most, fixed + each * (parts + 1), np.inf)
        enough = min(left, int((parts < most).sum()))
        time = float(np.partition(after, enough - 1)[enough - 1])
        more = np.clip(np.floor((time - fixed) / each), 0, most).astype(np.int64) - parts
        more = np.minimum(np.maximum(more, after <= time), np.minimum(left, most - parts))
        if int(more.sum()) > left:  # take the earliest of these samples, one by one
            takers = np.repeat(np.arange(len(parts)), more)
            nth = np.arange(len(takers)) - np.repeat(np.cumsum(more) - more, more) + 1
            ends = fixed[takers] + each[takers] * (parts[takers] + nth)
            first = np.argsort(ends, kind="stable")[:left]
            more = np.bincount(takers[first], minlength=len(parts))
        parts = parts + more
    return parts


def _common_time(total: int, fixed: Floats, each: Floats, least: Whole, most: Whole) -> float:
    """Return a time by which the workers finish at most `total` samples, and nearly that many."""
    low, high = float((fixed + each * least).min()), float((fixed + each * most).max())
    speeds = 1 / each
    time = min(max(_least_time(total, fixed, speeds), low), high)
    for _ in range(64):
        samples = (time - fixed) * speeds
        free = (samples > least) & (samples < most)
        beyond = float(np.clip(samples, least, most).sum()) - total
        low, high = (low, min(high, time)) if beyond > 0 else (max(low, time), high)
        if -1 < beyond <= 0 or high - low <= 1e-12 * high:
            break
        slope = float(speeds[free].sum())
        # Newton's step, a little too short; where it leaves the bracket, the middle.
        time = time - (beyond + 0.5) / slope if slope else low
        if not low < time < high:
            time = (low + high) / 2
    return low


def _least_time(total: int, fixed: Floats, speeds: Floats) -> float:
    """Return a time before which the workers do not finish `total` samples; without limits they then do."""
    return (total + float((fixed * speeds).sum())) / float(speeds.sum())


@dataclass(frozen=True)
class ShareChange:
    """A change of shares that pays for itself, or that caps ask for.

    Attributes:
        parts: each worker's samples of a whole batch.
        before: the expected seconds of the slowest worker without the change.
        after: those of the slowest worker with it.
        slowest: the worker that is the slowest without the change.
        waits_for: the worker for which the others wait although it has the least samples; -1: none.
        speeds: the samples a second that each worker is expected to compute with its part; 0: not known.
        capped: the worker that has found its memory to hold fewer samples than its part; -1: none.
        held: the samples of a batch that the workers' caps hold.
    """

    parts: Whole
    speeds: Floats
    before: float = 0.0
    after: float = 0.0
    slowest: int = -1
    waits_for: int = -1
    capped: int = -1
    held: int = 0


class ShareChooser:
    """Chooses each worker's part of a batch of `total` samples from what the workers report.

    Parts are even at first, and change only if the change pays for itself: by more than noise, and by more
    than earlier changes have cost, within the time for which this one is expected to last.

    Attributes:
        parts: the parts chosen last, (workers,).
    """

    def __init__(
        self,
        workers: int,
        total: int,
        *,
        least: int = 1,
        most: Whole | None = None,
        parts: Whole | None = None,
        by_speed: bool = True,
    ) -> None:
        """Begin with some parts.

        Args:
            workers: the number of workers.
            total: the samples of a batch.
            least: the least samples of a worker that gets any.
            most: the most samples of each worker, (workers,), where 0 is no limit; None: no limits.
            parts: the parts, (workers,); None: even ones.
            by_speed: True if parts follow speeds; else they change only as caps ask.
        """
        self._total, self._least, self._by_speed = total, least, by_speed
        self._most = np.zeros(workers, dtype=np.int64) if most is None else most
        self.parts = even(total, workers) if parts is None else parts
        self._model = SpeedModel(workers)
        self._since = 0  # iterations since the latest change
        self._changes = 0
        self._untried = False  # True until an iteration with the latest parts is reported
        self._cost = 0.0  # seconds that a change costs, by what earlier ones took

    def observe(self, seconds: Floats, samples: Floats) -> ShareChange | None:
        """Take an iteration of each worker; return the change of parts that follows from it; None: none."""
        self._since += 1
        if self._untried and np.array_equal(samples, self.parts):
            self._untried = False
            beyond = float((seconds - self._model.seconds_for(samples)).max())
            self._cost = (self._cost + max(0.0, beyond)) / 2
        self._model.observe(seconds, samples)
        if not self._by_speed or not self._model.is_known or (self._changes and self._since < _REST):
            return None
        if not are_held(self._total, np.ones_like(self.parts), self._most):
            return None
        fixed, each = self._model.careful_line()
        now = fixed + each * self.parts
        before = float(now.max())
        worth = before * ((_WORTH if self._changes else _UNEVEN) + self._model.error)
        horizon = max(_HORIZON, self._since)
        least = max(worth, self._cost / horizon)
        if before - _least_time(self._total, fixed, 1 / each) <= least:
            return None
        parts = share_out(self._total, fixed, each, least=self._least, most=self._most)
        then = fixed + each * parts
        last, after = int(then.argmax()), float(then.max())
        if before - after <= least:
            return None
        self.parts, self._since, self._untried = parts, 0, True
        self._changes += 1
        others = float(np.delete(then, last).max())
        late = parts[last] <= self._least and after > others * (1 + _UNEVEN)
        return ShareChange(parts, parts / then, before, after, int(now.argmax()), last if late else -1)

    def cap(self, most: Whole) -> ShareChange | None:
        """Take the caps that workers have found, (workers,), where 0 is none; return the change of parts that
        follows from them; None: none.

        Where the caps together do not hold a batch, parts are in proportion to the caps.
        """
        known = self._most
        self._most = np.where((most > 0) & ((known == 0) | (most < known)), most, known)
        beyond = (self._most > 0) & (self.parts > self._most)
        if np.array_equal(self._most, known) or not beyond.any():
            return None
        held = are_held(self._total, self.parts, self._most)
        if not held:
            parts = scaled(np.where(self.parts > 0, self._most, 0), self._total, self._least)
        elif self._by_speed and self._model.is_known:
            fixed, each = self._model.careful_line()
            parts = share_out(self._total, fixed, each, least=self._least, most=self._most)
        else:
            parts = scaled(self.parts, self._total, self._least, self._most)
        then = self._model.seconds_for(parts)
        speeds = np.divide(parts, then, out=np.zeros(len(parts)), where=then > 0)
        self.parts, self._since, self._untried = parts, 0, True
        self._changes += self._by_speed
        held_in_all = self._total if held else int(self._most[parts > 0].sum())
        return ShareChange(parts, speeds, capped=int(beyond.argmax()), held=held_in_all)


def even(total: int, workers: int) -> Whole:
    """Return even parts of `total` samples; the first workers take the remainder."""
    return total // workers + (np.arange(workers) < total % workers).astype(np.int64)


def are_held(total: int, parts: Whole, most: Whole) -> bool:
    """True if the workers that have a part take `total` samples with at most `most` each; 0: no limit."""
    return int(np.where(most > 0, np.minimum(most, total), total)[parts > 0].sum()) >= total


def scaled(parts: Whole, total: int, least: int = 0, most: Whole | int = 0) -> Whole:
    """Return parts of `total` samples in proportion to `parts`, each of at least `least` and at most `most`
    samples, where 0 is no limit.

    If there are too few samples for all, some get none; where `most` needs them all the same, `least` gives
    way. Only whole numbers are computed with, so all workers find the same, whatever their processors. Raises
    ValueError if the workers' `most` samples together are fewer than `total`, and for numbers so large that
    their products have more than 62 bits.
    """
    if total * max(float(parts.sum(dtype=np.float64)), float(len(parts)), 1.0) >= _MOST:
        raise ValueError(f"{total} samples are too many for parts of {parts.sum(dtype=np.float64):g} samples")
    found, takers = _in_proportion(parts, total), int((parts > 0).sum())
    high = np.where(parts > 0, _limits(most, total, len(parts)), 0)
    few = (parts > 0 if total >= least * takers else found > 0) & (found < least)
    if not (few | (found > high)).any():
        return found
    order = np.argsort(-parts, kind="stable")
    if (held := int(high.sum())) < total:
        raise ValueError(f"{takers} workers take at most {held} samples together, and there are {total}")
    able = min(takers, max(1, total // max(1, least), _needed(total, high[order])))
    chosen = np.sort(order[:able])
    high, left = high[chosen], total
    low, found = np.minimum(min(least, total // able), high), np.zeros_like(parts)
    while True:
        some = _in_proportion(parts[chosen], left)
        found[chosen] = limited = np.clip(some, low, high)
        beyond = int(limited.sum()) - left
        if not beyond:
            return found
        # Those that take more than their proportion have it from the others, or those that take less give it.
        done = limited > some if beyond > 0 else limited < some
        left -= int(limited[done].sum())
        chosen, low, high = chosen[~done], low[~done], high[~done]


def cut_run(
    start: int, stop: int, parts: Mapping[int, int], least: int = 0
) -> Iterator[dict[int, tuple[int, int]]]:
    """Cut positions from `start` to `stop` into batches of as many samples as the workers' `parts` sum to,
    the last of which may have fewer; yield each worker's positions in each batch, in the workers' order.

    Part of a worker that gets no sample is empty. See `scaled` for `least`.
    """
    workers = sorted(parts)
    weights = np.array([parts[worker] for worker in workers], dtype=np.int64)
    if not weights.any():
        weights = np.ones_like(weights)
    whole = int(weights.sum())
    for begin in range(start, stop, whole):
        ends = begin + np.cumsum(scaled(weights, min(whole, stop - begin), least))
        bounds = [begin, *ends.tolist()]
        yield dict(zip(workers, pairwise(bounds), strict=True))


def _in_proportion(parts: Whole, total: int) -> Whole:
    """Split `total` in proportion to `parts` by the largest remainder; the lower number wins a tie."""
    whole = int(parts.sum())
    if whole == total:
        return parts.copy()
    exact = parts * total
    found = exact // whole
    order = np.argsort(found * whole - exact, kind="stable")
    found[order[: total - int(found.sum())]] += 1
    return found
