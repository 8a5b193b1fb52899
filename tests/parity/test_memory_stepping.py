"""Gradients and steps of chunks whose values, gradients and states lie elsewhere, against plain torch.

What brings the values to the parameters here is the smallest thing that can: before a forward it waits for
each chunk's step and copies its payload "values". The engine proper is tested elsewhere.
"""

from __future__ import annotations

import copy
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from atoll.chunks import lay_out
from atoll.core.errors import DeadlineError, PrepareError, RunError, UserError
from atoll.core.memory import Memory
from atoll.memory.fit import fit
from atoll.memory.gradients import ModelGradients, TrainedChunk
from atoll.memory.modelsteps import ModelSteps
from atoll.memory.payloads import GRADIENT, VALUES, TensorPayloads
from atoll.memory.states import chunk_states
from atoll.memory.stepping import ChunkStepper, state_dtypes
from atoll.memory.stepqueue import StepQueue
from atoll.tensors.binding import specs_of
from atoll.tensors.lazy import LazyTensor
from support.models import MODELS
from support.optimizers import FUSED, SETTINGS

pytestmark = pytest.mark.sampled

STEPS = 5
# Torch's own fused SGD with momentum raises when a parameter's first gradient comes after the others'.
CASES = [
    pytest.param(name, settings | how, model, id="-".join([name, *settings, *how, model]))
    for name, variants in SETTINGS.items()
    for settings in variants
    for how in ({"foreach": True}, *([{"fused": True}] if name in FUSED else []))
    for model in ("odd", "unused")
    if not ("momentum" in settings and "fused" in how and model == "unused")
]


class AwayParameter(nn.Parameter):
    """A parameter whose gradient is served on demand, as the engine's class serves it."""

    homes: dict[int, ModelGradients] = {}  # noqa: RUF012

    @property  # type: ignore[override]
    def grad(self) -> Tensor | None:
        return self.homes[id(self)].grad_of(self)

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        self.homes[id(self)].set_grad(self, gradient)

    @grad.deleter
    def grad(self) -> None:
        self.homes[id(self)].set_grad(self, None)


class Noted(StepQueue):
    """Notes which chunks were stepped."""

    def __init__(self, words: dict[int, str]) -> None:
        super().__init__(words)
        self.stepped: list[int] = []
        self.began, self.goes_on = threading.Event(), threading.Event()
        self.goes_on.set()

    def ended(self, chunk: int, error: BaseException | None) -> None:
        self.stepped.append(chunk)
        self.began.set()
        assert self.goes_on.wait(60)
        super().ended(chunk, error)


