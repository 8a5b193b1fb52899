"""A script that reads or changes `p.grad` between backward and step sees the mean, as in one process.

It clips, logs, overwrites, accumulates or keeps gradients, or makes sharpness-aware steps. Each step is
compared with plain PyTorch's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

import atoll
from atoll.core.config import Config, Groups, Run, Sync
from support.pool import JobFailedError, WorkerPool
from support.runs import model, run_at, run_with

SAMPLES = 8  # of all workers in a backward


def batch(step: int, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + number)
    x = torch.randn(SAMPLES, 32, dtype=torch.float64, generator=generator)
    return x, torch.randn(SAMPLES, 4, dtype=torch.float64, generator=generator)


class Loop:
    """A script's step in parts; `session` is None in plain PyTorch."""

    def __init__(self, session: atoll.Session | None) -> None:
        self.session = session
        self.net = model()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        if session is not None:
            session.prepare(self.net, self.optimizer)
        self.step, self.number = 0, 0
        self.seen: list[Tensor] = []

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.net.parameters())

    def backward(self) -> None:
        x, y = batch(self.step, self.number)
        if self.session is not None:
            mine = slice(self.session.rank, None, self.session.world)
            x, y = x[mine], y[mine]
        self.number += 1
        mse_loss(self.net(x), y).backward()

    def norm(self) -> Tensor:
        return nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])

    def clip(self, most: float) -> None:
        nn.utils.clip_grad_norm_(self.net.parameters(), most)


def none(loop: Loop) -> None:
    loop.backward()


def norm_clipped(loop: Loop) -> None:
    loop.backward()
    loop.clip(0.01)


def clipped_without_effect(loop: Loop) -> None:
    loop.backward()
    loop.clip(1e6)


def value_clipped(loop: Loop) -> None:
    loop.backward()
    nn.utils.clip_grad_value_(loop.net.parameters(), 1e-4)


def logged(loop: Loop) -> None:
    loop.backward()
    loop.seen += [loop.norm(), *(p.grad.clone() for p in loop.parameters if p.grad is not None)]


def replaced(loop: Loop) -> None:
    loop.backward()
    for parameter in loop.parameters:
        parameter.grad = parameter.grad.square() if parameter.grad is not None else None


def data_changed(loop: Loop) -> None:
    loop.backward()
    for parameter in loop.parameters:
        assert parameter.grad is not None
        parameter.grad.data = parameter.grad.data.abs()


def sharpness_aware(loop: Loop) -> None:
    loop.backward()
    kept = [p.detach().clone() for p in loop.parameters]
    with torch.no_grad():
        norm = loop.norm()
        for parameter in loop.parameters:
            assert parameter.grad is not None
            parameter.add_(parameter.grad, alpha=float(0.05 / norm))
    loop.optimizer.zero_grad()
    loop.number -= 1
    loop.backward()
    with torch.no_grad():
        for parameter, before in zip(loop.parameters, kept, strict=True):
            parameter.copy_(before)


def accumulated(loop: Loop) -> None:
    """The script clips between two backwards that are stepped together."""
    loop.backward()
    loop.clip(0.01)
    loop.backward()


def accumulated_unread(loop: Loop) -> None:
    loop.backward()
    loop.backward()
    loop.clip(0.01)


def one_overwritten(loop: Loop) -> None:
    loop.backward()
    first = loop.parameters[0]
    assert first.grad is not None
    first.grad.zero_()
    loop.clip(0.01)


def read_after_the_step(loop: Loop) -> None:
    loop.backward()
    loop.optimizer.step()
    loop.seen.append(loop.norm())


def clipped_by_the_session(loop: Loop) -> None:
    loop.backward()
    if loop.session is not None:
        loop.session.clip_grad_norm_(0.01)
    else:
        loop.clip(0.01)


def clipped_by_the_session_and_read(loop: Loop) -> None:
    clipped_by_the_session(loop)
    loop.seen.append(loop.norm())


