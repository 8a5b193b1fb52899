"""The exchange of a group (strategy `ps-hra`) whose members' models lie in chunks over tiers.

Each member has tiers of its own, with all values and gradients. The ring sums gradients chunk by chunk, into
a payload beside the member's own, which stay until the group agrees that the iteration is whole: where a
member was lost, they are summed anew. One member, drawn anew for each exchange, sends the group's mean to the
shards and fetches what comes of it, or each its own share (train/sync/uplink.py). What has come is handed on
chunk by chunk, and goes into all members' tiers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from atoll.core import points
from atoll.exchange.coding import bytes_of
from atoll.tensors.binding import BoundChunk
from atoll.tensors.gradienthooks import after_gradient
from atoll.train.gradients.messages import ChunkGradients
from atoll.train.gradients.ring import RingSum
from atoll.train.gradients.samples import Contribution
from atoll.train.gradients.sums import Owner
from atoll.train.sync.exchange import (
    CONTRIBUTION,
    Connection,
    NewParameters,
    check_holder,
    values_of,
)
from atoll.train.sync.groupexchange import GroupExchange, GroupMeanExchange, GroupReducer, Outgoing
from atoll.train.sync.tieredexchange import (
    Asking,
    Holder,
    Stepping,
    TieredMeanSteps,
    TieredParameters,
    gradient_from,
    in_turn,
    note_nonfinite,
)
from atoll.train.sync.uplink import Role
from atoll.wire.messages import AnyMessage, Hyperparameters, Mean, Parameters, PullMean


class GroupParameters(TieredParameters):
    """New parameters that members fetch, and hand on."""

    def __init__(self, chunks: Sequence[BoundChunk], connection: Connection, held: Holder) -> None:
        super().__init__(chunks, connection, held)
        self._fetches = self._begun = False
        self._arrived: dict[int, Tensor] = {}

    def begin(self) -> None:
        """Ask for what is expected: `next` gives it, in the order in which chunks are asked for."""
        self._arrived.clear()
        self._fetches = True
        self._asking.begin(self._chunks)

    def next(self, chunk_id: int) -> Tensor:
        """This member's run of a chunk, 1-D, once it is here."""
        values = self._asking.next(chunk_id, self._arrived, self._what)
        self._staged[chunk_id] = None
        return values

    def become(self, bound: BoundChunk, values: Tensor) -> None:
        """Let a chunk's parameters have these values; `adopt` says that all have come."""
        if self._drops:
            return
        if not self._begun:
            self.check_unchanged()
            self._held().begin_values()
            self._begun = True
        self._put(bound, values)

    def _done(self) -> None:
        self._fetches = False
        self._arrived.clear()
        super()._done()

    def adopt(self, values: Mapping[int, Tensor]) -> None:
        assert not values
        self._connection.shards.answered(CONTRIBUTION)  # where another one spoke in the end
        self.discarded()
        if self._begun:
            self._begun = False
            self._end()

    def _handle(self, shard: int, message: AnyMessage, payload: memoryview | None) -> None:
        if not self._fetches:
            super()._handle(shard, message, payload)
            return
        assert isinstance(message, Parameters)
        bound = self._chunks.get(message.chunk)
        known = message.chunk in self._arrived or message.chunk in self._staged
        if self._asked is None or message.asked != self._asked or bound is None or known:
            return
        if (message.share, message.shares) != self._share:
            return  # what this member asked for before another was lost
        check_holder(self._connection.shard_of, shard, message.chunk)
        self.clock, self.staleness = message.clock, message.staleness
        self.consumed = max(self.consumed, message.consumed)
        self._arrived[message.chunk] = values_of(payload, bound, shard, self._share).clone()


