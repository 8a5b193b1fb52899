"""Whether the processes of a node of this machine live that is silent, or makes no iteration."""

from __future__ import annotations

import time
from collections.abc import Callable
from operator import attrgetter

from atoll.core.liveness import Judgement, Vouching, parent_of
from atoll.core.units import format_seconds
from atoll.cpuside.guests import Guests
from atoll.peers.watch import SILENT
from atoll.wire.peerviews import Life

_TELL_SECONDS = 60.0  # from one line on a silent node that lives to the next


class SilentNodes:
    """Looks at the processes of nodes that others would remove. `guests` knows which process a node said that
    it is; `tell(subject, what, reason)` notes a decision."""

    def __init__(self, guests: Guests, tell: Callable[[str, str, str], None]) -> None:
        self._guests, self._tell, self._vouching = guests, tell, Vouching()
        self._tell_again_at: dict[int, float] = {}  # by node; monotonic

    def judge(self, life: Life, lack: str, seconds: float, most: float) -> Judgement:
        """Return whether a node lives that lacks words or iterations (`lack`) for so many seconds. Who lives
        and computes is waited for at most `most` seconds. That a node is waited for is told once a minute.

        Words come from its CPU side. Iterations take its worker too, which is the CPU side's parent.
        """
        origin = self._guests.origin(life.node, life.incarnation)
        origins = [origin] if lack == SILENT else [parent_of(origin), origin]
        found = [self._vouching.judge(each, seconds, most) for each in origins]
        judgement = next(
            (each for each in found if each.alive and each.why), max(found, key=attrgetter("alive"))
        )
        now = time.monotonic()
        if judgement.alive and judgement.why and now >= self._tell_again_at.get(life.node, now):
            self._tell_again_at[life.node] = now + _TELL_SECONDS
            reason = f"{lack} for {format_seconds(seconds)}; {judgement.why}"
            self._tell("silence", f"node {life.node} is waited for", reason)
        return judgement
