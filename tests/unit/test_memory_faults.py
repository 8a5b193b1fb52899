"""What a script does, or what interrupts it, that chunked memory must stand: each against the plain model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll.core.errors import PrepareError, UserError
from atoll.core.memory import Memory
from atoll.memory import saved
from atoll.memory.fit import fit
from atoll.memory.fitted import Moving
from atoll.memory.gradients import ChunkGradients
from atoll.tensors.lazy import LazyTensor

WIDTH, LAYERS, CHUNK = 32, 6, 4608
X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))


def model_of(layers: int = LAYERS) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)])


def loss_of(model: nn.Module) -> Tensor:
    loss: Tensor = model(X).pow(2).mean()
    return loss


@contextmanager
def moving(model: nn.Module, optimizer: Any, blocks: int = 5) -> Iterator[Moving]:
    memory = Memory(device=str(blocks * CHUNK), host="64MiB", chunk=str(CHUNK), step="host")
    fitted = fit(model, optimizer, memory=memory)
    assert isinstance(fitted, Moving)
    try:
        yield fitted
    finally:
        fitted.close()


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def assert_same(found: list[Any], wanted: list[Any]) -> None:
    assert [each is None for each in found] == [each is None for each in wanted]
    torch.testing.assert_close(
        [each for each in found if each is not None],
        [each for each in wanted if each is not None],
        rtol=0,
        atol=0,
    )


def both(run: Callable[[nn.Sequential], list[Any]]) -> None:
    """What `run` finds is the same for a model in chunks and a plain one."""
    plain, chunked = model_of(), model_of()
    with moving(chunked, None):
        found = run(chunked)
    assert_same(found, run(plain))


class ByHolder(torch.autograd.Function):
    """Uses a parameter in backward that autograd was not given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, holder: nn.Linear) -> Tensor:
        ctx.holder = holder
        return x @ holder.weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient @ ctx.holder.weight, None


def test_a_backward_of_named_inputs_uses_parameters_as_any_other() -> None:
    def run(model: nn.Sequential) -> list[Any]:
        given = X.clone().requires_grad_()
        x = model[0](given)
        for layer in list(model)[1:]:
            x = ByHolder.apply(x, layer)
        loss, weight = x.sum(), model[0].weight
        torch.autograd.backward(loss, inputs=[weight, model[0].bias, given], retain_graph=True)
        loss.backward(inputs=weight)
        return [*gradients(model), given.grad]

    both(run)


def test_a_backward_of_all_parameters_by_name_does_not_need_all_at_once() -> None:
    def run(model: nn.Sequential) -> list[Any]:
        loss_of(model).backward(inputs=list(model.parameters()))
        return gradients(model)

    both(run)


def test_a_parameter_itself_can_be_the_root_of_a_backward() -> None:
    def run(model: nn.Sequential) -> list[Any]:
        weight: Any = model[0].weight
        with torch.no_grad():
            torch.autograd.backward([weight, model[1].bias], [torch.ones_like(weight), torch.ones(WIDTH)])
        weight.backward(torch.ones_like(weight), inputs=[weight])
        return gradients(model)

    both(run)


def test_hooks_that_were_there_before_fit_find_the_gradient() -> None:
    plain, chunked, seen = model_of(), model_of(), []
    for model in (plain, chunked):
        steps = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

        def in_backward(parameter: Tensor, steps: Any = steps) -> None:
            assert parameter.grad is not None
            seen.append(parameter.grad.clone())
            parameter.grad.clamp_(-1e-4, 1e-4)
            steps[parameter].step()
            steps[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(in_backward)
    with moving(chunked, None):
        for model in (plain, chunked):
            for _ in range(2):
                loss_of(model).backward()
        assert_same(values(chunked), values(plain))
    half = len(seen) // 2
    assert_same(seen[half:], seen[:half])
    assert half == 2 * 2 * LAYERS


def test_clipping_counts_parameters_that_were_unfrozen_after_fit() -> None:
    plain, chunked = model_of(), model_of()
    chunked[0].requires_grad_(False)
    with moving(chunked, torch.optim.SGD(chunked.parameters(), lr=0.1)) as fitted:
        chunked[0].requires_grad_(True)
        for model in (plain, chunked):
            loss_of(model).backward()
        wanted = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e-3)
        assert_same([fitted.clip_grad_norm_(1e-3), *gradients(chunked)], [wanted, *gradients(plain)])


def test_data_of_a_gradient_can_be_set() -> None:
    def run(model: nn.Sequential) -> list[Any]:
        loss_of(model).backward()
        weight, other = model[0].weight, model[1].weight
        assert weight.grad is not None
        assert other.grad is not None
        weight.grad.data = torch.full((WIDTH, WIDTH), 9.0)
        other.grad.data = weight.grad.data
        other.grad.data = other.grad.data
        return gradients(model)

    both(run)
    model = model_of()
    with moving(model, None):
        loss_of(model).backward()
        bias = model[0].bias.grad
        assert bias is not None
        with pytest.raises(UserError, match=r"data of a gradient was set to a tensor of shape \(1,\)"):
            bias.data = torch.ones(1)


def test_an_ended_backward_leaves_nothing_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model = model_of(), model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(plain).backward()
    with moving(model, optimizer):
        failing = model[1].weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss_of(model).backward()
        failing.remove()
        optimizer.zero_grad()
        loss_of(model).backward()
        assert_same(gradients(model), gradients(plain))

        taken, take = [], ChunkGradients.take

        def interrupted(self: ChunkGradients, *args: Any) -> None:
            taken.append(args)
            if len(taken) == 3:
                raise KeyboardInterrupt
            take(self, *args)

        optimizer.zero_grad()
        with monkeypatch.context() as patch:
            patch.setattr(ChunkGradients, "take", interrupted)
            with pytest.raises(KeyboardInterrupt):
                loss_of(model).backward()
        optimizer.zero_grad()
        loss_of(model).backward()
        assert_same(gradients(model), gradients(plain))


