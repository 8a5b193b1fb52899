"""The user's optimizer under a session and its plain twin: in a ring it steps chunks, alone parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import atoll
from atoll.core.config import Chunks, Config, Sync
from atoll.core.errors import PrepareError, UserError
from atoll.tensors.optimizer import ChunkOptimizer
from atoll.train.api.place import Place
from support.pool import ring_of_one

_places: list[Callable[[], Place]] = []  # what the running test is run for
_sessions: list[atoll.Session] = []


@pytest.fixture(autouse=True, params=[ring_of_one, Place], ids=["ring", "alone"])
def _place(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run each test twice."""
    _places[:] = [request.param]
    yield
    for session in _sessions:
        session.close()
    _sessions.clear()


def join(config: Config) -> atoll.Session:
    _sessions.append(atoll.join(config, place=_places[0]()))
    return _sessions[-1]


class Blocks(nn.Module):
    """Three layers of odd sizes; `skip` leaves the middle one out, so that its gradients are None."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(5, 33), nn.Linear(33, 33), nn.Linear(33, 7)

    def forward(self, x: torch.Tensor, skip: bool = False) -> torch.Tensor:
        x = self.first(x).tanh()
        return self.last(x if skip else self.middle(x).tanh())


class Twins:
    """The same model and optimizer twice: one plain, one prepared."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer], chunk: str = "8KiB") -> None:
        torch.manual_seed(0)
        self.plain = Blocks()
        self.chunked = copy.deepcopy(self.plain)
        self.plain_optimizer, self.optimizer = make(self.plain.parameters()), make(self.chunked.parameters())
        self.session = join(Config(chunks=Chunks(size=chunk)))
        self.session.prepare(self.chunked, self.optimizer)

    def step(self, number: int, skip: bool = False) -> None:
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(number))
        for model, optimizer in ((self.plain, self.plain_optimizer), (self.chunked, self.optimizer)):
            optimizer.zero_grad()
            model(x, skip).square().mean().backward()
            optimizer.step()

    def assert_equal(self) -> None:
        for (name, a), b in zip(self.plain.named_parameters(), self.chunked.parameters(), strict=True):
            assert torch.equal(a, b), name
        left, right = self.plain_optimizer.state_dict(), self.optimizer.state_dict()
        assert left["param_groups"] == right["param_groups"]
        assert left["state"].keys() == right["state"].keys()
        for index, state in left["state"].items():
            assert state.keys() == right["state"][index].keys()
            for key, value in state.items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(right["state"][index][key])), (
                    index,
                    key,
                )


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def test_a_parameter_without_gradient_is_skipped_and_keeps_its_own_step_count() -> None:
    twins = Twins(adamw)
    for number in range(8):
        twins.step(number, skip=number in (0, 3, 4))
    twins.assert_equal()
    steps = {float(state["step"]) for state in twins.optimizer.state_dict()["state"].values()}
    assert steps == {8.0, 5.0}


def test_the_state_shown_is_the_state_used() -> None:
    twins = Twins(adamw)
    twins.step(0)
    for optimizer, model in ((twins.plain_optimizer, twins.plain), (twins.optimizer, twins.chunked)):
        optimizer.state[model.first.weight]["exp_avg"].zero_()
    twins.step(1)
    twins.assert_equal()


def test_state_loads_from_and_into_plain_torch() -> None:
    twins = Twins(adamw)
    twins.step(0)
    twins.step(1, skip=True)
    saved = copy.deepcopy(twins.plain_optimizer.state_dict())
    twins.step(2)
    weights = copy.deepcopy(twins.plain.state_dict())
    for optimizer, model in ((twins.plain_optimizer, twins.plain), (twins.optimizer, twins.chunked)):
        optimizer.load_state_dict(copy.deepcopy(saved))
        model.load_state_dict(weights)
    for number in range(3, 6):
        twins.step(number)
    twins.assert_equal()


def test_preparing_an_optimizer_that_has_state_goes_on_from_it() -> None:
    twins = Twins(adamw)
    twins.step(0)
    twins.session.close()
    twins.session = join(Config())
    twins.session.prepare(twins.chunked, twins.optimizer)
    twins.step(1)
    twins.assert_equal()


