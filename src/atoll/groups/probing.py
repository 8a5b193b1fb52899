"""Links to measure at the start of a run, and their order (docs/grouping.md, "Measuring the links").

A pair is measured once, for both directions. Pairs come in rounds in which every worker has one partner (the
circle method for round robins). Two consecutive rounds join all workers in one chain. So whenever time runs
out, all workers have been measured about equally often, and the missing links follow from the measured ones.
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

LATE = 2.0  # a pair's result is awaited for so many times its span


@dataclass(frozen=True)
class Measure:
    """`first` is to measure its link to `second`, in at most `seconds`."""

    first: int
    second: int
    seconds: float


@dataclass(frozen=True)
class LinkMeasurement:
    """A link as measured by one of its ends: bytes per second, and seconds one way."""

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class MeasuredLinks:
    """Links of the workers that were measured. `without` are the others.

    `reason` says how many pairs were measured, and how the rest was filled in.
    """

    links: Links
    without: tuple[int, ...]
    reason: str


class LinkProbe:
    """Measure the links of `workers` within `seconds` from `now`, `together` pairs at a time.

    One pair at a time (the default) keeps other measurements off its link. Each pair gets an equal part of
    the remaining time, at least `least` and at most `most` seconds; a fast one leaves more to the next ones.
    Of many pairs some stay unmeasured, rather than all measured badly. A pair without a result after LATE
    times its span is given up, and no pair starts that could end after the deadline. Times are in the
    caller's seconds.

    Args:
        known: links measured before, which are skipped.
        only: pairs to measure; None: all.

    Raises:
        UserError: a span is not above 0, or fewer than one pair at a time.
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
        known: Mapping[tuple[int, int], LinkMeasurement] | None = None,
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
        self._under_way: dict[tuple[int, int], float] = {}  # pair -> when it is given up

    @property
    def over(self) -> bool:
        """True if no pair waits, or is being measured."""
        return not self._waiting and not self._under_way

    # -- events -------------------------------------------------------------------------------------------

    def handle_measured(self, now: float, first: int, second: int, measured: LinkMeasurement) -> None:  # noqa: ARG002
        """Take a pair's result, even a late one.

        Raises UserError for a pair that is not this probe's, and for an impossible bandwidth (above 0) or
        latency (0 or more).
        """
        pair = self._pair(first, second)
        if not (measured.bandwidth > 0 and 0 <= measured.latency < math.inf):
            raise UserError(
                f"the link of workers {self._name(first)} and {self._name(second)}: {measured.bandwidth:g} "
                f"bytes/s must be above 0, and {measured.latency:g} s 0 or more and finite"
            )
        self._under_way.pop(pair, None)
        self._measured.setdefault(pair, measured)

    def handle_failed(self, now: float, first: int, second: int) -> None:  # noqa: ARG002
        """Note that two workers cannot reach one another."""
        self._under_way.pop(self._pair(first, second), None)

    def handle_left(self, now: float, worker: int) -> None:  # noqa: ARG002
        """Remove a worker that died or left, with all its links."""
        self._workers = tuple(each for each in self._workers if each != worker)
        self._waiting = [pair for pair in self._waiting if worker not in pair]
        self._under_way = {pair: at for pair, at in self._under_way.items() if worker not in pair}
        self._measured = {pair: link for pair, link in self._measured.items() if worker not in pair}

    # -- decisions ----------------------------------------------------------------------------------------

    def poll(self, now: float) -> list[Measure]:
        """Return the pairs that begin now."""
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
        """Return when `poll` next has something to do without other events; None if it is over."""
        return min(self._under_way.values(), default=self._until if self._waiting else None)

    def found(self) -> MeasuredLinks:
        """Return the links known so far.

        An unmeasured link gets the bandwidth of the widest path over measured links, and the latency of the
        shortest. Workers that no such path joins to most of the others are left out.
        """
        joined = self._joined()
        bandwidth, latency = self._matrices(joined)
        without = tuple(worker for worker in self._workers if worker not in joined)
        return MeasuredLinks(
            Links.of(joined, bandwidth, latency, self._name), without, self._reason(joined, without)
        )

    def _next(self) -> tuple[int, int] | None:
        """Return the first waiting pair of two idle workers."""
        busy = {worker for pair in self._under_way for worker in pair}
        return next((pair for pair in self._waiting if busy.isdisjoint(pair)), None)

    def _given(self, now: float) -> float:
        """Return the next pair's span; 0 if too little time is left.

        All waiting pairs get a turn, and each ends in time even without a result.
        """
        turns = -(-len(self._waiting) // self._together)
        left = self._until - now
        given = min(self._most, max(self._least, left / turns), left / LATE)
        return given if given >= self._least else 0.0

    def _pair(self, first: int, second: int) -> tuple[int, int]:
        pair = (min(first, second), max(first, second))
        if first == second or not {first, second} <= set(self._workers):
            raise UserError(f"workers {first} and {second}: this probe does not measure their link")
        return pair

    def _joined(self) -> list[int]:
        """Return the largest set of workers joined by measured links; of equal ones, that with the lowest
        number."""
        groups = {worker: {worker} for worker in self._workers}
        for first, second in self._measured:
            if groups[first] is not groups[second]:
                groups[first] |= groups[second]
                for worker in groups[second]:
                    groups[worker] = groups[first]
        most = max(groups.values(), key=lambda group: (len(group), -min(group)), default=set())
        return sorted(most)

    def _matrices(self, workers: list[int]) -> tuple[_Matrix, _Matrix]:
        """Return (N, N) bandwidths and latencies: measured, or else by the best paths."""
        place = {worker: index for index, worker in enumerate(workers)}
        wide, short = np.zeros((len(workers),) * 2), np.full((len(workers),) * 2, np.inf)
        np.fill_diagonal(wide, np.inf)
        np.fill_diagonal(short, 0.0)
        known = [(place[a], place[b], link) for (a, b), link in self._measured.items() if a in place]
        for a, b, link in known:
            wide[a, b] = wide[b, a] = link.bandwidth
            short[a, b] = short[b, a] = link.latency
        for via in range(len(workers)):  # Floyd's algorithm, for the narrowest link and for the sum
            wide = np.maximum(wide, np.minimum(wide[:, via, None], wide[None, via]))
            short = np.minimum(short, short[:, via, None] + short[None, via])
        for a, b, link in known:  # keep measured links where a path looks better
            wide[a, b] = wide[b, a] = link.bandwidth
            short[a, b] = short[b, a] = link.latency
        return wide, short

    def _reason(self, joined: list[int], without: tuple[int, ...]) -> str:
        measured = len(self._measured)
        text = f"{measured} of {self._all} links measured"
        if measured < len(joined) * (len(joined) - 1) // 2:
            text += "; the others estimated from these"
        if without:
            names = ", ".join(self._name(worker) for worker in without[:8])
            text += f"; nothing is known of the links to {names}{', ...' if len(without) > 8 else ''}"
        return text


def pairs_in_rounds(workers: Iterable[int]) -> list[tuple[int, int]]:
    """Return each pair once, the lower number first, round after round.

    In a round every worker is in one pair (all but one if their number is odd).
    """
    ring = list(workers)
    if len(ring) % 2:
        ring.append(-1)  # a worker paired with it rests
    pairs: list[tuple[int, int]] = []
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        meet = zip(ring[:half], reversed(ring[half:]), strict=True)
        pairs += [(min(pair), max(pair)) for pair in meet if -1 not in pair]
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return pairs
