"""`fit`: a model and its optimizer under budgets of memory, with no change to either."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import nn

from atoll.chunks import ChunkMap, lay_out_memory
from atoll.core.errors import PrepareError
from atoll.core.memory import Budgets, Memory
from atoll.memory import observing, planning
from atoll.memory.agreeing import NO_EPOCHS, BatchEpochs
from atoll.memory.exchanged import Exchanged
from atoll.memory.fitted import Fitted, Moving, Resident
from atoll.memory.initialising import InitialisedParameter
from atoll.memory.lent import Flats, LentModel
from atoll.memory.members import Members
from atoll.memory.over import refuse_apart
from atoll.memory.parameters import ChunkParameter
from atoll.memory.payloads import Payloads
from atoll.memory.sharded import Sharded
from atoll.memory.sharedplan import agree
from atoll.memory.stepping import has_stepper
from atoll.memory.untilread import Hiding
from atoll.moves.search import MemoryPlan
from atoll.tensors.binding import check_bindable
from atoll.tensors.torch_compat import is_compiled

__all__ = ["Fitted", "fit", "plan"]

# One optimizer, several of which each has parameters of its own, or None if the model is not stepped here.
Optimizers: TypeAlias = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None

_STEPS_ANOTHER = (
    "the {} steps another model that was fitted already; give each model an optimizer of its own, or close() "
    "that first"
)


def plan(
    model: nn.Module,
    optimizer: Optimizers,
    memory: Memory,
    members: Members | None = None,
    *,
    lent: int = 0,
) -> MemoryPlan:
    """Return the plan by which `fit` would hold the model.

    Args:
        members: the group to share the model with; all of its members call this, and each gets its own plan,
            with chunks of worker 0's size.
        lent: the number of devices that borrow the model (`borrow`); the plan is then for one of them. 0:
            none.

    Raises what `fit` raises; with `members`, on all of them.
    """
    budgets = memory.budgets()
    _check(model, dict(model.named_parameters()))
    if members is None:
        refuse_apart(model, fit="alone")
        return planning.choose(model, _listed(optimizer), budgets, lent=lent)
    return agree(model, _listed(optimizer), budgets, members)


def fit(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    memory: Memory,
    members: Members | None = None,
    plan: MemoryPlan | None = None,
) -> Fitted:
    """Train `model` with `optimizer` within the budgets of `memory`; use both as before, until `close()`.

    Results equal the plain model's to the bit.

    Args:
        optimizer: one optimizer, or a list of several, each with parameters of its own.
        members: the group to share the model with. Each member calls `fit` with the same model and values,
            and keeps the part that it owns (see `memory/sharded.py`).
        plan: the plan that the function `plan` has returned; None: `fit` makes one.

    Raises ConfigError for budgets that cannot be read, PrepareError for a model or an optimizer that cannot
    be held in chunks, UserError for budgets that are too small, with the least that would do. Source:
    docs/memory.md.
    """
    budgets = memory.budgets()
    if plan is None:
        plan = _plan(model, optimizer, memory, members)
    else:
        _check(model, dict(model.named_parameters()))
    optimizers = _listed(optimizer)
    chunk_map = lay_out_memory(planning.specs_for(model, optimizers), chunk_bytes=plan.chunk_bytes)
    fitted: Fitted
    if plan.fits and members is not None:
        raise PrepareError(f"{plan.reason}: there is nothing to share; give smaller budgets, or no members")
    if plan.fits:
        fitted = Resident(model, budgets, plan, chunk_map)
    elif members is not None:
        return _share(model, optimizers, budgets, plan, chunk_map, members)
    else:
        _check_free(optimizers)
        fitted = Moving(model, optimizers, budgets, plan, chunk_map)
    observing.tell_fitted(fitted, optimizers)
    return fitted


def fit_shared(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    memory: Memory,
    members: Members,
    plan: MemoryPlan,
    epochs: BatchEpochs = NO_EPOCHS,
) -> Sharded:
    """Share `model` with other members, by a plan of the function `plan`.

    Args:
        plan: not a plan by which everything fits (`plan.fits`): there is nothing to share then.
        epochs: the epochs of the batches on which members train.

    Raises what `fit` raises.
    """
    _check(model, dict(model.named_parameters()))
    chunk_map = lay_out_memory(planning.specs_for(model, optimizers), chunk_bytes=plan.chunk_bytes)
    return _share(model, optimizers, memory.budgets(), plan, chunk_map, members, epochs)


def _share(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    budgets: Budgets,
    plan: MemoryPlan,
    chunk_map: ChunkMap,
    members: Members,
    epochs: BatchEpochs = NO_EPOCHS,
) -> Sharded:
    _check_free(optimizers)
    sharded = Sharded(model, optimizers, budgets, plan, chunk_map, members, epochs)
    observing.tell_fitted(sharded, optimizers)
    return sharded


def _listed(optimizer: Optimizers) -> Sequence[torch.optim.Optimizer]:
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer


def _check_free(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise PrepareError for an optimizer that steps another fitted model."""
    for optimizer in optimizers:
        if has_stepper(optimizer):
            raise PrepareError(_STEPS_ANOTHER.format(type(optimizer).__name__))


