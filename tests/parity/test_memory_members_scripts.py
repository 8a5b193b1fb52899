"""What scripts do to gradients and values of a model that several members hold, and their mistakes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from memory_members import BOTH, Script, compare, sgd, share_between, values_of
from torch import Tensor, nn

from atoll.core.errors import AtollError, MismatchError, RunError, UserError
from atoll.memory.payloads import VALUES
from atoll.memory.sharded import Sharded
from support.families import build
from support.members import Member
from support.tight import same

pytestmark = [pytest.mark.sampled, pytest.mark.usefixtures("poisoned")]


def edit(model: Any, step: int) -> None:
    """What a script makes of all gradients, and of some: each member sees at once what its own has made."""
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)
    if step != 1:  # a gradient of which scripts have views stays
        model.head.weight.grad.view(-1)[::2] *= 3
    model.positions.grad = torch.ones_like(model.positions) * 0.01
    model.tokens.weight.grad = None


@BOTH
def test_gradients_as_scripts_read_and_write_them(sharding: str) -> None:
    script = Script("gpt", (1.0, 1.0))

    def body(member: Member, model: Any, optimizer: Any, fitted: Sharded) -> Any:
        seen: list[Any] = []
        for step in range(3):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            script.backward(model, member.rank, step, fitted)
            seen.append([p.grad.clone() for p in model.parameters()])
            edit(model, step)
            seen.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
            seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
            optimizer.step()
            seen.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        return seen

    found = share_between(script, 0.5, body, sharding=sharding)
    model, optimizer = script.build()
    seen = []
    for step in range(3):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for rank in range(2):
            script.backward(model, rank, step, None)
        seen.append([p.grad.clone() for p in model.parameters()])
        edit(model, step)
        seen.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        optimizer.step()
        seen.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for told, values in found:
        assert same(told, seen)
        assert same(values, values_of(model))


class Centred(Script):
    """Changes each gradient by what all of it comes to, more than once before the members meet, and by a
    view too."""

    def clip(self, model: Any, fitted: Sharded | None) -> Any:
        for parameter in model.parameters():
            parameter.grad -= parameter.grad.mean()
            flat = parameter.grad.view(-1)
            flat.mul_(2.0)
            del flat
            parameter.grad /= parameter.grad.norm() + 1e-6


@pytest.mark.parametrize("sharding", ["symmetric", pytest.param("asymmetric", marks=pytest.mark.soak)])
def test_gradients_that_a_script_changes_more_than_once(sharding: str) -> None:
    compare(Centred("gpt", (1.0, 1.0), sgd), 0.5, steps=2, sharding=sharding)


class Doubled(Script):
    """In double precision, so that what is left out of a sum is seen far above what is rounded."""

    def build(self) -> tuple[Any, torch.optim.Optimizer]:
        model = build(self.family, self.seed).double()
        return model, self.make([p for p in model.parameters() if p.requires_grad])


def set_to_zero(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad(set_to_none=False)


def let_go(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad(set_to_none=True)


def zero_each(model: Any, optimizer: Any) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


def zero_some(model: Any, optimizer: Any) -> None:
    """Every other one: chunks have some of which the mean goes on."""
    for parameter in list(model.parameters())[::2]:
        if parameter.grad is not None:
            parameter.grad.zero_()


def set_each(model: Any, optimizer: Any) -> None:
    for number, parameter in enumerate(model.parameters()):
        ramp = torch.arange(parameter.numel(), dtype=parameter.dtype).view(parameter.shape)
        parameter.grad = (ramp + number) / (100 * parameter.numel())


def zero_then_set(model: Any, optimizer: Any) -> None:
    set_to_zero(model, optimizer)
    set_each(model, optimizer)


def let_go_of_one_and_set_it(model: Any, optimizer: Any) -> None:
    for parameter in (model.head.weight, model.norm.bias):
        parameter.grad = None
        parameter.grad = torch.full_like(parameter, 0.01)


def let_go_of_some(model: Any, optimizer: Any) -> None:
    for parameter in list(model.parameters())[::2]:
        parameter.grad = None


def halve(model: Any, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)


def halve_a_view(model: Any, optimizer: Any) -> None:
    """Which the script goes on to have."""
    optimizer.views = [parameter.grad.view(-1) for parameter in model.parameters()]
    for view in optimizer.views:
        view[::2].mul_(0.5)


def clip_by_torch(model: Any, optimizer: Any) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


REDUCED, LOCAL = "a backward that is reduced", "a backward under no_sync"
LOCAL_OF_ONE = "member 0 alone has a backward, and of some parameters alone"
Event = str | Callable[[Any, Any], None]
COURSES: dict[str, list[Event]] = {
    "none": [REDUCED, LOCAL, REDUCED],
    "reduced": [REDUCED, REDUCED, LOCAL, REDUCED],
    "zeros": [REDUCED, LOCAL, set_to_zero, REDUCED],
    "zeros-twice": [REDUCED, LOCAL, set_to_zero, LOCAL, set_to_zero, LOCAL, REDUCED],
    "zeros-of-the-mean": [REDUCED, REDUCED, set_to_zero, LOCAL, REDUCED],
    "let-go": [REDUCED, LOCAL, let_go, REDUCED],
    "let-go-after-zeros": [REDUCED, LOCAL, set_to_zero, let_go, LOCAL, REDUCED],
    "zero_": [REDUCED, LOCAL, zero_each, REDUCED],
    "zero_-of-some": [REDUCED, LOCAL, zero_some, LOCAL, REDUCED],
    "set": [REDUCED, LOCAL, set_each, REDUCED],
    "set-after-zeros": [REDUCED, LOCAL, zero_then_set, LOCAL, REDUCED],
    "set-after-none": [REDUCED, LOCAL, let_go_of_one_and_set_it, REDUCED],
    "halved": [REDUCED, halve, LOCAL, REDUCED],
    "halved-by-a-view": [REDUCED, halve_a_view, LOCAL, REDUCED],
    "clipped": [REDUCED, clip_by_torch, LOCAL, REDUCED],
    "halved-and-clipped": [REDUCED, halve, clip_by_torch, LOCAL, REDUCED, clip_by_torch],
    "zeros-where-one-has-more": [REDUCED, LOCAL_OF_ONE, set_to_zero, REDUCED],
    "set-where-one-has-more": [REDUCED, LOCAL_OF_ONE, set_each, REDUCED],
    "set-where-one-has-the-first": [LOCAL_OF_ONE, REDUCED, let_go, LOCAL_OF_ONE, set_each, REDUCED],
    "set-where-one-has-all": [REDUCED, let_go_of_some, LOCAL_OF_ONE, set_each, REDUCED],
    "none-where-one-has-more": [REDUCED, LOCAL_OF_ONE, REDUCED],
    "zeros-and-nothing-after": [REDUCED, LOCAL, set_to_zero, LOCAL_OF_ONE, "reduce"],
    "stepped-and-set": [REDUCED, "step", let_go, set_each, "reduce", LOCAL, REDUCED],
}


class Course(Doubled):
    """A step in which each member goes through some events; `plain` and `train` compare its end."""

    def __init__(self, events: list[Event]) -> None:
        super().__init__("gpt", (1.0, 1.0), lambda parameters: torch.optim.SGD(parameters, lr=1e-2))
        self.events = events

    def go(self, model: Any, optimizer: Any, ranks: list[int], fitted: Sharded | None) -> None:
        for number, event in enumerate(self.events):
            if not isinstance(event, str):
                event(model, optimizer)
            elif event == "step":
                optimizer.step()
            elif event != "reduce":
                for rank in ranks if event != LOCAL_OF_ONE else ranks[: ranks[0] == 0]:
                    self.one(event, model, rank, number).mul(0.5 if fitted is None else 1.0).backward()
            if event in (REDUCED, "reduce") and fitted is not None:
                fitted.reduce()
        optimizer.step()
        optimizer.views = []

    def one(self, event: str, model: Any, rank: int, number: int) -> Tensor:
        if event != LOCAL_OF_ONE:
            return self.loss(model, rank, number)
        return model.head.weight.square().sum() + model.blocks[1](model.positions[None]).square().mean()


ALSO_ASYMMETRIC = ("zeros", "halved-by-a-view", "zeros-where-one-has-more", "set-where-one-has-all")


def _all_courses() -> list[Any]:
    soak = [pytest.param(name, "asymmetric", marks=pytest.mark.soak) for name in COURSES]
    rest = [each for each in soak if each.values[0] not in ALSO_ASYMMETRIC]
    plain = [(name, "symmetric") for name in COURSES]
    return [*plain, *((name, "asymmetric") for name in ALSO_ASYMMETRIC), *rest]


@pytest.mark.parametrize(("name", "sharding"), _all_courses())
def test_gradients_that_come_after_a_mean_and_what_the_script_makes_of_it(name: str, sharding: str) -> None:
    script = Course(COURSES[name])
    model, optimizer = script.build()
    before = values_of(model)
    script.go(model, optimizer, [0, 1], None)
    found = share_between(
        script, 0.5, lambda m, model, opt, fitted: script.go(model, opt, [m.rank], fitted), sharding=sharding
    )
    for _, values in found:
        torch.testing.assert_close(values, values_of(model), rtol=1e-9, atol=1e-12)
    assert same(found[0][1], found[1][1])
    assert not same(before, found[0][1])


class Slow(torch.optim.SGD):
    """Whose chunks are stepped long after `step()` has returned."""

    def step(self, closure: Any = None) -> Any:
        if threading.current_thread().name == "atoll-stepping":
            time.sleep(0.005)
        return super().step(closure)


def test_gradients_are_set_to_zero_while_chunks_are_still_to_be_stepped() -> None:
    """Nobody holds a gradient's lock while he waits for a step, which takes it too."""
    script = Script("gpt", (1.0, 1.0), lambda parameters: Slow(parameters, lr=0.05))

    def body(member: Member, model: Any, optimizer: Any, fitted: Sharded) -> None:
        for step in range(3):
            script.backward(model, member.rank, step, fitted)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

    found = share_between(script, 0.5, body)
    values, _ = script.plain(3)
    assert same(found[0][1], values)
    assert same(found[1][1], values)


