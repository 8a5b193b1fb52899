"""The nodes that a node lets in, and the addresses at which a node can be."""

from __future__ import annotations

from operator import attrgetter
from pathlib import PurePath

from msgspec.structs import replace

from atoll.core.errors import UserError
from atoll.net.endpoint import check_reach, host_and_port
from atoll.net.keys import Keys
from atoll.wire.base import MOST_AHEAD, VERSION
from atoll.wire.nodes import Greet, Trains
from atoll.wire.peerviews import NODES

WORDS, CHUNKS = 0, 1  # the two connections to a node: for short messages, and for chunks


class Places:
    """The addresses at which nodes of a run can be.

    Args:
        nodes: number of nodes; 0 if unknown.
        keys: the keys of the run, if any.
        own: the address at which this node listens.
    """

    def __init__(self, nodes: int, keys: Keys | None, own: str) -> None:
        self._count, self._keys, self._own = min(nodes or NODES, NODES), keys, own

    def refusal(self, node: int, address: str) -> str:
        """Return the reason why node `node` cannot be at `address`, or "" if it can.

        Without keys, any process of this machine may have sent the address.
        """
        if node >= self._count:
            return f"this run has {self._count} nodes, from 0 to {self._count - 1}, and no node {node}"
        try:
            check_reach(address, self._keys, f"node {node}")
        except UserError as error:
            return str(error)
        if host_and_port(address) is not None:
            return ""
        is_beside = self._own.startswith("ipc://") and PurePath(self._own).parent == PurePath(address).parent
        return "" if is_beside else f"node {node}: {address!r} is no path beside this node's"


class Guests:
    """The nodes that have greeted this one.

    Args:
        run: the run's name.
        node: this node's number.
        address: this node's address for the others.
        places: the possible addresses of nodes.
        codec: this node's `sync.codec`, which all nodes must share.
    """

    def __init__(self, run: str, node: int, address: str, places: Places, codec: str) -> None:
        self._run, self._node, self._address, self._places = run, node, address, places
        self._codec = codec
        self._guests: dict[bytes, Greet] = {}  # by connection
        self._lives: dict[int, tuple[int, str]] = {}  # latest incarnation and life of each node

    def who(self, peer: bytes) -> Greet | None:
        """Return the greeting that came on a connection."""
        return self._guests.get(peer)

    def is_alive(self, guest: Greet) -> bool:
        """True unless a later life of the guest's node has greeted."""
        return self._lives[guest.node] == (guest.incarnation, guest.life)

    def origins(self, node: int, incarnation: int) -> tuple[str, list[str]]:
        """Return the places of the processes that a node has named: its CPU side's, and its devices'.

        Empty if unknown; the devices are known once the node is set up.
        """
        greets = [who for who in self._guests.values() if (who.node, who.incarnation) == (node, incarnation)]
        latest = max(greets, key=attrgetter("number"), default=None)
        return (latest.origin, latest.devices) if latest is not None else ("", [])

    def note_trains(self, peer: bytes, trains: Trains) -> None:
        """Record that the node whose connection this is has been set up."""
        made = replace(self._guests[peer], number=trains.number, devices=trains.devices)
        self._guests[peer] = made

    def refusal(self, greet: Greet, reached_at: str) -> str:
        """Return the reason why a node is not let in, or "" if it is.

        `reached_at` is the address of the connected node with that number; empty if there is none.
        """
        if greet.version != VERSION:
            return f"protocol version {greet.version}, and this is version {VERSION}: install the same Atoll"
        if greet.run != self._run:
            return f"this is run {self._run!r}, not {greet.run!r}"
        if greet.to != self._node:
            return f"this is node {self._node}, not node {greet.to}"
        if greet.codec != self._codec:
            return (
                f"node {greet.node} has sync.codec {greet.codec!r}, and node {self._node} has "
                f"{self._codec!r}: a run's gradients are written by one codec; set sync.codec to the same "
                "on all"
            )
        if greet.node == self._node:
            return f"two nodes with the name {self._node}: the other one is at {self._address}"
        if wrong := self._places.refusal(greet.node, greet.address):
            return wrong
        if greet.way not in (WORDS, CHUNKS):
            return f"a connection is for words, {WORDS}, or for chunks, {CHUNKS}, not {greet.way}"
        incarnation, life = self._lives.get(greet.node, (-1, ""))
        if greet.incarnation < incarnation:
            return f"incarnation {greet.incarnation} of node {greet.node} is over: {incarnation} is here"
        if 0 <= incarnation < greet.incarnation - MOST_AHEAD:
            return (
                f"node {greet.node} says that it is incarnation {greet.incarnation}, and {incarnation} is "
                "here: they are counted, so nobody has given it that number"
            )
        if greet.incarnation == incarnation and greet.life != life and reached_at:
            return f"two nodes with the name {greet.node}: the other one is at {reached_at}"
        if len(self._lives) >= NODES and greet.node not in self._lives:
            return f"{NODES} nodes, which is the most"
        return ""

    def admit(self, peer: bytes, greet: Greet) -> bool:
        """Let a node in on a connection; returns True for a new life of the node."""
        new = self._lives.get(greet.node) != (greet.incarnation, greet.life)
        self._lives[greet.node] = greet.incarnation, greet.life
        self._guests = {
            each: who
            for each, who in self._guests.items()
            if self.is_alive(who) and (who.node, who.way) != (greet.node, greet.way)
        }
        self._guests[peer] = greet
        return new

    def __len__(self) -> int:
        """Return the number of connections let in."""
        return len(self._guests)
