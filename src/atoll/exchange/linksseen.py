"""Reports on a client's loss-tolerant connections to shards, at intervals and at the end."""

from __future__ import annotations

import time
from collections.abc import Callable

from atoll.core.events import LinkSeen
from atoll.exchange.feedback import Feedback, Losses
from atoll.exchange.link import ShardLink
from atoll.net.linkcounts import EVERY_SECONDS, LinkCounts


class LinksSeen:
    """Reports on a client's loss-tolerant connections.

    Args:
        who: the client, in words.
        emit: `emit(kind, **fields)` makes an event of that kind, with its time.
    """

    def __init__(self, who: str, emit: Callable[..., None]) -> None:
        self._who, self._emit = who, emit
        self._due = time.monotonic() + EVERY_SECONDS
        self._counts = LinkCounts()

    def tell_if_due(self, link: ShardLink | None, feedback: Feedback | None) -> None:
        """Report if it is time."""
        if time.monotonic() >= self._due:
            self.tell(link, feedback)

    def tell(self, link: ShardLink | None, feedback: Feedback | None) -> None:
        """Report each connection as it is now. `feedback` is the model's, once there is one."""
        self._due = time.monotonic() + EVERY_SECONDS
        for shard, figures in (link.figures() if link is not None else {}).items():
            losses = feedback.losses(shard) if feedback is not None else Losses()
            self._emit(
                LinkSeen,
                who=self._who,
                peer=f"shard {shard}",
                borne=losses.borne,
                filled=losses.filled,
                held=losses.held,
                **self._counts.fields(shard, figures),
            )