@pytest.mark.parametrize("stepped", [False, True])
def test_who_is_behind_reads_gradients_that_others_have_let_go_of(stepped: bool) -> None:
    """A fast member drops the mean, or has more gradients, before a slow one has read it: in a script that
    skips a step, and in one that reads after the step."""
    script = Script("gpt", (1.0, 1.0))
    let_go = threading.Barrier(2)

    def body(member: Member, model: Any, optimizer: Any, fitted: Sharded) -> Any:
        seen = []
        for step, drops in enumerate((True, False)):
            script.backward(model, member.rank, step, fitted)
            if stepped:
                optimizer.step()
            if member.rank == 0:
                let_go.wait(60)
            seen.append([p.grad.clone() for p in model.parameters()])
            if drops:
                optimizer.zero_grad()
            else:  # the first gradients of another backward, whose end is where all meet
                model.head.weight.sum().backward()
                model.head.weight.grad = None
            if member.rank == 1:
                let_go.wait(60)
        return seen

    found = share_between(script, 0.5, body)
    assert same(found[0][0], found[1][0])


def test_one_member_alone_reads_gradients_after_the_step() -> None:
    """If the others have let go of them by the first time, a line says so; if not, they keep them then on."""
    script, reads, goes_on = Script("gpt", (1.0, 1.0)), threading.Barrier(2), threading.Barrier(2)

    def read_alone(member: Member, model: Any, optimizer: Any, *, late: bool) -> list[Tensor]:
        found = []
        if member.rank == 0:
            if late:
                reads.wait(60)
            found = [p.grad.clone() for p in model.parameters()]
            goes_on.wait(60)
        if member.rank == 1 and not late:
            goes_on.wait(60)
        optimizer.zero_grad()
        if member.rank == 1 and late:
            reads.wait(60)
            goes_on.wait(60)
        return found

    def body(member: Member, model: Any, optimizer: Any, fitted: Sharded) -> Any:
        seen = []
        for step, late in enumerate((False, True, True)):
            script.backward(model, member.rank, step, fitted)
            before = [p.grad.clone() for p in model.parameters()]
            optimizer.step()
            found = read_alone(member, model, optimizer, late=late)
            seen.append(member.rank == 1 or same(found, before))
        return seen

    found = share_between(script, 0.5, body)
    assert all(found[0][0])

    def too_late(member: Member, model: Any, optimizer: Any, fitted: Sharded) -> None:
        script.backward(model, member.rank, 0, fitted)
        optimizer.step()
        if member.rank == 1:
            optimizer.zero_grad()
            reads.wait(60)
            goes_on.wait(60)
            return
        reads.wait(60)
        line = r"worker 1 has let go of the gradient of .*; read p.grad before optimizer.step\(\), or on all"
        with pytest.raises(AtollError, match=line):
            [p.grad.clone() for p in model.parameters()]
        goes_on.wait(60)

    share_between(script, 0.5, too_late)


