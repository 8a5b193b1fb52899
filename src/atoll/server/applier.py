"""Application of the log's entries at a shard, while other workers are served."""

from __future__ import annotations

from collections.abc import Callable

from atoll.server.common import Common
from atoll.server.door import Door
from atoll.server.inbox import Inbox
from atoll.server.logexecutor import LogExecutor
from atoll.store.entries import Fenced


class Applier:
    """Passes log entries in order to the `stepper`. A replaying shard calls `meanwhile` between two chunks
    instead of answering peers."""

    def __init__(
        self, common: Common, stepper: LogExecutor, door: Door, inbox: Inbox, meanwhile: Callable[[], None]
    ) -> None:
        self._lines, self._kept, self._peers = common.lines, common.kept, common.peers
        self._stepper, self._door, self._inbox, self._meanwhile = stepper, door, inbox, meanwhile

    def apply(self) -> None:
        """Apply all entries that are ready."""
        while (entry := self._lines.take_next()) is not None:
            self._stepper.apply(entry, self.see_to_others)
            if isinstance(entry, Fenced):
                self._door.refuse_fenced(entry)

    def see_to_others(self) -> None:
        """Serve urgent messages and ready pulls between two chunks, or while a site waits for the global
        shards."""
        if self._kept.replaying:
            self._meanwhile()
            return
        for asked in self._inbox.take_in(self._stepper):
            self._stepper.join(asked)
        self._kept.hear()
        self._peers.flush()
