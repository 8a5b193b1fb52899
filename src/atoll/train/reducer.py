"""The way of a gradient inside a group: from backward, through the ring, to `p.grad`.

As autograd hands over a gradient, it is scaled into its chunk's **published** buffer. A chunk whose last
gradient has come is reduced there, while backward goes on. When backward ends, the workers agree that every
chunk of the iteration is whole; then, and only then, `p.grad` shows the published mean. A worker's own
gradients, in the tensors that autograd made, are kept until the step, so that an iteration can be reduced
again (a chunk whose gradient changed after it had left; later, a ring that lost a member). Source:
design.md, "The way of a gradient".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.distributed.distributed_c10d import Work

from atoll.core.errors import RunError, UserError
from atoll.tensors.binding import BoundChunk, Buffer
from atoll.train.channel import Channel
from atoll.train.samples import Contribution


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


class ChunkGradients:
    """The gradients of one chunk, and how far this backward has come with them.

    In a ring, `p.grad` is this worker's own gradient, as autograd made it, until `publish`; after that
    `kept` holds it until the step. Alone, it is a view into the published buffer from the start.
    """

    def __init__(self, bound: BoundChunk) -> None:
        self.bound = bound
        self.published: Buffer = bound.new_buffer()
        self.kept: list[Tensor | None] = []
        self.fired = [False] * len(bound.parameters)
        self.missing = len(bound.parameters)
        self.taken = 0  # how many of this backward's gradients are in the published buffer, scaled
        self.late = False  # wait for the end of backward: its gradients come more than once
        self.dirty = False  # a gradient came after the chunk had left
        self.work: Work | None = None

    def begin(self) -> None:
        self.fired = [False] * len(self.fired)
        self.missing = len(self.fired)
        self.taken, self.dirty, self.work = 0, False, None

    def take(self, index: int, scale: float) -> None:
        """Put this worker's gradient, scaled, where it is reduced: one pass, while the cache holds it."""
        parameter, view = self.bound.parameters[index], self.published.views[index]
        gradient = parameter.grad
        if gradient is None or scale == 0:  # zero times NaN would be NaN
            view.zero_()
            return
        if gradient is view:  # autograd has added to the mean of the reduction before
            gradient = parameter.grad = gradient.clone()
        torch.mul(gradient, scale, out=view)

    def settle(self, scale: float) -> None:
        """Make the published buffer whole: gradients that this backward did not touch, or more than once,
        and zeros for absent ones."""
        for index in range(len(self.bound.parameters)):
            self.take(index, scale)

    def publish(self, present: Sequence[bool]) -> None:
        """Let `p.grad` show the published values where any worker had a gradient."""
        self.kept = [parameter.grad for parameter in self.bound.parameters]
        for parameter, view, here in zip(self.bound.parameters, self.published.views, present, strict=True):
            parameter.grad = view if here else None

    def own(self) -> list[Tensor | None]:
        """This worker's own gradients of the iteration."""
        return self.kept or [parameter.grad for parameter in self.bound.parameters]

    def collect(self) -> tuple[bool, ...]:
        """Bring gradients that the script has replaced back into the published buffer; which are present."""
        for parameter, view in zip(self.bound.parameters, self.published.views, strict=True):
            gradient = parameter.grad
            if gradient is None:
                view.zero_()  # what an earlier iteration left there is nobody's gradient
            elif gradient is not view:
                view.copy_(gradient)
                parameter.grad = view
        return tuple(parameter.grad is not None for parameter in self.bound.parameters)


