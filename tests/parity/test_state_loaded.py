"""`optimizer.load_state_dict` in a session: the loaded state is what the next step is made with, wherever it
lies."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from kinds import check_equal
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer

import atoll
from atoll.core.errors import UserError
from support.pool import JobFailedError, WorkerPool
from support.runs import KINDS, PACES, model, run_at, run_with

pytestmark = pytest.mark.sampled

WORLD, STEPS, AFTER = 2, 6, 3
TOGETHER = ("server", "ps-hra", "server tiers", "peers", "peers tiers")
APART = ("asp", "ssp", "ps-hra asp", "peers stale")  # workers at their own pace


def adamw(net: nn.Module, lr: float = 0.01) -> list[Optimizer]:
    last = list(net.parameters())[-2:]
    others = list(net.parameters())[:-2]
    return [AdamW([{"params": others}, {"params": last, "betas": (0.5, 0.9)}], lr=lr)]


def momentum(net: nn.Module, lr: float = 0.1) -> list[Optimizer]:
    return [SGD(net.parameters(), lr=lr, momentum=0.9)]


def adafactor(net: nn.Module, lr: float = 0.05) -> list[Optimizer]:
    return [Adafactor(net.parameters(), lr=lr)]


def two(net: nn.Module, lr: float = 0.02) -> list[Optimizer]:
    matrices = [p for p in net.parameters() if p.dim() == 2]
    return [Muon(matrices, lr=lr), AdamW([p for p in net.parameters() if p.dim() != 2], lr=lr)]


MAKES: dict[str, Callable[..., list[Optimizer]]] = {
    "AdamW": adamw,
    "momentum": momentum,
    "Adafactor": adafactor,
    "Muon and AdamW": two,
}


def batch(rank: int, step: int) -> Tensor:
    made = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 32, dtype=torch.float64, generator=made)


def values(net: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def loop(net: nn.Module, optimizers: list[Optimizer], ranks: list[int], steps: range) -> list[list[Tensor]]:
    seen = []
    for step in steps:
        for rank in ranks:
            (net(batch(rank, step)).square().mean() / len(ranks)).backward()
        for each in optimizers:
            each.step()
            each.zero_grad()
        seen.append(values(net))
    return seen


@functools.cache
def saved(name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What another run, of plain torch, has saved: with another learning rate."""
    net = model(seed=1)
    optimizers = MAKES[name](net, lr=0.003)
    loop(net, optimizers, [5], range(4))
    return copy.deepcopy((net.state_dict(), [each.state_dict() for each in optimizers]))


def goes_on(net: nn.Module, optimizers: list[Optimizer], ranks: list[int], how: str, name: str) -> list[Any]:
    """Load at the start what another run has saved, and in mid-run what this one had after two steps."""
    held, states = saved(name)
    if how != "state alone":
        net.load_state_dict(held)
    for optimizer, state in zip(optimizers, states, strict=True):
        optimizer.load_state_dict(copy.deepcopy(state))
    seen = loop(net, optimizers, ranks, range(2))
    before = copy.deepcopy((net.state_dict(), [each.state_dict() for each in optimizers]))
    seen += loop(net, optimizers, ranks, range(2, STEPS))
    if how != "state alone":
        net.load_state_dict(before[0])
    for optimizer, state in zip(optimizers, before[1], strict=True):
        optimizer.load_state_dict(state)
    seen += loop(net, optimizers, ranks, range(STEPS, STEPS + AFTER))
    states = copy.deepcopy([each.state_dict() for each in optimizers])
    return [seen, states]


def train(session: atoll.Session, how: str, name: str) -> list[Any]:
    net = model()
    optimizers = MAKES[name](net)
    session.prepare(net, optimizers)
    return goes_on(net, optimizers, [session.rank], how, name)


@functools.cache
def plain(world: int, how: str, name: str) -> list[Any]:
    net = model()
    return goes_on(net, MAKES[name](net), list(range(world)), how, name)


def check(found: list[Any], right: list[Any]) -> None:
    assert len(found[0]) == len(right[0]) == STEPS + AFTER
    for mine, plainly in zip(found[0], right[0], strict=True):
        check_equal(mine, plainly)
    for mine, plainly in zip(found[1], right[1], strict=True):
        assert mine["param_groups"] == plainly["param_groups"]
        assert mine["state"].keys() == plainly["state"].keys()
        for number, state in plainly["state"].items():
            assert mine["state"][number].keys() == state.keys()
            check_equal(
                [torch.as_tensor(mine["state"][number][key]) for key in state],
                [torch.as_tensor(each) for each in state.values()],
            )


