"""A node's training process as a partner of its CPU side: messages that came, waits, and the present nodes.

Of several devices the leader receives the CPU side's messages, and passes them on to the others. Each `take`
and `wait` is a call that all devices make, after which all have equal knowledge. Only the leader's messages
reach the CPU side.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from atoll.core.decoding import from_msgpack
from atoll.core.errors import AtollError, DeadlineError, MismatchError
from atoll.core.stands import Stand
from atoll.peers.settings import NodeSettings
from atoll.train.members.peersintroduction import Introduction
from atoll.train.sync.peersdevices import Devices
from atoll.train.sync.peersstart import CpuSide
from atoll.wire.device import (
    Asked,
    Awake,
    CaptureAt,
    DeviceMessage,
    Figures,
    Leave,
    Left,
    LeftOut,
    Members,
    Notice,
    Ready,
    Release,
    Returned,
    Waiting,
    decode,
    encode,
)

_SLICE_SECONDS = 0.2  # length of a slice of a wait; after each slice the wait checks its deadline
# For the CPU side to wait until the others have all contributions, and to say goodbye:
_LEAVING_SECONDS = NodeSettings.linger + 5.0

_LEADERS = (Waiting, Figures, Notice)  # messages for the leader alone

Handler = Callable[[Any], None]


class Uses:
    """The meetings for means of gradients to which this worker comes from other calls.

    Attributes:
        asked: the latest meeting that another node has named, in which its script is.
    """

    def __init__(self) -> None:
        self.asked = Asked(number=0, what="")
        self._answers: list[Callable[[], bool]] = []

    def ask(self, message: Asked) -> None:
        self.asked = message

    def on(self, answer: Callable[[], bool]) -> None:
        """Call `answer` where this worker must bring its gradients; it returns False if it has none to bring
        any more."""
        self._answers.append(answer)

    def answer(self) -> None:
        """Bring this worker's gradients to the next meeting.

        Raises MismatchError if there is no model.
        """
        if not any(answer() for answer in self._answers):
            raise MismatchError(
                "another node's script uses p.grad, and this node's has no model yet, or not any more: every "
                "node's script must make the same calls in the same order"
            )


class NodeWorker:
    """This worker's part in a run without a server: its node, and the connection to the node's CPU side.

    `take` and `wait` handle messages, on the script's thread, with the handlers that `on` has set.

    Attributes:
        node: this node's number.
        world: the number of nodes with which the run began.
        introduction: what this node knows of the others.
        devices: the node's devices.
        leads: True on the leader of the devices.
        incarnation: the number of this node's starts.
        late: True until a node that comes late has entered.
        members: the nodes of the current view.
        next_meeting: the number of the next meeting.
        coming_meeting: the number of the meeting that this worker is in, or else of the next.
        at: the last iteration whose boundary the script has reached.
        figures: the CPU side's latest figures.
        finished: True if the session came to its end.
        script: the state of a member's script when this node entered.
        door: the name of the CPU side's socket for devices that do not lead.
        wanted: iterations before which this worker's state is asked for.
        returned: set when the others went on without this node and it is back, until the script acts on it.
        left_out: True if the others went on without this node, until the CPU side knows that the script is
            awake.
        is_out: True while this node is left out.
        meets: True while the script is in a meeting, which it cannot leave to come back.
        uses: the meetings in which other nodes' scripts are, for means of gradients.
        call: the place of the session's call in which the script is; None for none.
    """

    def __init__(
        self,
        introduction: Introduction,
        side: CpuSide | None,
        timeout: float,
        devices: Devices | None = None,
    ) -> None:
        """Connect to the CPU side. `side` is the leader's; None on the node's other devices."""
        self.node, self.world = introduction.node, len(introduction.nodes)
        self.introduction, self._side, self._timeout = introduction, side, timeout
        self.devices = devices or Devices()
        self.leads = side is not None
        self._kept: deque[tuple[DeviceMessage, list[int]]] = deque()  # came while an answer was awaited
        self._heard: list[bytes] = []  # messages that the leader has not passed on yet
        self._copied: list[int] = []  # buffers that all devices have copied, or are about to
        self.incarnation, self.late = introduction.incarnation, introduction.late
        self.members = [each.node for each in introduction.nodes]
        self.next_meeting = self.coming_meeting = 0
        self.at = 0
        self.figures = Figures()
        self._waited = 0.0  # seconds waited for other nodes so far
        self.finished = False
        self.script = b""
        self.door = ""
        self.wanted: list[int] = []
        self.returned: Returned | None = None
        self.left_out = False
        self.is_out = False
        self.meets = False
        self.uses = Uses()
        self.call: Stand | None = None
        self._holds_up = ""  # the CPU side's latest reason why the global iteration does not go on
        self._handlers: dict[type, list[Handler]] = {}
        self._closed = False
        self.on(Waiting, self._handle_waiting)
        self.on(Figures, self._handle_figures)
        self.on(Members, self._handle_members)
        self.on(CaptureAt, lambda message: self.wanted.append(message.iteration))
        self.on(LeftOut, self._handle_left_out)
        self.on(Asked, self.uses.ask)
        self.on(Returned, self._handle_returned)

    @property
    def has_groups(self) -> bool:
        """True if any node has several devices, which makes the nodes groups."""
        return max(self.introduction.devices) > 1

    def on(self, kind: type, handler: Handler) -> None:
        """Call `handler(message)` for each message of this kind, after the handlers set before."""
        self._handlers.setdefault(kind, []).append(handler)

    @property
    def seconds_waited(self) -> float:
        """The seconds waited so far for other nodes, and for the other devices of this one."""
        return self._waited + self.devices.seconds_waited

    def send(self, message: DeviceMessage, descriptors: Sequence[int] = ()) -> None:
        """Send a message without waiting. Other devices than the leader send nothing.

        Raises the errors of `CpuSide.send` if the CPU side is gone. With several devices the next `take` or
        `wait` raises instead, on all devices: otherwise the others would only learn that the leader has left
        them.
        """
        if self._side is None:
            return
        try:
            self._side.send(message, descriptors)
        except AtollError:  # `receive` raises it again
            if self.devices.count == 1:
                raise

    def release(self, buffer: int) -> None:
        """Note that this device has copied newer parameters than those in `buffer`.

        The CPU side gets the buffer back when all devices have.
        """
        self._copied.append(buffer)
        if self.devices.count == 1:
            self._release()

    def forget_copied(self) -> None:
        """Forget the buffers to give back: their memory is no more."""
        self._copied = []

    def take(self, where: str, said: bytes = b"") -> None:
        """Handle all messages that have come, without waiting for more.

        The leader hears the bytes that each device has `said` (`devices.said`). `where` names the place in
        the script.
        """
        self._together(self._hear, where, said)

    def wait(self, until: Callable[[], bool], what: str | Callable[[], str]) -> None:
        """Handle messages until `until()` is True.

        Raises DeadlineError after sync.timeout. The error names `what`, and the CPU side's reason for the
        wait.
        """
        self._holds_up = ""
        call = f"the wait for {what if isinstance(what, str) else what()}"
        self.take(call)
        if not until():
            self._together(lambda: self._hear_until(until, what), call)

    def give_time(self, seconds: float, until: Callable[[], bool]) -> None:
        """Handle messages until `until()` is True, for at most `seconds`. This is not counted as a wait for
        other nodes."""

        def hear() -> None:
            end = time.monotonic() + seconds
            self._hear()
            while not until() and (rest := end - time.monotonic()) > 0:
                self._hear_next(rest)

        self._together(hear, "the time for its own contribution's effect")

    def ask(
        self, question: DeviceMessage, descriptors: Sequence[int], kind: type, what: str
    ) -> DeviceMessage:
        """Send a question that concerns the leader alone, and return the answer, a `kind`.

        Other messages that come meanwhile are kept for the next `take`. Raises DeadlineError after
        sync.timeout.
        """
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
        """Let the leader `hear` its CPU side, and then pass the messages on to all other devices of the
        node."""
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
            self._say_awake()  # all devices have come here
            return
        for message in from_msgpack(told, list[bytes]):
            self._handle(decode(message), [])
        self._say_awake()  # sends nothing: the leader has

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
                self._say_awake()  # all devices came here as this wait began
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
        for each in descriptors:  # a CPU side sends none
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
        """Note that the CPU side is set up, and this node a member."""
        self.incarnation, self.is_out = ready.incarnation, False
        self.next_meeting = self.coming_meeting = max(self.next_meeting, ready.meeting)
        self.script, self.door = ready.script, ready.door
        self.introduction.lived(ready.incarnation)

    def prepared(self, _nbytes: int) -> None:
        """Do nothing: the CPU side learns of the model when it is set up."""

    def stepped(self, _iteration: int, _samples: float, _pace: object) -> None:
        """Do nothing: the CPU side counts iterations itself."""

    def finish(self, iteration: int) -> None:
        """Let the leader say goodbye to the other nodes, after `iteration` iterations, and wait for them a
        short time."""
        left: list[bool] = []
        self.on(Left, lambda _: left.append(True))
        self.send(Leave(iteration=iteration))
        self.finished = True
        until = time.monotonic() + _LEAVING_SECONDS
        while self.leads and not left and (rest := until - time.monotonic()) > 0:
            self._hear_next(min(_SLICE_SECONDS, rest))

    def close(self) -> None:
        """End the CPU side, and close the introduction. Closing twice does no harm."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._side is not None:
                self._side.close()
        finally:
            self.introduction.close(self.finished)
            self.devices.close()
