"""bfloat16 parameters that are stepped in float32: on master copies, or with stochastic rounding."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import atoll
from atoll.core.errors import PrepareError
from atoll.tensors.checkpoint import read_checkpoint
from atoll.tensors.rounding import stochastically_rounded
from support.cases import kept_for
from support.pool import JobFailedError, WorkerPool
from support.runs import alone, model, run_at

pytestmark = pytest.mark.sampled

BF16, STEPS, SAVED = torch.bfloat16, 5, 3
WAYS = ("masters", "stochastic")
HERE = ("ring", "hierarchical", "elastic")  # strategies whose workers step, without budgets
ELSEWHERE = ("server", "asp", "ps-hra", "peers", "tiers", "server tiers", "peers tiers")


def net_of(seed: int = 0) -> nn.Module:
    """Return a model in bfloat16 whose last layer is float32, and whose first one is frozen; set torch's
    seed."""
    net = model(seed, BF16)
    net[0].requires_grad_(False)
    net[-1].to(torch.float32)
    net[-1].register_forward_pre_hook(lambda _, inputs: (inputs[0].float(),))
    return net


def batch(step: int, rank: int) -> Tensor:
    """Four samples: the weights of two workers are powers of two, so that scaling a gradient is exact."""
    return torch.randn(4, 32, generator=torch.Generator().manual_seed(10 * step + rank)).to(BF16)


def adamw(net: nn.Module) -> list[Optimizer]:
    return [AdamW(net.parameters(), lr=1e-3)]


def momentum(net: nn.Module) -> list[Optimizer]:
    return [SGD(net.parameters(), lr=1e-2, momentum=0.9)]


def plain_sgd(net: nn.Module) -> list[Optimizer]:
    return [SGD(net.parameters(), lr=1e-2)]


def adagrad(net: nn.Module) -> list[Optimizer]:
    """It makes its state, in the dtype of its parameters, before the first step."""
    return [Adagrad(net.parameters(), lr=1e-3, initial_accumulator_value=0.125)]


def fused(net: nn.Module) -> list[Optimizer]:
    return [AdamW(net.parameters(), lr=1e-3, fused=True)]


def two(net: nn.Module) -> list[Optimizer]:
    matrices = [p for p in net.parameters() if p.ndim == 2]
    return [Muon(matrices, lr=1e-3), AdamW([p for p in net.parameters() if p.ndim != 2], lr=1e-3)]


Make = Callable[[nn.Module], list[Optimizer]]


def values(net: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def write(net: nn.Module) -> None:
    """A script's own write into some values of a parameter."""
    with torch.no_grad():
        list(net.parameters())[2][1].mul_(1.25)


def script(
    session: atoll.Session, how: str, make: Make, folder: str = "", resumes: bool = False
) -> tuple[list[list[Tensor]], list[Any]]:
    """Train with clipping, schedulers and a write into a parameter. Save after some steps, or go on from
    there, in a process with another seed. Return the values after each step, and the optimizers' states."""
    net = net_of(seed=int(resumes))
    optimizers = make(net)
    given: Any = optimizers if len(optimizers) > 1 else optimizers[0]
    before = [StepLR(each, 2, gamma=0.5) for each in optimizers[:1]]  # a scheduler may be older, or younger
    session.prepare(net, given, bf16=how)
    drives = before + [StepLR(each, 2, gamma=0.5) for each in optimizers[1:]]
    first = session.resume(folder) if resumes else 0
    assert first == SAVED * resumes
    seen = []
    for step in range(first, STEPS):
        net(batch(step, session.rank)).square().mean().backward()
        session.clip_grad_norm_(0.5)
        for each in (*optimizers, *drives):
            each.step()
        for each in optimizers:
            each.zero_grad()
        if step == 1:
            write(net)
        seen.append(values(net))
        if folder and step + 1 == SAVED:
            session.save(folder)
    session.barrier()
    return seen, [copy.deepcopy(each.state_dict()) for each in optimizers]


