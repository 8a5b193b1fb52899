"""Lays a model's parameters out in chunks that lie in blocks of a cache: the layout of chunked memory.

As in `chunks/layout.py`, groups of like parameters are laid out each by itself, in the reverse of
registration order, and share one chunk size. Here that is also the size of a block of the device's arena:
a chunk lies in one block, an oversize parameter in a contiguous run of them. At home, in the host's memory or
on disk, a chunk takes what it uses. So there are two kinds of waste: of what is stored (alignment, whole
pages), and of blocks (the tails of chunks and of runs), as long as a chunk is in the arena.

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

ALIGNMENT = 512  # bytes: what PyTorch's allocators give, so that a kernel takes the path that it takes there
PAGE = 4096  # bytes: direct reads and writes of a disk take whole ones
SMALLEST = 2**22  # bytes; who has measured the links gives the size that fills them
LARGEST = 2**30  # bytes, unless the caller says otherwise
_MOST_CHUNK = 2**40  # bytes; with this and the next, no sum of the search leaves 64 bits
_MOST_BYTES = 2**56  # of a model
_OPEN = 4  # chunks of a group that may be open at once
_STEP = 1000  # waste is compared in steps of 1 / _STEP
_BEARABLE = 0.01  # of the blocks, for which chunks stay alike and small
_DIVIDED = 16  # parameter sizes, of those that hold the most bytes, whose fractions are tried
_RUN = 256  # blocks of the longest run that is tried


def lay_out_memory(
    specs: Sequence[ParameterSpec],
    *,
    chunk_bytes: int | None = None,
    smallest: int = SMALLEST,
    largest: int | None = None,
    alignment: int = ALIGNMENT,
) -> ChunkMap:
    """The layout of the parameters `specs`, given in the order of registration, in blocks of one size.

    `chunk.nbytes` is what a chunk stores: what it uses, rounded up to 4096 bytes. `map.blocks_of(chunk)`
    blocks of `map.chunk_bytes` are what it takes in the arena: one, or more for an oversize chunk, which
    holds one parameter.

    `chunk_bytes` names the size of blocks (rounded up to that multiple); None searches from `smallest`, the
    bytes from which on a move fills its link, to `largest` (None: a sixteenth of the model, at least twice
    `smallest`, at most 1 GiB): the smallest size of those that waste the fewest blocks, in steps of 0.1 %.
    The same specs give the same map everywhere. Raises PrepareError for a spec that cannot be laid out,
    ConfigError for sizes that make no sense.
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
    """Ascending chunk sizes in bytes, for a plan that weighs waste against the memory and the time that it
    predicts: of each half octave the one that wastes the fewest blocks, and the smallest in which most bytes
    lie alike (`_alike`). Bounds and errors as in `lay_out_memory`, whose own choice is among them.
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
    """Raise for what makes no sense."""
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
    """What the search knows of each of the ascending candidate `sizes`."""

    sizes: Int64s  # bytes
    steps: Int64s  # waste of blocks, where all chunks lie in the arena, in steps of 1 / _STEP
    alike: int  # bytes: from this size on, at most half of the bytes are oversize


def _best(found: _Found) -> int:
    """The index of the size to take: of those with the least waste the smallest, since small chunks bring
    less that is not asked for, and a budget holds more of them."""
    return int(np.argmin(found.steps))


def _alike(found: _Found) -> int:
    """The index of the smallest size at which half of the bytes lie in chunks of one block and less than 1 %
    of the blocks is waste; where there is none, of the one with the least.

    Such chunks leave no holes in the arena, and Belady's rule is optimal for them.
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
    """Sizes of which a whole number makes a large parameter, or which a whole number of them makes."""
    values, counts = np.unique(np.concatenate([np.empty(0, dtype=np.int64), *groups]), return_counts=True)
    found = []
    for size in values[np.argsort(values * counts, kind="stable")][-_DIVIDED:]:
        parts = np.arange(1, _RUN + 1, dtype=np.int64)
        for sizes in (-(-size // parts), size * parts):
            found.append(sizes[(sizes >= low) & (sizes <= high)])
    return found


def _blocks(group: Int64s, sizes: Int64s) -> Int64s:
    """The blocks that one group takes at each of the ascending candidate `sizes`, filled as `_fill` does.

    `group` holds the parameters' bytes, rounded up to the alignment, in the order of filling.
    """
    blocks = np.zeros_like(sizes)
    columns = np.arange(len(sizes))
    free = np.full((_OPEN, len(sizes)), -1, dtype=np.int64)  # bytes left of each open chunk; -1: none is open
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
    """A chunk that may take more."""

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
    """The chunks of one group, not yet numbered; `indices` are in the order of registration.

    Up to four chunks are open. A parameter goes into the one that it leaves the least room in; where it
    fits into none, the fullest is closed and one is opened. So what a layer leaves over its neighbours fill.
    """
    size = itemsize(key.dtype)
    filled: list[_Open] = []
    chunks: list[Chunk] = []
    open_: list[_Open | None] = [None] * _OPEN

    def close(chunk: _Open, *, oversize: bool = False) -> None:
        nbytes = round_up(max(chunk.position, 1), PAGE)  # nobody can reduce or move a chunk of no bytes
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
    """The place of the open chunk that a parameter goes into, or of the one that makes room for a new one."""
    free = [-1 if chunk is None else chunk.free for chunk in open_]
    fitting = [left for left in free if left >= padded]
    return free.index(min(fitting) if fitting else min(free))
