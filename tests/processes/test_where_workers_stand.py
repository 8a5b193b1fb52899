"""Scripts whose workers wait for one another in vain: all end at once, with one line that says who stands
where, and with what to change."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest
import torch
from run_command import Command, wait_for
from torch import nn
from torch._C._distributed_c10d import PrefixStore

import atoll
from atoll.core.config import Chunks, Config, Groups, Sync
from atoll.core.errors import AtollError, MismatchError
from atoll.core.memory import Memory
from atoll.train.api.place import Place
from atoll.train.api.session import Session
from support.pool import WorkerPool
from support.served import ServedRun, served_worker

STEPS = 5
AT = 2  # the step after which worker 1 makes its mistake
PATIENCE = 15.0  # seconds from the first worker's wait to the end of all; they take about one
CONFIG = Config(chunks=Chunks(size="2KiB"), sync=Sync(timeout="60s"))
HERE = r" \(test_where_workers_stand\.py:\d+\)"
OF_GRADIENTS = rf"at the gradients of step {AT + 1}{HERE}"
SHARES = r"Every worker must make equally many steps \(session\.sampler deals equal shares; .*\)"

Mistake = Callable[[Session, Path], None]


# -- what worker 1 does alone after step AT ----------------------------------------------------------------


def saves(session: Session, folder: Path) -> None:
    session.save(folder)


def loads(session: Session, folder: Path) -> None:
    session.load(folder)


def resumes(session: Session, folder: Path) -> None:
    session.resume(folder)


def reduces(session: Session, _folder: Path) -> None:
    session.reduce(1.0)


def gathers(session: Session, _folder: Path) -> None:
    session.gather([1, 2])


def comes_to_the_barrier(session: Session, _folder: Path) -> None:
    session.barrier()


class LeavesError(Exception):
    """The loop is left."""


def leaves(_session: Session, _folder: Path) -> None:
    raise LeavesError


# -- what all workers do after step AT, each in its way ----------------------------------------------------


def reduce_other_shapes(session: Session, _folder: Path) -> None:
    session.reduce(torch.zeros(3 if session.rank == 1 else 2))


def reduce_other_dtypes(session: Session, _folder: Path) -> None:
    session.reduce(torch.zeros(2, dtype=torch.float64 if session.rank == 1 else torch.float32))


def reduce_by_other_ops(session: Session, _folder: Path) -> None:
    session.reduce(1.0, "max" if session.rank == 1 else "mean")


def reduce_on_other_lines(session: Session, _folder: Path) -> None:
    if session.rank == 1:
        session.reduce(0.5)  # a loss
    else:
        session.reduce(0.9)  # an accuracy


def make_other_calls(session: Session, folder: Path) -> None:
    if session.rank == 1:
        session.save(folder)
    else:
        session.barrier()


def gather_other_kinds(session: Session, _folder: Path) -> None:
    session.gather(torch.ones(1) if session.rank == 1 else 1.0)


@dataclass(frozen=True)
class Case:
    """A mistake, and where the workers then stand: worker 1, and all others."""

    mistake: Mistake
    first: str
    others: str
    advice: str
    by_all: bool = False
    skips: bool = False  # worker 1 has no batch in one step, and makes none
    after: Mistake | None = None  # what all do when their loops are over
    late: bool = False  # worker 2 comes to its gradients when the others have ended


def alone(mistake: Mistake, place: str, advice: str) -> Case:
    return Case(mistake, place, OF_GRADIENTS, advice)


def by_all(mistake: Mistake, first: str, others: str, advice: str) -> Case:
    return Case(mistake, first, others, advice, by_all=True)


def of_one(name: str) -> str:
    return rf"Every worker calls session\.{name}: take it out of `if session\.is_main`"


def of_steps(name: str) -> str:
    return rf"Every worker calls session\.{name}, and calls it after equally many steps: .*session\.is_main.*"


def nothing(_session: Session, _folder: Path) -> None:
    """The loop goes on."""


def saves_if_main(session: Session, folder: Path) -> None:
    if session.rank == 1:
        session.save(folder)


REDUCE = r"in session\.reduce\({}\)" + HERE
CASES = [
    alone(saves, rf"in session\.save{HERE}", of_one("save")),
    alone(loads, rf"in session\.load{HERE}", of_one("load")),
    alone(resumes, rf"in session\.resume{HERE}", of_one("resume")),
    alone(reduces, REDUCE.format("mean of a number"), of_steps("reduce")),
    alone(gathers, rf"in session\.gather\(a value\){HERE}", of_steps("gather")),
    alone(comes_to_the_barrier, rf"in session\.barrier{HERE}", of_steps("barrier")),
    alone(leaves, rf"at the end of its session after {AT + 1} steps{HERE}", SHARES),
    by_all(
        reduce_other_shapes,
        REDUCE.format(r"mean of a float32 tensor of shape \(3,\)"),
        REDUCE.format(r"mean of a float32 tensor of shape \(2,\)"),
        r"All calls of session\.reduce .* of the same operation, shape and dtype",
    ),
    by_all(
        reduce_other_dtypes,
        REDUCE.format(r"mean of a float64 tensor of shape \(2,\)"),
        REDUCE.format(r"mean of a float32 tensor of shape \(2,\)"),
        r"All calls of session\.reduce .* of the same operation, shape and dtype",
    ),
    by_all(
        reduce_by_other_ops,
        REDUCE.format("max of a number"),
        REDUCE.format("mean of a number"),
        r"All calls of session\.reduce .* of the same operation, shape and dtype",
    ),
    by_all(
        reduce_on_other_lines,
        REDUCE.format("mean of a number"),
        REDUCE.format("mean of a number"),
        r"Calls of session\.reduce meet only from one line of the script: .*",
    ),
    by_all(make_other_calls, rf"in session\.save{HERE}", rf"in session\.barrier{HERE}", of_one("save")),
    by_all(
        gather_other_kinds,
        rf"in session\.gather\(a tensor\){HERE}",
        rf"in session\.gather\(a value\){HERE}",
        r"All calls of session\.gather .*",
    ),
    Case(
        nothing,
        rf"at the end of its session after {STEPS - 1} steps{HERE}",
        rf"at the gradients of step {STEPS - 1}{HERE}",
        SHARES,
        skips=True,
    ),
    # An evaluation behind loops of unequal lengths:
    Case(leaves, REDUCE.format("mean of a number"), OF_GRADIENTS, of_steps("reduce"), after=reduces),
    Case(
        nothing,
        rf"in session\.save{HERE}",
        rf"at the end of (its|their) sessions? after {STEPS} steps{HERE}",
        of_one("save"),
        after=saves_if_main,
    ),
    Case(saves, rf"in session\.save{HERE}", OF_GRADIENTS, of_one("save"), late=True),
]

# -- where the workers train -------------------------------------------------------------------------------

PLACES = ["ring", "hierarchical", "elastic", "tiers", "tiers in groups"]
WORKERS = {"ring": 3, "hierarchical": 4, "elastic": 3, "tiers": 2, "tiers in groups": 4}


def config_of(where: str) -> Config:
    """Under `where`, of `PLACES`."""
    if where not in ("hierarchical", "tiers in groups"):
        return CONFIG
    run = msgspec.structs.replace(CONFIG.run, strategy="hierarchical")
    return msgspec.structs.replace(CONFIG, run=run, groups=Groups(count=2))


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    parts = [part for _ in range(6) for part in (nn.Linear(32, 32), nn.Tanh())]
    model = nn.Sequential(*parts).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(session: Session, case: Case, folder: Path, memory: Memory | None) -> None:
    model, optimizer = build()
    session.prepare(model, optimizer, memory=memory)
    with contextlib.suppress(LeavesError):
        for step in range(STEPS):
            if case.skips and step == 1 and session.rank == 1:
                continue
            if case.late and step == AT + 1 and session.rank == 2:
                wait_for(ended(folder).exists, "worker 0 to end", 30.0)
            optimizer.zero_grad()
            model(torch.ones(2, 32, dtype=torch.float64)).square().mean().backward()
            optimizer.step()
            if step == AT and (case.by_all or session.rank == 1):
                case.mistake(session, folder)
    if case.after is not None:
        case.after(session, folder)


def ended(folder: Path) -> Path:
    """Is there when worker 0 has ended in a case where another one is late."""
    return folder.with_name("ended")


@contextlib.contextmanager
def joined(place: Place, where: str, address: str) -> Iterator[Session]:
    if where != "elastic":
        with atoll.join(config_of(where), place=place) as session:
            yield session
        return
    with served_worker(address, place.rank), atoll.join(config_of(where)) as session:
        yield session


def ends(
    place: Place, where: str, hubs: Mapping[int, str], numbers: list[int], folder: Path
) -> list[tuple[str, int]]:
    """The line with which each case ends on this worker, and its exit status; `hubs` has each one's."""
    found = []
    for number in numbers:
        memory = Memory(device="30KiB", chunk="8448", step="host") if "tiers" in where else None
        began = time.monotonic()
        assert place.store is not None
        own = replace(place, store=PrefixStore(f"case {number}", place.store))
        try:
            with joined(own, where, hubs.get(number, "")) as session:
                train(session, CASES[number], folder, memory)
            found.append(("", 0))
        except AtollError as error:
            assert time.monotonic() - began < PATIENCE
            if place.rank == 0 and CASES[number].late:
                ended(folder).touch()
            found.append((f"{type(error).__name__}: {error}", error.exit_status))
    return found


