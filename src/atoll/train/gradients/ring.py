"""The way of a gradient inside a group: from backward, through the ring, to `p.grad`.

As autograd hands over a gradient, it is scaled into its chunk's **published** buffer. A message (one chunk,
or several small ones) is reduced there when its last gradient has come, while backward goes on. When backward
ends, the workers agree on the iteration. Once all of it is whole, and only then, `p.grad` shows the published
mean. A worker's own gradients, in the tensors that autograd made, are kept until the step, so that an
iteration can be reduced again: after a gradient changed when its chunk had left, or after the ring lost a
member. Source: docs/architecture.md, "The gradient".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from atoll.core import points
from atoll.core.errors import UserError
from atoll.core.stands import Stand
from atoll.tensors.binding import BoundChunk
from atoll.tensors.settings import Settings
from atoll.tensors.sparse import LEAST
from atoll.train.gradients.agreement import Agreement, Ballot
from atoll.train.gradients.alike import SAID, Treatments, are_alike
from atoll.train.gradients.buckets import Buckets
from atoll.train.gradients.copies import Copies
from atoll.train.gradients.messages import Bucket, BucketChunk, Rows, Tail, lay_messages
from atoll.train.gradients.reducer import Calls, Reducer
from atoll.train.gradients.samples import ContributionWeight
from atoll.train.gradients.scaling import Scaling
from atoll.train.gradients.sums import GroupSum, MakeSum, OwnGradients, SummedReducer
from atoll.train.group.channel import BrokenRingError
from atoll.train.group.inner import AnyRing


@dataclass
class Boundary:
    """The point between two iterations of a session's models. Newcomers enter here.

    Models are numbered in the order in which they were prepared. Model 0's steps count the iterations. But
    the script's loop may begin with another model, and may step that model more often. So the boundary is the
    first reduction of the model with which the loop began, after model 0 has stepped.

    Attributes:
        begins_with: the model with which the loop began; -1 if nothing was reduced yet.
        awaited: True if all members know of newcomers.
        reached: True if, in addition, model 0 has stepped since.
    """

    begins_with: int = -1
    awaited: bool = False
    reached: bool = False


class Carrier(Protocol):
    """The gradients of one model on their way through a ring, for one place in which gradients lie.

    Attributes:
        chunks: the chunks whose gradients lie in the device's memory, by id.
        by_rows: the ids of messages that wait until the workers know which rows their sparse gradients have.
    """

    chunks: dict[int, BucketChunk]
    by_rows: list[int]

    @property
    def gradients(self) -> OwnGradients:
        """The member's own gradients, from which sums are made again."""

    @property
    def bounds(self) -> list[BoundChunk]:
        """The chunks, in the order in which members report which of their gradients are present."""

    @property
    def ids(self) -> list[int]:
        """The ids of the messages, in the order in which they leave."""

    def said(self) -> list[float]:
        """Return this member's report on each message (`Bucket.says`). Empty: there is nothing to report."""

    def carry_rows(self, own: ContributionWeight, scale: float, agreed: Agreement, ballot: Ballot) -> None:
        """Find out which rows sparse gradients have, if the members' reports say that there are some, and sum
        the gradients that have waited for that, each multiplied by `scale`. A collective."""

    def anew(self) -> None:
        """Begin the iteration again in another ring. The former ring may still write into the memory of
        messages that had left."""

    def carry(self, scale: float, said: list[float]) -> list[float] | None:
        """Sum the gradients that have not been summed yet, but for those that wait for their rows. Each is
        multiplied by `scale`.

        `said` is this member's report. Returns the sums of the members' reports if these travelled with the
        gradients, else None.
        """

    def carry_again(self, scale: float, dirty: Sequence[bool] | None) -> None:
        """Sum again the messages that are `dirty`; None: all that were summed, because `scale` has
        changed."""

    def publish(self, factor: float, present: Sequence[Sequence[bool]], rows: Rows, *, apart: bool) -> None:
        """Multiply the sums by `factor`, and let `p.grad` show them if any member has a gradient there.

        Args:
            factor: the factor that makes the sums a mean.
            present: for each chunk and each of its slots, True if any member has a gradient.
            rows: of the gradients that are shown as sparse ones.
            apart: True to leave this member's own gradients where they are.
        """

    def measured(self) -> list[int]:
        """Return the ids of messages in the order in which they became complete in this backward."""

    def leave_in(self, order: Sequence[int]) -> None:
        """Let messages leave in this order of their ids from now on; empty: in the order in which they were
        laid out."""

    def take_by_rows(self, ids: Sequence[int]) -> None:
        """Take another member's `by_rows`."""

    def flat_gradients(self, bound: BoundChunk) -> tuple[Tensor, tuple[bool, ...]] | None:
        """Return a chunk's gradients as the script has left them, (extent,), and for each slot whether it has
        one; None if one is sparse."""


