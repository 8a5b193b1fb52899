"""The exchange of a group (strategy `ps-hra`) whose members' models lie in chunks over tiers.

Each member has tiers of its own, with all values and gradients. The ring sums gradients chunk by chunk, into
a payload beside the member's own, which stay until the group agrees that the iteration is whole: where a
member was lost, they are summed anew. One member, drawn anew for each exchange, sends the group's mean to the
shards and fetches the new values, which it hands on chunk by chunk; each goes into the tiers as it comes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor

from atoll.core import points
from atoll.net.returning import Made
from atoll.tensors.binding import BoundChunk
from atoll.train.exchange import CONTRIBUTION, Connection, NewParameters, bytes_of, values_of
from atoll.train.groupexchange import Answer, GroupExchange, Outgoing
from atoll.train.messages import ChunkGradients, Message
from atoll.train.ring import Agreement, RingReducer
from atoll.train.samples import Contribution
from atoll.train.tieredexchange import (
    Holder,
    Stepping,
    TieredParameters,
    gradient_from,
)
from atoll.train.uplink import Role
from atoll.wire.messages import AnyMessage, Committed, Hyperparameters, Parameters, Push


class _Likes:
    """What a hook asks of the place where a gradient would be reduced: dtypes alone."""

    def __init__(self, bound: BoundChunk) -> None:
        self.views = [torch.empty(0, dtype=parameter.dtype) for parameter in bound.parameters]


class StagedChunk(ChunkGradients):
    """A chunk whose gradients lie in tiers: it has no memory of its own, and leaves after backward."""

    def __init__(self, bound: BoundChunk) -> None:
        self.bound = bound
        self.published: Any = _Likes(bound)
        self.kept: list[Tensor | None] = []
        self.fired = [False] * len(bound.parameters)
        self.missing = len(bound.parameters)
        self.taken = 0
        self.late = True

    def again(self) -> None:
        """It is read once, when all have come."""

    def slots(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(())  # what the script has stays where it is


class StagedMessage(Message):
    """One chunk, which is put together when it is summed."""

    def __init__(self, bound: BoundChunk, number: int) -> None:
        self.number = number
        self.memory = self.gradients = torch.empty(0, dtype=bound.dtype)
        self.chunks: list[ChunkGradients] = [StagedChunk(bound)]
        self.dirty = self.sent = False
        self.work = None

    def move(self) -> None:
        """There is no memory that a former ring may still write into."""


class GroupParameters(TieredParameters):
    """New parameters that one member fetches, and hands on."""

    def __init__(self, chunks: Sequence[BoundChunk], connection: Connection, held: Holder) -> None:
        super().__init__(chunks, connection, held)
        self._fetches = self._begun = False
        self._arrived: dict[int, Tensor] = {}

    def ask(self, clock: int, *, newest: bool = False) -> None:
        """Fetch the parameters with which this group goes on: `next` gives them, in the order of `order`."""
        self.pull(clock, newest)
        self._arrived.clear()
        self._fetches = True
        self._asking.begin(self._chunks)

    def next(self, chunk_id: int) -> Tensor:
        """A chunk's values, (extent,), once they are here."""
        shards = self._connection.shards
        shard = self._connection.shard_of[chunk_id]
        shards.wait(lambda: chunk_id in self._arrived, lambda: [shard], self._what)
        self._staged[chunk_id] = None
        self._asking.has_come(chunk_id)
        return self._arrived.pop(chunk_id)

    def order(self) -> list[int]:
        """The chunks, as they are asked for: alike on all members."""
        return self._asking.order(self._chunks)

    def become(self, chunk_id: int, values: Tensor) -> None:
        """Let a chunk's parameters have these values; `adopt` says that all have come."""
        if not self._begun:
            self.check_unchanged()
            self._held().begin_values()
            self._begun = True
        self._put(self._chunks[chunk_id], values)

    def adopt(self, values: Mapping[int, Tensor]) -> None:
        assert not values
        self._fetches = False
        self._arrived.clear()
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
        self.clock, self.staleness = message.clock, message.staleness
        self._arrived[message.chunk] = values_of(payload, bound, shard).clone()


