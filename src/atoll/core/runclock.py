"""The time that a run's records carry: seconds since the epoch, on one clock for all processes of a machine.

The clock is the machine's monotonic one, set by the wall clock once. So no duration in the records changes
when a wall clock is set, or when one process's wall clock differs from the others'. `atoll run` sets the
clock for all processes that it starts; any other process sets its own when it starts.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path

CLOCK_VARIABLE = "ATOLL_CLOCK"  # what `clock_setting` gives
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # another one's monotonic clock counts from elsewhere
_NAMESPACE = Path("/proc/self/ns/time")  # and so may that of a container


def record_time() -> float:
    """Now, for an event of a run."""
    return _SET_AT + time.monotonic()


def clock_setting() -> str:
    """This process's clock, for the environment of processes that it starts (`CLOCK_VARIABLE`)."""
    return f"{_SET_AT!r} {_machine()}"


def _machine() -> str:
    """A name of what this process's monotonic clock counts from."""
    try:
        return f"{_BOOT.read_text().strip()} {_NAMESPACE.readlink()}"
    except OSError:  # not Linux, or an old one
        return platform.node()


def _set_at(environment: Mapping[str, str]) -> float:
    """Return what to add to the monotonic clock: as the environment says, if it speaks of this machine."""
    number, _, machine = environment.get(CLOCK_VARIABLE, "").partition(" ")
    try:
        set_at = float(number)
    except ValueError:
        set_at = math.nan
    if math.isfinite(set_at) and machine == _machine():
        return set_at
    return time.time() - time.monotonic()


_SET_AT = _set_at(os.environ)
