"""A script's step hooks do under Atoll what they do in plain PyTorch, whenever they were registered."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from atoll.tensors.optimizer import StepHooks
from atoll.tensors.remoteoptimizer import RemoteOptimizer
from atoll.tensors.stephooks import AroundStep


def an_optimizer() -> torch.optim.SGD:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return torch.optim.SGD([parameter], lr=1.0)


def test_ours_are_within_those_of_the_script_in_their_own_order() -> None:
    optimizer, seen = an_optimizer(), list[str]()

    def of(name: str) -> Any:
        return lambda *_: seen.append(name)

    def register(name: str) -> list[Any]:
        return [
            optimizer.register_step_pre_hook(of(f"{name} before")),
            optimizer.register_step_post_hook(of(f"{name} after")),
        ]

    register("early")
    ours = [AroundStep(optimizer, of(f"{n} before"), of(f"{n} after")) for n in ("first", "second")]
    last = AroundStep(optimizer, of("third before"))
    late = register("late")
    optimizer.step()
    before = ["early before", "late before", "first before", "second before", "third before"]
    after = ["first after", "second after", "early after", "late after"]
    assert seen == before + after
    seen.clear()
    for handle in [ours[0], last, *late]:
        handle.remove()
    optimizer.step()
    assert seen == ["early before", "second before", "second after", "early after"]
    ours[1].remove()
    ours[1].remove()
    assert "register_step_pre_hook" not in vars(optimizer)
    seen.clear()
    optimizer.step()
    assert seen == ["early before", "early after"]


class ByItsBase(torch.optim.SGD):
    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise FloatingPointError
        return super().step(closure)


def test_ours_run_once_where_the_step_of_a_class_calls_that_of_its_base() -> None:
    an_optimizer()  # from the first one on torch runs hooks around SGD.step, whatever calls it
    parameter, seen = nn.Parameter(torch.ones(2)), list[str]()
    optimizer = ByItsBase([parameter], lr=1.0)
    optimizer.register_step_post_hook(lambda *_: seen.append("the script's"))
    AroundStep(optimizer, lambda *_: seen.append("before"), lambda *_: seen.append("after"))
    AroundStep(optimizer, lambda *_: seen.append("before, alone"))
    for _ in range(2):
        seen.clear()
        optimizer.step()
        assert seen == ["before", "before, alone", "the script's", "after", "the script's"]
        optimizer.fails = True
        with pytest.raises(FloatingPointError):
            optimizer.step()
        optimizer.fails = False


def test_a_step_s_arguments_are_let_go_at_its_end() -> None:
    """Without a collection: a closure may hold a batch, and hooks memory that others wait for."""
    optimizer = an_optimizer()
    AroundStep(optimizer, lambda *_: None, lambda *_: None)
    held = nn.Linear(1, 1)
    gone = weakref.ref(held)
    gc.disable()
    try:
        optimizer.step(partial(held.forward, torch.ones(1, 1)))  # type: ignore[arg-type]
        del held
        assert gone() is None
    finally:
        gc.enable()


def test_the_script_s_own_way_to_register_is_put_back() -> None:
    optimizer, given = an_optimizer(), list[Any]()
    register = optimizer.register_step_pre_hook

    def own(hook: Any) -> Any:
        given.append(hook)
        return register(hook)

    optimizer.register_step_pre_hook = own  # type: ignore[method-assign]
    ours = AroundStep(optimizer, lambda *_: None)
    optimizer.register_step_pre_hook(print).remove()
    assert given[-1] is print
    ours.remove()
    assert vars(optimizer)["register_step_pre_hook"] is own


def test_what_steps_elsewhere_has_stepped_when_the_script_s_hooks_look() -> None:
    optimizer = an_optimizer()
    (parameter,) = optimizer.param_groups[0]["params"]
    seen: list[float] = []
    optimizer.register_step_post_hook(lambda *_: seen.append(float(parameter.detach().sum())))

    def make(_accepted: bool, _settings: object) -> None:
        with torch.no_grad():
            parameter.sub_(optimizer.param_groups[0]["lr"] * parameter.grad)

    hooks = StepHooks(lambda: None, lambda _: True, lambda: None)
    stepper = RemoteOptimizer(
        optimizer, hooks, make=make, settings=dict, fetch=dict, home="it lives elsewhere"
    )

    def before(*_: Any) -> None:
        parameter.grad.mul_(0.5)

    optimizer.register_step_pre_hook(before)
    optimizer.step()
    assert seen == [1.0]
    stepper.close()
