"""Groups of workers that each train a replica: rings of their own within the ring of all workers.

The ring of all workers meets, notices deaths and lets newcomers in. A group's sums stay within the group;
each of its rounds is one of the ring of all, which confirms it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import torch
from torch.distributed.distributed_c10d import PrefixStore

from atoll.core.stands import Stand
from atoll.exchange.synchronizer import Contributors
from atoll.train.api.place import Place
from atoll.train.group.channel import Channel
from atoll.train.group.channels import channel_of, opening, words_beside
from atoll.train.group.ringbytes import sum_values
from atoll.train.group.rounds import Ring

_Result = TypeVar("_Result")


class Replicas:
    """The contributors of a run, and this worker's group among them. A ring opens it as the ring is formed.

    A worker's group follows from its name, so it stays in its group whoever dies.
    """

    def __init__(self, count: int, workers: int) -> None:
        """`count` groups of the run's `workers`; 0: each worker is a contributor by itself."""
        self._count, self._workers = count, workers
        self._groups: dict[int, list[int]] = {}  # ranks of the members, by the contributor's name
        self._channels: list[Channel] = []  # of this worker's group; none where it is a group by itself

    def open(self, session: Channel, device: torch.device) -> list[Channel]:
        """Connect to the members of this worker's group; returns the channels, for the ring to close.

        Args:
            session: the channel to all workers, all of which make this call.
            device: of the gradients.
        """
        place = session.place
        self._place, self._groups = place, {}
        for rank in range(place.world):
            self._groups.setdefault(self._contributor_of(place.name_of(rank)), []).append(rank)
        self._channels = []
        if not self._count:
            return self._channels
        ranks, store = self._groups[self.own], None
        if len(ranks) > 1:
            assert place.store is not None
            store = PrefixStore(f"group{self.own}", place.store)  # groups meet in one store
        inner = Place(
            rank=ranks.index(place.rank),
            world=len(ranks),
            local_rank=place.local_rank,
            store=store,
            host=place.host,
            watch=place.watch,
            names=tuple(place.name_of(rank) for rank in ranks),
            standing=place.standing,
        )
        with opening() as self._channels:
            self._channels.append(data := channel_of(inner, "ring", session.timeout, device))
            words_beside(data, "words", device, self._channels)
        return self._channels

    def _contributor_of(self, name: int) -> int:
        if not self._count:
            return name
        if name >= self._workers:  # it came beside those with which the run began
            return name % self._count
        return name * self._count // self._workers

    @property
    def own(self) -> int:
        """The name of this worker's contributor."""
        return self._contributor_of(self._place.name)

    @property
    def grouped(self) -> bool:
        """True where workers are in groups."""
        return self._count > 0

    @property
    def contributors(self) -> Contributors:
        """Those of the ring as it stands."""
        return Contributors(self.own, tuple(sorted(self._groups)))

    @property
    def leads(self) -> bool:
        """True on the worker that speaks for its contributor."""
        return self._groups[self.own][0] == self._place.rank

    def leader_of(self, contributor: int) -> int:
        """The rank in the ring of all of the worker that speaks for a contributor."""
        return self._groups[contributor][0]

    def giver_of(self, rank: int, newcomers: Sequence[int]) -> int:
        """The rank whose state a newcomer takes: of its own group, else of the first group.

        Args:
            rank: of the newcomer.
            newcomers: the ranks of all newcomers.
        """
        group = self._groups[self._contributor_of(self._place.name_of(rank))]
        return next((member for member in group if member not in newcomers), 0)

    @property
    def place(self) -> Place:
        """This worker's place in its group."""
        return self.data.place

    @property
    def data(self) -> Channel:
        """The group's channel for gradients."""
        return self._channels[0]

    @property
    def words(self) -> Channel:
        """The group's channel for small vectors and for payloads, on the CPU."""
        return self._channels[-1]

    @property
    def index(self) -> int:
        """Where this worker's contributor stands among those that live."""
        return self.contributors.names.index(self.own)

    def __len__(self) -> int:
        """How many contributors live."""
        return len(self._groups)

    def describe(self) -> list[list[int]]:
        """The workers of each contributor, by name."""
        return [[self._place.name_of(rank) for rank in self._groups[each]] for each in sorted(self._groups)]


class InnerRing:
    """A group's ring, over which its members sum gradients (`Ring` is that of all workers)."""

    is_awaited = False  # the ring of all lets newcomers in, at an exchange

    def __init__(self, ring: Ring, replicas: Replicas) -> None:
        self._ring, self._replicas = ring, replicas

    @property
    def place(self) -> Place:
        """This worker's place in its group."""
        return self._replicas.place

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def world(self) -> int:
        return self.place.world

    @property
    def outside(self) -> bool:
        """True on a worker that has come late, and has not entered."""
        return self._ring.outside

    @property
    def generation(self) -> int:
        """Rises whenever the group's channels are new."""
        return self._ring.generation

    @property
    def data(self) -> Channel:
        return self._replicas.data

    @property
    def agreement(self) -> Channel:
        return self._replicas.words

    def meet(self) -> None:
        """Meet new members of the ring of all, if there are any."""
        self._ring.meet()

    def admit(self) -> None:
        """Newcomers enter at an exchange, and not here."""

    def round(
        self,
        what: str,
        act: Callable[[], _Result],
        iteration: int = -1,
        where: Callable[[], Stand | None] | None = None,
    ) -> _Result:
        """A round of the ring of all, in which each group does its own `act`."""
        return self._ring.round(what, act, iteration, where)

    def sum(
        self, values: Sequence[float], what: str, where: Callable[[], Stand | None] | None = None
    ) -> list[float]:
        """The group's sums of its members' `values`."""
        return self.round(what, lambda: sum_values(self.agreement, values, what), where=where)


AnyRing: TypeAlias = Ring | InnerRing
