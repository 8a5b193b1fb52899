"""The target loss rate, at which throughput over delay is greatest, fitted to observations.

Throughput and delay are fitted as functions of the loss rate by least squares: a straight line, or a parabola
where it explains clearly more. Where the history cannot decide, the target stays at its safe value, and the
reason says why. Source: docs/ltp-rates.md, "The target loss".
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]

HISTORY = 256  # observations, some minutes of them
LEAST_HISTORY = 16  # observations for a fit: four for each of the parabola's coefficients, and some
LEAST_RANGE = 0.005  # of loss, between the tenth and the ninetieth hundredth, for a fit
OUTLYING = 5.0  # robust standard deviations from the fit beyond which an observation is an outlier
MOST_OUTLYING = 0.1  # share of outliers above which the history is not of one path
BETTER = 2.0  # standard errors by which the best score must beat the safe value's
ILL_CONDITIONED = 1e3  # condition number of the scaled design above which a ridge is added
RIDGE = 1e-3  # of the observations' number
EXACT = 1e-6  # of the fitted value at the range's start: smaller residuals are rounding
CHOICES = 201  # loss rates compared
PATH_CHANGE = 0.25  # of the least round trip: a larger change means another path


@dataclass(frozen=True)
class Choice:
    """A target loss rate, and why."""

    value: float
    fitted: bool
    reason: str


@dataclass(frozen=True)
class _Fit:
    coefficients: Floats  # of 1, x, x^2: two or three
    inverse: Floats  # of the (ridged) normal matrix
    variance: float  # of the residuals
    residuals: Floats

    def at(self, x: Floats) -> Floats:
        return _design(x, len(self.coefficients)) @ self.coefficients

    def error(self, x: Floats) -> Floats:
        """Return the standard error of the fitted values."""
        design = _design(x, len(self.coefficients))
        error: Floats = np.sqrt(self.variance * np.einsum("ij,jk,ik->i", design, self.inverse, design))
        return error


class Target:
    """The target loss of one path. `safe` and `most` are shares of packets; `most` bounds every choice."""

    def __init__(self, safe: float, most: float) -> None:
        self._safe, self._most = min(safe, most), most
        self._history: deque[tuple[float, float, float]] = deque(maxlen=HISTORY)
        self._min_rtt: float | None = None
        self._added = 0
        self.choice = Choice(self._safe, False, "the safe value: nothing was seen yet")

    def handle_observation(self, loss: float, throughput: float, delay: float, min_rtt: float) -> None:
        """Add an observation over some round trips.

        Args:
            loss: share of packets lost.
            throughput: bytes per second that arrived.
            delay: mean round trip in seconds.
            min_rtt: least round trip in seconds; a clear change means another path, and clears the history.
        """
        known = self._min_rtt
        if known is not None and abs(min_rtt - known) > PATH_CHANGE * known:
            self.handle_path_change("the least round trip changed")
        self._min_rtt = min_rtt if self._min_rtt is None else min(min_rtt, self._min_rtt)
        if loss < 0.0 or loss > 1.0 or throughput <= 0.0 or delay <= 0.0:
            return
        self._history.append((loss, throughput, delay))
        self._added += 1
        if self._added % LEAST_HISTORY == 0:
            self.choice = self._choose()

    def handle_path_change(self, reason: str) -> None:
        """Clear the history: it describes a path that is no longer used."""
        self._history.clear()
        self._added, self._min_rtt = 0, None
        self.choice = Choice(self._safe, False, f"the safe value: the path has changed: {reason}")

    def _choose(self) -> Choice:
        loss, throughput, delay = np.array(self._history).T
        low, high = np.quantile(loss, [0.1, 0.9])
        if high - low < LEAST_RANGE:
            return self._stay(f"loss was between {low:.2%} and {high:.2%} only, too narrow a range to fit")
        if low >= self._most:
            return self._stay(f"loss was above {self._most:.2%} all the time")
        x = (loss - low) / (high - low)
        fits = _fit(x, throughput), _fit(x, delay)
        outliers = max(_outliers(fit) for fit in fits)
        if outliers > MOST_OUTLYING:
            return self._stay(f"{outliers:.0%} of what was seen are outliers")
        choices = np.linspace(low, min(high, self._most), CHOICES)
        return self._best(choices, (choices - low) / (high - low), *fits)

    def _best(self, choices: Floats, x: Floats, throughput: _Fit, delay: _Fit) -> Choice:
        values, delays = throughput.at(x), delay.at(x)
        if values.min() <= 0.0 or delays.min() <= 0.0:
            return self._stay("the fit is not positive where loss was seen")
        score = values / delays
        # The squared relative errors of a quotient's parts add up.
        error = score * np.sqrt((throughput.error(x) / values) ** 2 + (delay.error(x) / delays) ** 2)
        best = int(np.argmax(score))
        safe = int(np.argmin(np.abs(choices - self._safe)))
        if score[best] - score[safe] <= BETTER * (error[best] + error[safe]):
            return self._stay("no other loss rate serves clearly better than the safe value")
        value = float(choices[best])
        return Choice(value, True, f"throughput over delay is greatest at {value:.2%} of loss")

    def _stay(self, why: str) -> Choice:
        return Choice(self._safe, False, f"the safe value: {why}")


def _design(x: Floats, columns: int) -> Floats:
    return x[:, None] ** np.arange(columns)


def _fit(x: Floats, y: Floats) -> _Fit:
    """Return the parabola if it leaves clearly less than the line (Akaike's criterion, corrected)."""
    line, parabola = _least_squares(x, y, 2), _least_squares(x, y, 3)
    return parabola if _criterion(parabola) < _criterion(line) else line


def _least_squares(x: Floats, y: Floats, columns: int) -> _Fit:
    design = _design(x, columns)
    normal = design.T @ design
    if np.linalg.cond(normal) > ILL_CONDITIONED**2:
        normal = normal + RIDGE * len(x) * np.diag([0.0] + [1.0] * (columns - 1))
    inverse: Floats = np.asarray(np.linalg.inv(normal), dtype=np.float64)
    coefficients = inverse @ (design.T @ y)
    residuals = y - design @ coefficients
    variance = float(residuals @ residuals) / (len(x) - columns)
    return _Fit(coefficients, inverse, variance, residuals)


def _criterion(fit: _Fit) -> float:
    seen, free = len(fit.residuals), len(fit.coefficients) + 1
    # The least variance that counts: below it two exact fits differ by rounding alone.
    least = (EXACT * float(fit.coefficients[0])) ** 2 + 1e-300
    square = float(fit.residuals @ fit.residuals) / seen + least
    return float(seen * np.log(square)) + 2 * free + 2 * free * (free + 1) / (seen - free - 1)


def _outliers(fit: _Fit) -> float:
    """Return the share of residuals far from the median (1.4826 scales the deviation to a standard one)."""
    away = np.abs(fit.residuals - np.median(fit.residuals))
    spread = max(1.4826 * float(np.median(away)), EXACT * abs(float(fit.coefficients[0])))
    return float(np.mean(away > OUTLYING * spread))
