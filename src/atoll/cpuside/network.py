"""A node's connections to the other nodes.

A node listens at one address, and opens two connections to each other node: one for words (short messages)
and one for chunks, so that an acknowledgement does not wait behind a gradient. With link.transport "ltp",
chunks go through a tunnel that loses nothing. A broken connection is opened again; messages under way are
lost, and `take` reports the new connection. Only one thread may use these classes.

Addresses come from the launch, from views and from greetings. A node is not contacted at an impossible
address, and no error is raised for one.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from atoll.core.errors import RunError, UserError
from atoll.core.liveness import own_origin
from atoll.core.texts import one_line
from atoll.cpuside.guests import CHUNKS, WORDS, Guests, Places
from atoll.cpuside.silent import SilentNodes
from atoll.net.endpoint import (
    NOTHING_LISTENS,
    SOON,
    Buffer,
    Client,
    Endpoint,
    Received,
    Server,
    poll,
)
from atoll.net.keys import Keys
from atoll.net.socketfolder import remove_if_empty
from atoll.net.tunnel import TunnelClient, TunnelServer, Wish
from atoll.wire.base import VERSION, WireError
from atoll.wire.device import Begin, NodeAt
from atoll.wire.messages import Ping, Refused
from atoll.wire.nodes import (
    Greet,
    Greeted,
    NodeMessage,
    Trains,
    Word,
    decode_untrusted,
    encode,
)
from atoll.wire.peers import PeerMessage
from atoll.wire.peerviews import NODES

LARGEST_FRAME = 2**31 - 1  # bytes
_AT_ONCE = 64  # messages taken in one turn
_REFUSED_STRANGERS = 1000  # answers to peers that did not greet; further ones get none
_LOOK_SECONDS = 0.05  # between looks at silent connections: each look costs
_OTHER_MODEL = (
    "trains another model, or with another optimizer, configuration or kind of processor: "
    "give every node the same"
)


class Arrived(NamedTuple):
    """A message from a node, sent by this incarnation of the node."""

    node: int
    incarnation: int
    message: NodeMessage
    payload: memoryview | None


class Met(NamedTuple):
    """A greeting: if `up`, both connections to the node work now; else a new life of the node has come."""

    node: NodeAt
    up: bool


@dataclass
class _Way:
    """A connection to a node, for words or for chunks."""

    client: Client
    greeted: bool = False


@dataclass
class _Link:
    """The connections to one node."""

    at: NodeAt
    ways: list[_Way]  # for words, and for chunks; empty if the node cannot be contacted
    refusal: str = ""  # the reason why the node refuses this one, or cannot be contacted
    digest: str = ""  # digest of the node's model; empty if unknown
    number: int = 0  # number of the node's set-up
    looked_at: float = 0.0  # time of the last look at the connections, monotonic; 0: look now

    @property
    def is_up(self) -> bool:
        return bool(self.ways) and all(way.greeted and way.client.connected for way in self.ways)


@dataclass
class Counts:
    """Bytes received and sent, and messages refused, since the beginning."""

    bytes_in: int = 0
    bytes_out: int = 0
    refused: int = 0


class Network:
    """The connections of node `begin.node`, which listens at once; raises UserError if it cannot.

    `tell(what, choice, reason)` reports a decision (core.events.Decided), or a warning if `choice` is empty.
    """

    def __init__(self, begin: Begin, tell: Callable[[str, str, str], None]) -> None:
        self._begin, self._tell = begin, tell
        self.keys = Keys(*begin.keys) if begin.keys else None
        self.node, self.incarnation = begin.node, begin.incarnation
        self.name = f"node {begin.node}"
        self.counts = Counts()
        self.life = secrets.token_hex(8)
        self._trains = Trains(digest="", number=0)
        self._links: dict[int, _Link] = {}
        self._met: list[Met] = []
        self.has_answered = False  # a node has answered a greeting
        self._server = self._open()
        self.address = begin.address or self._server.address
        self._places = Places(begin.nodes, self.keys, self._server.address)
        self._guests = Guests(begin.run, begin.node, self.address, self._places, begin.codec)
        self.silent = SilentNodes(self._guests, tell)

    def _open(self) -> Server:
        begin = self._begin
        if begin.transport == "ltp":
            return TunnelServer(
                begin.listen, self.keys, limit=LARGEST_FRAME, name=self.name, udp_port=begin.udp_port
            )
        return Server(begin.listen, self.keys, limit=LARGEST_FRAME, name=self.name)

    # -- nodes --------------------------------------------------------------------------------------------

    @property
    def nodes(self) -> list[NodeAt]:
        """The nodes with a link, in order, each with its incarnation and address."""
        return [self._links[node].at for node in sorted(self._links)]

    def is_up(self, node: int) -> bool:
        """True if both connections to a node stand and the node has answered this one's greetings."""
        return node in self._links and self._links[node].is_up

    def trains(self, node: int) -> tuple[str, int]:
        """Return the digest of a node's model and the number of its set-up; ("", 0) if unknown."""
        link = self._links.get(node)
        return (link.digest, link.number) if link is not None else ("", 0)

    def trouble(self, node: int) -> str:
        """Return the reason why messages do not reach a node, or "" if they do."""
        link = self._links.get(node)
        if link is None:
            return "it is not known"
        troubles = [way.client.trouble for way in link.ways]
        return link.refusal or next(filter(None, troubles), "" if link.is_up else "it has not answered yet")

    def is_deaf(self, node: int) -> bool:
        """True if nothing listens at a node's address."""
        link = self._links.get(node)
        return link is not None and bool(link.ways) and link.ways[WORDS].client.trouble == NOTHING_LISTENS

    def link_to(self, at: NodeAt) -> None:
        """Connect to a node, in place of connections to an earlier incarnation or another address.

        For an impossible address nothing is opened, and `refusals` has the reason.
        """
        if at.node == self._begin.node:
            return
        link = self._links.get(at.node)
        if link is not None and link.at == at:
            return
        reason = self._places.refusal(at.node, at.address)
        if link is None and len(self._links) >= NODES:
            self._tell("link", "", f"{self.name} has no connection to node {at.node}: {NODES} is the most")
            return
        self.disconnect(at.node)
        self._links[at.node] = link = _Link(at, [])
        if reason:
            self._refused_by(link, reason)
            return
        try:
            for which in (WORDS, CHUNKS):
                link.ways.append(self._way(link, which))
        except UserError as error:
            for way in link.ways:
                way.client.abandon()
            link.ways = []
            self._refused_by(link, str(error))

    def disconnect(self, node: int) -> None:
        """Drop the connections to a node, with all unsent messages."""
        link = self._links.pop(node, None)
        for way in link.ways if link is not None else ():
            way.client.abandon()

    def drop_unsent(self, node: int) -> None:
        """Drop the chunks that wait to be sent to a former member."""
        if node in self._links and self._links[node].ways:
            self._reopen(self._links[node], CHUNKS)

    def set_up(self, digest: str, number: int, devices: Sequence[str] = ()) -> None:
        """Announce to all nodes that this one trains the model `digest` since its set-up `number`.

        `devices` are the places of its devices' processes.
        """
        self._trains = Trains(digest=digest, number=number, devices=list(devices))
        for node in self._links:
            self.send(node, self._trains)

    def _way(self, link: _Link, which: int) -> _Way:
        name = f"node {link.at.node}"
        if which == CHUNKS and self._begin.transport == "ltp":
            wish = Wish(who=self.name)
            client: Client = TunnelClient(
                link.at.address, self.keys, limit=LARGEST_FRAME, name=name, wish=wish
            )
        else:
            client = Client(link.at.address, self.keys, limit=LARGEST_FRAME, name=name, reconnect=SOON)
        greet = Greet(
            version=VERSION,
            run=self._begin.run,
            node=self._begin.node,
            incarnation=self.incarnation,
            to=link.at.node,
            address=self.address,
            life=self.life,
            digest=self._trains.digest,
            number=self._trains.number,
            way=which,
            codec=self._begin.codec,
            origin=own_origin(),
            devices=self._trains.devices,
        )
        client.send(encode(greet))
        return _Way(client)

    # -- sending ------------------------------------------------------------------------------------------

    def say(self, node: int, message: PeerMessage) -> None:
        """Send a message of the decisions; drop it without a connection, or if the node's model differs.

        A late node with another model must not be admitted.
        """
        if not self._other_model(self.trains(node)[0]):
            self.send(node, Word(body=message))

    def send(self, node: int, message: NodeMessage) -> None:
        """Send on the connection for words, or drop the message if there is none."""
        self._send(node, WORDS, message, None)

    def send_chunk(self, node: int, message: NodeMessage, payload: Buffer | None = None) -> None:
        """Send on the connection for chunks, or drop the message if there is none.

        The payload is not copied, and must not change as long as its memory lives.
        """
        self._send(node, CHUNKS, message, payload)

    def _send(self, node: int, which: int, message: NodeMessage, payload: Buffer | None) -> None:
        link = self._links.get(node)
        if link is None or not link.ways or not link.ways[which].greeted:
            return
        header = encode(message)
        try:
            link.ways[which].client.send(header, payload)
        except RunError:  # far too many messages wait: the receiver does not read
            self._reopen(link, which)
            return
        size = len(header) + (memoryview(payload).nbytes if payload is not None else 0)
        self.counts.bytes_out += size

    # -- receiving ----------------------------------------------------------------------------------------

    def wait(self, timeout: float, wake: int, others: Sequence[Endpoint] = ()) -> None:
        """Wait until there is something to take here or at `others`, or `wake` becomes readable.

        Waits for at most `timeout` seconds.
        """
        endpoints: list[Endpoint] = [self._server, *others]
        endpoints += [way.client for link in self._links.values() for way in link.ways]
        ready = set(poll(endpoints, timeout, wake))
        now = time.monotonic()
        for link in self._links.values():
            if now > link.looked_at + _LOOK_SECONDS or any(way.client in ready for way in link.ways):
                link.looked_at = 0.0

    def take(self) -> Iterator[Arrived | Met]:
        """Yield received messages and greetings, a bounded number a call; handles connections first."""
        report = self._server.take_report()
        if report:
            self._tell("port", "", f"{self.name}'s port {self._server.address}: {report}")
        for link in [link for link in self._links.values() if not link.looked_at]:
            link.looked_at = time.monotonic()
            self._see(link)
        yield from self._greetings()
        for _ in range(_AT_ONCE):
            received = self._server.receive(0)
            if received is None:
                return
            arrived = self._handle(received)
            yield from self._greetings()
            if arrived is not None:
                yield arrived

    def _greetings(self) -> Iterator[Met]:
        met, self._met = self._met, []
        yield from met

    def _handle(self, received: Received) -> Arrived | None:
        size = len(received.header) + (received.payload.nbytes if received.payload is not None else 0)
        self.counts.bytes_in += size
        try:
            message = decode_untrusted(received.header)
        except WireError as error:
            self._refuse(received.peer, str(error), "")
            return None
        if isinstance(message, Greet):
            reason = self._greet(received.peer, message)
            if reason:
                self._refuse(received.peer, reason, "Greet")
            return None
        guest = self._guests.who(received.peer)
        if guest is None:
            self._refuse(received.peer, "say Greet first", type(message).__name__)
            return None
        if not self._guests.is_alive(guest):
            return None  # the sender's life is over
        if isinstance(message, Trains):
            self._guests.note_trains(received.peer, message)
            self._note_trains(guest.node, message.digest, message.number)
            return None
        return Arrived(guest.node, guest.incarnation, message, received.payload)

    def _greet(self, peer: bytes, greet: Greet) -> str:
        """Let a node in and answer its greeting; returns the reason to refuse it, or ""."""
        link = self._links.get(greet.node)
        reason = self._guests.refusal(greet, link.at.address if link is not None and link.is_up else "")
        if reason or self._other_model(greet.digest):
            return reason or f"it {_OTHER_MODEL}"
        new = self._guests.admit(peer, greet)
        digest, number = self._trains.digest, self._trains.number
        answer = Greeted(node=self.node, incarnation=self.incarnation, digest=digest, number=number)
        self._server.send(peer, encode(answer))
        at = NodeAt(greet.node, greet.incarnation, greet.address)
        if new:
            self.link_to(at)
            self._met.append(Met(at, up=False))
        self._note_trains(greet.node, greet.digest, greet.number)
        return ""

    def _other_model(self, digest: str) -> bool:
        """True if both models are known and differ; the number of set-ups does not count.

        A loaded checkpoint does not change the digest.
        """
        return bool(digest and self._trains.digest) and digest != self._trains.digest

    def _note_trains(self, node: int, digest: str, number: int) -> None:
        link = self._links.get(node)
        if link is not None and digest and number >= link.number:
            link.digest, link.number = digest, number

    def _refuse(self, peer: bytes, reason: str, request: str) -> None:
        self.counts.refused += 1
        if self.counts.refused <= _REFUSED_STRANGERS or request == "Greet":
            self._server.send(peer, encode(Refused(reason=reason[:4000], request=request)))

    # -- links --------------------------------------------------------------------------------------------

    def _see(self, link: _Link) -> None:
        """Handle the answers of a node, and open broken connections again."""
        was_up = link.is_up
        for which, way in enumerate(link.ways):
            try:
                way.client.check()
            except UserError as error:
                self._refused_by(link, str(error))
                return
            while (answer := way.client.receive(0)) is not None:
                self._answer(link, way, answer[0])
            if way.client.losses:
                self._reopen(link, which)
        if link.is_up and not was_up:
            self._met.append(Met(link.at, up=True))

    def _answer(self, link: _Link, way: _Way, header: bytes) -> None:
        try:
            message = decode_untrusted(header)
        except WireError as error:
            self._refused_by(link, f"node {link.at.node} at {link.at.address}: {error}")
            return
        if isinstance(message, Greeted):
            way.greeted, link.refusal, self.has_answered = True, "", True
            self._note_trains(link.at.node, message.digest, message.number)
            # The model may have been set up after this greeting was sent.
            if link.ways and way is link.ways[WORDS] and self._trains.digest:
                self.send(link.at.node, self._trains)
        elif isinstance(message, Refused) and message.request == "Greet":
            reason = one_line(message.reason, 1000)
            self._refused_by(link, f"node {link.at.node} at {link.at.address} refused: {reason}")
        elif not isinstance(message, (Ping, Refused)):
            self._refused_by(
                link, f"node {link.at.node} at {link.at.address} sent a {type(message).__name__}"
            )

    def _refused_by(self, link: _Link, reason: str) -> None:
        if link.refusal != reason:
            link.refusal = reason
            self._tell("link", "", reason)

    def refusals(self, nodes: Collection[int] | None = None) -> list[str]:
        """Return a line for each node that refuses this one or has an impossible address.

        `nodes` limits the answer (None: all nodes). Nodes that came by themselves may claim anything, so a
        caller that raises errors must give the nodes that it was introduced to.
        """
        reasons = [
            f"node {node} at {link.at.address}: it {_OTHER_MODEL}"
            if self._other_model(link.digest)
            else link.refusal
            for node, link in sorted(self._links.items())
            if nodes is None or node in nodes
        ]
        return [each for each in reasons if each]

    def _reopen(self, link: _Link, which: int) -> None:
        link.ways[which].client.abandon()
        link.ways[which] = self._way(link, which)

    def close(self) -> None:
        """Close all connections; unsent messages still go out in the background for up to a second."""
        for link in self._links.values():
            for way in link.ways:
                way.client.close()
        self._links.clear()
        self._server.close()
        remove_if_empty(self._server.address)
