"""Sets of integers as sorted, disjoint half-open ranges."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

import msgspec


class Ranges(msgspec.Struct, forbid_unknown_fields=True, array_like=True):
    """A set of integers, kept as the fewest ranges from `starts[i]` up to, not including, `stops[i]`.

    It is small if the set has few gaps.
    """

    starts: list[int] = []
    stops: list[int] = []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(list(zip(self.starts, self.stops, strict=True)))

    def __len__(self) -> int:
        """Return the number of integers in the set."""
        return sum(self.stops) - sum(self.starts)

    def __bool__(self) -> bool:
        return bool(self.starts)

    def add(self, start: int, stop: int) -> None:
        """Add start, ..., stop - 1."""
        if start >= stop:
            return
        first = bisect_left(self.stops, start)  # the first range that touches [start, stop)
        last = bisect_right(self.starts, stop)
        if first < last:
            start, stop = min(start, self.starts[first]), max(stop, self.stops[last - 1])
        self.starts[first:last] = [start]
        self.stops[first:last] = [stop]

    def remove(self, start: int, stop: int) -> None:
        """Remove start, ..., stop - 1, as far as they are in the set."""
        first = bisect_right(self.stops, start)
        last = bisect_left(self.starts, stop)
        if start >= stop or first >= last:
            return
        left, right = self.starts[first], self.stops[last - 1]
        rest = [(left, start)] * (left < start) + [(stop, right)] * (stop < right)
        self.starts[first:last] = [part[0] for part in rest]
        self.stops[first:last] = [part[1] for part in rest]

    def overlap(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the parts of [start, stop) that are in the set."""
        first, last = bisect_right(self.stops, start), bisect_left(self.starts, stop)
        pairs = zip(self.starts[first:last], self.stops[first:last], strict=True)
        return [(max(start, left), min(stop, right)) for left, right in pairs]

    def take_first(self, count: int) -> tuple[int, int]:
        """Remove and return the first range, up to `count` integers of it. Raises IndexError for an empty
        set."""
        start = self.starts[0]
        stop = min(self.stops[0], start + count)
        self.remove(start, stop)
        return start, stop
