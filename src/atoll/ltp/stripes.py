"""Which stripes of a session are used: one that is silent while others are heard is left alone until it
answers. A way through the network may be cut for one port, or never have been open.

Source: docs/ltp.md, "Bursts, stripes, and a link's thread".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

SILENCE_SECONDS = (
    1.0  # without an acknowledgement, after which a stripe is not used; then it is asked so often
)
SILENT_TIMEOUTS = 4  # probe timeouts that it has at least: each may be a loss
QUESTIONS = 3  # in that time, each while another stripe answers: where all are silent, none is to blame


@dataclass
class _Stripe:
    used: bool = True
    acked_at: float = -math.inf  # when something that it carried was last acknowledged
    asked_at: float | None = None  # since it is silent
    unanswered: int = 0  # questions, though another stripe has answered since


@dataclass
class Poll:
    """What is to be done: a question is a Ping on that very stripe."""

    questions: list[int] = field(default_factory=list)
    silent: list[int] = field(default_factory=list)  # from now on not used


class Stripes:
    """Of one end: what it sends. `waits` of the polls is since when each stripe has something on its way of
    which nothing was acknowledged, else inf; `timeout` the probe timeout, in seconds."""

    def __init__(self, count: int) -> None:
        self._stripes = [_Stripe() for _ in range(count)]

    def used(self, stripe: int) -> bool:
        return self._stripes[stripe].used

    def handle_acked(self, now: float, stripe: int) -> bool:
        """Something that it carried was acknowledged; whether it is used again from now on."""
        known = self._stripes[stripe]
        back = not known.used
        self._stripes[stripe] = _Stripe(acked_at=now)
        return back

    def poll(self, now: float, waits: Sequence[float], timeout: float) -> Poll:
        """What is due."""
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
        if known.used:  # those who have nothing to acknowledge are asked too, to know whether they live
            asked += [at for at, each in enumerate(self._stripes) if each.used and waits[at] == math.inf]
        due.questions += [each for each in asked if each not in due.questions]
        known.asked_at = now

    def deadline(self, waits: Sequence[float], timeout: float) -> float:
        """When poll may have something; inf: only after input."""
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
