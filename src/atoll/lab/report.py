"""What the links did to a run, and what that cost it: lab.json, and the closing lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from atoll.core.events import StepDone, decode
from atoll.core.units import format_bytes, format_rate, format_seconds
from atoll.lab.emulator import EmulatorCounters, LinkCounters
from atoll.lab.topology import Topology

RECORD = "lab.json"  # in the folder of records


class Count(msgspec.Struct, frozen=True):
    """Packets as the wire carries them, and their bytes from the IP header on."""

    packets: int
    bytes: int


class LinkRecord(msgspec.Struct, frozen=True):
    """What one direction of a link did. Times are in seconds.

    `offered` came to it; `delivered` left it, copies included; `lost` says by what: `queue` (it was full),
    `loss` and `outage` (as the topology has it), `lab` (the emulator itself). `rate` is bytes delivered per
    second of the workers' time, `share` the part of that time in which the wire was sending.
    """

    source: str
    target: str
    offered: Count
    delivered: Count
    lost: dict[str, int]
    duplicated: int
    corrupted: int
    reordered: int
    queue_delay_mean: float
    queue_delay_worst: float
    rate: float
    share: float


class WorkerRecord(msgspec.Struct, frozen=True):
    """What one process that trained with Atoll did: `seconds` of its steps, and the part of them that it
    spent `waiting` for others, over links or not."""

    worker: int
    name: str  # its site, and its number
    speed: float
    steps: int
    seconds: float
    waiting: float
    bytes_sent: int


class LabRecord(msgspec.Struct, frozen=True):
    """lab.json. `emulator` is None where it was killed, and `links` is then empty."""

    command: list[str]
    status: int
    seed: int
    seconds: float  # from the workers' start to their end
    kept_up: bool  # the emulator; where it did not, links were worse than the topology says
    links: list[LinkRecord]
    emulator: EmulatorCounters | None
    dropped_before: dict[str, int]  # by site: packets that the kernel dropped before the emulator read them
    workers: list[WorkerRecord]


def make(
    topology: Topology,
    command: Sequence[str],
    *,
    status: int,
    seconds: float,
    links: Sequence[LinkCounters],
    emulator: EmulatorCounters | None,
    dropped_before: Mapping[str, int],
    journals: Path,
) -> LabRecord:
    """The record of a lab: `links` as the emulator counted them, `journals` with the workers' events."""
    names = [site.name for site in topology.sites]
    return LabRecord(
        command=list(command),
        status=status,
        seed=topology.seed,
        seconds=seconds,
        kept_up=emulator is not None and emulator.kept_up and not any(dropped_before.values()),
        links=[_link(counted, names, seconds) for counted in links],
        emulator=emulator,
        dropped_before=dict(dropped_before),
        workers=_workers(topology, journals),
    )


def _link(counted: LinkCounters, names: Sequence[str], seconds: float) -> LinkRecord:
    time = max(seconds, 1e-9)
    return LinkRecord(
        source=names[counted.source],
        target=names[counted.target],
        offered=Count(counted.offered_packets, counted.offered_bytes),
        delivered=Count(counted.delivered_packets, counted.delivered_bytes),
        lost={
            "queue": counted.lost_queue_packets,
            "loss": counted.lost_loss_packets,
            "outage": counted.lost_outage_packets,
            "lab": counted.dropped,
        },
        duplicated=counted.duplicated,
        corrupted=counted.corrupted,
        reordered=counted.reordered,
        queue_delay_mean=counted.mean_queue_delay,
        queue_delay_worst=counted.max_queue_delay,
        rate=counted.delivered_bytes / time,
        share=counted.busy_seconds / time,
    )


def _workers(topology: Topology, journals: Path) -> list[WorkerRecord]:
    """One record for each journal of a process that made steps; a file is named `worker-pid.jsonl`."""
    placed = [(site.name, speed) for site in topology.sites for speed in site.speeds]
    found = []
    for path in sorted(journals.glob("*.jsonl")):
        number = path.stem.partition("-")[0]
        steps = [event for line in path.read_bytes().splitlines() if (event := _step(line)) is not None]
        if not steps or not number.isdecimal() or int(number) >= len(placed):
            continue
        site, speed = placed[int(number)]
        record = WorkerRecord(
            worker=int(number),
            name=f"{site} {number}",
            speed=speed,
            steps=len(steps),
            seconds=sum(step.seconds for step in steps),
            waiting=sum(step.waiting for step in steps),
            bytes_sent=sum(step.bytes_sent for step in steps),
        )
        found.append(record)
    return sorted(found, key=lambda record: record.worker)


