"""A site's connection to the global shards, to which the site is one worker."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from atoll.core.config import LinkOptions
from atoll.core.errors import DeadlineError
from atoll.exchange.link import LOG, Handler, ShardLink, ignored
from atoll.net.endpoint import Endpoint, poll
from atoll.net.keys import Keys
from atoll.net.requests import who_is_missing
from atoll.server.links import HubLink
from atoll.server.siteplace import SitePlace
from atoll.wire import messages
from atoll.wire.messages import AnyMessage, WorkerStand

_ASK_SECONDS = 1.0  # seconds of a wait between queries to the global log about whom it waits for
_LOOK_SECONDS = 0.25  # seconds between checks of a hub that is waited for
_MEETING = "meeting"  # with the meeting's number: a Meet is resent until this milestone
_ENTERING = "entering"  # a WantState is resent until this milestone

# Answers to an earlier process of this site's shard may still arrive.
_ANSWERS: tuple[type[AnyMessage], ...] = (
    messages.Ready,
    messages.Committed,
    messages.Mean,
    messages.Parameters,
    messages.State,
    messages.StateEnd,
    messages.Ended,
)


class Upward:
    """The connection of the site at `place` of `run`. `hub` knows the global shards' addresses, `options`
    configures the link, and `timeout` in seconds is the deadline of each wait. `warn` takes lines for people,
    and `when_kept` delays an action until the journal has all earlier records. `link` is None until the
    global shards are found."""

    def __init__(
        self,
        place: SitePlace,
        run: str,
        keys: Keys | None,
        hub: HubLink,
        timeout: float,
        options: LinkOptions,
        warn: Callable[[str], None],
        when_kept: Callable[[Callable[[], None]], None],
    ) -> None:
        self._place, self._run, self._keys, self._hub = place, run, keys, hub
        self._timeout, self._options = timeout, options
        self._warn, self._when_kept = warn, when_kept
        self.link: ShardLink | None = None
        self.meets: dict[int, tuple[messages.Meet, memoryview]] = {}  # open meetings, by number

    def is_found(self, since: float, why: str) -> bool:
        """True if the hub knows all global shards, which may join later than the site's workers. Raises
        DeadlineError, with `why` they are needed, after `timeout`."""
        if self._hub.addresses:
            return True
        waited = time.monotonic() - since
        if waited > self._timeout:
            missing = who_is_missing(self._hub.client)
            raise DeadlineError(
                f"site {self._place.name!r} waited {waited:.1f} s for the global shards to come to the hub "
                f"at {self._hub.client.address}, {why} (deadline --timeout, {self._timeout:g} s)"
                f"{f': {missing}' if missing else ''}"
            )
        poll([self._hub.client], _LOOK_SECONDS)
        self._hub.take()
        return False

    def open(
        self,
        handlers: Mapping[type[AnyMessage], Handler],
        meanwhile: Callable[[], None],
        beside: Callable[[], list[Endpoint]],
    ) -> ShardLink:
        """Connect to the global shards. `handlers` take unsolicited messages; `meanwhile` and `beside` are
        ShardLink's."""
        link = self.link = ShardLink(
            self._hub.addresses,
            self._keys,
            hello=self._place.hello(self._run),
            parties=self._place.parties,
            timeout=self._timeout,
            where=self._where,
            tell=self._warn,
            meanwhile=meanwhile,
            beside=beside,
            asks_every=_ASK_SECONDS,
            options=self._options,
        )
        for kind in _ANSWERS:
            link.on(kind, ignored)
        for kind, handle in handlers.items():
            link.on(kind, handle)
        for number in self.meets:
            self._send_meet(link, number)
        return link

    def _where(self) -> list[str] | None:
        self._hub.ask_where()
        return self._hub.addresses or None

    def close(self) -> None:
        if self.link is not None:
            self.link.close()

    # -- meetings, and scripts that differ ----------------------------------------------------------------

    def meet(self, number: int, what: str, part: bytes, stand: WorkerStand | None) -> None:
        """Send up the site's part of a meeting of sites, with one worker's place."""
        meet = messages.Meet(incarnation=self._place.incarnation, number=number, what=what, stand=stand)
        self.meets[number] = meet, memoryview(part)
        link = self.link
        if link is not None:
            self._when_kept(lambda: self._send_meet(link, number))

    def _send_meet(self, link: ShardLink, number: int) -> None:
        meet, part = self.meets[number]
        link.send(LOG, meet, part, until=(_MEETING, number))
        link.waits.expect(f"every site's part in {meet.what}", LOG)

    def met(self, number: int) -> bool:
        """Note that all sites have met; False for a duplicate answer."""
        if number not in self.meets or self.link is None:
            return False
        self.link.waits.came()
        self.link.answered((_MEETING, number))
        return True

    def differ(self, line: str) -> None:
        """Report to all sites the `line` that says how this site's scripts differ."""
        if self.link is not None:
            self.link.send(LOG, messages.Mismatch(line=line))

    def end(self, stand: WorkerStand) -> None:
        """Report that the site's scripts have ended, with the place of one of them."""
        if self.link is not None:
            self.link.send(LOG, messages.Ends(incarnation=self._place.incarnation, stand=stand))

    # -- newcomers at a site without live workers ---------------------------------------------------------

    def ask(self, iteration: int) -> None:
        """Request from the global log the state of another site's worker."""
        if self.link is not None:  # else the newcomer asks again
            self.link.send(LOG, messages.WantState(iteration=iteration), until=_ENTERING)

    def asked(self) -> None:
        """Note that another site's worker has given its state."""
        if self.link is not None:
            self.link.answered(_ENTERING)

    def give(self, give: messages.GiveState, payload: memoryview | None) -> None:
        """Send up the state that a worker of this site gives to another site."""
        if self.link is not None:
            self.link.send(LOG, give, payload)
