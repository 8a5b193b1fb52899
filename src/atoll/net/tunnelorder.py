"""The order of messages at a tunnel's end: those that may be sent now, and the next of those received. No
socket, clock or lock.

Messages are numbered from 0 on, each way. A sender has at most a window of messages on the way that the other
end's application has not taken: so a busy receiver is not flooded, and keeps little in memory, however out of
order transfers come. Source: docs/ltp.md, "The tunnel".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from atoll.core.errors import RunError
from atoll.wire.base import HEADER_BYTES, WireError
from atoll.wire.messages import LostBlocks
from atoll.wire.tunnel import BATCH_BYTES, MOST_MESSAGES, WINDOW_MESSAGES, Batch, TunnelEntry

WINDOW_BYTES = 2**27  # headers and payloads that the other end has not taken; one message may exceed it
INLINE_BYTES = 2**14  # up to which a payload is copied into the batch, which is reliable
TOLD_SHARE = 1 / 4  # of a window: so much taken here is reported in a batch of its own


@dataclass(frozen=True)
class Lossy:
    """A payload's way of being sent: losses are reported at its arrival. `chunk` and `iteration` name it
    in errors and reports. `high`, by block, (blocks,), marks the blocks that arrive in the end; None: only
    the last one. Blocks have `block_elements` elements."""

    chunk: int
    iteration: int
    dtype: str  # "float32", "float64", "float16", "bfloat16", "uint8"
    high: npt.NDArray[np.bool_] | None = None


@dataclass(frozen=True)
class TunnelMessage:
    """One message. `lost`: the missing blocks of a payload that came lossy."""

    header: bytes
    payload: memoryview | None = None
    lossy: Lossy | None = None  # of a message to be sent
    lost: LostBlocks | None = None  # of a received message

    @property
    def bytes(self) -> int:
        return len(self.header) + (self.payload.nbytes if self.payload is not None else 0)

    @property
    def apart(self) -> bool:
        """True if the payload is a transfer of its own."""
        payload = self.payload
        return payload is not None and payload.nbytes > INLINE_BYTES


class Outbox:
    """Messages to be sent, and the window of sent ones that are not taken."""

    def __init__(self) -> None:
        self.next = 0  # the number of the next message
        self._waiting: deque[TunnelMessage] = deque()
        self._untaken: deque[int] = deque()  # bytes of each
        self._untaken_bytes = 0

    def put(self, message: TunnelMessage) -> None:
        self._waiting.append(message)

    @property
    def waiting(self) -> int:
        """Number of messages that are not sent yet."""
        return len(self._waiting)

    @property
    def _open(self) -> bool:
        return len(self._untaken) < WINDOW_MESSAGES and self._untaken_bytes < WINDOW_BYTES

    @property
    def ready(self) -> bool:
        """True if a message may go."""
        return bool(self._waiting) and self._open

    def take(self, transfers: int) -> tuple[int, list[TunnelMessage]]:
        """Return the number of the next batch's first message, and the batch's messages, whose payloads
        need at most so many transfers (one message may need more). Raises RunError when the numbers have
        run out."""
        first, size, apart = self.next, 0, 0
        batch: list[TunnelMessage] = []
        while self.ready:
            message = self._waiting[0]
            size += len(message.header) if message.apart else message.bytes
            apart += message.apart
            if batch and (size > BATCH_BYTES or apart > transfers):
                break
            batch.append(self._waiting.popleft())
            self._untaken.append(message.bytes)
            self._untaken_bytes += message.bytes
        self.next += len(batch)
        if self.next > MOST_MESSAGES:
            raise RunError(f"{MOST_MESSAGES} messages were sent, the most of a session")
        return first, batch

    def handle_taken(self, taken: int) -> None:
        """Note that the other end's application has taken so many messages in all. Raises WireError."""
        if taken > self.next:
            raise WireError(f"{taken} messages were taken, of {self.next}")
        while self.next - len(self._untaken) < taken:
            self._untaken_bytes -= self._untaken.popleft()


class Inbox:
    """Received messages, put into order. A payload has at most `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self.taken = 0  # messages that the application has taken
        self._limit = limit
        self._next = 0  # the number of the message that is handed out next
        self._entries: dict[int, TunnelEntry] = {}
        self._payloads: dict[int, tuple[memoryview, LostBlocks | None]] = {}
        self._held = 0  # bytes received and not taken
        self._told = self._untold_bytes = 0

    def handle_batch(self, batch: Batch) -> None:
        """Take in a batch. Raises WireError for an impossible one."""
        for number, entry in enumerate(batch.entries, batch.first):
            self._check_number(number, self._entries)
            size = len(entry.header)
            if entry.apart:
                if entry.size > self._limit:
                    raise WireError(f"a payload of {entry.size} bytes, where {self._limit} is the most")
            elif entry.payload is not None:
                size += len(entry.payload)
            self._hold(size)
            self._entries[number] = entry

    def handle_payload(self, number: int, payload: memoryview, lost: LostBlocks | None) -> None:
        """Take in a payload that is apart. Raises WireError for an impossible one."""
        self._check_number(number, self._payloads)
        self._hold(payload.nbytes)
        self._payloads[number] = payload, lost

    def _check_number(self, number: int, known: dict[int, Any]) -> None:
        if number in known or not self._next <= number < self.taken + WINDOW_MESSAGES:
            last = self.taken + WINDOW_MESSAGES - 1
            raise WireError(f"message {number}, where {self._next} is the next and {last} the last")

    def _hold(self, size: int) -> None:
        self._held += size
        if self._held > WINDOW_BYTES + self._limit + HEADER_BYTES:
            raise WireError(
                f"{self._held} bytes are not taken, where {WINDOW_BYTES} and a message are the most"
            )

    def in_order(self) -> list[TunnelMessage]:
        """Return the messages whose turn has come."""
        ready = []
        while (entry := self._entries.get(self._next)) is not None:
            lost: LostBlocks | None = None
            payload: memoryview | None = memoryview(entry.payload) if entry.payload is not None else None
            if entry.apart:
                if self._next not in self._payloads:
                    break
                payload, lost = self._payloads.pop(self._next)
                if payload.nbytes != entry.size:
                    raise WireError(
                        f"message {self._next}: a payload of {payload.nbytes} bytes, and not {entry.size}"
                    )
            elif self._next in self._payloads:
                raise WireError(f"message {self._next}: a payload, where none was said")
            del self._entries[self._next]
            self._next += 1
            ready.append(TunnelMessage(entry.header, payload, lost=lost))
        return ready

    def handle_taken(self, message: TunnelMessage) -> None:
        """Note that the application has taken the next message."""
        self.taken += 1
        self._held -= message.bytes
        self._untold_bytes += message.bytes

    @property
    def is_to_tell(self) -> bool:
        """True if the other end must learn what was taken, though there is nothing else to send."""
        many = self.taken - self._told >= WINDOW_MESSAGES * TOLD_SHARE
        return many or self._untold_bytes >= WINDOW_BYTES * TOLD_SHARE

    def batch(self, first: int, messages: Sequence[TunnelMessage]) -> Batch:
        """Return a batch of these messages, which also reports what was taken."""
        self._told, self._untold_bytes = self.taken, 0
        return Batch(first=first, taken=self.taken, entries=[_entry_of(message) for message in messages])


def _entry_of(message: TunnelMessage) -> TunnelEntry:
    if message.apart:
        assert message.payload is not None
        return TunnelEntry(message.header, apart=True, size=message.payload.nbytes)
    return TunnelEntry(message.header, bytes(message.payload) if message.payload is not None else None)