def borrow(
    model: nn.Module,
    *,
    memory: Memory,
    plan: MemoryPlan,
    chunk_map: ChunkMap,
    values: Flats,
    gradients: Payloads,
    peak: int,
    hiding: Hiding,
) -> LentModel:
    """Let `model` train within the device's budget on values that a lender keeps and steps; see `LentModel`.

    Args:
        plan: made by the function `plan` with `lent`; not one by which everything fits.

    Raises PrepareError where `fit` does.
    """
    _check(model, dict(model.named_parameters()))
    return LentModel(model, memory.budgets(), plan, chunk_map, values, gradients, peak, hiding)


def plan_exchanged(model: nn.Module, memory: Memory, staging_bytes: int, *, sums: bool = False) -> MemoryPlan:
    """Return the plan by which `fit_exchanged` would hold the model.

    Args:
        staging_bytes: bytes of host memory for gradients on their way out and values on their way in.
        sums: True if a group's sums lie beside a member's own gradients.

    Raises what `fit` raises.
    """
    budgets = memory.budgets()
    _check(model, dict(model.named_parameters()))
    return planning.choose(model, (), budgets, elsewhere=staging_bytes, sums=sums)


def fit_exchanged(model: nn.Module, memory: Memory, plan: MemoryPlan) -> Exchanged:
    """Hold `model` within the budgets of `memory`, by a plan of `plan_exchanged`; its steps are made
    elsewhere.

    Raises what `fit` raises.
    """
    chunk_map = lay_out_memory(planning.specs_for(model, ()), chunk_bytes=plan.chunk_bytes)
    return Exchanged(model, memory.budgets(), plan, chunk_map)


_plan = plan  # `fit` has an argument of this name


def _check(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise PrepareError for a model that cannot be held in chunks."""
    if not parameters:
        raise PrepareError("memory.fit was given a model without parameters; leave the budgets out")
    for name, module in model.named_modules():
        which = f"module {name or type(module).__name__!r}"
        if is_compiled(module):
            raise PrepareError(
                f"{which} is compiled: torch.compile bakes in where its parameters lie; give memory.fit the "
                "model as it is without torch.compile"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise PrepareError(
                f"{which} is a TorchScript module, whose uses of parameters cannot be seen; give the model "
                "as it was before torch.jit"
            )
    for name, parameter in parameters.items():
        if isinstance(parameter, ChunkParameter):
            raise PrepareError(
                f"parameter {name!r} is in a model that was fitted already; close() that first"
            )
        if type(parameter) not in (nn.Parameter, InitialisedParameter):
            kind = type(parameter).__name__
            raise PrepareError(f"parameter {name!r} is a {kind}; memory.fit takes plain nn.Parameters")
    plain = {name: p for name, p in parameters.items() if type(p) is nn.Parameter}
    check_bindable(plain)
    devices = sorted({str(parameter.device) for parameter in parameters.values()})
    if len(devices) > 1:
        raise PrepareError(f"the model's parameters are on {' and '.join(devices)}; move them to one device")
