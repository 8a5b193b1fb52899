"""Sessions in which each group of a hierarchy holds a replica of the model between its workers: checkpoints,
what is decided, what is refused, and a worker that is killed."""

from __future__ import annotations

import functools
import os
import signal
from pathlib import Path
from unittest import mock

import msgspec
import pytest
from member_lives import outcomes
from safetensors.torch import load_file
from test_members_session import (
    ASYMMETRIC,
    BUDGET,
    CONFIG,
    build,
    close,
    in_groups,
    seen,
    step,
    told,
    train,
)
from torch import Tensor, nn

import atoll
from atoll.core.config import Run, Sync
from atoll.core.memory import Memory
from atoll.observe.summary import read_summary
from atoll.train.api.place import Place
from support.pool import WorkerPool


def test_a_checkpoint_goes_on_in_any_grouping_and_without(pool: WorkerPool, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    four = pool.run(train, folder, 0, 3, BUDGET, 2, world=4)
    plain = load_file(f"{folder}/model.safetensors")
    for each in four:
        close(each.end, four[0].end, 0.0)
    close({name: four[0].end[name] for name in plain}, plain, 0.0)
    straight = train(Place(), str(tmp_path / "other"), 0, 6, None).end
    for workers, memory, groups in ((3, ASYMMETRIC, 2), (2, BUDGET, 0), (2, None, 2)):
        for each in pool.run(train, folder, 3, 6, memory, groups, world=workers):
            close(each.saved, four[0].end, 0.0)
            close(each.end, straight, 1e-9)
    alone = train(Place(), folder, 3, 6, None)
    close(alone.saved, four[0].end, 0.0)
    close(alone.end, straight, 1e-9)


@pytest.mark.soak
def test_a_ring_s_checkpoint_goes_on_in_groups(pool: WorkerPool, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    ring = pool.run(train, folder, 0, 3, ASYMMETRIC, world=2)
    for each in pool.run(train, folder, 3, 4, BUDGET, 2, world=4):
        close(each.saved, ring[0].end, 0.0)


def at_sites(place: Place, directory: str, memory: Memory, groups: int) -> tuple[object, dict[str, Tensor]]:
    """Who holds the model with this worker, where its site is told, and what it sees in the end."""
    model, optimizer = build()
    config = in_groups(groups, msgspec.structs.replace(CONFIG, run=Run(directory=directory)))
    site = mock.patch.dict(os.environ, ATOLL_SITE="ab"[place.rank % 2])
    with site, atoll.join(config, place=place) as session:
        session.prepare(model, optimizer, memory=memory)
        (tiers,) = session._state.tiers
        step(session, model, optimizer)
        holding = None if tiers.shared is None else tiers.shared.plan.holding
        if holding is None:
            assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
        return None if holding is None else holding.groups[0], seen(model, optimizer)


def test_groups_are_those_of_the_hierarchy_and_hold_whole_copies_where_all_fits(
    pool: WorkerPool, tmp_path: Path
) -> None:
    """The two train alike, in other orders of addition: a ring's goes along, and sums here go by rank."""
    small = pool.run(at_sites, str(tmp_path / "small"), BUDGET, 0, world=4)
    assert [holders for holders, _ in small] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    large = pool.run(at_sites, str(tmp_path / "large"), Memory(device="64MiB"), 0, world=4)
    assert not any(holders for holders, _ in large)
    one = pool.run(at_sites, str(tmp_path / "one"), BUDGET, 1, world=4)  # a group of all is a ring
    assert [holders for holders, _ in one] == [(0, 1, 2, 3)] * 4
    for _, values in (*small, *large, *one):
        close(values, small[0][1], 1e-12)
    choices = {}
    for name in ("small", "large"):
        events = read_summary(tmp_path / name / "summary.json").events
        choices[name] = [event["reason"] for event in events if event.get("what") == "memory"]
    assert "chunks are split evenly over the members of each of 2 groups" in choices["small"][0]
    assert choices["large"][0].startswith("all fits on each member's device: each holds the whole model")


def one_has_too_little(place: Place) -> None:
    model, optimizer = build()
    little = msgspec.structs.replace(BUDGET, device="4KiB")
    with atoll.join(in_groups(2), place=place) as session:
        session.prepare(model, optimizer, memory=little if place.rank == 2 else BUDGET)


def shards_of_its_own(place: Place) -> None:
    model, optimizer = build()
    atoll.memory.over(model, [place.rank])
    with atoll.join(in_groups(2), place=place) as session:
        session.prepare(model, optimizer, memory=BUDGET)


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (one_has_too_little, "UserError: worker 2: the budget of the device is too small: "),
        (shards_of_its_own, "PrepareError: atoll.memory.over has given '0.weight' the workers ["),
    ],
)
def test_mistakes_are_one_line_on_all(pool: WorkerPool, part: object, said: str) -> None:
    for line in pool.run(told, part, world=3):
        assert line.startswith(said)
        assert "\n" not in line


def skips(place: Place) -> dict[str, Tensor]:
    model, optimizer = build()
    config = in_groups(2, msgspec.structs.replace(CONFIG, sync=Sync(timeout="60s", nonfinite="skip")))
    with atoll.join(config, place=place) as session:
        session.prepare(model, optimizer, memory=BUDGET)
        before = seen(model, optimizer)
        step(session, model, optimizer, value=float("nan") if place.rank == 2 else 1.0)
        close(seen(model, optimizer), before, 0.0)
        session.weight(place.rank % 2)  # one of the groups, whose first is its only, weighs nothing
        step(session, model, optimizer)
        return seen(model, optimizer)


def test_a_step_that_is_not_finite_is_left_out_in_all_groups(pool: WorkerPool) -> None:
    first, *others = pool.run(skips, world=3)
    for other in others:
        close(first, other, 0.0)


def dies(place: Place) -> None:
    """Worker 3, before the sum of a step."""
    model, optimizer = build()
    with atoll.join(in_groups(2), place=place) as session:
        session.prepare(model, optimizer, memory=BUDGET)
        for turn in range(1000):
            if place.rank == 3 and turn == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            step(session, model, optimizer)


def stands_still(place: Place, seconds: str) -> None:
    """Worker 3, which sends nothing any more."""
    model, optimizer = build()
    config = in_groups(2, msgspec.structs.replace(CONFIG, sync=Sync(timeout=seconds)))
    with atoll.join(config, place=place) as session:
        session.prepare(model, optimizer, memory=BUDGET)
        for turn in range(1000):
            if place.rank == 3 and turn == 3:
                os.kill(os.getpid(), signal.SIGSTOP)
            step(session, model, optimizer)


def test_a_worker_that_is_killed_ends_the_workers_of_all_groups_in_a_line() -> None:
    for rank, (said, _) in outcomes(dies, 4, silent=3).items():
        lost = f"PeerLostError: worker {rank} lost touch with another worker, waiting for "
        assert said.startswith((lost, f"RefusedError: worker {rank} cannot have worker ")), said
        assert "\n" not in said


@pytest.mark.soak
def test_a_worker_that_stands_still_is_named_in_all_groups() -> None:
    """By who waits first; to the others the first that ends may be the one who is lost."""
    told = [said for said, _ in outcomes(functools.partial(stands_still, seconds="3s"), 4, silent=3).values()]
    assert any("for worker 3" in said and "(deadline sync.timeout, 3 s" in said for said in told), told
    for said in told:
        assert "for worker 3" in said or "lost touch with another worker" in said, said
        assert "\n" not in said
