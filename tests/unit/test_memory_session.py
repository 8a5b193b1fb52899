"""A session of one worker whose model lies in tiers of memory."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import atoll
from atoll.core.config import Config, Run, Sync
from atoll.core.errors import ConfigError, NonFiniteGradientError, RunError, UserError
from atoll.core.memory import Memory
from atoll.observe.memory import memory_lines
from atoll.observe.summary import Summary, read_summary
from atoll.train.api.place import Place
from atoll.train.gradients.memory import Tiers

HALF = "48KiB"  # of the 80 KiB that the model's parameters take


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(part for _ in range(5) for part in (nn.Linear(64, 64), nn.Tanh())))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def train(memory: Memory | None, config: Config | None = None, steps: int = 4) -> list[torch.Tensor]:
    """The losses of some steps with clipping, and the parameters after them."""
    model, optimizer = build()
    kept = []
    with atoll.join(config or Config(), place=Place()) as session:
        session.prepare(model, optimizer, memory=memory)
        for step in range(steps):
            generator = torch.Generator().manual_seed(step)
            loss = model(torch.randn(8, 64, generator=generator)).square().mean()
            loss.backward()
            session.clip_grad_norm_(0.05)
            optimizer.step()
            optimizer.zero_grad()
            kept.append(loss.detach().clone())
        assert session.iteration == steps
        kept += [value.clone() for value in model.state_dict().values()]
    return kept


@pytest.mark.parametrize("device", [HALF, "1GiB"])
def test_a_session_in_tiers_trains_as_one_without(device: str) -> None:
    plain, tiered = train(None), train(Memory(device=device))
    assert all(torch.equal(a, b) for a, b in zip(plain, tiered, strict=True))


@pytest.mark.parametrize(("saved_with", "loaded_with"), [(HALF, HALF), (HALF, ""), ("", HALF)])
def test_a_checkpoint_goes_from_tiers_to_tiers_and_to_none(
    tmp_path: Path, saved_with: str, loaded_with: str
) -> None:
    def memory(device: str) -> Memory | None:
        return Memory(device=device) if device else None

    def steps(first: int, last: int) -> None:
        for step in range(first, last):
            generator = torch.Generator().manual_seed(step)
            model(torch.randn(8, 64, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = build()
    with atoll.join(Config(), place=Place()) as session:
        session.prepare(model, optimizer, memory=memory(saved_with))
        steps(0, 2)
        session.save(tmp_path / "checkpoint")
        steps(2, 4)
        expected = [value.clone() for value in model.state_dict().values()]
    model, optimizer = build()
    with atoll.join(Config(), place=Place()) as session:
        session.prepare(model, optimizer, memory=memory(loaded_with))
        session.load(tmp_path / "checkpoint")
        assert session.iteration == 2
        steps(2, 4)
        found = [value.clone() for value in model.state_dict().values()]
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_the_table_of_the_configuration_counts_and_the_summary_has_what_moved(tmp_path: Path) -> None:
    config = Config(run=Run(directory=str(tmp_path / "run")), memory=Memory(device=HALF, host="1GiB"))
    train(None, config)
    summary = read_summary(tmp_path / "run" / "summary.json")
    (memory,) = summary.memory
    assert memory.worker == 0
    assert memory.device_budget == 48 * 2**10
    assert 0 < memory.device_peak <= memory.device_budget
    assert 0 < memory.host_peak <= 2**30
    assert memory.moves["to_device"] > memory.step_moves["to_device"] > 0
    assert memory.nbytes["to_device"] >= memory.step_nbytes["to_device"] > 0
    assert memory.optimum_blocks is not None
    assert memory.gradient_norm is not None
    assert memory.gradient_norm > 0
    (decided,) = [event for event in summary.events if event.get("what") == "memory"]
    assert decided["choice"].startswith("device 48.0 KiB, host 1.0 GiB: ")
    assert "chunk sizes" in decided["reason"]
    assert [event for event in summary.events if event.get("what") == "memory.host"]
    (line,) = memory_lines(summary)
    assert line.startswith("memory of worker 0: device ")
    assert "moves to the device in the last step" in line


def test_a_summary_without_tiers_has_no_memory(tmp_path: Path) -> None:
    train(None, Config(run=Run(directory=str(tmp_path / "run"))), steps=1)
    assert "memory" not in json.loads((tmp_path / "run" / "summary.json").read_text())
    assert memory_lines(Summary("ring", 1, 1, 0, 0.0, 0.0, 0, 0.0, {}, [], [])) == []


@pytest.mark.parametrize("policy", ["skip", "stop"])
@pytest.mark.parametrize("device", [HALF, "1GiB"])
def test_a_gradient_that_is_not_finite_is_left_out_or_stops(policy: str, device: str) -> None:
    model, optimizer = build()
    with atoll.join(Config(sync=Sync(nonfinite=policy)), place=Place()) as session:  # type: ignore[arg-type]
        session.prepare(model, optimizer, memory=Memory(device=device))
        before = {name: value.clone() for name, value in model.state_dict().items()}
        model(torch.full((2, 64), torch.nan)).sum().backward()
        if policy == "stop":
            with pytest.raises(NonFiniteGradientError, match="'8.bias' on worker 0 holds NaN or infinity"):
                optimizer.step()
            return
        optimizer.step()
        optimizer.zero_grad()
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        assert not any(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("of_group", ["", " in its group"])
def test_a_worker_that_is_lost_is_named_with_what_it_held(of_group: str) -> None:
    held = Tiers(Memory(device="1GiB"), None, of_group=of_group)
    shared: Any = object()
    held.shared = shared
    held.refuse_loss([])
    with pytest.raises(RunError, match=rf"^worker 3 was lost, .* part of the model{of_group},") as no:
        held.refuse_loss([3])
    assert "\n" not in str(no.value)


def memory_threads() -> set[threading.Thread]:
    names = ("atoll-bringing", "atoll-leaving", "atoll-stepping", "atoll-disk")
    return {thread for thread in threading.enumerate() if thread.name.startswith(names)}


def test_after_the_session_the_model_is_plain_and_no_thread_is_left() -> None:
    model, optimizer = build()
    plain, plain_optimizer = build()
    inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    of_others = memory_threads()
    with atoll.join(Config(), place=Place()) as session:
        session.prepare(model, optimizer, memory=Memory(device=HALF))
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert memory_threads() - of_others
    assert not memory_threads() - of_others
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    for each, steps in ((plain, plain_optimizer), (plain, plain_optimizer), (model, optimizer)):
        each(inputs).square().mean().backward()
        steps.step()
        steps.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


def test_a_model_that_is_too_large_as_a_plain_one_stays_in_its_tiers_after_the_end(tmp_path: Path) -> None:
    model, optimizer = build()
    plain, plain_optimizer = build()
    inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    budgets = Memory(device=HALF, host="150KiB", disk=f"{tmp_path}:1MiB")
    with atoll.join(Config(), place=Place()) as session:
        session.prepare(model, optimizer, memory=budgets)
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        entries = model.state_dict()
    for each, steps in ((plain, plain_optimizer), (plain, plain_optimizer), (model, optimizer)):
        each(inputs).square().mean().backward()
        steps.step()
        steps.zero_grad()
    assert all(torch.equal(value, entries[name]) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("memory", [None, Memory(device=HALF), Memory(device="1GiB")])
def test_clipping_that_is_given_parameters_says_how_it_is_called(memory: Memory | None) -> None:
    model, optimizer = build()
    with atoll.join(Config(), place=Place()) as session:
        session.prepare(model, optimizer, memory=memory)
        model(torch.ones(2, 64)).sum().backward()
        for given in (model.parameters(), list(model.parameters()), next(model.parameters())):
            with pytest.raises(UserError, match=r"so call clip_grad_norm_\(0\.5\)$"):
                session.clip_grad_norm_(given, 0.5)  # type: ignore[arg-type]
        session.clip_grad_norm_(torch.tensor(0.5))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("memory", "said"),
    [
        (Memory(device="2 apples"), "^device: '2 apples' is not a size"),
        (Memory(host="1GiB"), "^device: the device's budget is missing"),
        (Memory(device="1KiB"), "^the budget of the device is too small: .*'0.weight' of 16.0 KiB"),
        (Memory(device="1GiB", disk="/nowhere:1GiB"), "^disk: /nowhere does not exist"),
    ],
)
def test_wrong_budgets_are_told_of_before_the_model_is_touched(memory: Memory, said: str) -> None:
    model, optimizer = build()
    session = atoll.join(Config(), place=Place())
    with pytest.raises(UserError, match=said):
        session.prepare(model, optimizer, memory=memory)
    with pytest.raises(ConfigError, match=r"^memory\.device"):
        atoll.join(Config(memory=Memory(host="1GiB")), place=Place())
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
