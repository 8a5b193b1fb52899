"""The answers that a client waits for at its shards, and the parties that the log says it waits for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from atoll.core.texts import one_line
from atoll.exchange.parties import Parties, under_way
from atoll.net.requests import MOST_REASON


@dataclass
class Wait:
    """A wait for answers.

    Attributes:
        what: what is waited for, in words, or a function that returns it.
        missing: returns the shards that have yet to answer.
        since: when the wait began, on the monotonic clock.
        asked: when the log was last asked whom it waits for.
    """

    what: str | Callable[[], str]
    missing: Callable[[], Sequence[int]]
    since: float
    asked: float

    @property
    def named(self) -> str:
        return self.what if isinstance(self.what, str) else self.what()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since

    def asks(self, every: float) -> bool:
        """True if the log is to be asked now; the time is then noted."""
        now = time.monotonic()
        if now - self.asked <= every:
            return False
        self.asked = now
        return True


class ClientWaits:
    """The waits of a client.

    Args:
        named: returns a shard in words, with how long it has been gone.

    Attributes:
        blocking: the wait that holds the client up.
        expected: an answer that is expected, and holds nothing up.
        behind: the parties that the log waits for, in words; None if it has not said so yet.
    """

    def __init__(self, parties: Parties, named: Callable[[int], str]) -> None:
        self._parties, self._named = parties, named
        self.blocking: Wait | None = None
        self.expected: Wait | None = None
        self.behind: list[str] | None = None

    def new(self, what: str | Callable[[], str], missing: Callable[[], Sequence[int]]) -> Wait:
        self.behind = None
        now = time.monotonic()
        return Wait(what, missing, now, now)

    def expect(self, what: str, shard: int) -> None:
        """Note that a shard's answer comes in its time, and that nothing is held up until then."""
        self.expected = self.new(what, lambda: [shard])

    def came(self) -> None:
        """Forget an answer that has come, or is expected no more."""
        self.expected = None

    def hear(self, lines: Sequence[str]) -> None:
        """Note the parties that the log waits for, as it has said."""
        self.behind = [self._parties.reads(one_line(line, MOST_REASON)) for line in lines]

    def lines(self) -> list[str]:
        """Return, in words, the shards that this side waits for, or expects an answer from, and on what."""
        wait = self.blocking or self.expected
        if wait is None:
            return []
        return [under_way(self._who(wait), self.behind or [], wait.named, wait.seconds)]

    def late(self, wait: Wait, seconds: float, timeout: float) -> str:
        """Return the line of a deadline that has passed after so many seconds."""
        return self._parties.late(self._who(wait), self.behind or [], wait.named, seconds, timeout)

    def _who(self, wait: Wait) -> list[str]:
        return [self._named(shard) for shard in wait.missing()]
