"""Plans for a model and its optimizer, which `fit` makes before it takes any memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch
from torch import nn

from atoll.axes.choices import Choices
from atoll.axes.needs import check
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
from atoll.tensors.stepunit import unit_of

_LISTS = (nn.ParameterList, nn.ParameterDict)


def choose(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
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
    step_seconds: tuple[float, ...] = (),
) -> MemoryPlan:
    """Return the plan for this model under `budgets`.

    Args:
        optimizers: the optimizers that step the model here; empty if it is stepped elsewhere.
        profile: recorded uses (see `memory/profile.py`). Without it, uses are assumed to go through the
            parameters in registration order and back, and to compute for as long as copies take.
        bandwidths: measured now if None, in well under a second.
        share: this member's place among several that share the model.
        lent: the number of devices to which a lender lends the model, which it steps itself; 0 for none.
        elsewhere: bytes of host memory for staging, if shards step the model; None if they do not.
        sums: True if a group's sums lie beside a member's own gradients.
        network: bytes/s each way between members; 0 for not known.
        between: bytes/s each way between groups that each hold a replica; 0 for not known.
        step_seconds: how long the step of each parameter takes, equal on all members; empty for not known.

    Raises UserError with the least budget that would do, ConfigError if the disk's folder cannot be written
    to, and PrepareError for an optimizer that cannot step under budgets.
    """
    check_folder(budgets)
    if lent:
        optimizers = ()
    units = list(map(unit_of, optimizers))
    store = "tiered" if share is None else "sharded"
    for unit in units:  # before a step is timed
        facts = {"store": store, "memory.sharding": budgets.pins.sharding}
        check("prepare", Choices({**unit.facts, **facts}))
    if share is not None and any(unit.by_tensor for unit in units):  # one member has all of a tensor
        pins = msgspec.structs.replace(budgets.pins, sharding="asymmetric")
        budgets = msgspec.structs.replace(budgets, pins=pins)
    if bandwidths is None:
        bandwidths = measured(model, optimizers, budgets)
    if network or between:
        bandwidths = msgspec.structs.replace(bandwidths, members=network, groups=between)
    if profile is None:
        uses = _computing(model, assumed_uses(model), bandwidths)
        profile = profile_of(model, optimizers, uses, master=budgets.master, measured=False)
    if elsewhere is not None:
        profile = msgspec.structs.replace(profile, elsewhere=True, staging_bytes=elsewhere, sums=sums)
    profile = msgspec.structs.replace(profile, step_seconds=step_seconds)
    return search_plan(profile, bandwidths, budgets, share=share, lent=lent)


def measured(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], budgets: Budgets) -> Bandwidths:
    """Return this machine's bandwidths; of several optimizers, the one that steps most elements is timed."""
    timed = max(optimizers, key=_elements, default=None)
    by_tensor = timed is not None and unit_of(timed).by_tensor
    device = next(model.parameters()).device
    return measure(device, timed, budgets.folder, _measurable(budgets), by_tensor)


def _elements(optimizer: torch.optim.Optimizer) -> int:
    return sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])


def _measurable(budgets: Budgets) -> int:
    """Return the bytes that a measurement may take for a moment: a quarter of the smaller tier."""
    return min(budgets.device, budgets.host or budgets.device) // 4


def profile_of(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    uses: tuple[Use, ...],
    *,
    master: bool = False,
    measured: bool = True,
) -> Profile:
    """Return the profile of a model: its shapes, its optimizers' state, and these uses. `master` as in
    Budgets."""
    return Profile(
        specs=specs_for(model, optimizers),
        uses=uses,
        state_bytes=_state_bytes(model, optimizers, master),
        master_bytes=torch.float32.itemsize if master else 0,
        measured=measured,
    )


def specs_for(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> tuple[ParameterSpec, ...]:
    """Return the model's parameters as the layout sees them. Parameters share chunks only if one param group
    and the same members have them."""
    features = features_of(model)
    return tuple(
        msgspec.structs.replace(spec, feature=features.get(spec.name, ""))
        for spec in specs_of(dict(model.named_parameters()), settings_of(optimizers))
    )


def settings_of(optimizers: Sequence[torch.optim.Optimizer]) -> Mapping[nn.Parameter, str]:
    """Return, for each parameter of the optimizers, the number of its param group, as text.

    Groups are numbered through all optimizers, so parameters of two optimizers share no chunk.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return {parameter: str(index) for index, group in enumerate(groups) for parameter in group["params"]}


def assumed_uses(model: nn.Module) -> tuple[Use, ...]:
    """Return the uses of a model that was not recorded: forward in registration order, backward in reverse.

    The own parameters of a torch.nn module are used in one call; those of other modules one by one.
    """
    indices = {id(parameter): index for index, parameter in enumerate(model.parameters())}
    forward: list[Use] = []
    within: set[nn.Module] = set()  # modules whose parameters another module uses
    for module in model.modules():
        if module in within:
            continue
        whole = isinstance(module, nn.MultiheadAttention)  # it uses its projection's parameters itself
        within.update(module.modules() if whole else ())
        used = [indices[id(parameter)] for parameter in module.parameters(recurse=whole)]
        if type(module).__module__.startswith("torch.nn.modules.") and not isinstance(module, _LISTS):
            forward += [Use(tuple(used))] if used else []
        else:
            forward += [Use((index,)) for index in used]
    return (*forward, *(Use(use.parameters, backward=True) for use in reversed(forward)))


def _computing(model: nn.Module, uses: tuple[Use, ...], rates: Bandwidths) -> tuple[Use, ...]:
    """Return these uses with a computing time each: the time to copy its parameters' values, in backward also
    their gradients.

    At this ratio the size of chunks counts most: computing hides copies only if chunks are cut well.
    """
    nbytes = [parameter.nbytes for parameter in model.parameters()]

    def seconds(use: Use) -> float:
        return sum(nbytes[p] for p in use.parameters) * (
            1 / rates.to_device + (1 / rates.to_host if use.backward else 0.0)
        )

    return tuple(msgspec.structs.replace(use, seconds=seconds(use)) for use in uses)


def _state_bytes(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], master: bool
) -> dict[str, tuple[int, ...]]:
    """Return the bytes for an element of each kind of state, by the settings of `specs_for`; of the widest
    where dtypes differ."""
    dtypes = {parameter.dtype.to_real() for parameter in model.parameters() if parameter.requires_grad}
    found: list[tuple[int, ...]] = []  # for each param group
    for optimizer in optimizers:
        widest: dict[str, int] = {}
        for dtype in dtypes:
            for key, kept in state_dtypes(optimizer, stepped_dtype(dtype, master)).items():
                widest[key] = max(widest.get(key, 0), kept.itemsize)
        found += [tuple(widest[key] for key in sorted(widest))] * len(optimizer.param_groups)
    return {str(index): sizes for index, sizes in enumerate(found)}
