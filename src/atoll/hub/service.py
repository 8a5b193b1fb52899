"""The hub's loop: messages in, decisions by the store's state machines, answers out.

Source: docs/server.md; Li et al., OSDI 2014.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from atoll.core.errors import UserError
from atoll.core.heap import give_back_freed_memory
from atoll.core.points import reach
from atoll.core.texts import one_line
from atoll.hub.book import GLOBAL, Book, Gone, Word
from atoll.hub.broken import BrokenLinks
from atoll.hub.decisions import Decisions
from atoll.hub.groups import Groups
from atoll.hub.hearing import Hearing
from atoll.hub.journal import HubJournal
from atoll.hub.loglink import LogLink
from atoll.hub.pairs import HubParts, Pairs
from atoll.hub.planner import GroupingSettings
from atoll.hub.records import (
    AnyRecord,
    Asked,
    Came,
    Died,
    InRing,
    Knows,
    Left,
    Over,
    Told,
    Voted,
)
from atoll.hub.rings import Rings
from atoll.hub.sites import Sites
from atoll.hub.starting import Starting
from atoll.hub.vouching import Vouchers
from atoll.net.endpoint import Endpoint, Received, Server, poll
from atoll.net.keys import Keys
from atoll.peers.views import describe
from atoll.store.admission import Admission
from atoll.wire import messages
from atoll.wire.base import GUEST
from atoll.wire.messages import (
    VERSION,
    Accept,
    Accepted,
    AnyMessage,
    Beat,
    Echo,
    Enter,
    Fenced,
    Gather,
    Goodbye,
    Heard,
    Heartbeat,
    Heartbeats,
    Hello,
    InGroup,
    InSync,
    JoinGroup,
    Lease,
    LinkMeasured,
    LinkPlace,
    Looked,
    LostTouch,
    Missing,
    Prepare,
    Reform,
    Refused,
    Serves,
    Shards,
    StoreCall,
    Welcome,
    WhereAreShards,
    WhoIsMissing,
    WireError,
    decode_untrusted,
    encode,
)

NODE = "node"  # the role of who only wants votes on views
LIMIT = 2**21  # bytes of a message: the addresses of the most shards
_LOOK_SECONDS = 0.25  # the longest wait for a message
_MESSAGES = 64  # handled between looks at the time
_MANY = 256  # workers, from which a turn waits for more than one message
_MORE_SECONDS, _MORE_FOR_EACH = 0.01, 1e-6  # seconds: at the most, and for each worker
_GIVE_BACK = 256  # connections that are no more, after which freed memory is given back ...
_GIVE_BACK_SECONDS = (2.0, 10.0)  # ... once no others have gone for a while, and again
_READ_SECONDS = 0.1  # of messages handled in one go, before they are answered
_WAITING = 2**15  # peers that wait for an answer: no more are kept
_NODES = 4096  # connections for votes: of more, the oldest are forgotten
_MISSING_SECONDS = 5.0  # that shards are waited for before people are told
_RETRY_SECONDS = 5.0  # before a journal that could not be written is tried again
_REASON_CHARACTERS = 300  # of why a worker leaves


@dataclass
class _Parked:
    """A worker whose rank is still another's, who may be dead: it waits for a while."""

    peer: bytes
    hello: Hello
    until: float


@dataclass
class _Rival:
    """A shard that came from elsewhere, while the one of its index may live: it waits to see."""

    peer: bytes
    hello: Hello
    since: float


class Clock:
    """Monotonic seconds in which a gap counts for at most `most`: while the hub itself stood still, nobody
    was silent. It begins at `start`, where the hub that was there before had come to."""

    def __init__(self, most: float, source: Callable[[], float] = time.monotonic, start: float = 0.0) -> None:
        self._most, self._source = most, source
        self._now, self._last = start, source()

    def now(self) -> float:
        read = self._source()
        self._now += min(read - self._last, self._most)
        self._last = read
        return self._now


def _why_it_left(goodbye: Goodbye) -> str:
    """Why a worker left before the end of the training; else, and of a shard, that it said goodbye."""
    reason = one_line(goodbye.reason, _REASON_CHARACTERS)
    return reason if reason and not goodbye.finished else "it said goodbye"


