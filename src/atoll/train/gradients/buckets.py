"""Buckets of gradients that leave while backward goes on: over a ring, or to the shards of a parameter
server."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from atoll.core.errors import RunError
from atoll.tensors.binding import BoundChunk
from atoll.tensors.gradienthooks import after_gradient
from atoll.train.gradients.messages import Bucket, BucketChunk
from atoll.train.gradients.sums import OwnGradients, SummedReducer


class Buckets(OwnGradients):
    """Gradients on their way to others: collected in messages, each of which leaves when it is complete.

    Messages leave in `order`, which is equal on every worker. The last `_held_back` messages of an iteration
    wait for the end of backward. `messages` has all messages, and `order` those that leave in backward or at
    its end.
    """

    def __init__(self, owner: SummedReducer, order: list[Bucket], nodes: Sequence[Any]) -> None:
        self._owner, self.order, self.messages = owner, order, list(order)
        self.chunks = {c.bound.chunk.id: c for message in order for c in message.chunks}
        self._held_back = 0
        self._arrivals: list[int] = []  # ids of messages as they filled in this backward
        self._left = 0  # messages of `order` that have left
        hooks = [
            self._hook(message, chunk, index)
            for message in order
            for chunk in message.chunks
            for index in range(len(chunk.bound.parameters))
        ]
        self._handles = [after_gradient(node, hook) for node, hook in zip(nodes, hooks, strict=True)]

    @abstractmethod
    def _scale(self) -> float:
        """Return the factor for this worker's gradients. It is fixed when an iteration's first gradient
        comes."""

    @abstractmethod
    def _leave(self, message: Bucket) -> None:
        """Begin to send a message whose gradients have all come."""

    @property
    def rest(self) -> list[Bucket]:
        """The messages that have yet to leave."""
        return self.order[self._left :]

    @property
    def in_order(self) -> list[BucketChunk]:
        """The chunks in the order in which they leave."""
        return [chunk for message in self.messages for chunk in message.chunks]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self.order.clear()
        self.messages.clear()
        self.chunks.clear()

    def begin(self) -> None:
        for message in self.messages:
            message.begin()
        self._left = 0
        self.begin_chunks()

    def begin_chunks(self) -> None:
        """Expect all gradients anew. Messages that have left are still under way."""
        for chunk in self.chunks.values():
            chunk.begin()
        self._arrivals.clear()

    def drop_kept(self) -> None:
        for chunk in self.chunks.values():
            chunk.kept = []
            chunk.bring_home()

    def drop_graphs(self) -> None:
        for chunk in self.chunks.values():
            chunk.drop_graphs()

    def abandon(self) -> None:
        if self._left:
            raise RunError(
                f"iteration {self._owner.steps}: a backward raised after {self._left} of "
                f"{len(self.messages)} messages had left for the other workers, so the iteration cannot be "
                "completed; let its error end the script"
            )

    def own(self, bound: BoundChunk) -> list[Tensor | None]:
        return self.chunks[bound.chunk.id].own()

    def flat_gradients(self, bound: BoundChunk) -> tuple[Tensor, tuple[bool, ...]] | None:
        """Return a chunk's published gradients, (extent,), and for each slot whether it has one. None: one is
        sparse."""
        chunk = self.chunks[bound.chunk.id]
        present = chunk.collect()
        return None if chunk.shows_sparse else (chunk.published.flat, present)

    def _hook(self, message: Bucket, chunk: BucketChunk, index: int) -> Callable[..., None]:
        parameter, came = chunk.bound.parameters[index], self._owner.phase.came

        def on_gradient(*_: object) -> None:
            came()
            if message.waits:
                return
            gradient = parameter.grad  # None if a hook of the script has dropped it
            chunk.check(index, gradient)
            if chunk.fired[index]:
                chunk.again()
                message.dirty = message.sent
                return
            chunk.fired[index] = True
            chunk.missing -= 1
            if self._owner.synchronous and not chunk.late:
                chunk.take(index, gradient, self._scale())
                chunk.taken += 1
            if chunk.missing == 0:
                self._chunk_arrived(message)

        return on_gradient

    def _chunk_arrived(self, message: Bucket) -> None:
        """Send what may leave, if all gradients of the message have come."""
        if any(chunk.missing for chunk in message.chunks):
            return
        self._arrivals.append(message.id)
        if self._owner.synchronous and self._owner.sends_early:
            # All workers run their collectives in one order. The last messages may have to wait.
            last = len(self.order) - self._held_back
            while self._left < last and self.order[self._left].ready:
                self._leave(self.order[self._left])
                self._left += 1
