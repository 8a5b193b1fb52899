"""A shard at work: one thread, one loop, that takes messages and does what the store decides.

Messages come from outside: each is checked before anything is kept for it, and what is wrong is refused with
a line, or dropped and counted. What they lead to is done by its parts: `durability` notes it, `loglines` has
the log's lines in order, `stepper` does what they say, `setups` knows which set-up each worker is at, and
`logdesk` takes what is for the log.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from atoll.core.errors import CheckpointError, GivenUpError, UserError
from atoll.core.events import AnyEvent, Decided, Warned
from atoll.core.points import reach
from atoll.core.runclock import record_time
from atoll.net.endpoint import Endpoint, Received, Server, poll
from atoll.net.keys import Keys
from atoll.observe.lastwords import say
from atoll.server.durability import Durability
from atoll.server.journal import Journal, JournalError
from atoll.server.links import HubLink, earliest
from atoll.server.logdesk import Handler, LogDesk
from atoll.server.logkeeper import LogKeeper
from atoll.server.loglines import LogLines
from atoll.server.mirror import Mirror
from atoll.server.model import Model, no_share
from atoll.server.peers import Peers
from atoll.server.recovery import (
    CONTRIBUTION,
    LAST_MEETING,
    MEAN,
    MEETING,
    Found,
    KeptParts,
    Parts,
    ShardImage,
)
from atoll.server.setups import SetUps, unlike_codecs
from atoll.server.snapshot import Heading, Snapshots, restore
from atoll.server.stepper import Stepper
from atoll.store.entries import Fenced, decode_entry_untrusted
from atoll.store.pulls import AnyPull, Asked
from atoll.store.records import Part, Told
from atoll.wire import messages
from atoll.wire.lost import ZERO
from atoll.wire.messages import AnyMessage, Hello, Refused, WireError, decode_untrusted

_LONGEST_WAIT = 0.5  # seconds, for timers that no message announces
_RETRY = 0.01  # seconds, while a connection takes nothing more
_AT_ONCE = 64  # messages taken before timers and links have their turn
IN_BOX = 64  # messages taken while chunks are stepped, and kept for later
_LAST_WORDS = 0.3  # seconds for these to leave
_WARNED = 4096  # workers of which a refusal is told
_REFUSED_STRANGERS = 1000  # beyond, those who did not say Hello get no answer


class Shard:
    """Shard `index` of `run`, which begins with `workers` workers; shard 0 keeps the log.

    `server` is where workers come in. `hub` is the link to the hub, without which `log_address` says where
    shard 0 is. `configured` is the operator's own optimizer ("package.module:Class"), and `codec` the one
    codec that it may load beside Atoll's own; `fused` as in ShardOptimizer. `emit` takes core's events, of
    worker -1. With a `journal` nothing leaves before what it may tell of is written there, and `recover` has
    a shard go on where the one before it was killed. With a `mirror` a standby holds it too; a standby's own
    shard is driven by `server/standby.py` until it `serves`.
    """

    def __init__(
        self,
        index: int,
        server: Server,
        *,
        run: str,
        workers: int,
        keys: Keys | None = None,
        hub: HubLink | None = None,
        log_address: str = "",
        configured: str = "",
        codec: str = "",
        fused: bool = False,
        snapshots: Snapshots | None = None,
        journal: Journal | None = None,
        mirror: Mirror | None = None,
        emit: Callable[[AnyEvent], None] = lambda _event: None,
    ) -> None:
        self.index, self._server, self._run, self._keys = index, server, run, keys
        self.name = f"shard {index}"  # as its workers know it
        self.site = ""  # whose shard it is: no site's
        self._hub, self._emit = hub, emit
        self._configured, self._codec, self._fused = configured, codec, fused
        self.kept = Durability(journal, mirror, snapshots, self._journal_broke)
        self._peers = Peers(server, run)
        self._peers.when_kept = self.kept.when_kept
        if hub is not None:
            self._peers.heard_of(hub.welcome.incarnation)
        if mirror is not None:
            mirror.changed, mirror.tell = self.tell_comes_back, partial(self._decide, self.name)
        # Called between two chunks, while messages are heard again.
        self.meanwhile: Callable[[], None] = lambda: None
        self._model: Model | None = None
        self._lines = LogLines(index, run, keys, hub, self.kept, lambda: self._model)
        self._log = self._make_log(workers)
        self._desk = LogDesk(index, self._log, self._peers, lambda: self._model)
        self._stepper = Stepper(self._peers, self.kept, lambda: self._model, self._serve_meanwhile)
        self._setups = SetUps(self._lines, self._peers, self._refuse)
        self._inbox: deque[tuple[Received, AnyMessage | None]] = deque()
        self._strangers = 0
        self._warned: set[tuple[int, int]] = set()  # workers whose first refusal was told
        self._port_told: set[str] = set()  # kinds of reports on the port
        self.refused = 0  # messages refused
        self.in_box = IN_BOX
        self.at_once: tuple[type, ...] = (messages.WhoIsMissing,)  # handled while chunks are stepped, too
        if index and log_address:
            self._lines.follow_at(log_address)
        self._handlers: dict[type, Handler] = {
            **self._desk.handlers,
            messages.Push: self._handle_push,
            messages.Pull: self._handle_pull,
            messages.PullMean: self._handle_pull,
            messages.Replace: self._handle_replace,
            messages.WhoIsMissing: self._handle_who_is_missing,
            messages.Setup: self._handle_setup,
            messages.SetChunk: self._handle_set_chunk,
            messages.Ready: self._handle_ready,
            messages.PullState: self._handle_pull_state,
        }

    def _make_log(self, workers: int) -> LogKeeper | None:
        return LogKeeper(workers, self._peers, self._lines.queue) if self.index == 0 else None

    @property
    def dropped(self) -> int:
        """Messages that were none of ours."""
        return self._server.dropped

    @property
    def model(self) -> Model | None:
        """What is trained, once it is described."""
        return self._model

    @property
    def is_between_lines(self) -> bool:
        """Whether no line of the log waits to be applied."""
        return self._lines.is_empty

    def waiting_for(self) -> list[str]:
        """Who is waited for and on what, as the log knows it: empty on other shards."""
        return self._log.waiting_for() if self._log is not None else []

    # -- the loop -----------------------------------------------------------------------------------------

    def run(self, until: Callable[[], bool]) -> None:
        """Serve until `until()`, which is asked at least twice a second. When the shard cannot go on, all
        workers are told why, and the error is raised."""
        try:
            while not until():
                self._turn()
        except (JournalError, GivenUpError):
            raise  # the workers wait: it may be started again, or another has its place
        except Exception as error:
            if self.kept.is_gated:
                raise  # its standby takes its place
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            told = Refused(reason=f"{self.name} cannot go on: {reason}"[:4000])
            for peer in self._peers.workers():
                self._peers.send(peer, told)
            time.sleep(_LAST_WORDS)
            raise

    def close(self) -> None:
        """Drop the connections that this shard made, and the snapshot under way; write the journal's rest."""
        self.kept.close()
        self._lines.close()

    def _turn(self) -> None:
        """Wait for something to happen, and see to it."""
        kept, now = self.kept, time.monotonic()
        retry = now + _RETRY if self._peers.busy or self._lines.is_held else None
        busy, full = bool(self._inbox) or kept.busy, kept.is_full
        timeout = 0.0 if busy and not full else earliest([kept.next_deadline, retry], _LONGEST_WAIT)
        poll(self._links() if full else self._endpoints(), timeout, kept.fileno)
        kept.release()
        for _ in range(0 if full else _AT_ONCE):
            if not self._take_one():
                break
            self._apply_entries()
        self._see_to_links()
        self._apply_entries()
        kept.release()
        self._peers.flush()
        if self._log is not None:
            self._log.poll()
        self._poll_snapshots()

    def _poll_snapshots(self) -> None:
        self.kept.poll_snapshots(self)

    def _endpoints(self) -> list[Endpoint]:
        """What messages come from."""
        return [self._server, *self._links()]

    def _links(self) -> list[Endpoint]:
        """The connections that this shard has made."""
        links = (self._hub, self._lines, self.kept.mirror)
        return [link.client for link in links if link is not None and link.client is not None]

    def _take_one(self) -> bool:
        """Handle the next message, if there is one."""
        if self._inbox:
            received, message = self._inbox.popleft()
        else:
            taken = self._server.receive(0)
            if taken is None:
                return False
            received, message = taken, self._decode(taken)
        if message is not None:
            self._handle(received, message)
        return True

    def _decode(self, received: Received) -> AnyMessage | None:
        try:
            message = decode_untrusted(received.header)
        except WireError as error:
            self._server.dropped += 1
            self._refuse(received.peer, str(error), "")
            return None
        if isinstance(message, messages.Push) and (message.lost is not None or received.lost is not None):
            return self._with_losses(received, message)
        return message

    def _with_losses(self, received: Received, push: messages.Push) -> messages.Push | None:
        """A Push with the link's word on its payload; None for one that says itself what was lost."""
        if push.lost is not None:
            self._refuse(received.peer, "a Push does not say what was lost of it: the link does", "Push")
            return None
        lost = received.lost
        if lost is None or not any(lost.missing):
            return msgspec.structs.replace(push, lost=None)
        # A block that were left out of the mean now, and in full in a later one, would step too far.
        if push.late:
            lost = msgspec.structs.replace(lost, how=ZERO)
        return msgspec.structs.replace(push, lost=lost)

    def _handle(self, received: Received, message: AnyMessage) -> None:
        name = type(message).__name__
        if isinstance(message, Hello):
            reason = self._greet(received.peer, message)
        else:
            hello, handler = self._peers.who(received.peer), self._handlers.get(type(message))
            if hello is None:
                reason = "say Hello first"
            elif handler is None:
                reason = f"a shard takes no {name}"
            elif (
                hello.role == "worker"
                and getattr(message, "incarnation", hello.incarnation) != hello.incarnation
            ):
                reason = f"this connection is of incarnation {hello.incarnation}"
            else:
                reason = self._do(handler, hello, message, received)
        if reason:
            self._refuse(received.peer, reason, name)

    def _do(self, handler: Handler, hello: Hello, message: AnyMessage, received: Received) -> str:
        """Note a message, and handle it; returns why not. What is noted of a Push are its values: whoever
        hears it again, from the journal or as the standby, has the same bits, whatever the codec."""
        payload = received.payload
        if isinstance(message, messages.Push) and self._model is not None:
            try:
                message, payload = self._model.decoded(message, payload)
            except WireError as error:
                return f"chunk {message.chunk} of iteration {message.iteration}: {error}"
        self.kept.note_message(hello, message, received.header, payload)
        return handler(received.peer, hello, message, payload)

    def _refuse(self, peer: bytes, reason: str, request: str) -> None:
        if self.kept.replaying:
            return
        self.refused += 1
        hello = self._peers.who(peer)
        if hello is not None and request in ("Push", "Commit"):
            self._warn_refused(hello, reason)
        if hello is None:
            self._strangers += 1
            if self._strangers > _REFUSED_STRANGERS and request != "Hello":
                return
        self._peers.send(peer, Refused(reason=reason[:4000], request=request))

    def _warn_refused(self, hello: Hello, reason: str) -> None:
        """Leave word of what a worker was refused first, since its process may say nothing."""
        who = hello.worker, hello.incarnation
        if who not in self._warned and len(self._warned) < _WARNED:
            self._warned.add(who)
            self.warn(f"{self.name} refuses what worker {hello.worker} contributes: {reason}")

    def _see_to_links(self) -> None:
        if report := self._server.take_report():
            self._tell_of_port(report)
        if self._hub is not None:
            self._hub.steps = self._model.iterations if self._model is not None else 0
            self._hub.take()
        if self.kept.mirror is not None:
            self.kept.mirror.poll(self)
        self._lines.see_to_link()

    def _tell_of_port(self, report: str) -> None:
        """Tell people the first report of each kind, and put later ones into the records alone."""
        line, kind = f"{self.name}'s port {self._server.address}: {report}", report.partition(" ")[0]
        if kind in self._port_told:
            self.warn(line)
        else:
            self._port_told.add(kind)
            self._tell_people(line)

    # -- at the door --------------------------------------------------------------------------------------

    def _greet(self, peer: bytes, hello: Hello) -> str:
        reason = self._peers.greet(peer, hello)
        if reason:
            return reason
        late = False
        if hello.role == "worker" and hello.site != self.site:
            self._peers.forget(
                peer
            )  # it looks for another shard, whose port this one has got: see `_welcome`
            self._welcome(peer, hello, False)
            return ""
        if hello.role == "worker":
            reach("shard.hello")
            if self._log is not None:
                late = self._log.is_late(hello.worker, hello.incarnation)
                self.kept.note(hello, messages.encode(hello))
                reason = self._log.handle_join(hello.worker, hello.incarnation)
            elif self._model is not None:
                reason = self._model.state.refusal(hello.worker, hello.incarnation)
        elif self._log is None:
            reason = f"shard {self.index} keeps no log; shard 0 does"
        elif hello.role == "shard":
            self._log.greet_shard(hello.shard)
        if reason:
            self._peers.forget(peer)
            return reason
        self._welcome(peer, hello, late)
        if hello.role == "hub" and self._log is not None:
            self._log.greet_hub()
        return ""

    def _welcome(self, peer: bytes, hello: Hello, late: bool) -> None:
        """Say who this is: who looks for another shard goes on looking."""
        welcome = messages.Welcome(
            run=self._run,
            worker=hello.worker,
            incarnation=hello.incarnation,
            shard=self.index,
            sites=[self.site] if self.site else [],
            comes_back=self.kept.comes_back,
            late=late,
        )
        self._peers.send(peer, welcome)

    def _journal_broke(self, line: str) -> None:
        """The shard serves on without its journal: tell people, and workers that it does not come back."""
        self._tell_people(line)
        self.tell_comes_back()

    def journal_is_whole(self) -> None:
        """A snapshot is whole, and the journal since: the shard may be waited for again."""
        if not self.kept.is_on_disk:
            self.kept.is_on_disk = True
            self.tell_comes_back()
            if self.kept.journal is not None and not self.kept.journal.required:
                self._tell_people(f"{self.name}: its journal is written again")

    def _tell_people(self, line: str) -> None:
        """In the records, in this process's log, and to `atoll run`, whatever the disk takes of these."""
        self.warn(line)
        say(Warned(time=record_time(), worker=-1, message=line))
        with contextlib.suppress(OSError):
            print(f"atoll: warning: {line}", file=sys.stderr, flush=True)

    def tell_comes_back(self) -> None:
        """Whether the shard may be waited for is another than it was."""
        for peer in [*self._peers.workers(), *self._peers.shards()]:
            welcome = messages.Welcome(run=self._run, shard=self.index, comes_back=self.kept.comes_back)
            self._peers.send(peer, welcome)

    # -- setting up ---------------------------------------------------------------------------------------

    def _handle_setup(self, _peer: bytes, hello: Hello, setup: messages.Setup, _: memoryview | None) -> str:
        who = hello.worker, hello.incarnation
        if hello.role != "worker":
            return "a worker brings the Setup"
        model, wanted = self._model, self._setups.next_of(who, setup.number)
        if model is not None and model.complete and who != self._setups.setter:
            if setup.codec != model.setup.codec:
                return unlike_codecs(hello.worker, setup.codec, self._setups.setter[0], model.setup.codec)
            if setup.digest != model.setup.digest:
                return self._trains_another()
            if wanted <= self._lines.generation:
                return ""  # a first worker that has come anew: what is here is the truth, it pulls it
        if setup.number and wanted <= self._lines.generation and who == self._setups.setter:
            self._setups.setter_member = hello.member
            return ""  # it comes again
        try:
            model = self._model_of(setup)
        except (
            Exception
        ) as error:  # a layout that no memory holds, say: the sender's mistake, not the shard's
            return (str(error) or type(error).__name__).splitlines()[0]
        self._begin(model, who)
        self._setups.setter_member = hello.member
        return ""

    def _trains_another(self) -> str:
        return f"this shard trains another model or optimizer, brought by worker {self._setups.setter[0]}"

    def _begin(self, model: Model, setter: tuple[int, int]) -> None:
        """Train this from now on; `setter` brings it."""
        setup = model.setup
        self.kept.abandon_snapshot()
        self._model, self._setups.setter = model, setter
        self._lines.begin()
        self.kept.set_up()
        if self._log is not None:
            self._log.set_up(setup, model.holders)
        else:
            self._lines.follow()
        if self.kept.replaying:
            return
        self._decide(
            "shard",
            f"{len(model.chunks)} chunks, {model.held_bytes} bytes, {setup.optimizer}, {setup.consistency}",
            f"worker {setter[0]} describes the model",
        )

    def _handle_set_chunk(
        self, _peer: bytes, hello: Hello, message: messages.SetChunk, payload: memoryview | None
    ) -> str:
        if self._model is None:
            return "Setup comes before SetChunk"
        if (hello.worker, hello.incarnation) != self._setups.setter:
            bringer = self._setups.setter[0]
            return "" if self._model.complete else f"worker {bringer} brings this shard's values"
        if message.number and self._model.complete:
            return ""  # it comes again
        if not self.kept.replaying:
            reach("shard.setup")
        return self._model.set_chunk(message, payload)

    def _handle_ready(self, _peer: bytes, hello: Hello, message: messages.Ready, _: memoryview | None) -> str:
        """A worker asks to be told when all is there that its set-up brings."""
        who = hello.worker, hello.incarnation
        if hello.role != "worker":
            return "workers ask whether a shard is ready"
        brings = who == self._setups.setter and hello.member == self._setups.setter_member
        if self._model is not None and brings and not self._model.complete:
            reason = self._model.finish()
            if reason:
                return reason
        self._setups.wait(who, hello.member, message)
        self._setups.answer(self._model)
        return ""

    # -- contributions ------------------------------------------------------------------------------------

    def _handle_push(self, peer: bytes, hello: Hello, push: messages.Push, payload: memoryview | None) -> str:
        if self._model is None or hello.role != "worker":
            return "this shard is not set up yet"
        reason, staged = self._model.push(hello.worker, push, payload)
        if staged and not self.kept.replaying:
            reach("shard.staged", push.iteration)
        if staged and self._log is not None:
            if not self.kept.replaying:
                self._peers.when_kept(lambda: reach("shard.journalled", push.iteration))
            reason = self._log.handle_staged(0, hello.worker, push.incarnation, push.iteration)
        elif staged and not self.kept.replaying:
            self._lines.tell_staged(hello.worker, push.incarnation, push.iteration)
        if push.pull and not reason and not self.kept.replaying:
            return self._handle_pull(peer, hello, self._model.pull_with(push), None)
        return reason

    def _handle_replace(
        self, _peer: bytes, hello: Hello, replace: messages.Replace, payload: memoryview | None
    ) -> str:
        if self._model is None or hello.role != "worker":
            return "this shard is not set up yet"
        return self._model.replace(hello.worker, replace, payload)

    def _handle_who_is_missing(
        self, peer: bytes, _hello: Hello, _message: messages.WhoIsMissing, _: memoryview | None
    ) -> str:
        self._peers.send(peer, messages.Missing(lines=[line[:4000] for line in self.waiting_for()][:8192]))
        return ""

    # -- pulls --------------------------------------------------------------------------------------------

    def _handle_pull(self, _peer: bytes, hello: Hello, pull: AnyPull, _: memoryview | None) -> str:
        if self._model is None or hello.role != "worker":
            return "this shard is not set up yet"
        if pull.share >= pull.shares:
            return no_share(pull.share, pull.shares)
        reason = self._model.state.refusal(hello.worker, pull.incarnation)
        if not reason:
            self._stepper.pull(Asked(hello.worker, pull, hello.member))
        return reason

    def _may_pull(self, hello: Hello | None, pull: AnyPull) -> bool:
        assert self._model is not None
        return (
            hello is not None
            and hello.role == "worker"
            and hello.incarnation == pull.incarnation
            and pull.share < pull.shares
            and not self._model.state.refusal(hello.worker, pull.incarnation)
        )

    def _handle_pull_state(
        self, peer: bytes, hello: Hello, message: messages.PullState, _: memoryview | None
    ) -> str:
        if self._model is None or hello.role != "worker":
            return "this shard is not set up yet"
        self._stepper.send_state(peer, message)
        return ""

    # -- the log's lines ----------------------------------------------------------------------------------

    def _apply_entries(self) -> None:
        while (entry := self._lines.take_next()) is not None:
            self._stepper.apply(entry)
            if isinstance(entry, Fenced):
                self._tell_fenced(entry)

    def _serve_meanwhile(self) -> None:
        """Answer what came while chunks are stepped, or on their way here, and cannot wait."""
        if self.kept.replaying:
            self.meanwhile()
            return
        for asked in self._asked_meanwhile():
            self._stepper.join(asked)
        self.kept.hear()
        self._peers.flush()

    def _asked_meanwhile(self) -> list[Asked]:
        """Pulls that came while chunks were stepped and are ready now; other messages wait for their turn."""
        ready: list[Asked] = []
        while len(self._inbox) < self.in_box and (received := self._server.receive(0)) is not None:
            message, hello = self._decode(received), self._peers.who(received.peer)
            if message is not None and isinstance(message, self.at_once) and hello is not None:
                self._handle(received, message)  # of one whose Hello does not wait, too
            elif (
                not self._stepper.is_stepping
                or not isinstance(message, (messages.Pull, messages.PullMean))
                or not self._may_pull(hello, message)
            ):
                self._inbox.append((received, message))
            elif hello is not None:
                asked = Asked(hello.worker, message, hello.member)
                ready += [asked] * self._stepper.is_ready(asked)
        return ready

    def _tell_fenced(self, entry: Fenced) -> None:
        for peer in self._peers.members(entry.worker, entry.incarnation):
            self._refuse(
                peer,
                f"worker {entry.worker} of incarnation {entry.incarnation} was given up, or has left: "
                "nothing of it is taken any more",
                "",
            )

    # -- a life after death -------------------------------------------------------------------------------

    def image(self) -> tuple[ShardImage, Parts]:
        """All that the shard remembers between two messages, beside what a snapshot has."""
        assert self._model is not None
        model, contributions, mean = self._model.remembered()
        log = self._log
        meeting, last = (log.payloads, log.last_payload) if log is not None else ({}, None)
        image = ShardImage(
            generation=self._lines.generation,
            next_entry=self._lines.next_entry,
            setter=self._setups.setter,
            bases=dict(self._setups.bases),
            readies=dict(self._setups.readies),
            model=model,
            log=log.state if log is not None else None,
        )
        found = {CONTRIBUTION: contributions, MEAN: mean, MEETING: meeting}
        parts = [(Part(kind, key), each) for kind, held in found.items() for key, each in held.items()]
        return image, [*parts, *([(Part(LAST_MEETING, 0), last)] if last is not None else [])]

    def heading(self) -> Heading:
        """What a snapshot taken now is of."""
        assert self._model is not None
        return self._model.heading(self._run, self.index, self._lines.next_entry)

    def recover(self, found: Found) -> str:
        """Go on where the shard stood that left this; returns what that was, in words."""
        self.kept.replaying = True
        try:
            if found.image is not None and found.snapshot is not None:
                self._restore(found.snapshot, found.image, found.parts)
            count = 0
            for told, payload in found.told:
                self.hear_again(told, payload)
                count += 1
        finally:
            self.kept.replaying = False
        where = found.snapshot.name if found.snapshot is not None else "the beginning"
        at = self._model.iterations if self._model is not None else 0
        line = f"{self.name} goes on from {where} and {count} records of its journal: iteration {at}"
        self._decide("shard", "goes on", line)
        return line

    def _restore(self, snapshot: Path, image: ShardImage, parts: KeptParts) -> None:
        try:
            model = self.make_model(image)
        except UserError as error:
            raise CheckpointError(f"{snapshot}: {error}") from None
        model.own.set_hyperparameters(restore(snapshot, model.own).heading.hyperparameters)
        self.stand_as(model, image, parts)

    def make_model(self, image: ShardImage) -> Model:
        """The model that a primary's state describes, without its chunks. Raises UserError for one that this
        shard cannot hold."""
        return self._model_of(image.model.setup)

    def _model_of(self, setup: messages.Setup) -> Model:
        return Model(setup, self.index, configured=self._configured, fused=self._fused, codec=self._codec)

    def stand_as(self, model: Model, image: ShardImage, parts: KeptParts) -> None:
        """Be as `image` says, with a model whose chunks are as they were then, or are awaited."""
        model.remember(image.model, parts[CONTRIBUTION], parts[MEAN])
        self._take_place(model, image)
        self.kept.set_up()
        if self._log is not None and image.log is not None:
            last = parts[LAST_MEETING].get(0)
            self._log.restore(image.log, parts[MEETING], None if last is None else bytes(last))

    def _take_place(self, model: Model, image: ShardImage) -> None:
        """Train this from now on, from where the image stood."""
        self._model = model
        self._lines.generation, self._lines.next_entry = image.generation, image.next_entry
        self._setups.setter = image.setter
        self._setups.bases, self._setups.readies = dict(image.bases), dict(image.readies)

    def stand_by(self) -> None:
        """Hear only what the primary has heard, and answer nobody, until `serves`."""
        self.kept.replaying = True

    def serves(self) -> None:
        """Be the primary from now on, and say so at once."""
        self.kept.replaying = False
        self._see_to_links()

    def takes_over(self) -> str:
        """Say that this was the standby, and is the primary now; returns that, in words."""
        at = self._model.iterations if self._model is not None else 0
        line = f"{self.name} takes its primary's place: iteration {at}"
        self._decide("shard", "takes its primary's place", line)
        return line

    def rest(self) -> None:
        """What a standby does between two messages."""
        if self._log is not None:
            self._log.poll()
        self._poll_snapshots()

    def hear_again(self, told: Told, payload: memoryview | None) -> None:
        """Handle once more what the journal has, or what the primary has heard: it leads to the same."""
        self.kept.remember(told, payload)
        message = decode_untrusted(bytes(told.message))
        hello = Hello(
            version=messages.VERSION,
            run=self._run,
            role=told.role,
            worker=told.index if told.role == "worker" else -1,
            incarnation=told.incarnation,
            member=told.member,
            shard=told.index if told.role == "shard" else -1,
        )
        if isinstance(message, messages.Entry):
            self._lines.queue(message.sequence, decode_entry_untrusted(message.entry))
        elif isinstance(message, Hello):
            if self._log is not None:
                self._log.handle_join(hello.worker, hello.incarnation)
        else:
            self._handlers[type(message)](b"", hello, message, payload)
        self._apply_entries()

    # -- telling ------------------------------------------------------------------------------------------

    def _decide(self, what: str, choice: str, reason: str) -> None:
        self._emit(Decided(time=record_time(), worker=-1, what=what, choice=choice, reason=reason))

    def warn(self, line: str) -> None:
        """Tell people something that does not stop the run."""
        self._emit(Warned(time=record_time(), worker=-1, message=line))
