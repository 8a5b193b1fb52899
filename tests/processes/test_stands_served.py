"""With a parameter server, workers whose scripts stand at places that do not go together all end at once.

Everyone hears one line: who stands where, and what to change.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from differing_scripts import ASKED, AT, CALLS, HERE, PAIRS, STEPS, line_of, run_script

import atoll
from atoll.core.config import Chunks, Config, Groups, Run, Sync
from atoll.hub.planner import GroupingSettings
from atoll.testing.parity import ALONE, await_groups
from atoll.testing.pool import JobFailedError, WorkerPool
from atoll.testing.served import ServedRun, served_worker
from atoll.train.place import Place
from atoll.train.session import Session

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
        assert step <= ALONE or session.group.size == 2

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
) -> str:
    """The one line that every worker hears; `ended`: worker 0 may have ended before worker 1's call."""
    sites, grouping = None, None
    if script is train_at_sites:
        sites = dict.fromkeys(SITES, 1)
    elif script is not train:
        count = 1 if script is train_in_a_group else 2
        grouping = GroupingSettings(count=count, consistency=consistency, regroup=False)
    run = ServedRun(workers=2, shards=2, sites=sites, grouping=grouping)
    with run as served, pytest.raises(JobFailedError) as caught:
        pool.run(script, served.address, consistency, kind, which, str(tmp_path / "checkpoint"), world=2)
    failures = caught.value.failures
    assert {failure.kind for failure in failures.values()} == {"MismatchError"}, caught.value
    assert set(failures) == {0, 1} or (ended and set(failures) == {1}), caught.value
    (line,) = {failure.message for failure in failures.values()}
    return line


@pytest.mark.parametrize("which", CALLS)
def test_bsp_a_call_beside_a_step(pool: WorkerPool, tmp_path: Path, which: str) -> None:
    said = fails(pool, tmp_path, "bsp", "call", which)
    where = rf"worker 0 is at the gradients of step {AT} \({HERE}:\d+\); "
    where += rf"worker 1 is in session\.{which}{ASKED} \({line_of(f'in_{which}')}\)\. "
    where += rf"Every worker calls session\.{which}"
    assert re.match(where, said), said


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


ELSEWHERE = {"sites": train_at_sites, "alone": train_alone_in_groups, "a group": train_in_a_group}


@pytest.mark.parametrize("which", ["line", pytest.param("name", marks=pytest.mark.soak)])
@pytest.mark.parametrize("consistency", ["bsp", "asp"])
@pytest.mark.parametrize("where", ELSEWHERE)
def test_between_sites_and_in_groups_calls_that_do_not_match_never_combine(
    pool: WorkerPool, tmp_path: Path, where: str, consistency: str, which: str
) -> None:
    said = fails(pool, tmp_path, consistency, "pair", which, script=ELSEWHERE[where])
    assert re.match(rf"worker 0 is in session\.\w+.*\({HERE}:\d+\); worker 1 is in session\.", said), said


@pytest.mark.parametrize("kind", ["call", "leave"])
@pytest.mark.parametrize("where", ["sites", "alone"])
def test_bsp_between_sites_and_groups_a_worker_stands_elsewhere(
    pool: WorkerPool, tmp_path: Path, where: str, kind: str
) -> None:
    said = fails(pool, tmp_path, "bsp", kind, "save" if kind == "call" else "", script=ELSEWHERE[where])
    place = "in session.save" if kind == "call" else f"at the end of its session after {AT} steps"
    line = rf"worker 0 is at the gradients of step {AT} \({HERE}:\d+\); worker 1 is {place} \("
    assert re.match(line, said), said


@pytest.mark.parametrize("where", ["sites", "alone"])
def test_at_their_own_pace_between_sites_and_groups_a_call_that_the_other_never_makes(
    pool: WorkerPool, tmp_path: Path, where: str
) -> None:
    said = fails(pool, tmp_path, "asp", "call", "save", ended=True, script=ELSEWHERE[where])
    line = rf"worker 0 is at the end of its session after {STEPS} steps \({HERE}:\d+\); worker 1 is in "
    assert re.match(line + r"session\.save \(", said), said
