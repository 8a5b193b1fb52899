"""The way of a gradient inside a group: from backward, through the ring, to `p.grad`.

As autograd hands over a gradient, it is scaled into its chunk's **published** buffer. A message (one chunk,
or several small ones) whose last gradient has come is reduced there, while backward goes on. When backward
ends, the workers agree on the iteration; once all of it is whole, and only then, `p.grad` shows the published
mean. A worker's own gradients, in the tensors that autograd made, are kept until the step, so that an
iteration can be reduced again (a chunk whose gradient changed after it had left; a ring that lost a member).
Source: docs/architecture.md, "The gradient".
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import Any, NoReturn, Protocol, TypeAlias

import msgspec
import torch
from torch import Tensor

from atoll.core import points
from atoll.core.epochs import ComparedEpochs
from atoll.core.errors import MismatchError, UserError
from atoll.core.scriptline import waiting_line
from atoll.core.stands import (
    UNKNOWN,
    Epoch,
    Stand,
    decode_stand,
    describe_mismatch,
    encode_stand,
    gradients,
    gradients_in,
)
from atoll.core.weighing import GUESSED, KNOWN, Certainty, beyond, counted, counts_unlike, excess_line
from atoll.core.weighing import SAID as SAID_OF_WEIGHT
from atoll.tensors.binding import BoundChunk
from atoll.tensors.settings import Settings
from atoll.tensors.torch_compat import version_of
from atoll.train.checkpoint.buffers import ModelBuffers
from atoll.train.gradients.alike import SAID, Treatments, Word, are_alike, refuse_unlike
from atoll.train.gradients.buckets import Buckets
from atoll.train.gradients.messages import HEAD, ChunkGradients, Message, lay_messages
from atoll.train.gradients.reducer import Calls, Reducer
from atoll.train.gradients.samples import Contribution
from atoll.train.gradients.sums import Gradients, GroupSum, MakeSum, Owner
from atoll.train.group.channel import BrokenRingError
from atoll.train.group.inner import AnyRing
from atoll.train.group.ringbytes import gather_bytes

# Bounds on (sum / mean) of float16 gradients: beyond them the sum may overflow or lose small values.
_HALF_RANGE = (1 / 16, 2.0)
_STEPS = 4096  # steps are compared by their remainder, which a float32 holds for any number of workers


@dataclass
class Boundary:
    """Between two iterations of a session's models, which are numbered as they were prepared: newcomers enter
    here, and their script's loop begins here too. Model 0's steps count the iterations, but a loop may begin
    with another one, and may step that more often. So it is where the model with which the loop began is
    reduced for the first time after model 0 has stepped."""

    begins_with: int = -1  # the model; -1: nothing was reduced yet
    awaited: bool = False  # all know of newcomers
    reached: bool = False  # and model 0 has stepped since


class Carrier(Protocol):
    """What a ring sums of one model: where the gradients lie, and how they travel."""

    chunks: dict[int, ChunkGradients]  # those in the device's memory, by id

    @property
    def gradients(self) -> Gradients:
        """The member's own, from which sums are made again."""

    @property
    def bounds(self) -> list[BoundChunk]:
        """The chunks, in the order in which members say which of their gradients are there."""

    @property
    def ids(self) -> list[int]:
        """The messages, in the order in which they leave."""

    def dirty(self) -> list[float]:
        """For each message 1 where a gradient changed after it had left; empty: none can."""

    def anew(self) -> None:
        """The ring in which messages had left is no more; it may still write into their memory."""

    def carry(self, scale: float, said: Sequence[float]) -> list[float] | None:
        """Sum what has not been summed yet, of gradients times `scale`. The sums of what members have `said`,
        where those rode along; else None."""

    def carry_again(self, scale: float, dirty: Sequence[bool] | None) -> None:
        """Sum again the messages that are `dirty`; None: all of them, by another scale."""

    def publish(self, factor: float, present: Sequence[Sequence[bool]], *, apart: bool) -> None:
        """Multiply the sums by `factor`, and let `p.grad` show them where any member has a gradient. `apart`:
        this member's own gradients stay where they are."""

    def measured(self) -> list[int]:
        """The ids of messages as they filled in this backward."""

    def leave_in(self, order: Sequence[int]) -> None:
        """Messages leave in this order of their ids from now on; empty: in that in which they were laid."""

    def flat_gradients(self, bound: BoundChunk) -> tuple[Tensor, tuple[bool, ...]]:
        """A chunk's gradients as the script has left them, (extent,), and which slots have one."""


