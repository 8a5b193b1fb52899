"""Models that change after `session.prepare` under budgets of memory: values and states go from the old tiers
to the new ones."""

from __future__ import annotations

import functools
import gc
import re
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from kinds import check_equal
from test_changed_models import CHANGES, batch
from test_changed_models import check as check_values
from test_changed_models import plain as plain_values
from test_changed_models import train as train_values
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

import atoll
from atoll.core.config import Config, Run, Sync
from atoll.core.errors import UserError
from atoll.core.memory import Memory
from atoll.memory.arena import Arena
from atoll.memory.initialising import InitialisedParameter
from support.pool import JobFailedError, WorkerPool
from support.runs import KINDS, SHARDS, alone, model, run_at, run_with

pytestmark = pytest.mark.sampled

WORLD, STEPS, AT = 2, 6, (2, 4)
CONNECTION = re.compile(r"atoll-members-\d+")  # a thread for each connection that another member has made


def in_two_groups(net: nn.Sequential) -> Optimizer:
    """Adam with two param groups, of which the second is frozen at first."""
    net[2].requires_grad_(False)
    rest = [p for name, p in net.named_parameters() if not name.startswith("2.")]
    return Adam([{"params": rest}, {"params": list(net[2].parameters()), "lr": 0.002}], lr=0.01)


def alter(net: nn.Sequential, optimizer: Optimizer, step: int) -> None:
    """Unfreeze a layer first, then replace the head, whose parameters get a group of their own."""
    if step == AT[0]:
        net[2].requires_grad_(True)
        return
    old = set(net[-1].parameters())
    torch.manual_seed(5)
    net[-1] = nn.Linear(32, 4).double()
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p not in old]
    for parameter in old:
        optimizer.state.pop(parameter, None)
    optimizer.add_param_group({"params": list(net[-1].parameters()), "lr": 0.005})


def seen(net: nn.Sequential, optimizer: Optimizer) -> list[Tensor]:
    """The values and the states of all parameters, in the model's order."""
    states = [optimizer.state[p] for p in net.parameters()]
    values = [p.detach().clone() for p in net.parameters()]
    return values + [each[key].detach().clone() for each in states for key in sorted(each)]


