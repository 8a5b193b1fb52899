"""How the log's lines are applied at a shard, and who is seen to meanwhile."""

from __future__ import annotations

from collections.abc import Callable

from atoll.server.common import Common
from atoll.server.door import Door
from atoll.server.inbox import Inbox
from atoll.server.stepper import Stepper
from atoll.store.entries import Fenced


class Applier:
    """Takes the lines in order, and has the `stepper` do what they say. `meanwhile` is called between two
    chunks while messages are heard again."""

    def __init__(self, common: Common, stepper: Stepper, door: Door, inbox: Inbox) -> None:
        self._lines, self._kept, self._peers = common.lines, common.kept, common.peers
        self._stepper, self._door, self._inbox = stepper, door, inbox
        self.meanwhile: Callable[[], None] = lambda: None

    def apply(self) -> None:
        """Apply the lines that can be."""
        while (entry := self._lines.take_next()) is not None:
            self._stepper.apply(entry, self.see_to_others)
            if isinstance(entry, Fenced):
                self._door.refuse_fenced(entry)

    def see_to_others(self) -> None:
        """Answer what came while chunks are stepped, or on their way here, and cannot wait."""
        if self._kept.replaying:
            self.meanwhile()
            return
        for asked in self._inbox.take_in(self._stepper):
            self._stepper.join(asked)
        self._kept.hear()
        self._peers.flush()