class Away:
    """A model and its optimizer with values, gradients and states in payloads."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        size: int = 1024,
        device: torch.device | None = None,
        **options: Any,
    ) -> None:
        self.model, self.optimizer, self.payloads = model, optimizer, TensorPayloads()
        named = dict(model.named_parameters())
        groups = {p: str(i) for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        layout = lay_out(specs_of(named, groups), chunk_bytes=size)
        names, parameters = list(named), list(named.values())
        self.chunks = []
        for chunk in layout.trainable:
            members = [slot.parameter for slot in chunk.slots]
            trained = TrainedChunk(chunk, [names[i] for i in members], [parameters[i] for i in members])
            trained.device = device or trained.device
            self.chunks.append(trained)
            self.payloads.add((chunk.id, VALUES), chunk.numel, trained.dtype)
        self.store()
        self.arrivals: list[tuple[int, int]] = []
        self.steps = Noted({each.chunk.id: each.words for each in self.chunks})
        self.gradients = ModelGradients(
            self.chunks,
            self.payloads,
            self.steps,
            lambda each, slot: self.arrivals.append((each.chunk.id, slot)),
        )
        for trained in self.chunks:
            for parameter in trained.parameters:
                AwayParameter.homes[id(parameter)] = self.gradients
                parameter.__class__ = AwayParameter
        self.states = chunk_states(optimizer, self.chunks, self.payloads, **options)
        self.stepper = ChunkStepper(
            optimizer,
            self.states,
            self.gradients,
            self.steps,
            before=lambda chunks: self.order(chunks),
            after=lambda: None,
        )
        self.stepping = ModelSteps([self.stepper], self.steps)

    def order(self, chunks: Sequence[int]) -> Sequence[int]:
        return list(reversed(chunks))

    def store(self) -> None:
        """The script has changed the parameters."""
        for trained in self.chunks:
            with self.payloads.pin((trained.chunk.id, VALUES), writes=True) as flat, torch.no_grad():
                for slot, parameter in enumerate(trained.parameters):
                    trained.part(flat, slot).copy_(parameter)

    def fetch(self) -> None:
        """Before a forward: every value as it is after the step; until then it was NaN."""
        for trained in self.chunks:
            self.steps.wait_stepped(trained.chunk.id)
            with self.payloads.pin((trained.chunk.id, VALUES)) as flat, torch.no_grad():
                for slot, parameter in enumerate(trained.parameters):
                    parameter.data.copy_(trained.part(flat, slot))

    def spoil(self) -> None:
        for trained in self.chunks:
            for parameter in trained.parameters:
                parameter.data.fill_(float("nan"))

    def close(self) -> None:
        self.stepping.close()
        self.fetch()
        for trained in self.chunks:
            for parameter in trained.parameters:
                parameter.__class__ = nn.Parameter
                del AwayParameter.homes[id(parameter)]
        self.gradients.close()


@contextmanager
def away(model: nn.Module, optimizer: Optimizer, **options: Any) -> Iterator[Away]:
    torch.set_num_threads(1)
    fitted = Away(model, optimizer, **options)
    try:
        yield fitted
    finally:
        fitted.close()


Clip = Callable[[nn.Module, Away | None], Any]


def train(
    model: nn.Module,
    optimizer: Optimizer,
    name: str,
    fitted: Away | None = None,
    *,
    steps: int = STEPS,
    micro: int = 1,
    between: Clip = lambda _model, _fitted: None,
    to_none: bool = True,
    dtype: torch.dtype = torch.float32,
) -> list[Any]:
    """Train on share 0's batches; the parameters after each step, and what `between` gave."""
    seen: list[Any] = []
    for step in range(steps):
        for part in range(micro):
            if fitted is not None:
                fitted.spoil()
                fitted.fetch()
            MODELS[name].loss(model, MODELS[name].batch(0, step * micro + part, dtype=dtype)).backward()
        seen.append(between(model, fitted))
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
        if fitted is not None:
            fitted.spoil()
            fitted.fetch()
        seen.append([p.detach().clone() for p in model.parameters()])
    return seen


def both(
    name: str,
    make: Callable[[list[nn.Parameter]], Optimizer],
    dtype: torch.dtype = torch.float32,
    options: dict[str, Any] | None = None,
    **how: Any,
) -> None:
    """Train a plain model and one whose chunks are away, and compare them."""
    plain = MODELS[name].build(dtype)
    plain_optimizer = make(list(plain.parameters()))
    expected = train(plain, plain_optimizer, name, dtype=dtype, **how)
    model = MODELS[name].build(dtype)
    optimizer = make(list(model.parameters()))
    with away(model, optimizer, **(options or {})) as fitted:
        assert_same(expected, train(model, optimizer, name, fitted, dtype=dtype, **how))
        shown = optimizer.state_dict()
        assert not dict.keys(optimizer.state)  # nothing of it stays
        assert_same(plain_optimizer.state_dict(), shown)
    assert_same(plain_optimizer.state_dict(), shown)  # read after the end
    assert_same(plain_optimizer.state_dict(), optimizer.state_dict())


