"""Counts of the batches that a loader was given, and of those that backwards have reached."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


class Given(Protocol):
    """A count of batches, or of single indices, that a loader was given."""

    @property
    def consumed(self) -> int:
        """The number of samples that backwards have reached."""

    def begin(self, sizes: Sequence[int] = (), used: int = 0) -> None:
        """Start anew, with entries of these `sizes` given before, of which the first `used` are used."""

    def sizes(self, start: int = 0) -> list[int]:
        """Return the sizes of the entries from index `start` on."""

    def used(self, given: int) -> int:
        """Return how many of the first `given` entries have been used completely."""

    def count(self, samples: float, given: int) -> float:
        """Record that a backward has reached `samples` samples; return how many count in the mean."""

    def next_sizes(self, given: int) -> set[float]:
        """Return the possible sizes of the next batch that a backward reaches."""


class GivenBatches:
    """Batches of known sizes, in the order in which they were given. A fill, of size 0, has `fill()` samples
    of weight 0.

    `consumed` is the number of their samples that backwards have reached.
    """

    def __init__(self, fill: Callable[[], int] = lambda: 1) -> None:
        self._fill = fill
        self._sizes: list[int] = []  # below 0: a fill of so many samples
        self._used = 0  # batches that have been used completely
        self._rest = 0  # samples that backwards have reached beyond these batches
        self.consumed = 0

    def begin(self, sizes: Sequence[int] = (), used: int = 0) -> None:
        """Start anew, with batches of these `sizes` given before, of which the first `used` are used."""
        self._sizes, self._used, self._rest = [size or -self._fill() for size in sizes], used, 0
        self.consumed = self._samples(used)

    def __len__(self) -> int:
        return len(self._sizes)

    def give(self, size: int, at: int) -> int:
        """Record that batch `at` has this size; return its samples, with those of a fill. Batches recorded
        from `at` on are forgotten: they were not given after all."""
        while self._used > at:
            self._used -= 1
            self._rest += abs(self._sizes[self._used])
        del self._sizes[at:]
        self._sizes.append(size or -self._fill())
        self._use()
        return abs(self._sizes[at])

    def used(self, given: int) -> int:
        """Return how many of the first `given` batches have been used completely."""
        return min(self._used, given)

    def next_sizes(self, given: int) -> set[float]:
        """Return the possible sizes of the next batch that a backward reaches."""
        used = self.used(given)
        return {float(abs(self._sizes[used]))} if used < given else set()

    def count(self, samples: float, given: int) -> float:
        """Record that a backward has reached `samples` samples; return how many count in the mean: 0 for a
        fill."""
        used = self.used(given)
        is_fill = used < given and self._sizes[used] < 0
        self.consumed += int(samples)
        self._rest += int(samples)
        self._use()
        return 0.0 if is_fill else samples

    def sizes(self, start: int = 0) -> list[int]:
        """Return the sizes of the batches from index `start` on."""
        return [max(0, size) for size in self._sizes[start:]]

    def use_up(self, count: int) -> None:
        """Forget the first `count` batches, which are used."""
        self.consumed -= self._samples(count)
        self._used -= count
        del self._sizes[:count]

    def _use(self) -> None:
        while self._used < len(self._sizes) and self._rest >= abs(self._sizes[self._used]):
            self._rest -= abs(self._sizes[self._used])
            self._used += 1

    def _samples(self, count: int) -> int:
        return sum(map(abs, self._sizes[:count]))


class GivenIndices:
    """Single indices, of which a loader makes batches. `consumed` is the number that backwards have reached.

    The size of a batch is taken to be the number of indices for which the loader asks between two trained
    batches. A loader with workers of its own fetches ahead, but asks for one batch each time.
    """

    def __init__(self) -> None:
        self.consumed = 0
        self._given = self._asked = self._usual = 0

    def used(self, given: int) -> int:
        """Return how many of the first `given` indices have been used."""
        return min(self.consumed, given)

    def count(self, samples: float, given: int) -> float:
        """Record that a backward has reached `samples` samples, after `given` indices; all of them count."""
        self.consumed += int(samples)
        asked = given - self._given if given >= self._given else given
        if asked and asked == self._asked:
            self._usual = asked
        self._given, self._asked = given, asked or self._asked
        return samples

    def next_sizes(self, given: int) -> set[float]:
        """Return the possible sizes of the next batch that a backward reaches, as far as is known."""
        left = given - self.consumed
        return {float(size) for size in (left, self._usual) if 0 < size <= left}

    def begin(self, sizes: Sequence[int] = (), used: int = 0) -> None:
        """Start anew, with the first `used` indices used; `sizes` has no meaning here."""
        del sizes
        self.consumed = used

    def sizes(self, start: int = 0) -> list[int]:
        """Return nothing: single indices have no sizes."""
        del start
        return []
