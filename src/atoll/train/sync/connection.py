"""The connection that all parts of an exchange with a parameter server's shards share, and checks of
answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from atoll.core.config import LinkOptions
from atoll.core.errors import RunError
from atoll.exchange.coding import PLAIN, Coding
from atoll.exchange.link import ShardLink
from atoll.exchange.zeros import with_zeros
from atoll.tensors.binding import BoundChunk
from atoll.tensors.payload import tensor_of
from atoll.wire.messages import Committed, Mean, Used, WireError, run_of

# Resend topics: a message is sent again until its topic is answered. A contribution is answered by the mean
# under bsp, else by the parameters.
CONTRIBUTION, STEP, COMMIT = "contribution", "step", "commit"


class IterationMembers(Protocol):
    """The members of each iteration: newcomers enter between two iterations, and the members are notified of
    changes."""

    def boundary(self, iteration: int, *, begins: bool) -> None:
        """Note that `iteration` is computed, and nothing of its exchange was committed: newcomers may take
        the state if it `begins` a pass of the script's loop.

        Raises UserError if this worker has yet to enter the run.
        """

    def over(self) -> None:
        """Note that the exchange is over."""

    def told(self, committed: Committed) -> None:
        """Take the log's answer that an iteration counts, with the members in `committed`."""


@dataclass(frozen=True)
class Connection:
    """One model's connection to the shards.

    Attributes:
        shards: the link to the shards.
        shard_of: the shard that holds each chunk, by the chunk's id.
        used: returns the data that an iteration has used up.
        staleness: called with the staleness of each contribution, as the shards measured it.
        members: is notified of the members of each iteration.
        worker: this worker's number in the run.
        link: the options of the link.
        coding: writes gradients for the way.
    """

    shards: ShardLink
    shard_of: dict[int, int]
    used: Callable[[], list[Used]]
    staleness: Callable[[float], None]
    members: IterationMembers
    worker: int
    link: LinkOptions = field(default_factory=LinkOptions)
    coding: Coding = PLAIN


def chunks_named(chunks: Iterable[int]) -> str:
    """Return words like `chunk 3`, `chunks 1 and 3`, `chunks 0, 1, 2 and 5 more`."""
    ids = sorted(chunks)
    if len(ids) == 1:
        return f"chunk {ids[0]}"
    named, more = ids[:3], len(ids) - 3
    last = f"{more} more" if more > 0 else str(named.pop()) if named else "none"
    return f"chunks {', '.join(map(str, named))} and {last}"


def check_holder(shard_of: Mapping[int, int], shard: int, chunk: int) -> None:
    """Raise RunError if `shard` answers for a chunk that another shard holds."""
    if shard_of[chunk] != shard:
        raise RunError(f"shard {shard} answered for chunk {chunk}, which shard {shard_of[chunk]} holds")


def check_mean(shard_of: Mapping[int, int], shard: int, mean: Mean, bound: BoundChunk) -> None:
    """Raise RunError if a message of `shard` cannot be the mean of this chunk."""
    check_holder(shard_of, shard, mean.chunk)
    if len(mean.present) != len(bound.parameters):
        raise RunError(
            f"shard {shard} sent a mean of {len(mean.present)} parameters for chunk {mean.chunk}, which has "
            f"{len(bound.parameters)}"
        )


def values_of(
    payload: memoryview | None,
    bound: BoundChunk,
    shard: int,
    share: tuple[int, int] = (0, 1),
    *,
    shortened: bool = False,
) -> Tensor:
    """Return the values of a chunk, or of a share of it, 1-D: in the memory of `payload`, or in new memory if
    that is `shortened`, without its runs of zeros.

    Raises RunError if their number is wrong.
    """
    start, stop = run_of(bound.chunk.extent, *share)
    expected = (stop - start) * bound.dtype.itemsize
    if shortened:
        try:
            payload = with_zeros(payload, expected)
        except WireError as error:
            raise RunError(f"shard {shard} sent for chunk {bound.chunk.id} {error}") from None
    got = 0 if payload is None else len(payload)
    if got != expected:
        raise RunError(f"shard {shard} sent {got} bytes for chunk {bound.chunk.id}, which has {expected}")
    if payload is None or not got:  # the last shares of a chunk that has fewer elements
        return torch.empty(0, dtype=bound.dtype)
    return tensor_of(payload, bound.dtype)
