"""The transfers that a session sends: which one is next, and who is told what came of its datagrams.

A transfer is sent in its window; the next one's begins when all of it was sent once, or the receiver said
Early. Repairs of earlier ones go first. Source: docs/ltp.md, "A transfer's window".
"""

from __future__ import annotations

import math

from atoll.core.errors import UserError
from atoll.ltp.bodies import Items
from atoll.ltp.control import RateControl
from atoll.ltp.events import Delivered, Mask, Values
from atoll.ltp.sending import Outgoing
from atoll.ltp.sent import RTT_SHARE
from atoll.ltp.settings import Settings
from atoll.wire.datagrams import payload_bytes
from atoll.wire.linkcontrol import Closed, Need

MOST_IDS = 2**32  # of transfers: ids have 32 bits in a header
MOST_BEGUN = 16  # transfers that the receiver has not closed; it takes twice as many
MOST_BURNT = 4096  # ids that were refused unseen; only a receiver that errs refuses so many
MOST_SAID = 4096  # transfers closed out of order: a Closed that is lost goes again within a round trip
COPIES_APART = 1 / 16  # of the round trip: no burst of loss that is borne takes two copies of a repair
TAIL_SECONDS = 0.01  # beyond a round trip, in which what is lost at the end cannot come again in time


class Sender:
    """Of one end."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._transfers: dict[int, Outgoing] = {}  # in the order of `send`
        self._begun: dict[int, Outgoing] = {}  # those whose window has begun
        self._waiting: dict[int, Outgoing] = {}  # and those whose has not
        self._next = 1
        self._closed_retransmitted = 0
        self._said: dict[int, Delivered | None] = {}  # by the receiver's order, until those before are said
        self._order = 0  # of the next
        self._burnt: set[int] = set()  # ids that the receiver has refused before they were used

    def block(self, itemsize: int) -> int:
        """Elements in a block."""
        return payload_bytes(self._settings.datagram_bytes) // itemsize

    def add(self, chunk: int, iteration: int, values: Values, high: Mask | None, reliable: bool) -> int:
        """A transfer to send; returns its id. Raises UserError for what cannot be sent, or when the ids have
        run out."""
        while self._next in self._burnt:
            self._burnt.remove(self._next)
            self._next += 1
        transfer = self._next
        if transfer >= MOST_IDS:
            raise UserError(f"{MOST_IDS - 1} transfers were sent in this session, the most: open another one")
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
    def bytes_left(self) -> int:
        """That are still to be sent."""
        return sum(each.bytes_left for each in self._transfers.values())

    @property
    def retransmitted(self) -> int:
        """Datagrams that were sent again."""
        return self._closed_retransmitted + sum(each.repaired for each in self._begun.values())

    def next(self, now: float, control: RateControl, loss: float, burst: float) -> Outgoing | None:
        """The transfer whose turn it is; its window may begin here. `loss` is the path's, in bursts of so
        many datagrams."""
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
        span = RTT_SHARE * control.trip.smoothed + 4 * control.trip.variation + TAIL_SECONDS
        tail = math.ceil(span * decision.rate / outgoing.size)
        outgoing.begin(loss, burst, tail, COPIES_APART * control.trip.smoothed)
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
        outgoing = self._known(transfer)
        if outgoing is not None:
            outgoing.handle_early("the receiver said Early")

    def handle_need(self, now: float, need: Need, rtt: float) -> None:
        """The receiver asks for blocks of it."""
        outgoing = self._known(need.transfer)
        if outgoing is not None:
            outgoing.handle_need(now, need.ranges, rtt)

    def _known(self, transfer: int) -> Outgoing | None:
        """The transfer that the receiver speaks of. An id of which it has something before it was used (a
        datagram was forged, or damaged before it was sealed) is not used any more."""
        if self._next <= transfer and len(self._burnt) < MOST_BURNT:
            self._burnt.add(transfer)
        return self._begun.get(transfer)

    def handle_closed(self, part: Closed) -> list[Delivered]:
        """A part of the receiver's last word on a transfer; returns what is told by now, in the order in
        which the receiver has closed them: both ends keep books by it. Raises WireError."""
        delivered = None
        outgoing = self._transfers.get(part.transfer)
        if outgoing is not None:
            delivered = outgoing.handle_closed(part)
            if delivered is None:
                return []
            self._closed_retransmitted += outgoing.repaired
            for each in (self._transfers, self._begun, self._waiting):
                each.pop(part.transfer, None)
        else:
            self._known(part.transfer)
        if part.order < self._order or len(self._said) >= MOST_SAID:
            return [delivered] if delivered is not None else []
        self._said.setdefault(part.order, delivered)
        return self._in_order()

    def _in_order(self) -> list[Delivered]:
        """What can be told: without a gap, or when there is no transfer that could fill one."""
        ready = []
        while self._said and (self._order in self._said or not self._begun):
            self._order = min(self._said)
            ready.append(self._said.pop(self._order))
            self._order += 1
        return [each for each in ready if each is not None]

    @property
    def due(self) -> float:
        """When `poll` has something to do."""
        return min((each.due for each in self._begun.values()), default=math.inf)

    def poll(self, now: float) -> None:
        """Has go again what is due, and reminds a receiver of transfers that it has not closed."""
        for outgoing in self._begun.values():
            if now >= outgoing.due:
                outgoing.poll(now)

    def probe(self, transfer: int, item: int) -> bool:
        """Sends an item again, if it is worth it."""
        outgoing = self._begun.get(transfer)
        return outgoing is not None and outgoing.probe(item)

    def end(self) -> tuple[list[Delivered], tuple[int, ...]]:
        """The session is over: what the receiver has said out of order, which is told now, and the transfers
        whose fate is not known. To know what the last values were takes every word before."""
        said = [delivered for _, delivered in sorted(self._said.items()) if delivered is not None]
        told = [each for each in said if each.fill != "last"]
        unknown = {each.transfer for each in said if each.fill == "last"} | self._transfers.keys()
        self._transfers, self._begun, self._waiting, self._said = {}, {}, {}, {}
        return told, tuple(sorted(unknown))
