"""Addresses of the run's shards, sent to those that ask once all shards are there."""

from __future__ import annotations

import math

from atoll.hub.book import GLOBAL, Book
from atoll.hub.connections import Connections
from atoll.hub.decisions import Decisions
from atoll.hub.logs import Logs
from atoll.hub.starting import Starting
from atoll.hub.turn import Turn
from atoll.wire.messages import Missing, Shards, WhereAreShards, WhoIsMissing

_WAITING = 2**15  # the most peers that may wait for an answer
_MISSING_SECONDS = 5.0  # seconds that shards may be missing before a report


class ShardPlaces:
    """Answers queries for shards of the run in `book`, and connects `logs` to shard 0."""

    def __init__(
        self,
        book: Book,
        connections: Connections,
        logs: Logs,
        starting: Starting,
        decisions: Decisions,
        turn: Turn,
    ) -> None:
        self._book, self._members, self._connections = book, book.members, connections
        self._logs, self._decisions, self._turn = logs, decisions, turn
        turn.handlers |= {WhereAreShards: self.handle, WhoIsMissing: self.handle_who_is_missing}
        self._starting = starting
        self._asking: dict[
            bytes, str
        ] = {}  # peers that wait for addresses: of a site's shard, or of all ("")
        self._known: list[str] | None = None
        self._missing_since, self._missing_said = math.inf, ""  # by the hub's clock; the latest report

    def handle(self, peer: bytes, _message: WhereAreShards) -> None:
        """Handle a query for the shards' addresses."""
        site, refusal = "", ""
        incarnation = self._connections.member(peer)
        if not self._members.shards.count:
            refusal = "this run has no shards: its workers are a ring"
        elif len(self._asking) >= _WAITING:
            refusal = "too many wait for the shards"
        elif self._members.sites.workers and not incarnation:  # a peer's shard depends on its site
            refusal = "say Hello first"
        else:
            site = self._book.site_of(incarnation)
            if site in self._members.sites.ended:
                refusal = f"site {site!r} has ended, and does not come back"
        if refusal:
            self._turn.refuse(peer, refusal, "WhereAreShards")
        else:
            self._asking[peer] = site

    def handle_who_is_missing(self, peer: bytes, _message: WhoIsMissing) -> None:
        """Answer which shards have not come, and what is known of them."""
        site = self._book.site_of(self._connections.member(peer))
        self._turn.send(peer, Missing(lines=self._starting.missing(site)))

    def poll(self) -> None:
        """Answer queries that can be answered, and send shards the others' changed addresses."""
        for peer, site in list(self._asking.items()) if self._members.sites.workers else ():
            if site and (address := self._members.sites.address(site)):
                self._turn.send(peer, Shards(addresses=[address]))
                del self._asking[peer]
        addresses = self._members.shards.addresses()
        if not addresses:
            self._known = None
            self._say_who_is_missing()
            return
        self._missing_since = math.inf
        if addresses != self._known:
            self._known = addresses
            self._decisions.add("shards", ", ".join(addresses), "all are there; shard 0 keeps the log")
            self._logs.connect(GLOBAL, addresses[0])
            for incarnation in self._members.shards.incarnations():  # a shard that they know may have moved
                self._turn.send(self._connections.of(incarnation), Shards(addresses=addresses))
        for peer in [peer for peer, site in self._asking.items() if not site]:
            self._turn.send(peer, Shards(addresses=addresses))
            del self._asking[peer]

    def _say_who_is_missing(self) -> None:
        """Report missing shards after a while, once for each state."""
        now = self._turn.now()
        self._missing_since = min(self._missing_since, now)
        if self._book.over or now - self._missing_since < _MISSING_SECONDS:
            return
        state = "; ".join(self._members.shards.missing())
        if state and state != self._missing_said:
            self._missing_said = state
            self._decisions.add("shards", "waited for", "; ".join(self._starting.missing()))