def read_and_clipped_by_the_session(loop: Loop) -> None:
    loop.backward()
    loop.seen.append(loop.norm())
    if loop.session is not None:
        loop.seen.append(loop.session.clip_grad_norm_(0.01))
    else:
        loop.seen.append(nn.utils.clip_grad_norm_(loop.net.parameters(), 0.01))
    loop.seen.append(loop.norm())


def kept_zeros(loop: Loop) -> None:
    loop.optimizer.zero_grad(set_to_none=False)
    loop.backward()
    loop.optimizer.step()
    loop.seen.append(loop.norm())
    loop.optimizer.zero_grad(set_to_none=False)
    loop.seen.append(loop.norm())


USES = (
    none, norm_clipped, clipped_without_effect, value_clipped, logged, replaced, data_changed,
    sharpness_aware, accumulated, accumulated_unread, one_overwritten, read_after_the_step,
    clipped_by_the_session,
    clipped_by_the_session_and_read, read_and_clipped_by_the_session, kept_zeros, none,
)  # fmt: skip
STEP_MADE = (read_after_the_step, kept_zeros)


def train(session: atoll.Session | None) -> list[dict[str, list[Tensor]]]:
    loop, found = Loop(session), []
    for loop.step, use in enumerate(USES):
        loop.number, loop.seen = 0, []
        use(loop)
        if use not in STEP_MADE:
            loop.optimizer.step()
        loop.optimizer.zero_grad()
        values = [p.detach().clone() for p in loop.parameters]
        found.append({"values": values, "seen": [each.detach().clone() for each in loop.seen]})
    return found


@functools.cache
def plain() -> list[dict[str, list[Tensor]]]:
    return train(None)


def check(found: list[Any]) -> None:
    for worker in found:
        for use, steps, right in zip(USES, worker, plain(), strict=True):
            for what in ("seen", "values"):
                for got, expected in zip(steps[what], right[what], strict=True):
                    where = f"{what} of {use.__name__}"
                    assert torch.allclose(got, expected, rtol=1e-9, atol=1e-12), where


@pytest.mark.parametrize(("kind", "world"), [("ring", 2), ("peers", 2), ("peers", 3), ("peers tiers", 2)])
def test_gradients_are_plain_pytorch_s(pool: WorkerPool, kind: str, world: int) -> None:
    check(run_at(pool, kind, train, world=world))


def test_gradients_of_nodes_of_two_devices_are_plain_pytorch_s(pool: WorkerPool) -> None:
    sync = Sync(timeout="60s", stale_max=0)
    config = Config(run=Run(strategy="peers"), sync=sync, groups=Groups(count=2))
    check(run_with(pool, config, train, world=4))


def between_nothing(loop: Loop) -> None:
    del loop


def between_reduce(loop: Loop) -> None:
    if loop.session is not None:
        world = loop.session.world
        assert loop.session.reduce(float(loop.session.rank), "sum") == world * (world - 1) / 2


def between_gather(loop: Loop) -> None:
    if loop.session is not None:
        large = torch.full((2**20,), float(loop.session.rank))  # of several meetings
        found = loop.session.gather(large)
        assert [float(each.sum()) for each in found] == [rank * 2.0**20 for rank in range(loop.session.world)]


def between_barrier(loop: Loop) -> None:
    if loop.session is not None:
        loop.session.barrier()


def between_state(loop: Loop) -> None:
    loop.optimizer.state_dict()


def between_clip(loop: Loop) -> None:
    """Both nodes clip, and one of them has read the mean before."""
    if loop.session is not None:
        loop.session.clip_grad_norm_(0.01)
    else:
        loop.clip(0.01)


BETWEEN = (
    between_nothing, between_reduce, between_gather, between_barrier, between_state, between_clip,
    between_nothing,
)  # fmt: skip