class TierCarrier:
    """Gradients that lie in tiers: they are summed from tiers and into tiers, a chunk at a time, when all
    have come."""

    def __init__(
        self,
        ring_sum: RingSum,
        owner: Owner,
        chunks: Sequence[BoundChunk],
        nodes: Sequence[Any],
        *,
        held: Holder,
        stays: bool,
    ) -> None:
        """`stays`: the sums are never put in the place of this member's own gradients."""
        self._sum, self._owner, self.bounds = ring_sum, owner, list(chunks)
        self._held, self._stays = held, stays
        self._nonfinite: list[str] = []
        self.ids: list[int] = []  # in no message
        self.chunks: dict[int, ChunkGradients] = {}
        self.are_apart = False  # the sums are the group's, and this member's own gradients stay as they are
        self.present: dict[int, list[bool]] = {}  # of the sums, by chunk, where they are apart
        self._hooks = [after_gradient(node, owner.came) for node in nodes]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self.bounds.clear()

    def begin(self) -> None:
        """Nothing is kept of a backward."""

    def drop_kept(self) -> None:
        """They are where they are."""

    def abandon(self) -> None:
        """Nothing leaves before the end of backward."""

    def own(self, bound: BoundChunk) -> list[Tensor | None]:
        return [parameter.grad for parameter in bound.parameters]

    def flat_gradients(self, bound: BoundChunk) -> tuple[Tensor, tuple[bool, ...]]:
        present = self._held().present(bound.parameters)
        return gradient_from(self._held(), bound, present), tuple(present)

    def own_nonfinite(self) -> list[str]:
        return list(self._nonfinite)

    def dirty(self) -> list[float]:
        return []

    def measured(self) -> list[int]:
        return []

    def leave_in(self, order: Sequence[int]) -> None:
        """They leave as they were laid."""

    def anew(self) -> None:
        """There is no memory that a former ring may still write into."""

    def carry(self, scale: float, said: Sequence[float]) -> None:
        """Sum all chunks over the members. This member's own gradients stay unchanged."""
        del said  # it goes by itself
        self._nonfinite = []
        self.carry_again(scale, None)
        points.reach("ring.all_sent", self._owner.steps)

    def carry_again(self, scale: float, dirty: Sequence[bool] | None) -> None:
        del dirty
        channel = self._sum.ring.agreement  # in host memory, where the tiers are, whatever the device
        for bound in self.bounds:
            flat = self._own_of(bound, scale)
            work = channel.sum(flat)
            points.reach("ring.sent", self._owner.steps)
            named = f"chunk {bound.chunk.id} (with {bound.names[0]!r})"
            channel.wait(work, f"{named} in iteration {self._owner.steps}")
            self._owner.bytes_sent += channel.sends(flat.numel() * flat.element_size())
            self._held().put_sums(bound.chunk, bound.parameters, flat)

    def _own_of(self, bound: BoundChunk, scale: float) -> Tensor:
        """This member's gradient of a chunk, scaled, (extent,)."""
        if scale == 0:  # zero times NaN would be NaN
            return torch.zeros(bound.chunk.extent, dtype=bound.dtype)
        held = self._held()
        flat = gradient_from(held, bound, held.present(bound.parameters))
        note_nonfinite(bound, flat, self._nonfinite)
        return flat.mul_(scale) if scale != 1.0 else flat

    def publish(self, factor: float, present: Sequence[Sequence[bool]], *, apart: bool) -> None:
        held = self._held()
        self.are_apart = apart or self._stays
        for bound, here in zip(self.bounds, present, strict=True):
            flat = held.read_sums(bound.chunk, bound.parameters)
            if factor != 1.0:
                flat.mul_(factor)
            if self.are_apart:
                held.put_sums(bound.chunk, bound.parameters, flat)
                self.present[bound.chunk.id] = list(here)
            else:
                held.put_gradients(bound.chunk, bound.parameters, here, flat)


class _InTiers(GroupReducer):
    """What both kinds of exchange have: what goes to the shards is read as it leaves, and what comes is
    handed on to all members a chunk at a time."""

    parameters: GroupParameters
    _sums_stay = False  # whether they are never put in the place of this member's own gradients

    def __init__(self, chunks: Sequence[BoundChunk], *arguments: Any, held: Holder, **more: Any) -> None:
        self._held = held
        carry = partial(TierCarrier, held=held, stays=self._sums_stay)
        super().__init__(chunks, *arguments, carry=carry, **more)

    @property
    def tiers(self) -> TierCarrier:
        """Where the group's sums are."""
        assert isinstance(self.sum.carrier, TierCarrier)
        return self.sum.carrier

    def _new_parameters(self, connection: Connection) -> NewParameters:
        return GroupParameters(self._chunks, connection, self._held)

    def _push(self, outgoing: Outgoing, role: Role, _along: Mapping[int, Tensor] | None) -> None:
        self.connection.shards.answered(CONTRIBUTION)  # of a ring before this one
        sums, present = self.tiers.are_apart, outgoing.present

        def make(bound: BoundChunk, start: int, stop: int) -> memoryview:
            return self._mean_of(bound, present[bound.chunk.id], sums, start, stop)

        self.uplink.push_made(role, outgoing.iteration, present, make)

    def _mean_of(
        self, bound: BoundChunk, present: Sequence[bool], sums: bool, start: int, stop: int
    ) -> memoryview:
        """A run of the group's mean gradient of a chunk, as it leaves."""
        held = self._held()
        if not any(present):
            return bytes_of(torch.zeros(stop - start, dtype=bound.dtype))
        if sums:
            flat = held.read_sums(bound.chunk, bound.parameters)
        else:
            slots = zip(present, bound.chunk.slots, strict=True)
            within = [here and s.offset < stop and s.offset + s.numel > start for here, s in slots]
            flat = gradient_from(held, bound, within)
        run = flat[start:stop]
        return bytes_of(run if run.numel() == flat.numel() else run.clone())  # the rest is let go

    def _collect(self, role: Role, what: str) -> None:
        parameters = self.parameters
        if role.talks:
            parameters.begin()
        self._hand_on(role, parameters.next, parameters.become, what)

    def _hand_on(
        self,
        role: Role,
        take: Callable[[int], Tensor],
        put: Callable[[BoundChunk, Tensor], None],
        what: str,
    ) -> None:
        """What comes to those who talk, whose run of a chunk `take` gives: `put` each chunk on all members. A
        collective of the ring."""
        for chunk_id in in_turn(self._bounds, self.connection.shard_of):  # alike on all members
            bound = self._bounds[chunk_id]
            run = take(chunk_id) if role.talks else None
            put(bound, self.uplink.whole(role, bound, run, what))

    def _spread(self, _role: Role, runs: Mapping[int, Tensor] | None, _what: str) -> dict[int, Tensor]:
        assert runs is None
        return {}  # it is in the tiers of all


