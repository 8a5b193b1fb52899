"""The models that a session has prepared: the one that a call means, and checks of a new one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from atoll.core.errors import PrepareError, UserError
from atoll.tensors.torch_compat import uncompiled
from atoll.train.api.prepared import Prepared
from atoll.train.api.scriptmodel import Given, ScriptModel


class Models:
    """The prepared models. The list `prepared` grows in the order in which the script prepares models.

    If they train `as_one`, it has one entry, which each further model joins.
    """

    def __init__(self, prepared: list[Prepared], *, as_one: bool) -> None:
        self._prepared, self._as_one = prepared, as_one

    def __iter__(self) -> Iterator[ScriptModel]:
        return (model for prepared in self._prepared for model in prepared.models)

    def check_new(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], name: str
    ) -> ScriptModel | None:
        """Return the model as it was prepared before; None for another model.

        Raises PrepareError or UserError for a model or optimizers that cannot be prepared. That is so if
        `model` is no module, if `optimizers` are not optimizers, each another one, or if one of the model's
        parameters or its `name` belongs to another model prepared before.
        """
        _check_pair(model, optimizers)
        module = uncompiled(model)
        former = next((each for each in self if each.module is module), None)
        for other in self:
            if other is former:
                continue
            if name and other.origin.name == name:
                raise UserError(f"session.prepare(name={name!r}): another model has that name already")
            taken = {id(parameter) for parameter in other.parameters.values()}
            for own, parameter in module.named_parameters():
                if id(parameter) in taken:
                    raise PrepareError(
                        f"parameter {own!r} belongs to another prepared model too; put both models into one "
                        "nn.ModuleList and prepare that"
                    )
        return former

    def place(self, former: ScriptModel | None) -> Prepared | None:
        """Return the prepared model in whose place another one is about to be prepared: that of which
        `former` is a part, or the one that every model joins. None: there is none."""
        if former is None:
            return self._prepared[0] if self._as_one and self._prepared else None
        return self.of(former)

    def together_with(self, new: Given, known: ScriptModel | None) -> list[Given]:
        """Return what the script has given for all models that train as one with a `new` one, in order. It
        was prepared before as `known`; then its batches stay."""
        place = self.place(known)
        given = [] if place is None else [each.given for each in place.models]
        if known is None:
            return [*given, new]
        anew = replace(new, batches=known.given.batches)
        return [anew if each is known.given else each for each in given]

    def put(self, prepared: Prepared, former: Prepared | None) -> None:
        """Add a prepared model, or put it in the place of `former`."""
        if former is None:
            self._prepared.append(prepared)
        else:
            self._prepared[self._prepared.index(former)] = prepared

    def require(self, what: str) -> None:
        """Raise UserError unless a model is prepared. `what` names the call that needs one."""
        if not self._prepared:
            raise UserError(f"{what} needs a model; call session.prepare(model, optimizer) first")

    def of(self, model: ScriptModel) -> Prepared:
        """Return the prepared model of which `model` is a part."""
        return next(each for each in self._prepared if model in each.models)

    def find(self, model: nn.Module | None) -> ScriptModel:
        """Return the prepared model that a call means by `model`; if that is None, the only one.

        Raises UserError if there is no such model, or if several are prepared and `model` is None.
        """
        self.require("this call")
        known = list(self)
        if model is None:
            if len(known) > 1:
                raise UserError("several models are prepared; say which is meant with model=...")
            return known[0]
        for each in known:
            if each.module is uncompiled(model):
                return each
        raise UserError("this model is not prepared; call session.prepare(model, optimizer) first")

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally inside the block (`Session.no_sync`)."""
        before = [(prepared.reducer, prepared.reducer.synchronous) for prepared in self._prepared]
        for reducer, _ in before:
            reducer.synchronous = False
        try:
            yield
        finally:
            for reducer, synchronous in before:
                reducer.synchronous = synchronous


def _check_pair(model: object, optimizers: Sequence[object]) -> None:
    if not isinstance(model, nn.Module):
        raise PrepareError(
            f"session.prepare takes one nn.Module as its model, and was given a {type(model).__name__}; put "
            "several into one nn.ModuleList"
        )
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise PrepareError(
                "session.prepare takes a torch.optim.Optimizer, or a list of several, and was given a "
                f"{type(optimizer).__name__}"
            )
    if not optimizers:
        raise PrepareError("session.prepare was given an empty list of optimizers; give it one or more")
    if len(set(map(id, optimizers))) < len(optimizers):
        raise PrepareError("session.prepare was given one optimizer twice in its list; give it once")