def one_reads(session: atoll.Session | None, world: int) -> list[list[Tensor]]:
    """Worker 0 alone reads gradients before a step, and then all make the same call. The others have no
    batch in the last step, which all clip."""
    loop, found = Loop(session), []
    reads = session is None or session.rank == 0
    for loop.step, between in enumerate(BETWEEN):
        loop.number, loop.seen = 0, []
        if loop.step < len(BETWEEN) - 1:
            loop.backward()
            if reads:
                loop.seen.append(loop.norm())
        else:
            if reads:
                x, y = batch(loop.step, 0)
                mse_loss(loop.net(x[::world]), y[::world]).backward()
            loop.clip(0.01)
        between(loop)
        if loop.step == 2:  # the others come to the mean as well, which is there by now
            loop.seen.append(loop.norm())
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        found.append([p.detach().clone() for p in loop.parameters] + loop.seen)
    if session is not None:
        session.barrier()
    return found


@pytest.mark.parametrize(("kind", "world"), [("peers", 2), ("peers", 3), ("peers tiers", 2)])
def test_one_worker_may_read_gradients_alone(pool: WorkerPool, kind: str, world: int) -> None:
    """Three nodes have unlike weights: 3, 3 and 2 samples."""
    right = one_reads(None, world)
    for rank, worker in enumerate(run_at(pool, kind, one_reads, world, world=world)):
        for step, (got, expected) in enumerate(zip(worker, right, strict=True)):
            count = len(got)
            of_both = expected if len(expected) == count else [*expected[:12], *expected[13:]]
            for mine, its in zip(got, of_both, strict=True):
                assert torch.allclose(mine, its, rtol=1e-9, atol=1e-12), (rank, step)


def unlike_backwards(session: atoll.Session) -> None:
    """Node 0 uses the mean after the first of two backwards, and node 1 after both."""
    loop = Loop(session)
    loop.backward()
    if session.rank == 0:
        loop.norm()
    loop.backward()
    if session.rank == 1:
        loop.norm()
    loop.optimizer.step()
    session.barrier()


def unlike_without_sync(session: atoll.Session) -> None:
    """Node 1 has begun to accumulate when node 0 uses the mean."""
    loop = Loop(session)
    loop.backward()
    if session.rank == 0:
        loop.norm()
    else:
        with session.no_sync():
            loop.backward()
    session.barrier()


def other_backward_in_step(session: atoll.Session) -> None:
    """Node 0 uses the mean after the first of two backwards, and node 1 not at all."""
    loop = Loop(session)
    for number in range(2):
        loop.backward()
        if session.rank == number == 0:
            loop.norm()
    loop.optimizer.step()
    session.barrier()


def too_late(session: atoll.Session) -> None:
    """Node 1 makes its backward after a call to which node 0 comes with the mean of its own."""
    loop = Loop(session)
    if session.rank == 0:
        loop.backward()
        loop.norm()
    session.barrier()
    if session.rank == 1:
        loop.backward()
    loop.optimizer.step()
    session.barrier()


def read_after_the_step_by_one(session: atoll.Session) -> None:
    loop = Loop(session)
    loop.backward()
    loop.optimizer.step()
    if session.rank == 0:
        loop.norm()
    loop.optimizer.zero_grad()
    loop.backward()
    loop.optimizer.step()
    session.barrier()


UNLIKE = r"node 0 uses it after 1 backward of step 0 \(test_gradients_used\.py:\d+\); node 1 "


@pytest.mark.parametrize(
    ("script", "line"),
    [
        (unlike_backwards, UNLIKE + r"uses it after 2 backwards of step 0 \(test_gradients_used\.py:"),
        (other_backward_in_step, UNLIKE + r"does not use it, and is after optimizer\.step\(\) of step 0 \("),
        (unlike_without_sync, UNLIKE + "does not use it, and is after 1 backward and more under no_sync of"),
        # Node 0 hears of it only as its wait ends:
        pytest.param(
            too_late,
            "a backward of step 0 ends after another node's script has used the mean",
            marks=pytest.mark.check,
        ),
        (read_after_the_step_by_one, "p.grad is used only after optimizer.step\\(\\), and not on every node"),
    ],
)
def test_uses_that_cannot_be_paired_end_in_a_line(pool: WorkerPool, script: Any, line: str) -> None:
    with pytest.raises(JobFailedError, match=line):
        run_at(pool, "peers", script)


