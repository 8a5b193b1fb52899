"""Rings that lose members, with real processes and signals: who is left goes on, and computes what plain
PyTorch computes from exactly the contributions that counted."""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from run_command import wait_for
from torch import Tensor, nn

import atoll
from atoll.core import points
from atoll.core.config import Chunks, Config, Groups, Run, Sync
from atoll.core.errors import AtollError
from atoll.hub.decisions import read_decisions
from atoll.train.api.session import Session
from atoll.train.gradients.ring import RingReducer
from atoll.train.group.channel import BrokenRingError
from atoll.train.group.rounds import Ring
from atoll.train.group.sockets import shut
from support.pool import FORKSERVER
from support.served import ServedRun, served_worker

STEPS = 6
STRIKE = 3  # the iteration in which a fault happens
DEADLINE = 60.0
HEARTBEAT = 0.4  # a dead member is known after two and a half
AT_ONCE = 4  # cases that run beside one another


@dataclass(frozen=True)
class Fault:
    """`who` gets `what` when it reaches `point` in `iteration` (-1: in none) for the `nth` time."""

    who: int
    point: str
    iteration: int = STRIKE
    what: signal.Signals = signal.SIGKILL
    nth: int = 1


def strike(who: int, faults: tuple[Fault, ...], folder: Path) -> None:
    """Let the faults happen to this process, each once, written down before."""
    counts = {fault: itertools.count(1) for fault in faults}  # points are reached on several threads

    def handler(point: str, iteration: int) -> None:
        for fault in faults:
            here = (fault.who, fault.point, fault.iteration) == (who, point, iteration)
            if here and next(counts[fault]) == fault.nth:
                (folder / f"fired-{who}-{point}").touch()
                os.kill(os.getpid(), fault.what)
                time.sleep(0.05 if fault.what == signal.SIGSTOP else DEADLINE)

    points.install(handler)


# -- what the workers do ------------------------------------------------------------------------------------


_seeding = threading.Lock()  # torch's own generator is the whole process's, and cases run beside one another


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    with _seeding:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(5, 33), nn.Tanh(), nn.Linear(33, 33), nn.Tanh(), nn.Linear(33, 7)
        ).double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def share(who: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + who)
    return torch.randn(3, 5, generator=generator, dtype=torch.float64)


def loss_of(model: nn.Module, who: int, step: int) -> Tensor:
    return model(share(who, step)).square().mean()


Script = Callable[[Session, int, Path], dict[str, Any]]


def trains(session: Session, who: int, _folder: Path) -> dict[str, Any]:
    """Worker r weighs 2 ** r: an iteration's sum of weights says who counted."""
    model, optimizer = make()
    session.prepare(model, optimizer)
    counted = []
    for step in range(STEPS):
        optimizer.zero_grad()
        session.weight(2.0**who)
        loss_of(model, who, step).backward()
        counted.append(weight_of(session))
        optimizer.step()
    return {"counted": counted, "parameters": [p.detach().tolist() for p in model.parameters()]}


def weight_of(session: Session) -> float:
    """All workers' weights together, in the iteration just reduced."""
    reducer = session._state.prepared[0].reducer
    assert isinstance(reducer, RingReducer)
    return reducer.sum.scaling.reference


def nothing(_who: int) -> None:
    """What most do before they join."""


def work(
    address: str,
    who: int,
    script: Script,
    faults: tuple[Fault, ...],
    folder: Path,
    config: Config,
    prelude: Callable[[int], None],
) -> None:
    """A worker's whole life; what came of it is in a file."""
    torch.set_num_threads(1)
    prelude(who)
    strike(who, faults, folder)
    with (folder / f"{who}.err").open("w") as sys.stderr:
        faulthandler.register(signal.SIGUSR1, file=sys.stderr)
        try:
            with served_worker(address, who), atoll.join(config) as session:
                result = script(session, who, folder)
                result |= {"rank": session.rank, "world": session.world}
        except AtollError as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        except BaseException:
            result = {"error": traceback.format_exc()}
        beside = folder / f"{who}.new"
        beside.write_text(json.dumps(result))
        beside.replace(folder / f"{who}.json")


