"""Workers in groups (strategy ps-hra) as processes that are struck at points of their code, and their
accounts.

Under asp the model counts: it has a parameter for each sample, whose gradient in a batch is 1, and Adam
without memory takes exactly 1 off in each step in which a gradient is there (`test_survival_soak.py`). What
only fills a batch up has none. Under bsp worker r weighs 2 ** r, so that an iteration's sum of weights says
who counted, and plain PyTorch computes the same from that.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import hashlib
import itertools
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from run_command import wait_for
from torch import Tensor, nn
from transports import LINK

import atoll
from atoll.core import points
from atoll.core.config import RUN_VARIABLE, Chunks, Config, Groups, LinkOptions, Run, Sync
from atoll.core.errors import AtollError
from atoll.core.memory import Memory
from atoll.groups.chooser import Score, ScoreFunction
from atoll.groups.grouping import Grouping
from atoll.hub.decisions import Decision, read_decisions
from atoll.hub.planner import GroupingSettings, WorkerMeasurements
from atoll.train.api.session import Session
from atoll.train.data.leased_sampler import LeasedBatches, LeasedSampler
from atoll.train.data.sampler import ShardedSampler
from atoll.train.sync.server import MeanExchange, Server
from support.pool import FORKSERVER
from support.served import RUN, served_worker

DEADLINE = 60.0
PROBE = 3  # iterations
AFTER = 2  # iterations in a group before a fault
ENOUGH = 8  # iterations that each makes when all is over
MOST = 4  # workers
SAMPLES, BATCH = 240, 3
EPOCHS_AHEAD, ITERATIONS_AHEAD = 3, 15  # how long before the end the workers are told of it
PAUSE = 0.01  # seconds of each iteration
AHEAD = 3  # batches of unlike parts that every other worker fetches ahead
GOES_ON = 5.0  # seconds, from the hub's word that a worker died


def settings(groups: Sequence[Sequence[int]], consistency: str, **options: Any) -> GroupingSettings:
    """A hub's that makes these groups, whatever it measures; of those who are left, what is left of them."""
    wanted = Grouping(groups)

    def score_for(known: WorkerMeasurements) -> ScoreFunction:
        there = known.speeds
        left = Grouping(rest for group in wanted if (rest := [rank for rank in group if rank in there]))
        return lambda grouping: Score(2.0 if grouping == left else 1.0)

    options = {"regroup": False, "score_for": score_for, **options}
    return GroupingSettings(len(groups), by="joint", consistency=consistency, **options)  # type: ignore[arg-type]


