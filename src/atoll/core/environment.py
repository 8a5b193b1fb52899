"""The environment at the start of this process, which a script may have emptied since.

Linux keeps it under /proc. On other systems, or if a package has overwritten it with a process title,
variables that the script has removed are unknown.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

_STARTED_WITH = Path("/proc/self/environ")


def started_with() -> dict[str, str]:
    """Return the environment variables at the start of this process; empty if unknown."""
    try:
        entries = os.fsdecode(_STARTED_WITH.read_bytes()).split("\0")
    except OSError:
        return {}
    return {name: value for name, equals, value in (each.partition("=") for each in entries) if equals}


def variable(name: str) -> str | None:
    """Return a variable's present value, or its value before the script removed it."""
    return os.environ[name] if name in os.environ else started_with().get(name)


def removed(names: Iterable[str], before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the `names` that were set before and are not set now."""
    return [name for name in names if before.get(name) and name not in now]
