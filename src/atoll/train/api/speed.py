"""The slowing of a worker, as on a slower device: its computing time is stretched by sleeping.

$ATOLL_SPEED, in (0, 1], is the speed; a lab sets it. At 0.25, 10 ms of computing take 40 ms. Waits for other
workers, shards and samples are not stretched, nor, on a CPU, time lost to other processes. The worker sleeps
whenever gradients are about to leave, for as long as it owes by then. So messages leave a slow worker's
backward at a slow worker's times.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping

from atoll.core.config import SPEED_VARIABLE
from atoll.core.errors import ConfigError

_LEAST_SLEEP = 1e-4  # seconds: a shorter sleep takes as long, so less is owed on


def speed_from(environment: Mapping[str, str] | None = None) -> float:
    """Return the speed that $ATOLL_SPEED asks for; 1 unless it is set. Raises ConfigError unless it is in (0,
    1]."""
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
    """The stretch of computing time between two calls of `settle` to 1 / `speed` times its length: the second
    call sleeps.

    `computed()` returns the seconds that this worker has computed so far. Measuring begins with `begin`.
    """

    def __init__(
        self,
        speed: float,
        computed: Callable[[], float],
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._slower = 1 / speed - 1  # seconds of sleep for each second of computing
        self._computed, self._clock, self._sleep = computed, clock, sleep
        self._before: float | None = None  # the latest value of `computed()`
        self._owed = 0.0  # seconds of sleep that are due; below 0: it has slept too long

    def begin(self) -> None:
        """Measure from now on. Does nothing if it measures already."""
        if self._before is None:
            self._before = self._computed()

    def settle(self) -> None:
        """Sleep for the computing since the last call."""
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
        """Return a context whose computing is not stretched, such as the writing of files."""
        measured = self._before is not None
        self.settle()
        self._before = None
        try:
            yield
        finally:
            if measured:
                self.begin()
