"""How a launch ends where a process does not."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest
from torch.distributed.run import get_args_parser

from atoll.core.config import Config, Groups, Run, Strategy
from atoll.core.errors import GivenUpError
from atoll.core.events import AnyEvent, Decided, Failed, Started, StepDone, Warned
from atoll.hub.decisions import Decisions
from atoll.launch.launcher import WorkerEnd, culprit_of, launcher_command, write_ends
from atoll.launch.peers import PeerLaunch
from atoll.launch.processes import start_process
from atoll.launch.restarts import DelayedProcess, Pauses
from atoll.launch.rings import RingLaunch
from atoll.launch.served import SERVICE_RESTARTS, ServedLaunch
from atoll.observe.journal import Journal, JournalReader
from atoll.observe.rundir import RunDirectory
from atoll.server.options import ServerOptions

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


def test_a_node_of_several_workers_is_one_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PeerLaunch, "_start", lambda _self: None)
    directory = RunDirectory(tmp_path)
    directory.create()
    config = Config(run=Run(workers=6, strategy="peers"), groups=Groups(count=3))
    launch = PeerLaunch(directory, config, ["train.py"], {})
    assert [launch._lead(rank) for rank in launch._order] == [0, 2, 4]
    assert (launch.first, launch.life_of(3)) == (0, 0)
    launch._restarts[launch._name_of(1)] += 1
    assert [launch.life_of(worker) for worker in range(6)] == [0, 0, 1, 1, 0, 0]
    launch._workers = cast(Any, [FakeProcess(0), FakeProcess(0), FakeProcess(3)])
    assert launch._end_of(2, 3).worker == 4
    write_ends([WorkerEnd(5, 77, 3)], directory.ends_of(4))
    assert launch._end_of(2, 3) == WorkerEnd(5, 77, 3)
    echo = Failed(
        time=1.0, worker=4, error="PeerLostError", message="", traceback="", exit_status=1, echo=True
    )
    assert launch.excuses(echo)
    assert not launch.excuses(Failed(time=1.0, worker=5, error="E", message="", traceback="t", exit_status=1))


def test_a_process_that_does_not_end_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is stuck in the kernel and cannot be killed; here: one that nobody has killed yet."""

    def alone(launch: ServedLaunch) -> None:
        launch._workers.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))

    monkeypatch.setattr(ServedLaunch, "_start", alone)
    launch = ServedLaunch(RunDirectory(tmp_path), Config(), ["train.py"], {})
    try:
        began = time.monotonic()
        with pytest.raises(subprocess.TimeoutExpired):
            launch.wait(0.2)
        assert time.monotonic() - began < DEADLINE / 2
        assert launch.returncode is None
    finally:
        launch.kill()
    assert launch.wait(DEADLINE) == 1


# -- a shard that is held twice ----------------------------------------------------------------------------


