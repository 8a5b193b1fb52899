"""Replay window: a bit for each recent datagram number. Source: docs/ltp.md, "Keys, seals and replays"."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

WINDOW_BITS = 2**16  # datagrams: 0.7 s at 1 Gbit/s and 1,400 B; a later one counts as lost anyway


class ReplayWindow:
    """The numbers seen on one stripe in one direction.

    `fresh` filters numbers before seals are opened; `mark` takes only those with a good seal, so a forgery
    changes nothing. Numbers are in 0 .. 2^62.
    """

    def __init__(self, bits: int = WINDOW_BITS) -> None:
        self._seen = np.zeros(bits, dtype=bool)  # number n at n % bits
        self._highest = -1

    @property
    def highest(self) -> int:
        """Highest marked number; -1: none yet."""
        return self._highest

    def fresh(self, numbers: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        """Return which of the numbers, (n,), are neither marked nor below the window.

        A number that is given twice is fresh twice: only the seals show which datagram is genuine.
        """
        numbers = numbers.astype(np.int64)
        bits = len(self._seen)
        known = self._seen[numbers % bits] & (numbers <= self._highest)
        fresh: npt.NDArray[np.bool_] = ~known & (numbers > self._highest - bits)
        return fresh

    def mark(self, numbers: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        """Mark the numbers, (n,), of datagrams with good seals; return which of them to accept.

        Fresh ones are accepted, the first of each number.
        """
        numbers = numbers.astype(np.int64)
        if not len(numbers):
            return np.zeros(0, dtype=bool)
        rising = bool((numbers[1:] > numbers[:-1]).all())
        if rising and numbers[0] > self._highest:  # the usual case
            taken: npt.NDArray[np.bool_] = np.ones(len(numbers), dtype=bool)
        else:
            taken = self.fresh(numbers)
        if not taken.any():
            return taken
        if not rising:
            first = np.zeros(len(numbers), dtype=bool)
            first[np.unique(numbers, return_index=True)[1]] = True
            taken &= first
        self._move(int(numbers[taken].max()))
        bits = len(self._seen)
        self._seen[numbers[taken & (numbers > self._highest - bits)] % bits] = True
        return taken

    def _move(self, highest: int) -> None:
        """Move the window up, and unmark the numbers that it newly covers."""
        if highest <= self._highest:
            return
        bits = len(self._seen)
        if highest - self._highest >= bits:
            self._seen[:] = False
        else:
            start, stop = (self._highest + 1) % bits, highest % bits + 1
            if start < stop:
                self._seen[start:stop] = False
            else:
                self._seen[start:] = False
                self._seen[:stop] = False
        self._highest = highest
