"""The layout of parameters in chunks, from names, shapes and dtypes alone."""

from __future__ import annotations

from atoll.chunks.layout import lay_out
from atoll.chunks.maps import Chunk, ChunkGroup, ChunkMap, Slot
from atoll.chunks.memory import lay_out_memory, sizes_worth_trying
from atoll.chunks.shapes import parse_shapes
from atoll.chunks.specs import SPARSE, ParameterSpec, itemsize

__all__ = [
    "SPARSE",
    "Chunk",
    "ChunkGroup",
    "ChunkMap",
    "ParameterSpec",
    "Slot",
    "itemsize",
    "lay_out",
    "lay_out_memory",
    "parse_shapes",
    "sizes_worth_trying",
]
