"""Lays a model's parameters out in chunks that lie in blocks of a cache: the layout of chunked memory.

As in `chunks/layout.py` groups of like parameters are laid out each by itself and share one chunk size, but
here a chunk is whole blocks: one, or for an oversize parameter a contiguous run of them. What no parameter
fills, the tail of every chunk and of every run included, counts as waste: so much is stored for nothing in
each tier.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.chunks.maps import ChunkMap
from atoll.chunks.specs import ParameterSpec

ALIGNMENT = 512  # bytes: what PyTorch's allocators give, so that a kernel takes the path that it takes there
PAGE = 4096  # bytes: direct reads and writes of a disk take whole ones
SMALLEST = 2**22  # bytes


def lay_out_memory(
    specs: Sequence[ParameterSpec],
    *,
    chunk_bytes: int | None = None,
    smallest: int = SMALLEST,
    largest: int | None = None,
    members: int = 1,
    alignment: int = ALIGNMENT,
) -> ChunkMap:
    """The layout of the parameters `specs`, given in the order of registration, in blocks of one size.

    Every chunk's storage (`chunk.nbytes`) is a multiple of `chunk_bytes` of the map, the size of a block;
    `map.blocks_of(chunk)` tells how many. Only an oversize chunk, which holds one parameter, has more than
    one. `chunk.extent` is what of a chunk is worth moving. Blocks are a multiple of `members` times 4096
    bytes, so that each of `members` shards of any chunk is even, and whole pages.

    `chunk_bytes` names the size (rounded up to that multiple); None searches from `smallest`, the bytes
    from which on a move fills its link, to `largest` (None: a sixteenth of the model, at least twice
    `smallest`, at most 1 GiB). The same specs give the same map everywhere. Raises PrepareError for a spec that
    cannot be laid out, ConfigError for sizes that make no sense.
    """
    raise NotImplementedError
