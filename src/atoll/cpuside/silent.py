"""Whether the process of a silent node of this machine lives."""

from __future__ import annotations

import time
from collections.abc import Callable

from atoll.core.liveness import Judgement, Vouching
from atoll.core.units import format_seconds
from atoll.cpuside.guests import Guests
from atoll.wire.peerviews import Life

_TELL_SECONDS = 60.0  # from one line on a silent node that lives to the next


class SilentNodes:
    """Looks at the processes of silent nodes. `guests` knows which process a node said that it is;
    `tell(subject, what, reason)` notes a decision."""

    def __init__(self, guests: Guests, tell: Callable[[str, str, str], None]) -> None:
        self._guests, self._tell, self._vouching = guests, tell, Vouching()
        self._tell_again_at: dict[int, float] = {}  # by node; monotonic

    def judge(self, life: Life, silence: float, most: float) -> Judgement:
        """Return whether a node that was silent for `silence` seconds lives. Who lives and computes is waited
        for at most `most` seconds. That a node is waited for is told once a minute."""
        origin = self._guests.origin(life.node, life.incarnation)
        judgement = self._vouching.judge(origin, silence, most)
        now = time.monotonic()
        if judgement.alive and judgement.why and now >= self._tell_again_at.get(life.node, now):
            self._tell_again_at[life.node] = now + _TELL_SECONDS
            reason = f"silent for {format_seconds(silence)}; {judgement.why}"
            self._tell("silence", f"node {life.node} is waited for", reason)
        return judgement
