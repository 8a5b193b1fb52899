"""With a parameter server, workers whose scripts stand at places that do not go together all end at once.

Everyone hears one line: who stands where, and what to change.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from differing_scripts import ASKED, AT, CALLS, HERE, PAIRS, STEPS, line_of, run_script
from torch import nn

import atoll
from atoll.core.config import Chunks, Config, Groups, Run, Sync
from atoll.hub.planner import GroupingSettings
from atoll.train.api.place import Place
from atoll.train.api.session import Session
from support.parity import ALONE, await_groups
from support.pool import JobFailedError, WorkerPool
from support.served import ServedRun, served_worker

SITES = ["paris", "berlin"]
SSP = pytest.param("ssp", marks=pytest.mark.soak)


def config(consistency: str, strategy: str = "server") -> Config:
    return Config(
        run=Run(strategy=strategy),  # type: ignore[arg-type]
        chunks=Chunks(size="2KiB"),
        sync=Sync(timeout="120s", consistency=consistency),  # type: ignore[arg-type]
        groups=Groups(probe=ALONE - 1),
    )


def train(place: Place, address: str, consistency: str, kind: str, which: str, folder: str) -> None:
    with served_worker(address, place.rank), atoll.join(config(consistency)) as session:
        run_script(session, kind, which, folder)


def train_lazily(place: Place, address: str, consistency: str, kind: str, which: str, folder: str) -> None:
    settings = config(consistency)
    settings = msgspec.structs.replace(settings, sync=msgspec.structs.replace(settings.sync, lazy=True))
    with served_worker(address, place.rank), atoll.join(settings) as session:
        run_script(session, kind, which, folder)


def train_at_sites(place: Place, address: str, consistency: str, kind: str, which: str, folder: str) -> None:
    here = served_worker(address, place.rank, site=SITES[place.rank])
    with here, atoll.join(config(consistency)) as session:
        run_script(session, kind, which, folder)


def train_alone_in_groups(
    place: Place, address: str, consistency: str, kind: str, which: str, folder: str
) -> None:
    with served_worker(address, place.rank), atoll.join(config(consistency, "ps-hra")) as session:
        run_script(session, kind, which, folder)


def train_in_a_group(
    place: Place, address: str, consistency: str, kind: str, which: str, folder: str
) -> None:
    """All are in one group when one of them stands elsewhere."""

    def before(session: Session, step: int) -> None:
        await_groups(session, step)
        assert step != ALONE + 1 or session.group.size == 2

    with served_worker(address, place.rank), atoll.join(config(consistency, "ps-hra")) as session:
        run_script(session, kind, which, folder, before, at=ALONE + 1)


def fails(
    pool: WorkerPool,
    tmp_path: Path,
    consistency: str,
    kind: str,
    which: str = "",
    ended: bool = False,
    script: Callable[..., None] = train,
    workers: int = 2,
) -> str:
    """The one line that every worker hears; `ended`: one may have ended before the other's call."""
    sites, grouping = None, None
    if script is train_at_sites:
        sites = dict.fromkeys(SITES, 1)
    elif script not in (train, train_lazily):
        count = workers // 2 if script is train_in_a_group else workers
        grouping = GroupingSettings(count=count, consistency=consistency, regroup=False)
    run = ServedRun(workers=workers, shards=2, sites=sites, grouping=grouping)
    folder = str(tmp_path / "checkpoint")
    with run as served, pytest.raises(JobFailedError) as caught:
        pool.run(script, served.address, consistency, kind, which, folder, world=workers)
    failures = caught.value.failures
    assert {failure.kind for failure in failures.values()} == {"MismatchError"}, caught.value
    assert len(failures) == workers or (ended and failures), caught.value
    (line,) = {failure.message for failure in failures.values()}
    return line


@pytest.mark.parametrize("which", CALLS)
def test_bsp_a_call_beside_a_step(pool: WorkerPool, tmp_path: Path, which: str) -> None:
    said = fails(pool, tmp_path, "bsp", "call", which)
    where = rf"worker 0 is at the gradients of step {AT} \({HERE}:\d+\); "
    where += rf"worker 1 is in session\.{which}{ASKED} \({line_of(f'in_{which}')}\)\. "
    where += rf"Every worker calls session\.{which}"
    assert re.match(where, said), said


@pytest.mark.parametrize("which", CALLS)
@pytest.mark.parametrize("script", [train, train_lazily])
def test_bsp_a_call_in_place_of_a_step(
    pool: WorkerPool, tmp_path: Path, script: Callable[..., None], which: str
) -> None:
    """With `sync.lazy` worker 0 waits in its next forward, and not in its step."""
    said = fails(pool, tmp_path, "bsp", "call for step", which, script=script)
    where = rf"worker 0 is at the gradients of step {AT} \({HERE}:\d+\); "
    where += rf"worker 1 is in session\.{which}{ASKED} \({line_of(f'in_{which}')}\)\. "
    assert re.match(where, said), said


