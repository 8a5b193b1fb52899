"""A network of links: what is sent goes through queues and over wires, and comes out in the order of arrival.

Nothing is drawn but from the generator that it is given, and nothing waits: an hour of a bad link runs in a
second, the same way each time. Datagrams are rows of arrays, and stay so: a burst is one step, not one for
each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from support.sim.clock import VirtualClock
from support.sim.links import HEADERS, Counters, Direction, LinkModel

Frames = npt.NDArray[np.uint8]  # (datagrams, bytes of each)
Node = Hashable

# Seconds within which datagrams that arrive are handed over together, as a socket that is read in turns gives
# them: a fast link is then a few thousand steps a second, and a slow one hands over each by itself.
TOGETHER = 2.5e-4


@dataclass(frozen=True)
class Delivery:
    """Datagrams that arrived one after the other; `frames` may be written to. The clock is at the last one's
    time."""

    source: Node
    target: Node
    label: Hashable  # what their sender gave with them: the port, say
    frames: Frames
    arrived: npt.NDArray[np.float64]  # seconds, (n,), rising


Handler = Callable[[float, Delivery], None]


@dataclass
class _Flight:
    """A burst on its way, by arrival; `next` is the first that has not come yet."""

    due: npt.NDArray[np.float64]
    frames: Frames
    label: Hashable
    next: int = 0


class _Way:
    """One direction and what is on it."""

    def __init__(self, source: Node, target: Node, direction: Direction, rng: np.random.Generator) -> None:
        self.source, self.target, self.direction = source, target, direction
        self._rng = rng
        self._flights: list[_Flight] = []
        self._next: float | None = None  # of next_event, while it holds

    def send(self, now: float, frames: Frames, label: Hashable) -> None:
        fates = self.direction.offer(now, len(frames), frames.shape[1] + HEADERS)
        rows = np.flatnonzero(~fates.lost)
        rows = rows[np.argsort(fates.due[rows], kind="stable")]
        if fates.twice.any():
            rows = np.repeat(rows, 1 + fates.twice[rows])
        if not len(rows):
            return
        carried = frames[rows]  # a copy: the sender goes on to use its memory
        for row in np.flatnonzero(fates.damaged[rows]):
            bit = int(self._rng.integers(8 * frames.shape[1]))
            carried[row, bit // 8] ^= 1 << bit % 8
        self._flights.append(_Flight(fates.due[rows], carried, label))
        self._next = None

    def next_event(self) -> float:
        """When the last one of those that come together next arrives."""
        if not self._flights:
            return math.inf
        if self._next is None:
            first = min(flight.due[flight.next] for flight in self._flights)
            self._next = max(float(flight.due[at - 1]) for flight, at in self._come_by(first + TOGETHER))
        return self._next

    def _come_by(self, when: float) -> list[tuple[_Flight, int]]:
        """The flights of which some arrive by then, each with the place after the last that does."""
        return [
            (flight, int(np.searchsorted(flight.due, when, side="right")))
            for flight in self._flights
            if flight.due[flight.next] <= when
        ]

    def take(self, now: float) -> list[Delivery]:
        if self.next_event() > now:
            return []
        self._next = None
        pieces = []
        for flight, at in self._come_by(now):
            pieces.append((flight.due[flight.next : at], flight.frames[flight.next : at], flight.label))
            flight.next = at
        self._flights = [flight for flight in self._flights if flight.next < len(flight.due)]
        pieces = [piece for piece in pieces if len(piece[0])]
        if any(one[0][-1] > other[0][0] for one, other in pairwise(pieces)):
            pieces = _interleaved(pieces)
        return [Delivery(self.source, self.target, label, frames, due) for due, frames, label in pieces]

    def forget(self) -> int:
        """Drop what is on its way; returns how many datagrams that were."""
        count = sum(len(flight.due) - flight.next for flight in self._flights)
        self._flights.clear()
        self._next = None
        return count


_Piece = tuple[npt.NDArray[np.float64], Frames, Hashable]


def _interleaved(pieces: list[_Piece]) -> list[_Piece]:
    """The same datagrams in the order of arrival over all pieces, cut where the piece is another one."""
    due = np.concatenate([piece[0] for piece in pieces])
    owner = np.repeat(np.arange(len(pieces)), [len(piece[0]) for piece in pieces])
    order = np.argsort(due, kind="stable")
    owner = owner[order]
    cuts = np.flatnonzero(np.diff(owner)) + 1
    taken, cut = [0] * len(pieces), []
    for start, end in zip([0, *cuts.tolist()], [*cuts.tolist(), len(owner)], strict=True):
        index = int(owner[start])
        first, taken[index] = taken[index], taken[index] + end - start
        times, frames, label = pieces[index]
        cut.append((times[first : taken[index]], frames[first : taken[index]], label))
    return cut


class Network:
    """Nodes, and directed ways between them. All its random numbers come from `rng`."""

    def __init__(self, clock: VirtualClock, rng: np.random.Generator) -> None:
        self.clock = clock
        self._rng = rng
        self._ways: dict[tuple[Node, Node], _Way] = {}
        self._handlers: dict[Node, Handler] = {}

    def add_link(
        self,
        a: Node,
        b: Node,
        model: LinkModel,
        *,
        changes: Iterable[tuple[float, LinkModel]] = (),
        outages: Iterable[tuple[float, float]] = (),
        both: bool = True,
    ) -> None:
        """A link from `a` to `b`, and with `both` one like it back. `changes`: (at, what it is from then on);
        `outages`: (at, seconds)."""
        changes, outages = list(changes), list(outages)
        for source, target in [(a, b), (b, a)] if both else [(a, b)]:
            if (source, target) in self._ways:
                raise ValueError(f"there is a link from {source!r} to {target!r} already")
            fates, damage = self._rng.spawn(2)
            way = self._ways[source, target] = _Way(source, target, Direction(model, fates), damage)
            for at, changed in changes:
                way.direction.change(at, changed)
            for at, seconds in outages:
                way.direction.outage(at, seconds)

    def change(self, a: Node, b: Node, model: LinkModel, at: float | None = None) -> None:
        """Make the way from `a` to `b` another one, now or at a time to come."""
        self._way(a, b).direction.change(self.clock.now if at is None else at, model)

    def outage(self, a: Node, b: Node, seconds: float, at: float | None = None) -> None:
        """Let nothing through from `a` to `b`, for so long."""
        self._way(a, b).direction.outage(self.clock.now if at is None else at, seconds)

    def forget(self, a: Node, b: Node) -> int:
        """Drop what is on its way from `a` to `b`; returns how many datagrams that were."""
        return self._way(a, b).forget()

    def waiting(self, a: Node, b: Node) -> float:
        """Bytes in the queue from `a` to `b`."""
        return self._way(a, b).direction.waiting(self.clock.now)

    def counters(self, a: Node, b: Node) -> Counters:
        return self._way(a, b).direction.counters

    def _way(self, a: Node, b: Node) -> _Way:
        try:
            return self._ways[a, b]
        except KeyError:
            raise ValueError(f"there is no link from {a!r} to {b!r}") from None

    def send(self, a: Node, b: Node, frames: Frames, label: Hashable = None) -> None:
        """Put datagrams, (n, size), on the way from `a` to `b`, all at the clock's time. They are copied."""
        if len(frames):
            self._way(a, b).send(self.clock.now, frames, label)

    def next_event(self) -> float:
        """When the next datagrams arrive; infinity when none are on their way."""
        return min((way.next_event() for way in self._ways.values()), default=math.inf)

    def poll_deliveries(self) -> list[Delivery]:
        """What has arrived by the clock's time, link by link."""
        now = self.clock.now
        return [delivery for way in self._ways.values() for delivery in way.take(now)]

    def attach(self, node: Node, handler: Handler) -> None:
        """Have `run` give what arrives at a node to `handler(now, delivery)`. What arrives where none is
        attached is lost."""
        self._handlers[node] = handler

    def detach(self, node: Node) -> None:
        self._handlers.pop(node, None)

    def run(self, until: float) -> None:
        """Go on to `until`: make the clock's calls, and hand over what arrives, in the order of time."""
        while (at := min(self.next_event(), self.clock.next_event())) <= until:
            self.clock.advance(max(at, self.clock.now))
            for delivery in self.poll_deliveries():
                if handler := self._handlers.get(delivery.target):
                    handler(self.clock.now, delivery)
        self.clock.advance(max(until, self.clock.now))
