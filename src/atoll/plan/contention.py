"""Contention of groups for a link or for the server.

Each group iterates in its own period and sends during a part of it. Where groups together demand more than a
shared resource can carry, all sending over it takes longer by one factor, its **stretch**: the least at which
no resource is overloaded. Only sending is stretched, so a full link slows a fast group much, and a group that
computes for long little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_ROUNDS = 200  # most iterations; each full resource takes a few
_TIE = 1e-9  # relative difference of loads that is rounding
_OVER = 1e-3  # excess of a load over 1 that is accepted


@dataclass(frozen=True)
class Edge:
    """A link used in a phase, with seconds of latency and of sending.

    Sending is stretched with the resource `shared` (its number, from 1; 0: not shared).
    """

    latency: float
    sending: float
    shared: int = 0


@dataclass(frozen=True)
class Phase:
    """`count` times the slowest of these edges, which are used at once."""

    count: float
    edges: tuple[Edge, ...]


class GroupCost:
    """Seconds of a group's iteration: computing, adding up in the ring, and phases of ring and exchange."""

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
        busy: dict[int, float] = {}  # seconds of use of each shared resource, unstretched
        for phase in phases:
            for edge in phase.edges:
                if edge.shared:
                    busy[edge.shared] = busy.get(edge.shared, 0.0) + phase.count * edge.sending
        self.busy = busy


class Contention:
    """Groups that run in parallel, and the `things` that they share, numbered from 1.

    With `pipeline` an exchange overlaps with the next step's computing.
    """

    def __init__(self, costs: Sequence[GroupCost], things: int, pipeline: bool) -> None:
        self._groups, self._things, self._pipeline = len(costs), things + 1, pipeline
        self._before = np.array([cost.compute + cost.adding for cost in costs])
        self.adding = np.array([cost.adding for cost in costs])
        lengths = np.array([length for cost in costs for length in cost.lengths], dtype=np.int64)
        self._starts = np.cumsum(lengths) - lengths
        phases = np.repeat(np.arange(self._groups), [len(cost.lengths) for cost in costs])
        in_ring = np.array([flag for cost in costs for flag in cost.in_ring], dtype=bool)
        self._part = 2 * phases + np.where(in_ring, 0, 1)  # by phase: 2 * group, plus 1 for the exchange
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
        """Return the seconds of each group's ring, without adding up, and of its exchange."""
        if not len(self._starts):
            return np.zeros(self._groups), np.zeros(self._groups)
        edges = self._latency + self._sending * stretch[self._shared]
        phases = self._counts * np.maximum.reduceat(edges, self._starts)
        seconds = np.bincount(self._part, weights=phases, minlength=2 * self._groups).astype(np.float64)
        return seconds[0::2], seconds[1::2]

    def periods(self, stretch: Floats) -> Floats:
        """Return the seconds of each group's iteration."""
        ring, exchange = self.parts(stretch)
        if self._pipeline:
            return np.maximum(self._before + ring, exchange)
        return self._before + ring + exchange

    def stretch(self) -> Floats:
        """Return the stretch of each shared resource; 1 if it is not full, and for number 0."""
        stretch = np.ones(self._things)
        if self._groups < 2:
            return stretch  # a single group never overloads a link: it waits for its own sending
        for _ in range(_ROUNDS):
            loads = self._loads(stretch)
            full = int(np.argmax(loads >= loads.max() * (1 - _TIE)))  # of a tie the first, despite rounding
            if loads[full] <= 1 + _OVER:
                break
            stretch[full] *= self._factor(stretch, full, float(loads[full]))
        return stretch

    def _factor(self, stretch: Floats, full: int, load: float) -> float:
        """Return the factor by which to stretch `full` further.

        A period grows no faster than the stretch, so stretching by the load is never too much. A Newton step,
        with its slope taken over 1 %, comes nearer, and is used unless it goes too far.
        """

        def load_at(factor: float) -> float:
            ahead = stretch.copy()
            ahead[full] *= factor
            return float(self._loads(ahead)[full])

        fall = (load - load_at(1.01)) / 0.01  # decrease of the load per relative stretch
        newton = 1 + (load - 1) / fall if fall > 0 else load
        return newton if newton > load and load_at(newton) >= 1 - _OVER else load

    def _loads(self, stretch: Floats) -> Floats:
        """Return the share of time for which each shared resource is demanded."""
        asked = self._busy / self.periods(stretch)[self._user]
        return np.bincount(self._thing, weights=asked, minlength=self._things).astype(np.float64)