# Makes a Carrier, given the sum, its owner, the chunks, and the nodes that accumulate their gradients.
MakeCarrier: TypeAlias = Callable[["RingSum", Owner, Sequence[BoundChunk], Sequence[Any]], Carrier]


class RingSum(GroupSum):
    """Sums one model's trainable chunks over a ring.

    Each member steps its own copy of the model where `steps_here`. With `fills_up` an iteration in which
    nobody has samples is none to complain of: it weighs nothing.
    """

    def __init__(
        self,
        owner: Owner,
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
        """Sum over `ring` for model `number` of the session; all models share a `boundary`.

        Args:
            carry: makes what carries the gradients.
            settings: returns the optimizer's hyperparameters, which must be equal on all members.
            within: called with the iteration in each round once its sums are there, for collectives of the
                caller's own.
        """
        super().__init__(owner, chunks)
        self.ring, self._calls, self._number = ring, calls, number
        self.buffers = calls.buffers
        self._boundary = boundary or Boundary()
        self._fills_up, self._steps_here, self._within = fills_up, steps_here, within
        self._order_is_measured = False
        self._generation = ring.generation  # of the ring that this iteration's messages leave in
        self._reference = 1.0  # the last iteration's sum of weights, or number of workers if they count alike
        # The scale of this iteration's gradients, until the agreement gives the right one:
        self._scaled_alike, self._scaled_by = False, 1.0
        self._has_half = any(chunk.dtype == torch.float16 for chunk in chunks)
        self._counts_told = False  # the line on counts that differ; alike on all members
        self._treatments = Treatments(settings)
        self._epochs = ComparedEpochs(calls.epochs_mixed)
        self._means_seen: list[Tensor | None] = []  # as the script was shown them
        self._versions_seen: list[int] = []
        self.carrier = carry(self, owner, chunks, self._accumulators)
        self.gradients = self.carrier.gradients

    @property
    def shows_mean(self) -> bool:  # type: ignore[override]
        return self._steps_here

    @property
    def steps(self) -> int:
        """The iteration under way."""
        return self._owner.steps

    def scale(self) -> float:
        """What this worker's gradients are multiplied by before the sum; fixed when the first one comes."""
        return self._scale_of(self._owner.contribute())

    def leaving(self) -> None:
        """Gradients are about to leave."""
        self._calls.leaving()

    def count_sent(self, sent: int) -> None:
        """So many bytes leave this worker."""
        self._owner.bytes_sent += sent

    def _scale_of(self, own: Contribution) -> float:
        return (own.counts_alike if self._scaled_alike else own.weight) / self._scaled_by

    # -- an iteration --------------------------------------------------------------------------------------

    def opens(self) -> None:
        if self._owner.sends_early and not self.admit():
            self.ring.meet()  # before the first message leaves: all members' channels carry the same

    def weighs(self, own: Contribution) -> None:
        self._generation = self.ring.generation
        self._scale_as_before(own)

    def admit(self) -> bool:
        boundary = self._boundary
        if not boundary.reached or boundary.begins_with != self._number:
            return False
        boundary.reached = False
        self.ring.admit()
        return True

    def _scale_as_before(self, own: Contribution) -> None:
        """Scale gradients by the factor that was right in the last iteration."""
        alike = self._owner.count_alike
        if self.ring.world == 1 and own.weight > 0:  # a mean over one is what it was, to the bit
            self._reference = own.counts_alike if alike else own.weight
        self._scaled_alike, self._scaled_by = alike, self._reference

    def reduce(self, own: Contribution) -> Contribution:
        """Send what has not left, wait for all of it, agree, and publish."""
        if self._boundary.begins_with < 0:
            self._boundary.begins_with = self._number
        with torch.no_grad():
            agreed, order = self._round(own, self.where)
            if self._number == 0:
                self._boundary.awaited = agreed.newcomers
            self._treatments.latest = None  # all know
            self._take(agreed, order)
        self._look()
        points.reach("ring.published", self.steps)
        return agreed.contribution

    def assist(self, wanted: Callable[[], bool]) -> Contribution | None:
        """Take part in an iteration of the others with nothing, while this member's own gradients stay as
        they are; the group's contribution. None where it is not `wanted` once its round is over."""
        own = Contribution(0.0, 0.0)
        self.weighs(own)
        agreed, order = self._round(own)
        if not wanted():
            return None
        self._take(agreed, order, apart=True)
        return agreed.contribution

    def made_apart(self) -> None:
        """What the others made of the mean of that iteration is theirs."""
        self._treatments.latest = None

    def begin_in_group(self) -> None:
        """This member is in another group: what was measured alone is not what the others have measured."""
        self.carrier.leave_in([])
        self._order_is_measured, self._reference = False, 1.0
        self._owner.count_alike = self._counts_told = False
        self._treatments.latest = None

    def _round(
        self, own: Contribution, where: Callable[[], Stand | None] | None = None
    ) -> tuple[Agreement, list[int]]:
        return self.ring.round(f"iteration {self.steps}", partial(self._reduce, own), self.steps, where)

    def _take(self, agreed: Agreement, order: Sequence[int], *, apart: bool = False) -> None:
        self._publish(agreed, apart)
        self._take_over(agreed)
        self._leave_in(order)

    def where(self) -> Stand:
        """Return this worker's place in its script while it reduces."""
        model = "" if self._owner.sends_early else f"model {self._number + 1}"  # of several
        return gradients(self.steps, waiting_line(), model=model)

    def _reduce(self, own: Contribution) -> tuple[Agreement, list[int]]:
        """All messages, the agreement, and, once, the order in which messages leave from now on: what makes
        an iteration whole. Called again in the next ring, it begins from this worker's own gradients."""
        if self._generation != self.ring.generation:
            self.carrier.anew()
            self.weighs(own)
        said = self._said(own)
        agreed = self._agree(own, self.carrier.carry(self._scale_of(own), said))
        refuse_beyond(self.ring, own, agreed.certainty, self.steps)
        while agreed.dirty or self._is_scaled_wrongly(agreed):
            dirty = None if self._is_scaled_wrongly(agreed) else agreed.dirty_messages
            if dirty is None:
                self._scale_as(agreed)
            self.carrier.carry_again(self._scale_of(own), dirty)
            agreed = self._agree(own)
        self._tell_beside(own, agreed)
        points.reach("ring.agreed", self.steps)
        order = self._measured_order()
        self._within(self.steps)
        return agreed, order

    def _is_scaled_wrongly(self, agreed: Agreement) -> bool:
        """True where gradients were scaled for another mean than the right one, or where float16 may not hold
        their sum.

        The latter happens in the first iteration, for example. A scale for another mean is right where both
        means are equal.
        """
        if self._scaled_alike == agreed.certainty.certain and not agreed.certainty.equal:
            return True
        part = agreed.workers_or_weight(self._scaled_alike) / self._scaled_by
        return self._has_half and part > 0 and not _HALF_RANGE[0] <= part <= _HALF_RANGE[1]

    def _scale_as(self, agreed: Agreement) -> None:
        self._scaled_alike, self._scaled_by = not agreed.certainty.certain, agreed.total

    def _tell_beside(self, own: Contribution, agreed: Agreement) -> None:
        agreed.beside = tell_beside(
            self.ring,
            own,
            agreed.certainty,
            self.buffers,
            agreed.buffers,
            steps=self.steps,
            tells=not self._counts_told,
        )

    def _take_over(self, agreed: Agreement) -> None:
        """Apply the data that came with the iteration besides gradients."""
        self._owner.count_alike = not agreed.certainty.certain
        told = take_beside(agreed.beside, self.buffers, self.steps, self._calls.counts_unlike)
        self._counts_told = self._counts_told or told

    def _publish(self, agreed: Agreement, apart: bool) -> None:
        """Let every `p.grad` show the mean, by the weights that turned out to be this iteration's."""
        if agreed.weight <= 0 and not self._fills_up and agreed.with_gradients:
            raise UserError(
                f"iteration {self.steps}: the workers' weights sum to {agreed.weight:g}; "
                "session.weight must be above 0 on a worker that has gradients"
            )
        if agreed.weight <= 0:
            self.carrier.publish(1.0, [[False] * len(row) for row in agreed.present], apart=apart)
            return
        # Where all weights are equal both means are the same, and gradients may be scaled for either:
        factor = self._scaled_by / agreed.workers_or_weight(self._scaled_alike)
        self.carrier.publish(factor, agreed.present, apart=apart)
        self._reference = agreed.total

    # -- what the script makes of the mean -----------------------------------------------------------------

    def before_step(self) -> None:
        self._treatments.steps()
        if self._means_seen and not self._treatments.edited:
            now = [each.grad for bound in self._chunks for each in bound.parameters]
            unchanged = all(map(is_, now, self._means_seen)) and _versions(now) == self._versions_seen
            self._treatments.edited = not unchanged

    def clipped(self, max_norm: float, norm_type: float) -> None:
        self._treatments.clipped(max_norm, norm_type)
        self._look()  # whether a coefficient of 1 was written is a matter of the device

    def _look(self) -> None:
        """See the means as they are, to notice what the script changes where members must do alike."""
        if self._steps_here:
            self._means_seen = [each.grad for bound in self._chunks for each in bound.parameters]
            self._versions_seen = _versions(self._means_seen)

    def confirm(self, what: str) -> None:
        ring = self.ring
        if not self._steps_here or ring.outside or ring.world == 1:
            return
        if not are_alike(ring.sum(self._treatments.said(), what)):
            ring.round(what, lambda: self._refuse_unlike(what))
        self._treatments.latest = None

    def _refuse_unlike(self, what: str, stand: Stand | None = None) -> str:
        return refuse_unlike_members(self.ring, Word(self._treatments.latest, stand), what)

    def stepped(self, step: int) -> None:
        self._treatments.stepped(step)
        self._means_seen = []
        if self._number == 0:
            self._boundary.reached, self._boundary.awaited = self._boundary.awaited, False
        points.reach("ring.stepped", step)

    # -- what members say of an iteration ------------------------------------------------------------------

    def _said(self, own: Contribution) -> list[float]:
        """What this worker says about this iteration; the workers' sum is an Agreement."""
        rows = [[p.grad is not None for p in bound.parameters] for bound in self.carrier.bounds]
        present = [here and own.weight > 0 for row in rows for here in row]
        awaited = self._number == 0 and self.ring.is_awaited
        has_gradient, epoch = any(any(row) for row in rows), self._epochs.compared(self._calls.epoch())
        head = head_of(own, self.steps, has_gradient, awaited, self._treatments, epoch)
        buffers = [] if self.buffers is None else self.buffers.said()
        return [*head, *self.carrier.dirty(), *map(float, present), *buffers]

    def _agree(self, own: Contribution, summed: list[float] | None = None) -> Agreement:
        """What all workers say about this iteration; that all have said it makes it whole. `summed` if it
        rode along with the last message; else it is summed now."""
        ring = self.ring
        if summed is None:
            vector = torch.tensor(self._said(own), dtype=torch.float64)
            work = ring.agreement.sum(vector)
            ring.agreement.wait(work, f"the agreement on iteration {self.steps}")
            self.count_sent(ring.agreement.sends(vector.numel() * 8))
            summed = vector.tolist()
        slots = [len(bound.parameters) for bound in self.carrier.bounds]
        agreement = Agreement(summed, len(self.carrier.dirty()), slots)
        off = agreement.steps / ring.world - self.steps % _STEPS
        if off:
            self._refuse_other_steps()
        if not agreement.alike:
            stand = gradients_in(self.steps, waiting_line(), self._calls.epoch())
            what = f"what the workers made of the mean before iteration {self.steps}"
            self._epochs.looked(self._refuse_unlike(what, stand))
        return agreement

    def _refuse_other_steps(self) -> NoReturn:
        """Raise the error for workers whose gradients are of different steps, with each worker's place."""
        ring, own = self.ring, encode_stand(self.where())
        said = gather_bytes(ring.agreement, own, "the places of all workers")
        stands = {ring.place.name_of(rank): decode_stand(raw) for rank, raw in enumerate(said)}
        raise MismatchError(describe_mismatch(stands))

    def _measured_order(self) -> list[int]:
        """Once worker 0 has seen chunks arrive: the ids of messages in its order of arrival, in which they
        leave from then on. Else none."""
        ids = self.carrier.ids
        if self._order_is_measured or not ids:
            return []
        arrived = self.carrier.measured()
        never = [each for each in ids if each not in arrived]
        order = torch.tensor([len(arrived), *arrived, *never], dtype=torch.int64)
        agreement = self.ring.agreement
        agreement.wait(agreement.broadcast(order), "worker 0's order of messages")
        count, *ids = order.tolist()
        return ids if count else []

    def _leave_in(self, order: Sequence[int]) -> None:
        """Messages leave in this order of their ids from now on; empty: as before."""
        if order:
            self._order_is_measured = True
            self.carrier.leave_in(order)

    # -- what a checkpoint has of it, and what a newcomer takes ---------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to scale its sums, to the bit, as this one would."""
        return {"reference": self._reference, "count_alike": self._owner.count_alike}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._reference = state.get("reference", 1.0)
        self._owner.count_alike = bool(state.get("count_alike", False))
        self._treatments.latest = None

    def member_state(self) -> dict[str, Any]:
        """The measured order of messages, whether the loop begins with this model, and whether counts were
        reported.
        """
        order = self.carrier.ids if self._order_is_measured else []
        begins = self._boundary.begins_with == self._number
        return {
            "order": order,
            "begins": begins,
            "counts_told": self._counts_told,
            "looks": self._epochs.looks,
        }

    def check_member_state(self, state: Mapping[str, Any]) -> None:
        if state["order"] and sorted(state["order"]) != sorted(self.carrier.ids):
            raise ValueError(f"messages leave in the order {state['order']!r}, which are not this model's")
        if type(state["counts_told"]) is not bool:
            raise ValueError(f"whether people were told of counts is {state['counts_told']!r}")
        if type(state["looks"]) is not int:
            raise ValueError(f"how often epochs are still compared is {state['looks']!r}")
        if type(state["begins"]) is not bool:
            raise ValueError(f"whether the loop begins with this model is {state['begins']!r}")

    def load_member_state(self, state: Mapping[str, Any]) -> None:
        self._leave_in(state["order"])
        self._counts_told, self._epochs.looks = state["counts_told"], state["looks"]
        if state["begins"]:
            self._boundary.begins_with = self._number


class RingBuckets(Buckets):
    """Gradients in messages of at least `least` bytes, as far as chunks have so many neighbours, which leave
    while backward goes on."""

    def __init__(
        self, ring_sum: RingSum, owner: Owner, chunks: Sequence[BoundChunk], nodes: Sequence[Any], least: int
    ) -> None:
        buffers = ring_sum.buffers
        super().__init__(owner, lay_messages(chunks, least, 0 if buffers is None else len(buffers)), nodes)
        self._sum, self._ring = ring_sum, ring_sum.ring
        self._scales_by: float | None = None  # in the backward under way, once its first gradient has come
        self._agreement_rides = _agreement_rides(self.order)
        self._held_back = int(self._agreement_rides)  # with what is said at the end of backward

    @property
    def gradients(self) -> Gradients:
        return self

    @property
    def bounds(self) -> list[BoundChunk]:
        return [chunk.bound for chunk in self.in_order]

    @property
    def ids(self) -> list[int]:
        return [message.id for message in self.order]

    def dirty(self) -> list[float]:
        return [float(message.dirty) for message in self.order]

    def measured(self) -> list[int]:
        return self._arrivals

    def leave_in(self, order: Sequence[int]) -> None:
        if not order:
            self.order.sort(key=lambda message: message.number)
            return
        by_id = {message.id: message for message in self.order}
        self.order = [by_id[each] for each in order]

    def anew(self) -> None:
        for message in self.order:
            message.move()
            message.dirty = False
        self._left = 0

    def carry(self, scale: float, said: Sequence[float]) -> list[float] | None:
        for message in self.rest:
            last = message is self.order[-1]
            message.sent = True
            self._send(message, scale, said if last and self._agreement_rides else ())
        points.reach("ring.all_sent", self._owner.steps)
        self._wait(self.order)
        return self.order[-1].read_tail(len(said)) if self._agreement_rides else None

    def carry_again(self, scale: float, dirty: Sequence[bool] | None) -> None:
        again = self.order
        if dirty is None:
            for message in again:
                message.take_anew()
        else:
            again = [message for message, wrong in zip(self.order, dirty, strict=True) if wrong]
            for message in again:
                message.again()
        for message in again:
            self._send(message, scale)
        self._wait(again)

    def publish(self, factor: float, present: Sequence[Sequence[bool]], *, apart: bool) -> None:
        del apart  # they are kept in the tensors that autograd made
        for message in self.order:
            if factor != 1.0:
                message.gradients.mul_(factor)
        for chunk, here in zip(self.in_order, present, strict=True):
            chunk.publish(here)

    def begin(self) -> None:
        super().begin()
        self._scales_by = None

    def drop_kept(self) -> None:
        super().drop_kept()
        self._scales_by = None

    def _scale(self) -> float:
        if self._scales_by is None:
            self._scales_by = self._sum.scale()
        return self._scales_by

    def _leave(self, message: Message) -> None:
        self._sum.leaving()
        message.sent = True
        self._send(message, self._sum.scale())

    def _send(self, message: Message, scale: float, said: Sequence[float] = ()) -> None:
        """Begin to reduce a message, with what this worker says for the agreement if it rides along."""
        for chunk in message.chunks:
            chunk.settle(scale)
        if said:
            message.write_tail(said)
        flat = message.memory[: message.gradients.numel() + len(said)]
        try:
            message.work = self._ring.data.sum(flat)
        except BrokenRingError:  # within backward nothing can be done about it; `carry` finds no work
            message.work = None
        self._owner.bytes_sent += self._ring.data.sends(flat.numel() * flat.element_size())
        points.reach("ring.sent", self._owner.steps)

    def _wait(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if message.work is None:
                raise BrokenRingError(f"{message} could not be sent")
            self._ring.data.wait(message.work, f"{message} in iteration {self._owner.steps}")
        if messages and messages[0].memory.device.type != "cpu":
            # NCCL's wait orders streams only; the agreement below speaks of finished chunks.
            torch.accelerator.current_stream(messages[0].memory.device).synchronize()


class RingReducer(Reducer):
    """Reduces one model's trainable chunks over a ring; each worker steps its own copy of the model."""

    sum: RingSum

    def __init__(
        self, chunks: Sequence[BoundChunk], ring: AnyRing, *, calls: Calls, message_bytes: int, **options: Any
    ) -> None:
        """Reduce in messages of at least `message_bytes`; `options` are those of RingSum."""
        super().__init__(chunks, calls, over_ring(ring, calls, message_bytes, **options))

    def flat_gradients(self, bound: BoundChunk) -> tuple[Tensor, tuple[bool, ...]]:
        """The memory of a chunk's means, (extent,), and which slots have one."""
        return self.sum.carrier.flat_gradients(bound)


def over_ring(ring: AnyRing, calls: Calls, message_bytes: int, **options: Any) -> MakeSum:
    """Return what sums gradients over a ring from the device's memory; `options` are those of RingSum."""
    return partial(
        RingSum, ring=ring, calls=calls, carry=partial(RingBuckets, least=message_bytes), **options
    )


def _versions(gradients: Sequence[Tensor | None]) -> list[int]:
    return [0 if each is None else version_of(each) for each in gradients]


def refuse_unlike_members(ring: AnyRing, own: Word, what: str) -> str:
    """Raise where members treated a mean differently, by each member's `own` word; see `refuse_unlike`.

    A collective.
    """
    said = gather_bytes(ring.agreement, msgspec.msgpack.encode(own), what)
    names = [ring.place.name_of(rank) for rank in range(ring.world)]
    return refuse_unlike([msgspec.msgpack.decode(one, type=Word) for one in said], names)


@dataclass(frozen=True)
class Beside:
    """Optional data that comes with an iteration.

    `counted` has each worker's count of samples in words, by name, where counts differ and are not certain.
    `buffers` has the indices of buffers to take over, and their bytes.
    """

    counted: dict[int, str]
    buffers: tuple[list[int], Tensor] | None = None


def tell_beside(
    ring: AnyRing,
    own: Contribution,
    certainty: Certainty,
    buffers: ModelBuffers | None,
    summed: Sequence[float],
    *,
    steps: int,
    tells: bool,
) -> Beside:
    """Exchange data that has no room in an agreement.

    The buffers are those of the first worker with a batch. A collective: all members decide alike which data
    it carries.

    Args:
        ring: the ring of members.
        own: this worker's contribution.
        certainty: how certain the members' weights are.
        buffers: the model's buffers, or None.
        summed: the summed `said` values of the members' buffers.
        steps: the number of the iteration.
        tells: True where a warning is to say what was counted.
    """
    channel = ring.agreement
    words: dict[int, str] = {}
    if tells and not certainty.certain and not certainty.equal:
        word = counted(own.weight, own.basis) if own.weight > 0 else ""
        said = gather_bytes(channel, word.encode(), f"what the workers counted in iteration {steps}")
        words = {ring.place.name_of(rank): each.decode() for rank, each in enumerate(said) if each}
    changed = ModelBuffers.to_take(summed)
    if buffers is None or not changed or ring.world == 1:
        return Beside(words)
    root = 0
    if 0 < certainty.workers < ring.world:
        having = torch.zeros(ring.world)
        having[ring.rank] = float(own.weight > 0)
        channel.wait(channel.sum(having), f"who has a batch in iteration {steps}")
        root = having.gt(0).tolist().index(True)
    packed = buffers.packed(changed)
    channel.wait(channel.broadcast(packed, root), f"the buffers of worker {ring.place.name_of(root)}")
    return Beside(words, (changed, packed))


def refuse_beyond(ring: AnyRing, own: Contribution, certainty: Certainty, steps: int) -> None:
    """Raise UserError, on every worker, where a worker's weight is far beyond the others'.

    A collective where the sums of weights give reason to look at each.
    """
    if ring.world == 1 or not certainty.may_be_beyond:
        return
    mine = struct.pack("<3d", own.weight, own.samples, own.alike)
    said = gather_bytes(ring.agreement, mine, f"the workers' weights in iteration {steps}")
    weighed = {
        ring.place.name_of(rank): Contribution(weight, samples, KNOWN, alike)
        for rank, (weight, samples, alike) in enumerate(struct.unpack("<3d", each) for each in said)
    }
    for worker, excess in beyond(weighed).items():
        raise UserError(excess_line(worker, steps, excess))


def take_beside(
    beside: Beside, buffers: ModelBuffers | None, steps: int, counts_unlike_told: Callable[[str], None]
) -> bool:
    """Apply the data of `tell_beside`; returns whether a warning on counts was given."""
    if beside.counted:
        counts_unlike_told(counts_unlike(f"iteration {steps}", beside.counted))
    if buffers is not None:
        if beside.buffers is not None:
            buffers.take(*beside.buffers)
        buffers.settle()
    return bool(beside.counted)


def head_of(
    own: Contribution,
    steps: int,
    has_gradient: bool,
    awaited: bool,
    treatments: Treatments,
    epoch: Epoch = UNKNOWN,
) -> list[float]:
    """Encode the first HEAD values of a worker's part in an agreement.

    They are the contribution, the number of steps, whether the worker has gradients, whether newcomers wait,
    the treatment of the last mean, and the `epoch` of the batch.
    """
    head = [own.weight, own.samples, float(steps % _STEPS), float(has_gradient), float(awaited)]
    head += own.said() + treatments.said(epoch)
    assert len(head) == HEAD
    return head


class Agreement:
    """The workers' sums for one iteration.

    The sums are: weight, samples, steps, workers with gradients, workers that know of newcomers, certainty of
    weights, treatments of the last mean, dirty messages, presence of each gradient by chunk (of `slots`
    parameters each), and changed buffers.
    """

    def __init__(self, summed: list[float], messages: int, slots: list[int]) -> None:
        self.weight, self.samples, self.steps, self.with_gradients, newcomers = summed[:5]
        self.certainty = Certainty(summed[5 : 5 + SAID_OF_WEIGHT])
        self.alike = are_alike(summed[HEAD - SAID : HEAD])
        self.beside = Beside({})
        self.newcomers = newcomers > 0
        self.dirty_messages = [count > 0 for count in summed[HEAD : HEAD + messages]]
        self.dirty = any(self.dirty_messages)
        self.present: list[list[bool]] = []
        start = HEAD + messages
        for count in slots:
            self.present.append([value > 0 for value in summed[start : start + count]])
            start += count
        self.buffers = summed[start:]

    @property
    def total(self) -> float:
        """The divisor of the mean: the sum of weights, or the number of workers where they count alike."""
        return self.workers_or_weight(not self.certainty.certain)

    def workers_or_weight(self, alike: bool) -> float:
        return self.certainty.workers if alike else self.weight

    @property
    def contribution(self) -> Contribution:
        """The joint contribution of all workers of the ring."""
        basis = KNOWN if self.certainty.certain else GUESSED
        return Contribution(self.weight, self.samples, basis, self.certainty.workers)


def _agreement_rides(messages: Sequence[Message]) -> bool:
    """Whether the agreement may travel in the last message: on the CPU, in a dtype that holds its numbers,
    where no gradient has a finer one."""
    if not messages or messages[0].memory.device.type != "cpu":
        return False
    return {m.memory.dtype for m in messages} in ({torch.float32}, {torch.float64})
