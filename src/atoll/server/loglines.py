"""The queue of log entries at a shard, in order, until they are applied.

Shard 0 queues entries of its own log. Other shards follow shard 0, and look for it again if it may come back.
"""

from __future__ import annotations

import time
from collections import deque

from atoll.core.points import reach
from atoll.net.endpoint import Client
from atoll.net.keys import Keys
from atoll.server.durability import Durability
from atoll.server.followers import sequence_of
from atoll.server.links import HubLink, LogLink
from atoll.server.training import Training
from atoll.store.entries import AnyEntry, Fenced, StepWithMean, decode_entry_untrusted
from atoll.store.outcomes import StoreError
from atoll.wire import messages
from atoll.wire.messages import Hello

_ASK_WHERE = 0.5  # seconds between requests for shard 0's address while it is unreachable
_ASK_LINES = 0.5  # seconds between requests for a missing entry

_LOG = Hello(
    version=messages.VERSION, run="", role="shard", shard=0
)  # the sender of log entries, for the journal


class LogLines:
    """Queue of entries for shard `index` of `run`. `hub` knows shard 0's address; `training` the model."""

    def __init__(
        self,
        index: int,
        run: str,
        keys: Keys | None,
        hub: HubLink | None,
        kept: Durability,
        training: Training,
    ) -> None:
        self._index, self._run, self._keys, self._hub = index, run, keys, hub
        self._kept, self._training = kept, training
        self.generation = 0  # number of Setups that took effect
        self.next_entry = 0  # index of the next entry to apply, in this generation
        self._entries: deque[tuple[int, AnyEntry]] = deque()  # sequence; not applied yet
        self._link: LogLink | None = None
        self._asked_where = 0.0  # when the hub was last asked for shard 0's address; monotonic
        self._asked_line = (-1, 0.0)  # the missing entry requested last, and when; monotonic

    @property
    def client(self) -> Client | None:
        """The connection to shard 0."""
        return self._link.client if self._link is not None else None

    # -- the queue ----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a new generation and drop the entries of the one before."""
        self.generation += 1
        self.next_entry = 0
        self._entries.clear()

    @property
    def is_empty(self) -> bool:
        """True if no entry waits to be applied."""
        return not self._entries

    @property
    def _next_line(self) -> int:
        """The sequence number expected next."""
        return sequence_of(self.generation, self.next_entry + len(self._entries))

    def queue(self, sequence: int, entry: AnyEntry) -> None:
        """Queue the log's next entry. Raises StoreError if an entry is missing before it."""
        if sequence != self._next_line:
            raise StoreError(f"a line of the log is missing: {sequence} came, {self._next_line} is the next")
        self._entries.append((sequence, entry))

    def take_next(self) -> AnyEntry | None:
        """Return the entry to apply now; None if there is none, or it must wait."""
        if not self._entries or self.is_held:
            return None
        self.next_entry += 1
        return self._entries.popleft()[1]

    @property
    def is_held(self) -> bool:
        """True if the next entry needs edited gradients that have not arrived yet."""
        model = self._training.model
        if not self._entries or model is None:
            return False
        entry = self._entries[0][1]
        if not isinstance(entry, StepWithMean):
            return False
        edited = entry.edited if entry.accepted else []
        if not edited and not entry.written:
            return False
        gone = any(isinstance(each, Fenced) and each.worker == entry.editor for _, each in self._entries)
        return not gone and model.lacks(entry.editor, entry.iteration, edited, entry.written)

    # -- following shard 0 --------------------------------------------------------------------------------

    def follow_at(self, address: str) -> None:
        """Connect to shard 0 at this address and follow its log."""
        again = self._link is not None and self._link.comes_back
        self._link = LogLink(
            address,
            self._keys,
            run=self._run,
            shard=self._index,
            apply=self._handle_entry,
            incarnation=self._hub.standing if self._hub is not None else 0,
        )
        self._link.comes_back = again
        if self.generation:
            self.follow()

    def see_to_link(self) -> None:
        """Handle messages from shard 0, and follow it to the address that the hub knows."""
        if self._index and self._link is None and self._hub is not None and self._hub.addresses:
            self.follow_at(self._hub.addresses[0])
        if self._link is not None:
            self._link.take()
            self._mend_link(self._link, self._hub)

    def _mend_link(self, link: LogLink, hub: HubLink | None) -> None:
        """Reconnect to a shard 0 that is unreachable and may come back, at its old or a new address."""
        if hub is None:
            return
        moved = bool(hub.addresses) and hub.addresses[0] != link.client.address
        if link.client.connected and not link.is_lost and not moved:
            return
        due = time.monotonic() >= self._asked_where + _ASK_WHERE
        if moved or (link.is_lost and due):
            link.close()
            self.follow_at(hub.addresses[0] if moved else link.client.address)
        if due:
            self._asked_where = time.monotonic()
            hub.ask_where()

    def follow(self) -> None:
        """Request the entries from the next one on, and report again which contributions are whole here."""
        if self._link is None:
            return
        self._link.follow(self._next_line)
        model = self._training.model
        if model is not None:
            for staged in model.state.whole():
                self.tell_staged(*staged)

    def tell_staged(self, worker: int, incarnation: int, iteration: int) -> None:
        """Report to the log that a contribution is whole here, once that is durable."""

        def tell() -> None:
            reach("shard.journalled", iteration)
            if self._link is not None:
                self._link.staged(worker, incarnation, iteration)

        self._kept.when_kept(tell)

    def _handle_entry(self, message: messages.Entry, header: bytes) -> None:
        """Queue an entry from shard 0. Duplicates and entries of an earlier generation are dropped. After a
        gap the missing entries are requested; shard 0 then sends this one again after them."""
        if message.sequence == self._next_line:
            entry = decode_entry_untrusted(message.entry)
            self._kept.note(_LOG, header)
            self.queue(message.sequence, entry)
        elif self._next_line < message.sequence < sequence_of(self.generation + 1, 0):
            (line, at), now = self._asked_line, time.monotonic()
            if line != self._next_line or now >= at + _ASK_LINES:
                self._asked_line = self._next_line, now
                self.follow()

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
