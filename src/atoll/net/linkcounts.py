"""The figures of links that may break off and be made again, for core's LinkSeen."""

from __future__ import annotations

import math
from typing import Any

from atoll.core.events import LinkFigures

EVERY_SECONDS = 5.0  # between reports on links
# Counts of a connection, which begin anew with the next one to the same server:
_COUNTS = ("sent", "lost", "retransmitted", "repaired", "bytes_in", "bytes_out")
_NOW = ("rate", "estimate", "rtt", "min_rtt", "loss", "target")


class LinkCounts:
    """Counts over all connections to each server."""

    def __init__(self) -> None:
        self._latest: dict[int, LinkFigures] = {}  # by server, of its present or last connection
        self._before: dict[int, dict[str, int]] = {}  # by server, sums over its earlier connections

    def fields(self, server: int, figures: LinkFigures) -> dict[str, Any]:
        """Return the fields of LinkSeen that the transport knows: not the two ends' names, nor lost
        gradients that count, nor residuals."""
        latest, before = self._latest.get(server), self._before.setdefault(server, dict.fromkeys(_COUNTS, 0))
        if latest is not None and figures.sent < latest.sent:  # another connection's
            for name in _COUNTS:
                before[name] += getattr(latest, name)
        self._latest[server] = figures
        return {
            "reason": figures.reason,
            **{name: _finite(getattr(figures, name)) for name in _NOW},
            **{name: before[name] + getattr(figures, name) for name in _COUNTS},
        }


def _finite(value: float) -> float:
    """Return a number that JSON has; 0 for a value that was not measured yet."""
    return value if math.isfinite(value) else 0.0