def assert_same(expected: Any, got: Any, where: str = "") -> None:
    """Equal to the bit, whatever they are nested in."""
    got = got.clone() if isinstance(got, LazyTensor) else got
    assert type(expected) is type(got), where
    if isinstance(expected, Tensor):
        assert expected.dtype == got.dtype, where
        assert expected.shape == got.shape, where
        assert torch.equal(expected, got), f"{where}: differs by {(expected - got).abs().max():.3g}"
    elif isinstance(expected, dict):
        assert expected.keys() == got.keys(), where
        for key in expected:
            assert_same(expected[key], got[key], f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(expected) == len(got), where
        for index, (a, b) in enumerate(zip(expected, got, strict=True)):
            assert_same(a, b, f"{where}.{index}")
    else:
        assert expected == got, where


@pytest.mark.parametrize(("name", "settings", "model_name"), CASES)
def test_every_optimizer_is_bit_equal(name: str, settings: dict[str, Any], model_name: str) -> None:
    both(model_name, lambda parameters: getattr(torch.optim, name)(parameters, **settings))


def adamw(parameters: Any, **settings: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, fused=True, **settings)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["gpt", "tied", "frozen", "unused", "odd"])
def test_accumulation(name: str, dtype: torch.dtype, to_none: bool) -> None:
    both(name, adamw, dtype, micro=3, to_none=to_none)


def test_gradients_that_are_not_cleared_go_on_adding_up() -> None:
    def trained(model: nn.Module, optimizer: Optimizer, fitted: Away | None) -> Any:
        seen = []
        for step in range(3):
            if fitted is not None:
                fitted.fetch()
            MODELS["odd"].loss(model, MODELS["odd"].batch(0, step)).backward()
            optimizer.step()
            seen.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        return seen

    plain, model = MODELS["odd"].build(), MODELS["odd"].build()
    expected = trained(plain, adamw(plain.parameters()), None)
    optimizer = adamw(model.parameters())
    with away(model, optimizer) as fitted:
        assert_same(expected, trained(model, optimizer, fitted))
    assert_same([p.grad for p in plain.parameters()], [p.grad for p in model.parameters()])


def by_torch(model: nn.Module, _: Away | None) -> Tensor:
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def by_itself(model: nn.Module, fitted: Away | None) -> Tensor:
    return by_torch(model, None) if fitted is None else fitted.gradients.clip_grad_norm_(0.1)


def by_value(model: nn.Module, _: Away | None) -> None:
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)


def by_hand(model: nn.Module, _: Away | None) -> list[Any]:
    """What scripts do to gradients: in place, through .data, through views, by assignment, and reading."""
    seen: list[Any] = []
    for index, parameter in enumerate(model.parameters()):
        if parameter.grad is None:
            continue
        parameter.grad.mul_(0.5)
        parameter.grad.data.add_(0.01)
        parameter.grad.view(-1)[:1] = 3.0
        parameter.grad *= 2
        parameter.grad.add_(parameter.detach(), alpha=0.1)
        parameter.grad.numpy()[...] *= 0.75
        if index == 1:
            parameter.grad = parameter.grad / 3
        if index == 2:
            parameter.grad = None
        if parameter.grad is not None:
            assert parameter.grad is parameter.grad
            seen += [parameter.grad.norm(), parameter.grad.detach().clone(), float(parameter.grad.sum())]
            seen.append((parameter.grad.shape, parameter.grad.dtype, copy.deepcopy(parameter.grad)))
    return seen


@pytest.mark.parametrize("between", [by_torch, by_itself, by_value, by_hand])
@pytest.mark.parametrize("name", ["gpt", "unused", "odd"])
def test_edits_between_backward_and_step(name: str, between: Clip) -> None:
    both(name, adamw, between=between, micro=2)


def test_other_kinds_of_tensors_have_their_own_way_beside_gradients() -> None:
    class Counted(torch.Tensor):
        calls = 0

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            cls.calls += 1
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    model = MODELS["gpt"].build()
    with away(model, adamw(model.parameters())):
        MODELS["gpt"].loss(model, MODELS["gpt"].batch(0, 0)).backward()
        gradient = next(model.parameters()).grad
        assert gradient is not None
        expected = gradient.clone() + 1
        gradient.add_(torch.ones_like(expected).as_subclass(Counted))
        assert Counted.calls == 1
        assert_same(expected, gradient.clone())


