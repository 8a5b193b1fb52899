"""The processes of a run that has a hub, on this machine: the hub, the shards of a parameter server, and each
worker on its own.

Each worker is a launch of its own, so that one can die and the others go on; `torchrun` on several machines
does the same (docs/several-machines.md). A launch of one process needs nothing of torchrun's agent, so none
is started here: that saves seconds of every worker's start. Hub and shards that are killed are started again,
and so are workers, where the configuration says so.
"""

from __future__ import annotations

import contextlib
import math
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
from msgspec.structs import replace

from atoll.core.config import (
    HUB_VARIABLE,
    KEYS_VARIABLE,
    LAUNCHER_VARIABLE,
    RANK_VARIABLE,
    RUN_VARIABLE,
    SERVED,
    SITE_VARIABLE,
    SOCKETS_VARIABLE,
    Config,
)
from atoll.core.errors import AtollError, GivenUpError, RunError, UserError
from atoll.core.events import AnyEvent, Decided, Failed, Gone, LinkSeen, Started, StepDone, Warned
from atoll.core.runclock import record_time
from atoll.core.units import format_seconds
from atoll.hub.decisions import HUB, Decision, DecisionReader
from atoll.hub.forwarder import Forwarder
from atoll.hub.options import HubOptions
from atoll.launch.ends import EndWatch
from atoll.launch.launcher import WorkerEnd, write_ends
from atoll.launch.losses import Losses, who_of
from atoll.launch.parts import called, part_of
from atoll.launch.processes import Standstill, appended, descendants, is_stopped, signal_name, start_process
from atoll.launch.restarts import DelayedProcess, Pauses, Process
from atoll.launch.service import END_SIGNAL
from atoll.launch.tail import last_word
from atoll.net.keys import read_keys
from atoll.observe.groups import GROUPS
from atoll.observe.journal import Journal, JournalReader
from atoll.observe.rundir import RunDirectory
from atoll.server.options import ServerOptions

SERVICE = "atoll.launch.service"  # the module that a service's process runs
SERVICE_RESTARTS = 3  # times that a hub or a shard that is killed is started again, each
START_SECONDS = 60.0  # for the hub to say where it listens
_LOOK_SECONDS = 0.5  # between looks at who stands still
_GIVEN_UP_SECONDS = 1.0  # longer than the hub's patience is what a process may stand still: the hub is first
_LOOPBACK = "127.0.0.1"
_SERVICE_ENDED = 3  # the status of this launch when hub or shard ended before the workers


def sites_of(config: Config) -> list[str]:
    """The site of each worker, by rank: neighbours share one, and sites are as even as can be. Without sites,
    no name at all."""
    run = config.run
    return [f"site{rank * run.sites // run.workers}" if run.sites else "" for rank in range(run.workers)]


def _free_port() -> int:
    """Return a port of this machine that is free now."""
    with socket.socket() as bound:
        bound.bind((_LOOPBACK, 0))
        port: int = bound.getsockname()[1]
        return port


