"""A model in tiers that several optimizers step: as plain PyTorch does, to the bit."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from memory_members import BOTH, Script, compare, share_between, values_of
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from atoll.core.errors import MismatchError, PrepareError
from atoll.memory.fit import fit
from atoll.memory.sharded import Sharded
from support.families import batch, build, loss_of
from support.members import Member
from support.tight import Together, memory, same

pytestmark = pytest.mark.usefixtures("poisoned")


def split(parameters: Sequence[nn.Parameter]) -> list[Optimizer]:
    """Momentum for the matrices, in two groups, and AdamW for all else."""
    matrices = [p for p in parameters if p.dim() == 2]
    others = [p for p in parameters if p.dim() != 2]
    groups = [{"params": matrices[::2]}, {"params": matrices[1::2], "lr": 0.02, "weight_decay": 0.1}]
    return [SGD(groups, lr=0.05, momentum=0.9), AdamW(others, lr=1e-2, fused=True)]


def together(parameters: list[nn.Parameter]) -> Any:
    return Together(split(parameters))


def momentum(parameters: list[nn.Parameter]) -> Any:
    """Where sums are rounded in another order: AdamW makes a whole step of a gradient of nothing else."""
    return Together([SGD(parameters[::2], lr=0.05, momentum=0.9), SGD(parameters[1::2], lr=0.02)])


# The optimizers that step in each of the iterations. Gradients stay until their own optimizer has stepped.
DUE: dict[str, Sequence[Sequence[int]]] = {
    "both": [(0, 1)] * 4,
    "the second first": [(1, 0)] * 4,
    "the first twice as often": [(0,), (0, 1)] * 2,
    "the second twice as often": [(1,), (1, 0)] * 2,
    "in turn": [(0,), (1,)] * 2,
    "one twice on the same gradients": [(0, 0, 1)] * 3,
    "the first never": [(1,)] * 3,
}


def train(
    model: nn.Module, optimizers: Sequence[Optimizer], due: Sequence[Sequence[int]], first: int = 0
) -> Iterator[list[Any]]:
    """Yield the loss, the norm and the values of each iteration."""
    drives = [StepLR(each, 2, gamma=0.5) for each in optimizers]
    for step, order in enumerate(due, first):
        inputs, targets = batch("gpt", step)
        loss = loss_of(model(inputs), targets)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for index in order:
            optimizers[index].step()
        for index in set(order):
            optimizers[index].zero_grad()
            drives[index].step()
        yield [loss.item(), float(norm), values_of(model)]


def plain(due: Sequence[Sequence[int]]) -> list[list[Any]]:
    model = build("gpt")
    return list(train(model, split(list(model.parameters())), due))


@pytest.mark.parametrize("name", DUE)
def test_each_steps_its_own_parameters_when_it_is_called(name: str) -> None:
    model = build("gpt")
    optimizers = split(list(model.parameters()))
    with fit(model, optimizers, memory=memory(model, 0.4)) as fitted:
        assert not fitted.plan.fits
        found = list(train(model, optimizers, DUE[name]))
    assert same(found, plain(DUE[name]))
    assert all(type(p) is nn.Parameter for p in model.parameters())


def states(optimizer: Optimizer) -> list[Any]:
    """The optimizer's state_dict, as lists."""
    held = optimizer.state_dict()
    groups = [[group[key] for key in sorted(group)] for group in held["param_groups"]]
    state = held["state"]
    return [groups, [[index, [(k, state[index][k] + 0) for k in sorted(state[index])]] for index in state]]


def test_the_state_of_each_is_plain_torchs_and_loads_both_ways() -> None:
    due = DUE["the first twice as often"]
    model = build("gpt")
    optimizers = split(list(model.parameters()))
    list(train(model, optimizers, due[:2]))
    saved = copy.deepcopy([each.state_dict() for each in (model, *optimizers)])
    tiered = build("gpt", 1)
    theirs = split(list(tiered.parameters()))
    with fit(tiered, theirs, memory=memory(tiered, 0.4)):
        for each, state in zip((tiered, *theirs), saved, strict=True):
            each.load_state_dict(copy.deepcopy(state))
        assert same(list(map(states, theirs)), list(map(states, optimizers)))
        found = list(train(tiered, theirs, due[2:], 2))
        saved = copy.deepcopy([each.state_dict() for each in (tiered, *theirs)])
        again = build("gpt", 2)
        mine = split(list(again.parameters()))
        for each, state in zip((again, *mine), saved, strict=True):
            each.load_state_dict(state)
    assert same(found, list(train(model, optimizers, due[2:], 2)))
    assert same(list(map(states, theirs)), list(map(states, optimizers)))
    assert same(list(map(states, mine)), list(map(states, optimizers)))


class Held(SGD):
    """Steps chunks once `goes_on` is set."""

    goes_on = threading.Event()

    def step(self, closure: Any = None) -> Any:
        if threading.current_thread().name == "atoll-stepping":
            assert self.goes_on.wait(60)
        return super().step(closure)


