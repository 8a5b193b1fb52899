"""Local parameters: the global ones, and over them what the contributions that are pending would make of
them, uncommitted.

For each pending iteration in order comes the optimizer's step with the mean of the contributions that are
there. When all of an iteration's are there, the result is what applying will give, bit for bit.

S0 would multiply each step by its contributions' part of a full batch. A mean over those who are there stands
for the mean over all, though, and whole steps learn better (docs/notes/peers.md).

Chunks are done one by one, each through all the steps: so little memory is needed, and of a chunk that fits
into the processor's cache it is only the gradients that each step reads from memory. Source: S0, "Overlay".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.tensors.shardoptimizer import Scratch
from atoll.train.node.globals import Contribution, GlobalParameters

OVERLAYS = ("all", "own", "none")  # sync.overlay: whose pending contributions the local parameters have


@dataclass(frozen=True)
class Pending:
    """The contributions that are there of an iteration that is not applied yet, in order of node."""

    iteration: int
    contributions: Sequence[Contribution]


class Overlay:
    """Writes local parameters: `parameters`, and over them what is pending. To be used by the thread that
    applies, for it steps them and takes that back."""

    def __init__(self, parameters: GlobalParameters) -> None:
        self._parameters = parameters

    @torch.no_grad()
    def write(self, into: Mapping[int, Tensor], waiting: Sequence[Pending]) -> None:
        """Write every trainable chunk's local parameters into `into` (see HostMemory.buffer). `waiting`: the
        pending iterations in order; with none, what is written are the global parameters. Those, and the
        optimizer's state, are afterwards what they were."""
        parameters, steps = self._parameters, []
        for each in waiting:
            step = parameters.prepare(each.iteration, each.contributions)
            if step is not None:
                steps.append(step)

        def write(chunk: int, scratch: Scratch) -> None:
            if not steps or not parameters.optimizer.trains(chunk):
                into[chunk].copy_(parameters.values(chunk))
                return
            with parameters.optimizer.undone(chunk, scratch):
                for step in steps:
                    parameters.step_chunk(chunk, step, scratch)
                into[chunk].copy_(parameters.values(chunk))

        parameters.for_each_chunk(write)
