"""The samples that the contributions in the log have used, and those that the hub has yet to be told of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from atoll.store.ranges import Ranges
from atoll.wire import messages
from atoll.wire.messages import Count

Life: TypeAlias = tuple[int, int]  # worker, incarnation
Positions: TypeAlias = dict[tuple[int, int], Ranges]  # by sampler and epoch


class UsedSamples(msgspec.Struct, forbid_unknown_fields=True):
    """The samples that contributions have used, by incarnation.

    Attributes:
        used: all used positions.
        committed: the number of committed iterations.
        news: used positions that the hub has not been told of. As ranges they stay few, however long the hub
            is gone.
    """

    used: dict[Life, Positions] = {}
    committed: dict[Life, Count] = {}
    news: dict[Life, Positions] = {}

    def count(self, worker: int, commit: messages.Commit) -> None:
        """Note the samples of a contribution that counts."""
        key = (worker, commit.incarnation)
        self.committed[key] = commit.iteration + 1
        kept = [self.used.setdefault(key, {})] + ([self.news.setdefault(key, {})] if commit.used else [])
        for used in commit.used:
            for each in kept:
                each.setdefault((used.sampler, used.epoch), Ranges()).add(used.start, used.stop)

    def of(self, worker: int, incarnation: int) -> messages.Fenced:
        """Return, for the hub, how many iterations of this incarnation count, and all positions that they
        used."""
        return self._told((worker, incarnation), self.used.get((worker, incarnation), {}))

    def take_news(self) -> list[messages.Fenced]:
        """Return, for the hub's leases, the positions used since the last call, as answers to a Fence."""
        told = [self._told(key, used, news=True) for key, used in sorted(self.news.items())]
        self.news.clear()
        return told

    def tell_all(self, live: Mapping[int, int]) -> None:
        """Let `take_news` return all positions that `live` workers have used, as earlier news may be lost."""
        for key in live.items():
            for epoch, ranges in self.used.get(key, {}).items():
                news = self.news.setdefault(key, {}).setdefault(epoch, Ranges())
                for start, stop in ranges:
                    news.add(start, stop)

    def _told(self, key: Life, positions: Positions, *, news: bool = False) -> messages.Fenced:
        used = [
            messages.Used(sampler=sampler, epoch=epoch, start=start, stop=stop)
            for (sampler, epoch), ranges in sorted(positions.items())
            for start, stop in ranges
        ]
        iteration = self.committed.get(key, 0)
        return messages.Fenced(worker=key[0], incarnation=key[1], iteration=iteration, used=used, news=news)
