"""Whose connection is whose, at the hub's port."""

from __future__ import annotations

import math

from atoll.core.heap import give_back_freed_memory
from atoll.hub.turn import Turn
from atoll.net.endpoint import Server
from atoll.store.members import Membership
from atoll.wire.messages import Ping, Welcome, encode

_GIVE_BACK = 256  # connections that are no more, after which freed memory is given back ...
_GIVE_BACK_SECONDS = (2.0, 10.0)  # ... once no others have gone for a while, and again

_PING = encode(Ping())


class Connections:
    """The connections of `members` to `server`, each from its welcome to the run of this name on.
    `measures_links`: workers are to wait for that."""

    def __init__(
        self, run: str, server: Server, members: Membership, turn: Turn, *, measures_links: bool
    ) -> None:
        self._run, self._server, self._members, self._turn = run, server, members, turn
        self._measures_links = measures_links
        self._owners: dict[int, bytes] = {}  # incarnation -> whose connection it is
        self._owned: dict[bytes, int] = {}  # the other way round
        self._pids: dict[int, int] = {}  # incarnation of a shard -> its process
        self._disowned = 0  # connections that were given up since freed memory was given back
        self._disowned_at = -math.inf
        self._given_back = 0  # times, since the last one went

    def of(self, incarnation: int) -> bytes:
        """The connection of a member; empty where none is known."""
        return self._owners.get(incarnation, b"")

    def member(self, peer: bytes) -> int:
        """The incarnation of the member whose connection this is; 0 where it is nobody's."""
        return self._owned.get(peer, 0)

    def welcome(self, peer: bytes, role: str, incarnation: int = 0, worker: int = -1, site: str = "") -> None:
        """Welcome somebody, whose connection this is from now on; a guest has no incarnation."""
        if incarnation:
            self._own(incarnation, peer)
        members = self._members
        sites, workers = members.sites.workers, members.workers.count
        if sites and role != "worker":  # of the log that this shard follows or keeps
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
        """The member is no more."""
        self._disown(incarnation)
        self._pids.pop(incarnation, None)

    def is_another(self, incarnation: int, pid: int) -> bool:
        """Whether this process says that it is a member, and another one said so before."""
        before, self._pids[incarnation] = self._pids.get(incarnation, pid), pid
        return before != pid

    def owns(self, peer: bytes, incarnation: int) -> bool:
        """Whether this connection is the member's: after a restart, of a member that is there, the first that
        names it."""
        if incarnation not in self._owners and self._members.roll.is_there(incarnation):
            self._own(incarnation, peer)
        return self._owners.get(incarnation) == peer

    def is_gone(self, incarnation: int) -> bool:
        """Whether a member's connection is known, and is no more."""
        return incarnation in self._owners and self.has_lost(self._owners[incarnation])

    def has_lost(self, peer: bytes) -> bool:
        """Whether this connection is no more."""
        return self._server.offer(peer, _PING) == "gone"

    def give_back(self) -> None:
        """After many have gone, return the memory of their connections to the system: some close late."""
        since = self._turn.now() - self._disowned_at
        if self._disowned >= _GIVE_BACK and since >= _GIVE_BACK_SECONDS[self._given_back]:
            give_back_freed_memory()
            self._given_back += 1
            if self._given_back == len(_GIVE_BACK_SECONDS):
                self._disowned = self._given_back = 0


def given_up(incarnation: int) -> str:
    """Why nobody of this incarnation is answered."""
    return (
        f"the hub knows no incarnation {incarnation}: it was silent for too long, or this is another hub; "
        "start it again"
    )
