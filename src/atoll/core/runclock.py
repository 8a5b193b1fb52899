"""The clock of a run's records: seconds since the epoch, one clock for all processes of a machine.

It is the machine's monotonic clock plus an offset that the wall clock gives once. So no duration in the
records changes when someone sets the wall clock, or when the processes' wall clocks differ. `atoll run` gives
the offset to all processes that it starts; other processes compute their own when they start.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path

CLOCK_VARIABLE = "ATOLL_CLOCK"  # holds a result of `clock_setting`
# Monotonic clocks of another boot, and perhaps of another container, count from another moment.
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/time")


def record_time() -> float:
    """Return the time for an event that happens now."""
    return _SET_AT + time.monotonic()


def clock_setting() -> str:
    """Return the value of `CLOCK_VARIABLE` that gives this process's clock to a child process."""
    return f"{_SET_AT!r} {_machine()}"


def _machine() -> str:
    """Return a name that is equal for processes whose monotonic clocks count from one moment."""
    try:
        return f"{_BOOT.read_text().strip()} {_NAMESPACE.readlink()}"
    except OSError:  # not Linux, or an old one
        return platform.node()


def _set_at(environment: Mapping[str, str]) -> float:
    """Return the offset to add to the monotonic clock: the environment's, if it was set on this machine."""
    number, _, machine = environment.get(CLOCK_VARIABLE, "").partition(" ")
    try:
        set_at = float(number)
    except ValueError:
        set_at = math.nan
    if math.isfinite(set_at) and machine == _machine():
        return set_at
    return time.time() - time.monotonic()


_SET_AT = _set_at(os.environ)
