"""The layout of a model's parameters in chunks of one common size.

Each group of like parameters is laid out by itself, in the reverse of registration order, which is about the
order in which backward fills gradients. Parameters fill one chunk after another; a parameter that does not
fit into the open chunk opens the next one. A parameter larger than the common size gets a chunk of its own,
of exactly its size, and the open chunk stays open.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.chunks.maps import Chunk, ChunkGroup, ChunkMap, Slot
from atoll.chunks.search import least_waste
from atoll.chunks.specs import ParameterSpec, check_specs, itemsize
from atoll.core.errors import ConfigError

ALIGNMENT = 64  # bytes: a cache line, and the widest vector register
SMALLEST = 2**22  # bytes; below it a collective costs more than its overlap hides (docs/notes/gradients.md)
LARGEST = 2**30  # bytes


def lay_out(
    specs: Sequence[ParameterSpec],
    *,
    chunk_bytes: int | None = None,
    smallest: int = SMALLEST,
    largest: int | None = None,
    alignment: int = ALIGNMENT,
) -> ChunkMap:
    """Lay parameters out in chunks; equal specs give equal maps everywhere.

    The last chunk of a group ends after its last parameter. Raises PrepareError for a spec that cannot be
    laid out, and ConfigError for impossible sizes.

    Args:
        specs: the parameters, in the order of registration.
        chunk_bytes: the common size of chunks in bytes, rounded up to `alignment`; None searches for the size
            with the least waste (`least_waste`).
        smallest: lower bound of the search, in bytes.
        largest: upper bound of the search, in bytes; None: a sixteenth of the model, at least twice
            `smallest`, at most 1 GiB. Nothing can hide the reduction of a step's last chunk, which so stays a
            small part of the model.
        alignment: bytes; every slot starts on a multiple.
    """
    check_specs(specs)
    if alignment < 16 or alignment & (alignment - 1):
        raise ConfigError(f"alignment of {alignment} bytes: must be a power of two, 16 or more")
    groups = grouped(specs)
    if chunk_bytes is None:
        chunk_bytes = _search(specs, list(groups.values()), smallest, largest, alignment)
    elif chunk_bytes < alignment:
        raise ConfigError(
            f"chunk size of {chunk_bytes} bytes is below the alignment of {alignment} bytes; "
            "megabytes are usual, such as 4MiB"
        )
    chunk_bytes = round_up(chunk_bytes, alignment)
    chunks = [
        chunk
        for number, (key, members) in enumerate(groups.items())
        for chunk in _fill(specs, members, number, key, chunk_bytes, alignment)
    ]
    return numbered(specs, list(groups), chunks, chunk_bytes, alignment)


def grouped(specs: Sequence[ParameterSpec]) -> dict[ChunkGroup, list[int]]:
    """Return each group with the indices of its parameters, both in the order of registration."""
    groups: dict[ChunkGroup, list[int]] = {}
    for index, spec in enumerate(specs):
        key = ChunkGroup(spec.dtype, spec.settings, spec.trainable, spec.feature)
        groups.setdefault(key, []).append(index)
    return groups


def _search(
    specs: Sequence[ParameterSpec],
    groups: list[list[int]],
    smallest: int,
    largest: int | None,
    alignment: int,
) -> int:
    total = sum(spec.nbytes for spec in specs)
    if largest is None:
        largest = max(2 * smallest, min(total // 16, LARGEST))
    if not alignment <= smallest <= largest:
        raise ConfigError(
            f"chunk sizes from {smallest} to {largest} bytes: the smallest must be at least the alignment "
            f"of {alignment} bytes and at most the largest"
        )
    sizes = [[round_up(specs[index].nbytes, alignment) for index in reversed(members)] for members in groups]
    return least_waste(sizes, total, round_up(smallest, alignment), round_up(largest, alignment), alignment)


def _fill(
    specs: Sequence[ParameterSpec],
    members: list[int],
    number: int,
    key: ChunkGroup,
    chunk_bytes: int,
    alignment: int,
) -> list[Chunk]:
    """Return one group's chunks, not yet numbered; `members` are indices in the order of registration."""
    unit = alignment // itemsize(key.dtype)  # elements; chunks and slots start on its multiples
    capacity = chunk_bytes // itemsize(key.dtype)
    chunks: list[Chunk] = []
    slots: list[Slot] = []
    position = 0

    def close(numel: int) -> None:
        chunks.append(Chunk(-1, number, key.dtype, numel, tuple(slots), oversize=False))

    for index in reversed(members):
        numel = specs[index].numel
        padded = round_up(numel, unit)
        if padded > capacity:
            chunks.append(Chunk(-1, number, key.dtype, padded, (Slot(index, 0, numel),), oversize=True))
            continue
        if position + padded > capacity:
            close(capacity)
            slots, position = [], 0
        slots.append(Slot(index, position, numel))
        position += padded
    if slots:
        close(max(position, unit))  # a chunk of zero elements could not be reduced
    return chunks


def numbered(
    specs: Sequence[ParameterSpec],
    groups: list[ChunkGroup],
    chunks: list[Chunk],
    chunk_bytes: int,
    alignment: int,
) -> ChunkMap:
    """Return the map with chunks numbered: trainable first, in the order in which backward fills them."""

    def completed(chunk: Chunk) -> tuple[bool, int]:
        return not groups[chunk.group].trainable, -min(slot.parameter for slot in chunk.slots)

    places: list[tuple[int, int]] = [(-1, -1)] * len(specs)
    in_order: list[Chunk] = []
    for id_, chunk in enumerate(sorted(chunks, key=completed)):
        in_order.append(Chunk(id_, chunk.group, chunk.dtype, chunk.numel, chunk.slots, chunk.oversize))
        for position, slot in enumerate(chunk.slots):
            places[slot.parameter] = (id_, position)
    return ChunkMap(chunk_bytes, alignment, tuple(specs), tuple(groups), tuple(in_order), tuple(places))


def round_up(value: int, step: int) -> int:
    return -(-value // step) * step