NUMBERS = list(range(len(CASES)))
FEW = {
    "ring": NUMBERS,
    "hierarchical": [0, 3],
    "elastic": [0, 3, 6, 7, len(CASES) - 1],
    "tiers": [0, 3, 6, 13],
    "tiers in groups": [6],
}


@pytest.mark.parametrize(
    ("where", "numbers"),
    [
        *((where, FEW[where]) for where in PLACES),
        *(
            pytest.param(where, sorted(set(NUMBERS) - set(FEW[where])), marks=pytest.mark.soak)
            for where in PLACES
            if where != "ring"
        ),
    ],
    ids=lambda each: each if isinstance(each, str) else str(len(each)),
)
def test_all_end_with_one_line_that_says_who_stands_where(
    pool: WorkerPool, tmp_path: Path, where: str, numbers: list[int]
) -> None:
    workers = WORKERS[where]
    with contextlib.ExitStack() as stack:
        hubs = {}
        for number in numbers if where == "elastic" else []:
            hubs[number] = stack.enter_context(ServedRun(workers, 0, heartbeat=0.1)).address
        found = pool.run(ends, where, hubs, numbers, tmp_path / "checkpoint", world=workers, deadline=60.0)
    for number, lines in zip(numbers, zip(*found, strict=True), strict=True):
        case, (line, status) = CASES[number], lines[0]
        assert set(lines) == {lines[0]}, lines
        assert status == MismatchError.exit_status == 2, line
        assert line.startswith("MismatchError: "), line
        who = line.removeprefix("MismatchError: ")
        assert re.search(rf"worker 1 is {case.first}[;.] ", who), who
        assert re.search(rf"(worker 0 is|workers 0.* are) {case.others}[;.] ", who), who
        assert re.search(rf"\. {case.advice}$", who), who


