"""The launches of a run's workers on this machine, each of which may die and come back alone."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

from atoll.core.config import FIRST_VARIABLE, HUB_VARIABLE, RANK_VARIABLE, SITE_VARIABLE, Config
from atoll.core.runclock import record_time
from atoll.launch.ends import EndWatch
from atoll.launch.launcher import WorkerEnd, launcher_command, read_ends
from atoll.launch.ports import LOOPBACK, free_port
from atoll.launch.processes import descendants, start_logged
from atoll.launch.restarts import DelayedProcess, Pauses, Process
from atoll.launch.services import Start
from atoll.observe.rundir import RunDirectory


def sites_of(config: Config) -> list[str]:
    """Return the site of each worker, by rank: neighbours share one, and sites are as even as possible.
    Without sites, return empty names."""
    run = config.run
    return [f"site{rank * run.sites // run.workers}" if run.sites else "" for rank in range(run.workers)]


def meeting_place() -> dict[str, str]:
    """Return torchrun's variables for a process group of the script's own, with a free port of this
    machine. Raises UserError if there is none."""
    return {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(free_port())}


class WorkerLaunches:
    """The launches of the workers of a run, by rank.

    A launch is one worker; a launch of one process needs no agent of torchrun's, so none is started, which
    saves seconds of every worker's start. With `groups.count` under strategy `peers` a launch is a node: its
    devices' workers run under the agent, and are lost, and come back, together.
    """

    def __init__(
        self,
        directory: RunDirectory,
        config: Config,
        script: Sequence[str],
        umask: int = -1,
        start: Start = start_logged,
    ) -> None:
        """`script`: its path and its arguments. Workers have the umask `umask` (-1: this process's), since
        their scripts write files of their own."""
        self._directory, self._config, self._script = directory, config, list(script)
        self._umask, self._start = umask, start
        nodes = config.groups.count if config.run.strategy == "peers" else 0
        self.devices = config.run.workers // nodes if nodes else 1  # workers of a launch
        self.sites = sites_of(config)[:: self.devices]
        self.processes: list[Process] = []
        self.restarts: Counter[int] = Counter()
        self.order = list(range(len(self.sites)))  # ranks, in the order in which their output counts
        self.survived: dict[int, float] = {}  # worker -> time up to which its ends have ended nothing else
        self.pauses = Pauses()
        self._environment: dict[str, str] = {}
        self._watch = EndWatch(self._note_end)
        self._end_times: dict[int, float] = {}  # by process id
        self._told: set[int] = set()  # process ids

    def start(self, address: str, environment: Mapping[str, str]) -> None:
        """Start all launches; `address` is the hub's."""
        self._environment = {**environment, HUB_VARIABLE: address}
        for rank in range(len(self.sites)):
            self.processes.append(self._launch(rank))

    def start_again(self, rank: int, pause: float) -> None:
        """Start a launch again, after `pause` seconds."""
        start = partial(self._launch, rank)
        self.processes[rank] = DelayedProcess(start, pause, self.pauses.clock) if pause else start()
        self.survive(rank)

    # Names and numbers

    def lead(self, rank: int) -> int:
        """Return the first worker of a launch, whose journal reports on the launch."""
        return rank * self.devices

    def rank_of(self, worker: int) -> int:
        """Return the launch of a worker."""
        return worker // self.devices

    def workers_of(self, rank: int) -> range:
        """Return the workers of a launch."""
        return range(self.lead(rank), self.lead(rank + 1))

    def name_of(self, rank: int) -> str:
        """Return a launch's name for people."""
        return f"node {rank}" if self.devices > 1 else f"worker {rank}"

    def count_by_site(self) -> dict[str, int]:
        """Return the number of launches at each site; empty without sites."""
        return {site: self.sites.count(site) for site in self.sites if site}

    # How they end

    def codes(self) -> list[int | None]:
        """Return the exit code of each launch; None: it runs."""
        return [process.poll() for process in self.processes]

    @property
    def have_ended(self) -> bool:
        """True if no launch ran at the last poll."""
        return all(process.returncode is not None for process in self.processes)

    def newly_ended(self, rank: int) -> float | None:
        """Return when a process ended; None if this was asked before about the process."""
        pid = self.processes[rank].pid
        if pid in self._told:
            return None
        self._told.add(pid)
        return self._end_times.pop(pid, record_time())

    def end_of(self, rank: int, code: int) -> WorkerEnd:
        """Return the end of a launch; for several workers, the end that made the others end."""
        lead = self.lead(rank)
        told = read_ends(self._directory.ends_of(lead)) if self.devices > 1 else []
        return told[0] if told else WorkerEnd(lead, self.processes[rank].pid, code)

    def survive(self, rank: int) -> None:
        """Note that the run goes on without an ended launch, or starts it again."""
        for worker in self.workers_of(rank):
            self.survived[worker] = record_time()

    def pids(self, process: Process) -> list[int]:
        """Return the process ids of a launch that runs: its own, and its workers' for a launch of several."""
        if process.returncode is not None:
            return []
        return [process.pid, *(descendants(process.pid) if self.devices > 1 else [])]

    def end_waiting(self) -> None:
        """Cancel pending restarts once the others have finished: nothing is left to do."""
        waiting = [each for each in self.processes if isinstance(each, DelayedProcess) and each.waits]
        codes = self.codes() if waiting else []
        if waiting and 0 in codes and codes.count(None) == len(waiting):
            for each in waiting:
                each.kill()

    def send_signal(self, signum: int) -> None:
        """Hand a signal on to each running launch."""
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signum)

    def unfinished(self) -> list[str]:
        """Return the names of the launches that have not ended."""
        return [self.name_of(rank) for rank, code in enumerate(self.codes()) if code is None]

    def _note_end(self, pid: int, _code: int | None, at: float) -> None:
        self._end_times[pid] = at

    def _launch(self, rank: int) -> subprocess.Popen[bytes]:
        count = str(self._config.run.workers)
        if self.devices > 1:
            command = launcher_command(self.devices, self._script)
            place = {FIRST_VARIABLE: str(self.lead(rank))}
        else:
            command = [sys.executable, "-m", "atoll.launch.worker", *self._script]
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), SITE_VARIABLE: self.sites[rank]}
            place |= {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        environment = {**self._environment, RANK_VARIABLE: str(rank), **place}
        log = self._directory.launcher_log
        process = self._start(self.name_of(rank), command, log, environment, self._umask)
        self._watch.watch(process.pid)
        return process