ALONE = (1, 2, 4)  # steps in which worker 0 alone has a batch


def logs_after_steps(
    session: atoll.Session | None, steps: tuple[int, ...], reduces: str
) -> list[list[tuple[str, Tensor]]]:
    """All log the norm after some `steps`, of gradients that some workers do not have, and those go on."""
    loop, found = Loop(session), []
    world, rank = (1, 0) if session is None else (session.world, session.rank)
    for loop.step in range(6):
        if session is not None and reduces == "first":
            session.reduce(1.0)
        x, y = batch(loop.step, 0)
        has_batch = rank == 0 or loop.step not in ALONE
        if has_batch:
            mine = slice(None) if loop.step in ALONE else slice(rank, None, world)
            mse_loss(loop.net(x[mine]), y[mine]).backward()
        if session is not None and reduces == "before the step":
            session.reduce(1.0)
        loop.optimizer.step()
        logged = [("norm", loop.norm().detach())] if has_batch and loop.step in steps else []
        loop.optimizer.zero_grad()
        found.append([*((name, p.detach().clone()) for name, p in loop.net.named_parameters()), *logged])
    if session is not None:
        session.barrier()
    return found


@pytest.mark.parametrize("steps", [tuple(range(6)), (1,), (2, 4)], ids=str)
@pytest.mark.parametrize("reduces", ["", "first", "before the step"])
@pytest.mark.parametrize(("kind", "world"), [("peers", 2), ("peers tiers", 2)])
def test_gradients_used_after_a_step_are_those_that_counted_in_it(
    pool: WorkerPool, kind: str, world: int, reduces: str, steps: tuple[int, ...]
) -> None:
    right = [dict(step) for step in logs_after_steps(None, steps, "")]
    for rank, worker in enumerate(run_at(pool, kind, logs_after_steps, steps, reduces, world=world)):
        for step, (got, expected) in enumerate(zip(worker, right, strict=True)):
            for name, value in got:
                assert torch.allclose(value, expected[name], rtol=1e-9, atol=1e-12), (rank, step, name)


def read_after_a_step_that_is_left_out(session: atoll.Session) -> None:
    """Node 1's gradients are NaN, so no node makes the step, and node 0 alone reads the mean after it."""
    loop = Loop(session)
    x, y = batch(0, 0)
    mse_loss(loop.net(x), y * float("nan") if session.rank else y).backward()
    loop.optimizer.step()
    if session.rank == 0:
        loop.norm()
    loop.optimizer.zero_grad()
    loop.backward()
    session.barrier()


def test_gradients_of_a_step_that_is_left_out_are_not_had_alone(pool: WorkerPool) -> None:
    line = r"p\.grad is used only after optimizer\.step\(\), and not on every node"
    with pytest.raises(JobFailedError, match=line):
        run_at(pool, "peers", read_after_a_step_that_is_left_out, sync={"nonfinite": "skip"})


def changes_by_rank(session: atoll.Session) -> list[Tensor]:
    """Node 0 doubles the mean, and node 1 has it times four."""
    loop = Loop(session)
    for loop.step in range(2):
        loop.backward()
        for parameter in loop.parameters:
            assert parameter.grad is not None
            parameter.grad.mul_(2.0 + 2 * session.rank)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    session.barrier()
    return [p.detach().clone() for p in loop.parameters]


