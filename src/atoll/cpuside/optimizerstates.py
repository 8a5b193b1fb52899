"""Requests for the optimizer's state, from scripts on any device of the node."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable

from atoll.cpuside.acting import Acting
from atoll.cpuside.calculating import Work
from atoll.cpuside.door import Door, StateRequest
from atoll.cpuside.stage import Stage
from atoll.cpuside.trained import Trained
from atoll.exchange.globalstate import pack_globals_into
from atoll.peers.node import Node
from atoll.wire import device as d


class OptimizerStates:
    """Answers requests for the optimizer's state once the wanted iteration is applied.

    `asked` are the open requests. A node of several devices has a door for them, which `epoll` watches.
    """

    def __init__(self, stage: Stage, acting: Acting, work: Work, epoll: select.epoll) -> None:
        self._stage, self._acting, self._work, self._epoll = stage, acting, work, epoll
        self.asked: list[StateRequest] = []
        self._door: Door | None = None
        # The decisions that were last asked for a global iteration, and the iteration.
        self._wanted: tuple[Node | None, int] = None, 0

    def open_door(self) -> None:
        """Open the door for the other devices of the node."""
        if self._door is None:
            self._door = Door()
            self._epoll.register(self._door.fileno(), select.EPOLLIN)

    @property
    def door(self) -> str:
        """The door's name; empty if there is none."""
        return self._door.name if self._door is not None else ""

    def take(self) -> None:
        """Accept requests at the door."""
        if self._door is not None:
            self.asked += self._door.take()

    def go_on(self) -> None:
        """Pack the state for requests whose iteration is applied.

        When the other nodes have gone on without this one, all requests are answered: this node can only
        come back after its script goes on, and the script waits for the state.
        """
        stage = self._stage
        model = stage.trained
        if not self.asked or model is None:
            return
        applied = model.globals.iteration + model.shift
        due = [each for each in self.asked if each.least <= applied or stage.is_over]
        for asked in due:
            self.asked.remove(asked)
            self._work.answer(*_packing(model, asked))
        least = max((each.least for each in self.asked), default=0) - model.shift
        before = self._wanted[1] if self._wanted[0] is stage.node else 0
        if stage.node is None or stage.is_over or not before < least <= stage.node.iteration:
            return
        self._wanted = stage.node, least
        self._acting.do(stage.node.handle_wanted(time.monotonic(), least, least))

    def close(self) -> None:
        if self._door is not None:
            self._door.close()


def _packing(model: Trained, asked: StateRequest) -> tuple[Callable[[], int], Callable[[int], None]]:
    def pack() -> int:
        try:
            return pack_globals_into(model.globals, asked.file)
        finally:
            os.close(asked.file)

    def tell(packed: int) -> None:
        asked.answer(d.State(iteration=model.globals.iteration + model.shift, packed=packed))

    return pack, tell
