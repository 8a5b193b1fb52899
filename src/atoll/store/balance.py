"""The division of chunks among shards, by their sizes."""

from __future__ import annotations

from collections.abc import Sequence


def balance(sizes: Sequence[int], shards: int) -> list[int]:
    """Return the shard of each chunk: the largest chunk first, to the least loaded shard.

    Ties go by index, so that every process finds the same division. With more shards than chunks, the last
    shards hold none.

    Args:
        sizes: the chunks' sizes in bytes.

    Raises ValueError for less than one shard.
    """
    if shards < 1:
        raise ValueError(f"{shards} shards can hold nothing")
    loads = [0] * shards
    homes = [0] * len(sizes)
    held = [0] * shards  # chunks of no bytes go round too
    for chunk in sorted(range(len(sizes)), key=lambda chunk: (-sizes[chunk], chunk)):
        home = min(range(shards), key=lambda shard: (loads[shard], held[shard], shard))
        homes[chunk] = home
        loads[home] += sizes[chunk]
        held[home] += 1
    return homes
