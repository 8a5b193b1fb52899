"""Reports of a node's CPU side to its worker: decisions, reasons for waits, and figures."""

from __future__ import annotations

import time
from collections.abc import Sequence

from atoll.cpuside.door import StateRequest
from atoll.cpuside.figures import Counting
from atoll.cpuside.network import Counts
from atoll.cpuside.trained import Trained
from atoll.net.post import Post
from atoll.peers.outputs import Note
from atoll.wire import device as d

_WAITING_EACH = 0.5  # seconds between two messages on the reason of a wait
_ROUNDS_EACH = 1.0  # seconds between two reported rounds: there may be many, and all are counted


class Telling:
    """Sends reports to the worker; `counting` has the figures."""

    def __init__(self, post: Post, stale_max: int) -> None:
        self._post = post
        self.counting = Counting(stale_max)
        self._waiting_sent, self._waiting_at = "", 0.0
        self._round_sent_at = 0.0

    def send(self, message: d.DeviceMessage) -> None:
        self._post.send(message)

    def told(self, what: str, choice: str, reason: str) -> None:
        """Report a decision (core.events.Decided); with an empty choice, a warning."""
        self.send(d.Notice(what=what[:256], choice=choice[:4000], reason=reason[:4000]))

    def note(self, note: Note) -> None:
        """Count a note of the decisions and report it; rounds are reported once a second."""
        self.counting.note(note)
        now, is_round = time.monotonic(), note.what.startswith("round")
        if not is_round or now > self._round_sent_at + _ROUNDS_EACH:
            self._round_sent_at = now if is_round else self._round_sent_at
            self.told(note.what, note.about or note.what, note.reason)

    # -- reasons of waits ---------------------------------------------------------------------------------

    def wait_begins(self) -> None:
        """Note that the worker begins to wait."""
        self._waiting_sent, self._waiting_at = "", time.monotonic()
        self.counting.waits(True)

    def is_time(self, now: float) -> bool:
        """True if the next message on the worker's wait is due at `now`."""
        return now > self._waiting_at + _WAITING_EACH

    def waiting(self, lines: Sequence[str], asking: Sequence[StateRequest], *, again: bool) -> None:
        """Send the reasons of a wait to the worker, and to those `asking` for the optimizer's state.

        Reasons that were just sent are sent once more only with `again`.
        """
        self._waiting_at = time.monotonic()
        reasons = "; ".join(lines[:4])[:4000]
        if reasons and (again or reasons != self._waiting_sent):
            self._waiting_sent = reasons
            self.send(d.Waiting(what=reasons))
            for each in asking:
                each.answer(d.Waiting(what=reasons))

    # -- figures ------------------------------------------------------------------------------------------

    def figures(self, counts: Counts, model: Trained | None, *, now: bool) -> None:
        """Send the figures if a report is due and any has changed; with `now` a report is always due."""
        figures = self.counting.due(
            counts.bytes_in,
            counts.bytes_out,
            model.assembly.no_room if model is not None else 0,
            model.seconds_applying if model is not None else 0.0,
            model.seconds_overlaying if model is not None else 0.0,
            now=now,
        )
        if figures is not None:
            self.send(figures)
