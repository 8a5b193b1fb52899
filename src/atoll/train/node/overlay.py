"""Local parameters: the global ones, and over them what the contributions that are pending would make of
them, uncommitted.

For each pending iteration in order comes the optimizer's step with the mean of the contributions that are
there; then the parameters go back to a part of the way, those contributions' samples over a full batch's.
When all of an iteration's are there the part is 1, and the result is what applying will give, bit for bit.

Chunks are done one by one, each through all the steps: so little memory is needed, and of a chunk that fits
into the processor's cache it is only the gradients that each step reads from memory. Source: S0, "Overlay".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.tensors.shardoptimizer import Scratch
from atoll.train.node.globals import Contribution, GlobalParameters, Step

OVERLAYS = ("all", "own", "none")  # sync.overlay: whose pending contributions the local parameters have


@dataclass(frozen=True)
class Pending:
    """Contributions to an iteration that is not applied yet, in order of node; `part` of a full batch."""

    iteration: int
    contributions: Sequence[Contribution]
    part: float


def pending(iteration: int, contributions: Sequence[Contribution], batch: float, members: int) -> Pending:
    """Those of an iteration's contributions that are there, where `members` nodes contribute `batch` samples
    together (0: not known, and each counts for as much)."""
    if len(contributions) >= members:
        return Pending(iteration, contributions, 1.0)
    if batch > 0:
        part = sum(each.samples for each in contributions if each.weight > 0) / batch
    else:
        part = len(contributions) / members
    return Pending(iteration, contributions, min(1.0, part))


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
                steps.append((step, each.part))

        def write(chunk: int, scratch: Scratch) -> None:
            if not steps or not parameters.optimizer.trains(chunk):
                into[chunk].copy_(parameters.values(chunk))
                return
            with parameters.optimizer.undone(chunk, scratch) as before:
                _step_all(parameters, chunk, steps, before, into[chunk], scratch)

        parameters.for_each_chunk(write)


def _step_all(
    parameters: GlobalParameters,
    chunk: int,
    steps: Sequence[tuple[Step, float]],
    before: Tensor,
    into: Tensor,
    scratch: Scratch,
) -> None:
    """Make a chunk's steps, each one's change of the values (not that of the state) multiplied by its part;
    the values are `before`, and what comes of them goes to `into`."""
    values = parameters.values(chunk)
    for number, (step, part) in enumerate(steps):
        if number and part < 1.0:
            before = scratch.part("before", values.numel(), values.dtype).copy_(values)
        parameters.step_chunk(chunk, step, scratch)
        is_last = number == len(steps) - 1
        if part < 1.0:
            torch.lerp(before, values, part, out=into if is_last else values)
        elif is_last:
            into.copy_(values)
