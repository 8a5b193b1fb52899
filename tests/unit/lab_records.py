"""What a lab leaves, made up: counters of a link and of the emulator, workers' journals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from atoll.core.events import AnyEvent, Decided, Logged, Started, StepDone, encode
from atoll.lab.emulator import LinkCounters

LINK = LinkCounters(
    source=0,
    target=1,
    offered_packets=1000,
    offered_bytes=1_000_000,
    delivered_packets=905,
    delivered_bytes=905_000,
    lost_queue_packets=40,
    lost_queue_bytes=40_000,
    lost_loss_packets=30,
    lost_loss_bytes=30_000,
    lost_outage_packets=30,
    lost_outage_bytes=30_000,
    duplicated=5,
    corrupted=3,
    reordered=2,
    busy_seconds=0.5,
    mean_queue_delay=0.012,
    max_queue_delay=0.05,
    dropped=0,
)
EMULATOR: dict[str, Any] = {
    "seconds": 2.0,
    "cpu_seconds": 0.25,
    "packets": 905,
    "reads": 10,
    "writes": 10,
    "lateness_mean": 12e-6,
    "lateness_p99": 80e-6,
    "lateness_worst": 2e-3,
    "late_packets": 1,
    "dropped": 0,
    "malformed": 0,
    "unrouted": 0,
    "behind_seconds": 0,
    "realtime": True,
    "locked": True,
}


def journal(
    folder: Path, worker: int, computed: list[float], iteration: float, choice: str, world: int
) -> None:
    """Iterations that all take as long."""
    what, _, chosen = choice.partition(" ")
    events: list[AnyEvent] = [
        Started(time=1000.0, worker=worker, workers=world, strategy=what, device="cpu", pid=1)
    ]
    if worker == 0:
        events.append(Decided(time=1000.0, worker=0, what=what, choice=chosen, reason="x"))
    for index, seconds in enumerate(computed):
        step = StepDone(
            time=1001.0 + (index + 1) * iteration, worker=worker, iteration=index + 1, samples=8.0,
            seconds=iteration, waiting=iteration - seconds, bytes_sent=2048,
        )  # fmt: skip
        events += [
            step,
            Logged(
                time=step.time, worker=worker, iteration=index + 1, weight=1.0, values={"loss": 4.0 - index}
            ),
        ]
    (folder / f"{worker}-{worker}.jsonl").write_bytes(b"".join(encode(event) + b"\n" for event in events))
