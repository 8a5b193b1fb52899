"""A node's training process, as its CPU side is seen from it: what came, what is waited for, who is there."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from atoll.core.config import Config
from atoll.core.errors import DeadlineError
from atoll.train.node.introduction import Introduction
from atoll.train.node.start import CpuSide
from atoll.wire.device import (
    Applied,
    CaptureAt,
    DeviceMessage,
    Figures,
    Leave,
    Left,
    Members,
    Ready,
    Returned,
    Told,
    Waiting,
)

_SLICE_SECONDS = 0.2  # of a wait, between which the deadline is looked at
_LEAVING_SECONDS = 10.0  # for the CPU side to say goodbye to the other nodes

_OFTEN = ("round", "fetched")  # decisions that may come each iteration: for the journal alone

Handler = Callable[[Any, list[int]], None]


class NodeWorker:
    """This worker's part in a run without a server: its node, and the CPU side that speaks for it.

    Messages are handled by whoever `take`s or `wait`s, on the script's thread; `on` says how. `members` are
    the nodes of the current view, `late` is true until a node that comes late has entered. `tell(line)`,
    `decided(what, choice, reason)` and `round_seen` are the session's.
    """

    def __init__(self, introduction: Introduction, side: CpuSide, timeout: float) -> None:
        self.node, self.world = introduction.node, len(introduction.nodes)
        self.introduction, self._side, self._timeout = introduction, side, timeout
        self.incarnation, self.late = introduction.incarnation, introduction.late
        self.members = [each.node for each in introduction.nodes]
        self.next_meeting = self.coming_meeting = (
            0  # `coming`: the one that this worker is in, or else its next
        )
        self.at = 0  # the last iteration whose boundary the script has come to
        self.figures = Figures()
        self.seconds_waited = 0.0  # for other nodes, in all
        self.finished = False  # the session came to its end
        self.script = b""  # what a member's script was at when this one entered
        self.wanted: list[int] = []  # iterations before which this worker's state is asked for
        self.returned: Returned | None = None  # the others went on without this node; not acted on yet
        self._holds_up = ""  # what keeps the global iteration where it is, as was last said
        self._handlers: dict[type, Handler] = {}
        self._closed = False
        self.tell: Callable[[str], None] = lambda _line: None
        self.decided: Callable[[str, str, str], None] = lambda _what, _choice, _reason: None
        self.round_seen: Callable[[str, str, str], None] = lambda _what, _choice, _reason: None
        self.applied: Callable[[Applied], None] = lambda _applied: None
        self.asked: Callable[[], None] = lambda: None  # called when this worker's state is asked for
        self.left_behind: Callable[[], None] = lambda: None  # what was published before is of no use
        self.on(Waiting, self._handle_waiting)
        self.on(Figures, self._handle_figures)
        self.on(Told, self._handle_told)
        self.on(Members, self._handle_members)
        self.on(CaptureAt, self._handle_capture)
        self.on(Returned, self._handle_returned)
        self.on(Applied, lambda message, _: self.applied(message))

    def describe(self, config: Config) -> str:
        """How the nodes know one another, and go on together, in a few words."""
        sync = config.sync
        return (
            f"introduced by {self.introduction.describe()}; at most {sync.stale_max} iterations ahead, "
            f"overlay {sync.overlay}"
        )

    def on(self, kind: type, handler: Handler) -> None:
        """Call `handler(message, descriptors)` for each message of this kind; it closes the descriptors."""
        self._handlers[kind] = handler

    def send(self, message: DeviceMessage, descriptors: Sequence[int] = ()) -> None:
        """Send, never waiting. Raises RunError where the CPU side is gone."""
        self._side.send(message, descriptors)

    def take(self) -> None:
        """Handle all that has come, and wait for nothing."""
        while (got := self._side.receive()) is not None:
            self._handle(*got)

    def wait(self, until: Callable[[], bool], what: str | Callable[[], str]) -> None:
        """Handle what comes until `until()`; `what` is waited for, and stands in the deadline's error with
        what the CPU side says keeps it. Raises DeadlineError after sync.timeout."""
        start = time.monotonic()
        self._holds_up = ""
        try:
            self.take()
            while not until():
                waited = time.monotonic() - start
                if waited >= self._timeout:
                    raise DeadlineError(self._late(waited, what if isinstance(what, str) else what()))
                got = self._side.receive(min(_SLICE_SECONDS, self._timeout - waited))
                if got is not None:
                    self._handle(*got)
        finally:
            self.seconds_waited += time.monotonic() - start

    def give_time(self, seconds: float, until: Callable[[], bool]) -> None:
        """Handle what comes until `until()`, but for `seconds` at most; it is no wait for other nodes."""
        end = time.monotonic() + seconds
        self.take()
        while not until() and (rest := end - time.monotonic()) > 0:
            got = self._side.receive(rest)
            if got is not None:
                self._handle(*got)

    def _late(self, waited: float, what: str) -> str:
        holds_up = f"; it waits for {self._holds_up}" if self._holds_up else ""
        return (
            f"node {self.node} waited {waited:.1f} s for {what}{holds_up} "
            f"(deadline sync.timeout, {self._timeout:g} s)"
        )

    def _handle(self, message: DeviceMessage, descriptors: list[int]) -> None:
        handler = self._handlers.get(type(message))
        if handler is not None:
            handler(message, descriptors)
            return
        for each in descriptors:
            os.close(each)

    def _handle_waiting(self, message: Waiting, _descriptors: list[int]) -> None:
        self._holds_up = message.what

    def _handle_figures(self, message: Figures, _descriptors: list[int]) -> None:
        self.figures = message

    def _handle_told(self, message: Told, _descriptors: list[int]) -> None:
        if message.choice and message.what.startswith(_OFTEN):
            self.round_seen(message.what, message.choice, message.reason)
        elif message.choice:
            self.decided(message.what, message.choice, message.reason)
        else:
            self.tell(message.reason)

    def _handle_members(self, message: Members, _descriptors: list[int]) -> None:
        before, self.members = self.members, sorted(each.node for each in message.members)
        self.introduction.remember(message.known or message.members)
        gone = [f"node {each} was left out" for each in before if each not in self.members]
        came = [f"node {each} came in" for each in self.members if each not in before]
        if not gone and not came:
            return
        names = ", ".join(map(str, self.members))
        reason = f"{', '.join(gone + came)}{': ' if message.reason else ''}{message.reason}"
        self.decided("members", f"view {message.view}: nodes {names}", reason)
        if self.node == min(self.members):  # one of them tells it to people
            self.tell(f"{reason}; {len(self.members)} of {self.world} nodes go on")

    def _handle_capture(self, message: CaptureAt, _descriptors: list[int]) -> None:
        self.wanted.append(message.iteration)
        self.asked()

    def _handle_returned(self, message: Returned, _descriptors: list[int]) -> None:
        self.returned, self.incarnation = message, message.incarnation
        self.next_meeting = self.coming_meeting = message.meeting
        self.wanted.clear()
        self.left_behind()
        self.introduction.lived(message.incarnation)

    def entered(self, ready: Ready) -> None:
        """The CPU side is set up, and this node a member."""
        self.incarnation = ready.incarnation
        self.next_meeting = self.coming_meeting = max(self.next_meeting, ready.meeting)
        self.script = ready.script
        self.introduction.lived(ready.incarnation)

    def stepped(self, iteration: int) -> None:
        """The session has made so many iterations; the CPU side counts its own."""

    def leave(self, iteration: int) -> None:
        """Say goodbye to the other nodes, after `iteration` iterations; they are not waited for long."""
        left: list[bool] = []
        self.on(Left, lambda _message, _descriptors: left.append(True))
        self.send(Leave(iteration=iteration))
        self.finished = True
        until = time.monotonic() + _LEAVING_SECONDS
        while not left and (rest := until - time.monotonic()) > 0:
            got = self._side.receive(min(_SLICE_SECONDS, rest))
            if got is not None:
                self._handle(*got)

    def close(self) -> None:
        """End the CPU side, and let the introduction go. Closing twice does no harm."""
        if self._closed:
            return
        self._closed = True
        try:
            self._side.close()
        finally:
            self.introduction.close(self.finished)
