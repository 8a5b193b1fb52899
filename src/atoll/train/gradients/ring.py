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
from typing import Any, NoReturn

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
from atoll.train.gradients.messages import HEAD, ChunkGradients, Message, lay_messages
from atoll.train.gradients.reducer import Calls, SendingReducer
from atoll.train.gradients.samples import Contribution
from atoll.train.group.channel import BrokenRingError
from atoll.train.group.ringbytes import gather_bytes
from atoll.train.group.rounds import Ring

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


class RingReducer(SendingReducer):
    """Reduces one model's trainable chunks over a ring."""

    fills_up = False  # an iteration in which nobody has samples is none to complain of: it weighs nothing
    steps_here = True  # each member steps its own copy of the model

    def __init__(
        self,
        chunks: Sequence[BoundChunk],
        ring: Ring,
        *,
        message_bytes: int,
        calls: Calls,
        number: int = 0,
        boundary: Boundary | None = None,
        settings: Callable[[], Settings] = list,
    ) -> None:
        """Reduce over `ring` for model `number` of the session; all models share a `boundary`.

        `settings()` returns the optimizer's hyperparameters, which must be equal on all members.
        """
        self._buffers = calls.buffers
        super().__init__(chunks, calls, message_bytes)
        self._ring, self._number = ring, number
        self._boundary = boundary or Boundary()
        self._order_is_measured = False
        self._generation = ring.generation  # of the ring that this iteration's messages leave in
        self._reference = 1.0  # the last iteration's sum of weights, or number of workers if they count alike
        # The scale of this iteration's gradients, until the agreement gives the right one:
        self._scaled_alike, self._scaled_by = False, 1.0
        self._has_half = any(chunk.dtype == torch.float16 for chunk in chunks)
        self._counts_told = False  # the line on counts that differ; alike on all members
        self._treatments = Treatments(settings)
        self._epochs = ComparedEpochs(calls.epochs_mixed)
        self._means_seen: list[tuple[Tensor | None, int]] = []  # the means, and at which versions
        self._agreement_rides = _agreement_rides(self._order)
        self.held_back = int(self._agreement_rides)  # with what is said at the end of backward

    @property
    def shows_mean(self) -> bool:
        return self.steps_here and self._reduced and not self.unsent

    def _lay(self, chunks: Sequence[BoundChunk], message_bytes: int) -> list[Message]:
        return lay_messages(chunks, message_bytes, 0 if self._buffers is None else len(self._buffers))

    def _scale(self) -> float:
        """What this worker's gradients are multiplied by before the sum; fixed when the first one comes."""
        return self._scale_of(self._contribute())

    def _scale_of(self, own: Contribution) -> float:
        return (own.counts_alike if self._scaled_alike else own.weight) / self._scaled_by

    def _contribute(self) -> Contribution:
        begins = self._own is None
        if begins and self.sends_early and not self.admit():
            self._ring.meet()  # before the first message leaves: all members' channels carry the same
        own = super()._contribute()
        if begins:
            self._generation = self._ring.generation
            self._scale_as_before(own)
        return own

    def admit(self) -> bool:
        boundary = self._boundary
        if not boundary.reached or boundary.begins_with != self._number:
            return False
        boundary.reached = False
        self._ring.admit()
        return True

    def _scale_as_before(self, own: Contribution) -> None:
        """Scale gradients by the factor that was right in the last iteration."""
        if self._ring.world == 1 and own.weight > 0:  # a mean over one is what it was, to the bit
            self._reference = own.counts_alike if self.count_alike else own.weight
        self._scaled_alike, self._scaled_by = self.count_alike, self._reference

    def _send(self, message: Message, said: Sequence[float] = ()) -> None:
        """Begin to reduce a message, with what this worker says for the agreement if it rides along."""
        scale = self._scale()
        for chunk in message.chunks:
            chunk.settle(scale)
        if said:
            message.write_tail(said)
        flat = message.memory[: message.gradients.numel() + len(said)]
        try:
            message.work = self._ring.data.sum(flat)
        except BrokenRingError:  # within backward nothing can be done about it; `reduce` finds no work
            message.work = None
        self.bytes_sent += self._ring.data.sends(flat.numel() * flat.element_size())
        points.reach("ring.sent", self.steps)

    @torch.no_grad()
    def reduce(self) -> None:
        """Send what has not left, wait for all of it, agree, and publish."""
        self.admit()
        own = self._contribute()
        if self._boundary.begins_with < 0:
            self._boundary.begins_with = self._number
        what = f"iteration {self.steps}"
        agreed, order = self._ring.round(what, lambda: self._reduce(own), self.steps, self._where)
        if self._number == 0:
            self._boundary.awaited = agreed.newcomers
        self._treatments.latest = None  # all know
        self._publish(agreed)
        self._take_over(agreed)
        self._look()
        self._leave_in(order)
        points.reach("ring.published", self.steps)
        self._ring_is_whole(own, agreed)

    def _where(self) -> Stand:
        """Return this worker's place in its script while it reduces."""
        model = "" if self.sends_early else f"model {self._number + 1}"  # of several
        return gradients(self.steps, waiting_line(), model=model)

    def _ring_is_whole(self, own: Contribution, agreed: Agreement) -> None:
        """`p.grad` shows the mean over the ring."""
        self._done(own, agreed.samples)

    def _reduce(self, own: Contribution) -> tuple[Agreement, list[int]]:
        """All messages, the agreement, and, once, the order in which messages leave from now on: what makes
        an iteration whole. Called again in the next ring, it begins from this worker's own gradients."""
        if self._generation != self._ring.generation:
            self._begin_anew(own)
        said = self._said(own)
        for message in self._order[self._next :]:
            last = message is self._order[-1]
            message.sent = True
            self._send(message, said if last and self._agreement_rides else ())
        points.reach("ring.all_sent", self.steps)
        self._wait(self._order)
        agreed = self._agree(own, self._order[-1].read_tail(len(said)) if self._agreement_rides else None)
        refuse_beyond(self._ring, own, agreed.certainty, self.steps)
        while agreed.dirty or self._is_scaled_wrongly(agreed):
            if self._is_scaled_wrongly(agreed):
                again = self._order
                self._scale_as(agreed)
                for message in again:
                    message.take_anew()
            else:
                again = [m for m, dirty in zip(self._order, agreed.dirty_messages, strict=True) if dirty]
                for message in again:
                    message.again()
            for message in again:
                self._send(message)
            self._wait(again)
            agreed = self._agree(own)
        self._tell_beside(own, agreed)
        points.reach("ring.agreed", self.steps)
        return agreed, self._measured_order()

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
            self._ring,
            own,
            agreed.certainty,
            self._buffers,
            agreed.buffers,
            steps=self.steps,
            tells=not self._counts_told,
        )

    def _take_over(self, agreed: Agreement) -> None:
        """Apply the data that came with the iteration besides gradients."""
        self.count_alike = not agreed.certainty.certain
        told = take_beside(agreed.beside, self._buffers, self.steps, self._calls.counts_unlike)
        self._counts_told = self._counts_told or told

    def _begin_anew(self, own: Contribution) -> None:
        """The ring in which messages had left is no more."""
        for message in self._order:
            message.move()
            message.dirty = False
        self._next = 0
        self._generation = self._ring.generation
        self._scale_as_before(own)

    def before_step(self) -> None:
        super().before_step()
        self._treatments.steps()
        now = [each.grad for bound in self._chunks for each in bound.parameters] if self._means_seen else []
        self._treatments.edited |= any(
            gradient is not seen or (seen is not None and version_of(seen) != version)
            for gradient, (seen, version) in zip(now, self._means_seen, strict=True)
        )

    def clipped(self, max_norm: float, norm_type: float) -> None:
        self._treatments.clipped(max_norm, norm_type)
        self._look()  # whether a coefficient of 1 was written is a matter of the device

    def _look(self) -> None:
        """See the means as they are, to notice what the script changes where members must do alike."""
        if self.steps_here:
            gradients = [each.grad for bound in self._chunks for each in bound.parameters]
            self._means_seen = [(each, 0 if each is None else version_of(each)) for each in gradients]

    def confirm(self, what: str) -> None:
        ring = self._ring
        if not self.steps_here or ring.outside or ring.world == 1:
            return
        if not are_alike(ring.sum(self._treatments.said(), what)):
            ring.round(what, lambda: self._refuse_unlike(what))
        self._treatments.latest = None

    def _refuse_unlike(self, what: str, stand: Stand | None = None) -> str:
        return refuse_unlike_members(self._ring, Word(self._treatments.latest, stand), what)

    def after_step(self) -> None:
        self._treatments.stepped(self.steps)
        self._means_seen = []
        super().after_step()
        if self._number == 0:
            self._boundary.reached, self._boundary.awaited = self._boundary.awaited, False
        points.reach("ring.stepped", self.steps - 1)

    def _publish(self, agreed: Agreement) -> None:
        """Let every `p.grad` show the mean, by the weights that turned out to be this iteration's."""
        if agreed.weight <= 0 and self.fills_up:
            for chunk in self._gradients.values():
                chunk.publish([False] * len(chunk.bound.parameters))
            return
        if agreed.weight <= 0 and agreed.with_gradients:
            raise UserError(
                f"iteration {self.steps}: the workers' weights sum to {agreed.weight:g}; "
                "session.weight must be above 0 on a worker that has gradients"
            )
        # Where all weights are equal both means are the same, and gradients may be scaled for either:
        total = agreed.workers_or_weight(self._scaled_alike)
        factor = self._scaled_by / total if agreed.weight > 0 else 1.0
        for message in self._order:
            if factor != 1.0:
                message.gradients.mul_(factor)
        for chunk, here in zip(self._gradients_in_order(), agreed.present, strict=True):
            chunk.publish(here)
        if agreed.weight > 0:
            self._reference = agreed.total

    def _gradients_in_order(self) -> list[ChunkGradients]:
        return [chunk for message in self._order for chunk in message.chunks]

    def _wait(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if message.work is None:
                raise BrokenRingError(f"{message} could not be sent")
            self._ring.data.wait(message.work, f"{message} in iteration {self.steps}")
        if messages and messages[0].memory.device.type != "cpu":
            # NCCL's wait orders streams only; the agreement below speaks of finished chunks.
            torch.accelerator.current_stream(messages[0].memory.device).synchronize()

    def _said(self, own: Contribution) -> list[float]:
        """What this worker says about this iteration; the workers' sum is an Agreement."""
        rows = [[p.grad is not None for p in c.bound.parameters] for c in self._gradients_in_order()]
        present = [here and own.weight > 0 for row in rows for here in row]
        awaited = self._number == 0 and self._ring.is_awaited
        has_gradient, epoch = any(any(row) for row in rows), self._epochs.compared(self._calls.epoch())
        head = head_of(own, self.steps, has_gradient, awaited, self._treatments, epoch)
        buffers = [] if self._buffers is None else self._buffers.said()
        dirty = [float(message.dirty) for message in self._order]
        return [*head, *dirty, *map(float, present), *buffers]

    def _agree(self, own: Contribution, summed: list[float] | None = None) -> Agreement:
        """What all workers say about this iteration; that all have said it makes it whole. `summed` if it
        rode along with the last message; else it is summed now."""
        ring = self._ring
        if summed is None:
            vector = torch.tensor(self._said(own), dtype=torch.float64)
            work = ring.agreement.sum(vector)
            ring.agreement.wait(work, f"the agreement on iteration {self.steps}")
            self.bytes_sent += ring.agreement.sends(vector.numel() * 8)
            summed = vector.tolist()
        slots = [len(chunk.bound.parameters) for chunk in self._gradients_in_order()]
        agreement = Agreement(summed, len(self._order), slots)
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
        ring, own = self._ring, encode_stand(self._where())
        said = gather_bytes(ring.agreement, own, "the places of all workers")
        stands = {ring.place.name_of(rank): decode_stand(raw) for rank, raw in enumerate(said)}
        raise MismatchError(describe_mismatch(stands))

    def _measured_order(self) -> list[int]:
        """Once worker 0 has seen chunks arrive: the ids of messages in its order of arrival, in which they
        leave from then on. Else none."""
        if self._order_is_measured or not self._order:
            return []
        ids = [message.id for message in self._order]
        never = [each for each in ids if each not in self._arrivals]
        order = torch.tensor([len(self._arrivals), *self._arrivals, *never], dtype=torch.int64)
        agreement = self._ring.agreement
        agreement.wait(agreement.broadcast(order), "worker 0's order of messages")
        arrived, *ids = order.tolist()
        return ids if arrived else []

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to scale its sums, to the bit, as this one would."""
        return {**super().state_dict(), "reference": self._reference, "count_alike": self.count_alike}

    def member_state(self) -> dict[str, Any]:
        """Add the measured order of messages, whether the loop begins with this model, and whether counts
        were reported.
        """
        order = [message.id for message in self._order] if self._order_is_measured else []
        begins = self._boundary.begins_with == self._number
        told, looks = self._counts_told, self._epochs.looks
        state = super().member_state()
        return {**state, "order": order, "begins": begins, "counts_told": told, "looks": looks}

    def check_member_state(self, state: Mapping[str, Any]) -> None:
        super().check_member_state(state)
        if state["order"] and sorted(state["order"]) != sorted(message.id for message in self._order):
            raise ValueError(f"messages leave in the order {state['order']!r}, which are not this model's")
        if type(state["counts_told"]) is not bool:
            raise ValueError(f"whether people were told of counts is {state['counts_told']!r}")
        if type(state["looks"]) is not int:
            raise ValueError(f"how often epochs are still compared is {state['looks']!r}")
        if type(state["begins"]) is not bool:
            raise ValueError(f"whether the loop begins with this model is {state['begins']!r}")

    def load_member_state(self, state: Mapping[str, Any]) -> None:
        super().load_member_state(state)
        self._leave_in(state["order"])
        self._counts_told, self._epochs.looks = state["counts_told"], state["looks"]
        if state["begins"]:
            self._boundary.begins_with = self._number

    def _leave_in(self, order: Sequence[int]) -> None:
        """Messages leave in this order of their ids from now on; empty: as before."""
        if order:
            self._order_is_measured = True
            by_id = {message.id: message for message in self._order}
            self._order = [by_id[each] for each in order]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._reference = state.get("reference", 1.0)
        self.count_alike = bool(state.get("count_alike", False))
        self._treatments.latest = None


def refuse_unlike_members(ring: Ring, own: Word, what: str) -> str:
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
    ring: Ring,
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


def refuse_beyond(ring: Ring, own: Contribution, certainty: Certainty, steps: int) -> None:
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
