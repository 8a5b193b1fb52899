"""What this worker's loss-tolerant links to the shards do, told at intervals and at the end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from atoll.core import events
from atoll.train.lossy import LossyPushes
from atoll.train.shards import Shards
from atoll.wire.messages import LinkFigures

EVERY_SECONDS = 5.0
# Counts of a connection, which begin anew with the next one to the same shard:
_COUNTS = ("sent", "lost", "retransmitted", "repaired", "bytes_in", "bytes_out")
_NOW = ("rate", "estimate", "rtt", "min_rtt", "loss", "target")


class LinkReport:
    """`lossy()` is the model's, once there is one. `emit(kind, **fields)` as the session's."""

    def __init__(
        self, shards: Shards, who: str, lossy: Callable[[], LossyPushes | None], emit: Callable[..., None]
    ) -> None:
        self._shards, self._who, self._lossy, self._emit = shards, who, lossy, emit
        self._due = time.monotonic() + EVERY_SECONDS
        self._latest: dict[int, LinkFigures] = {}  # of each shard's connection, as it is or was
        self._before: dict[int, dict[str, int]] = {}  # counts of connections that are no more

    def poll(self) -> None:
        """A step is made: tell, if it is time."""
        if time.monotonic() >= self._due:
            self.tell()

    def tell(self) -> None:
        """Tell of each link as it is now."""
        self._due = time.monotonic() + EVERY_SECONDS
        for shard, figures in self._shards.links().items():
            self._tell_of(shard, figures)

    def _tell_of(self, shard: int, figures: LinkFigures) -> None:
        latest, before = self._latest.get(shard), self._before.setdefault(shard, dict.fromkeys(_COUNTS, 0))
        if latest is not None and figures.sent < latest.sent:  # another connection's
            for name in _COUNTS:
                before[name] += getattr(latest, name)
        self._latest[shard] = figures
        lossy = self._lossy()
        losses = lossy.losses(shard) if lossy is not None else None
        told: dict[str, Any] = {name: _finite(getattr(figures, name)) for name in _NOW}
        told |= {name: before[name] + getattr(figures, name) for name in _COUNTS}
        self._emit(
            events.LinkSeen,
            who=self._who,
            peer=f"shard {shard}",
            borne=losses.borne if losses is not None else 0,
            filled=losses.filled if losses is not None else 0,
            held=losses.held if losses is not None else 0.0,
            reason=figures.reason,
            **told,
        )


def _finite(value: float) -> float:
    """A number that JSON has; 0 for what was not measured yet."""
    return value if math.isfinite(value) else 0.0
