"""The steps by which a late or returning node becomes a member."""

from __future__ import annotations

import time

import numpy as np

from atoll.core.errors import UserError
from atoll.core.points import reach
from atoll.cpuside.acting import Acting
from atoll.cpuside.calculating import Work
from atoll.cpuside.entering import Entering
from atoll.cpuside.history import History
from atoll.cpuside.others import Others
from atoll.cpuside.parts import MeetingParts
from atoll.cpuside.publishing import Publishing
from atoll.cpuside.settingup import SettingUp
from atoll.cpuside.stage import Stage
from atoll.cpuside.telling import Telling
from atoll.peers.node import Node
from atoll.wire import device as d
from atoll.wire import nodes as n


class ComingIn:
    """Asks to be admitted, takes over a member's state, and begins with the state of a member's script."""

    def __init__(
        self,
        stage: Stage,
        others: Others,
        acting: Acting,
        settingup: SettingUp,
        meetings: MeetingParts,
        work: Work,
        publishing: Publishing,
        history: History,
        telling: Telling,
    ) -> None:
        self._stage, self._others, self._acting, self._settingup = stage, others, acting, settingup
        self._meetings, self._work, self._publishing = meetings, work, publishing
        self._history, self._telling = history, telling

    def poll(self, entering: Entering) -> None:
        """Advance as far as possible; raises an error if the others refuse this node or time is up."""
        stage = self._stage
        if stage.trained is None or not entering.awake:
            return  # the worker's SetUp or Awake must come first
        if not stage.is_ready:
            self._others.check_refused(late=True)
        now = time.monotonic()
        if stage.node is None:
            stage.node = Node.joining(
                stage.begin.node,
                entering.token,
                self._others.network.address,
                [each.node for each in self._others.nodes],
                stage.settings(),
                np.random.default_rng(),
                now,
                stage.newest,
                self._others.network.silent.judge,
            )
            self._acting.do(stage.node.poll(now))
        if entering.taker is not None and (why := entering.taker.stalled()):
            source, entering.taker = entering.taker.source, None
            self._acting.do(stage.introduced.handle_state_failed(now, source, why))
        if entering.lacks():
            self._others.check_somebody_is_there(entering)
        else:
            self._enter(entering)

    def _enter(self, entering: Entering) -> None:
        """Become a member, with all state present, and let the worker begin."""
        stage, script = self._stage, entering.script
        assert script is not None
        stage.entering = None
        self._publishing.due()
        self._meetings.since = script.meeting
        self._settingup.entered(script.number)
        first, incarnation = script.iteration + stage.shift, stage.introduced.life.incarnation
        if not entering.returned:
            self._settingup.tell_ready(first, incarnation, script.meeting, bytes(script.state))
            return
        stage.is_ready, stage.resuming = True, incarnation
        self._telling.send(
            d.Returned(
                incarnation=incarnation,
                iteration=first,
                meeting=script.meeting,
                script=bytes(script.state),
                reason=entering.reason[:4000],
            )
        )

    def hear_takeover(self, sender: int, message: n.Takeover, payload: memoryview | None) -> None:
        """Handle a piece of a member's state."""
        stage = self._stage
        entering = stage.entering
        if entering is None or entering.taker is None or entering.unpacking:
            return
        taker, model = entering.taker, stage.model
        raw = taker.handle(sender, message, payload)
        if raw is None:
            return
        entering.unpacking = True

        def unpack() -> str:
            try:
                model.take_over(raw)
            except UserError as error:
                return str(error)
            return ""

        def unpacked(wrong: str) -> None:
            entering.unpacking, entering.taker = False, None
            if stage.entering is not entering:
                return
            now, node = time.monotonic(), stage.introduced
            if wrong:
                self._telling.told("refused", f"node {sender}'s state", wrong)
                self._acting.do(node.handle_state_failed(now, sender, wrong))
                return
            entering.has_state, model.shift = True, taker.shift
            # The script's state may come from a member whose script has not heard of all these iterations.
            for each in taker.applied:
                self._history.take_over(each)
            self._history.consumed = taker.consumed
            reach("node.took", model.globals.iteration)
            self._acting.do(node.handle_state(now, model.globals.iteration))

        self._work.do(unpack, unpacked)

    def hear_script(self, sender: int, message: n.Script, payload: memoryview | None) -> None:
        """Handle a piece of the state of a member's script."""
        stage = self._stage
        if stage.entering is None or stage.trained is None:
            return
        if wrong := stage.entering.take_script(sender, message, payload, stage.most_script):
            self._telling.told("refused", f"node {sender}", wrong)