@pytest.mark.parametrize("kind", ["peers", "peers tiers"])
def test_the_step_is_of_the_mean_of_what_scripts_make_of_the_mean(pool: WorkerPool, kind: str) -> None:
    """Each of two nodes has half of the samples."""
    plain = Loop(None)
    for plain.step in range(2):
        plain.backward()
        for parameter in plain.parameters:
            assert parameter.grad is not None
            parameter.grad.mul_(3.0)
        plain.optimizer.step()
        plain.optimizer.zero_grad()
    for worker in run_at(pool, kind, changes_by_rank):
        for got, expected in zip(worker, plain.parameters, strict=True):
            assert torch.allclose(got, expected, rtol=1e-9, atol=1e-12)


def uses_an_earlier_one(session: atoll.Session) -> None:
    loop = Loop(session)
    loop.backward()
    earlier = [p.grad for p in loop.parameters]
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    loop.backward()
    assert earlier[0] is not None
    earlier[0].norm()


@pytest.mark.parametrize("kind", ["peers", "peers tiers"])
def test_a_gradient_of_an_earlier_backward_is_refused(pool: WorkerPool, kind: str) -> None:
    with pytest.raises(JobFailedError, match="a gradient of an earlier backward is used"):
        run_at(pool, kind, uses_an_earlier_one)


def lacks_one(session: atoll.Session) -> None:
    loop = Loop(session)
    loop.backward()
    if session.rank == 1:
        loop.parameters[0].grad = None
    loop.clip(0.1)


def test_nodes_with_gradients_of_other_parameters_are_refused(pool: WorkerPool) -> None:
    with pytest.raises(JobFailedError, match=r"node 1 has no gradient of '0\.weight'"):
        run_at(pool, "peers", lacks_one)


def scales_differ(session: atoll.Session | None) -> list[list[Tensor]]:
    """Node 1's scale is half of node 0's, and the script reads and changes gradients before it unscales
    them."""
    loop, found = Loop(session), []
    scale = 1024.0 if session is None or session.rank == 0 else 512.0
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=100)
    for loop.step in range(3):
        x, y = batch(loop.step, 0)
        if session is not None:
            x, y = x[session.rank :: 2], y[session.rank :: 2]
        scaler.scale(mse_loss(loop.net(x), y)).backward()
        for parameter in loop.parameters:
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)
        seen = loop.norm() / scale
        scaler.unscale_(loop.optimizer)
        loop.clip(0.01)
        scaler.step(loop.optimizer)
        scaler.update()
        loop.optimizer.zero_grad()
        found.append([*(p.detach().clone() for p in loop.parameters), seen])
    return found


def another_one_scales(session: atoll.Session | None) -> list[list[Tensor]]:
    """A GradScaler scales the loss of another model, which each node trains by itself; node 1's scale is half
    of node 0's."""
    loop, found, other = Loop(session), [], nn.Linear(32, 1, dtype=torch.float64)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0 if session is None or session.rank == 0 else 512.0)
    for loop.step in range(3):
        x, _ = batch(loop.step, 0)
        loop.number = 0
        if loop.step:  # in the first step it has scaled a loss of which no backward comes
            scaler.scale(other(x).sum()).backward()
        else:
            scaler.scale(other(x).sum())
        loop.backward()
        seen = loop.norm()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        found.append([*(p.detach().clone() for p in loop.parameters), seen])
    return found


def scaled_in_pieces(session: atoll.Session | None) -> list[list[Tensor]]:
    """The gradients of a step are of two backwards, the first of which does not reduce, and each of which has
    a checkpoint's backward within it."""
    loop, found = Loop(session), []
    scale = 1024.0 if session is None or session.rank == 0 else 512.0
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=100)
    for loop.step in range(3):
        for number in range(2):
            x, y = batch(loop.step, number)
            if session is not None:
                x, y = x[session.rank :: 2], y[session.rank :: 2]
            with session.no_sync() if session is not None and not number else nullcontext():
                y_hat = checkpoint(loop.net, x.requires_grad_(), use_reentrant=True)
                scaler.scale(mse_loss(y_hat, y) / 2).backward()
        seen = loop.norm() / scale
        scaler.step(loop.optimizer)
        scaler.update()
        loop.optimizer.zero_grad()
        found.append([*(p.detach().clone() for p in loop.parameters), seen])
    return found


