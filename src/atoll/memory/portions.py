"""A member's part of one chunk. Source: docs/memory.md, "Members"."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from atoll.memory.gradients import TrainedChunk


class Portion:
    """The elements `begin` to `end` of a chunk; without bounds, all of them."""

    def __init__(self, trained: TrainedChunk, bounds: tuple[int, int] | None = None) -> None:
        self._trained = trained
        self.begin, self.end = (0, trained.extent) if bounds is None else bounds

    @property
    def is_empty(self) -> bool:
        return self.end <= self.begin

    def bounds(self, first: int, last: int | None = None) -> tuple[int, int]:
        """Return the bounds, in the chunk, of the elements of the slots from `first` to `last` that are in
        the portion.

        If none are, the first bound is not below the second.
        """
        slots = self._trained.chunk.slots
        place, end = slots[first], slots[first if last is None else last]
        return max(place.offset, self.begin), min(end.offset + end.numel, self.end)

    def numel(self, slot: int) -> int:
        """Return the number of a slot's elements in the portion."""
        first, last = self.bounds(slot)
        return max(0, last - first)

    def is_whole(self, slot: int) -> bool:
        """True if all of a slot's elements are in the portion."""
        first, last = self.bounds(slot)
        return last - first == self._trained.chunk.slots[slot].numel

    def has(self, slot: int) -> bool:
        """True if any element of a slot is in the portion; a slot without elements counts by its place."""
        if not self._trained.extent:  # no parameter has elements: whoever steps the chunk has them all
            return True
        begin, end = self._trained.place(slot)
        return begin < self.end and end > self.begin

    def of(self, flat: Tensor, slot: int) -> Tensor:
        """Return the view of `flat`, the chunk's (extent,), with a slot's elements in the portion: 1-D."""
        first, last = self.bounds(slot)
        return flat[first : max(first, last)]
