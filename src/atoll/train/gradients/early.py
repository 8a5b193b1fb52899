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
    sends_again = False

    def __init__(self, owner: Pushes, chunks: Sequence[BoundChunk]) -> None:
        super().__init__(owner, chunks)
        self.gradients = self._buckets = _ByChunk(owner, lay_messages(chunks, 0), self._accumulators)
        self._pushes, self._is_first = owner, True

    @property
    def chunks(self) -> dict[int, BucketChunk]:
        """Each chunk's gradients, by its id."""
        return self._buckets.chunks

    def begin(self) -> None:
        super().begin()
        if self._is_first:
            self._buckets.hold_back(True)

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
        self._buckets.hold_back(False)
        self._is_first = False
        return own


class _ByChunk(Buckets):
    """Messages of one chunk each, unscaled: the shards weigh the contributions."""

    _owner: Pushes

    def hold_back(self, held_back: bool) -> None:
        """Let all messages wait for the end of backward, or none."""
        self._held_back = len(self.order) if held_back else 0

    def _scale(self) -> float:
        self._owner.contribute()
        return 1.0

    def _leave(self, message: Bucket) -> None:
        self._owner.leave(message)
