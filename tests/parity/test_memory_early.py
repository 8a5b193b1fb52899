"""Chunks that are stepped while backward goes on: the numbers are the plain model's to the bit, whatever
comes between a gradient and the optimizer's step."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from test_memory_parity import FEW, USES, Run, each_step
from torch import Tensor, nn

from atoll.core.memory import Memory
from atoll.memory import planning, speculation
from atoll.memory.fitted import Moving
from atoll.memory.segments import Segments
from atoll.memory.speculation import Ahead, Speculation
from atoll.moves.timeline import Bandwidths
from support.cases import kept_for
from support.families import FAMILIES, batch, loss_of
from support.tight import Together, same

pytestmark = pytest.mark.sampled

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
SHARE = 0.4  # of the need, on the device
SECONDS = 60.0  # until what is queued is stepped


# A device whose cores are its own, and a host that steps for about as long as it computes.
RATES = Bandwidths(to_device=1e9, to_host=1e9, host_steps=1.2e8, device_steps=1e9, latency=1e-6)


@pytest.fixture(autouse=True)
def _early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_POISON", "1")
    monkeypatch.setattr(planning, "measure", lambda *_: RATES)
    monkeypatch.setattr(speculation, "_ALWAYS", True)
    monkeypatch.setattr(speculation, "TRUST", 1)


def speculation_of(run: Run, number: int = 0) -> Speculation:
    assert isinstance(run.fitted, Moving)
    assert run.fitted._stepping is not None
    found = run.fitted._stepping.steppers[number].speculation
    assert found is not None
    return found


def settle(run: Run, number: int = 0) -> list[int]:
    """Wait until all chunks are stepped that may be, of the optimizer of this number; which they are."""
    found = speculation_of(run, number)

    def pending() -> list[int]:
        return [c for c, ahead in current() if found._held[c] and ahead.made is None]

    def current() -> list[tuple[int, Ahead]]:
        return [(c, ahead) for c, ahead in found._could.items() if found._is_current(ahead)]

    with found._condition:
        until = time.monotonic() + SECONDS
        while pending():
            assert not found._failed
            assert time.monotonic() < until, pending()
            found._condition.wait(0.5)
        return [c for c, ahead in current() if ahead.made is not None]


class Early(Run):
    """A run in which every step is called when all chunks have been stepped that may be."""

    def __init__(self, family: str, share: float | None, make: Make, **more: Any) -> None:
        self.early: list[int] = []  # chunks stepped so, by step

        def make_and_wait(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
            optimizer = make(parameters)
            optimizer.register_step_pre_hook(lambda *_: self.wait())
            return optimizer

        super().__init__(family, share, make_and_wait, **more)

    def wait(self) -> None:
        if self.fitted is not None:
            self.early.append(len(settle(self)))

    @property
    def figures(self) -> tuple[int, int]:
        """Chunks stepped early, and rolled back."""
        assert isinstance(self.fitted, Moving)
        self.fitted._steps.wait_all()
        stats = self.fitted.stats()
        assert stats.host_peak <= self.fitted.plan.host_bytes <= self.fitted.plan.predicted.host_peak
        return stats.stepped_early, stats.rolled_back


def fused(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def looped(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=False, amsgrad=True)


def without_state(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, weight_decay=0.1)


def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    half = len(parameters) // 2
    groups = [{"params": parameters[:half], "lr": 0.05}, {"params": parameters[half:], "weight_decay": 0.1}]
    return torch.optim.SGD(groups, lr=0.01, momentum=0.9)


Body = Callable[[Early], list[Any]]


def compare(body: Body, family: str = "gpt", make: Make = fused, **more: Any) -> tuple[int, int]:
    """Run it plainly and under a budget; chunks stepped early and rolled back there."""
    results, figures = [], (0, 0)
    for share in (None, SHARE):
        run = Early(family, share, make, **more)
        if share is not None:
            assert isinstance(run.fitted, Moving)
            assert run.fitted.plan.early
        seen = body(run)
        if share is not None:
            figures = run.figures
        state = copy.deepcopy(run.optimizer.state_dict()["state"])
        kept = [(n, key, entry[key]) for n, entry in sorted(state.items()) for key in sorted(entry)]
        results.append((seen, kept, run.close()))
    for expected, found in zip(*results, strict=True):
        assert same(found, expected)
    return figures


def steps(run: Early, first: int, count: int, before: Callable[[], Any] = lambda: None) -> list[Any]:
    """Train; `before` comes between backward and step."""
    seen: list[Any] = []
    for number in range(first, first + count):
        inputs, targets = batch(run.family, number)
        run.optimizer.zero_grad()
        loss = loss_of(run.model(inputs), targets)
        loss.backward()
        seen += [loss.item(), before()]
        run.optimizer.step()
    return seen


OFTEN = [("gpt", fused), ("resnet", looped), ("lstm", momentum), ("experts", fused), ("vit", without_state)]
ALL = [  # but those that train little: no room is made
    (family, make)
    for family in FAMILIES
    if family != "lora"
    for make in (fused, looped, momentum, without_state)
]


@pytest.mark.parametrize(("family", "make"), kept_for(pytest.mark.soak, ALL, OFTEN))
def test_the_numbers_are_plain_pytorch_s(family: str, make: Make) -> None:
    settled = family != "experts"  # whose routes are other ones in each step

    def body(run: Early) -> list[Any]:
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(run.optimizer, 10)
        seen: list[Any] = []
        for number in range(8):
            seen += [steps(run, number, 1), schedule.step()]
        if run.fitted is not None and settled:
            assert run.early[-1] == len(run.fitted.plan.early)
        return seen

    early, rolled_back = compare(body, family, make)
    assert early > 0
    assert rolled_back == 0 or not settled


@pytest.mark.parametrize("use", kept_for(pytest.mark.soak, USES, FEW))
def test_uses_of_parameters_in_all_ways(use: str) -> None:
    compare(each_step(USES[use], steps=5), "gpt")


def test_accumulation_is_waited_for() -> None:
    def body(run: Early) -> list[Any]:
        for number in range(6):
            run.optimizer.zero_grad()
            for micro in range(3):
                inputs, targets = batch(run.family, 3 * number + micro)
                loss_of(run.model(inputs), targets).backward()
                if run.fitted is not None and micro < 2:
                    assert settle(run) == []
            run.optimizer.step()
        return []

    early, rolled_back = compare(body)
    assert early > 0
    assert rolled_back == 0


def test_in_half_precision_with_a_master() -> None:
    """Against the same budget without steps ahead: plain PyTorch has no master."""
    results = []
    for ahead in (False, True):
        found = _half(ahead)
        results.append(found)
    assert same(*results)


def _half(ahead: bool) -> list[Any]:
    def change(memory: Memory) -> Memory:
        return msgspec.structs.replace(memory, master=True)

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        for parameter in parameters:
            parameter.data = parameter.data.to(torch.bfloat16)
        return fused(parameters)

    run = Early("gpt", SHARE, make, change=change)
    if not ahead:
        speculation_of(run)._failed.update(speculation_of(run)._segments)
        run.wait = lambda: None  # type: ignore[method-assign]
    seen = steps(run, 0, 6)
    assert bool(run.figures[0]) == ahead
    return [seen, run.close()]


# What may come between backward and the step.


def read_all(run: Early) -> Any:
    return [float(p.grad.norm()) for p in run.model.parameters() if p.grad is not None]


def evaluate(run: Early) -> Any:
    with torch.no_grad():
        inputs, targets = batch(run.family, 99)
        return loss_of(run.model(inputs), targets).item()


def read_states(run: Early) -> Any:
    model, optimizer = run.model.state_dict(), run.optimizer.state_dict()["state"]
    states = [(n, key, each[key].clone()) for n, each in sorted(optimizer.items()) for key in sorted(each)]
    return [*(value.clone() for value in model.values()), states]


def read_values(run: Early) -> Any:
    return [float(p.data.sum()) for p in run.model.parameters()]


def clip(maximum: float) -> Callable[[Early], Any]:
    def body(run: Early) -> Any:
        if run.fitted is None:
            return nn.utils.clip_grad_norm_(run.model.parameters(), maximum)
        return run.fitted.clip_grad_norm_(maximum)

    return body


HARMLESS: dict[str, Callable[[Early], Any]] = {
    "gradients are read": read_all,
    "an evaluation": evaluate,
    "states are read": read_states,
    "a clipping that changes nothing": clip(1e9),
}


@pytest.mark.parametrize("what", kept_for(pytest.mark.check, HARMLESS, ("gradients are read",)))
def test_who_looks_sees_what_was_and_the_step_counts(what: str) -> None:
    def body(run: Early) -> list[Any]:
        seen = steps(run, 0, 4)
        return seen + steps(run, 4, 3, lambda: (run.wait(), HARMLESS[what](run))[1])

    early, rolled_back = compare(body)
    assert early > 0
    assert rolled_back == 0


def another_backward(run: Early) -> Any:
    inputs, targets = batch(run.family, 77)
    loss_of(run.model(inputs), targets).backward()


def edit_a_gradient(run: Early) -> Any:
    for parameter in run.model.parameters():
        parameter.grad.mul_(0.5)


def edit_a_view(run: Early) -> Any:
    run.model.head.weight.grad.view(-1)[3] = 0.25


def set_gradients(run: Early) -> Any:
    for parameter in run.model.parameters():
        parameter.grad = torch.full_like(parameter, 0.01)


def let_some_go(run: Early) -> Any:
    for parameter in list(run.model.parameters())[::2]:
        parameter.grad = None


def change_lr(run: Early) -> Any:
    for group in run.optimizer.param_groups:
        group["lr"] *= 0.5


def edit_values(run: Early) -> Any:
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.mul_(0.9)


def assign_values(run: Early) -> Any:
    for parameter in run.model.parameters():
        parameter.data = torch.full_like(parameter, 0.03)


def edit_states(run: Early) -> Any:
    for parameter in run.model.parameters():
        run.optimizer.state[parameter]["exp_avg"].mul_(0.5)


def load_states(run: Early) -> Any:
    state = copy.deepcopy(run.optimizer.state_dict())
    for entry in state["state"].values():
        entry["exp_avg"].mul_(0.5)
        entry["step"] += 3
    run.optimizer.load_state_dict(state)


def load_values(run: Early) -> Any:
    run.model.load_state_dict({name: value * 0.9 for name, value in run.model.state_dict().items()})


def let_all_go(run: Early) -> Any:
    run.optimizer.zero_grad()


def zero_and_again(run: Early) -> Any:
    run.optimizer.zero_grad()
    another_backward(run)


BREAKS: dict[str, Callable[[Early], Any]] = {
    "another backward": another_backward,
    "gradients are multiplied": edit_a_gradient,
    "a view of a gradient is changed": edit_a_view,
    "gradients are set": set_gradients,
    "some gradients are let go": let_some_go,
    "all gradients are let go": let_all_go,
    "zero_grad without a step": zero_and_again,
    "the learning rate changes": change_lr,
    "parameters are changed": edit_values,
    "parameters are assigned": assign_values,
    "states are changed": edit_states,
    "states are loaded": load_states,
    "parameters are loaded": load_values,
    "clipping": clip(0.01),
    "clipping by PyTorch": lambda run: nn.utils.clip_grad_norm_(run.model.parameters(), 0.01),
}


@pytest.mark.parametrize(
    "what", kept_for(pytest.mark.check, BREAKS, ("another backward", "zero_grad without a step", "clipping"))
)
def test_what_breaks_the_pattern_is_as_in_plain_pytorch(what: str) -> None:
    """Once, twice in a row (not tried the second time), and on."""

    def body(run: Early) -> list[Any]:
        def change() -> Any:
            run.wait()
            return BREAKS[what](run)

        seen = steps(run, 0, 4)
        if run.fitted is not None:
            assert run.early[-1] == len(run.fitted.plan.early)
        seen += steps(run, 4, 1, change)
        if run.fitted is not None and not what.startswith("a view"):
            rolled_back = run.figures[1]
            assert rolled_back
        seen += steps(run, 5, 2, change)
        return seen + steps(run, 7, 4)

    early, rolled_back = compare(body)
    assert early > 0
    assert rolled_back > 0


def test_a_step_that_is_left_out() -> None:
    def body(run: Early) -> list[Any]:
        seen = steps(run, 0, 4)
        for number in (4, 5):  # the second adds to the first
            inputs, targets = batch(run.family, number)
            loss_of(run.model(inputs), targets).backward()
            run.wait()
        run.optimizer.step()
        return seen + steps(run, 6, 4)

    compare(body)


def test_an_exception_in_backward() -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, *_: Tensor) -> Any:
            raise ValueError("in the script's own")

    def body(run: Early) -> list[Any]:
        seen = steps(run, 0, 4)
        model: Any = run.model
        for goes_on in (False, True):  # with a step by what has come, and without
            inputs, targets = batch(run.family, 4)
            x = Failing.apply(model.tokens(inputs) + model.positions)
            run.optimizer.zero_grad()
            with pytest.raises(ValueError, match="own"):
                loss_of(model.head(model.norm(model.blocks(x))), targets).backward()
            run.wait()
            if goes_on:
                run.optimizer.step()
        return seen + steps(run, 5, 4)

    early, _ = compare(body)
    assert early > 0


@pytest.mark.parametrize("infinite", [False, True])
def test_a_gradient_scaler(infinite: bool) -> None:
    """Whose fused step is told by attributes of the optimizer whether to leave it out."""

    def body(run: Early) -> list[Any]:
        seen = steps(run, 0, 4)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        for number in range(4, 9):
            inputs, targets = batch(run.family, number)
            run.optimizer.zero_grad()
            scaler.scale(loss_of(run.model(inputs), targets)).backward()
            if infinite and number == 6:
                next(iter(run.model.parameters())).grad[0] = float("inf")
            scaler.step(run.optimizer)
            scaler.update()
            seen.append(scaler.get_scale())
        return seen + steps(run, 9, 3)

    compare(body)


def test_a_learning_rate_that_is_a_tensor() -> None:
    """Changed in place: the same object, another value."""

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=torch.tensor(0.01), foreach=False)

    def body(run: Early) -> list[Any]:
        seen = steps(run, 0, 4)
        seen += steps(run, 4, 1, lambda: run.optimizer.param_groups[0]["lr"].mul_(0.5).item())
        return seen + steps(run, 5, 4)

    early, rolled_back = compare(body, make=make)
    assert early > 0
    assert rolled_back > 0


def test_closures() -> None:
    def body(run: Early) -> list[Any]:
        seen = []
        for number in range(6):

            def closure(number: int = number) -> Tensor:
                inputs, targets = batch(run.family, number)
                run.optimizer.zero_grad()
                loss = loss_of(run.model(inputs), targets)
                loss.backward()
                if run.fitted is not None:
                    settle(run)
                return loss

            seen.append(run.optimizer.step(closure).item())
        return seen

    early, rolled_back = compare(body)
    assert early > 0
    assert rolled_back == 0


def test_only_where_the_steps_take_longer_than_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "_ALWAYS", False)
    run = Run("gpt", SHARE, fused)
    found = speculation_of(run)
    run.losses(4)
    assert not any(each.begun for each in found._could.values())
    assert isinstance(run.fitted, Moving)
    for seconds, forward in ((0.0, 0.0), (1000.0, 0.0), (1000.0, 1000.0 * len(found._segments))):
        run.fitted._steps.wait_all()  # a step that goes on tells how long it took when it ends
        found._seconds = dict.fromkeys(found._segments, seconds)
        found._began -= forward
        found._aside, found._backward = dict.fromkeys(found._segments, 0.0), 1000.0
        chunks = 0 if forward or not seconds else len(found._segments)
        inputs, targets = batch(run.family, 4)
        run.optimizer.zero_grad()
        loss_of(run.model(inputs), targets).backward()
        assert len(settle_begun(run)) == chunks, (seconds, forward)
        run.optimizer.step()
    run.close()


def settle_begun(run: Run) -> list[int]:
    """Wait until what was queued is stepped; which chunks that are."""
    found = speculation_of(run)
    assert isinstance(run.fitted, Moving)
    for each in run.fitted.gradients._chunks.values():
        each.arrive()
    run.fitted.gradients._leaving._thread.submit(lambda: None).result(SECONDS)

    def is_over() -> bool:
        begun = [ahead for ahead in found._could.values() if ahead.begun]
        return not found._queue and all(ahead.made is not None for ahead in begun)

    with found._condition:
        assert found._condition.wait_for(is_over, SECONDS)
    return [chunk for chunk, ahead in found._could.items() if ahead.made is not None]


def test_what_a_step_ahead_raises_is_left_to_the_usual_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("no room")

    expected = Run("gpt", None, fused)
    losses = expected.losses(6)
    monkeypatch.setattr(Segments, "step_aside", fails)
    run = Run("gpt", SHARE, fused)
    assert run.losses(6) == losses
    assert speculation_of(run)._failed
    assert isinstance(run.fitted, Moving)
    assert run.fitted.stats().stepped_early == 0
    assert same(run.close(), expected.close())


def test_chunks_of_two_optimizers_are_stepped_ahead() -> None:
    def both(parameters: list[nn.Parameter]) -> Any:
        return Together([fused(parameters[::2]), looped(parameters[1::2])])

    results = []
    for share in (None, SHARE):
        run = Run("gpt", share, both)
        losses, early = [], [0, 0]
        for step in range(5):
            run.optimizer.zero_grad()
            inputs, targets = batch(run.family, step)
            loss = loss_of(run.model(inputs), targets)
            loss.backward()
            if share is not None:
                early = [len(settle(run, number)) for number in (0, 1)]
            run.optimizer.step()
            losses.append(loss.item())
        results.append((losses, run.close()))
    assert all(early)
    assert same(results[0], results[1])


def test_the_script_s_own_optimizer_is_not_stepped_ahead() -> None:
    """What else its step does could not be taken back."""

    class Counting(torch.optim.AdamW):
        """The script's."""

    run = Run("gpt", SHARE, lambda p: Counting(p, lr=0.01))
    assert isinstance(run.fitted, Moving)
    assert run.fitted.plan.early
    assert run.fitted._stepping is not None
    assert run.fitted._stepping.steppers[0].speculation is None
    run.losses(4)
    run.close()


