"""Gradients that leave for the shards of a parameter server while backward goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from atoll.tensors.binding import BoundChunk
from atoll.train.gradients.buckets import Buckets
from atoll.train.gradients.messages import ChunkGradients, Message, lay_messages
from atoll.train.gradients.samples import Contribution
from atoll.train.gradients.sums import Owner, Sum


class EarlySum(Sum):
    """Of a worker that speaks to the shards for itself: each chunk leaves when its gradients have come."""

    def __init__(
        self, owner: Owner, chunks: Sequence[BoundChunk], *, leave: Callable[[Message], None]
    ) -> None:
        """`leave` begins to send a chunk, alone in its message."""
        super().__init__(owner, chunks)
        self._buckets = _ByChunk(owner, chunks, self._accumulators, leave)

    @property
    def chunks(self) -> dict[int, ChunkGradients]:
        """Each chunk's gradients, by its id."""
        return self._buckets.chunks

    @property
    def order(self) -> list[Message]:
        """The messages in the order in which they leave."""
        return self._buckets.order

    @property
    def rest(self) -> list[Message]:
        """Those that have yet to leave."""
        return self._buckets.rest

    def close(self) -> None:
        self._buckets.close()
        super().close()

    def begin(self) -> None:
        self._buckets.begin()

    def drop_kept(self) -> None:
        self._buckets.drop_kept()

    def abandon(self) -> None:
        self._buckets.abandon()

    def own(self, bound: BoundChunk) -> list[Tensor | None]:
        return self._buckets.own(bound)

    def reduce(self, own: Contribution) -> Contribution:
        return own


class _ByChunk(Buckets):
    """One chunk a message, as it is: the shards weigh."""

    def __init__(
        self,
        owner: Owner,
        chunks: Sequence[BoundChunk],
        nodes: Sequence[Any],
        leave: Callable[[Message], None],
    ) -> None:
        super().__init__(owner, lay_messages(chunks, 0), nodes)
        self._send = leave

    def _scale(self) -> float:
        self._owner.contribute()
        return 1.0

    def _leave(self, message: Message) -> None:
        self._send(message)
