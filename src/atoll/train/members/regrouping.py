"""The moves of a worker to another group, by the hub's grouping, between two iterations.

The hub numbers its groupings, and announces the latest to workers. A contribution names the grouping that its
workers know. The answer names the grouping to which they all move at the end of that step, so the members of
a group leave it together. Nothing is in flight then: the last iteration is whole, and the next has not begun.
Source: docs/ps-hra.md; docs/notes/ps-hra.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from atoll.core import points
from atoll.core.decoding import from_msgpack
from atoll.core.errors import CheckpointError
from atoll.exchange.link import LOG, ShardLink
from atoll.store.blocks import BLOCKS_A_REWIND, MOST_EPOCHS
from atoll.train.data.leased_sampler import LeasedSampler, Where
from atoll.train.group.rounds import Ring
from atoll.train.members.attendance import Attendance
from atoll.train.members.hub_client import HubClient
from atoll.train.sync.servedmodels import ServedModels
from atoll.train.sync.uplink import Speaker
from atoll.wire.messages import Arrive, Cut, Grouped, Leased, Reformed, Used

ARRIVING = "arriving"  # the name of a group's Arrive, which is sent again until answered


class Shared(Protocol):
    """The part of a session that is equal on all members of a group (`train/checkpoint/resume.py`:
    TrainingState)."""

    iteration: int

    def capture_shared(self) -> bytes: ...

    def restore_shared(self, raw: bytes) -> None: ...


class GroupState:
    """The state that members of a group take from its first member, and their agreement on places in the
    data.

    Data is leased, so members need to agree only on their places in it. See `train/group/rounds.py`: State.
    """

    def __init__(self, state: Shared, samplers: list[LeasedSampler], warn: Callable[[str], None]) -> None:
        """Hold a session's state. The list `samplers` may grow; `warn(line)` warns the user."""
        self._state, self._samplers, self._warn = state, samplers, warn

    def capture(self) -> bytes:
        """Return the shared state. If it cannot be captured, warn and return b"": each member goes on with
        its own."""
        try:
            return self._state.capture_shared()
        except CheckpointError as error:
            self._warn(f"the members of this worker's group go on with schedules of their own: {error}")
            return b""

    def restore(self, raw: bytes, rank: int) -> None:  # noqa: ARG002
        if raw:
            self._state.restore_shared(raw)

    def places(self, *, entered: bool = False) -> bytes:  # noqa: ARG002
        return msgspec.msgpack.encode([sampler.where() for sampler in self._samplers])

    def deal_anew(self, places: Sequence[bytes], rank: int, world: int) -> None:  # noqa: ARG002
        found = [from_msgpack(place, list[Where]) for place in places]
        for number, sampler in enumerate(self._samplers):
            sampler.go_to([place[number] for place in found])


class Leases:
    """A worker's leases of data from the hub: its own, or its part of its group's leases, block by block."""

    def __init__(self, hub: HubClient) -> None:
        self._hub = hub
        self._contributor = 0  # the worker's group; 0: the worker leases for itself
        self._blocks: dict[int, dict[int, int]] = {}  # by sampler: epoch -> number of the last block

    def lease(
        self,
        sampler: int,
        epoch: int,
        length: int,
        count: int,
        wait: float,
        cut: Cut | None = None,
        rewinds: int = 0,
        returned: Sequence[Used] = (),
        *,
        idle: bool = False,
    ) -> Leased:
        """Lease positions of an epoch (see `HubClient.lease`).

        Args:
            cut: the parts in which a group's members take each of `count` batches; a worker that is in no
                group takes such batches whole.
            rewinds: how often the script has gone back to an earlier epoch. Members may have asked for unlike
                numbers of an epoch's blocks before, so all go on at one number then.
            returned: positions that this worker gives back. What a group has leased stays its own, since
                other members have parts of it.
            idle: True in a loop without steps.
        """
        if not self._contributor:
            own = count if cut is None else count * sum(cut.parts.values())
            return self._hub.lease(sampler, epoch, length, own, wait, returned=returned, idle=idle)
        more: dict[str, Any] = {"idle": True} if idle else {}
        blocks = self._blocks.setdefault(sampler, {})
        block = max(blocks.get(epoch, 0), rewinds * BLOCKS_A_REWIND) + 1
        leased = self._hub.lease(
            sampler,
            epoch,
            length,
            count,
            wait,
            contributor=self._contributor,
            block=block,
            cut=cut,
            **more,
        )
        if leased.block:
            blocks.pop(epoch, None)  # the epochs stand in the order in which they were asked for last
            blocks[epoch] = block
            if len(blocks) > MOST_EPOCHS:
                del blocks[next(iter(blocks))]
        return leased

    def move(self, contributor: int) -> None:
        """Lease as a member of another group from now on."""
        self._contributor = contributor
        self._blocks.clear()


