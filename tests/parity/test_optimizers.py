"""Every element-wise optimizer of torch.optim, in every implementation it has, steps chunks bit-equally."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import atoll
from atoll.core.config import Chunks, Config
from support.models import MODELS
from support.optimizers import FUSED, SETTINGS
from support.pool import ring_of_one

pytestmark = pytest.mark.sampled

STEPS = 8

# Torch's own fused SGD with momentum raises when a parameter's first gradient comes after the others'.
CASES = [
    pytest.param(
        name, settings | how, model, id="-".join([name, *settings, *(k for k in how if how[k]), model])
    )
    for name, variants in SETTINGS.items()
    for settings in variants
    for how in ({"foreach": False}, {"foreach": True}, *([{"fused": True}] if name in FUSED else []))
    for model in ("odd", "unused")
    if not ("momentum" in settings and "fused" in how and model == "unused")
]


def train(model: nn.Module, optimizer: Optimizer, name: str, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    """STEPS steps on share 0's batches; the parameters after each."""
    seen = []
    for step in range(STEPS):
        MODELS[name].loss(model, MODELS[name].batch(0, step, dtype=dtype)).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append([p.detach().clone() for p in model.parameters()])
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize(("name", "settings", "model_name"), CASES)
def test_bit_equal(name: str, settings: dict[str, Any], model_name: str, dtype: torch.dtype) -> None:
    make = getattr(torch.optim, name)
    plain_model = MODELS[model_name].build(dtype)
    plain_optimizer = make(plain_model.parameters(), **settings)
    plain = train(plain_model, plain_optimizer, model_name, dtype)

    model = MODELS[model_name].build(dtype)
    optimizer = make(model.parameters(), **settings)
    with atoll.join(Config(chunks=Chunks(size="1KiB")), place=ring_of_one()) as session:
        session.prepare(model, optimizer)
        seen = train(model, optimizer, model_name, dtype)

    for step, (expected, got) in enumerate(zip(plain, seen, strict=True)):
        for (parameter, _), a, b in zip(model.named_parameters(), expected, got, strict=True):
            assert torch.equal(a, b), f"step {step}, {parameter}: differs by {(a - b).abs().max():.3g}"
    states = plain_optimizer.state_dict(), optimizer.state_dict()
    assert states[0]["param_groups"] == states[1]["param_groups"]
    assert states[0]["state"].keys() == states[1]["state"].keys()
    for index, state in states[0]["state"].items():
        assert state.keys() == states[1]["state"][index].keys()
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(states[1]["state"][index][key])), key


def test_every_elementwise_optimizer_of_torch_is_here() -> None:
    """What a new torch brings must be held to the test above, or be listed as not element-wise."""
    not_elementwise = {"Optimizer", "LBFGS", "Adafactor", "Muon", "SparseAdam"}
    found = {
        n for n, kind in vars(torch.optim).items() if isinstance(kind, type) and issubclass(kind, Optimizer)
    }
    assert found - not_elementwise == set(SETTINGS)