# -- faults ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """`who` gets `what` when it reaches `point` for the `nth` time in an iteration of a group (in which it
    speaks to the log, or does not, where `leads` says so); `anywhere`: as it moves, or prepares a model, for
    the `nth` time."""

    who: int
    point: str
    leads: bool | None = None
    nth: int = 1
    what: signal.Signals = signal.SIGKILL

    @property
    def anywhere(self) -> bool:
        return self.point in MOVING or self.point in CHANGING

    @property
    def file(self) -> str:
        return f"fired-{self.who}-{self.point}"

    def __str__(self) -> str:
        leads = {None: "", True: " leads", False: " follows"}[self.leads]
        return f"{self.who} {self.point}{leads}{f' {self.nth}' if self.nth > 1 else ''}"


LINGER_SECONDS = 1.0  # in which others make many iterations, where they can
MOVING = ("group.leaving", "group.formed", "group.ring", "group.arrived", "group.joined")
CHANGING = ("change.left", "setup.sent", "setup.ready")  # a model is prepared, or prepared again


@dataclass
class Striker:
    """Lets faults happen to this process, each once, written down before."""

    who: int
    faults: tuple[Fault, ...]
    folder: Path
    lingers: str = ""  # a point that it takes LINGER_SECONDS to pass
    session: Session | None = None
    since: int | None = None  # the first iteration in a group
    struck: dict[Fault, int] = field(default_factory=dict)  # the iteration in which one is to happen
    counts: Counter[Fault] = field(default_factory=Counter)
    fired: set[Fault] = field(default_factory=set)

    def __call__(self, point: str, iteration: int) -> None:
        if point == self.lingers:
            time.sleep(LINGER_SECONDS)
        for fault in self.faults:
            due = self._is_due(fault, iteration)
            if fault.point != point or fault in self.fired or not due:
                continue
            self.counts[fault] += 1
            if self.counts[fault] == fault.nth:
                self.fired.add(fault)
                (self.folder / fault.file).write_text(str(time.time()))
                os.kill(os.getpid(), fault.what)
                time.sleep(0.05 if fault.what == signal.SIGSTOP else DEADLINE)

    def _is_due(self, fault: Fault, iteration: int) -> bool:
        if fault.anywhere:
            return True
        if fault not in self.struck and self.session is not None and iteration >= 0:
            session = self.session
            if session.group.size < 2:
                return False
            self.since = iteration if self.since is None else self.since
            reducer = session._state.prepared[0].reducer
            assert isinstance(reducer, Server)
            fits = fault.leads in (None, reducer.uplink.role(iteration).leads)
            if iteration >= self.since + AFTER and fits:
                self.struck[fault] = iteration
        return self.struck.get(fault) == iteration


# -- what the workers do -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What a worker is told; `uplink` as sync.uplink."""

    address: str
    consistency: str
    uplink: str
    faults: tuple[Fault, ...]
    folder: Path
    run: str = RUN
    tiers: bool = False  # under budgets of memory: a third of the parameters on the device
    edits: bool = False  # bsp: the script clips each mean, and changes a part of it
    changes: bool = False  # the model is changed and prepared again, now and then
    shares: bool = False  # asp: members take unlike parts, by speed; a worker's pause is for BATCH samples


class Counting(nn.Module):
    """Says how often each sample was in a step. A step may have as many contributions as there are workers,
    also of one of them, and of two epochs: each worker has rows of its own, in turns by iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(MOST * MOST, SAMPLES))

        self.more = nn.ParameterList()

    def forward(self, indices: Tensor, row: int, own: Tensor) -> Tensor:
        return self.counts[row, indices] * own

    def grow(self, optimizer: torch.optim.Optimizer) -> None:
        """Have one more parameter, of which nothing is used, in a param group of its own."""
        self.more.append(nn.Parameter(torch.ones(len(self.more) + 2)))
        optimizer.add_param_group({"params": [self.more[-1]], "lr": 0.5})


def own_among(sampler: LeasedSampler, count: int) -> Tensor:
    """Which of the `count` samples that were given last are, 1, and which only fill a batch up, 0."""
    held = [epoch >= 0 for epoch, start, stop in sampler._hand.runs for _ in range(start, stop)]
    return torch.tensor(held[:count], dtype=torch.float32)


@dataclass(frozen=True)
class Fetched:
    """A loader's batches, each of which is fetched `ahead` batches before its use."""

    loader: Any
    ahead: int

    def __iter__(self) -> Iterator[Tensor]:
        batches = iter(self.loader)
        ready = deque(itertools.islice(batches, self.ahead))
        for batch in batches:
            ready.append(batch)
            yield ready.popleft()
        yield from ready


class Notes:
    """A worker's own: one line for what it tries, and one for what is done."""

    def __init__(self, who: int, session: Session, model: nn.Module, folder: Path) -> None:
        self._session, self._model = session, model
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._file = os.open(folder / f"notes-{who}", flags)

    def add(self, what: str, iteration: int, **more: Any) -> None:
        group = self._session.group
        regrouping = self._session._runtime.regrouping
        assert regrouping is not None
        line = {"what": what, "time": time.time(), "iteration": iteration, "size": group.size}
        line["contributor"] = regrouping.contributor
        if what == "done":
            digest = hashlib.blake2b(digest_size=8)
            for parameter in self._model.parameters():
                digest.update(parameter.detach().numpy().tobytes())
            line["digest"] = digest.hexdigest()
        os.write(self._file, json.dumps(line | more).encode() + b"\n")


