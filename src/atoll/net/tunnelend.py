"""One end of a tunnel: messages, in order, on a session of the loss-tolerant transport.

The application's thread puts messages in; the link's thread handles events, and goes on sending. Received
messages go to a Mailbox, which wakes the application's poll. Source: docs/ltp.md, "The tunnel".
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from atoll.core.errors import AtollError, RunError, UserError
from atoll.core.events import LinkFigures
from atoll.ltp.events import Arrived, Delivered, Event, Lost, Opened, Refused
from atoll.ltp.settings import LtpSettings
from atoll.net.linksession import LinkSession
from atoll.net.tunnelorder import Inbox, Lossy, Outbox, TunnelMessage
from atoll.wire.base import WireError
from atoll.wire.datagrams import payload_bytes
from atoll.wire.messages import LostBlocks
from atoll.wire.tunnel import BATCHES, PAYLOADS, decode_batch_untrusted, encode_batch

UNDERWAY = 16  # transfers that the other end has not closed; messages that wait meanwhile go in one batch
IDLE_SECONDS = 60.0  # of silence, after which the session is over
# numpy has no bfloat16; uint8: a codec's output.
_WIRE_DTYPES = {"float32": "f4", "float64": "f8", "float16": "f2", "bfloat16": "u2", "uint8": "u1"}

T = TypeVar("T")


def block_elements(dtype: str, settings: LtpSettings) -> int:
    """Return the number of elements in a block of a lossy payload."""
    return payload_bytes(settings.datagram_bytes) // _dtype_of(dtype).itemsize


def _dtype_of(name: str) -> np.dtype[Any]:
    if name not in _WIRE_DTYPES:
        raise UserError(f"a lossy payload of {name}: one of {', '.join(_WIRE_DTYPES)}")
    return np.dtype(_WIRE_DTYPES[name])


class Mailbox(Generic[T]):
    """Items of link threads for the thread that uses an endpoint. `fileno` is readable while there are
    any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._items: deque[T | None] = deque()
        self._woken, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._closed = False

    def fileno(self) -> int:
        return self._woken

    def add(self, items: Sequence[T | None]) -> None:
        """Add items; None only wakes the waiting thread."""
        with self._lock:
            if self._closed:
                return
            if items and not self._items:
                os.write(self._waker, b"x")
            self._items.extend(items)

    def take(self) -> T | None:
        """Return the next item, or None."""
        with self._lock:
            while self._items:
                item = self._items.popleft()
                if not self._items:
                    os.read(self._woken, 1)
                if item is not None:
                    return item
        return None

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._items.clear()
                os.close(self._woken)
                os.close(self._waker)


