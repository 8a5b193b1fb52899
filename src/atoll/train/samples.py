"""How much a worker's batch weighs in an iteration: what `session.weight` says, else the samples that it
holds. Source: core/weighing.py, which says when samples are certain enough to weigh by.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from atoll.core.weighing import KNOWN, NONE, said, worst


@dataclass(frozen=True)
class Contribution:
    """What a worker, or a group of them, puts into an iteration.

    `weight` is its part in a mean by samples, and `alike` in a mean in which all workers count alike: the
    workers behind it. `samples` are for the records. `basis` says how far `weight` is certain
    (core/weighing.py).
    """

    weight: float
    samples: float
    basis: str = KNOWN
    alike: float = 1.0

    @property
    def counts_alike(self) -> float:
        """Its weight where all workers count alike: nothing, where it has none by samples."""
        return self.alike if self.weight > 0 else 0.0

    @property
    def is_certain(self) -> bool:
        return self.basis == KNOWN or self.weight <= 0

    def said(self) -> list[float]:
        """What it says of its weight beside the weight itself (core/weighing.py)."""
        return said(self.weight, self.counts_alike, self.is_certain)


class SampleCount:
    """The samples of the iteration under way: counted as backward reaches them, or given by `session.weight`.

    What a reduction has used stays known until something new is counted or given: a second backward over
    the same batch weighs what the first one did.
    """

    def __init__(self) -> None:
        self._counted: float | None = None
        self._given: float | None = None
        self._basis = KNOWN  # of what was counted
        self._used = False
        self.latest = 1.0  # the weight that logged values get
        self.unknown = 0.0  # the samples of a batch that are not known, where a schedule goes by samples
        self.guessed = False  # that was used

    def count(self, samples: float, basis: str = KNOWN) -> None:
        self._forget_used()
        self._counted = samples + (self._counted or 0.0)
        self._basis = worst([self._basis, basis])
        self.latest = self._counted if self._given is None else self._given

    def missed(self) -> None:
        """Gradients have come of a backward in which nothing was counted."""
        if not self._used:
            self._basis = NONE

    def give(self, weight: float) -> None:
        self._forget_used()
        self._given = weight + (self._given or 0.0)
        self.latest = self._given

    def contribution(self, has_gradient: bool) -> Contribution:
        """A worker with gradients and no known samples weighs 1; one with neither weighs nothing."""
        known = self._counted if self._given is None else self._given
        basis = KNOWN if self._given is not None else NONE if self._counted is None else self._basis
        weight = (1.0 if has_gradient else 0.0) if known is None else known
        samples = 0.0 if self._used else self._samples()
        if has_gradient and not self._used and not samples and self.unknown:
            samples, self.guessed = self.unknown, True
        return Contribution(weight, samples, basis)

    def _samples(self) -> float:
        """For the records: what was counted, unless the script knows better."""
        if self._counted is None or self._basis != KNOWN:
            return self._given if self._given is not None else self._counted or 0.0
        return self._counted

    def use(self, alike: bool = False) -> None:
        """A reduction is done with them; `alike`: all workers counted alike in it."""
        self._used = True
        if alike and self.latest > 0:
            self.latest = 1.0

    def reset(self) -> None:
        """The iteration is over."""
        self._counted, self._given, self._basis, self._used = None, None, KNOWN, False

    def _forget_used(self) -> None:
        if self._used:
            self.reset()


@dataclass(frozen=True)
class Seen:
    """What a forward shows of its number of samples: `samples`, the first dimension of the first tensor that
    has one (None: there is none), whether the output `confirms` it, and `instead`, the first dimensions of
    the output's tensors where none of these is that number."""

    samples: float | None
    confirms: bool = False
    instead: tuple[float, ...] = ()


def seen_in(inputs: Any, output: Any) -> Seen:
    """What a forward's arguments and its output show.

    An output's tensor confirms the count if its first dimension is equal to it. It does not where the first
    two dimensions of input and output agree, as with tokens (L, N) and logits (L, N, V): either may be the
    batch. Vectors (N, F) to vectors (N, F), and images (N, C, H, W) to images, have the batch first.
    """
    first = next((tensor for tensor in tensors_in(inputs) if tensor.dim()), None)
    if first is None:
        return Seen(None)
    samples = first.shape[0]
    outputs = [tensor for tensor in tensors_in(output) if tensor.dim()]
    agreeing = [tensor for tensor in outputs if tensor.shape[0] == samples]
    if not agreeing:
        return Seen(float(samples), instead=tuple(float(tensor.shape[0]) for tensor in outputs))
    return Seen(float(samples), confirms=not any(_is_ambiguous(first, tensor) for tensor in agreeing))


def _is_ambiguous(first: Tensor, output: Tensor) -> bool:
    """Whether either of the first two dimensions may be the batch."""
    both = first.dim() > 1 and output.dim() > 1 and first.shape[1] == output.shape[1] != first.shape[0]
    has_features = first.is_floating_point() and first.dim() == output.dim() and first.dim() in (2, 4)
    return both and not has_features


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested dicts, lists, tuples and dataclasses, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_in(part)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))