@functools.cache
def plainly(world: int, how: str, make: Make) -> tuple[list[list[Tensor]], list[Any], list[Tensor]]:
    """Do so in plain PyTorch: the optimizers step a copy of the model in float32. Return also the copy's
    values in the end."""
    net = net_of()
    wide = copy.deepcopy(net).to(torch.float32)
    optimizers = make(wide)
    drives = [StepLR(each, 2, gamma=0.5) for each in optimizers]
    pairs = list(zip(net.parameters(), wide.parameters(), strict=True))
    shown, seen = values(net), []
    for step in range(STEPS):
        sums: dict[nn.Parameter, Tensor] = {}
        for rank in range(world):
            net.zero_grad()
            net(batch(step, rank)).square().mean().backward()
            for each in net.parameters():
                if each.grad is not None:
                    sums[each] = sums[each] + each.grad / world if each in sums else each.grad / world
        for each, total in sums.items():
            each.grad = total
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        with torch.no_grad():
            for (each, copied), before in zip(pairs, shown, strict=True):
                copied.grad = None if each.grad is None else each.grad.float()
                written = torch.ones_like(each) if how == "stochastic" else each != before
                copied.copy_(torch.where(written.bool(), each.float(), copied))
        for driven in (*optimizers, *drives):
            driven.step()
        with torch.no_grad():
            for position, (each, copied) in enumerate(pairs):
                result = copied.detach()
                if how == "stochastic" and each.dtype == BF16 and each.requires_grad:
                    (result,) = stochastically_rounded(0, [result], [(step, position)])
                each.copy_(result)
        shown = values(net)
        if step == 1:
            write(net)
        seen.append(values(net))
    return seen, [each.state_dict() for each in optimizers], values(wide)


def same(found: Sequence[list[Tensor]], right: Sequence[list[Tensor]]) -> None:
    assert len(found) == len(right)
    for step, (mine, its) in enumerate(zip(found, right, strict=True)):
        for index, (a, b) in enumerate(zip(mine, its, strict=True)):
            assert a.dtype == b.dtype
            assert torch.equal(a, b), f"step {step}, parameter {index}: {(a != b).sum()} differ"


def same_states(found: list[Any], how: str, right: list[Any], wide: list[Tensor]) -> None:
    """The states are the plain ones, in float32, and have one more entry for each bfloat16 parameter."""
    for mine, its in zip(found, right, strict=True):
        assert mine["state"].keys() >= its["state"].keys()
        for index, own in mine["state"].items():
            state = its["state"].get(index, {})
            master, roundings = own.get("master"), own.get("roundings")
            assert own.keys() - {"master", "roundings"} == state.keys()
            for key, value in state.items():
                if own.keys() & {"master", "roundings"}:
                    assert torch.as_tensor(own[key]).dtype == torch.as_tensor(value).dtype
                assert torch.equal(torch.as_tensor(own[key]).float(), torch.as_tensor(value).float())
            if how == "stochastic":
                assert master is None
                assert roundings in (STEPS, None)
            elif master is not None:
                assert any(torch.equal(master, each) for each in wide)
        kept = [("master" if how == "masters" else "roundings") in each for each in mine["state"].values()]
        assert any(kept)


ALONE = (adamw, momentum, plain_sgd, adagrad, fused, two)


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("make", ALONE)
def test_one_worker_is_plain_torch_at_each_step_and_through_a_checkpoint(
    how: str, make: Make, tmp_path: Path
) -> None:
    right, states, wide = plainly(1, how, make)
    seen, found = alone(script, how, make, str(tmp_path / "it"))
    same(seen, right)
    same_states(found, how, states, wide)
    again, found = alone(script, how, make, str(tmp_path / "it"), True)
    same(again, right[SAVED:])
    same_states(found, how, states, wide)


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("make", [adamw, two])
@pytest.mark.parametrize("where", kept_for(pytest.mark.check, HERE, ("ring",)))
def test_several_workers_are_plain_torch_with_the_mean(
    pool: WorkerPool, where: str, make: Make, how: str, tmp_path: Path
) -> None:
    right, states, wide = plainly(2, how, make)
    for seen, found in run_at(pool, where, script, how, make, str(tmp_path / "it")):
        same(seen, right)
        same_states(found, how, states, wide)
    for seen, _ in run_at(pool, where, script, how, make, str(tmp_path / "it"), True):
        same(seen, right[SAVED:])


def given_gradients(session: atoll.Session, how: str) -> list[list[Tensor]]:
    """Steps on gradients that the script writes, equal on any number of workers."""
    net = net_of()
    torch.manual_seed(100 + session.rank)  # worker 0's seed counts
    optimizer = AdamW(net.parameters(), lr=1e-3)
    session.prepare(net, optimizer, bf16=how)
    seen = []
    for step in range(3):
        net(batch(step, session.rank)).square().mean().backward()
        generator = torch.Generator().manual_seed(step)
        for each in net.parameters():
            if each.grad is not None:
                each.grad.copy_(torch.randn(each.shape, generator=generator))
        optimizer.step()
        optimizer.zero_grad()
        seen.append(values(net))
    return seen


