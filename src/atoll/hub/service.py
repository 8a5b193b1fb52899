"""The hub's loop: each message goes to the object in charge, and a turn's changes are recorded before its
answers leave.

Source: docs/server.md; Li et al., OSDI 2014.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from atoll.groups.formation import Formation
from atoll.hub.book import GLOBAL, Book, no_fences
from atoll.hub.broken import BrokenLinks
from atoll.hub.connections import Connections
from atoll.hub.contributors import Contributors
from atoll.hub.decisions import Decisions
from atoll.hub.departures import Departures
from atoll.hub.door import Door, of_another_run
from atoll.hub.groups import Groups
from atoll.hub.hearing import Hearing
from atoll.hub.journal import HubJournal
from atoll.hub.ledger import Ledger
from atoll.hub.lifesigns import LifeSigns
from atoll.hub.links import LinkDesk
from atoll.hub.logs import Logs
from atoll.hub.pairs import Pairs
from atoll.hub.planner import GroupingSettings
from atoll.hub.records import Over
from atoll.hub.rings import Rings
from atoll.hub.samples import Samples
from atoll.hub.shardplaces import ShardPlaces
from atoll.hub.starting import Starting
from atoll.hub.turn import Turn
from atoll.hub.votes import Votes
from atoll.net.endpoint import Endpoint, Received, Server, poll
from atoll.net.keys import Keys
from atoll.store.leases import Leases
from atoll.store.members import Membership
from atoll.wire.messages import Hello, WireError, decode_untrusted

LIMIT = 2**21  # bytes of a message: the addresses of the most shards
_LOOK_SECONDS = 0.25  # seconds of the longest wait for a message
_MESSAGES = 64  # messages handled between checks of the time
_MANY = 256  # workers from which on a turn waits for more than one message
_MORE_SECONDS, _MORE_FOR_EACH = 0.01, 1e-6  # seconds of that wait: at most, and for each worker
_READ_SECONDS = 0.1  # seconds of handling messages before answers are sent


class Clock:
    """Monotonic seconds that start at `start`, the earlier hub's last time. A gap counts as `most` at the
    most, since no member was silent while the hub itself was suspended."""

    def __init__(self, most: float, source: Callable[[], float] = time.monotonic, start: float = 0.0) -> None:
        self._most, self._source = most, source
        self._now, self._last = start, source()

    def now(self) -> float:
        read = self._source()
        self._now += min(read - self._last, self._most)
        self._last = read
        return self._now


class Hub:
    """Serves the run of `members` at `server`: `turn` is one round of the loop, `serve` is the loop. `book`
    has all that the hub knows of the run.

    `run` is the run's name. With `until_done` the hub ends when all workers have left or died, after as many
    were there as the run begins with, and the shards, which it then stops, have ended. A ring of fewer
    members than `at_least` does not go on. With `grouping` workers are in groups.

    Records in `journal` are replayed first, and the run goes on from there.
    """

    def __init__(
        self,
        server: Server,
        members: Membership,
        decisions: Decisions,
        *,
        run: str,
        keys: Keys | None = None,
        until_done: bool = False,
        at_least: int = 1,
        journal: HubJournal | None = None,
        grouping: GroupingSettings | None = None,
    ) -> None:
        self._server, self._members, self._decisions = server, members, decisions
        self._run, self._until_done = run, until_done
        # The clock continues, so that recorded deadlines stay valid.
        start = journal.records[-1].at if journal is not None and journal.records else 0.0
        turn = self._turn = Turn(Clock(2 * _LOOK_SECONDS, start=start).now)
        hearing = self._hearing = Hearing(server.address, keys, decisions, turn)
        starting = Starting(members, turn.now)
        broken = self._broken = BrokenLinks(members, server)
        by_links = grouping is not None and grouping.by_links
        connections = self._connections = Connections(run, server, members, turn, measures_links=by_links)
        contributors = None
        if grouping is not None:
            lockstep = grouping.consistency == "bsp"
            formation = Formation(members.workers.count, members.roll.new_incarnation, lockstep=lockstep)
            desk = LinkDesk(grouping.links if by_links else 0.0, turn.keep)
            contributors = Contributors(members, formation, desk)
        rings = self._rings = Rings(
            members, decisions, turn, contributors, at_least=at_least, heard_until=hearing.heard_until
        )
        groups, leases, fences = None, Leases(), no_fences(members)
        if grouping is not None:
            groups = Groups(grouping, members, leases, fences, formation, desk, rings, decisions, turn)
        self._groups = groups
        book = self.book = Book(members, rings, groups, leases, fences)
        samples = Samples(book, connections, contributors, decisions, turn)
        logs = self._logs = Logs(keys, run, book, samples, broken, contributors, decisions)
        self._places = ShardPlaces(book, connections, logs, starting, decisions, turn)
        departures = self._departures = Departures(
            book, rings, connections, broken, logs, hearing, decisions, turn
        )
        pairs = self._pairs = Pairs(book, connections, departures.bury, decisions, turn)
        votes = Votes(book, decisions, turn, may_vote=journal is not None)
        self._door = Door(run, book, connections, departures, pairs, votes, logs, starting, decisions, turn)
        self._signs = LifeSigns(book, broken, rings, groups, pairs, decisions, turn)
        self._read_few = True  # the last turn had few messages
        self._ledger = Ledger(journal, book, decisions, turn)
        self._ledger.replay()
        for site in list(members.sites.members):
            logs.connect(site, members.sites.address(site))
        self._manned = turn.now()  # when workers were last there

    def serve(self, until: Callable[[], bool] = lambda: False) -> None:
        """Serve until `until` returns true, which is checked several times a second."""
        while not until() and not self._is_done():
            self.turn(_LOOK_SECONDS)

    def turn(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for messages, and handle those that are there."""
        endpoints: list[Endpoint] = [self._server, *self._logs.clients]
        if poll(endpoints, self._soon(timeout)):
            self._let_more_come()
        self._read()
        if report := self._server.take_report():
            self._decisions.add("port", self._server.address, report)
        self._logs.take()
        for rank, incarnation in self._broken.poll(self._turn.now()):
            self._logs.look(rank, incarnation)
        self._departures.poll()
        self._door.poll()
        self._pairs.poll()
        self._places.poll()
        self._departures.poll_rings()
        self._rings.poll()
        if self._groups is not None:
            self._groups.poll()
        self._commit()
        self._connections.give_back()

    def close(self) -> None:
        """Close the connections to the logs and to itself. Server and journal belong to the caller."""
        self._hearing.close()
        self._logs.close()

    def _let_more_come(self) -> None:
        """With very many workers, wait some milliseconds, so that many messages share the fixed cost of a
        turn."""
        if self._read_few and len(self._members.workers.members) >= _MANY:
            time.sleep(min(_MORE_SECONDS, _MORE_FOR_EACH * len(self._members.workers.members)))

    def _read(self) -> None:
        """Handle queued messages for a limited time."""
        until, handled = time.monotonic() + _READ_SECONDS, 0
        received: Received | None = None
        while handled % _MESSAGES or time.monotonic() < until:
            received = self._server.receive(0)
            if received is None:
                break
            self._handle(received)
            handled += 1
        self._read_few = received is None and handled < _MESSAGES
        self._hearing.read(self._turn.now(), handled, is_empty=received is None)

    def _handle(self, received: Received) -> None:
        peer = received.peer
        try:
            message = decode_untrusted(received.header)
        except WireError as error:
            self._turn.refuse(peer, str(error), "")
            return
        name, handle = type(message).__name__, self._turn.handlers.get(type(message))
        run = getattr(message, "run", self._run)
        if handle is None:
            self._turn.refuse(peer, f"the hub takes no {name}", name)
        elif run != self._run and not isinstance(
            message, Hello
        ):  # the door checks it and answers in more detail
            self._turn.refuse(peer, of_another_run(self._run, run), name, getattr(message, "number", 0))
        else:
            handle(peer, message)

    def _soon(self, seconds: float) -> float:
        seconds = self._rings.soon(seconds)
        return self._groups.soon(seconds) if self._groups is not None else seconds

    def _commit(self) -> None:
        self._ledger.commit(self._server)
        self._logs.flush()

    def _is_done(self) -> bool:
        """True if `until_done` is set and all workers and shards have ended. Shards learn at their next
        heartbeat that the run is over. Sites' shards end by themselves; one that does not, is stopped like
        the others after the patience."""
        book, members, now = self.book, self._members, self._turn.now()
        if (
            not self._until_done
            or not members.begun
            or len(members.workers.members)
            or self._door.has_waiting
        ):
            self._manned = now
            return False
        shards, sites = members.shards.live(), list(members.sites.members)
        lingering = bool(sites) and now - self._manned < members.roll.patience
        if not book.over and not lingering and (not book.fences[GLOBAL] or not shards):
            over = Over(at=now)
            book.apply(over)
            self._turn.keep(over)
            self._decisions.add("run", "over", "all workers have left or died")
            self._commit()
        return book.over and not shards and not sites
