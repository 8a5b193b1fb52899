"""What a site's loss-tolerant links to the global shards do, told at intervals and at the end."""

from __future__ import annotations

import time
from collections.abc import Callable

from atoll.core.events import AnyEvent, LinkSeen
from atoll.core.runclock import record_time
from atoll.exchange.link import Link
from atoll.net.linkcounts import EVERY_SECONDS, LinkCounts
from atoll.server.sitemodel import SiteModel


class SiteReport:
    """Of the site's shard; `emit` takes the events."""

    def __init__(self, site: str, emit: Callable[[AnyEvent], None]) -> None:
        self._site, self._emit = site, emit
        self._due = time.monotonic() + EVERY_SECONDS
        self._counts = LinkCounts()

    def poll(self, upstream: Link | None, model: SiteModel | None) -> None:
        """Tell, if it is time."""
        if time.monotonic() >= self._due:
            self.tell(upstream, model)

    def tell(self, upstream: Link | None, model: SiteModel | None) -> None:
        """Tell of each link as it is now."""
        self._due = time.monotonic() + EVERY_SECONDS
        for shard, figures in (upstream.figures() if upstream is not None else {}).items():
            borne, filled, held = model.lost_to(shard) if model is not None else (0, 0, 0.0)
            self._emit(
                LinkSeen(
                    time=record_time(),
                    worker=-1,
                    who=f"site {self._site}",
                    peer=f"shard {shard}",
                    site=self._site,
                    borne=borne,
                    filled=filled,
                    held=held,
                    **self._counts.fields(shard, figures),
                )
            )