class Hub:
    """Serves the run of `book` at `server`. `heartbeat` in seconds is what workers and shards are told.

    `run` is the run's name; who names another one is refused, who names none is told it. `turn` is one round
    of the loop, `serve` is the loop. With `until_done` it ends when all workers have left or died, after as
    many were there as the run begins with, and the shards have ended, which are then told to. A ring of fewer
    members than `at_least` does not go on. With `grouping` the workers are put into groups.

    Each turn writes down what it has changed, in `journal` where there is one, before it answers anybody.
    What the journal holds already is gone through again first, and the run goes on from there.
    """

    def __init__(
        self,
        server: Server,
        book: Book,
        decisions: Decisions,
        *,
        run: str,
        keys: Keys | None = None,
        until_done: bool = False,
        at_least: int = 1,
        journal: HubJournal | None = None,
        grouping: GroupingSettings | None = None,
    ) -> None:
        self._until_done = until_done
        self._server, self._book, self._members, self._decisions = server, book, book.members, decisions
        self._run, self._heartbeat = run, book.members.roll.heartbeat
        self._journal = journal
        self._new: list[AnyRecord] = []  # records of this turn
        self._outgoing: list[tuple[bytes, AnyMessage]] = []  # this turn's answers
        self._votes: list[
            tuple[bytes, AnyMessage]
        ] = []  # answers that are given only if they are written down
        self._nodes: dict[bytes, int] = {}  # who wants votes: whose connection is which node's
        self._journal_fails_until = 0.0  # by the clock; 0: it does not fail
        self._log = LogLink(
            keys,
            run,
            lambda: book.fences[GLOBAL],
            lambda fenced: self._handle_fenced(GLOBAL, fenced),
            lambda line: decisions.add("log", "not reached", line),
            looked=self._handle_looked,
        )
        self._hearing = Hearing(server.address, keys, lambda choice, why: decisions.add("hub", choice, why))
        self._starting = Starting(self._members, self._now)
        self._vouching = Vouchers(self._members.roll, decisions)
        self._broken = BrokenLinks(self._members, server, self._ask_log)
        self._sites = Sites(list(self._members.sites.workers), lambda site: self._link_to(site, keys))
        self._replayed_at: float | None = None  # while what is in the journal is gone through
        self._clock = Clock(2 * _LOOK_SECONDS)
        self._rings = Rings(
            self._members,
            decisions,
            self._now,
            self._send,
            self._refuse,
            self._give_up,
            self._keep_word,
            at_least=at_least,
            heard_until=self._heard_until,
            lives=self._lives,
        )
        book.rings = self._rings
        self._groups = (
            Groups(
                grouping,
                book,
                self._rings,
                decisions,
                self._now,
                self._send,
                self._refuse,
                self._new_record,
            )
            if grouping is not None
            else None
        )
        self._read_few = True  # the last turn had few messages
        self._disowned = 0  # connections that were given up since freed memory was given back
        self._disowned_at = -math.inf
        self._given_back = 0  # times, since the last one went
        self._judged = -math.inf  # as of when silences were judged last
        self._owners: dict[int, bytes] = {}  # incarnation -> whose connection it is
        self._owned: dict[bytes, int] = {}  # the other way round
        self._pids: dict[int, int] = {}  # incarnation of a shard -> its process
        self._pairs = self._make_pairs()
        self._parked: dict[str, _Parked] = {}  # by token, or by connection; in the order of their ends
        self._vacancies = 0  # of the members, when the parked were last looked at
        self._rivals: list[_Rival] = []
        self._asking: dict[bytes, str] = {}  # who waits for shards' addresses: of which site, or of all
        self._known_shards: list[str] | None = None
        self._missing_since, self._missing_said = math.inf, ""  # shards; by the clock, in words
        self._ungrouped_said = False
        self._stranger_said = False  # that a launcher spoke for who is not its own
        self.refused = 0  # messages
        if journal is not None:
            self._replay(journal)
        self._manned = self._clock.now()  # when workers were last there

    def _link_to(self, site: str, keys: Keys | None) -> LogLink:
        return LogLink(
            keys,
            self._run,
            lambda: self._book.fences.get(site, ()),
            lambda fenced: self._handle_fenced(site, fenced),
            lambda line: self._decisions.add(f"log of site {site!r}", "not reached", line),
            f"site {site!r}",
            looked=self._broken.looked,
        )

    def _ask_log(self, rank: int, incarnation: int) -> None:
        """Ask the log that knows a worker for its connection."""
        site = self._book.site_of(incarnation) if self._members.sites.workers else ""
        link = self._sites.link(site) if site else self._log
        key = (rank, incarnation) if self._groups is None else self._groups.looked_for(rank)
        if link is not None and key is not None:
            link.look(*key)

    def _handle_looked(self, looked: Looked) -> None:
        if self._groups is not None:
            incarnation = self._groups.worker_of(looked.worker)
            if incarnation is None:
                return
            looked = msgspec.structs.replace(looked, incarnation=incarnation)
        self._broken.looked(looked)

    def _make_pairs(self) -> Pairs:
        parts = HubParts(
            now=self._now,
            send=self._send,
            refuse=lambda peer, reason: self._refuse(peer, reason, "Hello"),
            welcome=self._welcome_half,
            owner=self._owners.get,
            is_gone=self._is_gone,
            has_lost=self._has_lost,
            bury=self._bury,
            keep=self._new.append,
        )
        return Pairs(self._book, self._decisions, parts)

    def _welcome_half(self, peer: bytes, incarnation: int) -> None:
        self._own(incarnation, peer)
        self._welcome(peer, "shard", "", -1, incarnation)

    def _own(self, incarnation: int, peer: bytes) -> None:
        """This connection is the member's from now on."""
        self._disown(incarnation)
        self._owners[incarnation] = peer
        self._owned[peer] = incarnation

    def _disown(self, incarnation: int) -> None:
        """The member is no more, or has another connection."""
        peer = self._owners.pop(incarnation, b"")
        self._disowned += bool(peer)
        self._disowned_at, self._given_back = self._clock.now(), 0
        if self._owned.get(peer) == incarnation:
            del self._owned[peer]

    def serve(self, until: Callable[[], bool] = lambda: False) -> None:
        """Serve until `until`, which is looked at several times a second."""
        while not until() and not self._is_done():
            self.turn(_LOOK_SECONDS)

    def turn(self, timeout: float) -> None:
        """Wait for up to `timeout` seconds for messages, and handle those that are there."""
        endpoints: list[Endpoint] = [self._server]
        if self._log.client is not None:
            endpoints.append(self._log.client)
        endpoints += self._sites.clients
        if poll(endpoints, self._soon(timeout)):
            self._let_more_come()
        self._read()
        if report := self._server.take_report():
            self._decisions.add("port", self._server.address, report)
        self._log.take()
        self._sites.take()
        self._broken.poll(self._clock.now())
        self._poll_deaths()
        self._poll_rivals()
        self._poll_parked()
        self._pairs.poll()
        self._poll_shards()
        self._rings.poll()
        if self._groups is not None:
            self._groups.poll()
        self._commit()
        self._give_back()

    def _let_more_come(self) -> None:
        """Where there are very many workers, wait a few milliseconds, so that a turn is not for one heartbeat
        alone: many share what it costs beside its messages."""
        if self._read_few and len(self._members.workers.members) >= _MANY:
            time.sleep(min(_MORE_SECONDS, _MORE_FOR_EACH * len(self._members.workers.members)))

    def _read(self) -> None:
        """Handle what is there, for a while."""
        until, handled = time.monotonic() + _READ_SECONDS, 0
        received: Received | None = None
        while handled % _MESSAGES or time.monotonic() < until:
            received = self._server.receive(0)
            if received is None:
                break
            self._handle(received)
            handled += 1
        self._read_few = received is None and handled < _MESSAGES
        self._hearing.read(self._clock.now(), handled, is_empty=received is None)

    def _heard_until(self, now: float) -> float:
        """Up to when all that members said has been read, for who is to judge somebody's silence `now`."""
        self._hearing.ask(now)
        return self._hearing.until

    def _give_back(self) -> None:
        """After many have gone, return the memory of their connections to the system: some close late."""
        since = self._clock.now() - self._disowned_at
        if self._disowned >= _GIVE_BACK and since >= _GIVE_BACK_SECONDS[self._given_back]:
            give_back_freed_memory()
            self._given_back += 1
            if self._given_back == len(_GIVE_BACK_SECONDS):
                self._disowned = self._given_back = 0

    def _soon(self, seconds: float) -> float:
        seconds = self._rings.soon(seconds)
        return self._groups.soon(seconds) if self._groups is not None else seconds

    def close(self) -> None:
        """Close the connections to the logs, and to itself; server and journal are the caller's."""
        self._hearing.close()
        self._log.close()
        self._sites.close()

    # -- what is written down -----------------------------------------------------------------------------

    def _now(self) -> float:
        return self._clock.now() if self._replayed_at is None else self._replayed_at

    def _replay(self, journal: HubJournal) -> None:
        """Know again what the hub knew that wrote the journal. Silence is counted from now on."""
        self._decisions.muted = True
        for record in journal.records:
            self._replayed_at = record.at
            self._book.apply(record)
        journal.records.clear()
        self._outgoing.clear()
        self._new.clear()
        self._decisions.muted = False
        # The clock goes on where it was, so that deadlines stay what they are.
        self._clock = Clock(2 * _LOOK_SECONDS, start=self._replayed_at or 0.0)
        self._replayed_at = None
        self._members.roll.hear_all(self._clock.now())
        for site in list(self._members.sites.members):
            self._reach_site(site, self._members.sites.address(site))

    def _new_record(self, record: AnyRecord) -> None:
        self._new.append(record)

    def _keep_word(self, message: AnyMessage) -> None:
        """A worker's word about rings has changed something."""
        self._new.append(InRing(at=self._now(), message=message))

    def _commit(self) -> None:
        """Write down what this turn has changed, and then tell it."""
        written = bool(self._new)
        if self._journal is not None:
            self._write(self._journal)
            if not self._journal_fails_until:
                self._outgoing += self._votes
        self._votes.clear()
        self._new.clear()
        outgoing, self._outgoing = self._outgoing, []
        for peer, message in outgoing:
            # Who is gone, or reads nothing, asks again or is given up by its silence.
            self._server.send(peer, encode(message))
        if written and self._journal is not None:
            reach("hub.answered", self._journal.commits)
        self._log.flush()
        self._sites.flush()

    def _write(self, journal: HubJournal) -> None:
        """A disk that takes no more does not stop the run: the journal is written anew once it does."""
        now = self._clock.now()
        if self._journal_fails_until > now:
            return
        try:
            if self._journal_fails_until:
                self._compact(journal)
                self._journal_fails_until = 0.0
                self._decisions.add("journal", "written again", "the disk takes it")
            elif self._new:
                journal.append(self._new)
                if journal.is_long:
                    self._compact(journal)
        except OSError as error:
            if not self._journal_fails_until:
                reason = (
                    f"{error.strerror or error}; a hub that is started again would not know what comes now"
                )
                self._decisions.add("journal", f"{journal.path} is not written", reason)
                with contextlib.suppress(OSError):
                    journal.forsake()
            self._journal_fails_until = now + _RETRY_SECONDS

    def _compact(self, journal: HubJournal) -> None:
        if journal.began is not None:
            journal.replace([journal.began, Knows(at=self._clock.now(), state=self._book.state())])

    # -- messages -----------------------------------------------------------------------------------------

    def _handle(self, received: Received) -> None:
        try:
            message = decode_untrusted(received.header)
        except WireError as error:
            self._refuse(received.peer, str(error), "")
            return
        peer = received.peer
        if isinstance(message, (Heartbeat, Heartbeats, StoreCall)) and message.run != self._run:
            number = message.number if isinstance(message, StoreCall) else 0
            self._refuse(peer, self._of_another_run(message.run), type(message).__name__, number)
        elif isinstance(message, Hello):
            self._handle_hello(peer, message)
        elif isinstance(message, Heartbeat):
            self._handle_heartbeat(peer, message)
        elif isinstance(message, Heartbeats):
            self._handle_heartbeats(peer, message)
        elif isinstance(message, Lease):
            self._handle_lease(peer, message)
        elif isinstance(message, (Gather, StoreCall, Reform, Enter)):
            self._rings.handle(peer, message)
        elif isinstance(message, (JoinGroup, InGroup)) and self._groups is not None:
            self._groups.handle(peer, message)
        elif isinstance(message, (LinkPlace, LinkMeasured)):
            if self._groups is not None:
                self._groups.handle_links(message)
        elif isinstance(message, (Prepare, Accept)):
            self._handle_vote(peer, message)
        elif isinstance(message, Goodbye):
            self._handle_goodbye(peer, message)
        elif isinstance(message, WhereAreShards):
            self._handle_where(peer)
        elif isinstance(message, WhoIsMissing):
            site = self._book.site_of(self._owned.get(peer, 0))
            self._send(peer, Missing(lines=self._starting.missing(site)))
        elif isinstance(message, (Serves, InSync, LostTouch)):
            if self._owns(peer, message.incarnation):  # else it hears at its next heartbeat
                self._pairs.handle(message)
        elif isinstance(message, Echo):
            self._hearing.take(message)
        else:
            name = type(message).__name__
            self._refuse(peer, f"the hub takes no {name}", name)

    def _handle_hello(self, peer: bytes, hello: Hello) -> None:
        refusal = self._at_the_door(hello)
        if refusal:
            self._refuse(peer, refusal, "Hello")
            return
        if hello.role == GUEST:
            self._starting.note(hello)
            self._welcome(peer, hello.role, "", -1, 0)
            return
        if hello.role == NODE:
            self._nodes.pop(peer, None)
            self._nodes[peer] = hello.worker
            if len(self._nodes) > _NODES:
                del self._nodes[next(iter(self._nodes))]
            return
        if hello.role == "shard" and self._members.shards.pairs:
            self._pairs.handle_hello(peer, hello)
            return
        known = self._members.workers.rank_of(hello.incarnation) if hello.incarnation else None
        there = self._members.workers.called(hello.token) if hello.role == "worker" else None
        if known is not None:  # its connection was lost, and is a new one
            self._members.roll.hear(self._clock.now(), hello.incarnation)
            self._own(hello.incarnation, peer)
            self._welcome(peer, "worker", hello.site, known, hello.incarnation)
        elif hello.incarnation and hello.role != "shard":
            self._refuse(peer, self._given_up(hello.incarnation), "Hello")
        elif there is not None:  # our answer was lost
            self._own(there.incarnation, peer)
            self._welcome(peer, "worker", hello.site, there.worker, there.incarnation)
        elif hello.role == "worker" and self._members.workers.must_wait(hello.worker):
            self._park(peer, hello)
        elif hello.role == "shard" and self._members.shards.elsewhere(hello.shard, hello.address) is not None:
            self._challenge(peer, hello)
        else:
            self._admit(peer, hello)

    def _at_the_door(self, hello: Hello) -> str:
        """Why this one may not come in, whoever it is."""
        if hello.version != VERSION:
            return (
                f"the hub speaks version {VERSION} of the protocol and the {hello.role[:16]} version "
                f"{hello.version}; install the same version of Atoll everywhere"
            )
        if hello.run not in ("", self._run):
            return self._of_another_run(hello.run)
        texts = (hello.role, hello.address, hello.site, hello.token, hello.launcher, hello.origin)
        if not "".join(texts).isprintable():
            return "a Hello with characters that cannot be printed"
        return ""

    def _of_another_run(self, run: str) -> str:
        return f"this hub is of run {self._run!r}, and not of run {run!r}"

    def _admit(self, peer: bytes, hello: Hello) -> None:
        came = Came(
            at=self._clock.now(),
            role=hello.role,
            wish=max(-1, hello.worker),
            shard=hello.shard,
            address=hello.address,
            site=hello.site,
            token=hello.token,
            before=hello.incarnation if hello.role == "shard" else 0,
            launcher=hello.launcher if hello.role == "worker" else "",
            origin=hello.origin,
        )
        newest, site_before = self._members.roll.newest, self._members.sites.address(hello.site)
        admission = self._book.come(came)
        if admission.refused:
            self._refuse(peer, admission.refused, "Hello")
            return
        again = admission.incarnation <= newest  # a shard that says Hello once more
        moved = again and hello.role == "site" and site_before != hello.address
        if not again or moved:
            self._new.append(came)
        self._own(admission.incarnation, peer)
        self._welcome(peer, hello.role, hello.site, admission.worker, admission.incarnation)
        if hello.role == "site":
            self._reach_site(hello.site, hello.address)
        pid = self._pids.get(admission.incarnation, hello.pid)
        self._pids[admission.incarnation] = hello.pid
        if not again:
            self._decisions.add(f"{hello.role} joined", self._name(hello, admission), admission.reason)
        elif pid != hello.pid:
            where = f"elsewhere: {hello.address}" if moved else f"at the same address: {hello.address}"
            reason = f"it was started again, {where}"
            self._decisions.add(f"{hello.role} came back", self._name(hello, admission), reason)

    def _welcome(self, peer: bytes, role: str, site: str, worker: int, incarnation: int) -> None:
        sites, workers = self._members.sites.workers, self._members.workers.count
        if sites and role != "worker":  # of the log that this shard follows or keeps
            workers = sites[site] if role == "site" else len(sites)
        welcome = Welcome(
            run=self._run,
            worker=worker,
            incarnation=incarnation,
            workers=workers,
            shards=self._members.shards.count,
            heartbeat=self._heartbeat,
            patience=self._members.roll.patience,
            sites=list(sites),
            replicas=self._members.shards.replicas,
            links=self._groups is not None and self._groups.measures_links,
        )
        self._send(peer, welcome)

    def _park(self, peer: bytes, hello: Hello) -> None:
        """A worker that was started again may come before its forerunner's death is known."""
        name = hello.token or peer.hex()
        if self._parked.pop(name, None) is None and len(self._parked) >= _WAITING:
            self._refuse(peer, "too many workers wait for a rank", "Hello")
            return
        # A little longer than a death takes to be noticed, counted from now.
        until = self._clock.now() + self._members.roll.patience + self._heartbeat
        self._parked[name] = _Parked(peer, hello, until)

    def _poll_parked(self) -> None:
        now, vacancies = self._clock.now(), self._members.workers.vacancies
        is_over = bool(self._parked) and now >= next(iter(self._parked.values())).until
        if vacancies == self._vacancies and not is_over:
            return
        self._vacancies = vacancies
        for name, parked in list(self._parked.items()):
            if now >= parked.until or not self._members.workers.must_wait(parked.hello.worker):
                del self._parked[name]
                self._admit(parked.peer, parked.hello)

    def _handle_heartbeat(self, peer: bytes, beat: Heartbeat) -> None:
        if not self._members.roll.hear(self._clock.now(), beat.incarnation, beat.iteration):
            self._refuse(peer, self._given_up(beat.incarnation), "Heartbeat")
        elif self._book.over:  # nobody but shards is left
            self._send(peer, messages.Over())
        else:
            self._broken.beat(peer, beat.incarnation)
            self._note_pace(beat)
            self._rings.beat(peer, beat.incarnation)
            self._pairs.beat(peer, beat.incarnation)

    def _handle_heartbeats(self, peer: bytes, message: Heartbeats) -> None:
        """A launcher passes on what it has heard of its workers. Who is not there, or came from another
        launcher, is named in the answer: it hears from the hub itself how things stand."""
        now, unknown = self._clock.now(), []
        for beat in message.beats:
            incarnation = beat.incarnation
            silence = self._members.roll.silence_of(now, incarnation)
            if (
                silence is None
                or not message.launcher == self._members.roll.known[incarnation].launcher != ""
            ):
                unknown.append(incarnation)
                self._tell_of_stranger(incarnation)
            elif beat.age <= silence:  # else the worker was heard directly since
                self._members.roll.hear(now, incarnation, beat.iteration, beat.age)
                self._broken.hear(incarnation)
                self._note_pace(beat)
                self._rings.hear(incarnation)
        self._send(peer, Heard(number=message.number, unknown=unknown))

    def _tell_of_stranger(self, incarnation: int) -> None:
        """Say once that a launcher speaks for who came from elsewhere."""
        if self._stranger_said or not self._members.roll.is_there(incarnation):
            return
        self._stranger_said = True
        reason = f"a launcher passed on a heartbeat of incarnation {incarnation}, which it has not started"
        self._decisions.add("heartbeat", "not taken", reason)

    def _note_pace(self, beat: Heartbeat | Beat) -> None:
        """A heartbeat says how fast its worker is."""
        rank = self._members.workers.rank_of(beat.incarnation)
        if self._groups is not None and rank is not None:
            self._groups.beat(rank, beat)
        elif beat.pace and not self._ungrouped_said:
            self._ungrouped_said = True
            reason = "workers are of strategy ps-hra, and this hub was started without --groups"
            self._decisions.add("groups", "none", reason)

    def _given_up(self, incarnation: int) -> str:
        return (
            f"the hub knows no incarnation {incarnation}: it was silent for too long, or this is another "
            "hub; start it again"
        )

    def _owns(self, peer: bytes, incarnation: int) -> bool:
        """Whether this connection is the member's: after a restart, of a member that is there, the first that
        names it."""
        if incarnation not in self._owners and self._members.roll.is_there(incarnation):
            self._own(incarnation, peer)
        return self._owners.get(incarnation) == peer

    def _handle_goodbye(self, peer: bytes, goodbye: Goodbye) -> None:
        incarnation = goodbye.incarnation
        if not self._owns(peer, incarnation):
            self._refuse(peer, "only a worker itself says goodbye", "Goodbye")
            return
        left = Left(at=self._clock.now(), incarnation=incarnation, finished=goodbye.finished)
        gone = self._book.leave(left)
        if gone is not None:
            self._new.append(left)
            self._see_off(incarnation, gone, "left", _why_it_left(goodbye))

    # -- views of a run without a server ------------------------------------------------------------------

    def _handle_vote(self, peer: bytes, message: Prepare | Accept) -> None:
        """A node asks the witness. Without a journal the hub has no vote: one that is started again under the
        run's name would not know what it has voted."""
        name = type(message).__name__
        if self._journal is None:
            self._refuse(peer, "this hub has no directory to keep votes in; give it --directory", name)
        elif peer not in self._nodes:
            self._refuse(peer, "say Hello first", name)
        else:
            voted = Voted(at=self._clock.now(), node=self._nodes[peer], message=message)
            before = self._book.witness.state
            answer = self._book.vote(voted)
            if answer is None:
                self._refuse(peer, "the hub votes on what follows views of two nodes, for these two", name)
                return
            self._votes.append((peer, answer))
            if self._book.witness.state != before:
                self._new.append(voted)
                if isinstance(message, Accept) and isinstance(answer, Accepted):
                    reason = f"node {voted.node} asked for the hub's vote: of two nodes and it two decide"
                    self._decisions.add("view", describe(message.view, message.next), reason)

    # -- shards -------------------------------------------------------------------------------------------

    def _handle_where(self, peer: bytes) -> None:
        if not self._members.shards.count:
            self._refuse(peer, "this run has no shards: its workers are a ring", "WhereAreShards")
            return
        if len(self._asking) >= _WAITING:
            self._refuse(peer, "too many wait for the shards", "WhereAreShards")
            return
        incarnation = self._owned.get(peer, 0)
        if self._members.sites.workers and not incarnation:  # where its shard is depends on who it is
            self._refuse(peer, "say Hello first", "WhereAreShards")
            return
        site = self._book.site_of(incarnation)
        if site in self._members.sites.ended:
            self._refuse(peer, f"site {site!r} has ended, and does not come back", "WhereAreShards")
            return
        self._asking[peer] = site

    def _reach_site(self, site: str, address: str) -> None:
        try:
            self._sites.reach(site, address)
        except UserError as error:  # such an address cannot be used from here
            self._decisions.add(f"log of site {site!r}", "not reached", str(error))

    def _poll_shards(self) -> None:
        for peer, site in list(self._asking.items()) if self._members.sites.workers else ():
            if site and (address := self._members.sites.address(site)):
                self._send(peer, Shards(addresses=[address]))
                del self._asking[peer]
        addresses = self._members.shards.addresses()
        if not addresses:
            self._say_who_is_missing()
            return
        self._missing_since = math.inf
        if addresses != self._known_shards:
            self._known_shards = addresses
            self._decisions.add("shards", ", ".join(addresses), "all are there; shard 0 keeps the log")
            try:
                self._log.connect(addresses[0])
            except UserError as error:  # such an address cannot be used from here
                self._decisions.add("log", "not reached", str(error))
            for incarnation in self._members.shards.incarnations():  # one that they know may have moved
                self._send(self._owners.get(incarnation, b""), Shards(addresses=addresses))
        for peer in [peer for peer, site in self._asking.items() if not site]:
            self._send(peer, Shards(addresses=addresses))
            del self._asking[peer]

    def _say_who_is_missing(self) -> None:
        """When shards have been waited for for a while, once for each state of things."""
        now = self._clock.now()
        self._missing_since = min(self._missing_since, now)
        if self._book.over or now - self._missing_since < _MISSING_SECONDS:
            return
        state = "; ".join(self._members.shards.missing())
        if state and state != self._missing_said:
            self._missing_said = state
            self._decisions.add("shards", "waited for", "; ".join(self._starting.missing()))

    def _challenge(self, peer: bytes, hello: Hello) -> None:
        """A shard comes from elsewhere than the one of its index: that is gone, or shows that it lives."""
        self._rivals = [each for each in self._rivals if each.hello.address != hello.address]
        if len(self._rivals) >= _WAITING:
            self._refuse(peer, "too many shards wait for their place", "Hello")
            return
        self._rivals.append(_Rival(peer, hello, self._clock.now()))

    def _poll_rivals(self) -> None:
        """One that is gone itself by now would hold the place for as long as its silence is borne."""
        now = self._clock.now()
        for rival in list(self._rivals):
            before = self._members.shards.elsewhere(rival.hello.shard, rival.hello.address)
            silence = None if before is None else self._members.roll.silence_of(now, before)
            death = self._death_of(before, rival.hello) if before is not None else ""
            if silence is not None and not death and silence >= now - rival.since:
                continue  # not heard since: it shows that it lives, or its patience ends
            self._rivals.remove(rival)
            if self._has_lost(rival.peer):
                continue
            if before is not None and death:
                self._bury(before, death)
            self._admit(rival.peer, rival.hello)

    def _death_of(self, before: int, hello: Hello) -> str:
        """How it shows, now that another shard comes, that this incarnation is dead; empty where it may
        live."""
        if before == hello.incarnation or hello.token == self._members.roll.known[before].token != "":
            return "it was started again elsewhere, and goes on from its directory"
        return "its connection is gone, and another came in its place" if self._is_gone(before) else ""

    def _is_gone(self, incarnation: int) -> bool:
        """Whether a shard's connection is no more. What is sent to try it tells it nothing new."""
        owner = self._owners.get(incarnation)
        if owner is None:
            return False
        return self._server.offer(owner, encode(Shards(addresses=self._known_shards or []))) == "gone"

    def _has_lost(self, peer: bytes) -> bool:
        """Whether this connection is no more."""
        return self._server.offer(peer, encode(messages.Ping())) == "gone"

    # -- the end ------------------------------------------------------------------------------------------

    def _is_done(self) -> bool:
        """With `until_done`: whether workers and shards have ended. The latter hear at their next heartbeat
        that the run is over. Sites' shards end by themselves; one that does not, hears so after a while."""
        if not self._until_done or not self._book.begun or len(self._members.workers.members) or self._parked:
            self._manned = self._clock.now()
            return False
        shards, sites = self._members.shards.live(), list(self._members.sites.members)
        lingering = bool(sites) and self._clock.now() - self._manned < self._members.roll.patience
        if not self._book.over and not lingering and (not self._book.fences[GLOBAL] or not shards):
            over = Over(at=self._clock.now())
            self._book.apply(over)
            self._new.append(over)
            self._decisions.add("run", "over", "all workers have left or died")
            self._commit()
        return self._book.over and not shards and not sites

    # -- deaths -------------------------------------------------------------------------------------------

    def _poll_deaths(self) -> None:
        now, hearing = self._clock.now(), self._hearing
        if hearing.waits or self._members.roll.poll_deaths(now):
            hearing.ask(now)
        if hearing.until > self._judged:
            self._judged = hearing.until
            for incarnation, reason in self._members.roll.poll_deaths(self._judged):
                if not self._lives(incarnation):
                    self._bury(incarnation, f"{reason}{self._vouching.seen(incarnation)}")

    def _lives(self, incarnation: int) -> bool:
        """True for a silent member that is to be waited for, for its process lives."""
        return self._vouching.spares(self._clock.now(), incarnation)

    def _give_up(self, incarnation: int, reason: str) -> None:
        """A worker is dead, by what the others of its ring say."""
        if self._members.roll.is_there(incarnation):
            self._bury(incarnation, f"{reason}{self._vouching.seen(incarnation)}")

    def _bury(self, incarnation: int, reason: str) -> None:
        """A member is dead."""
        died = Died(at=self._clock.now(), incarnation=incarnation)
        gone = self._book.die(died)
        assert gone is not None
        self._new.append(died)
        if gone.site:
            self._sites.end(gone.site)
            reason = f"{reason}; the other sites go on"
        self._see_off(incarnation, gone, "died", reason)

    def _see_off(self, incarnation: int, gone: Gone, how: str, reason: str) -> None:
        """Somebody has left or died."""
        self._disown(incarnation)
        self._pids.pop(incarnation, None)
        self._broken.left(incarnation)
        if gone.worker is not None:
            self._decisions.add(f"worker {how}", _worker(gone.worker, incarnation), reason)
        elif gone.shard is not None:
            self._decisions.add(f"shard {how}", f"shard {gone.shard}", reason)
            if not self._pairs.has_primary(gone.shard):
                self._known_shards = None
            self._pairs.lost(gone.shard)
        else:
            self._decisions.add(f"site {how}", f"site {gone.site!r}", reason)

    def _handle_fenced(self, log: str, fenced: Fenced) -> None:
        """A log's word on what an incarnation's commits have used: all of it where the hub asked."""
        told = Told(at=self._clock.now(), log=log, fenced=fenced)
        word = self._book.told(told)
        self._new.append(told)
        for key, dealt in word.epochs:
            shares = ", ".join(f"worker {rank} {count}" for rank, count in dealt.items())
            self._decisions.add(_epoch(key), "over", f"every sample was used; leased by rank: {shares}")
        if word.returned is not None:
            self._tell_fenced(log, fenced, word)

    def _tell_fenced(self, log: str, fenced: Fenced, word: Word) -> None:
        sites = list(self._members.sites.workers)
        of_site = log == GLOBAL and bool(sites)
        name = self._groups.name if self._groups is not None else _worker
        who = f"site {sites[fenced.worker]!r}" if of_site else name(fenced.worker, fenced.incarnation)
        free = f"{word.returned} samples of its leases are free again"
        self._decisions.add("fenced", who, f"{fenced.iteration} iterations of it count; {free}")

    # -- leases -------------------------------------------------------------------------------------------

    def _handle_lease(self, peer: bytes, lease: Lease) -> None:
        rank = self._members.workers.rank_of(lease.incarnation)
        if rank is None or not self._owns(peer, lease.incarnation):
            self._refuse(peer, self._given_up(lease.incarnation), "Lease", lease.number)
            return
        asked, before = Asked(at=self._clock.now(), rank=rank, lease=lease), self._book.lease_changes
        try:
            leased, first = self._book.lease(asked)
        except UserError as error:
            self._refuse(peer, str(error), "Lease", lease.number)
            return
        if self._book.lease_changes != before:
            self._new.append(asked)
        self._send(peer, leased)
        if first:
            reason = f"worker {rank} asks first for some of {lease.length} samples"
            self._decisions.add(_epoch((lease.sampler, lease.epoch)), "begun", reason)

    # -- answers ------------------------------------------------------------------------------------------

    def _refuse(self, peer: bytes, reason: str, request: str, number: int = 0) -> None:
        self.refused += 1
        self._send(peer, Refused(reason=reason[:4096], request=request, number=number))

    def _send(self, peer: bytes, message: AnyMessage) -> None:
        """Send at this turn's end. Nobody (an empty peer) is who asked before a restart."""
        if peer:
            self._outgoing.append((peer, message))

    def _name(self, hello: Hello, admission: Admission) -> str:
        if hello.role == "shard":
            return f"shard {hello.shard}"
        if hello.role == "site":
            return f"site {hello.site!r}"
        return _worker(admission.worker, admission.incarnation)


def _epoch(key: tuple[int, int]) -> str:
    sampler, epoch = key
    return f"epoch {epoch} of sampler {sampler}"


def _worker(rank: int, incarnation: int) -> str:
    return f"worker {rank}, incarnation {incarnation}"
