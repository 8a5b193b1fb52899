"""Publication of new parameters to the worker, through shared memory."""

from __future__ import annotations

import time
from typing import Any

from atoll.cpuside.calculating import Work
from atoll.cpuside.stage import Stage
from atoll.cpuside.telling import Telling
from atoll.cpuside.trained import Trained
from atoll.wire import device as d
from atoll.wire.peers import Key


class Publishing:
    """Publishes parameters when the thread is free; `wanted` is the worker's wait, None while it computes."""

    def __init__(self, stage: Stage, work: Work, telling: Telling) -> None:
        self._stage, self._work, self._telling = stage, work, telling
        self._is_due = False  # parameters have changed since the latest publication
        self.wanted: d.Want | None = None

    def clear(self) -> None:
        """Begin anew for another model."""
        self._is_due, self.wanted = False, None

    def due(self) -> None:
        """Note that parameters have changed."""
        self._is_due = True

    def want(self, message: d.Want) -> None:
        """Note that the worker waits for parameters."""
        self.wanted, self._is_due = message, True
        self._telling.wait_begins()

    def contributed(self) -> None:
        """Note that the worker has contributed, and so no longer waits."""
        if self._stage.publishes_own:
            self._is_due = True
        self.got()

    def got(self) -> None:
        self.wanted = None
        self._telling.counting.waits(False)

    def go_on(self) -> None:
        """Start the next computation; if there is no other, write parameters for the worker."""
        stage = self._stage
        if self._work.start_next() or not (self._is_due and stage.is_ready and stage.entering is None):
            return
        if stage.trained is not None:
            self._publish(stage.trained)

    def _publish(self, model: Trained) -> None:
        stage, buffer = self._stage, model.buffers.free()
        node = stage.introduced
        least = self.wanted.least - model.shift if self.wanted is not None else 0
        if buffer is None or node.applied < least:
            return  # a Release or an applied iteration comes first
        self._is_due, began = False, time.monotonic()
        taken, through = node.applied, node.iteration if stage.publishes_own else node.applied
        waiting = self._pending(model, taken) if stage.publishes_own else []

        def published(_: None) -> None:
            if stage.node is not node:
                return
            model.buffers.announce(buffer)
            shift, seconds = model.shift, time.monotonic() - began
            message = d.Published(
                buffer=buffer, taken=taken + shift, through=max(taken, through) + shift, seconds=seconds
            )
            self._telling.send(message)
            if self.wanted is not None and message.taken >= self.wanted.least:
                self.got()

        self._work.start(lambda: model.publish(buffer, waiting), published)

    def _pending(self, model: Trained, applied: int) -> list[Any]:
        """Return the contributions that the overlay shows, for each pending iteration in order."""
        own, overlay = self._stage.introduced.life, self._stage.begin.overlay
        by_iteration: dict[int, list[Key]] = {}
        for key in model.assembly:
            if key.number >= applied and (overlay == "all" or key.life == own):
                by_iteration.setdefault(key.number, []).append(key)
        return [
            model.pending(iteration, sorted(keys, key=lambda key: key.life))
            for iteration, keys in sorted(by_iteration.items())
        ]
