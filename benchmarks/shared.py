"""What benchmarks/fairness.py and benchmarks/incast.py share: a lab with one link, and flows over it."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from labsites import emulator_record, prepare
from shared_worker import LTP, Plan
from support.sites import Sites, pair, phase

WORKER = str(Path(__file__).parent / "shared_worker.py")
PORT = 47730


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
        prepare(sites)
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
        emulator = emulator_record(sites)
    return json.loads(out), answers, emulator


def verdict(found: dict[str, Any], unit: str = "") -> str:
    """The end of a case's line: whether it came to its target, and whether the lab was what it should be."""
    said = ""
    if found["target"]:
        said += f"; target {found['target']:g}{unit}: {'met' if found['met'] else 'MISSED'}"
    if any(each["behind_seconds"] for each in found["emulator"]):
        said += "; the emulator was BEHIND"
    return said
