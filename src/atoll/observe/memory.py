"""Figures of chunked memory in a run's summary and closing lines."""

from __future__ import annotations

import msgspec

from atoll.core.events import AnyEvent, MemorySeen
from atoll.core.units import format_bytes, format_seconds
from atoll.observe.summary import MemoryTotals, Summary

MOST_LINES = 8  # workers with a closing line


class MemoryRecords:
    """The latest memory figures of each worker."""

    def __init__(self) -> None:
        self._seen: dict[int, MemorySeen] = {}

    def take(self, event: AnyEvent) -> None:
        if isinstance(event, MemorySeen):
            self._seen[event.worker] = event

    def shown(self) -> list[MemoryTotals]:
        """Return the figures of each worker that has reported any, in order."""
        return [
            MemoryTotals(worker=worker, **msgspec.structs.asdict(self._seen[worker].figures))
            for worker in sorted(self._seen)
        ]


def memory_lines(summary: Summary) -> list[str]:
    """Return the closing lines on memory, one for each worker."""
    lines = [
        f"memory of worker {each.worker}: {' · '.join(memory_facts(each))}"
        for each in summary.memory[:MOST_LINES]
    ]
    if len(summary.memory) > MOST_LINES:
        lines.append(f"memory: {len(summary.memory) - MOST_LINES} more workers: see summary.json")
    return lines


def memory_facts(totals: MemoryTotals) -> list[str]:
    """Return `device 1.0 MiB of 1.5 MiB`, `12 moves to the device in the last step`, and so on."""
    facts = [f"device {format_bytes(totals.device_peak)} of {format_bytes(totals.device_budget)}"]
    if totals.host_peak:
        bound = "" if totals.host_budget is None else f" of {format_bytes(totals.host_budget)}"
        facts.append(f"host {format_bytes(totals.host_peak)}{bound}")
    if totals.disk_peak:
        facts.append(f"disk {format_bytes(totals.disk_peak)} of {format_bytes(totals.disk_budget)}")
    moved = totals.step_moves.get("to_device", 0)
    if not any(totals.moves.values()):
        facts.append("everything fits, nothing moved")
    else:
        best = "" if totals.optimum is None else f", at best {totals.optimum}"
        if totals.optimum is None and totals.optimum_blocks is not None:
            best = f", {totals.step_blocks:,} blocks, at best {totals.optimum_blocks:,}"
        facts.append(f"{moved:,} moves to the device in the last step{best}")
        if fetched := totals.nbytes.get("from_members", 0):
            facts.append(f"{format_bytes(fetched)} from other members in all")
        facts.append(f"waited {format_seconds(totals.waited)}")
    return facts
