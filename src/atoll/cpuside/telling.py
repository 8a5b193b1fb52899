"""What a node's CPU side tells its worker beside its answers: decisions, what it waits for, and figures."""

from __future__ import annotations

import time
from collections.abc import Sequence

from atoll.cpuside.door import Asked
from atoll.cpuside.figures import Counting
from atoll.cpuside.network import Counts
from atoll.cpuside.trained import Trained
from atoll.net.post import Post
from atoll.peers.outputs import Note
from atoll.wire import device as d

_WAITING_EACH = 0.5  # seconds between two words on what the worker waits for
_ROUNDS_EACH = 1.0  # seconds between two rounds that are told of: they are counted, and there may be many


class Telling:
    """Speaks to the worker. `counting` has the figures that it tells."""

    def __init__(self, post: Post, stale_max: int) -> None:
        self._post = post
        self.counting = Counting(stale_max)
        self._waiting_told, self._waiting_at = "", 0.0
        self._round_told_at = 0.0

    def send(self, message: d.DeviceMessage) -> None:
        self._post.send(message)

    def told(self, what: str, choice: str, reason: str) -> None:
        """Tell of a decision (core.events.Decided); with an empty choice, a warning."""
        self.send(d.Told(what=what[:256], choice=choice[:4000], reason=reason[:4000]))

    def note(self, note: Note) -> None:
        """Tell of a note of the decisions', and count it."""
        self.counting.note(note)
        now, is_round = time.monotonic(), note.what.startswith("round")
        if not is_round or now > self._round_told_at + _ROUNDS_EACH:
            self._round_told_at = now if is_round else self._round_told_at
            self.told(note.what, note.about or note.what, note.reason)

    # -- what is waited for -------------------------------------------------------------------------------

    def wait_begins(self) -> None:
        """The worker waits from now on."""
        self._waiting_told, self._waiting_at = "", time.monotonic()
        self.counting.waits(True)

    def is_time(self, now: float) -> bool:
        """Whether the worker should hear again what it waits for."""
        return now > self._waiting_at + _WAITING_EACH

    def waiting(self, lines: Sequence[str], asking: Sequence[Asked], *, again: bool) -> None:
        """Tell the worker, and who is `asking` for the optimizer's state, what they wait for; `again`: also
        where they have heard so."""
        self._waiting_at = time.monotonic()
        told = "; ".join(lines[:4])[:4000]
        if told and (again or told != self._waiting_told):
            self._waiting_told = told
            self.send(d.Waiting(what=told))
            for each in asking:
                each.answer(d.Waiting(what=told))

    # -- figures ------------------------------------------------------------------------------------------

    def figures(self, counts: Counts, model: Trained | None, *, now: bool) -> None:
        """Tell the figures, if it is time and there is news; `now`: without waiting for the time."""
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
