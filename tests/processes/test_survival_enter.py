"""Workers that come late, of a parameter server: what they are given, and whose samples count.

Hub and shards run here, on threads; each worker is a process of its own, which is killed and started again.
"""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_script import ForkedScript
from run_command import wait_for
from torch import nn
from transports import LINK_TABLE

from atoll.core.config import CONFIG_VARIABLE, HUB_VARIABLE, RANK_VARIABLE, RUN_VARIABLE
from support.served import RUN, ServedRun

PATIENCE = 5.0  # seconds until the hub gives up who was killed
DEADLINE = 90.0
LENGTH, BATCH, EPOCHS = 240, 8, 2
PACE = 0.1  # seconds of an iteration while somebody is to come

# Each line of a worker's notes is one iteration that counts. A worker whose rank is in `hang` stops in that
# iteration, before its backward; one whose rank is in `pace` goes slowly from that iteration on, until a file
# says that all are there, and before the first slow one waits for the workers in `ready` to have set
# themselves up. `die` has a point of the code for a worker's name, at which it kills itself.
SCRIPT = f"""
import json, os, pathlib, signal, sys, time
import torch
import atoll
from atoll.core import points

torch.set_num_threads(1)
plan = json.loads(sys.argv[1])
me, name = os.environ["ATOLL_RANK"], sys.argv[2]
points.install(lambda at, _: os.kill(os.getpid(), signal.SIGKILL) if at == plan["die"].get(name) else None)
torch.manual_seed(0 if not plan["late"] else 77)  # who comes late begins with other values
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)).double()
model.register_buffer("seen", torch.zeros(()).double())
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
data = torch.utils.data.TensorDataset(torch.load("inputs.pt"), torch.arange({LENGTH}))


class Average:
    def __init__(self):
        self.values = [torch.zeros_like(p) for p in model.parameters()]

    def update(self):
        for value, p in zip(self.values, model.parameters()):
            value.lerp_(p.detach(), 0.2)

    def state_dict(self):
        return {{"values": self.values}}

    def load_state_dict(self, state):
        for value, saved in zip(self.values, state["values"]):
            value.copy_(saved)


with atoll.join() as session, open(f"notes-{{name}}", "w", buffering=1) as notes:
    session.prepare(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    average = Average()
    session.register(average=average)
    if plan["batches"]:
        sampler = session.batches(data, seed=5)
        loader = torch.utils.data.DataLoader(data, batch_sampler=sampler)
    else:
        sampler = session.sampler(data, seed=5)
        loader = torch.utils.data.DataLoader(data, batch_size={BATCH} // 2, sampler=sampler)
    pathlib.Path(f"ready-{{name}}").touch()
    done = session.resume() if plan["resume"] else session.iteration
    assert done == session.iteration
    for epoch in range(sampler.epoch, {EPOCHS}):
        sampler.set_epoch(epoch)
        for x, indices in loader:
            at, lr = session.iteration, optimizer.param_groups[0]["lr"]
            if at >= plan["pace"].get(me, 10**9) and not pathlib.Path("all-there").exists():
                while not all(pathlib.Path(f"ready-{{each}}").exists() for each in plan["ready"]):
                    time.sleep(0.02)
                time.sleep({PACE})
            while at >= plan["hang"].get(me, 10**9):
                pathlib.Path(f"hangs-{{name}}").touch()
                time.sleep(0.05)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            world = session.world
            optimizer.step()
            scheduler.step()
            average.update()
            model.seen += 1
            used = indices.tolist()
            if plan["batches"] and session._state.models[0].samples.latest == 0:
                used = []  # a fill
            print(json.dumps([at, used, lr, world]), file=notes)
    ends = [p.detach() for p in model.parameters()]
    torch.save({{"model": ends, "average": average.values, "seen": model.seen}}, f"end-{{name}}.pt")
"""


