"""The way of a gradient inside a group: from backward, through the ring, to `p.grad`.

As autograd hands over a gradient, it is scaled into its chunk's **published** buffer. A message (one chunk,
or several small ones) whose last gradient has come is reduced there, while backward goes on. When backward
ends, the workers agree on the iteration; once all of it is whole, and only then, `p.grad` shows the published
mean. A worker's own gradients, in the tensors that autograd made, are kept until the step, so that an
iteration can be reduced again (a chunk whose gradient changed after it had left; later, a ring that lost a
member). Source: design.md, "The way of a gradient".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from atoll.core.errors import RunError, UserError
from atoll.tensors.binding import BoundChunk
from atoll.train.channel import Channel
from atoll.train.messages import HEAD, ChunkGradients, Message, lay_messages
from atoll.train.samples import Contribution

_STEPS = 4096  # steps are compared by their remainder, which a float32 holds for any number of workers


@dataclass(frozen=True)
class Ring:
    """A group's channels: `data` carries chunks (on their device), `agreement` small vectors (on the CPU)."""

    data: Channel
    agreement: Channel

    @property
    def world(self) -> int:
        return self.data.place.world

    def close(self) -> None:
        self.data.close()
        if self.agreement is not self.data:
            self.agreement.close()


class Reducer:
    """Reduces one model's trainable chunks over a ring; with `ring` None it only knows when they are there.

    `arm()` is called as gradients come, so that `reduce` is called when their backward ends.
    `contribution(has_gradient)` is asked once for each reduction, and `committed(own, samples)` told this
    worker's contribution and the group's samples when it is whole. Chunks travel in messages of at least
    `message_bytes`, as far as they have so many neighbours.
    """

    def __init__(
        self,
        chunks: Sequence[BoundChunk],
        ring: Ring | None,
        *,
        message_bytes: int,
        arm: Callable[[], None],
        contribution: Callable[[bool], Contribution],
        committed: Callable[[Contribution, float], None],
    ) -> None:
        self._ring, self._chunks = ring, list(chunks)
        self._arm, self._contribution, self._committed = arm, contribution, committed
        # The order in which messages leave, the same on every worker:
        self._order = [] if ring is None else lay_messages(chunks, message_bytes)
        self._gradients = {c.bound.chunk.id: c for message in self._order for c in message.chunks}
        self._arrivals: list[int] = []  # ids of messages as they filled in this backward
        self._order_is_measured = ring is None
        self._agreement_rides = _agreement_rides(self._order)
        self._next = 0  # the first of `_order` that has not left
        self._own: Contribution | None = None  # fixed when the first message leaves
        self._reference = 1.0  # the last iteration's sum of weights
        self.synchronous = True  # False within no_sync
        self.sends_early = True  # while backward goes on
        self.unsent = False  # gradients have come that no reduction has seen
        self._reduced = False  # since the last step
        self.steps = 0
        self.seconds_waiting = 0.0
        self.bytes_sent = 0
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._hook(message, chunk, index))  # type: ignore[no-untyped-call]
            for message in self._order
            for chunk in message.chunks
            for index, parameter in enumerate(chunk.bound.parameters)
        ]
        self._accumulators = [get_gradient_edge(p).node for bound in chunks for p in bound.parameters]

    @property
    def order(self) -> list[int]:
        """The ids of the chunks in the order in which they leave."""
        return [chunk.bound.chunk.id for message in self._order for chunk in message.chunks]

    def close(self) -> None:
        """Let go of the model: its parameters stay where they are, but nothing is reduced any more."""
        for handle in self._handles:
            handle.remove()
        self._ring = None
        self._chunks.clear()
        self._order.clear()
        self._gradients.clear()
        self._accumulators.clear()

    # During backward

    def check_bound(self, closely: bool = True) -> None:
        """Raise BindingError if a parameter has left its chunk; `closely`: if any one has."""
        for bound in self._chunks:
            if closely or bound.has_moved:
                bound.check()

    def accumulates(self) -> bool:
        """Within a backward: whether it will leave gradients in these parameters, as torch.autograd.grad
        does not."""
        try:
            return any(torch._C._will_engine_execute_node(node) for node in self._accumulators)
        except RuntimeError:  # raised for a parameter that torch.autograd.grad was asked about
            return False

    def drop_kept(self) -> None:
        """A new backward begins: the last iteration's own gradients are not needed any more."""
        for chunk in self._gradients.values():
            chunk.kept = []

    def abandon(self) -> None:
        """Forget a backward that raised; raises RunError if chunks had left for the other workers."""
        if self._next:
            raise RunError(
                f"iteration {self.steps}: a backward raised after {self._next} of {len(self._order)} "
                "messages had left for the other workers, so the iteration cannot be completed; let its "
                "error end the script"
            )
        self.begin()

    def _hook(self, message: Message, chunk: ChunkGradients, index: int) -> Callable[[Tensor], None]:
        view = chunk.published.views[index]
        name = chunk.bound.names[index]

        def on_gradient(parameter: Tensor) -> None:
            gradient = parameter.grad
            assert gradient is not None
            if gradient is not view:
                if gradient.dtype != view.dtype:
                    chunk.bound.check()
                _check_usable(name, gradient)
            self._arm()
            self.unsent = True
            if chunk.fired[index]:
                chunk.again()
                message.dirty = message.work is not None
                return
            chunk.fired[index] = True
            chunk.missing -= 1
            if self.synchronous and not chunk.late:
                chunk.take(index, gradient, self._scale())
                chunk.taken += 1
            if chunk.missing == 0:
                self._chunk_arrived(message)

        return on_gradient

    def _chunk_arrived(self, message: Message) -> None:
        """All gradients of a chunk have come; send what may leave now."""
        if any(chunk.missing for chunk in message.chunks):
            return
        self._arrivals.append(message.id)
        if self.synchronous and self.sends_early:
            # In the one order of collectives that all workers keep; the last waits for the agreement.
            last = len(self._order) - self._agreement_rides
            while self._next < last and self._order[self._next].ready:
                self._send(self._order[self._next])
                self._next += 1

    def _scale(self) -> float:
        """What this worker's gradients are multiplied by before the sum; fixed when the first one comes."""
        return self._contribute().weight / self._reference

    def _contribute(self) -> Contribution:
        if self._own is None:
            has_gradient = any(p.grad is not None for bound in self._chunks for p in bound.parameters)
            self._own = self._contribution(has_gradient)
            if self._ring is not None and self._ring.world == 1 and self._own.weight > 0:
                self._reference = self._own.weight  # a mean over one is what it was, to the bit
        return self._own

    def _send(self, message: Message, said: Sequence[float] = ()) -> None:
        """Begin to reduce a message, with what this worker says for the agreement if it rides along."""
        assert self._ring is not None
        scale = self._scale()
        for chunk in message.chunks:
            chunk.settle(scale)
        if said:
            message.write_tail(said)
        flat = message.memory[: message.gradients.numel() + len(said)]
        message.work = self._ring.data.sum(flat)
        self._count(flat.numel() * flat.element_size())

    def _count(self, size: int) -> None:
        """A ring sends each byte on 2 (n - 1) / n times."""
        assert self._ring is not None
        self.bytes_sent += 2 * (self._ring.world - 1) * size // self._ring.world

    # At its end

    @torch.no_grad()
    def reduce(self) -> None:
        """Send what has not left, wait for all of it, agree, and publish."""
        own = self._contribute()
        if self._ring is None:
            self._done(own, own.samples)
            return
        said = self._said(own)
        for message in self._order[self._next :]:
            last = message is self._order[-1]
            self._send(message, said if last and self._agreement_rides else ())
        self._wait(self._order)
        agreed = self._agree(own, self._order[-1].read_tail(len(said)) if self._agreement_rides else None)
        while agreed.dirty:
            again = [
                message for message, dirty in zip(self._order, agreed.dirty_messages, strict=True) if dirty
            ]
            for message in again:
                message.again()
                self._send(message)
            self._wait(again)
            agreed = self._agree(own)
        self._publish(agreed)
        self._measure_order(self._ring)
        self._done(own, agreed.samples)

    def _publish(self, agreed: Agreement) -> None:
        """Let every `p.grad` show the mean, by the weights that turned out to be this iteration's."""
        if agreed.weight <= 0 and agreed.with_gradients:
            raise UserError(
                f"iteration {self.steps}: the workers' weights sum to {agreed.weight:g}; "
                "session.weight must be above 0 on a worker that has gradients"
            )
        factor = self._reference / agreed.weight if agreed.weight > 0 else 1.0
        for message in self._order:
            if factor != 1.0:
                message.gradients.mul_(factor)
        for chunk, here in zip(self._gradients_in_order(), agreed.present, strict=True):
            chunk.publish(here)
        if agreed.weight > 0:
            self._reference = agreed.weight

    def _gradients_in_order(self) -> list[ChunkGradients]:
        return [chunk for message in self._order for chunk in message.chunks]

    def _wait(self, messages: Sequence[Message]) -> None:
        assert self._ring is not None
        for message in messages:
            assert message.work is not None
            self.seconds_waiting += self._ring.data.wait(message.work, f"{message} in iteration {self.steps}")
        if messages and messages[0].memory.device.type != "cpu":
            # NCCL's wait orders streams only; the agreement below speaks of finished chunks.
            torch.accelerator.current_stream(messages[0].memory.device).synchronize()

    def _said(self, own: Contribution) -> list[float]:
        """What this worker says about this iteration; the workers' sum is an Agreement."""
        rows = [[p.grad is not None for p in c.bound.parameters] for c in self._gradients_in_order()]
        present = [here and own.weight > 0 for row in rows for here in row]
        head = [own.weight, own.samples, self.steps % _STEPS, any(any(row) for row in rows)]
        assert len(head) == HEAD
        return [float(value) for value in (*head, *(message.dirty for message in self._order), *present)]

    def _agree(self, own: Contribution, summed: list[float] | None = None) -> Agreement:
        """What all workers say about this iteration; that all have said it makes it whole. `summed` if it
        rode along with the last message; else it is summed now."""
        assert self._ring is not None
        ring = self._ring
        if summed is None:
            vector = torch.tensor(self._said(own), dtype=torch.float64)
            work = ring.agreement.sum(vector)
            self.seconds_waiting += ring.agreement.wait(work, f"the agreement on iteration {self.steps}")
            self._count(vector.numel() * 8)
            summed = vector.tolist()
        slots = [len(chunk.bound.parameters) for chunk in self._gradients_in_order()]
        agreement = Agreement(summed, len(self._order), slots)
        off = agreement.steps / ring.world - self.steps % _STEPS
        if off:
            raise RunError(
                f"the workers are at different iterations (this one at {self.steps}, on average "
                f"{self.steps + off:g}); every worker must call optimizer.step() equally often"
            )
        return agreement

    def _measure_order(self, ring: Ring) -> None:
        """Once worker 0 has seen chunks arrive: take its order of arrival as that in which they leave."""
        if self._order_is_measured or not self._order:
            return
        ids = [message.id for message in self._order]
        never = [each for each in ids if each not in self._arrivals]
        order = torch.tensor([len(self._arrivals), *self._arrivals, *never], dtype=torch.int64)
        ring.agreement.wait(ring.agreement.broadcast(order), "worker 0's order of messages")
        arrived, *ids = order.tolist()
        if arrived:
            self._order_is_measured = True
            by_id = {message.id: message for message in self._order}
            self._order = [by_id[each] for each in ids]

    def _done(self, own: Contribution, samples: float) -> None:
        self._reduced, self.unsent = True, False
        self.begin()
        self._committed(own, samples)

    def begin(self) -> None:
        """Make ready for the next backward."""
        for message in self._order:
            message.begin()
        self._next, self._own = 0, None
        self._arrivals.clear()

    # At the optimizer's step

    def before_step(self) -> None:
        """Send what no backward has sent: all of it came under no_sync, or there is no gradient here."""
        if self.unsent or not self._reduced:
            self.reduce()

    def flat_gradients(self, bound: BoundChunk) -> tuple[Tensor, tuple[bool, ...]]:
        """The memory of a chunk's published gradients, and which slots have one."""
        chunk = self._gradients[bound.chunk.id]
        return chunk.published.flat, chunk.collect()

    def after_step(self) -> None:
        self._reduced = False
        self.steps += 1
        self.drop_kept()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to scale its sums, to the bit, as this one would."""
        return {"steps": self.steps, "reference": self._reference}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps, self._reference = state["steps"], state["reference"]

    def own_nonfinite(self) -> list[str]:
        """The parameters for which this worker's own gradient holds NaN or infinity."""
        found = []
        for bound in self._chunks:
            chunk = self._gradients.get(bound.chunk.id)
            own = chunk.own() if chunk else [parameter.grad for parameter in bound.parameters]
            for name, gradient in zip(bound.names, own, strict=True):
                if gradient is not None and not bool(torch.isfinite(gradient).all()):
                    found.append(name)
        return found


