"""The contributions that are staged, and on which shards, as the log knows it."""

from __future__ import annotations

import msgspec

from atoll.wire.messages import Count


class Stages(msgspec.Struct, forbid_unknown_fields=True):
    """The staged contributions.

    Attributes:
        holders: the shards that hold trainable chunks; the others have nothing to stage.
        staged: (worker, incarnation) -> iteration -> shards.
    """

    holders: frozenset[Count]
    staged: dict[tuple[int, int], dict[int, set[Count]]] = {}

    def add(self, shard: int, worker: int, incarnation: int, iteration: int) -> None:
        """Note that a shard has all chunks of a contribution."""
        self.staged.setdefault((worker, incarnation), {}).setdefault(iteration, set()).add(shard)

    def missing(self, worker: int, incarnation: int, iteration: int) -> list[int]:
        """Return the shards that do not have the whole contribution."""
        return sorted(self.holders - self.staged.get((worker, incarnation), {}).get(iteration, set()))

    def forget_through(self, worker: int, incarnation: int, iteration: int) -> None:
        """Forget a worker's contributions up to this iteration, which are in the log."""
        staged = self.staged.get((worker, incarnation), {})
        for old in [each for each in staged if each <= iteration]:
            del staged[old]
        if not staged:
            self.staged.pop((worker, incarnation), None)

    def forget_worker(self, worker: int, incarnation: int) -> None:
        """Forget the staged contributions of this incarnation and of earlier ones, which are fenced."""
        for key in [key for key in self.staged if key[0] == worker and key[1] <= incarnation]:
            del self.staged[key]
