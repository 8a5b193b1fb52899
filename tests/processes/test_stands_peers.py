"""Without a server, nodes whose scripts stand at places that do not go together all end at once: a living
node is not excluded for that."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from differing_scripts import ASKED, AT, CALLS, HERE, PAIRS, STEPS, line_of, run_script

import atoll
from atoll.core.config import Chunks, Config, Run, Sync
from atoll.train.api.place import Place
from support.pool import JobFailedError, WorkerPool


def train(place: Place, stale_max: int, kind: str, which: str, folder: str) -> None:
    config = Config(
        run=Run(strategy="peers"),
        chunks=Chunks(size="2KiB"),
        sync=Sync(timeout="120s", stale_max=stale_max),
    )
    with atoll.join(config, place=place) as session:
        run_script(session, kind, which, folder)


def fails(pool: WorkerPool, tmp_path: Path, stale_max: int, kind: str, which: str = "") -> str:
    """The one line that every worker hears."""
    with pytest.raises(JobFailedError) as caught:
        pool.run(train, stale_max, kind, which, str(tmp_path / "checkpoint"), world=2)
    failures = caught.value.failures
    assert {failure.kind for failure in failures.values()} == {"MismatchError"}, caught.value
    assert set(failures) == {0, 1}, caught.value
    (line,) = {failure.message for failure in failures.values()}
    return line


@pytest.mark.parametrize("which", CALLS)
@pytest.mark.parametrize("stale_max", [0, pytest.param(4, marks=pytest.mark.soak)])
def test_a_call_beside_a_step(pool: WorkerPool, tmp_path: Path, which: str, stale_max: int) -> None:
    said = fails(pool, tmp_path, stale_max, "call", which)
    last = rf"(at the gradients of step \d+|at the end of its session after {STEPS} steps)"
    where = rf"worker 0 is {last} \({HERE}:\d+\); "
    where += rf"worker 1 is in session\.{which}{ASKED} \({line_of(f'in_{which}')}\)\. "
    assert re.match(where + rf"Every worker calls session\.{which}", said), said


@pytest.mark.parametrize("which", PAIRS)
def test_calls_that_do_not_match_never_combine(pool: WorkerPool, tmp_path: Path, which: str) -> None:
    said = fails(pool, tmp_path, 0, "pair", which)
    assert re.match(rf"worker 0 is in session\.\w+.*\({HERE}:\d+\); worker 1 is in session\.", said), said


@pytest.mark.parametrize("stale_max", [0, 4])
@pytest.mark.parametrize("kind", ["leave", "skip"])
def test_unequal_steps(pool: WorkerPool, tmp_path: Path, kind: str, stale_max: int) -> None:
    said = fails(pool, tmp_path, stale_max, kind)
    steps = AT if kind == "leave" else STEPS - 1
    last = rf"(at the gradients of step \d+|at the end of its session after {STEPS} steps)"
    where = rf"worker 0 is {last} \({HERE}:\d+\); "
    where += rf"worker 1 is at the end of its session after {steps} steps \({HERE}:\d+\)\. "
    assert re.match(where + "Every worker must make equally many steps", said), said


def test_a_worker_leaves_its_loop(pool: WorkerPool, tmp_path: Path) -> None:
    said = fails(pool, tmp_path, 0, "leave", "reduce after")
    where = rf"worker 0 is at the gradients of step {AT} \({HERE}:\d+\); "
    where += rf"worker 1 is in session\.reduce{ASKED} \({line_of('in_reduce')}\)\. "
    assert re.match(where, said), said
