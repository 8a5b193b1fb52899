"""The peers connected to a shard, by their Hello, and non-blocking sends to them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from atoll.net.endpoint import Server
from atoll.server.askers import Askers
from atoll.store.outcomes import Request
from atoll.wire.base import MOST_AHEAD
from atoll.wire.messages import VERSION, AnyMessage, Hello, Ping, Refused, encode

ROLES = ("worker", "shard", "hub")
_MOST = 16_384  # peers that may be connected

# A role; the worker's rank or the shard's index; the member, if the worker is a group.
Name: TypeAlias = tuple[str, int, int]


class Peers:
    """Connections of workers, shards and the hub. A name has one connection, of the latest Hello. A group is
    one worker, with a connection for each of its members."""

    def __init__(
        self,
        server: Server,
        run: str,
        when_kept: Callable[[Callable[[], None]], None] = lambda send: send(),
    ) -> None:
        """`when_kept` delays each message until the records that it depends on are durable."""
        self._server, self._run = server, run
        self._hellos: dict[bytes, Hello] = {}
        self._connections: dict[Name, bytes] = {}
        self._members: dict[int, set[int]] = {}  # worker -> the members that are connected
        self._highest = 0  # the highest known incarnation
        self._speakers: dict[int, int] = {}  # worker -> the member that spoke to the log last
        self._askers = Askers()
        self._lost: dict[int, int] = {}  # worker -> its incarnation, if all connections of that are gone
        self._waiting: dict[bytes, deque[tuple[bytes, Any]]] = {}  # messages that a full queue did not take
        self.when_kept = when_kept

    def greet(self, peer: bytes, hello: Hello) -> str:
        """Register a peer's Hello; returns in one line why it is refused."""
        if hello.version != VERSION:
            return (
                f"this shard speaks version {VERSION} of the protocol and the {hello.role[:16]} version "
                f"{hello.version}; install the same version of Atoll everywhere"
            )
        if hello.run != self._run:
            return f"this shard is of run {self._run!r}, and not of run {hello.run!r}"
        if hello.role not in ROLES:
            return f"this shard knows no role {hello.role!r}: {', '.join(ROLES)}"
        name = _name(hello)
        if name[1] < 0 or (hello.role == "worker" and hello.incarnation < 1):
            return "a worker says Hello with the rank and incarnation that the hub gave it"
        before = self._connections.get(name)
        if before is None and len(self._connections) >= _MOST:
            self._look_for_gone()
            if len(self._connections) >= _MOST:
                return f"{_MOST} peers are known, which is the most"
        known = max((each.incarnation for each in self._known_as(name)), default=0)
        if known > hello.incarnation:
            return f"{name[0]} {name[1]} lives in a later incarnation, {known}"
        if hello.role == "worker" and hello.incarnation > self._highest + MOST_AHEAD:
            return (
                f"worker {hello.worker} says that it is incarnation {hello.incarnation}, and the highest "
                f"known here is {self._highest}: the hub counts them, so it has given no such number"
            )
        if hello.role == "worker":
            self._displace(hello)
            self.heard_of(hello.incarnation)
        if before != peer:
            self.forget(peer)
            if before is not None:
                self.forget(before)
        self._hellos[peer], self._connections[name] = hello, peer
        if hello.role == "worker":
            self._members.setdefault(hello.worker, set()).add(hello.member)
            self._lost.pop(hello.worker, None)
        return ""

    def heard_of(self, incarnation: int) -> None:
        """Note an incarnation that the hub has assigned."""
        self._highest = max(self._highest, incarnation)

    def _displace(self, hello: Hello) -> None:
        """Notify processes whose place a later incarnation of their worker takes."""
        worker, new = hello.worker, hello.incarnation
        for member in sorted(self._members.get(worker, ())):
            peer = self._connections["worker", worker, member]
            old = self._hellos[peer].incarnation
            if old < new:
                reason = (
                    f"worker {worker} has come anew, as incarnation {new}, and this process is incarnation "
                    f"{old} of it: nothing of it is taken any more. Where nobody has started worker {worker} "
                    "again, somebody else with the run's key has taken its place"
                )
                self.send(peer, Refused(reason=reason))

    def _known_as(self, name: Name) -> list[Hello]:
        """Return the Hellos of all connections with this name, whichever member they are of."""
        role, number, member = name
        members = self._members.get(number, ()) if role == "worker" else (member,)
        peers = [self._connections.get((role, number, each)) for each in members]
        return [self._hellos[peer] for peer in peers if peer is not None]

    def _look_for_gone(self) -> None:
        """Forget connections that ended without notice. Nothing is ever sent to a dissolved group, so pings
        find them."""
        for peer in list(self._hellos):
            if peer not in self._waiting:
                self._offer(peer, encode(Ping()), None)

    def who(self, peer: bytes) -> Hello | None:
        """Return the Hello of a connection."""
        return self._hellos.get(peer)

    def forget(self, peer: bytes) -> None:
        """Remove a connection, which has ended or has another owner."""
        hello = self._hellos.pop(peer, None)
        if hello is not None:
            self._connections.pop(_name(hello), None)
        if hello is not None and hello.role == "worker":
            members = self._members[hello.worker]
            members.discard(hello.member)
            if not members:
                del self._members[hello.worker]
                self._speakers.pop(hello.worker, None)
                self._askers.forget(hello.worker)
        self._waiting.pop(peer, None)

    def _gone(self, peer: bytes) -> None:
        """Handle a broken connection."""
        hello = self._hellos.get(peer)
        self.forget(peer)
        if hello is None or hello.role != "worker":
            return
        if not self.members(hello.worker, hello.incarnation):
            self._lost[hello.worker] = max(hello.incarnation, self._lost.get(hello.worker, 0))

    def has_lost(self, worker: int, incarnation: int) -> bool:
        """True if this worker was connected and no member of it still is. Pings test the connections."""
        for peer in self.members(worker, incarnation):
            if peer not in self._waiting:  # else `flush` tests the connection
                self._offer(peer, encode(Ping()), None)
        return self._lost.get(worker) == incarnation

    def speaks(self, peer: bytes, request: Request | None = None) -> bool:
        """Make this connection its worker's speaker to the log; True if another member was it before.
        `request` is the message that the log will answer, if it will."""
        hello = self._hellos.get(peer)
        if hello is None or hello.role != "worker":
            return False
        if request is not None:
            self._askers.add(hello.worker, hello.incarnation, hello.member, request)
        before = self.worker(hello.worker, hello.incarnation)
        self._speakers[hello.worker] = hello.member
        return before != peer

    def worker(self, worker: int, incarnation: int) -> bytes | None:
        """The connection for messages that this incarnation of a worker did not ask the log for. Of a group:
        that of the member that spoke to the log last, or of any member if that one is not connected."""
        speaker = self.member(worker, incarnation, self._speakers.get(worker, 0))
        return speaker or next(iter(self.members(worker, incarnation)), None)

    def answer(
        self, worker: int, incarnation: int, request: Request, message: AnyMessage, payload: Any = None
    ) -> None:
        """Send the log's answer to a request to all members that have sent it and are connected. If it was
        sent to the log's process before this one, send it to the worker's speaker."""
        asked = self._askers.take(worker, incarnation, request)
        if not asked:
            self.send(self.worker(worker, incarnation), message, payload)
        for member in asked:
            self.send(self.member(worker, incarnation, member), message, payload)

    def member(self, worker: int, incarnation: int, member: int) -> bytes | None:
        """The connection of one member of this incarnation of a worker."""
        peer = self._connections.get(("worker", worker, member))
        return peer if peer is not None and self._hellos[peer].incarnation == incarnation else None

    def members(self, worker: int, incarnation: int) -> list[bytes]:
        """Connections of all members of this incarnation of a worker."""
        found = (self.member(worker, incarnation, each) for each in sorted(self._members.get(worker, ())))
        return [peer for peer in found if peer is not None]

    def workers(self) -> list[bytes]:
        """Connections of all workers."""
        return [peer for (role, _, _), peer in self._connections.items() if role == "worker"]

    def shards(self) -> list[bytes]:
        """Connections of all shards that follow this one."""
        return [peer for (role, _, _), peer in self._connections.items() if role == "shard"]

    def shard(self, index: int) -> bytes | None:
        return self._connections.get(("shard", index, 0))

    @property
    def hub(self) -> bytes | None:
        return self._connections.get(("hub", 0, 0))

    def send(self, peer: bytes | None, message: AnyMessage, payload: Any = None) -> None:
        """Send a message, or queue it until the connection takes it. The payload is not copied and must not
        change."""
        if peer is not None:
            self.when_kept(partial(self._offer, peer, encode(message), payload))

    def _offer(self, peer: bytes, header: bytes, payload: Any) -> None:
        waiting = self._waiting.get(peer)
        if waiting is not None:
            waiting.append((header, payload))
            return
        offered = self._server.offer(peer, header, payload, copy=False)
        if offered == "full" and peer in self._hellos:  # a stranger's answer is dropped
            self._waiting[peer] = deque([(header, payload)])
        elif offered == "gone":
            self._gone(peer)

    def takes(self, peer: bytes | None) -> bool:
        """True if the connection exists and nothing is queued for it. Senders of messages that can wait check
        this first."""
        return peer is not None and peer not in self._waiting

    @property
    def busy(self) -> bool:
        """True if messages are queued."""
        return bool(self._waiting)

    def flush(self) -> None:
        """Retry the queued messages."""
        for peer, waiting in list(self._waiting.items()):
            while waiting:
                offered = self._server.offer(peer, *waiting[0], copy=False)
                if offered == "full":
                    break
                if offered == "gone":
                    self._gone(peer)
                    break
                waiting.popleft()
            if not waiting:
                self._waiting.pop(peer, None)


def _name(hello: Hello) -> Name:
    if hello.role == "worker":
        return hello.role, hello.worker, hello.member
    return hello.role, hello.shard if hello.role == "shard" else 0, 0
