"""Agreement of all nodes on their members and on the model to train."""

from __future__ import annotations

import time

import numpy as np

from atoll.core.errors import DeadlineError, RunError, UserError
from atoll.cpuside.acting import Acting
from atoll.cpuside.calculating import Work
from atoll.cpuside.entering import Entering
from atoll.cpuside.history import History
from atoll.cpuside.optimizerstates import OptimizerStates
from atoll.cpuside.others import Others
from atoll.cpuside.publishing import Publishing
from atoll.cpuside.stage import Stage
from atoll.cpuside.telling import Telling
from atoll.cpuside.trained import Trained
from atoll.peers.node import Node
from atoll.wire import device as d
from atoll.wire.peerviews import Life, View, ViewMember


class SettingUp:
    """Introduces the nodes to each other, and sets up models once all members have equal ones."""

    def __init__(
        self,
        stage: Stage,
        others: Others,
        acting: Acting,
        work: Work,
        publishing: Publishing,
        states: OptimizerStates,
        history: History,
        telling: Telling,
    ) -> None:
        self._stage, self._others, self._acting, self._work = stage, others, acting, work
        self._publishing, self._states = publishing, states
        self._history, self._telling = history, telling
        self._since: float | None = None  # begin of a set-up that not all members have made yet

    def introduce(self, message: d.Introduce) -> None:
        """Take the run's nodes from the worker; this node founds the run with them, or comes late."""
        stage, begin = self._stage, self._stage.begin
        self._others.introduce(message)
        if message.late:
            stage.entering = Entering(begin.timeout, returned=False)
            return
        members = tuple(
            ViewMember(Life(each.node, each.incarnation), address=each.address)
            for each in sorted(message.nodes, key=lambda each: each.node)
        )
        last = {each.life.node: each.life.incarnation for each in members}
        stage.see(View(message.founding, 0, members, last=last))
        if begin.node not in stage.lives:
            raise UserError(f"node {begin.node} is none of those that it was introduced to")
        assert stage.view is not None
        now, life = time.monotonic(), stage.lives[begin.node]
        rng, judge = np.random.default_rng(), self._others.network.silent.judge
        stage.node = Node(life, stage.view, stage.settings(), rng, now, judge=judge)
        self._acting.do(stage.node.poll(time.monotonic()))

    def set_up(self, message: d.SetUp, descriptors: list[int]) -> None:
        """Set up the worker's model, in place of an earlier one."""
        stage = self._stage
        iteration = stage.node.applied if stage.node is not None else 0
        if stage.node is not None and stage.node.iteration != iteration:
            raise RunError(f"set up at iteration {stage.node.iteration}, where {iteration} are applied")
        if stage.trained is not None:
            stage.trained.close()
        stage.trained, stage.is_ready = None, False
        self._publishing.clear()
        self._history.clear()  # the script may count anew
        self._history.consumed = message.consumed
        if len(message.devices) > 1:
            self._states.open_door()
        stage.number = number = message.number + stage.uncounted

        def is_set_up(made: Trained) -> None:
            stage.trained = made
            self._others.network.set_up(message.digest, number, message.devices)
            self._since = time.monotonic()

        # The first optimizer of a process takes seconds, in which torch imports modules.
        codec = stage.begin.codec
        self._work.answer(lambda: Trained(message, descriptors, iteration, stage.wants, codec), is_set_up)

    def go_on(self) -> None:
        """Let the worker begin once all members have set up equal models.

        Raises DeadlineError after sync.timeout, and UserError if a member trains another model.
        """
        if self._since is None:
            return
        stage, begin = self._stage, self._stage.begin
        missing = self._missing()
        if not stage.is_ready:
            self._others.check_refused(late=False)
        if missing and stage.number > 1:
            self._acting.do(stage.introduced.handle_replaced(time.monotonic()))
        if not missing:
            self._since = None
            self._begin(stage)
        elif time.monotonic() > self._since + begin.timeout:
            raise DeadlineError(
                f"node {begin.node} waited {begin.timeout:.1f} s for {' and '.join(missing)} to be set up "
                f"(deadline sync.timeout, {begin.timeout:g} s)"
            )

    def _missing(self) -> list[str]:
        """Return the members that have not made this set-up; raises UserError if one has another model."""
        stage, network = self._stage, self._others.network
        node, setup, missing = stage.begin.node, stage.model.setup, []
        assert stage.view is not None
        for each in stage.view.members:
            other = each.life.node
            if other == node:
                continue
            digest, number = network.trains(other)
            if digest and digest != setup.digest:
                raise UserError(
                    f"node {node} and node {other} train different models, or with different "
                    "optimizers, configurations or kinds of processor: give every node the same"
                )
            if number < stage.number:
                trouble = network.trouble(other)
                missing.append(f"node {other} at {each.address}{f' ({trouble})' if trouble else ''}")
        return missing

    def _begin(self, stage: Stage) -> None:
        """Let the worker begin with the parameters in buffer 0."""
        node, model = stage.introduced, stage.model
        self.tell_ready(node.iteration + model.shift, node.life.incarnation)
        model.buffers.announce(0)
        taken = node.applied + model.shift
        self._telling.send(d.Published(buffer=0, taken=taken, through=taken))

    def tell_ready(self, first: int, incarnation: int, meeting: int = 0, script: bytes = b"") -> None:
        """Let the worker begin at iteration `first`, in the worker's count.

        `meeting` and `script` are those of the script that a newcomer continues.
        """
        self._stage.is_ready = True
        ready = d.Ready(
            iteration=first, incarnation=incarnation, meeting=meeting, script=script, door=self._states.door
        )
        self._telling.send(ready)

    def entered(self, number: int) -> None:
        """Adopt the members' number of set-ups as this node comes in."""
        stage, self._since = self._stage, None
        stage.uncounted += number - stage.number
        stage.number = number
        setup = stage.model.setup
        self._others.network.set_up(setup.digest, number, setup.devices)
