"""What outlives a shard's process: its journal, its snapshots, and its standby. Each may be absent.

What changes the shard is noted before it is handled, and nothing leaves before what it may tell of is kept.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from atoll.server.heard import Heard
from atoll.server.journal import Journal
from atoll.server.mirror import Mirror
from atoll.server.mirror import Source as Mirrored
from atoll.server.records import Told
from atoll.server.recovery import encode_image
from atoll.server.snapshot import Heading, Snapshots
from atoll.wire import messages
from atoll.wire.messages import Hello

_SMALL_JOURNAL = 2**28  # bytes of a segment that are no reason for a snapshot
_LARGE_JOURNAL = 8  # times what the shard holds: a snapshot is due

# What changes the shard: in its journal before anybody is answered.
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


class Source(Mirrored, Protocol):
    """What is kept of a shard, as it gives it."""

    def heading(self) -> Heading:
        """What a snapshot taken now is of."""


class Durability:
    """One shard's `journal`, `mirror` (of its standby) and `snapshots`. Where the journal breaks, nobody may
    go on from what is on disk until the next snapshot is whole."""

    def __init__(
        self,
        journal: Journal | None,
        mirror: Mirror | None,
        snapshots: Snapshots | None,
    ) -> None:
        self.journal, self.mirror, self.snapshots = journal, mirror, snapshots
        self._trouble = ""  # why the journal broke, until it is taken
        self.replaying = False  # what the shard hears is noted already, and nobody is answered
        self.is_on_disk = True  # the journal, where there is one, suffices to go on from
        self.wants_snapshot = False

    @property
    def comes_back(self) -> bool:
        """Whether the shard may be waited for when it is lost."""
        kept = self.journal is not None and self.is_on_disk
        return kept or self.is_gated

    @property
    def is_gated(self) -> bool:
        """Whether there is a standby that holds all that was acknowledged."""
        return self.mirror is not None and self.mirror.gated

    def take_trouble(self) -> str:
        """Why the journal broke, once; empty where it has not."""
        trouble, self._trouble = self._trouble, ""
        return trouble

    # -- what is noted, and what waits for it -------------------------------------------------------------

    def note_message(self, heard: Heard, header: bytes) -> None:
        """Note a message that is about to be handled, if it changes the shard; it came as this header."""
        message = heard.message
        if isinstance(message, messages.GiveState):
            self.note(heard.hello, header)  # its payload is only passed on
        elif isinstance(message, messages.Push) and message.lost is not None:
            self.note(
                heard.hello, messages.encode(message), heard.payload
            )  # with what the header does not say
        elif isinstance(message, _JOURNALLED):
            self.note(heard.hello, header, heard.payload)

    def note(self, hello: Hello, header: bytes, payload: memoryview | None = None) -> None:
        """Write into the journal what is about to be handled, and tell the standby."""
        if self.replaying or (self.journal is None and self.mirror is None):
            return
        index = hello.worker if hello.role == "worker" else max(0, hello.shard)
        told = Told(hello.role, index, hello.incarnation, msgspec.Raw(header), hello.member)
        if self.journal is not None:
            self.journal.append(told, payload)
        if self.mirror is not None:
            self.mirror.append(told, payload)

    def remember(self, told: Told, payload: memoryview | None) -> None:
        """The shard hears what was noted before: a standby to come has to hear it, too."""
        if self.mirror is not None:
            self.mirror.remember(told, payload)

    def set_up(self) -> None:
        """The shard has been set up: from now on its state says all."""
        if self.mirror is not None:
            self.mirror.set_up()

    def when_kept(self, act: Callable[[], None]) -> None:
        """Call `act` once all that was noted so far is kept; at once where nothing is."""
        if self.mirror is not None:
            self.mirror.when_kept(act)
        elif self.journal is not None:
            self.journal.when_written(act)
        else:
            act()

    def release(self) -> None:
        """Let go what waited for the journal, and for the standby."""
        if self.journal is not None:
            self.journal.release()
            if self.journal.is_broken and self.is_on_disk:
                self.is_on_disk, self.wants_snapshot = False, True
                self._trouble = self.journal.trouble
        if self.mirror is not None:
            self.mirror.release()

    def hear(self) -> None:
        """Take what the standby says, while the shard is busy, and let go what waited."""
        if self.mirror is not None:
            self.mirror.hear()
        self.release()

    def close(self) -> None:
        """Drop the snapshot under way and the connection to the standby; write the journal's rest."""
        if self.snapshots is not None:
            self.snapshots.close()
        if self.journal is not None:
            self.journal.close()
        if self.mirror is not None:
            self.mirror.close()

    # -- the loop's part ----------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether there is something to do at once."""
        if self.snapshots is not None and self.snapshots.busy:
            return True
        return self.mirror is not None and self.mirror.busy

    @property
    def is_full(self) -> bool:
        """Whether the journal, or the standby, is as far behind as it may be."""
        if self.journal is not None and self.journal.is_full:
            return True
        return self.mirror is not None and self.mirror.is_full

    @property
    def fileno(self) -> int:
        """What is readable when more is written; -1 for nothing."""
        return self.journal.fileno if self.journal is not None else -1

    @property
    def next_deadline(self) -> float | None:
        """When the next snapshot is due; monotonic."""
        return self.snapshots.next_deadline() if self.snapshots is not None else None

    # -- snapshots ----------------------------------------------------------------------------------------

    def before_change(self, chunk: int) -> None:
        """A chunk is about to be stepped: a snapshot under way has it as it is."""
        if self.snapshots is not None:
            self.snapshots.before_change(chunk)

    def abandon_snapshot(self) -> None:
        """What it is of is trained no more."""
        if self.snapshots is not None:
            self.snapshots.abandon()

    def poll_snapshots(self, source: Source) -> None:
        """Begin a snapshot where one is due, and go on with the one under way."""
        model = source.model
        if self.snapshots is None or model is None or not model.is_whole or not source.is_between_lines:
            return
        journal = self.journal
        large = journal is not None and journal.size > max(_SMALL_JOURNAL, _LARGE_JOURNAL * model.held_bytes)
        wanted = large or self.wants_snapshot
        self.snapshots.poll(
            time.monotonic(), model.own, model.state.versions, lambda: self._begin_snapshot(source), wanted
        )

    def _begin_snapshot(self, source: Source) -> Heading:
        """A snapshot is taken of this moment: from here on the journal goes on in a segment of its own."""
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
