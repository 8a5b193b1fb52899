"""A site's shard: the whole parameter server for the site's workers, and one worker to the global shards.

With a directory it keeps a journal and can be killed and started again. To the global shards it is then the
worker of before, with its incarnation, and repeats the operation that was in progress.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping

from atoll.core.config import LinkOptions
from atoll.core.errors import DeadlineError, MismatchError
from atoll.core.events import AnyEvent
from atoll.core.runclock import record_time
from atoll.exchange.feedback import Feedback
from atoll.exchange.link import LOG, ShardLink
from atoll.exchange.link import Handler as FromAbove
from atoll.exchange.linksseen import LinksSeen
from atoll.net.endpoint import Endpoint, Server, poll
from atoll.net.keys import Keys
from atoll.server.common import Common
from atoll.server.door import Door
from atoll.server.heard import Handler, Heard, Life
from atoll.server.journal import Journal, JournalError
from atoll.server.links import HubLink
from atoll.server.logkeeper import LogKeeper
from atoll.server.model import Model
from atoll.server.recovery import encode_image
from atoll.server.setups import SetUps
from atoll.server.shard import Shard
from atoll.server.sitelog import SiteLog
from atoll.server.sitemodel import SiteModel
from atoll.server.siteplace import SitePlace, in_sites
from atoll.server.upward import Upward
from atoll.store.places import RETURN_PATIENCES
from atoll.wire import messages
from atoll.wire.messages import AnyMessage, Hello, Setup

IN_BOX = 4096  # messages of the site's workers that wait while the global shards are waited for
_FAREWELL = 0.5  # seconds from the last worker's end to the site's, for last messages to the hub
_LOOK_SECONDS = 0.25  # seconds between checks of a journal that is waited for
_LARGE_JOURNAL = 8  # a journal of this many times the chunks' bytes begins anew
_SMALL_JOURNAL = 2**28  # journal bytes below which size is no reason to begin anew
_GRACE_SECONDS = 2.0  # at the end of a run the global shards may stop first

_ABOVE = Hello(
    version=messages.VERSION, run="", role="shard", shard=LOG
)  # the sender of global shards' messages, for the journal


class _StoppedError(BaseException):
    """The process is to end while it waits. Not an error; only the loop handles it."""


class SiteSetUps(SetUps):
    """Set-ups at a site. The first worker to reach its n-th set-up begins the n-th; `find(why)` connects to
    the global shards if needed."""

    def __init__(
        self,
        common: Common,
        door: Door,
        make: Callable[[Setup, int], Model],
        log: SiteLog,
        find: Callable[[str], object],
    ) -> None:
        super().__init__(common, door, make)
        self._site_log, self._find = log, find

    def refusal(self, who: Life) -> str:  # noqa: ARG002
        """Return "": the site's workers reach a set-up one after another, with one model all the time."""
        return ""

    def _handle_setup(self, heard: Heard) -> str:
        setup, model = heard.message, self._training.model
        self._find("to be set up")
        if model is not None and setup.digest != model.setup.digest:
            return self._trains_another()
        if self._next_of(heard.life, setup.number) <= self._lines.generation:
            return ""
        made = self._made(setup)
        if not isinstance(made, SiteModel):
            return str(made)
        bringer = self._site_log.incarnation(setup.first)
        self._site_log.state.loose = setup.consistency != "bsp"
        self._begin(made, (setup.first, bringer))
        (made.describe if bringer else made.begin)()
        return ""


