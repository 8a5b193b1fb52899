"""Silent stripes: a stripe without acknowledgements while others have some is not used until it answers.

A network may block one port from the start, or lose its route later. Source: docs/ltp.md, "Bursts, stripes,
and a link's thread".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

SILENCE_SECONDS = 1.0  # without acknowledgement until a stripe is not used; then between questions
SILENT_TIMEOUTS = 4  # probe timeouts before that, at least: each may be a loss
QUESTIONS = 3  # unanswered ones while another stripe answers: if all are silent, none is at fault


@dataclass
class _Stripe:
    used: bool = True
    acked_at: float = -math.inf  # time of its last acknowledgement
    asked_at: float | None = None  # time of the last question, while it is silent
    unanswered: int = 0  # questions after which only other stripes answered


@dataclass
class Poll:
    """Actions that are due. A question is a Ping on that very stripe."""

    questions: list[int] = field(default_factory=list)
    silent: list[int] = field(default_factory=list)  # not used from now on


class Stripes:
    """The stripes of one end, in the sending direction.

    In the polls `waits` has the time since which each stripe has unacknowledged datagrams in flight, or inf;
    `timeout` is the probe timeout in seconds.
    """

    def __init__(self, count: int) -> None:
        self._stripes = [_Stripe() for _ in range(count)]

    def used(self, stripe: int) -> bool:
        return self._stripes[stripe].used

    def handle_acked(self, now: float, stripe: int) -> bool:
        """Record an acknowledgement for a stripe; return True if that brings it back into use."""
        known = self._stripes[stripe]
        back = not known.used
        self._stripes[stripe] = _Stripe(acked_at=now)
        return back

    def poll(self, now: float, waits: Sequence[float], timeout: float) -> Poll:
        """Return the actions that are due."""
        due = Poll()
        for stripe, known in enumerate(self._stripes):
            if known.used and waits[stripe] == math.inf:
                known.asked_at, known.unanswered = None, 0
            elif now >= self._due(stripe, waits, timeout):
                self._ask(now, stripe, waits, due)
        return due

    def _ask(self, now: float, stripe: int, waits: Sequence[float], due: Poll) -> None:
        known = self._stripes[stripe]
        others = [each for at, each in enumerate(self._stripes) if at != stripe and each.used]
        if known.used and known.asked_at is not None:
            known.unanswered += any(each.acked_at > known.asked_at for each in others)
            if known.unanswered == QUESTIONS:
                known.used = False
                due.silent.append(stripe)
        asked = [stripe]
        if known.used:  # idle stripes are asked too: their answers show that the other end lives
            asked += [at for at, each in enumerate(self._stripes) if each.used and waits[at] == math.inf]
        due.questions += [each for each in asked if each not in due.questions]
        known.asked_at = now

    def deadline(self, waits: Sequence[float], timeout: float) -> float:
        """Return the time at which `poll` may have something; inf: only after input."""
        return min(self._due(stripe, waits, timeout) for stripe in range(len(self._stripes)))

    def _due(self, stripe: int, waits: Sequence[float], timeout: float) -> float:
        known = self._stripes[stripe]
        if len(self._stripes) == 1:
            return math.inf
        if not known.used:
            assert known.asked_at is not None
            return known.asked_at + SILENCE_SECONDS
        patience = max(SILENCE_SECONDS, SILENT_TIMEOUTS * timeout) / (QUESTIONS + 1)
        since = waits[stripe] if known.asked_at is None else max(known.asked_at, waits[stripe])
        return since + patience
