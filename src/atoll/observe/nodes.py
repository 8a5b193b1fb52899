"""The nodes of a run without a server, in the run's summary and closing lines."""

from __future__ import annotations

from collections import Counter

from atoll.core.events import AnyEvent, NodeSeen, StepDone
from atoll.core.units import format_bytes
from atoll.observe.summary import NodeTotals, Summary

MOST_LINES = 8  # nodes with a closing line

_COUNTS = ("applied", "rounds", "joined", "refusals", "fetched", "waits", "no_room")
_AMOUNTS = ("bytes_in", "bytes_out", "applying", "overlaying")


class NodeRecords:
    """The latest figures of each node, from its first worker and its CPU side."""

    def __init__(self) -> None:
        # All by worker; a node's figures come from its first worker.
        self._seen: dict[int, NodeSeen] = {}
        self._staleness: dict[int, Counter[int]] = {}  # of the worker's iterations
        self._seconds: dict[int, list[float]] = {}  # of its steps: in all, in exchange, waiting

    def take(self, event: AnyEvent) -> None:
        if isinstance(event, NodeSeen):
            self._seen[event.worker] = event
        elif isinstance(event, StepDone):
            self._staleness.setdefault(event.worker, Counter())[event.staleness] += 1
            seconds = self._seconds.setdefault(event.worker, [0.0, 0.0, 0.0])
            for index, value in enumerate((event.seconds, event.exchange, event.waiting)):
                seconds[index] += value

    def shown(self) -> list[NodeTotals]:
        """Return the figures of each node whose CPU side has reported any, in order of worker."""
        return [self._totals(worker) for worker in sorted(self._seen)]

    def _totals(self, worker: int) -> NodeTotals:
        seen, counts = self._seen[worker], self._staleness.get(worker, Counter())
        busy, exchange, waiting = self._seconds.get(worker, [0.0, 0.0, 0.0])
        values = sorted(counts.elements())
        node = seen.node if seen.node >= 0 else worker
        counted = {name: getattr(seen, name) for name in (*_COUNTS, *_AMOUNTS)}
        totals = NodeTotals(node, seen.devices, **counted)
        if values:
            totals.staleness_mean = sum(values) / len(values)
            totals.staleness_p95 = values[min(len(values) - 1, int(0.95 * len(values)))]
            totals.staleness_most = values[-1]
        if busy > 0:
            totals.exchange_share, totals.waiting_share = exchange / busy, waiting / busy
        return totals


def node_lines(summary: Summary) -> list[str]:
    """Return the closing lines on nodes, one for each."""
    lines = [f"node {each.node}: {' · '.join(node_facts(each))}" for each in summary.nodes[:MOST_LINES]]
    if len(summary.nodes) > MOST_LINES:
        lines.append(f"nodes: {len(summary.nodes) - MOST_LINES} more: see summary.json")
    return lines


def views_of(summary: Summary) -> list[str]:
    """Return the views after the first, in order, each once: `view 2: nodes 0, 2`."""
    decisions = [
        event for event in summary.events if (event.get("event"), event.get("what")) == ("decided", "members")
    ]
    return list(dict.fromkeys(str(event["choice"]) for event in decisions))


def node_facts(node: NodeTotals) -> list[str]:
    """Return `stale by 1.2 iterations (95 %: 3, most 4)`, `exchange 1.1% of its device's time`, and so on."""
    devices = [f"{node.devices} devices"] if node.devices > 1 else []
    return [
        *devices,
        f"stale by {node.staleness_mean:.1f} iterations (95 %: {node.staleness_p95}, "
        f"most {node.staleness_most})",
        f"exchange {node.exchange_share:.1%} of its device's time, waiting {node.waiting_share:.1%}",
        f"{node.rounds:,} rounds started, {node.joined:,} joined, {node.refusals:,} refused",
        f"{format_bytes(node.bytes_out)} sent",
    ]
