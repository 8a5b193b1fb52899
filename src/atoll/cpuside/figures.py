"""What a node's CPU side counts."""

from __future__ import annotations

import time

from atoll.peers.outputs import Note
from atoll.wire.device import Figures

_EACH = 1.0  # seconds between two reports

# The decisions' notes that are counted, and as what.
_COUNTED = {
    "round started": "rounds",
    "round over": "joined",
    "round refused": "refusals",
    "fetched": "fetched",
}


class Counting:
    """Counts, and says when they are to be told. `most` is the greatest staleness that is counted apart."""

    def __init__(self, most: int) -> None:
        self._counts: dict[str, int] = {}
        self._staleness = [0] * (most + 2)
        self._waiting_since: float | None = None
        self._waited = 0.0
        self._told = Figures()
        self._told_at = 0.0

    def add(self, what: str) -> None:
        self._counts[what] = self._counts.get(what, 0) + 1

    def note(self, note: Note) -> None:
        if note.what in _COUNTED:
            self.add(_COUNTED[note.what])

    def applied(self, staleness: list[int]) -> None:
        """An iteration was applied, of contributions that were computed at parameters so old."""
        self.add("applied")
        for each in staleness:
            self._staleness[max(0, min(each, len(self._staleness) - 1))] += 1

    def waits(self, waiting: bool) -> None:
        """The worker waits for the global iteration, or does not any more."""
        now = time.monotonic()
        if waiting and self._waiting_since is None:
            self._waiting_since = now
            self.add("waits")
        elif not waiting and self._waiting_since is not None:
            self._waited += now - self._waiting_since
            self._waiting_since = None

    def due(
        self, bytes_in: int, bytes_out: int, no_room: int, applying: float, overlaying: float, *, now: bool
    ) -> Figures | None:
        """What there is to tell, if it is time and there is news; `now`: without waiting for the time."""
        moment = time.monotonic()
        if not now and moment < self._told_at + _EACH:
            return None
        figures = Figures(
            **self._counts,
            waited=self._waited,
            no_room=no_room,
            bytes_in=bytes_in,
            bytes_out=bytes_out,
            applying=applying,
            overlaying=overlaying,
            staleness=list(self._staleness),
        )
        self._told_at = moment
        if figures == self._told:
            return None
        self._told = figures
        return figures
