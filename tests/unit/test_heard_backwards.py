"""Backwards that are listened to: their ends, and the graph of one that raised."""

from __future__ import annotations

import contextlib
import gc
import inspect
from typing import Any

import pytest
import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from atoll.tensors import torch_patches as patches
from atoll.tensors.backwardgraph import BackwardGraph


class _BackwardWithin(torch.autograd.Function):
    """Makes a backward within its backward, and goes on if that raises."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad(), contextlib.suppress(RuntimeError):
            _Raising.apply(torch.ones(2, requires_grad=True)).sum().backward()
        return gradients[0]


class _Raising(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, *_gradients: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no memory")


class _BackwardsHeard:
    def __init__(self) -> None:
        self.heard: list[str] = []
        self.graphs: list[BackwardGraph] = []

    def returned(self) -> None:
        self.heard.append("returned")

    def raised(self, graph: BackwardGraph) -> None:
        self.heard.append("raised")
        self.graphs.append(graph)


@pytest.fixture
def unwatched(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Torch's own backward, to which no session listens."""
    plain = inspect.unwrap(torch.autograd.backward)
    monkeypatch.setattr(patches, "_backward_watchers", [])
    monkeypatch.setattr(patches, "_watched_backward", None)
    monkeypatch.setattr(torch.autograd, "backward", plain)
    return plain


def test_the_ends_of_backwards(unwatched: Any) -> None:
    x = torch.ones(2, requires_grad=True)
    watcher, other = _BackwardsHeard(), _BackwardsHeard()
    unwatch = patches.watch_backwards(watcher)
    patches.watch_backwards(other)
    x.sum().backward()
    with pytest.raises(RuntimeError, match="no memory"):
        _Raising.apply(x).sum().backward()
    _BackwardWithin.apply(x).sum().backward()
    assert watcher.heard == other.heard == ["returned", "raised", "returned"]
    unwatch()
    x.sum().backward()
    assert len(watcher.heard) == 3
    assert len(other.heard) == 4
    del other  # it is held weakly
    gc.collect()
    patches.watch_backwards(watcher)()
    assert torch.autograd.backward is unwatched


def test_backwards_are_heard_once_beside_another_package_s_function(unwatched: Any) -> None:
    """It may stand in torch's place before a session, and may come while one is open."""

    def around(inner: Any) -> Any:
        def act(*arguments: Any, **named: Any) -> None:
            calls.append(inner)
            inner(*arguments, **named)

        return act

    calls, x, watcher = list[Any](), torch.ones(2, requires_grad=True), _BackwardsHeard()
    torch.autograd.backward = first = around(unwatched)
    unwatch = patches.watch_backwards(watcher)
    x.sum().backward()
    unwatch()
    assert torch.autograd.backward is first
    unwatch = patches.watch_backwards(watcher)
    torch.autograd.backward = second = around(torch.autograd.backward)
    x.sum().backward()
    unwatch()
    assert torch.autograd.backward is second
    x.sum().backward()
    unwatch = patches.watch_backwards(watcher)
    x.sum().backward()
    unwatch()
    assert watcher.heard == ["returned"] * 3
    assert len(calls) == 1 + 2 + 2 + 2


def test_backwards_are_heard_after_a_listener_that_has_not_ended(unwatched: Any) -> None:
    patches.watch_backwards(_BackwardsHeard())  # and is collected
    gc.collect()

    def other(*arguments: Any, **named: Any) -> None:
        unwatched(*arguments, **named)

    x, watcher = torch.ones(2, requires_grad=True), _BackwardsHeard()
    torch.autograd.backward = other
    unwatch = patches.watch_backwards(watcher)
    x.sum().backward()
    assert watcher.heard == ["returned"]
    unwatch()
    assert torch.autograd.backward is other


def test_the_graph_of_a_backward_that_raised(unwatched: Any) -> None:
    here, there = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    watcher = _BackwardsHeard()
    patches.watch_backwards(watcher)
    plain, hides = here.exp().sum(), _Raising.apply(here.exp()).sum()
    inside = checkpoint(_Raising.apply, here.exp(), use_reentrant=True).sum()
    plain.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        torch.autograd.backward(tensors=[there.sum(), plain])
    with pytest.raises(ZeroDivisionError):
        plain.backward()
    for each in (hides, inside):
        with pytest.raises(RuntimeError, match="no memory"):
            each.backward()
    both, one, *others = watcher.graphs
    assert both.has_any([here])
    assert both.has_any([there])
    assert one.has_any([here])
    assert not one.has_any([there])
    assert not one.may_hide(found=False)
    assert [graph.may_hide(found=False) for graph in others] == [True, True]
    assert [graph.may_hide(found=True) for graph in others] == [False, True]


def test_the_graph_of_each_form_of_a_backward_s_first_argument(unwatched: Any) -> None:
    here, there = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    watcher = _BackwardsHeard()
    patches.watch_backwards(watcher)

    def loss() -> torch.Tensor:
        return _Raising.apply(here.exp()).sum()

    forms: list[Any] = [
        get_gradient_edge(loss()), [get_gradient_edge(loss())], {"loss": loss()}.values(),
        (each for each in [loss()]), iter([loss()]),
    ]  # fmt: skip
    gradient = torch.ones(())
    for form in forms:
        with pytest.raises(RuntimeError, match="no memory"):
            torch.autograd.backward(form, [gradient] if isinstance(form, list) else gradient)
    with pytest.raises(RuntimeError, match="no memory"):
        torch.autograd.backward(tensors=(each for each in [loss()]))
    torch.autograd.backward(each for each in [there.sum()])
    assert there.grad is not None
    assert [graph.has_any([here]) for graph in watcher.graphs] == [True] * 6
    assert not any(graph.has_any([there]) for graph in watcher.graphs)
    for wrong in (None, 3, [None]):
        with pytest.raises((TypeError, AttributeError, AssertionError)) as error:
            torch.autograd.backward(wrong)
        assert error.value.__context__ is None


class _Keeping(torch.autograd.Function):
    """Keeps a tensor of its own under the name that a parameter's node has for the parameter."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
        ctx.variable = kept[0]
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, *_gradients: torch.Tensor) -> Any:
        raise RuntimeError("no memory")


def test_a_function_s_own_attribute_is_no_parameter() -> None:
    here, there = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    graph = BackwardGraph(_Keeping.apply(here.exp(), [there]).sum())
    assert graph.has_any([here])
    assert not graph.has_any([there])
    assert graph.may_hide(found=False)
