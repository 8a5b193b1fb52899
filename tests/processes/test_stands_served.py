"""With a parameter server, workers whose scripts stand at places that do not go together all end at once.

Everyone hears one line: who stands where, and what to change.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from differing_scripts import ASKED, AT, CALLS, HERE, PAIRS, STEPS, line_of, run_script

import atoll
from atoll.core.config import Chunks, Config, Run, Sync
from atoll.testing.pool import JobFailedError, WorkerPool
from atoll.testing.served import ServedRun, served_worker
from atoll.train.place import Place


def config(consistency: str) -> Config:
    return Config(
        run=Run(strategy="server"),
        chunks=Chunks(size="2KiB"),
        sync=Sync(timeout="120s", consistency=consistency),  # type: ignore[arg-type]
    )


def train(place: Place, address: str, consistency: str, kind: str, which: str, folder: str) -> None:
    with served_worker(address, place.rank), atoll.join(config(consistency)) as session:
        run_script(session, kind, which, folder)


def fails(
    pool: WorkerPool, tmp_path: Path, consistency: str, kind: str, which: str = "", ended: bool = False
) -> str:
    """The one line that every worker hears; `ended`: worker 0 may have ended before worker 1's call."""
    with ServedRun(workers=2, shards=2) as served, pytest.raises(JobFailedError) as caught:
        pool.run(train, served.address, consistency, kind, which, str(tmp_path / "checkpoint"), world=2)
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
@pytest.mark.parametrize("consistency", ["bsp", "ssp", "asp"])
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


@pytest.mark.parametrize("consistency", ["ssp", "asp"])
@pytest.mark.parametrize("which", CALLS)
def test_at_their_own_pace_a_call_that_the_other_never_makes(
    pool: WorkerPool, tmp_path: Path, which: str, consistency: str
) -> None:
    said = fails(pool, tmp_path, consistency, "call", which, ended=True)
    where = rf"worker 0 is at the end of its session after {STEPS} steps \({HERE}:\d+\); "
    where += rf"worker 1 is in session\.{which}.* \({line_of(f'in_{which}')}\)\. "
    assert re.match(where, said), said
