"""A worker's news of the workers with which it trains: a ring's members, its group, its moves."""

from __future__ import annotations

from atoll.core import events
from atoll.core.config import Config
from atoll.train.api.pace import Pace
from atoll.train.api.place import Seat, is_first
from atoll.train.api.records import Records
from atoll.train.checkpoint.resume import TrainingState
from atoll.train.group.hierarchy import Hierarchy
from atoll.train.group.ordering import RingOrder
from atoll.train.group.rounds import MOVING, Regrouped, Ring
from atoll.train.members.attendance import Attendance
from atoll.train.sync.peersworker import NodeWorker
from atoll.train.sync.uplink import Speaker
from atoll.wire.device import Members, Notice
from atoll.wire.messages import Grouped


class RingNews:
    """News of the one ring of a run: its members after a change, and their groups."""

    def __init__(
        self,
        seat: Seat,
        state: TrainingState,
        records: Records,
        hierarchy: Hierarchy | None,
        order: RingOrder | None,
    ) -> None:
        self._seat, self._state, self._records = seat, state, records
        self._hierarchy, self._order = hierarchy, order

    def ring_changed(self, ring: Ring, changed: Regrouped) -> None:
        """Report that the ring goes on with other members.

        Raises RunError if a lost member held the only copy of a part of a model.
        """
        for tiers in self._state.tiers:
            tiers.refuse_loss([*changed.lost, *changed.left])
        if is_first(self._seat):
            self._records.tell_of_ring(changed, "the ring")
            self._records.tell_of_order(self._order)
        self._records.tell_of_groups(self._hierarchy)
        self._records.tell_of_confirmations(ring)


class GroupNews:
    """News of this worker's group among several: its members, and the worker's moves to other groups."""

    def __init__(
        self,
        attendance: Attendance,
        state: TrainingState,
        records: Records,
        pace: Pace,
        order: RingOrder | None,
    ) -> None:
        self._attendance, self._state, self._records = attendance, state, records
        self._pace, self._order = pace, order

    def ring_changed(self, ring: Ring, changed: Regrouped) -> None:
        """Report that this worker's group has another ring. `moved` reports moves to another group."""
        self._pace.leave_out()
        self._attendance.lose([*changed.lost, *changed.left])
        if ring.rank != 0:
            return
        if changed.what != MOVING:
            self._records.tell_of_ring(changed, f"group {self._attendance.contributor}")
        self._records.tell_of_order(self._order)

    def moved(self, grouped: Grouped, seconds: float, speaker: Speaker) -> None:
        """Report that this worker is in another group. Nothing is reported if it stays in its group."""
        self._pace.leave_out()
        if grouped.group:
            self._records.emit(
                events.Regrouped,
                iteration=self._state.iteration + 1,  # a worker moves before its step is counted
                grouping=grouped.grouping,
                group=grouped.contributor,
                workers=sorted(grouped.workers),
                seconds=seconds,
                reason=grouped.reason,
            )
            self._records.emit(events.Decided, what="uplink", choice=speaker.kind, reason=speaker.reason)


_WEIGHTS = "weights"  # the name of the warning on counts that differ
_OFTEN = ("round", "fetched")  # decisions that may come each iteration: they go to the journal alone


class NodeNews:
    """News of this node among the others: its CPU side's decisions, and nodes that come and go.

    The CPU side sends them to the leader of the node's devices.
    """

    def __init__(self, node: NodeWorker, records: Records) -> None:
        self._node, self._records = node, records
        self._members = list(node.members)
        node.on(Notice, self._handle_told)
        node.on(Members, self._handle_members)

    def begin(self, config: Config) -> None:
        """Report how the nodes know one another, and how they exchange."""
        introduction, sync = self._node.introduction, config.sync
        devices, nodes = introduction.devices, f"{self._node.world}, without a server"
        if self._node.has_groups:
            alike = len(set(devices)) == 1
            each = f"{devices[0]} devices each" if alike else f"{', '.join(map(str, devices))} devices"
            nodes = f"{self._node.world} of {each}, without a server"
        how = (
            f"introduced by {introduction.describe()}; at most {sync.stale_max} iterations ahead, "
            f"overlay {sync.overlay}"
        )
        self._records.decided("nodes", nodes, how)

    @property
    def _is_first(self) -> bool:
        """True if this node prints the lines that all nodes know."""
        return self._node.node == min(self._node.members, default=self._node.node)

    def _handle_told(self, message: Notice) -> None:
        if message.choice:
            kind = events.RoundSeen if message.what.startswith(_OFTEN) else events.Decided
            self._records.decided_here(kind, message.what, message.choice, message.reason)
        elif message.what != _WEIGHTS or self._is_first:  # all nodes know of the weights
            self._records.warn(message.reason)

    def _handle_members(self, message: Members) -> None:
        node = self._node
        before, self._members = self._members, list(node.members)
        gone = [f"node {each} was left out" for each in before if each not in node.members]
        came = [f"node {each} came in" for each in node.members if each not in before]
        if not node.leads or not (gone or came):
            return
        names = ", ".join(map(str, node.members))
        reason = f"{', '.join(gone + came)}{': ' if message.reason else ''}{message.reason}"
        self._records.decided_here(events.Decided, "members", f"view {message.view}: nodes {names}", reason)
        if self._is_first:
            self._records.warn(f"{reason}; {len(node.members)} of {node.world} nodes go on")