@dataclass
class Case:
    """A hub and workers, each a process. Processes that are left are killed at the end."""

    folder: Path
    served: ServedRun
    script: Script
    faults: tuple[Fault, ...] = ()
    config: Config = field(default_factory=Config)
    prelude: Callable[[int], None] = nothing  # what a worker does first
    processes: dict[int, BaseProcess] = field(default_factory=dict)

    def start(self, who: int) -> None:
        arguments = (self.served.address, who, self.script, self.faults, self.folder, self.config)
        self.processes[who] = FORKSERVER.Process(target=work, args=(*arguments, self.prelude))
        self.processes[who].start()

    def result(self, who: int) -> dict[str, Any]:
        """What a worker's script gave, once its process has ended."""
        self.processes[who].join(DEADLINE)
        if self.processes[who].is_alive():
            os.kill(self.processes[who].pid or 0, signal.SIGUSR1)  # it says where each thread is
            self.processes[who].join(1.0)
            raise AssertionError(f"worker {who} still runs: {self.said(who)}")
        file = self.folder / f"{who}.json"
        assert file.exists(), f"worker {who} died: {self.processes[who].exitcode}, {self.said(who)}"
        result: dict[str, Any] = json.loads(file.read_text())
        return result

    def said(self, who: int) -> str:
        return (self.folder / f"{who}.err").read_text()

    def killed(self, who: int) -> None:
        self.processes[who].join(DEADLINE)
        assert self.processes[who].exitcode == -signal.SIGKILL

    def told(self, what: str) -> list[str]:
        return [decision.choice for decision in read_decisions(self.folder) if decision.what == what]


@contextlib.contextmanager
def case(
    folder: Path,
    script: Script = trains,
    *faults: Fault,
    workers: int = 3,
    patience: float = 20.0,
    timeout: str = "30s",
    at_least: int = 1,
    prelude: Callable[[int], None] = nothing,
    groups: int | None = None,
    strategy: str = "",
) -> Iterator[Case]:
    """`workers` of them train, and the faults happen; with `groups`, under strategy hierarchical, or the
    `strategy` that is given."""
    folder.mkdir(exist_ok=True)
    config = Config(
        run=Run(strategy=strategy or ("ring" if groups is None else "hierarchical")),
        chunks=Chunks(size="2KiB"),
        sync=Sync(timeout=timeout),
        groups=Groups(count=groups or 0),
    )
    with ServedRun(
        workers, 0, patience=patience, heartbeat=HEARTBEAT, folder=folder, at_least=at_least
    ) as served:
        made = Case(folder, served, script, faults, config, prelude)
        try:
            for who in range(workers):
                made.start(who)
            yield made
            for fault in faults:
                assert (folder / f"fired-{fault.who}-{fault.point}").exists(), fault
        finally:
            for process in made.processes.values():
                process.kill()
                process.join(DEADLINE)
    assert not served.failures


def let_in(made: Case) -> None:
    """Start one more worker when the others have stopped: one that came earlier would be let in earlier, and
    nobody be left to wait for."""
    began = list(made.processes)
    for who in began:
        wait_for((made.folder / f"{who}.stops").exists, f"worker {who} to stop", DEADLINE)
    made.start(len(began))


def members_of(weight: float) -> list[int]:
    return [who for who in range(8) if int(weight) >> who & 1]


def plain(counted: list[float]) -> list[Tensor]:
    """Parameters after the same steps in one process, from the contributions that counted."""
    model, optimizer = make()
    for step, weight in enumerate(counted):
        optimizer.zero_grad()
        for who in members_of(weight):
            (loss_of(model, who, step) * 2.0**who / weight).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def assert_as_plain_torch(
    results: list[dict[str, Any]],
    make: Callable[[], tuple[nn.Module, Sequence[torch.optim.Optimizer]]],
    loss_of: Callable[[nn.Module, int, int], Tensor],
) -> None:
    """They end alike, to the bit, and as plain PyTorch does with what counted."""
    for result in results:
        assert "error" not in result, result["error"]
        assert result["parameters"] == results[0]["parameters"]
        assert result["counted"] == results[0]["counted"][-len(result["counted"]) :]
    model, optimizers = make()
    for step, weight in enumerate(results[0]["counted"]):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for who in members_of(weight):
            (loss_of(model, who, step) * 2.0**who / weight).backward()
        for optimizer in optimizers:
            optimizer.step()
    for ours, theirs in zip(results[0]["parameters"], model.parameters(), strict=True):
        found = torch.tensor(ours, dtype=torch.float64)
        torch.testing.assert_close(found, theirs.detach(), rtol=0, atol=1e-9)