class TieredRing(RingReducer):
    """Sums gradients over a ring from tiers and into tiers, a chunk at a time."""

    _held: Holder
    _nonfinite: list[str]
    _waits: bool
    _present_of: dict[int, list[bool]]  # of the sums, by chunk, where they count
    _sums_count = False  # the sums are the group's, and this member's own gradients stay as they are

    def _lay(self, chunks: Sequence[BoundChunk], _message_bytes: int) -> list[Message]:
        return [StagedMessage(bound, number) for number, bound in enumerate(chunks)]

    def _reduce(self, own: Contribution) -> tuple[Agreement, list[int]]:
        self._generation = self._ring.generation
        self._mean_of_one(own)
        held, scale = self._held(), own.weight / self._reference
        channel = self._ring.agreement  # in host memory, where the tiers are, whatever the device
        self._nonfinite = []
        for message in self._order:
            bound = message.chunks[0].bound
            flat = self._own_of(bound, scale)
            work = channel.sum(flat)
            points.reach("ring.sent", self.steps)
            channel.wait(work, f"{message} in iteration {self.steps}")
            self.bytes_sent += channel.sends(flat.numel() * flat.element_size())
            held.put_sums(bound.chunk, bound.parameters, flat)
        points.reach("ring.all_sent", self.steps)
        agreed = self._agree(own)
        points.reach("ring.agreed", self.steps)
        return agreed, []

    def _own_of(self, bound: BoundChunk, scale: float) -> Tensor:
        """This member's gradient of a chunk, scaled, (extent,)."""
        if scale == 0:  # zero times NaN would be NaN
            return torch.zeros(bound.chunk.extent, dtype=bound.dtype)
        held = self._held()
        flat = gradient_from(held, bound, held.present(bound.parameters))
        if not bool(torch.isfinite(flat).all()):
            for name, slot in zip(bound.names, bound.chunk.slots, strict=True):
                if not bool(torch.isfinite(flat[slot.offset : slot.offset + slot.numel]).all()):
                    self._nonfinite.append(name)
        return flat.mul_(scale) if scale != 1.0 else flat

    def _publish(self, agreed: Agreement) -> None:
        held, nothing = self._held(), agreed.weight <= 0
        factor = 1.0 if nothing else self._reference / agreed.weight
        self._sums_count = self._waits
        for message, here in zip(self._order, agreed.present, strict=True):
            bound = message.chunks[0].bound
            present = [not nothing and each for each in here]
            flat = held.read_sums(bound.chunk, bound.parameters)
            if factor != 1.0:
                flat.mul_(factor)
            if self._sums_count:
                held.put_sums(bound.chunk, bound.parameters, flat)
                self._present_of[bound.chunk.id] = present
            else:
                held.put_gradients(bound.chunk, bound.parameters, present, flat)
        if not nothing:
            self._reference = agreed.weight

    def own_nonfinite(self) -> list[str]:
        return list(self._nonfinite)