def set_pause(folder: Path, who: int, seconds: float) -> None:
    """From now on each iteration of a worker takes so much longer."""
    (folder / f"pause-{who}.new").write_text(str(seconds))
    (folder / f"pause-{who}.new").rename(folder / f"pause-{who}")


def pause_of(who: int, folder: Path) -> float:
    told = folder / f"pause-{who}"
    return float(told.read_text()) if told.exists() else PAUSE


def told_end(folder: Path) -> int:
    told = folder / "end"
    return int(told.read_text()) if told.exists() else sys.maxsize


def counts(session: Session, who: int, plan: Plan) -> dict[str, Any]:
    """asp: count samples until the epoch that the test says."""
    folder = plan.folder
    model = Counting()
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.0, 0.0), eps=1e-30)
    session.prepare(model, optimizer)
    data = torch.arange(SAMPLES)
    loader: Any
    if plan.shares:
        batches = session.batches(data, seed=7)
        assert isinstance(batches, LeasedBatches)
        sampler = batches.sampler
        # Members that fetch unlike amounts ahead, and so ask for blocks that others have not asked for:
        ahead = AHEAD * (who % 2)
        loader = Fetched(torch.utils.data.DataLoader(data, batch_sampler=batches), ahead)  # type: ignore[arg-type]
    else:
        sampler = session.sampler(data, seed=7)  # type: ignore[assignment]
        loader = torch.utils.data.DataLoader(data, batch_size=BATCH, sampler=sampler)  # type: ignore[arg-type]
    assert isinstance(sampler, LeasedSampler)
    session.resume()
    notes = Notes(who, session, model, folder)
    for epoch in itertools.count(sampler.epoch):
        if epoch >= told_end(folder):
            break
        if plan.changes and epoch:
            model.grow(optimizer)
            session.prepare(model, optimizer)
        for indices in loader:
            iteration, own = session.iteration, own_among(sampler, len(indices))
            given = indices[own > 0].tolist()
            optimizer.zero_grad()
            notes.add("tried", iteration, epoch=epoch, indices=given)
            time.sleep(pause_of(who, folder) * (len(indices) / BATCH if plan.shares else 1))
            model(indices, MOST * who + iteration % MOST, own).sum().backward()
            optimizer.step()
            notes.add("done", iteration, epoch=epoch, indices=given)
    session.barrier()
    return {"counts": [[float(each) for each in row] for row in model.counts.detach()]}


_seeding = threading.Lock()


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    with _seeding:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 33), nn.Tanh(), nn.Linear(33, 7)).double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def loss_of(model: nn.Module, who: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + who)
    return model(torch.randn(3, 5, generator=generator, dtype=torch.float64)).square().mean()


EVERY = 10  # iterations, after which a model that changes is another one