def assert_went_on(results: list[dict[str, Any]], survivors: list[int]) -> None:
    """They end alike, to the bit, and as plain PyTorch does with what counted."""
    for result in results:
        assert "error" not in result, result["error"]
        assert result["world"] == len(survivors)
        assert result["counted"] == results[0]["counted"]
        assert result["parameters"] == results[0]["parameters"]
    assert sorted(result["rank"] for result in results) == list(range(len(survivors)))
    counted = results[0]["counted"]
    assert len(counted) == STEPS
    assert members_of(counted[-1]) == survivors
    for ours, theirs in zip(results[0]["parameters"], plain(counted), strict=True):
        torch.testing.assert_close(torch.tensor(ours, dtype=torch.float64), theirs, rtol=0, atol=1e-9)


# -- one dies, at each point --------------------------------------------------------------------------------

IN_AN_ITERATION = [name for name in points.POINTS if name.startswith("ring.")]
IN_AN_ITERATION = [name for name in IN_AN_ITERATION if name not in ("ring.broken", "ring.formed")]


def one_dies(folder: Path, who: int, point: str) -> None:
    with case(folder, trains, Fault(who, point)) as made:
        survivors = [each for each in range(3) if each != who]
        made.killed(who)
        results = [made.result(each) for each in survivors]
    assert_went_on(results, survivors)
    counted = results[0]["counted"]
    # What all held before it died counts; nobody else's is ever left out.
    late = point in ("ring.confirmed", "ring.published", "ring.stepped")
    assert [members_of(weight) for weight in counted[:STRIKE]] == [[0, 1, 2]] * STRIKE
    if late:
        assert members_of(counted[STRIKE]) == [0, 1, 2]
    elif point in ("ring.sent", "ring.all_sent"):
        assert members_of(counted[STRIKE]) in (survivors, [0, 1, 2])
    assert [members_of(weight) for weight in counted[STRIKE + 1 :]] == [survivors] * (STEPS - STRIKE - 1)


def each_dies(
    folder: Path, cases: list[tuple[int, str]], one_dies: Callable[[Path, int, str], None] = one_dies
) -> None:
    with ThreadPoolExecutor(AT_ONCE) as threads:
        ends = {
            threads.submit(one_dies, folder / f"{who}-{point}", who, point): (who, point)
            for who, point in cases
        }
        failures = {}
        for end, which in ends.items():
            try:
                end.result()
            except BaseException as error:
                failures[which] = error
    assert not failures, failures


def test_one_of_three_is_killed_at_each_point_of_an_iteration(tmp_path: Path) -> None:
    """Each point once, and each worker at two of them at least."""
    assert len(IN_AN_ITERATION) == 7
    each_dies(tmp_path, [(number % 3, point) for number, point in enumerate(IN_AN_ITERATION)])


@pytest.mark.soak
def test_each_of_three_is_killed_at_each_point_of_an_iteration(tmp_path: Path) -> None:
    each_dies(tmp_path, [(who, point) for point in IN_AN_ITERATION for who in range(3)])


# -- other ways to be lost, and other moments ---------------------------------------------------------------


def test_a_member_that_stands_still_for_three_seconds_is_waited_for(tmp_path: Path) -> None:
    fault = Fault(1, "ring.all_sent", what=signal.SIGSTOP)
    with case(tmp_path / "run", trains, fault) as made:
        wait_for((made.folder / "fired-1-ring.all_sent").exists, "the stop", DEADLINE)
        time.sleep(3.0)
        assert made.processes[0].is_alive()  # and waits
        os.kill(made.processes[1].pid or 0, signal.SIGCONT)
        results = [made.result(who) for who in range(3)]
        assert made.told("ring") == ["ring 1 of 3 workers"]
    assert_went_on(results, [0, 1, 2])


def test_a_member_that_stands_still_for_ever_is_left_out_and_told_so(tmp_path: Path) -> None:
    """Nothing fails at the others: they are blocked in a collective until the hub says so."""
    fault = Fault(0, "ring.agreed", what=signal.SIGSTOP)
    with case(tmp_path / "run", trains, fault, patience=2.0) as made:
        results = [made.result(who) for who in (1, 2)]
        assert "worker 0 was lost during iteration 3; the ring goes on with 2 workers" in made.said(1)
        os.kill(made.processes[0].pid or 0, signal.SIGCONT)
        assert "RunError: " in made.result(0)["error"]
        assert "silent for too long" in made.result(0)["error"]
        assert made.result(0)["error"].count("\n") == 0
    assert_went_on(results, [1, 2])


