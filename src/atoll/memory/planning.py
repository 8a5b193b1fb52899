"""From a model and its optimizer to a plan: what `fit` asks before it takes any memory."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import torch
from torch import nn

from atoll.chunks import ParameterSpec
from atoll.core.memory import Budgets, check_folder
from atoll.memory.bandwidth import measure
from atoll.memory.over import features_of
from atoll.memory.states import stepped_dtype
from atoll.memory.stepping import state_dtypes
from atoll.moves.owners import Share
from atoll.moves.search import MemoryPlan, Profile, Use, search_plan
from atoll.moves.timeline import Bandwidths
from atoll.tensors.binding import specs_of
from atoll.tensors.optimizer import elementwise_keys

_LISTS = (nn.ParameterList, nn.ParameterDict)


def choose(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    budgets: Budgets,
    *,
    profile: Profile | None = None,
    bandwidths: Bandwidths | None = None,
    share: Share | None = None,
    lent: int = 0,
    elsewhere: int | None = None,
    sums: bool = False,
    network: float = 0.0,
    between: float = 0.0,
) -> MemoryPlan:
    """The plan for this model under `budgets`, by `bandwidths`, which else are measured now (well under a
    second); with `share`, for one of several members; with `lent`, for one of so many devices to which
    others lend it, who step it; with `elsewhere`, where shards step it, and that many bytes
    of host memory are staging; with `sums`, a group's sums lie beside a member's gradients. `network`
    bytes/s go between members, each way, and `between` between groups of them that each hold a replica
    (0: not known).

    Without a `profile` (see `memory/profile.py`) uses are taken to go through the parameters in the order of
    registration and back, and to compute for as long as copies take. Raises UserError with
    the least budget that would do, ConfigError where the disk's folder cannot be written to, PrepareError for
    an optimizer that is not element-wise.
    """
    check_folder(budgets)
    if lent:
        optimizer = None
    if optimizer is not None:
        elementwise_keys(optimizer)  # or its line, before a step of it is timed
    if bandwidths is None:
        device = next(model.parameters()).device
        bandwidths = measure(device, optimizer, budgets.folder, measurable(budgets))
    if network or between:
        bandwidths = msgspec.structs.replace(bandwidths, members=network, groups=between)
    if profile is None:
        uses = _computing(model, assumed_uses(model), bandwidths)
        profile = profile_of(model, optimizer, uses, master=budgets.master, measured=False)
    if elsewhere is not None:
        profile = msgspec.structs.replace(profile, elsewhere=True, staging_bytes=elsewhere, sums=sums)
    return search_plan(profile, bandwidths, budgets, share=share, lent=lent)


def measurable(budgets: Budgets) -> int:
    """Bytes that measuring may take for a moment: a quarter of the smaller tier."""
    return min(budgets.device, budgets.host or budgets.device) // 4


def profile_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    uses: tuple[Use, ...],
    *,
    master: bool = False,
    measured: bool = True,
) -> Profile:
    """The model's shapes and its optimizer's state, with these uses; `master` as in Budgets."""
    return Profile(
        specs=specs_for(model, optimizer),
        uses=uses,
        state_bytes=_state_bytes(model, optimizer, master),
        master_bytes=torch.float32.itemsize if master else 0,
        measured=measured,
    )


def specs_for(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> tuple[ParameterSpec, ...]:
    """The model's parameters as the layout sees them: those of one param group share chunks, and those that
    the same members share."""
    features = features_of(model)
    return tuple(
        msgspec.structs.replace(spec, feature=features.get(spec.name, ""))
        for spec in specs_of(dict(model.named_parameters()), settings_of(optimizer))
    )


def settings_of(optimizer: torch.optim.Optimizer | None) -> Mapping[nn.Parameter, str]:
    """Which of the optimizer's param groups has each parameter."""
    groups = [] if optimizer is None else optimizer.param_groups
    return {parameter: str(index) for index, group in enumerate(groups) for parameter in group["params"]}


def assumed_uses(model: nn.Module) -> tuple[Use, ...]:
    """Forward in the order of registration, and backward the other way. What a module of torch.nn has of its
    own goes into one call."""
    indices = {id(parameter): index for index, parameter in enumerate(model.parameters())}
    forward: list[Use] = []
    within: set[nn.Module] = set()  # whose parameters another module uses
    for module in model.modules():
        if module in within:
            continue
        whole = isinstance(module, nn.MultiheadAttention)  # which hands its projection's parameters on
        within.update(module.modules() if whole else ())
        used = [indices[id(parameter)] for parameter in module.parameters(recurse=whole)]
        if type(module).__module__.startswith("torch.nn.modules.") and not isinstance(module, _LISTS):
            forward += [Use(tuple(used))] if used else []
        else:
            forward += [Use((index,)) for index in used]
    return (*forward, *(Use(use.parameters, backward=True) for use in reversed(forward)))


def _computing(model: nn.Module, uses: tuple[Use, ...], rates: Bandwidths) -> tuple[Use, ...]:
    """These uses, each with the seconds that its parameters' copies take: in backward, of the values and of
    the gradients. It is where the size of chunks counts most: computing hides copies that are well cut."""
    nbytes = [parameter.nbytes for parameter in model.parameters()]

    def seconds(use: Use) -> float:
        return sum(nbytes[p] for p in use.parameters) * (
            1 / rates.to_device + (1 / rates.to_host if use.backward else 0.0)
        )

    return tuple(msgspec.structs.replace(use, seconds=seconds(use)) for use in uses)


def _state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None, master: bool) -> tuple[int, ...]:
    """Bytes of each kind of state for an element; where dtypes differ, of the widest."""
    if optimizer is None:
        return ()
    widest: dict[str, int] = {}
    for dtype in {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}:
        for key, kept in state_dtypes(optimizer, stepped_dtype(dtype, master)).items():
            widest[key] = max(widest.get(key, 0), kept.itemsize)
    return tuple(widest[key] for key in sorted(widest))
