"""A shard at work: one thread, one loop, that takes messages and does what the store decides.

Messages come from outside: each is checked before anything is kept for it, and what is wrong is refused with
a line, or dropped and counted. When the log says to combine or to step, that is done chunk by chunk; each
chunk goes to those who wait for it as soon as it is ready, and whoever asks meanwhile is served too.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from atoll.core.errors import CheckpointError, GivenUpError, UserError
from atoll.core.events import AnyEvent, Decided, Warned
from atoll.core.points import reach
from atoll.net.endpoint import Endpoint, Received, Server, poll
from atoll.net.keys import Keys
from atoll.server.journal import Journal, JournalError
from atoll.server.links import HubLink, LogLink, earliest
from atoll.server.logkeeper import LogKeeper, sequence_of
from atoll.server.mirror import Mirror
from atoll.server.model import Model
from atoll.server.payloads import payload_of
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
    encode_image,
)
from atoll.server.snapshot import Heading, Snapshots, restore
from atoll.store.entries import Entry, Fenced, Step, decode_entry_untrusted
from atoll.store.outcomes import StoreError
from atoll.store.records import Part, Told
from atoll.store.shard import AnyPull
from atoll.wire import messages
from atoll.wire.messages import AnyMessage, Hello, Refused, WireError, decode_untrusted

_LONGEST_WAIT = 0.5  # seconds, for timers that no message announces
_RETRY = 0.01  # seconds, while a connection takes nothing more
_AT_ONCE = 64  # messages taken before timers and links have their turn
IN_BOX = 64  # messages taken while chunks are stepped, and kept for later
_LAST_WORDS = 0.3  # seconds for these to leave
_REFUSED_STRANGERS = 1000  # beyond, those who did not say Hello get no answer
_ASK_WHERE = 0.5  # seconds between questions where shard 0 is, while it is not to be reached
_ASK_LINES = 0.5  # seconds between questions for a line of the log that did not come
_SMALL_JOURNAL = 2**28  # bytes of a segment that are no reason for a snapshot
_LARGE_JOURNAL = 8  # times what the shard holds: a snapshot is due

# What changes the shard: in its journal before anybody is answered.
_JOURNALLED = (
    messages.Push,
    messages.Replace,
    messages.Commit,
    messages.Step,
    messages.Meet,
    messages.Arrive,
    messages.WantState,
    messages.GiveState,
    messages.Setup,
    messages.SetChunk,
    messages.Ready,
    messages.Fence,
    messages.Follow,
    messages.Staged,
)


_LOG = Hello(version=messages.VERSION, run="", role="shard", shard=0)  # from whom lines of the log come


class Shard:
    """Shard `index` of `run`, which begins with `workers` workers; shard 0 keeps the log.

    `server` is where workers come in. `hub` is the link to the hub, without which `log_address` says where
    shard 0 is. `configured` is the operator's own optimizer ("package.module:Class"); `fused` as in
    ShardOptimizer. `emit` takes core's events, of worker -1. With a `journal` nothing leaves before what it
    may tell of is written there, and `recover` has a shard go on where the one before it was killed. With a
    `mirror` a standby holds it too; a standby's own shard is driven by `server/standby.py` until it `serves`.
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
        fused: bool = False,
        snapshots: Snapshots | None = None,
        journal: Journal | None = None,
        mirror: Mirror | None = None,
        emit: Callable[[AnyEvent], None] = lambda _event: None,
    ) -> None:
        self.index, self._server, self._run, self._keys = index, server, run, keys
        self.name = f"shard {index}"  # as its workers know it
        self.site = ""  # whose shard it is: no site's
        self._hub, self._snapshots, self._emit = hub, snapshots, emit
        self._configured, self._fused = configured, fused
        self._peers = Peers(server, run)
        self._journal, self._replaying = journal, False
        if journal is not None:
            self._peers.when_kept = journal.when_written
        self._mirror = mirror
        if mirror is not None:
            self._peers.when_kept = mirror.when_kept
            mirror.changed, mirror.tell = self.tell_comes_back, partial(self._decide, self.name)
        self.is_on_disk = True  # the journal, where there is one, suffices to go on from
        self.wants_snapshot = False
        # Called between two chunks, while messages are heard again.
        self.meanwhile: Callable[[], None] = lambda: None
        self._asked_where = 0.0  # when the hub was asked where shard 0 is
        self._log = self._make_log(workers)
        self._link: LogLink | None = None
        self._model: Model | None = None
        self._setter = (-1, 0)  # the worker and incarnation that brought the Setup
        self._generation = 0  # how many Setups were put into effect
        self._next_entry = 0  # of this generation
        self._entries: deque[tuple[int, Entry]] = deque()  # sequence; not applied yet
        self._asked_line = (-1, 0.0)  # the latest that did not come and was asked for, and when; monotonic
        self._bases: dict[tuple[int, int], int] = {}  # the generation that a worker's set-up 0 would be
        self._readies: dict[tuple[int, int], int] = {}  # the generation that a worker's latest Ready is for
        self._waiting: dict[tuple[int, int], tuple[int, messages.Ready]] = {}  # by generation
        self._inbox: deque[tuple[Received, AnyMessage | None]] = deque()
        self._active: list[tuple[int, AnyPull]] = []  # those who get each chunk as it is ready
        self._done: list[int] | None = None  # while a line is applied: the chunks that are
        self._strangers = 0
        self.refused = 0  # messages refused
        self.in_box = IN_BOX
        self.at_once: tuple[type, ...] = (messages.WhoIsMissing,)  # handled while chunks are stepped, too
        if index and log_address:
            self._connect(log_address)
        self._handlers: dict[type, Callable[[bytes, Hello, Any, memoryview | None], str]] = {
            messages.Push: self._handle_push,
            messages.Pull: self._handle_pull,
            messages.PullMean: self._handle_pull,
            messages.Replace: self._handle_replace,
            messages.Commit: self._handle_for_log,
            messages.Step: self._handle_for_log,
            messages.Meet: self._handle_meet,
            messages.Arrive: self._handle_entering,
            messages.WantState: self._handle_entering,
            messages.GiveState: self._handle_entering,
            messages.WhoIsMissing: self._handle_who_is_missing,
            messages.Setup: self._handle_setup,
            messages.SetChunk: self._handle_set_chunk,
            messages.Ready: self._handle_ready,
            messages.PullState: self._handle_pull_state,
            messages.Fence: self._handle_fence,
            messages.Look: self._handle_look,
            messages.Follow: self._handle_shard,
            messages.Staged: self._handle_shard,
        }

    def _make_log(self, workers: int) -> LogKeeper | None:
        return LogKeeper(workers, self._peers, self._queue) if self.index == 0 else None

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
        return not self._entries

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
            if self._mirror is not None and self._mirror.gated:
                raise  # its standby takes its place
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            told = Refused(reason=f"{self.name} cannot go on: {reason}"[:4000])
            for peer in self._peers.workers():
                self._peers.send(peer, told)
            time.sleep(_LAST_WORDS)
            raise

    def close(self) -> None:
        """Drop the connections that this shard made, and the snapshot under way; write the journal's rest."""
        if self._snapshots is not None:
            self._snapshots.close()
        if self._journal is not None:
            self._journal.close()
        if self._mirror is not None:
            self._mirror.close()
        if self._link is not None:
            self._link.close()

    def _turn(self) -> None:
        """Wait for something to happen, and see to it."""
        deadline = self._snapshots.next_deadline() if self._snapshots is not None else None
        now = time.monotonic()
        retry = now + _RETRY if self._peers.busy or self._is_held() else None
        busy = bool(self._inbox) or (self._snapshots is not None and self._snapshots.busy)
        busy = busy or (self._mirror is not None and self._mirror.busy)
        full = (self._journal is not None and self._journal.is_full) or self._is_ahead()
        wake = self._journal.fileno if self._journal is not None else -1
        timeout = 0.0 if busy and not full else earliest([deadline, retry], _LONGEST_WAIT)
        poll(self._links() if full else self._endpoints(), timeout, wake)
        self._release()
        for _ in range(0 if full else _AT_ONCE):
            if not self._take_one():
                break
            self._apply_entries()
        self._see_to_links()
        self._apply_entries()
        self._release()
        self._peers.flush()
        if self._log is not None:
            self._log.poll()
        self._poll_snapshots()

    def _release(self) -> None:
        """Let go what waited for the journal, and for the standby."""
        if self._journal is not None:
            self._journal.release()
        if self._mirror is not None:
            self._mirror.release()

    def _is_ahead(self) -> bool:
        """Whether the standby is as far behind as it may be."""
        return self._mirror is not None and self._mirror.is_full

    def _poll_snapshots(self) -> None:
        model = self._model
        if self._snapshots is None or model is None or not model.is_whole or self._entries:
            return
        journal = self._journal
        large = journal is not None and journal.size > max(_SMALL_JOURNAL, _LARGE_JOURNAL * model.held_bytes)
        wanted = large or self.wants_snapshot
        self._snapshots.poll(time.monotonic(), model.own, model.state.versions, self._begin_snapshot, wanted)

    def _begin_snapshot(self) -> Heading:
        """A snapshot is taken of this moment: from here on the journal goes on in a segment of its own."""
        model = self._model
        assert model is not None
        self.wants_snapshot = False
        heading = model.heading(self._run, self.index, self._next_entry)
        if self._journal is None or self._snapshots is None:
            return heading
        image, parts = self.image()
        number = self._journal.begin_segment(encode_image(image), parts)
        written = self._snapshots.may_end = threading.Event()
        self._journal.when_written(written.set)
        return msgspec.structs.replace(heading, journal=number)

    def _endpoints(self) -> list[Endpoint]:
        """What messages come from."""
        return [self._server, *self._links()]

    def _links(self) -> list[Endpoint]:
        """The connections that this shard has made."""
        links = (self._hub, self._link, self._mirror)
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
            return decode_untrusted(received.header)
        except WireError as error:
            self._server.dropped += 1
            self._refuse(received.peer, str(error), "")
            return None

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
                if isinstance(message, messages.GiveState):
                    self._note(hello, received.header)  # its payload is only passed on
                elif isinstance(message, _JOURNALLED):
                    self._note(hello, received.header, received.payload)
                reason = handler(received.peer, hello, message, received.payload)
        if reason:
            self._refuse(received.peer, reason, name)

    def _note(self, hello: Hello, header: bytes, payload: memoryview | None = None) -> None:
        """Write into the journal what is about to be handled, and tell the standby."""
        if self._replaying or (self._journal is None and self._mirror is None):
            return
        index = hello.worker if hello.role == "worker" else max(0, hello.shard)
        told = Told(hello.role, index, hello.incarnation, msgspec.Raw(header))
        if self._journal is not None:
            self._journal.append(told, payload)
        if self._mirror is not None:
            self._mirror.append(told, payload)

    def _refuse(self, peer: bytes, reason: str, request: str) -> None:
        if self._replaying:
            return
        self.refused += 1
        if self._peers.who(peer) is None:
            self._strangers += 1
            if self._strangers > _REFUSED_STRANGERS and request != "Hello":
                return
        self._peers.send(peer, Refused(reason=reason[:4000], request=request))

    def _see_to_links(self) -> None:
        if self._hub is not None:
            self._hub.steps = self._model.iterations if self._model is not None else 0
            self._hub.take()
            if self.index and self._link is None and self._hub.addresses:
                self._connect(self._hub.addresses[0])
        if self._mirror is not None:
            self._mirror.poll(self)
        if self._link is not None:
            self._link.take()
            self._mend_link(self._link, self._hub)

    def _mend_link(self, link: LogLink, hub: HubLink | None) -> None:
        """Where shard 0 is not to be reached, and may come back: look for it, here and elsewhere."""
        if hub is None:
            return
        moved = bool(hub.addresses) and hub.addresses[0] != link.client.address
        if link.client.connected and not link.is_lost and not moved:
            return
        due = time.monotonic() >= self._asked_where + _ASK_WHERE
        if moved or (link.is_lost and due):
            link.close()
            self._connect(hub.addresses[0] if moved else link.client.address)
        if due:
            self._asked_where = time.monotonic()
            hub.ask_where()

    def _connect(self, address: str) -> None:
        again = self._link is not None and self._link.comes_back
        self._link = LogLink(
            address,
            self._keys,
            run=self._run,
            shard=self.index,
            apply=self._handle_entry,
            incarnation=self._hub.standing if self._hub is not None else 0,
        )
        self._link.comes_back = again
        if self._generation:
            self._follow()

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
                self._note(hello, messages.encode(hello))
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
            comes_back=self._comes_back,
            late=late,
        )
        self._peers.send(peer, welcome)

    @property
    def _comes_back(self) -> bool:
        """Whether the shard may be waited for when it is lost."""
        kept = self._journal is not None and self.is_on_disk
        return kept or (self._mirror is not None and self._mirror.gated)

    def tell_comes_back(self) -> None:
        """Whether the shard may be waited for is another than it was."""
        for peer in [*self._peers.workers(), *self._peers.shards()]:
            welcome = messages.Welcome(run=self._run, shard=self.index, comes_back=self._comes_back)
            self._peers.send(peer, welcome)

    # -- setting up ---------------------------------------------------------------------------------------

    def _handle_setup(self, _peer: bytes, hello: Hello, setup: messages.Setup, _: memoryview | None) -> str:
        who = hello.worker, hello.incarnation
        if hello.role != "worker":
            return "a worker brings the Setup"
        model, wanted = self._model, self._next_set_up(who, setup.number)
        if model is not None and model.complete and who != self._setter:
            if setup.digest != model.setup.digest:
                return self._trains_another()
            if wanted <= self._generation:
                return ""  # a first worker that has come anew: what is here is the truth, it pulls it
        if setup.number and wanted <= self._generation and who == self._setter:
            return ""  # it comes again
        try:
            model = Model(setup, self.index, configured=self._configured, fused=self._fused)
        except (
            Exception
        ) as error:  # a layout that no memory holds, say: the sender's mistake, not the shard's
            return (str(error) or type(error).__name__).splitlines()[0]
        self._begin(model, who)
        return ""

    def _trains_another(self) -> str:
        return f"this shard trains another model or optimizer, brought by worker {self._setter[0]}"

    def _begin(self, model: Model, setter: tuple[int, int]) -> None:
        """Train this from now on; `setter` brings it."""
        setup = model.setup
        if self._snapshots is not None:
            self._snapshots.abandon()
        self._model, self._setter = model, setter
        self._generation += 1
        self._next_entry = 0
        self._entries.clear()
        if self._mirror is not None:
            self._mirror.set_up()
        if self._log is not None:
            self._log.set_up(setup, model.holders)
        else:
            self._follow()
        if self._replaying:
            return
        self._decide(
            "shard",
            f"{len(model.chunks)} chunks, {model.held_bytes} bytes, {setup.optimizer}, {setup.consistency}",
            f"worker {setter[0]} describes the model",
        )

    def _follow(self) -> None:
        if self._link is None:
            return
        self._link.follow(sequence_of(self._generation, self._next_entry + len(self._entries)))
        if self._model is not None:
            for staged in self._model.state.staged():
                self._tell_staged(*staged)

    def _tell_staged(self, worker: int, incarnation: int, iteration: int) -> None:
        """Tell the log, once it is in the journal, that a contribution is whole here."""

        def tell() -> None:
            reach("shard.journalled", iteration)
            if self._link is not None:
                self._link.staged(worker, incarnation, iteration)

        self._peers.when_kept(tell)

    def _handle_set_chunk(
        self, _peer: bytes, hello: Hello, message: messages.SetChunk, payload: memoryview | None
    ) -> str:
        if self._model is None:
            return "Setup comes before SetChunk"
        if (hello.worker, hello.incarnation) != self._setter:
            return "" if self._model.complete else f"worker {self._setter[0]} brings this shard's values"
        if message.number and self._model.complete:
            return ""  # it comes again
        if not self._replaying:
            reach("shard.setup")
        return self._model.set_chunk(message, payload)

    def _handle_ready(self, _peer: bytes, hello: Hello, message: messages.Ready, _: memoryview | None) -> str:
        """A worker asks to be told when all is there that its set-up brings."""
        who = hello.worker, hello.incarnation
        if hello.role != "worker":
            return "workers ask whether a shard is ready"
        if self._model is not None and who == self._setter and not self._model.complete:
            reason = self._model.finish()
            if reason:
                return reason
        generation = self._readies[who] = self._next_set_up(who, message.number)
        self._waiting[who] = generation, message
        self._answer_readies()
        return ""

    def _next_set_up(self, who: tuple[int, int], number: int = 0) -> int:
        """The generation that a worker's Setup and Ready of this number are for (0: its next): all workers
        make the same sequence of set-ups, and who comes late begins with the one under way."""
        if number:
            return self._bases.setdefault(who, max(self._generation, 1) - number) + number
        return self._readies.get(who, max(self._generation, 1) - 1) + 1

    def _answer_readies(self) -> None:
        model = self._model
        if model is None or not model.complete:
            return
        for who, (generation, ready) in list(self._waiting.items()):
            if generation > self._generation:
                continue
            del self._waiting[who]
            peer = self._peers.worker(*who)
            if ready.digest == model.setup.digest:
                self._peers.send(peer, ready)
            elif peer is not None:
                self._refuse(
                    peer,
                    f"worker {who[0]} has another model, layout or optimizer than worker {self._setter[0]} "
                    "has described; start the same script with the same settings everywhere",
                    "Ready",
                )

    # -- contributions ------------------------------------------------------------------------------------

    def _handle_push(self, peer: bytes, hello: Hello, push: messages.Push, payload: memoryview | None) -> str:
        if self._model is None or hello.role != "worker":
            return "this shard is not set up yet"
        reason, staged = self._model.push(hello.worker, push, payload)
        if staged and not self._replaying:
            reach("shard.staged", push.iteration)
        if staged and self._log is not None:
            if not self._replaying:
                self._peers.when_kept(lambda: reach("shard.journalled", push.iteration))
            reason = self._log.handle_staged(0, hello.worker, push.incarnation, push.iteration)
        elif staged and not self._replaying:
            self._tell_staged(hello.worker, push.incarnation, push.iteration)
        if push.pull and not reason and not self._replaying:
            return self._handle_pull(peer, hello, self._model.pull_with(push), None)
        return reason

    def _handle_replace(
        self, _peer: bytes, hello: Hello, replace: messages.Replace, payload: memoryview | None
    ) -> str:
        if self._model is None or hello.role != "worker":
            return "this shard is not set up yet"
        return self._model.replace(hello.worker, replace, payload)

    def _handle_for_log(
        self, _peer: bytes, hello: Hello, message: messages.Commit | messages.Step, _: memoryview | None
    ) -> str:
        if self._log is None:
            return f"shard {self.index} keeps no log; shard 0 does"
        if self._model is None or not self._model.complete or hello.role != "worker":
            return "this shard is not set up yet"
        asynchronous = isinstance(message, messages.Commit) and self._model.setup.consistency != "bsp"
        if asynchronous or (isinstance(message, messages.Step) and message.accepted):
            # What is in the log is done on every shard; so it must be something that can be done.
            try:
                self._model.optimizer.check_hyperparameters(message.hyperparameters)
            except UserError as error:
                return str(error)
        return self._log.handle_worker(hello.worker, message)

    def _handle_meet(
        self, _peer: bytes, hello: Hello, meet: messages.Meet, payload: memoryview | None
    ) -> str:
        if self._log is None or hello.role != "worker":
            return "workers meet at shard 0"
        return self._log.handle_meet(hello.worker, meet, payload)

    def _handle_entering(
        self,
        _peer: bytes,
        hello: Hello,
        message: messages.Arrive | messages.WantState | messages.GiveState,
        payload: memoryview | None,
    ) -> str:
        """A worker comes late, or a living one gives it its state."""
        if self._log is None or hello.role != "worker":
            return "workers enter at shard 0"
        if isinstance(message, messages.Arrive):
            return self._log.handle_arrive(hello.worker, hello.incarnation)
        if isinstance(message, messages.WantState):
            self._log.handle_want(hello.worker, hello.incarnation, message)
        else:
            self._log.handle_give(message, payload)
        return ""

    def _handle_who_is_missing(
        self, peer: bytes, _hello: Hello, _message: messages.WhoIsMissing, _: memoryview | None
    ) -> str:
        self._peers.send(peer, messages.Missing(lines=[line[:4000] for line in self.waiting_for()][:8192]))
        return ""

    def _handle_fence(self, _peer: bytes, hello: Hello, fence: messages.Fence, _: memoryview | None) -> str:
        if self._log is None or hello.role != "hub":
            return "the hub fences workers, at shard 0"
        self._log.handle_fence(fence)
        return ""

    def _handle_look(self, peer: bytes, hello: Hello, look: messages.Look, _: memoryview | None) -> str:
        if self._log is None or hello.role != "hub":
            return "the hub asks for workers' connections, at shard 0"
        lost = self._peers.has_lost(look.worker, look.incarnation)
        self._peers.send(peer, messages.Looked(worker=look.worker, incarnation=look.incarnation, lost=lost))
        return ""

    def _handle_shard(
        self, _peer: bytes, hello: Hello, message: messages.Follow | messages.Staged, _: memoryview | None
    ) -> str:
        if self._log is None or hello.role != "shard" or message.shard != hello.shard or hello.shard == 0:
            return "shards speak for themselves, to shard 0"
        return self._log.handle_shard(hello.shard, message)

    # -- pulls --------------------------------------------------------------------------------------------

    def _handle_pull(self, _peer: bytes, hello: Hello, pull: AnyPull, _: memoryview | None) -> str:
        if self._model is None or hello.role != "worker":
            return "this shard is not set up yet"
        reason = self._model.state.refusal(hello.worker, pull.incarnation)
        if not reason and self._is_ready(hello.worker, pull):
            for chunk in self._model.chunks:
                self._answer(hello.worker, pull, chunk)
        return reason

    def _may_pull(self, hello: Hello | None, pull: AnyPull) -> bool:
        assert self._model is not None
        return (
            hello is not None
            and hello.role == "worker"
            and hello.incarnation == pull.incarnation
            and not self._model.state.refusal(hello.worker, pull.incarnation)
        )

    def _is_ready(self, worker: int, pull: AnyPull) -> bool:
        assert self._model is not None
        if isinstance(pull, messages.Pull):
            return self._model.state.handle_pull(worker, pull)
        return self._model.state.handle_pull_mean(worker, pull)

    def _answer(self, worker: int, pull: AnyPull, chunk: int) -> None:
        """Send one chunk to one who waits for it."""
        model, peer = self._model, self._peers.worker(worker, pull.incarnation)
        assert model is not None
        if peer is None:
            return
        if isinstance(pull, messages.PullMean):
            if model.mean is not None and model.mean.iteration == pull.iteration:
                self._send_mean(peer, chunk)
                reach("shard.answered", pull.iteration)
            return
        self._peers.send(
            peer,
            messages.Parameters(
                clock=model.state.clock_of(worker),
                chunk=chunk,
                version=model.state.versions[chunk],
                staleness=model.state.staleness_of(worker),
            ),
            model.lend(chunk),
        )
        reach("shard.answered", pull.clock - 1)

    def _send_mean(self, peer: bytes, chunk: int) -> None:
        assert self._model is not None
        mean = self._model.mean
        assert mean is not None
        values, present = mean.chunks[chunk]
        self._peers.send(
            peer,
            messages.Mean(
                iteration=mean.iteration,
                chunk=chunk,
                present=present,
                weight=mean.weight,
                samples=mean.samples,
            ),
            payload_of(values),
        )

    def _handle_pull_state(
        self, peer: bytes, hello: Hello, _message: messages.PullState, _: memoryview | None
    ) -> str:
        if self._model is None or hello.role != "worker":
            return "this shard is not set up yet"
        for chunk in self._model.chunks:
            elements, slots = self._model.own.state(chunk)
            self._peers.send(peer, messages.State(chunk=chunk, key="", values=slots))
            for key, flat in elements.items():
                self._peers.send(peer, messages.State(chunk=chunk, key=key), payload_of(flat))
        self._peers.send(peer, messages.StateEnd(steps=self._model.iterations))
        return ""

    # -- the log's lines ----------------------------------------------------------------------------------

    @property
    def _next_line(self) -> int:
        """The sequence number of the line that is to come next."""
        return sequence_of(self._generation, self._next_entry + len(self._entries))

    def _queue(self, sequence: int, entry: Entry) -> None:
        """A line of the log, which come in order."""
        if sequence != self._next_line:
            raise StoreError(f"a line of the log is missing: {sequence} came, {self._next_line} is the next")
        self._entries.append((sequence, entry))

    def _handle_entry(self, message: messages.Entry, header: bytes) -> None:
        """A line from shard 0. What is here already, or of an earlier Setup's log, is nothing to this shard;
        where lines before it did not come, they are asked for, and it comes again after them."""
        if message.sequence == self._next_line:
            entry = decode_entry_untrusted(message.entry)
            self._note(_LOG, header)
            self._queue(message.sequence, entry)
        elif self._next_line < message.sequence < sequence_of(self._generation + 1, 0):
            (line, at), now = self._asked_line, time.monotonic()
            if line != self._next_line or now >= at + _ASK_LINES:
                self._asked_line = self._next_line, now
                self._follow()

    def _is_held(self) -> bool:
        """Whether the next line needs edited gradients that are still on their way here."""
        model = self._model
        if not self._entries or model is None:
            return False
        entry = self._entries[0][1]
        if not isinstance(entry, Step) or not entry.accepted or not entry.edited:
            return False
        gone = any(isinstance(each, Fenced) and each.worker == entry.editor for _, each in self._entries)
        return not gone and model.lacks(entry.editor, entry.iteration, entry.edited)

    def _apply_entries(self) -> None:
        while self._entries and not self._is_held():
            self._apply(self._entries.popleft()[1])

    def _apply(self, entry: Entry) -> None:
        """Do what a line says, and answer those whom it makes ready, chunk by chunk."""
        model = self._model
        assert model is not None
        if not self._replaying:
            reach("shard.logged", getattr(entry, "iteration", -1))
        self._next_entry += 1
        actions = model.state.handle_entry(entry)
        self._active = model.state.poll_pulls()
        done = self._done = []
        for action in actions:
            model.act(action, self._before_change, self._chunk_is_done)
        for chunk in model.chunks:
            if chunk not in done:
                self._chunk_is_done(chunk)
        self._active, self._done = [], None
        if isinstance(entry, Fenced):
            self._tell_fenced(entry)

    def _before_change(self, chunk: int) -> None:
        if self._snapshots is not None:
            self._snapshots.before_change(chunk)

    def _chunk_is_done(self, chunk: int) -> None:
        """Send a chunk to all who are to get it, and those before it to whoever has asked meanwhile."""
        assert self._done is not None
        self._done.append(chunk)
        for worker, pull in self._active:
            self._answer(worker, pull, chunk)
        self._serve_meanwhile()

    def _serve_meanwhile(self) -> None:
        """Answer what came while chunks are stepped, or on their way here, and cannot wait."""
        if self._replaying:
            self.meanwhile()
            return
        for worker, pull in self._asked_meanwhile():
            for each in self._done or ():
                self._answer(worker, pull, each)
            self._active.append((worker, pull))
        if self._mirror is not None:
            self._mirror.hear()
        self._release()
        self._peers.flush()

    def _asked_meanwhile(self) -> list[tuple[int, AnyPull]]:
        """Pulls that came while chunks were stepped and are ready now; other messages wait for their turn."""
        ready: list[tuple[int, AnyPull]] = []
        while len(self._inbox) < self.in_box and (received := self._server.receive(0)) is not None:
            message, hello = self._decode(received), self._peers.who(received.peer)
            if message is not None and isinstance(message, self.at_once) and hello is not None:
                self._handle(received, message)  # of one whose Hello does not wait, too
            elif (
                self._done is None
                or not isinstance(message, (messages.Pull, messages.PullMean))
                or not self._may_pull(hello, message)
            ):
                self._inbox.append((received, message))
            elif hello is not None and self._is_ready(hello.worker, message):
                ready.append((hello.worker, message))
        return ready

    def _tell_fenced(self, entry: Fenced) -> None:
        peer = self._peers.worker(entry.worker, entry.incarnation)
        if peer is not None:
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
        keeper, meeting, last = self._log.state() if self._log is not None else (None, {}, None)
        image = ShardImage(
            generation=self._generation,
            next_entry=self._next_entry,
            setter=self._setter,
            bases=dict(self._bases),
            readies=dict(self._readies),
            model=model,
            log=keeper,
        )
        found = {CONTRIBUTION: contributions, MEAN: mean, MEETING: meeting}
        parts = [(Part(kind, key), each) for kind, held in found.items() for key, each in held.items()]
        return image, [*parts, *([(Part(LAST_MEETING, 0), last)] if last is not None else [])]

    def recover(self, found: Found) -> str:
        """Go on where the shard stood that left this; returns what that was, in words."""
        self._replaying = True
        try:
            if found.image is not None and found.snapshot is not None:
                self._restore(found.snapshot, found.image, found.parts)
            count = 0
            for told, payload in found.told:
                self.hear_again(told, payload)
                count += 1
        finally:
            self._replaying = False
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
        return Model(image.model.setup, self.index, configured=self._configured, fused=self._fused)

    def stand_as(self, model: Model, image: ShardImage, parts: KeptParts) -> None:
        """Be as `image` says, with a model whose chunks are as they were then, or are awaited."""
        model.remember(image.model, parts[CONTRIBUTION], parts[MEAN])
        self._model, self._setter = model, image.setter
        self._generation, self._next_entry = image.generation, image.next_entry
        self._bases, self._readies = dict(image.bases), dict(image.readies)
        if self._mirror is not None:
            self._mirror.set_up()
        if self._log is not None and image.log is not None:
            last = parts[LAST_MEETING].get(0)
            self._log.restore(image.log, parts[MEETING], None if last is None else bytes(last))

    def stand_by(self) -> None:
        """Hear only what the primary has heard, and answer nobody, until `serves`."""
        self._replaying = True

    def serves(self) -> None:
        """Be the primary from now on, and say so at once."""
        self._replaying = False
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
        if self._mirror is not None:
            self._mirror.remember(told, payload)
        message = decode_untrusted(bytes(told.message))
        hello = Hello(
            version=messages.VERSION,
            run=self._run,
            role=told.role,
            worker=told.index if told.role == "worker" else -1,
            incarnation=told.incarnation,
            shard=told.index if told.role == "shard" else -1,
        )
        if isinstance(message, messages.Entry):
            self._queue(message.sequence, decode_entry_untrusted(message.entry))
        elif isinstance(message, Hello):
            if self._log is not None:
                self._log.handle_join(hello.worker, hello.incarnation)
        else:
            self._handlers[type(message)](b"", hello, message, payload)
        self._apply_entries()

    # -- telling ------------------------------------------------------------------------------------------

    def _decide(self, what: str, choice: str, reason: str) -> None:
        self._emit(Decided(time=time.time(), worker=-1, what=what, choice=choice, reason=reason))

    def warn(self, line: str) -> None:
        """Tell people something that does not stop the run."""
        self._emit(Warned(time=time.time(), worker=-1, message=line))