@pytest.mark.parametrize("point", ["ring.broken", "ring.formed"])
def test_a_second_one_dies_while_the_ring_is_formed_again(tmp_path: Path, point: str) -> None:
    first, second = Fault(2, "ring.agreed"), Fault(0, point, iteration=-1)
    with case(tmp_path / "run", trains, first, second, patience=4.0) as made:
        made.killed(2)
        made.killed(0)
        result = made.result(1)
    assert_went_on([result], [1])


def test_two_of_three_die_at_once(tmp_path: Path) -> None:
    with case(tmp_path / "run", trains, Fault(0, "ring.sent"), Fault(1, "ring.published")) as made:
        result = made.result(2)
    assert_went_on([result], [2])


def test_with_fewer_left_than_are_wanted_the_run_ends(tmp_path: Path) -> None:
    with case(tmp_path / "run", trains, Fault(1, "ring.sent"), at_least=3) as made:
        for who in (0, 2):
            assert made.result(who)["error"] == (
                "RunError: the ring does not go on: 2 of its workers are left, and at least 3 must be"
            )


def around(session: Session, who: int, folder: Path) -> dict[str, Any]:
    """Every collective of a session, and what came of each. A member that is to die does so in `DIES`."""
    counts: dict[str, int] = {}

    def dies(where: str) -> None:
        counts[where] = counts.get(where, 0) + 1
        points.reach(f"test.{where}")

    result: dict[str, Any] = {}
    dies("prepare")
    model, optimizer = make()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(who)  # the first member's values become everyone's
    session.prepare(model, optimizer)
    dies("gather")
    result["gathered"] = session.gather(who)
    dies("reduce")
    result["mean"] = session.reduce(float(who), weight=2.0**who)
    dies("barrier")
    session.barrier()
    dies("save")
    session.save(folder / "checkpoint")
    dies("load")
    session.load(folder / "checkpoint")
    result["parameters"] = [p.detach().tolist() for p in model.parameters()]
    return result


@pytest.mark.parametrize(
    "where",
    [
        "prepare",
        "gather",
        "save",
        *(pytest.param(w, marks=pytest.mark.soak) for w in ("reduce", "barrier", "load")),
    ],
)
def test_one_dies_where_the_others_wait_in_a_collective_of_the_session(tmp_path: Path, where: str) -> None:
    with case(tmp_path / "run", around, Fault(0, f"test.{where}", iteration=-1)) as made:
        made.killed(0)
        results = [made.result(who) for who in (1, 2)]
    for result in results:
        assert "error" not in result, result["error"]
        assert result["parameters"] == results[0]["parameters"]
        before = ["prepare", "gather", "reduce", "barrier", "save", "load"].index(where)
        assert result["gathered"] == ([0, 1, 2] if before > 1 else [1, 2])
        mean = (0 + 1 * 2 + 2 * 4) / 7 if before > 2 else (1 * 2 + 2 * 4) / 6
        assert result["mean"] == pytest.approx(mean)


def break_connections(ring: Ring) -> int:
    """Break those over which sums pass; return the number of c10d's."""
    assert ring.channels.current is not None
    assert ring.channels.current.member_links is not None
    for link in ring.channels.current.member_links.by_rank.values():
        link.shutdown(socket.SHUT_RDWR)
    return shut(ring.agreement._ports, ring.agreement._peers)


def cut_off(session: Session, who: int, folder: Path) -> dict[str, Any]:
    """As `trains`; in one iteration all connections of worker 1 to the others break, as a router might do."""
    model, optimizer = make()
    session.prepare(model, optimizer)
    counted = []
    for step in range(STEPS):
        optimizer.zero_grad()
        session.weight(2.0**who)
        if (who, step) == (1, STRIKE):
            assert session._runtime.ring is not None
            assert break_connections(session._runtime.ring) == 2
        loss_of(model, who, step).backward()
        counted.append(weight_of(session))
        optimizer.step()
    return {"counted": counted, "parameters": [p.detach().tolist() for p in model.parameters()]}


def test_connections_that_break_between_the_living_are_made_again(tmp_path: Path) -> None:
    with case(tmp_path / "run", cut_off) as made:
        results = [made.result(who) for who in range(3)]
        assert made.told("ring") == ["ring 1 of 3 workers", "ring 2 of 3 workers"]
        assert "a connection was lost during iteration 3; the ring goes on with 3 workers" in made.said(0)
    assert_went_on(results, [0, 1, 2])
    assert results[0]["counted"] == [7.0] * STEPS


# -- the last word of a round is lost -----------------------------------------------------------------------


