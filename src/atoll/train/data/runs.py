"""Runs: stretches of epochs' orders, which all deals cut and join; pure.

Workers in lockstep (`Deal`), nodes that deal by their speeds (`PeerDeal`) and leases of a hub
(`LeasedSampler`) all deal runs. They differ in how workers agree which one takes which run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor

SampleRange: TypeAlias = tuple[
    int, int, int
]  # an epoch, and its positions from the second to the third (exclusive)
Item: TypeAlias = tuple[int, int]  # an epoch, and a position in its order


def joined(runs: Iterable[SampleRange]) -> list[SampleRange]:
    """Return the runs in their order, and join a run that begins within or right behind the one before it.

    Runs of epochs below 0, which are fills, are never joined.
    """
    found: list[SampleRange] = []
    for epoch, start, stop in runs:
        same = bool(found) and found[-1][0] == epoch >= 0
        if same and found[-1][1] <= start <= found[-1][2]:
            found[-1] = (epoch, found[-1][1], max(stop, found[-1][2]))
        else:
            found.append((epoch, start, stop))
    return found


def merged(runs: Iterable[SampleRange]) -> list[SampleRange]:
    """Return the runs in the order of their positions, each position once."""
    return joined(sorted(runs))


def positions(runs: Iterable[SampleRange]) -> int:
    """Return the number of positions in `runs`."""
    return sum(stop - start for _, start, stop in runs)


def ticks_of(count: int, batch: int, *, drop_last: bool) -> int:
    """Return the number of batches that `count` positions make; with `drop_last`, of whole batches only."""
    return count // batch if drop_last else -(-count // batch)


def cut(runs: Iterable[SampleRange], count: int) -> tuple[list[SampleRange], list[SampleRange]]:
    """Split `runs` into the first `count` positions and the rest."""
    first: list[SampleRange] = []
    rest: list[SampleRange] = []
    for epoch, start, stop in runs:
        middle = start + min(count, stop - start)
        count -= middle - start
        if start < middle:
            first.append((epoch, start, middle))
        if middle < stop:
            rest.append((epoch, middle, stop))
    return first, rest


def without(runs: Iterable[SampleRange], parts: Iterable[SampleRange]) -> list[SampleRange]:
    """Return the positions of `runs` that are in none of `parts`."""
    left, gone = [], merged(parts)
    for epoch, start, end in runs:
        for _, first, stop in (part for part in gone if part[0] == epoch):
            if start < min(first, end):
                left.append((epoch, start, min(first, end)))
            start = max(start, stop)
        if start < end:
            left.append((epoch, start, end))
    return left


def items_of(runs: Iterable[SampleRange]) -> list[Item]:
    """Return the positions in `runs`, one after the other."""
    return [(epoch, position) for epoch, start, stop in runs for position in range(start, stop)]


def singles(items: Iterable[Item]) -> list[SampleRange]:
    """Return runs of one position each."""
    return [(epoch, position, position + 1) for epoch, position in items]


def kept(runs: Iterable[SampleRange], keep: Tensor) -> Iterator[SampleRange]:
    """Yield the positions that are kept, as runs.

    Args:
        runs: runs of n positions together.
        keep: for each position, in the order of the runs, True to keep it; bool, (n,).
    """
    begin = 0
    for epoch, start, stop in runs:
        part = keep[begin : begin + stop - start].to(torch.int8)
        begin += stop - start
        edges = torch.diff(part, prepend=part.new_zeros(1), append=part.new_zeros(1)).nonzero().flatten()
        for first, last in edges.reshape(-1, 2).tolist():
            yield epoch, start + first, start + last
