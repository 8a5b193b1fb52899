"""Weights of workers in a mean: by samples only if every worker's number of samples is certain.

The rule is in docs/from-ddp.md, "How batches are weighted". Workers of `ring` and `hierarchical` apply it in
the agreement on an iteration, shards of a parameter server in their log, and nodes of `peers` when they apply
contributions.
"""

from __future__ import annotations

import functools
import math
import statistics
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

KNOWN = "known"  # given by session.weight, or confirmed by the sampler or the model's output
GUESSED = "guessed"  # the first dimension of the first tensor given to the model; not confirmed
NONE = "none"  # nothing was counted: the backward did not go through the model's forward
_BASES = (KNOWN, GUESSED, NONE)  # from the most certain on
_SHOWN = 8  # workers that the line names
_BITS = 24  # of a weight's checksum
MOST = 1000.0  # largest accepted multiple of the recent median, for weights and numbers of samples
# Largest multiple beside contributions of one iteration: a last batch may have one sample beside thousands.
MOST_AT_ONCE = 1e6
_RECENT = 64  # contributions whose median counts
_ENOUGH = 8  # contributions for a meaningful median
SAID = 4 + _BITS  # number of values of `said`


def said(weight: float, alike: float, certain: bool) -> list[float]:
    """Encode a worker's weight for an agreement: SAID values, sent together with the weight itself.

    Sums of these values are exact in any dtype, except for the weight and its logarithm, which only tell
    whether to look at each worker's weight.

    Args:
        weight: the worker's weight by samples.
        alike: the worker's weight if all workers count alike; 0 for a worker that does not count.
        certain: the number of samples is certain.
    """
    counts = alike > 0 and weight > 0
    size = [float(weight), math.log2(weight)] if counts else [0.0, 0.0]
    checksum = zlib.crc32(float(weight).hex().encode())
    bits = [float(alike > 0 and checksum >> bit & 1) for bit in range(_BITS)]
    return [alike, float(alike > 0 and not certain), *size, *bits]