def scaled(
    session: atoll.Session | None, step: Callable[..., None], first: bool = True
) -> list[list[Tensor]]:
    """Node 1's scale is half of node 0's. `step(net, x, y, scaler)` makes a backward, and the script uses the
    gradients before they are unscaled, those of the first step only with `first`."""
    loop, found = Loop(session), []
    scale = 1024.0 if session is None or session.rank == 0 else 512.0
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=100)
    for loop.step in range(4):
        x, y = batch(loop.step, 0)
        if session is not None:
            x, y = x[session.rank :: 2], y[session.rank :: 2]
        step(loop.net, x, y, scaler)
        if loop.step or first:
            seen = loop.norm() / scale
        else:
            scaler.unscale_(loop.optimizer)
            seen = loop.norm()
        scaler.step(loop.optimizer)
        scaler.update()
        loop.optimizer.zero_grad()
        found.append([*(p.detach().clone() for p in loop.parameters), seen])
    return found


def begun_at_a_cut(net: nn.Module, x: Tensor, y: Tensor, scaler: torch.amp.GradScaler) -> None:
    out = net(x)
    cut = out.detach().requires_grad_()
    scaler.scale(mse_loss(cut, y)).backward()
    out.backward(cut.grad)


def given_a_gradient(net: nn.Module, x: Tensor, y: Tensor, scaler: torch.amp.GradScaler) -> None:
    loss = mse_loss(net(x), y)
    loss.backward(scaler.scale(torch.ones_like(loss)))


def scaled_lazily(net: nn.Module, x: Tensor, y: Tensor, scaler: torch.amp.GradScaler) -> None:
    losses = {"of labels": mse_loss(net(x), y), "of size": net(x).square().mean()}
    sum(scaler.scale(losses.values())).backward()  # type: ignore[call-overload]


def thrown_away_before(net: nn.Module, x: Tensor, y: Tensor, scaler: torch.amp.GradScaler) -> None:
    scaler.scale(mse_loss(net(2 * x), y)).backward()
    net.zero_grad()
    scaler.scale(mse_loss(net(x), y)).backward()


@pytest.mark.parametrize("kind", ["peers", "peers tiers"])
@pytest.mark.parametrize("step", [begun_at_a_cut, given_a_gradient])
def test_a_mean_by_a_scale_that_was_not_known_is_refused(
    pool: WorkerPool, kind: str, step: Callable[..., None]
) -> None:
    """In the first step nothing tells the scale of a backward that does not begin at the scaled loss."""
    with pytest.raises(
        JobFailedError, match="for a scale of 1 in them, where the scaler divides by 1024; call"
    ):
        run_at(pool, kind, scaled, step)


lazily = functools.partial(scaled, step=scaled_lazily)
thrown_away = functools.partial(scaled, step=thrown_away_before)
cut = functools.partial(scaled, step=begun_at_a_cut, first=False)
given = functools.partial(scaled, step=given_a_gradient, first=False)


@pytest.mark.parametrize("kind", ["peers", "peers tiers"])
@pytest.mark.parametrize(
    "loop", [scales_differ, another_one_scales, scaled_in_pieces, lazily, thrown_away, cut, given]
)
def test_gradients_have_one_mean_whatever_scale_is_in_them(
    pool: WorkerPool, kind: str, loop: Callable[..., list[list[Tensor]]]
) -> None:
    right = loop(None)
    for worker in run_at(pool, kind, loop):
        for got, expected in zip(worker, right, strict=True):
            for mine, its in zip(got, expected, strict=True):
                assert torch.allclose(mine, its, rtol=1e-6, atol=1e-9)