@pytest.mark.parametrize("between", [by_torch, by_itself, by_hand])
def test_gradients_on_another_device_are_served_as_copies(between: Clip) -> None:
    """To torch, cpu:0 is another device than cpu."""
    here = torch.zeros(1)
    assert here.to("cpu:0").data_ptr() != here.data_ptr()
    both("gpt", adamw, between=between, micro=2, options={"device": torch.device("cpu:0")})


def test_a_gradient_scaler_unscales_and_skips() -> None:
    def trained(model: nn.Module, optimizer: Optimizer, fitted: Away | None) -> list[Any]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, growth_interval=2)
        seen: list[Any] = []
        for step in range(6):
            if fitted is not None:
                fitted.fetch()
            loss = MODELS["gpt"].loss(model, MODELS["gpt"].batch(0, step))
            scaler.scale(loss * (1e10 if step < 2 else 1.0)).backward()  # type: ignore[no-untyped-call]
            scaler.unscale_(optimizer)
            seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen.append(scaler.get_scale())
        return seen

    plain, model = MODELS["gpt"].build(), MODELS["gpt"].build()
    plain_optimizer, optimizer = adamw(plain.parameters()), adamw(model.parameters())
    expected = trained(plain, plain_optimizer, None)
    assert expected[1] < 2.0**120 < expected[-1] * 4
    with away(model, optimizer) as fitted:
        assert str(expected) == str(trained(model, optimizer, fitted))
    assert_same(plain.state_dict(), model.state_dict())
    assert_same(plain_optimizer.state_dict(), optimizer.state_dict())


def test_parameters_outside_the_chunks_are_stepped_by_the_optimizer_itself() -> None:
    """Of another module, and one that was frozen when its chunk was made."""

    def trained(model: nn.Module, fitted: bool) -> list[Any]:
        outside, seen = nn.Parameter(torch.ones(3)), []
        late = next(model.parameters()).requires_grad_(False)
        optimizer = adamw([*model.parameters(), outside])
        with away(model, optimizer) if fitted else nullcontext() as held:
            late.requires_grad_(True)
            for step in range(3):
                if held is not None:
                    held.fetch()
                loss = MODELS["gpt"].loss(model, MODELS["gpt"].batch(0, step)) * outside.square().sum()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                seen += [
                    outside.detach().clone(),
                    late.detach().clone(),
                    sorted(optimizer.state_dict()["state"]),
                ]
        return [*seen, *(p.detach() for p in model.parameters()), optimizer.state_dict()]

    plain, model = MODELS["gpt"].build(), MODELS["gpt"].build()
    assert_same(trained(plain, False), trained(model, True))


def test_schedulers_and_param_groups() -> None:
    def made(model: nn.Module) -> tuple[Any, Optimizer]:
        first, *rest = model.parameters()
        optimizer = torch.optim.SGD([{"params": [first], "lr": 0.1}, {"params": rest}], lr=0.01, momentum=0.9)
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), optimizer

    def trained(model: nn.Module, optimizer: Optimizer, scheduler: Any, fitted: Away | None) -> list[Any]:
        seen = []
        for _ in range(3):
            seen += train(model, optimizer, "gpt", fitted, steps=2)
            scheduler.step()
        return seen

    plain, model = MODELS["gpt"].build(), MODELS["gpt"].build()
    scheduler, optimizer = made(plain)
    expected = trained(plain, optimizer, scheduler, None)
    scheduler, optimizer = made(model)
    with away(model, optimizer) as fitted:
        assert_same(expected, trained(model, optimizer, scheduler, fitted))
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**3


