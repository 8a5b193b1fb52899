"""One direction of a link: its queue, its rate, and what it does to datagrams, a whole burst at a time.

The words and what they mean are the lab's (docs/lab.md), so that what is found here can be tried there;
jitter has the normal distribution alone, and the fates are not the lab's to the packet: its random numbers
are its own.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

PACKET = 1500  # bytes: what a slot of the burst model carries
HEADERS = 28  # bytes: IPv4's and UDP's, which a datagram brings on the wire beside its own
_LEAST_QUEUE = 2**16  # bytes, where none is named
_LEAST_OVERTAKEN = 1e-3  # seconds, where none is named
_PERIODS = 8  # standard deviations between two knots of the jitter's course, as in the lab
_KEPT_KNOTS = 256
_SHARES = ("loss", "reorder", "duplicate", "corrupt")


@dataclass(frozen=True)
class LinkModel:
    """How one direction behaves. Raises ValueError for what no link can be."""

    rate: float  # bytes of IP packets per second
    delay: float = 0.0  # seconds, one way
    jitter: float = 0.0  # seconds: the standard deviation of the delay
    queue: int | None = None  # bytes that may wait, beyond them is dropped; None: a bandwidth-delay product
    loss: float = 0.0  # the share of packets that get lost on the wire
    burst: float = 1.0  # mean length of a run of lost packets, in slots; 1: each packet by itself
    reorder: float = 0.0  # the share of packets that overtake
    reorder_by: float | None = None  # seconds by which these come earlier; None: a tenth of the delay
    duplicate: float = 0.0  # the share of packets that arrive twice
    corrupt: float = 0.0  # the share of packets in which a bit is flipped
    down: bool = False  # nothing gets through

    def __post_init__(self) -> None:
        if not 0 < self.rate < math.inf:
            raise ValueError(f"rate = {self.rate:g}: it is above 0; where nothing gets through, set `down`")
        if not (0 <= self.delay < math.inf and 0 <= self.jitter <= self.delay):
            raise ValueError(f"delay = {self.delay:g}, jitter = {self.jitter:g}: 0 <= jitter <= delay")
        for name in _SHARES:
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} = {getattr(self, name):g}: a share is between 0 and 1")
        if not self.burst >= 1 or (self.burst > 1 and self.loss > self.burst / (self.burst + 1)):
            raise ValueError(f"a loss of {self.loss:g} cannot be had in bursts of {self.burst:g}")
        if self.reorder and not 0 < self.skipped <= self.delay:
            raise ValueError(f"reorder_by = {self.skipped:g}: more than 0, at most the delay, {self.delay:g}")

    @property
    def room(self) -> int:
        """Bytes of the queue."""
        return max(round(self.rate * self.delay), _LEAST_QUEUE) if self.queue is None else self.queue

    @property
    def skipped(self) -> float:
        """Seconds by which a packet that overtakes comes earlier."""
        default = min(self.delay, max(self.delay / 10, _LEAST_OVERTAKEN))
        return default if self.reorder_by is None else self.reorder_by

    @property
    def memory(self) -> float:
        """The burst chain's second eigenvalue: what is left after a slot of where it was."""
        if self.burst <= 1 or not 0 < self.loss < 1:
            return 0.0
        leave = 1 / self.burst
        return 1 - leave - leave * self.loss / (1 - self.loss)


@dataclass
class Counters:
    """What became of the datagrams of a direction so far."""

    offered: int = 0
    queue: int = 0  # found the queue full
    loss: int = 0
    outage: int = 0
    delivered: int = 0  # copies count
    duplicated: int = 0
    corrupted: int = 0
    reordered: int = 0
    most_waiting: float = 0.0  # bytes that the queue held at once


@dataclass(frozen=True)
class Fates:
    """What becomes of the datagrams of a burst that found room in the queue, in the order of sending, (n,)
    each."""

    due: Floats  # seconds: when it arrives, were it not lost
    lost: Bools
    twice: Bools
    damaged: Bools
    overtook: Bools


