"""A free TCP port of this machine, without which no run can begin."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

from atoll.core.errors import UserError

LOOPBACK = "127.0.0.1"
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """Return a free port. Raises UserError if there is none."""
    try:
        with socket.socket() as bound:
            bound.bind((LOOPBACK, 0))
            port: int = bound.getsockname()[1]
    except OSError as error:
        among = ""
        with contextlib.suppress(OSError, ValueError):
            lowest, highest = map(int, _RANGE.read_text(encoding="ascii").split())
            among = f" among {lowest} to {highest} (net.ipv4.ip_local_port_range)"
        raise UserError(
            f"this machine has no free TCP port{among}, and the processes of a run meet at one: end programs "
            f"that hold ports, or widen the range ({error.strerror or error})"
        ) from None
    return port