@pytest.mark.parametrize("how", WAYS)
def test_any_number_of_workers_gives_equal_bits(pool: WorkerPool, how: str) -> None:
    right = alone(given_gradients, how)
    for world in (1, 2, 3):
        for seen in run_at(pool, "ring", given_gradients, how, world=world):
            same(seen, right)


@pytest.mark.parametrize("how", WAYS)
def test_plain_torch_loads_the_checkpoint_and_goes_on(how: str, tmp_path: Path) -> None:
    alone(script, how, adamw, str(tmp_path / "it"))
    held = read_checkpoint(tmp_path / "it")
    net = net_of(seed=1)
    (optimizer,) = adamw(net)
    net.load_state_dict(held.model)
    optimizer.load_state_dict(held.trees["optimizer"][0])
    same([values(net)], [plainly(1, how, adamw)[0][SAVED - 1]])
    before = values(net)
    net(batch(SAVED, 0)).square().mean().backward()
    optimizer.step()
    assert optimizer.state[net[2].weight]["exp_avg"].dtype == BF16  # as torch loads it
    assert any((a != b).any() for a, b in zip(before, values(net), strict=True))


@pytest.mark.parametrize("how", WAYS)
def test_the_states_of_plain_steps_are_taken_over(how: str) -> None:
    """A plain run in bfloat16 goes on in float32, as does a float32 optimizer that loads its state."""
    net, other = net_of(), net_of()
    (optimizer,), (plain,) = adamw(net), adamw(other)
    for each, steps in ((net, optimizer), (other, plain)):
        each(batch(0, 0)).square().mean().backward()
        steps.step()
        steps.zero_grad()
    wide = copy.deepcopy(other).to(torch.float32)
    (right,) = adamw(wide)
    right.load_state_dict(plain.state_dict())
    with atoll.join() as session:
        session.prepare(net, optimizer, bf16=how)
        net(batch(1, 0)).square().mean().backward()
        other(batch(1, 0)).square().mean().backward()
        for mine, its in zip(wide.parameters(), other.parameters(), strict=True):
            mine.grad = None if its.grad is None else its.grad.float()
        optimizer.step()
        right.step()
        for mine, its in zip(net.parameters(), wide.parameters(), strict=True):
            for key, state in right.state[its].items():
                assert torch.equal(state, optimizer.state[mine][key])
            if how == "masters":
                assert torch.equal(mine, its.to(mine.dtype))


