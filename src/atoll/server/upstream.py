"""A site's connections to the global shards, where the whole site is one worker.

What is sent goes out at once; what comes is handed to the handler registered for its type. `wait` blocks, and
serves the site's own workers meanwhile. A global shard that keeps a journal is waited for while it is gone,
as workers do (`net/returning.py`).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from atoll.core.config import LinkOptions
from atoll.core.errors import DeadlineError, RunError, UserError
from atoll.core.events import LinkFigures
from atoll.core.texts import one_line
from atoll.net.endpoint import Client, Endpoint, poll
from atoll.net.keys import Keys
from atoll.net.requests import MOST_REASON
from atoll.net.returning import ReturningLinks
from atoll.net.tunnel import Lossy
from atoll.wire.messages import (
    VERSION,
    AnyMessage,
    Committed,
    Hello,
    Mean,
    Missing,
    Parameters,
    Ping,
    Ready,
    Refused,
    State,
    StateEnd,
    Welcome,
    WhoIsMissing,
    WireError,
    decode_untrusted,
)

Handler: TypeAlias = Callable[[int, AnyMessage, memoryview | None], None]  # (shard, message, payload)

_ANSWERS = (Ready, Committed, Mean, Parameters, State, StateEnd)

LOG = 0  # the global shard that keeps the log
LARGEST_FRAME = 2**31 - 1  # bytes
_LOOK_SECONDS = 0.25  # between looks at connections and at the time
_ASK_SECONDS = 1.0  # of waiting, before the log is asked for whom; and before it is asked again
_GRACE_SECONDS = 2.0  # at the end of a run all are told to stop, and the global shards may be the first


@dataclass(frozen=True)
class Place:
    """A site among the run's `names`, and its shard's incarnation."""

    index: int
    names: list[str]
    incarnation: int

    @property
    def name(self) -> str:
        return self.names[self.index]


@dataclass
class _Wait:
    what: str
    missing: Callable[[], Sequence[int]]  # the global shards that have not answered
    since: float  # monotonic
    asked: float


class Upstream:
    """One connection to each global shard. `timeout` in seconds is the deadline of each wait. `where()` gives
    the addresses as the hub told them last, and asks it anew. `tell(line)` is told of global shards that are
    lost, and back. `link` is how the connections are made.

    `door` is where the site's own workers come in: `meanwhile()` serves them while a wait goes on, tells
    whether it would take more, and ends the wait by raising.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        keys: Keys | None,
        *,
        run: str,
        place: Place,
        timeout: float,
        door: Endpoint,
        meanwhile: Callable[[], bool],
        where: Callable[[], list[str] | None] = lambda: None,
        tell: Callable[[str], None] = lambda _line: None,
        link: LinkOptions | None = None,
    ) -> None:
        self.place, self.timeout = place, timeout
        self._door, self._meanwhile = door, meanwhile
        # The site's shard that was here before may have asked for what comes now.
        self._handlers: dict[type, Handler] = dict.fromkeys(_ANSWERS, _ignored)
        self._handlers |= {Welcome: self._handle_welcome, Missing: self._handle_missing, Ping: _ignored}
        self._wait: _Wait | None = None  # that blocks
        self._expected: _Wait | None = None
        self._behind: list[str] = []  # whom the log waits for, as it said last
        self._left = False
        hello = Hello(
            version=VERSION,
            run=run,
            role="worker",
            worker=place.index,
            incarnation=place.incarnation,
            pid=os.getpid(),
        )
        self._links = ReturningLinks(
            addresses,
            keys,
            hello=hello,
            limit=LARGEST_FRAME,
            name=lambda shard: f"global shard {shard}",
            ends=self._ends,
            where=where,
            is_it=lambda shard, welcome: welcome.shard in (-1, shard) and not welcome.sites,
            lost=lambda shard: tell(f"{self._name(shard)} is lost, and waited for"),
            back=lambda shard, seconds: tell(f"{self._name(shard)} is back, after {seconds:.1f} s"),
            link=link or LinkOptions(),
        )
        self._count = len(addresses)

    def __len__(self) -> int:
        return self._count

    @property
    def addresses(self) -> list[str]:
        return self._links.addresses

    @property
    def clients(self) -> list[Client]:
        return self._links.clients

    @property
    def come_back(self) -> int:
        """How often a global shard was lost and found again."""
        return self._links.come_back

    def close(self) -> None:
        self._links.close()

    def leave(self) -> None:
        """The site has no workers any more: what the global shards say from now on is nothing to it."""
        self._left, self._expected = True, None
        self.close()

    def on(self, kind: type[AnyMessage], handler: Handler) -> None:
        """Let `handler` take messages of this kind from now on."""
        self._handlers[kind] = handler

    def send(
        self,
        shard: int,
        message: AnyMessage,
        payload: memoryview | None = None,
        until: Hashable = None,
        lossy: Lossy | None = None,
    ) -> None:
        """Send without waiting; nobody may change `payload` any more. With `until`, it is sent again to a
        global shard that was lost, as long as `answered(until)` is not called. With `lossy`, parts of the
        payload may be lost, and the answer tells which."""
        self._links.send(shard, message, payload, until, lossy)

    def block_elements(self, dtype: str) -> int:
        """Elements in a block of a lossy payload."""
        return self._links.block_elements(dtype)

    def links(self) -> dict[int, LinkFigures]:
        """How the loss-tolerant links do, by global shard: those that are open."""
        return self._links.links()

    def send_all(self, message: AnyMessage, until: Hashable = None) -> None:
        for shard in range(len(self)):
            self.send(shard, message, until=until)

    def answered(self, until: Hashable) -> None:
        """What was sent `until` this needs not be sent again."""
        self._links.answered(until)

    # -- waiting ------------------------------------------------------------------------------------------

    def wait(self, done: Callable[[], bool], missing: Callable[[], Sequence[int]], what: str) -> None:
        """Take what comes until `done()`; `missing()` says which global shards have yet to answer.

        Raises DeadlineError, naming them and `what`, PeerLostError when one has gone, and UserError with the
        reason of one that refuses.
        """
        wait = self._wait = self._new(what, missing)
        try:
            self._take()
            room = True
            while not done():
                if time.monotonic() - wait.since > self.timeout:
                    raise DeadlineError(self._late(wait))
                self._ask(wait)
                poll([*self.clients, *([self._door] if room else [])], _LOOK_SECONDS)
                self._take()
                self._links.check()
                room = self._meanwhile()
        finally:
            self._wait = None

    def expect(self, what: str) -> None:
        """An answer of the log's comes in its time, and is not waited for here: `came` ends it, or the
        deadlines of the site's workers."""
        self._expected = self._new(what, lambda: [LOG])

    def came(self) -> None:
        """What was expected has come."""
        self._expected = None

    def poll(self) -> None:
        """Take what has come, where nobody waits; raises as `wait` does."""
        if self._left:
            return
        self._take()
        self._links.check(_GRACE_SECONDS)
        if self._expected is not None:
            self._ask(self._expected)

    def waiting_for(self) -> list[str]:
        """Whom the site waits for and on what, in words; empty where it does not."""
        wait = self._wait or self._expected
        return [self._waiting_line(wait)] if wait is not None else []

    def _new(self, what: str, missing: Callable[[], Sequence[int]]) -> _Wait:
        self._behind = []
        now = time.monotonic()
        return _Wait(what, missing, now, now)

    def _ask(self, wait: _Wait) -> None:
        """Now and then, have the log say whom it waits for, so that the site's workers are told at once."""
        now = time.monotonic()
        if now - wait.asked > min(_ASK_SECONDS, self.timeout / 4):
            wait.asked = now
            self.send(LOG, WhoIsMissing())

    def _handle_missing(self, _shard: int, message: AnyMessage, _payload: memoryview | None) -> None:
        assert isinstance(message, Missing)
        self._behind = [in_sites(line, self.place.names) for line in message.lines]

    def _late(self, wait: _Wait) -> str:
        return (
            f"site {self.place.name!r} waited {time.monotonic() - wait.since:.1f} s for {self._who(wait)} on "
            f"{wait.what} (deadline --timeout, {self.timeout:g} s; set it higher if the sites are only slow)"
        )

    def _waiting_line(self, wait: _Wait) -> str:
        return f"{self._who(wait)} on {wait.what} (for {time.monotonic() - wait.since:.1f} s so far)"

    def _who(self, wait: _Wait) -> str:
        missing = wait.missing()
        who = " and ".join(f"{self._name(shard)}{self._links.gone(shard)}" for shard in missing[:4])
        who = who or "a global shard"
        if self._behind:
            behind = self._behind
            who += f", which waits for {'; '.join(behind[:3])}{'; ...' if len(behind) > 3 else ''},"
        return who

    # -- what comes ---------------------------------------------------------------------------------------

    def _take(self) -> None:
        self._links.take(self.clients, self._handle)

    def _handle_welcome(self, shard: int, message: AnyMessage, _payload: memoryview | None) -> None:
        assert isinstance(message, Welcome)
        self._links.handle_welcome(shard, message)

    def _handle(self, shard: int, header: bytes, payload: memoryview | None) -> None:
        try:
            message = decode_untrusted(header)
        except WireError as error:
            raise RunError(f"{self._name(shard)} sent {error}") from None
        if isinstance(message, Refused):
            reason = in_sites(one_line(message.reason, MOST_REASON), self.place.names)
            raise UserError(f"{self._name(shard)} refused: {reason}")
        handler = self._handlers.get(type(message))
        if handler is None:
            raise RunError(f"{self._name(shard)} sent a {type(message).__name__}, which nobody asked for")
        handler(shard, message, payload)

    def _ends(self, shard: int) -> str:
        return (
            f"site {self.place.name!r} lost {self._name(shard)}: the connection broke off; it keeps no "
            "journal (--directory), so its end is the run's"
        )

    def _name(self, shard: int) -> str:
        return f"global shard {shard} at {self.addresses[shard]}"


def in_sites(line: str, names: Sequence[str]) -> str:
    """A global shard's line, to which the sites are workers, with their names."""

    def name(found: re.Match[str]) -> str:
        index = int(found[1])
        return f"site {names[index]!r}" if index < len(names) else found[0]

    return re.sub(r"\bworker (\d+)\b", name, line).replace(" workers, to join", " sites, to join")


def _ignored(_shard: int, _message: AnyMessage, _payload: memoryview | None) -> None:
    """Nobody has asked for it, or knows it by what comes with it."""
