"""Detection of shards that are silent while they are waited for."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

_ASK_AFTER = 2.0  # seconds without a word, until a shard is asked for a sign of life
_UNANSWERED = 3.0  # seconds without that sign of life, after which people are told


@dataclass
class _Heard:
    """A shard's words, by their times on the monotonic clock.

    Attributes:
        at: when it was last heard.
        asked_at: when it was asked for a sign of life that has not come yet.
        told: True if people were told that it is silent.
        missed_at: since when it has been silent, until the wait is over.
    """

    at: float = 0.0
    asked_at: float | None = None
    told: bool = False
    missed_at: float | None = None


class Silence:
    """The times at which `count` shards were heard.

    A shard that only waits for another party gives a sign of life when it is asked. One that stands still
    does not.
    """

    def __init__(self, count: int) -> None:
        self._heard = [_Heard() for _ in range(count)]

    def hear(self, shard: int, *, lost: bool) -> float | None:
        """Note that a shard was heard. Return the seconds for which it was silent, if people were told of it;
        else None.

        Args:
            lost: True if its connection was lost; its silence then still counts for `lasted`.
        """
        heard = self._heard[shard]
        heard.at, heard.asked_at = time.monotonic(), None
        if heard.told:
            heard.told = False
            return heard.at - (heard.missed_at or heard.at)
        if not lost:
            heard.missed_at = None
        return None

    @staticmethod
    def is_long(seconds: float) -> bool:
        """True if shards are to be checked after a wait of so many seconds."""
        return seconds > _ASK_AFTER

    def look(self, shard: int, since: float) -> Literal["ask", "tell", ""]:
        """Return whether to ask a silent shard for a sign of life, or to tell people of its silence."""
        heard, now = self._heard[shard], time.monotonic()
        if heard.told:
            return ""
        if heard.asked_at is None:
            if now - max(since, heard.at) <= _ASK_AFTER:
                return ""
            heard.asked_at, heard.missed_at = now, max(since, heard.at)
            return "ask"
        if now - heard.asked_at <= _UNANSWERED:
            return ""
        heard.told = True
        return "tell"

    def lasted(self, shard: int) -> float:
        """Return the seconds since a shard that is waited for fell silent; 0 if it did not."""
        missed_at = self._heard[shard].missed_at
        return 0.0 if missed_at is None else time.monotonic() - missed_at

    def lose(self, shard: int) -> None:
        """Note that the connection to a shard is lost, of which people are told elsewhere."""
        heard = self._heard[shard]
        heard.asked_at, heard.told = None, False

    def over(self) -> None:
        """End the wait: the answer has come."""
        for heard in self._heard:
            heard.missed_at = None
