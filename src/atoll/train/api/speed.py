"""A worker slowed down, as on a slower device: what it computes is stretched by sleeping.

$ATOLL_SPEED, in (0, 1], says how fast it is; a lab sets it. At 0.25, 10 ms of computing take 40. What the
worker waits for (other workers, shards, samples) is not stretched, nor, on a CPU, what it loses to other
processes. It sleeps whenever gradients are about to leave, for as long as it owes by then, so messages leave
a slow worker's backward at a slow worker's times.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping

from atoll.core.config import SPEED_VARIABLE
from atoll.core.errors import ConfigError

_LEAST_SLEEP = 1e-4  # seconds: a shorter one takes as long; what is owed is carried on


def speed_from(environment: Mapping[str, str] | None = None) -> float:
    """The speed that $ATOLL_SPEED asks for, 1 unless set; raises ConfigError unless it is in (0, 1]."""
    text = (os.environ if environment is None else environment).get(SPEED_VARIABLE, "") or "1"
    try:
        speed = float(text)
    except ValueError:
        speed = 0.0
    if not 0 < speed <= 1:
        raise ConfigError(
            f"{SPEED_VARIABLE}={text}: not a speed; give a number above 0 and at most 1 (0.25: a step takes "
            "four times as long; no worker can be made faster than it is)"
        )
    return speed


class Stretch:
    """Makes what is computed between two calls of `settle` take 1 / `speed` times as long: the second sleeps.

    `computed()` is how long this worker has computed so far, in seconds. Measuring begins with `begin`.
    """

    def __init__(
        self,
        speed: float,
        computed: Callable[[], float],
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._slower = 1 / speed - 1  # seconds of sleep for each of work
        self._computed, self._clock, self._sleep = computed, clock, sleep
        self._before: float | None = None  # of `computed`, when it was last looked at
        self._owed = 0.0  # below 0: it has slept too long

    def begin(self) -> None:
        """Measure from now on, unless it measures already."""
        if self._before is None:
            self._before = self._computed()

    def settle(self) -> None:
        """Sleep for what was computed since the last call."""
        if self._before is None:
            return
        self._owed += max(0.0, self._computed() - self._before) * self._slower
        if self._owed >= _LEAST_SLEEP:
            start = self._clock()
            self._sleep(self._owed)
            self._owed -= self._clock() - start
        self._before = self._computed()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What is done while this is entered is not stretched: files are written, say."""
        measured = self._before is not None
        self.settle()
        self._before = None
        try:
            yield
        finally:
            if measured:
                self.begin()
