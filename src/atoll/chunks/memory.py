"""The layout of chunked memory: chunks that lie in blocks of a cache.

Groups of like parameters are laid out each by itself, in the reverse of registration order, and share one
chunk size (as in `chunks/layout.py`). The chunk size is also the size of a block of the device's arena: a
chunk takes one block, and an oversize parameter a contiguous run of blocks. In host memory or on disk, a
chunk takes only the bytes that it uses. So there are two kinds of waste: of storage (alignment, whole pages),
and of blocks (the tails of chunks and of runs), while a chunk is in the arena.

Source: docs/memory.md, "Layout"; the idea is Elixir's (Huang et al., arXiv 2212.05339).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from atoll.chunks.layout import grouped, numbered, round_up
from atoll.chunks.maps import Chunk, ChunkGroup, ChunkMap, Slot
from atoll.chunks.search import Int64s, candidate_sizes, half_of_bytes
from atoll.chunks.specs import ParameterSpec, check_specs, itemsize
from atoll.core.errors import ConfigError, PrepareError

ALIGNMENT = 512  # bytes: the alignment of PyTorch's allocators, on which kernels choose their path
PAGE = 4096  # bytes: direct reads and writes of a disk take whole pages
SMALLEST = 2**22  # bytes, unless the links were measured
LARGEST = 2**30  # bytes, unless the caller gives a bound
_MOST_CHUNK = 2**40  # bytes; with this and the next limit, all sums of the search fit in 64 bits
_MOST_BYTES = 2**56  # of a model
_OPEN = 4  # chunks of a group that may be open at once
_STEP = 1000  # waste is compared in steps of 1 / _STEP
_BEARABLE = 0.01  # waste, as a part of the blocks, that is accepted for small chunks of one block
_DIVIDED = 16  # parameter sizes, those that hold the most bytes, whose fractions are tried
_RUN = 256  # blocks of the longest run that is tried


def lay_out_memory(
    specs: Sequence[ParameterSpec],
    *,
    chunk_bytes: int | None = None,
    smallest: int = SMALLEST,
    largest: int | None = None,
    alignment: int = ALIGNMENT,
) -> ChunkMap:
    """Lay parameters out in blocks of one size; equal specs give equal maps everywhere.

    `chunk.nbytes` is the used size of a chunk, rounded up to 4096 bytes. In the arena a chunk takes
    `map.blocks_of(chunk)` blocks of `map.chunk_bytes`: one, or several for an oversize chunk, which holds one
    parameter. Raises PrepareError for a spec that cannot be laid out, and ConfigError for impossible sizes.

    Args:
        specs: the parameters, in the order of registration.
        chunk_bytes: size of blocks, rounded up to 4096 bytes; None takes the smallest of the sizes that waste
            the fewest blocks, in steps of 0.1 %.
        smallest: lower bound of the search, in bytes: from there on a move fills its link.
        largest: upper bound of the search, in bytes; None: a sixteenth of the model, at least twice
            `smallest`, at most 1 GiB.
        alignment: bytes; every slot starts on a multiple.
    """
    _check(specs, alignment)
    groups = grouped(specs)
    if chunk_bytes is None:
        found = _search(specs, groups, smallest, largest, alignment)
        chunk_bytes = int(found.sizes[_best(found)])
    elif not 1 <= chunk_bytes <= _MOST_CHUNK:
        raise ConfigError(
            f"chunk size of {chunk_bytes} bytes: from 1 byte to 1 TiB; megabytes are usual, such as 4MiB"
        )
    chunk_bytes = round_up(chunk_bytes, PAGE)
    chunks = [
        chunk
        for number, (key, indices) in enumerate(groups.items())
        for chunk in _fill(specs, indices, number, key, chunk_bytes, alignment)
    ]
    return numbered(specs, list(groups), chunks, chunk_bytes, alignment)


def sizes_worth_trying(
    specs: Sequence[ParameterSpec],
    *,
    smallest: int = SMALLEST,
    largest: int | None = None,
    alignment: int = ALIGNMENT,
) -> tuple[int, ...]:
    """Return ascending chunk sizes in bytes, for a plan that weighs waste against memory and time.

    They are the size with the fewest wasted blocks of each half octave, and the size of `_alike`. The choice
    of `lay_out_memory` is among them; arguments and errors are those of `lay_out_memory`.
    """
    _check(specs, alignment)
    found = _search(specs, grouped(specs), smallest, largest, alignment)
    octaves = np.floor(2 * np.log2(found.sizes / found.sizes[0]))
    chosen = {int(found.sizes[_alike(found)])}
    for octave in np.unique(octaves):
        (there,) = np.nonzero(octaves == octave)
        chosen.add(int(found.sizes[there[np.argmin(found.steps[there])]]))
    return tuple(sorted(chosen))


def _check(specs: Sequence[ParameterSpec], alignment: int) -> None:
    """Raise PrepareError for a spec that cannot be laid out, ConfigError for an impossible alignment."""
    check_specs(specs)
    if not 16 <= alignment <= PAGE or alignment & (alignment - 1):
        raise ConfigError(f"alignment of {alignment} bytes: must be a power of two from 16 to {PAGE}")
    total = 0
    for spec in specs:
        total += spec.nbytes
        if total > _MOST_BYTES:
            raise PrepareError(f"parameter {spec.name!r}: with it the model exceeds {_MOST_BYTES} bytes")


@dataclass(frozen=True)
class _Found:
    """Results of the search, for each candidate size."""

    sizes: Int64s  # bytes, ascending
    steps: Int64s  # waste of blocks with all chunks in the arena, in steps of 1 / _STEP
    alike: int  # bytes: from this size on, at most half of the bytes are oversize


def _best(found: _Found) -> int:
    """Return the index of the smallest size with the least waste.

    Small chunks bring fewer bytes that are not asked for, and more of them fit into a budget.
    """
    return int(np.argmin(found.steps))


def _alike(found: _Found) -> int:
    """Return the index of the smallest size with most bytes in chunks of one block, and waste below 1 %.

    If there is none, return `_best`. Chunks of one block leave no holes in the arena, and Belady's rule is
    optimal for them.
    """
    bearable = (found.sizes >= found.alike) & (found.steps < _STEP * _BEARABLE)
    return int(np.argmax(bearable)) if bearable.any() else _best(found)


def _search(
    specs: Sequence[ParameterSpec],
    groups: dict[ChunkGroup, list[int]],
    smallest: int,
    largest: int | None,
    alignment: int,
) -> _Found:
    total = sum(spec.nbytes for spec in specs)
    if largest is None:
        largest = min(max(2 * smallest, min(total // 16, LARGEST)), _MOST_CHUNK)
    if not 1 <= smallest <= largest <= _MOST_CHUNK:
        raise ConfigError(
            f"chunk sizes from {smallest} to {largest} bytes: the smallest must be at least 1 byte and at "
            "most the largest, and that at most 1 TiB"
        )
    low = round_up(smallest, PAGE)
    high = max(low, round_up(min(largest, max(total, smallest)), PAGE))
    padded = [
        np.array([round_up(specs[index].nbytes, alignment) for index in reversed(indices)], dtype=np.int64)
        for indices in groups.values()
    ]
    suggested = [candidate_sizes(padded, low, high, alignment), *_fractions(padded, low, high)]
    sizes: Int64s = np.unique(np.clip(-(-np.concatenate(suggested) // PAGE) * PAGE, low, high))
    taken = np.zeros_like(sizes)
    for group in padded:
        taken += _blocks(group, sizes)
    storage = taken * sizes
    steps: Int64s = (storage - total) // np.maximum(-(-storage // _STEP), 1)
    return _Found(sizes, steps, half_of_bytes(padded))


def _fractions(groups: list[Int64s], low: int, high: int) -> list[Int64s]:
    """Return whole fractions and multiples of the largest parameters' sizes, within bounds."""
    values, counts = np.unique(np.concatenate([np.empty(0, dtype=np.int64), *groups]), return_counts=True)
    found = []
    for size in values[np.argsort(values * counts, kind="stable")][-_DIVIDED:]:
        parts = np.arange(1, _RUN + 1, dtype=np.int64)
        for sizes in (-(-size // parts), size * parts):
            found.append(sizes[(sizes >= low) & (sizes <= high)])
    return found


def _blocks(group: Int64s, sizes: Int64s) -> Int64s:
    """Return the blocks that `_fill` uses for one group, at each of the ascending candidate `sizes`.

    `group` holds the parameters' bytes, rounded up to the alignment, in the order of filling.
    """
    blocks = np.zeros_like(sizes)
    columns = np.arange(len(sizes))
    free = np.full((_OPEN, len(sizes)), -1, dtype=np.int64)  # free bytes of each open chunk; -1: none is open
    for parameter in group.tolist():
        # `sizes` ascend, so those for which this parameter is oversize come first.
        first = int(np.searchsorted(sizes, parameter))
        blocks[:first] += -(-parameter // sizes[:first])
        left, column = free[:, first:], columns[: len(sizes) - first]
        closest = np.argmin(np.where(left >= parameter, left, np.iinfo(np.int64).max), axis=0)
        opens = left[closest, column] < parameter
        at = np.where(opens, np.argmin(left, axis=0), closest)
        left[at, column] = np.where(opens, sizes[first:], left[at, column]) - parameter
        blocks[first:] += opens
    return blocks


@dataclass
class _Open:
    """A chunk with room for more parameters."""

    free: int  # bytes
    position: int = 0  # bytes
    slots: list[Slot] = field(default_factory=list)


def _fill(
    specs: Sequence[ParameterSpec],
    indices: list[int],
    number: int,
    key: ChunkGroup,
    chunk_bytes: int,
    alignment: int,
) -> list[Chunk]:
    """Return one group's chunks, not yet numbered; `indices` are in the order of registration.

    Up to four chunks are open. A parameter goes into the chunk in which it leaves the least room (best fit).
    If it fits into none, the fullest is closed and a new one opened.
    """
    size = itemsize(key.dtype)
    filled: list[_Open] = []
    chunks: list[Chunk] = []
    open_: list[_Open | None] = [None] * _OPEN

    def close(chunk: _Open, *, oversize: bool = False) -> None:
        nbytes = round_up(max(chunk.position, 1), PAGE)  # a chunk of no bytes can't be reduced or moved
        chunks.append(Chunk(-1, number, key.dtype, nbytes // size, tuple(chunk.slots), oversize))

    for index in reversed(indices):
        numel = specs[index].numel
        padded = round_up(numel * size, alignment)
        if padded > chunk_bytes:
            close(_Open(0, padded, [Slot(index, 0, numel)]), oversize=True)
            continue
        at = _where(open_, padded)
        chunk = open_[at]
        if chunk is None or chunk.free < padded:
            chunk = open_[at] = _Open(chunk_bytes)
            filled.append(chunk)
        chunk.slots.append(Slot(index, chunk.position // size, numel))
        chunk.position += padded
        chunk.free -= padded
    for chunk in filled:
        close(chunk)
    return chunks


def _where(open_: Sequence[_Open | None], padded: int) -> int:
    """Return the index of the open chunk for a parameter, or of the chunk that a new one replaces."""
    free = [-1 if chunk is None else chunk.free for chunk in open_]
    fitting = [left for left in free if left >= padded]
    return free.index(min(fitting) if fitting else min(free))
