"""Some chunks step on the device, where their values, gradients and states stay; the others on the host. The
numbers are the plain model's, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import atoll
from atoll.core.config import Config
from atoll.core.memory import Memory
from atoll.memory import planning
from atoll.memory.fit import fit
from atoll.memory.fitted import Moving
from atoll.memory.observing import as_in
from atoll.memory.parameters import ChunkParameter
from atoll.memory.profile import Recorder
from atoll.train.api.place import Place
from support.families import batch, build, loss_of
from support.tight import CHUNK, adamw, rates, same

SHARES = ("0", "0.3", "0.6", "1")
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


pytestmark = pytest.mark.usefixtures("poisoned")


def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    half = len(parameters) // 2
    groups = [{"params": parameters[:half], "lr": 0.05}, {"params": parameters[half:], "weight_decay": 0.1}]
    return torch.optim.SGD(groups, lr=0.01, momentum=0.9)


def device_for(model: nn.Module, share: float, state: int = 2) -> str:
    """What steps there, with gradient and state, and a third of the others beside: in whole blocks."""
    trained = sum(-(-p.nbytes // CHUNK) for p in model.parameters() if p.requires_grad) * CHUNK
    every = sum(-(-p.nbytes // CHUNK) for p in model.parameters()) * CHUNK
    return str(int((2 + state) * share * trained + (every - share * trained) * 0.4) // CHUNK * CHUNK)


class Run:
    """A model that trains plainly where `step` is None, else with this much of it stepped on the device."""

    def __init__(self, family: str, step: str | None, make: Make = adamw, **more: Any) -> None:
        self.family, self.model = family, build(family)
        self.optimizer = make([p for p in self.model.parameters() if p.requires_grad])
        self.fitted: Moving | None = None
        if step is not None:
            given = {"device": device_for(self.model, float(step)), "host": "1GiB", "chunk": str(CHUNK)}
            fitted = fit(self.model, self.optimizer, memory=Memory(**(given | {"step": step} | more)))
            assert isinstance(fitted, Moving)
            self.fitted = fitted

    def steps(self, first: int, count: int) -> list[Any]:
        """Train by accumulation and clipping; the losses and norms."""
        seen: list[Any] = []
        for step in range(first, first + count):
            inputs, targets = batch(self.family, step)
            self.optimizer.zero_grad()
            for micro in range(2):
                loss = loss_of(self.model(inputs.roll(micro, 0)), targets.roll(micro, 0))
                loss.backward()
            fitted, parameters = self.fitted, self.model.parameters()
            if fitted is not None and step % 2:
                seen.append(fitted.clip_grad_norm_(0.3))
            else:
                seen.append(torch.nn.utils.clip_grad_norm_(parameters, 0.3))
            self.optimizer.step()
            seen.append(loss.detach())
        return seen

    def close(self) -> list[Tensor]:
        if self.fitted is not None:
            figures = self.fitted.stats()
            assert figures.device_peak <= figures.device_budget
            self.fitted.close()
        assert all(type(p) is nn.Parameter for p in self.model.parameters())
        return [value.detach().clone() for value in (*self.model.parameters(), *self.model.buffers())]


def state_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """All that its state_dict tells, in order."""
    state = optimizer.state_dict()
    kept = [(n, key, entry[key]) for n, entry in sorted(state["state"].items()) for key in sorted(entry)]
    return [(n, key, value.clone() if isinstance(value, Tensor) else value) for n, key, value in kept]


@pytest.mark.check
@pytest.mark.parametrize(("family", "make"), [("gpt", adamw), ("resnet", momentum), ("lora", adamw)])
def test_shares_of_the_steps_give_the_plain_model_s_numbers(family: str, make: Make) -> None:
    plain = Run(family, None, make)
    expected = plain.steps(0, 4), state_of(plain.optimizer), plain.close()
    for step in SHARES if family == "lora" else SHARES[:-1]:  # without frozen ones all would stay
        run = Run(family, step, make)
        assert run.fitted is not None
        plan = run.fitted.plan
        assert not plan.fits
        assert bool(plan.steps_on_device) == (step != "0")
        there = [p for p in run.model.parameters() if not isinstance(p, ChunkParameter)]
        assert bool(there) == (step != "0")
        assert len(there) < len(list(run.model.parameters()))
        seen = run.steps(0, 4), state_of(run.optimizer), run.close()
        assert same(seen, expected), f"{family} at {step}"
        assert [p.grad is None for p in run.model.parameters()] == [
            p.grad is None for p in plain.model.parameters()
        ]


@pytest.mark.check
def test_with_a_disk_below_state_goes_from_share_to_share_and_to_none(tmp_path: Path) -> None:
    """What was saved by a split run goes on in a plain one and in one with another share, and back."""
    results = []
    for first, second in ((None, None), ("0.3", None), (None, "0.3"), ("0.3", "0.6")):
        beside = {"host": "300KiB", "disk": f"{tmp_path}:8MiB"}
        run = Run("gpt", first, **(beside if first else {}))
        seen = run.steps(0, 2)
        other = Run("gpt", second, **(beside if second else {}))
        other.model.load_state_dict(run.model.state_dict())
        other.optimizer.load_state_dict(run.optimizer.state_dict())
        run.close()
        seen += other.steps(2, 2)
        results.append((seen, state_of(other.optimizer), other.close()))
    assert all(same(results[0], each) for each in results[1:])


def test_a_session_saves_and_loads_what_is_split(tmp_path: Path) -> None:
    def trained(step: str | None, *, resume: bool) -> list[Any]:
        model = build("gpt")
        optimizer = adamw(list(model.parameters()))
        memory = None
        if step is not None:
            memory = Memory(device=device_for(model, 0.5), chunk=str(CHUNK), step=step)
        seen: list[Any] = []
        with atoll.join(Config(), place=Place()) as session:
            session.prepare(model, optimizer, memory=memory)
            if resume:
                session.load(tmp_path / "checkpoint")
            for number in range(session.iteration, session.iteration + 2):
                inputs, targets = batch("gpt", number)
                loss = loss_of(model(inputs), targets)
                loss.backward()
                session.clip_grad_norm_(0.5)
                optimizer.step()
                optimizer.zero_grad()
                seen.append(loss.detach().clone())
            if not resume:
                session.save(tmp_path / "checkpoint")
            seen += [value.clone() for value in model.state_dict().values()]
        return seen

    expected = trained(None, resume=False), trained(None, resume=True)
    assert same((trained("0.5", resume=False), trained("0.5", resume=True)), expected)
    assert same(trained(None, resume=True), expected[1])  # a checkpoint of a split run, in plain training


def test_a_recorded_step_is_the_model_s_whatever_steps_where() -> None:
    """The uses that are recorded are the model's, whatever steps where; and the plan that ran is predicted as
    it was."""
    uses = []
    for step in ("0", "0.4"):
        run = Run("gpt", step)
        assert run.fitted is not None
        run.steps(0, 2)
        recorder = Recorder(run.model, run.fitted.mover)
        recorder.start()
        inputs, targets = batch("gpt", 2)
        loss_of(run.model(inputs), targets).backward()
        uses.append([(use.parameters, use.backward) for use in recorder.stop() if use.parameters])
        pinned = as_in(run.fitted.budgets, run.fitted.plan)
        plan = planning.choose(run.model, [run.optimizer], pinned, bandwidths=rates())
        assert plan.steps_on_device == run.fitted.plan.steps_on_device
        run.close()
    assert uses[0] == uses[1]


def test_the_device_holds_what_was_set_aside_for_it() -> None:
    """Values, gradients and states of what steps there are no more than the plan has counted for them."""
    run = Run("gpt", "0.5")
    assert run.fitted is not None
    run.steps(0, 2)
    there = [p for p in run.model.parameters() if not isinstance(p, ChunkParameter)]
    held = sum(p.nbytes + p.grad.nbytes for p in there if p.grad is not None)
    held += sum(run.optimizer.state[p][key].nbytes for p in there for key in ("exp_avg", "exp_avg_sq"))
    plan, layout = run.fitted.plan, run.fitted.chunk_map
    aside = plan.blocks - plan.cache_blocks
    assert aside == 4 * sum(layout.blocks_of(layout.chunks[c]) for c in plan.steps_on_device)
    assert 0.5 * aside * plan.chunk_bytes < held <= aside * plan.chunk_bytes
    assert plan.blocks * plan.chunk_bytes <= run.fitted.budgets.device
    run.close()
