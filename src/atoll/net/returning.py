"""Connections to servers that may be killed and started again, here or elsewhere.

Messages without an answer are kept, and sent again once the server is back, which counts repeated ones once.
Workers hold such connections to their shards, and a site's shard to the global ones.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy

from atoll.core.config import LinkOptions
from atoll.core.errors import PeerLostError
from atoll.core.events import LinkFigures
from atoll.ltp.settings import LtpSettings
from atoll.net.endpoint import Client, Endpoint
from atoll.net.keys import Keys
from atoll.net.tunnel import Lossy, TunnelClient, Wish
from atoll.net.tunnelend import IDLE_SECONDS, block_elements
from atoll.wire.messages import AnyMessage, Hello, Welcome, encode

_ASK_WHERE = 0.25  # seconds between requests for the servers' addresses, while one is lost
_ASK_ANYWAY = 2.0  # seconds, while none is lost: a silent one may have been given up, and be elsewhere
_GREET_AGAIN = 1.0  # seconds between Hellos to a server that has not answered: it may have been a standby


MOST_UNDER_WAY = 2  # prepared payloads that the system has not taken yet, over all connections


@dataclass(frozen=True)
class Made:
    """A payload that is made when it leaves, and again if it was lost, so that unanswered messages need no
    memory. `make()` gives a tensor's memory that nobody else writes to; its sources must stay unchanged
    until the answer."""

    make: Callable[[], memoryview]


Payload: TypeAlias = "memoryview | Made | None"


@dataclass(frozen=True)
class _Sent:
    message: AnyMessage
    payload: Payload
    until: Hashable
    lossy: Lossy | None = None


@dataclass
class _Link:
    """The connection to one server, and the unanswered messages."""

    client: Client
    address: str
    sent: list[_Sent] = field(default_factory=list)
    queue: deque[_Sent] = field(default_factory=deque)  # waiting behind a payload to be made
    welcomed: bool = False  # on this connection
    comes_back: bool = True  # the server keeps a journal, by its welcome as far as is known
    lost_at: float | None = None  # monotonic
    greeted_at: float = field(default_factory=time.monotonic)


class ReturningLinks:
    """One connection to each server, on which `hello` is said first.

    `name(index)` names a server in words; `ends(index)` is the error's line for a lost server that keeps no
    journal. `where()` gives the addresses as the hub knows them, or None if it does not now. `is_it(index,
    welcome)` tells a server from another one that has got its old port. `lost(index)` is called when a server
    is lost and waited for, and `back(index, seconds)` when it is back. `link`: options of the connections;
    with transport "ltp", each is a tunnel (net/tunnel.py).
    """

    def __init__(
        self,
        addresses: Sequence[str],
        keys: Keys | None,
        *,
        hello: Hello,
        limit: int,
        name: Callable[[int], str],
        ends: Callable[[int], str],
        where: Callable[[], list[str] | None],
        is_it: Callable[[int, Welcome], bool],
        lost: Callable[[int], None] = lambda _index: None,
        back: Callable[[int, float], None] = lambda _index, _seconds: None,
        link: LinkOptions | None = None,
    ) -> None:
        self.come_back = 0  # number of times that a server was lost and found again
        self._hello, self._keys, self._limit = hello, keys, limit
        self._name, self._ends, self._where, self._is_it = name, ends, where, is_it
        self._lost, self._back = lost, back
        self._wish = _wish_of(link, hello) if link is not None and link.transport == "ltp" else None
        self._asked_where = 0.0
        self._links: list[_Link] = []
        self._turn = 0  # index of the queue that was looked at last
        self._under_way: list[weakref.ref[numpy.ndarray[Any, Any]]] = []  # payloads that were made
        try:
            for index, address in enumerate(addresses):
                self._links.append(_Link(self._connect(index, address), address))
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._links)

    @property
    def addresses(self) -> list[str]:
        return [link.address for link in self._links]

    @property
    def clients(self) -> list[Client]:
        return [link.client for link in self._links]

    @property
    def strangers(self) -> list[int]:
        """The servers that have sent no welcome on their present connections."""
        return [index for index, link in enumerate(self._links) if not link.welcomed]

    def _connect(self, index: int, address: str) -> Client:
        client: Client
        if self._wish is not None:
            client = TunnelClient(
                address, self._keys, limit=self._limit, name=self._name(index), wish=self._wish
            )
        else:
            client = Client(address, self._keys, limit=self._limit, name=self._name(index))
        client.send(encode(self._hello))
        return client

    def close(self) -> None:
        for link in self._links:
            link.client.close()
        self._links.clear()

    def figures(self) -> dict[int, LinkFigures]:
        """Return the figures of open tunnels, by server; none over TCP."""
        tunnels = {
            index: link.client.link
            for index, link in enumerate(self._links)
            if isinstance(link.client, TunnelClient)
        }
        return {index: figures for index, figures in tunnels.items() if figures is not None}

    # -- sending ------------------------------------------------------------------------------------------

    def send(
        self,
        index: int,
        message: AnyMessage,
        payload: Payload = None,
        until: Hashable = None,
        lossy: Lossy | None = None,
    ) -> None:
        """Send without waiting; `payload` must not change before the server has answered. `lossy`: not all of
        it needs to arrive, if the connection is a tunnel; over TCP all of it does.

        With `until`, the message is sent again to a server that was lost, until `answered(until)` is called.
        """
        link = self._links[index]
        sent = _Sent(message, payload, until, lossy)
        if until is not None:
            link.sent.append(sent)
        if link.lost_at is not None and until is not None:
            return
        if link.queue or isinstance(payload, Made):
            link.queue.append(sent)
            self.pump()
        else:
            _transmit(link.client, message, payload, lossy)

    @property
    def is_behind(self) -> bool:
        """True if messages have yet to leave: call `pump` soon."""
        return any(link.queue for link in self._links)

    def pump(self) -> None:
        """Send waiting messages; payloads are made as earlier ones have become the system's."""
        while any(link.queue for link in self._links):
            self._turn = (self._turn + 1) % len(self._links)  # all links are to be used
            queue = self._links[self._turn].queue
            if queue and not self._leave(self._links[self._turn], queue[0]):
                self._turn -= 1
                return

    def _leave(self, link: _Link, sent: _Sent) -> bool:
        """Send the first message of a queue; return whether it may leave now."""
        payload = sent.payload
        if isinstance(payload, Made):
            self._under_way = [held for held in self._under_way if held() is not None]
            if len(self._under_way) >= MOST_UNDER_WAY:
                return False
            # ZeroMQ holds the array until all of it is the system's.
            array = numpy.frombuffer(payload.make(), dtype=numpy.uint8)
            self._under_way.append(weakref.ref(array))
            payload = array.data
        link.queue.popleft()
        _transmit(link.client, sent.message, payload, sent.lossy)
        return True

    def answered(self, until: Hashable, index: int | None = None, instead: AnyMessage | None = None) -> None:
        """Do not send messages with this `until` again, to server `index` or to all; but send `instead`,
        if the rest of the answer is lost."""
        for each, link in enumerate(self._links):
            if index is None or each == index:
                link.sent = [sent for sent in link.sent if sent.until != until]
                link.queue = deque(sent for sent in link.queue if sent.until != until)
                if instead is not None:
                    link.sent.append(_Sent(instead, None, until))

    # -- receiving ----------------------------------------------------------------------------------------

    def take(
        self, ready: Sequence[Endpoint], handle: Callable[[int, bytes, memoryview | None], None]
    ) -> None:
        """Hand out the messages on the connections in `ready`: (index, header, payload)."""
        for index, link in enumerate(list(self._links)):
            client = link.client
            while client in ready and link.client is client:
                got = client.receive(0.0)
                # Check after receiving: the connection may have been lost and made again meanwhile.
                if link.comes_back and client.losses:
                    self._lose(index, link)  # no Hello was said on a connection that came back
                    break
                if got is None:
                    break
                handle(index, got[0], got[1])
                if not self._links:
                    return  # a handler has closed them

    def check(self, grace: float = 0.0) -> None:
        """Replace lost connections. Raises the error of a server that refuses this side, and PeerLostError
        for a server that will not come back, once it has been gone for `grace` seconds."""
        for index, link in enumerate(self._links):
            link.client.check()
            if link.client.losses:
                self._lose(index, link, grace=grace)
            if not link.welcomed:
                self._greet_again(link)
        lost, now = bool(self.strangers), time.monotonic()  # or not found yet
        if now - self._asked_where >= (_ASK_WHERE if lost else _ASK_ANYWAY):
            addresses = self._where() if any(link.comes_back for link in self._links) else None
            self._asked_where = time.monotonic()
            for index, address in enumerate(addresses or ()):
                if address != self._links[index].address:
                    self._lose(index, self._links[index], address)

    def _greet_again(self, link: _Link) -> None:
        """Repeat Hello: a server that was no primary before may be one by now."""
        if time.monotonic() >= link.greeted_at + _GREET_AGAIN:
            link.greeted_at = time.monotonic()
            if link.client.connected:
                link.client.send(encode(self._hello))

    def _lose(self, index: int, link: _Link, address: str = "", grace: float = 0.0) -> None:
        """Begin another connection, since unanswered messages on this one may be lost."""
        if not link.comes_back:
            link.lost_at = link.lost_at or time.monotonic()
            if time.monotonic() - link.lost_at >= grace:
                raise PeerLostError(self._ends(index))
            return
        link.client.abandon()
        link.queue.clear()  # `handle_welcome` sends unanswered messages again
        if link.lost_at is None:
            link.lost_at = time.monotonic()
            self._lost(index)
        link.address = address or link.address
        link.welcomed, link.greeted_at = False, time.monotonic()
        link.client = self._connect(index, link.address)

    def handle_welcome(self, index: int, welcome: Welcome) -> None:
        """Handle a server's welcome: send again what the server may have lost."""
        link = self._links[index]
        if not self._is_it(index, welcome):
            return  # the hub knows the lost one's address
        link.welcomed, link.comes_back = True, welcome.comes_back
        if link.lost_at is not None:
            away, link.lost_at = time.monotonic() - link.lost_at, None
            self.come_back += 1
            self._back(index, away)
            link.queue.extend(link.sent)
            self.pump()

    def gone(self, index: int) -> str:
        """Return in words for how long a server has been lost; empty if it is there."""
        lost_at = self._links[index].lost_at
        if lost_at is None:
            return ""
        seconds = time.monotonic() - lost_at
        return f" (lost {seconds:.1f} s ago; `atoll server` with its --directory would bring it back)"


def _transmit(client: Client, message: AnyMessage, payload: memoryview | None, lossy: Lossy | None) -> None:
    if isinstance(client, TunnelClient):
        client.send(encode(message), payload, lossy)
    else:
        client.send(encode(message), payload)


def elements_in_block(link: LinkOptions, dtype: str) -> int:
    """Return the number of elements of type "float32", "bfloat16" and the like in a block of a lossy
    payload over such a link."""
    return block_elements(dtype, _settings_of(link))


def _settings_of(link: LinkOptions) -> LtpSettings:
    return LtpSettings(
        usable=link.usable,
        fill=link.fill,
        fill_above=link.fill_above,
        target_loss=link.target_loss,
        idle_seconds=IDLE_SECONDS,
    )


def _wish_of(link: LinkOptions, hello: Hello) -> Wish:
    """Return the tunnel options of a client with this Hello."""
    return Wish(f"{hello.role} {hello.worker}", hello.site, _settings_of(link), link.stripes)