@pytest.mark.parametrize("direction", ["to plain", "from plain", "both away"])
def test_state_dict_round_trips(direction: str) -> None:
    model, other = MODELS["unused"].build(), MODELS["unused"].build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True)
    if direction == "from plain":
        train(model, optimizer, "unused")
        saved = copy.deepcopy(optimizer.state_dict())
    else:
        with away(model, optimizer) as fitted:
            train(model, optimizer, "unused", fitted)
            saved = copy.deepcopy(optimizer.state_dict())
    other.load_state_dict(model.state_dict())
    again = torch.optim.AdamW(other.parameters(), lr=1.0)
    expected = train(model, optimizer, "unused")
    if direction == "to plain":
        again.load_state_dict(saved)
        got = train(other, again, "unused")
    else:
        with away(other, again) as fitted:
            again.load_state_dict(saved)
            got = train(other, again, "unused", fitted)
    assert_same(expected, got)
    assert_same(optimizer.state_dict(), again.state_dict())


def by_state(model: nn.Module, optimizer: Optimizer, fitted: Away | None) -> list[Any]:
    """What scripts do with an optimizer's state directly."""
    first, second, third, *_ = model.parameters()
    seen: list[Any] = []
    for step in range(6):
        seen += train(model, optimizer, "gpt", fitted, steps=1)
        if step == 0:
            optimizer.state[first]["exp_avg"].mul_(0.5)
            seen += [first in optimizer.state, len(optimizer.state), optimizer.state.get(nn.Parameter())]
        if step == 1:
            optimizer.state[second] = {}
        if step == 2:
            optimizer.state.pop(third)
            seen.append(third in optimizer.state)
        if step == 3:
            optimizer.state.clear()
            seen.append(len(optimizer.state))
        if step == 4:
            optimizer.state = defaultdict(dict, {first: optimizer.state[first]})
            seen.append([sorted(state) for state in copy.deepcopy(optimizer.state).values()])
    return seen


def test_the_state_is_there_when_it_is_asked_for_and_may_be_changed() -> None:
    plain, model = MODELS["gpt"].build(), MODELS["gpt"].build()
    plain_optimizer, optimizer = adamw(plain.parameters()), adamw(model.parameters())
    expected = by_state(plain, plain_optimizer, None)
    with away(model, optimizer) as fitted:
        assert_same(expected, by_state(model, optimizer, fitted))
    assert_same(plain_optimizer.state_dict(), optimizer.state_dict())


def test_gradients_and_state_from_before_are_taken_over() -> None:
    plain, model = MODELS["odd"].build(), MODELS["odd"].build()
    optimizers = [adamw(plain.parameters()), adamw(model.parameters())]
    for each, optimizer in zip((plain, model), optimizers, strict=True):
        train(each, optimizer, "odd", steps=2)
        MODELS["odd"].loss(each, MODELS["odd"].batch(0, 9)).backward()
    optimizers[0].step()
    with away(model, optimizers[1]):
        optimizers[1].step()
    assert_same(dict(plain.named_parameters()), dict(model.named_parameters()))
    assert_same(optimizers[0].state_dict(), optimizers[1].state_dict())


