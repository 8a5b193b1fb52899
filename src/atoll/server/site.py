"""A site's shard: one process that is the whole parameter server to the site's workers, and one worker to the
global shards."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from atoll.core.events import AnyEvent
from atoll.net.endpoint import Endpoint, Server
from atoll.net.keys import Keys
from atoll.server.gathered import merge_untrusted, pack
from atoll.server.links import HubLink
from atoll.server.logkeeper import LogKeeper, Outgoing
from atoll.server.peers import Peers
from atoll.server.shard import Shard
from atoll.server.sitemodel import SiteModel
from atoll.server.upstream import LOG, Place, Upstream
from atoll.store.outcomes import Meeting
from atoll.store.shard import AnyPull
from atoll.wire import messages
from atoll.wire.messages import AnyMessage, Hello

_FAREWELL = 0.5  # seconds from the last worker's end to the site's: for what the hub is yet to be told
_IN_BOX = 4096  # messages of the site's workers that wait while the global shards are waited for


class _StoppedError(BaseException):
    """The process is told to end while it waits: no error, and nobody's to handle but the loop's."""


class SiteLog(LogKeeper):
    """The log of a site's own workers. Their meetings are parts of the sites': `pass_up(number, what, part)`
    takes each that is complete here, and `end` is told when all sites have come."""

    def __init__(
        self, workers: int, peers: Peers, apply: Outgoing, pass_up: Callable[[int, str, bytes], None]
    ) -> None:
        super().__init__(workers, peers, apply)
        self._pass_up = pass_up
        self.takes_latecomers = False
        self._complete: dict[int, Meeting] = {}  # meetings that the other sites are waited for in
        self.met = 0  # how many are over

    @property
    def is_over(self) -> bool:
        """Whether all of the site's workers have been here, and none is left."""
        return self._meetings.is_over

    def incarnation(self, worker: int) -> int:
        """The incarnation of a worker of this site that takes part; 0 for any other."""
        return self._meetings.live().get(worker, 0)

    def used(self) -> list[messages.Used]:
        """The samples that contributions have used since this was asked last."""
        news = self._log.poll_used() if self._log is not None else []
        return [used for each in news for used in each.used]

    def poll(self) -> None:
        """What has been used goes up with the contributions: the global log tells the hub."""
        self._forget_old_lines()

    def _end_meeting(self, meeting: Meeting) -> None:
        parts = [self._parts.pop(handle) for handle in meeting.handles]
        self._complete[meeting.number] = meeting
        self._pass_up(meeting.number, meeting.what, pack(meeting.workers, parts))

    def end(self, message: messages.Met, payload: memoryview | None) -> None:
        """All sites have come to a meeting: answer this site's workers."""
        meeting = self._complete.pop(message.number, None)
        if meeting is None:
            return
        merged = merge_untrusted(payload, message.sizes)
        self.met += 1
        for worker, incarnation in zip(meeting.workers, meeting.incarnations, strict=True):
            self._set_idle(worker, incarnation, False)
        met = messages.Met(
            number=message.number,
            workers=[worker for worker, _ in merged],
            sizes=[part.nbytes for _, part in merged],
            clock=self._log.next_iteration if self._log is not None else 0,
        )
        whole = b"".join(part for _, part in merged)
        for worker, incarnation in zip(meeting.workers, meeting.incarnations, strict=True):
            self._peers.send(self._peers.worker(worker, incarnation), met, whole or None)


