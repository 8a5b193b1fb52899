"""A node's place in its run, shared by all parts of its CPU side."""

from __future__ import annotations

from typing import Any

from atoll.core.errors import RunError
from atoll.cpuside.entering import Entering, most_script
from atoll.cpuside.trained import Trained
from atoll.exchange.globalstate import most_bytes
from atoll.peers.node import Node
from atoll.peers.settings import NodeSettings
from atoll.store.silence import USUAL_SECONDS
from atoll.wire import device as d
from atoll.wire.peers import Key
from atoll.wire.peerviews import Life, View

_PROGRESS = (0.1, 0.5)  # parts of sync.timeout: least and most for an iteration that all others wait for


class Stage:
    """The state of a node: its present life, the members around it, and the model.

    Attributes:
        node: the decisions of this life; None before the worker's Introduce, and between two lives.
        view: the newest view that includes the node.
        lives: the members of the view, by node.
        newest: the view that removed an earlier life of this process.
        entering: the progress of a node that comes in; None for a member.
        resuming: the incarnation for which the worker's Resumed is awaited.
        trained: the model that the worker has set up.
        number: the number of the latest set-up, in the count of all nodes.
        uncounted: set-ups that the worker has missed.
        is_ready: the worker has been sent Ready.
    """

    def __init__(self, begin: d.Begin) -> None:
        self.begin = begin
        self.node: Node | None = None
        self.view: View | None = None
        self.lives: dict[int, Life] = {}
        self.newest: View | None = None
        self.entering: Entering | None = None
        self.resuming: int | None = None
        self.trained: Trained | None = None
        self.number = self.uncounted = 0
        self.is_ready = False

    def see(self, view: View) -> None:
        """Adopt a view."""
        self.view = view
        self.lives = {each.life.node: each.life for each in view.members}

    def leave(self, entering: Entering, newest: View) -> None:
        """End the present life and begin to enter as the next one."""
        self.node, self.view, self.lives = None, None, {}
        self.entering, self.newest = entering, newest

    @property
    def introduced(self) -> Node:
        if self.node is None:
            raise RunError("the worker says Introduce before it speaks of iterations or meetings")
        return self.node

    @property
    def model(self) -> Trained:
        if self.trained is None:
            raise RunError("the worker says SetUp before it speaks of iterations")
        return self.trained

    @property
    def shift(self) -> int:
        """The worker's count of iterations minus the decisions'."""
        return self.trained.shift if self.trained is not None else 0

    @property
    def is_over(self) -> bool:
        """True while the worker may speak of a life that is over, which it does not know yet."""
        return self.entering is not None or self.resuming is not None

    @property
    def publishes_own(self) -> bool:
        """True if the worker uses parameters with its own contribution before that is applied."""
        return self.begin.overlay != "none" and self.begin.stale_max > 0

    @property
    def most_script(self) -> int:
        """The most bytes of a script's own state."""
        return most_script(most_bytes(self.model.globals))

    def wants(self, key: Key) -> bool:
        """True if a contribution or a part of a meeting with this key is taken now."""
        return self.node is not None and not self.node.refusal(key)

    def settings(self) -> NodeSettings:
        """Return the settings of the decisions, from the run's configuration."""
        begin = self.begin
        # A node that evaluates alone or compiles may take long, as in any script: it answers meanwhile.
        fixed: dict[str, Any] = {"progress": (begin.timeout * _PROGRESS[0], begin.timeout * _PROGRESS[1])}
        if begin.patience > USUAL_SECONDS:
            fixed["silence"] = tuple(each * begin.patience / USUAL_SECONDS for each in NodeSettings.silence)
        if begin.round_timeout > 0:
            fixed["round"] = (begin.round_timeout, begin.round_timeout)
        if begin.backoff > 0:
            fixed["backoff"] = (begin.backoff, begin.backoff)
        return NodeSettings(stale_max=begin.stale_max, **fixed)
