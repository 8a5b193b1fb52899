"""The command `atoll run`: starts the workers, watches them, stops them, and leaves the run directory
complete."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TypeAlias

from atoll.core.config import (
    CONFIG_VARIABLE,
    FIRST_VARIABLE,
    HUB_VARIABLE,
    JOINED_VARIABLE,
    KEYS_VARIABLE,
    LAUNCHER_VARIABLE,
    RANK_VARIABLE,
    RUN_VARIABLE,
    SERVED,
    SITE_VARIABLE,
    SOCKETS_VARIABLE,
    Config,
    to_toml,
)
from atoll.core.errors import RunError, UserError
from atoll.core.events import Decided, Gone, Warned
from atoll.core.outlet import Screen
from atoll.core.runclock import CLOCK_VARIABLE, clock_setting, record_time
from atoll.core.sharing import files_for, files_under
from atoll.core.units import format_bytes, format_seconds
from atoll.launch.causes import Causes
from atoll.launch.checks import check_run
from atoll.launch.hublaunch import HubLaunch
from atoll.launch.output import Output
from atoll.launch.picture import draw_picture
from atoll.launch.ports import free_port
from atoll.launch.private import PrivateFolder
from atoll.launch.processes import (
    GRACE_VARIABLE,
    PARENT_VARIABLE,
    adopt_orphans,
    descendants,
    kill_descendants,
    why_no_thread,
)
from atoll.launch.program import Program
from atoll.launch.services import SERVICE
from atoll.launch.torchrun import TorchrunLaunch
from atoll.launch.verdict import Judge, Verdict
from atoll.net.socketfolder import KEY_FILE
from atoll.observe.groups import group_lines
from atoll.observe.journal import TOLD
from atoll.observe.lastwords import LAST_WORDS_VARIABLE, LastWords
from atoll.observe.links import link_lines
from atoll.observe.memory import memory_lines
from atoll.observe.nodes import node_lines
from atoll.observe.progress import Progress, format_values, make_progress
from atoll.observe.recorder import Recorder, Writer
from atoll.observe.rundir import DIRECTORY_VARIABLE, Claim, RunDirectory, UsedError
from atoll.observe.summary import Summary, reserve_summary, write_summary
from atoll.observe.tensorboard import MISSING, TensorBoard

Launch: TypeAlias = HubLaunch | TorchrunLaunch

POLL_SECONDS = 0.1
STOP_SECONDS = 5.0  # from Ctrl-C to the end of every process, by force if need be
_TOGETHER_SECONDS = 1.0  # signals that come so close are one: `timeout` sends SIGTERM to the group as well
READER_SECONDS = 60.0  # that a reader of the command's output may take nothing, once all has ended
_STOPPED_READER_SECONDS = 1.0  # the same after Ctrl-C
FAILED_SECONDS = 30.0  # from a worker's error to the end of the launcher, by force if need be


def run(
    script: str,
    arguments: Sequence[str],
    config: Config,
    summary: Path | None = None,
    *,
    is_module: bool = False,
    hub_module: str = SERVICE,
    warnings: Sequence[str] = (),
) -> int:
    """Run `script` on `config.run.workers` workers of this machine; returns the exit status of the command.

    `script` is the path of a file, or with `is_module` the name of a module.

    0: every worker ended well. 2: the user gave something wrong. 130: Ctrl-C. 143: SIGTERM. A script's own
    `sys.exit(n)` passes as n; every other failure is 1.

    Writes the summary to the run directory, and to the file `summary` where given. A run with a hub starts
    the module `hub_module` as the hub's process. The module works like `launch.service`, and may do more
    (`cli/hub.py` calls the planner). `warnings` are printed at the start and written into the summary. Raises
    UserError for mistakes found before the start.
    """
    program = Program(script, arguments, is_module)
    program.check()
    if summary is not None and (summary.is_dir() or not summary.absolute().parent.is_dir()):
        raise UserError(f"--summary {summary}: give a file in a directory that is there")
    check_run(config)
    free_port()  # torchrun, the hub or the script will want one
    directory, claim = _claim_directory(program, config)
    with files_for(config.run.readable) as umask:
        job = _Job(directory, config, program, hub_module, umask)
        try:
            return _run_in(job, claim, summary, warnings)
        except RuntimeError as error:
            if not (why := why_no_thread(error)):
                raise
            raise RunError(f"the command {why}") from None


@dataclass(frozen=True)
class _Job:
    """A run that is about to begin, in a directory that it alone uses. `umask` is the user's own: the
    script's files follow it."""

    directory: RunDirectory
    config: Config
    program: Program
    hub_module: str
    umask: int