class FakeProcess:
    """What a launch needs of a process; `returncode` is what the test says."""

    def __init__(self, name: str) -> None:
        self.name, self.pid = name, 2**22 + 1  # no such process on Linux
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, signum: int) -> None:
        self.returncode = -signum if self.returncode is None else self.returncode

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class Halves:
    """A launch of a worker, a hub, and the two processes of shard 0, all of them fakes."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, begun: bool = True) -> None:
        self.directory = RunDirectory(folder)
        self.directory.create()
        self.started: list[str] = []
        monkeypatch.setattr(ServedLaunch, "_start", lambda _launch: None)
        monkeypatch.setattr(ServedLaunch, "_serve", lambda launch, name, _: self._serve(launch, name))
        self.launch = ServedLaunch(self.directory, Config(), ["train.py"], {})
        self.launch._workers.append(cast(Any, FakeProcess("worker")))
        self.launch._sites = [""]
        for name in ("hub", "server-0", "second-0"):
            self.launch._options[name] = ServerOptions(hub="")
            self._serve(self.launch, name)
        self.started.clear()
        if begun:
            with Journal(self.directory.journal(0)) as journal:
                journal(Started(time=1.0, worker=0, workers=1, strategy="server", device="cpu", pid=1))

    def _serve(self, launch: ServedLaunch, name: str) -> None:
        self.started.append(name)
        launch._services[name] = cast(Any, FakeProcess(name))

    def _set(self, name: str, code: int) -> None:
        cast(Any, self.launch._services[name]).returncode = code

    def end(self, **codes: int) -> None:
        """Have processes end, all at once, and look."""
        for name, code in codes.items():
            self._set(f"{name}-0", code)
        self.launch.poll()

    def use_up(self, name: str) -> None:
        """Kill one until it is left out."""
        for _ in range(SERVICE_RESTARTS + 1):
            self.end(**{name: -signal.SIGKILL})
        assert self.launch.poll() is None
        assert self.started == [f"{name}-0"] * SERVICE_RESTARTS
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
    halves = Halves(tmp_path / "run", monkeypatch)
    halves.use_up(first)
    halves.end(**{OTHER[first]: status})
    assert halves.launch.poll() is None
    assert halves.started == [f"{OTHER[first]}-0"]


@pytest.mark.parametrize("first", ["server", "second"])
def test_both_halves_may_be_killed_at_once_while_one_has_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    halves = Halves(tmp_path / "run", monkeypatch)
    for _ in range(SERVICE_RESTARTS):
        halves.end(**{first: -signal.SIGKILL})
    halves.started.clear()
    halves.end(server=-signal.SIGKILL, second=-signal.SIGKILL)
    assert halves.launch.poll() is None
    assert halves.started == [f"{OTHER[first]}-0"]


def test_without_restarts_for_either_half_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    halves = Halves(tmp_path / "run", monkeypatch)
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
    halves = Halves(tmp_path / "run", monkeypatch)
    halves.said(f"{name}-0", "atoll: journal-3: No space left on device")
    halves.end(**{name: status})
    assert halves.launch.poll() is None
    assert halves.started == []
    line = f"{called} process of shard 0 ended with status {status}: journal-3: No space left on device; "
    assert halves.messages() == [line + "the other one goes on alone"]  # once
    halves.end(**{OTHER[name]: -signal.SIGKILL})  # who is alone is started again
    assert halves.started == [f"{OTHER[name]}-0"]
    assert halves.launch.poll() is None
    halves.said(f"{OTHER[name]}-0", "atoll: journal-4: No space left on device")
    halves.end(**{OTHER[name]: 1})
    assert halves.launch.returncode is not None
    assert halves.messages()[-1].endswith("shard 0: journal-4: No space left on device")


def test_both_halves_end_with_an_error_and_so_does_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    halves = Halves(tmp_path / "run", monkeypatch)
    halves.end(server=1, second=1)
    assert halves.launch.returncode is not None
    assert [type(event) for event in halves.told()] == [Failed]


@pytest.mark.parametrize("name", ["server", "second"])
def test_a_half_that_ends_with_an_error_before_the_run_began_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    halves = Halves(tmp_path / "run", monkeypatch, begun=False)
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
    halves = Halves(tmp_path / "run", monkeypatch)
    halves.end(second=1)
    halves.launch._stopping = True  # as by Ctrl-C: the worker has some time to end by itself
    assert halves.launch.poll() is None
    assert not [event for event in halves.told() if isinstance(event, Failed)]


# -- the start --------------------------------------------------------------------------------------------


class Begun:
    """A launch whose hub, a fake, has just been started."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, kind: type[ServedLaunch]) -> None:
        self.directory = RunDirectory(folder)
        self.directory.create()
        self.started: list[str] = []
        monkeypatch.setattr(ServedLaunch, "_serve", lambda launch, name, _: self._serve(launch, name))
        monkeypatch.setattr(kind, "_worker", lambda _launch, rank: self._start(f"worker {rank}"))
        strategy: Strategy = "server" if kind is ServedLaunch else "ring" if kind is RingLaunch else "peers"
        config = Config(run=Run(workers=2, strategy=strategy, shards=1))
        self.launch = kind(self.directory, config, ["train.py"], {})

    def _serve(self, launch: ServedLaunch, name: str) -> None:
        launch._options[name] = ServerOptions(hub="")
        launch._services[name] = cast(Any, self._start(name))

    def _start(self, name: str) -> FakeProcess:
        self.started.append(name)
        return FakeProcess(name)

    @property
    def hub(self) -> FakeProcess:
        return cast(FakeProcess, self.launch._services["hub"])

    def failure(self) -> Failed:
        (failed,) = [word for word in self.launch.words() if isinstance(word, Failed)]
        assert failed.by_launcher
        return failed


KINDS = [ServedLaunch, RingLaunch, PeerLaunch]