def test_after_the_session_the_optimizer_is_a_plain_one() -> None:
    twins = Twins(adamw)
    twins.step(0)
    twins.session.close()
    twins.step(1)
    twins.step(2, skip=True)
    twins.assert_equal()


def test_a_step_that_raises_leaves_the_parameters_in_place() -> None:
    twins = Twins(lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2)))
    twins.step(0)
    group = twins.optimizer.param_groups[0]
    kept, group["betas"] = group["betas"], "not a pair"
    with pytest.raises((ValueError, TypeError)):
        twins.step(1)
    group["betas"] = kept
    twins.chunked(torch.ones(1, 5))
    assert [id(p) for p in group["params"]] == [id(p) for p in twins.chunked.parameters()]


def test_closures_run_with_the_parameters_in_place() -> None:
    twins = Twins(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    x = torch.ones(2, 5)
    losses = []
    for model, optimizer in ((twins.plain, twins.plain_optimizer), (twins.chunked, twins.optimizer)):

        def closure(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        losses.append([float(optimizer.step(closure).detach()) for _ in range(3)])
    assert losses[0] == losses[1]
    twins.assert_equal()


def test_autograd_notices_a_step_between_forward_and_backward() -> None:
    twins = Twins(adamw)
    loss = twins.chunked(torch.ones(1, 5)).sum()
    loss.backward(retain_graph=True)
    twins.optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_optimizer_that_needs_a_closure_is_named_where_a_step_may_be_left_out() -> None:
    model = nn.Linear(4, 4, bias=False)
    with pytest.raises(PrepareError, match="optimizer LBFGS calls the script's closure") as caught:
        join(Config(sync=Sync(nonfinite="skip"))).prepare(model, torch.optim.LBFGS(model.parameters()))
    assert "set sync.nonfinite to stop or allow" in str(caught.value)


class Lamb(torch.optim.Optimizer):
    """Scales each parameter's step by its norm."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * p.norm() / p.grad.norm(), alpha=group["lr"])


def test_a_trust_ratio_is_stepped_by_whole_tensors_without_being_known() -> None:
    twins = Twins(lambda p: Lamb(p, {"lr": 0.1}))
    for number in range(4):
        twins.step(number)
    twins.assert_equal()


def test_an_unknown_element_wise_optimizer_works() -> None:
    class SignDescent(torch.optim.Optimizer):
        """Counts its steps in a plain number, and replaces its state tensor at each step."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    state = self.state[p]
                    state["count"] = state.get("count", 0) + 1
                    state["mean"] = p.grad * 0.5 + state.get("mean", torch.zeros_like(p)) * 0.5
                    p.sub_(state["mean"].sign(), alpha=group["lr"] / state["count"])

    twins = Twins(lambda parameters: SignDescent(parameters, {"lr": 0.1}))
    for number in range(6):
        twins.step(number, skip=number in (2, 3))
    twins.assert_equal()


def test_state_that_the_script_clears_begins_anew() -> None:
    twins = Twins(adamw)
    twins.step(0)
    for optimizer in (twins.plain_optimizer, twins.optimizer):
        optimizer.state.clear()
    twins.step(1)
    twins.step(2, skip=True)
    twins.assert_equal()


def test_state_that_first_appears_in_mid_run_is_kept_by_element() -> None:
    twins = Twins(lambda p: torch.optim.SGD(p, lr=0.1))
    twins.step(0)
    for optimizer in (twins.plain_optimizer, twins.optimizer):
        optimizer.param_groups[0]["momentum"] = 0.9
    for number in range(1, 5):
        twins.step(number, skip=number == 3)
    twins.assert_equal()


def test_an_optimizer_with_attributes_and_tensors_of_its_own_works() -> None:
    class Scaled(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.1})
            self.scale = 0.5

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    self.state[p]["step"] = self.state[p].get("step", torch.tensor(0.0)) + 1
                    p.sub_(p.grad * self.scale / self.state[p]["step"])

    twins = Twins(Scaled)
    for number in range(4):
        twins.step(number, skip=number == 1)
    twins.assert_equal()


def test_a_refused_optimizer_leaves_the_model_as_it_was() -> None:
    model = nn.Linear(4, 4)
    session = join(Config(sync=Sync(nonfinite="skip")))
    with pytest.raises(PrepareError):
        session.prepare(model, torch.optim.LBFGS(model.parameters()))
    session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(2, 4)).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.eq(2).all()


