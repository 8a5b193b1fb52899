"""How much a worker's batch weighs in an iteration: what `session.weight` says, else the samples that it
holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Contribution:
    """What a worker puts into an iteration: its `weight` in the mean, and the `samples` behind it."""

    weight: float
    samples: float


class SampleCount:
    """The samples of the iteration under way: counted as backward reaches them, or given by `session.weight`.

    What a reduction has used stays known until something new is counted or given: a second backward over
    the same batch weighs what the first one did.
    """

    def __init__(self) -> None:
        self._counted: float | None = None
        self._given: float | None = None
        self._used = False
        self.latest = 1.0  # the weight that logged values get
        self.unknown = 0.0  # the samples of a batch that are not known, where a schedule goes by samples
        self.guessed = False  # that was used

    def count(self, samples: float) -> None:
        self._forget_used()
        self._counted = samples + (self._counted or 0.0)
        self.latest = self._counted if self._given is None else self._given

    def give(self, weight: float) -> None:
        self._forget_used()
        self._given = weight + (self._given or 0.0)
        self.latest = self._given

    def contribution(self, has_gradient: bool) -> Contribution:
        """A worker with gradients and no known samples weighs 1; one with neither weighs nothing."""
        known = self._counted if self._given is None else self._given
        weight = (1.0 if has_gradient else 0.0) if known is None else known
        samples = 0.0 if self._used else self._counted or 0.0
        if has_gradient and not self._used and not samples and self.unknown:
            samples, self.guessed = self.unknown, True
        return Contribution(weight=weight, samples=samples)

    def use(self) -> None:
        """A reduction is done with them."""
        self._used = True

    def reset(self) -> None:
        """The iteration is over."""
        self._counted, self._given, self._used = None, None, False

    def _forget_used(self) -> None:
        if self._used:
            self.reset()


def leading_dimension(value: Any) -> float | None:
    """The first dimension of the first tensor that has one, in nested arguments; None where there is none."""
    return next((float(tensor.shape[0]) for tensor in tensors_in(value) if tensor.dim()), None)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested dicts, lists and tuples, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_in(part)