class MoveListener(Protocol):
    """A callback for a move: the group, the seconds that the move took, and the group's speaker."""

    def __call__(self, grouped: Grouped, seconds: float, speaker: Speaker) -> None: ...


@dataclass
class MoveParts:
    """The parts of a session that a move concerns."""

    hub: HubClient
    ring: Ring
    shards: ShardLink
    attendance: Attendance
    state: Shared
    samplers: list[LeasedSampler]
    leases: Leases
    models: ServedModels


class Regrouping:
    """One worker's moves from group to group."""

    def __init__(self, parts: MoveParts, told: MoveListener) -> None:
        self._parts, self._tell = parts, told
        self.grouping = 0  # the latest grouping to which this worker has asked to move

    @property
    def contributor(self) -> int:
        """The group to which this worker belongs."""
        return self._parts.attendance.contributor

    @property
    def contributors(self) -> list[int]:
        """All living contributors, by the log's latest report."""
        return self._parts.models.contributors or [self.contributor]

    def known(self) -> int:
        """Return the hub's latest grouping that this worker knows."""
        return self._parts.hub.grouping

    def is_called(self) -> bool:
        """True if the hub wants this worker in another group, and the worker is between two of its
        iterations, with a model at the shards."""
        if self.known() <= self.grouping:
            return False
        exchange = self._parts.models.exchange
        return exchange.at_shards and not exchange.phase.reduced

    def answer(self) -> None:
        """Move this worker, a group of one, to the hub's latest grouping."""
        self._parts.models.exchange.settle()  # contributions in flight belong to this group
        self.move(self.known())

    def move(self, grouping: int) -> None:
        """Move to `grouping`, which the answer to the last iteration names. Do nothing if it is not new."""
        if grouping <= self.grouping:
            return
        self.grouping = grouping
        began, parts = time.monotonic(), self._parts
        points.reach("group.leaving", parts.state.iteration)
        held = [used for sampler in parts.samplers for used in sampler.held()]
        grouped = parts.hub.join_group(grouping, parts.state.iteration, held)
        points.reach("group.formed", parts.state.iteration)
        if grouped.group:
            self._move_to(grouped)
        self._tell(grouped, time.monotonic() - began, parts.models.exchange.uplink)

    def _move_to(self, grouped: Grouped) -> None:
        parts = self._parts
        for sampler in parts.samplers:
            sampler.leave_leased()
        parts.leases.move(grouped.contributor)
        parts.ring.move(
            Reformed(group=grouped.group, workers=grouped.workers, newcomers=grouped.newcomers, round=0)
        )
        points.reach("group.ring", parts.state.iteration)
        shards = parts.shards
        shards.move(
            msgspec.structs.replace(
                shards.hello,
                worker=grouped.contributor,
                incarnation=grouped.life,
                member=parts.attendance.place.rank,
            )
        )
        meeting = parts.attendance.coming
        shards.send(LOG, Arrive(incarnation=grouped.life, meeting=meeting), until=ARRIVING)
        who = f"group {grouped.contributor}"
        parts.models.arrive(f"the shards' word that they know {who}")
        shards.answered(ARRIVING)
        parts.attendance.contributor = grouped.contributor
        points.reach("group.arrived", parts.state.iteration)
        # Under bsp the group's first iteration begins once all groups have reported this to the hub.
        parts.hub.in_group(grouped.contributor)
        parts.models.exchange.join(grouped.contributor, f"the parameters with which {who} begins")
        points.reach("group.joined", parts.state.iteration)
