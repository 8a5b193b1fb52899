"""With a parameter server, workers whose scripts stand at places that do not go together all end at once.

Everyone hears one line: who stands where, and what to change.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import atoll
from atoll.core.config import Chunks, Config, Run, Sync
from atoll.testing.pool import JobFailedError, WorkerPool
from atoll.testing.served import ServedRun, served_worker
from atoll.train.place import Place
from atoll.train.session import Session

STEPS, AT = 5, 2  # how many a worker makes, and before which one of them stands elsewhere
SOON = 15.0  # seconds: of a deadline of 120
HERE = Path(__file__).name


def config(consistency: str) -> Config:
    return Config(
        run=Run(strategy="server"),
        chunks=Chunks(size="2KiB"),
        sync=Sync(timeout="120s", consistency=consistency),  # type: ignore[arg-type]
    )


def in_save(session: Session, folder: str) -> None:
    session.save(folder)


def in_load(session: Session, folder: str) -> None:
    session.load(folder)


def in_barrier(session: Session, _folder: str) -> None:
    session.barrier()


def in_gather(session: Session, _folder: str) -> None:
    session.gather(1)


def in_reduce(session: Session, _folder: str) -> None:
    session.reduce(0.5)


def reduce_elsewhere(session: Session, _folder: str) -> None:
    session.reduce(0.25)


def reduce_other_op(session: Session, op: str) -> None:
    session.reduce(0.25, op=op)  # type: ignore[arg-type]


def reduce_other_shape(session: Session, size: str) -> None:
    session.reduce(torch.zeros(int(size)))


def reduce_other_dtype(session: Session, dtype: str) -> None:
    session.reduce(torch.zeros(2, dtype=getattr(torch, dtype)))


CALLS: dict[str, Callable[[Session, str], None]] = {
    "save": in_save,
    "load": in_load,
    "barrier": in_barrier,
    "gather": in_gather,
    "reduce": in_reduce,
}
# What workers 0 and 1 call between the same two steps, each with its argument.
PAIRS: dict[str, tuple[tuple[Callable[[Session, str], None], str], ...]] = {
    "line": ((in_reduce, ""), (reduce_elsewhere, "")),
    "op": ((reduce_other_op, "mean"), (reduce_other_op, "max")),
    "shape": ((reduce_other_shape, "2"), (reduce_other_shape, "3")),
    "dtype": ((reduce_other_dtype, "float32"), (reduce_other_dtype, "float64")),
    "name": ((in_gather, ""), (in_barrier, "")),
    "save and reduce": ((in_save, "checkpoint"), (in_reduce, "")),
}


def train(place: Place, address: str, consistency: str, kind: str, which: str, folder: str) -> float:
    """One worker's script; worker 1 does at step AT what `kind` says. Gives the seconds since then."""
    torch.manual_seed(0)
    odd = place.rank == 1
    since = 0.0
    try:
        with served_worker(address, place.rank), atoll.join(config(consistency)) as session:
            model = nn.Linear(8, 4)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            session.prepare(model, optimizer)
            for step in range(STEPS):
                if step == AT:
                    since = time.monotonic()
                    if kind == "pair":
                        call, argument = PAIRS[which][place.rank]
                        call(session, argument or folder)
                    elif kind == "call" and odd:
                        CALLS[which](session, folder)
                    elif kind == "skip" and odd:
                        continue
                    elif kind == "leave" and odd:
                        break
                model(torch.ones(4, 8)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            if which == "reduce after":
                in_reduce(session, folder)
    finally:
        took = time.monotonic() - since
        print(f"{took:.1f}", flush=True)
        assert took < SOON
    return took


def line_of(name: str) -> str:
    """The line of this file on which a function above makes its call."""
    lines = Path(__file__).read_text().splitlines()
    at = next(number for number, line in enumerate(lines, 1) if line.startswith(f"def {name}("))
    return f"{HERE}:{at + 1}"


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
    where += rf"worker 1 is in session\.{which}(\(mean of a number\))? \({line_of(f'in_{which}')}\)\. "
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