@pytest.mark.parametrize("kind", ["call", "skip", "leave", "call before step"])
def test_bsp_lazy_steps_are_compared_as_others(pool: WorkerPool, tmp_path: Path, kind: str) -> None:
    said = fails(pool, tmp_path, "bsp", kind, "reduce" if "call" in kind else "", script=train_lazily)
    at = STEPS - 1 if kind == "skip" else AT
    place = "in session.reduce" if "call" in kind else f"at the end of its session after {at} steps"
    assert re.match(
        rf"worker 0 is at the gradients of step {at} \({HERE}:\d+\); worker 1 is {place}", said
    ), said


@pytest.mark.parametrize("which", PAIRS)
@pytest.mark.parametrize("consistency", ["bsp", SSP, "asp"])
def test_calls_that_do_not_match_never_combine(
    pool: WorkerPool, tmp_path: Path, which: str, consistency: str
) -> None:
    said = fails(pool, tmp_path, consistency, "pair", which)
    assert re.match(rf"worker 0 is in session\.\w+.*\({HERE}:\d+\); worker 1 is in session\.", said), said


def test_bsp_a_worker_ends_its_session(pool: WorkerPool, tmp_path: Path) -> None:
    said = fails(pool, tmp_path, "bsp", "leave")
    where = rf"worker 0 is at the gradients of step {AT} \({HERE}:\d+\); "
    where += rf"worker 1 is at the end of its session after {AT} steps \({HERE}:\d+\)\. "
    assert re.match(where + "Every worker must make equally many steps", said), said


def test_bsp_a_worker_leaves_its_loop(pool: WorkerPool, tmp_path: Path) -> None:
    said = fails(pool, tmp_path, "bsp", "leave", "reduce after")
    where = rf"worker 0 is at the gradients of step {AT} \({HERE}:\d+\); "
    where += rf"worker 1 is in session\.reduce\(mean of a number\) \({line_of('in_reduce')}\)\. "
    assert re.match(where, said), said


def test_bsp_a_worker_skips_a_step(pool: WorkerPool, tmp_path: Path) -> None:
    said = fails(pool, tmp_path, "bsp", "skip")
    where = rf"worker 0 is at the gradients of step {STEPS - 1} \({HERE}:\d+\); "
    where += rf"worker 1 is at the end of its session after {STEPS - 1} steps \({HERE}:\d+\)\. "
    assert re.match(where + "Every worker must make equally many steps", said), said


@pytest.mark.parametrize("consistency", [SSP, "asp"])
@pytest.mark.parametrize("which", CALLS)
def test_at_their_own_pace_a_call_that_the_other_never_makes(
    pool: WorkerPool, tmp_path: Path, which: str, consistency: str
) -> None:
    said = fails(pool, tmp_path, consistency, "call", which, ended=True)
    where = rf"worker 0 is at the end of its session after {STEPS} steps \({HERE}:\d+\); "
    where += rf"worker 1 is in session\.{which}.* \({line_of(f'in_{which}')}\)\. "
    assert re.match(where, said), said


MORE_PAIRS = ["name", "save and reduce"]  # of which one call has its group come before it meets
ELSEWHERE = {"sites": train_at_sites, "alone": train_alone_in_groups, "a group": train_in_a_group}


def at_in(where: str) -> int:
    """Before which step worker 1 stands elsewhere."""
    return ALONE + 1 if where == "a group" else AT


@pytest.mark.parametrize(
    "which", ["line", *(pytest.param(each, marks=pytest.mark.soak) for each in MORE_PAIRS)]
)
@pytest.mark.parametrize("consistency", ["bsp", "asp"])
@pytest.mark.parametrize("where", ELSEWHERE)
def test_between_sites_and_in_groups_calls_that_do_not_match_never_combine(
    pool: WorkerPool, tmp_path: Path, where: str, consistency: str, which: str
) -> None:
    said = fails(pool, tmp_path, consistency, "pair", which, script=ELSEWHERE[where])
    assert re.match(rf"worker 0 is in session\.\w+.*\({HERE}:\d+\); worker 1 is in session\.", said), said


@pytest.mark.parametrize("kind", ["call", "leave"])
@pytest.mark.parametrize("where", ELSEWHERE)
def test_bsp_between_sites_and_groups_a_worker_stands_elsewhere(
    pool: WorkerPool, tmp_path: Path, where: str, kind: str
) -> None:
    said = fails(pool, tmp_path, "bsp", kind, "save" if kind == "call" else "", script=ELSEWHERE[where])
    place = "in session.save" if kind == "call" else f"at the end of its session after {at_in(where)} steps"
    line = rf"worker 0 is at the gradients of step {at_in(where)} \({HERE}:\d+\); worker 1 is {place} \("
    assert re.match(line, said), said


