"""The environment that a process was started with, which a script may have emptied since.

Linux keeps it under /proc. On other systems, and where a package has written a process title over it, a
variable that the script has removed is not known.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

_STARTED_WITH = Path("/proc/self/environ")


def started_with() -> dict[str, str]:
    """Return the variables that this process was started with, as far as is known."""
    try:
        entries = os.fsdecode(_STARTED_WITH.read_bytes()).split("\0")
    except OSError:
        return {}
    return {name: value for name, equals, value in (each.partition("=") for each in entries) if equals}


def variable(name: str) -> str | None:
    """Return a variable's value: as it is now, or as it was before the script removed it."""
    return os.environ[name] if name in os.environ else started_with().get(name)


def removed(names: Iterable[str], before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return those of `names` that were set before and are not now."""
    return [name for name in names if before.get(name) and name not in now]
