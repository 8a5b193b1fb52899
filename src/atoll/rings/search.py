"""A good ring of many members, in bounded work: fragments joined by their fastest links, then exchanged.

The slowest link is raised by threshold: over the links that reach it, the ring is changed until no other is
left in it. A ring without one of its links is a path; a **rotation** turns its end round (Pósa, 1976), and
where links differ by direction a **swap** exchanges two neighbouring stretches of it, which turns nothing
round. Neither makes the ring worse, and either may bring together two ends that a link joins. Where swaps
lead in a circle, one is made that does make it worse.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atoll.rings.bounds import bound
from atoll.rings.matrices import Matrix

_Order = NDArray[np.int64]
_Links = NDArray[np.bool_]

WORK = 80_000_000  # links that one search looks at, at most, beside the n^2 of its first ring
_ATTEMPTS = 24  # a threshold may take one part in so many of the work; there are hardly more than 16
_ROTATION = 8  # what a rotation costs for each member, in links looked at: it writes too
_CALL = 2_000  # what any change costs however few members there are, in links looked at


class Search:
    """One search over `weights` (bytes/s from row to column; 0: no link); `symmetric`: both ways are alike.

    `worked` counts the links that were looked at. The same input gives the same ring.
    """

    def __init__(self, weights: Matrix, symmetric: bool, work: int = WORK) -> None:
        self.weights, self.symmetric, self.worked = weights, symmetric, 0
        self._work, self._draws = work, 0x9E3779B97F4A7C15

    def fastest(self) -> tuple[_Order, float]:
        """A ring and its bound: no ring's slowest link is above it. Its own may be 0: then none was found."""
        most = bound(self.weights, self.symmetric)
        ring = self.greedy()
        slowest = self.slowest(ring)
        values = np.unique(self.weights[(self.weights > slowest) & (self.weights <= most)])
        low, high = -1, len(values)  # values[low] is had; values[high] was not found
        middle = high - 1  # the bound itself is often had
        while low + 1 < high:
            found = self.repaired(ring, self.weights >= values[middle], self._work // _ATTEMPTS)
            if found is None:
                high = middle
            else:
                ring = found
                low = int(np.searchsorted(values, self.slowest(ring)))
            middle = (low + high) // 2
        return ring, most

    def slowest(self, ring: _Order) -> float:
        return float(self.weights[ring, np.roll(ring, -1)].min())

    def greedy(self) -> _Order:
        """Paths of members, joined at their ends by the fastest link that is left, until there is one."""
        n = len(self.weights)
        sources, targets = np.triu_indices(n, 1) if self.symmetric else np.nonzero(~np.eye(n, dtype=bool))
        faster_first = np.argsort(-self.weights[sources, targets], kind="stable")
        path = [[member] for member in range(n)]  # of each member, shared by all on it
        joins = 0
        for source, target in zip(
            sources[faster_first].tolist(), targets[faster_first].tolist(), strict=True
        ):
            first, second = path[source], path[target]
            if first is second:
                continue
            if self.symmetric:
                if source not in (first[0], first[-1]) or target not in (second[0], second[-1]):
                    continue
                if source != first[-1]:
                    first.reverse()
                if target != second[0]:
                    second.reverse()
            elif source != first[-1] or target != second[0]:
                continue
            first.extend(second)
            for member in second:
                path[member] = first
            joins += 1
            if joins == n - 1:
                break
        self.worked += n * n
        return np.array(path[0], dtype=np.int64)

    def repaired(self, ring: _Order, good: _Links, work: int) -> _Order | None:
        """The ring, changed until it has good links alone; None where `work` did not suffice."""
        until = min(self.worked + work, self._work)
        bad: _Links = ~good[ring, np.roll(ring, -1)]
        while bad.any():
            ring = np.roll(ring, -(int(bad.argmax()) + 1))  # the path from behind a bad link to before it
            found = (self._rotated if self.symmetric else self._swapped)(ring, good, until)
            if found is None:
                return None
            ring = found
            bad = ~good[ring, np.roll(ring, -1)]
        return ring

    def _rotated(self, path: _Order, good: _Links, until: int) -> _Order | None:
        """The path as a ring with one bad link less, by rotations alone; None where the work ran out."""
        path = path.copy()
        n = len(path)
        while self.worked < until:
            ends = np.zeros(n, dtype=np.bool_)  # that were turned up while this start stood
            while self.worked < until:
                self.worked += _ROTATION * n + _CALL
                ends[path[-1]] = True
                if good[path[-1], path[0]]:
                    return path
                # To turn round what is behind place i: a link from the end to i, in place of i's to its next.
                able = good[path[-1], path[:-2]]
                freed = able & ~good[path[:-2], path[1:-1]]
                if freed.any():
                    place = int(freed.argmax())
                    path[place + 1 :] = path[place + 1 :][::-1].copy()
                    return path
                closing = able & good[path[1:-1], path[0]]
                choices = np.flatnonzero(closing if closing.any() else able & ~ends[path[1:-1]])
                if not len(choices):
                    break
                place = int(choices[self._draw(len(choices))])
                path[place + 1 :] = path[place + 1 :][::-1].copy()
            path = path[::-1].copy()
        return None

    def _swapped(self, path: _Order, good: _Links, until: int) -> _Order | None:
        """The same where links differ by direction: no stretch is turned round."""
        n = len(path)
        before = np.triu(np.ones((n - 1, n - 1), dtype=np.bool_), 1)  # places i < j, each with a next one
        ends = np.zeros((n, n), dtype=np.bool_)  # pairs of ends that were turned up
        while self.worked < until:
            self.worked += n * n + _CALL
            ends[path[0], path[-1]] = True
            if good[path[-1], path[0]]:
                return path
            here = good[np.ix_(path, path)]
            ahead = here.diagonal(1)  # place i to i + 1
            # The stretches i + 1 .. j and j + 1 .. end change places: links i to j + 1, and the end to i + 1.
            able = here[:-1, 1:] & here[-1, 1:][:, None] & before
            rising = able & ~(ahead[:, None] & ahead[None, :])
            closing = able & here[:-1, 0][None, :]
            fresh = able & ~ends[path[0], path[:-1]][None, :]
            # Where only ends come that were there before, any swap: then others come.
            choices = next(each for each in (rising, closing, fresh, before) if each.any())
            places = np.flatnonzero(choices)
            i, j = divmod(int(places[self._draw(len(places))]), n - 1)
            path = np.concatenate([path[: i + 1], path[j + 1 :], path[i + 1 : j + 1]])
            if choices is rising:
                return path
        return None

    def cheapest(self, ring: _Order, costs: Matrix, good: _Links) -> _Order:
        """The ring, changed over good links alone while the sum of its links' costs falls by it."""
        n = len(ring)
        turning = self.symmetric and bool(
            (costs == costs.T).all()
        )  # a stretch that is turned round costs the same
        # Enough to outweigh every gain; a swap that brings in a bad link never pays.
        prices = np.where(good, costs, 4 * (np.abs(costs).max() * n + 1.0))
        least = 1e-9 * (float(np.abs(costs).max()) or 1.0)
        before = np.triu(np.ones((n - 1, n - 1), dtype=np.bool_), 1)
        tried = 0
        while tried < n and self.worked < self._work:
            self.worked += 2 * n * n + _CALL
            here = prices[np.ix_(ring, ring)]
            ahead = here.diagonal(1)
            closing = here[-1, 0]
            changes = here[:-1, 1:] + here[-1, 1:][:, None] + here[:-1, 0][None, :]
            changes -= ahead[:, None] + ahead[None, :] + closing
            changes[~before] = 0.0
            swap = int(changes.argmin())
            i, j = divmod(swap, n - 1)
            swap_gain = -changes[i, j]
            turn_gain, turn = 0.0, 0
            if turning:
                turns = here[-1, :-2] + here[1:-1, 0] - ahead[:-1] - closing
                turn = int(turns.argmin())
                turn_gain = -turns[turn]
            if max(swap_gain, turn_gain) <= least:
                ring = np.roll(ring, -1)
                tried += 1
                continue
            tried = 0
            if turn_gain >= swap_gain:
                ring = np.concatenate([ring[: turn + 1], ring[turn + 1 :][::-1]])
            else:
                ring = np.concatenate([ring[: i + 1], ring[j + 1 :], ring[i + 1 : j + 1]])
        return ring

    def _draw(self, below: int) -> int:
        """A whole number below `below`, of a fixed sequence (xorshift64): the same search every time."""
        x = self._draws
        x ^= (x << 13) & 0xFFFFFFFFFFFFFFFF
        x ^= x >> 7
        x ^= (x << 17) & 0xFFFFFFFFFFFFFFFF
        self._draws = x
        return x % below
