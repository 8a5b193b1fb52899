"""A worker's news of those that it trains with: a ring's members, its group, its moves."""

from __future__ import annotations

from collections.abc import Callable

from atoll.core import events
from atoll.train.api.pace import Pace
from atoll.train.api.records import Records
from atoll.train.checkpoint.resume import TrainingState
from atoll.train.group.hierarchy import Hierarchy
from atoll.train.group.rounds import MOVING, Regrouped, Ring
from atoll.train.members.groupworkers import GroupWorkers
from atoll.train.members.workers import Workers
from atoll.train.sync.uplink import Uplink
from atoll.wire.messages import Grouped


class RingNews:
    """Of the one ring of a run: which members it goes on with, and how it is grouped."""

    def __init__(
        self,
        workers: Workers,
        state: TrainingState,
        records: Records,
        ring: Ring,
        hierarchy: Hierarchy | None,
    ) -> None:
        self._workers, self._state, self._records = workers, state, records
        self._ring, self._hierarchy = ring, hierarchy

    def ring_changed(self, ring: Regrouped) -> None:
        """The ring goes on with other members than before. Raises RunError where one of them held the only
        copy of a part of a model."""
        for tiers in self._state.tiers:
            tiers.refuse_loss([*ring.lost, *ring.left])
        if self._workers.is_first:
            self._records.tell_of_ring(ring, "the ring")
        self._records.tell_of_groups(self._hierarchy)
        self._records.tell_of_confirmations(self._ring)


class GroupNews:
    """Of this worker's group among several: its members, and the worker's moves to other groups."""

    def __init__(
        self, workers: GroupWorkers, state: TrainingState, records: Records, pace: Pace, ring: Ring
    ) -> None:
        self._workers, self._state, self._records = workers, state, records
        self._pace, self._ring = pace, ring

    def ring_changed(self, ring: Regrouped, group: int) -> None:
        """The ring of this worker's group, which contributes as `group`, is another one; `moved` tells of
        moves."""
        self._pace.leave_out()
        self._workers.lose([*ring.lost, *ring.left])
        if ring.what != MOVING and self._ring.rank == 0:
            self._records.tell_of_ring(ring, f"group {group}")

    def moved(self, uplink_of: Callable[[], Uplink], grouped: Grouped, seconds: float) -> None:
        """This worker is in another group, or was told to stay where it is."""
        self._pace.leave_out()
        if grouped.group:
            self._records.emit(
                events.Regrouped,
                iteration=self._state.iteration + 1,  # it moves at the end of a step that is not counted yet
                grouping=grouped.grouping,
                group=grouped.contributor,
                workers=sorted(grouped.workers),
                seconds=seconds,
                reason=grouped.reason,
            )
            uplink = uplink_of()
            self._records.emit(events.Decided, what="uplink", choice=uplink.kind, reason=uplink.reason)
