"""A node's training process, as its CPU side is seen from it: what came, what is waited for, who is there.

Of several devices the leader hears the CPU side, and tells the others what came: each `take` and `wait` is a
call that all of them make, after which they know the same. Only the leader's words reach the CPU side.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from atoll.core.decoding import from_msgpack
from atoll.core.errors import AtollError, DeadlineError
from atoll.core.stands import Stand
from atoll.peers.settings import Settings
from atoll.train.members.peersintroduction import Introduction
from atoll.train.sync.peersdevices import Devices
from atoll.train.sync.peersstart import CpuSide
from atoll.wire.device import (
    Awake,
    CaptureAt,
    DeviceMessage,
    Figures,
    Leave,
    Left,
    LeftOut,
    Members,
    Ready,
    Release,
    Returned,
    Told,
    Waiting,
    decode,
    encode,
)

_SLICE_SECONDS = 0.2  # of a wait, between which the deadline is looked at
_LEAVING_SECONDS = Settings.linger + 5.0  # for the CPU side to see the others take all, and say goodbye

_LEADERS = (Waiting, Figures, Told)  # what is the leader's alone to know

Handler = Callable[[Any], None]


class NodeWorker:
    """This worker's part in a run without a server: its node, and the CPU side that speaks for it.

    Messages are handled by whoever `take`s or `wait`s, on the script's thread; `on` says how. `members` are
    the nodes of the current view, `late` is true until a node that comes late has entered.
    """

    def __init__(
        self,
        introduction: Introduction,
        side: CpuSide | None,
        timeout: float,
        devices: Devices | None = None,
    ) -> None:
        """`side` is the leader's: None at the node's other devices."""
        self.node, self.world = introduction.node, len(introduction.nodes)
        self.introduction, self._side, self._timeout = introduction, side, timeout
        self.devices = devices or Devices()
        self.leads = side is not None
        self._kept: deque[tuple[DeviceMessage, list[int]]] = deque()  # came while something else was asked
        self._heard: list[bytes] = []  # by the leader, and not told to the other devices
        self._copied: list[int] = []  # buffers that all devices have copied, or are about to
        self.incarnation, self.late = introduction.incarnation, introduction.late
        self.members = [each.node for each in introduction.nodes]
        self.next_meeting = self.coming_meeting = (
            0  # `coming`: the one that this worker is in, or else its next
        )
        self.at = 0  # the last iteration whose boundary the script has come to
        self.figures = Figures()
        self._waited = 0.0  # for other nodes, in all
        self.finished = False  # the session came to its end
        self.script = b""  # what a member's script was at when this one entered
        self.door = ""  # of the CPU side, where a device that does not lead may ask it
        self.wanted: list[int] = []  # iterations before which this worker's state is asked for
        self.returned: Returned | None = None  # the others went on without this node; not acted on yet
        self.left_out = False  # the same; the CPU side has not heard that the script is awake
        self.is_out = False  # it has not come in again
        self.meets = False  # the script is in a meeting, which it cannot leave to come back
        self.call: Stand | None = None  # the session's that the script is in
        self._holds_up = ""  # what keeps the global iteration where it is, as was last said
        self._handlers: dict[type, list[Handler]] = {}
        self._closed = False
        self.on(Waiting, self._handle_waiting)
        self.on(Figures, self._handle_figures)
        self.on(Members, self._handle_members)
        self.on(CaptureAt, lambda message: self.wanted.append(message.iteration))
        self.on(LeftOut, self._handle_left_out)
        self.on(Returned, self._handle_returned)

    @property
    def has_groups(self) -> bool:
        """Whether any node has several devices, and is a group."""
        return max(self.introduction.devices) > 1

    def on(self, kind: type, handler: Handler) -> None:
        """Call `handler(message)` for each message of this kind, after those that were there before."""
        self._handlers.setdefault(kind, []).append(handler)

    @property
    def seconds_waited(self) -> float:
        """For other nodes, and for the other devices of this one, in all."""
        return self._waited + self.devices.seconds_waited

    def send(self, message: DeviceMessage, descriptors: Sequence[int] = ()) -> None:
        """Send, never waiting; at the leader alone. Raises what `CpuSide.send` does where the CPU side is
        gone. Where the leader has other devices, its next `take` or `wait` raises that, and theirs too: they
        would else learn no more than that it has left them."""
        if self._side is None:
            return
        try:
            self._side.send(message, descriptors)
        except AtollError:  # which `receive` says again
            if self.devices.count == 1:
                raise

    def release(self, buffer: int) -> None:
        """This device has copied what came after what is in the buffer; the CPU side gets it back when all
        have."""
        self._copied.append(buffer)
        if self.devices.count == 1:
            self._release()

    def forget_copied(self) -> None:
        """The memory in which buffers lay is no more."""
        self._copied = []

    def take(self, where: str, said: bytes = b"") -> None:
        """Handle all that has come, and wait for nothing; the script is `where` says. The leader hears what
        each device has `said` (`devices.said`)."""
        self._together(self._hear, where, said)

    def wait(self, until: Callable[[], bool], what: str | Callable[[], str]) -> None:
        """Handle what comes until `until()`; `what` is waited for, and stands in the deadline's error with
        what the CPU side says keeps it. Raises DeadlineError after sync.timeout."""
        self._holds_up = ""
        call = f"the wait for {what if isinstance(what, str) else what()}"
        self.take(call)
        if not until():
            self._together(lambda: self._hear_until(until, what), call)

    def give_time(self, seconds: float, until: Callable[[], bool]) -> None:
        """Handle what comes until `until()`, but for `seconds` at most; it is no wait for other nodes."""

        def hear() -> None:
            end = time.monotonic() + seconds
            self._hear()
            while not until() and (rest := end - time.monotonic()) > 0:
                self._hear_next(rest)

        self._together(hear, "the time for its own contribution's effect")

    def ask(
        self, question: DeviceMessage, descriptors: Sequence[int], kind: type, what: str
    ) -> DeviceMessage:
        """Send what is the leader's own business, and wait for the answer, a `kind`; what comes meanwhile is
        for the next `take`. Raises DeadlineError after sync.timeout."""
        self._holds_up = ""
        self.send(question, descriptors)
        start = time.monotonic()
        try:
            while (waited := time.monotonic() - start) < self._timeout:
                got = self._receive(min(_SLICE_SECONDS, self._timeout - waited))
                if got is None:
                    continue
                if isinstance(got[0], kind):
                    return got[0]
                if isinstance(got[0], Waiting):
                    self._handle_waiting(got[0])
                else:
                    self._kept.append(got)
            raise DeadlineError(self._late(waited, what))
        finally:
            self._waited += time.monotonic() - start

    def _together(self, hear: Callable[[], None], call: str, said: bytes = b"") -> None:
        """Let the leader `hear` its CPU side, and then all other devices of the node what it has heard."""
        if self.devices.count == 1:
            hear()
            self._say_awake()
            return

        def lead() -> bytes:
            hear()
            heard, self._heard = self._heard, []
            return msgspec.msgpack.encode(heard)

        told = self.devices.led(lead, call, said)
        if self.leads:
            self._release()
            self._say_awake()  # so all devices have come here
            return
        for message in from_msgpack(told, list[bytes]):
            self._handle(decode(message), [])
        self._say_awake()  # the leader has said it

    def _say_awake(self) -> None:
        if self.left_out and not self.meets:
            self.left_out = False
            self.send(Awake())

    def _release(self) -> None:
        if self._copied:
            self.send(Release(buffers=self._copied))
            self._copied = []

    def _hear(self) -> None:
        while self._kept:
            self._handle(*self._kept.popleft())
        while (got := self._receive()) is not None:
            self._handle(*got)

    def _hear_until(self, until: Callable[[], bool], what: str | Callable[[], str]) -> None:
        start = time.monotonic()
        try:
            while not until():
                waited = time.monotonic() - start
                if waited >= self._timeout:
                    raise DeadlineError(self._late(waited, what if isinstance(what, str) else what()))
                self._hear_next(min(_SLICE_SECONDS, self._timeout - waited))
                self._say_awake()  # all devices had come here when this wait began
        finally:
            self._waited += time.monotonic() - start

    def _hear_next(self, timeout: float) -> None:
        got = self._receive(timeout)
        if got is not None:
            self._handle(*got)

    def _receive(self, timeout: float = 0.0) -> tuple[DeviceMessage, list[int]] | None:
        assert self._side is not None
        return self._side.receive(timeout)

    def _late(self, waited: float, what: str) -> str:
        holds_up = f"; it waits for {self._holds_up}" if self._holds_up else ""
        return (
            f"node {self.node} waited {waited:.1f} s for {what}{holds_up} "
            f"(deadline sync.timeout, {self._timeout:g} s)"
        )

    def _handle(self, message: DeviceMessage, descriptors: list[int]) -> None:
        if self.leads and self.devices.count > 1 and not isinstance(message, _LEADERS):
            self._heard.append(encode(message))
        for each in descriptors:  # a CPU side gives none
            os.close(each)
        for handler in self._handlers.get(type(message), ()):
            handler(message)

    def _handle_waiting(self, message: Waiting) -> None:
        self._holds_up = message.what

    def _handle_figures(self, message: Figures) -> None:
        self.figures = message

    def _handle_members(self, message: Members) -> None:
        self.members = sorted(each.node for each in message.members)
        self.introduction.remember(message.known or message.members)

    def _handle_left_out(self, _: LeftOut) -> None:
        self.left_out = self.is_out = True

    def _handle_returned(self, message: Returned) -> None:
        self.returned, self.incarnation, self.is_out = message, message.incarnation, False
        self.next_meeting = self.coming_meeting = message.meeting
        self.wanted.clear()
        self.introduction.lived(message.incarnation)

    def entered(self, ready: Ready) -> None:
        """The CPU side is set up, and this node a member."""
        self.incarnation, self.is_out = ready.incarnation, False
        self.next_meeting = self.coming_meeting = max(self.next_meeting, ready.meeting)
        self.script, self.door = ready.script, ready.door
        self.introduction.lived(ready.incarnation)

    def prepared(self, _nbytes: int) -> None:
        """The CPU side is told of the model itself."""

    def stepped(self, _iteration: int, _samples: float, _pace: object) -> None:
        """The session has made so many iterations; the CPU side counts its own."""

    def finish(self, iteration: int) -> None:
        """Let the leader say goodbye to the other nodes, after `iteration` iterations; they are not waited
        for long."""
        left: list[bool] = []
        self.on(Left, lambda _: left.append(True))
        self.send(Leave(iteration=iteration))
        self.finished = True
        until = time.monotonic() + _LEAVING_SECONDS
        while self.leads and not left and (rest := until - time.monotonic()) > 0:
            self._hear_next(min(_SLICE_SECONDS, rest))

    def close(self) -> None:
        """End the CPU side, and let the introduction go. Closing twice does no harm."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._side is not None:
                self._side.close()
        finally:
            self.introduction.close(self.finished)
            self.devices.close()
