"""A shard at work: one thread, one loop, that takes messages and does what the store decides.

Messages come from outside: each is checked before anything is kept for it, and what is wrong is refused with
a line, or dropped and counted. When the log says to combine or to step, that is done chunk by chunk; each
chunk goes to those who wait for it as soon as it is ready, and whoever asks meanwhile is served too.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from atoll.core.errors import UserError
from atoll.core.events import AnyEvent, Decided, Warned
from atoll.net.endpoint import Endpoint, Received, Server, poll
from atoll.net.keys import Keys
from atoll.server.links import HubLink, LogLink, earliest
from atoll.server.logkeeper import LogKeeper, sequence_of
from atoll.server.model import Model
from atoll.server.payloads import payload_of
from atoll.server.peers import Peers
from atoll.server.snapshot import Snapshots
from atoll.store.entries import Entry, Fenced, Step, decode_entry_untrusted
from atoll.store.outcomes import StoreError
from atoll.store.shard import AnyPull
from atoll.wire import messages
from atoll.wire.messages import AnyMessage, Hello, Refused, WireError, decode_untrusted

_LONGEST_WAIT = 0.5  # seconds, for timers that no message announces
_RETRY = 0.01  # seconds, while a connection takes nothing more
_AT_ONCE = 64  # messages taken before timers and links have their turn
IN_BOX = 64  # messages taken while chunks are stepped, and kept for later
_LAST_WORDS = 0.3  # seconds for these to leave
_REFUSED_STRANGERS = 1000  # beyond, those who did not say Hello get no answer


class Shard:
    """Shard `index` of `run`, which begins with `workers` workers; shard 0 keeps the log.

    `server` is where workers come in. `hub` is the link to the hub, without which `log_address` says where
    shard 0 is. `configured` is the operator's own optimizer ("package.module:Class"); `fused` as in
    ShardOptimizer. `emit` takes core's events, of worker -1.
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
        emit: Callable[[AnyEvent], None] = lambda _event: None,
    ) -> None:
        self.index, self._server, self._run, self._keys = index, server, run, keys
        self.name = f"shard {index}"  # as its workers know it
        self._hub, self._snapshots, self._emit = hub, snapshots, emit
        self._configured, self._fused = configured, fused
        self._peers = Peers(server, run)
        self._log = self._make_log(workers)
        self._link: LogLink | None = None
        self._model: Model | None = None
        self._setter = (-1, 0)  # the worker and incarnation that brought the Setup
        self._generation = 0  # how many Setups were put into effect
        self._next_entry = 0  # of this generation
        self._entries: deque[tuple[int, Entry]] = deque()  # sequence; not applied yet
        self._readies: dict[tuple[int, int], int] = {}  # the generation that a worker's latest Ready is for
        self._waiting: dict[tuple[int, int], tuple[int, str]] = {}  # Readies: generation, digest
        self._inbox: deque[tuple[Received, AnyMessage | None]] = deque()
        self._active: list[tuple[int, AnyPull]] = []  # those who get each chunk as it is ready
        self._done: list[int] | None = None  # while a line is applied: the chunks that are
        self._strangers = 0
        self.refused = 0  # messages refused
        self.in_box = IN_BOX
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
            messages.Follow: self._handle_shard,
            messages.Staged: self._handle_shard,
        }

    def _make_log(self, workers: int) -> LogKeeper | None:
        return LogKeeper(workers, self._peers, self._queue) if self.index == 0 else None

    @property
    def dropped(self) -> int:
        """Messages that were none of ours."""
        return self._server.dropped

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
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            told = Refused(reason=f"{self.name} cannot go on: {reason}"[:4000])
            for peer in self._peers.workers():
                self._peers.send(peer, told)
            time.sleep(_LAST_WORDS)
            raise

    def close(self) -> None:
        """Drop the connections that this shard made, and the snapshot under way."""
        if self._snapshots is not None:
            self._snapshots.close()
        if self._link is not None:
            self._link.close()

    def _turn(self) -> None:
        """Wait for something to happen, and see to it."""
        deadline = self._snapshots.next_deadline() if self._snapshots is not None else None
        now = time.monotonic()
        retry = now + _RETRY if self._peers.busy or self._is_held() else None
        busy = bool(self._inbox) or (self._snapshots is not None and self._snapshots.busy)
        poll(self._endpoints(), 0.0 if busy else earliest([deadline, retry], _LONGEST_WAIT))
        for _ in range(_AT_ONCE):
            if not self._take_one():
                break
            self._apply_entries()
        self._see_to_links()
        self._apply_entries()
        self._peers.flush()
        if self._log is not None:
            self._log.poll()
        model = self._model
        if self._snapshots is not None and model is not None and model.complete and not self._entries:
            self._snapshots.poll(
                time.monotonic(),
                model.own,
                model.state.versions,
                lambda: model.heading(self._run, self.index, self._next_entry),
            )

    def _endpoints(self) -> list[Endpoint]:
        """What messages come from."""
        links = [link.client for link in (self._hub, self._link) if link is not None]
        return [self._server, *links]

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
                reason = handler(received.peer, hello, message, received.payload)
        if reason:
            self._refuse(received.peer, reason, name)

    def _refuse(self, peer: bytes, reason: str, request: str) -> None:
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
        if self._link is not None:
            self._link.take()

    def _connect(self, address: str) -> None:
        self._link = LogLink(address, self._keys, run=self._run, shard=self.index, apply=self._handle_entry)
        if self._generation:
            self._follow()

    # -- at the door --------------------------------------------------------------------------------------

    def _greet(self, peer: bytes, hello: Hello) -> str:
        reason = self._peers.greet(peer, hello)
        if reason:
            return reason
        late = False
        if hello.role == "worker":
            if self._log is not None:
                late = self._log.is_late(hello.worker, hello.incarnation)
                reason = self._log.handle_join(hello.worker, hello.incarnation)
            elif self._model is not None:
                reason = self._model.state.refusal(hello.worker, hello.incarnation)
        elif self._log is None:
            reason = f"shard {self.index} keeps no log; shard 0 does"
        if reason:
            self._peers.forget(peer)
            return reason
        self._peers.send(
            peer,
            messages.Welcome(run=self._run, worker=hello.worker, incarnation=hello.incarnation, late=late),
        )
        if hello.role == "hub" and self._log is not None:
            self._log.handle_hub()
        return ""

    # -- setting up ---------------------------------------------------------------------------------------

    def _handle_setup(self, _peer: bytes, hello: Hello, setup: messages.Setup, _: memoryview | None) -> str:
        who = hello.worker, hello.incarnation
        if hello.role != "worker":
            return "a worker brings the Setup"
        model = self._model
        if model is not None and model.complete and who != self._setter:
            if setup.digest != model.setup.digest:
                return self._trains_another()
            if self._next_set_up(who) <= self._generation:
                return ""  # a first worker that has come anew: what is here is the truth, it pulls it
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
        if self._log is not None:
            self._log.set_up(setup, model.holders)
        else:
            self._follow()
        held = sum(model.optimizer.nbytes(chunk) for chunk in model.chunks)
        self._decide(
            "shard",
            f"{len(model.chunks)} chunks, {held} bytes, {setup.optimizer}, {setup.consistency}",
            f"worker {setter[0]} describes the model",
        )

    def _follow(self) -> None:
        if self._link is not None:
            self._link.follow(sequence_of(self._generation, self._next_entry))

    def _handle_set_chunk(
        self, _peer: bytes, hello: Hello, message: messages.SetChunk, payload: memoryview | None
    ) -> str:
        if self._model is None:
            return "Setup comes before SetChunk"
        if (hello.worker, hello.incarnation) != self._setter:
            return "" if self._model.complete else f"worker {self._setter[0]} brings this shard's values"
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
        generation = self._readies[who] = self._next_set_up(who)
        self._waiting[who] = generation, message.digest
        self._answer_readies()
        return ""

    def _next_set_up(self, who: tuple[int, int]) -> int:
        """The generation that a worker's next Setup and Ready are for: all workers make the same sequence of
        set-ups, and who comes late begins with the one under way."""
        return self._readies.get(who, max(self._generation, 1) - 1) + 1

    def _answer_readies(self) -> None:
        model = self._model
        if model is None or not model.complete:
            return
        for who, (generation, digest) in list(self._waiting.items()):
            if generation > self._generation:
                continue
            del self._waiting[who]
            peer = self._peers.worker(*who)
            if digest == model.setup.digest:
                self._peers.send(peer, messages.Ready(digest=digest))
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
        if staged and self._log is not None:
            reason = self._log.handle_staged(0, hello.worker, push.incarnation, push.iteration)
        elif staged and self._link is not None:
            self._link.staged(hello.worker, push.incarnation, push.iteration)
        if push.pull and not reason:
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

    def _queue(self, sequence: int, entry: Entry) -> None:
        """A line for this shard, in order; of an earlier Setup's log, it is nothing to this one."""
        expected = sequence_of(self._generation, self._next_entry + len(self._entries))
        if sequence == expected:
            self._entries.append((sequence, entry))
        elif sequence > expected and sequence < sequence_of(self._generation + 1, 0):
            raise StoreError(f"a line of the log is missing: {sequence} came, {expected} is the next")

    def _handle_entry(self, message: messages.Entry) -> None:
        self._queue(message.sequence, decode_entry_untrusted(message.entry))

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
        for worker, pull in self._asked_meanwhile():
            for each in self._done or ():
                self._answer(worker, pull, each)
            self._active.append((worker, pull))
        self._peers.flush()

    def _asked_meanwhile(self) -> list[tuple[int, AnyPull]]:
        """Pulls that came while chunks were stepped and are ready now; other messages wait for their turn."""
        ready: list[tuple[int, AnyPull]] = []
        while len(self._inbox) < self.in_box and (received := self._server.receive(0)) is not None:
            message, hello = self._decode(received), self._peers.who(received.peer)
            if isinstance(message, messages.WhoIsMissing):
                self._handle(received, message)
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

    # -- telling ------------------------------------------------------------------------------------------

    def _decide(self, what: str, choice: str, reason: str) -> None:
        self._emit(Decided(time=time.time(), worker=-1, what=what, choice=choice, reason=reason))

    def warn(self, line: str) -> None:
        """Tell people something that does not stop the run."""
        self._emit(Warned(time=time.time(), worker=-1, message=line))