class SiteShard(Shard):
    """The shard of a site of `run`; the site and its workers are known to `hub`.

    `server` accepts the site's workers. `timeout` in seconds is the deadline of each wait for the global
    shards. With a `journal`, which begins anew every `image_seconds`, `revival` continues from a killed
    shard's state. `link` has the options of the way to the global shards.
    """

    in_box = IN_BOX
    # GiveState must not wait: another site may wait for it, and this site for that one.
    at_once = (messages.WhoIsMissing, messages.Goodbye, messages.GiveState)

    def __init__(
        self,
        server: Server,
        *,
        run: str,
        hub: HubLink,
        keys: Keys | None = None,
        timeout: float,
        journal: Journal | None = None,
        image_seconds: float = 60.0,
        link: LinkOptions | None = None,
        codec: str = "",
        emit: Callable[[AnyEvent], None] = lambda _event: None,
    ) -> None:
        welcome, self._options = hub.welcome, link or LinkOptions()
        self._place = SitePlace(welcome.worker, list(welcome.sites), welcome.incarnation)
        self._link_up, self._timeout = hub, timeout
        self._up = Upward(
            self._place,
            run,
            keys,
            hub,
            timeout,
            self._options,
            lambda line: self._tell.warn(line),
            lambda act: self.kept.when_kept(act),
        )
        super().__init__(
            0,
            server,
            run=run,
            workers=welcome.workers,
            keys=keys,
            hub=hub,
            codec=codec,
            journal=journal,
            site=self._place.name,
            emit=emit,
        )
        self._image_seconds, self._image_at = image_seconds, time.monotonic() + image_seconds
        self._links_seen = LinksSeen(
            f"site {self._place.name}",
            lambda kind, **fields: emit(kind(time=record_time(), worker=-1, site=self._place.name, **fields)),
        )
        self._alone_since = math.inf  # since when the site has had no worker; monotonic
        self.is_over = False  # the site has ended for good
        self._ends_at = math.inf  # monotonic
        self._until: Callable[[], bool] = lambda: False

    # -- its parts ----------------------------------------------------------------------------------------

    def _make_log(self, workers: int) -> LogKeeper:
        self._site_log = SiteLog(workers, self._peers, self._lines.queue, self._up)
        return self._site_log

    def _make_setups(self) -> SetUps:
        return SiteSetUps(self._common, self.door, self._make_model, self._site_log, self._find)

    def _make_model(self, setup: Setup, generation: int) -> Model:
        log, welcome = self._site_log, self._link_up.welcome
        return SiteModel(
            setup,
            self._up.link,
            number=generation,
            place=self._place,
            workers=welcome.workers,
            shards=welcome.shards,
            used=log.used,
            met=lambda: log.state.met,
            stand=lambda: log.stand,
            alive=lambda: not log.has_left,
            settle=self._settle,
            note=lambda answer: self.kept.note(_ABOVE, messages.encode(answer)),
            link=self._options,
            codec=self._codec,
        )

    def _more_handlers(self) -> dict[type, Handler]:
        return {messages.Goodbye: Handler(self._handle_goodbye, "")}

    def _again(self, handlers: Mapping[type, Handler]) -> Mapping[type, Handler]:
        given = handlers[messages.GiveState]

        def give(heard: Heard) -> str:
            if heard.hello.role != _ABOVE.role:
                return given(heard)
            self._site_log.handle_given_from_above(heard.message, None)
            return ""

        def end_meeting(heard: Heard) -> str:
            self._end_meeting(heard.message, heard.payload)
            return ""

        def lost(heard: Heard) -> str:
            assert isinstance(self.model, SiteModel)
            self.model.hear_losses(heard.message)
            return ""

        return {
            **handlers,
            messages.GiveState: Handler(give, role=""),
            messages.Met: Handler(end_meeting, role=_ABOVE.role),
            messages.Mean: Handler(lost, role=_ABOVE.role),
            messages.Parameters: Handler(lost, role=_ABOVE.role),
        }

    def _handle_goodbye(self, heard: Heard) -> str:
        """Note that a worker leaves for good."""
        self.kept.note(heard.hello, messages.encode(heard.message))
        self._site_log.handle_goodbye(*heard.life)
        return ""

    # -- the loop -----------------------------------------------------------------------------------------

    def waiting_for(self) -> list[str]:
        above = self._up.link.waits.lines() if self._up.link is not None else []
        return above or super().waiting_for()

    def run(self, until: Callable[[], bool]) -> None:
        """Serve like Shard.run. Also ends during a wait, and once all of the site's workers have left. Tells
        the hub when the site cannot go on."""
        self._until = until
        try:
            if isinstance(self.model, SiteModel):  # finish the work in progress before any answer
                link = self._find(f"to go on from iteration {self.model.iterations}")
                assert link is not None
                self.model.go_on(link)
            super().run(lambda: until() or time.monotonic() > self._ends_at)
        except _StoppedError:
            return
        except JournalError:
            raise  # the shard may be started again
        except Exception:
            if not self.is_over:
                self._link_up.goodbye()  # else the other sites wait until the hub misses this one
            raise

    def close(self) -> None:
        super().close()
        self._tell_of_links(self._links_seen.tell)
        self._up.close()

    def _tell_of_links(self, tell: Callable[[ShardLink | None, Feedback | None], None]) -> None:
        tell(self._up.link, self.model.feedback if isinstance(self.model, SiteModel) else None)

    def _links(self) -> list[Endpoint]:
        return [*super()._links(), *(self._up.link.clients if self._up.link is not None else [])]

    def _see_to_links(self) -> None:
        super()._see_to_links()
        if self._up.link is None and self._link_up.addresses:
            self._connect()
        if self._up.link is not None:
            self._up.link.take(_GRACE_SECONDS)
        self._tell_of_links(self._links_seen.tell_if_due)
        if not self.is_over:
            self._see_to_end()

    def _see_to_end(self) -> None:
        """End the site once all workers have left. If they died, wait for some to come back."""
        if not self._site_log.is_over:
            self._alone_since = math.inf
            return
        self._alone_since = min(self._alone_since, time.monotonic())
        waited = time.monotonic() - self._alone_since
        if self._site_log.has_left:
            self._leave("all its workers have left")
        elif waited > RETURN_PATIENCES * self._link_up.welcome.patience:
            self._leave(f"all its workers were lost, and nobody came back for {waited:.1f} s")

    def _leave(self, reason: str) -> None:
        """End the site, so that no other site waits for it."""
        self.is_over, self._ends_at = True, time.monotonic() + _FAREWELL
        self._tell_of_links(self._links_seen.tell)
        last = self._site_log.last
        if self._site_log.has_left and last is not None:
            self._up.end(last)
        self._up.close()
        self._link_up.goodbye()
        self._tell.decide("site", "over", reason)

    # -- the global shards --------------------------------------------------------------------------------

    def _find(self, why: str) -> ShardLink | None:
        """Connect to the global shards once the hub knows all addresses; None while a journal is replayed."""
        since = time.monotonic()
        while self._up.link is None and not self.kept.replaying:
            if self._up.is_found(since, why):
                self._connect()
            elif self._until():
                raise _StoppedError
        return self._up.link

    def _connect(self) -> None:
        from_above: dict[type[AnyMessage], FromAbove] = {
            messages.Met: self._handle_met,
            messages.WantState: self._handle_want_from_above,
            messages.Mismatch: self._handle_mismatch_from_above,
            messages.GiveState: self._handle_given_from_above,
        }
        self._up.open(from_above, self._meanwhile, self._door_with_room)
        held = ", and what is lost is held back" if self._options.holds_back else ""
        shards = f"{len(self._link_up.addresses)} global shards{held}"
        self._tell.decide("link", self._options.transport, f"link.transport: to {shards}")

    def _meanwhile(self) -> None:
        """Handle urgent work while the global shards are waited for."""
        if self._until():
            raise _StoppedError
        self._link_up.take()
        self._tell_of_links(self._links_seen.tell_if_due)
        self.applier.see_to_others()

    def _door_with_room(self) -> list[Endpoint]:
        """The site's port, if more messages of workers may wait."""
        return [self._server] if self._inbox.has_room else []

    def _handle_mismatch_from_above(
        self, _shard: int, message: AnyMessage, _payload: memoryview | None
    ) -> None:
        """Send the line to all workers of this site and end: scripts differ between the sites."""
        assert isinstance(message, messages.Mismatch)
        line = in_sites(message.line, self._place.names) if message.of_contributors else message.line
        self._site_log.handle_mismatch_from_above(line)
        raise MismatchError(line)

    def _handle_met(self, _shard: int, message: AnyMessage, payload: memoryview | None) -> None:
        assert isinstance(message, messages.Met)
        if self._up.met(message.number):
            self.kept.note(_ABOVE, messages.encode(message), payload)
            self._end_meeting(message, payload)

    def _end_meeting(self, message: messages.Met, payload: memoryview | None) -> None:
        self._up.meets.pop(message.number, None)
        self._site_log.end(message, payload)

    def _handle_want_from_above(self, _shard: int, message: AnyMessage, _payload: memoryview | None) -> None:
        assert isinstance(message, messages.WantState)
        self._site_log.handle_want_from_above(message)

    def _handle_given_from_above(self, _shard: int, message: AnyMessage, payload: memoryview | None) -> None:
        assert isinstance(message, messages.GiveState)
        self._up.asked()
        self.kept.note(_ABOVE, messages.encode(message))  # the payload is only forwarded
        self._site_log.handle_given_from_above(message, payload)

    # -- the journal --------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Wait until the journal has all input, on which the message about to go up depends."""
        journal, since = self.kept.journal, time.monotonic()
        if journal is None:
            return
        written = threading.Event()
        journal.when_written(written.set)
        while not written.is_set():
            waited = time.monotonic() - since
            if waited > self._timeout:
                raise DeadlineError(
                    f"site {self._place.name!r} waited {waited:.1f} s for its journal in "
                    f"{journal.folder.path} to be written, before iteration {self._training.iterations} "
                    f"goes up (deadline --timeout, {self._timeout:g} s)"
                )
            poll([], _LOOK_SECONDS, journal.fileno)
            journal.release()

    def _poll_snapshots(self) -> None:
        """Begin the journal anew from the full state if due, between two iterations, when few payloads belong
        to the state."""
        journal, model = self.kept.journal, self.model
        if journal is None or model is None or not model.complete:
            return
        large = journal.size > max(_SMALL_JOURNAL, _LARGE_JOURNAL * model.held_bytes)
        if time.monotonic() < self._image_at and not large:
            return
        if self._up.link is None or not self._lines.is_empty or self._up.meets or model.mean is not None:
            return
        self._image_at = time.monotonic() + self._image_seconds
        image, parts = self.revival.image()
        number = journal.begin_segment(encode_image(image), parts)
        journal.when_written(lambda: journal.drop_before(number))