def lose_word(session: Session, of: str, have_it: Callable[[], bool]) -> None:
    """This worker confirms to the others that it holds a round's result, all of them hear so and go on; and
    its connections break before it hears that from them. Once."""
    ring = session._runtime.ring
    assert ring is not None
    confirm = ring._confirm
    lost = []

    def loses(what: str) -> None:
        confirm(what)
        if of in what and not lost:
            lost.append(what)
            wait_for(have_it, "the others to go on", DEADLINE / 2)
            break_connections(ring)
            raise BrokenRingError("the others' last word is lost")

    ring._confirm = loses  # type: ignore[method-assign]


def goes_on_without_a_word(session: Session, who: int, folder: Path) -> dict[str, Any]:
    """Worker 1 misses the end of the iteration in which all agree to let in a newcomer."""
    at = 2
    if who == 1:
        others = [folder / f"{each}.past" for each in (0, 2)]
        lose_word(session, f"iteration {at}", lambda: all(file.exists() for file in others))
    model, optimizer = make()
    session.prepare(model, optimizer)
    first = session.resume()
    counted: list[float] = []
    ring = session._runtime.ring
    assert ring is not None
    for step in range(first, STEPS):
        if step in (at, at + 2) and session.world < 4:  # in the second, at the latest, they hear of it again
            (folder / f"{who}.stops").touch()
            wait_for(lambda: ring.is_awaited, "a newcomer", DEADLINE / 2)
        optimizer.zero_grad()
        session.weight(2.0**who)
        loss_of(model, who, step).backward()
        if step == at:
            (folder / f"{who}.past").touch()
        counted.append(weight_of(session))
        optimizer.step()
    return {"counted": counted, "parameters": [p.detach().tolist() for p in model.parameters()]}


def test_a_ring_breaks_when_some_are_about_to_let_in_a_newcomer(tmp_path: Path) -> None:
    """Who waits at the hub for the others to let it in, and who is told of another ring first, do alike."""
    with case(tmp_path / "run", goes_on_without_a_word) as made:
        let_in(made)
        results = [made.result(who) for who in range(4)]
        rings = ["ring 1 of 3 workers", "ring 2 of 3 workers", "ring 3 of 4 workers"]
        assert made.told("ring") == rings
    for result in results:
        assert "error" not in result, result["error"]
        assert result["parameters"] == results[0]["parameters"]
    assert results[0]["counted"] in ([7.0] * 4 + [15.0] * 2, [7.0] * 5 + [15.0])


# -- data ---------------------------------------------------------------------------------------------------

SAMPLES = 60


def deals(session: Session, who: int, folder: Path) -> dict[str, Any]:
    """An epoch in batches of two; what was in each is written down before it is used."""
    model, optimizer = make()
    session.prepare(model, optimizer)
    data = torch.utils.data.TensorDataset(torch.arange(SAMPLES))
    sampler = session.sampler(data, seed=3)
    counted = []
    with (folder / f"{who}.samples").open("a") as file:
        for (indices,) in torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler):
            file.write(json.dumps(indices.tolist()) + "\n")
            file.flush()
            optimizer.zero_grad()
            session.weight(2.0**who)
            model(torch.ones(len(indices), 5, dtype=torch.float64)).square().mean().backward()
            counted.append(weight_of(session))
            optimizer.step()
    return {"counted": counted}


@pytest.mark.parametrize(
    ("who", "point"),
    [(0, "ring.agreed"), (2, "ring.held"), pytest.param(1, "ring.published", marks=pytest.mark.soak)],
)
def test_each_sample_of_an_epoch_counts_once_although_a_worker_dies(
    tmp_path: Path, who: int, point: str
) -> None:
    with case(tmp_path / "run", deals, Fault(who, point)) as made:
        survivors = [each for each in range(3) if each != who]
        results = [made.result(each) for each in survivors]
        assert_each_sample_counted(made, results)


def assert_each_sample_counted(made: Case, results: list[dict[str, Any]]) -> None:
    given = [(made.folder / f"{each}.samples").read_text().splitlines() for each in range(3)]
    for result in results:
        assert result.get("counted", result) == results[0]["counted"]
    used = [
        index
        for step, weight in enumerate(results[0]["counted"])
        for each in members_of(weight)
        for index in json.loads(given[each][step])
    ]
    assert set(used) == set(range(SAMPLES))
    assert len(used) <= SAMPLES + 2 * 2  # what is missing in the last batches is filled up


