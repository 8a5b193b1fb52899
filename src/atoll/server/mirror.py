"""A primary's side of a shard that is held twice: its standby gets the state, and then whatever the shard is
told, before anybody is answered.

Everything for the standby is one stream of numbered messages (wire/messages.py: Begin and what follows it):
the state first, its chunks one by one while records go on, each as it is at its place in the stream. The
standby says how many it holds (Standing). Once it has all of the state the gate is closed: nothing leaves the
shard before the standby holds what it may tell of. Only the hub's word that the standby is gone opens it
again.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from atoll.core.points import reach
from atoll.logs.waiting import Waiting
from atoll.net.endpoint import Client
from atoll.net.keys import Keys
from atoll.server.journal import Journal
from atoll.server.links import HubLink
from atoll.server.model import Model
from atoll.server.payloads import payload_of
from atoll.server.records import Record, Told, encode_header
from atoll.server.recovery import Parts, ShardImage, encode_image
from atoll.tensors.wholechunk import WholeChunk
from atoll.wire.messages import (
    VERSION,
    AnyMessage,
    Begin,
    Copy,
    CopyChunk,
    Hello,
    InSync,
    LostTouch,
    Probe,
    Serves,
    Standing,
    WireError,
    decode_untrusted,
    encode,
)

_BACKLOG = 2**28  # bytes that the standby has not acknowledged; beyond, the shard takes no more messages
MOST_BEHIND = 50_000  # the same, in messages
_COPY_AHEAD = 2**26  # bytes on their way, beyond which no further chunk is copied
_FRESH = 1.0  # seconds for which the standby's word counts that it still is one
_SAY_AGAIN = 0.25  # seconds between the same words to the hub, or to a standby that has not answered
_MOST_HISTORY = 10_000  # messages before the first Setup
_FRAME = 2**31 - 1  # bytes


class Source(Protocol):
    """What the mirror needs of its shard."""

    @property
    def model(self) -> Model | None: ...

    @property
    def is_between_lines(self) -> bool:
        """Whether no line of the log waits to be applied."""

    def image(self) -> tuple[ShardImage, Parts]: ...


@dataclass(frozen=True)
class _Sent:
    number: int
    size: int
    header: bytes
    payload: Any


class Mirror:
    """Keeps shard `index`'s standby as the hub names it. All calls come from the shard's thread.

    `changed` is called when the shard gets a standby in sync, or loses it; `tell(choice, reason)` takes what
    people are to know.
    """

    def __init__(
        self,
        index: int,
        run: str,
        keys: Keys | None,
        hub: HubLink,
        journal: Journal | None,
        *,
        changed: Callable[[], None] = lambda: None,
        tell: Callable[[str, str], None] = lambda _choice, _reason: None,
    ) -> None:
        self.index, self._run, self._keys, self._hub, self._journal = index, run, keys, hub, journal
        self.changed, self.tell = changed, tell
        self.client: Client | None = None  # to the standby
        self.gated = False
        self._place = (0, "", 0)  # the standby's incarnation and address, and our own incarnation
        self._welcomed = False  # on this connection
        self._lost = False  # the connection was lost, and there is no other yet
        self._stream, self._number, self._acked = "", 0, 0
        self._copied = 0  # the number of the last message of its state
        self._gate = 0  # the number at which the gate was closed
        self._sent_at = 0.0  # when the latest message was; monotonic
        self._unacked: deque[_Sent] = deque()
        self._bytes = 0  # of these
        self._copying: deque[int] = deque()  # chunks that are to be copied
        self._model: Model | None = None  # whose they are
        self._waiting = Waiting()  # what is written, until messages of the stream are acknowledged
        self._history: list[tuple[Told, Any]] | None = []  # before the first Setup; else None, or if too much
        self._said: dict[type, float] = {}  # when something was last said again; monotonic

    # -- what is kept, and what waits for it --------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """Whether the standby is as far behind as it may be."""
        return self._bytes > _BACKLOG or len(self._unacked) > MOST_BEHIND

    @property
    def busy(self) -> bool:
        """Whether `poll` has something to do at once: a chunk to copy."""
        return bool(self._copying) and self._welcomed and self._bytes <= _COPY_AHEAD

    def remember(self, told: Told, payload: Any) -> None:
        """The shard was told this before its first Setup, perhaps in an earlier life."""
        if self._history is not None:
            self._history.append((told, payload))
            if len(self._history) > _MOST_HISTORY:
                self._history = None

    def append(self, told: Told, payload: Any) -> None:
        """The shard is about to handle this; nobody may change the payload any more."""
        if self._stream:
            self._copy(told, payload)
        self.remember(told, payload)

    def set_up(self) -> None:
        """The shard has been set up: from now on its state says all."""
        self._history = None

    def when_kept(self, act: Callable[[], None]) -> None:
        """Call `act` once all that was appended so far is written here, and held by the standby."""
        if self.gated and time.monotonic() > self._sent_at + _FRESH:
            self._send(Probe(), None)  # it may have taken this one's place meanwhile
        stream, number = (self._stream, self._number) if self.gated else ("", 0)

        def written() -> None:  # perhaps when the standby of that stream is gone
            self._waiting.add(number if stream == self._stream else 0, act)

        if self._journal is None:
            written()
        else:
            self._journal.when_written(written)
        self.release()

    def release(self) -> None:
        """Let go what waited and may leave now."""
        self._waiting.release(self._acked if self.gated else None)

    # -- the loop's part ----------------------------------------------------------------------------------

    def poll(self, source: Source) -> None:
        """Do what the hub says, take what the standby has said, and go on with what it lacks."""
        duty = self._hub.duty
        if duty is None or not duty.primary:
            return
        if not duty.serves and self._is_due(Serves):
            self._hub.say(Serves(incarnation=self._hub.welcome.incarnation))
        place = (duty.partner, duty.address, self._hub.welcome.incarnation)
        if place != self._place:
            self._turn_to(place)
        if self.client is not None:
            self._look_after(self.client)
            self._go_on(source)
        if self.gated and self._acked >= self._gate and not duty.synced and self._is_due(InSync):
            self._hub.say(InSync(incarnation=self._hub.welcome.incarnation, standby=duty.partner))
        self.release()

    def hear(self) -> None:
        """Take what the standby says, while the shard is busy: what waited for it may leave."""
        if self.client is not None and self._welcomed:
            self._hear(self.client)
            self.release()

    def close(self) -> None:
        if self.client is not None:
            self.client.close()
            self.client = None

    def _is_due(self, what: type) -> bool:
        now = time.monotonic()
        if now < self._said.get(what, 0.0) + _SAY_AGAIN:
            return False
        self._said[what] = now
        return True

    def _turn_to(self, place: tuple[int, str, int]) -> None:
        """The hub names another standby, or none; or this one's own name is another."""
        before, self._place = self._place[0], place
        self._said.clear()
        if place[0] != before:
            self._forget_stream()
            self._lost = False  # that was the one before
            if self.gated:
                self.gated = False
                self.release()
                self.tell("goes on without a standby", "the hub says that it is gone")
                self.changed()
        self._connect()

    def _forget_stream(self) -> None:
        self._stream, self._number, self._acked, self._bytes = "", 0, 0, 0
        self._copied = 0
        self._unacked.clear()
        self._copying.clear()
        self._model = None

    # -- the connection -----------------------------------------------------------------------------------

    def _connect(self) -> None:
        if self.client is not None:
            self.client.abandon()
        partner, address, _ = self._place
        self._welcomed, self.client = False, None
        if partner:
            name = f"the standby of shard {self.index}"
            self.client = Client(address, self._keys, limit=_FRAME, name=name)

    def _look_after(self, client: Client) -> None:
        self._hear(client)
        if client.losses:
            self._lost = True
            self._connect()
        elif not self._welcomed and client.connected and self._is_due(Hello):
            client.send(encode(self._hello()))
        if self._lost and self._is_due(LostTouch):
            self._hub.say(LostTouch(incarnation=self._place[2], partner=self._place[0]))

    def _hear(self, client: Client) -> None:
        while (received := client.receive(0)) is not None:
            self._take(received[0])

    def _hello(self) -> Hello:
        return Hello(
            version=VERSION,
            run=self._run,
            role="primary",
            shard=self.index,
            incarnation=self._place[2],
            pid=os.getpid(),
        )

    def _take(self, header: bytes) -> None:
        try:
            message = decode_untrusted(header)
        except WireError:
            return
        if not isinstance(message, Standing):
            return  # it does not know its own duty yet, or is a primary itself: the hub tells who is right
        if self._stream and message.stream == self._stream:
            self._acknowledge(message.count)
        if self._welcomed:
            return
        if self._stream and message.stream != self._stream:
            if self.gated:
                return  # it has lost what it held: the hub will say so
            self._forget_stream()
        self._welcomed, self._lost = True, False
        assert self.client is not None
        for sent in self._unacked:
            self.client.send(sent.header, sent.payload)

    def _acknowledge(self, count: int) -> None:
        self._acked = max(self._acked, min(count, self._number))
        while self._unacked and self._unacked[0].number <= self._acked:
            self._bytes -= self._unacked.popleft().size

    def _send(self, message: AnyMessage, payload: Any) -> None:
        """Add this to the stream."""
        header = encode(message)
        self._number += 1
        self._sent_at = time.monotonic()
        size = 64 + len(header) + (memoryview(payload).nbytes if payload is not None else 0)
        self._unacked.append(_Sent(self._number, size, header, payload))
        self._bytes += size
        if self._welcomed and self.client is not None:
            self.client.send(header, payload)

    # -- the state ----------------------------------------------------------------------------------------

    def _go_on(self, source: Source) -> None:
        """Begin the stream, copy the next chunk, and close the gate once the standby holds all of them: until
        then nobody waits for it."""
        if not self._welcomed:
            return
        if not self._stream:
            self._begin(source)
        elif self._copying:
            if self._model is not source.model:
                self._copying.clear()  # another Setup has been told of
            elif self.busy:
                self._copy_chunk(self._copying.popleft())
            self._copied = self._number
        elif not self.gated and self._acked >= self._copied:
            self.gated, self._gate = True, self._number
            self.changed()

    def _begin(self, source: Source) -> None:
        model = source.model
        if model is None:
            if self._history is None:
                return  # too much has happened: it begins when the shard is set up
            self._stream = secrets.token_hex(8)
            self._send(Begin(stream=self._stream), None)
            for told, payload in self._history:
                self._copy(told, payload)
            self._copied = self._number
        elif model.complete and source.is_between_lines:
            image, parts = source.image()
            self._stream = secrets.token_hex(8)
            groups = model.optimizer.hyperparameters
            begin = Begin(stream=self._stream, parts=len(parts), hyperparameters=groups)
            self._send(begin, encode_image(image))
            for part, payload in parts:
                self._copy(part, payload)
            self._model, self._copying, self._copied = model, deque(model.chunks), self._number

    def _copy(self, record: Record, payload: Any) -> None:
        self._send(Copy(record=msgspec.Raw(encode_header(record))), payload)

    def _copy_chunk(self, chunk: int) -> None:
        """A chunk as it is between these two messages; its values are not copied, for they are lent."""
        model = self._model
        assert model is not None
        reach("shard.copied", model.iterations)
        whole = WholeChunk.of(model.own, chunk)
        for key, flat in whole.tensors.items():
            self._send(CopyChunk(chunk=chunk, key=key), payload_of(flat))
        last, step = CopyChunk(chunk=chunk, slots=whole.slots), whole.open
        if step is not None:
            last = msgspec.structs.replace(last, is_open=True, present=step.present, open_slots=step.slots)
        self._send(last, model.lend(chunk))