# Makes a Carrier, given the sum, its owner, the chunks, and the nodes that accumulate their gradients.
MakeCarrier: TypeAlias = Callable[["RingSum", SummedReducer, Sequence[BoundChunk], Sequence[Any]], Carrier]


class RingSum(GroupSum):
    """The sum of one model's trainable chunks over a ring."""

    def __init__(
        self,
        owner: SummedReducer,
        chunks: Sequence[BoundChunk],
        *,
        ring: AnyRing,
        calls: Calls,
        carry: MakeCarrier,
        number: int = 0,
        boundary: Boundary | None = None,
        settings: Callable[[], Settings] = list,
        fills_up: bool = False,
        steps_here: bool = True,
        within: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Sum over a ring.

        Args:
            owner: the reducer.
            chunks: the model's trainable chunks.
            ring: the ring.
            calls: the services that the sum asks for.
            carry: makes the carrier of the gradients.
            number: the model's number in the session.
            boundary: shared by all models of the session.
            settings: returns the optimizer's hyperparameters, which must be equal on all members.
            fills_up: True to accept an iteration in which no member has samples, as one that weighs nothing.
            steps_here: True if each member steps its own copy of the model.
            within: called with the iteration's number in each round once its sums are there, for collectives
                of the caller's own.
        """
        super().__init__(owner, chunks)
        self.ring, self._calls, self._number = ring, calls, number
        self.buffers = calls.buffers
        self._boundary = boundary or Boundary()
        self._fills_up, self._within = fills_up, within
        self.shows_mean = steps_here
        self._order_is_measured = False
        self._generation = ring.generation  # of the ring through which this iteration's messages go
        self.scaling = Scaling(owner, has_half=any(chunk.dtype == torch.float16 for chunk in chunks))
        # Edits of the mean are compared only if it is stepped here:
        self._treatments = Treatments(settings, self._parameters if steps_here else ())
        self._ballot = Ballot(ring, owner, calls, self._treatments)
        self._copies = Copies(self._chunks)
        self.carrier = carry(self, owner, chunks, self._accumulators)
        self.gradients = self.carrier.gradients

    @property
    def steps(self) -> int:
        """The number of the iteration under way."""
        return self._owner.steps

    def scale(self) -> float:
        """Return the factor for this worker's gradients before the sum. It is fixed when the first gradient
        comes."""
        return self.scaling.of(self._owner.contribute())

    def leaving(self) -> None:
        """Report that gradients are about to leave."""
        self._calls.leaving()

    # -- an iteration --------------------------------------------------------------------------------------

    def opens(self) -> None:
        if self._owner.sends_early and not self.admit():
            self.ring.meet()  # before the first message leaves, so that all members use one set of channels

    def weighs(self, own: ContributionWeight) -> None:
        self._generation = self.ring.generation
        self.scaling.as_before(own, self.ring.world)

    def admit(self) -> bool:
        boundary = self._boundary
        if not boundary.reached or boundary.begins_with != self._number:
            return False
        boundary.reached = False
        self.ring.admit()
        return True

    def reduce(self, own: ContributionWeight) -> ContributionWeight:
        """Send the messages that have not left, wait for all of them, agree, and publish."""
        if self._boundary.begins_with < 0:
            self._boundary.begins_with = self._number
        with torch.no_grad():
            agreed, order = self.ring.round(
                f"iteration {self.steps}", partial(self._reduce, own), self.steps, self.where
            )
            if self._number == 0:
                self._boundary.awaited = agreed.newcomers
            self._treatments.latest = None  # all members know it
            self._take(agreed, order)
        self._treatments.shown()
        points.reach("ring.published", self.steps)
        return agreed.contribution

    def assist(self, wanted: Callable[[], bool]) -> ContributionWeight | None:
        """Take part in an iteration of the others with weight 0, and leave this member's own gradients
        unchanged.

        Returns the group's contribution; None if the iteration is no longer `wanted()` once its round is
        over.
        """
        own = ContributionWeight(0.0, 0.0)
        self.weighs(own)
        agreed, order = self.ring.round(f"iteration {self.steps}", partial(self._reduce, own), self.steps)
        if not wanted():
            return None
        self._take(agreed, order, apart=True)
        return agreed.contribution

    def made_apart(self) -> None:
        """Forget the last treatment: the others stepped that iteration's mean, and only they compare their
        treatments."""
        self._treatments.latest = None

    def begin_in_group(self) -> None:
        """Forget the former group's measured order and scale: this member has entered another group."""
        self.carrier.leave_in([])
        self._order_is_measured, self.scaling.reference = False, 1.0
        self._ballot.begin_in_group()

    def _take(self, agreed: Agreement, order: Sequence[int], *, apart: bool = False) -> None:
        self._publish(agreed, apart)
        self._ballot.take_over(agreed)
        self._leave_in(order)

    def where(self) -> Stand:
        return self._ballot.where("" if self._owner.sends_early else f"model {self._number + 1}")

    def _reduce(self, own: ContributionWeight) -> tuple[Agreement, list[int]]:
        """Make an iteration whole: sum all messages, and agree.

        Returns the agreement and, once, the order in which messages leave from now on; else an empty list. In
        a new ring the call starts again from this worker's own gradients.
        """
        if self._generation != self.ring.generation:
            self.carrier.anew()
            self.weighs(own)
        scaling, said = self.scaling, self._said(own)
        agreed = self._read(own, self.carrier.carry(scaling.of(own), said) or self._ballot.sum(said))
        while agreed.dirty or scaling.is_wrong(agreed):
            dirty: list[bool] | None = agreed.dirty_messages
            if scaling.is_wrong(agreed):
                scaling.take(agreed)
                dirty = None
            self.carrier.carry_again(scaling.of(own), dirty)
            agreed = self._read(own, self._ballot.sum(self._said(own)))
        if self.shows_mean:
            self.carrier.carry_rows(own, scaling.of(own), agreed, self._ballot)
        self._ballot.tell_beside(own, agreed)
        points.reach("ring.agreed", self.steps)
        order = self._measured_order()
        self._within(self.steps)
        return agreed, order

    def _said(self, own: ContributionWeight) -> list[float]:
        awaited = self._number == 0 and self.ring.is_awaited
        return self._ballot.said(own, self.carrier.bounds, self.carrier.said(), awaited=awaited)

    def _read(self, own: ContributionWeight, summed: list[float]) -> Agreement:
        return self._ballot.agreed(own, summed, self.carrier.bounds, len(self.carrier.ids))

    def _publish(self, agreed: Agreement, apart: bool) -> None:
        """Let every `p.grad` show the mean, by the weights on which the members have agreed.

        Raises UserError if workers have gradients but weigh nothing.
        """
        if agreed.weight <= 0 and not self._fills_up and agreed.with_gradients:
            raise UserError(
                f"iteration {self.steps}: the workers' weights sum to {agreed.weight:g}; "
                "session.weight must be above 0 on a worker that has gradients"
            )
        if agreed.weight > 0:
            self.carrier.publish(self.scaling.after(agreed), agreed.present, agreed.rows, apart=apart)
        else:
            self.carrier.publish(1.0, [[False] * len(row) for row in agreed.present], {}, apart=apart)

    def _measured_order(self) -> list[int]:
        """Return, once, the ids of messages in the order in which they became complete on worker 0; else an
        empty list.

        Messages leave in this order from then on.
        """
        ids, waiting = self.carrier.ids, self.carrier.by_rows
        if self._order_is_measured or len(ids) - len(waiting) < 2:
            return []
        arrived = list(self.carrier.measured())
        for each in waiting if arrived else ():  # these keep their places among the others
            arrived.insert(ids.index(each), each)
        never = [each for each in ids if each not in arrived]
        order = torch.tensor([len(arrived), *arrived, *never], dtype=torch.int64)
        agreement = self.ring.agreement
        agreement.wait(agreement.broadcast(order), "worker 0's order of messages")
        count, *ids = order.tolist()
        return ids if count else []

    def _leave_in(self, order: Sequence[int]) -> None:
        """Let messages leave in this order of their ids from now on; empty: no change."""
        if order:
            self._order_is_measured = True
            self.carrier.leave_in(order)

    # -- the script's treatment of the mean ----------------------------------------------------------------

    def before_step(self, follows: bool = False) -> None:
        if follows:
            self._treatments.followed()
        else:
            self._treatments.steps()

    def steps_by(self, place: int, follows: bool) -> None:
        self._treatments.steps_by(place, follows)

    def clipped(self, max_norm: float, norm_type: float) -> None:
        self._treatments.clipped(max_norm, norm_type)

    def stepped(self, step: int) -> None:
        self._treatments.stepped(step)
        points.reach("ring.stepped", step)

    def all_stepped(self) -> None:
        if self._number == 0:  # before, a newcomer would lack gradients that wait for an optimizer
            self._boundary.reached, self._boundary.awaited = self._boundary.awaited, False

    def confirm(self, what: str) -> None:
        ring = self.ring
        if not self.shows_mean or ring.outside or ring.world == 1:
            return
        said = self._copies.said()
        summed = ring.sum([*self._treatments.said(), *said], what)
        if not are_alike(summed[:SAID]):
            ring.round(what, lambda: self._ballot.refuse_unlike(what))
        self._treatments.latest = None
        if line := self._copies.line(said, summed[SAID:], ring.world):
            self._calls.copies_differ(line)

    # -- state for checkpoints and for newcomers -----------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        by_rows = {"by_rows": self.carrier.by_rows} if self.carrier.by_rows else {}
        return {**self.scaling.state_dict(), **by_rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scaling.load_state_dict(state)
        if self.shows_mean:  # the ids may be those of another layout: then they are chosen anew
            said = state.get("by_rows")
            ids = said if isinstance(said, list) else []
            self.carrier.take_by_rows([each for each in self.carrier.ids if each in ids])
        self._treatments.latest = None

    def member_state(self) -> dict[str, Any]:
        """Return the measured order of messages, whether the loop begins with this model, and the state of
        `Ballot`."""
        order = self.carrier.ids if self._order_is_measured else []
        begins = self._boundary.begins_with == self._number
        return {"order": order, "begins": begins, **self._ballot.member_state()}

    def check_member_state(self, state: Mapping[str, Any]) -> None:
        if state["order"] and sorted(state["order"]) != sorted(self.carrier.ids):
            raise ValueError(f"messages leave in the order {state['order']!r}, which are not this model's")
        if type(state["begins"]) is not bool:
            raise ValueError(f"whether the loop begins with this model is {state['begins']!r}")
        self._ballot.check_member_state(state)

    def load_member_state(self, state: Mapping[str, Any]) -> None:
        self._leave_in(state["order"])
        self._ballot.load_member_state(state)
        if state["begins"]:
            self._boundary.begins_with = self._number


class RingBuckets(Buckets):
    """Gradients in messages that leave while backward goes on.

    A message has at least `least` bytes if its chunks have enough neighbours of their dtype.

    If all gradients of a message were sparse in an iteration, and the rows that any worker had were few, the
    message waits in the next one until the workers know its rows. Then they sum these rows alone. So do
    messages of gradients that layers announce as sparse, from the first iteration on. `order` has the other
    messages.
    """

    def __init__(
        self,
        ring_sum: RingSum,
        owner: SummedReducer,
        chunks: Sequence[BoundChunk],
        nodes: Sequence[Any],
        least: int,
    ) -> None:
        buffers = ring_sum.buffers
        super().__init__(owner, lay_messages(chunks, least, 0 if buffers is None else len(buffers)), nodes)
        self._sum, self._ring = ring_sum, ring_sum.ring
        self._may_ride = _may_ride(self.messages)
        self._scales_by: float | None = None  # this backward's scale, once its first gradient has come
        self._repeats = False  # True: the gradients of messages that have left come again
        self._waits_for_device = any(message.memory.device.type != "cpu" for message in self.order)
        self._is_measured = len(self.order) == 1
        # Where layers announce sparse gradients, few rows are expected at first.
        expected = [message.id for message in self.order if message.chunks[0].bound.is_sparse]
        self.take_by_rows(expected if ring_sum.shows_mean else [])

    @property
    def gradients(self) -> OwnGradients:
        return self

    def said(self) -> list[float]:
        return [message.says() for message in self.messages]

    def carry_rows(self, own: ContributionWeight, scale: float, agreed: Agreement, ballot: Ballot) -> None:
        if any(agreed.sparse_messages):
            ballot.share_rows(own, agreed, self.messages)
        if not self.by_rows:
            return
        by_chunk = self._by_chunk(agreed.present)
        waiting = [message for message in self.messages if message.waits_for_rows]
        for message in waiting:
            elements = _elements_by_rows(message, agreed.rows, by_chunk)
            if elements is None:
                self._send(message, scale)
            else:
                self._send_rows(message, agreed.rows, scale, elements)
        self._wait([message for message in waiting if message.summed is None or len(message.summed)])

    def _by_chunk(self, present: Sequence[Sequence[bool]]) -> dict[int, Sequence[bool]]:
        return {bound.chunk.id: there for bound, there in zip(self.bounds, present, strict=True)}

    def measured(self) -> list[int]:
        return self._arrivals

    def leave_in(self, order: Sequence[int]) -> None:
        if order:
            by_id = {message.id: message for message in self.messages}
            self.messages = [by_id[each] for each in order]
        else:
            self.messages.sort(key=lambda message: message.number)
        self._is_measured = bool(order) or len(self.messages) == 1
        self._arrange()

    def take_by_rows(self, ids: Sequence[int]) -> None:
        self.by_rows = list(ids)
        for message in self.messages:
            message.waits_for_rows = message.id in self.by_rows
        self._arrange()

    def _arrange(self) -> None:
        """Follow the present order of messages, and which of them wait for their rows.

        The gradients of the last message are taken all together, if it is known to stay the last one.
        """
        self.order = [message for message in self.messages if not message.waits_for_rows]
        self._agreement_rides = self._may_ride and bool(self.order)
        self._held_back = int(self._agreement_rides)  # the message that carries the agreement
        for message in self.messages:
            message.waits = message.waits_for_rows
        if self._is_measured and self._held_back:
            self.order[-1].waits = True
        self.ids = [message.id for message in self.messages]
        self._laid = self.in_order
        self.bounds = [chunk.bound for chunk in self._laid]
        self._tail: Tail | None = None

    def anew(self) -> None:
        for message in self.messages:
            message.move()
            message.dirty = False
        self._left, self._repeats = 0, False

    def repeat(self) -> None:
        for message in self.order[: self._left]:
            message.dirty = True  # so that all members reduce it again
        self._repeats = self._left > 0

    def carry(self, scale: float, said: list[float]) -> list[float] | None:
        tail = None
        if self._agreement_rides:
            self.order[-1].make_room(len(said))
            tail = self._tail
            if tail is None or tail.memory is not self.order[-1].memory:
                tail = self._tail = Tail(self.order[-1])
            tail.write(said)
        for message in self.messages if self.by_rows else ():
            for chunk in message.chunks if message.waits_for_rows else ():
                chunk.check_own()
        for message in self.rest:
            message.sent = True
            self._send(message, scale, len(said) if tail is not None and message is self.order[-1] else 0)
        points.reach("ring.all_sent", self._owner.steps)
        self._wait(self.order)
        return None if tail is None else tail.heard(len(said))

    def carry_again(self, scale: float, dirty: Sequence[bool] | None) -> None:
        again = self.order
        if dirty is not None:
            again = [message for message, wrong in zip(self.messages, dirty, strict=True) if wrong]
        for message in again:
            message.take_anew()
            self._send(message, scale)
        self._wait(again)

    def publish(self, factor: float, present: Sequence[Sequence[bool]], rows: Rows, *, apart: bool) -> None:
        del apart  # own gradients are kept in the tensors that autograd made
        self._repeats = False
        for message in self.messages:
            if factor != 1.0:
                (message.gradients if message.summed is None else message.summed).mul_(factor)
        for chunk, here in zip(self._laid, present, strict=True):
            chunk.publish(here, rows.get(chunk.bound.chunk.id, {}))
        if rows or self.by_rows:
            self._choose(rows, present)

    def _choose(self, rows: Rows, present: Sequence[Sequence[bool]]) -> None:
        """Let messages wait for their rows in the next iteration that had few in this one. A message without
        gradients goes on as before."""
        by_rows, by_chunk = [], self._by_chunk(present)
        for message in self.messages:
            elements = _elements_by_rows(message, rows, by_chunk)
            if elements or (elements == 0 and message.waits_for_rows):
                by_rows.append(message.id)
        if by_rows != self.by_rows:
            self.take_by_rows(by_rows)

    def begin(self) -> None:
        if self._repeats:
            self.begin_chunks()
        else:
            super().begin()
        self._scales_by = None

    def drop_kept(self) -> None:
        super().drop_kept()
        self._scales_by = None

    def _scale(self) -> float:
        if self._scales_by is None:
            self._scales_by = self._sum.scale()
        return self._scales_by

    def _leave(self, message: Bucket) -> None:
        self._sum.leaving()
        message.sent = True
        self._send(message, self._sum.scale())

    def _send(self, message: Bucket, scale: float, more: int = 0) -> None:
        """Begin to reduce a message, and `more` values of its spare room."""
        for chunk in message.chunks:
            chunk.settle(scale)
        self._sum_over_ring(message, message.flat(more))

    def _sum_over_ring(self, message: Bucket, flat: Tensor) -> None:
        try:
            message.work = self._ring.data.sum(flat)
        except BrokenRingError:  # backward cannot repair the ring: `_wait` raises
            message.work = None
        self._owner.bytes_sent += self._ring.data.sends(flat.numel() * flat.element_size())
        points.reach("ring.sent", self._owner.steps)

    def _send_rows(self, message: Bucket, rows: Rows, scale: float, elements: int) -> None:
        """Begin to reduce the rows of a message's sparse gradients, which have so many elements."""
        message.summed, end = message.memory.new_empty(elements), 0
        for chunk in message.chunks:
            end += chunk.pack(rows.get(chunk.bound.chunk.id, {}), message.summed[end:], scale)
        if elements:
            self._sum_over_ring(message, message.summed)

    def _wait(self, messages: Sequence[Bucket]) -> None:
        for message in messages:
            if message.work is None:
                raise BrokenRingError(f"{message} could not be sent")
            self._ring.data.wait(message.work, f"{message} in iteration {self._owner.steps}")
        if self._waits_for_device and messages:
            # NCCL's wait only orders streams, but the agreement is on chunks that are finished.
            torch.accelerator.current_stream(messages[0].memory.device).synchronize()


class RingReducer(Reducer):
    """Reduces one model's trainable chunks over a ring; each worker steps its own copy of the model."""

    sum: RingSum

    def __init__(
        self, chunks: Sequence[BoundChunk], ring: AnyRing, *, calls: Calls, message_bytes: int, **options: Any
    ) -> None:
        """Reduce in messages of at least `message_bytes`; `options` are those of RingSum."""
        super().__init__(chunks, calls, over_ring(ring, calls, message_bytes, **options))

    def flat_gradients(self, bound: BoundChunk) -> tuple[Tensor, tuple[bool, ...]] | None:
        """Return the memory of a chunk's means, (extent,), and for each slot whether it has one. None: one is
        sparse."""
        return self.sum.carrier.flat_gradients(bound)


def over_ring(ring: AnyRing, calls: Calls, message_bytes: int, **options: Any) -> MakeSum:
    """Return the maker of a sum over `ring` of gradients in the device's memory; `options` are those of
    RingSum."""
    return partial(
        RingSum, ring=ring, calls=calls, carry=partial(RingBuckets, least=message_bytes), **options
    )


def _elements_by_rows(message: Bucket, rows: Rows, present: Mapping[int, Sequence[bool]]) -> int | None:
    """Return how many elements of a message are summed by rows. None: all are.

    All are if a gradient is dense or complex, if the rows that any member has are more than half of all, or
    if the message is short.

    Args:
        present: for each chunk's id, True for each slot of which any member has a gradient.
    """
    elements = 0
    for chunk in message.chunks:
        id_, parameters = chunk.bound.chunk.id, chunk.bound.parameters
        of_chunk = rows.get(id_, {})
        for slot, there in enumerate(present[id_]):
            if there and (slot not in of_chunk or parameters[slot].is_complex()):
                return None
        elements += chunk.elements(of_chunk)
    short = message.gradients.nbytes < LEAST
    return None if short or 2 * elements > message.gradients.numel() else elements


def _may_ride(messages: Sequence[Bucket]) -> bool:
    """True if the agreement may travel in one of these messages.

    The messages must lie in the CPU's memory, and be all float32 or all float64, so that they hold the
    agreement's numbers exactly.
    """
    if not messages or messages[0].memory.device.type != "cpu":
        return False
    return {m.memory.dtype for m in messages} in ({torch.float32}, {torch.float64})