def scale(parameter: nn.Parameter) -> None:
    parameter.mul_(0.99)


def give_other_data(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data * 0.99  # which lies on the device


def scale_past_autograd(parameter: nn.Parameter) -> None:
    parameter.data.mul_(0.99)


WRITES = pytest.mark.parametrize("write", [scale, give_other_data, scale_past_autograd])


@WRITES
@BOTH
def test_parameters_that_all_have_written_to_are_new_to_all_in_the_next_forward(
    write: Callable[[nn.Parameter], None], sharding: str
) -> None:
    """A forward with or without gradients meets all members first: none finds others' former values."""
    script = Script("gpt", (1.0, 1.0), sgd)

    def write_all(model: Any) -> float:
        with torch.no_grad():
            for parameter in model.parameters():
                write(parameter)
            return float(script.loss(model, 0, 99))

    def body(member: Member, model: Any, optimizer: Any, fitted: Sharded) -> list[float]:
        seen = []
        for step in range(3):
            optimizer.zero_grad()
            script.backward(model, member.rank, step, fitted)
            optimizer.step()
            seen.append(write_all(model))
        return seen

    found = share_between(script, 0.5, body, sharding=sharding)
    model, optimizer = script.build()
    seen = []
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(2):
            script.backward(model, rank, step, None)
        optimizer.step()
        seen.append(write_all(model))
    for told, values in found:
        assert same(told, seen)
        assert same(values, values_of(model))


@WRITES
def test_parameters_that_one_member_alone_has_written_to_end_the_run_with_a_line(
    write: Callable[[nn.Parameter], None],
) -> None:
    script = Script("gpt", (1.0, 1.0))

    def body(member: Member, model: Any, optimizer: Any, fitted: Sharded) -> Any:
        script.train(member, model, optimizer, fitted, 1)
        if member.rank == 0:
            with torch.no_grad():
                write(model.head.weight)
        script.train(member, model, optimizer, fitted, 1)

    said = r"worker 0 is in a forward after the script wrote to parameters \(.*\); worker 1 is .*\. All"
    with pytest.raises(MismatchError, match=said):
        share_between(script, 0.5, body)


def clip(most: float) -> Callable[[Sharded], None]:
    return lambda fitted: fitted.clip_grad_norm_(most) and None


def nothing(_: Sharded) -> None:
    """What a member does that has no batch, say."""


def meet(fitted: Sharded) -> None:
    fitted.sync("the barrier")


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (
            clip(0.1),
            nothing,
            r"worker 0 is in clip_grad_norm_\(0\.1\) \(.*\); worker 1 is in optimizer\.step \(.*\)\. All",
        ),
        (
            clip(0.1),
            clip(0.2),
            r"worker 0 is in clip_grad_norm_\(0\.1\) \(.*\); worker 1 is in clip_grad_norm_\(0\.2\) \(.*\)",
        ),
        (
            nothing,
            meet,
            r"worker 0 is in optimizer\.step \(.*\); worker 1 is in the barrier \(.*\)\. All workers",
        ),
    ],
)
def test_members_that_make_unlike_calls_are_told_which(
    first: Callable[[Sharded], None], second: Callable[[Sharded], None], said: str
) -> None:
    script = Script("gpt", (1.0, 1.0))

    def body(member: Member, model: Any, optimizer: Any, fitted: Sharded) -> Any:
        script.train(member, model, optimizer, fitted, 1)
        script.backward(model, member.rank, 1, fitted)
        (second if member.rank else first)(fitted)
        optimizer.step()

    with pytest.raises(MismatchError, match=said) as raised:
        share_between(script, 0.5, body)
    assert "\n" not in str(raised.value)


