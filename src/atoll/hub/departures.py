"""Departures and deaths of members, and their effects on the hub's objects."""

from __future__ import annotations

import math

from atoll.core.texts import one_line
from atoll.hub.book import Book, Gone
from atoll.hub.broken import BrokenLinks
from atoll.hub.connections import Connections
from atoll.hub.decisions import Decisions
from atoll.hub.hearing import Hearing
from atoll.hub.logs import Logs
from atoll.hub.records import Died, Left
from atoll.hub.rings import Rings
from atoll.hub.turn import Turn
from atoll.hub.vouching import Vouchers
from atoll.wire.messages import Goodbye

_REASON_CHARACTERS = 300  # characters of a worker's reason to leave


class Departures:
    """Removes members of the run in `book`: those that say goodbye, are silent for too long, or are lost to
    their ring. `hearing` limits the time up to which silence can be judged."""

    def __init__(
        self,
        book: Book,
        rings: Rings,
        connections: Connections,
        broken: BrokenLinks,
        logs: Logs,
        hearing: Hearing,
        decisions: Decisions,
        turn: Turn,
    ) -> None:
        self._book, self._rings, self._connections = book, rings, connections
        self._broken, self._logs, self._hearing = broken, logs, hearing
        self._decisions, self._turn = decisions, turn
        turn.handlers[Goodbye] = self.handle
        self._vouching = Vouchers(book.members.roll, decisions)
        self._judged = -math.inf  # time up to which silences were judged

    def handle(self, peer: bytes, goodbye: Goodbye) -> None:
        """Handle a member's Goodbye."""
        incarnation = goodbye.incarnation
        if not self._connections.owns(peer, incarnation):
            self._turn.refuse(peer, "only a worker itself says goodbye", "Goodbye")
            return
        left = Left(at=self._turn.now(), incarnation=incarnation, finished=goodbye.finished)
        gone = self._book.leave(left)
        if gone is not None:
            self._turn.keep(left)
            self._see_off(incarnation, gone, "left", _why_it_left(goodbye))

    def poll(self) -> None:
        """Remove members that were silent for too long."""
        now, hearing, roll = self._turn.now(), self._hearing, self._book.members.roll
        if hearing.waits or roll.poll_deaths(now):
            hearing.ask(now)
        if hearing.until > self._judged:
            self._judged = hearing.until
            for incarnation, reason in roll.poll_deaths(self._judged):
                self._bury_silent(incarnation, reason)

    def poll_rings(self) -> None:
        """Remove members that their rings have lost."""
        for incarnation, reason in self._rings.silent():
            if self._book.members.roll.is_there(incarnation):
                self._bury_silent(incarnation, reason)

    def _bury_silent(self, incarnation: int, reason: str) -> None:
        """Remove a silent member, unless its process is seen alive."""
        if not self._vouching.spares(self._turn.now(), incarnation):
            self.bury(incarnation, f"{reason}{self._vouching.seen(incarnation)}")

    def bury(self, incarnation: int, reason: str) -> None:
        """Remove a dead member."""
        died = Died(at=self._turn.now(), incarnation=incarnation)
        gone = self._book.die(died)
        assert gone is not None
        self._turn.keep(died)
        if gone.site:
            self._logs.end(gone.site)
            reason = f"{reason}; the other sites go on"
        self._see_off(incarnation, gone, "died", reason)

    def _see_off(self, incarnation: int, gone: Gone, how: str, reason: str) -> None:
        """Record a departure, and close what belongs to the member."""
        self._connections.forget(incarnation)
        self._broken.left(incarnation)
        if gone.worker is not None:
            who = f"worker {gone.worker}, incarnation {incarnation}"
            self._decisions.add(f"worker {how}", who, reason)
        elif gone.shard is not None:
            self._decisions.add(f"shard {how}", f"shard {gone.shard}", reason)
            pair = self._book.members.shards.pairs.get(gone.shard)
            if pair is not None and pair.primary is not None and pair.standby is None and not self._book.over:
                reason = "its standby is gone; another may come"
                self._decisions.add(f"shard {gone.shard}", "goes on without a standby", reason)
        else:
            self._decisions.add(f"site {how}", f"site {gone.site!r}", reason)


def _why_it_left(goodbye: Goodbye) -> str:
    """Reason given by a worker that left early; otherwise "it said goodbye"."""
    reason = one_line(goodbye.reason, _REASON_CHARACTERS)
    return reason if reason and not goodbye.finished else "it said goodbye"
