"""A worker's connections to the shards of the parameter server, and what it waits for there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
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
_POLL_SECONDS = 0.5  # between looks at connections that may have failed


class Shards:
    """One connection to each shard; what comes is handed to the handler registered for its type.

    All of it runs on the thread that calls `wait`; sockets send by themselves. `timeout` is in seconds. With
    `site`, the one shard is that site's.
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
    ) -> None:
        self.worker, self.incarnation, self.timeout = worker, incarnation, timeout
        self.run, self.site = run, site
        self.addresses = list(addresses)
        self.seconds_waited = 0.0  # in all
        self.late = False  # the run has begun without this worker, which has yet to arrive
        self._handlers: dict[type[AnyMessage], Handler] = {}
        self._clients = [
            Client(address, keys, limit=limit, name=self._name(index))
            for index, address in enumerate(addresses)
        ]
        try:
            self._greet()
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._clients)

    def _name(self, shard: int) -> str:
        return f"the shard of site {self.site!r}" if self.site else f"shard {shard}"

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self._clients.clear()

    def on(self, kind: type[AnyMessage], handler: Handler) -> None:
        """Let `handler` take messages of this kind from now on."""
        self._handlers[kind] = handler

    def send(self, shard: int, message: AnyMessage, payload: memoryview | None = None) -> None:
        """Send without waiting; `payload` must not change before the shard has answered."""
        self._clients[shard].send(encode(message), payload)

    def send_all(self, message: AnyMessage) -> None:
        for shard in range(len(self)):
            self.send(shard, message)

    def wait(
        self, done: Callable[[], bool], missing: Callable[[], Sequence[int]], what: str | Callable[[], str]
    ) -> float:
        """Take what comes until `done()`; returns the seconds that it took.

        `missing()` says which shards are waited for, and `what` on what, as it stands when that is told.
        Raises DeadlineError, naming both, after the timeout, PeerLostError when a shard has gone, and
        UserError with a shard's reason where one refuses.
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
        ready = poll(self._clients, timeout)
        if not ready:
            self._check_connections()
        for client in ready:
            while (received := client.receive(0.0)) is not None:
                header, payload = received
                self._handle(self._clients.index(client), decode_untrusted(header), payload)

    def _check_connections(self) -> None:
        """Raise for a shard that refuses this worker, or has gone: what was sent to it is lost."""
        for shard, client in enumerate(self._clients):
            client.check()
            if client.losses:
                end = "its site's, and the others go on" if self.site else "the run's"
                raise PeerLostError(
                    f"worker {self.worker} lost {self._name(shard)} at {self.addresses[shard]}: the "
                    f"connection broke off; a shard's end is {end}, so go on from a checkpoint (session.save)"
                )

    def _handle(self, shard: int, message: AnyMessage, payload: memoryview | None) -> None:
        if isinstance(message, Refused):
            raise UserError(f"{self._name(shard)} at {self.addresses[shard]}: {message.reason}")
        handler = self._handlers.get(type(message))
        if handler is None:
            raise RunError(f"{self._name(shard)} sent a {type(message).__name__}, which nobody asked for")
        handler(shard, message, payload)

    def _greet(self) -> None:
        """Say hello to each shard: versions, run and rank are checked there."""
        welcome: set[int] = set()

        def take(shard: int, message: AnyMessage, _payload: memoryview | None) -> None:
            assert isinstance(message, Welcome)
            self.late = self.late or message.late
            welcome.add(shard)

        self.on(Welcome, take)
        self.send_all(
            Hello(
                version=VERSION,
                run=self.run,
                role="worker",
                worker=self.worker,
                incarnation=self.incarnation,
            )
        )
        self.wait(
            lambda: len(welcome) == len(self),
            lambda: [shard for shard in range(len(self)) if shard not in welcome],
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
        named = [f"{self._name(shard)} at {self.addresses[shard]}" for shard in missing]
        who = " and ".join(named) or "a shard"
        if behind:
            who += f", which waits for {'; '.join(behind[:3])}{'; ...' if len(behind) > 3 else ''},"
        return (
            f"worker {self.worker} waited {waited:.1f} s for {who} on {what} "
            f"(deadline sync.timeout, {self.timeout:g} s; set it higher if the workers are only slow)"
        )