def test_one_member_evaluates_and_all_write_values() -> None:
    script = Script("gpt", (1.0, 1.0))

    def evaluate(model: Any) -> float:
        with torch.no_grad():
            return float(script.loss(model, 0, 99))

    def body(member: Member, model: Any, optimizer: Any, fitted: Sharded) -> Any:
        script.train(member, model, optimizer, fitted, 2)
        alone = evaluate(model) if member.rank == 0 else None
        fitted.sync("evaluated")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.01)
        fitted.sync("written")
        return alone, evaluate(model)

    found = share_between(script, 0.5, body)
    model, _ = script.build()
    values, _ = script.plain(2)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.copy_(value)
        alone = evaluate(model)
        for parameter in model.parameters():
            parameter.fill_(0.01)
    assert found[0][0] == (alone, evaluate(model))
    assert found[1][0] == (None, evaluate(model))


def test_gradients_that_are_not_finite_are_seen_by_all() -> None:
    script = Script("gpt", (1.0, 1.0))

    def body(member: Member, model: Any, optimizer: Any, fitted: Sharded) -> Any:
        script.backward(model, member.rank, 0, fitted)
        first = fitted.all_finite()
        optimizer.zero_grad()
        scale = float("inf") if member.rank == 1 else 1.0
        (script.loss(model, member.rank, 0) * scale).backward()
        fitted.reduce()
        seen = fitted.all_finite(), fitted.nonfinite()
        with pytest.raises(RuntimeError, match="cannot be clipped"):
            fitted.clip_grad_norm_(1.0, error_if_nonfinite=True)
        return first, seen

    found = share_between(script, 0.5, body)
    for (first, (second, bad)), _ in found:
        assert (first, second) == (True, False)
        assert "." in bad


