"""The figures of links that may break off and be made again, as core's LinkSeen tells them."""

from __future__ import annotations

import math
from typing import Any

from atoll.core.events import LinkFigures

EVERY_SECONDS = 5.0  # how often links are told of
# Counts of a connection, which begin anew with the next one to the same server:
_COUNTS = ("sent", "lost", "retransmitted", "repaired", "bytes_in", "bytes_out")
_NOW = ("rate", "estimate", "rtt", "min_rtt", "loss", "target")


class LinkCounts:
    """Counts over all connections to each server."""

    def __init__(self) -> None:
        self._latest: dict[int, LinkFigures] = {}  # of each server's connection, as it is or was
        self._before: dict[int, dict[str, int]] = {}  # counts of connections that are no more

    def fields(self, server: int, figures: LinkFigures) -> dict[str, Any]:
        """What LinkSeen has of the link to a server that the transport knows: not who they are, nor what was
        lost of gradients that count, nor what is held back."""
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
    """A number that JSON has; 0 for what was not measured yet."""
    return value if math.isfinite(value) else 0.0