class Certainty:
    """The summed `said` values of all workers.

    Attributes:
        workers: the number of workers that count.
        certain: all weights are certain.
        equal: all weights are equal, so weights by samples and equal weights give one mean. Unequal weights
            pass for equal with a probability of 2^-24.
    """

    def __init__(self, summed: Sequence[float]) -> None:
        self.workers, uncertain, self._weight, self._logarithms, *bits = summed
        self.certain = uncertain <= 0
        self.equal = {0.0, self.workers}.issuperset(bits)

    @functools.cached_property
    def may_be_beyond(self) -> bool:
        """True if a weight may be more than M = MOST_AT_ONCE times the median; equal on all workers.

        Then the mean is far above the geometric mean. If k of n weights are M times the others, the ratio of
        the means is (f M + 1 - f) / M^f with f = k / n, which is least at 1/n or 1/2. Four fifths of that
        leave room for weights in between.
        """
        workers = self.workers
        if not workers >= 2:
            return False
        if not (math.isfinite(self._weight) and math.isfinite(self._logarithms)):
            return True
        most = MOST_AT_ONCE
        least = min((f * most + 1 - f) / most**f for f in (1 / workers, (workers // 2) / workers))
        return math.log2(self._weight / workers) - self._logarithms / workers > math.log2(0.8 * least)


def worst(bases: Sequence[str]) -> str:
    """Return the least certain basis. An unknown name counts as NONE."""
    return max((base if base in _BASES else NONE for base in bases), key=_BASES.index, default=KNOWN)


class Counted(Protocol):
    """A contribution: its weight by samples, that weight's certainty, and its weight if all count alike."""

    @property
    def weight(self) -> float: ...

    @property
    def basis(self) -> str: ...

    @property
    def alike(self) -> float: ...


def are_certain(contributions: Iterable[Counted]) -> bool:
    """True if every contribution that counts has a certain number of samples."""
    return all(each.basis == KNOWN for each in contributions if each.weight > 0)


def weight_of(contribution: Counted, certain: bool) -> float:
    """Return a contribution's weight in a mean: by samples if all are `certain`, else its `alike`."""
    return contribution.weight if certain or contribution.weight <= 0 else contribution.alike


class Usual(msgspec.Struct, forbid_unknown_fields=True):
    """The recent weights and numbers of samples of a run's contributions, as a measure of extreme ones.

    `numbers` are those of contributions that counted, in order: each is a weight, samples, and the weight
    if all count alike.
    """

    numbers: list[tuple[float, float, float]] = []

    def take(self, contribution: Weighed) -> None:
        """Note a contribution that counts."""
        if contribution.weight > 0:
            self.numbers.append(_numbers(contribution))
            del self.numbers[:-_RECENT]

    def excess(self, contribution: Weighed, others: Iterable[Weighed] = ()) -> str:
        """Describe a number of a contribution that is more than MOST times the median; "" if none is.

        The median is that of the recent contributions, or of the iteration's `others` if that is larger,
        since all workers may begin to weigh more together. Without either, nothing is too much. While few
        contributions are known the limit is MOST_AT_ONCE times: one of two workers may have a last batch of
        one sample.
        """
        most = MOST if len(self.numbers) >= _ENOUGH else MOST_AT_ONCE
        beside = [_numbers(each) for each in others if each.weight > 0]
        for index, what in enumerate(("weight", "samples", "workers")):
            value = _numbers(contribution)[index]
            medians = [median_of([each[index] for each in seen]) for seen in (self.numbers, beside)]
            usual = max(medians)
            if usual > 0 and not value <= most * usual:
                of = "weight" if what == "weight" else f"number of {what}"
                return f"a {of} of {value:g}, more than {most:,.0f} times the median of {usual:g}"
        return ""


def excess_line(worker: int, iteration: int, excess: str) -> str:
    """Return the line that refuses a contribution for a result of `Usual.excess`."""
    return (
        f"worker {worker}'s gradients of iteration {iteration} come with {excess}: they are not taken; look "
        "at session.weight and the batches in its script"
    )


class Weighed(Counted, Protocol):
    """A contribution with its number of samples."""

    @property
    def samples(self) -> float: ...


def _numbers(contribution: Weighed) -> tuple[float, float, float]:
    return contribution.weight, contribution.samples, contribution.alike


def median_of(values: Sequence[float]) -> float:
    """Return the lower median of the values above 0, or 0 if there are none.

    Of two values it is the smaller, so that one of two workers cannot make its own weight the usual one.
    """
    positive = [value for value in values if value > 0]
    return statistics.median_low(positive) if positive else 0.0


def beyond(contributions: Mapping[int, Weighed]) -> dict[int, str]:
    """Return the extreme contributions of one iteration, each with its text from `Usual.excess`.

    Repeats until the remaining contributions have no extreme one.
    """
    left, found = dict(contributions), dict[int, str]()
    while True:
        texts = {name: Usual().excess(each, left.values()) for name, each in left.items()}
        out = {name: text for name, text in texts.items() if text}
        if not out:
            return found
        found.update(out)
        left = {name: each for name, each in left.items() if name not in found}


def told_unlike(where: str, contributions: Mapping[int, Counted], who: str = "worker") -> str:
    """Return the line of `counts_unlike` for these contributions, keyed by worker.

    Empty if all are certain, or if weights by samples and equal weights give one mean.
    """
    counting = {name: each for name, each in contributions.items() if each.weight > 0}
    ratios = {each.weight / each.alike for each in counting.values() if each.alike > 0}
    if are_certain(counting.values()) or len(ratios) < 2:
        return ""
    return counts_unlike(where, {n: counted(e.weight, e.basis) for n, e in counting.items()}, who)


def counted(weight: float, basis: str) -> str:
    """Describe a worker's count of samples, as "counted 9 (a guess)"."""
    if basis == NONE:
        return "counted none"
    return f"counted {weight:g}" + (" (a guess)" if basis == GUESSED else "")


def counts_unlike(where: str, words: Mapping[int, str], who: str = "worker") -> str:
    """Return the warning that all workers count alike although their counts differ.

    Args:
        where: the iteration, in words.
        words: the `counted` text of each worker.
        who: the noun for a worker.
    """
    named = [f"{who} {name} {each}" for name, each in words.items()]
    more = f" and {len(named) - _SHOWN} more" if len(named) > _SHOWN else ""
    return (
        f"{where}: not every worker's number of samples is certain, so all count alike in the mean of "
        f"gradients: {', '.join(named[:_SHOWN])}{more}; to weight by samples call session.weight(len(batch)) "
        "before each backward, or session.weight(1) to let all count alike without this line"
    )