def deals_while_a_word_is_lost(session: Session, who: int, folder: Path) -> dict[str, Any]:
    """As `deals`; worker 1 misses the end of the members' meeting in which data is dealt anew."""
    if who == 1:
        lose_word(session, "places", (folder / "0.dealt").exists)
    if who == 0:
        deal = session._state.deal_anew

        def dealt(*arguments: Any) -> None:
            deal(*arguments)
            (folder / "0.dealt").touch()

        session._state.deal_anew = dealt  # type: ignore[method-assign]
    return deals(session, who, folder)


def test_a_ring_breaks_when_some_have_dealt_the_data_anew(tmp_path: Path) -> None:
    with case(tmp_path / "run", deals_while_a_word_is_lost, Fault(2, "ring.agreed")) as made:
        results = [made.result(who) for who in (0, 1)]
        assert len(made.told("ring")) == 3
        assert_each_sample_counted(made, results)


# -- newcomers ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TakesIn:
    """Two begin, and stop in iteration `at` until a third one, which is started then (`let_in`), wants to
    enter: so it does in the next one."""

    at: int = 2

    def __call__(self, session: Session, who: int, folder: Path) -> dict[str, Any]:
        model, optimizer = make()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        session.prepare(model, optimizer)
        first = session.resume()
        counted: list[float] = []
        ring = session._runtime.ring
        assert ring is not None
        for step in range(first, STEPS):
            if step == self.at:
                (folder / f"{who}.stops").touch()
                wait_for(lambda: ring.is_awaited, "a newcomer", DEADLINE / 2)
            optimizer.zero_grad()
            session.weight(2.0**who)
            loss_of(model, who, step).backward()
            counted.append(weight_of(session))
            optimizer.step()
            scheduler.step()
        parameters = [p.detach().tolist() for p in model.parameters()]
        return {"first": first, "counted": counted, "parameters": parameters, "lr": scheduler.get_last_lr()}


@pytest.mark.parametrize("at", [0, 2])
def test_a_late_worker_enters_between_two_iterations_with_a_living_ones_state(
    tmp_path: Path, at: int
) -> None:
    with case(tmp_path / "run", TakesIn(at), workers=2) as made:
        let_in(made)
        results = [made.result(who) for who in range(3)]
        assert made.told("ring") == ["ring 1 of 2 workers", "ring 2 of 3 workers"]
    before, after = at + 1, STEPS - at - 1
    assert [result.get("first", result) for result in results] == [0, 0, before]
    for result in results:
        assert (result["world"], result["lr"]) == (3, results[0]["lr"])
        assert result["parameters"] == results[0]["parameters"]
        assert result["counted"][-after:] == [7.0] * after
    assert results[0]["counted"] == [3.0] * before + [7.0] * after


@pytest.mark.parametrize("who", [0, 1, 2])
def test_one_dies_while_a_late_worker_enters(tmp_path: Path, who: int) -> None:
    """The first, which gives its state; another; and the one that enters. Those who are left go on."""
    fault = Fault(who, "ring.formed", iteration=-1)
    with case(tmp_path / "run", TakesIn(), fault, workers=2, patience=4.0) as made:
        let_in(made)
        made.killed(who)
        survivors = [each for each in range(3) if each != who]
        results = [made.result(each) for each in survivors]
    for result in results:
        assert "error" not in result, result["error"]
        assert result["parameters"] == results[0]["parameters"]
        assert (result["world"], result["lr"]) == (2, results[0]["lr"])
        assert members_of(result["counted"][-1]) == survivors


def does_not_resume(session: Session, who: int, _folder: Path) -> dict[str, Any]:
    """The late one forgets session.resume."""
    return trains(session, who, _folder) if who == 2 else takes_in_nobody(session, who, _folder)


def takes_in_nobody(session: Session, who: int, folder: Path) -> dict[str, Any]:
    model, optimizer = make()
    session.prepare(model, optimizer)
    wait_for((folder / "2.json").exists, "the end of the late one", DEADLINE)
    loss_of(model, who, 0).backward()
    optimizer.step()
    return {}


def test_a_late_worker_that_does_not_resume_is_refused_in_one_line(tmp_path: Path) -> None:
    with case(tmp_path / "run", does_not_resume, workers=2) as made:
        wait_for(lambda: made.told("ring"), "the ring", DEADLINE)
        made.start(2)
        assert made.result(2)["error"].startswith(
            "UserError: this worker came when the run was under way; call session.resume() before the loop"
        )
        assert [made.result(who)["world"] for who in range(2)] == [2, 2]
