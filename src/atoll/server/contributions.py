"""Handlers of a shard for workers' contributions: gradients, and edited means."""

from __future__ import annotations

from collections.abc import Callable

from atoll.core.points import reach
from atoll.server.common import Common
from atoll.server.heard import NOT_SET_UP, Handler, Heard
from atoll.wire import messages


class Contributions:
    """Stages contributions in the model. `pull` answers the pull that a Push may include."""

    def __init__(self, common: Common, pull: Callable[[Heard], str]) -> None:
        self._peers, self._kept, self._log = common.peers, common.kept, common.log
        self._lines, self._training, self._pull = common.lines, common.training, pull
        self.handlers: dict[type, Handler] = {
            messages.Push: Handler(self._handle_push),
            messages.Replace: Handler(self._handle_replace),
        }

    def _handle_push(self, heard: Heard) -> str:
        model, push, live = self._training.model, heard.message, not self._kept.replaying
        if model is None:
            return NOT_SET_UP
        reason, staged = model.push(heard.worker, push, heard.payload)
        if staged and live:
            reach("shard.staged", push.iteration)
        if staged and self._log is not None:
            if live:
                self._peers.when_kept(lambda: reach("shard.journalled", push.iteration))
            reason = self._log.handle_staged(0, heard.worker, push.incarnation, push.iteration)
        elif staged and live:
            self._lines.tell_staged(heard.worker, push.incarnation, push.iteration)
        if push.pull and not reason and live:
            return self._pull(Heard(heard.peer, heard.hello, model.pull_with(push)))
        return reason

    def _handle_replace(self, heard: Heard) -> str:
        model = self._training.model
        return NOT_SET_UP if model is None else model.replace(heard.worker, heard.message, heard.payload)
