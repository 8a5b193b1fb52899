"""Models that change after `session.prepare` while workers are in groups (strategy ps-hra): under bsp each
step is that of plain PyTorch, under asp from the moment on at which the group is the run's only contributor.
"""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from kinds import check_equal
from test_changed_in_tiers import alter, in_two_groups, seen
from test_changed_models import CHANGES, batch, first_frozen, unfreeze
from test_groups_parity import score_for
from torch import Tensor

import atoll
from atoll.core import points
from atoll.core.config import Chunks, Config, Consistency, Groups, Run, Sync
from atoll.core.memory import Memory
from atoll.groups.grouping import Grouping
from atoll.hub.planner import GroupingSettings
from atoll.train.sync.server import Server
from atoll.train.sync.uplink import Wanted
from support.parity import ALONE, await_groups
from support.pool import JobFailedError, WorkerPool
from support.runs import KINDS, model, run_with

pytestmark = pytest.mark.sampled

PAIRS = [[0, 1], [2, 3]]
# Once while all workers are alone, and at the step after which they are in groups; then two times in groups.
STEPS, AT = ALONE + 6, (ALONE + 2, ALONE + 4)
MOST = 200  # steps until a group is the only contributor
BUDGET = KINDS["server tiers"].memory


def config(
    consistency: Consistency, uplink: Wanted = "leader", *, tiers: bool = False, **sync: Any
) -> Config:
    return Config(
        run=Run(strategy="ps-hra"),
        chunks=Chunks(size="8KiB"),
        sync=Sync(timeout="60s", consistency=consistency, uplink=uplink, **sync),
        groups=Groups(probe=ALONE - 1),
        memory=BUDGET if tiers else Memory(),
    )


def run(
    pool: WorkerPool, config: Config, script: Any, *arguments: Any, groups: list[list[int]] = PAIRS
) -> list[Any]:
    """Run the script on workers of which the hub makes these groups."""
    settings = GroupingSettings(
        len(groups),
        by="joint",
        consistency=config.sync.consistency,
        regroup=False,
        score_for=score_for(Grouping(groups)),
    )
    world = sum(map(len, groups))
    return run_with(pool, config, script, *arguments, world=world, shards=2, grouping=settings)


def in_group(session: atoll.Session) -> bool:
    regrouping = session._runtime.regrouping
    assert regrouping is not None
    return regrouping.contributor != session.rank


# bsp: each step