def _step(line: bytes) -> StepDone | None:
    """The step that a journal's line tells of; a line that was cut off tells of none."""
    try:
        event = decode(line)
    except msgspec.DecodeError:
        return None
    return event if isinstance(event, StepDone) else None


def write(record: LabRecord, folder: Path) -> None:
    (folder / RECORD).write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")


# What people read


def shown(record: LabRecord) -> str:
    """The closing report, several lines."""
    lines = [f"the lab ran for {_span(record.seconds)}"]
    lines += _table(
        ["link", "carried", "lost", "queueing", "rate", "busy", ""],
        [_row(link) for link in record.links],
    )
    lines += [_worker_line(worker) for worker in record.workers]
    lines += _emulator_lines(record)
    return "\n".join(lines)


def _span(seconds: float) -> str:
    """As format_seconds; what is below a millisecond in microseconds."""
    return f"{seconds * 1e6:.0f} us" if 0 < seconds < 1e-3 else format_seconds(seconds)


def _row(link: LinkRecord) -> list[str]:
    lost = [f"{count} by {cause}" for cause, count in link.lost.items() if count]
    share = sum(link.lost.values()) / max(1, link.offered.packets)
    other = {"twice": link.duplicated, "corrupted": link.corrupted, "out of order": link.reordered}
    return [
        f"{link.source} -> {link.target}",
        f"{format_bytes(link.delivered.bytes)} in {link.delivered.packets} of {link.offered.packets} packets",
        f"{', '.join(lost)} ({share:.2%})" if lost else "none",
        f"{_span(link.queue_delay_mean)}, at worst {_span(link.queue_delay_worst)}",
        format_rate(8 * link.rate),
        f"{link.share:.0%}",
        ", ".join(f"{count} {what}" for what, count in other.items() if count),
    ]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]


def _worker_line(worker: WorkerRecord) -> str:
    each, waiting = worker.seconds / worker.steps, worker.waiting / worker.steps
    share = waiting / each if each > 0 else 0.0
    speed = f" at speed {worker.speed:g}" if worker.speed != 1 else ""
    return (
        f"worker {worker.name}{speed}: {worker.steps} iterations of {_span(each)}, of which it "
        f"waited {_span(waiting)} ({share:.0%}) for others and the links; sent "
        f"{format_bytes(worker.bytes_sent / worker.steps)} in each"
    )


def _emulator_lines(record: LabRecord) -> list[str]:
    emulator = record.emulator
    if emulator is None:
        return ["*** THE EMULATOR WAS KILLED: what the links did is not known ***"]
    lines = [
        f"the emulator wrote {emulator.packets} packets, {_span(emulator.lateness_mean)} late on "
        f"average, 99 % by less than {_span(emulator.lateness_p99)}, at worst "
        f"{_span(emulator.lateness_worst)}; {emulator.cpu_seconds:.1f} s of a core"
    ]
    if emulator.unrouted or emulator.malformed:
        lines.append(
            f"nowhere to go: {emulator.unrouted} packets to a site that no link leads to, and "
            f"{emulator.malformed} that could not be read"
        )
    lines += emulator.notes()
    lines += _complaints(record, emulator)
    return lines


def _complaints(record: LabRecord, emulator: EmulatorCounters) -> list[str]:
    """What makes the links worse than the topology says: said loudly, for it is no result."""
    early = {site: count for site, count in record.dropped_before.items() if count}
    said = []
    if emulator.dropped:
        said.append(f"it dropped {emulator.dropped} packets itself")
    if early:
        sites = ", ".join(f"{count} in {site}" for site, count in early.items())
        said.append(f"packets were dropped before it could read them ({sites})")
    if emulator.behind_seconds:
        said.append(f"in {emulator.behind_seconds} seconds it was behind")
    if not said:
        return []
    return [
        f"*** THE EMULATOR COULD NOT KEEP UP: {'; '.join(said)} ***",
        "*** the links were worse than the topology says; give the machine more cores or the links less ***",
    ]