def _run_in(job: _Job, claim: Claim, summary: Path | None, warnings: Sequence[str]) -> int:
    """Run a job; return the exit status."""
    screen, directory = Screen(sys.stdout, sys.stderr), job.directory
    configured = directory.config
    try:
        with _Stop() as stop:
            configured, trouble = _prepare(directory, job.config)
            watch = _Watch(job, configured, stop, screen)
            verdict = watch.run([*warnings, *filter(None, [claim.trouble, trouble])])
        status = verdict.status
        told: list[str] = []
        if summary is not None:
            try:
                with files_under(job.umask):
                    write_summary(watch.summary, summary)
            except UserError as error:
                told.append(str(error))
                status = status or error.exit_status
        removed = claim.removed
        told += [f"warning: {removed}"] if removed else filter(None, [watch.missing])
        with _Stop() as ended:
            why = "" if removed else _draw(watch.summary, directory, lambda: ended.count > 0)
            lines = _close(watch.summary, watch.losses, directory, verdict, why)
            stops = ended.count  # until now
            if stops and not status:
                status = 128 + ended.signum
            screen.say(*(f"atoll: {line}" for line in told), *lines)
            patience = _STOPPED_READER_SECONDS if stop.count or stops else READER_SECONDS
            screen.close(patience, lambda: ended.count > stops)
    except BaseException:
        screen.close(_STOPPED_READER_SECONDS)
        raise
    finally:
        claim.release()
        if configured != directory.config:
            configured.unlink(missing_ok=True)
    return status