# -- under the command -------------------------------------------------------------------------------------

SCRIPT = """import sys, torch, atoll
with atoll.join() as session:
    model = torch.nn.Linear(8, 4); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.prepare(model, optimizer)
    for step in range(6 if session.is_main or sys.argv[1] == "saves" else 4):
        model(torch.randn(4, 8)).square().mean().backward(); optimizer.step(); optimizer.zero_grad()
        if session.is_main and step == 3 and sys.argv[1] == "saves": session.save("checkpoint")
    print("metric", session.reduce(1.0))
"""
BY_ONE = (
    "atoll: worker 0 is in session.save (train.py:7); worker 1 is at the gradients of step 4 (train.py:6). "
    "Every worker calls session.save: take it out of `if session.is_main`"
)
UNEQUAL = (
    "atoll: worker 0 is at the gradients of step 4 (train.py:6); worker 1 is in session.reduce(mean of a "
    "number) (train.py:8). Every worker calls session.reduce, and calls it after equally many steps: "
)


@pytest.mark.parametrize(
    ("how", "elastic", "line"),
    [
        pytest.param("saves", "false", BY_ONE, marks=pytest.mark.soak),
        ("saves", "true", BY_ONE),
        pytest.param("leaves", "false", UNEQUAL, marks=pytest.mark.soak),
        pytest.param("leaves", "true", UNEQUAL, marks=pytest.mark.soak),
    ],
)
def test_a_run_ends_with_status_2_and_nobody_is_called_lost(
    command: Command, how: str, elastic: str, line: str
) -> None:
    status, out, err = command.run(SCRIPT, how, options=["--set", f"run.elastic={elastic}"])
    assert status == 2, err
    assert err.splitlines()[-1].startswith(line), err
    assert "metric" not in out
    assert "the others go on without it" not in err
    assert "SIGABRT" not in err
    assert not command.alive()
