"""Where a node is in its run, for all parts of its CPU side."""

from __future__ import annotations

from typing import Any

from atoll.core.errors import RunError
from atoll.cpuside.entering import Entering, most_script
from atoll.cpuside.trained import Trained
from atoll.exchange.globalstate import most_bytes
from atoll.peers.node import Node
from atoll.peers.settings import Settings
from atoll.store.silence import USUAL_SECONDS
from atoll.wire import device as d
from atoll.wire.peers import Key
from atoll.wire.peerviews import Life, View

_PROGRESS = (0.1, 0.5)  # of sync.timeout: the least and the most for an iteration that all others wait for


class Stage:
    """In which of its lives a node is, among whom, and what it trains.

    Attributes:
        node: the decisions of this life; None before the worker's Introduce, and between two lives.
        view: the newest that the node is in.
        lives: the members of the view, by node.
        newest: the view by which an earlier node of this process was removed.
        entering: what a node that comes in has so far; None: it is a member.
        resuming: the incarnation to which the worker is to say Resumed.
        trained: what the worker has set up.
        number: of set-ups, as all nodes count them.
        uncounted: those that the worker was not in.
        is_ready: the worker has had Ready.
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
        """This view holds from now on."""
        self.view = view
        self.lives = {each.life.node: each.life for each in view.members}

    def leave(self, entering: Entering, newest: View) -> None:
        """The life is over: the next one enters."""
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
        """How many more iterations the worker counts than the decisions do."""
        return self.trained.shift if self.trained is not None else 0

    @property
    def is_over(self) -> bool:
        """Whether what the worker says is of a life that is over, which it may not know yet."""
        return self.entering is not None or self.resuming is not None

    @property
    def publishes_own(self) -> bool:
        """Whether parameters with an own contribution over them are of use before it is applied."""
        return self.begin.overlay != "none" and self.begin.stale_max > 0

    @property
    def most_script(self) -> int:
        """Bytes that a script's own state may take."""
        return most_script(most_bytes(self.model.globals))

    def wants(self, key: Key) -> bool:
        """Whether the payload of `key` is taken now."""
        return self.node is not None and not self.node.refusal(key)

    def settings(self) -> Settings:
        """What the decisions go by."""
        begin = self.begin
        # A node may evaluate alone, or compile, for as long as a script may: it answers meanwhile.
        fixed: dict[str, Any] = {"progress": (begin.timeout * _PROGRESS[0], begin.timeout * _PROGRESS[1])}
        if begin.patience > USUAL_SECONDS:  # of silence, too
            fixed["silence"] = tuple(each * begin.patience / USUAL_SECONDS for each in Settings.silence)
        if begin.round_timeout > 0:
            fixed["round"] = (begin.round_timeout, begin.round_timeout)
        if begin.backoff > 0:
            fixed["backoff"] = (begin.backoff, begin.backoff)
        return Settings(stale_max=begin.stale_max, **fixed)