class Agreement:
    """The workers' sums for one iteration: weight, samples, steps, how many have gradients, dirty messages,
    and the presence of each gradient, chunk by chunk (of `slots` parameters each)."""

    def __init__(self, summed: list[float], messages: int, slots: list[int]) -> None:
        self.weight, self.samples, self.steps, self.with_gradients = summed[:HEAD]
        self.dirty_messages = [count > 0 for count in summed[HEAD : HEAD + messages]]
        self.dirty = any(self.dirty_messages)
        self.present: list[list[bool]] = []
        start = HEAD + messages
        for count in slots:
            self.present.append([value > 0 for value in summed[start : start + count]])
            start += count


def _agreement_rides(messages: Sequence[Message]) -> bool:
    """Whether the agreement may travel in the last message: on the CPU, in a dtype that holds its numbers,
    where no gradient has a finer one."""
    if not messages or messages[0].memory.device.type != "cpu":
        return False
    return {m.memory.dtype for m in messages} in ({torch.float32}, {torch.float64})


def _check_usable(name: str, gradient: Tensor) -> None:
    if gradient.requires_grad:
        raise UserError(
            f"the gradient of {name!r} carries a graph of its own (backward with create_graph=True); "
            "take second derivatives with torch.autograd.grad"
        )
    if gradient.layout != torch.strided:
        raise UserError(f"the gradient of {name!r} is sparse; build the layer with sparse=False")