Body = Callable[[Member, Any, Any, Sharded], Any]


def no_reduction(member: Member, model: Any, optimizer: Any, fitted: Sharded) -> None:
    Script("gpt", (1.0, 1.0)).loss(model, member.rank, 0).backward()
    optimizer.step()


def another_presence(member: Member, model: Any, optimizer: Any, fitted: Sharded) -> None:
    Script("gpt", (1.0, 1.0)).backward(model, member.rank, 0, fitted)
    if member.rank:
        model.head.weight.grad = None
    optimizer.step()


def edited_by_one(member: Member, model: Any, optimizer: Any, fitted: Sharded) -> None:
    Script("gpt", (1.0, 1.0)).backward(model, member.rank, 0, fitted)
    if member.rank:
        model.head.weight.grad.mul_(0.5)
    else:
        model.tokens.weight.grad.numpy()  # who looks changes nothing
    optimizer.step()


def other_steps(member: Member, model: Any, optimizer: Any, fitted: Sharded) -> None:
    if member.rank:
        optimizer.step()
    fitted.sync("here")


def no_weight(member: Member, model: Any, optimizer: Any, fitted: Sharded) -> None:
    Script("gpt", (1.0, 1.0)).loss(model, member.rank, 0).backward()
    fitted.reduce(0.0)


