"""What hooks of every other kind see and change: what they would in plain PyTorch on this worker's own batch.

Hooks around the optimizer's step see the mean over the workers in `p.grad`; under strategy `peers`, whose
mean is made elsewhere, this node's own gradient. One training has hooks of all kinds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_full_backward_hook

import atoll
from support.pool import WorkerPool
from support.runs import model, run_at

STEPS, WORLD = 2, 2
Seen = list[tuple[str, float]]  # which hook has run, and a number of what it was given


@contextmanager
def hooked(net: nn.Sequential, optimizer: torch.optim.Optimizer, seen: Seen) -> Iterator[None]:
    """Hooks of every kind on these, which note what they see; those that may change what they see do."""

    def note(kind: str, value: Tensor | None = None) -> None:
        seen.append((kind, 0.0 if value is None else float(value.detach().clone().sum())))

    def changes(kind: str) -> Callable[[Tensor], Tensor]:
        def hook(value: Tensor) -> Tensor:
            note(kind, value)
            return value * 1.5

        return hook

    def within(kind: str, part: nn.Module, value: Tensor) -> None:
        if any(part is each for each in net.modules()):
            note(kind, value)

    first, second, last = net[0], net[2], net[10]
    weight_of = lambda: second.weight.grad  # noqa: E731
    first.weight.register_hook(changes("tensor"))
    torch.autograd.graph.register_multi_grad_hook(
        [first.bias, last.weight], lambda grads: note("several tensors", grads[0])
    )
    second.register_forward_pre_hook(lambda _, args: (changes("forward pre")(args[0]),))
    second.register_forward_hook(lambda _, __, output: changes("forward")(output))
    second.register_full_backward_pre_hook(lambda _, grads: (changes("backward pre")(grads[0]),))
    second.register_full_backward_hook(lambda _, grads, __: (changes("backward")(grads[0]),))
    last.register_forward_hook(lambda _, __, output: output.register_hook(changes("activation")) and None)
    optimizer.register_step_pre_hook(lambda *_: note("step pre", weight_of()))
    optimizer.register_step_post_hook(lambda *_: note("step post", second.weight))
    optimizer.register_state_dict_post_hook(lambda *_: note("optimizer state"))
    net.register_state_dict_pre_hook(lambda *_: note("state_dict pre"))
    net.register_state_dict_post_hook(lambda _, state, *__: note("state_dict", state["2.weight"]))
    net.register_load_state_dict_pre_hook(lambda _, state, *__: note("load pre", state["2.weight"]))
    net.register_load_state_dict_post_hook(lambda part, _: note("load", part[2].weight))
    handles = [
        register_module_forward_hook(lambda part, _, output: within("any forward", part, output)),
        register_module_full_backward_hook(lambda part, grads, __: within("any backward", part, grads[0])),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def backward(net: nn.Sequential, rank: int, step: int, seen: Seen) -> None:
    """On a batch of this worker's own; what forward saves goes through hooks too."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    inputs = torch.randn(4, 32, dtype=torch.float64, generator=generator, requires_grad=True)
    packed = [0, 0]

    def pack(value: Tensor) -> Tensor:
        packed[0] += 1
        return value

    def unpack(value: Tensor) -> Tensor:
        packed[1] += 1
        return value

    # Around all of the forward, a model in tiers would keep the chunks of what is saved on the device.
    output = net(inputs)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = output.square().mean()
    loss.backward()
    seen.append(("saved and used again", float(packed[0] == packed[1] and packed[0] > 0)))
    assert inputs.grad is not None
    seen.append(("inputs", float(inputs.grad.sum())))


def use_states(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state_dict()
    state = net.state_dict()
    net.load_state_dict({name: value.clone() for name, value in state.items()})


def train(session: atoll.Session) -> tuple[Seen, list[Tensor]]:
    net, seen = model(), Seen()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    session.prepare(net, optimizer)
    with hooked(net, optimizer, seen):
        for step in range(STEPS):
            backward(net, session.rank, step, seen)
            optimizer.step()
            optimizer.zero_grad()
            use_states(net, optimizer)
        return seen, [p.detach().clone() for p in net.parameters()]


@functools.cache
def train_plain() -> tuple[list[Seen], list[list[float]], list[Tensor]]:
    """Each worker's copy of the model, with hooks of its own; then all step with the mean. What hooks have
    seen, each worker's own gradient before each step, as a hook sees it, and the parameters."""
    nets, logs = [model() for _ in range(WORLD)], [Seen() for _ in range(WORLD)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in nets]
    own: list[list[float]] = [[] for _ in range(WORLD)]
    with ExitStack() as stack:
        for net, optimizer, seen in zip(nets, optimizers, logs, strict=True):
            stack.enter_context(hooked(net, optimizer, seen))
        for step in range(STEPS):
            for rank, net in enumerate(nets):
                backward(net, rank, step, logs[rank])
                own[rank].append(float(net[2].weight.grad.sum()))
            for same in zip(*(net.parameters() for net in nets), strict=True):
                mean = torch.stack([p.grad for p in same]).mean(0)
                for parameter in same:
                    parameter.grad = mean.clone()
            for net, optimizer in zip(nets, optimizers, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                use_states(net, optimizer)
    return logs, own, [p.detach() for p in nets[0].parameters()]


@pytest.mark.parametrize("kind", ["ring", "server", pytest.param("peers", marks=pytest.mark.soak), "tiers"])
def test_hooks_see_what_they_see_in_plain_torch(pool: WorkerPool, kind: str) -> None:
    logs, own, parameters = train_plain()
    found = run_at(pool, kind, train, world=WORLD)
    for rank, (seen, values) in enumerate(found):
        expected = list(logs[rank])
        if kind == "peers":
            numbers = iter(own[rank])
            expected = [(what, next(numbers) if what == "step pre" else value) for what, value in expected]
        assert [what for what, _ in seen] == [what for what, _ in expected]
        off = {
            what for (what, one), (_, other) in zip(seen, expected, strict=True) if abs(one - other) > 1e-9
        }
        assert not off
        for value, plain in zip(values, parameters, strict=True):
            assert float((value - plain).abs().max()) <= 1e-12


def watch_steps(session: atoll.Session) -> list[float]:
    """What a hook before the optimizer's step sees, while the parameters stay as they are."""
    net, seen = model(), Seen()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    session.prepare(net, optimizer)
    shown: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: shown.append(float(net[2].weight.grad.sum())))
    for step in range(STEPS):
        backward(net, session.rank, step, seen)
        optimizer.step()
        optimizer.zero_grad()
    return shown


@pytest.mark.parametrize("kind", ["asp", "peers", "server"])
def test_a_hook_before_the_step_sees_the_mean_or_under_asp_this_worker_s_own_gradient(
    pool: WorkerPool, kind: str
) -> None:
    own: list[list[float]] = [[] for _ in range(WORLD)]
    for rank, sums in enumerate(own):
        net = model()
        for step in range(STEPS):
            backward(net, rank, step, Seen())
            sums.append(float(net[2].weight.grad.sum()))
            net.zero_grad()
    mean = [sum(each) / WORLD for each in zip(*own, strict=True)]
    for rank, shown in enumerate(run_at(pool, kind, watch_steps, world=WORLD)):
        assert shown == pytest.approx(own[rank] if kind == "asp" else mean, abs=1e-12)