class ServedLaunch:
    """Looks, to its watcher, like a launcher's process: `poll`, `send_signal`, `kill`, `wait`, `returncode`.

    It ends when all workers have. A worker that ends with an error ends the others, since the error is likely
    the script's. One that was killed is started again up to `run.restarts` times; then it is left out, and
    the others go on, once the run has begun. A hub or a shard that was killed, a site's too, is started again
    up to three times, with the same arguments: what they go on from is in the directory that each has. A site
    whose shard was killed more often is left out. Of a shard that is held twice one process may end for good:
    it was killed more often, or ended with an error once the run had begun.
    A launch may be of several workers (`_devices`), under torchrun's agent, and is lost, and comes back, as
    one: `rank` is the launch's then.
    A process that stands still (SIGSTOP) is killed when the hub has given it up, by the patience that it has
    measured for it; where the hub says nothing, since it may stand still itself, a while after the longest
    patience. A worker that was given up and ends by itself is as one that was killed.
    `hub_module` is what the hub's process runs, with the same arguments as SERVICE. Workers have the umask
    `umask` (-1: this process's), since their scripts write files of their own.
    """

    def __init__(
        self,
        directory: RunDirectory,
        config: Config,
        script: Sequence[str],
        environment: Mapping[str, str],
        hub_module: str = SERVICE,
        umask: int = -1,
    ) -> None:
        self._hub_module, self._umask = hub_module, umask
        self._directory, self._config = directory, config
        # torchrun's variables for a process group of the script's own.
        meeting = {"MASTER_ADDR": _LOOPBACK, "MASTER_PORT": str(_free_port())}
        self._environment = {**environment, **meeting, RUN_VARIABLE: directory.name}
        self.returncode: int | None = None
        self._script, self._address = list(script), ""
        self._forwarder: Forwarder | None = None  # of the workers' heartbeats
        self._services: dict[str, subprocess.Popen[bytes]] = {}
        self._options: dict[str, HubOptions | ServerOptions] = {}  # of each service
        self._restarts: Counter[str] = Counter()  # by the name of a service or a worker
        self._pauses = Pauses()
        self._workers: list[Process] = []
        self._ends: list[WorkerEnd] = []
        self._stopping = False  # workers end because they were told to
        self._devices = self._devices_of(config)
        self._sites = sites_of(config)[:: self._devices]
        self._lost_sites: set[str] = set()
        self._standstill = Standstill(config.patience_seconds + _GIVEN_UP_SECONDS)
        self._next_look = 0.0  # monotonic
        self._left_halves: set[str] = set()  # processes of shards that are not started again
        self._port_told: set[str] = set()  # kinds of the hub's reports on its port
        self._began = time.monotonic()
        self._decisions = DecisionReader(directory.path / "service")
        self._site_journals = [
            JournalReader(directory.path / "service" / f"site-{site}" / "journal.jsonl")
            for site in dict.fromkeys(self._sites)
            if site
        ]
        self._news: list[AnyEvent] = []
        self.losses = Losses(twice=config.server.replicas > 1)
        self._entering: dict[int, JournalReader] = {}  # ranks that were started again, until their first step
        self._turned_away: set[int] = set()  # those of them that ended with an error before
        self._given_up: set[int] = set()  # ranks whose worker the hub has given up, though its process lives
        self._excused: dict[
            int, float
        ] = {}  # rank -> until when its failures are no end of the run; record_time
        self._order = list(range(len(self._sites)))  # ranks, whose output counts first
        self._watch = EndWatch(self._note_end)
        self._end_times: dict[int, float] = {}  # by process id
        self._words: list[AnyEvent] = []  # how processes ended, for who judges the run
        self._gone: set[int] = set()  # the processes of workers that are in `_words`, or were
        self.survived: dict[int, float] = {}  # worker -> until when its ends have ended nothing else
        self._awaited: Path | None = None  # where the hub will say where it listens, until it has
        self._begins_by = math.inf  # monotonic: when it must have
        self._start()

    def _devices_of(self, _config: Config) -> int:
        """How many workers a launch has."""
        return 1

    def _lead(self, rank: int) -> int:
        """The first worker of a launch, in whose journal is told what happens to it."""
        return rank * self._devices

    def _name_of(self, rank: int) -> str:
        """What a person calls a launch: by its worker."""
        return f"worker {rank}"

    def _start(self) -> None:
        """Start the hub; the rest is started by `poll`, once the hub listens."""
        count, shards = len(self._sites), self._shard_count
        folder = self._directory.path / "service"
        folder.mkdir(exist_ok=True)
        where = folder / "hub.address"
        where.unlink(missing_ok=True)
        self._serve("hub", self._hub_options(count, shards))
        self._awaited, self._begins_by = where, time.monotonic() + START_SECONDS

    @property
    def _shard_count(self) -> int:
        return self._config.run.shards if self._config.run.strategy in SERVED else 0

    def _workers_of(self) -> dict[str, int]:
        """How many workers each site has."""
        return {site: self._sites.count(site) for site in self._sites if site}

    def _hub_options(self, count: int, shards: int) -> HubOptions:
        config, groups = self._config, self._config.groups
        return HubOptions(
            workers=count,
            shards=shards,
            listen=f"tcp://{_LOOPBACK}:0",
            key_file=self._environment.get(KEYS_VARIABLE, ""),
            run=self._directory.name,
            directory=str(self._directory.path / "service"),
            patience=config.patience_seconds,
            sites=self._workers_of(),
            replicas=config.server.replicas if shards else 1,
            groups=groups.count if config.run.strategy == "ps-hra" else None,
            group_by=groups.by,
            group_patience=config.probe_seconds,
            group_links=config.links_seconds,
            regroup=groups.regroup,
            consistency=config.sync.consistency,
        )

    def _server_options(self, address: str) -> dict[str, ServerOptions]:
        """Those of each shard's processes and of each site's, by name."""
        config, folder = self._config, self._directory.path / "service"
        common = ServerOptions(
            hub=address,
            key_file=self._environment.get(KEYS_VARIABLE, ""),
            run=self._directory.name,
            codec=config.sync.codec,
            snapshot_seconds=config.snapshot_seconds,
        )
        shards = replace(
            common,
            optimizer=config.server.optimizer,
            journal=config.server.journal,
            link_rate=config.link_options.rate,
        )
        sites = replace(common, timeout=config.timeout_seconds, link=config.link_options)
        found: dict[str, ServerOptions] = {}
        for shard in range(self._shard_count):
            for name, beside in (("server", ""), ("second", "-second"))[: config.server.replicas]:
                directory = str(folder / f"shard-{shard}{beside}")
                found[f"{name}-{shard}"] = replace(shards, shard=shard, directory=directory)
        for site in self._workers_of():
            found[f"site-{site}"] = replace(sites, site=site, directory=str(folder / f"site-{site}"))
        return found

    def _start_others(self, address: str) -> None:
        """Start shards and workers. They import torch, which takes longest: none waits for another."""
        for name, options in self._server_options(address).items():
            self._serve(name, options)
        self._forward_heartbeats()
        for rank in range(len(self._sites)):
            self._workers.append(self._start_worker(rank))

    def _forward_heartbeats(self) -> None:
        """Pass on the workers' heartbeats to the hub from now on, where there is a folder for the socket."""
        folder, keys = (self._environment.get(name) for name in (SOCKETS_VARIABLE, KEYS_VARIABLE))
        if not folder or not sys.platform.startswith("linux"):  # others have no such sockets
            return
        try:
            found = read_keys(keys) if keys else None
            self._forwarder = Forwarder(Path(folder), self._address, found, self._directory.name)
        except (OSError, AtollError) as error:
            self._tell_of_heartbeats(str(error))
            return
        self._environment = {**self._environment, LAUNCHER_VARIABLE: self._forwarder.launcher.name}

    def _tell_of_heartbeats(self, trouble: str) -> None:
        message = f"the launcher passes no heartbeats on, and each worker sends its own: {trouble}"
        self._write(0, Warned(time=record_time(), worker=0, message=message))

    def _look_at_forwarder(self) -> None:
        """Say so once if the workers' heartbeats are not passed on any more."""
        if self._forwarder is not None and self._forwarder.trouble:
            self._tell_of_heartbeats(self._forwarder.trouble)
            self._forwarder = None

    def _serve(self, name: str, options: HubOptions | ServerOptions) -> None:
        """Start the hub or a shard, with a log of its own."""
        self._options[name] = options
        module = self._hub_module if name == "hub" else SERVICE
        with appended(self._directory.logs / f"{name}.log") as log:
            self._services[name] = start_process(
                called(name),
                [sys.executable, "-m", module, name, msgspec.json.encode(options).decode()],
                env={**self._environment, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _worker(self, rank: int) -> subprocess.Popen[bytes]:
        count = str(self._config.run.workers)
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        with appended(self._directory.launcher_log) as log:
            return start_process(
                self._name_of(rank),
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
                umask=self._umask,
                start_new_session=True,
            )

    def _await_hub(self, path: Path) -> None:
        """Start the others once the hub has written its address to `path`; end where it does not."""
        if self._stopping:
            self._finish(_SERVICE_ENDED)
            return
        with contextlib.suppress(FileNotFoundError):
            if address := path.read_text(encoding="utf-8").strip():
                self._awaited, self._address = None, address
                self._start_others(address)
                return
        if lost := self._lost_service():
            self._tell_lost(lost)
        elif time.monotonic() > self._begins_by:
            log = self._directory.logs / "hub.log"
            self._tell_failed(0, f"the hub did not listen within {START_SECONDS:g} s; its log is {log}")
        else:
            return
        self._finish(_SERVICE_ENDED)

    def _start_worker(self, rank: int) -> subprocess.Popen[bytes]:
        worker = self._worker(rank)
        self._watch.watch(worker.pid)
        return worker

    def _note_end(self, pid: int, _code: int | None, at: float) -> None:
        self._end_times[pid] = at

    def _tell_gone(self, rank: int, pid: int, code: int) -> None:
        """Say once how a worker's process has ended. A launch of several says so of each of its workers."""
        if pid in self._gone:
            return
        self._gone.add(pid)
        at = self._end_times.pop(pid, record_time())
        if self._devices == 1:
            self._words.append(Gone(time=at, worker=self._lead(rank), exit_code=code))

    def _survive(self, rank: int) -> None:
        """The run goes on without the worker's process that has ended, or starts it again."""
        for worker in range(self._lead(rank), self._lead(rank + 1)):
            self.survived[worker] = record_time()

    @property
    def goes_on(self) -> bool:
        """True while a worker runs, and none was told to end."""
        return not self._stopping and any(worker.returncode is None for worker in self._workers)

    def words(self) -> list[AnyEvent]:
        """How processes have ended, and what ends the run, since the last call."""
        words, self._words = self._words, []
        return words

    # What a watcher asks of a launcher

    def poll(self) -> int | None:
        """The status, once all workers have ended; None before."""
        if self.returncode is None:
            try:
                self._look()
            except RunError as error:  # a process cannot be started
                self._tell_failed(0, str(error), error.exit_status)
                self._stop_workers()
                self._finish(_SERVICE_ENDED)
        return self.returncode

    def _look(self) -> None:
        """See who has ended, and what follows from it."""
        if self._awaited is not None:
            self._await_hub(self._awaited)
            return
        self._take_decisions()
        self._look_at_forwarder()
        self._end_standstill()
        self._end_waiting()
        lost = self._lost_service()
        for rank, worker in enumerate(self._workers):
            ended = worker.poll()
            if ended is not None:
                self._tell_gone(rank, worker.pid, ended)
            if ended and rank not in {end.worker // self._devices for end in self._ends}:
                self._worker_ended(rank, ended)
        if lost:  # before the workers, for until they have ended nobody else ends it
            self._tell_lost(lost)
            self._stop_workers()
            self._finish(_SERVICE_ENDED)
        elif all(worker.returncode is not None for worker in self._workers):
            self._finish(self._status())

    def _worker_ended(self, rank: int, code: int) -> None:
        """A worker has ended with an error, or was killed."""
        lost_site = self._sites[rank] in self._lost_sites
        is_newcomer = code > 0 and not lost_site and self._is_newcomer(rank)
        is_refused = is_newcomer and self._failed_itself(rank)
        given_up = code > 0 and not lost_site and not is_refused and self._ends_given_up(rank)
        how = self._how_lost(rank, code)
        if (code < 0 or given_up) and self._starts_again(rank, how):
            return
        self._ends.append(self._end_of(rank, code))
        write_ends(self._ends, self._directory.ends)
        if is_newcomer and not given_up:
            self._turn_away(rank)
        elif code > 0 and not lost_site and not given_up:
            if not self._stopping:  # else each has its signal, and time to end
                self._stop_workers()
            return
        elif not lost_site:
            self._see_to_killed(rank, how)
        if len(self._order) > 1 and not self._stopping:
            self._order.remove(rank)

    def _is_newcomer(self, rank: int) -> bool:
        """True where a restarted worker has made no step, and the run can go on without it."""
        if self._has_stepped(rank):
            return False
        others = (worker.poll() for other, worker in enumerate(self._workers) if other != rank)
        return any(code in (None, 0) for code in others) and self._has_begun()

    def _has_stepped(self, rank: int) -> bool:
        """False where a worker was started again, and has made no step since."""
        reader = self._entering.get(rank)
        if reader is not None and any(isinstance(event, StepDone) for event in reader.read()):
            del self._entering[rank]
        return rank not in self._entering

    def _failed_itself(self, rank: int) -> bool:
        """True where a worker's last report shows a mistake of the worker or its script, not a lost
        connection.
        """
        failed = [event for event in self._said_by(self._lead(rank)) if isinstance(event, Failed)]
        return not failed or bool(failed[-1].traceback) or failed[-1].exit_status == UserError.exit_status

    def _turn_away(self, rank: int) -> None:
        """Leave out a worker that failed while it entered; the others go on."""
        self._turned_away.add(rank)
        self._survive(rank)
        self._given_up.add(rank)
        failed = [event for event in self._said_by(self._lead(rank)) if isinstance(event, Failed)]
        why = f"its log is {self._directory.log(self._lead(rank))}"
        if failed:
            last = failed[-1]
            why = f"{last.error}: {last.message}; {why}" if last.traceback else f"{last.message}; {why}"
        self._warn(rank, f"{self._name_of(rank)} could not enter, and the others go on without it: {why}")

    def _end_of(self, rank: int, code: int) -> WorkerEnd:
        return WorkerEnd(rank, self._workers[rank].pid, code)

    def _how_lost(self, rank: int, code: int) -> str:
        """Describe how a worker was lost: killed by a signal, or given up by the hub."""
        if code < 0:
            return f"was killed by {signal_name(-code)}"
        said = [each.message for each in self._said_by(self._lead(rank)) if isinstance(each, Failed)]
        return f"was given up by the hub, and ended: {said[-1]}" if said else "was given up by the hub"

    def _ends_given_up(self, rank: int) -> bool:
        """Whether a worker that the hub has given up has ended for that, and not with an error of its
        script's."""
        said = [each for each in self._said_by(rank) if isinstance(each, Failed)]
        return rank in self._given_up and bool(said) and not said[-1].traceback

    @property
    def first(self) -> int:
        """The worker whose output counts: the first that lives, as the workers count themselves. In a ring
        one that is started again is the last; at shards it has its place again."""
        return self._lead(self._order[0])

    def life_of(self, worker: int) -> int:
        """How often a worker was started again."""
        return self._restarts[self._name_of(worker // self._devices)]

    def excuses(self, failure: Failed) -> bool:
        """True where a worker's error does not end the run.

        Its site was lost, or the hub has given it up, or it entered a run under way and has made no step.
        """
        rank = failure.worker // self._devices
        if rank in self._turned_away or (not self._stopping and self._is_newcomer(rank)):
            return True
        if rank < len(self._sites) and self._sites[rank] in self._lost_sites:
            return True
        given_up = rank in self._given_up or failure.time <= self._excused.get(rank, -math.inf)
        return given_up and not failure.traceback

    def news(self) -> list[AnyEvent]:
        """The hub's decisions about faults, and about groups, since the last call."""
        news, self._news = self._news, []
        return news

    def links(self) -> list[LinkSeen]:
        """How the sites' links to the shards do: what is new."""
        events = [event for journal in self._site_journals for event in journal.read()]
        return [event for event in events if isinstance(event, LinkSeen)]

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _take_decisions(self) -> None:
        """Look at what the hub has decided, while nobody was told to end."""
        if self._stopping:
            return
        for each in self._decisions.take():
            if self.losses.take(each, self._now()) or each.what == GROUPS or self._is_new_of_port(each):
                what = each.what if each.what in ("hub", GROUPS) else f"hub: {each.what}"
                self._news.append(
                    Decided(time=each.time, worker=HUB, what=what, choice=each.choice, reason=each.reason)
                )
            if each.what.endswith(" died"):
                self._see_to_given_up(who_of(each))

    def _is_new_of_port(self, decision: Decision) -> bool:
        """True for the hub's first report of its kind that its port is full, or that strangers fill it."""
        kind = decision.reason.partition(" ")[0]
        if decision.what != "port" or kind in self._port_told:
            return False
        self._port_told.add(kind)
        return True

    def _see_to_given_up(self, who: str) -> None:
        """The hub has given this part up: if its process stands still, it is of no use any more."""
        for name, (rank, process) in self._processes().items():
            if process.poll() is not None or part_of(name) != who:
                continue
            if is_stopped(process.pid):
                message = f"{called(name)} stands still (SIGSTOP), and the hub has given it up; it is killed"
                self._warn(rank, message)
                process.kill()
            elif name == who:  # a worker
                self._given_up.add(rank)

    def _processes(self) -> dict[str, tuple[int, Process]]:
        """Workers and services by name, each with the worker in whose journal it is told of."""
        there: dict[str, tuple[int, Process]] = {
            self._name_of(rank): (rank, worker) for rank, worker in enumerate(self._workers)
        }
        return there | {name: (0, service) for name, service in self._services.items()}

    def _end_standstill(self) -> None:
        """Kill who has stood still for too long: the hub has given it up, and others may wait for it."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_SECONDS
        there = self._processes()
        living = {pid: name for name, (_, each) in there.items() for pid in self._pids(each)}
        for pid, seconds in self._standstill.look(living).items():
            rank, process = there[living[pid]]
            message = f"{called(living[pid])} has stood still for {seconds:.0f} s (SIGSTOP); it is killed"
            self._warn(rank, message)
            process.kill()

    def _pids(self, process: Process) -> list[int]:
        """The processes that stand for one that was started, while it lives: a launch's workers too."""
        if process.returncode is not None:
            return []
        return [process.pid, *(descendants(process.pid) if self._devices > 1 else [])]

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
        self._tell_again(0, name, called(name), how, SERVICE_RESTARTS)
        self.losses.lost(part_of(name), self._now())
        self._serve(name, self._options[name])
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
        self._write(0, Warned(time=record_time(), worker=0, message=message))
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

    def _starts_again(self, rank: int, how: str) -> bool:
        """Start a worker again that was lost, and say so; False where it may not be."""
        name, most = self._name_of(rank), self._config.run.restarts
        codes = [worker.poll() for worker in self._workers]
        is_over = 0 in codes and None not in codes  # the others have finished: nothing is left to do
        lost = self._sites[rank] in self._lost_sites
        if self._stopping or is_over or lost or self._restarts[name] >= most:
            return False
        pause = self._pauses.before_restart(name, self._has_stepped(rank))
        self._tell_again(rank, name, name, how, most, pause)
        self.losses.lost(name, self._now())
        if self._config.run.strategy not in (*SERVED, "peers", "hierarchical") and self._has_begun():
            self._order.remove(rank)
            self._order.append(rank)
        self._given_up.discard(rank)
        self._excused[rank] = record_time()
        reader = self._entering[rank] = JournalReader(self._directory.journal(self._lead(rank)))
        for _ in reader.read():  # what its last life has left
            pass
        start = partial(self._start_worker, rank)
        self._workers[rank] = DelayedProcess(start, pause, self._pauses.clock) if pause else start()
        self._survive(rank)
        return True

    def _end_waiting(self) -> None:
        """Do not start a worker again when the others have finished: nothing is left to do."""
        waiting = [each for each in self._workers if isinstance(each, DelayedProcess) and each.waits]
        if not waiting:
            return
        codes = [worker.poll() for worker in self._workers]
        if 0 in codes and codes.count(None) == len(waiting):
            for worker in waiting:
                worker.kill()

    def _tell_again(self, rank: int, name: str, called: str, how: str, most: int, pause: float = 0.0) -> None:
        self._restarts[name] += 1
        when = f" in {format_seconds(pause)}, for it made no step" if pause else ""
        message = f"{called} {how}, and is started again{when} ({self._restarts[name]} of {most})"
        self._warn(rank, message)

    def _leave_out(self, site: str) -> None:
        """A site's shard was killed, and so its workers end."""
        ranks = [rank for rank, each in enumerate(self._sites) if each == site]
        code = self._services[f"site-{site}"].returncode or 0
        how = f"was killed by {signal_name(-code)}" if code < 0 else "could not come back"
        message = f"the shard of site {site!r} {how}; the other sites go on without it"
        self._write(ranks[0], Warned(time=record_time(), worker=ranks[0], message=message))

    def _see_to_killed(self, rank: int, how: str) -> None:
        """Name a worker that the others go on without; before the run begins, they would wait for another."""
        if self._stopping or all(worker.poll() is not None for worker in self._workers):
            return
        if self._has_begun():
            self._survive(rank)
            message = f"{self._name_of(rank)} {how}; the others go on without it"
            self._warn(rank, message)
            self.losses.lost(self._name_of(rank), self._now())
            return
        log = self._directory.log(self._lead(rank))
        self._tell_failed(rank, f"{self._name_of(rank)} {how} before the run began; its log is {log}")
        self._stop_workers()

    def _has_begun(self) -> bool:
        """Whether the workers have met: each says so in its journal then."""
        said = (event for worker in self._directory.journals() for event in self._said_by(worker))
        return any(isinstance(event, Started) for event in said)

    def _warn(self, rank: int, message: str) -> None:
        self._write(rank, Warned(time=record_time(), worker=self._lead(rank), message=message))

    def _said_by(self, worker: int) -> Iterator[AnyEvent]:
        journal = JournalReader(self._directory.journal(worker))
        return journal.read()

    def _tell_lost(self, name: str) -> None:
        """Say which of hub and shards has ended, and why: without it the run cannot go on."""
        code, log = self._services[name].returncode, self._directory.logs / f"{name}.log"
        who = called(name)
        said = self._last_word(name) if code >= 0 else ""
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with status {code}"
        often = f" for the {self._restarts[name] + 1}th time" if self._restarts[name] else ""
        message = f"{who} {how}{often}, and the run cannot go on without it; its log is {log}"
        message = (said if said.startswith(who) else f"{who}: {said}") if said else message
        self._tell_failed(0, message, code if code > 0 else 1)

    def _last_word(self, name: str) -> str:
        """What a service said last of why it ends; empty where it said nothing."""
        return last_word(self._directory.logs / f"{name}.log")

    def _tell_failed(self, rank: int, message: str, status: int = 1) -> None:
        """Leave word of what ends the run."""
        worker = self._lead(rank)
        failed = Failed(
            time=record_time(),
            worker=worker,
            error="RunError",
            message=message,
            traceback="",
            exit_status=status,
            by_launcher=True,
        )
        self._words.append(failed)  # the disk may be full
        self._write(worker, failed)

    def _write(self, worker: int, event: AnyEvent) -> None:
        """Leave word where the command looks for it: in a worker's journal."""
        with contextlib.suppress(OSError), Journal(self._directory.journal(worker)) as journal:
            journal(event)

    def _status(self) -> int:
        ended = [(rank, worker.returncode or 0) for rank, worker in enumerate(self._workers)]
        codes = [
            code
            for (rank, code), site in zip(ended, self._sites, strict=True)
            if site not in self._lost_sites and not (rank in self._given_up and code > 0)
        ]
        if any(code > 0 for code in codes) or not any(code == 0 for code in codes):
            return 1
        return 0  # those that were killed were left out, and the others have finished

    def _finish(self, status: int) -> None:
        self.returncode = status
        for service in self._services.values():
            service.send_signal(END_SIGNAL)

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

    def unfinished(self) -> list[str]:
        """Return the names of workers that have not ended."""
        return [self._name_of(rank) for rank, worker in enumerate(self._workers) if worker.poll() is None]

    def kill(self) -> None:
        """End what is left, by force."""
        for process in (*self._workers, *self._services.values()):
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
        if self._forwarder is not None:
            self._forwarder.close()

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
