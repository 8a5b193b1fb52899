"""The log's lines at a shard: in order, each until it is applied.

Shard 0 queues those of its own log. The others follow shard 0, and look for it where it may come back.
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
from atoll.store.entries import Entry, Fenced, Step, decode_entry_untrusted
from atoll.store.outcomes import StoreError
from atoll.wire import messages
from atoll.wire.messages import Hello

_ASK_WHERE = 0.5  # seconds between questions where shard 0 is, while it is not to be reached
_ASK_LINES = 0.5  # seconds between questions for a line of the log that did not come

_LOG = Hello(version=messages.VERSION, run="", role="shard", shard=0)  # from whom lines of the log come


class LogLines:
    """The lines for shard `index` of `run`. `hub` says where shard 0 is; `training` is what is trained."""

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
        self.generation = 0  # how many Setups were put into effect
        self.next_entry = 0  # of this generation
        self._entries: deque[tuple[int, Entry]] = deque()  # sequence; not applied yet
        self._link: LogLink | None = None
        self._asked_where = 0.0  # when the hub was asked where shard 0 is
        self._asked_line = (-1, 0.0)  # the latest that did not come and was asked for, and when; monotonic

    @property
    def client(self) -> Client | None:
        """The connection to shard 0."""
        return self._link.client if self._link is not None else None

    # -- the queue ----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Another generation: lines of the one before are nothing any more."""
        self.generation += 1
        self.next_entry = 0
        self._entries.clear()

    @property
    def is_empty(self) -> bool:
        """Whether no line waits to be applied."""
        return not self._entries

    @property
    def _next_line(self) -> int:
        """The sequence number of the line that is to come next."""
        return sequence_of(self.generation, self.next_entry + len(self._entries))

    def queue(self, sequence: int, entry: Entry) -> None:
        """A line of the log, which come in order."""
        if sequence != self._next_line:
            raise StoreError(f"a line of the log is missing: {sequence} came, {self._next_line} is the next")
        self._entries.append((sequence, entry))

    def take_next(self) -> Entry | None:
        """The line that is to be applied now, if there is one."""
        if not self._entries or self.is_held:
            return None
        self.next_entry += 1
        return self._entries.popleft()[1]

    @property
    def is_held(self) -> bool:
        """Whether the next line needs edited gradients that are still on their way here."""
        model = self._training.model
        if not self._entries or model is None:
            return False
        entry = self._entries[0][1]
        if not isinstance(entry, Step) or not entry.accepted or not entry.edited:
            return False
        gone = any(isinstance(each, Fenced) and each.worker == entry.editor for _, each in self._entries)
        return not gone and model.lacks(entry.editor, entry.iteration, entry.edited)

    # -- following shard 0 --------------------------------------------------------------------------------

    def follow_at(self, address: str) -> None:
        """Follow shard 0 at this address."""
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
        """Take what shard 0 has sent, and see that it is followed where the hub says that it is."""
        if self._index and self._link is None and self._hub is not None and self._hub.addresses:
            self.follow_at(self._hub.addresses[0])
        if self._link is not None:
            self._link.take()
            self._mend_link(self._link, self._hub)

    def _mend_link(self, link: LogLink, hub: HubLink | None) -> None:
        """Where shard 0 is not to be reached, and may come back: look for it, here and elsewhere."""
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
        """Ask for the lines from the next one on, and say again what is whole here."""
        if self._link is None:
            return
        self._link.follow(self._next_line)
        model = self._training.model
        if model is not None:
            for staged in model.state.whole():
                self.tell_staged(*staged)

    def tell_staged(self, worker: int, incarnation: int, iteration: int) -> None:
        """Tell the log, once it is in the journal, that a contribution is whole here."""

        def tell() -> None:
            reach("shard.journalled", iteration)
            if self._link is not None:
                self._link.staged(worker, incarnation, iteration)

        self._kept.when_kept(tell)

    def _handle_entry(self, message: messages.Entry, header: bytes) -> None:
        """A line from shard 0. What is here already, or of an earlier Setup's log, is nothing to this shard;
        where lines before it did not come, they are asked for, and it comes again after them."""
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
