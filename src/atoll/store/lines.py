"""The log's lines: entries in order, each with a sequence number."""

from __future__ import annotations

import msgspec

from atoll.store.entries import Entry
from atoll.wire.messages import Count


class Lines(msgspec.Struct, forbid_unknown_fields=True):
    """A sequence number is an index into `entries`, plus `first`, which `forget` moves."""

    first: Count = 0
    entries: list[Entry] = []

    @property
    def next_sequence(self) -> int:
        """The number that the next entry will have."""
        return self.first + len(self.entries)

    def after(self, number: int) -> list[tuple[int, Entry]]:
        """The entries from `number` on, with their numbers; raises ValueError where they are forgotten."""
        if number < self.first:
            raise ValueError(f"the log has forgotten its lines before {self.first}, {number} among them")
        return list(enumerate(self.entries[number - self.first :], start=number))

    def keep(self, count: int) -> None:
        """Forget all but the latest `count` entries, once there are twice as many."""
        if len(self.entries) >= 2 * count:
            self.forget(self.next_sequence - count)

    def forget(self, before: int) -> None:
        """Drop the entries below number `before`, which every shard has: the log stays small."""
        count = min(max(before - self.first, 0), len(self.entries))
        del self.entries[:count]
        self.first += count