class TunnelEnd:
    """One end of a tunnel. `came` is called with messages in order, and `over` once, with the reason why
    there are no more: both from the link's thread. `limit` is the largest payload or header in bytes."""

    def __init__(
        self,
        limit: int,
        came: Callable[[list[TunnelMessage]], None],
        over: Callable[[str], None] = lambda _reason: None,
    ) -> None:
        self.opened = False  # the other end was heard
        self.lost = ""  # why the session is over
        self.session: LinkSession | None = None
        self.bytes_in = self.bytes_out = 0
        self._came, self._over = came, over
        self._condition = threading.Condition(threading.Lock())
        self._outbox, self._inbox = Outbox(), Inbox(limit)
        self._underway: dict[int, bool] = {}  # transfers: lossy
        self._borne = self._filled = 0  # lost blocks of sent payloads

    # -- for the application's thread ------------------------------------------------------------------------

    def begin(self, open_session: Callable[[Callable[[list[Event]], None]], LinkSession]) -> None:
        """Open the session, and send waiting messages."""
        with self._condition:
            self.session = open_session(self.handle_events)
            self._send()

    def say(self, message: TunnelMessage) -> None:
        """Send, never waiting; once the session is over, do nothing."""
        with self._condition:
            if not self.lost:
                self._outbox.put(message)
                self._send()

    @property
    def waiting(self) -> int:
        """Number of messages that the session does not have yet."""
        return self._outbox.waiting

    def taken(self, message: TunnelMessage) -> None:
        """Note that the application has taken this message, the next one."""
        with self._condition:
            self._inbox.handle_taken(message)
            self._send()

    def wait_sent(self, seconds: float) -> None:
        """Wait until the other end has all sent messages, or for so long."""
        until = time.monotonic() + seconds
        with self._condition:
            while not self.lost and self.session is not None and (self._outbox.waiting or self._underway):
                left = until - time.monotonic()
                if left <= 0 or not self._condition.wait(left):
                    return

    def close(self, reason: str) -> None:
        """End the session, and tell the other end why, without a call of `over`. Closing twice does no
        harm."""
        with self._condition:
            self.lost = self.lost or reason
            session = self.session
            self._forget()
        if session is not None:
            with contextlib.suppress(AtollError):  # its last word is not worth more waiting
                session.close(reason)

    def figures(self, peer: str, site: str) -> LinkFigures | None:
        """Return the session's figures; None before it is open."""
        if self.session is None:
            return None
        status = self.session.status().session
        names = ("rate", "estimate", "rtt", "min_rtt", "loss", "target")
        counts = ("sent", "lost", "retransmitted", "repaired", "reason")
        return LinkFigures(
            peer=peer,
            site=site,
            borne=status.borne + self._borne,
            filled=status.filled + self._filled,
            bytes_in=self.bytes_in,
            bytes_out=self.bytes_out,
            **{name: getattr(status, name) for name in (*names, *counts)},
        )

    # -- for the link's thread -------------------------------------------------------------------------------

    def handle_events(self, events: list[Event]) -> None:
        """Handle the session's events. Raises WireError for an error of the other end: the session is over
        then."""
        lost = ""
        with self._condition:
            if self.lost:
                return
            try:
                for event in events:
                    self._handle(event)
                    lost = lost or (event.reason if isinstance(event, Lost) else "")
                came = self._inbox.in_order()
                self.bytes_in += sum(message.bytes for message in came)
                if not lost:
                    self._send()
            except WireError as error:
                self.lost = str(error)
                self._forget()
                self._over(self.lost)
                raise
            if lost:
                self.lost = lost
                self._forget()
        if came:
            self._came(came)
        if lost:
            self._over(lost)

    def _handle(self, event: Event) -> None:
        if isinstance(event, Opened):
            self.opened = True
        elif isinstance(event, Arrived):
            self._arrive(event)
        elif isinstance(event, Delivered):
            lossy = self._underway.pop(event.transfer)
            missing = int(np.count_nonzero(event.missing))
            if missing and not lossy:
                raise WireError(
                    f"the other end says that blocks of a reliable transfer are missing: {event.reason}"
                )
            self._borne += missing if event.fill == "borne" else 0
            self._filled += missing if event.fill != "borne" else 0
            self._condition.notify_all()
        elif isinstance(event, Refused):
            raise WireError(f"a transfer that came was refused: {event.reason}")

    def _arrive(self, event: Arrived) -> None:
        raw = event.values.data.cast("B")
        if event.chunk == BATCHES:
            batch = decode_batch_untrusted(raw)
            self._outbox.handle_taken(batch.taken)
            self._inbox.handle_batch(batch)
        else:
            lost = None
            if event.fill != "none":
                missing = np.packbits(~event.present, bitorder="little").tobytes()
                lost = LostBlocks(block=event.block, missing=missing, how=event.fill)
            if lost is not None and event.chunk == PAYLOADS:
                raise WireError("blocks of a reliable payload are missing")
            self._inbox.handle_payload(event.iteration, raw, lost)

    def _send(self) -> None:
        """Give the session all messages that may go now."""
        session = self.session
        if session is None or self.lost:
            return
        try:
            while self._outbox.ready and len(self._underway) < UNDERWAY:
                self._send_batch(session, *self._outbox.take(UNDERWAY - len(self._underway)))
            if self._inbox.is_to_tell:
                self._send_batch(session, self._outbox.next, [])
        except (RunError, UserError):
            if not session.over:
                raise
            # Its last event says why.

    def _send_batch(self, session: LinkSession, first: int, messages: Sequence[TunnelMessage]) -> None:
        batch = np.frombuffer(encode_batch(self._inbox.batch(first, messages)), dtype=np.uint8)
        self._underway[session.send(BATCHES, 0, batch, reliable=True)] = False
        for number, message in enumerate(messages, first):
            self.bytes_out += message.bytes
            if message.apart:
                self._send_payload(session, number, message)

    def _send_payload(self, session: LinkSession, number: int, message: TunnelMessage) -> None:
        assert message.payload is not None
        lossy = message.lossy
        if lossy is None:
            values: npt.NDArray[Any] = np.frombuffer(message.payload, dtype=np.uint8)
            transfer = session.send(PAYLOADS, number, values, reliable=True)
        else:
            values = np.frombuffer(message.payload, dtype=_dtype_of(lossy.dtype))
            transfer = session.send(lossy.chunk, number, values, lossy.high)
        self._underway[transfer] = lossy is not None

    def _forget(self) -> None:
        """Drop messages whose memory others may want to write to."""
        self._outbox = Outbox()
        self._underway = {}
        self._condition.notify_all()


def check_lossy(lossy: Lossy, payload: memoryview, settings: LtpSettings) -> None:
    """Raise UserError for a payload that cannot be sent so."""
    itemsize = _dtype_of(lossy.dtype).itemsize
    if not 0 <= lossy.chunk < PAYLOADS:
        raise UserError(f"a lossy payload of chunk {lossy.chunk}: chunks are from 0 to {PAYLOADS - 1}")
    if payload.nbytes % itemsize:
        raise UserError(
            f"a lossy payload of {payload.nbytes} bytes: a multiple of {itemsize}, for {lossy.dtype}"
        )
    blocks = -(-payload.nbytes // (block_elements(lossy.dtype, settings) * itemsize))
    if lossy.high is not None and lossy.high.shape != (blocks,):
        raise UserError(f"high: of shape {lossy.high.shape}, where the payload has {blocks} blocks")