def test_a_param_group_removed_afterwards_is_refused() -> None:
    twins = Twins(lambda p: torch.optim.SGD([{"params": [each]} for each in p], lr=0.1))
    twins.optimizer.param_groups.pop()
    with pytest.raises(UserError, match="was removed after session.prepare"):
        twins.step(0)


def test_a_param_group_added_afterwards_is_refused() -> None:
    twins = Twins(adamw)
    twins.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    with pytest.raises(UserError, match="param group 1 was changed after session.prepare"):
        twins.step(0)


def test_the_step_takes_gradients_that_the_script_replaced() -> None:
    twins = Twins(adamw)
    for model, optimizer in ((twins.plain, twins.plain_optimizer), (twins.chunked, twins.optimizer)):
        model(torch.ones(2, 5)).square().mean().backward()
        model.first.weight.grad = torch.full_like(model.first.weight, 0.25)
        model.last.bias.grad = None
        model.middle.weight.grad.clamp_(-0.01, 0.01)
        optimizer.step()
    twins.assert_equal()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_fused_kernels_step_even_sizes_in_runs_and_odd_ones_apart(
    make: Any, dtype: torch.dtype, threads: int
) -> None:
    torch.manual_seed(0)
    sizes = [64, 4096, 33, 16, 100_003, 300_032, 8, 48, 1, 160]
    plain = nn.ParameterList(nn.Parameter(torch.randn(size, dtype=dtype)) for size in sizes)
    chunked = copy.deepcopy(plain)
    optimizers = [make(model.parameters(), lr=1e-2, fused=True) for model in (plain, chunked)]
    session = join(Config(chunks=Chunks(size="16MiB")))
    session.prepare(chunked, optimizers[1])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for _ in range(5):
            for a, b in zip(plain, chunked, strict=True):
                gradient = torch.randn_like(a)
                a.grad, b.grad = gradient, gradient.clone()
            for optimizer in optimizers:
                optimizer.step()
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(plain, chunked, strict=True))
    stepper = session._state.prepared[0].stepper
    if isinstance(stepper, ChunkOptimizer):
        assert 1 < len(stepper.segments) < len(sizes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW, torch.optim.ASGD])
def test_half_precision_is_stepped_to_the_bit(dtype: torch.dtype, make: Any) -> None:
    torch.manual_seed(0)
    plain = Blocks().to(dtype)
    chunked = copy.deepcopy(plain)
    extra = {torch.optim.SGD: {"momentum": 0.9}, torch.optim.AdamW: {"eps": 1e-3}}.get(make, {})
    optimizers = [make(model.parameters(), lr=1e-2, **extra) for model in (plain, chunked)]
    join(Config()).prepare(chunked, optimizers[1])
    for number in range(10):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(number)).to(dtype)
        for model, optimizer in zip((plain, chunked), optimizers, strict=True):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), chunked.parameters(), strict=True))


def test_step_hooks_of_the_script_do_what_they_do_in_plain_pytorch() -> None:
    """Registered before `prepare` and after it; they see parameters, and what they change counts."""
    seen: list[list[float]] = []

    def add_hooks(optimizer: torch.optim.Optimizer) -> None:
        def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            group = optimizer.param_groups[0]
            group["lr"] *= 0.9
            group["params"][1].grad = None
            group["params"][2].grad.mul_(0.5)

        def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            with torch.no_grad():
                for parameter in optimizer.param_groups[0]["params"]:
                    parameter.clamp_(-0.2, 0.2)
                    noted.append(float(parameter.sum()))

        noted: list[float] = []
        seen.append(noted)
        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)

    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(parameters, lr=0.1)
        add_hooks(optimizer)
        return optimizer

    twins = Twins(make)
    add_hooks(twins.plain_optimizer)
    add_hooks(twins.optimizer)
    for number in range(4):
        twins.step(number)
        twins.assert_equal()
    assert seen[0] == seen[1]
    assert seen[2] == seen[3]
