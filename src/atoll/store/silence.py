"""For how long a silence is borne, measured: by how regularly a member was heard so far."""

from __future__ import annotations

from array import array
from statistics import median

FLOOR_SECONDS = 3.5  # of silence that is always borne: a process that was stopped for 3 s goes on
WINDOW = 64  # gaps that are remembered
USUAL_SECONDS = 10.0  # of patience: of a longer one more is always borne
BEATS = 2.0  # medians: one heartbeat may be lost, or be late by its whole period
DEVIATIONS = 10.0  # median absolute deviations beside them: 6.7 standard deviations, were the gaps normal


def least_patience(patience: float) -> float:
    """Return the seconds of silence that are always borne, where `patience` is the most: 3.5, and as much
    more as the patience is more than usual."""
    return FLOOR_SECONDS * max(1.0, patience / USUAL_SECONDS)


class Patience:
    """The silence, in seconds, after which a member counts as dead: 2 medians of the gaps between its signs
    of life plus 10 times their median absolute deviation, within [floor, ceiling].

    Median and median absolute deviation stay where they are while fewer than half of the gaps are extreme
    (F. R. Hampel, "The influence curve and its role in robust estimation", 1974). A mean with a variance, as
    in phi accrual (N. Hayashibara et al., 2004) or TCP's timeout (V. Jacobson, 1988), does not: one pause
    that was survived must not make all later deaths be noticed late. Whoever's rhythm itself becomes slower
    is borne for longer from half a window on. A ceiling below the floor counts alone: it is what a person
    has set.
    """

    def __init__(self, floor: float, ceiling: float) -> None:
        """`floor` and `ceiling` in seconds, more than 0; raises ValueError for others."""
        if not (floor > 0 and ceiling > 0):
            raise ValueError(f"floor {floor:g} s and ceiling {ceiling:g} s must be more than 0")
        self.floor, self.ceiling = min(floor, ceiling), ceiling
        self._gaps = array("d")
        self._oldest = 0  # the place of the gap that the next one takes, once there are WINDOW
        self._seconds: float | None = ceiling  # before anything is known of the member; None: not worked out

    def note(self, gap: float) -> None:
        """The member was heard, `gap` seconds after the last time; raises ValueError if negative."""
        if not gap >= 0:
            raise ValueError(f"a gap of {gap:g} s")
        gap = min(gap, self.ceiling)  # infinity too has a median
        if len(self._gaps) < WINDOW:
            self._gaps.append(gap)
        else:
            self._gaps[self._oldest] = gap
            self._oldest = (self._oldest + 1) % WINDOW
        self._seconds = None

    @property
    def seconds(self) -> float:
        """The silence that is borne, in seconds. It is worked out only where somebody asks: signs of life
        come far more often than silences."""
        if self._seconds is None:
            middle = median(self._gaps)
            deviation = median(abs(each - middle) for each in self._gaps)
            self._seconds = min(max(BEATS * middle + DEVIATIONS * deviation, self.floor), self.ceiling)
        return self._seconds