@pytest.mark.parametrize("kind", KINDS)
def test_the_others_start_once_the_hub_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[ServedLaunch]
) -> None:
    begun = Begun(tmp_path / "run", monkeypatch, kind)
    assert begun.launch.poll() is None
    assert begun.started == ["hub"]
    (begun.directory.path / "service" / "hub.address").write_text("tcp://127.0.0.1:5\n")
    assert begun.launch.poll() is None
    shards = ["server-0"] if kind is ServedLaunch else []
    assert begun.started == ["hub", *shards, "worker 0", "worker 1"]
    assert begun.launch.poll() is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("log", "says"),
    [
        ("atoll: the hub: too many open files\n", "the hub: too many open files"),
        ("Traceback ...\nOSError: [Errno 98] in use\n", "the hub: OSError: [Errno 98] in use"),
        ("", "the hub ended with status 2, and the run cannot go on without it; its log is "),
    ],
)
def test_the_hub_s_reason_for_ending_at_the_start_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[ServedLaunch], log: str, says: str
) -> None:
    begun = Begun(tmp_path / "run", monkeypatch, kind)
    (begun.directory.logs / "hub.log").write_text(log)
    begun.hub.returncode = 2
    assert begun.launch.poll() is not None
    failed = begun.failure()
    assert failed.message.startswith(says)
    assert failed.exit_status == 2
    assert begun.started == ["hub"]


def test_a_hub_that_is_killed_at_the_start_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = Begun(tmp_path / "run", monkeypatch, RingLaunch)
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
    begun = Begun(tmp_path / "run", monkeypatch, ServedLaunch)
    begun.launch._begins_by = time.monotonic() - 1.0
    assert begun.launch.poll() is not None
    assert begun.failure().message.startswith("the hub did not listen within 60 s; its log is ")


@pytest.mark.parametrize("kind", KINDS)
def test_a_signal_before_the_hub_listens_ends_the_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[ServedLaunch]
) -> None:
    begun = Begun(tmp_path / "run", monkeypatch, kind)
    begun.launch.send_signal(signal.SIGTERM)
    (begun.directory.path / "service" / "hub.address").write_text("tcp://127.0.0.1:5\n")
    assert begun.launch.poll() is not None
    assert begun.started == ["hub"]
    assert begun.launch.words() == []


def test_a_process_that_cannot_be_started_ends_the_run_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the user may have no more processes: the others that were started are stopped."""
    begun = Begun(tmp_path / "run", monkeypatch, ServedLaunch)

    def start(_launch: ServedLaunch, rank: int) -> FakeProcess:
        return start_process(f"worker {rank}", ["true"]) if rank else begun._start("worker 0")  # type: ignore[return-value]

    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(ServedLaunch, "_worker", start)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    (begun.directory.path / "service" / "hub.address").write_text("tcp://127.0.0.1:5\n")
    assert begun.launch.poll() is not None
    said = "worker 1 cannot be started: Resource temporarily unavailable: there may be no more processes for "
    assert begun.failure().message.startswith(said)
    assert begun.launch._workers[0].returncode == -signal.SIGTERM


# -- a worker that the hub has given up --------------------------------------------------------------------


class Two:
    """A launch of two workers, fakes, and of a hub whose decisions the test writes."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
        self.directory = RunDirectory(folder)
        self.directory.create()
        monkeypatch.setattr(ServedLaunch, "_start", lambda _launch: None)
        monkeypatch.setattr(ServedLaunch, "_worker", lambda _launch, rank: FakeProcess(f"again {rank}"))
        self.launch = ServedLaunch(self.directory, Config(run=run), ["train.py"], {})
        self.launch._sites = ["", ""]
        self.launch._workers += [cast(Any, FakeProcess(f"worker {rank}")) for rank in range(2)]
        self.say(Started(time=1.0, worker=1, workers=2, strategy=run.strategy, device="cpu", pid=1))

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
        cast(Any, self.launch._workers[rank]).returncode = code
        self.launch.poll()
        return failed


def test_a_worker_that_was_given_up_and_ends_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = Two(tmp_path / "run", monkeypatch, Run(workers=2, strategy="server"))
    two.hub_gives_up(0)
    (told,) = two.launch.news()
    assert isinstance(told, Decided)
    assert (told.what, told.choice) == ("hub: worker died", "worker 0, incarnation 1")
    failed = two.end(0, 2)
    assert two.launch.poll() is None
    assert two.launch.excuses(failed)
    said = [each for each in JournalReader(two.directory.journal(0)).read() if isinstance(each, Warned)]
    assert [each.message for each in said] == [
        "worker 0 was given up by the hub, and ended: e; the others go on without it"
    ]
    assert two.launch.first == 1
    cast(Any, two.launch._workers[1]).returncode = 0
    assert two.launch.poll() == 0


