"""A client's link to the shards of a parameter server: a worker's to its shards, a site's to the global ones.

A shard that keeps a journal may be killed and started again, here or elsewhere. Until then its clients wait
for it. They then send again what it has not answered (`net/returning.py`); a message that comes twice counts
once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import TypeAlias

from atoll.core.config import LinkOptions
from atoll.core.errors import DeadlineError, MismatchError, RunError, UserError
from atoll.core.events import LinkFigures
from atoll.core.texts import one_line
from atoll.exchange.parties import Parties
from atoll.exchange.silence import Silence
from atoll.exchange.waits import ClientWaits, Wait
from atoll.net.endpoint import Client, Endpoint, poll
from atoll.net.keys import Keys
from atoll.net.requests import MOST_REASON, decode_from
from atoll.net.returning import Payload, ReturningLinks
from atoll.net.tunnel import Lossy
from atoll.wire.messages import (
    AnyMessage,
    Hello,
    Mismatch,
    Missing,
    Ping,
    Refused,
    Welcome,
    WhoIsMissing,
)

Handler: TypeAlias = Callable[[int, AnyMessage, memoryview | None], None]  # (shard, message, payload)

LOG = 0  # the shard that keeps the log
LARGEST_FRAME = 2**31 - 1  # bytes; a shard is as trusted as this process's own code
_EXPLAIN_SECONDS = 2.0  # for the log's answer, once a deadline has passed, on whom it waits for
_BEHIND_SECONDS = 0.001  # between looks at the connections, while payloads wait for room
_POLL_SECONDS = 0.1  # between looks at connections that may have failed


class ShardLink:
    """One connection to each shard. A message that comes is handed to the handler of its type.

    Handlers run on the thread that calls `wait` or `take`. Sockets send by themselves.

    Attributes:
        seconds_waited: seconds of all waits.
        late: True if the run has begun without this side, which has yet to enter it.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        keys: Keys | None,
        *,
        hello: Hello,
        parties: Parties,
        timeout: float,
        limit: int = LARGEST_FRAME,
        where: Callable[[], list[str] | None] = lambda: None,
        tell: Callable[[str], None] = lambda _line: None,
        meanwhile: Callable[[], None] = lambda: None,
        beside: Callable[[], Sequence[Endpoint]] = tuple,
        asks_every: float | None = None,
        options: LinkOptions | None = None,
    ) -> None:
        """Begin to connect; `greet` waits for the welcomes.

        Args:
            hello: the first message of this side on each connection.
            timeout: the deadline of each wait, in seconds.
            limit: most bytes of a message from a shard.
            where: returns the shards' addresses as the hub knows them, or None if it does not know them now.
            tell: called with a line for people when a shard is lost, back, or silent while it is waited for.
            meanwhile: called again and again during a wait; an exception ends the wait.
            beside: returns endpoints; when one of them is ready, `meanwhile` is called at once.
            asks_every: seconds between questions to the log, during a wait, on whom it waits for; None asks
                only once a deadline has passed.
            options: how the connections are made.
        """
        self.hello, self.timeout = hello, timeout
        self.options = options or LinkOptions()
        self.seconds_waited = 0.0
        self.late = False
        self._keys, self._limit, self._parties = keys, limit, parties
        self._where, self._tell, self._meanwhile, self._beside = where, tell, meanwhile, beside
        self._asks_every = asks_every
        self._handlers: dict[type, Handler] = {
            Welcome: self._handle_welcome,
            Missing: self._handle_missing,
            Ping: ignored,
        }
        self.waits = ClientWaits(parties, lambda shard: f"{self._named(shard)}{self._links.gone(shard)}")
        self._links = self._connect(addresses)

    def _connect(self, addresses: Sequence[str]) -> ReturningLinks:
        self._silence = Silence(len(addresses))
        sites = [self.hello.site] if self.hello.site else []
        return ReturningLinks(
            addresses,
            self._keys,
            hello=self.hello,
            limit=self._limit,
            name=self._parties.shard,
            ends=lambda shard: self._parties.lost_for_good(shard, self.addresses[shard]),
            where=self._where,
            is_it=lambda shard, welcome: welcome.shard in (-1, shard) and welcome.sites == sites,
            lost=self._tell_lost,
            back=self._tell_back,
            link=self.options,
        )

    def greet(self) -> None:
        """Wait for each shard's welcome, which checks versions, run and rank.

        Closes the link and raises as `wait` does if one does not come.
        """
        try:
            self.wait(lambda: not self._links.strangers, lambda: self._links.strangers, "their welcome")
        except BaseException:
            self.close()
            raise

    def move(self, hello: Hello) -> None:
        """Connect anew, to speak for another contributor from now on: a group of which this side is a member.

        Answers to earlier messages are not waited for any more.
        """
        addresses = self.addresses
        self.close()
        self.hello = hello
        self._links = self._connect(addresses)
        self.greet()
        self.late = False  # a group's members take part already

    def close(self) -> None:
        """Close the connections. No message comes any more, and none is expected."""
        self.waits.came()
        self._links.close()

    def __len__(self) -> int:
        return len(self._links)

    @property
    def addresses(self) -> list[str]:
        return self._links.addresses

    @property
    def clients(self) -> list[Client]:
        return self._links.clients

    @property
    def incarnation(self) -> int:
        return self.hello.incarnation

    @property
    def come_back(self) -> int:
        """The number of times that a shard was lost and found again."""
        return self._links.come_back

    def figures(self) -> dict[int, LinkFigures]:
        """Return the figures of the open loss-tolerant connections, by shard."""
        return self._links.figures()

    # -- sending ---------------------------------------------------------------------------------------

    def send(
        self,
        shard: int,
        message: AnyMessage,
        payload: Payload = None,
        until: Hashable = None,
        lossy: Lossy | None = None,
    ) -> None:
        """Send a message without waiting.

        Args:
            payload: must not change before the shard has answered. If it is a function, the payload is made
                when there is room for it; see `net/returning.py`.
            until: a topic. Until `answered(until)` is called, the message is sent again to a shard that was
                lost.
            lossy: parts of the payload may be lost, and the shard's answer says which.
        """
        self._links.send(shard, message, payload, until, lossy)

    def answered(self, until: Hashable, shard: int | None = None, instead: AnyMessage | None = None) -> None:
        """Mark messages of a topic, to `shard` or to all, as answered: they are not sent again.

        Args:
            instead: sent to a shard that is lost before the rest of its answer has come.
        """
        self._links.answered(until, shard, instead)

    # -- receiving -------------------------------------------------------------------------------------

    def on(self, kind: type[AnyMessage], handler: Handler) -> None:
        """Let `handler` take messages of this type from now on."""
        self._handlers[kind] = handler

    def wait(
        self, done: Callable[[], bool], missing: Callable[[], Sequence[int]], what: str | Callable[[], str]
    ) -> float:
        """Handle messages until `done()`; return the seconds that it took.

        Args:
            missing: returns the shards that are waited for.
            what: what is waited for, in words, or a function that returns it.

        Raises DeadlineError, naming shards and words, after the timeout; PeerLostError for a shard that has
        gone for good; UserError, with the shard's reason, if one refuses.
        """
        wait = self.waits.blocking = self.waits.new(what, missing)
        try:
            self._take(0.0)
            while not done():
                waited = wait.seconds
                if waited > self.timeout:
                    raise DeadlineError(self._explain(wait))
                self._ask_now_and_then(wait)
                if self._silence.is_long(waited):
                    self._look_for_silence(wait)
                self._take(min(_POLL_SECONDS, self.timeout - waited + 0.01), beside=self._beside())
                self._meanwhile()
        finally:
            self.waits.blocking = None
        self._silence.over()
        self.seconds_waited += wait.seconds
        return wait.seconds

    def take(self, grace: float = 0.0) -> None:
        """Handle the messages that have come, without waiting.

        Args:
            grace: seconds for which a shard that will not come back may be gone before the run ends.
        """
        self._take(0.0, grace=grace)
        if self.waits.expected is not None:
            self._ask_now_and_then(self.waits.expected)

    def _take(self, timeout: float, *, beside: Sequence[Endpoint] = (), grace: float = 0.0) -> None:
        """Handle the messages that are there, or that come within `timeout` seconds."""
        self._links.pump()
        if self._links.is_behind:
            timeout = min(timeout, _BEHIND_SECONDS)
        clients: list[Endpoint] = [*self._links.clients]
        ready = [each for each in poll([*clients, *beside], timeout) if each in clients]
        if not ready:
            self._links.check(grace)
        self._links.take(ready, self._handle)

    def _handle(self, shard: int, header: bytes, payload: memoryview | None) -> None:
        away = self._silence.hear(shard, lost=bool(self._links.gone(shard)))
        if away is not None:
            self._tell(self._parties.back(shard, self.addresses[shard], away, "answers again"))
        message = decode_from(self.clients[shard], header)
        handler = self._handlers.get(type(message))
        if isinstance(message, Refused):
            reason = one_line(message.reason, MOST_REASON)
            raise UserError(f"{self._named(shard)}: {self._parties.reads(reason)}")
        if isinstance(message, Mismatch) and handler is None and shard == LOG:
            raise MismatchError(one_line(message.line, MOST_REASON))
        if handler is None:
            sent = type(message).__name__
            raise RunError(f"{self._named(shard)} sent a {sent}, which nobody asked for")
        handler(shard, message, payload)

    def _handle_welcome(self, shard: int, message: AnyMessage, _payload: memoryview | None) -> None:
        assert isinstance(message, Welcome)
        self.late = self.late or message.late
        self._links.handle_welcome(shard, message)

    def ask(
        self,
        shards: Sequence[int],
        message: AnyMessage,
        until: Hashable,
        came: Collection[int],
        what: str,
    ) -> None:
        """Send a message to these shards, and wait until all of them are in `came`. Raises as `wait` does.

        Args:
            came: shards that have answered; a handler of the answer adds them.
        """
        for shard in shards:
            self.send(shard, message, until=until)
        self.wait(
            lambda: all(shard in came for shard in shards),
            lambda: [shard for shard in shards if shard not in came],
            what,
        )
        self.answered(until)

    # -- shards that are waited for, silent, lost or back ----------------------------------------------

    def _ask_now_and_then(self, wait: Wait) -> None:
        """Ask the log whom it waits for, at intervals, so that processes that wait for this side learn of
        it."""
        if self._asks_every is not None and wait.asks(min(self._asks_every, self.timeout / 4)):
            self.send(LOG, WhoIsMissing())

    def _handle_missing(self, shard: int, message: AnyMessage, _payload: memoryview | None) -> None:
        assert isinstance(message, Missing)
        if shard == LOG:  # other shards were only asked for a sign of life
            self.waits.hear(message.lines)

    def _look_for_silence(self, wait: Wait) -> None:
        """Ask silent shards that are waited for to give a sign of life; tell people of those that do not."""
        for shard in wait.missing():
            if self._links.gone(shard):
                continue  # people were told
            found = self._silence.look(shard, wait.since)
            if found == "ask":
                self.send(shard, WhoIsMissing())
            elif found == "tell":
                seconds, address = self._silence.lasted(shard), self.addresses[shard]
                self._tell(self._parties.silent(shard, address, wait.named, seconds, self.timeout))

    def _tell_lost(self, shard: int) -> None:
        self._silence.lose(shard)
        self._tell(self._parties.lost(shard, self.addresses[shard]))

    def _tell_back(self, shard: int, seconds: float) -> None:
        """Tell people that a shard is back, after the time since its connection broke, or since it fell
        silent.

        A shard that stood still and was replaced keeps its connection until it is replaced.
        """
        seconds = max(seconds, self._silence.lasted(shard))
        self._tell(self._parties.back(shard, self.addresses[shard], seconds))

    def _explain(self, wait: Wait) -> str:
        """Return the line of a deadline that has passed. Asks the log whom it waits for, if it was not asked
        yet."""
        seconds = wait.seconds
        if self._asks_every is None:
            self.waits.behind = None
            self.send(LOG, WhoIsMissing())
            until = time.monotonic() + _EXPLAIN_SECONDS
            while self.waits.behind is None and time.monotonic() < until:
                self._take(_POLL_SECONDS)
        return self.waits.late(wait, seconds, self.timeout)

    def _named(self, shard: int) -> str:
        return f"{self._parties.shard(shard)} at {self.addresses[shard]}"


def ignored(_shard: int, _message: AnyMessage, _payload: memoryview | None) -> None:
    """Ignore a message that nobody waits for."""
