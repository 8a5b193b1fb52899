"""What benchmarks share that make sites of a lab in their own process: what each site is given, and how the
emulator kept up."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from common import hindrance
from support.sites import Sites

BUFFER = 2**26
# Of each site: room for more than a bandwidth-delay product, and windows that stay open between turns.
SYSCTLS = {
    "tcp_rmem": f"4096 131072 {BUFFER}",
    "tcp_wmem": f"4096 131072 {BUFFER}",
    "tcp_slow_start_after_idle": "0",
    "tcp_no_metrics_save": "1",
}


def can_begin() -> bool:
    """Whether sites can be made here; says why they cannot. If they can, this process hurries, and what it
    starts inherits that: other work disturbs both ends less."""
    reason = hindrance()
    if reason:
        print(f"left out: {reason}")
        return False
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    return True


def prepare(sites: Sites, **others: str) -> None:
    """Set up both sites' TCP, by these settings and `others`."""

    def write() -> None:
        for name, value in {**SYSCTLS, **others}.items():
            Path(f"/proc/sys/net/ipv4/{name}").write_text(value, encoding="ascii")

    for site in (0, 1):
        sites.inside(site, write)


def emulator_record(sites: Sites) -> dict[str, Any]:
    """How the emulator kept up: seconds it was behind or late, and what was dropped that no link had to."""
    total = sites.emulator.totals()
    return {
        "behind_seconds": total.behind_seconds,
        "late_mean": total.lateness_mean,
        "late_p99": total.lateness_p99,
        "own_drops": total.dropped,
        "unread": sites.unread(0) + sites.unread(1),
        "full_sockets": sites.overrun(0) + sites.overrun(1),
    }