def test_a_worker_that_dies_at_once_each_time_is_started_at_growing_intervals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = Two(tmp_path / "run", monkeypatch, Run(workers=2, strategy="server", restarts=1000))
    now = [100.0]
    two.launch._pauses = Pauses(lambda: now[0])
    starts = 0
    while now[0] < 120.0:
        now[0] += 0.2
        two.launch.poll()
        worker = two.launch._workers[1]
        if not (isinstance(worker, DelayedProcess) and worker.waits):
            starts += 1
            worker = worker._process if isinstance(worker, DelayedProcess) else worker
            cast(Any, worker).returncode = -signal.SIGKILL
    assert starts == 7  # the first one, two at once, and after 1, 2, 4 and 8 s; without pauses 100
    said = [each for each in JournalReader(two.directory.journal(1)).read() if isinstance(each, Warned)]
    assert said[2].message == (
        "worker 1 was killed by SIGKILL, and is started again in 1.0 s, for it made no step (3 of 1000)"
    )
    assert two.launch.unfinished() == ["worker 0", "worker 1"]
    cast(Any, two.launch._workers[0]).returncode = 0  # nothing is left to do for the one that waits
    assert two.launch.poll() == 0


def test_a_worker_that_waits_to_be_started_again_ends_with_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = Two(tmp_path / "run", monkeypatch, Run(workers=2, strategy="server", restarts=1000))
    for _ in range(3):
        worker = two.launch._workers[1]
        cast(Any, worker).returncode = -signal.SIGKILL
        two.launch.poll()
    worker = two.launch._workers[1]
    assert isinstance(worker, DelayedProcess)
    cast(Any, two.launch._workers[0]).send_signal = lambda _signum: None
    two.launch.send_signal(signal.SIGINT)
    assert worker.returncode == -signal.SIGINT


@pytest.mark.parametrize(("strategy", "first"), [("ring", 1), ("server", 0)])
def test_a_worker_that_was_given_up_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: Strategy, first: int
) -> None:
    """Once it has made a step, an error of its own is not excused. In a ring it is the last then."""
    run = Run(workers=2, strategy=strategy, elastic=True, restarts=1)
    two = Two(tmp_path / "run", monkeypatch, run)
    two.hub_gives_up(0)
    failed = two.end(0, 2)
    assert cast(Any, two.launch._workers[0]).name == "again 0"
    assert two.launch.excuses(failed)
    assert two.launch.first == first
    two.say(step_of(0))
    assert not two.launch.excuses(two.end(0, 2))
    assert two.launch._stopping


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
    two = Two(tmp_path / "run", monkeypatch, run)
    two.say(step_of(0))  # of its first life
    cast(Any, two.launch._workers[0]).returncode = -signal.SIGKILL
    assert two.launch.poll() is None
    two.hub_gives_up(0)  # its first life, which the hub notices late
    failed = two.end(0, 2, traceback)
    assert not two.launch._stopping
    assert two.launch.excuses(failed)
    assert cast(Any, two.launch._workers[0]).name == "again 0"  # it would fail again
    said = [
        each.message for each in JournalReader(two.directory.journal(0)).read() if isinstance(each, Warned)
    ]
    error = "E: e" if traceback else "e"
    log = two.directory.log(0)
    assert said[-1] == f"worker 0 could not enter, and the others go on without it: {error}; its log is {log}"
    cast(Any, two.launch._workers[1]).returncode = 0
    assert two.launch.poll() == 0


def test_a_worker_that_nobody_could_go_on_without_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = Two(tmp_path / "run", monkeypatch, Run(workers=2, strategy="server", restarts=1))
    cast(Any, two.launch._workers[1]).returncode = -signal.SIGKILL
    two.launch._restarts["worker 1"] = 1  # often enough
    cast(Any, two.launch._workers[0]).returncode = -signal.SIGKILL
    assert two.launch.poll() is None
    assert not two.launch.excuses(two.end(0, 2))
    assert two.launch.poll() == 1


@pytest.mark.parametrize("given_up", [False, True])
def test_a_script_s_own_error_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given_up: bool
) -> None:
    """Also where its process took so long to end that the hub has given it up."""
    two = Two(tmp_path / "run", monkeypatch, Run(workers=2, strategy="server", restarts=1))
    if given_up:
        two.hub_gives_up(0)
    failed = two.end(0, 1, traceback="Traceback ...")
    assert two.launch._stopping
    assert not two.launch.excuses(failed)
