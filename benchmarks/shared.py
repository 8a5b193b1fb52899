"""What benchmarks/fairness.py and benchmarks/incast.py share: a lab with one link, and flows over it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from atoll.core.errors import UserError
from atoll.lab.emulator import available
from atoll.lab.namespaces import find_way
from atoll.testing.sites import Sites, pair, phase
from shared_worker import LTP, Plan

INSIDE = "ATOLL_BENCHMARK_INSIDE"
WORKER = str(Path(__file__).parent / "shared_worker.py")
PORT = 47730
BUFFER = 2**26
# Of each site: room for more than a bandwidth-delay product, and windows that stay open between turns.
SYSCTLS = {
    "tcp_rmem": f"4096 131072 {BUFFER}",
    "tcp_wmem": f"4096 131072 {BUFFER}",
    "tcp_slow_start_after_idle": "0",
    "tcp_no_metrics_save": "1",
}


@dataclass(frozen=True)
class Link:
    """One link: bits per second, seconds each way, and how many bandwidth-delay products its queue holds."""

    rate: float
    delay: float
    queue: float

    @property
    def held(self) -> float:
        """Bytes of a bandwidth-delay product."""
        return self.rate / 8 * 2 * self.delay


def run(link: Link, plan: dict[str, Any], seconds: float) -> tuple[Any, Any, dict[str, Any]]:
    """What the workers and (for answers) the shard have measured, and how the emulator kept up."""
    given = Plan(
        host="",
        port=PORT,
        secrets=tuple(secrets.token_hex(32) for each in plan["flows"] if each == LTP),
        **plan,
    )
    quality = phase(link.rate, delay=link.delay, queue=round(link.queue * link.held))
    # The way back is as fast, and never full: the shard's words and acknowledgements are small.
    back = phase(link.rate, delay=link.delay, queue=round(link.held))
    with Sites(pair([quality], [back])) as sites:
        for site in (0, 1):
            sites.inside(site, prepare)
        arguments = json.dumps({**asdict(given), "host": sites.address(1)})
        shard = sites.start(1, [sys.executable, WORKER, "shard", arguments])
        try:
            assert shard.stdout is not None
            if not shard.stdout.readline():
                raise SystemExit(f"the shard has ended:\n{shard.communicate()[1]}")
            workers = sites.start(0, [sys.executable, WORKER, "workers", arguments])
            try:
                out, err = workers.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                workers.kill()
                shard.kill()
                raise SystemExit(
                    f"no end in {seconds:g} s: {workers.communicate()} {shard.communicate()}"
                ) from None
            if workers.returncode:
                raise SystemExit(f"the workers have failed:\n{err}")
            said = shard.stdout.readline() if given.rounds else "null"
            if not said:
                raise SystemExit(f"the shard has failed:\n{shard.communicate()[1]}")
            answers = json.loads(said)
        finally:
            shard.terminate()
            shard.communicate(timeout=60)
        total = sites.emulator.totals()
        emulator = {
            "behind_seconds": total.behind_seconds,
            "late_mean": total.lateness_mean,
            "late_p99": total.lateness_p99,
            "own_drops": total.dropped,
            "unread": sites.unread(0) + sites.unread(1),
            "full_sockets": sites.overrun(0) + sites.overrun(1),
        }
    return json.loads(out), answers, emulator


def prepare() -> None:
    for name, value in SYSCTLS.items():
        Path(f"/proc/sys/net/ipv4/{name}").write_text(value, encoding="ascii")


def hindrance() -> str:
    """Why this cannot run here; empty if it can. Starts itself anew as root of a namespace, if it must."""
    try:
        way = find_way()
    except UserError as error:
        return str(error)
    if "--user" in way and not os.environ.get(INSIDE):
        os.execvpe(way[0], [*way, sys.executable, *sys.argv], {**os.environ, INSIDE: "1"})
    return available()


def hurry() -> None:
    """Both ends inherit it: other work disturbs them less."""
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -10)