@pytest.mark.parametrize("how", WAYS)
def test_after_the_session_plain_torch_goes_on(how: str) -> None:
    """The state_dict is exact until a plain step, which casts the state as torch's own load does."""
    net = net_of()
    (optimizer,) = adamw(net)
    with atoll.join() as session:
        session.prepare(net, optimizer, bf16=how)
        net(batch(0, 0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = copy.deepcopy(optimizer.state_dict())
    assert state["state"][2]["exp_avg"].dtype == torch.float32
    other = copy.deepcopy(net)
    (plain,) = adamw(other)
    plain.load_state_dict(state)
    for each, steps in ((net, optimizer), (other, plain)):
        each(batch(1, 0)).square().mean().backward()
        steps.step()
    same([values(net)], [values(other)])
    assert optimizer.state[net[2].weight].keys() == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("how", WAYS)
def test_prepared_once_more_it_goes_on(how: str) -> None:
    """A second prepare of a changed model keeps copies and numbers of roundings; a layer comes free."""
    net = net_of()
    (optimizer,) = adamw(net)
    with atoll.join() as session:
        for number in range(2):
            session.prepare(net, optimizer, bf16=how)
            for step in range(2):
                net(batch(step, 0)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            net[0].requires_grad_(True)
            state = optimizer.state[net[2].weight]
            assert state["exp_avg"].dtype == torch.float32
            assert float(state["step"]) == 2 * (number + 1)
            if how == "stochastic":
                assert state["roundings"] == 2 * (number + 1)
        assert optimizer.state[net[0].weight].get("roundings", 2) == 2


@pytest.mark.parametrize("how", WAYS)
def test_a_worker_that_comes_late_takes_the_exact_state(how: str) -> None:
    """It has another seed, and goes on to the bit from the state of a living worker."""
    raw, seen = b"", list[list[Tensor]]()
    for seed in range(2):
        net = net_of(seed)
        (optimizer,) = adamw(net)
        with atoll.join() as session:
            session.prepare(net, optimizer, bf16=how)
            for step in range(4):
                if seed and step < 2:
                    continue  # made by the living worker
                if step == 2 and seed:
                    session._state.restore(raw, seed)
                elif step == 2:
                    raw = session._state.capture()
                net(batch(step, 0)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            seen.append(values(net))
    same(seen[1:], seen[:1])


def test_an_average_is_one_of_the_float32_values() -> None:
    net = net_of()
    (optimizer,) = adamw(net)
    with atoll.join() as session:
        average = session.average(net, 0.9)
        session.prepare(net, optimizer, bf16="masters")
        right: AveragedModel | None = None
        wide = copy.deepcopy(net).to(torch.float32)
        for step in range(3):
            net(batch(step, 0)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for mine, its in zip(wide.parameters(), net.parameters(), strict=True):
                    mine.copy_(optimizer.state[its].get("master", its))
            right = right or AveragedModel(wide, multi_avg_fn=get_ema_multi_avg_fn(0.9))
            right.update_parameters(wide)
        found = dict(average.named_parameters())
        for name, value in right.module.named_parameters():
            if not name.startswith("0."):
                torch.testing.assert_close(found[name], value.detach(), rtol=1e-6, atol=1e-8)


class Failing(SGD):
    """It fails in the middle of its second step."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        if self.steps == 2:
            raise ArithmeticError("in the middle")
        return super().step(closure)


@pytest.mark.parametrize("how", WAYS)
def test_a_step_that_fails_leaves_the_script_s_parameters_in_place(how: str) -> None:
    net = net_of()
    optimizer = Failing(net.parameters(), lr=1e-2, momentum=0.9)
    parameters = list(net.parameters())
    with atoll.join() as session:
        session.prepare(net, optimizer, bf16=how)
        for step in range(3):
            net(batch(step, 0)).square().mean().backward()
            if step == 1:
                before = values(net)
                with pytest.raises(ArithmeticError):
                    optimizer.step()
                assert optimizer.state_dict()["state"][2].keys() >= {"momentum_buffer"}
                same([values(net)], [before])
            else:
                optimizer.step()
            found = [p for group in optimizer.param_groups for p in group["params"]]
            assert all(a is b for a, b in zip(found, parameters, strict=True))
        assert all((a != b).any() for a, b in zip(before[2:], values(net)[2:], strict=True))


def prepared(session: atoll.Session, how: str) -> None:
    net = net_of()
    session.prepare(net, adamw(net)[0], bf16=how)


@pytest.mark.parametrize("where", kept_for(pytest.mark.check, ELSEWHERE, ("server", "tiers")))
def test_elsewhere_it_is_one_line(pool: WorkerPool, where: str) -> None:
    with pytest.raises(JobFailedError) as raised:
        run_at(pool, where, prepared, "masters")
    for failure in raised.value.failures.values():
        assert failure.kind == PrepareError.__name__
        assert failure.message.startswith("session.prepare(bf16='masters'): ")
        assert "\n" not in failure.message
        assert "memory.master" in failure.message or "ring or hierarchical" in failure.message


def unequal(session: atoll.Session) -> None:
    prepared(session, WAYS[session.rank])


def test_workers_that_ask_for_different_ways_are_told(pool: WorkerPool) -> None:
    with pytest.raises(JobFailedError) as raised:
        run_at(pool, "ring", unequal)
    for failure in raised.value.failures.values():
        line = "'session.prepare(bf16=)' is 'masters' on worker 0 and 'stochastic' on worker 1"
        assert line in failure.message


def lbfgs(net: nn.Module) -> Optimizer:
    return torch.optim.LBFGS([p for p in net.parameters() if p.requires_grad])


@pytest.mark.parametrize(
    ("make", "dtype", "asked", "line"),
    [
        (lambda net: adamw(net)[0], BF16, "master", "did you mean 'masters'? (one of: masters, stochastic)"),
        (lambda net: adamw(net)[0], torch.float32, "masters", "the model trains no parameter in bfloat16"),
        (lbfgs, BF16, "stochastic", "optimizer LBFGS calls the script's closure within a step"),
    ],
)
def test_bad_input_is_one_line(make: Any, dtype: torch.dtype, asked: str, line: str) -> None:
    net = model(0, dtype)
    with atoll.join() as session, pytest.raises(PrepareError) as raised:
        session.prepare(net, make(net), bf16=asked)
    assert line in str(raised.value)
    assert "\n" not in str(raised.value)
