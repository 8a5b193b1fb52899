"""Models that do not fit are built, saved and loaded as plain ones: in either direction, and to the bit."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import atoll
from atoll.core.config import Config
from atoll.core.errors import CheckpointError
from atoll.core.memory import Memory
from atoll.memory.fit import Fitted, fit
from atoll.memory.initialising import init
from atoll.memory.weights import load, save
from atoll.tensors.checkpoint import read_checkpoint
from atoll.tensors.lazy import LazyTensor
from atoll.train.api.place import Place
from atoll.train.api.session import Session
from support.families import batch, build, loss_of
from support.tight import CHUNK

FAMILIES = ("tied", "resnet", "lora")


pytestmark = [pytest.mark.sampled, pytest.mark.usefixtures("poisoned")]


def size_of(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def budgets(model: nn.Module, folder: Path) -> Memory:
    """Room for a third of the values on the device and for twice in host memory; the rest is on disk."""
    device = size_of(model) // 3 // CHUNK * CHUNK
    host = 2 * size_of(model) // CHUNK * CHUNK
    return Memory(device=str(device), host=str(host), disk=f"{folder}:1GiB", chunk=str(CHUNK), step="host")


def made_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True)


def joined(model: Any, optimizer: torch.optim.Optimizer, memory: Memory | None) -> Session:
    session = atoll.join(Config(), place=Place())
    session.prepare(model, optimizer, memory=memory)
    return session


def train(family: str, model: Any, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        inputs, targets = batch(family, step)
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert list(a) == list(b)
    for name in a:
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True), (True, True)])
def test_a_checkpoint_goes_on_where_it_was_with_and_without_budgets(
    family: str, first: bool, second: bool, tmp_path: Path
) -> None:
    plain = build(family)
    expected = train(family, plain, made_optimizer(plain), range(5))
    losses: list[float] = []
    values: dict[str, Tensor] = {}
    for number, in_tiers in enumerate((first, second)):
        model = build(family)
        if number:  # what is loaded must come from the checkpoint
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1)
        optimizer = made_optimizer(model)
        session = joined(model, optimizer, budgets(model, tmp_path) if in_tiers else None)
        if number:
            session.load(tmp_path / "checkpoint")
        losses += train(family, model, optimizer, range(3) if not number else range(3, 5))
        if not number:
            session.save(tmp_path / "checkpoint")
        session.close()
        values = values_of(model)
    assert losses == expected
    assert_same(values, values_of(plain))


def test_a_checkpoint_holds_what_a_plain_session_s_holds(tmp_path: Path) -> None:
    for name in ("tiers", "plain"):
        model = build("gpt")
        optimizer = made_optimizer(model)
        torch.manual_seed(3)
        session = joined(model, optimizer, budgets(model, tmp_path) if name == "tiers" else None)
        train("gpt", model, optimizer, range(2))
        session.save(tmp_path / name)
        session.close()
    tiers, plain = tmp_path / "tiers", tmp_path / "plain"
    assert (tiers / "model.safetensors").read_bytes() == (plain / "model.safetensors").read_bytes()
    ours, theirs = read_checkpoint(tiers).trees["optimizer"][0], read_checkpoint(plain).trees["optimizer"][0]
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for index, state in theirs["state"].items():
        assert_same(ours["state"][index], state)


def test_a_checkpoint_of_another_model_changes_nothing(tmp_path: Path) -> None:
    other = nn.Linear(4, 4)
    session = joined(other, torch.optim.AdamW(other.parameters()), None)
    session.save(tmp_path / "other")
    session.close()
    model = build("gpt")
    before = values_of(model)
    session = joined(model, made_optimizer(model), budgets(model, tmp_path))
    with pytest.raises(CheckpointError, match="it is of another model"):
        session.load(tmp_path / "other")
    session.close()
    assert_same(values_of(model), before)


def fitted_gpt(folder: Path) -> tuple[nn.Module, torch.optim.Optimizer, Fitted]:
    model = build("gpt")
    optimizer = made_optimizer(model)
    fitted = fit(model, optimizer, memory=budgets(model, folder))
    assert not fitted.plan.fits
    return model, optimizer, fitted


def test_weights_and_state_dicts_of_a_fitted_model(tmp_path: Path) -> None:
    plain = build("gpt")
    theirs = made_optimizer(plain)
    train("gpt", plain, theirs, range(2))
    model, optimizer, fitted = fitted_gpt(tmp_path)
    train("gpt", model, optimizer, range(2))
    moved = fitted.stats().moves["to_device"]
    state = model.state_dict()
    assert all(
        type(value) is LazyTensor for name, value in state.items() if name in dict(plain.named_parameters())
    )
    assert_same(values_of(model), values_of(plain))
    save(model, tmp_path / "ours.safetensors")
    assert fitted.stats().moves["to_device"] == moved  # nothing became resident
    loaded = build("gpt")
    load(loaded, tmp_path / "ours.safetensors")
    assert_same(values_of(loaded), values_of(plain))

    ours = optimizer.state_dict()["state"]
    assert type(ours[0]["exp_avg"]) is LazyTensor
    for index, entry in theirs.state_dict()["state"].items():
        for key, value in entry.items():
            assert torch.equal(ours[index][key], value), (index, key)

    before = copy.deepcopy(state)
    safetensors.torch.save_file(values_of(build("gpt")), tmp_path / "first.safetensors")
    load(model, tmp_path / "first.safetensors")
    assert_same(values_of(model), values_of(build("gpt")))
    model.load_state_dict(before)
    assert train("gpt", model, optimizer, range(2, 4)) == train("gpt", plain, theirs, range(2, 4))
    fitted.close()
    assert_same(values_of(model), values_of(plain))
    torch.save(state, tmp_path / "state.pt")  # which was asked for before the end
    assert_same(torch.load(tmp_path / "state.pt"), values_of(plain))


@pytest.mark.parametrize(("family", "fits"), [("tied", False), ("experts", False), ("lstm", True)])
def test_a_model_that_was_built_under_budgets_trains_like_a_plain_one(
    family: str, fits: bool, tmp_path: Path
) -> None:
    plain = build(family)
    expected = train(family, plain, made_optimizer(plain), range(3))
    largest = max(parameter.nbytes for parameter in plain.parameters())
    memory = Memory(device="64MiB") if fits else budgets(plain, tmp_path)
    building = Memory(
        device=memory.device, host=str(max(size_of(plain) // 2, 3 * largest)), disk=f"{tmp_path}:1GiB"
    )
    with init(building):
        model = build(family)
    optimizer = made_optimizer(model)
    fitted = fit(model, optimizer, memory=memory)
    assert fitted.plan.fits == fits
    assert train(family, model, optimizer, range(3)) == expected
    fitted.close()
    assert_same(values_of(model), values_of(plain))


_STREAM = """
import pathlib, re, sys, torch
from torch import nn
import atoll
from atoll.core.config import Config
from atoll.core.memory import Memory
from atoll.memory import init, load, planning, save
from atoll.train.api.place import Place
def resident(what):
    return int(re.search(what + r":\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1])
torch.set_num_threads(1)
folder = sys.argv[1]
memory = Memory(device="16MiB", host="32MiB", disk=folder + ":1GiB", chunk="4MiB", step="host")
def build(layers):
    return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(layers)))  # 4 MiB each
