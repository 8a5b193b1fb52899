"""Curves from a metrics.jsonl of any length, with a bounded number of points, for the picture."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from atoll.observe.metrics import Line, read_lines

_BINS = 120  # most bins of the steps' time
_POINTS = 2000  # most points of a logged value's curve: twice a panel's columns of pixels
_MOST_NAMES = 10_000  # logged names that are counted


@dataclass
class Curve:
    """A logged value over the iterations, with `size` values to a point, so at most `_POINTS` points.

    Each point has the least and the greatest of its values, with their iterations, and the mean.
    """

    size: int
    least: list[tuple[int, float]] = field(default_factory=list)
    greatest: list[tuple[int, float]] = field(default_factory=list)
    means: list[float] = field(default_factory=list)
    last: tuple[int, float] = (0, 0.0)
    _count: int = 0

    def add(self, step: int, value: float) -> None:
        self.last = step, value
        place = self._count % self.size
        self._count += 1
        if place == 0:
            self.least.append(self.last)
            self.greatest.append(self.last)
            self.means.append(value)
            return
        self.means[-1] += (value - self.means[-1]) / (place + 1)
        if value < self.least[-1][1]:
            self.least[-1] = self.last
        if value > self.greatest[-1][1]:
            self.greatest[-1] = self.last

    @property
    def extremes(self) -> list[tuple[int, float]]:
        """The curve with all its peaks, as (iteration, value) in order of arrival."""
        if self.size == 1:
            return self.least
        pairs = zip(self.least, self.greatest, strict=True)
        return [point for pair in pairs for point in sorted(set(pair))]


@dataclass
class StepBin:
    """Consecutive iterations. Seconds are sums over them; `iteration` is the middle one."""

    iteration: int = 0
    count: int = 0
    seconds: float = 0.0
    waiting: float = 0.0
    phases: Counter[str] = field(default_factory=Counter)


@dataclass
class StepCurve:
    """The time of steps by use, with `size` iterations to a bin, so at most `_BINS` bins."""

    size: int
    bins: list[StepBin] = field(default_factory=list)
    _iterations: list[int] = field(default_factory=list)  # of the last bin

    def add(self, line: Line) -> None:
        if not self.bins or self.bins[-1].count == self.size:
            self.bins.append(StepBin())
            self._iterations.clear()
        last = self.bins[-1]
        self._iterations.append(line.iteration)
        last.iteration = self._iterations[len(self._iterations) // 2]
        last.count += 1
        last.seconds += line.seconds
        last.waiting += line.waiting
        last.phases.update(line.phases)


@dataclass
class Curves:
    """The drawn part of a metrics.jsonl: curves of logged `values` by name, and its `steps`."""

    values: dict[str, Curve]
    steps: StepCurve


def read_curves(path: Path, most: int, last_name: str = "") -> Curves:
    """Read curves from `path`, in two passes line by line, so that memory does not grow with the file.

    Returns curves of the `most` names that were logged most often. Names logged equally often are in order of
    their first line, and `last_name` comes after all others.
    """
    logged, known, timed = Counter[str](), Counter[str](), 0
    for line in read_lines(path):
        timed += line.seconds > 0
        for name, value in line.values.items():
            if name in logged or len(logged) < _MOST_NAMES:
                logged[name] += 1
                known[name] += value is not None
    names = sorted(logged, key=lambda name: (name == last_name, -logged[name]))[:most]
    values = {name: Curve(max(1, -(-known[name] // _POINTS))) for name in names}
    steps = StepCurve(max(1, -(-timed // _BINS)))
    for line in read_lines(path):
        if line.seconds > 0:
            steps.add(line)
        for name, curve in values.items():
            if (value := line.values.get(name)) is not None:
                curve.add(line.iteration, value)
    return Curves(values, steps)
