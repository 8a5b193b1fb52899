"""How a launch ends where a process does not."""

from __future__ import annotations

import errno
import itertools
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from torch.distributed.run import get_args_parser

from atoll.core.config import Config, Groups, Run, Server, Strategy
from atoll.core.errors import GivenUpError
from atoll.core.events import AnyEvent, Decided, Failed, Started, StepDone, Warned
from atoll.hub.decisions import Decisions
from atoll.launch.hublaunch import HubLaunch
from atoll.launch.launcher import WorkerEnd, culprit_of, launcher_command, write_ends
from atoll.launch.processes import start_process
from atoll.launch.restarts import Pauses
from atoll.launch.services import SERVICE_RESTARTS
from atoll.launch.workers import WorkerLaunches
from atoll.observe.journal import Journal, JournalReader
from atoll.observe.rundir import RunDirectory

DEADLINE = 60.0

KILLED, STOPPED, ECHO = -signal.SIGKILL, -signal.SIGTERM, 1


@pytest.mark.parametrize(
    ("codes", "worker"),
    [
        ([ECHO, KILLED], 1),
        ([KILLED, STOPPED], 0),
        ([STOPPED, KILLED, ECHO], 1),
        ([ECHO, 3], 1),  # the script's own status, and the other device's word of it
        ([GivenUpError.exit_status, ECHO], 0),
        ([STOPPED, 2], 1),
    ],
)
def test_a_launch_of_several_workers_ends_as_the_one_that_ended_the_others(
    codes: list[int], worker: int
) -> None:
    ends = [WorkerEnd(each, 100 + each, code) for each, code in enumerate(codes)]
    assert culprit_of(ends) == ends[worker]


def test_a_scripts_options_may_be_short_for_several_of_torchruns() -> None:
    script = ["train.py", "--n", "400", "--log", "--run=a", "--max", "7", "--", "-m", "--standalone"]
    command = launcher_command(2, script)
    parsed = get_args_parser().parse_args(command[command.index("atoll.launch.launcher") + 1 :])
    assert (parsed.module, parsed.standalone, parsed.nproc_per_node) == (True, True, "2")
    assert (parsed.training_script, parsed.training_script_args) == ("atoll.launch.worker", script)


@pytest.mark.parametrize("code", [3, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGABRT])
def test_a_launch_ends_by_the_same_signal_or_status(code: int, tmp_path: Path) -> None:
    said = f"from atoll.launch.launcher import WorkerEnd, end_as; end_as(WorkerEnd(1, 2, {int(code)}))"
    ended = subprocess.run([sys.executable, "-c", said], cwd=tmp_path, timeout=DEADLINE, check=False)
    assert ended.returncode == code


def test_a_node_of_several_workers_is_one_launch(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.create()
    config = Config(run=Run(workers=6, strategy="peers"), groups=Groups(count=3))
    processes = Processes()
    launch = processes.launch(directory, config)
    assert processes.started == ["the hub", "node 0", "node 1", "node 2"]
    assert (launch.seen().first, launch.seen().life) == (0, 0)
    workers = WorkerLaunches(directory, config, ["train.py"])
    assert [workers.lead(rank) for rank in workers.order] == [0, 2, 4]
    workers.restarts[1] += 1
    assert [workers.restarts[workers.rank_of(worker)] for worker in range(6)] == [0, 0, 1, 1, 0, 0]
    workers.processes = cast(Any, [FakeProcess(str(rank)) for rank in range(3)])
    assert workers.end_of(2, 3).worker == 4
    write_ends([WorkerEnd(5, 77, 3)], directory.ends_of(4))
    assert workers.end_of(2, 3) == WorkerEnd(5, 77, 3)
    echo = Failed(
        time=1.0, worker=4, error="PeerLostError", message="", traceback="", exit_status=1, echo=True
    )
    assert launch.excuses(echo)
    assert not launch.excuses(Failed(time=1.0, worker=5, error="E", message="", traceback="t", exit_status=1))


def test_a_process_that_does_not_end_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    """As one that is stuck in the kernel and cannot be killed; here: one that nobody has killed yet."""
    sleeping = [sys.executable, "-c", "import time; time.sleep(600)"]
    launch = HubLaunch(
        RunDirectory(tmp_path), Config(), ["train.py"], {}, start=lambda *_, **__: subprocess.Popen(sleeping)
    )
    try:
        began = time.monotonic()
        with pytest.raises(subprocess.TimeoutExpired):
            launch.wait(0.2)
        assert time.monotonic() - began < DEADLINE / 2
        assert launch.returncode is None
    finally:
        launch.kill()
    assert launch.wait(DEADLINE) == 1


class FakeProcess:
    """What a launch needs of a process; `returncode` is what the test says."""

    def __init__(self, name: str) -> None:
        self.name, self.pid = name, 2**22 + 1 + next(PIDS)  # no such process on Linux
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, signum: int) -> None:
        self.returncode = -signum if self.returncode is None else self.returncode

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


