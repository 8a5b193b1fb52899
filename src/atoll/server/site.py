"""A site's shard: one process that is the whole parameter server to the site's workers, and one worker to the
global shards.

With a directory it keeps a journal, as other shards do, and may be killed and started again: to the global
shards it is the same worker then, of the same incarnation, and what was under way is sent up once more.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from atoll.core.config import LinkOptions
from atoll.core.errors import DeadlineError, MismatchError
from atoll.core.events import AnyEvent
from atoll.core.points import reach
from atoll.core.runclock import record_time
from atoll.exchange.feedback import Feedback
from atoll.exchange.link import LOG, Link, ignored
from atoll.exchange.linksseen import LinksSeen
from atoll.net.endpoint import Endpoint, Server, poll
from atoll.net.keys import Keys
from atoll.server.entrance import Above
from atoll.server.gathered import merge_untrusted, pack
from atoll.server.journal import Journal, JournalError
from atoll.server.links import HubLink
from atoll.server.logkeeper import LastMeeting, LogKeeper, Outgoing
from atoll.server.payloads import payload_of
from atoll.server.peers import Peers
from atoll.server.recovery import CONTRIBUTION, LAST_MEETING, MEETING
from atoll.server.shard import Shard
from atoll.server.sitemodel import SiteModel
from atoll.server.siteplace import Place, in_sites
from atoll.server.siterecovery import HELD, FoundSite, SiteImage, encode_site_image
from atoll.store.outcomes import Meeting
from atoll.store.places import RETURN_PATIENCES
from atoll.store.pulls import AnyPull
from atoll.store.records import Part, Told
from atoll.tensors.payload import tensor_of
from atoll.wire import messages
from atoll.wire.messages import AnyMessage, Hello, WorkerStand, decode_untrusted

_FAREWELL = 0.5  # seconds from the last worker's end to the site's: for what the hub is yet to be told
_IN_BOX = 4096  # messages of the site's workers that wait while the global shards are waited for
_LOOK_SECONDS = 0.25  # between looks at the hub, or at the journal, while one is waited for
_LARGE_JOURNAL = 8  # times what the chunks hold: the journal begins anew
_SMALL_JOURNAL = 2**28  # bytes that are no reason for it
_ASK_SECONDS = 1.0  # of a wait, between questions to the global log for whom it waits
_GRACE_SECONDS = 2.0  # at the end of a run all are told to stop, and the global shards may be the first
_MEETING = "meeting"  # what a Meet is sent again until, with its number
_ENTERING = "entering"  # the same, of a WantState

# The site's shard that was here before may have asked for what comes now.
_ANSWERS = (
    messages.Ready,
    messages.Committed,
    messages.Mean,
    messages.Parameters,
    messages.State,
    messages.StateEnd,
)
_ABOVE = Hello(version=messages.VERSION, run="", role="shard", shard=LOG)  # who says that sites have met


class _StoppedError(BaseException):
    """The process is told to end while it waits: no error, and nobody's to handle but the loop's."""


class SiteLog(LogKeeper):
    """The log of a site's own workers.

    Meetings of the site are parts of meetings of all sites. `pass_up(number, what, part)` sends up a complete
    part with one worker's place. `end` is called when all sites have come. `tell_above` sends up the line for
    all sites where scripts differ in this site. `above` is the global log.
    """

    def __init__(
        self,
        workers: int,
        peers: Peers,
        apply: Outgoing,
        above: Above,
        pass_up: Callable[[int, str, bytes, WorkerStand | None], None],
        tell_above: Callable[[str], None] = lambda _line: None,
    ) -> None:
        super().__init__(workers, peers, apply, above)
        self._pass_up, self._tell_above = pass_up, tell_above
        self.last: WorkerStand | None = None  # where the worker stood that was the last to end
        self._complete: dict[int, Meeting] = {}  # meetings that the other sites are waited for in
        self.met = 0  # how many are over
        self._left: set[tuple[int, int]] = set()  # who has said goodbye: worker, incarnation
        self._last_gone = (-1, 0)

    def handle_goodbye(self, worker: int, incarnation: int) -> None:
        """A worker leaves; the hub fences it, too."""
        self._left.add((worker, incarnation))

    def handle_fence(self, fence: messages.Fence) -> None:
        self._last_gone = (fence.worker, fence.incarnation)
        super().handle_fence(fence)

    def handle_want_from_above(self, want: messages.WantState) -> None:
        """Another site asks for the state of a living worker."""
        self._entrance.want(want.worker, want.life, want.iteration, outside=True)
        self._see_to_entrance()

    def handle_given_from_above(self, give: messages.GiveState, payload: memoryview | None) -> None:
        """Another site's worker gives its state to those who come late here."""
        for given in self._entrance.given_from_above(give, payload, self._meetings.meetings.next):
            if given.members and not given.refused:
                self._meetings.meetings.skip_to(given.meeting)
                self._meetings.handle_entered(given.worker, given.life, given.meeting, True)

    @property
    def has_left(self) -> bool:
        """Whether nobody is left, and who was the last has said goodbye: nobody comes back."""
        return self.is_over and self._last_gone in self._left

    @property
    def is_over(self) -> bool:
        """Whether all of the site's workers have been here, and none is left."""
        return self._meetings.is_over

    def incarnation(self, worker: int) -> int:
        """The incarnation of a worker of this site that takes part; 0 for any other."""
        return self._meetings.live.get(worker, 0)

    def used(self) -> list[messages.Used]:
        """The samples that contributions have used since this was asked last."""
        news = self._log.used.take_news() if self._log is not None else []
        return [used for each in news for used in each.used]

    def poll(self) -> None:
        """What has been used goes up with the contributions: the global log tells the hub."""
        self._forget_old_lines()

    def _end_meeting(self, meeting: Meeting) -> None:
        parts = [self.payloads.pop(handle, None) for handle in meeting.handles]
        self._complete[meeting.number] = meeting
        self._pass_up(meeting.number, meeting.what, pack(meeting.workers, parts), meeting.stand)

    @property
    def stand(self) -> WorkerStand | None:
        """Return the place of a worker that has committed the site's iteration under way."""
        return self._log.stand if self._log is not None else None

    def handle_end(self, worker: int, ends: messages.Ends) -> None:
        self.last = ends.stand
        super().handle_end(worker, ends)

    def handle_mismatch_from_above(self, line: str) -> None:
        """End this site's workers: scripts differ between the sites."""
        if not self.state.mismatch:
            super()._end_all(line)

    def _end_all(self, line: str, *, of_contributors: bool = False) -> None:  # noqa: ARG002
        super()._end_all(line)
        self._tell_above(line)

    def end(self, message: messages.Met, payload: memoryview | None) -> None:
        """All sites have come to a meeting: answer this site's workers."""
        meeting = self._complete.pop(message.number, None)
        if meeting is None:
            return
        merged = merge_untrusted(payload, message.sizes)
        self.met += 1
        for worker, incarnation in zip(meeting.workers, meeting.incarnations, strict=True):
            self._set_idle(worker, incarnation, False)
        reach("site.met")
        met = messages.Met(
            number=message.number,
            workers=[worker for worker, _ in merged],
            sizes=[part.nbytes for _, part in merged],
            clock=self._log.next_iteration if self._log is not None else 0,
        )
        whole = b"".join(part for _, part in merged)
        own = dict(zip(meeting.workers, meeting.incarnations, strict=True))
        self.state.last = LastMeeting(met, [own.get(worker, 0) for worker in met.workers])
        self.last_payload = whole or None
        for worker, incarnation in zip(meeting.workers, meeting.incarnations, strict=True):
            self._peers.send(self._peers.worker(worker, incarnation), met, whole or None)


