"""The gradients of a worker that is alone. They stay where autograd puts them.

No work is done as gradients come, nor when their backward ends. The samples of a backward count when the next
backward reaches a batch, or before the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from atoll.tensors.binding import BoundChunk, Buffer
from atoll.tensors.torch_compat import copy_all
from atoll.train.gradients.reducer import Reducer

_SMALL_BYTES = 2**18  # of gradients, up to which a copy costs less than a step parameter by parameter


class SoloReducer(Reducer):
    """The reducer of one model on a worker without others to reduce with."""

    acts_after_backward = False

    _backward = -1  # the latest backward that has reached a batch
    _counts_now = True  # True if that backward was outside no_sync
    _raised = False  # True if it raised, and its samples are still counted

    def reached(self, backward: int) -> None:
        """Count the samples of the backward before, and note that backward number `backward` is about to
        count a batch.

        -1: a forward counts the batch, outside of any backward.
        """
        if self.phase.unsent and backward != self._backward and self._counts_now:
            self.reduce()
        self._backward, self._counts_now = backward, self.synchronous
        self.phase.unsent = True

    def raised(self) -> None:
        self._raised = True

    def begin(self) -> None:
        """Forget a backward that raised. What is left to count has come under no_sync."""
        super().begin()
        self._raised = self._counts_now = False

    def reduce(self) -> None:
        """Count the samples of all backwards since the last call."""
        phase = self.phase
        own = self._calls.contribution(phase.unsent or self.watch.has_values())
        phase.reduced, phase.unsent = True, False
        self.consumed += self._calls.committed(own, own.samples)

    def before_step(self, follows: bool = False) -> None:
        if self._raised and not follows:
            self._calls.reduce(self)  # gives that backward up first
        elif not follows and (self.phase.unsent or not self.phase.reduced):
            self.reduce()

    def after_step(self) -> None:
        self.phase.reduced = False
        self.steps += 1

    def count_before(self) -> None:
        if self.phase.unsent and self._counts_now and not self._raised:
            self.reduce()

    def note_zeros(self, parameters: Iterable[nn.Parameter]) -> None:
        """Do nothing: a step without a batch counts nothing, with or without gradients."""

    def settle(self) -> None:
        if self.phase.unsent and self.synchronous and not self._raised:
            self.reduce()

    def confirm(self, what: str) -> None:  # noqa: ARG002
        self.settle()


def are_quickly_gathered(chunks: Sequence[BoundChunk]) -> bool:
    """True if copying the gradients of these chunks is quicker than stepping parameter by parameter.

    On a CPU torch steps parameter by parameter, at some ten microseconds each.
    """
    parameters = [parameter for bound in chunks for parameter in bound.parameters]
    nbytes = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    return nbytes <= _SMALL_BYTES and all(parameter.is_cpu for parameter in parameters)


class GatheredGradients:
    """Copies of the gradients of each chunk, side by side, for a step on few tensors."""

    def __init__(self, chunks: Sequence[BoundChunk]) -> None:
        self._buffers = {
            bound.chunk.id: Buffer(bound.chunk, bound.parameters, bound.flat.new_zeros(bound.chunk.extent))
            for bound in chunks
        }
        self._all = {bound.chunk.id: (True,) * len(bound.parameters) for bound in chunks}

    @torch.no_grad()
    def gather(self, bound: BoundChunk) -> tuple[Tensor, tuple[bool, ...]] | None:
        """Copy a chunk's gradients; return the copy, (extent,), and for each slot whether it has one. None if
        one is sparse."""
        buffer = self._buffers[bound.chunk.id]
        views, gradients = [], []
        for parameter, view in zip(bound.parameters, buffer.views, strict=True):
            gradient = parameter.grad
            if gradient is None:
                view.zero_()
                continue
            if gradient.is_sparse:
                return None
            views.append(view)
            gradients.append(gradient)
        if len(gradients) == len(buffer.views):
            copy_all(views, gradients)
            return buffer.flat, self._all[bound.chunk.id]
        if gradients:
            copy_all(views, gradients)
        return buffer.flat, tuple(parameter.grad is not None for parameter in bound.parameters)
