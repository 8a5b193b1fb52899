"""Durability of a shard: its journal, snapshots and standby, each of which may be absent.

State changes are recorded before they are handled. No message leaves before the records that it depends on
are durable.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from atoll.exchange.zeros import without_zeros
from atoll.server.heard import Heard
from atoll.server.journal import Journal
from atoll.server.mirror import Mirror, MirroredShard
from atoll.server.records import HandledMessage
from atoll.server.recovery import encode_image
from atoll.server.snapshot import Heading, Snapshots
from atoll.wire import messages
from atoll.wire.messages import Hello

_SMALL_JOURNAL = 2**28  # segment bytes below which size is no reason for a snapshot
_LARGE_JOURNAL = 8  # a journal of this many times the chunks' bytes makes a snapshot due

# Messages that change the shard. They are journalled before any answer leaves.
_JOURNALLED = (
    messages.Push,
    messages.Replace,
    messages.Commit,
    messages.Step,
    messages.Meet,
    messages.Arrive,
    messages.WantState,
    messages.GiveState,
    messages.Setup,
    messages.SetChunk,
    messages.Ready,
    messages.Fence,
    messages.Follow,
    messages.Staged,
)


class DurableShard(MirroredShard, Protocol):
    """A shard, as its snapshots and its standby need it."""

    def heading(self) -> Heading:
        """Return the heading of a snapshot taken now."""


class Durability:
    """One shard's `journal`, `mirror` (to its standby) and `snapshots`. After the journal breaks, the shard
    cannot be restored from disk until the next snapshot is complete."""

    def __init__(
        self,
        journal: Journal | None,
        mirror: Mirror | None,
        snapshots: Snapshots | None,
    ) -> None:
        self.journal, self.mirror, self.snapshots = journal, mirror, snapshots
        self._news: list[str] = []  # about the journal, until `take_news`
        self._has_told = False  # of the journal's trouble, and not yet of its end
        self.replaying = False  # messages come from records; nothing is recorded or answered
        self.is_on_disk = True  # the shard can be restored from its journal, if it has one
        self.wants_snapshot = False

    @property
    def comes_back(self) -> bool:
        """True if peers may wait for this shard after a loss: it has a usable journal or a standby in
        sync."""
        kept = self.journal is not None and self.is_on_disk
        return kept or self.is_gated

    @property
    def is_gated(self) -> bool:
        """True if a standby holds everything that was acknowledged."""
        return self.mirror is not None and self.mirror.gated

    def take_news(self) -> list[str]:
        """Return lines for people, once each: why the journal broke, and that it is written again.

        A journal that breaks again before the second snapshot is the same trouble: on a full disk each broken
        journal leaves room for the next.
        """
        news, self._news = self._news, []
        return news

    # -- records, and actions that wait for them ---------------------------------------------------------

    @property
    def _records(self) -> bool:
        """True if messages are recorded now."""
        return not self.replaying and (self.journal is not None or self.mirror is not None)

    def note_message(self, heard: Heard, header: bytes, *, shortened: bool = False) -> None:
        """Record a message that is about to be handled, if it changes the shard.

        `header` is the message as received. `shortened`: it is a Push that came without its zeros, and its
        payload has them again.
        """
        if not self._records:
            return
        message = heard.message
        if isinstance(message, messages.GiveState):
            self.note(heard.hello, header)  # the payload is only forwarded
        elif shortened:
            short = None if heard.payload is None else without_zeros(heard.payload)
            push = msgspec.structs.replace(message, shortened=short is not None)
            self.note(heard.hello, messages.encode(push), heard.payload if short is None else short)
        elif isinstance(message, messages.Push) and message.lost is not None:
            self.note(
                heard.hello, messages.encode(message), heard.payload
            )  # the received header lacks the losses
        elif isinstance(message, _JOURNALLED):
            self.note(heard.hello, header, heard.payload)

    def note(self, hello: Hello, header: bytes, payload: memoryview | None = None) -> None:
        """Append a message to the journal and to the standby's stream."""
        if not self._records:
            return
        index = hello.worker if hello.role == "worker" else max(0, hello.shard)
        told = HandledMessage(hello.role, index, hello.incarnation, msgspec.Raw(header), hello.member)
        if self.journal is not None:
            self.journal.append(told, payload)
        if self.mirror is not None:
            self.mirror.append(told, payload)

    def remember(self, told: HandledMessage, payload: memoryview | None) -> None:
        """Pass a replayed record to the mirror, for a later standby."""
        if self.mirror is not None:
            self.mirror.remember(told, payload)

    def set_up(self) -> None:
        """Note that a Setup took effect: from now on a standby starts from the shard's state, not from its
        history."""
        if self.mirror is not None:
            self.mirror.set_up()

    def when_kept(self, act: Callable[[], None]) -> None:
        """Call `act` once all records so far are durable; at once if there is neither journal nor standby."""
        if self.mirror is not None:
            self.mirror.when_kept(act)
        elif self.journal is not None:
            self.journal.when_written(act)
        else:
            act()

    def release(self) -> None:
        """Run all actions whose records are durable by now. Notices a broken journal."""
        if self.journal is not None:
            self.journal.release()
            if self.journal.is_broken and self.is_on_disk:
                self.is_on_disk, self.wants_snapshot = False, True
                if not self._has_told:
                    self._has_told = True
                    self._news.append(self.journal.trouble)
        if self.mirror is not None:
            self.mirror.release()

    def hear(self) -> None:
        """Take the standby's acknowledgements while the shard is busy, and run released actions."""
        if self.mirror is not None:
            self.mirror.hear()
        self.release()

    def close(self) -> None:
        """Drop the snapshot in progress and the connection to the standby; write the rest of the journal."""
        if self.snapshots is not None:
            self.snapshots.close()
        if self.journal is not None:
            self.journal.close()
        if self.mirror is not None:
            self.mirror.close()

    # -- for the shard's loop -----------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """True if a snapshot or the standby has a chunk to copy at once."""
        if self.snapshots is not None and self.snapshots.busy:
            return True
        return self.mirror is not None and self.mirror.busy

    @property
    def is_full(self) -> bool:
        """True if the journal's or the standby's backlog is at its limit."""
        if self.journal is not None and self.journal.is_full:
            return True
        return self.mirror is not None and self.mirror.is_full

    @property
    def fileno(self) -> int:
        """Descriptor that is readable when the journal has written more; -1 without a journal."""
        return self.journal.fileno if self.journal is not None else -1

    @property
    def next_deadline(self) -> float | None:
        """Monotonic time at which the next snapshot is due."""
        return self.snapshots.next_deadline() if self.snapshots is not None else None

    # -- snapshots ----------------------------------------------------------------------------------------

    def before_change(self, chunk: int) -> None:
        """Copy a chunk for the snapshot in progress before the chunk is stepped."""
        if self.snapshots is not None:
            self.snapshots.before_change(chunk)

    def abandon_snapshot(self) -> None:
        """Drop the snapshot in progress, because another model is trained from now on."""
        if self.snapshots is not None:
            self.snapshots.abandon()

    def poll_snapshots(self, source: DurableShard) -> None:
        """Start a snapshot if one is due, and continue the one in progress."""
        model = source.model
        if self.snapshots is None or model is None or not model.is_whole or not source.is_between_lines:
            return
        journal = self.journal
        large = journal is not None and journal.size > max(_SMALL_JOURNAL, _LARGE_JOURNAL * model.held_bytes)
        wanted = large or self.wants_snapshot
        complete = self.snapshots.poll(
            time.monotonic(), model.own, model.state.versions, lambda: self._begin_snapshot(source), wanted
        )
        if complete is not None and journal is not None:
            self._drop_older(journal, complete)

    def _drop_older(self, journal: Journal, snapshot: Heading) -> None:
        """Drop the journal segments that a complete snapshot replaces."""
        if journal.is_broken or snapshot.journal not in journal.folder.segments():
            return  # the journal broke meanwhile
        if not self.is_on_disk:
            self.is_on_disk = True
        elif self._has_told:
            self._has_told = False
            self._news.append(f"{journal.owner}: its journal is written again")
        journal.folder.incomplete.unlink(missing_ok=True)
        journal.drop_before(snapshot.journal)

    def _begin_snapshot(self, source: DurableShard) -> Heading:
        """Begin a journal segment that starts from this moment's state; returns the snapshot's heading."""
        self.wants_snapshot = False
        heading = source.heading()
        if self.journal is None or self.snapshots is None:
            return heading
        image, parts = source.image()
        number = self.journal.begin_segment(encode_image(image), parts)
        journal, written = self.journal, threading.Event()
        self.snapshots.may_end = written
        journal.when_written(lambda: None if journal.is_broken else written.set())
        return msgspec.structs.replace(heading, journal=number)
