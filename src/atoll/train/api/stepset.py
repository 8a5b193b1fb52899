"""One optimizer of a prepared model, and its place in an iteration.

A model may have several optimizers. Each steps when the script calls it, with the mean that was reduced last.
An optimizer that steps more seldom than the others leaves its gradients to the next backward, which adds to
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from atoll.tensors.bf16 import Float32Steps
from atoll.tensors.chunkstate import State
from atoll.tensors.optimizer import StepHooks
from atoll.tensors.stepunit import Unit
from atoll.train.gradients.watch import GradientWatch


class SteppedModel(Protocol):
    """The model that optimizers step (`train/api/prepared.py`: Prepared)."""

    def before_unscaling(self, of: StepSet) -> None:
        """Act before a GradScaler looks for infinities in this optimizer's gradients."""

    def has_batch_for(self, of: StepSet) -> bool:
        """False if this optimizer has no gradients of a batch of this worker to step."""

    def before_step(self, of: StepSet) -> None:
        """Act before this optimizer steps."""

    def accepts(self, of: StepSet, gradients: Sequence[Tensor]) -> bool:
        """Return True if this optimizer is to step these gradients."""

    def after_step(self, of: StepSet) -> None:
        """Act after this optimizer has stepped."""

    def mean_loss(self, loss: Any) -> Any:
        """Return the workers' mean of a loss whose gradients were just reduced."""


class StepSet:
    """The parameters that one optimizer steps.

    `way_out` says what to do about changed param groups. `watch` notices gradients of the optimizer that the
    script drops; it is None if the model has no other optimizer. `loads` and `loaded` follow a load of its
    state by the script (`tensors/optimizer.py`: StepHooks).

    Attributes:
        optimizer: the optimizer.
        parameters: those that it steps.
        unit: the unit in which it steps.
        hooks: the functions around its steps.
        float32: how it steps bfloat16 parameters in float32; None: it steps their own values.
        own_samples: this worker's samples since its last step.
        waits: True if gradients were reduced that it has not stepped. Always False if the model has no other
            optimizer.
        follows: True in a step of gradients that another optimizer has stepped before.
        repeats: True while the optimizer calls its closure again in a step, which has counted the samples.
    """

    def __init__(
        self,
        model: SteppedModel,
        optimizer: torch.optim.Optimizer,
        unit: Unit,
        way_out: str,
        watch: GradientWatch | None = None,
        float32: Float32Steps | None = None,
        *,
        loads: Callable[[StepSet, Callable[[], State], str], State],
        loaded: Callable[[StepSet, str], None],
    ) -> None:
        self._model, self.optimizer, self.unit, self._watch = model, optimizer, unit, watch
        self.float32 = float32
        self.hooks = StepHooks(
            self._before,
            self._accept,
            self._after,
            model.mean_loss,
            way_out,
            self._evaluates,
            self.has_batch,
            partial(loads, self),
            partial(loaded, self),
        )
        self.parameters = {each for group in optimizer.param_groups for each in group["params"]}
        self.own_samples = 0.0
        self.waits = self.follows = self.repeats = False

    def before_unscaling(self) -> None:
        self._model.before_unscaling(self)

    def has_batch(self) -> bool:
        return self._model.has_batch_for(self)

    def reduced(self) -> None:
        """Note that new gradients are reduced."""
        if self._watch is not None:
            self.waits = True
            self._watch.reduced()

    def note_zeros(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Note a `zero_grad` of `parameters` by the script; return True if such gradients waited."""
        if not self.waits or self._watch is None or self.parameters.isdisjoint(parameters):
            return False
        self._watch.note_zeros(parameters)
        return True

    @property
    def has_gradients_left(self) -> bool:
        """True if gradients were reduced that this optimizer has not stepped and the script has not
        zeroed."""
        watch = self._watch
        return self.waits and watch is not None and watch.has_gradients() and not watch.is_left_out()

    @property
    def has_values(self) -> bool:
        """True if this one of several optimizers has gradients that are not all zeros."""
        return self._watch is not None and self._watch.has_values()

    def _evaluates(self, again: bool) -> None:
        self.repeats = again

    def _before(self) -> None:
        self._model.before_step(self)

    def _accept(self, gradients: Sequence[Tensor]) -> bool:
        return self._model.accepts(self, gradients)

    def _after(self) -> None:
        self.repeats = False
        self._model.after_step(self)