@pytest.mark.parametrize("how", ["close", "let go", "abandon"])
def test_the_end_while_steps_are_made_ahead(how: str) -> None:
    expected = Run("gpt", None, fused)
    losses = expected.losses(4)
    values = expected.close()
    run = Run("gpt", SHARE, fused)
    assert run.losses(4) == losses
    inputs, targets = batch(run.family, 4)
    run.optimizer.zero_grad()
    loss_of(run.model(inputs), targets).backward()
    thread = run.fitted._stepping._thread  # type: ignore[union-attr]
    if how == "close":
        assert same(run.close(), values)
    elif how == "let go":
        run.fitted.let_go("it is over")  # type: ignore[union-attr]
    else:
        run.fitted.abandon()  # type: ignore[union-attr]
    assert not thread.is_alive()


@pytest.mark.parametrize("between", [read_all, change_lr, another_backward])
def test_nesterov_by_foreach_which_writes_into_gradients(between: Callable[[Early], Any]) -> None:
    """Its step is not made ahead: what it leaves in the gradients would be seen."""

    def body(run: Early) -> list[Any]:
        seen = steps(run, 0, 4)
        return seen + steps(run, 4, 3, lambda: between(run))

    def nesterov(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, nesterov=True, foreach=True)

    assert compare(body, make=nesterov)[0] == 0
