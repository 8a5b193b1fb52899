"""The processes of a run that has a hub, on this machine: the hub, the shards of a parameter server, and each
worker on its own.

Each worker is a launch of its own, so that one can die and the others go on; `torchrun` on several machines
does the same (docs/several-machines.md). A launch of one process needs nothing of torchrun's agent, so none
is started here: that saves seconds of every worker's start. Hub and shards that are killed are started again,
and so are workers, where the configuration says so.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from atoll.core.config import HUB_VARIABLE, RANK_VARIABLE, RUN_VARIABLE, SITE_VARIABLE, Config, check_groups
from atoll.core.errors import GivenUpError, RunError, UserError
from atoll.core.events import AnyEvent, Failed, Started, Warned
from atoll.launch.launcher import WorkerEnd, write_ends
from atoll.launch.processes import Standstill, signal_name
from atoll.launch.tail import last_lines
from atoll.observe.journal import Journal, JournalReader
from atoll.observe.rundir import RunDirectory

SERVICE_RESTARTS = 3  # times that a hub or a shard that is killed is started again, each
START_SECONDS = 60.0  # for the hub to say where it listens
_POLL_SECONDS = 0.05
_LOOK_SECONDS = 0.5  # between looks at who stands still
_GIVEN_UP_SECONDS = 1.0  # longer than the hub's patience is what a process may stand still: the hub is first
_SERVICE_ENDED = 3  # the status of this launch when hub or shard ended before the workers


def check_run(config: Config) -> None:
    """Raise UserError for sites and groups that cannot be started, and for restarts that cannot be."""
    run = config.run
    if run.strategy == "hierarchical":
        check_groups(config.groups.count, run.workers)
    if run.restarts and run.strategy in ("ring", "hierarchical") and not run.elastic:
        raise UserError(
            f"run.restarts: {run.restarts} restarts of a worker go with run.elastic = true (or strategy "
            "'server'), where each worker is a launch of its own"
        )
    if config.server.replicas > 1 and run.strategy != "server":
        raise UserError(
            f"server.replicas (--replicas): {config.server.replicas} processes for each shard go with "
            f"run.strategy 'server', not {run.strategy!r}"
        )
    if run.sites and run.strategy != "server":
        raise UserError(f"run.sites: {run.sites} sites go with run.strategy 'server', not {run.strategy!r}")
    if config.server.replicas > 1 and run.sites:
        raise UserError(
            f"server.replicas (--replicas): {config.server.replicas} processes for each shard do not go with "
            "run.sites: sites' shards have no standby yet"
        )
    if run.sites > run.workers:
        raise UserError(f"run.sites: {run.sites} sites for {run.workers} workers: each has at least one")


def sites_of(config: Config) -> list[str]:
    """The site of each worker, by rank: neighbours share one, and sites are as even as can be. Without sites,
    no name at all."""
    run = config.run
    return [f"site{rank * run.sites // run.workers}" if run.sites else "" for rank in range(run.workers)]


class ServedLaunch:
    """Looks, to its watcher, like a launcher's process: `poll`, `send_signal`, `kill`, `wait`, `returncode`.

    It ends when all workers have. A worker that ends with an error ends the others, since the error is likely
    the script's. One that was killed is started again up to `run.restarts` times; then it is left out, and
    the others go on, once the run has begun. A hub or a shard that was killed, a site's too, is started again
    up to three times, with the same arguments: what they go on from is in the directory that each has. A site
    whose shard was killed more often is left out. Of a shard that is held twice one process may end for good:
    it was killed more often, or ended with an error once the run had begun.
    A process that stands still (SIGSTOP) for longer than the hub bears is killed.
    """

    def __init__(
        self, directory: RunDirectory, config: Config, script: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self._directory, self._config = directory, config
        self._environment = {**environment, RUN_VARIABLE: directory.path.name}
        self.returncode: int | None = None
        self._script, self._address = list(script), ""
        self._services: dict[str, subprocess.Popen[bytes]] = {}
        self._arguments: dict[str, list[str]] = {}  # of each service
        self._restarts: Counter[str] = Counter()  # by the name of a service or a worker
        self._workers: list[subprocess.Popen[bytes]] = []
        self._ends: list[WorkerEnd] = []
        self._stopping = False  # workers end because they were told to
        self._sites = sites_of(config)
        self._lost_sites: set[str] = set()
        self._standstill = Standstill(config.patience_seconds + _GIVEN_UP_SECONDS)
        self._next_look = 0.0  # monotonic
        self._left_halves: set[str] = set()  # processes of shards that are not started again
        self._start()

    def _start(self) -> None:
        run = self._config.run
        count, shards = run.workers, run.shards if run.strategy == "server" else 0
        folder = self._directory.path / "service"
        folder.mkdir(exist_ok=True)
        where = folder / "hub.address"
        where.unlink(missing_ok=True)
        common = ["--run", self._directory.path.name, "--directory", str(folder)]
        patience = ["--patience", f"{self._config.patience_seconds:g}"]
        sites = {site: self._sites.count(site) for site in self._sites if site}
        named = [part for site, workers in sites.items() for part in ("--site", f"{site}={workers}")]
        replicas = self._config.server.replicas if shards else 1
        of_run = ["--workers", str(count), "--shards", str(shards), "--replicas", str(replicas)]
        self._serve("hub", [*of_run, *named, *patience, *common])
        # Shards and workers import torch, which takes longest: none waits for another to have done so.
        address = self._address = self._address_in(where)
        for shard in range(shards):
            arguments = ["--hub", address, "--shard", str(shard), *common]
            arguments += ["--snapshot-seconds", f"{self._config.snapshot_seconds:g}"]
            if self._config.server.optimizer:
                arguments += ["--optimizer", self._config.server.optimizer]
            self._serve(f"server-{shard}", arguments)
            if replicas > 1:
                self._serve(f"second-{shard}", [*arguments, "--second"])
        for site in sites:
            arguments = ["--hub", address, "--site", site, *common]
            arguments += ["--snapshot-seconds", f"{self._config.snapshot_seconds:g}"]
            self._serve(f"site-{site}", [*arguments, "--timeout", f"{self._config.timeout_seconds:g}"])
        for rank in range(count):
            self._workers.append(self._worker(rank))

    def _serve(self, name: str, arguments: Sequence[str]) -> None:
        """Start the hub or a shard, with a log of its own."""
        kind, self._arguments[name] = name.partition("-")[0].replace("second", "server"), list(arguments)
        with (self._directory.logs / f"{name}.log").open("ab") as log:
            self._services[name] = subprocess.Popen(
                [sys.executable, "-m", "atoll.launch.service", kind, *arguments],
                env={**self._environment, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _worker(self, rank: int) -> subprocess.Popen[bytes]:
        count = str(self._config.run.workers)
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        with self._directory.launcher_log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "atoll.launch.worker", *self._script],
                env={
                    **self._environment,
                    **place,
                    HUB_VARIABLE: self._address,
                    RANK_VARIABLE: str(rank),
                    SITE_VARIABLE: self._sites[rank],
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _address_in(self, path: Path) -> str:
        """The address that the hub has written to `path`, once it listens."""
        until = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(FileNotFoundError):
                if address := path.read_text(encoding="utf-8").strip():
                    return address
            ended = self._services["hub"].poll()
            if ended is not None or time.monotonic() > until:
                self.kill()
                said = "ended" if ended is not None else f"did not listen within {START_SECONDS:g} s"
                raise RunError(f"the hub {said}; its log is {self._directory.logs / 'hub.log'}")
            time.sleep(_POLL_SECONDS)

    # What a watcher asks of a launcher

    def poll(self) -> int | None:
        """The status, once all workers have ended; None before."""
        if self.returncode is not None:
            return self.returncode
        self._end_standstill()
        lost = self._lost_service()
        for rank, worker in enumerate(self._workers):
            ended = worker.poll()
            if ended and rank not in {end.worker for end in self._ends}:
                if ended < 0 and self._starts_again(rank, signal_name(-ended)):
                    continue
                self._ends.append(WorkerEnd(rank, worker.pid, ended))
                write_ends(self._ends, self._directory.ends)
                if ended > 0 and self._sites[rank] in self._lost_sites:
                    continue
                if ended > 0:
                    self._stop_workers()
                else:
                    self._see_to_killed(rank, signal_name(-ended))
        if lost:  # before the workers, for until they have ended nobody else ends it
            self._tell_lost(lost)
            self._stop_workers()
            self._finish(_SERVICE_ENDED)
        elif all(worker.returncode is not None for worker in self._workers):
            self._finish(self._status())
        return self.returncode

    @property
    def left_out(self) -> set[int]:
        """The workers whose site was lost: their errors are no end of the run."""
        return {rank for rank, site in enumerate(self._sites) if site in self._lost_sites}

    def _end_standstill(self) -> None:
        """Kill who has stood still for too long: the hub has given it up, and others may wait for it."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_SECONDS
        there = {f"worker {rank}": (rank, worker) for rank, worker in enumerate(self._workers)}
        there |= {_called(name): (0, service) for name, service in self._services.items()}
        living = {each.pid: name for name, (_, each) in there.items() if each.returncode is None}
        for pid, seconds in self._standstill.look(living).items():
            rank, process = there[living[pid]]
            message = f"{living[pid]} has stood still for {seconds:.0f} s (SIGSTOP); it is killed"
            self._write(rank, Warned(time=time.time(), worker=rank, message=message))
            process.kill()

    def _lost_service(self) -> str:
        """The hub or a shard that has ended, without which nobody can go on; a site's shard only when all are
        killed. One that ends well has no workers any more. Those that were killed are started again first."""
        ended = {name: each.poll() for name, each in self._services.items()}
        # Who was left out comes last: it was told of, and what ends the run is what came after.
        for name, code in sorted(ended.items(), key=lambda each: each[0] in self._left_halves):
            site = name.partition("site-")[2]
            if code is None or (site and code == 0):
                continue
            if site not in self._lost_sites and _may_start_again(code):
                how = f"was killed by {signal_name(-code)}" if code < 0 else "was given up by the hub"
                if self._serves_again(name, how):
                    continue
            if self._goes_on_without(name, code):
                continue
            # One that comes too late, for the others to go on with its site, says so and ends.
            killed = code < 0 or self._restarts[name] > 0
            if site and killed and self._lost_sites | {site} != set(self._sites):
                if site not in self._lost_sites:
                    self._lost_sites.add(site)
                    self._leave_out(site)
            else:
                return name
        return ""

    def _serves_again(self, name: str, how: str) -> bool:
        """Start a hub or a shard again that was killed, and say so; False where it was often enough."""
        if self._stopping or self._restarts[name] >= SERVICE_RESTARTS:
            return False
        self._tell_again(0, name, _called(name), how, SERVICE_RESTARTS)
        self._serve(name, self._arguments[name])
        return True

    def _goes_on_without(self, name: str, code: int) -> bool:
        """Whether the other process of a shard that is held twice goes on alone; say so once."""
        if code == 0 or not self._has_other_half(name):
            return False
        if name in self._left_halves:
            return True
        # Before the run began what was given is wrong, and the run waits for both.
        if self._stopping or not (_may_start_again(code) or self._has_begun()):
            return False
        self._left_halves.add(name)
        place = "first" if name.startswith("server-") else "second"
        who = f"the {place} process of shard {name.partition('-')[2]}"
        message = f"{who} {self._how_it_ended(name, code)}; the other one goes on alone"
        self._write(0, Warned(time=time.time(), worker=0, message=message))
        return True

    def _has_other_half(self, name: str) -> bool:
        """Whether the shard has another process, which runs or will be started again."""
        kind, _, shard = name.partition("-")
        other_kind = {"server": "second", "second": "server"}.get(kind)
        other = f"{other_kind}-{shard}"
        if other_kind is None or other not in self._services:
            return False
        code = self._services[other].poll()
        can_start = not self._stopping and self._restarts[other] < SERVICE_RESTARTS
        return code is None or (can_start and _may_start_again(code))

    def _how_it_ended(self, name: str, code: int) -> str:
        """Of a shard's process that is not started again."""
        if code < 0:
            return f"was killed by {signal_name(-code)}, {self._restarts[name] + 1} times by now"
        if code == GivenUpError.exit_status:
            return f"was given up by the hub, {self._restarts[name] + 1} times by now"
        said = self._last_word(name) or f"its log is {self._directory.logs / f'{name}.log'}"
        return f"ended with status {code}: {said}"

    def _starts_again(self, rank: int, signame: str) -> bool:
        """Start a worker again that was killed, and say so; False where it may not be."""
        name, most = f"worker {rank}", self._config.run.restarts
        codes = [worker.poll() for worker in self._workers]
        is_over = 0 in codes and None not in codes  # the others have finished: nothing is left to do
        lost = self._sites[rank] in self._lost_sites
        if self._stopping or is_over or lost or self._restarts[name] >= most:
            return False
        self._tell_again(rank, name, name, f"was killed by {signame}", most)
        self._workers[rank] = self._worker(rank)
        return True

    def _tell_again(self, rank: int, name: str, called: str, how: str, most: int) -> None:
        self._restarts[name] += 1
        message = f"{called} {how}, and is started again ({self._restarts[name]} of {most})"
        self._write(rank, Warned(time=time.time(), worker=rank, message=message))

    def _leave_out(self, site: str) -> None:
        """A site's shard was killed, and so its workers end."""
        ranks = [rank for rank, each in enumerate(self._sites) if each == site]
        code = self._services[f"site-{site}"].returncode or 0
        how = f"was killed by {signal_name(-code)}" if code < 0 else "could not come back"
        message = f"the shard of site {site!r} {how}; the other sites go on without it"
        self._write(ranks[0], Warned(time=time.time(), worker=ranks[0], message=message))

    def _see_to_killed(self, rank: int, signame: str) -> None:
        """Name a worker that the others go on without; before the run begins, they would wait for another."""
        if self._stopping or all(worker.poll() is not None for worker in self._workers):
            return
        if self._has_begun():
            message = f"worker {rank} was killed by {signame}; the others go on without it"
            self._write(rank, Warned(time=time.time(), worker=rank, message=message))
            return
        log = self._directory.log(rank)
        self._tell_failed(
            rank, f"worker {rank} was killed by {signame} before the run began; its log is {log}"
        )
        self._stop_workers()

    def _has_begun(self) -> bool:
        """Whether the workers have met: each says so in its journal then."""
        journals = map(JournalReader, self._directory.journals().values())
        return any(isinstance(event, Started) for journal in journals for event in journal.read())

    def _tell_lost(self, name: str) -> None:
        """Say which of hub and shards has ended, and why: without it the run cannot go on."""
        code, log = self._services[name].returncode, self._directory.logs / f"{name}.log"
        who = _called(name)
        said = self._last_word(name)
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with status {code}"
        often = f" for the {self._restarts[name] + 1}th time" if self._restarts[name] else ""
        message = f"{who} {how}{often}, and the run cannot go on without it; its log is {log}"
        message = f"{who}: {said}" if said else message
        self._tell_failed(0, message, code if code > 0 else 1)

    def _last_word(self, name: str) -> str:
        """What a service said last of why it ends; empty where it said nothing."""
        lines = reversed(last_lines(self._directory.logs / f"{name}.log", 20))
        said = next((line for line in lines if line.startswith("atoll: ")), "")
        return said.removeprefix("atoll: ")

    def _tell_failed(self, rank: int, message: str, status: int = 1) -> None:
        """Leave word of what ends the run."""
        self._write(
            rank,
            Failed(
                time=time.time(),
                worker=rank,
                error="RunError",
                message=message,
                traceback="",
                exit_status=status,
            ),
        )

    def _write(self, rank: int, event: AnyEvent) -> None:
        """Leave word where the command looks for it: in a worker's journal."""
        with Journal(self._directory.journal(rank)) as journal:
            journal(event)

    def _status(self) -> int:
        codes = [
            worker.returncode
            for worker, site in zip(self._workers, self._sites, strict=True)
            if site not in self._lost_sites
        ]
        if any(code > 0 for code in codes) or not any(code == 0 for code in codes):
            return 1
        return 0  # those that were killed were left out, and the others have finished

    def _finish(self, status: int) -> None:
        self.returncode = status
        for service in self._services.values():
            service.terminate()

    def _stop_workers(self) -> None:
        self._stopping = True
        for worker in self._workers:
            if worker.poll() is None:
                worker.terminate()

    def send_signal(self, signum: int) -> None:
        """Hand a signal on to every worker."""
        self._stopping = True
        for worker in self._workers:
            with contextlib.suppress(ProcessLookupError):
                worker.send_signal(signum)

    def kill(self) -> None:
        """End what is left, by force."""
        for process in (*self._workers, *self._services.values()):
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)

    def wait(self, timeout: float) -> int:
        """Return when every process has ended; raises subprocess.TimeoutExpired after `timeout` seconds."""
        until = time.monotonic() + timeout
        for process in (*self._workers, *self._services.values()):
            process.wait(max(0.0, until - time.monotonic()))
        if self.returncode is None:
            self.returncode = self._status()
        return self.returncode


def _may_start_again(code: int) -> bool:
    """Whether a service that ended so is of use again: one that was killed, or that the hub gave up."""
    return code < 0 or code == GivenUpError.exit_status


def _called(name: str) -> str:
    """A service's name as a person reads it."""
    name = name.replace("server-", "shard ").replace("second-", "the second process of shard ")
    return name.replace("site-", "the shard of site ").replace("hub", "the hub")