def train(session: atoll.Session, memory: Memory | None = None) -> list[list[Tensor]]:
    net = model()
    optimizer, found = in_two_groups(net), []
    session.prepare(net, optimizer, memory)
    for step in range(STEPS):
        if step in AT:
            alter(net, optimizer, step)
            session.prepare(net, optimizer, memory)
        net(batch(session.rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(seen(net, optimizer))
    return found


@functools.cache
def plain(world: int) -> list[list[Tensor]]:
    net = model()
    optimizer, found = in_two_groups(net), []
    for step in range(STEPS):
        if step in AT:
            alter(net, optimizer, step)
        for rank in range(world):
            (net(batch(rank, step)).square().mean() / world).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(seen(net, optimizer))
    return found


def check(found: list[list[Tensor]], right: list[list[Tensor]]) -> None:
    assert [len(each) for each in found] == [len(each) for each in right]
    for mine, theirs in zip(found, right, strict=True):
        check_equal(mine, theirs)


# Values and states, step by step


@pytest.mark.parametrize("change", CHANGES)
def test_alone_each_change_equals_plain_torch(change: str) -> None:
    check_values(alone(train_values, change, tiers=True), plain_values(1, change))


def test_alone_values_and_states_equal_plain_torch() -> None:
    check(alone(train, tiers=True), plain(1))


def test_from_disk_to_disk(tmp_path: Path) -> None:
    memory = Memory(device="24KiB", host="64KiB", disk=f"{tmp_path}:1MiB", chunk="4096", step="host")
    check(alone(train, memory), plain(1))
    assert not list(tmp_path.iterdir())


class Waves(nn.Module):
    """Layers of complex weights between real ones."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.first, self.last = nn.Linear(32, 24).double(), nn.Linear(24, 4).double()
        turns = [torch.randn(24, 24, dtype=torch.complex128, generator=generator) / 5 for _ in range(4)]
        self.turns = nn.ParameterList(turns)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).to(torch.complex128)
        for turn in self.turns:
            x = x @ turn
        out: Tensor = self.last(x.real + x.imag)
        return out


def train_waves(session: atoll.Session | None, amsgrad: bool, world: int = 1) -> list[list[Tensor]]:
    """Complex weights, and a layer that is unfrozen later; without a session in plain torch, for all."""
    torch.manual_seed(0)
    net = Waves()
    net.last.requires_grad_(False)
    optimizer, found = Adam(net.parameters(), lr=0.01, amsgrad=amsgrad), []
    if session is not None:
        session.prepare(net, optimizer)
    for step in range(STEPS):
        if step == AT[0]:
            net.last.requires_grad_(True)
            if session is not None:
                session.prepare(net, optimizer)
        for rank in range(world) if session is None else [session.rank]:
            (net(batch(rank, step)).square().mean() / (world if session is None else 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(seen(net, optimizer))
    return found


@pytest.mark.parametrize("amsgrad", [False, True])
def test_complex_states_go_on(pool: WorkerPool, amsgrad: bool) -> None:
    check(alone(train_waves, amsgrad, tiers=True), train_waves(None, amsgrad))
    for found in run_at(pool, "tiers", train_waves, amsgrad, world=WORLD):
        check(found, train_waves(None, amsgrad, WORLD))


@pytest.mark.parametrize("sharding", ["symmetric", "asymmetric"])
def test_members_values_and_states_equal_plain_torch(pool: WorkerPool, sharding: str) -> None:
    config = KINDS["tiers"]
    config = msgspec.structs.replace(config, memory=msgspec.structs.replace(config.memory, sharding=sharding))
    for found in run_with(pool, config, train, world=WORLD):
        check(found, plain(WORLD))


@pytest.mark.parametrize("kind", ["server tiers"])
def test_with_a_server_values_and_states_equal_plain_torch(pool: WorkerPool, kind: str) -> None:
    for found in run_at(pool, kind, trained_elsewhere, world=WORLD):
        check(found, plain(WORLD))


def trained_elsewhere(session: atoll.Session) -> list[list[Tensor]]:
    """Train where shards step: states are read by `state_dict`, which brings them here."""
    net = model()
    optimizer, found = in_two_groups(net), []
    session.prepare(net, optimizer)
    for step in range(STEPS):
        if step in AT:
            alter(net, optimizer, step)
            session.prepare(net, optimizer)
        net(batch(session.rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.state_dict()
        found.append(seen(net, optimizer))
        session.barrier()
    return found


@pytest.mark.parametrize("tiers", [(False, True), (True, False)])
def test_budgets_may_come_or_go_with_the_change(tiers: tuple[bool, bool]) -> None:
    def script(session: atoll.Session) -> list[list[Tensor]]:
        budgets = [KINDS["tiers"].memory if each else None for each in tiers]
        net = model()
        optimizer, found = in_two_groups(net), []
        session.prepare(net, optimizer, budgets[0])
        for step in range(STEPS):
            if step in AT:
                alter(net, optimizer, step)
                session.prepare(net, optimizer, budgets[1])
            net(batch(0, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(seen(net, optimizer))
        return found

    check(alone(script), plain(1))


# A checkpoint


def saves(session: atoll.Session, path: Path) -> list[Tensor]:
    net = model()
    optimizer = in_two_groups(net)
    session.prepare(net, optimizer)
    for step in range(STEPS):
        if step in AT:
            alter(net, optimizer, step)
            session.prepare(net, optimizer)
        if step == STEPS - 1:
            session.save(path)
        net(batch(session.rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in net.parameters()]


def loads(session: atoll.Session, path: Path) -> list[Tensor]:
    net = model(seed=3)
    optimizer = in_two_groups(net)
    for step in AT:
        alter(net, optimizer, step)
    session.prepare(net, optimizer)
    session.load(path)
    assert session.iteration == STEPS - 1
    net(batch(session.rank, STEPS - 1)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("kind", ["tiers", "server tiers"])
def test_a_new_run_goes_on_from_a_save_after_the_change(pool: WorkerPool, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    saved = run_at(pool, kind, saves, path, world=WORLD)
    loaded = run_at(pool, kind, loads, path, world=WORLD)
    right = plain(WORLD)[-1]
    for found in (*saved, *loaded):
        check_equal(found, right[: len(found)])


# Budgets, and what is left behind


def files() -> int:
    """The number of files of this process that have lost their name."""
    links = []
    for each in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            links.append(each.readlink())
    return sum(str(link).endswith("(deleted)") for link in links)


def left_behind(net: nn.Module, optimizer: Optimizer) -> list[int]:
    """The numbers of hooks, threads and files that a prepared model has."""
    hooks = [
        len(held)
        for part in net.modules()
        for held in (
            part._forward_pre_hooks,
            part._forward_hooks,
            part._state_dict_hooks,
            part._state_dict_pre_hooks,
            part._load_state_dict_pre_hooks,
            part._load_state_dict_post_hooks,
        )
    ]
    steps = [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
    threads = [name for name in thread_names() if not CONNECTION.fullmatch(name)]
    return [*hooks, *map(len, steps), len(threads), files()]


def thread_names() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("atoll")]


def connections_end(most: int) -> bool:
    """Wait until at most so many threads serve other members' connections, which end by themselves."""
    deadline = time.monotonic() + 20
    while sum(map(bool, map(CONNECTION.fullmatch, thread_names()))) > most:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def again_and_again(session: atoll.Session, memory: Memory | None) -> list[Any]:
    """Prepare one model many times; return what is left behind after the first time and at the end, and how
    many arenas live."""
    arenas: list[weakref.ref[Arena]] = []
    made = Arena.__init__

    def note(self: Arena, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        arenas.append(weakref.ref(self))

    Arena.__init__ = note  # type: ignore[method-assign]
    try:
        net = model()
        optimizer = SGD(net.parameters(), lr=0.01, momentum=0.9)
        session.prepare(net, optimizer, memory)
        first = left_behind(net, optimizer)
        for step in range(4):
            net(batch(session.rank, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            session.prepare(net, optimizer, memory)
        last = left_behind(net, optimizer)
        assert connections_end(session.world - 1)
        held = sum(each._memory.nbytes for made in arenas if (each := made()) is not None)
        one = sum(each._memory.nbytes for made in arenas[-2:] if (each := made()) is not None)
    finally:
        Arena.__init__ = made  # type: ignore[method-assign]
    return [first, last, held, one]


def test_alone_nothing_of_old_tiers_is_left_behind(tmp_path: Path) -> None:
    memory = Memory(device="24KiB", host="64KiB", disk=f"{tmp_path}:1MiB", chunk="4096", step="host")
    first, last, held, one = alone(again_and_again, memory)
    assert first == last
    assert held == one


def test_members_leave_nothing_of_old_tiers_behind(pool: WorkerPool) -> None:
    for first, last, _, _ in run_at(pool, "tiers", again_and_again, None, world=WORLD):
        assert first == last


# What is refused, or lost


def keeps_gradients(session: atoll.Session) -> list[Tensor]:
    """Change the model while the gradients of a step are still there; the next backward adds to them."""
    net = model()
    optimizer = SGD(net.parameters(), lr=0.1)
    session.prepare(net, optimizer)
    net(batch(session.rank, 0)).square().mean().backward()
    optimizer.step()
    shown = net[0].weight.grad
    session.prepare(net, optimizer)
    if session.world == 1:  # other members' parts of it are gone
        assert torch.equal(shown, net[0].weight.grad)
    net(batch(session.rank, 1)).square().mean().backward()
    optimizer.step()
    return [p.detach().clone() for p in net.parameters()]


@functools.cache
def with_gradients(world: int) -> list[Tensor]:
    net = model()
    optimizer = SGD(net.parameters(), lr=0.1)
    for step in range(2):
        for rank in range(world):
            (net(batch(rank, step)).square().mean() / world).backward()
        optimizer.step()
    return [p.detach().clone() for p in net.parameters()]


def test_alone_gradients_go_on() -> None:
    check_equal(alone(keeps_gradients, tiers=True), with_gradients(1))


@pytest.mark.parametrize("kind", ["tiers", "server tiers"])
def test_gradients_of_members_go_on(pool: WorkerPool, kind: str) -> None:
    for found in run_at(pool, kind, keeps_gradients, world=WORLD):
        check_equal(found, with_gradients(WORLD))


def unequal(session: atoll.Session, make: str) -> None:
    """Only worker 0 makes the change."""
    net = model()
    optimizer = SGD(net.parameters(), lr=0.1, momentum=0.9)
    session.prepare(net, optimizer)
    net(batch(session.rank, 0)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if make == "another head" and session.rank == 0:
        net[-1] = nn.Linear(32, 4).double()
        optimizer = SGD(net.parameters(), lr=0.1, momentum=0.9)
    if make == "no call" and session.rank == 1:
        net(batch(session.rank, 1)).square().mean().backward()
        optimizer.step()
        return
    session.prepare(net, optimizer)


def said_of(pool: WorkerPool, kind: str, script: Callable[..., Any], *arguments: Any) -> list[str]:
    with pytest.raises(JobFailedError) as caught:
        run_at(pool, kind, script, *arguments, world=WORLD)
    return [each.message for each in caught.value.failures.values()]


@pytest.mark.parametrize("kind", ["ring", "tiers"])
def test_a_head_that_one_worker_has_not_replaced_is_named(pool: WorkerPool, kind: str) -> None:
    said = said_of(pool, kind, unequal, "another head")
    assert any("new in the model on worker 0" in line and "on worker 1" in line for line in said)
    assert all("'10.weight'" in line for line in said if "differ" in line)


@pytest.mark.parametrize("kind", ["ring", "tiers"])
def test_a_worker_that_does_not_prepare_again_is_named(pool: WorkerPool, kind: str) -> None:
    said = said_of(pool, kind, unequal, "no call")
    assert any("worker 0" in line and "session.prepare" in line and "worker 1" in line for line in said)


def test_the_state_of_an_optimizer_that_was_left_is_lost_with_a_line() -> None:
    def script(session: atoll.Session) -> None:
        net = model()
        old = SGD(net.parameters(), lr=0.1, momentum=0.9)
        session.prepare(net, old)
        net(batch(0, 0)).square().mean().backward()
        old.step()
        old.zero_grad()
        session.prepare(net, SGD(net.parameters(), lr=0.1))
        with pytest.raises(UserError, match="prepare the model with this one too"):
            old.state_dict()

    alone(script, tiers=True)


def test_a_part_that_has_left_the_model_keeps_its_values() -> None:
    def script(session: atoll.Session) -> None:
        net = model()
        optimizer = SGD(net.parameters(), lr=0.1)
        session.prepare(net, optimizer)
        net(batch(0, 0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        head, values = net[-1], [p.detach().clone() for p in net[-1].parameters()]
        net[-1] = nn.Linear(32, 4).double()
        optimizer = SGD(net.parameters(), lr=0.1)
        session.prepare(net, optimizer)
        assert all(isinstance(p, InitialisedParameter) for p in head.parameters())
        assert all(map(torch.equal, head.parameters(), values))
        assert head(torch.zeros(1, 32).double()).shape == (1, 4)
        net[-1] = head  # and it comes back
        optimizer = SGD(net.parameters(), lr=0.1)
        session.prepare(net, optimizer)
        assert all(map(torch.equal, net[-1].parameters(), values))

    alone(script, tiers=True)


def prepared(session: atoll.Session, net: nn.Sequential) -> weakref.ref[nn.Parameter]:
    """Prepare the model with an optimizer that ends with this call; return its first parameter."""
    session.prepare(net, SGD(net.parameters(), lr=0.1))
    return weakref.ref(next(net.parameters()))


@pytest.mark.parametrize("tiers", [False, True])
def test_a_part_that_has_left_the_model_and_the_script_is_gone(tiers: bool) -> None:
    def script(session: atoll.Session) -> None:
        net = model()
        gone = prepared(session, net)
        net[0] = nn.Linear(32, 32).double()
        prepared(session, net)
        gc.collect()
        assert gone() is None

    alone(script, tiers=tiers)


def test_a_graph_made_before_the_change_is_refused() -> None:
    def script(session: atoll.Session) -> None:
        net = model()
        optimizer = SGD(net.parameters(), lr=0.1)
        session.prepare(net, optimizer)
        loss = net(batch(0, 0)).square().mean()
        session.prepare(net, optimizer)
        with pytest.raises(UserError, match="before session.prepare was called again"):
            loss.backward()

    alone(script, tiers=True)


def served(consistency: str) -> tuple[Config, int]:
    config = Config(run=Run(strategy="server"), sync=Sync(timeout="60s", consistency=consistency))
    return msgspec.structs.replace(config, memory=KINDS["tiers"].memory), SHARDS["server tiers"]


@pytest.mark.parametrize("consistency", ["ssp", "asp"])
def test_a_worker_at_its_own_pace_goes_on_too(pool: WorkerPool, consistency: str) -> None:
    config, shards = served(consistency)
    (found,) = run_with(pool, config, train_values, "LoRA", world=1, shards=shards)
    check_values(found, plain_values(1, "LoRA"))
