"""What this worker's loss-tolerant links to the shards do, told at intervals and at the end."""

from __future__ import annotations

import time
from collections.abc import Callable

from atoll.core import events
from atoll.exchange.link import Link
from atoll.net.linkcounts import EVERY_SECONDS, LinkCounts
from atoll.train.lossy import LossyPushes


class LinkReport:
    """`lossy()` is the model's, once there is one. `emit(kind, **fields)` as the session's."""

    def __init__(
        self, shards: Link, who: str, lossy: Callable[[], LossyPushes | None], emit: Callable[..., None]
    ) -> None:
        self._shards, self._who, self._lossy, self._emit = shards, who, lossy, emit
        self._due = time.monotonic() + EVERY_SECONDS
        self._counts = LinkCounts()

    def tell_if_due(self) -> None:
        """A step is made: tell, where it is time to."""
        if time.monotonic() >= self._due:
            self.tell()

    def tell(self) -> None:
        """Tell of each link as it is now."""
        self._due = time.monotonic() + EVERY_SECONDS
        for shard, figures in self._shards.figures().items():
            lossy = self._lossy()
            losses = lossy.losses(shard) if lossy is not None else None
            self._emit(
                events.LinkSeen,
                who=self._who,
                peer=f"shard {shard}",
                borne=losses.borne if losses is not None else 0,
                filled=losses.filled if losses is not None else 0,
                held=losses.held if losses is not None else 0.0,
                **self._counts.fields(shard, figures),
            )