@pytest.mark.parametrize("how", ["state alone", "model too"])
@pytest.mark.parametrize("name", ["AdamW", "momentum", "Adafactor"])
@pytest.mark.parametrize("kind", TOGETHER)
def test_each_step_equals_plain_torch(pool: WorkerPool, kind: str, name: str, how: str) -> None:
    for found in run_at(pool, kind, train, how, name, world=WORLD):
        check(found, plain(WORLD, how, name))


@pytest.mark.parametrize("kind", ["server", "server tiers", "ps-hra"])
def test_each_of_several_optimizers_loads_its_own(pool: WorkerPool, kind: str) -> None:
    for found in run_at(pool, kind, train, "model too", "Muon and AdamW", world=WORLD):
        check(found, plain(WORLD, "model too", "Muon and AdamW"))


@pytest.mark.parametrize("how", ["state alone", "model too"])
@pytest.mark.parametrize("tiers", [False, True])
@pytest.mark.parametrize("kind", APART[:3])  # a single node of peers overlays what it has yet to apply
def test_a_single_worker_at_its_own_pace(pool: WorkerPool, kind: str, tiers: bool, how: str) -> None:
    config = {**KINDS, **PACES}[kind]
    if tiers:
        config = msgspec.structs.replace(config, memory=KINDS["tiers"].memory)
    (found,) = run_with(pool, config, train, how, "AdamW", world=1, shards=1)
    check(found, plain(1, how, "AdamW"))


@pytest.mark.parametrize("sync", [{"lazy": True}, {"consistency": "asp", "pipeline": 1}])
def test_parameters_that_come_late_are_taken_first(pool: WorkerPool, sync: dict[str, Any]) -> None:
    (found,) = run_at(pool, "server", train, "state alone", "AdamW", world=1, sync=sync)
    assert len(found[0]) == STEPS + AFTER


def apart(session: atoll.Session, how: str, more: int) -> list[Any]:
    """Make two steps, and `more` on the second worker, load, and tell what all begin from."""
    net = model()
    (optimizer,) = adamw(net)
    session.prepare(net, optimizer)
    loop(net, [optimizer], [session.rank], range(2 + more * session.rank))
    held, (state,) = saved("AdamW")
    if how != "state alone":
        net.load_state_dict(held)
    optimizer.load_state_dict(state)
    begun = [values(net), copy.deepcopy(optimizer.state_dict())]
    session.barrier()  # else the other worker's next steps may be seen
    loop(net, [optimizer], [session.rank], range(3))
    session.barrier()
    return [*begun, values(net)]


@pytest.mark.parametrize("how", ["state alone", "model too"])
@pytest.mark.parametrize("kind", APART)
def test_workers_at_their_own_pace_all_load_at_one_moment(pool: WorkerPool, kind: str, how: str) -> None:
    sync = {"slack": 8} if kind == "ssp" else {}
    more = 0 if kind == "peers stale" else 3
    first, second = run_at(pool, kind, apart, how, more, world=WORLD, sync=sync)
    check_equal(first[0], second[0])
    check_equal(first[2], second[2])
    if how != "state alone":
        check_equal(first[0], list(saved("AdamW")[0].values()))
    for found in (first, second):
        state = saved("AdamW")[1][0]
        assert found[1]["param_groups"] == state["param_groups"]
        for number, of in state["state"].items():
            check_equal([found[1]["state"][number]["exp_avg"]], [of["exp_avg"]])


def leaves_out(net: nn.Module, optimizer: Optimizer, ranks: list[int]) -> list[list[Tensor]]:
    """Leave a step out, as a GradScaler does, and load."""
    seen = loop(net, [optimizer], ranks, range(2))
    state = copy.deepcopy(optimizer.state_dict())
    seen += loop(net, [optimizer], ranks, range(2, 4))
    for rank in ranks:
        net(batch(rank, 4)).square().mean().backward()
    optimizer.zero_grad()
    optimizer.load_state_dict(state)
    return seen + loop(net, [optimizer], ranks, range(5, 7))


def leaves_out_at(session: atoll.Session) -> list[list[Tensor]]:
    net = model()
    (optimizer,) = adamw(net)
    session.prepare(net, optimizer)
    return leaves_out(net, optimizer, [session.rank])


@pytest.mark.parametrize("kind", ["server", "server tiers", "peers"])
def test_after_a_step_that_is_left_out(pool: WorkerPool, kind: str) -> None:
    net = model()
    right = leaves_out(net, adamw(net)[0], list(range(WORLD)))
    for found in run_at(pool, kind, leaves_out_at, world=WORLD):
        for mine, plainly in zip(found, right, strict=True):
            check_equal(mine, plainly)


