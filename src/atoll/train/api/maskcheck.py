"""A session's check of its workers' random numbers: equal ones give all workers the same dropout masks."""

from __future__ import annotations

from collections.abc import Callable

import torch

from atoll.train.checkpoint.resume import TrainingState
from atoll.train.gradients.masks import ALIKE, digest_of_generators, has_random_layers
from atoll.train.members.workers import Workers


class MaskCheck:
    """A warning, given once, if dropout masks are equal on all workers.

    All workers check after the first iteration that they make, or at the end of a session without one. A
    worker that joins later does not check.
    """

    def __init__(
        self,
        state: TrainingState,
        workers: Workers,
        device: torch.device,
        warn_once: Callable[[str, str], None],
    ) -> None:
        self._state, self._workers, self._device, self._warn_once = state, workers, device, warn_once
        self._at = 1  # the iteration after which workers check

    def begin(self) -> None:
        """Check after the next iteration: all workers have loaded a checkpoint."""
        self._at = self._state.iteration + 1

    @property
    def is_due(self) -> bool:
        """True right after the iteration at which workers check."""
        return self._state.iteration == self._at

    def look_at_end(self) -> None:
        """Check if the session made no step. All workers make this call."""
        if self._state.iteration < self._at:
            self.look()

    def look(self) -> None:
        """Compare the workers' random numbers. All workers make this call in one iteration."""
        modules = [module for each in self._state.prepared for module in each.module.modules()]
        if self._state.world == 1 or not has_random_layers(modules):
            return
        own = [digest_of_generators(self._device), has_random_layers(modules, training=True)]
        everyone = self._workers.gather(own, "the workers' random numbers")
        alike = len(everyone) > 1 and all(each == [own[0], True] for each in everyone)
        if alike and self._workers.is_first:
            self._warn_once("masks", ALIKE)
