"""A process's connections to the hub: one for requests, and one for heartbeats."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from atoll.core.errors import DeadlineError, PeerLostError, RunError
from atoll.core.texts import one_line
from atoll.net.endpoint import SOON, Client
from atoll.net.keys import Keys
from atoll.net.requests import MOST_REASON, Answer, RefusedError, ask, decode_from, late
from atoll.wire import messages
from atoll.wire.messages import AnyMessage, Hello, Refused, Welcome, encode

LIMIT = 2**21  # bytes of a message, as the hub's
_LISTEN_SECONDS = 0.1  # between looks at whether heartbeats are to end
_OPENING_SECONDS = 0.05  # between looks whether there is a connection again
_END_SECONDS = 5.0  # for the thread of heartbeats to end


class HubConnection:
    """The connection to the hub at `address`.

    On each new connection after a loss this side says `hello` again: the hub may be another process.
    `timeout` is in seconds, and named by the errors of a deadline. `refusal` is why the hub does not take
    this side any more.
    """

    def __init__(self, address: str, keys: Keys | None, timeout: float = 0.0) -> None:
        self.client = Client(address, keys, limit=LIMIT, name="hub")
        self.hello: Hello | None = None  # None: the hub has not let this side in
        self.refusal = ""
        self.timeout = timeout
        self._losses = 0  # connections lost before the last Hello

    def join(self, hello: Hello, what: str, deadline: float) -> Welcome:
        """Say Hello until there is an answer: a hub that was started again meanwhile has heard nothing.
        Raises the errors of `ask`."""
        welcome = self.ask(hello, Welcome, what, deadline)
        self.hello = hello
        return welcome

    def ask(
        self,
        message: AnyMessage,
        expected: type[Answer],
        what: str,
        deadline: float,
        number: int | None = None,
    ) -> Answer:
        """Ask; after a lost connection, say Hello on the new one and ask again.

        A message that was sent as a connection was lost may go out on the next one, beside its repetition:
        with `number`, only an answer with that number counts. A message that had not left by then goes out
        before the Hello, and the hub takes it for a stranger's: one refusal after a loss may be of this.
        Raises DeadlineError, of the whole wait, and RefusedError.
        """
        until, stale = time.monotonic() + deadline, False
        while True:
            self.check()
            try:
                stale = stale or self._is_new
                self.introduce(max(0.0, until - time.monotonic()))
                left = max(0.0, until - time.monotonic())
                return ask(self.client, message, expected, left, what, number=number)[0]
            except DeadlineError:
                raise DeadlineError(late(self.client, self.timeout or deadline, what)) from None
            except (PeerLostError, RefusedError) as error:
                if self._is_new:
                    continue
                if not (stale and isinstance(error, RefusedError)):
                    raise
                stale = False

    def check(self) -> None:
        """Raise RunError if the hub does not take this side any more."""
        if self.refusal:
            raise RunError(f"hub at {self.client.address}: {self.refusal}")

    @property
    def _is_new(self) -> bool:
        """True if this side has said no Hello on the present connection."""
        self.client.check()
        return self.client.losses != self._losses

    def introduce(self, deadline: float) -> None:
        """Say Hello on a new connection, and wait for the hub's welcome."""
        if self._is_new:
            self._losses = self.client.losses
            if self.hello is not None:
                ask(self.client, self.hello, Welcome, deadline, "its welcome on a new connection")

    def greet(self, hello: Hello, *, again: bool = False) -> bool:
        """Say `hello`, without waiting, on a new connection or if `again`; return whether it was sent."""
        if self.client.losses == self._losses and not again:
            return False
        self._losses = self.client.losses
        self.client.send(encode(hello))
        return True

    def say(self, message: AnyMessage) -> None:
        """Send a message to the hub, if there is a connection."""
        if self.client.connected:
            self.client.send(encode(message))

    def take(self) -> Iterator[AnyMessage]:
        """Yield the messages that no request waits for. Raises RunError for bytes that are no message."""
        while (received := self.client.receive(0)) is not None:
            message = decode_from(self.client, received[0])
            if not isinstance(message, Refused):
                yield message
            elif message.request != messages.WhereAreShards.__name__:  # which may be asked before Hello
                self.refusal = one_line(message.reason, MOST_REASON)


class HubHeartbeats:
    """A thread, with a connection of its own, that sends heartbeats to the hub: the other threads may be busy
    for minutes.

    Args:
        beat: called while the connection stands; sends what is due over it, or at once if its second argument
            is true, and returns the seconds until there is more to send.
        hear: takes a message of the hub; returns whether heartbeats are to go on.
        look: called again and again, whether the connection stands or not.
    """

    def __init__(
        self,
        address: str,
        keys: Keys | None,
        beat: Callable[[Client, bool], float],
        hear: Callable[[AnyMessage], bool],
        look: Callable[[Client], None] = lambda _link: None,
    ) -> None:
        self._beat, self._hear, self._look = beat, hear, look
        self._at_once, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(address, keys), name="atoll-heartbeat", daemon=True
        )

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def at_once(self) -> None:
        """Send the next heartbeat without waiting."""
        self._at_once.set()

    def stop(self) -> None:
        """End the heartbeats, if they have begun; ending twice does no harm."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(_END_SECONDS)

    def _run(self, address: str, keys: Keys | None) -> None:
        with Client(address, keys, limit=LIMIT, name="hub", reconnect=SOON) as link:
            pause = 0.0
            while self._listen(link, pause):
                pause = _OPENING_SECONDS
                if link.connected:  # unsent heartbeats would only heap up
                    at_once = self._at_once.is_set()
                    self._at_once.clear()  # before `beat` reads the state to report
                    pause = self._beat(link, at_once)
                self._look(link)

    def _listen(self, link: Client, seconds: float) -> bool:
        """Take the hub's messages for so long, or until a heartbeat is wanted at once; return whether to
        go on."""
        until = time.monotonic() + seconds
        while not self._stop.is_set():
            if self._at_once.is_set() and link.connected:
                return True
            self._look(link)
            left = until - time.monotonic()
            received = link.receive(max(0.0, min(left, _LISTEN_SECONDS)))
            if received is None:
                if left <= 0:
                    return True
                continue
            with contextlib.suppress(messages.WireError):
                if not self._hear(messages.decode_untrusted(received[0])):
                    return False
        return False
