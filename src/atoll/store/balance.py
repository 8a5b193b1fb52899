"""Which shard holds which chunk."""

from __future__ import annotations

from collections.abc import Sequence


def balance(sizes: Sequence[int], shards: int) -> list[int]:
    """The shard of each chunk, given the chunks' sizes in bytes: the largest first, to the least loaded.

    Ties go by index, so that everyone who asks gets the same answer. With more shards than chunks, the last
    shards hold none. Raises ValueError for less than one shard.
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
