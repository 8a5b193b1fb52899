"""Control messages on their way: kept until acknowledged, sent again when lost, handled once.

Source: docs/ltp.md, "Control messages".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from atoll.wire.linkcontrol import AnyControl, encode

MOST_WAITING = 2**14  # messages: 32 of the largest transfers are closed in as many
MOST_HANDLED = 4096  # sequences that are remembered past a gap: one who passes by more has lost the oldest


@dataclass(frozen=True)
class Message:
    """One to send. `stripe` None: any; `path` None: the stripe's own. One that is not `kept` goes once."""

    sequence: int
    body: bytes
    kept: bool
    stripe: int | None
    path: Hashable | None


class Outbox:
    """Of one end."""

    def __init__(self) -> None:
        self._sequence = 0
        self._kept: dict[int, Message] = {}
        self._queue: deque[Message] = deque()

    def __bool__(self) -> bool:
        return bool(self._queue)

    @property
    def sequence(self) -> int:
        """Of the next message."""
        return self._sequence

    def put(
        self,
        message: AnyControl,
        *,
        kept: bool = True,
        stripe: int | None = None,
        path: Hashable | None = None,
    ) -> None:
        """Queues it; its sequence is `sequence`."""
        assert message.sequence == self._sequence
        self._sequence += 1
        entry = Message(message.sequence, encode(message), kept, stripe, path)
        if kept:
            self._kept[entry.sequence] = entry
        self._queue.append(entry)

    def take(self, sendable: Callable[[Message], bool]) -> Message | None:
        """The next that can be sent now."""
        for message in self.queued:
            if sendable(message):
                self._queue.remove(message)
                return message
            if message.path is not None:  # an address that may be forgotten; if it is not, it will ask again
                self._queue.remove(message)
        return None

    @property
    def queued(self) -> tuple[Message, ...]:
        """What is to be sent."""
        return tuple(self._queue)

    def resend(self, sequence: int) -> bool:
        """Sends one again though nothing says that it is lost; False: it is not kept."""
        self.handle_lost([sequence])
        return sequence in self._kept

    def handle_acked(self, sequences: list[int]) -> None:
        """These came."""
        for sequence in sequences:
            self._kept.pop(sequence, None)

    def handle_lost(self, sequences: list[int]) -> None:
        """The datagrams that carried these are lost: what is kept goes again."""
        queued = {message.sequence for message in self._queue}
        for sequence in sequences:
            if sequence in self._kept and sequence not in queued:
                self._queue.append(self._kept[sequence])

    @property
    def full(self) -> bool:
        """Whether more waits than an honest end would leave waiting."""
        return max(len(self._kept), len(self._queue)) > MOST_WAITING

    @property
    def waiting(self) -> int:
        """Messages that are not acknowledged."""
        return len(self._kept)


class Handled:
    """Which sequences have been handled."""

    def __init__(self) -> None:
        self._below = 0
        self._past: set[int] = set()

    def fresh(self, sequence: int) -> bool:
        """Whether it is the first time; from now on it is not."""
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
