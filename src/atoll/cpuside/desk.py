"""Handlers of the worker's messages."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from atoll.core.points import reach
from atoll.core.units import format_bytes
from atoll.cpuside.acting import Acting
from atoll.cpuside.door import StateRequest
from atoll.cpuside.entering import Scripted
from atoll.cpuside.giving import Giving
from atoll.cpuside.optimizerstates import OptimizerStates
from atoll.cpuside.parts import MeetingParts
from atoll.cpuside.publishing import Publishing
from atoll.cpuside.settingup import SettingUp
from atoll.cpuside.stage import Stage
from atoll.cpuside.telling import Telling
from atoll.wire import device as d
from atoll.wire.peers import Key


class Desk:
    """Passes each message of the worker to its handler."""

    def __init__(
        self,
        stage: Stage,
        acting: Acting,
        settingup: SettingUp,
        publishing: Publishing,
        states: OptimizerStates,
        giving: Giving,
        meetings: MeetingParts,
        telling: Telling,
    ) -> None:
        self._stage, self._acting, self._settingup = stage, acting, settingup
        self._publishing, self._states, self._giving = publishing, states, giving
        self._meetings, self._telling = meetings, telling
        self._handlers: dict[type, Callable[[Any, list[int]], None]] = {
            d.Introduce: lambda message, _: settingup.introduce(message),
            d.SetUp: settingup.set_up,
            d.Contribute: self._contribute,
            d.Want: self._want,
            d.Release: self._release,
            d.Meet: self._meet,
            d.WantState: self._want_state,
            d.Captured: self._captured,
            d.Awake: self._wake,
            d.Resumed: self._resumed,
            d.Leave: self._leave,
        }

    def handle(self, message: d.DeviceMessage, descriptors: list[int]) -> None:
        self._handlers[type(message)](message, descriptors)

    def _contribute(self, message: d.Contribute, _: list[int]) -> None:
        stage = self._stage
        if stage.is_over:
            return
        node, iteration = stage.introduced, message.iteration - stage.shift
        stage.model.keep_own(node.life, message)
        self._publishing.contributed()
        reach("node.contributed", iteration)
        outputs = node.handle_contributed(time.monotonic(), iteration)
        self._publishing.go_on()  # before sending: the worker waits only for the publication
        self._acting.do(outputs)

    def _want(self, message: d.Want, _: list[int]) -> None:
        stage = self._stage
        if stage.is_over:
            return
        self._publishing.want(message)
        wanted = message.iteration - stage.shift, message.least - stage.shift
        self._acting.do(stage.introduced.handle_wanted(time.monotonic(), *wanted, message.stand))

    def _release(self, message: d.Release, _: list[int]) -> None:
        for each in message.buffers:
            self._stage.model.buffers.release(each)

    def _meet(self, message: d.Meet, _: list[int]) -> None:
        stage = self._stage
        if stage.is_over:
            return
        node = stage.introduced
        at = message.at if message.at >= d.NO_MORE else max(0, message.at - stage.shift)
        key = Key("meetings", message.number, node.life)
        self._meetings.keep(key, message.what, message.payload, self._meetings.since, message.stand)
        self._acting.do(node.handle_met(time.monotonic(), message.number, at, message.stand))

    def _want_state(self, message: d.WantState, descriptors: list[int]) -> None:
        self._states.asked.append(StateRequest(message.least, descriptors[0], self._telling.send))

    def _captured(self, message: d.Captured, _: list[int]) -> None:
        stage = self._stage
        if stage.is_over:
            return
        state, most = message.script, stage.most_script
        if len(state) > most:
            reason = f"it takes {format_bytes(len(state))}, and {format_bytes(most)} is the most here"
            why = f"{d.NO_STATE}: {reason}; register less, or go on from a checkpoint"
            self._telling.told("state", "", why)
            state = b""
        iteration = message.iteration - stage.shift
        self._giving.captured(Scripted(iteration, message.meeting, stage.number, state))

    def _wake(self, _: d.Awake, __: list[int]) -> None:
        if self._stage.entering is not None:
            self._stage.entering.wake()

    def _resumed(self, message: d.Resumed, _: list[int]) -> None:
        if message.incarnation == self._stage.resuming:
            self._stage.resuming = None

    def _leave(self, _: d.Leave, __: list[int]) -> None:
        stage = self._stage
        if stage.node is None or stage.entering is not None:
            self._telling.send(d.Left())
            return
        self._acting.do(stage.node.handle_finished(time.monotonic()))
