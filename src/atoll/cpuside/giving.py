"""A member's gifts to newcomers: the state of the model, and the state of its script."""

from __future__ import annotations

from atoll.core.points import reach
from atoll.cpuside.calculating import Work
from atoll.cpuside.entering import Newcomers, Scripted
from atoll.cpuside.history import History
from atoll.cpuside.network import Network
from atoll.cpuside.stage import Stage
from atoll.cpuside.takeover import Giver, give
from atoll.exchange.globalstate import pack_globals
from atoll.wire.nodes import Lacks
from atoll.wire.peerviews import View


class Giving:
    """Gives this node's state to newcomers; `newcomers` are those that get its script's state."""

    def __init__(self, stage: Stage, network: Network, history: History, work: Work) -> None:
        self._stage, self._network, self._history, self._work = stage, network, history, work
        self.newcomers, self._giver = Newcomers(), Giver()

    def clear(self) -> None:
        """Forget all newcomers, since this node begins a new life."""
        self.newcomers, self._giver = Newcomers(), Giver()

    def see(self, old: View | None, view: View) -> list[int]:
        """Adopt a view; returns the iterations (the worker's count) before which to capture its script."""
        stage = self._stage
        if stage.entering is not None:
            return []
        return [each + stage.shift for each in self.newcomers.view(old, view, stage.introduced.life)]

    def captured(self, script: Scripted) -> None:
        """Send the script's state to the newcomers that begin with its iteration."""
        self.newcomers.captured(script, self._network)

    def up(self, node: int) -> None:
        """Send again what a broken connection to `node` may have lost."""
        self.newcomers.up(node, self._network)

    def handle_lacks(self, sender: int, message: Lacks) -> None:
        """Note a newcomer's request for the state."""
        self._giver.handle(sender, message)
        self.go_on()

    def go_on(self) -> None:
        """Pack the state for each newcomer that is a member and whose iteration is applied."""
        stage = self._stage
        node, model = stage.node, stage.trained
        if node is None or model is None or stage.entering is not None or stage.view is None:
            return
        lives = {each.life for each in stage.view.members}
        for life in self._giver.due(node.applied, lives.__contains__):

            def send(raw: memoryview, to: int = life.node) -> None:
                reach("node.gives", model.globals.iteration)
                give(
                    self._network,
                    to,
                    raw,
                    model.globals.iteration,
                    model.shift,
                    self._history.latest,
                    self._history.consumed,
                )

            self._work.do(lambda: pack_globals(model.globals), send)