PIDS = itertools.count()


class Processes:
    """Starts fakes in place of processes: `latest` has each one's latest life, by what a person calls it."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.latest: dict[str, FakeProcess] = {}

    def start(self, who: str, *_: Any) -> Any:
        self.started.append(who)
        self.latest[who] = FakeProcess(who)
        return self.latest[who]

    def launch(self, directory: RunDirectory, config: Config, listens: bool = True) -> HubLaunch:
        """A launch whose hub has just been started, or `listens`, and so all have."""
        launch = HubLaunch(directory, config, ["train.py"], {}, start=self.start)
        if listens:
            (directory.path / "service" / "hub.address").write_text("tcp://127.0.0.1:5\n")
            assert launch.poll() is None
        return launch


# -- a shard that is held twice ----------------------------------------------------------------------------


HALVES = {"server": "shard 0", "second": "the second process of shard 0"}


class Halves:
    """A launch of a worker, a hub, and the two processes of shard 0, all of them fakes."""

    def __init__(self, folder: Path, begun: bool = True) -> None:
        self.directory = RunDirectory(folder)
        self.directory.create()
        config = Config(run=Run(strategy="server"), server=Server(replicas=2))
        self.processes = Processes()
        self.launch = self.processes.launch(self.directory, config)
        self.started.clear()
        if begun:
            with Journal(self.directory.journal(0)) as journal:
                journal(Started(time=1.0, worker=0, workers=1, strategy="server", device="cpu", pid=1))

    @property
    def started(self) -> list[str]:
        return self.processes.started

    def end(self, **codes: int) -> None:
        """Have processes end, all at once, and look."""
        for name, code in codes.items():
            self.processes.latest[HALVES[name]].returncode = code
        self.launch.poll()

    def use_up(self, name: str) -> None:
        """Kill one until it is left out."""
        for _ in range(SERVICE_RESTARTS + 1):
            self.end(**{name: -signal.SIGKILL})
        assert self.launch.poll() is None
        assert self.started == [HALVES[name]] * SERVICE_RESTARTS
        self.started.clear()

    def said(self, name: str, line: str) -> None:
        with (self.directory.logs / f"{name}.log").open("a") as log:
            log.write(f"{line}\n")

    def told(self) -> list[AnyEvent]:
        events = JournalReader(self.directory.journal(0)).read()
        return [event for event in events if not isinstance(event, Started)]

    def messages(self) -> list[str]:
        return [event.message for event in self.told() if isinstance(event, (Warned, Failed))]


OTHER = {"server": "second", "second": "server"}


@pytest.mark.parametrize("status", [-signal.SIGKILL, GivenUpError.exit_status])
@pytest.mark.parametrize("first", ["server", "second"])
def test_the_other_half_is_there_also_while_it_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str, status: int
) -> None:
    """Whichever of the two has used up its restarts, and whichever is looked at first."""
    halves = Halves(tmp_path / "run")
    halves.use_up(first)
    halves.end(**{OTHER[first]: status})
    assert halves.launch.poll() is None
    assert halves.started == [HALVES[OTHER[first]]]


@pytest.mark.parametrize("first", ["server", "second"])
def test_both_halves_may_be_killed_at_once_while_one_has_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    halves = Halves(tmp_path / "run")
    for _ in range(SERVICE_RESTARTS):
        halves.end(**{first: -signal.SIGKILL})
    halves.started.clear()
    halves.end(server=-signal.SIGKILL, second=-signal.SIGKILL)
    assert halves.launch.poll() is None
    assert halves.started == [HALVES[OTHER[first]]]


def test_without_restarts_for_either_half_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    halves = Halves(tmp_path / "run")
    halves.use_up("server")
    for _ in range(SERVICE_RESTARTS):
        halves.end(second=-signal.SIGKILL)
        assert halves.launch.poll() is None
    halves.end(second=-signal.SIGKILL)
    assert halves.launch.returncode is not None
    assert [type(event) for event in halves.told()].count(Failed) == 1


@pytest.mark.parametrize("status", [1, 2])
@pytest.mark.parametrize(("name", "called"), [("server", "the first"), ("second", "the second")])
def test_a_half_that_ends_with_an_error_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, called: str, status: int
) -> None:
    halves = Halves(tmp_path / "run")
    halves.said(f"{name}-0", "atoll: journal-3: No space left on device")
    halves.end(**{name: status})
    assert halves.launch.poll() is None
    assert halves.started == []
    line = f"{called} process of shard 0 ended with status {status}: journal-3: No space left on device; "
    assert halves.messages() == [line + "the other one goes on alone"]  # once
    halves.end(**{OTHER[name]: -signal.SIGKILL})  # who is alone is started again
    assert halves.started == [HALVES[OTHER[name]]]
    assert halves.launch.poll() is None
    halves.said(f"{OTHER[name]}-0", "atoll: journal-4: No space left on device")
    halves.end(**{OTHER[name]: 1})
    assert halves.launch.returncode is not None
    assert halves.messages()[-1].endswith("shard 0: journal-4: No space left on device")


def test_both_halves_end_with_an_error_and_so_does_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    halves = Halves(tmp_path / "run")
    halves.end(server=1, second=1)
    assert halves.launch.returncode is not None
    assert [type(event) for event in halves.told()] == [Failed]


@pytest.mark.parametrize("name", ["server", "second"])
def test_a_half_that_ends_with_an_error_before_the_run_began_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    halves = Halves(tmp_path / "run", begun=False)
    halves.said(f"{name}-0", "atoll: the optimizer 'mine:No' cannot be imported here")
    halves.end(**{name: 2})
    assert halves.launch.returncode is not None
    (failed,) = halves.told()
    assert isinstance(failed, Failed)
    assert failed.exit_status == 2
    assert failed.message.endswith("shard 0: the optimizer 'mine:No' cannot be imported here")


def test_a_half_that_was_left_out_is_no_failure_while_the_run_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    halves = Halves(tmp_path / "run")
    halves.end(second=1)
    # As by Ctrl-C: the worker has some time to end by itself.
    halves.processes.latest["worker 0"].send_signal = lambda _signum: None  # type: ignore[method-assign]
    halves.launch.send_signal(signal.SIGINT)
    assert halves.launch.poll() is None
    assert not [event for event in halves.told() if isinstance(event, Failed)]


# -- the start --------------------------------------------------------------------------------------------


class Begun:
    """A launch whose hub, a fake, has just been started."""

    def __init__(self, folder: Path, strategy: Strategy) -> None:
        self.directory = RunDirectory(folder)
        self.directory.create()
        self.processes = Processes()
        config = Config(run=Run(workers=2, strategy=strategy, shards=1))
        self.launch = self.processes.launch(self.directory, config, listens=False)

    def listens(self) -> None:
        (self.directory.path / "service" / "hub.address").write_text("tcp://127.0.0.1:5\n")

    @property
    def started(self) -> list[str]:
        return self.processes.started

    @property
    def hub(self) -> FakeProcess:
        return self.processes.latest["the hub"]

    def failure(self) -> Failed:
        (failed,) = [word for word in self.launch.seen().words if isinstance(word, Failed)]
        assert failed.by_launcher
        return failed


STRATEGIES_WITH_HUB = ["server", "ring", "peers"]


@pytest.mark.parametrize("strategy", STRATEGIES_WITH_HUB)
def test_the_others_start_once_the_hub_listens(tmp_path: Path, strategy: Strategy) -> None:
    begun = Begun(tmp_path / "run", strategy)
    assert begun.launch.poll() is None
    assert begun.started == ["the hub"]
    begun.listens()
    assert begun.launch.poll() is None
    shards = ["shard 0"] if strategy == "server" else []
    assert begun.started == ["the hub", *shards, "worker 0", "worker 1"]
    assert begun.launch.poll() is None


@pytest.mark.parametrize("strategy", STRATEGIES_WITH_HUB)
def test_who_is_killed_after_the_others_have_ended_is_told_of(tmp_path: Path, strategy: Strategy) -> None:
    begun = Begun(tmp_path / "run", strategy)
    begun.listens()
    assert begun.launch.poll() is None
    with Journal(begun.directory.journal(0)) as journal:
        journal(Started(time=1.0, worker=0, workers=2, strategy=strategy, device="cpu", pid=1))
    begun.processes.latest["worker 0"].returncode = 0
    assert begun.launch.poll() is None
    begun.processes.latest["worker 1"].returncode = -signal.SIGSEGV
    assert begun.launch.poll() == 0
    said = [event for event in JournalReader(begun.directory.journal(1)).read() if isinstance(event, Warned)]
    assert [event.message for event in said] == ["worker 1 was killed by SIGSEGV, after the others had ended"]


@pytest.mark.parametrize("strategy", STRATEGIES_WITH_HUB)
@pytest.mark.parametrize(
    ("log", "says"),
    [
        ("atoll: the hub: too many open files\n", "the hub: too many open files"),
        ("Traceback ...\nOSError: [Errno 98] in use\n", "the hub: OSError: [Errno 98] in use"),
        ("", "the hub ended with status 2, and the run cannot go on without it; its log is "),
    ],
)
def test_the_hub_s_reason_for_ending_at_the_start_ends_the_run(
    tmp_path: Path, strategy: Strategy, log: str, says: str
) -> None:
    begun = Begun(tmp_path / "run", strategy)
    (begun.directory.logs / "hub.log").write_text(log)
    begun.hub.returncode = 2
    assert begun.launch.poll() is not None
    failed = begun.failure()
    assert failed.message.startswith(says)
    assert failed.exit_status == 2
    assert begun.started == ["the hub"]


def test_a_hub_that_is_killed_at_the_start_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = Begun(tmp_path / "run", "ring")
    (begun.directory.logs / "hub.log").write_text("atoll: of a life before\n")
    for _ in range(SERVICE_RESTARTS):
        begun.hub.returncode = -signal.SIGKILL
        assert begun.launch.poll() is None
    begun.hub.returncode = -signal.SIGKILL
    assert begun.launch.poll() is not None
    assert begun.failure().message.startswith("the hub was killed by SIGKILL for the 4th time, and the run")


def test_a_hub_that_does_not_listen_is_waited_for_with_a_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = Begun(tmp_path / "run", "server")
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 61.0)
    assert begun.launch.poll() is not None
    said = "the hub did not listen within 60 s: its process has ended; it has said nothing; its log is "
    assert begun.failure().message.startswith(said)


@pytest.mark.parametrize("strategy", STRATEGIES_WITH_HUB)
def test_a_signal_before_the_hub_listens_ends_the_launch(tmp_path: Path, strategy: Strategy) -> None:
    begun = Begun(tmp_path / "run", strategy)
    begun.launch.send_signal(signal.SIGTERM)
    begun.listens()
    assert begun.launch.poll() is not None
    assert begun.started == ["the hub"]
    assert list(begun.launch.seen().words) == []


def test_nobody_is_late_once_the_launch_has_ended(tmp_path: Path) -> None:
    """Where the hub ends while workers take their time after SIGTERM, it is the hub's end that counts."""
    begun = Begun(tmp_path / "run", "server")
    begun.listens()
    assert begun.launch.poll() is None
    for rank in range(2):
        begun.processes.latest[f"worker {rank}"].send_signal = lambda _signum: None  # type: ignore[method-assign]
    begun.launch.send_signal(signal.SIGTERM)
    assert begun.launch.late_workers() == ["worker 0", "worker 1"]
    begun.hub.returncode = 1
    assert begun.launch.poll() is not None
    assert begun.launch.late_workers() == []


