"""Which links between workers are measured, and in which order, at the start of a run (docs/grouping.md,
"Measuring the links").

A pair is measured once, and holds for both directions. Pairs come in rounds in which every worker has one
partner (the circle method for round robins). Two rounds that follow one another join all workers in one
chain, so whenever time runs out, each worker has been measured about as often as any other, and what was
not measured follows from what was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from atoll.core.errors import UserError
from atoll.groups.links import Links

_Matrix = npt.NDArray[np.float64]

LATE = 2.0  # so many times what a pair was given is waited for its word


@dataclass(frozen=True)
class Measure:
    """`first` is to measure its link to `second`, in at most `seconds`."""

    first: int
    second: int
    seconds: float


@dataclass(frozen=True)
class Measured:
    """A link, as one of its ends found it: bytes per second, and seconds one way."""

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Found:
    """The links of those workers that were measured with others; `without` are the others. `reason` says how
    many pairs were measured, and how the rest was filled."""

    links: Links
    without: tuple[int, ...]
    reason: str


class LinkProbe:
    """Measures each pair of `workers` that is not `known`, or `only` these, within `seconds` from `now` on,
    `together` pairs at a time.

    One at a time (the default) nothing shares a link with what is measured. Each pair is given an equal part
    of the time that is left, at least `least` and at most `most` seconds: what is faster leaves more to those
    behind it, and of many pairs, rather than all of them badly, some are not measured. A pair
    whose word does not come in twice the time that it was given is given up, and nothing begins that could
    end after the deadline. Times are in the caller's seconds.

    Raises UserError for a span that is not above 0, and for fewer than one pair at a time.
    """

    def __init__(
        self,
        now: float,
        workers: Iterable[int],
        seconds: float,
        *,
        least: float = 0.0,
        most: float = 1.0,
        together: int = 1,
        known: Mapping[tuple[int, int], Measured] | None = None,
        only: Collection[tuple[int, int]] | None = None,
        name: Callable[[int], str] = str,
    ) -> None:
        if not (0 < seconds < math.inf and 0 < most < math.inf):
            raise UserError(f"probing links for {seconds:g} s, {most:g} s a pair: both must be above 0")
        if together < 1:
            raise UserError(f"{together} pairs at a time: there must be at least 1")
        self._least, self._most, self._together, self._name = min(least, most), most, together, name
        self._workers = tuple(sorted(set(workers)))
        pairs = pairs_in_rounds(self._workers)
        self._all = len(pairs)
        there = {*self._workers}
        self._measured = {pair: link for pair, link in (known or {}).items() if there.issuperset(pair)}
        wanted = set(pairs if only is None else only)
        self._waiting = [pair for pair in pairs if pair in wanted and pair not in self._measured]
        self._until = now + seconds
        self._under_way: dict[tuple[int, int], float] = {}  # pair -> until when its word is waited for

    @property
    def over(self) -> bool:
        """Whether no pair waits, or is under way."""
        return not self._waiting and not self._under_way

    # -- what happens -------------------------------------------------------------------------------------

    def handle_measured(self, now: float, first: int, second: int, measured: Measured) -> None:  # noqa: ARG002
        """A pair's word; one that comes too late counts too. Raises UserError for a pair that is none of this
        probe's, and for what is no bandwidth (above 0) or latency (from 0 on)."""
        pair = self._pair(first, second)
        if not (measured.bandwidth > 0 and 0 <= measured.latency < math.inf):
            raise UserError(
                f"the link of workers {self._name(first)} and {self._name(second)}: {measured.bandwidth:g} "
                f"bytes/s and {measured.latency:g} s are no bandwidth and latency"
            )
        self._under_way.pop(pair, None)
        self._measured.setdefault(pair, measured)

    def handle_failed(self, now: float, first: int, second: int) -> None:  # noqa: ARG002
        """The two do not reach one another."""
        self._under_way.pop(self._pair(first, second), None)

    def handle_left(self, now: float, worker: int) -> None:  # noqa: ARG002
        """A worker died or said goodbye; nothing of it is in the result."""
        self._workers = tuple(each for each in self._workers if each != worker)
        self._waiting = [pair for pair in self._waiting if worker not in pair]
        self._under_way = {pair: at for pair, at in self._under_way.items() if worker not in pair}
        self._measured = {pair: link for pair, link in self._measured.items() if worker not in pair}

    # -- what follows -------------------------------------------------------------------------------------

    def poll(self, now: float) -> list[Measure]:
        """The pairs that begin now."""
        self._under_way = {pair: until for pair, until in self._under_way.items() if now < until}
        begun: list[Measure] = []
        while len(self._under_way) < self._together and (pair := self._next()) is not None:
            given = self._given(now)
            if given <= 0:
                self._waiting.clear()
                break
            self._waiting.remove(pair)
            self._under_way[pair] = now + LATE * given
            begun.append(Measure(*pair, given))
        return begun

    def next_deadline(self) -> float | None:
        """When `poll` next has something to do, if nothing happens before; None: it is over."""
        return min(self._under_way.values(), default=self._until if self._waiting else None)

    def found(self) -> Found:
        """What is known of the links.

        Between two that were not measured: the bandwidth of the widest way over measured links, and the
        latency of the shortest. Workers that no such way joins to most of the others are left out.
        """
        joined = self._joined()
        bandwidth, latency = self._matrices(joined)
        without = tuple(worker for worker in self._workers if worker not in joined)
        return Found(Links.of(joined, bandwidth, latency, self._name), without, self._reason(joined, without))

    def _next(self) -> tuple[int, int] | None:
        """The first pair that waits and of which neither is busy."""
        busy = {worker for pair in self._under_way for worker in pair}
        return next((pair for pair in self._waiting if busy.isdisjoint(pair)), None)

    def _given(self, now: float) -> float:
        """What the next pair may take, so that all that wait have a turn, and each ends in time, also one
        whose word does not come; 0: there is too little time for one more."""
        turns = -(-len(self._waiting) // self._together)
        left = self._until - now
        given = min(self._most, max(self._least, left / turns), left / LATE)
        return given if given >= self._least else 0.0

    def _pair(self, first: int, second: int) -> tuple[int, int]:
        pair = (min(first, second), max(first, second))
        if first == second or not {first, second} <= set(self._workers):
            raise UserError(f"workers {first} and {second} are no pair whose link is measured")
        return pair

    def _joined(self) -> list[int]:
        """The most workers that measured links join; of equally many those with the lowest number."""
        groups = {worker: {worker} for worker in self._workers}
        for first, second in self._measured:
            if groups[first] is not groups[second]:
                groups[first] |= groups[second]
                for worker in groups[second]:
                    groups[worker] = groups[first]
        most = max(groups.values(), key=lambda group: (len(group), -min(group)), default=set())
        return sorted(most)

    def _matrices(self, workers: list[int]) -> tuple[_Matrix, _Matrix]:
        """(N, N) bandwidths and latencies: what was measured, and elsewhere what the best ways give."""
        place = {worker: index for index, worker in enumerate(workers)}
        wide, short = np.zeros((len(workers),) * 2), np.full((len(workers),) * 2, np.inf)
        np.fill_diagonal(wide, np.inf)
        np.fill_diagonal(short, 0.0)
        known = [(place[a], place[b], link) for (a, b), link in self._measured.items() if a in place]
        for a, b, link in known:
            wide[a, b] = wide[b, a] = link.bandwidth
            short[a, b] = short[b, a] = link.latency
        for via in range(len(workers)):  # Floyd's, for the narrowest link and for the sum
            wide = np.maximum(wide, np.minimum(wide[:, via, None], wide[None, via]))
            short = np.minimum(short, short[:, via, None] + short[None, via])
        for a, b, link in known:  # a way round may be better than a link; the link is what was measured
            wide[a, b] = wide[b, a] = link.bandwidth
            short[a, b] = short[b, a] = link.latency
        return wide, short

    def _reason(self, joined: list[int], without: tuple[int, ...]) -> str:
        measured = len(self._measured)
        said = f"{measured} of {self._all} links measured"
        if measured < len(joined) * (len(joined) - 1) // 2:
            said += "; the others by the best ways over these"
        if without:
            names = ", ".join(self._name(worker) for worker in without[:8])
            said += f"; nothing is known of the links to {names}{', ...' if len(without) > 8 else ''}"
        return said


def pairs_in_rounds(workers: Iterable[int]) -> list[tuple[int, int]]:
    """Each pair once, the lower number first; round after round, in each of which every worker is in one pair
    (with an odd number of workers, all but one)."""
    ring = list(workers)
    if len(ring) % 2:
        ring.append(-1)  # who meets it rests
    pairs: list[tuple[int, int]] = []
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        meet = zip(ring[:half], reversed(ring[half:]), strict=True)
        pairs += [(min(pair), max(pair)) for pair in meet if -1 not in pair]
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return pairs
