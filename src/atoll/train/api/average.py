"""Exponential averages of models' parameters (`Session.average`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from atoll.core.errors import PrepareError, UserError
from atoll.tensors.averaging import AVERAGE, keep_average, keeps_average
from atoll.tensors.torch_compat import uncompiled


class Average:
    """The exponential average of one model's parameters: a state of the model's optimizers.

    The session's checkpoints have it with the optimizers' states.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay = model, decay
        self._optimizers: list[torch.optim.Optimizer] = []

    def begin(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Let these optimizers keep the average from now on."""
        for optimizer in optimizers:
            if "step" in vars(optimizer):
                raise PrepareError(
                    "session.average: a scheduler, or another wrapper, already has the optimizer's step; "
                    "make it after session.prepare"
                )
        for optimizer in optimizers:
            if not keeps_average(optimizer):
                keep_average(optimizer, self.decay)
        self._optimizers = list(optimizers)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter's name and average, one at a time; a parameter that was never stepped is its
        own average.

        Raises UserError if the model is not prepared.
        """
        if not self._optimizers:
            raise UserError(
                "this average's model is not prepared: give session.average and session.prepare one model"
            )
        for name, parameter in self.model.named_parameters():
            average = parameter.detach()
            for optimizer in self._optimizers:
                state = optimizer.state.get(parameter)
                if state is not None and AVERAGE in state:
                    average = state[AVERAGE]
            yield name, average

    @torch.no_grad()
    def copy_to(self, module: nn.Module) -> None:
        """Copy the average into the parameters of `module`, and the model's buffers into its buffers.

        `module` is a plain module like the model. Raises UserError, naming the first parameter that differs,
        for another.
        """
        targets = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        shapes = {name: tuple(each.shape) for name, each in targets.items()}
        own = [*self.model.named_parameters(), *self.model.named_buffers()]
        for name, each in own:
            if shapes.get(name) != tuple(each.shape):
                other = f"of shape {shapes[name]}" if name in shapes else "missing"
                raise UserError(
                    f"average.copy_to: {name!r} of shape {tuple(each.shape)} is {other} in the module that "
                    "it was given, which is of another model"
                )
        for name, average in self.named_parameters():
            targets[name].copy_(average)
        for name, buffer in self.model.named_buffers():
            targets[name].copy_(buffer)


class Averages:
    """The averages of a session."""

    def __init__(self) -> None:
        self._averages: list[Average] = []

    def add(self, model: nn.Module, decay: float, prepared: Sequence[nn.Module]) -> Average:
        """Return a new average of `model`; `prepared` are the models that are prepared already."""
        if not 0 <= decay < 1:
            raise UserError(f"session.average: decay is {decay}, and must be at least 0 and less than 1")
        module = uncompiled(model)
        if any(each is module for each in prepared):
            raise UserError("session.average: this model is prepared already; call it before session.prepare")
        if self.of(module) is not None:
            raise UserError("session.average: this model has an average already; use that one")
        self._averages.append(Average(module, decay))
        return self._averages[-1]

    def of(self, model: nn.Module) -> Average | None:
        """Return the average of a model that is prepared now; None: it has none.

        Raises PrepareError if a part of it has an average, or a module of which it is a part.
        """
        module = uncompiled(model)
        own = {id(parameter) for parameter in module.parameters()}
        for each in self._averages:
            if each.model is module:
                return each
            if any(id(parameter) in own for parameter in each.model.parameters()):
                raise PrepareError(
                    "session.average was given another module that shares parameters with this one; give it "
                    "the module that session.prepare takes"
                )
        return None
