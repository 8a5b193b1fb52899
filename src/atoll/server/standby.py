"""A standby: a second process that replicates a primary shard and takes its place when the hub decides so.

It listens on its future address and takes data from its primary alone. Records are written to its own
journal, if it has a directory, and acknowledged; then they are handled as in a journal's replay. On promotion
it only handles the records that it has acknowledged and not handled yet.

Its directory holds the whole shard once the first snapshot is written. Until then it is marked as unusable
for a restart (`server/journal.py`: `Folder.incomplete`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from atoll.core.errors import GivenUpError, RunError
from atoll.core.points import reach
from atoll.core.texts import one_line
from atoll.net.endpoint import Received, Server, poll
from atoll.server.journal import Journal, JournalError
from atoll.server.links import HubLink
from atoll.server.records import HandledMessage, Record, StatePayload, decode_record
from atoll.server.recovery import ShardImage, decode_image, no_parts
from atoll.server.shard import Shard
from atoll.server.snapshot import Snapshots
from atoll.store.outcomes import StoreError
from atoll.tensors.shardoptimizer import warm_up
from atoll.tensors.wholechunk import OpenRecord
from atoll.wire.messages import (
    VERSION,
    AnyMessage,
    Begin,
    Copy,
    CopyChunk,
    Hello,
    LostTouch,
    Probe,
    Standing,
    WireError,
    decode_untrusted,
    encode,
)

MOST_PENDING = 2**28  # bytes taken and not handled, beyond which no more are taken
_LOOK_SECONDS = 0.1  # seconds between checks of the hub and the connection
_SAY_AGAIN = 0.25  # seconds between repeated messages to the hub
_AT_ONCE = 256  # messages taken at a time


@dataclass(frozen=True)
class _Pending:
    message: AnyMessage | Record
    payload: memoryview | None
    size: int


class Standby:
    """The standby of shard `index`. `make` makes a shard without any state, with what it calls between two
    chunks of a step.

    With a `journal`, `snapshots` are those of the shard.
    """

    def __init__(
        self,
        index: int,
        run: str,
        server: Server,
        hub: HubLink,
        make: Callable[[Callable[[], None]], Shard],
        *,
        journal: Journal | None = None,
        snapshots: Snapshots | None = None,
    ) -> None:
        self.index, self._run, self._server, self._hub, self._make = index, run, server, hub, make
        self._journal, self._snapshots = journal, snapshots
        self._primary: bytes | None = None  # its connection
        self._of = 0  # the primary's incarnation
        self._lost = False  # the primary's connection is gone and not replaced
        self._stream, self._count = "", 0  # the stream, and the number of its messages taken
        self._held = 0  # number of messages that are also written, if there is a journal
        self._pending: deque[_Pending] = deque()
        self._bytes = 0  # of these
        self._looked, self._said = 0.0, 0.0  # when; monotonic
        self._image: ShardImage | None = None  # until all its parts have arrived
        self._parts, self._parts_left = no_parts(), 0
        self._groups: list[dict[str, Any]] = []
        self._tensors: dict[str, memoryview] = {}  # of the chunk being received
        self.shard = self._anew()

    def _anew(self) -> Shard:
        shard = self._make(self._meanwhile)
        shard.stand_by()
        return shard

    def run(self, until: Callable[[], bool]) -> bool:
        """Stand by until the hub makes this process the primary (returns True) or `until()` is true (False).
        Raises RunError if the hub refuses this process, or a record of the primary cannot be handled."""
        warm_up()
        while not until():
            duty = self._hub.duty
            if duty is not None and duty.primary:
                self._take_over()
                return True
            self._turn()
        return False

    def close(self) -> None:
        self.shard.close()

    def _turn(self) -> None:
        wake = self._journal.fileno if self._journal is not None else -1
        poll([self._server, self._hub.client], 0.0 if self._pending else _LOOK_SECONDS, wake)
        self._hub.take()
        self._take_in()
        self._release()
        if self._pending:
            self._handle_next()
        if not self._pending or (self._snapshots is not None and self._snapshots.busy):
            self.shard.rest()
        self._look_after()

    def _meanwhile(self) -> None:
        """Take data between two chunks of a step, so that the primary need not wait for the whole step."""
        self._take_in()
        self._release()
        self._look_after()

    def _release(self) -> None:
        if self._journal is not None:
            self._journal.release()

    def _look_after(self) -> None:
        """Check the primary's connection, and report its loss to the hub."""
        now = time.monotonic()
        if now < self._looked + _LOOK_SECONDS:
            return
        self._looked = now
        self._hub.steps = self.shard.model.iterations if self.shard.model is not None else 0
        duty = self._hub.duty
        if duty is None or duty.primary:
            return
        if duty.partner != self._of:
            self._primary, self._of, self._lost = None, duty.partner, False
        if self._primary is not None and self._offer_standing() == "gone":
            self._primary, self._lost = None, True
        if self._lost and now >= self._said + _SAY_AGAIN:
            self._said = now
            self._hub.say(LostTouch(incarnation=self._hub.welcome.incarnation, partner=self._of))

    # -- taking in ----------------------------------------------------------------------------------------

    def _take_in(self) -> None:
        """Take messages from the primary. Other peers are ignored, and ask the hub again."""
        before = self._count
        for _ in range(_AT_ONCE):
            if self._bytes > MOST_PENDING or self._must_rest():
                break
            received = self._server.receive(0)
            if received is None:
                break
            self._take(received)
        if self._count > before and self._primary is not None:
            reach("shard.held", self.shard.model.iterations if self.shard.model is not None else -1)
            self._acknowledge()

    def _must_rest(self) -> bool:
        """True if a due snapshot waits until all taken messages are handled."""
        return bool(self._pending) and self._is_snapshot_due()

    def _is_snapshot_due(self) -> bool:
        model = self.shard.model
        if self._snapshots is None or model is None or not model.is_whole:
            return False
        due = self._snapshots.next_deadline()
        return self.shard.kept.wants_snapshot or (due is not None and time.monotonic() >= due)

    def _take(self, received: Received) -> None:
        try:
            message: AnyMessage | Record = decode_untrusted(received.header)
            if isinstance(message, Copy):
                message = decode_record(message.record)
        except (WireError, StoreError):
            return
        if isinstance(message, Hello):
            self._greet(received.peer, message)
        elif received.peer == self._primary and isinstance(
            message, (Begin, StatePayload, HandledMessage, CopyChunk, Probe)
        ):
            self._note(message, received.payload)

    def _greet(self, peer: bytes, hello: Hello) -> None:
        """Admit the primary, if the hub names it as such."""
        duty = self._hub.duty
        if duty is None or duty.primary or hello.role != "primary":
            return
        says = (hello.version, hello.run, hello.shard, hello.incarnation)
        if says != (VERSION, self._run, self.index, duty.partner):
            return
        if peer != self._primary:
            self._primary, self._of = None, duty.partner  # the earlier connection is ignored from now on
        stream, count = self._stream, self._count
        self._when_written(lambda: self._welcome(peer, stream, count))

    def _welcome(self, peer: bytes, stream: str, count: int) -> None:
        """Report how many messages are written; the primary sends from there on."""
        self._primary, self._lost = peer, False
        if stream == self._stream:
            self._held = max(self._held, count)
        self._offer_standing()

    def _when_written(self, act: Callable[[], None]) -> None:
        if self._journal is not None:
            self._journal.when_written(act)
        else:
            act()

    def _offer_standing(self) -> str:
        assert self._primary is not None
        return self._server.offer(self._primary, encode(Standing(stream=self._stream, count=self._held)))

    def _note(self, message: AnyMessage | Record, payload: memoryview | None) -> None:
        """Journal and queue a message of the stream."""
        if isinstance(message, Begin):
            self._stream = message.stream
            self._begin()
        elif not self._stream:
            return
        elif isinstance(message, HandledMessage) and self._journal is not None:
            self._journal.append(message, payload)
        self._count += 1
        size = 64 + (payload.nbytes if payload is not None else 0)
        self._pending.append(_Pending(message, payload, size))
        self._bytes += size

    def _acknowledge(self) -> None:
        """Acknowledge the messages taken so far, once they are written."""
        stream, count = self._stream, self._count

        def written() -> None:
            if stream == self._stream:
                self._held = max(self._held, count)
                if self._primary is not None:
                    self._offer_standing()

        self._when_written(written)

    def _begin(self) -> None:
        """Begin a new stream, and drop the state of the earlier one."""
        self._count, self._held, self._bytes = 0, 0, 0
        self._pending.clear()
        if self._snapshots is not None:
            self._snapshots.abandon()
        self.shard = self._anew()
        if self._journal is not None:
            self._journal.folder.incomplete.touch()
            self._journal.begin_anew()
            self.shard.kept.is_on_disk, self.shard.kept.wants_snapshot = False, True

    # -- handling -----------------------------------------------------------------------------------------

    def _handle_next(self) -> None:
        """Handle the next message of the stream. Raises RunError, which names the message, if that fails: the
        shard would no longer equal its primary."""
        pending = self._pending.popleft()
        self._bytes -= pending.size
        message, payload = pending.message, pending.payload
        try:
            self._handle(message, payload)
        except (JournalError, GivenUpError):
            raise  # errors of this process, not of the primary's data
        except Exception as error:
            why = one_line(str(error), 400) or type(error).__name__
            what = f"a {type(message).__name__} of the stream makes no sense here"
            raise RunError(
                f"the standby of shard {self.index} cannot do what its primary did: {what} "
                f"({type(error).__name__}: {why})"
            ) from error

    def _handle(self, message: AnyMessage | Record, payload: memoryview | None) -> None:
        if isinstance(message, HandledMessage):
            self.shard.revival.hear_again(message, payload)
        elif isinstance(message, CopyChunk):
            self._take_chunk(message, payload)
        elif isinstance(message, StatePayload):
            if payload is None or message.kind not in self._parts or self._image is None:
                raise RunError(f"the primary sent a part {message.kind[:40]!r} that nobody knows")
            self._parts[message.kind][message.key] = payload
            self._parts_left -= 1
            self._stand()
        elif isinstance(message, Begin) and payload is not None:
            self._image, self._parts, self._parts_left = decode_image(payload), no_parts(), message.parts
            self._groups = message.hyperparameters
            self._stand()

    def _stand(self) -> None:
        """Take over the primary's state at the start of the stream, once all but the chunks has arrived."""
        if self._image is None or self._parts_left:
            return
        image, self._image = self._image, None
        model = self.shard.revival.make_model(image)
        model.own.param_groups.set(self._groups)
        model.awaited = set(model.chunks)
        self.shard.revival.stand_as(model, image, self._parts)

    def _take_chunk(self, message: CopyChunk, payload: memoryview | None) -> None:
        model = self.shard.model
        if model is None or payload is None:
            raise RunError(f"the primary sent a chunk {message.chunk} that nobody awaits")
        self._tensors[message.key] = payload
        if message.key:
            return
        tensors, self._tensors = self._tensors, {}
        opened = OpenRecord(present=message.present, slots=message.open_slots) if message.is_open else None
        model.receive(message.chunk, tensors, message.slots, opened)

    def _take_over(self) -> None:
        """Handle the queued messages and become the primary. The old primary is answered no more."""
        self._primary = None
        while self._pending:
            self._handle_next()
            self._release()
        model = self.shard.model
        if self._image is not None or (model is not None and model.complete and not model.is_whole):
            raise RunError(f"shard {self.index} is to take its primary's place, and has not got all of it")
        until = time.monotonic() + _LOOK_SECONDS
        while self._server.receive(0) is not None and time.monotonic() < until:
            pass  # from peers with an old address: they ask the hub and reconnect
        reach("shard.promoted", model.iterations if model is not None else -1)
        self.shard.serves()