@dataclass(frozen=True)
class _Course:
    """The phases over time, as arrays: `starts` in seconds, and `work`, the bytes that the wire can have
    taken by then."""

    starts: Floats
    work: Floats
    models: tuple[LinkModel, ...]
    columns: dict[str, npt.NDArray[np.float64]] = field(default_factory=dict)

    @staticmethod
    def of(phases: Iterable[tuple[float, LinkModel]]) -> _Course:
        starts, models = zip(*phases, strict=True)
        work = [0.0]
        for index in range(1, len(starts)):
            work.append(work[-1] + (starts[index] - starts[index - 1]) * models[index - 1].rate)
        return _Course(np.array(starts), np.array(work), models)

    def column(self, name: str, phases: npt.NDArray[np.intp]) -> Floats:
        """A quality at each of these phases."""
        if name not in self.columns:
            self.columns[name] = np.array([float(getattr(model, name)) for model in self.models])
        return self.columns[name][phases]

    def phase(self, when: float) -> int:
        return bisect_right(self.starts, when) - 1

    def work_at(self, when: float) -> float:
        phase = self.phase(when)
        return float(self.work[phase] + (when - self.starts[phase]) * self.models[phase].rate)

    def when(self, work: Floats) -> Floats:
        """The moments at which the wire has taken so many bytes."""
        phases = np.searchsorted(self.work, work, side="right") - 1
        found: Floats = self.starts[phases] + (work - self.work[phases]) / self.column("rate", phases)
        return found


