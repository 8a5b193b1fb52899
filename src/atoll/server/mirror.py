"""The primary's side of replication: it sends its standby the state and all later records before answering.

All data for the standby forms one stream of numbered messages (wire/messages.py: Begin and those after it).
The state comes first, its chunks one by one between records, each as it is at its place in the stream. The
standby reports how many messages it holds (Standing). Once it has the whole state the gate is closed: no
message leaves the shard before the standby holds the records that it depends on. The gate opens only when the
hub says that the standby is gone.
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
from atoll.server.records import HandledMessage, Record, encode_header
from atoll.server.recovery import ImageParts, ShardImage, encode_image
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

_BACKLOG = 2**28  # unacknowledged bytes beyond which the shard takes no more messages
MOST_BEHIND = 50_000  # unacknowledged messages, likewise
_COPY_AHEAD = 2**26  # unacknowledged bytes beyond which no further chunk is copied
_FRESH = 1.0  # seconds after a message in which no probe checks that the standby still is one
_SAY_AGAIN = 0.25  # seconds between repeated messages to the hub, or to a silent standby
_MOST_HISTORY = 10_000  # retained records before the first Setup
_FRAME = 2**31 - 1  # bytes


class MirroredShard(Protocol):
    """The interface of a shard that a mirror reads."""

    @property
    def model(self) -> Model | None: ...

    @property
    def is_between_lines(self) -> bool:
        """True if no log entry waits to be applied."""

    def image(self) -> tuple[ShardImage, ImageParts]: ...


@dataclass(frozen=True)
class _Sent:
    number: int
    size: int
    header: bytes
    payload: Any


class Mirror:
    """Replicates shard `index` to the standby that the hub names. All calls come from the shard's thread.

    `tell(choice, reason)` takes messages for people.
    """

    def __init__(
        self,
        index: int,
        run: str,
        keys: Keys | None,
        hub: HubLink,
        journal: Journal | None,
        tell: Callable[[str, str], None] = lambda _choice, _reason: None,
    ) -> None:
        self.index, self._run, self._keys, self._hub, self._journal = index, run, keys, hub, journal
        self._tell = tell
        self.client: Client | None = None  # to the standby
        self.gated = False
        self._place = (0, "", 0)  # the standby's incarnation and address, and our own incarnation
        self._welcomed = False  # on this connection
        self._lost = False  # the connection was lost, and there is no other yet
        self._stream, self._number, self._acked = "", 0, 0
        self._copied = 0  # the number of the last message of its state
        self._gate = 0  # the number at which the gate was closed
        self._sent_at = 0.0  # time of the latest message; monotonic
        self._unacked: deque[_Sent] = deque()
        self._bytes = 0  # of these
        self._copying: deque[int] = deque()  # chunks that are to be copied
        self._model: Model | None = None  # the model of these chunks
        self._waiting = Waiting()  # written actions that wait for the standby's acknowledgement
        self._history: (
            list[tuple[HandledMessage, Any]] | None
        ) = []  # records before the first Setup; None after that, or if too many
        self._said: dict[type, float] = {}  # time of the latest message of each repeated kind; monotonic

    # -- records, and actions that wait for them ---------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """True if the standby is as far behind as it may be."""
        return self._bytes > _BACKLOG or len(self._unacked) > MOST_BEHIND

    @property
    def busy(self) -> bool:
        """True if `poll` has a chunk to copy at once."""
        return bool(self._copying) and self._welcomed and self._bytes <= _COPY_AHEAD

    def remember(self, told: HandledMessage, payload: Any) -> None:
        """Retain a record from before the first Setup, perhaps replayed from the journal."""
        if self._history is not None:
            self._history.append((told, payload))
            if len(self._history) > _MOST_HISTORY:
                self._history = None

    def append(self, told: HandledMessage, payload: Any) -> None:
        """Send a record that the shard is about to handle. The payload must not change any more."""
        if self._stream:
            self._copy(told, payload)
        self.remember(told, payload)

    def set_up(self) -> None:
        """Drop the history of records: after a Setup the shard's state replaces it."""
        self._history = None

    def when_kept(self, act: Callable[[], None]) -> None:
        """Call `act` once all records so far are in the journal and, while the gate is closed, at the
        standby."""
        if self.gated and time.monotonic() > self._sent_at + _FRESH:
            self._send(Probe(), None)  # the standby may have taken this primary's place meanwhile
        stream, number = (self._stream, self._number) if self.gated else ("", 0)

        def written() -> None:  # may run after that stream's standby is gone
            self._waiting.add(number if stream == self._stream else 0, act)

        if self._journal is None:
            written()
        else:
            self._journal.when_written(written)
        self.release()

    def release(self) -> None:
        """Run the waiting actions that are allowed by now."""
        self._waiting.release(self._acked if self.gated else None)

    # -- the loop's part ----------------------------------------------------------------------------------

    def poll(self, source: MirroredShard) -> None:
        """Follow the hub's word, handle the standby's messages, and send the next part of the state."""
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
        """Take the standby's acknowledgements while the shard is busy, and run released actions."""
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
        """Switch to the standby that the hub names, or to none; or take over this shard's new incarnation."""
        before, self._place = self._place[0], place
        self._said.clear()
        if place[0] != before:
            self._forget_stream()
            self._lost = False  # the flag was about the earlier standby
            if self.gated:
                self.gated = False
                self.release()
                self._tell("goes on without a standby", "the hub says that it is gone")
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
            return  # it knows no duty yet, or is a primary: the hub decides
        if self._stream and message.stream == self._stream:
            self._acknowledge(message.count)
        if self._welcomed:
            return
        if self._stream and message.stream != self._stream:
            if self.gated:
                return  # the standby lost its state: the hub will report that
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
        """Append a message to the stream."""
        header = encode(message)
        self._number += 1
        self._sent_at = time.monotonic()
        size = 64 + len(header) + (memoryview(payload).nbytes if payload is not None else 0)
        self._unacked.append(_Sent(self._number, size, header, payload))
        self._bytes += size
        if self._welcomed and self.client is not None:
            self.client.send(header, payload)

    # -- the state ----------------------------------------------------------------------------------------

    def _go_on(self, source: MirroredShard) -> None:
        """Begin the stream, copy the next chunk, or close the gate once the standby holds all chunks."""
        if not self._welcomed:
            return
        if not self._stream:
            self._begin(source)
        elif self._copying:
            if self._model is not source.model:
                self._copying.clear()  # another Setup, recorded in the stream, replaced the model
            elif self.busy:
                self._copy_chunk(self._copying.popleft())
            self._copied = self._number
        elif not self.gated and self._acked >= self._copied:
            self.gated, self._gate = True, self._number

    def _begin(self, source: MirroredShard) -> None:
        model = source.model
        if model is None:
            if self._history is None:
                return  # too many records: the stream begins after the Setup
            self._stream = secrets.token_hex(8)
            self._send(Begin(stream=self._stream), None)
            for told, payload in self._history:
                self._copy(told, payload)
            self._copied = self._number
        elif model.complete and source.is_between_lines:
            image, parts = source.image()
            self._stream = secrets.token_hex(8)
            groups = model.optimizer.param_groups.given
            begin = Begin(stream=self._stream, parts=len(parts), hyperparameters=groups)
            self._send(begin, encode_image(image))
            for part, payload in parts:
                self._copy(part, payload)
            self._model, self._copying, self._copied = model, deque(model.chunks), self._number

    def _copy(self, record: Record, payload: Any) -> None:
        self._send(Copy(record=msgspec.Raw(encode_header(record))), payload)

    def _copy_chunk(self, chunk: int) -> None:
        """Send a chunk as it is at this place of the stream. Its values are lent, not copied."""
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