def uses_a_dropped_one(session: atoll.Session) -> None:
    loop = Loop(session)
    loop.backward()
    held = loop.parameters[0].grad
    loop.optimizer.zero_grad()
    assert held is not None
    held.norm()


@pytest.mark.parametrize("kind", ["peers", "peers tiers"])
def test_a_gradient_that_was_dropped_unread_is_refused(pool: WorkerPool, kind: str) -> None:
    with pytest.raises(JobFailedError, match=r"use p\.grad, or clone it, before"):
        run_at(pool, kind, uses_a_dropped_one)


def reads_cached(session: atoll.Session | None) -> list[Tensor]:
    """The script takes its list of gradients once, and keeps them by zero_grad(set_to_none=False)."""
    loop, found = Loop(session), []
    loop.backward()
    gradients = [p.grad for p in loop.parameters if p.grad is not None]
    for loop.step in range(1, 4):
        loop.optimizer.step()
        loop.optimizer.zero_grad(set_to_none=False)
        loop.backward()
        found.append(nn.utils.get_total_norm(gradients))
    return found


def test_gradients_may_be_kept_from_step_to_step(pool: WorkerPool) -> None:
    right = reads_cached(None)
    for worker in run_at(pool, "peers", reads_cached):
        for got, expected in zip(worker, right, strict=True):
            assert torch.allclose(got, expected, rtol=1e-9, atol=1e-12)


def writes_kept_views(session: atoll.Session, *, reads: bool) -> None:
    loop = Loop(session)
    loop.backward()
    views = [p.grad.view(-1) for p in loop.parameters if p.grad is not None]
    loop.optimizer.step()
    loop.optimizer.zero_grad(set_to_none=False)
    loop.backward()
    for view in views:
        view.mul_(0.5)
    if reads:
        loop.norm()
    loop.optimizer.step()


@pytest.mark.parametrize("reads", [False, True])
def test_a_change_past_the_gradient_is_refused(pool: WorkerPool, reads: bool) -> None:
    line = r"\d+\.\w+\.grad was changed after its backward through another tensor over its memory"
    with pytest.raises(JobFailedError, match=line):
        run_at(pool, "peers", functools.partial(writes_kept_views, reads=reads))


def one_device_reads(session: atoll.Session, reader: int) -> None:
    loop = Loop(session)
    loop.backward()
    if session.rank == reader:
        loop.norm()
    loop.optimizer.step()
    session.barrier()


@pytest.mark.check  # the devices wait for one another till the deadline
@pytest.mark.parametrize("reader", [0, 1])
def test_a_device_that_reads_alone_is_told_so(pool: WorkerPool, reader: int) -> None:
    sync = Sync(timeout="60s", stale_max=0)
    config = Config(run=Run(strategy="peers"), sync=sync, groups=Groups(count=2))
    line = r"in a use of p\.grad, and worker \d, of its node, in .*use p\.grad on all of a node's workers"
    with pytest.raises(JobFailedError, match=line):
        run_with(pool, config, one_device_reads, reader, world=4)


def clips_its_own(session: atoll.Session) -> list[str]:
    loop, lines = Loop(session), list[str]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session._records._notices, "warn", lines.append)
        for loop.step in range(2):
            loop.backward()
            loop.clip(0.01)
            loop.optimizer.step()
            loop.optimizer.zero_grad()
        session.barrier()
    return lines


def test_where_there_is_no_mean_the_first_change_is_told(pool: WorkerPool) -> None:
    said = [line for lines in run_at(pool, "peers stale", clips_its_own) for line in lines]
    lines = [line for line in said if "with sync.stale_max above 0" in line]
    assert len(lines) == 1
    assert "torch.nn.utils.clip_grad_norm_ (test_gradients_used.py:" in lines[0]
    assert "set sync.stale_max to 0 for the mean in p.grad, or call session.clip_grad_norm_" in lines[0]
