"""The transfers that come to a session: which datagrams are whose, what is refused, what is handed on.

Source: docs/ltp.md, "The receiver". Bounds are checked before memory is taken.
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
from atoll.ltp.settings import Settings
from atoll.wire.datagrams import Datagrams, Records
from atoll.wire.linkcontrol import Filled, How

MOST_TRANSFERS = 32  # open at a time: a sender begins half as many
MOST_BYTES = 2**32  # of all open transfers together, by what they declare
REPEAT_SECONDS = 0.5  # from one word that a transfer is closed to the next: half of a sender's reminder
MOST_TOLD, MOST_TOLD_BYTES = 4096, 2**22  # last words that are kept, to be said again; masks, a byte a block
MOST_RANGES = 4096  # of ids of transfers that are over: an honest sender leaves as few gaps as it has begun


@dataclass
class Done:
    """What is to be done about a transfer. `missing`, by index, is to be told: it is closed."""

    early: bool = False
    need: Mask | None = None
    event: Event | None = None
    missing: Mask | None = None
    fill: Filled = "none"
    how: How = "complete"
    order: int = 0  # among all that are closed


@dataclass
class _Word:
    """The last one on a transfer, and when it was said."""

    done: Done
    at: float

    @property
    def bytes(self) -> int:
        return 0 if self.done.missing is None else self.done.missing.nbytes


class IdRanges:
    """A set of ids that are added nearly in order. Where it has more than MOST_RANGES gaps, the lowest is
    taken for full."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []  # not in the range any more

    def __len__(self) -> int:
        """Ranges."""
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
    """Of one end."""

    def __init__(
        self,
        settings: Settings,
        extents: Mapping[int, Extent] | None,
        drops: Counter[str],
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self.repaired = self.borne = self.filled = 0
        self._settings, self._extents, self._drops = settings, extents, drops
        self._most_bytes = most_bytes
        self._open: dict[int, Incoming] = {}
        self._refused: dict[int, str] = {}  # that are still to be told
        self._closed = IdRanges()
        self._told: dict[int, _Word] = {}  # the newest of them
        self._told_bytes = 0
        self._order = 0
        self._last = LastValues(most_bytes)
        self._rates = ArrivalRate()

    def handle_slices(self, now: float, batch: Datagrams, srtt: float) -> list[int]:
        """Takes DATA or PARITY; returns the transfers that they were of, for `poll`."""
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
                f"transfer {first['transfer']}: {MOST_TRANSFERS} are open, which is the most"
            )
        extent = None if self._extents is None else self._extents[chunk]
        room = self._most_bytes - sum(each.bytes for each in self._open.values())
        return Incoming(self._settings, first, payload, extent, room, now)

    def _repeats(self, now: float, transfer: int) -> bool:
        """Whether to say once more that a transfer is closed: its sender, who goes on, may not know. Of one
        whose word is forgotten nothing is said: its sender gets the word that is still on its way, or never
        learns, and says so when the session ends. Another word would tell it of a loss that is none."""
        word = self._told.get(transfer)
        if word is None or now < word.at + REPEAT_SECONDS:
            return False
        word.at = now
        return True

    def poll(self, now: float, transfer: int, reorder: float, srtt: float, rttvar: float) -> Done:
        """What is to be done about it now."""
        if transfer in self._refused:
            return self._refuse(now, transfer, self._refused.pop(transfer), "refused")
        incoming = self._open.get(transfer)
        if incoming is None:  # it is over
            return self._told[transfer].done if transfer in self._told else Done()
        idle = now >= incoming.last_at + self._settings.idle_seconds  # as in `_deadline_of`, to the bit
        if idle and not incoming.whole:
            return self._refuse(now, transfer, f"transfer {transfer}: nothing came of it any more", "dropped")
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
        told = Done(missing=incoming.missing, fill=arrived.fill, how=arrived.how, order=self._order)
        return self._close(now, transfer, told, arrived)

    def _count(self, arrived: Arrived, restored: int, missing: int) -> None:
        self.repaired += restored
        if arrived.fill == "borne":
            self.borne += missing
        else:
            self.filled += missing

    def _refuse(self, now: float, transfer: int, reason: str, how: How) -> Done:
        told = Done(missing=np.zeros(0, dtype=np.bool_), how=how, order=self._order)
        return self._close(now, transfer, told, Refused(transfer, reason))

    def _close(self, now: float, transfer: int, told: Done, event: Event) -> Done:
        self._open.pop(transfer, None)
        self._closed.add(transfer)
        self._told[transfer] = word = _Word(told, now)
        self._told_bytes += word.bytes
        self._order += 1
        while len(self._told) > 1 and (len(self._told) > MOST_TOLD or self._told_bytes > MOST_TOLD_BYTES):
            self._told_bytes -= self._told.pop(next(iter(self._told))).bytes
        return replace(told, event=event)

    @property
    def deadline(self) -> float:
        """When a transfer is to be polled."""
        if not self._open:
            return math.inf
        return min(self._deadline_of(each) for each in self._open.values())

    def due(self, now: float) -> list[int]:
        """The transfers to poll."""
        return [transfer for transfer, each in self._open.items() if self._deadline_of(each) <= now]

    def _deadline_of(self, incoming: Incoming) -> float:
        return min(incoming.deadline, incoming.last_at + self._settings.idle_seconds)

    def end(self) -> tuple[int, ...]:
        """The session is over: these had come in part, and are dropped."""
        transfers = tuple(self._open)
        self._open, self._refused = {}, {}
        return transfers
