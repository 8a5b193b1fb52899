"""Transfers that arrive on a session: open them, refuse bad ones, hand on complete ones.

Source: docs/ltp.md, "The receiver". Bounds are checked before memory is allocated.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from atoll.ltp.events import Arrived, Event, Mask, Refused
from atoll.ltp.filling import LastValues
from atoll.ltp.order import Extent
from atoll.ltp.receiving import ArrivalRate, BadTransferError, Incoming
from atoll.ltp.settings import LtpSettings
from atoll.wire.datagrams import Datagrams, Records
from atoll.wire.linkcontrol import Filled, How

MOST_TRANSFERS = 32  # open at a time; a sender begins at most half as many
MOST_BYTES = 2**32  # of all open transfers together, by their declared sizes
REPEAT_SECONDS = 0.5  # between two Closed messages for one transfer: half of a sender's reminder
MOST_TOLD, MOST_TOLD_BYTES = 4096, 2**22  # Closed messages kept for repeating; their masks, a byte a block
MOST_RANGES = 4096  # of closed ids: an honest sender leaves no more gaps than transfers it has begun


@dataclass
class Done:
    """Actions due on a transfer. A `missing` mask, by index, closes it."""

    early: bool = False
    need: Mask | None = None
    event: Event | None = None
    missing: Mask | None = None
    fill: Filled = "none"
    how: How = "complete"
    order: int = 0  # rank among all closed transfers


@dataclass
class _Notice:
    """The last Closed of a transfer, and the time it was sent."""

    done: Done
    at: float

    @property
    def bytes(self) -> int:
        return 0 if self.done.missing is None else self.done.missing.nbytes


class IdRanges:
    """A set of ids that are added nearly in order.

    With more than MOST_RANGES gaps the lowest gap is treated as filled.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []  # exclusive

    def __len__(self) -> int:
        """Number of ranges."""
        return len(self._starts)

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._starts, number) - 1
        return at >= 0 and number < self._stops[at]

    def add(self, number: int) -> None:
        if number in self:
            return
        at = bisect_right(self._starts, number)
        follows = at > 0 and self._stops[at - 1] == number
        precedes = at < len(self._starts) and self._starts[at] == number + 1
        if follows and precedes:
            self._stops[at - 1] = self._stops.pop(at)
            del self._starts[at]
        elif follows:
            self._stops[at - 1] += 1
        elif precedes:
            self._starts[at] = number
        else:
            self._starts.insert(at, number)
            self._stops.insert(at, number + 1)
        if len(self._starts) > MOST_RANGES:
            del self._starts[1], self._stops[0]


