"""What all parts of an exchange with the shards of a parameter server have in common: the connection, and
checks of what comes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from atoll.core.config import LinkOptions
from atoll.core.errors import RunError
from atoll.exchange.coding import PLAIN, Coding
from atoll.exchange.link import Link
from atoll.tensors.binding import BoundChunk
from atoll.tensors.payload import tensor_of
from atoll.wire.messages import Committed, Mean, Used, run_of

# Resend topics: what answers a contribution (the mean under bsp, else the parameters), a step, a group's
# commit.
CONTRIBUTION, STEP, COMMIT = "contribution", "step", "commit"


class Members(Protocol):
    """Who is told of the members of each iteration, and lets newcomers in between two of them."""

    def boundary(self, iteration: int) -> None:
        """All of `iteration` is done but its exchange, and nothing of that was committed; raises UserError
        where this worker has yet to enter the run."""

    def over(self) -> None:
        """The exchange is over."""

    def told(self, committed: Committed) -> None:
        """An iteration counts, with those in `committed`."""


@dataclass(frozen=True)
class Connection:
    """The shards, which of them holds each chunk (by id), the data that an iteration has used up, this
    worker's number in the run, and how gradients go there and are written."""

    shards: Link
    shard_of: dict[int, int]
    used: Callable[[], list[Used]]
    staleness: Callable[[float], None]  # told what the shards measured of each contribution
    members: Members
    worker: int
    link: LinkOptions = field(default_factory=LinkOptions)
    coding: Coding = PLAIN


def chunks_named(chunks: Iterable[int]) -> str:
    """`chunk 3`, `chunks 1 and 3`, `chunks 0, 1, 2 and 5 more`."""
    ids = sorted(chunks)
    if len(ids) == 1:
        return f"chunk {ids[0]}"
    named, more = ids[:3], len(ids) - 3
    last = f"{more} more" if more > 0 else str(named.pop()) if named else "none"
    return f"chunks {', '.join(map(str, named))} and {last}"


def check_holder(shard_of: Mapping[int, int], shard: int, chunk: int) -> None:
    """Raise RunError where `shard` answers for a chunk that another one holds."""
    if shard_of[chunk] != shard:
        raise RunError(f"shard {shard} answered for chunk {chunk}, which shard {shard_of[chunk]} holds")


def check_mean(shard_of: Mapping[int, int], shard: int, mean: Mean, bound: BoundChunk) -> None:
    """Raise RunError where `shard` sends what cannot be the mean of this chunk."""
    check_holder(shard_of, shard, mean.chunk)
    if len(mean.present) != len(bound.parameters):
        raise RunError(
            f"shard {shard} sent a mean of {len(mean.present)} parameters for chunk {mean.chunk}, which has "
            f"{len(bound.parameters)}"
        )


def values_of(
    payload: memoryview | None, bound: BoundChunk, shard: int, share: tuple[int, int] = (0, 1)
) -> Tensor:
    """The values of a chunk, or of a share of it, in `payload`, in place; raises RunError where their number
    is wrong."""
    start, stop = run_of(bound.chunk.extent, *share)
    expected = (stop - start) * bound.dtype.itemsize
    got = 0 if payload is None else len(payload)
    if got != expected:
        raise RunError(f"shard {shard} sent {got} bytes for chunk {bound.chunk.id}, which has {expected}")
    if payload is None or not got:  # the last shares of a chunk that has fewer elements
        return torch.empty(0, dtype=bound.dtype)
    return tensor_of(payload, bound.dtype)
