"""Which contributions are staged on which shards, as the log knows it."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from atoll.wire.messages import Count


class StagesState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that Stages remember."""

    holders: list[Count]
    staged: dict[tuple[int, int], dict[int, list[Count]]]


class Stages:
    """`holders` are the shards that hold trainable chunks: the others have nothing to stage."""

    def __init__(self, holders: Collection[int]) -> None:
        self.holders = frozenset(holders)
        # (worker, incarnation) -> iteration -> shards
        self._staged: dict[tuple[int, int], dict[int, set[int]]] = {}

    def state(self) -> StagesState:
        """For a journal; `restored` makes the same of it."""
        return StagesState(
            holders=sorted(self.holders),
            staged={
                key: {iteration: sorted(shards) for iteration, shards in staged.items()}
                for key, staged in self._staged.items()
            },
        )

    @classmethod
    def restored(cls, state: StagesState) -> Stages:
        stages = cls(state.holders)
        stages._staged = {
            key: {iteration: set(shards) for iteration, shards in staged.items()}
            for key, staged in state.staged.items()
        }
        return stages

    def add(self, shard: int, worker: int, incarnation: int, iteration: int) -> None:
        """A shard has all chunks of a contribution."""
        self._staged.setdefault((worker, incarnation), {}).setdefault(iteration, set()).add(shard)

    def missing(self, worker: int, incarnation: int, iteration: int) -> list[int]:
        """The shards that have not got the whole contribution."""
        return sorted(self.holders - self._staged.get((worker, incarnation), {}).get(iteration, set()))

    def forget_through(self, worker: int, incarnation: int, iteration: int) -> None:
        """The contributions up to this one are in the log."""
        staged = self._staged.get((worker, incarnation), {})
        for old in [each for each in staged if each <= iteration]:
            del staged[old]
        if not staged:
            self._staged.pop((worker, incarnation), None)

    def forget_worker(self, worker: int, incarnation: int) -> None:
        """This incarnation and earlier ones are fenced."""
        for key in [key for key in self._staged if key[0] == worker and key[1] <= incarnation]:
            del self._staged[key]
