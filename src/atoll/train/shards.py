"""A worker's connections to the shards of the parameter server, and what it waits for there.

A shard that keeps a journal may be killed and started again, here or elsewhere. Until then a worker waits for
it, and what it has sent and has no answer to it sends again: what comes twice counts once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from atoll.core.errors import DeadlineError, PeerLostError, RunError, UserError
from atoll.net.endpoint import Client, poll
from atoll.net.keys import Keys
from atoll.wire.messages import (
    VERSION,
    AnyMessage,
    Hello,
    Missing,
    Refused,
    Welcome,
    WhoIsMissing,
    decode_untrusted,
    encode,
)

Handler: TypeAlias = Callable[[int, AnyMessage, memoryview | None], None]  # (shard, message, payload)

LOG = 0  # the shard that keeps the log
_EXPLAIN_SECONDS = 2.0  # for the log to say who is waited for
_POLL_SECONDS = 0.1  # between looks at connections that may have failed
_ASK_WHERE = 0.25  # seconds between questions where the shards are, while one is lost
_ASK_ANYWAY = 2.0  # the same, while all are silent: one may have been given up, and be elsewhere
_GREET_AGAIN = 1.0  # seconds between Hellos to a shard that has not answered: it may have been a standby


@dataclass(frozen=True)
class _Sent:
    message: AnyMessage
    payload: memoryview | None
    until: Hashable


@dataclass
class _Link:
    """The connection to one shard, and what was sent there and is not answered."""

    client: Client
    address: str
    sent: list[_Sent] = field(default_factory=list)
    welcomed: bool = False  # on this connection
    comes_back: bool = True  # it keeps a journal, as far as is known: its welcome says so
    lost_at: float | None = None  # monotonic
    greeted_at: float = field(default_factory=time.monotonic)


class Shards:
    """One connection to each shard; what comes is handed to the handler registered for its type.

    All of it runs on the thread that calls `wait`; sockets send by themselves. `timeout` is in seconds. With
    `site`, the one shard is that site's. `where()` asks the hub for the addresses, and gives None where it
    does not know them now.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        keys: Keys | None,
        *,
        run: str,
        worker: int,
        incarnation: int,
        timeout: float,
        limit: int,
        site: str = "",
        where: Callable[[], list[str] | None] = lambda: None,
    ) -> None:
        self.worker, self.incarnation, self.timeout = worker, incarnation, timeout
        self.run, self.site = run, site
        self.seconds_waited = 0.0  # in all
        self.late = False  # the run has begun without this worker, which has yet to arrive
        self.come_back = 0  # how often a shard was lost and found again
        self._keys, self._limit, self._where, self._asked_where = keys, limit, where, 0.0
        self._handlers: dict[type[AnyMessage], Handler] = {}
        self._links: list[_Link] = []
        try:
            for shard, address in enumerate(addresses):
                self._links.append(_Link(self._connect(shard, address), address))
            self._greet()
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._links)

    @property
    def addresses(self) -> list[str]:
        return [link.address for link in self._links]

    def _connect(self, shard: int, address: str) -> Client:
        """A new connection, on which the worker says who it is before all else."""
        client = Client(address, self._keys, limit=self._limit, name=self._name(shard))
        client.send(encode(self._hello))
        return client

    @property
    def _hello(self) -> Hello:
        return Hello(
            version=VERSION,
            run=self.run,
            role="worker",
            worker=self.worker,
            incarnation=self.incarnation,
        )

    def _name(self, shard: int) -> str:
        return f"the shard of site {self.site!r}" if self.site else f"shard {shard}"

    def close(self) -> None:
        for link in self._links:
            link.client.close()
        self._links.clear()

    def on(self, kind: type[AnyMessage], handler: Handler) -> None:
        """Let `handler` take messages of this kind from now on."""
        self._handlers[kind] = handler

    def send(
        self, shard: int, message: AnyMessage, payload: memoryview | None = None, until: Hashable = None
    ) -> None:
        """Send without waiting; `payload` must not change before the shard has answered.

        With `until`, it is sent again to a shard that was lost, as long as `answered(until)` is not called.
        """
        link = self._links[shard]
        if until is not None:
            link.sent.append(_Sent(message, payload, until))
        if link.lost_at is None or until is None:
            link.client.send(encode(message), payload)

    def send_all(self, message: AnyMessage, until: Hashable = None) -> None:
        for shard in range(len(self)):
            self.send(shard, message, until=until)

    def answered(self, until: Hashable, shard: int | None = None, instead: AnyMessage | None = None) -> None:
        """What was sent `until` this, to `shard` or to all, needs not be sent again; but `instead`, if the
        rest of the answer is lost."""
        for index, link in enumerate(self._links):
            if shard is None or index == shard:
                link.sent = [sent for sent in link.sent if sent.until != until]
                if instead is not None:
                    link.sent.append(_Sent(instead, None, until))

    def wait(
        self, done: Callable[[], bool], missing: Callable[[], Sequence[int]], what: str | Callable[[], str]
    ) -> float:
        """Take what comes until `done()`; returns the seconds that it took.

        `missing()` says which shards are waited for, and `what` on what, as it stands when that is told.
        Raises DeadlineError, naming both, after the timeout, PeerLostError when a shard has gone for good,
        and UserError with a shard's reason where one refuses.
        """
        start = time.monotonic()
        self._take(0.0)
        while not done():
            waited = time.monotonic() - start
            if waited > self.timeout:
                named = what if isinstance(what, str) else what()
                raise DeadlineError(self._late(missing(), named, waited, self._who_is_missing()))
            self._take(min(_POLL_SECONDS, self.timeout - waited + 0.01))
        waited = time.monotonic() - start
        self.seconds_waited += waited
        return waited

    def _take(self, timeout: float) -> None:
        """Hand out what is there, or comes within `timeout` seconds."""
        ready = poll([link.client for link in self._links], timeout)
        if not ready:
            self._look_after_connections()
        for shard, link in enumerate(self._links):
            client = link.client
            while client in ready and link.client is client and (got := client.receive(0.0)) is not None:
                self._handle(shard, decode_untrusted(got[0]), got[1])

    def _look_after_connections(self) -> None:
        """See to shards that were lost. Raises for one that refuses this worker, or will not come back."""
        lost = False  # or not found yet
        for shard, link in enumerate(self._links):
            link.client.check()
            if link.client.losses:
                self._lose(shard, link)
            lost = lost or not link.welcomed
            if not link.welcomed and time.monotonic() >= link.greeted_at + _GREET_AGAIN:
                link.greeted_at = time.monotonic()
                if link.client.connected:
                    link.client.send(encode(self._hello))
        now = time.monotonic()
        if now - self._asked_where >= (_ASK_WHERE if lost else _ASK_ANYWAY):
            addresses = self._where() if any(link.comes_back for link in self._links) else None
            self._asked_where = time.monotonic()
            for shard, address in enumerate(addresses or ()):
                if address != self._links[shard].address:
                    self._lose(shard, self._links[shard], address)

    def _lose(self, shard: int, link: _Link, address: str = "") -> None:
        """What was sent on this connection and not answered may be lost: begin another one."""
        if not link.comes_back:
            end = "its site's, and the others go on" if self.site else "the run's"
            raise PeerLostError(
                f"worker {self.worker} lost {self._name(shard)} at {link.address}: the connection broke off; "
                f"it keeps no journal (--directory), so its end is {end}: go on from a checkpoint "
                "(session.save)"
            )
        link.client.abandon()
        link.address = address or link.address
        link.lost_at = link.lost_at or time.monotonic()
        link.welcomed, link.greeted_at = False, time.monotonic()
        link.client = self._connect(shard, link.address)

    def _handle_welcome(self, shard: int, message: AnyMessage, _payload: memoryview | None) -> None:
        assert isinstance(message, Welcome)
        self.late = self.late or message.late
        link = self._links[shard]
        if message.shard not in (-1, shard) and not self.site:
            return  # another shard, which has got the lost one's old port: the hub tells the new one
        link.welcomed, link.comes_back = True, message.comes_back
        if link.lost_at is not None:
            link.lost_at = None
            self.come_back += 1
            for sent in link.sent:
                link.client.send(encode(sent.message), sent.payload)

    def _handle(self, shard: int, message: AnyMessage, payload: memoryview | None) -> None:
        if isinstance(message, Refused):
            raise UserError(f"{self._name(shard)} at {self.addresses[shard]}: {message.reason}")
        handler = self._handlers.get(type(message))
        if handler is None:
            raise RunError(f"{self._name(shard)} sent a {type(message).__name__}, which nobody asked for")
        handler(shard, message, payload)

    def _greet(self) -> None:
        """Wait for each shard's word: versions, run and rank are checked there."""
        self.on(Welcome, self._handle_welcome)
        self.wait(
            lambda: all(link.welcomed for link in self._links),
            lambda: [shard for shard, link in enumerate(self._links) if not link.welcomed],
            "their welcome",
        )

    def _who_is_missing(self) -> list[str]:
        """What the log says of who is waited for; nothing where it does not answer."""
        lines: list[list[str]] = []

        def take(_shard: int, message: AnyMessage, _payload: memoryview | None) -> None:
            assert isinstance(message, Missing)
            lines.append(message.lines)

        self.on(Missing, take)
        self.send(LOG, WhoIsMissing())
        until = time.monotonic() + _EXPLAIN_SECONDS
        while not lines and time.monotonic() < until:
            self._take(0.1)
        return lines[0] if lines else []

    def _late(self, missing: Sequence[int], what: str, waited: float, behind: Sequence[str]) -> str:
        named = [f"{self._name(shard)} at {self.addresses[shard]}{self._gone(shard)}" for shard in missing]
        who = " and ".join(named) or "a shard"
        if behind:
            who += f", which waits for {'; '.join(behind[:3])}{'; ...' if len(behind) > 3 else ''},"
        return (
            f"worker {self.worker} waited {waited:.1f} s for {who} on {what} "
            f"(deadline sync.timeout, {self.timeout:g} s; set it higher if the workers are only slow)"
        )

    def _gone(self, shard: int) -> str:
        lost_at = self._links[shard].lost_at
        if lost_at is None:
            return ""
        seconds = time.monotonic() - lost_at
        return f" (lost {seconds:.1f} s ago; `atoll server` with its --directory would bring it back)"