class TieredGroup(_InTiers, GroupExchange):
    """ssp and asp."""

    @torch.no_grad()
    def step(self, accepted: bool, hyperparameters: Hyperparameters) -> None:
        with Stepping(self.parameters):
            super().step(accepted, hyperparameters)

    def _outgoing(self, accepted: bool, hyperparameters: Hyperparameters) -> Outgoing:
        own = self._of_group if accepted else Contribution(0.0, self._of_group.samples)
        held, present = self._held(), {}
        for bound in self._chunks:
            apart = self.tiers.are_apart
            here = self.tiers.present[bound.chunk.id] if apart else held.present(bound.parameters)
            present[bound.chunk.id] = [each and own.weight > 0 for each in here]
        used, self._used = self._used, []
        return Outgoing(self.steps, {}, present, own, used, list(self._able), hyperparameters)


class TieredGroupMean(_InTiers, TieredMeanSteps, GroupMeanExchange):
    """bsp: after backward `p.grad` is the mean over all groups, in the tiers where this member's own was.

    The group's mean stays beside it until the exchange is over: where a member is lost meanwhile, and some
    chunks of the mean over all groups have come, it is there to be sent again.
    """

    _sums_stay = True

    def _connect(self, connection: Connection, lazy: bool) -> None:
        super()._connect(connection, lazy)
        self._asking = Asking(connection, "mean", self._pull_of)

    def _pull_of(self, chunk: int) -> PullMean:
        return self.uplink.pull_mean(self._mean_share, self.steps, [chunk])

    @property
    def _flats(self) -> dict[int, Tensor]:
        return {}  # it is read as it leaves

    @property
    def _present(self) -> dict[int, list[bool]]:
        return dict(self.tiers.present)

    def _collect_mean(self, role: Role, what: str) -> None:
        held, self._all_edited = self._held(), False

        def put(bound: BoundChunk, values: Tensor) -> None:
            known = self._means[bound.chunk.id].present if role.leads else None
            present = [bool(byte) for byte in self.uplink.tell(role, known, what)]
            held.put_gradients(bound.chunk, bound.parameters, present, values)
            points.reach("group.handed", self.steps)

        if role.talks:
            self._asking.begin(self._bounds)
        else:
            self._asking.stop()  # it may have talked in a ring before this one
        self._hand_on(role, lambda chunk: self._asking.next(chunk, self._mean_runs, self._what), put, what)

    def _handle_mean(self, shard: int, message: AnyMessage, payload: memoryview | None) -> None:
        assert isinstance(message, Mean)
        if message.chunk not in self._means:  # else it was sent again
            super()._handle_mean(shard, message, payload)

    def _shard_answers(self, shard: int) -> None:
        """What was sent to it stays as it is until the exchange is over."""

    @torch.no_grad()
    def step(self, accepted: bool, hyperparameters: Hyperparameters) -> None:
        with Stepping(self.parameters):
            super().step(accepted, hyperparameters)

    def _step_left_out(self) -> None:
        with self.parameters.dropping():
            super()._step_left_out()
