"""What groups do to one another where they share a link or the server.

Each group goes round in its own period, part of which it sends. Where groups together ask for more than a
shared thing can do, what they send over it takes longer, for all of them by the same factor, its **stretch**:
the least at which nothing is asked for more than it can do. Stretching only the sending keeps apart what a
full link does to a group that hurries (much) and to one that computes for long (little).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_ROUNDS = 200  # in which the stretches are found; a few for each thing that is full are enough
_TIE = 1e-9  # the relative difference of loads that differ by rounding alone
_OVER = 1e-3  # the share by which a load may be above 1 in the end


@dataclass(frozen=True)
class Edge:
    """One way that bytes take in a phase: seconds, `sending` of which is stretched with what is `shared`
    (its number, from 1; 0: nobody else uses it)."""

    latency: float
    sending: float
    shared: int = 0


@dataclass(frozen=True)
class Phase:
    """`count` times the slowest of these edges, all of which are used at once."""

    count: float
    edges: tuple[Edge, ...]


class GroupCost:
    """What an iteration of a group is made of: seconds of computing, of adding up in the ring, and of
    the phases of the ring and of the exchange."""

    def __init__(
        self, samples: int, compute: float, adding: float, ring: Sequence[Phase], exchange: Sequence[Phase]
    ) -> None:
        self.samples, self.compute, self.adding = samples, compute, adding
        phases = [*ring, *exchange]
        edges = [edge for phase in phases for edge in phase.edges]
        self.latency = np.array([edge.latency for edge in edges])
        self.sending = np.array([edge.sending for edge in edges])
        self.shared = np.array([edge.shared for edge in edges], dtype=np.int64)
        self.lengths = [len(phase.edges) for phase in phases]  # edges of each phase
        self.counts = [phase.count for phase in phases]
        self.in_ring = [True] * len(ring) + [False] * len(exchange)
        busy: dict[int, float] = {}  # for how long it uses what is shared, unstretched
        for phase in phases:
            for edge in phase.edges:
                if edge.shared:
                    busy[edge.shared] = busy.get(edge.shared, 0.0) + phase.count * edge.sending
        self.busy = busy


class Contention:
    """Groups that go on at the same time, and the `things` that they share, numbered from 1. With `pipeline`
    an exchange goes on while the next step computes."""

    def __init__(self, costs: Sequence[GroupCost], things: int, pipeline: bool) -> None:
        self._groups, self._things, self._pipeline = len(costs), things + 1, pipeline
        self._before = np.array([cost.compute + cost.adding for cost in costs])
        self.adding = np.array([cost.adding for cost in costs])
        lengths = np.array([length for cost in costs for length in cost.lengths], dtype=np.int64)
        self._starts = np.cumsum(lengths) - lengths
        phases = np.repeat(np.arange(self._groups), [len(cost.lengths) for cost in costs])
        in_ring = np.array([flag for cost in costs for flag in cost.in_ring], dtype=bool)
        self._part = 2 * phases + np.where(in_ring, 0, 1)  # whose, and of what
        self._counts = np.array([count for cost in costs for count in cost.counts])
        self._latency = np.concatenate([cost.latency for cost in costs])
        self._sending = np.concatenate([cost.sending for cost in costs])
        self._shared = np.concatenate([cost.shared for cost in costs])
        users = [
            (thing, group, busy) for group, cost in enumerate(costs) for thing, busy in cost.busy.items()
        ]
        self._thing = np.array([thing for thing, _, _ in users], dtype=np.int64)
        self._user = np.array([group for _, group, _ in users], dtype=np.int64)
        self._busy = np.array([busy for _, _, busy in users])

    def parts(self, stretch: Floats) -> tuple[Floats, Floats]:
        """Seconds of each group's ring, without its adding, and of its exchange."""
        if not len(self._starts):
            return np.zeros(self._groups), np.zeros(self._groups)
        edges = self._latency + self._sending * stretch[self._shared]
        phases = self._counts * np.maximum.reduceat(edges, self._starts)
        seconds = np.bincount(self._part, weights=phases, minlength=2 * self._groups).astype(np.float64)
        return seconds[0::2], seconds[1::2]

    def periods(self, stretch: Floats) -> Floats:
        """Seconds from one iteration of each group to its next."""
        ring, exchange = self.parts(stretch)
        if self._pipeline:
            return np.maximum(self._before + ring, exchange)
        return self._before + ring + exchange

    def stretch(self) -> Floats:
        """The stretch of each shared thing, 1 where it is not full; that with number 0 is always 1."""
        stretch = np.ones(self._things)
        if self._groups < 2:
            return stretch  # a group alone never asks for more: it waits for its own sending
        for _ in range(_ROUNDS):
            loads = self._loads(stretch)
            full = int(np.argmax(loads >= loads.max() * (1 - _TIE)))  # the first: not rounding's choice
            if loads[full] <= 1 + _OVER:
                break
            stretch[full] *= self._factor(stretch, full, float(loads[full]))
        return stretch

    def _factor(self, stretch: Floats, full: int, load: float) -> float:
        """By what to stretch what is `full` further. A period grows no faster than the stretch, so
        stretching by the load is never too much; a step of Newton's, its slope taken over 1 %, comes nearer,
        and is taken where it is not too much either."""

        def load_at(factor: float) -> float:
            ahead = stretch.copy()
            ahead[full] *= factor
            return float(self._loads(ahead)[full])

        fall = (load - load_at(1.01)) / 0.01  # of the load, for each share of the stretch
        newton = 1 + (load - 1) / fall if fall > 0 else load
        return newton if newton > load and load_at(newton) >= 1 - _OVER else load

    def _loads(self, stretch: Floats) -> Floats:
        """The share of its time for which each shared thing is asked."""
        asked = self._busy / self.periods(stretch)[self._user]
        return np.bincount(self._thing, weights=asked, minlength=self._things).astype(np.float64)