def test_a_process_that_cannot_be_started_ends_the_run_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the user may have no more processes: the others that were started are stopped."""
    begun = Begun(tmp_path / "run", "server")
    start = begun.processes.start

    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    def start_or_not(who: str, command: Sequence[str], *others: Any) -> Any:
        return start_process(who, command) if who == "worker 1" else start(who)

    begun.launch._workers._start = start_or_not
    monkeypatch.setattr(subprocess, "Popen", refuse)
    begun.listens()
    assert begun.launch.poll() is not None
    said = "worker 1 cannot be started: Resource temporarily unavailable: there may be no more processes for "
    assert begun.failure().message.startswith(said)
    assert begun.processes.latest["worker 0"].returncode == -signal.SIGTERM


# -- a worker that the hub has given up --------------------------------------------------------------------


class Two:
    """A launch of two workers, fakes, and of a hub whose decisions the test writes."""

    def __init__(self, folder: Path, run: Run) -> None:
        self.directory = RunDirectory(folder)
        self.directory.create()
        self.processes = Processes()
        self.launch = self.processes.launch(self.directory, Config(run=run))
        self.say(Started(time=1.0, worker=1, workers=2, strategy=run.strategy, device="cpu", pid=1))

    def worker(self, rank: int) -> FakeProcess:
        """The latest life of a worker."""
        return self.processes.latest[f"worker {rank}"]

    def say(self, event: AnyEvent) -> None:
        with Journal(self.directory.journal(event.worker)) as journal:
            journal(event)

    def hub_gives_up(self, rank: int) -> None:
        decisions = Decisions(self.directory.path / "service")
        decisions.add("worker died", f"worker {rank}, incarnation {rank + 1}", "silent for 3.5 s")
        decisions.close()
        self.launch.poll()

    def end(self, rank: int, code: int, traceback: str = "") -> Failed:
        """A worker ends with an error of Atoll's, or of its script's."""
        failed = Failed(
            time=time.time(), worker=rank, error="E", message="e", traceback=traceback, exit_status=code
        )
        self.say(failed)
        self.worker(rank).returncode = code
        self.launch.poll()
        return failed


def test_a_worker_that_was_given_up_and_ends_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = Two(tmp_path / "run", Run(workers=2, strategy="server"))
    two.hub_gives_up(0)
    (told,) = two.launch.seen().news
    assert isinstance(told, Decided)
    assert (told.what, told.choice) == ("hub: worker died", "worker 0, incarnation 1")
    failed = two.end(0, 2)
    assert two.launch.poll() is None
    assert two.launch.excuses(failed)
    said = [each for each in JournalReader(two.directory.journal(0)).read() if isinstance(each, Warned)]
    assert [each.message for each in said] == [
        "worker 0 was given up by the hub, and ended: e; the others go on without it"
    ]
    assert two.launch.seen().first == 1
    two.worker(1).returncode = 0
    assert two.launch.poll() == 0


def test_a_worker_that_dies_at_once_each_time_is_started_at_growing_intervals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = Two(tmp_path / "run", Run(workers=2, strategy="server", restarts=1000))
    now = [100.0]
    two.launch._workers.pauses = Pauses(lambda: now[0])
    while now[0] < 120.0:
        now[0] += 0.2
        two.launch.poll()
        two.worker(1).returncode = -signal.SIGKILL
    starts = two.processes.started.count("worker 1")
    assert starts == 7  # the first one, two at once, and after 1, 2, 4 and 8 s; without pauses 100
    said = [each for each in JournalReader(two.directory.journal(1)).read() if isinstance(each, Warned)]
    assert said[2].message == (
        "worker 1 was killed by SIGKILL, and is started again in 1.0 s, for it made no step (3 of 1000)"
    )
    assert two.launch.late_workers() == ["worker 0", "worker 1"]
    two.worker(0).returncode = 0  # nothing is left to do for the one that waits
    assert two.launch.poll() == 0


def test_a_worker_that_waits_to_be_started_again_ends_with_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = Two(tmp_path / "run", Run(workers=2, strategy="server", restarts=1000))
    for _ in range(3):
        two.worker(1).returncode = -signal.SIGKILL
        two.launch.poll()
    assert two.processes.started.count("worker 1") == 3  # the fourth waits
    two.worker(0).send_signal = lambda _signum: None  # type: ignore[method-assign]
    two.launch.send_signal(signal.SIGINT)
    assert two.launch.late_workers() == ["worker 0"]


@pytest.mark.parametrize(("strategy", "first"), [("ring", 1), ("server", 0)])
def test_a_worker_that_was_given_up_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: Strategy, first: int
) -> None:
    """Once it has made a step, an error of its own is not excused. In a ring it is the last then."""
    run = Run(workers=2, strategy=strategy, elastic=True, restarts=1)
    two = Two(tmp_path / "run", run)
    two.hub_gives_up(0)
    failed = two.end(0, 2)
    assert two.processes.started.count("worker 0") == 2
    assert two.launch.excuses(failed)
    assert two.launch.seen().first == first
    two.say(step_of(0))
    assert not two.launch.excuses(two.end(0, 2))
    assert not two.launch.goes_on


def step_of(worker: int) -> StepDone:
    return StepDone(
        time=time.time(), worker=worker, iteration=9, samples=1, seconds=1.0, waiting=0.0, bytes_sent=0
    )


@pytest.mark.parametrize("traceback", ["", "Traceback ..."])
@pytest.mark.parametrize("strategy", ["ring", "server"])
def test_a_worker_that_fails_while_it_enters_ends_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: Strategy, traceback: str
) -> None:
    run = Run(workers=2, strategy=strategy, elastic=True, restarts=2)
    two = Two(tmp_path / "run", run)
    two.say(step_of(0))  # of its first life
    two.worker(0).returncode = -signal.SIGKILL
    assert two.launch.poll() is None
    two.hub_gives_up(0)  # its first life, which the hub notices late
    failed = two.end(0, 2, traceback)
    assert two.launch.goes_on
    assert two.launch.excuses(failed)
    assert two.processes.started.count("worker 0") == 2  # it would fail again
    said = [
        each.message for each in JournalReader(two.directory.journal(0)).read() if isinstance(each, Warned)
    ]
    error = "E: e" if traceback else "e"
    log = two.directory.log(0)
    assert said[-1] == f"worker 0 could not enter, and the others go on without it: {error}; its log is {log}"
    two.worker(1).returncode = 0
    assert two.launch.poll() == 0


def test_a_worker_that_nobody_could_go_on_without_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = Two(tmp_path / "run", Run(workers=2, strategy="server", restarts=1))
    two.worker(1).returncode = -signal.SIGKILL
    two.launch._workers.restarts[1] = 1  # often enough
    two.worker(0).returncode = -signal.SIGKILL
    assert two.launch.poll() is None
    assert not two.launch.excuses(two.end(0, 2))
    assert two.launch.poll() == 1


@pytest.mark.parametrize("given_up", [False, True])
def test_a_script_s_own_error_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given_up: bool
) -> None:
    """Also where its process took so long to end that the hub has given it up."""
    two = Two(tmp_path / "run", Run(workers=2, strategy="server", restarts=1))
    if given_up:
        two.hub_gives_up(0)
    failed = two.end(0, 1, traceback="Traceback ...")
    assert not two.launch.goes_on
    assert not two.launch.excuses(failed)