class Workers:
    """Worker processes of one served run, in `folder`."""

    def __init__(self, folder: Path, address: str, strategy: str, sync: str, plan: dict[str, Any]) -> None:
        self.folder, self._address, self._plan = folder, address, plan
        self._processes: dict[str, ForkedScript] = {}
        (folder / "script.py").write_text(SCRIPT)
        (folder / "atoll.toml").write_text(
            f"[run]\nstrategy = '{strategy}'\n[chunks]\nsize = '1KiB'\n[sync]\ntimeout = '60s'\n{sync}\n"
            + (LINK_TABLE if strategy == "server" else "")  # a ring has its own connections
        )
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(LENGTH, 6, generator=generator, dtype=torch.float64)
        torch.save(self.inputs, folder / "inputs.pt")

    def start(self, name: str, rank: int, **plan: Any) -> ForkedScript:
        given = {
            "late": False,
            "resume": True,
            "batches": True,
            "hang": {},
            "pace": {},
            "die": {},
            "ready": [],
            **self._plan,
            **plan,
        }
        environment = {
            **os.environ,
            HUB_VARIABLE: self._address,
            RUN_VARIABLE: RUN,
            RANK_VARIABLE: str(rank),
            CONFIG_VARIABLE: str(self.folder / "atoll.toml"),
            "OMP_NUM_THREADS": "1",
        }
        process = ForkedScript(
            self.folder / "script.py",
            json.dumps(given),
            name,
            folder=self.folder,
            environment=environment,
            log=self.folder / f"log-{name}",
        )
        self._processes[name] = process
        return process

    def kill(self, name: str) -> None:
        """When it hangs, as it is to."""
        self.wait(lambda: (self.folder / f"hangs-{name}").exists(), f"{name} to hang")
        self._processes[name].send_signal(signal.SIGKILL)
        self._processes[name].wait(DEADLINE)

    def await_death(self, name: str) -> None:
        """By the point of the code at which it is to die."""
        process = self._processes[name]
        assert process.wait(DEADLINE) == -signal.SIGKILL, process.said

    def wait(self, done: Callable[[], bool], what: str) -> None:
        """A worker that has failed meanwhile says why."""

        def check() -> bool:
            for name, process in self._processes.items():
                if process.status not in (None, 0, -signal.SIGKILL):
                    raise AssertionError(f"{name}: {process.said}")
            return done()

        wait_for(check, what)

    def finish(self, *names: str) -> None:
        for name in names:
            process = self._processes[name]
            assert process.wait(DEADLINE) == 0, f"{name}: {process.said}"

    def notes(self, name: str) -> list[tuple[int, list[int], float, int]]:
        """Of each iteration: its number, the samples, the learning rate, and how many workers there were."""
        path = self.folder / f"notes-{name}"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [tuple(json.loads(line)) for line in lines if line.endswith("\n")]

    def end(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = torch.load(self.folder / f"end-{name}.pt", weights_only=True)
        return found

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait(DEADLINE)


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Workers]]:
    """A run with its hub, and its two shards where it has a parameter server, and nobody in it."""
    runs: list[ServedRun] = []
    teams: list[Workers] = []

    def make(workers: int, sync: str, strategy: str = "server", **plan: Any) -> Workers:
        shards = 2 if strategy == "server" else 0
        runs.append(ServedRun(workers=workers, shards=shards, patience=PATIENCE, heartbeat=0.3))
        runs[-1].__enter__()
        teams.append(Workers(tmp_path, runs[-1].address, strategy, sync, plan))
        return teams[-1]

    yield make
    for team in teams:
        team.close()
    for run in runs:
        run.stop()
        assert run.failures == []


def merged(workers: Workers, *names: str) -> dict[int, list[int]]:
    """The samples of each iteration, over all workers."""
    found: dict[int, list[int]] = {}
    for name in names:
        for at, samples, _, _ in workers.notes(name):
            found.setdefault(at, []).extend(samples)
    return dict(sorted(found.items()))


Tensors = list[torch.Tensor]