def test_after_a_step_that_raised_the_optimizer_has_all_its_parameters() -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())

    def refuses(*_: Any) -> None:
        raise RuntimeError("not this step")

    with moving(model, optimizer):
        handle = optimizer.register_step_pre_hook(refuses)
        loss_of(model).backward()
        with pytest.raises(RuntimeError, match="not this step"):
            optimizer.step()
        handle.remove()
        with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
            optimizer.add_param_group({"params": [model[0].weight]})
        optimizer.zero_grad()
        assert gradients(model) == [None] * 2 * LAYERS
    assert "zero_grad" not in vars(optimizer)


class Breakable(torch.optim.SGD):
    """Raises on the stepping thread, while it is `broken`."""

    broken = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if self.broken and self.param_groups[0]["params"]:
            raise FloatingPointError("broken")
        return super().step(closure)


def test_a_step_that_failed_is_told_of_and_all_else_goes_on() -> None:
    model = model_of()
    optimizer = Breakable(model.parameters(), lr=0.1, momentum=0.9)
    with moving(model, optimizer) as fitted:
        optimizer.broken = True
        last = model[LAYERS - 1](X).sum()  # one layer alone is stepped
        last.backward()
        optimizer.step()  # which notes the optimizer's attributes
        optimizer.broken = False
        with pytest.raises(FloatingPointError, match="broken"):
            model[LAYERS - 1](X)
        assert torch.isfinite(model[0].weight.sum())  # of another chunk
        assert torch.isfinite(model.state_dict()["0.weight"].clone()).all()
        with pytest.raises(FloatingPointError, match="broken"):
            model.state_dict()[f"{LAYERS - 1}.weight"].clone()
        with pytest.raises(FloatingPointError, match="broken"):
            optimizer.step()
        fitted.close()
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    assert len(optimizer.param_groups[0]["params"]) == 2 * LAYERS
    assert_same(values(model), values(model_of()))


def test_a_failed_step_that_nobody_was_told_of_is_raised_once_all_is_closed() -> None:
    model = model_of()
    optimizer = Breakable(model.parameters(), lr=0.1)
    with moving(model, optimizer) as fitted:
        loss_of(model).backward()
        optimizer.broken = True
        optimizer.step()
        with pytest.raises(FloatingPointError, match="broken"):
            fitted.close()
        assert {type(p) for p in model.parameters()} == {nn.Parameter}


def test_states_are_shown_on_the_parameters_device() -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with moving(model, optimizer) as fitted:
        loss_of(model).backward()
        optimizer.step()
        assert fitted._stepping is not None
        (stepper,) = fitted._stepping.steppers
        for each in stepper._chunks.values():
            each.states.trained.device = torch.device("meta")  # any that is not the host
        shown = stepper.state._plain(model[0].weight)
        assert {key: value.device.type for key, value in shown.items()} == {
            "step": "meta",
            "exp_avg": "meta",
            "exp_avg_sq": "meta",
        }
        for each in stepper._chunks.values():
            each.states.trained.device = torch.device("cpu")


class Transposed(nn.Module):
    """Uses a view of its parameter, and is interrupted between."""

    interrupted = False

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.t()
        if Transposed.interrupted:
            raise KeyboardInterrupt
        return x @ weight


@pytest.mark.parametrize("grad", [False, True])
def test_what_an_interrupted_forward_entered_is_left(grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[Transposed() for _ in range(8)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with moving(model, optimizer) as fitted:

        def interrupt() -> None:
            with monkeypatch.context() as patch, torch.set_grad_enabled(grad):
                patch.setattr(Transposed, "interrupted", True)
                with pytest.raises(KeyboardInterrupt):
                    model(X)

        interrupt()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            with torch.no_grad():
                model(X)  # below another's hooks nothing of ours can be left, and nothing of theirs is
            assert saved.hooks_are_active()
        loss_of(model).backward()  # views would hold all chunks: more than the budget
        assert not saved.hooks_are_active()
        optimizer.step()
        interrupt()
        fitted.close()
        assert not saved.hooks_are_active()


def test_an_optimizer_that_steps_a_fitted_model_is_refused_for_another() -> None:
    first, second = model_of(), model_of()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    with moving(first, optimizer):
        with pytest.raises(PrepareError, match="SGD steps another model that was fitted already"):
            fit(
                second,
                optimizer,
                memory=Memory(device=str(5 * CHUNK), host="64MiB", chunk=str(CHUNK), step="host"),
            )
        assert {type(p) for p in second.parameters()} == {nn.Parameter}
    with moving(second, optimizer):
        pass


def test_a_parameter_under_two_names_of_a_module_is_lazy_under_both() -> None:
    model = model_of()
    model[0].again = model[0].weight
    with moving(model, None):
        state = model.state_dict()
        assert isinstance(state["0.weight"], LazyTensor)
        assert isinstance(state["0.again"], LazyTensor)
        assert not isinstance(model[0].weight.detach(), LazyTensor)
        handle = model[1].register_state_dict_pre_hook(interrupts)
        with pytest.raises(KeyboardInterrupt):
            model.state_dict()
        handle.remove()
        assert not isinstance(model[0].weight.detach(), LazyTensor)
        assert not isinstance(model[1].weight.detach(), LazyTensor)


def interrupts(*_: Any) -> None:
    raise KeyboardInterrupt
