"""Transfers that a session sends: their order, and where acknowledgements and losses go.

A transfer is sent in its window. The next window begins when the whole transfer was sent once, or the
receiver said Early. Repairs of earlier transfers go first. Source: docs/ltp.md, "A transfer's window".
"""

from __future__ import annotations

import math

from atoll.core.errors import UserError
from atoll.ltp.bodies import Items
from atoll.ltp.control import RateControl
from atoll.ltp.events import Delivered, Mask, Values
from atoll.ltp.sending import Outgoing
from atoll.ltp.sent import RTT_SHARE
from atoll.ltp.settings import LtpSettings
from atoll.wire.datagrams import payload_bytes
from atoll.wire.linkcontrol import Closed, Need

MOST_IDS = 2**32  # transfer ids have 32 bits in a header
MOST_BEGUN = 16  # transfers in flight that are not closed; a receiver takes twice as many
MOST_BURNT = 4096  # ids refused before use; only a faulty receiver refuses so many
MOST_SAID = 4096  # transfers closed out of order: a lost Closed is resent within a round trip
COPIES_APART = 1 / 16  # of the round trip, between copies of a repair: no ordinary loss burst takes two
TAIL_SECONDS = 0.01  # beyond a round trip: losses so close to the end cannot be repaired in time


class Sender:
    """The sending side of one end of a session."""

    def __init__(self, settings: LtpSettings) -> None:
        self._settings = settings
        self._transfers: dict[int, Outgoing] = {}  # in the order of `send`
        self._begun: dict[int, Outgoing] = {}  # those whose window has begun
        self._waiting: dict[int, Outgoing] = {}  # those whose window has not begun
        self._next = 1
        self._closed_retransmitted = 0
        self._reports: dict[int, Delivered | None] = {}  # closed out of order, by the receiver's order
        self._order = 0  # next one to report
        self._burnt: set[int] = set()  # ids that the receiver refused before they were used

    def block(self, itemsize: int) -> int:
        """Return the elements in a block."""
        return payload_bytes(self._settings.datagram_bytes) // itemsize

    def add(self, chunk: int, iteration: int, values: Values, high: Mask | None, reliable: bool) -> int:
        """Queue a transfer and return its id. Raises UserError for values that cannot be sent, or without
        free ids."""
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
        """True if a datagram waits to be sent."""
        if any(each.ready for each in self._begun.values()):
            return True
        return bool(self._waiting) and len(self._begun) < MOST_BEGUN

    @property
    def bytes_left(self) -> int:
        """Bytes still to be sent."""
        return sum(each.bytes_left for each in self._transfers.values())

    @property
    def retransmitted(self) -> int:
        """Datagrams sent more than once."""
        return self._closed_retransmitted + sum(each.repaired for each in self._begun.values())

    def next(self, now: float, control: RateControl, loss: float, burst: float) -> Outgoing | None:
        """Return the transfer to send from; its window may begin here.

        `loss` and `burst` are the path's loss rate and mean datagrams lost in a row.
        """
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
        """Record that these items of a transfer arrived."""
        outgoing = self._begun.get(transfer)
        if outgoing is not None:
            outgoing.handle_acked(items)

    def handle_lost(self, transfer: int, items: Items) -> None:
        """Record that these items of a transfer were lost."""
        outgoing = self._begun.get(transfer)
        if outgoing is not None:
            outgoing.handle_lost(items)

    def handle_early(self, transfer: int) -> None:
        """Stop low blocks of a transfer: its receiver has enough."""
        outgoing = self._known(transfer)
        if outgoing is not None:
            outgoing.handle_early("the receiver said Early")

    def handle_need(self, now: float, need: Need, rtt: float) -> None:
        """Resend the blocks of a transfer that its receiver asks for."""
        outgoing = self._known(need.transfer)
        if outgoing is not None:
            outgoing.handle_need(now, need.ranges, rtt)

    def _known(self, transfer: int) -> Outgoing | None:
        """Return the transfer with this id, if its window has begun.

        An id that the receiver names before it was used (a datagram was forged, or damaged before sealing) is
        never used.
        """
        if self._next <= transfer and len(self._burnt) < MOST_BURNT:
            self._burnt.add(transfer)
        return self._begun.get(transfer)

    def handle_closed(self, part: Closed) -> list[Delivered]:
        """Take one part of a Closed; return what can be reported by now, in the order of the receiver.

        Both ends keep their last values by that order. Raises WireError.
        """
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
        if part.order < self._order or len(self._reports) >= MOST_SAID:
            return [delivered] if delivered is not None else []
        self._reports.setdefault(part.order, delivered)
        return self._in_order()

    def _in_order(self) -> list[Delivered]:
        """Return the reports without a gap before them, or all if no open transfer could fill a gap."""
        ready = []
        while self._reports and (self._order in self._reports or not self._begun):
            self._order = min(self._reports)
            ready.append(self._reports.pop(self._order))
            self._order += 1
        return [each for each in ready if each is not None]

    @property
    def due(self) -> float:
        """Time at which `poll` has something to do."""
        return min((each.due for each in self._begun.values()), default=math.inf)

    def poll(self, now: float) -> None:
        """Queue repeats that are due, and remind a receiver of transfers that it has not closed."""
        for outgoing in self._begun.values():
            if now >= outgoing.due:
                outgoing.poll(now)

    def probe(self, transfer: int, item: int) -> bool:
        """Send an item again if that helps; return True if so."""
        outgoing = self._begun.get(transfer)
        return outgoing is not None and outgoing.probe(item)

    def end(self) -> tuple[list[Delivered], tuple[int, ...]]:
        """End the session; return reports closed out of order, and the transfers whose fate is unknown.

        A transfer filled with last values counts as unknown: these depend on every transfer before it.
        """
        ordered = [delivered for _, delivered in sorted(self._reports.items()) if delivered is not None]
        known = [each for each in ordered if each.fill != "last"]
        unknown = {each.transfer for each in ordered if each.fill == "last"} | self._transfers.keys()
        self._transfers, self._begun, self._waiting, self._reports = {}, {}, {}, {}
        return known, tuple(sorted(unknown))
