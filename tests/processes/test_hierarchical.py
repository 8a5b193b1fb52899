"""Sessions and runs under strategy `hierarchical`: who is in which group, and what is said of those who are
late or wrong."""

from __future__ import annotations

import os
import re
from dataclasses import astuple
from datetime import timedelta
from unittest import mock

import pytest
import torch
from run_command import Command
from torch import nn

import atoll
from atoll.core.config import Chunks, Config, Groups, Run, Sync
from atoll.core.errors import AtollError, ConfigError
from atoll.train.api.place import Place
from support.pool import JobFailedError, WorkerPool
from support.served import ServedRun, served_worker

WORKERS = 4
DEADLINE = timedelta(seconds=60)


def config(groups: int) -> Config:
    return Config(
        run=Run(strategy="hierarchical"),
        chunks=Chunks(size="2KiB"),
        sync=Sync(timeout="60s"),
        groups=Groups(count=groups),
    )


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 33), nn.Linear(33, 33), nn.Linear(33, 7))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


# -- groups -------------------------------------------------------------------------------------------------


def group_at(place: Place, groups: int, sites: list[str], variable: str) -> list[int]:
    environment = {variable: sites[place.rank]} if sites[place.rank] else {}
    with mock.patch.dict(os.environ, environment), atoll.join(config(groups), place=place) as session:
        return list(astuple(session.group))


@pytest.mark.parametrize(
    ("groups", "sites", "variable", "found"),
    [
        (2, ["", "", "", ""], "ATOLL_SITE", [[0, 2, 0, 2], [0, 2, 1, 2], [1, 2, 0, 2], [1, 2, 1, 2]]),
        (3, ["", "", "", ""], "ATOLL_SITE", [[0, 3, 0, 2], [0, 3, 1, 2], [1, 3, 0, 1], [2, 3, 0, 1]]),
        (0, ["a", "b", "b", "a"], "ATOLL_SITE", [[0, 2, 0, 2], [1, 2, 0, 2], [1, 2, 1, 2], [0, 2, 1, 2]]),
        (0, ["a", "b", "b", "b"], "ATOLL_LAB_SITE", [[0, 2, 0, 1], [1, 2, 0, 3], [1, 2, 1, 3], [1, 2, 2, 3]]),
    ],
)
def test_a_session_knows_its_group(
    pool: WorkerPool, groups: int, sites: list[str], variable: str, found: list[list[int]]
) -> None:
    assert pool.run(group_at, groups, sites, variable, world=WORKERS) == found


def sends(place: Place, size: int) -> int:
    with atoll.join(config(2), place=place) as session:
        assert session._runtime.ring is not None
        return session._runtime.ring.data.sends(size)


def test_what_a_sum_sends_is_counted(pool: WorkerPool) -> None:
    """A ring of m sends a sum 2 (m - 1) times, all together, and a broadcast m - 1 times."""
    size = 3 * 2**20
    sent = pool.run(sends, size, world=5)  # groups of three and of two
    assert sum(sent) == (4 + 2) * size + 2 * size + (2 + 1) * size
    assert sent[0] == 4 * size // 3 + size + 2 * size  # a leader of three passes the sum on twice
    assert sent[1] == sent[2] == 4 * size // 3
    assert sent[4] == size


def group_through_hub(place: Place, address: str, sites: list[str]) -> list[int]:
    site = sites[place.rank]
    with served_worker(address, place.rank, site=site), atoll.join(config(0)) as session:
        return list(astuple(session.group))


def test_a_ring_through_a_hub_is_grouped_by_site(pool: WorkerPool) -> None:
    with ServedRun(3, 0) as served:
        found = pool.run(group_through_hub, served.address, ["paris", "berlin", "paris"], world=3)
    assert found == [[0, 2, 0, 2], [1, 2, 0, 1], [0, 2, 1, 2]]


def test_more_groups_than_workers_are_refused_on_each_worker(pool: WorkerPool) -> None:
    with pytest.raises(JobFailedError) as refused:
        pool.run(group_at, 3, ["", ""], "ATOLL_SITE", world=2)
    for failure in refused.value.failures.values():
        assert (failure.kind, failure.message) == (
            "ConfigError",
            "groups.count (--groups): 3 groups for 2 workers: each has at least one, so give 1 to 2, or "
            "leave it out for as many as are best",
        )
    assert len(refused.value.failures) == 2


def prepares(place: Place) -> None:
    with atoll.join(config(1 + place.rank), place=place) as session:
        session.prepare(*make())


def test_workers_that_ask_for_other_numbers_of_groups_are_told_so(pool: WorkerPool) -> None:
    with pytest.raises(JobFailedError) as refused:
        pool.run(prepares, world=2)
    for failure in refused.value.failures.values():
        assert failure.message == (
            "the workers differ: the configuration's 'groups.count' is 1 on worker 0 and 2 on worker 1; "
            "give every worker the same configuration"
        )


def test_a_run_with_shards_has_no_groups_of_a_ring() -> None:
    with (
        ServedRun(1, 1) as served,
        served_worker(served.address, 0),
        pytest.raises(ConfigError, match=r"'hierarchical' is a ring's, and the run at tcp://\S+ has shards"),
    ):
        atoll.join(config(0))


# -- waits --------------------------------------------------------------------------------------------------


def stays_away(place: Place, late: int) -> str:
    """Worker `late` reaches its backward only when the others have given up."""
    assert place.store is not None
    everyone = range(place.world)
    others = [f"given up {rank}" for rank in everyone if rank != late]
    session = atoll.join(config(2), place=place)
    model, optimizer = make()
    session.prepare(model, optimizer)
    session.barrier()
    assert session._runtime.ring is not None
    session._runtime.ring.data.timeout = (
        2.0  # only now: joining and preparing may take longer on a busy machine
    )
    if session.rank == late:
        place.store.wait(others, DEADLINE)
        return "late"
    try:
        model(torch.ones(2, 5)).square().mean().backward()
    except AtollError as error:
        place.store.set(f"given up {place.rank}", "1")
        place.store.wait(others, DEADLINE)
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("late", [pytest.param(2, marks=pytest.mark.soak), 3])
def test_who_is_waited_for_is_named_also_from_other_groups(pool: WorkerPool, late: int) -> None:
    """A leader, and a member: those who wait for a worker that itself waits do not blame it."""
    said = pool.run(stays_away, late, world=WORKERS)
    for rank, line in enumerate(said):
        if rank != late:
            named = rf"DeadlineError: worker {rank} waited \d\.\d s for worker {late} on chunks? "
            assert re.match(named, line), line
            assert " in iteration 0 (deadline sync.timeout, 2 s; set it higher" in line


# -- the command --------------------------------------------------------------------------------------------

TRAIN = """
import torch, atoll
with atoll.join() as session:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.prepare(model, optimizer)
    for i in range(20):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    print("groups", session.gather([session.group.index, session.group.rank]))
"""


def test_a_run_in_groups(command: Command) -> None:
    (command.directory / "atoll.toml").write_text("[run]\nstrategy = 'hierarchical'\n[groups]\ncount = 2\n")
    code, out, err = command.run(TRAIN, workers=2)
    assert code == 0, err
    assert out == "groups [[0, 0], [1, 0]]\n"
    assert "atoll: 2 workers (hierarchical): 20 steps" in err
    assert command.summary()["groups"] == 2
    decided = [event for event in command.summary()["events"] if event.get("what") == "groups"]
    assert [(event["choice"], event["reason"]) for event in decided] == [("0 | 1", "groups.count is 2")]