def plain(workers: Workers, iterations: dict[int, list[int]]) -> tuple[Tensors, Tensors]:
    """One process, without Atoll, on the same samples: the parameters, and their average, at the end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    average = [torch.zeros_like(p) for p in model.parameters()]
    for samples in iterations.values():
        optimizer.zero_grad()
        model(workers.inputs[samples]).square().mean().backward()
        optimizer.step()
        scheduler.step()
        for value, p in zip(average, model.parameters(), strict=True):
            value.lerp_(p.detach(), 0.2)
    return [p.detach() for p in model.parameters()], average


def assert_near(left: Tensors, right: Tensors) -> None:
    for one, other in zip(left, right, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_bsp_a_worker_is_killed_and_started_again(begin: Callable[..., Workers]) -> None:
    """The run ends as if one process had trained on the same samples, each of which counts once an epoch."""
    plan = {"hang": {"1": 5}, "pace": {"0": 8}, "ready": ["again"]}
    workers = begin(2, f"global_batch = {BATCH}", **plan)
    workers.start("zero", 0)
    workers.start("one", 1)
    workers.kill("one")
    refused = workers.start("without", 2, late=True, resume=False)
    workers.start("again", 1, late=True, hang={})
    assert refused.wait(DEADLINE) == 2
    line = refused.said.strip().splitlines()[-1]
    assert "this worker comes late: the run is under way; call session.resume() before the loop" in line
    del workers._processes["without"]
    workers.wait(lambda: bool(workers.notes("again")), "the new worker's first iteration")
    (workers.folder / "all-there").touch()
    workers.finish("zero", "again")

    zero, again = workers.notes("zero"), workers.notes("again")
    assert [at for at, *_ in zero] == list(range(len(zero)))
    assert [at for at, *_ in again] == list(range(again[0][0], len(zero)))  # from where it entered
    assert again[0][0] > 5
    rates = {at: lr for at, _, lr, _ in zero}
    assert all(lr == rates[at] for at, _, lr, _ in again)

    iterations = merged(workers, "zero", "one", "again")
    used = Counter(index for samples in iterations.values() for index in samples)
    assert used == Counter(dict.fromkeys(range(LENGTH), EPOCHS))
    sizes = [len(samples) for samples in iterations.values()]
    assert sizes[5] == BATCH // 2  # what the lost one had is dealt again
    assert sizes.count(BATCH) == len(sizes) - 2
    parameters, average = plain(workers, iterations)
    for name in ("zero", "again"):
        end = workers.end(name)
        assert_near(end["model"], parameters)
        assert_near(end["average"], average)
        assert end["seen"] == len(zero)
    ends = [workers.end(name)["model"] for name in ("zero", "again")]
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


@pytest.mark.parametrize(("strategy", "shares"), [("server", "even"), ("ring", "even"), ("ring", "auto")])
def test_a_run_grows_from_two_to_four_and_shrinks_to_one(
    begin: Callable[..., Workers], strategy: str, shares: str
) -> None:
    """With a constant global batch: as one process trains, whoever is there and takes which part."""
    sync = f"global_batch = {BATCH}\nshares = '{shares}'\nleast = 1"
    workers = begin(2, sync, strategy, pace={"0": 4}, ready=["2", "3"])
    for rank in range(2):
        workers.start(str(rank), rank, hang={"1": 40})
    workers.wait(lambda: bool(workers.notes("0")), "the run's first iteration")
    for rank in (2, 3):
        workers.start(str(rank), rank, late=True, hang={"2": 40, "3": 40})
    workers.wait(lambda: bool(workers.notes("2")) and bool(workers.notes("3")), "four workers")
    (workers.folder / "all-there").touch()
    for name in ("1", "2", "3"):
        workers.kill(name)
    workers.finish("0")

    iterations = merged(workers, "0", "1", "2", "3")
    used = Counter(index for samples in iterations.values() for index in samples)
    assert used == Counter(dict.fromkeys(range(LENGTH), EPOCHS))
    worlds = [world for *_, world in workers.notes("0")]
    assert worlds[0] == 2
    assert max(worlds) == 4
    assert worlds[-1] == 1
    short = [at for at, samples in iterations.items() if len(samples) != BATCH]
    assert short[0] == 40  # where three were lost, at once or one after the other
    assert len(short) <= 4
    parameters, average = plain(workers, iterations)
    assert_near(workers.end("0")["model"], parameters)
    assert_near(workers.end("0")["average"], average)


@pytest.mark.soak
def test_newcomers_and_who_lets_them_in_may_die_on_the_way(begin: Callable[..., Workers]) -> None:
    """One newcomer dies as a member that has nothing yet; worker 0 as it is about to give its state to
    another, who gets it from the next."""
    die = {"lost": "enter.member", "zero": "enter.giving"}
    slow = {"pace": {"0": 4, "1": 4}, "ready": ["lost", "new"]}
    workers = begin(2, f"global_batch = {BATCH}", die=die, **slow)
    for rank, name in enumerate(("zero", "one")):
        workers.start(name, rank)
    workers.wait(lambda: bool(workers.notes("zero")), "the run's first iteration")
    workers.start("lost", 2, late=True)
    workers.start("new", 3, late=True)
    workers.await_death("lost")
    workers.await_death("zero")
    workers.wait(lambda: bool(workers.notes("new")), "the new worker's first iteration")
    (workers.folder / "all-there").touch()
    workers.finish("one", "new")

    one, new = workers.notes("one"), workers.notes("new")
    assert [at for at, *_ in one] == list(range(len(one)))
    assert [at for at, *_ in new] == list(range(new[0][0], len(one)))
    iterations = merged(workers, "zero", "one", "new")
    used = Counter(index for samples in iterations.values() for index in samples)
    assert used == Counter(dict.fromkeys(range(LENGTH), EPOCHS))
    parameters, average = plain(workers, iterations)
    for name in ("one", "new"):
        assert_near(workers.end(name)["model"], parameters)
        assert_near(workers.end(name)["average"], average)
    assert one[-1][3] == 2


def test_asp_a_worker_is_killed_and_started_again(begin: Callable[..., Workers]) -> None:
    plan = {"hang": {"1": 5}, "pace": {"0": 8}, "ready": ["again"], "batches": False}
    workers = begin(2, "consistency = 'asp'", **plan)
    workers.start("zero", 0)
    workers.start("one", 1)
    workers.kill("one")
    workers.start("again", 1, late=True, hang={})
    workers.wait(lambda: bool(workers.notes("again")), "the new worker's first iteration")
    (workers.folder / "all-there").touch()
    workers.finish("zero", "again")

    zero, again = workers.notes("zero"), workers.notes("again")
    assert again[0][0] > 5
    assert [at for at, *_ in again] == list(range(again[0][0], again[0][0] + len(again)))
    rates = {at: lr for at, _, lr, _ in zero}
    assert all(lr == pytest.approx(rates[at]) for at, _, lr, _ in again if at in rates)
    names = ("zero", "one", "again")
    used = Counter(index for name in names for _, samples, *_ in workers.notes(name) for index in samples)
    assert used == Counter(dict.fromkeys(range(LENGTH), EPOCHS))
    assert workers.end("again")["seen"] == again[-1][0] + 1
