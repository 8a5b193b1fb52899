"""Actions that a shard's state asks of its runtime, on tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias, Union

from atoll.core.weighing import KNOWN
from atoll.store.losses import ChunkLoss
from atoll.wire.messages import Hyperparameters

Part: TypeAlias = tuple[int, bytes]  # the handle of a chunk's gradient, and which slots have one
Parts: TypeAlias = dict[int, Part]  # by chunk


@dataclass(frozen=True)
class PushOutcome:
    """`keep`: the payload is now held under its handle; else free it. `staged`: tell the log Staged. An empty
    `refused` with `keep` False is a duplicate, which is no error.

    Of a share: `joins` are the handles of all the runs of a chunk that is whole now, in order, this one's
    among them: their payloads, end to end, are from now on held under this one's handle, and under no other.
    `freed` are handles of runs that nobody needs."""

    keep: bool = False
    staged: bool = False
    refused: str = ""
    joins: tuple[int, ...] = ()
    freed: tuple[int, ...] = ()


@dataclass(frozen=True)
class CombineChunks:
    """BSP: make the weighted mean of each chunk. A chunk that a contribution lacks counts as zeros; what of
    one was lost and borne does not count. `losses`, by chunk, are in the order of `contributions`."""

    iteration: int
    contributions: list[tuple[float, Parts]]  # in order of worker
    weight: float  # sums of what was counted, for wire's Mean
    samples: float
    losses: list[dict[int, ChunkLoss]] = field(default_factory=list)  # empty: nothing was lost
    basis: str = KNOWN  # of the least certain weight
    alike: float = 1.0  # workers that count


@dataclass(frozen=True)
class StepChunks:
    """BSP: step the optimizer with the mean times `scale`; with `edited` in the place of the mean's chunks,
    unscaled. Not `accepted`: only drop the mean. `nobody`: as the log's Step has it."""

    iteration: int
    scale: float
    hyperparameters: Hyperparameters
    edited: Parts
    accepted: bool
    nobody: bool = False


@dataclass(frozen=True)
class ApplyChunks:
    """SSP, ASP: add these chunks to the mean that the open step is made with, and make it (anew).

    It `opens` a step, `closes` it, and is `part` of the weight so far: see the log's Apply.
    """

    worker: int
    incarnation: int
    iteration: int
    chunks: Parts
    part: float
    opens: bool
    closes: bool
    hyperparameters: Hyperparameters
    staleness: float
    behind: int = 0


@dataclass(frozen=True)
class Release:
    """Free what is held under these handles."""

    handles: list[int]


Action: TypeAlias = Union[CombineChunks, StepChunks, ApplyChunks, Release]