class TieredGroup(GroupExchange, TieredRing):
    """ssp and asp, with a leader that is drawn anew for each exchange."""

    parameters: GroupParameters

    def __init__(self, chunks: Sequence[BoundChunk], *arguments: Any, held: Holder, **more: Any) -> None:
        self._held, self._nonfinite, self._waits = held, [], False
        self._present_of = {}
        super().__init__(chunks, *arguments, **more)
        self._agreement_rides, self.held_back = False, 0

    def _new_parameters(self, connection: Connection) -> NewParameters:
        return GroupParameters(self._chunks, connection, self._held)

    @torch.no_grad()
    def step(self, accepted: bool, hyperparameters: Hyperparameters) -> None:
        with Stepping(self.parameters):
            super().step(accepted, hyperparameters)

    def join(self, contributor: int, what: str) -> None:
        self.uplink.contributor = contributor

        def act() -> Answer:
            role = self.uplink.role(0)
            self._hand_on(role, 0, what)
            word = None
            if role.leads:
                word = msgspec.msgpack.encode(Answer(self.parameters.clock, 0.0, Committed(iteration=0)))
            return self._told_by(role, word, what)

        answer = self._ring.round(what, act)
        self.parameters.adopt({})
        self._joined(answer.clock)

    @torch.no_grad()
    def refresh(self) -> None:
        what = "the newest parameters"
        self._ring.round(
            what, lambda: self._hand_on(self.uplink.role(self.steps), self.steps, what, newest=True)
        )
        self.parameters.adopt({})

    def _hand_on(self, role: Role, clock: int, what: str, *, newest: bool = False) -> None:
        """The leader's new parameters, to all, chunk by chunk. A collective of the ring."""
        parameters, channel = self.parameters, self._ring.agreement
        bounds = {bound.chunk.id: bound for bound in self._chunks}
        if role.leads:
            parameters.ask(clock, newest=newest)
        for chunk_id in parameters.order():
            bound = bounds[chunk_id]
            if role.leads:
                values = parameters.next(chunk_id)
            else:
                values = torch.empty(bound.chunk.extent, dtype=bound.dtype)
            if self._ring.world > 1:
                channel.wait(channel.broadcast(values.view(torch.uint8), role.leader), what)
            parameters.become(chunk_id, values)

    # The group's contribution

    def _outgoing(self, accepted: bool, hyperparameters: Hyperparameters) -> Outgoing:
        own = self._of_group if accepted else Contribution(0.0, self._of_group.samples)
        held, present = self._held(), {}
        for bound in self._chunks:
            here = self._present_of[bound.chunk.id] if self._sums_count else held.present(bound.parameters)
            present[bound.chunk.id] = [each and own.weight > 0 for each in here]
        used, self._used = self._used, []
        return Outgoing(self.steps, {}, present, own, used, list(self._able), hyperparameters)

    def _begin(self, outgoing: Outgoing, role: Role, _along: Mapping[int, Tensor] | None) -> None:
        if not role.talks or outgoing.sent_in == self._ring.generation:
            return
        self._counted, outgoing.sent_in = None, self._ring.generation
        shards, shard_of = self.connection.shards, self.connection.shard_of
        shards.answered(CONTRIBUTION)  # of a ring before this one
        for bound in self._chunks:
            present = outgoing.present[bound.chunk.id]
            message = Push(
                incarnation=shards.incarnation,
                iteration=outgoing.iteration,
                chunk=bound.chunk.id,
                chunks_in_all=self._held_by[shard_of[bound.chunk.id]],
                present=bytes(present),
            )
            payload = Made(partial(self._mean_of, bound, present, self._sums_count))
            shards.send(shard_of[bound.chunk.id], message, payload, until=CONTRIBUTION)
            self.uplink.bytes_sent += bound.chunk.extent * bound.dtype.itemsize
        points.reach("group.pushed", outgoing.iteration)
        self._send_commit(outgoing)
        points.reach("group.committed", outgoing.iteration)

    def _mean_of(self, bound: BoundChunk, present: Sequence[bool], sums: bool) -> memoryview:
        """The group's mean gradient of a chunk, as it leaves."""
        held = self._held()
        if not any(present):
            return bytes_of(torch.zeros(bound.chunk.extent, dtype=bound.dtype))
        if sums:
            return bytes_of(held.read_sums(bound.chunk, bound.parameters))
        return bytes_of(gradient_from(held, bound, present))

    def _exchange(self, outgoing: Outgoing, what: str) -> tuple[Answer, dict[int, Tensor]]:
        role = self._role(outgoing)
        self._begin(outgoing, role, None)
        counted = self._wait_counted(outgoing.iteration) if role.leads else None
        self._hand_on(role, outgoing.iteration + 1, what)
        word = None
        if counted is not None:
            word = msgspec.msgpack.encode(Answer(self.parameters.clock, self.parameters.staleness, counted))
        points.reach("group.answered", outgoing.iteration)
        return self._told_by(role, word, what), {}
