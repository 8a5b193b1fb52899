"""A check whether the processes of a node live that is silent or makes no iteration, on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from operator import attrgetter

from atoll.core.liveness import Judgement, Vouching, parent_of
from atoll.core.units import format_seconds
from atoll.cpuside.guests import Guests
from atoll.peers.watch import SILENT
from atoll.wire.peerviews import Life

_TELL_SECONDS = 60.0  # between two lines on one silent node that lives


class SilentNodes:
    """Judges whether nodes that others would remove are alive.

    Args:
        guests: the nodes that have greeted this one, with the process that each named as its own.
        tell: reports a decision; called with its subject, the choice and the reason.
    """

    def __init__(self, guests: Guests, tell: Callable[[str, str, str], None]) -> None:
        self._guests, self._tell, self._vouching = guests, tell, Vouching()
        self._tell_again_at: dict[int, float] = {}  # by node; monotonic

    def judge(self, life: Life, lack: str, seconds: float, most: float) -> Judgement:
        """Judge a node that lacks messages or iterations (`lack`) for `seconds` seconds.

        A process that lives and computes counts as alive for at most `most` seconds. Reports a node that is
        waited for at most once a minute. Messages come from the node's CPU side. Iterations also take its
        devices, any of which can hold up all; until they are known, its worker, the CPU side's parent.
        """
        origin, devices = self._guests.origins(life.node, life.incarnation)
        origins = [origin] if lack == SILENT else [*(devices or [parent_of(origin)]), origin]
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