class Receiver:
    """The receiving side of one end of a session."""

    def __init__(
        self,
        settings: LtpSettings,
        extents: Mapping[int, Extent] | None,
        drops: Counter[str],
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self.repaired = self.borne = self.filled = 0
        self._settings, self._extents, self._drops = settings, extents, drops
        self._most_bytes = most_bytes
        self._open: dict[int, Incoming] = {}
        self._refused: dict[int, str] = {}  # reasons that the sender has yet to hear
        self._closed = IdRanges()
        self._notices: dict[int, _Notice] = {}  # of the transfers closed last
        self._notice_bytes = 0
        self._order = 0
        self._last = LastValues(most_bytes)
        self._rates = ArrivalRate()

    def handle_slices(self, now: float, batch: Datagrams, srtt: float) -> list[int]:
        """Take DATA or PARITY; return the transfers that `poll` must look at."""
        transfers = batch.slices["transfer"]
        self._rates.handle_blocks(now, len(batch), srtt)
        if (transfers == transfers[0]).all():
            touched = [(int(transfers[0]), batch)]
        else:
            touched = [
                (int(each), Datagrams(batch.kind, batch.frames[transfers == each]))
                for each in np.unique(transfers)
            ]
        return [transfer for transfer, part in touched if self._handle_part(now, transfer, part)]

    def _handle_part(self, now: float, transfer: int, part: Datagrams) -> bool:
        incoming = self._open.get(transfer)
        if incoming is None and transfer in self._closed:
            self._drops["of a transfer that was handed on"] += len(part)
            return self._repeats(now, transfer)
        try:
            if incoming is None:
                incoming = self._open_transfer(now, part.slices[0], part.elements.shape[1])
                self._open[transfer] = incoming
            incoming.handle_datagrams(now, part, self._drops)
        except BadTransferError as error:
            self._refused[transfer] = str(error)
        return True

    def _open_transfer(self, now: float, first: Records, payload: int) -> Incoming:
        chunk = int(first["chunk"])
        if self._extents is not None and chunk not in self._extents:
            raise BadTransferError(f"transfer {first['transfer']}: no chunk {chunk} is known here")
        if len(self._open) >= MOST_TRANSFERS:
            raise BadTransferError(
                f"transfer {first['transfer']}: the limit of {MOST_TRANSFERS} open transfers is reached"
            )
        extent = None if self._extents is None else self._extents[chunk]
        room = self._most_bytes - sum(each.bytes for each in self._open.values())
        return Incoming(self._settings, first, payload, extent, room, now)

    def _repeats(self, now: float, transfer: int) -> bool:
        """Return True to send Closed once more, because the sender goes on and may have missed it.

        A forgotten Closed is not replaced: the sender either still gets it, or reports an unknown fate at the
        session's end. A made-up one would report a loss that did not happen.
        """
        notice = self._notices.get(transfer)
        if notice is None or now < notice.at + REPEAT_SECONDS:
            return False
        notice.at = now
        return True

    def poll(self, now: float, transfer: int, reorder: float, srtt: float, rttvar: float) -> Done:
        """Return the action for a transfer at this time."""
        if transfer in self._refused:
            return self._refuse(now, transfer, self._refused.pop(transfer), "refused")
        incoming = self._open.get(transfer)
        if incoming is None:  # closed already
            return self._notices[transfer].done if transfer in self._notices else Done()
        idle = now >= incoming.last_at + self._settings.idle_seconds  # as in `_deadline_of`, to the bit
        if idle and not incoming.whole:
            silence = f"transfer {transfer}: nothing arrived for {self._settings.idle_seconds:g} s"
            return self._refuse(now, transfer, silence, "dropped")
        verdict = incoming.poll_verdict(now, reorder, self._rates, srtt, rttvar, idle=idle)
        if verdict.name == "early":
            return Done(early=True)
        if verdict.name == "need":
            return Done(need=incoming.poll_need(now, srtt, rttvar))
        if not verdict.hands_on:
            return Done()
        last = self._settings.fill == "last" and not incoming.reliable
        arrived = incoming.finish(now, self._last.of(incoming.chunk) if last else None)
        if last:
            self._last.keep(incoming.chunk, arrived.values, arrived.present, arrived.block)
        self._count(arrived, incoming.restored, int(np.count_nonzero(incoming.missing)))
        done = Done(missing=incoming.missing, fill=arrived.fill, how=arrived.how, order=self._order)
        return self._close(now, transfer, done, arrived)

    def _count(self, arrived: Arrived, restored: int, missing: int) -> None:
        self.repaired += restored
        if arrived.fill == "borne":
            self.borne += missing
        else:
            self.filled += missing

    def _refuse(self, now: float, transfer: int, reason: str, how: How) -> Done:
        done = Done(missing=np.zeros(0, dtype=np.bool_), how=how, order=self._order)
        return self._close(now, transfer, done, Refused(transfer, reason))

    def _close(self, now: float, transfer: int, done: Done, event: Event) -> Done:
        self._open.pop(transfer, None)
        self._closed.add(transfer)
        self._notices[transfer] = notice = _Notice(done, now)
        self._notice_bytes += notice.bytes
        self._order += 1
        while len(self._notices) > 1 and (
            len(self._notices) > MOST_TOLD or self._notice_bytes > MOST_TOLD_BYTES
        ):
            self._notice_bytes -= self._notices.pop(next(iter(self._notices))).bytes
        return replace(done, event=event)

    @property
    def deadline(self) -> float:
        """Next time at which some transfer must be polled."""
        if not self._open:
            return math.inf
        return min(self._deadline_of(each) for each in self._open.values())

    def due(self, now: float) -> list[int]:
        """Return the transfers to poll at this time."""
        return [transfer for transfer, each in self._open.items() if self._deadline_of(each) <= now]

    def _deadline_of(self, incoming: Incoming) -> float:
        return min(incoming.deadline, incoming.last_at + self._settings.idle_seconds)

    def end(self) -> tuple[int, ...]:
        """Drop all open transfers because the session ended; return their ids."""
        transfers = tuple(self._open)
        self._open, self._refused = {}, {}
        return transfers
