"""The patience with a member's silence, measured by how regularly it was heard."""

from __future__ import annotations

from array import array
from statistics import median

FLOOR_SECONDS = 3.5  # silence that is always borne: a process that was stopped for 3 s goes on
WINDOW = 64  # gaps that are kept
USUAL_SECONDS = 10.0  # the usual patience; a longer one raises the floor in proportion
BEATS = 2.0  # medians of the gaps: one heartbeat may be lost, or be late by its whole period
DEVIATIONS = 10.0  # median absolute deviations: 6.7 standard deviations, if the gaps were normal


def least_patience(patience: float) -> float:
    """Return the seconds of silence that are always borne, with a patience of at most `patience` seconds.

    They are 3.5, and in proportion more if the patience is more than usual.
    """
    return FLOOR_SECONDS * max(1.0, patience / USUAL_SECONDS)


class Patience:
    """The silence, in seconds, after which a member counts as dead.

    It is 2 medians of the gaps between its signs of life, plus 10 times their median absolute deviation,
    within [floor, ceiling]. A ceiling below the floor counts alone, as a person has set it.

    Median and median absolute deviation do not move while fewer than half of the gaps are extreme (F. R.
    Hampel, "The influence curve and its role in robust estimation", 1974). A mean with a variance, as in phi
    accrual (N. Hayashibara et al., 2004) or TCP's timeout (V. Jacobson, 1988), does: one pause that a member
    survived would let all its later deaths be noticed late. A member whose rhythm itself becomes slower is
    given more patience from half a window on.
    """

    def __init__(self, floor: float, ceiling: float) -> None:
        """Begin with a patience of `ceiling`. Raises ValueError for a floor or a ceiling that is not above
        0."""
        if not (floor > 0 and ceiling > 0):
            raise ValueError(f"floor {floor:g} s and ceiling {ceiling:g} s must be more than 0")
        self.floor, self.ceiling = min(floor, ceiling), ceiling
        self._gaps = array("d")
        self._oldest = 0  # the index of the gap that the next one replaces, once there are WINDOW
        self._seconds: float | None = ceiling  # as long as nothing is known; None: to be computed

    def note(self, gap: float) -> None:
        """Note a gap of so many seconds between two signs of life. Raises ValueError for a negative one."""
        if not gap >= 0:
            raise ValueError(f"a gap of {gap:g} s")
        gap = min(gap, self.ceiling)  # so that the deviation of an infinite gap is defined
        if len(self._gaps) < WINDOW:
            self._gaps.append(gap)
        else:
            self._gaps[self._oldest] = gap
            self._oldest = (self._oldest + 1) % WINDOW
        self._seconds = None

    @property
    def seconds(self) -> float:
        """The silence that is borne, in seconds. It is computed when it is asked for: signs of life come far
        more often."""
        if self._seconds is None:
            middle = median(self._gaps)
            deviation = median(abs(each - middle) for each in self._gaps)
            self._seconds = min(max(BEATS * middle + DEVIATIONS * deviation, self.floor), self.ceiling)
        return self._seconds
