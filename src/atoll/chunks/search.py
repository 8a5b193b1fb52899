"""The search for the common size of chunks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]

_GRID = 256  # sizes tried at equal ratios, in addition to those from the model's shapes
_RUNS = 2048  # most sizes from the model's shapes
_THRESHOLDS = 8  # parameter sizes that are tried as the largest that is not oversize
_STARTS = 16  # parameters at which runs begin
_STEP = 10_000  # waste is compared in steps of 1 / _STEP
_BEARABLE = 0.01  # waste that is accepted so that most bytes lie in chunks of the common size


def least_waste(
    groups: Sequence[Sequence[int]], used: int, smallest: int, largest: int, alignment: int
) -> int:
    """Return the chunk size in bytes, from `smallest` to `largest`, that wastes the least memory.

    Waste is compared in steps of 0.01 % of the memory, and within a step the smaller size wins, since smaller
    chunks overlap better. Sizes at which half of the bytes or more are oversize are taken only if every other
    size wastes over 1 %; of those, the larger wins.

    Args:
        groups: for each group, its parameters' sizes in bytes, rounded up to `alignment`, in the order of
            filling.
        used: bytes of all parameters, not rounded.
        smallest: smallest size in bytes, a multiple of `alignment`.
        largest: largest size in bytes, a multiple of `alignment`.
        alignment: bytes; sizes are multiples of it.
    """
    sizes = [np.array(group, dtype=np.int64) for group in groups]
    candidates = candidate_sizes(sizes, smallest, largest, alignment)
    storage = np.zeros_like(candidates)
    for group in sizes:
        storage += _storage(group, candidates)
    wasted: Int64s = storage - used
    steps = wasted * _STEP // np.maximum(storage, 1)
    alike = candidates >= half_of_bytes(sizes)
    if np.any(alike) and steps[alike].min() <= _STEP * _BEARABLE:
        return int(candidates[alike][np.argmin(steps[alike])])
    return int(candidates[steps == steps.min()][-1])


def half_of_bytes(groups: list[Int64s]) -> int:
    """Return the smallest size such that parameters of at most this size hold half of the bytes."""
    sizes: Int64s = np.sort(np.concatenate([np.zeros(1, dtype=np.int64), *groups]))
    sums = np.cumsum(sizes)
    return int(sizes[np.searchsorted(sums, sums[-1] / 2)])


def candidate_sizes(groups: list[Int64s], smallest: int, largest: int, alignment: int) -> Int64s:
    """Return ascending sizes to try: a grid of equal ratios, and the lengths of runs of parameters.

    A chunk of the length of a run of whole parameters has no tail, and layers repeat such runs.
    """
    grid = np.geomspace(smallest, largest, _GRID).astype(np.int64) // alignment * alignment
    runs: list[Int64s] = [np.empty(0, dtype=np.int64)]
    for group in groups:
        # Sizes below a large parameter make it oversize; runs are then formed of the smaller ones.
        thresholds = np.unique(group[group <= largest])[-_THRESHOLDS:]
        for threshold in thresholds:
            runs += _runs(group[group <= threshold], smallest, largest)
    suggested: Int64s = np.unique(np.concatenate(runs))
    if len(suggested) > _RUNS:
        suggested = suggested[np.linspace(0, len(suggested) - 1, _RUNS).astype(np.int64)]
    both: Int64s = np.unique(np.clip(np.concatenate([grid, suggested]), smallest, largest))
    return both


def _runs(sizes: Int64s, smallest: int, largest: int) -> list[Int64s]:
    """Return lengths, within bounds, of runs from the first parameters and from some spread over all."""
    ends = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)])
    spread = np.linspace(0, len(sizes) - 1, _STARTS).astype(np.int64)
    runs = []
    for start in sorted({*range(min(_STARTS, len(sizes))), *spread.tolist()}):
        lengths = ends[start + 1 :] - ends[start]
        runs.append(lengths[(lengths >= smallest) & (lengths <= largest)])
    return runs


def _storage(group: Int64s, candidates: Int64s) -> Int64s:
    """Return the bytes of storage that one group takes at each of the ascending candidate sizes."""
    result = np.zeros_like(candidates)
    # Candidates between two neighbouring parameter sizes have the same oversize parameters.
    bounds = np.searchsorted(candidates, np.unique(group))
    for low, high in itertools.pairwise(sorted({0, *bounds.tolist(), len(candidates)})):
        small = group[group <= candidates[low]]
        oversize = int(group.sum() - small.sum())
        result[low:high] = oversize + _fill(small, candidates[low:high])
    return result


def _fill(sizes: Int64s, candidates: Int64s) -> Int64s:
    """Return the bytes of chunks filled one after another with `sizes`, at every candidate size.

    Every chunk takes the whole candidate size, except the last, which takes only its used bytes.
    """
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if len(ends) else 0
    storage = np.zeros_like(candidates)
    begun = np.zeros_like(candidates)  # bytes of parameters in the chunks closed so far
    active = np.arange(len(candidates) if total else 0)
    while active.size:
        ended = ends[np.searchsorted(ends, begun[active] + candidates[active], side="right") - 1]
        done = ended >= total
        storage[active] += np.where(done, total - begun[active], candidates[active])
        begun[active] = ended
        active = active[~done]
    return storage
