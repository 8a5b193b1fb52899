"""Who should share a ring: the chooser and the regrouper, on a thread of their own.

They may take seconds, for which nobody else is to wait. One job is under way at a time, and only it touches
the regrouper; what happens meanwhile is kept for the next one.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import TypeAlias

from atoll.core.config import Consistency, GroupBy
from atoll.core.errors import UserError
from atoll.groups.chooser import Choice, Measured, ScoreFunction, choose, computing
from atoll.groups.drift import Proposal, Regrouper, Rules
from atoll.groups.grouping import Grouping
from atoll.groups.links import Links


@dataclass(frozen=True)
class Known:
    """What is known of some workers, by rank. What is not known yet: links None, `size` and `batch` 0."""

    speeds: Mapping[int, float]  # samples per second
    links: Links | None = None  # of exactly these workers
    sites: Mapping[int, str] = field(default_factory=dict)  # where they say that they are; empty: nobody does
    size: int = 0  # bytes of a model's gradients
    batch: int = 0  # samples of a worker's iteration
    beside_server: int | None = None  # one on the machine of the shards


ScoreFor: TypeAlias = Callable[[Known], ScoreFunction]

_TOLERANCE = 0.05  # the share of samples/s that fewer groups may cost while a run goes
_LOOK_SECONDS = 1.0  # between two jobs that only look at what was measured


def by_computing(known: Known) -> ScoreFunction:
    """Scores what groups compute, if sending takes no time."""
    return computing(known.speeds)


@dataclass(frozen=True)
class GroupingSettings:
    """How a run's workers are put into groups. `count` 0: as many as are best. `patience` is for a worker's
    probe, in seconds, and `links` how many the measuring of all links may take; 0: they are not measured.
    `score_for(known)` gives what groupings of these workers are scored by."""

    count: int = 0
    by: GroupBy = "auto"
    patience: float = 60.0
    regroup: bool = True
    consistency: Consistency = "asp"
    links: float = 0.0
    score_for: ScoreFor = by_computing
    rules: Rules = field(default_factory=Rules)

    @property
    def queued(self) -> bool:
        """Whether the probe's queue makes the first groups; else they are chosen when all have reported. In
        lock step all end their probes at once, and a queue would tell nothing."""
        return self.count > 0 and self.way == "speed" and self.consistency != "bsp"

    @property
    def way(self) -> GroupBy:
        """`by`, without "auto": the paper's way where a number of groups is asked for, else the chooser's."""
        return self.by if self.by != "auto" else "speed" if self.count else "joint"

    @property
    def by_links(self) -> bool:
        """Whether links between workers matter, and are to be measured."""
        return self.links > 0 and self.way in ("joint", "site")

    def __str__(self) -> str:
        return f"{self.count or 'auto'} by {self.by}, {self.consistency}"


@dataclass(frozen=True)
class Plan:
    """Workers are to be grouped so; without a grouping, why there is none."""

    grouping: Grouping | None
    reason: str


class Planner:
    """Chooses groups. What is known beside speeds is put into its attributes, whenever it is: `links` and
    `hosts` are never changed, but replaced."""

    def __init__(self, settings: GroupingSettings) -> None:
        self.links: Links | None = None
        self.measured = ""  # how many links were measured, in a few words
        self.sites: dict[int, str] = {}  # by worker: where it says that it is
        self.hosts: dict[int, str] = {}  # by worker: its address, where links are measured
        self.sizes: dict[int, int] = {}  # by worker: bytes of its gradients
        self.batches: dict[int, float] = {}  # by worker: samples of its latest iteration
        self.server = ""  # the address of the shards' machine
        self._settings = settings
        self._regrouper: Regrouper | None = None
        self._events: list[Callable[[Regrouper], Proposal | None]] = []  # for the next job
        self._urgent = False  # one of them is not to wait
        self._next = math.inf  # when the regrouper may have something
        self._last = -math.inf  # when a job was begun
        self._thread: threading.Thread | None = None
        self._found: list[Plan] = []

    # -- what happens -------------------------------------------------------------------------------------

    def choose(self, now: float, speeds: Mapping[int, float]) -> None:
        """Choose groups for these workers, of whom samples per second are given: `poll` gives them."""
        speeds = dict(speeds)
        self._events.clear()
        self._begin_job(now, lambda: self._first(now, speeds))

    def follow(self, now: float, grouping: Grouping, speeds: Mapping[int, float]) -> None:
        """These groups are what the workers are in from now on."""
        self._regrouper = self._make_regrouper(now, grouping, speeds)
        self._events.clear()

    def handle_measured(self, now: float, worker: int, pace: float) -> None:
        """A worker has made an iteration, at so many seconds a sample."""
        if self._settings.regroup:
            self._tell(lambda regrouper: regrouper.handle_measured(now, worker, pace))

    def handle_joined(self, now: float, worker: int, pace: float) -> None:
        """A worker is to be placed beside the others."""
        self._tell(lambda regrouper: regrouper.handle_joined(now, worker, pace), urgent=True)

    def handle_left(self, now: float, worker: int) -> None:
        """A worker is no more."""
        self._tell(lambda regrouper: regrouper.handle_left(now, worker))

    def _tell(self, event: Callable[[Regrouper], Proposal | None], *, urgent: bool = False) -> None:
        self._events.append(event)
        self._urgent = self._urgent or urgent

    # -- what follows -------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a job is under way, or its result not yet taken."""
        return self._thread is not None

    def poll(self, now: float) -> list[Plan]:
        """What was found; and begin the next job, if there is something to look at."""
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
            except Exception as error:  # a fault of ours ends no run: workers go on as they are
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
        # Each holds for all workers: the last is what they are to be in.
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
        """As the settings say, of those who are left."""
        settings, known = self._settings, self._known(speeds)
        count = min(settings.count, len(speeds)) or None
        choice = choose(
            Measured(speeds, known.sites, known.links),
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

    def _known(self, speeds: Mapping[int, float]) -> Known:
        """All that is known of these workers."""
        hosts, links = self.hosts, self.links
        beside = [worker for worker in sorted(speeds) if hosts.get(worker) and hosts[worker] == self.server]
        batches = [batch for worker, batch in list(self.batches.items()) if worker in speeds and batch > 0]
        return Known(
            dict(speeds),
            links.of_these(sorted(speeds)) if links is not None else None,
            self._sites(speeds, hosts),
            max(list(self.sizes.values()), default=0),
            max(1, round(median(batches))) if batches else 0,
            beside[0] if beside else None,
        )

    def _sites(self, speeds: Mapping[int, float], hosts: Mapping[int, str]) -> dict[int, str]:
        """Where these workers are, if any of them says so, or if all are on one machine: of that no links
        need tell."""
        sites = {worker: self.sites.get(worker, "") for worker in speeds}
        if not any(sites.values()) and len({hosts.get(worker, "") for worker in speeds}) == 1:
            sites = {worker: hosts.get(worker, "") for worker in speeds}
        return sites if any(sites.values()) else {}
