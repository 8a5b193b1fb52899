"""How workers weigh in a mean: by samples only where every worker's number of samples is certain.

The rule is in docs/from-ddp.md, "How batches are weighted". The workers of `ring` and `hierarchical` apply it
in their agreement on an iteration, the shards of a parameter server in their log, and nodes of `peers` as
they apply contributions."""

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
    """What a worker says of its weight in an agreement, beside the weight itself: SAID values, whose sums are
    exact in any dtype. `alike` is its weight where all count alike; 0: it does not count."""
    checksum = zlib.crc32(float(weight).hex().encode())
    bits = [float(alike > 0 and checksum >> bit & 1) for bit in range(_BITS)]
    return [alike, float(alike > 0 and not certain), *bits]


class Certainty:
    """The sums of what all workers `said`: `workers`, how many count; whether all weights are `certain`; and
    whether they are `equal`, so that both means are the same one. (Unequal ones are taken for equal with odds
    of 2^-24.)"""

    def __init__(self, summed: Sequence[float]) -> None:
        self.workers, uncertain, *bits = summed
        self.certain = uncertain <= 0
        self.equal = all(count in (0, self.workers) for count in bits)


def worst(bases: Sequence[str]) -> str:
    """The least certain of these; what is no such name counts as NONE."""
    return max((base if base in _BASES else NONE for base in bases), key=_BASES.index, default=KNOWN)


class Counted(Protocol):
    """A contribution: its weight by samples, how certain that is, and its weight where all count alike."""

    @property
    def weight(self) -> float: ...

    @property
    def basis(self) -> str: ...

    @property
    def alike(self) -> float: ...


def are_certain(contributions: Iterable[Counted]) -> bool:
    """Whether all that count weigh by samples."""
    return all(each.basis == KNOWN for each in contributions if each.weight > 0)


def weight_of(contribution: Counted, certain: bool) -> float:
    """A contribution's weight in a mean of which all are `certain`, or not."""
    return contribution.weight if certain or contribution.weight <= 0 else contribution.alike


def told_unlike(where: str, contributions: Mapping[int, Counted], who: str = "worker") -> str:
    """`counts_unlike` of contributions, by worker, that are not all certain; empty where both means are the
    same."""
    counting = {name: each for name, each in contributions.items() if each.weight > 0}
    ratios = {each.weight / each.alike for each in counting.values() if each.alike > 0}
    if are_certain(counting.values()) or len(ratios) < 2:
        return ""
    return counts_unlike(where, {n: counted(e.weight, e.basis) for n, e in counting.items()}, who)


def counted(weight: float, basis: str) -> str:
    """In words, what a worker counted: "counted 9 (a guess)"."""
    if basis == NONE:
        return "counted none"
    return f"counted {weight:g}" + (" (a guess)" if basis == GUESSED else "")


def counts_unlike(where: str, words: Mapping[int, str], who: str = "worker") -> str:
    """The line that tells people that all count alike though their counts differ: what each has `counted`, by
    worker, and in which iteration (`where`)."""
    named = [f"{who} {name} {each}" for name, each in words.items()]
    more = f" and {len(named) - _SHOWN} more" if len(named) > _SHOWN else ""
    return (
        f"{where}: not every worker's number of samples is certain, so all count alike in the mean of "
        f"gradients: {', '.join(named[:_SHOWN])}{more}; to weight by samples call session.weight(len(batch)) "
        "before each backward, or session.weight(1) to let all count alike without this line"
    )
