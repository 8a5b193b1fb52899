"""The hub's pairs of primary and standby, for shards with a standby.

`store/replicas.py` decides about one shard. Evidence comes from here: a process is gone if another process
uses its directory, if both the hub and its partner lost it, or if it is silent for too long.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from atoll.hub.book import Book
from atoll.hub.connections import Connections
from atoll.hub.decisions import Decisions
from atoll.hub.records import Came, Paired, Promoted
from atoll.hub.turn import Turn
from atoll.store.replicas import Half, Pair
from atoll.wire.messages import Duty, Hello, InSync, LostTouch, Serves

_MOST_RIVALS = 4096


@dataclass(frozen=True)
class _Rival:
    """A third process of a shard, while one of its two processes may be dead."""

    peer: bytes
    hello: Hello
    since: float


class Pairs:
    """The pairs of the run in `book`; inactive without any. `bury(incarnation, reason)` declares a process
    dead."""

    def __init__(
        self,
        book: Book,
        connections: Connections,
        bury: Callable[[int, str], None],
        decisions: Decisions,
        turn: Turn,
    ) -> None:
        self._book, self._members, self._connections = book, book.members, connections
        self._bury, self._decisions, self._turn = bury, decisions, turn
        turn.handlers |= dict.fromkeys((Serves, InSync, LostTouch), self.handle)
        self._told: dict[int, int] = {}  # shard -> the term announced to both
        self._rivals: list[_Rival] = []

    @property
    def _pairs(self) -> dict[int, Pair]:
        return self._members.shards.pairs

    # -- arrivals -----------------------------------------------------------------------------------------

    def handle_hello(self, peer: bytes, hello: Hello) -> None:
        """Handle the Hello of a shard's process, new or on a new connection."""
        pair = self._pairs.get(hello.shard)
        if pair is not None and pair.known(hello.life) is None:
            for half in pair.halves():
                if hello.token and half.token == hello.token:
                    self._bury(half.incarnation, "it was started again, in its directory")
            self._promote(hello.shard, pair)
        self._admit(peer, hello)

    def _admit(self, peer: bytes, hello: Hello, may_wait: bool = True) -> None:
        came = Came(
            at=self._turn.now(),
            role="shard",
            wish=-1,
            shard=hello.shard,
            address=hello.address,
            site="",
            token=hello.token,
            before=hello.incarnation,
            life=hello.life,
            since=hello.since,
            origin=hello.origin,
        )
        newest = self._members.roll.newest
        admission = self._book.come(came)
        if admission.waits and may_wait and len(self._rivals) < _MOST_RIVALS:
            self._rivals = [each for each in self._rivals if each.hello.life != hello.life]
            self._rivals.append(_Rival(peer, hello, self._turn.now()))
            return
        if admission.refused:
            self._turn.refuse(peer, admission.refused, "Hello")
            return
        if admission.incarnation > newest:  # else a known process says Hello again
            self._turn.keep(came)
            self._decisions.add("shard joined", f"shard {hello.shard}", admission.reason)
        self._connections.welcome(peer, "shard", admission.incarnation)
        self._tell(peer, admission.incarnation)

    # -- messages -----------------------------------------------------------------------------------------

    def beat(self, peer: bytes, incarnation: int) -> None:
        """Repeat its duty to a process of a pair, at a heartbeat."""
        if self._pairs:
            self._tell(peer, incarnation)

    def handle(self, peer: bytes, message: Serves | InSync | LostTouch) -> None:
        """Handle a process's message on its own connection. Others are ignored; the process learns its duty
        at a heartbeat."""
        shard = self._members.shards.pair_of(message.incarnation)
        if shard is None or not self._connections.owns(peer, message.incarnation):
            return
        if isinstance(message, LostTouch):
            self._handle_lost(shard, message)
            return
        standby = message.standby if isinstance(message, InSync) else 0
        paired = Paired(at=self._turn.now(), shard=shard, primary=message.incarnation, standby=standby)
        if self._book.pair(paired):
            self._turn.keep(paired)
            where = self._members.shards.half_at(standby or message.incarnation)
            if standby:
                reason = f"it holds all that is acknowledged: {where}"
                self._decisions.add(f"shard {shard}", "its standby is in sync", reason)

    def _handle_lost(self, shard: int, lost: LostTouch) -> None:
        partner = self._pairs[shard].partner_of(lost.incarnation)
        if partner is None or partner.incarnation != lost.partner:
            return
        if self._connections.is_gone(partner.incarnation):
            self._bury(partner.incarnation, "its connections are gone, to the hub and to its partner")
        else:
            self._members.roll.suspect(self._turn.now(), partner.incarnation)

    # -- timed changes ------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Promote standbys whose primaries are gone, and announce changed duties."""
        for shard, pair in self._pairs.items():
            self._promote(shard, pair)
        self._poll_rivals()
        for shard, pair in self._pairs.items():
            if self._told.get(shard) == pair.term:
                continue
            self._told[shard] = pair.term
            for half in pair.halves():
                self._tell(self._connections.of(half.incarnation), half.incarnation)

    def _promote(self, shard: int, pair: Pair) -> None:
        half = pair.promotable()
        if half is None or self._book.over:
            return
        silence = self._members.roll.silence_of(self._turn.now(), half.incarnation)
        if silence is None or silence >= self._members.roll.suspect_seconds:
            return  # it may be dead too: the one that comes back goes on
        promoted = Promoted(at=self._turn.now(), shard=shard)
        self._book.apply(promoted)
        self._turn.keep(promoted)
        where = self._members.shards.half_at(half.incarnation)
        self._decisions.add(f"shard {shard}", f"its standby at {where} goes on", "its primary is gone")

    def _poll_rivals(self) -> None:
        """Admit or refuse third processes, once one of the two is gone or both have been heard since. A rival
        that is gone itself is dropped, or it would block the place until its silence is noticed."""
        for rival in list(self._rivals):
            pair = self._pairs[rival.hello.shard]
            halves = pair.halves()
            gone = [half for half in halves if self._connections.is_gone(half.incarnation)]
            if len(halves) == 2 and not gone and not all(self._lives(half, rival.since) for half in halves):
                continue
            self._rivals.remove(rival)
            if self._connections.has_lost(rival.peer):
                continue
            for half in gone:
                self._bury(half.incarnation, "its connection is gone, and another came in its place")
            self._promote(rival.hello.shard, pair)
            self._admit(rival.peer, rival.hello, may_wait=False)

    def _lives(self, half: Half, since: float) -> bool:
        """True if the process was heard after `since`."""
        now = self._turn.now()
        silence = self._members.roll.silence_of(now, half.incarnation)
        return silence is not None and silence < now - since

    def _tell(self, peer: bytes, incarnation: int) -> None:
        shard = self._members.shards.pair_of(incarnation)
        if shard is None:
            return
        pair = self._pairs[shard]
        partner = pair.partner_of(incarnation)
        duty = Duty(
            term=pair.term,
            primary=pair.primary is not None and pair.primary.incarnation == incarnation,
            partner=partner.incarnation if partner is not None else 0,
            address=self._members.shards.half_at(partner.incarnation) if partner is not None else "",
            synced=pair.synced,
            serves=pair.serves,
        )
        self._turn.send(peer, duty)