class Direction:
    """Decides the fates of datagrams that go one way. `rng`'s children are drawn from, one for each quality:
    so the fates by one do not depend on another's."""

    def __init__(self, model: LinkModel, rng: np.random.Generator) -> None:
        self.counters = Counters()
        self._changes: dict[float, LinkModel] = {-math.inf: model}
        self._outages: list[tuple[float, float]] = []
        self._course = _Course.of([(0.0, model)])
        self._loss, self._reorder, self._duplicate, self._corrupt, jitter = rng.spawn(5)
        self._jitter_key = int(jitter.integers(2**63))
        self._values: dict[int, float] = {}  # at knots of the jitter's course
        self._taken = 0.0  # of the wire's work, by the datagrams so far
        self._left = -math.inf  # when the last of them has left
        self._bad = False  # the burst chain's state
        self._last = 0.0  # when the last that did not overtake arrives

    def change(self, at: float, model: LinkModel) -> None:
        """Behave like `model` from `at` on; datagrams that were sent before keep what was decided for
        them."""
        self._changes[at] = model
        self._lay_out()

    def outage(self, at: float, seconds: float) -> None:
        """Let nothing through from `at` on for so long."""
        self._outages.append((at, at + seconds))
        self._lay_out()

    def _lay_out(self) -> None:
        changes = sorted(self._changes)
        moments = {0.0, *changes[1:], *(moment for outage in self._outages for moment in outage)}
        phases = []
        for moment in sorted(moments):
            model = self._changes[changes[bisect_right(changes, moment) - 1]]
            down = model.down or any(start <= moment < end for start, end in self._outages)
            phases.append((moment, replace(model, down=down)))
        self._course = _Course.of(phases)

    def waiting(self, now: float) -> float:
        """Bytes in the queue, with what the wire has not wholly taken yet."""
        return max(0.0, self._taken - self._course.work_at(now))

    def offer(self, now: float, count: int, size: int) -> Fates:
        """Datagrams of `size` bytes come to the queue at once; the first ones find room."""
        room, waiting = self._course.models[self._course.phase(now)].room, self.waiting(now)
        kept = min(count, max(0, (room - round(waiting)) // size))
        self.counters.offered += count
        self.counters.queue += count - kept
        self.counters.most_waiting = max(self.counters.most_waiting, waiting + kept * size)
        self._taken = max(self._taken, self._course.work_at(now))
        left = self._course.when(self._taken + np.arange(size, size * kept + 1, size, dtype=np.float64))
        self._taken += size * kept
        # Each quality is the one that holds when a datagram has left, and each draws for each datagram.
        phases = np.searchsorted(self._course.starts, left, side="right") - 1
        lost = self._lost(left, phases)
        due, overtook = self._arrivals(
            left, phases, self._reorder.random(kept) < self._of("reorder", phases), lost
        )
        twice = self._duplicate.random(kept) < self._of("duplicate", phases)
        damaged = self._corrupt.random(kept) < self._of("corrupt", phases)
        there = ~lost
        self.counters.delivered += int(there.sum() + (twice & there).sum())
        self.counters.duplicated += int((twice & there).sum())
        self.counters.corrupted += int((damaged & there).sum())
        self.counters.reordered += int(overtook.sum())
        return Fates(due, lost, twice & there, damaged & there, overtook)

    def _of(self, name: str, phases: npt.NDArray[np.intp]) -> Floats:
        return self._course.column(name, phases)

    def _lost(self, left: Floats, phases: npt.NDArray[np.intp]) -> Bools:
        if not len(left):
            return np.zeros(0, bool)
        down = self._of("down", phases) > 0
        bad = self._bursts(left, phases)
        self.counters.outage += int(down.sum())
        self.counters.loss += int((bad & ~down).sum())
        return bad | down

    def _bursts(self, left: Floats, phases: npt.NDArray[np.intp]) -> Bools:
        """The Gilbert-Elliott chain, driven by the time on the wire: a datagram takes a slot, and an idle
        link as many as would have fitted. P(bad in n slots | now) = loss + (now - loss) * memory^n."""
        loss, memory = self._of("loss", phases), self._of("memory", phases)
        gaps = np.diff(left, prepend=self._left)
        self._left = left[-1]
        slots = np.maximum(np.floor(gaps * self._of("rate", phases) / PACKET + 1e-6), 1.0)
        stays = np.power(memory, slots)
        from_bad, from_good = loss + (1 - loss) * stays, loss - loss * stays
        draws = self._loss.random(len(left))
        # A draw below both chances, or above both, tells the state whatever the one before it was; between
        # them the state stays, or where the memory is negative turns. So the last telling draw and the turns
        # since decide.
        told_bad = draws < np.minimum(from_bad, from_good)
        told = told_bad | (draws >= np.maximum(from_bad, from_good))
        teller = np.maximum.accumulate(np.where(told, np.arange(len(left)), -1))
        turns = np.cumsum(~told & (from_bad < from_good))
        known = teller >= 0
        since = turns - np.where(known, turns[teller], 0)
        bad: Bools = np.where(known, told_bad[teller], self._bad) != (since % 2 == 1)
        self._bad = bool(bad[-1])
        return bad

    def _arrivals(
        self, left: Floats, phases: npt.NDArray[np.intp], early: Bools, lost: Bools
    ) -> tuple[Floats, Bools]:
        """When each arrives, and which of them overtake others. All others keep their order, whatever the
        jitter."""
        if not len(left):
            return left, early
        due = left + np.maximum(self._of("delay", phases) + self._jitter(left, phases), 0.0)
        sooner = np.maximum(due - self._of("skipped", phases), left)
        last = np.maximum.accumulate(np.where(early | lost, self._last, due))
        before = np.concatenate([[self._last], np.maximum(last[:-1], self._last)])
        overtook = early & ~lost & (sooner < before)
        ordered = np.maximum.accumulate(np.where(overtook | lost, self._last, due))
        ordered = np.maximum(ordered, self._last)
        self._last = float(ordered[-1])
        return np.where(overtook, sooner, ordered), overtook

    def _jitter(self, left: Floats, phases: npt.NDArray[np.intp]) -> Floats:
        """A smooth course over time that is normal at every moment: independent values stand at knots, and
        between two of them it is cos(a) first + sin(a) second. (Of independent ones that must not reorder,
        the latest of many would count.)"""
        jitter = self._of("jitter", phases)
        if not jitter.any():
            return jitter
        place = left / np.maximum(_PERIODS * jitter, 1e-9)
        knot = np.floor(place)
        angle = (place - knot) * (math.pi / 2)
        first, second = self._knots(knot), self._knots(knot + 1)
        late: Floats = jitter * np.clip(np.cos(angle) * first + np.sin(angle) * second, -4.0, 4.0)
        return late

    def _knots(self, knot: Floats) -> Floats:
        """A standard normal value for each, always the same for the same knot."""
        numbers, places = np.unique(knot, return_inverse=True)
        values = [self._knot(int(number)) for number in numbers]
        found: Floats = np.array(values)[places]
        return found

    def _knot(self, number: int) -> float:
        if number not in self._values:
            if len(self._values) >= _KEPT_KNOTS:
                self._values.clear()
            self._values[number] = np.random.default_rng((self._jitter_key, number)).standard_normal()
        return self._values[number]
