"""A worker slowed down, as on a slower device: what it computes is stretched by sleeping.

$ATOLL_SPEED, in (0, 1], says how fast it is; a lab sets it. At 0.25, 10 ms of computing take 40. What the
worker waits for (other workers, shards, samples) is not stretched. It sleeps whenever gradients are about to
leave, for as long as it owes by then, so messages leave a slow worker's backward at a slow worker's times.
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
    """Makes what lies between two calls of `settle` take 1 / `speed` times as long: the second one sleeps.

    `waited()` is the total time in seconds that the worker has waited so far, which is left as it is;
    `finish()` returns when the device has done what it was given. Measuring begins with `begin`.
    """

    def __init__(
        self,
        speed: float,
        waited: Callable[[], float],
        *,
        finish: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._slower = 1 / speed - 1  # seconds of sleep for each of work
        self._waited, self._finish, self._clock, self._sleep = waited, finish, clock, sleep
        self._since: float | None = None
        self._waited_before = 0.0
        self._owed = 0.0  # below 0: it has slept too long

    def begin(self) -> None:
        """Measure from now on, unless it measures already."""
        if self._since is None:
            self._since, self._waited_before = self._clock(), self._waited()

    def settle(self) -> None:
        """Sleep for what was computed since the last call."""
        if self._since is None:
            return
        self._finish()
        now, waited = self._clock(), self._waited()
        computed = now - self._since - (waited - self._waited_before)
        self._owed += max(0.0, computed) * self._slower
        if self._owed >= _LEAST_SLEEP:
            self._sleep(self._owed)
            woken = self._clock()
            self._owed -= woken - now
            now = woken
        self._since, self._waited_before = now, waited

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What happens while this is entered is no computing: files are written, say."""
        measured = self._since is not None
        self.settle()
        self._since = None
        try:
            yield
        finally:
            if measured:
                self.begin()