def loads_none(session: atoll.Session | None, world: int = 1) -> list[list[Tensor]]:
    """Load a state without momenta, as older versions of torch's SGD have saved it."""
    net = model()
    (optimizer,) = momentum(net)
    if session is not None:
        session.prepare(net, optimizer)
    ranks = list(range(world)) if session is None else [session.rank]
    loop(net, [optimizer], ranks, range(2))
    state = copy.deepcopy(optimizer.state_dict())
    state["state"] = {number: {"momentum_buffer": None} for number in state["state"]}
    optimizer.load_state_dict(state)
    return loop(net, [optimizer], ranks, range(2, 5))


@pytest.mark.parametrize("kind", ["server", "server tiers", "peers"])
def test_entries_that_are_none_are_taken_as_missing(pool: WorkerPool, kind: str) -> None:
    right = loads_none(None, WORLD)
    for found in run_at(pool, kind, loads_none, world=WORLD):
        for mine, plainly in zip(found, right, strict=True):
            check_equal(mine, plainly)


# -- what is refused -----------------------------------------------------------------------------------------


def said(load: Callable[[], Any]) -> str:
    try:
        load()
    except (UserError, ValueError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def loads_unlike(session: atoll.Session, what: str) -> list[Any]:
    net = model()
    (optimizer,) = adamw(net)
    session.prepare(net, optimizer)
    loop(net, [optimizer], [session.rank], range(2))
    before = copy.deepcopy(optimizer.state_dict())
    given = copy.deepcopy(before)
    if what == "rates":
        given["param_groups"][0]["lr"] = 0.1 * (1 + session.rank)
    elif what == "state":
        given["state"][0]["exp_avg"].add_(session.rank)
    elif what == "parameters":
        with torch.no_grad():
            next(net.parameters()).add_(0.1 * session.rank)
    elif what == "shape":
        given["state"][0]["exp_avg"] = torch.zeros(3)
    elif what == "key":
        given["state"][1]["other"] = torch.zeros(3)
    elif what == "groups":
        given["param_groups"] = given["param_groups"][:1]
    elif what == "no groups":
        del given["param_groups"]
    elif what == "no group" and session.rank == 1:
        given["param_groups"] = [1, 2]
    elif what == "backward":
        net(batch(session.rank, 2)).square().mean().backward()
    line = said(lambda: optimizer.load_state_dict(given))
    if what == "parameters":
        return [line]
    after = copy.deepcopy(optimizer.state_dict())
    if what == "backward":
        optimizer.zero_grad()
    return [line, before, after, loop(net, [optimizer], [session.rank], range(3, 5))]


LINES = {
    "rates": "UserError: optimizer.load_state_dict: worker 1 loads other param_groups than worker 0; load",
    "state": "UserError: optimizer.load_state_dict: worker 1 loads other state than worker 0; load the same",
    "parameters": "UserError: optimizer.load_state_dict: the script has written other values into parameters",
    "shape": "UserError: optimizer.load_state_dict: 'exp_avg' of the optimizer's parameter 0 is (3,), and",
    "key": "UserError: optimizer.load_state_dict: 'other' of the optimizer's parameter 1 is no state that",
    "groups": "ValueError: loaded state dict has a different number of parameter groups",
    "no groups": "KeyError: 'param_groups'",
    "no group": "optimizer.load_state_dict: it is no state of an optimizer (AttributeError: 'int' object has",
    "backward": "UserError: optimizer.load_state_dict between a backward and optimizer.step(): under",
}


@pytest.mark.parametrize("what", LINES)
@pytest.mark.parametrize("kind", ["server", "peers", "server tiers", "peers tiers"])
def test_what_cannot_be_loaded_is_a_line_and_changes_nothing(pool: WorkerPool, kind: str, what: str) -> None:
    for found in run_at(pool, kind, loads_unlike, what, world=WORLD):
        assert LINES[what] in found[0], found[0]
        assert "\n" not in found[0]
        if what == "parameters":
            continue
        assert found[1]["param_groups"] == found[2]["param_groups"]
        for number, of in found[1]["state"].items():
            check_equal([found[2]["state"][number]["exp_avg"]], [of["exp_avg"]])


def loads_alone(session: atoll.Session) -> None:
    net = model()
    (optimizer,) = adamw(net)
    session.prepare(net, optimizer)
    if session.rank == 0:
        optimizer.load_state_dict(saved("AdamW")[1][0])
    loop(net, [optimizer], [session.rank], range(2))


@pytest.mark.parametrize("kind", ["server", "peers"])
def test_a_load_on_one_worker_alone_says_who_is_where(pool: WorkerPool, kind: str) -> None:
    with pytest.raises(JobFailedError, match=re.escape("worker 0 is in optimizer.load_state_dict (")):
        run_at(pool, kind, loads_alone, world=WORLD)
