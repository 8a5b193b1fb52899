"""The transfers that a session sends: which one is next, and who is told what came of its datagrams.

A transfer is sent in its window; the next one's begins when all of it was sent once, or the receiver said
Early. Repairs of earlier ones go first. Source: S3, "The sender", 5.
"""

from __future__ import annotations

import math

from atoll.ltp.control import RateControl
from atoll.ltp.events import Delivered, Mask, Values
from atoll.ltp.sending import Items, Outgoing
from atoll.ltp.sent import RTT_SHARE
from atoll.ltp.settings import Settings
from atoll.wire.datagrams import payload_bytes
from atoll.wire.linkcontrol import Closed, Need

MOST_BEGUN = 16  # transfers that the receiver has not closed; it takes twice as many
TAIL_SECONDS = 0.01  # beyond a round trip, in which what is lost at the end cannot come again in time


class Sender:
    """Of one end."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._transfers: dict[int, Outgoing] = {}  # in the order of `send`
        self._begun: dict[int, Outgoing] = {}  # those whose window has begun
        self._waiting: dict[int, Outgoing] = {}  # and those whose has not
        self._current: Outgoing | None = None
        self._next = 1
        self._closed_retransmitted = 0

    def block(self, itemsize: int) -> int:
        """Elements in a block."""
        return payload_bytes(self._settings.datagram_bytes) // itemsize

    def add(self, chunk: int, iteration: int, values: Values, high: Mask | None, reliable: bool) -> int:
        """A transfer to send; returns its id."""
        transfer = self._next
        outgoing = Outgoing(self._settings, transfer, chunk, iteration, values, high, reliable)
        self._next += 1
        self._transfers[transfer] = self._waiting[transfer] = outgoing
        return transfer

    @property
    def ready(self) -> bool:
        """Whether something is to be sent."""
        if any(each.ready for each in self._begun.values()):
            return True
        return bool(self._waiting) and len(self._begun) < MOST_BEGUN

    @property
    def retransmitted(self) -> int:
        """Datagrams that were sent again."""
        return self._closed_retransmitted + sum(each.repaired for each in self._begun.values())

    def next(self, now: float, control: RateControl, burst: float) -> Outgoing | None:
        """The transfer whose turn it is; its window may begin here."""
        for outgoing in self._begun.values():
            if outgoing.repairs:
                return outgoing
        for outgoing in self._begun.values():
            if outgoing.ready:
                return outgoing
        if not self._waiting or len(self._begun) >= MOST_BEGUN:
            return None
        transfer, outgoing = next(iter(self._waiting.items()))
        del self._waiting[transfer]
        self._begun[transfer] = outgoing
        decision = control.begin_window(now)
        span = RTT_SHARE * control.srtt + 4 * control.rttvar + TAIL_SECONDS
        outgoing.begin(control.loss, burst, math.ceil(span * decision.rate / outgoing.size))
        return outgoing

    def handle_acked(self, transfer: int, items: Items) -> None:
        """These of its items came."""
        outgoing = self._begun.get(transfer)
        if outgoing is not None:
            outgoing.handle_acked(items)

    def handle_lost(self, transfer: int, items: Items) -> int:
        """These were lost; how many of them can be restored."""
        outgoing = self._begun.get(transfer)
        return outgoing.handle_lost(items) if outgoing is not None else 0

    def handle_early(self, transfer: int) -> None:
        """The receiver has enough of it."""
        outgoing = self._begun.get(transfer)
        if outgoing is not None:
            outgoing.handle_early("the receiver said Early")

    def handle_need(self, now: float, need: Need, rtt: float) -> None:
        """The receiver asks for blocks of it."""
        outgoing = self._begun.get(need.transfer)
        if outgoing is not None:
            outgoing.handle_need(now, need.ranges, rtt)

    def handle_closed(self, part: Closed) -> Delivered | None:
        """A part of the receiver's last word on it. Raises WireError."""
        outgoing = self._begun.get(part.transfer)
        if outgoing is None:
            return None
        delivered = outgoing.handle_closed(part)
        if delivered is not None:
            del self._begun[part.transfer], self._transfers[part.transfer]
            self._closed_retransmitted += outgoing.repaired
        return delivered

    def probe(self, transfer: int, item: int) -> bool:
        """Sends an item again, if it is worth it."""
        outgoing = self._begun.get(transfer)
        return outgoing is not None and outgoing.probe(item)

    def end(self) -> tuple[int, ...]:
        """The session is over: these transfers' fate is not known."""
        transfers = tuple(self._transfers)
        self._transfers, self._begun, self._waiting = {}, {}, {}
        return transfers
