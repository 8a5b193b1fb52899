"""A group's members whose models lie in tiers (strategy ps-hra) train as plain PyTorch does on their batches
together: under asp from the moment on at which the group is the run's only contributor, under bsp always, and
then, to the bit, as groups without budgets."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
import torch
from test_groups_parity import score_for
from test_members_parity import TOLERANCE, Case, make, share_of
from torch import Tensor

import atoll
from atoll.core.config import Chunks, Config, Consistency, Groups, Run, Sync
from atoll.core.memory import Memory
from atoll.groups.grouping import Grouping
from atoll.hub.planner import GroupingSettings
from atoll.memory.exchanged import Exchanged
from atoll.train.api.place import Place
from atoll.train.sync.server import Server
from atoll.train.sync.uplink import Wanted
from support.families import loss_of
from support.parity import ALONE, MAX_NORM, await_groups
from support.pool import WorkerPool
from support.served import ServedRun, served_worker
from support.tight import memory, poisoned

pytestmark = pytest.mark.check

STEPS, MOST = 4, 200  # that are compared; until the group is alone
# bsp: once alone and once in groups, what the script makes of a mean; and a step that it leaves out.
EDITED, LEFT_OUT = (1, ALONE + 3), ALONE + 2


@dataclass
class Seen:
    """What a worker had when the group was alone, at which of its steps, and what it had after."""

    before: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    after: list[dict[str, Tensor]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


def values(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def config(consistency: Consistency, uplink: Wanted) -> Config:
    return Config(
        run=Run(strategy="ps-hra"),
        chunks=Chunks(size="10000"),
        sync=Sync(timeout="60s", consistency=consistency, uplink=uplink),
        groups=Groups(probe=ALONE - 1),
    )


def budgets(model: torch.nn.Module, case: Case) -> Memory:
    return memory(model, case.share, step="auto")


def train(place: Place, case: Case, address: str, uplink: Wanted) -> Seen:
    """What a user writes; batches are numbered anew from the moment on that is compared."""
    model, optimizer = make(case)
    seen, begun = Seen(), -1
    with (
        poisoned(),
        served_worker(address, place.rank),
        atoll.join(config("asp", uplink)) as session,
    ):
        session.prepare(model, optimizer, memory=budgets(model, case))
        (tiers,) = session._state.tiers
        assert isinstance(tiers.fitted, Exchanged)
        for step in range(MOST):
            await_groups(session, step)
            reducer = session._state.prepared[0].reducer
            assert isinstance(reducer, Server)
            assert reducer.uplink.kind == ("members" if uplink == "members" else "leader")
            assert session._runtime.regrouping is not None
            alone = reducer.contributors == [session._runtime.regrouping.contributor]
            if begun < 0 and session.group.size == place.world and alone:
                chosen = "members share a machine's link" if uplink == "auto" else "sync.uplink"
                assert reducer.uplink.reason == chosen
                begun, seen.before = step, values(model)
                seen.state = copy.deepcopy(optimizer.state_dict())
            for micro in range(case.accumulation):
                inputs, targets = share_of(case, session.rank, step - begun if begun >= 0 else 0, micro)
                session.weight(len(inputs))
                loss = loss_of(model(inputs), targets) / case.accumulation
                if micro < case.accumulation - 1:
                    with session.no_sync():
                        loss.backward()
                else:
                    loss.backward()
            if case.clip:
                norm = session.clip_grad_norm_(MAX_NORM).item()
                seen.norms += [norm] if begun >= 0 else []
            optimizer.step()
            optimizer.zero_grad()
            if begun >= 0:
                seen.after.append(values(model))
                if len(seen.after) == STEPS:
                    break
        figures = tiers.fitted.stats()
        assert 0 < figures.device_peak <= figures.device_budget
        assert figures.moves["to_device"] > 0
    return seen


def edit(model: torch.nn.Module, step: int) -> None:
    """Some gradients are changed in place, and one is taken away."""
    if step in EDITED:
        gradients = [parameter for parameter in model.parameters() if parameter.grad is not None]
        for parameter in gradients[::3]:
            parameter.grad.mul_(0.5)  # type: ignore[union-attr]
        gradients[1].grad = None


def within_backward(session: atoll.Session, tiered: bool) -> AbstractContextManager[Any]:
    """No value changes here: who would write one fails."""
    return patch.object(session._state.tiers[0].fitted, "write_values", None) if tiered else nullcontext()


def train_mean(place: Place, case: Case, address: str, uplink: Wanted, tiered: bool) -> Seen:
    """What a user writes, under bsp."""
    model, optimizer = make(case)
    seen = Seen()
    with (
        poisoned(),
        served_worker(address, place.rank),
        atoll.join(config("bsp", uplink)) as session,
    ):
        session.prepare(model, optimizer, memory=budgets(model, case) if tiered else None)
        for step in range(ALONE + STEPS):
            await_groups(session, step)
            for micro in range(case.accumulation):
                inputs, targets = share_of(case, session.rank, step, micro)
                last = micro == case.accumulation - 1
                session.weight(len(inputs))
                with within_backward(session, tiered), nullcontext() if last else session.no_sync():
                    (loss_of(model(inputs), targets) / case.accumulation).backward()
            edit(model, step)
            if case.clip:
                seen.norms.append(session.clip_grad_norm_(MAX_NORM).item())
            if step != LEFT_OUT:
                optimizer.step()
            optimizer.zero_grad()
            seen.after.append(values(model))
        assert session._runtime.regrouping is not None
        assert session._runtime.regrouping.contributor != place.rank, "it has not moved to a group"
        if tiered:
            (tiers,) = session._state.tiers
            assert isinstance(tiers.fitted, Exchanged)
            figures = tiers.fitted.stats()
            assert 0 < figures.device_peak <= figures.device_budget
            assert figures.moves["to_device"] > 0
    return seen


def train_each(place: Place, case: Case, ways: list[tuple[str, Wanted, bool]]) -> list[Seen]:
    return [train_mean(place, case, *way) for way in ways]


def plain(case: Case, workers: int, first: Seen, steps: int = STEPS, edited: bool = False) -> Seen:
    """The same from there on, in this process."""
    model, optimizer = make(case)
    model.load_state_dict({**model.state_dict(), **first.before})
    if first.state:
        optimizer.load_state_dict(first.state)
    seen = Seen()
    for step in range(steps):
        batches = [
            [share_of(case, rank, step, micro) for micro in range(case.accumulation)]
            for rank in range(workers)
        ]
        total = sum(len(inputs) for micros in batches for inputs, _ in micros)
        optimizer.zero_grad()
        for micros in batches:
            count = sum(len(inputs) for inputs, _ in micros)
            for inputs, targets in micros:
                (loss_of(model(inputs), targets) / case.accumulation * (count / total)).backward()
        if edited:
            edit(model, step)
        if case.clip:
            seen.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        if not (edited and step == LEFT_OUT):
            optimizer.step()
        seen.after.append(values(model))
    return seen


@pytest.mark.parametrize(
    ("workers", "case", "uplink"),
    [
        (2, Case("gpt", 0.5, 2, True), "auto"),
        (2, Case("lstm", 0.75), "members"),
        pytest.param(3, Case("lstm", 0.75), "leader", marks=pytest.mark.soak),
        pytest.param(2, Case("tied", 0.25, 1, True), "leader", marks=pytest.mark.soak),
        pytest.param(3, Case("gpt", 0.5, 2, True), "members", marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_a_group_in_tiers_trains_as_one_process_does(
    pool: WorkerPool, workers: int, case: Case, uplink: Wanted
) -> None:
    settings = GroupingSettings(
        1, by="joint", consistency="asp", regroup=False, score_for=score_for(Grouping([list(range(workers))]))
    )
    with ServedRun(workers, shards=2, grouping=settings) as served:
        members: list[Seen] = pool.run(train, case, served.address, uplink, world=workers)
    assert not served.failures
    expected = plain(case, workers, members[0])
    for member in members:
        assert len(member.after) == STEPS
        assert member.norms == members[0].norms
        for ours, first, theirs in zip(member.after, members[0].after, expected.after, strict=True):
            for name, value in theirs.items():
                assert torch.equal(ours[name], first[name]), name  # to the bit
                assert (ours[name] - value).abs().max().item() <= TOLERANCE, name
    assert members[0].norms == pytest.approx(expected.norms, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("groups", "case"),
    [
        ([[0, 1], [2]], Case("experts", 0.5, 1, True)),
        pytest.param([[0, 1], [2, 3]], Case("vit", 0.75, 2, True), marks=pytest.mark.soak),
        pytest.param([[0, 1], [2, 3]], Case("gpt", 0.5, 2, True), marks=pytest.mark.soak),
        pytest.param([[0, 1], [2]], Case("tied", 0.25, 1, True), marks=pytest.mark.soak),
        pytest.param([[0, 1]], Case("lstm", 0.75, 2, True), marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_groups_in_tiers_are_under_bsp_what_they_are_without_to_the_bit(
    pool: WorkerPool, groups: list[list[int]], case: Case
) -> None:
    workers = sum(map(len, groups))
    settings = GroupingSettings(
        len(groups), by="joint", consistency="bsp", regroup=False, score_for=score_for(Grouping(groups))
    )
    ways: list[tuple[Wanted, bool]] = [("leader", True), ("members", True), ("members", False)]  # in tiers?
    with ExitStack() as stack:
        runs = [stack.enter_context(ServedRun(workers, shards=2, grouping=settings)) for _ in ways]
        jobs = [(run.address, *way) for run, way in zip(runs, ways, strict=True)]
        pool.submit(train_each, case, jobs, world=workers)
        expected = plain(case, workers, Seen(), ALONE + STEPS, edited=True)
        trained: list[list[Seen]] = pool.collect()
    assert not any(run.failures for run in runs)
    for rank, (*tiered, without) in enumerate(trained):
        for (uplink, _), seen in zip(ways, tiered, strict=False):
            assert seen.norms == without.norms, (rank, uplink)
            for step, (ours, theirs) in enumerate(zip(seen.after, without.after, strict=True)):
                for name, value in theirs.items():
                    assert torch.equal(ours[name], value), (rank, uplink, step, name)  # to the bit
        for step, (ours, theirs) in enumerate(zip(without.after, expected.after, strict=True)):
            for name, value in theirs.items():
                assert (ours[name] - value).abs().max().item() <= TOLERANCE, (rank, step, name)
        assert without.norms == pytest.approx(expected.norms, abs=TOLERANCE)
