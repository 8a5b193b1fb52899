"""The iteration or meeting that a node's own devices and script wait for."""

from __future__ import annotations

import math

from atoll.wire.peers import ScriptWaits
from atoll.wire.workerstand import WorkerStand


class OwnScript:
    """The iteration that the devices want, and the meeting that the script is in.

    Attributes:
        wanted: an iteration, and the least global iteration for it; None: the devices compute.
        wanted_since: when they began to wait for that; infinity: they do not.
        meeting: the number of the script's meeting, and the iteration at whose beginning the script was;
            None: it is in no meeting.
        met_since: when it came to its latest meeting.
        finished_at: when it ended; infinity: it goes on.
    """

    def __init__(self) -> None:
        self.wanted: tuple[int, int] | None = None
        self.wanted_since = math.inf
        self.meeting: tuple[int, int] | None = None
        self.met_since = math.inf
        self.finished_at = math.inf
        self._stand: WorkerStand | None = None  # the script's place while it waits, as far as known

    def want(self, now: float, iteration: int, least: int, stand: WorkerStand | None) -> None:
        """Record what the devices wait for, in place of what they waited for before."""
        if self.wanted is None:
            self.wanted_since = now
        self.wanted = (iteration, least)
        if self.meeting is None:  # else it is another device of the node that asks
            self._stand = stand

    def finish(self, now: float) -> None:
        """Record that the script has ended."""
        self.finished_at, self.wanted = now, None

    def granted(self) -> None:
        self.wanted, self.wanted_since, self._stand = None, math.inf, None

    def come_to(self, now: float, number: int, at: int, stand: WorkerStand | None) -> None:
        """Record that the script comes to a meeting."""
        self.meeting, self.met_since, self._stand = (number, at), now, stand

    def met(self) -> None:
        self.meeting, self._stand = None, None

    def waits(self) -> ScriptWaits | None:
        """Return the meeting or iteration for which the script waits, or None."""
        if self._stand is None:
            return None
        if self.meeting is not None:
            number, at = self.meeting
            return ScriptWaits(self._stand, meeting=number, at=at)
        return ScriptWaits(self._stand, least=self.wanted[1]) if self.wanted is not None else None