@pytest.mark.parametrize("where", ELSEWHERE)
def test_at_their_own_pace_between_sites_and_groups_a_call_after_the_other_has_ended(
    pool: WorkerPool, tmp_path: Path, where: str
) -> None:
    which = "reduce after, of worker 0"
    said = fails(pool, tmp_path, "asp", "leave", which, ended=True, script=ELSEWHERE[where])
    line = rf"worker 0 is in session\.reduce\(mean of a number\) \({line_of('in_reduce')}\); "
    line += rf"worker 1 is at the end of its session after {at_in(where)} steps \({HERE}:\d+\)\. "
    assert re.match(line, said), said


@pytest.mark.parametrize("consistency", ["bsp", SSP, "asp"])
def test_in_a_group_a_call_between_backward_and_step(
    pool: WorkerPool, tmp_path: Path, consistency: str
) -> None:
    """Its other members go on to the step, where all members meet too."""
    said = fails(pool, tmp_path, consistency, "call before step", "reduce", script=train_in_a_group)
    line = rf"worker 0 is at the gradients of step {at_in('a group')} \({HERE}:\d+\); "
    line += rf"worker 1 is in session\.reduce\(mean of a number\) \({line_of('in_reduce')}\)\. "
    assert re.match(line, said), said


@pytest.mark.soak
@pytest.mark.parametrize("which", [which for which in CALLS if which != "load"])  # not in groups
@pytest.mark.parametrize("consistency", ["bsp", "asp"])
def test_in_a_group_a_call_that_the_other_never_makes(
    pool: WorkerPool, tmp_path: Path, consistency: str, which: str
) -> None:
    said = fails(pool, tmp_path, consistency, "call", which, ended=True, script=train_in_a_group)
    line = rf"worker 0 is .*; worker 1 is in session\.{which}{ASKED} \({line_of(f'in_{which}')}\)\. "
    assert re.match(line, said), said


def gather_and_end(place: Place, address: str) -> list[int]:
    """Worker 1 ends right after a call; worker 0 holds what came of that call, and misses worker 1 before it
    knows that all hold it."""
    with served_worker(address, place.rank), atoll.join(config("asp", "ps-hra")) as session:
        model = nn.Linear(8, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        session.prepare(model, optimizer)
        for step in range(ALONE + 1):
            await_groups(session, step)
            model(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
        ring = session._runtime.group_ring
        assert ring is not None
        channels = ring.channels.current
        assert channels is not None
        confirmations = channels.confirmations
        assert confirmations is not None
        confirm, watch = confirmations.confirm, ring.place.watch
        assert watch is not None

        def confirm_and_miss(what: str) -> None:
            confirm(what)
            until = time.monotonic() + 60
            while "gather" in what and time.monotonic() < until:
                watch()  # raises when worker 1 has left
                time.sleep(0.002)

        if not place.rank:
            confirmations.confirm = confirm_and_miss  # type: ignore[method-assign]
        return session.gather(place.rank)


def test_in_a_group_a_worker_that_ends_after_a_call_was_in_it(pool: WorkerPool) -> None:
    grouping = GroupingSettings(count=1, consistency="asp", regroup=False)
    with ServedRun(workers=2, shards=2, grouping=grouping) as served:
        assert pool.run(gather_and_end, served.address, world=2) == [[0, 1], [0, 1]]


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["call", "leave"])
def test_bsp_a_member_of_one_of_two_groups_stands_elsewhere(
    pool: WorkerPool, tmp_path: Path, kind: str
) -> None:
    """The other group, which waits for the first, hears of it too."""
    which = "save" if kind == "call" else ""
    said = fails(pool, tmp_path, "bsp", kind, which, script=train_in_a_group, workers=4)
    place = r"in session\.save" if kind == "call" else "at the end of its session after 5 steps"
    assert re.search(rf"\bworker 1 is {place} \(", said), said
    assert re.search(r"\bworker [023] is at the gradients of step 5 \(", said), said


@pytest.mark.parametrize("where", ELSEWHERE)
def test_at_their_own_pace_between_sites_and_groups_a_call_that_the_other_never_makes(
    pool: WorkerPool, tmp_path: Path, where: str
) -> None:
    said = fails(pool, tmp_path, "asp", "call", "save", ended=True, script=ELSEWHERE[where])
    steps = max(STEPS, at_in(where) + 3)
    line = rf"worker 0 is at the end of its session after {steps} steps \({HERE}:\d+\); worker 1 is in "
    assert re.match(line + r"session\.save \(", said), said
