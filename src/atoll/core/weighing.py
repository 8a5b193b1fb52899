"""Weights of workers in a mean: by samples only where every worker's number of samples is certain.

The rule is in docs/from-ddp.md, "How batches are weighted". Workers of `ring` and `hierarchical` apply it in
the agreement on an iteration, shards of a parameter server in their log, and nodes of `peers` when they apply
contributions.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

KNOWN = "known"  # session.weight said it, or the sampler or the model's output agrees with the count
GUESSED = "guessed"  # the first dimension of the first tensor given to the model; nothing agrees with it
NONE = "none"  # nothing was counted: the backward did not go through the model's forward
_BASES = (KNOWN, GUESSED, NONE)  # from the best on
_SHOWN = 8  # workers that the line names
_BITS = 24  # of a weight's checksum
SAID = 2 + _BITS  # values that `said` gives


def said(weight: float, alike: float, certain: bool) -> list[float]:
    """Encode a worker's weight for an agreement: SAID values, sent beside the weight itself.

    Sums of these values are exact in any dtype. `alike` is the worker's weight where all workers count alike;
    0 means that this worker does not count.
    """
    checksum = zlib.crc32(float(weight).hex().encode())
    bits = [float(alike > 0 and checksum >> bit & 1) for bit in range(_BITS)]
    return [alike, float(alike > 0 and not certain), *bits]


class Certainty:
    """The summed `said` values of all workers.

    `workers` is the number of workers that count. `certain` is True where all weights are certain. `equal` is
    True where all weights are equal, so that both means are one. Unequal weights pass for equal with odds of
    2^-24.
    """

    def __init__(self, summed: Sequence[float]) -> None:
        self.workers, uncertain, *bits = summed
        self.certain = uncertain <= 0
        self.equal = all(count in (0, self.workers) for count in bits)


def worst(bases: Sequence[str]) -> str:
    """Return the least certain basis. An unknown name counts as NONE."""
    return max((base if base in _BASES else NONE for base in bases), key=_BASES.index, default=KNOWN)


class Counted(Protocol):
    """A contribution: its weight by samples, the certainty of that weight, and its weight where all count
    alike.
    """

    @property
    def weight(self) -> float: ...

    @property
    def basis(self) -> str: ...

    @property
    def alike(self) -> float: ...


def are_certain(contributions: Iterable[Counted]) -> bool:
    """True where every contribution that counts has a certain number of samples."""
    return all(each.basis == KNOWN for each in contributions if each.weight > 0)


def weight_of(contribution: Counted, certain: bool) -> float:
    """Return a contribution's weight in a mean: by samples where all are `certain`, else its `alike`."""
    return contribution.weight if certain or contribution.weight <= 0 else contribution.alike


def told_unlike(where: str, contributions: Mapping[int, Counted], who: str = "worker") -> str:
    """Return the line of `counts_unlike` for these contributions, keyed by worker.

    Empty where all are certain, or where weights by samples and equal weights give one mean.
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
