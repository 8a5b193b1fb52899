"""A worker's connections to the shards of the parameter server, and what it waits for there.

A shard that keeps a journal may be killed and started again, here or elsewhere. Until then a worker waits for
it, and what it has sent and has no answer to it sends again (`net/returning.py`): what comes twice counts
once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from atoll.core.config import LinkOptions
from atoll.core.errors import DeadlineError, MismatchError, PeerLostError, RunError, UserError
from atoll.core.events import LinkFigures
from atoll.core.texts import one_line
from atoll.net.endpoint import poll
from atoll.net.keys import Keys
from atoll.net.requests import MOST_REASON, RefusedError, decode_from
from atoll.net.returning import Payload, ReturningLinks
from atoll.net.tunnel import Lossy
from atoll.wire.messages import (
    VERSION,
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
_EXPLAIN_SECONDS = 2.0  # for the log to say who is waited for
_BEHIND_SECONDS = 0.001  # the same, while payloads wait for room to be made
_POLL_SECONDS = 0.1  # between looks at connections that may have failed
_ASK_AFTER = 2.0  # seconds that a shard is waited for, and says nothing, until it is asked for a sign of life
_SILENCE = 3.0  # seconds without an answer to that, after which people are told


@dataclass
class _Heard:
    """When a shard said something last, and when it was asked for a sign of life that has not come yet;
    monotonic. `told`: that it is silent. `missed_at`: since when it has been, until what it is waited for has
    come."""

    at: float = 0.0
    asked_at: float | None = None
    told: bool = False
    missed_at: float | None = None


class Shards:
    """One connection to each shard; what comes is handed to the handler registered for its type.

    All of it runs on the thread that calls `wait`; sockets send by themselves. `timeout` is in seconds. With
    `site`, the one shard is that site's. `where()` asks the hub for the addresses, and gives None where it
    does not know them now. `tell(line)` is called when a shard is lost, or is silent where it is waited for,
    and when it is back. `link` is how the connections are made.
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
        tell: Callable[[str], None] = lambda _line: None,
        link: LinkOptions | None = None,
    ) -> None:
        self.link = link or LinkOptions()
        self.worker, self.incarnation, self.timeout = worker, incarnation, timeout
        self.run, self.site = run, site
        self.seconds_waited = 0.0  # in all
        self.watch: Callable[[], None] = lambda: None  # called while it waits; what it raises ends the wait
        self.late = False  # the run has begun without this worker, which has yet to arrive
        self._where, self._tell = where, tell
        self._handlers: dict[type[AnyMessage], Handler] = {Missing: _nothing}
        self._heard = [_Heard() for _ in addresses]
        self._keys, self._limit = keys, limit
        self._connect(addresses, worker)

    def move(self, contributor: int, incarnation: int) -> None:
        """Speak for another contributor from now on, with new connections: a group, of which this worker is a
        member. Nothing that was sent is waited for any more."""
        addresses = self.addresses
        self._links.close()
        self.incarnation, self._heard = incarnation, [_Heard() for _ in addresses]
        self._connect(addresses, contributor, self.worker)
        self.late = False  # a group's members take part already

    def _connect(self, addresses: Sequence[str], contributor: int, member: int = 0) -> None:
        hello = Hello(
            version=VERSION,
            run=self.run,
            role="worker",
            worker=contributor,
            incarnation=self.incarnation,
            site=self.site,
            member=member,
        )
        self._links = ReturningLinks(
            addresses,
            self._keys,
            hello=hello,
            limit=self._limit,
            name=self._name,
            ends=self._ends,
            where=self._where_they_are,
            is_it=lambda shard, welcome: (
                welcome.shard in (-1, shard) and welcome.sites == [self.site] * bool(self.site)
            ),
            lost=self._tell_lost,
            back=self._tell_back,
            link=self.link,
        )
        try:
            self._greet()
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._links)

    @property
    def addresses(self) -> list[str]:
        return self._links.addresses

    @property
    def come_back(self) -> int:
        """How often a shard was lost and found again."""
        return self._links.come_back

    def _name(self, shard: int) -> str:
        return f"the shard of site {self.site!r}" if self.site else f"shard {shard}"

    def _ends(self, shard: int) -> str:
        end = "its site's, and the others go on" if self.site else "the run's"
        return (
            f"worker {self.worker} lost {self._name(shard)} at {self.addresses[shard]}: the connection broke "
            f"off; it keeps no journal (--directory), so its end is {end}: go on from a checkpoint "
            "(session.save)"
        )

    def _where_they_are(self) -> list[str] | None:
        """The addresses, if the hub knows them; a site that has ended has none any more."""
        try:
            return self._where()
        except RefusedError as error:
            if not self.site:
                raise
            raise PeerLostError(
                f"worker {self.worker} lost {self._name(LOG)} at {self.addresses[LOG]}: {error}; the others "
                "go on"
            ) from None

    def close(self) -> None:
        self._links.close()

    def on(self, kind: type[AnyMessage], handler: Handler) -> None:
        """Let `handler` take messages of this kind from now on."""
        self._handlers[kind] = handler

    def send(
        self,
        shard: int,
        message: AnyMessage,
        payload: Payload = None,
        until: Hashable = None,
        lossy: Lossy | None = None,
    ) -> None:
        """Send without waiting; `payload` must not change before the shard has answered. One that is made
        leaves while this side waits: see `net/returning.py`.

        With `until`, it is sent again to a shard that was lost, as long as `answered(until)` is not called.
        With `lossy`, parts of the payload may be lost, and the shard's answer tells which.
        """
        self._links.send(shard, message, payload, until, lossy)

    def links(self) -> dict[int, LinkFigures]:
        """How the loss-tolerant links do, by shard: those that are open."""
        return self._links.links()

    def block_elements(self, dtype: str) -> int:
        """Elements in a block of a lossy payload."""
        return self._links.block_elements(dtype)

    def send_all(self, message: AnyMessage, until: Hashable = None) -> None:
        for shard in range(len(self)):
            self.send(shard, message, until=until)

    def answered(self, until: Hashable, shard: int | None = None, instead: AnyMessage | None = None) -> None:
        """What was sent `until` this, to `shard` or to all, needs not be sent again; but `instead`, if the
        rest of the answer is lost."""
        self._links.answered(until, shard, instead)

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
            if waited > _ASK_AFTER and not done():
                self._look_for_silence(start, missing(), what)
            self._take(min(_POLL_SECONDS, self.timeout - waited + 0.01))
            self.watch()
        for heard in self._heard:
            heard.missed_at = None
        waited = time.monotonic() - start
        self.seconds_waited += waited
        return waited

    def take(self) -> None:
        """Hand out what has come, without waiting."""
        self._take(0.0)

    def _take(self, timeout: float) -> None:
        """Hand out what is there, or comes within `timeout` seconds."""
        self._links.pump()
        if self._links.is_behind:
            timeout = min(timeout, _BEHIND_SECONDS)
        ready = poll(self._links.clients, timeout)
        if not ready:
            self._links.check()
        self._links.take(ready, self._decode)

    def _decode(self, shard: int, header: bytes, payload: memoryview | None) -> None:
        self._hear(shard)
        self._handle(shard, decode_from(self._links.clients[shard], header), payload)

    # -- who is silent, lost or back ----------------------------------------------------------------------

    def _hear(self, shard: int) -> None:
        """A shard has said something."""
        heard = self._heard[shard]
        heard.at, heard.asked_at = time.monotonic(), None
        if heard.told:
            heard.told = False
            away = heard.at - (heard.missed_at or heard.at)
            self._tell(f"{self._named(shard)} answers again, after {away:.1f} s")
        elif not self._links.gone(shard):
            heard.missed_at = None  # the first word of one that was lost is how it comes back: see _tell_back

    def _look_for_silence(self, start: float, missing: Sequence[int], what: str | Callable[[], str]) -> None:
        """Ask those who are waited for since `start`, and say nothing, for a sign of life, and tell of those
        who do not give it. A shard that only waits for another worker does."""
        now = time.monotonic()
        for shard in missing:
            heard = self._heard[shard]
            if heard.told or self._links.gone(shard):
                continue  # told already
            if heard.asked_at is None:
                if now - max(start, heard.at) > _ASK_AFTER:
                    heard.asked_at, heard.missed_at = now, max(start, heard.at)
                    self.send(shard, WhoIsMissing())
            elif now - heard.asked_at > _SILENCE:
                heard.told = True
                self._tell(
                    f"worker {self.worker} waits for {self._name(shard)} at {self.addresses[shard]} on "
                    f"{what if isinstance(what, str) else what()}: it has not answered for "
                    f"{now - max(start, heard.at):.1f} s (sync.timeout is {self.timeout:g} s)"
                )

    def _tell_lost(self, shard: int) -> None:
        heard = self._heard[shard]
        heard.asked_at, heard.told = None, False
        self._tell(
            f"worker {self.worker} lost {self._name(shard)} at {self.addresses[shard]}, and waits for it"
        )

    def _tell_back(self, shard: int, seconds: float) -> None:
        """It was away since its connection broke, or since it fell silent: one that stood still and was
        replaced keeps its connection until then."""
        missed_at = self._heard[shard].missed_at
        if missed_at is not None:
            seconds = max(seconds, time.monotonic() - missed_at)
        self._tell(f"{self._named(shard)} is back, after {seconds:.1f} s")

    def _named(self, shard: int) -> str:
        return f"worker {self.worker}: {self._name(shard)} at {self.addresses[shard]}"

    def _handle_welcome(self, shard: int, message: AnyMessage, _payload: memoryview | None) -> None:
        assert isinstance(message, Welcome)
        self.late = self.late or message.late
        self._links.handle_welcome(shard, message)

    def _handle(self, shard: int, message: AnyMessage, payload: memoryview | None) -> None:
        if isinstance(message, Ping):
            return
        if isinstance(message, Refused):
            reason = one_line(message.reason, MOST_REASON)
            raise UserError(f"{self._name(shard)} at {self.addresses[shard]}: {reason}")
        if isinstance(message, Mismatch) and shard == LOG:
            raise MismatchError(one_line(message.line, MOST_REASON))
        handler = self._handlers.get(type(message))
        if handler is None:
            raise RunError(f"{self._name(shard)} sent a {type(message).__name__}, which nobody asked for")
        handler(shard, message, payload)

    def _greet(self) -> None:
        """Wait for each shard's word: versions, run and rank are checked there."""
        self.on(Welcome, self._handle_welcome)
        self.wait(
            lambda: not self._links.strangers,
            lambda: self._links.strangers,
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
        named = [
            f"{self._name(shard)} at {self.addresses[shard]}{self._links.gone(shard)}" for shard in missing
        ]
        who = " and ".join(named) or "a shard"
        waits = f"for {who} on {what}"
        if behind:
            waits = f"on {what}: {who} waits for {'; '.join(behind[:3])}{'; ...' if len(behind) > 3 else ''} "
        return (
            f"worker {self.worker} waited {waited:.1f} s {waits.rstrip()} "
            f"(deadline sync.timeout, {self.timeout:g} s; set it higher if the workers are only slow)"
        )


def _nothing(_shard: int, _message: AnyMessage, _payload: memoryview | None) -> None:
    """A sign of life is all that was asked for."""
