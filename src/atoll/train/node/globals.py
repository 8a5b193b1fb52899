"""The global parameters at a node's CPU side, and the optimizer that steps them.

An iteration's contributions make one step: their mean weighted by samples, in order of node, clipped by its
global norm where the scripts ask for it, with hyperparameters that depend on the iteration alone. Every
node makes the same operations in the same order, each on one thread, so all have the same bits.
Source: S0, "The global parameters".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from atoll.chunks import ChunkMap
from atoll.wire.device import Clip
from atoll.wire.messages import Hyperparameters

Key: TypeAlias = tuple[int, tuple[tuple[int, int], ...]]  # an iteration, and whose contributions
_COLUMNS = 1024  # of 8 bytes, by which a chunk's digest is summed
_NO_DIGEST = bytes(8)


@dataclass(frozen=True)
class Contribution:
    """What node `node` adds to an iteration: gradients [chunk.extent] of every trainable chunk, and for each
    of them, in which slots there is one (zeros stand where not).

    `weight` is its part in the mean; 0: it is left out (NaN, under "skip"). The gradients are only read.
    """

    node: int
    incarnation: int
    samples: float
    weight: float
    gradients: Mapping[int, Tensor]
    present: Mapping[int, bytes]
    hyperparameters: Hyperparameters
    clip: Clip | None = None

    @property
    def who(self) -> tuple[int, int]:
        return self.node, self.incarnation


@dataclass(frozen=True)
class Outcome:
    """What became of an iteration: `norm` of the mean where it was asked for, before clipping; `unlike`,
    the nodes whose hyperparameters, or wish to clip, were not the first one's, which counted."""

    iteration: int
    stepped: bool
    norm: float | None
    unlike: tuple[int, ...]
    digest: bytes


class GlobalParameters:
    """The global parameters of `layout`, at `iteration`: how many iterations have been applied.

    The first `hyperparameters` are the param groups' as plain_hyperparameters makes them, and `optimizer` is
    its class's full name; see ShardOptimizer for `configured` and `fused`. `threads` work on as many chunks
    at once. To be used by one thread. Raises UserError for an optimizer that cannot be run here.
    """

    def __init__(
        self,
        layout: ChunkMap,
        optimizer: str,
        hyperparameters: Hyperparameters,
        *,
        configured: str = "",
        fused: bool = True,
        threads: int = 1,
    ) -> None: ...

    @property
    def chunks(self) -> tuple[int, ...]:
        """The ids of the chunks that contributions are made of: the trainable ones, in order."""
        ...

    def values(self, chunk: int) -> Tensor:
        """A chunk's global parameters where they lie: the next step changes them."""
        ...

    def set_values(self, chunk: int, values: Tensor) -> None: ...

    def check(self, hyperparameters: Hyperparameters) -> None:
        """Raise UserError for hyperparameters that `apply` would not take: for what came from outside."""
        ...

    def apply(self, iteration: int, contributions: Sequence[Contribution]) -> Outcome:
        """Make the step of an iteration, the next one, with all its contributions in order of node.

        Where all are left out no step is made, but the iteration counts.
        """
        ...

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes of "parameters", "optimizer" and "scratch" (see docs/peers.md)."""
        ...