def test_single_precision_master_of_bfloat16_values() -> None:
    """The plain reference: a copy of the model in single precision, stepped with the gradients cast."""
    model, plain = MODELS["gpt"].build(torch.bfloat16), MODELS["gpt"].build(torch.bfloat16)
    masters = [nn.Parameter(p.detach().float()) for p in plain.parameters()]
    reference = adamw(masters)
    optimizer = adamw(model.parameters())
    batch = MODELS["gpt"].batch
    with away(model, optimizer, master=True) as fitted:
        for step in range(STEPS):
            fitted.fetch()
            for each in (plain, model):
                MODELS["gpt"].loss(each, batch(0, step, dtype=torch.bfloat16)).backward()
            for master, parameter in zip(masters, plain.parameters(), strict=True):
                assert parameter.grad is not None
                master.grad, parameter.grad = parameter.grad.float(), None
            reference.step()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for master, parameter in zip(masters, plain.parameters(), strict=True):
                    parameter.copy_(master)
            fitted.fetch()
            assert_same(
                [p.detach() for p in plain.parameters()], [p.detach() for p in model.parameters()], str(step)
            )
            if step == 2:  # what a script writes into the values counts, and costs the rest no precision
                for each in (plain, model):
                    with torch.no_grad():
                        next(each.parameters()).mul_(2)
                with torch.no_grad():
                    masters[0].copy_(next(plain.parameters()))
                fitted.store()
                for trained in fitted.chunks:
                    fitted.steps.wait_stepped(trained.chunk.id)
                    fitted.states[trained.chunk.id].follow_values()
        saved = optimizer.state_dict()
    for index, master in enumerate(masters):
        assert_same(master.detach(), saved["state"][index].pop("master"))
    assert_same(reference.state_dict()["state"], saved["state"])


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_parameter_used_in_and_out_of_a_checkpoint(reentrant: bool) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(7, 7)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(self.layer, self.layer(x), use_reentrant=reentrant)
            return y

    plain, model = Twice(), Twice()
    optimizers = adamw(plain.parameters()), adamw(model.parameters())
    with away(model, optimizers[1]) as fitted:
        for step in range(3):
            fitted.fetch()
            fitted.arrivals.clear()
            x = torch.randn(3, 7, generator=torch.Generator().manual_seed(step))
            for each in (plain, model):
                each(x).square().sum().backward()
            assert len(fitted.arrivals) == (4 if reentrant else 2)
            for a, b in zip(plain.parameters(), model.parameters(), strict=True):
                assert b.grad is not None
                assert_same(a.grad, b.grad.clone())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert_same(dict(plain.named_parameters()), dict(model.named_parameters()))


def test_nothing_stays_at_the_parameters_and_memory_is_given_back() -> None:
    model = MODELS["gpt"].build()
    optimizer = adamw(model.parameters())
    with away(model, optimizer) as fitted:
        MODELS["gpt"].loss(model, MODELS["gpt"].batch(0, 0)).backward()
        own = torch.Tensor.grad
        with torch._C.DisableTorchFunctionSubclass():
            assert all(own.__get__(p) is None for p in model.parameters())  # type: ignore[union-attr]
        fitted.gradients.norm()  # when all have arrived
        assert all((each.chunk.id, GRADIENT) in fitted.payloads._memory for each in fitted.chunks)
        held = next(model.parameters()).grad
        assert held is not None
        before = held.clone()
        optimizer.step()
        optimizer.zero_grad()
        fitted.steps.wait_all()
        assert not any((each.chunk.id, GRADIENT) in fitted.payloads._memory for each in fitted.chunks)
        assert_same(before, held.clone())  # whoever has the gradient has it for himself now


def test_a_step_that_is_under_way_is_waited_for_and_comes_next() -> None:
    model = MODELS["gpt"].build()
    optimizer = adamw(model.parameters())
    with away(model, optimizer) as fitted:
        MODELS["gpt"].loss(model, MODELS["gpt"].batch(0, 0)).backward()
        fitted.steps.goes_on.clear()
        optimizer.step()
        assert fitted.steps.began.wait(60)
        ids = [each.chunk.id for each in fitted.chunks]
        first, last = fitted.steps.stepped[0], ids[0]
        assert (first, last) == (ids[-1], 0)
        assert len(ids) > 2
        try:
            with pytest.raises(DeadlineError, match=r"step of 'head\.weight' to '\S+', which has not ended"):
                fitted.steps.wait_stepped(last, 0.01)
        finally:
            fitted.steps.goes_on.set()
        fitted.steps.wait_stepped(last, 60)
        assert fitted.steps.stepped[:2] == [first, last]
        fitted.steps.wait_all(60)
        assert sorted(fitted.steps.stepped) == ids


