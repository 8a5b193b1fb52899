"""The log's lines: entries in order, each with a sequence number."""

from __future__ import annotations

import msgspec

from atoll.store.entries import AnyEntry
from atoll.wire.messages import Count


class Lines(msgspec.Struct, forbid_unknown_fields=True):
    """The log's entries.

    Attributes:
        first: the sequence number of `entries[0]`; `forget` raises it.
    """

    first: Count = 0
    entries: list[AnyEntry] = []

    @property
    def next_sequence(self) -> int:
        """The sequence number of the next entry."""
        return self.first + len(self.entries)

    def after(self, number: int) -> list[tuple[int, AnyEntry]]:
        """Return the entries from `number` on, with their numbers. Raises ValueError if some are
        forgotten."""
        if number < self.first:
            raise ValueError(f"the log has forgotten its lines before {self.first}, {number} among them")
        return list(enumerate(self.entries[number - self.first :], start=number))

    def keep(self, count: int) -> None:
        """Forget all but the latest `count` entries, once there are twice as many."""
        if len(self.entries) >= 2 * count:
            self.forget(self.next_sequence - count)

    def forget(self, before: int) -> None:
        """Drop the entries below number `before`. Every shard must have them."""
        count = min(max(before - self.first, 0), len(self.entries))
        del self.entries[:count]
        self.first += count
