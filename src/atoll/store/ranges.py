"""Sets of integers as sorted, disjoint half-open ranges."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator


class Ranges:
    """A set of integers, kept as the fewest ranges (start, stop); small where the set has few gaps."""

    def __init__(self, *ranges: tuple[int, int]) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, stop in ranges:
            self.add(start, stop)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(list(zip(self._starts, self._stops, strict=True)))

    def __len__(self) -> int:
        """How many integers are in it."""
        return sum(self._stops) - sum(self._starts)

    def __bool__(self) -> bool:
        return bool(self._starts)

    def add(self, start: int, stop: int) -> None:
        """Put in start, ..., stop - 1; those that are in it already are no matter."""
        if start >= stop:
            return
        first = bisect_left(self._stops, start)  # the first range that touches [start, stop)
        last = bisect_right(self._starts, stop)
        if first < last:
            start, stop = min(start, self._starts[first]), max(stop, self._stops[last - 1])
        self._starts[first:last] = [start]
        self._stops[first:last] = [stop]

    def remove(self, start: int, stop: int) -> None:
        """Take out start, ..., stop - 1, where they are in it."""
        first = bisect_right(self._stops, start)
        last = bisect_left(self._starts, stop)
        if start >= stop or first >= last:
            return
        left, right = self._starts[first], self._stops[last - 1]
        rest = [(left, start)] * (left < start) + [(stop, right)] * (stop < right)
        self._starts[first:last] = [part[0] for part in rest]
        self._stops[first:last] = [part[1] for part in rest]

    def overlap(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The parts of [start, stop) that are in it."""
        first, last = bisect_right(self._stops, start), bisect_left(self._starts, stop)
        pairs = zip(self._starts[first:last], self._stops[first:last], strict=True)
        return [(max(start, left), min(stop, right)) for left, right in pairs]

    def take_first(self, count: int) -> tuple[int, int]:
        """Take out the first run of up to `count` integers; raises IndexError where it is empty."""
        start = self._starts[0]
        stop = min(self._stops[0], start + count)
        self.remove(start, stop)
        return start, stop