def train(session: atoll.Session, change: str, at: tuple[int, ...]) -> list[list[Tensor]]:
    net = model()
    make, change_it = CHANGES[change]
    optimizer, found = make(net), []
    session.prepare(net, optimizer)
    for step in range(STEPS):
        await_groups(session, step)
        if step in at:
            optimizer = change_it(net, optimizer)
            assert session.prepare(net, optimizer) == (net, optimizer)
        net(batch(session.rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append([p.detach().clone() for p in net.parameters()])
    assert in_group(session)
    assert session.iteration == STEPS
    assert session.group.size == 2
    assert session.group.count == 2
    return found


@functools.cache
def plain(world: int, change: str, at: tuple[int, ...]) -> list[list[Tensor]]:
    net = model()
    make, change_it = CHANGES[change]
    optimizer, found = make(net), []
    for step in range(STEPS):
        if step in at:
            optimizer = change_it(net, optimizer)
        for rank in range(world):
            (net(batch(rank, step)).square().mean() / world).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append([p.detach().clone() for p in net.parameters()])
    return found


def check(found: list[list[Tensor]], right: list[list[Tensor]]) -> None:
    assert [len(each) for each in found] == [len(each) for each in right]
    for mine, theirs in zip(found, right, strict=True):
        check_equal(mine, theirs)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    ("uplink", "tiers"), [("leader", False), ("members", False), ("members", True), ("leader", True)]
)
def test_each_step_of_two_groups_is_that_of_one_process(
    pool: WorkerPool, change: str, uplink: Wanted, tiers: bool
) -> None:
    found = run(pool, config("bsp", uplink, tiers=tiers), train, change, AT)
    for each in found:
        check(each, plain(4, change, AT))


@pytest.mark.parametrize("at", [(2, ALONE + 1), (ALONE, ALONE + 2), (ALONE - 1, ALONE)])
def test_a_change_alone_and_one_as_the_groups_have_come_together(
    pool: WorkerPool, at: tuple[int, ...]
) -> None:
    for each in run(pool, config("bsp", "auto"), train, "LoRA", at):
        check(each, plain(4, "LoRA", at))


# States, and a checkpoint


def train_states(session: atoll.Session, save: Path | None = None) -> list[list[Tensor]]:
    """Adam with param groups; states are read by `state_dict`, which brings them here."""
    net = model()
    optimizer, found = in_two_groups(net), []
    session.prepare(net, optimizer)
    for step in range(STEPS):
        await_groups(session, step)
        if step in AT:
            alter(net, optimizer, 2 if step == AT[0] else 4)
            session.prepare(net, optimizer)
        if step == STEPS - 1 and save is not None:
            session.save(save)
        net(batch(session.rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.state_dict()
        found.append(seen(net, optimizer))
        session.barrier()
    assert in_group(session)
    return found


@functools.cache
def plain_states(world: int) -> list[list[Tensor]]:
    net = model()
    optimizer, found = in_two_groups(net), []
    for step in range(STEPS):
        if step in AT:
            alter(net, optimizer, 2 if step == AT[0] else 4)
        for rank in range(world):
            (net(batch(rank, step)).square().mean() / world).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(seen(net, optimizer))
    return found


def resumed(session: atoll.Session, path: Path) -> list[Tensor]:
    net = model(seed=3)
    optimizer = in_two_groups(net)
    for step in (2, 4):
        alter(net, optimizer, step)
    session.prepare(net, optimizer)
    session.load(path)
    assert session.iteration == STEPS - 1
    net(batch(session.rank, STEPS - 1)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.state_dict()
    found = seen(net, optimizer)
    session.barrier()
    return found


@pytest.mark.parametrize("tiers", [False, True])
def test_kept_states_go_on_and_are_saved(pool: WorkerPool, tiers: bool, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    for each in run(pool, config("bsp", tiers=tiers), train_states, path):
        check(each, plain_states(4))
    for each in run(pool, config("bsp", tiers=tiers), resumed, path):
        check_equal(each, plain_states(4)[-1])


# asp


def train_alone(session: atoll.Session, change: str) -> tuple[list[Tensor], Any, list[list[Tensor]]]:
    """Train until this group is the only contributor; then change the model two times."""
    net = model()
    make, change_it = CHANGES[change]
    optimizer, found = make(net), []
    session.prepare(net, optimizer)
    before: list[Tensor] = []
    state: Any = None
    begun = -1
    for step in range(MOST):
        await_groups(session, step)
        reducer, regrouping = session._state.prepared[0].reducer, session._runtime.regrouping
        assert isinstance(reducer, Server)
        assert regrouping is not None
        together = session.group.size == session.world
        if begun < 0 and together and reducer.contributors == [regrouping.contributor]:
            begun, before = step, [p.detach().clone() for p in net.parameters()]
            state = copy.deepcopy(optimizer.state_dict())
            net.zero_grad()  # of a parameter that no optimizer steps yet
        at = step - begun
        if begun >= 0 and at in (1, 3):
            optimizer = change_it(net, optimizer)
            session.prepare(net, optimizer)
        net(batch(session.rank, at if begun >= 0 else 0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if begun >= 0:
            found.append([p.detach().clone() for p in net.parameters()])
            if len(found) == 5:
                break
    return before, state, found


def plain_from(before: list[Tensor], state: Any, world: int, change: str) -> list[list[Tensor]]:
    net = model()
    make, change_it = CHANGES[change]
    with torch.no_grad():
        for parameter, value in zip(net.parameters(), before, strict=True):
            parameter.copy_(value)
    optimizer, found = make(net), []
    optimizer.load_state_dict(state)
    for step in range(5):
        if step in (1, 3):
            optimizer = change_it(net, optimizer)
        for rank in range(world):
            (net(batch(rank, step)).square().mean() / world).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append([p.detach().clone() for p in net.parameters()])
    return found


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("uplink", "tiers"), [("leader", False), ("members", True)])
def test_under_asp_the_only_group_trains_as_one_process(
    pool: WorkerPool, change: str, uplink: Wanted, tiers: bool
) -> None:
    found = run(pool, config("asp", uplink, tiers=tiers), train_alone, change, groups=[[0, 1]])
    right = plain_from(*found[0][:2], 2, change)
    for _, _, each in found:
        check(each, right)


def at_own_paces(session: atoll.Session) -> tuple[bool, list[Tensor]]:
    """Groups make unequal numbers of steps before each change, and take the newest values at its end."""
    net = model()
    optimizer = first_frozen(net)
    session.prepare(net, optimizer)
    mine = 3 * (session.rank // 2)
    found = [net[0].weight.detach().clone()]
    for step in range(ALONE + 3 + mine):
        await_groups(session, step)
        net(batch(session.rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for _ in range(2):
        session.prepare(net, unfreeze(net, optimizer))
        found += [p.detach().clone() for p in net.parameters()]
        for step in range(2 + mine):
            net(batch(session.rank, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    session.barrier()
    return in_group(session), [*found, *(p.detach().clone() for p in net.parameters())]


@pytest.mark.parametrize("consistency", ["asp", "ssp"])
@pytest.mark.parametrize(("pipeline", "tiers"), [(0, False), (1, False), (0, True)])
def test_groups_at_unequal_iterations_change_together(
    pool: WorkerPool, consistency: Consistency, pipeline: int, tiers: bool
) -> None:
    settings = config(consistency, tiers=tiers, pipeline=pipeline)
    (placed, first), *others = run(pool, settings, at_own_paces)
    assert placed
    assert all(bool(value.isfinite().all()) for value in first)
    for there, each in others:
        assert there
        assert all(map(torch.equal, first, each))
    begun = first[1 : 1 + len(list(model().parameters()))]
    assert torch.equal(begun[0], first[0])  # frozen until the change
    assert not torch.equal(first[-len(begun)], begun[0])


# Groups that are made while workers prepare the changed model


def called_while_preparing(session: atoll.Session, when: str) -> tuple[bool, list[Tensor]]:
    """The hub's call to groups comes while this worker waits in session.prepare for others, or is in the
    midst of it, without a model at the shards."""
    regrouping = session._runtime.regrouping
    assert regrouping is not None
    waited = []

    def until_called(point: str, _iteration: int) -> None:
        if point == "change.left" and when == "in the midst" and not waited:
            waited.append(point)
            await_groups(session, ALONE)

    points.install(until_called)
    try:
        net = model()
        optimizer = first_frozen(net)
        session.prepare(net, optimizer)
        goes_on = when == "waiting" and session.rank % 2
        for step in range(ALONE + 3 if goes_on else ALONE):
            await_groups(session, step)
            net(batch(session.rank, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        session.prepare(net, unfreeze(net, optimizer))
        step = 0
        while not in_group(session) or step < ALONE:
            assert step < 2000
            net(batch(session.rank, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
        session.barrier()
    finally:
        points.install(None)
    assert waited or when == "waiting"
    return session.group.size == 2, [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("when", ["waiting", "in the midst"])
def test_groups_come_together_around_a_change(pool: WorkerPool, when: str) -> None:
    """asp: each group forms when its members have asked, also from within a call of all."""
    first, *others = run(pool, config("asp"), called_while_preparing, when)
    for placed, values in (first, *others):
        assert placed
        assert all(map(torch.equal, first[1], values))


# What is refused


def unequal(session: atoll.Session, what: str) -> None:
    """In groups, only worker 1 makes the change, or it alone does not prepare it."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    session.prepare(net, optimizer)
    for step in range(ALONE + 2):
        await_groups(session, step)
        net(batch(session.rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert in_group(session)
    if what == "another head" and session.rank == 1:
        net[-1] = torch.nn.Linear(32, 4).double()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    if what == "no call" and session.rank == 1:
        net(batch(session.rank, 1)).square().mean().backward()
        optimizer.step()
        return
    session.prepare(net, optimizer)


@pytest.mark.parametrize("consistency", ["bsp", "asp"])
@pytest.mark.parametrize("what", ["another head", "no call"])
def test_a_change_that_one_worker_makes_otherwise_is_named(
    pool: WorkerPool, consistency: Consistency, what: str
) -> None:
    with pytest.raises(JobFailedError) as caught:
        run(pool, config(consistency), unequal, what)
    said = [each.message for each in caught.value.failures.values()]
    if what == "another head":
        assert all("'10.weight'" in line and "worker 1" in line for line in said if "differ" in line), said
        assert any("new in the model" in line for line in said), said
    else:
        assert any("session.prepare" in line and "worker 1" in line for line in said), said
