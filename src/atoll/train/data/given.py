"""What a loader was given, and how much of that backwards have reached."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Given(Protocol):
    """Batches, or single indices."""

    @property
    def consumed(self) -> int:
        """How many samples backwards have reached."""

    def begin(self, sizes: Sequence[int] = (), used: int = 0) -> None:
        """They are given anew; those of these sizes were given before, and the first `used` are used."""

    def sizes(self, start: int = 0) -> list[int]:
        """The sizes of those from the `start`-th on."""

    def used(self, given: int) -> int:
        """How many of the first `given` have been used whole."""

    def count(self, samples: float, given: int) -> float:
        """A backward has reached this many samples: how many of them count in the mean."""

    def next_sizes(self, given: int) -> set[float]:
        """The possible sizes of the next batch that a backward reaches."""


class GivenBatches:
    """Batches of known sizes, in the order in which they were given. A fill, of size 0, is one sample that
    weighs nothing. `consumed` is how many samples of them backwards have reached."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._used = 0  # batches that have been used whole
        self._rest = 0  # samples that backwards have reached beyond those
        self.consumed = 0

    def begin(self, sizes: Sequence[int] = (), used: int = 0) -> None:
        """Batches are given anew; those of these sizes were given before, and the first `used` are used."""
        self._sizes, self._used, self._rest = list(sizes), used, 0
        self.consumed = self._samples(used)

    def __len__(self) -> int:
        return len(self._sizes)

    def give(self, size: int, at: int) -> None:
        """The `at`-th batch is of this size; those from it on were not given after all."""
        while self._used > at:
            self._used -= 1
            self._rest += max(1, self._sizes[self._used])
        del self._sizes[at:]
        self._sizes.append(size)
        self._use()

    def used(self, given: int) -> int:
        """How many of the first `given` batches have been used whole."""
        return min(self._used, given)

    def next_sizes(self, given: int) -> set[float]:
        """The possible sizes of the next batch that a backward reaches."""
        used = self.used(given)
        return {float(max(1, self._sizes[used]))} if used < given else set()

    def count(self, samples: float, given: int) -> float:
        """A backward has reached this many samples: how many of them count in the mean."""
        used = self.used(given)
        is_fill = used < given and self._sizes[used] == 0
        self.consumed += int(samples)
        self._rest += int(samples)
        self._use()
        return 0.0 if is_fill else samples

    def sizes(self, start: int = 0) -> list[int]:
        """The sizes of the batches from the `start`-th on."""
        return self._sizes[start:]

    def use_up(self, count: int) -> None:
        """Forget the first `count` batches, which are used."""
        self.consumed -= self._samples(count)
        self._used -= count
        del self._sizes[:count]

    def _use(self) -> None:
        while self._used < len(self._sizes) and self._rest >= max(1, self._sizes[self._used]):
            self._rest -= max(1, self._sizes[self._used])
            self._used += 1

    def _samples(self, count: int) -> int:
        return sum(max(1, size) for size in self._sizes[:count])


class GivenIndices:
    """Single indices, of which a loader makes batches. `consumed` is how many of them backwards have reached.

    The size of a batch is the number of indices that the loader asks for between two trained batches. A
    loader with workers of its own fetches ahead, and asks for one batch each time.
    """

    def __init__(self) -> None:
        self.consumed = 0
        self._given = self._asked = self._usual = 0

    def used(self, given: int) -> int:
        """How many of the first `given` indices have been used."""
        return min(self.consumed, given)

    def count(self, samples: float, given: int) -> float:
        """A backward has reached this many samples, after `given` indices: how many of them count."""
        self.consumed += int(samples)
        asked = given - self._given if given >= self._given else given
        if asked and asked == self._asked:
            self._usual = asked
        self._given, self._asked = given, asked or self._asked
        return samples

    def next_sizes(self, given: int) -> set[float]:
        """The possible sizes of the next batch that a backward reaches, as far as is known."""
        left = given - self.consumed
        return {float(size) for size in (left, self._usual) if 0 < size <= left}

    def begin(self, sizes: Sequence[int] = (), used: int = 0) -> None:
        """Indices are given anew; so many were given before, and the first `used` are used."""
        del sizes
        self.consumed = used

    def sizes(self, start: int = 0) -> list[int]:
        """Nothing is to be known of single indices."""
        del start
        return []
