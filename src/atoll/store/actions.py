"""Actions on tensors that a shard's state asks of the process around it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias, Union

from atoll.core.weighing import KNOWN
from atoll.store.losses import ChunkLoss
from atoll.wire.messages import Hyperparameters

# The handle of a chunk's gradients, and one byte a slot: whether it has a gradient.
GradientHandle: TypeAlias = tuple[int, bytes]
GradientHandles: TypeAlias = dict[int, GradientHandle]  # by chunk


@dataclass(frozen=True)
class PushOutcome:
    """The result of a Push or a Replace.

    An empty `refused` with `keep` False is a duplicate, which is no error.

    Attributes:
        keep: True if the payload is held under its handle from now on; otherwise free it.
        staged: True if this shard now has all chunks of the contribution: tell the log so, by Staged.
        refused: why the payload was not taken.
        joins: when the last run of a chunk has come, the handles of all its runs, in order. Their payloads,
            end to end, are from now on held under the handle of the run that came last, and under no other.
        freed: handles of runs that nobody needs any more.
    """

    keep: bool = False
    staged: bool = False
    refused: str = ""
    joins: tuple[int, ...] = ()
    freed: tuple[int, ...] = ()


@dataclass(frozen=True)
class CombineChunks:
    """BSP: make the weighted mean of each chunk.

    A chunk that a contribution lacks counts as zeros. Lost elements that the sender does not send again
    (`borne`) are left out of the mean.

    Attributes:
        contributions: (weight, chunks) of each, in order of worker.
        weight: the sum of the counted weights, for wire's Mean.
        samples: the sum of samples, for wire's Mean.
        losses: what each contribution lost, by chunk, in the order of `contributions`; empty if nothing was
            lost.
        basis: the basis of the least certain weight (core/weighing.py).
        alike: the number of workers that count.
        weights: of each contribution, for each optimizer the weight of its gradients, in place of the one in
            `contributions`; empty: none differs.
    """

    iteration: int
    contributions: list[tuple[float, GradientHandles]]
    weight: float
    samples: float
    losses: list[dict[int, ChunkLoss]] = field(default_factory=list)
    basis: str = KNOWN
    alike: float = 1.0
    weights: list[list[float]] = field(default_factory=list)


@dataclass(frozen=True)
class StepChunks:
    """BSP: step the optimizer with an iteration's mean.

    Attributes:
        scale: the factor of the mean.
        edited: chunks that replace the mean's, and are not scaled.
        accepted: False only drops the mean.
        nobody: True if all workers that had the mean were gone before one said how to step.
        optimizer: the optimizer that steps, of the model's.
        stays: True if the mean stays for steps of the model's other optimizers.
        written: the values that chunks have before the step, also if it is not accepted.
    """

    iteration: int
    scale: float
    hyperparameters: Hyperparameters
    edited: GradientHandles
    accepted: bool
    nobody: bool = False
    optimizer: int = 0
    stays: bool = False
    written: GradientHandles = field(default_factory=dict)


@dataclass(frozen=True)
class ApplyChunks:
    """SSP, ASP: add a contribution to the mean of the open step, and make the step, again if it was made
    before.

    The fields are those of the log's Apply, with the contribution's chunks.
    """

    worker: int
    incarnation: int
    iteration: int
    chunks: GradientHandles
    part: float
    opens: bool
    closes: bool
    hyperparameters: Hyperparameters
    staleness: float
    behind: int = 0
    optimizer: int = 0


@dataclass(frozen=True)
class Release:
    """Free the payloads under these handles."""

    handles: list[int]


Action: TypeAlias = Union[CombineChunks, StepChunks, ApplyChunks, Release]
