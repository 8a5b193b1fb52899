"""The workers' mean of the loss that an optimizer's closure returns."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from atoll.train.gradients.samples import ContributionWeight
from atoll.train.members.workers import Workers


class MeanLoss:
    """Takes the mean of a loss over the workers, weighted as its gradients were in the latest reduction."""

    def __init__(self, workers: Workers) -> None:
        self._workers, self._weight = workers, 0.0

    def reduced(self, own: ContributionWeight, *, alike: bool) -> None:
        """Note this worker's contribution to a reduction. `alike`: all workers counted alike."""
        self._weight = own.counts_alike if alike else own.weight

    def __call__(self, loss: Any) -> Any:
        """Return the mean of a loss, a number or a tensor of one element. A collective.

        Anything else that a closure returns is returned as it is.
        """
        is_number = loss.numel() == 1 if isinstance(loss, Tensor) else isinstance(loss, (int, float))
        if self._workers.alone or not is_number:
            return loss
        mean = self._workers.reduce(float(loss), "mean", self._weight, "the closure's loss")
        return loss.detach().new_tensor(mean) if isinstance(loss, Tensor) else mean
