"""Choice of groups by the chooser and the regrouper, on a thread of their own.

A job may take seconds, and nothing else waits for it. One job runs at a time, and only it uses the regrouper;
events in the meantime are queued for the next job.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import TypeAlias

from atoll.core.config import Consistency, GroupBy
from atoll.core.errors import UserError
from atoll.groups.chooser import Choice, ProbeMeasurements, ScoreFunction, choose, computing
from atoll.groups.drift import Proposal, Regrouper, Rules
from atoll.groups.grouping import Grouping
from atoll.groups.links import Links


@dataclass(frozen=True)
class WorkerMeasurements:
    """Measurements of some workers, by rank. Unknown values: links None, `size` and `batch` 0."""

    speeds: Mapping[int, float]  # samples per second
    links: Links | None = None  # of exactly these workers
    sites: Mapping[int, str] = field(default_factory=dict)  # sites that workers name; empty: none does
    size: int = 0  # bytes of a model's gradients
    batch: int = 0  # samples of a worker's iteration
    beside_server: int | None = None  # a worker on the shards' machine
    by_speed: bool = False  # members of a group have parts of its batches by their speeds


ScoreFor: TypeAlias = Callable[[WorkerMeasurements], ScoreFunction]

_TOLERANCE = 0.05  # share of samples/s that fewer groups may cost
_LOOK_SECONDS = 1.0  # seconds between jobs that only process measurements


def by_computing(known: WorkerMeasurements) -> ScoreFunction:
    """Return a score of groupings that counts computing and ignores the time of sending."""
    return computing(known.speeds, by_speed=known.by_speed)


@dataclass(frozen=True)
class GroupingSettings:
    """Settings of a run's groups. `count` 0: as many as are best. `patience` is for a worker's probe, in
    seconds, and `links` the seconds for measuring all links; 0: none. `score_for(known)` returns the function
    that scores groupings of these workers. `by_speed`: members' parts of batches follow their speeds
    (`sync.shares` is "auto"), so a group does not go at its slowest member's pace."""

    count: int = 0
    by: GroupBy = "auto"
    patience: float = 60.0
    regroup: bool = True
    consistency: Consistency = "asp"
    links: float = 0.0
    score_for: ScoreFor = by_computing
    rules: Rules = field(default_factory=Rules)
    by_speed: bool = False

    @property
    def queued(self) -> bool:
        """True if the probe's queue forms the first groups; else they are chosen once all workers have
        reported. In lock step all probes end at once, and their order says nothing."""
        return self.count > 0 and self.way == "speed" and self.consistency != "bsp"

    @property
    def way(self) -> GroupBy:
        """`by` with "auto" resolved: speed if a number of groups is given (the paper's way), else joint."""
        return self.by if self.by != "auto" else "speed" if self.count else "joint"

    @property
    def by_links(self) -> bool:
        """True if groups depend on links between workers, which are to be measured."""
        return self.links > 0 and self.way in ("joint", "site")

    def __str__(self) -> str:
        shares = ", shares auto" if self.by_speed else ""
        return f"{self.count or 'auto'} by {self.by}, {self.consistency}{shares}"


@dataclass(frozen=True)
class Plan:
    """A new grouping; without one, `reason` says why there is none."""

    grouping: Grouping | None
    reason: str