class SiteShard(Shard):
    """The shard of a site of `run`; `hub` knows which one and who belongs to it.

    `server` is where the site's workers come in. `timeout` in seconds is the deadline of each wait for the
    global shards.
    """

    def __init__(
        self,
        server: Server,
        *,
        run: str,
        hub: HubLink,
        keys: Keys | None = None,
        timeout: float,
        emit: Callable[[AnyEvent], None] = lambda _event: None,
    ) -> None:
        welcome = hub.welcome
        self._place = Place(welcome.worker, list(welcome.sites), welcome.incarnation)
        self._link_up, self._timeout = hub, timeout
        self._site_log: SiteLog
        super().__init__(0, server, run=run, workers=welcome.workers, keys=keys, hub=hub, emit=emit)
        self.name, self.in_box = f"the shard of site {self._place.name!r}", _IN_BOX
        self._workers = welcome.workers
        self._upstream: Upstream | None = None
        self._meets: list[tuple[messages.Meet, memoryview]] = []  # while the global shards are not there
        self._refreshed = 0  # the parameters are those after so many meetings
        self._over = False
        self._ends_at = math.inf  # monotonic
        self._until: Callable[[], bool] = lambda: False

    def _make_log(self, workers: int) -> LogKeeper:
        self._site_log = SiteLog(workers, self._peers, self._queue, self._meet)
        return self._site_log

    def waiting_for(self) -> list[str]:
        above = self._upstream.waiting_for() if self._upstream is not None else []
        return above or super().waiting_for()

    # -- the loop -----------------------------------------------------------------------------------------

    def run(self, until: Callable[[], bool]) -> None:
        """As Shard's, and it ends while it waits too, and when all of the site's workers have left. The hub
        is told when the site cannot go on."""
        self._until = until
        try:
            super().run(lambda: until() or time.monotonic() > self._ends_at)
        except _StoppedError:
            return
        except Exception:
            if not self._over:
                self._link_up.goodbye()  # the other sites need not wait until the hub misses it
            raise

    def close(self) -> None:
        super().close()
        if self._upstream is not None:
            self._upstream.close()

    def _endpoints(self) -> list[Endpoint]:
        above = self._upstream.clients if self._upstream is not None else []
        return [*super()._endpoints(), *above]

    def _see_to_links(self) -> None:
        super()._see_to_links()
        if self._upstream is None and self._link_up.addresses:
            self._upstream = self._connect_up(self._link_up.addresses)
        if self._upstream is not None:
            self._upstream.poll()
        if self._site_log.is_over and not self._over:
            self._leave()

    def _connect_up(self, addresses: list[str]) -> Upstream:
        upstream = Upstream(
            addresses,
            self._keys,
            run=self._run,
            place=self._place,
            timeout=self._timeout,
            door=self._server,
            meanwhile=self._meanwhile,
        )
        upstream.on(messages.Met, self._handle_met)
        for meet, payload in self._meets:
            self._send_meet(upstream, meet, payload)
        self._meets.clear()
        return upstream

    def _meanwhile(self) -> bool:
        """While the global shards are waited for: see to what cannot wait; whether there is room for more."""
        if self._until():
            raise _StoppedError
        self._link_up.take()
        self._serve_meanwhile()
        return len(self._inbox) < self.in_box

    def _leave(self) -> None:
        """All of the site's workers have left: no other site is to wait for this one."""
        self._over, self._ends_at = True, time.monotonic() + _FAREWELL
        if self._upstream is not None:
            self._upstream.leave()
        self._link_up.goodbye()
        self._decide("site", "over", "all its workers have left")

    # -- meetings -----------------------------------------------------------------------------------------

    def _meet(self, number: int, what: str, part: bytes) -> None:
        meet = messages.Meet(incarnation=self._place.incarnation, number=number, what=what)
        if self._upstream is None:
            self._meets.append((meet, memoryview(part)))
        else:
            self._send_meet(self._upstream, meet, memoryview(part))

    def _send_meet(self, upstream: Upstream, meet: messages.Meet, part: memoryview) -> None:
        upstream.send(LOG, meet, part)
        upstream.expect(f"every site's part in {meet.what}")

    def _handle_met(self, _shard: int, message: AnyMessage, payload: memoryview | None) -> None:
        assert isinstance(message, messages.Met)
        assert self._upstream is not None
        self._upstream.came()
        self._site_log.end(message, payload)

    # -- setting up ---------------------------------------------------------------------------------------

    def _handle_setup(self, _peer: bytes, hello: Hello, setup: messages.Setup, _: memoryview | None) -> str:
        """All workers make the same sequence of set-ups: the first to come with its n-th begins the n-th."""
        if hello.role != "worker":
            return "a worker brings the Setup"
        if self._upstream is None:
            return "the global shards are not all there yet"
        if self._model is not None and setup.digest != self._model.setup.digest:
            return self._trains_another()
        if self._next_set_up((hello.worker, hello.incarnation)) <= self._generation:
            return ""
        try:
            model = SiteModel(
                setup,
                self._upstream,
                workers=self._workers,
                used=self._site_log.used,
                alive=lambda: not self._site_log.is_over,
            )
        except Exception as error:  # the sender's mistake, not the shard's
            return (str(error) or type(error).__name__).splitlines()[0]
        bringer = self._site_log.incarnation(setup.first)
        self._site_log.loose = setup.consistency != "bsp"
        self._begin(model, (setup.first, bringer))
        if bringer:
            model.describe()
        else:
            model.begin()
        return ""

    def _handle_ready(self, peer: bytes, hello: Hello, message: messages.Ready, _: memoryview | None) -> str:
        who, model = (hello.worker, hello.incarnation), self._model
        if isinstance(model, SiteModel) and who == self._setter and not model.complete:
            model.begin()  # its values have all gone up
        return super()._handle_ready(peer, hello, message, None)

    # -- what workers ask for -----------------------------------------------------------------------------

    def _may_pull(self, hello: Hello | None, pull: AnyPull) -> bool:
        return self._model is not None and self._model.complete and super()._may_pull(hello, pull)

    def _handle_pull(self, peer: bytes, hello: Hello, pull: AnyPull, payload: memoryview | None) -> str:
        model = self._model
        if not isinstance(model, SiteModel) or not model.complete:
            return "this shard is not set up yet"  # it has no values at all
        newest = isinstance(pull, messages.Pull) and pull.newest
        if newest and self._refreshed < self._site_log.met:
            self._refreshed = self._site_log.met
            model.refresh()
        return super()._handle_pull(peer, hello, pull, payload)

    def _handle_pull_state(
        self, peer: bytes, hello: Hello, _message: messages.PullState, _: memoryview | None
    ) -> str:
        if not isinstance(self._model, SiteModel) or hello.role != "worker":
            return "this shard is not set up yet"
        self._model.pass_state(lambda message, payload: self._peers.send(peer, message, payload))
        return ""
