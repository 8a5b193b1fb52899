"""How many files and connections this process may have open at a time."""

from __future__ import annotations

import contextlib
import resource


def raise_descriptor_limit() -> int:
    """Let this process open as many files and connections as its hard limit allows, and return that number.

    The soft limit is 1,024 on most systems, for programs that use `select`; Atoll does not.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # a system may allow less than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return soft