class Planner:
    """Chooses groups. The caller may update its public attributes at any time; `links` and `hosts` are
    replaced, never changed in place."""

    def __init__(self, settings: GroupingSettings) -> None:
        self.links: Links | None = None
        self.measured = ""  # summary of the measured links
        self.sites: dict[int, str] = {}  # by worker: the site that it names
        self.hosts: dict[int, str] = {}  # by worker: its address, where links are measured
        self.sizes: dict[int, int] = {}  # by worker: bytes of its gradients
        self.batches: dict[int, float] = {}  # by worker: samples of its latest iteration
        self.server = ""  # the address of the shards' machine
        self._settings = settings
        self._regrouper: Regrouper | None = None
        self._events: list[Callable[[Regrouper], Proposal | None]] = []  # for the next job
        self._urgent = False  # one of the events must not wait
        self._next = math.inf  # when the regrouper is due
        self._last = -math.inf  # when the latest job began
        self._thread: threading.Thread | None = None
        self._found: list[Plan] = []

    # -- events -------------------------------------------------------------------------------------------

    def choose(self, now: float, speeds: Mapping[int, float]) -> None:
        """Start choosing groups for these workers by their samples per second; `poll` returns the result."""
        speeds = dict(speeds)
        self._events.clear()
        self._begin_job(now, lambda: self._first(now, speeds))

    def follow(self, now: float, grouping: Grouping, speeds: Mapping[int, float]) -> None:
        """Set the workers' present groups."""
        self._regrouper = self._make_regrouper(now, grouping, speeds)
        self._events.clear()

    def handle_measured(self, now: float, worker: int, pace: float) -> None:
        """Note an iteration of a worker, at `pace` seconds a sample."""
        if self._settings.regroup:
            self._tell(lambda regrouper: regrouper.handle_measured(now, worker, pace))

    def handle_joined(self, now: float, worker: int, pace: float) -> None:
        """Note a worker that is to be placed in a group."""
        self._tell(lambda regrouper: regrouper.handle_joined(now, worker, pace), urgent=True)

    def handle_left(self, now: float, worker: int) -> None:
        """Note a worker that left or died."""
        self._tell(lambda regrouper: regrouper.handle_left(now, worker))

    def _tell(self, event: Callable[[Regrouper], Proposal | None], *, urgent: bool = False) -> None:
        self._events.append(event)
        self._urgent = self._urgent or urgent

    # -- jobs ---------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """True if a job runs, or its result was not taken yet."""
        return self._thread is not None

    def poll(self, now: float) -> list[Plan]:
        """Return the results so far, and start the next job if events are due."""
        if self._thread is not None:
            if self._thread.is_alive():
                return []
            self._thread = None
        found, self._found = self._found, []
        due = self._urgent or (bool(self._events) and now >= self._last + _LOOK_SECONDS) or now >= self._next
        if self._regrouper is not None and due:
            regrouper, events = self._regrouper, self._events
            self._events, self._urgent, self._next = [], False, math.inf
            self._begin_job(now, lambda: self._look(now, regrouper, events))
        return found

    def _begin_job(self, now: float, job: Callable[[], list[Plan]]) -> None:
        assert self._thread is None
        self._last = now

        def run() -> None:
            try:
                self._found = job()
            except UserError as error:
                self._found = [Plan(None, str(error))]
            except Exception as error:  # a fault of Atoll's ends no run: groups stay as they are
                self._found = [Plan(None, f"choosing failed: {type(error).__name__}: {error}")]

        self._thread = threading.Thread(target=run, name="atoll-planner", daemon=True)
        self._thread.start()

    # -- on the thread ------------------------------------------------------------------------------------

    def _first(self, now: float, speeds: dict[int, float]) -> list[Plan]:
        choice = self._choose(speeds)
        self._regrouper = self._make_regrouper(now, choice.grouping, speeds)
        return [Plan(choice.grouping, choice.reason)]

    def _look(
        self, now: float, regrouper: Regrouper, events: list[Callable[[Regrouper], Proposal | None]]
    ) -> list[Plan]:
        proposals = [event(regrouper) for event in events]
        if self._settings.regroup:
            proposals.append(regrouper.poll(now))
            deadline = regrouper.next_deadline()
            self._next = math.inf if deadline is None else deadline
        # Each proposal covers all workers: the last one counts.
        there = [each for each in proposals if each is not None]
        return [Plan(there[-1].grouping, " ".join(each.reason for each in there))] if there else []

    def _make_regrouper(self, now: float, grouping: Grouping, speeds: Mapping[int, float]) -> Regrouper:
        return Regrouper(
            now,
            grouping,
            speeds,
            self._choose,
            lambda each, at: self._settings.score_for(self._known(at))(each),
            rules=self._settings.rules,
        )

    def _choose(self, speeds: Mapping[int, float]) -> Choice:
        """Choose groups of the remaining workers, according to the settings."""
        settings, known = self._settings, self._known(speeds)
        count = min(settings.count, len(speeds)) or None
        choice = choose(
            ProbeMeasurements(speeds, known.sites, known.links),
            settings.score_for(known),
            groups=None if settings.way == "site" else count,
            tolerance=_TOLERANCE,
        )
        if known.links is not None and self.measured:
            choice = dataclasses.replace(choice, reason=f"{self.measured}; {choice.reason}")
        chosen = {"speed": choice.by_speed, "site": choice.by_site}.get(settings.way)
        if chosen is None or chosen.grouping == choice.grouping:
            return choice
        rate = f"{chosen.score.samples_per_second:.4g} samples/s are predicted"
        reason = f"by {settings.way}, as asked for: {rate}. By speeds and links: {choice.reason}"
        return dataclasses.replace(choice, grouping=chosen.grouping, score=chosen.score, reason=reason)

    def _known(self, speeds: Mapping[int, float]) -> WorkerMeasurements:
        """Return the measurements of these workers."""
        hosts, links, by_speed = self.hosts, self.links, self._settings.by_speed
        beside = [worker for worker in sorted(speeds) if hosts.get(worker) and hosts[worker] == self.server]
        batches = [batch for worker, batch in list(self.batches.items()) if worker in speeds and batch > 0]
        return WorkerMeasurements(
            dict(speeds),
            links.of_these(sorted(speeds)) if links is not None else None,
            self._sites(speeds, hosts),
            max(list(self.sizes.values()), default=0),
            max(1, round((fmean if by_speed else median)(batches))) if batches else 0,
            beside[0] if beside else None,
            by_speed,
        )

    def _sites(self, speeds: Mapping[int, float], hosts: Mapping[int, str]) -> dict[int, str]:
        """Return workers' sites, if any worker names one; or their common host if all are on one machine.
        Else empty."""
        sites = {worker: self.sites.get(worker, "") for worker in speeds}
        if not any(sites.values()) and len({hosts.get(worker, "") for worker in speeds}) == 1:
            sites = {worker: hosts.get(worker, "") for worker in speeds}
        return sites if any(sites.values()) else {}
