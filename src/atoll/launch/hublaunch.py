"""A run that has a hub, on this machine: the hub, the shards of a parameter server, and each worker apart.

Each worker, or under `peers` each node, is a launch of its own, so that one can die and the others go on;
`torchrun` on several machines does the same (docs/several-machines.md).
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Mapping, Sequence
from functools import partial

from atoll.core.config import RUN_VARIABLE, Config
from atoll.core.errors import RunError
from atoll.core.events import Failed
from atoll.core.runclock import record_time
from atoll.core.units import format_seconds
from atoll.launch.heartbeats import Heartbeats
from atoll.launch.launcher import WorkerEnd, write_ends
from atoll.launch.newcomers import Newcomers
from atoll.launch.news import LaunchNews, News
from atoll.launch.processes import start_logged
from atoll.launch.restarts import Process
from atoll.launch.rules import rules_of
from atoll.launch.services import SERVICE, Services, Start
from atoll.launch.servicewatch import ServiceWatch
from atoll.launch.standing import ProcessWatch
from atoll.launch.words import Words
from atoll.launch.workers import WorkerLaunches, meeting_place
from atoll.observe.rundir import RunDirectory

START_SECONDS = 60.0  # for the hub to say where it listens
_SERVICE_ENDED = 3  # the status of this launch when hub or shard ended before the workers


class HubLaunch:
    """Starts and watches the processes of a run with a hub, and decides what follows from their ends.

    It ends when all workers have. A worker that ends with an error ends the others, since the error is likely
    the script's. A killed worker is started again up to `run.restarts` times; then it is left out, and the
    others go on, once the run has begun. A worker that was started again and fails before its first step ends
    alone. A killed hub or shard, a site's too, is started again up to three times. A site whose shard was
    killed more often is left out. Of a shard with two processes, one may end for good: it was killed more
    often, or ended with an error once the run had begun.

    A process that stands still (SIGSTOP) is killed when the hub has given it up, by the patience that the hub
    has measured for it; if the hub reports nothing, since it may stand still itself, a while after the
    longest patience. A worker that was given up and ends by itself counts as killed.
    """

    kills_late_workers = False  # after SIGTERM, when their time is over: the watcher does that

    def __init__(
        self,
        directory: RunDirectory,
        config: Config,
        script: Sequence[str],
        environment: Mapping[str, str],
        hub_module: str = SERVICE,
        umask: int = -1,
        start: Start = start_logged,
    ) -> None:
        """`script`: its path and its arguments. `hub_module` is the module of the hub's process, with the
        arguments of SERVICE. Workers have the umask `umask`. `start` starts a process."""
        self._directory, self._config = directory, config
        self._environment = {**environment, **meeting_place(), RUN_VARIABLE: directory.name}
        self._rules = rules_of(config.run.strategy)
        hub_judges = self._rules.hub_judges
        self._words = Words(directory)
        self._workers = workers = WorkerLaunches(directory, config, script, umask, start)
        self._services = Services(directory, config, self._environment, hub_module, start)
        self._sites = workers.count_by_site()
        self._news = News(directory, self._sites, config.server.replicas > 1, hub_judges)
        self._watch = ServiceWatch(self._services, workers.sites, self._rules, self._words, self._news)
        self._newcomers = Newcomers(directory, workers)
        self._standing = ProcessWatch(
            workers, self._services, self._words, config.patience_seconds, hub_judges
        )
        self._heartbeats: Heartbeats | None = None
        self._stopping = False  # workers end because they were asked to
        self._ends: list[WorkerEnd] = []
        self._turned_away: set[int] = set()  # ranks that were started again and ended with an error
        self._given_up: set[int] = set()  # ranks that others have given up, though the process lives
        self._excused: dict[int, float] = {}  # rank -> until when its failures are no end of the run
        self.returncode: int | None = None
        self._services.start_hub(len(self._workers.sites), self._sites)
        self._begins_by: float | None = time.monotonic() + START_SECONDS  # None: the hub listens

    # Called by the watcher

    def poll(self) -> int | None:
        """Return the status once all workers have ended; None before."""
        if self.returncode is None:
            try:
                self._look()
            except RunError as error:  # a process cannot be started
                self._words.fail(0, str(error), error.exit_status)
                self._stop_workers()
                self._finish(_SERVICE_ENDED)
        return self.returncode

    def send_signal(self, signum: int) -> None:
        """Hand a signal on to every worker."""
        self._stopping = True
        self._workers.send_signal(signum)

    def kill(self) -> None:
        """Kill all remaining processes."""
        for process in self._all():
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
        if self._heartbeats is not None:
            self._heartbeats.close()

    def wait(self, timeout: float) -> int:
        """Return when every process has ended. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        until = time.monotonic() + timeout
        for process in self._all():
            process.wait(max(0.0, until - time.monotonic()))
        if self.returncode is None:
            self.returncode = self._status()
        return self.returncode

    def late_workers(self) -> list[str]:
        """Return the names of the launches that have not ended; none once this one has."""
        return self._workers.unfinished() if self.returncode is None else []

    @property
    def goes_on(self) -> bool:
        """True while a worker runs, and none was asked to end."""
        return not self._stopping and not self._workers.have_ended

    def seen(self) -> LaunchNews:
        """Return what is new since the last call.

        Output counts of the first living worker, in the workers' own order: in a ring a restarted worker is
        the last; with shards it keeps its place.
        """
        workers = self._workers
        rank = workers.order[0]
        return LaunchNews(
            self._news.take(),
            self._news.links(),
            self._words.take(),
            workers.survived,
            workers.lead(rank),
            workers.restarts[rank],
        )

    def excuses(self, failure: Failed) -> bool:
        """True if a worker's error does not end the run.

        Its site was lost, or others have given it up, or it entered a run under way and has made no step.
        """
        if self._rules.excuses(failure, self._workers.devices):
            return True
        rank = self._workers.rank_of(failure.worker)
        if rank in self._turned_away or (not self._stopping and self._is_newcomer(rank)):
            return True
        if rank < len(self._workers.sites) and self._has_lost_site(rank):
            return True
        given_up = rank in self._given_up or failure.time <= self._excused.get(rank, -math.inf)
        return given_up and not failure.traceback

    def losses(self) -> list[str]:
        """Return the parts that were lost, and came back, for people."""
        return self._news.losses.lines()

    # Looking

    def _look(self) -> None:
        """Handle the ends of processes."""
        if self._begins_by is not None:
            self._await_hub(self._begins_by)
            return
        if self._rules.newcomers_may_be_late:
            self._see_who_is_back()
        if not self._stopping:
            for who in self._news.look():
                self._given_up.update(self._standing.give_up(who))
        if self._heartbeats is not None:
            self._heartbeats.look()
        self._standing.look()
        self._workers.end_waiting()
        lost = self._watch.look(self._stopping)
        seen = {self._workers.rank_of(end.worker) for end in self._ends}
        for rank, process in enumerate(self._workers.processes):
            code = process.poll()
            if code is None:
                continue
            at = self._workers.newly_ended(rank)
            if at is not None and self._workers.devices == 1:  # a launch of several reports each worker
                self._words.gone(self._workers.lead(rank), code, at)
            if code and rank not in seen:
                self._worker_ended(rank, code)
        if lost:  # before the workers, for until they have ended nobody else ends it
            self._watch.tell_lost(lost)
            self._stop_workers()
            self._finish(_SERVICE_ENDED)
        elif self._workers.have_ended:
            self._finish(self._status())

    def _await_hub(self, begins_by: float) -> None:
        """Start the others once the hub listens; end the run if it does not."""
        if self._stopping:
            self._finish(_SERVICE_ENDED)
        elif address := self._services.address():
            self._begins_by = None
            # They import torch, which takes longest: so all start at once.
            self._services.start_shards(address, self._sites)
            heartbeats = Heartbeats(
                address, self._environment, self._directory.name, partial(self._words.warn, 0)
            )
            self._heartbeats = heartbeats
            self._workers.start(address, {**self._environment, **heartbeats.environment()})
        elif lost := self._watch.look(self._stopping):
            self._watch.tell_lost(lost)
            self._finish(_SERVICE_ENDED)
        elif time.monotonic() > begins_by:
            self._words.fail(0, self._services.why_unheard("hub", START_SECONDS))
            self._finish(_SERVICE_ENDED)

    # Workers

    def _has_lost_site(self, rank: int) -> bool:
        return self._workers.sites[rank] in self._watch.lost_sites

    def _worker_ended(self, rank: int, code: int) -> None:
        """Handle a worker that has ended with an error, or was killed."""
        has_site = not self._has_lost_site(rank)
        said = self._words.errors(*self._workers.workers_of(rank))
        is_newcomer = code > 0 and has_site and self._is_newcomer(rank)
        is_refused = is_newcomer and self._words.failed_itself(self._workers.lead(rank))
        given_up = code > 0 and has_site and not is_refused
        given_up = given_up and self._rules.is_given_up(code, said, rank in self._given_up)
        if given_up:
            self._given_up.add(rank)
        how = self._rules.how_lost(code, said, self._excused.get(rank, -math.inf))
        if (code < 0 or given_up) and self._starts_again(rank, how):
            return
        self._ends.append(self._workers.end_of(rank, code))
        write_ends(self._ends, self._directory.ends)
        if is_newcomer and not given_up:
            self._turn_away(rank)
        elif code > 0 and has_site and not given_up:
            if not self._stopping:  # else each has its signal, and time to end
                self._stop_workers()
            return
        elif has_site:
            self._see_to_lost(rank, how)
        if len(self._workers.order) > 1 and not self._stopping:
            self._workers.order.remove(rank)

    def _is_newcomer(self, rank: int) -> bool:
        """True if a restarted worker has made no step, and the run can go on without it."""
        if self._newcomers.has_stepped(rank):
            return False
        others = (code for other, code in enumerate(self._workers.codes()) if other != rank)
        return any(code in (None, 0) for code in others) and self._words.has_begun()

    def _turn_away(self, rank: int) -> None:
        """Leave out a worker that failed while it entered; the others go on."""
        self._turned_away.add(rank)
        self._workers.survive(rank)
        self._given_up.add(rank)
        failed = self._words.errors(self._workers.lead(rank))
        why = f"its log is {self._directory.log(self._workers.lead(rank))}"
        if failed:
            last = failed[-1]
            why = f"{last.error}: {last.message}; {why}" if last.traceback else f"{last.message}; {why}"
        name = self._workers.name_of(rank)
        self._warn(rank, f"{name} could not enter, and the others go on without it: {why}")

    def _starts_again(self, rank: int, how: str) -> bool:
        """Start a lost worker again, and say so; False if it may not be."""
        workers, most = self._workers, self._config.run.restarts
        codes = workers.codes()
        is_over = 0 in codes and None not in codes  # the others have finished: nothing is left to do
        if self._stopping or is_over or rank in self._newcomers.late or self._has_lost_site(rank):
            return False
        if workers.restarts[rank] >= most:
            return False
        name = workers.name_of(rank)
        pause = workers.pauses.before_restart(name, self._newcomers.has_stepped(rank))
        workers.restarts[rank] += 1
        when = f" in {format_seconds(pause)}, for it made no step" if pause else ""
        self._warn(rank, f"{name} {how}, and is started again{when} ({workers.restarts[rank]} of {most})")
        self._news.lost(name)
        if self._rules.newcomers_are_last and self._words.has_begun():
            workers.order.remove(rank)
            workers.order.append(rank)
        self._given_up.discard(rank)
        self._excused[rank] = record_time()
        self._newcomers.enter(rank)
        workers.start_again(rank, pause)
        return True

    def _see_who_is_back(self) -> None:
        """End restarted workers that have not come in when the others have finished."""
        back, late = self._newcomers.take()
        if not self._rules.hub_judges:
            for rank in back:
                self._news.back(self._workers.name_of(rank))
        for rank in late:
            self._excused[rank] = math.inf
            name = self._workers.name_of(rank)
            self._warn(rank, f"{name} was started again, and the others have finished without it")
            self._workers.processes[rank].kill()

    def _see_to_lost(self, rank: int, how: str) -> None:
        """Name a worker that the others go on without; before the run begins, they would wait for another."""
        codes, name = self._workers.codes(), self._workers.name_of(rank)
        if self._stopping or None not in codes:
            if 0 in codes and not self._stopping and rank not in self._newcomers.late:
                self._warn(rank, f"{name} {how}, after the others had ended")
            return
        if self._words.has_begun():
            self._workers.survive(rank)
            self._warn(rank, f"{name} {how}; the others go on without it")
            self._news.lost(name)
            return
        lead = self._workers.lead(rank)
        log = self._directory.log(lead)
        self._words.fail(lead, f"{name} {how} before the run began; its log is {log}")
        self._stop_workers()

    # The end

    def _all(self) -> list[Process]:
        return [*self._workers.processes, *self._services.processes.values()]

    def _warn(self, rank: int, message: str) -> None:
        self._words.warn(self._workers.lead(rank), message)

    def _status(self) -> int:
        codes = [
            code or 0
            for rank, code in enumerate(process.returncode for process in self._workers.processes)
            if not self._has_lost_site(rank) and not (rank in self._given_up and (code or 0) > 0)
        ]
        if any(code > 0 for code in codes) or 0 not in codes:
            return 1
        return 0  # those that were killed were left out, and the others have finished

    def _finish(self, status: int) -> None:
        self.returncode = status
        self._services.finish()

    def _stop_workers(self) -> None:
        self._stopping = True
        self._workers.send_signal(signal.SIGTERM)
