"""The chunk map: groups, chunks and slots, as immutable data."""

from __future__ import annotations

import msgspec

from atoll.chunks.specs import ParameterSpec, itemsize
from atoll.core.units import format_bytes


class ChunkGroup(msgspec.Struct, frozen=True):
    """Properties that all parameters of a chunk share; the fields are those of `ParameterSpec`."""

    dtype: str
    settings: str
    trainable: bool
    feature: str


class Slot(msgspec.Struct, frozen=True):
    """A parameter's place in its chunk: `numel` elements from element `offset` on."""

    parameter: int  # index into ChunkMap.specs
    offset: int
    numel: int


class Chunk(msgspec.Struct, frozen=True):
    """A contiguous run of memory for one or more parameters of one group."""

    id: int  # also its index in ChunkMap.chunks
    group: int  # index into ChunkMap.groups
    dtype: str
    numel: int  # elements of storage, padding and unused tail included
    slots: tuple[Slot, ...]  # in the order in which backward fills them
    oversize: bool  # holds one parameter that is larger than the common size

    @property
    def used(self) -> int:
        """Elements that belong to parameters."""
        return sum(slot.numel for slot in self.slots)

    @property
    def extent(self) -> int:
        """Elements up to the end of the last slot, which a transfer carries."""
        return max(slot.offset + slot.numel for slot in self.slots)

    @property
    def nbytes(self) -> int:
        """Bytes of storage."""
        return self.numel * itemsize(self.dtype)


class ChunkMap(msgspec.Struct, frozen=True):
    """The layout of one model.

    `specs` are in the order of registration. Chunks are numbered with the trainable ones first, in the
    order in which backward completes them. `places[i]` is parameter i's (chunk id, index of its slot in
    that chunk).
    """

    chunk_bytes: int  # the common size of chunks
    alignment: int  # bytes; every slot starts on a multiple
    specs: tuple[ParameterSpec, ...]
    groups: tuple[ChunkGroup, ...]
    chunks: tuple[Chunk, ...]
    places: tuple[tuple[int, int], ...]

    def blocks_of(self, chunk: Chunk) -> int:
        """Return the blocks of `chunk_bytes` that the chunk takes in an arena; several if oversize."""
        return -(-chunk.nbytes // self.chunk_bytes)

    @property
    def trainable(self) -> tuple[Chunk, ...]:
        """The chunks that receive gradients, in the order in which backward completes them."""
        return tuple(chunk for chunk in self.chunks if self.groups[chunk.group].trainable)

    @property
    def nbytes(self) -> int:
        """Bytes of all chunks' storage."""
        return sum(chunk.nbytes for chunk in self.chunks)

    @property
    def used_bytes(self) -> int:
        """Bytes that belong to parameters."""
        return sum(spec.nbytes for spec in self.specs)

    @property
    def waste(self) -> float:
        """The fraction of storage that belongs to no parameter: padding, and stored tails of chunks.

        A layout in blocks stores no tails; `block_waste` counts them.
        """
        total = self.nbytes
        return (total - self.used_bytes) / total if total else 0.0

    @property
    def blocks(self) -> int:
        """Blocks of `chunk_bytes` that all chunks take in an arena."""
        return sum(self.blocks_of(chunk) for chunk in self.chunks)

    @property
    def block_waste(self) -> float:
        """The fraction of `blocks` that belongs to no parameter: padding, and the tails of blocks."""
        total = self.blocks * self.chunk_bytes
        return (total - self.used_bytes) / total if total else 0.0

    def describe(self) -> str:
        """Return a few lines for users: chunks by group, and the waste."""
        lines = [
            f"{len(self.specs)} parameters ({format_bytes(self.used_bytes)}) in "
            f"{_counted(len(self.chunks), 'chunk')} of {format_bytes(self.chunk_bytes)}; {self.waste:.2%} "
            "of the memory is unused"
        ]
        for index, group in enumerate(self.groups):
            chunks = [chunk for chunk in self.chunks if chunk.group == index]
            oversize = sum(chunk.oversize for chunk in chunks)
            features = [
                group.dtype,
                "trainable" if group.trainable else "frozen",
                group.settings,
                group.feature,
            ]
            lines.append(
                f"  {', '.join(filter(None, features))}: {_counted(len(chunks), 'chunk')}, "
                f"{format_bytes(sum(chunk.nbytes for chunk in chunks))}"
                + (f", {oversize} of them of one oversize parameter each" if oversize else "")
            )
        return "\n".join(lines)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
