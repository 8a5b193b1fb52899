"""Gradients that leave for the shards of a parameter server while backward goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from atoll.core.errors import RunError
from atoll.tensors.binding import BoundChunk
from atoll.train.gradients.buckets import Buckets
from atoll.train.gradients.messages import Bucket, BucketChunk, lay_messages
from atoll.train.gradients.samples import ContributionWeight
from atoll.train.gradients.sums import GroupSum, SummedReducer


class Pushes(SummedReducer, Protocol):
    """A reducer whose chunks go to shards."""

    def leave(self, message: Bucket) -> None:
        """Begin to send a message, which holds one chunk."""


class EarlySum(GroupSum):
    """The sum of a worker that talks to the shards for itself: each chunk leaves when its gradients have
    come.

    Nothing leaves early for the rest of a first iteration that begins anew, as after a backward under
    no_sync: some parameters may get their gradients more than once.
    """

    has_sent = True

    def __init__(self, owner: Pushes, chunks: Sequence[BoundChunk]) -> None:
        super().__init__(owner, chunks)
        self.gradients = self._buckets = _ByChunk(owner, lay_messages(chunks, 0), self._accumulators)
        self._pushes, self._first = owner, True

    @property
    def chunks(self) -> dict[int, BucketChunk]:
        """Each chunk's gradients, by its id."""
        return self._buckets.chunks

    def begin(self) -> None:
        super().begin()
        if self._first:
            self._owner.sends_early = False

    def reduce(self, own: ContributionWeight) -> ContributionWeight:
        """Send the chunks that have not left. Raises RunError if a gradient changed after its chunk had
        left."""
        if any(message.dirty for message in self._buckets.order):
            raise RunError(
                f"iteration {self._owner.steps}: a gradient changed after its chunk had left for the shards "
                "(a parameter in a reentrant checkpoint, only now and then?); use use_reentrant=False"
            )
        for message in self._buckets.rest:
            self._pushes.leave(message)
        self._owner.sends_early, self._first = self._owner.sends_early or self._first, False
        return own


class _ByChunk(Buckets):
    """Messages of one chunk each, unscaled: the shards weigh the contributions."""

    _owner: Pushes

    def _scale(self) -> float:
        self._owner.contribute()
        return 1.0

    def _leave(self, message: Bucket) -> None:
        self._owner.leave(message)
