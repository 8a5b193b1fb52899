"""Who is connected to a shard, by what they said in their Hello, and sending that never waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from atoll.net.endpoint import Server
from atoll.wire.messages import VERSION, AnyMessage, Hello, Ping, encode

ROLES = ("worker", "shard", "hub")
_MOST = 16_384  # peers that are remembered

Name: TypeAlias = tuple[str, int]  # a role, and the worker's rank or the shard's index


class Peers:
    """One connection for each rank, shard and hub: the latest that said Hello."""

    def __init__(self, server: Server, run: str) -> None:
        self._server, self._run = server, run
        self._hellos: dict[bytes, Hello] = {}
        self._connections: dict[Name, bytes] = {}
        self._lost: dict[int, int] = {}  # worker -> its incarnation, whose connection has gone
        self._waiting: dict[bytes, deque[tuple[bytes, Any]]] = {}  # what a full queue did not take
        # Lets nothing leave before what it may tell of is in the journal, where there is one.
        self.when_kept: Callable[[Callable[[], None]], None] = lambda send: send()

    def greet(self, peer: bytes, hello: Hello) -> str:
        """Remember who this is; returns why not, in one line."""
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
            return f"{_MOST} peers are known, which is the most"
        known = self._hellos.get(before) if before is not None else None
        if known is not None and known.incarnation > hello.incarnation:
            return f"{name[0]} {name[1]} lives in a later incarnation, {known.incarnation}"
        if before != peer:
            self.forget(peer)
            if before is not None:
                self.forget(before)
        self._hellos[peer], self._connections[name] = hello, peer
        if hello.role == "worker":
            self._lost.pop(hello.worker, None)
        return ""

    def who(self, peer: bytes) -> Hello | None:
        """What this connection said it is."""
        return self._hellos.get(peer)

    def forget(self, peer: bytes) -> None:
        """The connection is no more, or another's."""
        hello = self._hellos.pop(peer, None)
        if hello is not None:
            self._connections.pop(_name(hello), None)
        self._waiting.pop(peer, None)

    def _gone(self, peer: bytes) -> None:
        """The connection has broken."""
        hello = self._hellos.get(peer)
        if hello is not None and hello.role == "worker":
            self._lost[hello.worker] = hello.incarnation
        self.forget(peer)

    def has_lost(self, worker: int, incarnation: int) -> bool:
        """Whether this worker was connected, and is not any more. A connection is tried, to know."""
        peer = self.worker(worker, incarnation)
        if peer is not None and peer not in self._waiting:  # else what waits for it is tried anyway
            self._offer(peer, encode(Ping()), None)
        return self._lost.get(worker) == incarnation

    def worker(self, worker: int, incarnation: int) -> bytes | None:
        """The connection of this incarnation of a worker."""
        peer = self._connections.get(("worker", worker))
        return peer if peer is not None and self._hellos[peer].incarnation == incarnation else None

    def workers(self) -> list[bytes]:
        """The connections of all workers."""
        return [peer for (role, _), peer in self._connections.items() if role == "worker"]

    def shards(self) -> list[bytes]:
        """The connections of all shards that follow this one."""
        return [peer for (role, _), peer in self._connections.items() if role == "shard"]

    def shard(self, index: int) -> bytes | None:
        return self._connections.get(("shard", index))

    @property
    def hub(self) -> bytes | None:
        return self._connections.get(("hub", 0))

    def send(self, peer: bytes | None, message: AnyMessage, payload: Any = None) -> None:
        """Send, or keep until the connection takes it. A payload is not copied: nobody changes it."""
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
        """Whether there is such a connection, and nothing waits for it: who has more to say that can wait,
        waits for this."""
        return peer is not None and peer not in self._waiting

    @property
    def busy(self) -> bool:
        """Whether something waits for a connection to take it."""
        return bool(self._waiting)

    def flush(self) -> None:
        """Try again with what waits."""
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
    return hello.role, {"worker": hello.worker, "shard": hello.shard}.get(hello.role, 0)
