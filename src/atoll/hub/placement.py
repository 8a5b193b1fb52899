"""Assignment of workers to groups: at the start, for newcomers, and when speeds change.

Source: docs/grouping.md; docs/notes/ps-hra.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from atoll.core.errors import DeadlineError
from atoll.core.units import format_seconds
from atoll.groups.grouping import Grouping
from atoll.groups.probe import Formed, Late, ProbeQueue
from atoll.hub.decisions import Decisions
from atoll.hub.links import LinkDesk, LinksFound
from atoll.hub.planner import GroupingSettings, Planner
from atoll.hub.records import Decided, Paced
from atoll.net.endpoint import host_and_port, is_path
from atoll.store.members import Membership
from atoll.wire.messages import Beat, Heartbeat

_LEAST_PATIENCE = 2.0  # seconds that a group has at least to form
_ITERATIONS = 4.0  # iterations of a group's slowest member that the others wait for
_CHOOSE_AGAIN = 10.0  # seconds after a choice that could not be made
_PACE_MOVED = 0.05  # relative change of a pace that is recorded


@dataclass
class _Progress:
    """A worker's latest progress and its seconds per iteration, from heartbeats."""

    iteration: int
    since: float
    seconds: float = 0.0


class Placement:
    """Decides on groups according to `settings`. Workers are ranks, times the hub's.

    The caller records each decision that `poll` yields and passes it to `take`, live and after a restart.
    """

    def __init__(
        self, settings: GroupingSettings, members: Membership, desk: LinkDesk, decisions: Decisions
    ) -> None:
        self._settings, self._members, self._desk, self._decisions = settings, members, desk, decisions
        self._planner = Planner(settings)
        self.paces: dict[int, float] = {}  # by rank: seconds for a sample
        self.wanted: list[list[int]] = []  # groups decided so far, of live workers
        self.placed = False  # the start is over
        self._progress: dict[int, _Progress] = {}  # by rank
        self._queue: ProbeQueue | None = None
        self._began: float | None = None  # when the start began
        self._not_before = -math.inf  # no choice before this time
        self._follows = False  # the planner knows how workers are grouped
        self._told: set[int] = set()  # newcomers reported to the planner
        self._failed = ""  # the latest reported reason why no groups were chosen

    # -- events -------------------------------------------------------------------------------------------

    @property
    def sites(self) -> dict[int, str]:
        """Sites that workers name, by rank."""
        return self._planner.sites

    def joined(self, rank: int, site: str) -> None:
        """Note a worker that joined, at `site` if it named one."""
        self._planner.sites[rank] = site

    def left(self, now: float, rank: int) -> None:
        """Forget a worker that left or died."""
        planner = self._planner
        for known in (self.paces, self._progress, planner.sites, planner.sizes, planner.batches):
            known.pop(rank, None)
        self.wanted = [rest for group in self.wanted if (rest := [w for w in group if w != rank])]
        self._told.discard(rank)
        if self._queue is not None:
            self._queue.handle_left(now, rank)
        planner.handle_left(now, rank)

    def beat(self, now: float, rank: int, beat: Heartbeat | Beat) -> Paced | None:
        """Take iterations and seconds per sample from a heartbeat. Returns a record if the pace has changed
        enough."""
        planner, iteration, pace = self._planner, beat.iteration, beat.pace
        known = self._progress.get(rank)
        planner.sizes[rank], planner.batches[rank] = beat.size, beat.batch
        if known is None:
            known = self._progress[rank] = _Progress(iteration, now)
        moved = iteration > known.iteration
        if moved:
            seconds = (now - known.since) / (iteration - known.iteration)
            self._progress[rank] = _Progress(iteration, now, seconds)
        if not 0 < pace < math.inf:
            return None
        if moved and self._follows:
            planner.handle_measured(now, rank, pace)
        before = self.paces.get(rank)
        if before is not None and abs(pace / before - 1) <= _PACE_MOVED:
            return None
        return Paced(at=now, incarnation=beat.incarnation, pace=pace)

    def restore(
        self, paces: dict[int, float], wanted: list[list[int]], placed: bool, sites: dict[int, str]
    ) -> None:
        """Restore the state after a restart."""
        self.paces, self.wanted, self.placed, self._planner.sites = paces, wanted, placed, sites

    def take(self, decided: Decided) -> list[list[int]]:
        """Apply a decision; returns its groups, of live workers only."""
        live = self._members.workers.live()
        groups = [rest for group in decided.groups if (rest := [rank for rank in group if rank in live])]
        moved = {rank for group in groups for rank in group}
        rests = ([rank for rank in group if rank not in moved] for group in self.wanted)
        self.wanted = [rest for rest in rests if rest] + groups
        self._told -= moved
        self.placed = self.placed or decided.placed
        return groups

    def take_links(self, found: LinksFound) -> None:
        """Pass measured links to the planner."""
        shards, planner = self._members.shards.addresses() or [""], self._planner
        here = "127.0.0.1" if is_path(shards[0]) else ""
        planner.server = (host_and_port(shards[0]) or (here,))[0]
        planner.links, planner.hosts, planner.measured = found.links, dict(self._desk.hosts), found.summary

    def patience(self, now: float, rank: int) -> float:
        """Seconds that a worker may wait for the other members of its new group."""
        mates = next((group for group in self.wanted if rank in group), [rank])
        slowest = max(
            (max(each.seconds, now - each.since) for mate in mates if (each := self._progress.get(mate))),
            default=0.0,
        )
        return min(max(_LEAST_PATIENCE, _ITERATIONS * slowest), self._settings.patience)

    # -- decisions ----------------------------------------------------------------------------------------

    def poll(self, now: float) -> Iterator[Decided]:
        """Yield the decisions due now. Pass each to `take` before the next is requested."""
        if not self.placed:
            yield from self._poll_start(now)
        elif not self._follows:
            self._follow(now)
        else:
            self._place_newcomers(now)
        for plan in self._planner.poll(now):
            if plan.grouping is not None:
                self._follows = True
                yield _decided(now, plan.grouping, plan.reason, placed=True)
            elif plan.reason != self._failed:
                self._failed = plan.reason
                self._decisions.add("groups", "none chosen", plan.reason)

    def _poll_start(self, now: float) -> Iterator[Decided]:
        if self._began is None:
            self._began = now
        if self._settings.queued:
            yield from self._poll_queue(now)
        elif not self._planner.busy and now >= self._not_before and self._desk.over:
            live = self._members.workers.live()
            over = now >= self._began + self._settings.patience
            reported = {rank: 1 / pace for rank, pace in self.paces.items() if rank in live}
            if reported and (over or len(reported) == len(live)):
                for rank in live.keys() - reported.keys():
                    span = format_seconds(self._settings.patience)
                    reason = f"its probe did not end within {span}; it is placed when it reports"
                    self._decisions.add("groups", f"without worker {rank}", reason)
                self._not_before = now + _CHOOSE_AGAIN
                self._planner.choose(now, reported)

    def _poll_queue(self, now: float) -> Iterator[Decided]:
        """Serve the probe's queue; after a restart, for workers in no group."""
        placed = {rank for group in self.wanted for rank in group}
        waiting = [rank for rank in self._members.workers.live() if rank not in placed]
        if self._queue is None:
            if not waiting:
                yield _decided(now, Grouping([]), "each worker is in a group", placed=True)
                return
            groups = max(1, min(self._settings.count - len(self.wanted), len(waiting)))
            self._queue = ProbeQueue(now, waiting, groups, patience=self._settings.patience)
        for rank in waiting:
            self._queue.handle_begun(now, rank)
            if rank in self.paces:
                self._queue.handle_probed(now, rank, self.paces[rank])
        try:
            outcomes = self._queue.poll(now)
        except DeadlineError as error:
            self._decisions.add("groups", "none yet", str(error))
            self._queue = None  # start a new queue next time
            return
        for outcome in outcomes:
            if isinstance(outcome, Formed):
                yield _decided(now, Grouping([outcome.group]), outcome.reason)
            elif not isinstance(outcome, Late):  # a late worker is placed like a newcomer
                self._decisions.add("groups", f"without worker {outcome.worker}", outcome.reason)
        if self._queue.over and self.wanted:
            yield _decided(now, Grouping([]), "the probe is over", placed=True)

    def _follow(self, now: float) -> None:
        """Give the planner the present groups: after the queue, and after a restart."""
        groups = [[rank for rank in group if rank in self.paces] for group in self.wanted]
        grouping = Grouping(group for group in groups if group)
        speeds = {rank: 1 / self.paces[rank] for rank in grouping.workers}
        if speeds:
            self._planner.follow(now, grouping, speeds)
            self._follows = True

    def _place_newcomers(self, now: float) -> None:
        placed = {rank for group in self.wanted for rank in group} | self._told
        for rank in self._members.workers.live():
            if rank not in placed and rank in self.paces and not self._desk.wants(rank):
                self._told.add(rank)
                self._planner.handle_joined(now, rank, self.paces[rank])


def _decided(now: float, grouping: Grouping, reason: str, *, placed: bool = False) -> Decided:
    return Decided(at=now, groups=[list(group) for group in grouping], reason=reason, placed=placed)
