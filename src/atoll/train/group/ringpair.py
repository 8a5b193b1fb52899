"""Two rings at once over the same members, which share the bytes of each sum."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torch import Tensor

from atoll.train.group.channel import Channel, Pending

_OF_THE_GROUP = timedelta(0)  # c10d reads it as the group's own timeout
_LEAST_SPLIT = 2**15  # bytes: a shorter tensor takes the first ring alone


class RingPair:
    """A sum over two rings of the same members, each of which carries a part of every tensor.

    Args:
        first: takes the first `share` of each tensor, and all of a short one.
        second: takes the rest.
        share: a number from 0 to 1.
    """

    def __init__(self, first: Channel, second: Channel, share: float) -> None:
        self.first, self.second, self.share = first, second, share

    def sum(self, tensor: Tensor) -> Pending:
        if tensor.numel() * tensor.element_size() < _LEAST_SPLIT:
            return self.first.sum(tensor)
        flat = tensor.view(-1)
        cut = round(self.share * flat.numel())
        return _Both([self.first.sum(flat[:cut]), self.second.sum(flat[cut:])])

    def sends(self, size: int) -> int:
        return self.first.sends(size)

    def wait(self, work: Pending, what: str) -> float:
        return self.first.wait(work, what)


class _Both:
    """The two halves of a sum, as one collective."""

    def __init__(self, works: Sequence[Pending]) -> None:
        self._works = works
        self._failed: Pending | None = None

    def is_completed(self) -> bool:
        """True if both halves are completed, or if one has failed: the other may then wait for ever."""
        return self._failed is not None or all(work.is_completed() for work in self._works)

    def wait(self, timeout: timedelta = _OF_THE_GROUP) -> bool:
        if self._failed is not None:
            return self._failed.wait(timeout)
        for work in self._works:
            try:
                work.wait(timeout)
            except RuntimeError:
                self._look_for_failure()
                raise
        return True

    def _look_for_failure(self) -> None:
        for work in self._works:
            if work.is_completed():
                try:
                    work.wait(_OF_THE_GROUP)
                except RuntimeError:
                    self._failed = work