def _prepare(directory: RunDirectory, config: Config) -> tuple[Path, str]:
    """Write the configuration for the workers, and take the room for the summary.

    Return the configuration's path, and a line on what could not be written. On a full disk the configuration
    goes to the system's folder for temporary files. Raises UserError if it cannot be written there either.
    """
    reserve_summary(directory.summary)
    text = to_toml(config)
    try:
        directory.config.write_text(text, encoding="utf-8")
        return directory.config, ""
    except OSError as error:
        trouble = f"{directory.config}: {error.strerror}; the run begins, and records may be missing there"
    try:
        with tempfile.NamedTemporaryFile("w", suffix=".toml", delete=False, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        where = tempfile.gettempdir()
        raise UserError(f"{where}: cannot write the configuration: {error.strerror}") from None
    return Path(file.name), trouble


def _claim_directory(program: Program, config: Config) -> tuple[RunDirectory, Claim]:
    """Claim `run.directory`, or a new directory under runs/ named after the program and the time."""
    if config.run.directory:
        directory = RunDirectory(Path(config.run.directory))
        return directory, directory.claim(config.run.readable)
    name = f"{program.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    for count in itertools.count(1):
        directory = RunDirectory(Path("runs") / (name if count == 1 else f"{name}-{count}"))
        with contextlib.suppress(UsedError):  # of a run that began in the same second
            if not directory.path.exists():
                return directory, directory.claim(config.run.readable)
    raise AssertionError("there is no last name")


@dataclass
class _Stop:
    """Counts the signals that ask for the end, while it is entered."""

    signum: int = 0
    count: int = 0
    at: float = 0.0  # of the first one; record_time()
    _first: float = 0.0  # monotonic
    _before: dict[int, object] = field(default_factory=dict)

    def __enter__(self) -> _Stop:
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signum == signal.SIGHUP and signal.getsignal(signum) == signal.SIG_IGN:
                continue  # under nohup
            self._before[signum] = signal.signal(signum, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]

    def _ask(self, signum: int, _frame: FrameType | None) -> None:
        if self.count == 0:
            self.signum, self.at, self._first = signum, record_time(), time.monotonic()
        elif signum == self.signum == signal.SIGTERM and time.monotonic() - self._first < _TOGETHER_SECONDS:
            return
        self.count += 1


class _Watch:
    """One run, from the launcher's start to the last process's end."""

    summary: Summary
    missing = ""  # closing line on records that could not be written
    losses: Sequence[str] = ()  # closing lines on parts that were lost, and came back

    def __init__(self, job: _Job, configured: Path, stop: _Stop, screen: Screen) -> None:
        """`configured` is the configuration's file."""
        self._directory, self._config, self._program = job.directory, job.config, job.program
        self._job, self._configured, self._stop, self._screen = job, configured, stop, screen
        self._killed: Sequence[str] = ()  # the workers that had not ended when run.grace was over
        self._shown, self._life = 0, 0  # the worker whose output is passed on, and which life of it
        self._causes, self._words = Causes(), LastWords()
        self._left_early: set[int] = set()  # workers that were warned of
        self._began = record_time()
        self._has_stalled = False  # the workers would have waited in vain for an ended one

    def run(self, warnings: Sequence[str]) -> Verdict:
        """Run to the end; afterwards `summary` has the summary, with `warnings` in it."""
        workers, strategy = self._config.run.workers, self._config.run.strategy
        spared = set(descendants(os.getpid()))  # processes of this function's caller are not the run's
        adopt_orphans()
        with contextlib.ExitStack() as shown:
            with self._launcher(spared) as launcher:
                title = f"{self._program.title} · {strategy} · {_count(workers)}"
                progress = make_progress(title, self._screen)
                shown.callback(progress.close)
                recorder = Recorder(
                    self._directory, workers, strategy, _writers(self._directory, progress), self._causes.take
                )
                for line in warnings:
                    recorder.warn(line)
                self._output = Output(0, self._directory.log(0), progress, recorder.warn)
                self._follow(launcher, recorder, progress)
            self._look(launcher, recorder, progress, last=True)
            for failure in self._causes.failures():
                recorder.hear(failure)
            self.summary = recorder.close()
            self.missing = recorder.missing()
        self.losses = launcher.losses()
        judge = self._judge(launcher, self._program)
        self._words.close()
        if self._stop.count:
            return judge.stopped(self._stop.signum, self._stop.at, self._killed)
        status = 1 if launcher.returncode is None else launcher.returncode  # None: it cannot be killed
        return judge.judge(status, self._has_stalled)

    @contextlib.contextmanager
    def _launcher(self, spared: set[int]) -> Iterator[Launch]:
        """Start the workers' launcher; at the exit end it, and all processes that it started."""
        run = self._config.run
        with contextlib.ExitStack() as stack:
            job, words, environment = self._job, self._program.words(), self._environment()
            if run.strategy in (*SERVED, "peers") or run.elastic:
                private = PrivateFolder(self._directory.path / "service" / KEY_FILE)
                stack.callback(private.close)
                environment |= private.environment()
                launcher: Launch = HubLaunch(
                    job.directory, job.config, words, environment, job.hub_module, job.umask
                )
            else:
                launcher = TorchrunLaunch(job.directory, job.config, words, environment, job.umask)
            try:
                yield launcher
            finally:
                launcher.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel: named below
                    launcher.wait(STOP_SECONDS)
                if stuck := kill_descendants(spared):
                    self._screen.say(f"atoll: these processes could not be killed: {stuck}")

    def _environment(self) -> dict[str, str]:
        """Return the environment of the launcher and the workers."""
        # Variables of another run, started by hand, in which this shell takes part:
        foreign = (
            HUB_VARIABLE,
            KEYS_VARIABLE,
            SOCKETS_VARIABLE,
            LAUNCHER_VARIABLE,
            RUN_VARIABLE,
            RANK_VARIABLE,
            SITE_VARIABLE,
            FIRST_VARIABLE,
            JOINED_VARIABLE,
        )
        environment = {
            **{name: value for name, value in os.environ.items() if name not in foreign},
            CONFIG_VARIABLE: str(self._configured.absolute()),
            DIRECTORY_VARIABLE: str(self._directory.path.absolute()),
            PARENT_VARIABLE: str(os.getpid()),
            LAST_WORDS_VARIABLE: self._words.where,
            GRACE_VARIABLE: str(self._config.grace_seconds),
            CLOCK_VARIABLE: clock_setting(),
            "PYTHONUNBUFFERED": "1",
        }
        environment.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // self._config.run.workers)))
        return environment

    def _follow(self, launcher: Launch, recorder: Recorder, progress: Progress) -> None:
        """Look at the launcher until it has ended, or must be ended."""
        stopping = until = None
        while launcher.poll() is None:
            self._look(launcher, recorder, progress)
            now = time.monotonic()
            if self._stop.count and stopping is None:
                stopping = now
                until = self._ask_to_end(launcher, now)
            elif until is None and any(not launcher.excuses(failure) for failure in self._causes.failures()):
                until = now + FAILED_SECONDS
            elif until is None and self._causes.absent() is not None:
                self._has_stalled, until = True, now + FAILED_SECONDS
                launcher.send_signal(signal.SIGTERM)
            if self._stop.count > 1:
                return
            if until is not None and now > until:
                if self._stop.signum == signal.SIGTERM:
                    self._killed = launcher.late_workers() or self._causes.unfinished()
                return
            time.sleep(POLL_SECONDS)
        if self._stop.signum == signal.SIGTERM:
            self._killed = launcher.late_workers()

    def _ask_to_end(self, launcher: Launch, now: float) -> float:
        """Send the user's signal to every worker; return the time at which to kill the remaining workers."""
        if self._stop.signum != signal.SIGTERM:
            launcher.send_signal(signal.SIGINT)
            return now + STOP_SECONDS
        launcher.send_signal(signal.SIGTERM)
        grace = self._config.grace_seconds
        return now + grace + (STOP_SECONDS if launcher.kills_late_workers else 0.0)

    def _look(self, launcher: Launch, recorder: Recorder, progress: Progress, last: bool = False) -> None:
        """Read and show the news."""
        if last:
            self._output.finish(lambda: self._stop.count > 0)
        else:
            self._output.look()
        seen = launcher.seen()
        for event in seen.news:
            recorder.note(event)
        for link in seen.links:
            recorder.links.take(link)
        if seen.first != self._shown:
            self._show(seen.first, recorder)
        elif seen.life != self._life:
            self._output.go_on()
        self._life = seen.life
        for word in seen.words:
            self._causes.take(word)
            if isinstance(word, Gone):
                recorder.hear(word)
        for worker, until in seen.survived.items():
            self._causes.survive(worker, until)
        for word in self._words.take():
            self._causes.take(word)
            if isinstance(word, (*TOLD, Gone)):
                recorder.hear(word)
        if launcher.goes_on and not self._stop.count:
            self._tell_of_early(launcher, recorder)
        for trouble in self._screen.troubles():
            recorder.warn(f"{trouble}; the run goes on, and what workers print is in {self._directory.logs}")
        for event in recorder.poll(last):
            progress.event(event)
        progress.update(recorder.status())

    def _tell_of_early(self, launcher: Launch, recorder: Recorder) -> None:
        """Warn once of each worker that ended early with status 0: the others go on without it."""
        for worker, line in self._judge(launcher).left_early().items():
            if worker not in self._left_early:
                self._left_early.add(worker)
                self._causes.survive(worker, record_time())
                recorder.warn(f"{line}; the others go on without it")

    def _judge(self, launcher: Launch, program: Program | None = None) -> Judge:
        workers = self._config.run.workers
        return Judge(self._causes, self._directory, self._began, launcher.excuses, program, workers)

    def _show(self, worker: int, recorder: Recorder) -> None:
        """Pass on another worker's output from here on, and say so."""
        self._output.follow(worker, self._directory.log(worker))
        reason = f"worker {self._shown} was lost; what each one printed is in {self._directory.logs}"
        choice = f"worker {worker}'s follows"
        recorder.note(Decided(time=record_time(), worker=-1, what="output", choice=choice, reason=reason))
        self._shown = worker


def _writers(directory: RunDirectory, progress: Progress) -> list[Writer]:
    try:
        return [TensorBoard(directory.tensorboard)]
    except ImportError:
        said = MISSING
    except (OSError, UnicodeError) as error:  # tensorboard takes no folder whose name is not UTF-8
        said = f"no TensorBoard events: {directory.tensorboard}: {error}"
    progress.event(Warned(time=record_time(), worker=-1, message=said))
    return []


def _cores() -> int:
    """Return the number of cores that this process may use, which may be fewer than the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _count(workers: int) -> str:
    return "1 worker" if workers == 1 else f"{workers} workers"


def _draw(summary: Summary, directory: RunDirectory, hurried: Callable[[], bool]) -> str:
    """Draw the picture if there are steps to draw; return why it was not drawn, else an empty string."""
    why = draw_picture(directory, hurried) if summary.steps else ""
    return f"{directory.picture} was not drawn: {why}" if why else ""


def _close(
    summary: Summary, losses: Sequence[str], directory: RunDirectory, verdict: Verdict, undrawn: str
) -> list[str]:
    """Return the closing report, with the failure last, where the eye falls. `undrawn`: why there is no
    picture; empty if there is one, or nothing to draw."""
    lines = [f"atoll: {line}" for line in losses]
    if summary.steps:
        lines = [f"atoll: {undrawn}"] if undrawn else []
        lines += closing_lines(summary, directory, directory.picture.exists(), losses)
    if verdict.detail:
        lines.append(verdict.detail)
    lines += [f"atoll: {line}" for line in (verdict.line, verdict.followed) if line]
    return lines


def closing_lines(
    summary: Summary, directory: RunDirectory, drawn: bool, losses: Sequence[str] = ()
) -> list[str]:
    """Return the closing lines for people: amount, speed, losses and returns, last values, and where to
    look."""
    samples = f"{'' if summary.samples_exact else 'at least '}{summary.samples:,.0f} samples"
    steps = f"{summary.steps:,} steps of {samples} in {format_seconds(summary.seconds)}"
    facts = [steps, f"{summary.samples_per_second:,.4g} samples/s"]
    if summary.workers > 1:
        facts += [
            f"{summary.waiting_share:.0%} of the time waiting",
            f"{format_bytes(summary.bytes_sent)} sent",
        ]
    lines = [f"atoll: {_count(summary.workers)} ({summary.strategy}): " + " · ".join(facts)]
    lines += [f"atoll: {line}" for line in losses]
    if summary.last:
        lines.append(f"atoll: last: {format_values(summary.last)}")
    lines += [
        f"atoll: {line}"
        for lines in (group_lines, link_lines, node_lines, memory_lines)
        for line in lines(summary)
    ]
    files = [each for each in (directory.summary, directory.metrics) if each.exists()]
    files += [directory.picture] if drawn else []
    files += [directory.logs] if directory.logs.exists() else []
    if files:  # nobody has removed the directory
        lines.append(f"atoll: see {directory.path}: {', '.join(file.name for file in files)}")
    return lines
