"""Ownership of the connections at the hub's port."""

from __future__ import annotations

import math

from atoll.core.heap import give_back_freed_memory
from atoll.hub.turn import Turn
from atoll.net.endpoint import Server
from atoll.store.members import Membership
from atoll.wire.messages import Ping, Welcome, encode

_GIVE_BACK = 256  # closed connections after which freed memory is given back ...
_GIVE_BACK_SECONDS = (2.0, 10.0)  # ... once no other has closed for this long, and once more

_PING = encode(Ping())


class Connections:
    """Connections of `members` to `server`, from their welcome to the run of this name on. `measures_links`
    is announced to workers, which then wait for the measuring."""

    def __init__(
        self, run: str, server: Server, members: Membership, turn: Turn, *, measures_links: bool
    ) -> None:
        self._run, self._server, self._members, self._turn = run, server, members, turn
        self._measures_links = measures_links
        self._owners: dict[int, bytes] = {}  # incarnation -> its connection
        self._owned: dict[bytes, int] = {}  # connection -> incarnation
        self._pids: dict[int, int] = {}  # incarnation -> its process
        self._disowned = 0  # connections closed since memory was given back
        self._disowned_at = -math.inf
        self._given_back = 0  # times memory was given back since the last one closed

    def of(self, incarnation: int) -> bytes:
        """The connection of a member; empty if unknown."""
        return self._owners.get(incarnation, b"")

    def member(self, peer: bytes) -> int:
        """The incarnation of the member that owns this connection; 0 if none does."""
        return self._owned.get(peer, 0)

    def welcome(self, peer: bytes, role: str, incarnation: int = 0, worker: int = -1, site: str = "") -> None:
        """Send a Welcome and make the connection the member's. A guest has no incarnation."""
        if incarnation:
            self._own(incarnation, peer)
        members = self._members
        sites, workers = members.sites.workers, members.workers.count
        if sites and role != "worker":  # the number of workers of this shard's log
            workers = sites[site] if role == "site" else len(sites)
        welcome = Welcome(
            run=self._run,
            worker=worker,
            incarnation=incarnation,
            workers=workers,
            shards=members.shards.count,
            heartbeat=members.roll.heartbeat,
            patience=members.roll.patience,
            sites=list(sites),
            replicas=members.shards.replicas,
            links=self._measures_links,
        )
        self._turn.send(peer, welcome)

    def _own(self, incarnation: int, peer: bytes) -> None:
        self._disown(incarnation)
        self._owners[incarnation] = peer
        self._owned[peer] = incarnation

    def _disown(self, incarnation: int) -> None:
        peer = self._owners.pop(incarnation, b"")
        self._disowned += bool(peer)
        self._disowned_at, self._given_back = self._turn.now(), 0
        if self._owned.get(peer) == incarnation:
            del self._owned[peer]

    def forget(self, incarnation: int) -> None:
        """Forget a member that left or died."""
        self._disown(incarnation)
        self._pids.pop(incarnation, None)

    def is_another(self, incarnation: int, pid: int) -> bool:
        """True if another process named this incarnation before."""
        before, self._pids[incarnation] = self._pids.get(incarnation, pid), pid
        return before != pid

    def owns(self, peer: bytes, incarnation: int) -> bool:
        """True if the connection belongs to the member. After a hub's restart the first connection to name a
        live member is accepted."""
        if incarnation not in self._owners and self._members.roll.is_there(incarnation):
            self._own(incarnation, peer)
        return self._owners.get(incarnation) == peer

    def is_gone(self, incarnation: int) -> bool:
        """True if a member's connection is known and broken."""
        return incarnation in self._owners and self.has_lost(self._owners[incarnation])

    def has_lost(self, peer: bytes) -> bool:
        """True if this connection is broken."""
        return self._server.offer(peer, _PING) == "gone"

    def give_back(self) -> None:
        """Return the memory of many closed connections to the system; twice, since some close late."""
        since = self._turn.now() - self._disowned_at
        if self._disowned >= _GIVE_BACK and since >= _GIVE_BACK_SECONDS[self._given_back]:
            give_back_freed_memory()
            self._given_back += 1
            if self._given_back == len(_GIVE_BACK_SECONDS):
                self._disowned = self._given_back = 0


def given_up(incarnation: int) -> str:
    """Refusal for an incarnation that is unknown or given up."""
    return (
        f"the hub knows no incarnation {incarnation}: it was silent for too long, or this is another hub; "
        "start it again"
    )
