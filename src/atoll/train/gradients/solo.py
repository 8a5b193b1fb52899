"""The gradients of a worker that is alone: they stay where autograd puts them.

Nothing is done as gradients come, nor when their backward ends. What a backward has trained on counts when
the next one reaches a batch, or before the step.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from atoll.tensors.binding import check_usable
from atoll.train.gradients.reducer import Clipping, Reducer


class SoloReducer(Reducer):
    """The reducer of one model on a worker without others to reduce with."""

    acts_after_backward = False

    _backward = -1  # the latest that has reached a batch
    _counts_now = True  # whether that was outside no_sync

    def reached(self, backward: int) -> None:
        """Backward number `backward` is about to count a batch; -1: a forward counts it, outside of any."""
        if self.unsent and backward != self._backward and self._counts_now:
            self.reduce()
        self._backward, self._counts_now = backward, self.synchronous
        self.unsent = True

    def reduce(self) -> None:
        """Count what was trained on since the last call."""
        own = self._calls.contribution(self.unsent or self._has_values())
        self._reduced, self.unsent = True, False
        self.consumed += own.samples
        self._calls.committed(own, own.samples)

    def before_step(self) -> None:
        if self.unsent or not self._reduced:
            self.reduce()

    def after_step(self) -> None:
        self._reduced = False
        self.steps += 1

    def abandon(self) -> None:
        """A backward that raised has left nothing behind."""

    def note_zeros(self, parameters: Iterable[nn.Parameter]) -> None:
        """A step without a batch counts nothing, whether or not there are gradients."""

    def clip(self, by: Clipping) -> Tensor:
        self.check_gradients()
        return super().clip(by)

    def settle(self) -> None:
        if self.unsent and self.synchronous:
            self.reduce()

    def confirm(self, what: str) -> None:  # noqa: ARG002
        self.settle()

    def check_gradients(self) -> None:
        for bound in self._chunks:
            for name, parameter in zip(bound.names, bound.parameters, strict=True):
                if parameter.grad is not None and parameter.grad.is_sparse:
                    check_usable(name, parameter.grad)