def test_who_waits_for_a_step_that_is_no_more_is_told() -> None:
    """A thread that brings a chunk ahead, or answers another member, when the session ends."""
    model = MODELS["gpt"].build()
    fitted = Away(model, adamw(model.parameters()))
    MODELS["gpt"].loss(model, MODELS["gpt"].batch(0, 0)).backward()
    waiting = threading.Barrier(3)
    told: dict[int, str] = {}

    def wait(chunk: int) -> None:
        waiting.wait(60)
        try:
            fitted.steps.wait_stepped(chunk)
            told[chunk] = "stepped"
        except RunError as error:
            told[chunk] = str(error)

    fitted.steps.goes_on.clear()
    fitted.optimizer.step()
    assert fitted.steps.began.wait(60)
    under_way, last = fitted.steps.stepped[0], fitted.chunks[0].chunk.id
    threads = [threading.Thread(target=wait, args=(each,), daemon=True) for each in (under_way, last)]
    for thread in threads:
        thread.start()
    waiting.wait(60)
    ending = threading.Thread(target=fitted.stepping.abandon, args=("it has ended",), daemon=True)
    ending.start()
    with fitted.steps.condition:
        assert fitted.steps.condition.wait_for(lambda: fitted.steps.is_closed, 60)
    fitted.steps.goes_on.set()
    for thread in (*threads, ending):
        thread.join(60)
        assert not thread.is_alive()
    assert told[under_way] == "stepped"
    never = r"the optimizer's step of '\S+' to '\S+' will not come: the session ended before it;"
    assert re.search(never, told[last])
    assert last not in fitted.steps.stepped
    fitted.gradients.abandon()


def test_what_a_step_raises_is_raised_where_it_is_waited_for() -> None:
    class Broken(torch.optim.SGD):
        broken = False

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            if self.broken and self.param_groups[0]["params"]:
                raise FloatingPointError("broken")
            return super().step(closure)

    model = MODELS["gpt"].build()
    optimizer = Broken(model.parameters(), lr=0.1)
    fitted = Away(model, optimizer)
    MODELS["gpt"].loss(model, MODELS["gpt"].batch(0, 0)).backward()
    optimizer.broken = True
    optimizer.step()
    with pytest.raises(FloatingPointError, match="broken"):
        fitted.steps.wait_all(60)
    fitted.close()  # it was told


def test_a_step_that_is_refused_leaves_the_gradients_to_the_script() -> None:
    """It may read them, step with them once more, or let them go at once, whoever refuses: the members, as
    they agree, or the optimizer itself, for a parameter in no chunk."""

    class Refusing(torch.optim.AdamW):
        refuses = False

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            if self.refuses:
                raise FloatingPointError("refused")
            return super().step(closure)

    def refuse(_: Sequence[int]) -> Sequence[int]:
        raise UserError("refused")

    def backward(model: Any, step: int) -> None:
        MODELS["gpt"].loss(model, MODELS["gpt"].batch(step, 0)).backward()

    plain, model = MODELS["gpt"].build(), MODELS["gpt"].build()
    made = Refusing(plain.parameters())
    optimizer = Refusing(model.parameters())
    with away(model, optimizer) as fitted:
        held = [(each.chunk.id, GRADIENT) for each in fitted.chunks]
        order = fitted.order
        for step, refuser in enumerate(("members", "optimizer")):
            backward(model, step)
            if refuser == "members":
                fitted.order = refuse  # type: ignore[method-assign]
            else:
                optimizer.refuses = True
            with pytest.raises((UserError, FloatingPointError), match="refused"):
                optimizer.step()
            fitted.order, optimizer.refuses = order, False  # type: ignore[method-assign]
            gradient = next(model.parameters()).grad
            assert gradient is not None
            assert bool(torch.isfinite(gradient.clone()).all())
            optimizer.zero_grad()
            assert not any(key in fitted.payloads._memory for key in held)
            for each, steps in ((plain, made), (model, optimizer)):  # with no trace of what was refused
                backward(each, step)
                steps.step()
                steps.zero_grad()
                if each is model:
                    fitted.fetch()
        assert_same(next(plain.parameters()).detach(), next(model.parameters()).detach())