class SiteShard(Shard):
    """The shard of a site of `run`; `hub` knows which one and who belongs to it.

    `server` is where the site's workers come in. `timeout` in seconds is the deadline of each wait for the
    global shards. With a `journal`, which begins anew every `image_seconds`, `recover` has it go on where the
    one before it was killed. `link` is how it reaches the global shards.
    """

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
        welcome, self._link = hub.welcome, link or LinkOptions()
        self._place = Place(welcome.worker, list(welcome.sites), welcome.incarnation)
        self._link_up, self._timeout = hub, timeout
        self._site_log: SiteLog
        super().__init__(
            0,
            server,
            run=run,
            workers=welcome.workers,
            keys=keys,
            hub=hub,
            codec=codec,
            journal=journal,
            emit=emit,
        )
        self.site = self._place.name
        self.name, self.in_box = f"the shard of site {self._place.name!r}", _IN_BOX
        self._workers, self._shards = welcome.workers, welcome.shards
        self._handlers[messages.Goodbye] = self._handle_goodbye
        # Another site may wait for what a worker gives, and this one for that site.
        self.at_once = (messages.WhoIsMissing, messages.Goodbye, messages.GiveState)
        self._image_seconds, self._image_at = image_seconds, time.monotonic() + image_seconds
        self._upstream: Link | None = None
        self._links_seen = LinksSeen(
            f"site {self.site}",
            lambda kind, **fields: emit(kind(time=record_time(), worker=-1, site=self.site, **fields)),
        )
        self._meets: dict[int, tuple[messages.Meet, memoryview]] = {}  # that are not over, by number
        self._alone_since = math.inf  # monotonic: when the last of its workers was lost
        self._refreshed = 0  # the parameters are those after so many meetings
        self._over = False
        self._ends_at = math.inf  # monotonic
        self._until: Callable[[], bool] = lambda: False

    def _make_log(self, workers: int) -> LogKeeper:
        self._site_log = SiteLog(
            workers,
            self._peers,
            self._lines.queue,
            self,
            self._meet,
            self._tell_above,
        )
        return self._site_log

    @property
    def is_over(self) -> bool:
        """Whether the site has ended: nobody is to come back."""
        return self._over

    def waiting_for(self) -> list[str]:
        above = self._upstream.waits.lines() if self._upstream is not None else []
        return above or super().waiting_for()

    # -- the loop -----------------------------------------------------------------------------------------

    def run(self, until: Callable[[], bool]) -> None:
        """As Shard's, and it ends while it waits too, and when all of the site's workers have left. The hub
        is told when the site cannot go on."""
        self._until = until
        try:
            if self._model is not None:
                self._go_on()
            super().run(lambda: until() or time.monotonic() > self._ends_at)
        except _StoppedError:
            return
        except JournalError:
            raise  # it may be started again
        except Exception:
            if not self._over:
                self._link_up.goodbye()  # the other sites need not wait until the hub misses it
            raise

    def close(self) -> None:
        super().close()
        self._tell_of_links(self._links_seen.tell)
        if self._upstream is not None:
            self._upstream.close()

    def _tell_of_links(self, tell: Callable[[Link | None, Feedback | None], None]) -> None:
        tell(self._upstream, self._model.feedback if isinstance(self._model, SiteModel) else None)

    def _endpoints(self) -> list[Endpoint]:
        above = self._upstream.clients if self._upstream is not None else []
        return [*super()._endpoints(), *above]

    def _see_to_links(self) -> None:
        super()._see_to_links()
        if self._upstream is None and self._link_up.addresses:
            self._upstream = self._connect_up(self._link_up.addresses)
        if self._upstream is not None:
            self._upstream.take(_GRACE_SECONDS)
        self._tell_of_links(self._links_seen.tell_if_due)
        if not self._over:
            self._see_to_end()

    def _see_to_end(self) -> None:
        """A site whose workers have left ends; where they have died, it waits for some to come back."""
        if not self._site_log.is_over:
            self._alone_since = math.inf
            return
        self._alone_since = min(self._alone_since, time.monotonic())
        waited = time.monotonic() - self._alone_since
        if self._site_log.has_left:
            self._leave("all its workers have left")
        elif waited > RETURN_PATIENCES * self._link_up.welcome.patience:
            self._leave(f"all its workers were lost, and nobody came back for {waited:.1f} s")

    def _connect_up(self, addresses: list[str]) -> Link:
        upstream = Link(
            addresses,
            self._keys,
            hello=self._place.hello(self._run),
            parties=self._place.parties,
            timeout=self._timeout,
            where=self._where,
            tell=self.warn,
            meanwhile=self._meanwhile,
            beside=self._door_with_room,
            asks_every=_ASK_SECONDS,
            options=self._link,
        )
        for kind in _ANSWERS:
            upstream.on(kind, ignored)
        upstream.on(messages.Met, self._handle_met)
        upstream.on(messages.WantState, self._handle_want_from_above)
        upstream.on(messages.Mismatch, self._handle_mismatch_from_above)
        upstream.on(messages.Ended, ignored)
        upstream.on(messages.GiveState, self._handle_given_from_above)
        for number in self._meets:
            self._send_meet(upstream, number)
        held = ", and what is lost is held back" if self._link.holds_back else ""
        self._decide("link", self._link.transport, f"link.transport: to {len(addresses)} global shards{held}")
        return upstream

    def _where(self) -> list[str] | None:
        self._link_up.ask_where()
        return self._link_up.addresses or None

    def _meanwhile(self) -> None:
        """While the global shards are waited for: see to what cannot wait."""
        if self._until():
            raise _StoppedError
        self._link_up.take()
        self._tell_of_links(self._links_seen.tell_if_due)
        self._serve_meanwhile()

    def _door_with_room(self) -> list[Endpoint]:
        """Where the site's workers come in, if more of their messages may wait."""
        return [self._server] if len(self._inbox) < self.in_box else []

    def _leave(self, reason: str) -> None:
        """No other site is to wait for this one."""
        self._over, self._ends_at = True, time.monotonic() + _FAREWELL
        self._tell_of_links(self._links_seen.tell)
        last = self._site_log.last
        if self._upstream is not None and self._site_log.has_left and last is not None:
            self._upstream.send(LOG, messages.Ends(incarnation=self._place.incarnation, stand=last))
        if self._upstream is not None:
            self._upstream.close()
        self._link_up.goodbye()
        self._decide("site", "over", reason)

    # -- meetings -----------------------------------------------------------------------------------------

    def _tell_above(self, line: str) -> None:
        if self._upstream is not None and not self.kept.replaying:
            self._upstream.send(LOG, messages.Mismatch(line=line))

    def _handle_mismatch_from_above(
        self, _shard: int, message: AnyMessage, _payload: memoryview | None
    ) -> None:
        """Send the line to all workers of this site and end: scripts differ between the sites."""
        assert isinstance(message, messages.Mismatch)
        line = in_sites(message.line, self._place.names) if message.of_contributors else message.line
        self._site_log.handle_mismatch_from_above(line)
        raise MismatchError(line)

    def _meet(self, number: int, what: str, part: bytes, stand: WorkerStand | None) -> None:
        meet = messages.Meet(incarnation=self._place.incarnation, number=number, what=what, stand=stand)
        self._meets[number] = meet, memoryview(part)
        upstream = self._upstream
        if upstream is not None:
            self._peers.when_kept(lambda: self._send_meet(upstream, number))

    def _send_meet(self, upstream: Link, number: int) -> None:
        meet, part = self._meets[number]
        upstream.send(LOG, meet, part, until=(_MEETING, number))
        upstream.waits.expect(f"every site's part in {meet.what}", LOG)

    def _handle_met(self, _shard: int, message: AnyMessage, payload: memoryview | None) -> None:
        assert isinstance(message, messages.Met)
        assert self._upstream is not None
        if message.number not in self._meets:
            return  # the answer to what was sent twice
        self._upstream.waits.came()
        self._upstream.answered((_MEETING, message.number))
        self.kept.note(_ABOVE, messages.encode(message), payload)
        self._end_meeting(message, payload)

    def _end_meeting(self, message: messages.Met, payload: memoryview | None) -> None:
        self._meets.pop(message.number, None)
        self._site_log.end(message, payload)

    # -- who comes late where nobody lives ----------------------------------------------------------------

    def ask(self, iteration: int) -> None:
        """Ask the global log for the state of another site's worker."""
        if self._upstream is not None:  # else who comes late asks again
            self._upstream.send(LOG, messages.WantState(iteration=iteration), until=_ENTERING)

    def give(self, give: messages.GiveState, payload: memoryview | None) -> None:
        """Pass up what this site's worker gives to another site."""
        if self._upstream is not None:
            self._upstream.send(LOG, give, payload)

    def _handle_want_from_above(self, _shard: int, message: AnyMessage, _payload: memoryview | None) -> None:
        assert isinstance(message, messages.WantState)
        self._site_log.handle_want_from_above(message)

    def _handle_given_from_above(self, _shard: int, message: AnyMessage, payload: memoryview | None) -> None:
        assert isinstance(message, messages.GiveState)
        assert self._upstream is not None
        self._upstream.answered(_ENTERING)
        self.kept.note(_ABOVE, messages.encode(message))  # its payload is only passed on
        self._site_log.handle_given_from_above(message, payload)

    # -- setting up ---------------------------------------------------------------------------------------

    def _handle_setup(self, _peer: bytes, hello: Hello, setup: messages.Setup, _: memoryview | None) -> str:
        """All workers make the same sequence of set-ups: the first to come with its n-th begins the n-th."""
        if hello.role != "worker":
            return "a worker brings the Setup"
        if self._upstream is None and not self.kept.replaying:
            self._find_global_shards("to be set up")
        if self._model is not None and setup.digest != self._model.setup.digest:
            return self._trains_another()
        if self._setups.next_of((hello.worker, hello.incarnation), setup.number) <= self._lines.generation:
            return ""
        try:
            model = self._make_model(setup, self._lines.generation + 1)
        except Exception as error:  # the sender's mistake, not the shard's
            return (str(error) or type(error).__name__).splitlines()[0]
        bringer = self._site_log.incarnation(setup.first)
        self._site_log.state.loose = setup.consistency != "bsp"
        self._begin(model, (setup.first, bringer))
        if bringer:
            model.describe()
        else:
            model.begin()
        return ""

    def _make_model(self, setup: messages.Setup, number: int) -> SiteModel:
        return SiteModel(
            setup,
            self._upstream,
            number=number,
            place=self._place,
            workers=self._workers,
            shards=self._shards,
            used=self._site_log.used,
            stand=lambda: self._site_log.stand,
            alive=lambda: not self._site_log.has_left,
            settle=self._settle,
            note=lambda answer: self.kept.note(_ABOVE, messages.encode(answer)),
            link=self._link,
            codec=self._codec,
        )

    def _handle_ready(self, peer: bytes, hello: Hello, message: messages.Ready, _: memoryview | None) -> str:
        who, model = (hello.worker, hello.incarnation), self._model
        if isinstance(model, SiteModel) and who == self._setups.setter and not model.complete:
            model.begin()  # its values have all gone up
        return super()._handle_ready(peer, hello, message, None)

    def _handle_goodbye(
        self, _peer: bytes, hello: Hello, goodbye: messages.Goodbye, _: memoryview | None
    ) -> str:
        """A worker leaves: the site does not wait for it to come back."""
        if hello.role == "worker":
            self.kept.note(hello, messages.encode(goodbye))
            self._site_log.handle_goodbye(hello.worker, hello.incarnation)
        return ""

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

    # -- a life after death -------------------------------------------------------------------------------

    def recover_site(self, found: FoundSite) -> str:
        """Go on where the shard of this site stood that left this; returns what that was, in words."""
        self.kept.replaying, count = True, 0
        try:
            if found.image is not None:
                self._restore_site(found, found.image)
            for told, payload in found.told:
                self.hear_again(told, payload)
                count += 1
        finally:
            self.kept.replaying = False
        line = f"{self.name} goes on from {count} records of its journal: iteration {self._model_iteration()}"
        self._decide("shard", "goes on", line)
        return line

    def _restore_site(self, found: FoundSite, image: SiteImage) -> None:
        shard = image.shard
        model = self._make_model(image.between, shard.generation)
        model.remember(shard.model, found.parts[CONTRIBUTION], {})
        model.optimizer.set_hyperparameters(image.hyperparameters)
        model.clock = image.clock
        held = found.parts[HELD]
        model.feedback.restore(
            {
                chunk: (tensor_of(held[chunk], model.optimizer.dtype(chunk)), weight)
                for chunk, weight in image.held.items()
            }
        )
        self._take_place(model, shard)
        assert shard.log is not None
        last = found.parts[LAST_MEETING].get(0)
        self._site_log.restore(shard.log, found.parts[MEETING], None if last is None else bytes(last))
        self._site_log.met = image.met

    def hear_again(self, told: Told, payload: memoryview | None) -> None:
        """As a shard's, and what the global shards had said."""
        message = decode_untrusted(bytes(told.message))
        if isinstance(message, messages.Met):
            self._end_meeting(message, payload)
            self._apply_entries()
        elif isinstance(message, messages.GiveState) and told.role == _ABOVE.role:
            self._site_log.handle_given_from_above(message, None)
        elif isinstance(message, (messages.Mean, messages.Parameters)):
            assert isinstance(self._model, SiteModel)
            self._model.hear_losses(message)
        else:
            super().hear_again(told, payload)

    def _go_on(self) -> None:
        """Before anybody is answered: find the global shards, and have what was under way done."""
        upstream = self._find_global_shards(f"to go on from iteration {self._model_iteration()}")
        assert isinstance(self._model, SiteModel)
        self._model.go_on(upstream)

    def _find_global_shards(self, why: str) -> Link:
        """Connect to them once the hub knows where all are: they may come later than the site's workers."""
        since = time.monotonic()
        while not self._link_up.addresses:
            waited = time.monotonic() - since
            if waited > self._timeout:
                raise DeadlineError(
                    f"site {self._place.name!r} waited {waited:.1f} s for the hub at "
                    f"{self._link_up.client.address} on the global shards' addresses, {why} (deadline "
                    f"--timeout, {self._timeout:g} s)"
                )
            if self._until():
                raise _StoppedError
            poll([self._link_up.client], _LOOK_SECONDS)
            self._link_up.take()
        upstream = self._upstream = self._connect_up(self._link_up.addresses)
        return upstream

    def _settle(self) -> None:
        """What is about to go up tells of all that was taken in: wait until that is in the journal."""
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
                    f"{journal.folder.path} to be written, before iteration {self._model_iteration()} "
                    f"goes up (deadline --timeout, {self._timeout:g} s)"
                )
            poll([], _LOOK_SECONDS, journal.fileno)
            journal.release()

    def _model_iteration(self) -> int:
        return self._model.iterations if self._model is not None else 0

    def _poll_snapshots(self) -> None:
        """Now and then the journal begins anew, with all that is remembered: between two iterations, when
        no payloads have to be written with it but those that came early."""
        journal, model = self.kept.journal, self._model
        if journal is None or not isinstance(model, SiteModel) or not model.complete:
            return
        large = journal.size > max(_SMALL_JOURNAL, _LARGE_JOURNAL * model.held_bytes)
        if time.monotonic() < self._image_at and not large:
            return
        if self._upstream is None or not self.is_between_lines or self._meets or model.mean is not None:
            return
        self._image_at = time.monotonic() + self._image_seconds
        shard, parts = self.image()
        held = model.feedback.state()
        # What is held now is changed while the journal still writes it.
        parts += [(Part(HELD, chunk), payload_of(values.clone())) for chunk, (values, _) in held.items()]
        image = SiteImage(
            shard=shard,
            between=model.between,
            hyperparameters=model.optimizer.hyperparameters,
            clock=model.clock,
            met=self._site_log.met,
            held={chunk: weight for chunk, (_, weight) in held.items()},
        )
        number = journal.begin_segment(encode_site_image(image), parts)
        journal.when_written(lambda: journal.drop_before(number))