def test_a_step_waits_for_no_chunk_of_another_optimizer() -> None:
    model = build("gpt")
    parameters = list(model.parameters())
    held, adamw = Held(parameters[::2], lr=0.05), AdamW(parameters[1::2], lr=1e-2)
    with fit(model, [held, adamw], memory=memory(model, 0.4, resident="0")) as fitted:
        inputs, targets = batch("gpt", 0)
        loss_of(model(inputs), targets).backward()
        held.step()
        adamw.step()
        assert fitted.stats().steps == 1  # of the model: both have stepped
        held.goes_on.set()
    expected = build("gpt")
    parameters = list(expected.parameters())
    loss_of(expected(inputs), targets).backward()
    for each in (SGD(parameters[::2], lr=0.05), AdamW(parameters[1::2], lr=1e-2)):
        each.step()
    assert same(values_of(model), values_of(expected))


def in_backward(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[Any]:
    """Each optimizer steps its one parameter as soon as the gradient is there."""
    owners = {group["params"][0]: each for each in optimizers for group in each.param_groups}

    def step_at_once(parameter: nn.Parameter) -> None:
        owners[parameter].step()
        owners[parameter].zero_grad()

    for parameter in owners:
        parameter.register_post_accumulate_grad_hook(step_at_once)
    found = []
    for step in range(3):
        loss = model(torch.randn(4, 32, generator=torch.Generator().manual_seed(step))).square().mean()
        loss.backward()
        found.append([loss.item(), values_of(model)])
    return found


def test_an_optimizer_for_each_parameter_steps_within_backward() -> None:
    def build() -> tuple[nn.Module, list[Optimizer]]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(4)))
        return model, [SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()]

    model, optimizers = build()
    with fit(model, optimizers, memory=memory(model, 0.5)) as fitted:
        assert not fitted.plan.fits
        found = in_backward(model, optimizers)
    assert same(found, in_backward(*build()))


def test_one_that_steps_another_fitted_model_is_refused() -> None:
    first, second = build("gpt"), build("gpt")
    shared = split(list(first.parameters()))[1]
    with fit(first, shared, memory=memory(first, 0.4)):
        optimizers = [*split(list(second.parameters())), shared]
        with pytest.raises(PrepareError, match="the AdamW steps another model that was fitted already"):
            fit(second, optimizers, memory=memory(second, 0.4))


# -- members -------------------------------------------------------------------------------------------------


@BOTH
def test_members_step_by_both(sharding: str) -> None:
    compare(Script("gpt", (1.0, 1.0), together), 0.5, sharding=sharding)


class InTurn(Script):
    """The second optimizer steps in every other iteration alone, and is zeroed then."""

    def plain(self, steps: int) -> tuple[list[Tensor], list[Any]]:
        model, optimizers = self.build()
        for step in range(steps):
            for rank in range(len(self.weights)):
                self.backward(model, rank, step, None)
            self.step(optimizers, step)
        return values_of(model), [None] * steps

    def train(self, member: Member, model: Any, optimizer: Any, fitted: Sharded, steps: int) -> list[Any]:
        for step in range(steps):
            self.backward(model, member.rank, step, fitted)
            self.step(optimizer, step)
        return [None] * steps

    def step(self, optimizers: Any, step: int) -> None:
        for each in optimizers if step % 2 else optimizers[:1]:
            each.step()
            each.zero_grad()


@BOTH
def test_the_gradients_of_one_that_waits_are_added_up_at_their_holders(sharding: str) -> None:
    compare(InTurn("gpt", (1.0, 1.0), momentum), 0.5, steps=4, exact=False, sharding=sharding)


def test_members_of_groups_step_by_both() -> None:
    script = Script("gpt", (1.0,) * 4, momentum)
    values, _ = script.plain(3)
    groups = ((0, 1), (2, 3))
    found = share_between(script, 0.5, lambda m, *rest: script.train(m, *rest, 3), groups)
    for _, ended in found:
        assert same(ended, found[0][1])
        torch.testing.assert_close(ended, values, rtol=1e-5, atol=1e-6)


def test_members_that_step_unlike_ones_are_told_which() -> None:
    script = Script("gpt", (1.0, 1.0), together)

    def body(member: Member, model: Any, optimizers: Any, fitted: Sharded) -> None:
        script.backward(model, member.rank, 0, fitted)
        optimizers[member.rank].step()

    with pytest.raises(MismatchError) as caught:
        share_between(script, 0.5, body)
    first, second = str(caught.value).split("; ")
    assert first.startswith("worker 0 is in optimizers[0].step")
    assert second.startswith("worker 1 is in optimizers[1].step")


def test_what_is_not_finite_is_asked_of_the_parameters_at_hand() -> None:
    script = Script("gpt", (1.0, 1.0), together)

    def body(member: Member, model: Any, optimizers: Any, fitted: Sharded) -> list[bool]:
        script.backward(model, member.rank, 0, fitted)
        model.head.weight.grad.fill_(float("nan"))
        fitted.sync("a gradient that is no number")
        of_each = [{p for group in each.param_groups for p in group["params"]} for each in optimizers]
        found = [fitted.all_finite(parameters) for parameters in of_each]
        return [*found, fitted.all_finite()]

    for found, _ in share_between(script, 0.5, body):
        assert found == [False, True, False]
