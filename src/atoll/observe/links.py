"""The latest figures of loss-tolerant links, for a run's summary, picture and closing lines."""

from __future__ import annotations

from typing import Any

import msgspec

from atoll.core.events import LinkSeen
from atoll.core.units import format_bytes, format_rate, format_seconds
from atoll.observe.summary import LinkTotals, Summary

MOST_LINES = 8  # links with a closing line: those with the most losses


class LinkRecords:
    """The latest event of each link."""

    def __init__(self) -> None:
        self._links: dict[tuple[str, str], LinkSeen] = {}

    def take(self, event: LinkSeen) -> None:
        self._links[event.who, event.peer] = event

    def shown(self) -> list[LinkTotals]:
        return [_totals(self._links[key]) for key in sorted(self._links, key=_in_order)]


def _totals(event: LinkSeen) -> LinkTotals:
    plain: dict[str, Any] = msgspec.structs.asdict(event)
    return LinkTotals(**{name: plain[name] for name in LinkTotals.__struct_fields__})


def _in_order(key: tuple[str, str]) -> tuple[tuple[str, int], ...]:
    """Return a sort key that puts worker 2 before worker 10."""
    parts = [each.rpartition(" ") for each in key]
    return tuple((start, int(end)) if end.isdecimal() else (start + end, -1) for start, _, end in parts)


def most_lossy(summary: Summary, most: int) -> list[LinkTotals]:
    """Return the `most` links with the most losses, in the summary's order."""
    kept = sorted(summary.links, key=lambda link: -link.lost)[:most]
    return [link for link in summary.links if any(link is each for each in kept)]


def link_lines(summary: Summary) -> list[str]:
    """Return the closing lines on links, one for each."""
    shown = most_lossy(summary, MOST_LINES)
    lines = [f"link: {link.name}: {' · '.join(link_facts(link))}" for link in shown]
    if len(shown) < len(summary.links):
        lines.append(f"links: {len(summary.links) - len(shown)} more, which lost less: see summary.json")
    return lines


def link_facts(link: LinkTotals) -> list[str]:
    """Return `9.2 MiB at 184 Mbit/s`, `delay 41 ms (least 40 ms)`, and so on."""
    facts = [f"{format_bytes(link.bytes_out)} at {format_rate(8 * link.rate)}"]
    if link.rtt > 0:
        facts.append(f"delay {format_seconds(link.rtt)} (least {format_seconds(link.min_rtt)})")
    facts.append(f"loss {link.loss:.2%} (target {link.target:.2%})")
    facts.append(f"{link.lost:,} of {link.sent:,} datagrams lost")
    facts.append(f"{link.repaired:,} blocks repaired")
    facts.append(f"{link.borne:,} borne")
    facts.append(f"{link.filled:,} filled")
    facts.append(f"held back {link.held:.2%}")
    return facts
