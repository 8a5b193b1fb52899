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

_KEPT = 0.85  # weight of an earlier iteration, against the one after it
_PRIOR = 0.02  # weight of the assumption that nothing is fixed: of one iteration with another size, squared
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
    """The seconds that each worker takes for n samples, from its own latest iterations.

    A single odd iteration (a checkpoint, another process) counts for nothing. Several in a row mean that the
    worker's speed has changed, and scale what is known.

    Attributes:
        fixed: seconds that do not depend on samples, (workers,).
        each: seconds for each sample, (workers,).
    """

    def __init__(self, workers: int) -> None:
        def zeros() -> Floats:
            return np.zeros(workers)

        self.fixed, self.each = zeros(), zeros()
        self._counted: Whole = np.zeros(workers, dtype=np.int64)
        # Sums over iterations, each with its weight: the weights, means, squares of samples, and products.
        self._weight, self._samples, self._seconds = zeros(), zeros(), zeros()
        self._squares, self._products = zeros(), zeros()
        self._unsure = zeros()  # of the slope
        self._noise = 0.0  # mean square of what iterations are off, as a part of the expected seconds
        self._odd: Whole = np.zeros(workers, dtype=np.int64)  # odd iterations in a row; below 0: faster ones
        self._ratios: Floats = np.ones((_LASTS, workers))  # of the latest odd ones' to the expected seconds

    @property
    def is_known(self) -> bool:
        """True once each worker has reported enough iterations."""
        return bool((self._counted >= _KNOWN).all())

    @property
    def error(self) -> float:
        """By what part the expected seconds of the worker that is off the most may be off."""
        of_mean = math.sqrt(self._noise * (1 - _KEPT) / (1 + _KEPT))
        return of_mean * math.sqrt(2 * math.log(max(2, len(self.each))))

    def seconds_for(self, samples: Whole | Floats) -> Floats:
        """Return the expected seconds of each worker for its number of samples."""
        return self.fixed + self.each * samples

    def observe(self, seconds: Floats, samples: Floats) -> None:
        """Take an iteration of each worker; 0 seconds or 0 samples: nothing is known of this one."""
        there = (seconds > 0) & (samples > 0) & np.isfinite(seconds)
        all_there = bool(there.all())
        if not all_there:
            seconds, samples = np.where(there, seconds, 1.0), np.where(there, samples, 1.0)
        expected = self.seconds_for(samples)
        # How far the seconds may be off for a size that is new: as far as the line's slope is unknown.
        unsure = self._unsure * np.abs(samples - self._samples)
        slower, lower = seconds > _ODD * (expected + unsure), expected - unsure
        odd = (slower | (_ODD * seconds < lower)) & there & (self._weight > 0)
        any_odd = bool(odd.any())
        if any_odd:
            which = np.flatnonzero(odd)
            usual = np.where(slower[which], expected[which] + unsure[which], lower[which])
            self._note_odd(which, np.where(slower[which], 1, -1), seconds[which] / usual)
        self._note_noise(seconds, expected, there & ~odd & (self._weight > 0))
        every = all_there and not any_odd  # nearly always
        self._odd[slice(None) if every else there & ~odd] = 0
        self._add(None if every else there & ~odd, seconds, samples)
        self._fit()

    def _note_noise(self, seconds: Floats, expected: Floats, usual: NDArray[np.bool_]) -> None:
        off = np.square(seconds / np.where(usual, expected, seconds) - 1)
        if number := np.count_nonzero(usual):
            self._noise += (1 - _KEPT) * (float(off.sum(where=usual)) / number - self._noise)

    def _note_odd(self, which: Whole, way: Whole, ratio: Floats) -> None:
        """Count odd iterations of some workers; where they last, scale the seconds by their median ratio."""
        before = self._odd[which]
        self._odd[which] = np.where(before * way > 0, before, 0) + way
        self._ratios[:-1, which] = self._ratios[1:, which]
        self._ratios[-1, which] = ratio
        lasting = which[np.abs(self._odd[which]) >= _LASTS]
        if lasting.size:
            factor = np.sort(self._ratios[:, lasting], axis=0)[_LASTS // 2]
            self._seconds[lasting] *= factor
            self._products[lasting] *= factor
            self._odd[lasting] = 0

    def _add(self, where: NDArray[np.bool_] | None, seconds: Floats, samples: Floats) -> None:
        """Add iterations `where` there are any; None: everywhere."""
        before = _KEPT * self._weight
        weight = before + 1
        part = 1 / weight
        spread, kept = before * part, np.array(_KEPT)
        if where is not None:
            weight, part = np.where(where, weight, self._weight), np.where(where, part, 0.0)
            spread, kept = np.where(where, spread, 0.0), np.where(where, _KEPT, 1.0)
        self._counted += 1 if where is None else where
        more_samples, more_seconds = samples - self._samples, seconds - self._seconds
        self._squares = kept * self._squares + spread * more_samples**2
        self._products = kept * self._products + spread * more_samples * more_seconds
        self._samples = self._samples + part * more_samples
        self._seconds = self._seconds + part * more_seconds
        self._weight = weight

    def _fit(self) -> None:
        """Fit a line through each worker's iterations; where sizes have not differed it goes through 0."""
        rate = self._seconds / np.maximum(self._samples, 1e-300)
        prior = _PRIOR * self._samples**2
        known = np.maximum(self._squares + prior, 1e-300)
        slope = (self._products + prior * rate) / known
        self._unsure = rate * prior / known
        self.each = np.minimum(np.maximum(slope, _LEAST_EACH * rate), rate)
        self.fixed = np.maximum(self._seconds - self.each * self._samples, 0.0)


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
        fixed, each = self._model.fixed, self._model.each
        now = self._model.seconds_for(self.parts)
        before = float(now.max())
        worth = before * ((_WORTH if self._changes else _UNEVEN) + self._model.error)
        horizon = max(_HORIZON, self._since)
        least = max(worth, self._cost / horizon)
        if before - _least_time(self._total, fixed, 1 / each) <= least:
            return None
        parts = share_out(self._total, fixed, each, least=self._least, most=self._most)
        then = self._model.seconds_for(parts)
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
            fixed, each = self._model.fixed, self._model.each
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