class Reducer:
    """Reduces one model's trainable chunks over a ring; with `ring` None it only gathers them into chunks.

    `arm()` is called as gradients come, so that `reduce` is called when their backward ends.
    `contribution(has_gradient)` is asked once for each reduction, and `committed(own, samples)` told this
    worker's contribution and the group's samples when it is whole.
    """

    def __init__(
        self,
        chunks: Sequence[BoundChunk],
        ring: Ring | None,
        *,
        arm: Callable[[], None],
        contribution: Callable[[bool], Contribution],
        committed: Callable[[Contribution, float], None],
    ) -> None:
        self._ring = ring
        self._arm, self._contribution, self._committed = arm, contribution, committed
        self.gradients = {bound.chunk.id: ChunkGradients(bound) for bound in chunks}
        self._order = list(self.gradients.values())  # in which chunks leave, the same on every worker
        self._arrivals: list[int] = []  # chunk ids as they filled in this backward
        self._order_is_measured = ring is None
        self._next = 0  # the first of `_order` that has not left
        self._own: Contribution | None = None  # fixed when the first chunk leaves
        self._reference = 1.0  # the last iteration's sum of weights
        self.synchronous = True  # False within no_sync
        self.sends_early = True  # while backward goes on
        self.unsent = False  # gradients have come that no reduction has seen
        self._reduced = False  # since the last step
        self.steps = 0
        self.seconds_waiting = 0.0
        self.bytes_sent = 0
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._hook(chunk, index))  # type: ignore[no-untyped-call]
            for chunk in self._order
            for index, parameter in enumerate(chunk.bound.parameters)
        ]
        self._accumulators = [
            get_gradient_edge(parameter).node for chunk in self._order for parameter in chunk.bound.parameters
        ]

    @property
    def order(self) -> list[int]:
        """The ids of the chunks in the order in which they leave."""
        return [chunk.bound.chunk.id for chunk in self._order]

    def close(self) -> None:
        """Let go of the model: its parameters stay where they are, but nothing is reduced any more."""
        for handle in self._handles:
            handle.remove()
        self._ring = None
        self._order.clear()
        self.gradients.clear()
        self._accumulators.clear()

    # During backward

    def check_bound(self) -> None:
        """Raise BindingError if a parameter has left its chunk."""
        for chunk in self._order:
            chunk.bound.check()

    def accumulates(self) -> bool:
        """Within a backward: whether it will leave gradients in these parameters, as torch.autograd.grad
        does not."""
        try:
            return any(torch._C._will_engine_execute_node(node) for node in self._accumulators)
        except RuntimeError:  # raised for a parameter that torch.autograd.grad was asked about
            return False

    def drop_kept(self) -> None:
        """A new backward begins: the last iteration's own gradients are not needed any more."""
        for chunk in self._order:
            chunk.kept = []

    def abandon(self) -> None:
        """Forget a backward that raised; raises RunError if chunks had left for the other workers."""
        if self._next:
            raise RunError(
                f"iteration {self.steps}: a backward raised after {self._next} of {len(self._order)} "
                "chunks had left for the other workers, so the iteration cannot be completed; let its "
                "error end the script"
            )
        self.begin()

    def _hook(self, chunk: ChunkGradients, index: int) -> Callable[[Tensor], None]:
        view = chunk.published.views[index]
        name = chunk.bound.names[index]
        alone = self._ring is None

        def on_gradient(parameter: Tensor) -> None:
            gradient = parameter.grad
            if gradient is not view:
                assert gradient is not None
                if gradient.dtype != view.dtype:
                    chunk.bound.check()
                if gradient.requires_grad or gradient.layout != torch.strided:
                    raise UserError(_unusable(name, gradient))
                if alone:
                    view.copy_(gradient)
                    parameter.grad = view
            self._arrived(chunk, index)

        return on_gradient

    def _arrived(self, chunk: ChunkGradients, index: int) -> None:
        self._arm()
        self.unsent = True
        if chunk.fired[index]:
            chunk.late, chunk.taken = True, 0
            chunk.dirty = chunk.work is not None
            return
        chunk.fired[index] = True
        chunk.missing -= 1
        if self.synchronous and self._ring is not None and not chunk.late:
            chunk.take(index, self._scale())
            chunk.taken += 1
        if chunk.missing == 0:
            self._arrivals.append(chunk.bound.chunk.id)
            if self.synchronous and self._ring is not None and self.sends_early:
                self._send_ready()

    def _send_ready(self) -> None:
        """Send the chunks that are complete, in the one order of collectives that all workers keep."""
        while self._next < len(self._order):
            chunk = self._order[self._next]
            if chunk.missing or chunk.late:
                return
            self._send(chunk)
            self._next += 1

    def _scale(self) -> float:
        """What this worker's gradients are multiplied by before the sum; fixed when the first one comes."""
        return self._contribute().weight / self._reference

    def _contribute(self) -> Contribution:
        if self._own is None:
            has_gradient = any(p.grad is not None for c in self._order for p in c.bound.parameters)
            self._own = self._contribution(has_gradient)
        return self._own

    def _send(self, chunk: ChunkGradients) -> None:
        assert self._ring is not None
        if chunk.taken < len(chunk.fired):
            chunk.settle(self._scale())
        flat = chunk.published.flat
        chunk.work = self._ring.data.sum(flat)
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
        for chunk in self._order[self._next :]:
            self._send(chunk)
        self._wait(self._order)
        agreed = self._agree(self._ring, own)
        while agreed.dirty:
            again = [chunk for chunk, dirty in zip(self._order, agreed.dirty_chunks, strict=True) if dirty]
            for chunk in again:
                chunk.dirty, chunk.late, chunk.taken = False, True, 0
                self._send(chunk)
            self._wait(again)
            agreed = self._agree(self._ring, own)
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
        for chunk, here in zip(self._order, agreed.present, strict=True):
            if factor != 1.0:
                chunk.published.flat.mul_(factor)
            chunk.publish(here)
        if agreed.weight > 0:
            self._reference = agreed.weight

    def _wait(self, chunks: Sequence[ChunkGradients]) -> None:
        assert self._ring is not None
        for chunk in chunks:
            assert chunk.work is not None
            what = f"chunk {chunk.bound.chunk.id} (with {chunk.bound.names[0]!r}) in iteration {self.steps}"
            self.seconds_waiting += self._ring.data.wait(chunk.work, what)
        if chunks and chunks[0].bound.flat.device.type != "cpu":
            # NCCL's wait orders streams only; the agreement below speaks of finished chunks.
            torch.accelerator.current_stream(chunks[0].bound.flat.device).synchronize()

    def _agree(self, ring: Ring, own: Contribution) -> Agreement:
        """Sum what every worker says about this iteration; that all have said it makes it whole."""
        gradients = [[p.grad is not None for p in chunk.bound.parameters] for chunk in self._order]
        present = [here and own.weight > 0 for row in gradients for here in row]
        head = [own.weight, own.samples, self.steps, any(any(row) for row in gradients)]
        said = [*head, *(chunk.dirty for chunk in self._order), *present]
        vector = torch.tensor([float(value) for value in said], dtype=torch.float64)
        work = ring.agreement.sum(vector)
        self.seconds_waiting += ring.agreement.wait(work, f"the agreement on iteration {self.steps}")
        self._count(vector.numel() * 8)
        agreement = Agreement(vector.tolist(), [len(row) for row in gradients])
        if agreement.steps != self.steps * ring.world:
            raise RunError(
                f"the workers are at different iterations (this one at {self.steps}, on average "
                f"{agreement.steps / ring.world:g}); every worker must call optimizer.step() equally often"
            )
        return agreement

    def _measure_order(self, ring: Ring) -> None:
        """Once worker 0 has seen chunks arrive: take its order of arrival as that in which they leave."""
        if self._order_is_measured or not self._order:
            return
        ids = [chunk.bound.chunk.id for chunk in self._order]
        never = [chunk_id for chunk_id in ids if chunk_id not in self._arrivals]
        order = torch.tensor([len(self._arrivals), *self._arrivals, *never], dtype=torch.int64)
        ring.agreement.wait(ring.agreement.broadcast(order), "worker 0's order of chunks")
        arrived, *ids = order.tolist()
        if arrived:
            self._order_is_measured = True
            self._order = [self.gradients[chunk_id] for chunk_id in ids]

    def _done(self, own: Contribution, samples: float) -> None:
        self._reduced, self.unsent = True, False
        self.begin()
        self._committed(own, samples)

    def begin(self) -> None:
        """Make ready for the next backward."""
        for chunk in self._order:
            chunk.begin()
        self._next, self._own = 0, None
        self._arrivals.clear()

    # At the optimizer's step

    def before_step(self) -> None:
        """Send what no backward has sent: all of it came under no_sync, or there is no gradient here."""
        self.check_bound()
        if self.unsent or not self._reduced:
            self.reduce()

    def flat_gradients(self, bound: BoundChunk) -> tuple[Tensor, tuple[bool, ...]]:
        """The memory of a chunk's published gradients, and which slots have one."""
        chunk = self.gradients[bound.chunk.id]
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
        return [
            name
            for chunk in self._order
            for name, gradient in zip(chunk.bound.names, chunk.own(), strict=True)
            if gradient is not None and not bool(torch.isfinite(gradient).all())
        ]


class Agreement:
    """The workers' sums for one iteration: weight, samples, steps, how many have gradients, dirty chunks,
    and the presence of each gradient."""

    def __init__(self, vector: list[float], slots: list[int]) -> None:
        self.weight, self.samples, self.steps, self.with_gradients = vector[:4]
        self.dirty_chunks = [count > 0 for count in vector[4 : 4 + len(slots)]]
        self.dirty = any(self.dirty_chunks)
        self.present: list[list[bool]] = []
        start = 4 + len(slots)
        for count in slots:
            self.present.append([value > 0 for value in vector[start : start + count]])
            start += count


def _unusable(name: str, gradient: Tensor) -> str:
    if gradient.requires_grad:
        return (
            f"the gradient of {name!r} carries a graph of its own (backward with create_graph=True); "
            "take second derivatives with torch.autograd.grad"
        )
    return f"the gradient of {name!r} is sparse; build the layer with sparse=False"
