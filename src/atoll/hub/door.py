"""Admission to the run: Hellos, refusals, and applicants that wait for a place that may be free soon."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.hub.book import Book
from atoll.hub.connections import Connections, given_up
from atoll.hub.decisions import Decisions
from atoll.hub.departures import Departures
from atoll.hub.logs import Logs
from atoll.hub.pairs import Pairs
from atoll.hub.records import Came
from atoll.hub.starting import Starting
from atoll.hub.turn import Turn
from atoll.hub.votes import Votes
from atoll.store.admission import Admission
from atoll.wire.base import GUEST
from atoll.wire.messages import VERSION, Hello

NODE = "node"  # the role of a node, which only wants votes on views
_WAITING = 2**15  # the most applicants that may wait


@dataclass
class _Parked:
    """A worker that waits for a rank whose owner may be dead."""

    peer: bytes
    hello: Hello
    until: float


@dataclass
class _Rival:
    """A shard at a new address that waits until its index's present process proves alive or dead."""

    peer: bytes
    hello: Hello
    since: float


class Door:
    """Admits members to the run of this name. A Hello that names another run is refused; one that names none
    is accepted, and its Welcome has the name."""

    def __init__(
        self,
        run: str,
        book: Book,
        connections: Connections,
        departures: Departures,
        pairs: Pairs,
        votes: Votes,
        logs: Logs,
        starting: Starting,
        decisions: Decisions,
        turn: Turn,
    ) -> None:
        self._run, self._book, self._members = run, book, book.members
        self._connections, self._departures = connections, departures
        self._pairs, self._votes, self._logs, self._starting = pairs, votes, logs, starting
        self._decisions, self._turn = decisions, turn
        turn.handlers[Hello] = self.handle
        self._parked: dict[str, _Parked] = {}  # by token or connection, in order of deadline
        self._vacancies = 0  # number of vacancies when parked workers were last checked
        self._rivals: list[_Rival] = []

    @property
    def has_waiting(self) -> bool:
        """True if a worker waits for a rank."""
        return bool(self._parked)

    def handle(self, peer: bytes, hello: Hello) -> None:
        """Handle a Hello, of a new process or on a new connection."""
        refusal = self._refusal(hello)
        if refusal:
            self._turn.refuse(peer, refusal, "Hello")
        elif hello.role == GUEST:
            self._starting.note(hello)
            self._connections.welcome(peer, hello.role)
        elif hello.role == NODE:
            self._votes.enter(peer, hello.worker)
        elif hello.role == "shard" and self._members.shards.pairs:
            self._pairs.handle_hello(peer, hello)
        else:
            self._handle_member(peer, hello)

    def _handle_member(self, peer: bytes, hello: Hello) -> None:
        workers, shards = self._members.workers, self._members.shards
        known = workers.rank_of(hello.incarnation) if hello.incarnation else None
        there = workers.called(hello.token) if hello.role == "worker" else None
        if known is not None:  # a known worker on a new connection
            self._members.roll.hear(self._turn.now(), hello.incarnation)
            self._connections.welcome(peer, "worker", hello.incarnation, known, hello.site)
        elif hello.incarnation and hello.role != "shard":
            self._turn.refuse(peer, given_up(hello.incarnation), "Hello")
        elif there is not None:  # the welcome was lost
            self._connections.welcome(peer, "worker", there.incarnation, there.worker, hello.site)
        elif hello.role == "worker" and workers.must_wait(hello.worker):
            self._park(peer, hello)
        elif hello.role == "shard" and shards.elsewhere(hello.shard, hello.address) is not None:
            self._challenge(peer, hello)
        else:
            self._admit(peer, hello)

    def _refusal(self, hello: Hello) -> str:
        """Return why a Hello is refused whatever its role; empty if it is not."""
        if hello.version != VERSION:
            return (
                f"the hub speaks version {VERSION} of the protocol and the {hello.role[:16]} version "
                f"{hello.version}; install the same version of Atoll everywhere"
            )
        if hello.run not in ("", self._run):
            return of_another_run(self._run, hello.run)
        texts = (hello.role, hello.address, hello.site, hello.token, hello.launcher, hello.origin)
        if not "".join(texts).isprintable():
            return "a Hello with characters that cannot be printed"
        return ""

    def _admit(self, peer: bytes, hello: Hello) -> None:
        came = Came(
            at=self._turn.now(),
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
            self._turn.refuse(peer, admission.refused, "Hello")
            return
        again = admission.incarnation <= newest  # a known shard says Hello again
        moved = again and hello.role == "site" and site_before != hello.address
        if not again or moved:
            self._turn.keep(came)
        self._connections.welcome(peer, hello.role, admission.incarnation, admission.worker, hello.site)
        if hello.role == "site":
            self._logs.connect(hello.site, hello.address)
        is_another = self._connections.is_another(admission.incarnation, hello.pid)
        if not again:
            self._decisions.add(f"{hello.role} joined", _name(hello, admission), admission.reason)
        elif is_another:
            where = f"elsewhere: {hello.address}" if moved else f"at the same address: {hello.address}"
            reason = f"it was started again, {where}"
            self._decisions.add(f"{hello.role} came back", _name(hello, admission), reason)

    # -- waiting applicants -------------------------------------------------------------------------------

    def _park(self, peer: bytes, hello: Hello) -> None:
        """Let a worker wait for its rank: a restarted worker may come before its predecessor's death is
        known."""
        name = hello.token or peer.hex()
        if self._parked.pop(name, None) is None and len(self._parked) >= _WAITING:
            self._turn.refuse(peer, "too many workers wait for a rank", "Hello")
            return
        # A little longer than it takes, from now, to notice a death.
        roll = self._members.roll
        self._parked[name] = _Parked(peer, hello, self._turn.now() + roll.patience + roll.heartbeat)

    def _challenge(self, peer: bytes, hello: Hello) -> None:
        """Let a shard wait whose index has a process at another address, until that one proves alive or
        dead."""
        self._rivals = [each for each in self._rivals if each.hello.address != hello.address]
        if len(self._rivals) >= _WAITING:
            self._turn.refuse(peer, "too many shards wait for their place", "Hello")
            return
        self._rivals.append(_Rival(peer, hello, self._turn.now()))

    def poll(self) -> None:
        """Admit or refuse applicants whose wait is over."""
        self._poll_rivals(self._turn.now())
        self._poll_parked(self._turn.now())

    def _poll_parked(self, now: float) -> None:
        vacancies = self._members.workers.vacancies
        is_over = bool(self._parked) and now >= next(iter(self._parked.values())).until
        if vacancies == self._vacancies and not is_over:
            return
        self._vacancies = vacancies
        for name, parked in list(self._parked.items()):
            if now >= parked.until or not self._members.workers.must_wait(parked.hello.worker):
                del self._parked[name]
                self._admit(parked.peer, parked.hello)

    def _poll_rivals(self, now: float) -> None:
        """Admit or refuse waiting shards. A rival that is gone itself is dropped, or it would block the place
        until its silence is noticed."""
        for rival in list(self._rivals):
            before = self._members.shards.elsewhere(rival.hello.shard, rival.hello.address)
            silence = None if before is None else self._members.roll.silence_of(now, before)
            death = self._death_of(before, rival.hello) if before is not None else ""
            if silence is not None and not death and silence >= now - rival.since:
                continue  # silent since the challenge: wait for a sign of life or a death
            self._rivals.remove(rival)
            if self._connections.has_lost(rival.peer):
                continue
            if before is not None and death:
                self._departures.bury(before, death)
            self._admit(rival.peer, rival.hello)

    def _death_of(self, before: int, hello: Hello) -> str:
        """Return the evidence that this incarnation is dead, now that another shard comes; empty if it may
        live."""
        if before == hello.incarnation or hello.token == self._members.roll.known[before].token != "":
            return "it was started again elsewhere, and goes on from its directory"
        gone = self._connections.is_gone(before)
        return "its connection is gone, and another came in its place" if gone else ""


def _name(hello: Hello, admission: Admission) -> str:
    if hello.role == "shard":
        return f"shard {hello.shard}"
    if hello.role == "site":
        return f"site {hello.site!r}"
    return f"worker {admission.worker}, incarnation {admission.incarnation}"


def of_another_run(run: str, other: str) -> str:
    """Refusal for a message that names another run."""
    return f"this hub is of run {run!r}, and not of run {other!r}"