def replace_head(model: nn.Module, step: int) -> torch.optim.Optimizer:
    """What a script makes of a model that changes, before this step; the rest keeps no state."""
    assert isinstance(model, nn.Sequential)
    with _seeding:
        torch.manual_seed(step)
        model[-1] = nn.Linear(33, 3 + step // EVERY).double()
    return torch.optim.AdamW(model.parameters(), lr=0.01)


MAX_NORM = 1e-3  # of a mean that is clipped: each has more


def edit(model: nn.Module) -> None:
    """What a script makes of a mean that has been clipped."""
    first = next(model.parameters())
    assert first.grad is not None
    first.grad.mul_(0.5)


def trains(session: Session, who: int, plan: Plan) -> dict[str, Any]:
    """bsp: train until the iteration that the test says; who counted in each is in the sum of weights. What a
    batch trains on follows from the worker and the iteration; the samples that it is given are noted."""
    weights: dict[int, float] = {}
    exchange = MeanExchange._exchange

    def noting(self: Any, outgoing: Any, what: str) -> Any:
        answer, values = exchange(self, outgoing, what)
        weights[outgoing.iteration] = answer.weight
        return answer, values

    MeanExchange._exchange = noting  # type: ignore[method-assign]
    model, optimizer = make()
    session.prepare(model, optimizer)
    data = torch.arange(SAMPLES)
    sampler = session.sampler(data, seed=7)
    assert isinstance(sampler, ShardedSampler)
    session.resume()
    folder = plan.folder
    notes, given = Notes(who, session, model, folder), batches_of(data, sampler)
    while session.iteration < (end := told_end(folder)):
        iteration, indices = session.iteration, next(given)
        if plan.changes and iteration and iteration % EVERY == 0:
            optimizer = replace_head(model, iteration)
            session.prepare(model, optimizer)
        optimizer.zero_grad()
        notes.add("tried", iteration, epoch=sampler.epoch, indices=indices.tolist())
        session.weight(2.0**who)
        time.sleep(pause_of(who, folder))
        loss_of(model, who, iteration).backward()
        if plan.edits:
            session.clip_grad_norm_(MAX_NORM)
            edit(model)
        optimizer.step()
        notes.add("done", iteration, weight=weights[iteration])
    assert session.iteration == end, "the test told of the end too late"
    return {"parameters": [p.detach().tolist() for p in model.parameters()]}


def batches_of(data: Tensor, sampler: ShardedSampler) -> Iterator[Tensor]:
    """Batches of one epoch after the other."""
    while True:
        yield from torch.utils.data.DataLoader(data, batch_size=BATCH, sampler=sampler)  # type: ignore[arg-type]


SCRIPTS: dict[str, Callable[[Session, int, Plan], dict[str, Any]]] = {"asp": counts, "bsp": trains}


def work(who: int, plan: Plan, lingers: str = "") -> None:
    """A worker's whole life; what came of it is in a file."""
    torch.set_num_threads(1)
    folder, striker = plan.folder, Striker(who, plan.faults, plan.folder, lingers)
    striker.faults = tuple(f for f in plan.faults if f.who == who and not (folder / f.file).exists())
    points.install(striker)
    config = Config(
        run=Run(strategy="ps-hra"),
        chunks=Chunks(size="2KiB"),
        sync=Sync(
            timeout="30s",
            consistency=plan.consistency,  # type: ignore[arg-type]
            uplink=plan.uplink,  # type: ignore[arg-type]
            global_batch=MOST * BATCH,
            shares="auto" if plan.shares else "even",
        ),
        groups=Groups(probe=PROBE),
        link=LinkOptions() if plan.tiers else LINK,
        memory=Memory(device="16KiB", chunk="4KiB") if plan.tiers else Memory(),
    )
    with (folder / f"{who}.err").open("a") as sys.stderr:
        faulthandler.register(signal.SIGUSR1, file=sys.stderr)
        try:
            with served_worker(plan.address, who):
                os.environ[RUN_VARIABLE] = plan.run
                with atoll.join(config) as session:
                    striker.session = session
                    result = SCRIPTS[plan.consistency](session, who, plan)
        except AtollError as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        except BaseException:
            result = {"error": traceback.format_exc()}
        beside = folder / f"{who}.new"
        beside.write_text(json.dumps(result))
        beside.replace(folder / f"{who}.json")
        atexit._run_exitfuncs()  # which a forked process does not; the hub waits for this one's goodbye


# -- a case ------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """Workers of a run whose hub keeps its decisions in `decided`; processes that are left are killed at the
    end."""

    plan: Plan
    decided: Path
    processes: dict[int, BaseProcess] = field(default_factory=dict)

    def start(self, who: int, lingers: str = "") -> None:
        self.processes[who] = FORKSERVER.Process(target=work, args=(who, self.plan, lingers))
        self.processes[who].start()

    def pid(self, who: int) -> int:
        pid = self.processes[who].pid
        assert pid is not None
        return pid

    def decisions(self, what: str) -> list[Decision]:
        return [each for each in read_decisions(self.decided) if each.what == what]

    def lines(self, who: int, what: str = "done") -> list[dict[str, Any]]:
        """What a worker noted; a killed one's last line may be torn."""
        path = self.plan.folder / f"notes-{who}"
        raw = path.read_bytes().split(b"\n") if path.exists() else []
        found = [json.loads(line) for line in raw if line.endswith(b"}")]
        return [line for line in found if line["what"] == what]

    def groups(self, whom: Sequence[int]) -> list[list[int]]:
        """Who of these is together, by the latest that each has noted."""
        together = defaultdict(list)
        for who in whom:
            lines = self.lines(who)
            together[lines[-1]["contributor"] if lines else -1 - who].append(who)
        return sorted(together.values())

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        def holds() -> bool:
            for who in self.processes:
                file = self.plan.folder / f"{who}.json"
                assert not file.exists(), f"worker {who} has ended: {file.read_text()} {self.said(who)}"
            return bool(condition())

        try:
            wait_for(holds, what, DEADLINE / 2)
        except AssertionError:
            for process in self.processes.values():
                if process.is_alive():
                    os.kill(process.pid or 0, signal.SIGUSR1)  # it says where each thread is
            time.sleep(0.5)
            raise

    def wait_fired(self, fault: Fault) -> float:
        """When the fault happened, in seconds since the epoch."""
        file = self.plan.folder / fault.file
        self.wait_for(lambda: file.exists() and file.read_text(), f"{fault}")
        return float(file.read_text())

    def wait_until_together(self, groups: Sequence[Sequence[int]]) -> None:
        """Return when the workers are in these groups, and each has made some iterations there."""
        whom = sorted(itertools.chain.from_iterable(groups))
        wanted = sorted(sorted(group) for group in groups)
        what = f"workers to be in groups {wanted}"
        self.wait_for(lambda: self.groups(whom) == wanted, what)
        self.wait_until_all_go_on(whom)

    def wait_until_all_go_on(self, whom: Sequence[int]) -> None:
        before = {who: len(self.lines(who)) for who in whom}
        for who in whom:
            self.wait_for(
                lambda who=who: len(self.lines(who)) >= before[who] + ENOUGH, f"worker {who} to go on"
            )

    def end(self, survivors: Sequence[int]) -> dict[int, dict[str, Any]]:
        """Tell the workers when it is over; what those who live have come to."""
        key, ahead = (
            ("epoch", EPOCHS_AHEAD) if self.plan.consistency == "asp" else ("iteration", ITERATIONS_AHEAD)
        )
        last = max(self.lines(who)[-1][key] for who in survivors) + ahead
        (self.plan.folder / "end.new").write_text(str(last))
        (self.plan.folder / "end.new").rename(self.plan.folder / "end")
        results = {who: self.result(who) for who in survivors}
        for who, result in results.items():
            assert "error" not in result, f"worker {who}: {result['error']} {self.said(who)}"
        return results

    def result(self, who: int) -> dict[str, Any]:
        process = self.processes[who]
        process.join(DEADLINE)
        if process.is_alive():
            os.kill(process.pid or 0, signal.SIGUSR1)
            process.join(1.0)
            raise AssertionError(f"worker {who} still runs: {self.said(who)}")
        file = self.plan.folder / f"{who}.json"
        assert file.exists(), f"worker {who} died: {process.exitcode}, {self.said(who)}"
        result: dict[str, Any] = json.loads(file.read_text())
        return result

    def said(self, who: int) -> str:
        return (self.plan.folder / f"{who}.err").read_text()

    def check(self, results: dict[int, dict[str, Any]], everyone: Sequence[int]) -> None:
        """All accounts of a run that has ended."""
        self.check_equal(everyone)
        if self.plan.consistency == "asp":
            self._check_counts(next(iter(results.values()))["counts"], everyone)
        else:
            self._check_reference(results)
            self._check_dealt(results, everyone)

    def check_equal(self, everyone: Sequence[int]) -> None:
        """All members of a group have the same parameters after each of its iterations."""
        seen: dict[tuple[int, int], tuple[str, int]] = {}
        for who in everyone:
            for line in self.lines(who):
                key = line["contributor"], line["iteration"]
                digest, other = seen.setdefault(key, (line["digest"], who))
                assert line["digest"] == digest, f"workers {other} and {who} differ in {line}"

    def _check_counts(self, found: list[list[float]], everyone: Sequence[int]) -> None:
        """Each sample counted once an epoch; none that was not tried, and each that was acknowledged."""
        end = told_end(self.plan.folder)
        tried, done, hidden = Counter[int](), Counter[int](), Counter[int]()
        for who in everyone:
            for what, counter in (("tried", tried), ("done", done)):
                for line in self.lines(who, what):
                    counter.update(index for index in line["indices"])
            for line in self.lines(who, "done"):
                # Of the epoch before, given up by one that died, and of this one: Adam makes one step of it.
                hidden.update(Counter(line["indices"]) - Counter(set(line["indices"])))
        wrong = []
        for sample in range(SAMPLES):
            counted = -sum(row[sample] for row in found) + hidden[sample]
            if counted != end:  # one that came back may have been in the next epoch
                wrong.append(f"sample {sample}: counted {counted} times in {end} epochs")
            if not done[sample] <= counted <= tried[sample]:
                wrong.append(
                    f"sample {sample}: counted {counted}, done {done[sample]}, tried {tried[sample]}"
                )
        assert not wrong, "\n".join(wrong[:10])

    def _check_reference(self, results: dict[int, dict[str, Any]]) -> None:
        """As plain PyTorch does with what counted."""
        weights: dict[int, float] = {}
        for who in results:
            for line in self.lines(who):
                assert weights.setdefault(line["iteration"], line["weight"]) == line["weight"], line
        assert sorted(weights) == list(range(told_end(self.plan.folder)))
        model, optimizer = make()
        for step in sorted(weights):
            if self.plan.changes and step and step % EVERY == 0:
                optimizer = replace_head(model, step)
            optimizer.zero_grad()
            for who in members_of(weights[step]):
                (loss_of(model, who, step) * 2.0**who / weights[step]).backward()
            if self.plan.edits:
                norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
                assert norm > MAX_NORM, f"iteration {step}: a mean of norm {norm} was not clipped"
                edit(model)
            optimizer.step()
        for result in results.values():
            for ours, theirs in zip(result["parameters"], model.parameters(), strict=True):
                torch.testing.assert_close(
                    torch.tensor(ours, dtype=torch.float64), theirs.detach(), rtol=0, atol=1e-9
                )

    def _check_dealt(self, results: dict[int, dict[str, Any]], everyone: Sequence[int]) -> None:
        """Each sample of an epoch that is over was in one contribution that counted. What fills an epoch's
        last batches up was in two."""
        weights = {line["iteration"]: line["weight"] for who in results for line in self.lines(who)}
        used: dict[int, list[int]] = defaultdict(list)  # by epoch
        for who in everyone:
            tried = {line["iteration"]: line for line in self.lines(who, "tried")}
            for iteration, weight in weights.items():
                if who in members_of(weight):
                    used[tried[iteration]["epoch"]] += tried[iteration]["indices"]
        assert len(used) > 1, "no epoch is over"
        for epoch in sorted(used)[:-1]:
            missing = set(range(SAMPLES)) - set(used[epoch])
            assert not missing, f"epoch {epoch}: {len(missing)} samples did not count"
            assert len(used[epoch]) <= SAMPLES + BATCH * MOST, f"epoch {epoch}: samples counted twice"

    def check_went_on(self, survivors: Sequence[int]) -> None:
        """Each made an iteration within some seconds of the hub's word that a worker died. Not for one that
        died and came again: its new process has to start first."""
        for died in self.decisions("worker died"):
            for who in survivors:
                after = [line["time"] for line in self.lines(who) if line["time"] > died.time]
                assert after, f"worker {who} made nothing after {died}"
                assert after[0] - died.time < GOES_ON, (
                    f"worker {who} went on {after[0] - died.time} s after {died}"
                )


def members_of(weight: float) -> list[int]:
    return [who for who in range(8) if int(weight) >> who & 1]


@contextlib.contextmanager
def workers_of(plan: Plan, decided: Path, count: int) -> Iterator[Case]:
    made = Case(plan, decided)
    try:
        for who in range(count):
            made.start(who)
        yield made
        for fault in plan.faults:
            assert (plan.folder / fault.file).exists(), fault
    finally:
        for process in made.processes.values():
            process.kill()
            process.join(DEADLINE)
