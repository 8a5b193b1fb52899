"""Figures that a node's CPU side counts and reports to its worker."""

from __future__ import annotations

import time

from atoll.peers.outputs import Note
from atoll.wire.device import Figures

_EACH = 1.0  # seconds between two reports

# Notes of the decisions -> the figure that counts them.
_COUNTED = {
    "round started": "rounds",
    "round over": "joined",
    "round refused": "refusals",
    "fetched": "fetched",
}


class Counting:
    """Counts events, and says when a report is due; one figure counts all staleness above `most`."""

    def __init__(self, most: int) -> None:
        self._counts: dict[str, int] = {}
        self._staleness = [0] * (most + 2)
        self._waiting_since: float | None = None
        self._waited = 0.0
        self._reported = Figures()
        self._reported_at = 0.0

    def add(self, what: str) -> None:
        self._counts[what] = self._counts.get(what, 0) + 1

    def note(self, note: Note) -> None:
        if note.what in _COUNTED:
            self.add(_COUNTED[note.what])

    def applied(self, staleness: list[int]) -> None:
        """Count an applied iteration; `staleness` has the iterations of delay of each contribution."""
        self.add("applied")
        for each in staleness:
            self._staleness[max(0, min(each, len(self._staleness) - 1))] += 1

    def waits(self, waiting: bool) -> None:
        """Start or stop the clock of the worker's waits for the global iteration."""
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
        """Return the figures if a report is due and any figure has changed; with `now` one is always due.

        Args:
            bytes_in: bytes received from other nodes.
            bytes_out: bytes sent to other nodes.
            no_room: contributions refused for lack of room.
            applying: seconds spent on steps.
            overlaying: seconds spent on local parameters.
            now: do not wait for the next report's time.
        """
        moment = time.monotonic()
        if not now and moment < self._reported_at + _EACH:
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
        self._reported_at = moment
        if figures == self._reported:
            return None
        self._reported = figures
        return figures
