"""Control messages: kept until acknowledged, resent when lost, handled once.

Source: docs/ltp.md, "Control messages".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from atoll.wire.linkcontrol import AnyControl, encode

MOST_WAITING = 2**14  # messages: enough to close 32 of the largest transfers
MOST_HANDLED = 4096  # sequences remembered past a gap; beyond it the oldest gaps count as handled


@dataclass(frozen=True)
class ControlMessage:
    """A message to send. `stripe` None: any; `path` None: the stripe's own. Sent once unless `kept`."""

    sequence: int
    body: bytes
    kept: bool
    stripe: int | None
    path: Hashable | None


class Outbox:
    """Control messages that one end sends."""

    def __init__(self) -> None:
        self._sequence = 0
        self._kept: dict[int, ControlMessage] = {}
        self._queue: deque[ControlMessage] = deque()

    def __bool__(self) -> bool:
        return bool(self._queue)

    @property
    def sequence(self) -> int:
        """Sequence of the next message."""
        return self._sequence

    def put(
        self,
        message: AnyControl,
        *,
        kept: bool = True,
        stripe: int | None = None,
        path: Hashable | None = None,
    ) -> None:
        """Queue a message, whose sequence must be `sequence`."""
        assert message.sequence == self._sequence
        self._sequence += 1
        entry = ControlMessage(message.sequence, encode(message), kept, stripe, path)
        if kept:
            self._kept[entry.sequence] = entry
        self._queue.append(entry)

    def take(self, sendable: Callable[[ControlMessage], bool]) -> ControlMessage | None:
        """Remove and return the next message that can be sent now."""
        for message in self.queued:
            if sendable(message):
                self._queue.remove(message)
                return message
            if message.path is not None:  # its address may be forgotten by now; if not, it asks again
                self._queue.remove(message)
        return None

    @property
    def queued(self) -> tuple[ControlMessage, ...]:
        """Messages that wait to be sent."""
        return tuple(self._queue)

    def resend(self, sequence: int) -> bool:
        """Queue a message again though it is not known to be lost. Returns False if it is not kept."""
        self.handle_lost([sequence])
        return sequence in self._kept

    def handle_acked(self, sequences: list[int]) -> None:
        """Drop these acknowledged messages."""
        for sequence in sequences:
            self._kept.pop(sequence, None)

    def handle_lost(self, sequences: list[int]) -> None:
        """Queue again the kept ones of these lost messages."""
        queued = {message.sequence for message in self._queue}
        for sequence in sequences:
            if sequence in self._kept and sequence not in queued:
                self._queue.append(self._kept[sequence])

    @property
    def full(self) -> bool:
        """True if more messages wait than an honest end leaves unacknowledged."""
        return max(len(self._kept), len(self._queue)) > MOST_WAITING

    @property
    def waiting(self) -> int:
        """Number of unacknowledged messages."""
        return len(self._kept)


class Handled:
    """The set of message sequences that were handled."""

    def __init__(self) -> None:
        self._below = 0
        self._past: set[int] = set()

    def fresh(self, sequence: int) -> bool:
        """Return True the first time that a sequence is given."""
        if sequence < self._below or sequence in self._past:
            return False
        self._past.add(sequence)
        while self._below in self._past:
            self._past.remove(self._below)
            self._below += 1
        if len(self._past) > MOST_HANDLED:
            self._below = sorted(self._past)[MOST_HANDLED // 2]
            self._past = {each for each in self._past if each >= self._below}
        return True
