"""The phase of an iteration between backward, reduction and step."""

from __future__ import annotations

from collections.abc import Callable

from atoll.tensors.torch_compat import backward_under_way
from atoll.train.gradients.watch import GradientWatch


class IterationPhase:
    """The phase of one model's iteration: its gradients come, are reduced, and are stepped.

    `watch` sees what the script does with the gradients between these. `arm()` is called as the first
    gradient of a backward comes.

    Attributes:
        unsent: True if gradients have come that no reduction has seen.
        reduced: True between a reduction and its step.
    """

    def __init__(self, watch: GradientWatch, arm: Callable[[], None]) -> None:
        self._watch, self._arm = watch, arm
        self.unsent = self.reduced = False
        self._came_in = -1  # the backward in which the latest gradient came

    def came(self, *_: object) -> None:
        """Note that autograd has delivered a gradient."""
        backward = backward_under_way()
        if backward == -1 or backward != self._came_in:
            self._came_in = backward
            self._arm()
        self.unsent = True

    @property
    def has_batch(self) -> bool:
        """True if a backward has left gradients in this iteration."""
        return self.unsent or self.reduced

    @property
    def awaits_step(self) -> bool:
        """True if gradients are reduced and not stepped, and none have come since."""
        return self.reduced and not self.unsent

    def has_unstepped(self) -> bool:
        """True between a backward and its step, unless the script has zeroed the reduced gradients."""
        return self.unsent or (self.reduced and self._watch.has_values())

    def is_left_out(self) -> bool:
        """True if the script has zeroed the reduced gradients without a step (see `GradientWatch`)."""
        return self.reduced and not self.unsent and self._watch.is_left_out()

    def end_reduction(self) -> None:
        """Note that the gradients are reduced."""
        self.reduced, self.unsent = True, False
        self._watch.reduced()

    def end_step(self) -> None:
        """Note that the reduced gradients are stepped."""
        self.reduced = False
        self._watch.stepped()