def train(model, optimizer):
    model(torch.ones(2, 1024)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
first = build(1)
train(first, torch.optim.AdamW(first.parameters(), fused=True))  # imports half of torch
start = resident("VmRSS")
with init(memory):
    model = build(16)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
session = atoll.join(Config(), place=Place())
plan = planning.choose(model, [optimizer], memory.budgets())  # measures bandwidths, in memory of its own
planning.choose = lambda *_, **__: plan
pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
session.prepare(model, optimizer, memory=memory)
print((resident("VmHWM") - start) * 1024)
for _ in range(2):
    train(model, optimizer)
for call in (
    lambda: session.save(folder + "/checkpoint"),
    lambda: session.load(folder + "/checkpoint"),
    lambda: save(model, folder + "/weights"),
    lambda: load(model, folder + "/weights"),
):
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = resident("VmRSS")
    call()
    print((resident("VmHWM") - before) * 1024)
print(sum(f.stat().st_size for f in pathlib.Path(folder, "checkpoint").iterdir()))
"""


@pytest.mark.check
def test_checkpoints_and_weights_hold_a_tensor_or_two_beside_the_budgets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """192 MiB of parameters and states under budgets of 48 MiB: `fit` takes what `init` has made within
    them, and what process memory grows by in each later call is a few layers' worth: up to the third of a
    second copy, since what the allocator gives back before, and takes again, differs from run to run."""
    monkeypatch.delenv("ATOLL_POISON")  # which writes into free memory, so that all of it is there
    command = [sys.executable, "-c", _STREAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    fitted, *grown, written = map(int, done.stdout.split())
    assert fitted <= (48 + 5 * 4) * 2**20  # 63 to 66 MiB; a second copy would be 32 more
    assert written > 192 * 2**20
    assert max(grown) <= 64 * 2**20, grown