def test_a_closure_is_called_once_and_its_loss_given_back() -> None:
    model = MODELS["gpt"].build()
    optimizer = adamw(model.parameters())
    with away(model, optimizer) as fitted:
        calls: list[Tensor] = []

        def closure() -> Tensor:
            fitted.fetch()
            optimizer.zero_grad()
            loss = MODELS["gpt"].loss(model, MODELS["gpt"].batch(0, 0))
            loss.backward()
            calls.append(loss)
            return loss

        assert optimizer.step(closure) is calls[0]  # type: ignore[arg-type]
        assert len(calls) == 1


def test_an_optimizer_with_counters_of_its_own() -> None:
    class Counting(torch.optim.Optimizer):
        """Its step size falls with what it itself, and its param group, has counted."""

        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.1, "k": 0})
            self.made = 0

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            self.made += 1
            for group in self.param_groups:
                group["k"] += 1
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad, alpha=group["lr"] / (self.made * group["k"]))

    both("unused", Counting)


def test_refusals_name_the_way_out() -> None:
    model = MODELS["gpt"].build()
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(PrepareError, match="LBFGS calls the script's closure"):
        fit(model, optimizer, memory=Memory(device="8KiB", host="1GiB"))
    optimizer = adamw(model.parameters())
    with away(model, optimizer) as fitted:
        parameter = next(model.parameters())
        with pytest.raises(UserError, match=r"grad was set to a tensor of shape \(3,\)"):
            fitted.gradients.set_grad(parameter, torch.zeros(3))
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        with pytest.raises(UserError, match=r"param group 1 was changed after the optimizer was fitted"):
            optimizer.step()
        optimizer.param_groups.pop()


def test_what_an_optimizer_keeps() -> None:
    parameters = [nn.Parameter(torch.zeros(2))]
    assert state_dtypes(adamw(parameters), torch.bfloat16) == dict.fromkeys(
        ("exp_avg", "exp_avg_sq"), torch.bfloat16
    )
    assert state_dtypes(torch.optim.SGD(parameters, lr=1.0), torch.float32) == {}
    assert set(state_dtypes(torch.optim.SGD(parameters, lr=1.0, momentum=0.5), torch.float32)) == {
        "momentum_buffer"
    }


def test_masters_through_fit_on_the_store_and_from_disk(tmp_path: Path) -> None:
    """As test_single_precision_master_of_bfloat16_values, with what is planned for it."""
    torch.set_num_threads(1)
    reference, model = MODELS["gpt"].build(torch.bfloat16), MODELS["gpt"].build(torch.bfloat16)
    masters = [nn.Parameter(p.detach().float()) for p in reference.parameters()]
    plain, optimizer = adamw(masters), adamw(model.parameters())
    with fit(
        model, optimizer, memory=Memory(device="8KiB", host="64KiB", disk=f"{tmp_path}:1MiB", master=True)
    ):
        for step in range(3):
            batch = MODELS["gpt"].batch(0, step, dtype=torch.bfloat16)
            for each in (reference, model):
                MODELS["gpt"].loss(each, batch).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
            for master, parameter in zip(masters, reference.parameters(), strict=True):
                assert parameter.grad is not None
                master.grad, parameter.grad = parameter.grad.float(), None
            plain.step()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for master, parameter in zip(masters, reference.parameters(), strict=True):
                    parameter.copy_(master)
            for parameter, got in zip(reference.parameters(), model.parameters(), strict=True):
                assert_same(parameter.detach().clone(), got.detach().clone())
    saved = optimizer.state_dict()
    for index, master in enumerate(masters):
        assert_same(master.detach(), saved["state"][index].pop("master"))
    assert_same(plain.state_dict()["state"], saved["state"])
