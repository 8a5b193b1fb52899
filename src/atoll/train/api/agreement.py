"""The check, before the first step, that all workers train the same model with the same settings."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from atoll.chunks import SPARSE, ParameterSpec
from atoll.core.config import Config
from atoll.core.decoding import from_json
from atoll.core.errors import PrepareError
from atoll.train.members.workers import Workers


class Description(msgspec.Struct):
    """Settings that must be equal on all workers, under the names that errors use."""

    parameters: dict[str, str]
    buffers: dict[str, str]
    optimizer: dict[str, str]
    configuration: dict[str, str]


def describe(
    specs: list[ParameterSpec],
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    config: Config,
    *,
    name: str = "",
    step: str | None = None,
    bf16: str | None = None,
    has_budgets: bool = False,
    known: Mapping[str, nn.Parameter] | None = None,
) -> Description:
    """Return this worker's description. Of an optimizer's state it has only the number of parameters with
    state.

    `known` are the model's parameters when it was prepared before; None: it was not.
    """
    old = None if known is None else set(map(id, known.values()))
    new = {name for name, each in model.named_parameters() if old is not None and id(each) not in old}
    parameters = {
        spec.name: f"{spec.shape} {spec.dtype}{'' if spec.trainable else ', frozen'}"
        + _in_group(spec.settings)
        + (", of sparse gradients" if spec.feature == SPARSE else "")
        + (", new in the model" if spec.name in new else "")
        for spec in specs
    }
    buffers = {name: f"{tuple(b.shape)} {b.dtype}" for name, b in model.named_buffers()}
    settings: dict[str, str] = {}
    for number, optimizer in enumerate(optimizers):
        of = f"[{number}] " if len(optimizers) > 1 else ""
        settings |= {f"{of}class": type(optimizer).__name__, f"{of}state": str(len(optimizer.state))}
        for index, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key not in ("params", "param_names"):
                    settings[f"{of}param_groups[{index}][{key!r}]"] = _shown(value)
    # Settings that change the computation must be equal; others, such as the place of records, may differ.
    # Under ps-hra all members of a group hold the gradients that its link carries, so link settings count.
    sections = ("chunks", "sync", "groups", *(("link",) if config.run.strategy == "ps-hra" else ()))
    configuration = {
        f"{section}.{key}": str(value)
        for section in sections
        for key, value in msgspec.to_builtins(getattr(config, section)).items()
    }
    configuration["session.prepare(name=)"] = repr(name)
    configuration["session.prepare(step=)"] = repr(step)
    configuration["session.prepare(bf16=)"] = repr(bf16)
    # The sizes of budgets may differ between workers.
    configuration["memory"] = "given" if has_budgets else "not given"
    return Description(parameters, buffers, settings, configuration)


def check_same(workers: Workers, own: Description) -> None:
    """Raise PrepareError on every worker unless all descriptions are equal.

    The error names the first difference, and the two workers with their values. A collective.
    """
    encoded = msgspec.json.encode(own)
    digests = workers.gather_bytes(hashlib.sha256(encoded).digest(), "the other workers' models")
    if len(set(digests)) == 1:
        return
    parts = workers.gather_bytes(encoded, "the other workers' models")
    raise PrepareError(_first_difference([from_json(part, Description) for part in parts]))


def _first_difference(descriptions: list[Description]) -> str:
    first = descriptions[0]
    for rank, other in enumerate(descriptions[1:], start=1):
        for field, what, way_out in (
            ("parameters", "parameter", "build the same model on every worker"),
            ("buffers", "buffer", "build the same model on every worker"),
            ("optimizer", "the optimizer's", "make the same optimizer on every worker"),
            ("configuration", "the configuration's", "give every worker the same configuration"),
        ):
            mine, theirs = getattr(first, field), getattr(other, field)
            for name in [*mine, *theirs]:
                if mine.get(name) != theirs.get(name):
                    return (
                        f"the workers differ: {what} {name!r} is {mine.get(name, 'missing')} on worker 0 "
                        f"and {theirs.get(name, 'missing')} on worker {rank}; {way_out}"
                    )
        if list(first.parameters) != list(other.parameters):
            return (
                f"the workers differ: worker {rank} registers its parameters in another order than worker 0"
            )
    return "the workers differ in the order of their buffers or settings"


def _in_group(settings: str) -> str:
    return f", param group {settings}" if settings else ", in no param group"


def _shown(value: Any) -> str:
    """Return a hyperparameter as text; for functions and objects their type, since their addresses differ."""
    if isinstance(value, Tensor):
        return repr(value.tolist())
    plain = (bool, int, float, str, type(None), tuple, list, dict)
    return repr(value) if isinstance(value, plain) else f"a {type(value).__qualname__}"