def no_second_reduction(member: Member, model: Any, optimizer: Any, fitted: Sharded) -> None:
    script = Script("gpt", (1.0, 1.0))
    script.backward(model, member.rank, 0, fitted)
    script.loss(model, member.rank, 1).backward()
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()


def read_too_early(member: Member, model: Any, optimizer: Any, fitted: Sharded) -> None:
    script = Script("gpt", (1.0, 1.0))
    script.backward(model, member.rank, 0, fitted)
    script.loss(model, member.rank, 1).backward()
    model.head.weight.grad.mul_(0.5)


@pytest.mark.parametrize(
    ("body", "kind", "said"),
    [
        (no_second_reduction, UserError, r"the gradient of '.*' is set aside for .* call Fitted.reduce"),
        (read_too_early, UserError, r"^head.weight.grad: gradients have come after the workers' mean, and"),
        (no_reduction, UserError, r"the gradient of '.*' is this worker's own: call Fitted.reduce"),
        (another_presence, UserError, r"1 of 2 workers have a gradient of 'head.weight' after their mean"),
        (
            other_steps,
            MismatchError,
            r"^worker 0 is in here \(.*\); worker 1 is in optimizer\.step \(.*\)\. All",
        ),
        (edited_by_one, UserError, r"^worker 1 has changed the gradient of 'head.weight' after the mean was"),
        (no_weight, UserError, r"step 0: the workers' weights sum to 0"),
    ],
)
def test_mistakes_are_one_line(body: Body, kind: type[AtollError], said: str) -> None:
    with pytest.raises(kind, match=said) as raised:
        share_between(Script("gpt", (1.0, 1.0)), 0.5, body)
    assert "\n" not in str(raised.value)


def test_a_member_that_fails_ends_the_others() -> None:
    """Nothing hangs: those that wait for it are told."""
    script = Script("gpt", (1.0,) * 3)
    ended: list[tuple[int, str]] = []

    def body(member: Member, model: Any, optimizer: Any, fitted: Sharded) -> None:
        try:
            script.train(member, model, optimizer, fitted, 1 if member.rank == 1 else 2)
        except AtollError as error:
            ended.append((member.rank, str(error)))
            raise
        raise ValueError("the script's own")

    with pytest.raises(ValueError, match="the script's own"):
        share_between(script, 0.5, body)
    assert {rank for rank, _ in ended} == {0, 2}


def test_a_member_whose_steps_have_ended_says_that_it_has_gone() -> None:
    """Who asks it for values is not told of the end of "the session", which would be taken for its own."""
    ended, told = threading.Event(), list[str]()

    def body(member: Member, _model: Any, _optimizer: Any, fitted: Sharded) -> None:
        def over(_chunk: int, *, tells: bool = True) -> None:
            raise RunError("the optimizer's step of 'w' will not come: the session ended before it")

        if member.rank == 0:
            fitted._steps.wait_stepped = over
        fitted.sync("the test")
        try:
            if member.rank == 1:
                chunk = next(c for c in fitted.engine.chunks if fitted.sharing.others(c))
                with fitted.sharing.pin((chunk, VALUES)):
                    pass
        except RunError as error:
            told.append(str(error))
            raise
        finally:
            ended.set()
        assert ended.wait(60)

    with pytest.raises(RunError):
        share_between(Script("gpt", (1.0,) * 2), 0.5, body)
    assert told == ["worker 0 has gone: it holds its part of the model no more"]
