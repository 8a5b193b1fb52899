"""One worker's reports on its run: events for its journals, warnings for people.

`atoll run`, the report and the lab read the journals (`observe`).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from atoll.core import events
from atoll.core.config import LAB_JOURNALS_VARIABLE, LAB_WORKER_VARIABLE, Config
from atoll.core.errors import UserError
from atoll.core.runclock import record_time
from atoll.exchange.linksseen import LinksSeen
from atoll.groups.grouping import show
from atoll.observe.journal import FLUSH_SECONDS, Journal
from atoll.observe.lastwords import say
from atoll.observe.metrics import LATE_SECONDS
from atoll.observe.notices import Notices, print_warning
from atoll.observe.recorder import Recorder
from atoll.observe.rundir import DIRECTORY_VARIABLE, Claim, RunDirectory
from atoll.train.api.counting import SampleReport
from atoll.train.api.logged import finite, loggable
from atoll.train.api.meter import Taken
from atoll.train.api.place import WorkerRoster, is_first
from atoll.train.checkpoint.resume import TrainingState
from atoll.train.group.hierarchy import Hierarchy
from atoll.train.group.ordering import RingOrder
from atoll.train.group.rounds import Regrouped, Ring
from atoll.train.members.workers import Workers
from atoll.train.sync.peersworker import NodeWorker
from atoll.train.sync.service import Service

MOST_LOGGED = 1000  # the most calls of `log` that are kept to be read later


class Records:
    """The reports of one worker. Without a journal its events go nowhere; its warnings are printed in any
    case.

    `state` belongs to the session. So do `service` and `node`, if the strategy has them.

    Attributes:
        kept: True if there is a journal.
    """

    def __init__(
        self,
        config: Config,
        who: WorkerRoster,
        state: TrainingState,
        service: Service | None = None,
        node: NodeWorker | None = None,
        notices: Notices | None = None,
    ) -> None:
        """Take the collaborators. `notices` are the warnings that this worker has printed so far; None:
        none."""
        self._config, self._who, self._state, self._node = config, who, state, node
        self._notices = notices or Notices(who.place.name)
        self._bus = self._notices.bus
        self._claim: Claim | None = None  # worker 0's claim on the run directory, without `atoll run`
        self._journal: Journal | None = None
        self._lab_journal: Journal | None = None
        self.kept = False
        self._logged: list[tuple[int, float, dict[str, Any]]] = []
        self._read_at = time.perf_counter()
        # Steps without an event yet: time, iteration, samples, measurements, more fields, samples of all.
        self._steps: deque[tuple[float, int, float, Taken, dict[str, Any], float | None]] = deque()
        self._samples = SampleReport(state)
        self._telling = threading.RLock()  # held while a thread makes the events of steps
        self._over = threading.Event()  # nothing more is written
        self._writer = threading.Thread(target=self._write_in_pauses, name="atoll-records", daemon=True)
        self._confirming = ""  # the way of confirming that was reported last
        self._warned_of: set[str] = set()  # the subjects of `warn_once`
        shards = service.shards if service is not None else None
        self._is_at_site = service is not None and bool(service.site)
        self._link = shards if shards is not None and shards.options.transport == "ltp" else None
        self._links = LinksSeen(f"worker {self._who.place.name}", self.emit)

    # The journals

    def open(self, workers: Workers) -> None:
        """Begin this worker's journal, if a directory for it is named, and the lab's journal in a lab.

        All `workers` make this call. Worker 0 first checks that the directory holds no other run. Raises
        UserError on every worker if it does.
        """
        self._open_journal(workers)
        self._open_lab_journal()
        self.kept = self._journal is not None or self._lab_journal is not None
        if self.kept:
            self._writer.start()

    def close(self) -> None:
        """Write all events that are left. Later events are written nowhere."""
        self._over.set()
        if self.kept:
            self._tell_of_samples(ends=True)
        with contextlib.ExitStack() as ends:
            for journal in self._journals():
                ends.callback(journal.close)

    def summarise(self) -> None:
        """Put the records of all workers together, on worker 0 and without `atoll run`."""
        if self._journal is None or DIRECTORY_VARIABLE in os.environ or not is_first(self._who):
            return
        run = self._config.run
        recorder = Recorder(RunDirectory(Path(run.directory)), self._state.world, run.strategy)
        recorder.close()
        if missing := recorder.missing():
            print_warning(missing)
        if self._claim is not None:
            self._claim.release()

    # Events

    def emit(self, kind: Any, **fields: Any) -> None:
        """Report an event of this kind (`core/events.py`), of now and of this worker."""
        if self._steps:
            self._tell_of_steps()
        event = kind(time=record_time(), worker=self._who.place.name, **fields)
        self._bus.emit(event)
        if isinstance(event, (events.Started, events.Finished)):
            say(event)

    def decided(self, what: str, choice: str, reason: str) -> None:
        """Report a decision that concerns all workers; only the first worker reports it."""
        if is_first(self._who):
            self.decided_here(events.Decided, what, choice, reason)

    def decided_here(self, kind: Any, what: str, choice: str, reason: str) -> None:
        """Report a decision of this worker, or one that it alone knows, as an event of this `kind`."""
        self.emit(kind, what=what, choice=choice, reason=reason)

    def warn(self, line: str) -> None:
        """Print a line for people at once, from any thread; `atoll run` shows the lines that are in the
        journal."""
        self._tell_of_steps()
        self._notices.warn(line)

    def warn_once(self, subject: str, line: str) -> None:
        """Print `line` unless this worker has warned of `subject` before, from any thread.

        If each worker's warning matters, the line includes the worker's number. If one warning is enough,
        only the first worker (`Workers.is_first`) makes this call.
        """
        if subject not in self._warned_of:
            self._warned_of.add(subject)
            self.warn(line)

    def warn_together(self, subject: str, line: str) -> None:
        """Print once a line that all workers know: on the first worker.

        At a site each worker prints it, because a site's workers know only of themselves.
        """
        if is_first(self._who) or self._is_at_site:
            self.warn_once(subject, line)

    # Iterations, and the values logged in them

    def log(self, values: dict[str, float | Tensor]) -> None:
        """Record values of this iteration (`Session.log`)."""
        kept = {name: loggable(name, value) for name, value in values.items()}
        if not self.kept:
            return
        self._log(self._state.prepared[0].models[0].samples.latest if self._state.prepared else 1.0, kept)
        if len(self._logged) >= MOST_LOGGED:  # many in one step, as in an evaluation
            self.read_logged()

    def read_logged(self) -> None:
        """Report the logged values that were not reported yet. This waits for a GPU that has not computed
        them yet."""
        for iteration, weight, values in self._logged:
            numbers = {name: finite(float(value)) for name, value in values.items()}
            self.emit(events.Logged, iteration=iteration, weight=weight, values=numbers)
        self._logged.clear()

    def stepped(
        self,
        taken: Taken,
        samples: float,
        figures: dict[str, Any],
        staleness: float | None = None,
        counted: float | None = None,
    ) -> None:
        """Report that an iteration is over.

        Args:
            taken: the iteration's measurements.
            samples: this worker's samples.
            figures: more fields of StepDone.
            staleness: the staleness to log, in steps; None if it is not measured.
            counted: the samples of all workers in iterations that count; None: this worker cannot know.
        """
        if self._link is not None:
            self._tell_of_links(now=False)
        if staleness is not None:
            self._log(1.0, {"staleness": staleness})
        self._steps.append((record_time(), self._state.iteration, samples, taken, figures, counted))
        if taken.at - self._read_at > LATE_SECONDS:
            self._read_at = taken.at
            self.tell_of_node()
            self._tell_of_memory()
            self.read_logged()
            self._write()

    def counted(self, samples: float | None, *, whole_at: float) -> None:
        """Report the samples of all workers in iterations that count; None: this worker cannot know.

        `whole_at`: the time up to which the number has every iteration that counts; 0: unknown.
        """
        if self.kept:
            with self._telling:
                self._tell_of_steps()
                self._samples.know(samples)
                self._tell_of_samples(whole_at=whole_at)

    def finished(self) -> None:
        """Report that the script has come to its end."""
        self.read_logged()
        self._tell_of_memory()
        self._tell_of_links(now=True)
        self.emit(events.Finished, iteration=self._state.iteration)

    # Groups, rings and nodes

    def tell_of_groups(self, hierarchy: Hierarchy | None) -> None:
        """Report which workers are in which group, and why."""
        arranged = hierarchy.arranged if hierarchy is not None else None
        if arranged is not None:
            place = self._who.place
            named = show(arranged.grouping, lambda rank: str(place.name_of(rank)))
            self.decided("groups", named, arranged.reason)

    def tell_of_order(self, order: RingOrder | None) -> None:
        """Report the order in which a ring's sums pass its members, and why, if it was chosen. One member
        makes this call."""
        if order is not None and order.decision is not None:
            choice, reason = order.decision.choice, order.decision.reason
            self.decided_here(events.Decided, "ring order", choice, reason)

    def tell_of_ring(self, ring: Regrouped, who: str) -> None:
        """Report that a ring goes on with other members. `who` names the ring in the line for people."""
        gone = [f"worker {name} was lost" for name in ring.lost] + [
            f"worker {name} left" for name in ring.left
        ]
        entered = [f"worker {name} entered" for name in ring.entered]
        happened = ", ".join(gone + entered) or "a connection was lost"
        repeated = f"; repeated: {ring.what}" if ring.again else ""
        workers = f"{ring.world} worker{'s' * (ring.world > 1)}"
        choice, reason = f"formed again with {workers}", f"{happened}{repeated}"
        self.decided_here(events.Decided, "ring", choice, reason)
        self.warn(
            f"{happened} during iteration {self._state.iteration}; {who} goes on with {workers} after "
            f"{ring.seconds:.1f} s"
        )

    def tell_of_confirmations(self, ring: Ring | None) -> None:
        """Report how a ring's members confirm the results that they hold, if that has changed."""
        channels = None if ring is None else ring.channels.current
        confirmations = None if channels is None else channels.confirmations
        if confirmations is None:
            return
        links = confirmations.member_links
        choice, reason = "over connections of the workers' own", "all could connect"
        if links.without:
            choice = "by all-reduce, which takes longer"
            names = " and ".join(f"worker {name}" for name in links.without)
            reason = f"not all could connect: {names}"
        if choice != self._confirming:
            self._confirming = choice
            self.decided("confirmations", choice, reason)
            if links.trouble:
                name = self._who.place.name
                self.warn(f"worker {name}: the ring's members confirm {choice}: {links.trouble}")

    def tell_of_node(self) -> None:
        """Report the figures of this node's CPU side. Only the leader of the node's devices does."""
        node = self._node
        if node is not None and node.leads:
            figures = msgspec.structs.asdict(node.figures)
            self.emit(events.NodeSeen, node=node.node, devices=node.devices.count, **figures)

    # Inside

    def _journals(self) -> list[Journal]:
        return [journal for journal in (self._journal, self._lab_journal) if journal is not None]

    def _write(self) -> None:
        self._tell_of_samples()
        for journal in self._journals():
            journal.flush()

    def _write_in_pauses(self) -> None:
        """Write what no later step writes in time: a script may evaluate for an hour, wait, or be killed."""
        while not self._over.wait(FLUSH_SECONDS):
            self._write()

    def _tell_of_steps(self) -> None:
        """Make the events of the steps since the last call. A fast loop makes none and takes no lock.

        Any thread may call this, before an event of its own. If another thread is at it, the call waits: the
        journals may be closed next.
        """
        worker = self._who.place.name
        with self._telling:
            while self._steps:
                at, iteration, samples, taken, figures, counted = self._steps.popleft()
                step = events.StepDone(
                    time=at,
                    worker=worker,
                    iteration=iteration,
                    samples=samples,
                    seconds=taken.seconds,
                    waiting=taken.waiting,
                    bytes_sent=taken.bytes_sent,
                    phases=taken.phases,
                    **figures,
                )
                self._bus.emit(step)
                self._samples.know(counted)

    def _tell_of_samples(self, *, whole_at: float = 0.0, ends: bool = False) -> None:
        """Make the events of the steps since the last call, and report the count of samples after them.

        `whole_at` and `ends` are fields of the event SamplesCounted.
        """
        with self._telling:
            self._tell_of_steps()
            news = self._samples.news(whole_at=whole_at, ends=ends)
            if news is not None:
                self.emit(events.SamplesCounted, **news)

    def _open_journal(self, workers: Workers) -> None:
        by_command = os.environ.get(DIRECTORY_VARIABLE)
        directory = by_command or self._config.run.directory
        run = RunDirectory(Path(directory)) if directory else None
        failure = ""
        if is_first(self._who) and run is not None and not by_command:
            try:
                self._claim = run.claim(self._config.run.readable)
            except UserError as error:
                failure = str(error)
        # Every worker takes part, whether or not it keeps records itself.
        found = workers.gather(failure, "worker 0 to look at the run directory")[0]
        if found:
            raise UserError(found)
        if run is None:
            return
        run.create(self._config.run.readable)
        if self._claim is not None and self._claim.trouble:
            self.warn(self._claim.trouble)
        self._journal = Journal(run.journal(self._who.place.name))
        self._bus.subscribe(self._journal)

    def _open_lab_journal(self) -> None:
        """Open a journal for the lab, if the worker runs in one. From it the lab reports the cost of its
        links."""
        folder = os.environ.get(LAB_JOURNALS_VARIABLE)
        if not folder:
            return
        worker = os.environ.get(LAB_WORKER_VARIABLE, "")
        self._lab_journal = Journal(Path(folder) / f"{worker}-{os.getpid()}.jsonl")
        self._bus.subscribe(self._lab_journal)

    def _tell_of_links(self, *, now: bool) -> None:
        """Report the state of the links to the shards, if these links may lose parts of gradients."""
        if self._link is None:
            return
        reducers = [prepared.reducer for prepared in self._state.prepared]
        feedback = next((each.losses for each in reducers if each.losses is not None), None)
        tell = self._links.tell if now else self._links.tell_if_due
        tell(self._link, feedback)

    def _log(self, weight: float, values: dict[str, Any]) -> None:
        self._logged.append((self._state.iteration, weight, values))

    def _tell_of_memory(self) -> None:
        """Report the figures of the first model that lies in tiers."""
        fitted = next((tiers.fitted for tiers in self._state.tiers if tiers.fitted is not None), None)
        if fitted is not None:
            self.emit(events.MemorySeen, figures=fitted.stats())
