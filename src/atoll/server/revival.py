"""Saving a shard's state as an image, and restoring it in another process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from atoll.core.errors import CheckpointError, UserError
from atoll.server.common import Common
from atoll.server.heard import Handler, Heard
from atoll.server.logkeeper import LAST_MEETING, MEETING
from atoll.server.model import Model
from atoll.server.records import HandledMessage
from atoll.server.recovery import FolderContents, ImageParts, KeptParts, ShardImage
from atoll.server.setups import SetUps
from atoll.server.snapshot import Heading, restore
from atoll.store.entries import decode_entry_untrusted
from atoll.wire import messages
from atoll.wire.messages import Hello, decode_untrusted


class Revival:
    """Takes and restores a shard's image. `handlers` handle replayed messages, and `apply` applies log
    entries."""

    def __init__(
        self, common: Common, setups: SetUps, handlers: Mapping[type, Handler], apply: Callable[[], None]
    ) -> None:
        self._index, self._run, self._training = common.index, common.run, common.training
        self._lines, self._log, self._kept, self._tell = common.lines, common.log, common.kept, common.tell
        self._setups, self._handlers, self._apply = setups, handlers, apply

    @property
    def model(self) -> Model | None:
        """The model, once a Setup describes it."""
        return self._training.model

    @property
    def is_between_lines(self) -> bool:
        """True if no log entry waits to be applied."""
        return self._lines.is_empty

    def image(self) -> tuple[ShardImage, ImageParts]:
        """Return the shard's state between two messages, except for a snapshot's contents. The image shares
        live objects: encode it at once."""
        log, setups = self._log, self._setups
        model, parts = self._training.there.remembered()
        image = ShardImage(
            generation=self._lines.generation,
            next_entry=self._lines.next_entry,
            setter=setups.setter,
            bases=setups.bases,
            readies=setups.readies,
            model=model,
            log=log.state if log is not None else None,
        )
        return image, [*parts, *(log.parts() if log is not None else [])]

    def heading(self) -> Heading:
        """Return the heading of a snapshot taken now."""
        return self._training.there.heading(self._run, self._index, self._lines.next_entry)

    def recover(self, found: FolderContents) -> str:
        """Restore the saved state and replay its records; returns a line for people. Raises
        CheckpointError."""
        self._kept.replaying, count = True, 0
        try:
            if found.image is not None:
                self._restore(found.snapshot, found.image, found.parts)
            for told, payload in found.told:
                self.hear_again(told, payload)
                count += 1
        finally:
            self._kept.replaying = False
        where = "its journal's state" if found.image is not None else "the beginning"
        where = found.snapshot.name if found.snapshot is not None else where
        at = self._training.iterations
        line = f"{self._tell.name} goes on from {where} and {count} records of its journal: iteration {at}"
        self._tell.decide("shard", "goes on", line)
        return line

    def _restore(self, snapshot: Path | None, image: ShardImage, parts: KeptParts) -> None:
        try:
            model = self.make_model(image)
        except UserError as error:
            raise CheckpointError(f"{snapshot or 'the journal'}: {error}") from None
        if snapshot is not None:
            model.own.param_groups.set(restore(snapshot, model.own).heading.hyperparameters)
        self.stand_as(model, image, parts)

    def make_model(self, image: ShardImage) -> Model:
        """Make the model that an image describes, without its chunks. Raises UserError for one that this
        shard cannot hold."""
        return self._setups.make(image.model.given, image.generation)

    def stand_as(self, model: Model, image: ShardImage, parts: KeptParts) -> None:
        """Take over the state in `image`. The model's chunks are as they were then, or are awaited."""
        model.remember(image.model, parts)
        self._training.model = model
        self._lines.generation, self._lines.next_entry = image.generation, image.next_entry
        self._setups.setter = image.setter
        self._setups.bases, self._setups.readies = image.bases, image.readies
        self._kept.set_up()
        if self._log is not None and image.log is not None:
            last = parts[LAST_MEETING].get(0)
            self._log.restore(image.log, parts[MEETING], None if last is None else bytes(last))

    def hear_again(self, told: HandledMessage, payload: memoryview | None) -> None:
        """Handle a recorded message from the journal or the primary, with the same effect as the first
        time."""
        self._kept.remember(told, payload)
        message = decode_untrusted(bytes(told.message))
        hello = Hello(
            version=messages.VERSION,
            run=self._run,
            role=told.role,
            worker=told.index if told.role == "worker" else -1,
            incarnation=told.incarnation,
            member=told.member,
            shard=told.index if told.role == "shard" else -1,
        )
        if isinstance(message, messages.Entry):
            self._lines.queue(message.sequence, decode_entry_untrusted(message.entry))
        elif isinstance(message, Hello):
            if self._log is not None:
                self._log.handle_join(hello.worker, hello.incarnation)
        else:
            if isinstance(message, messages.Push) and self._training.model is not None:
                message, payload = self._training.model.decoded(message, payload, recorded=True)
            self._handlers[type(message)](Heard(b"", hello, message, payload))
        self._apply()
