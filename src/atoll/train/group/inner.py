"""Groups of workers that each train a replica: rings of their own within the ring of all workers.

The ring of all workers meets, notices deaths and lets newcomers in. A group's sums stay within the group.
Each of a group's rounds is a round of the ring of all, which confirms it.
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
    """The contributors of a run, and this worker's group among them. A ring calls `open` whenever it is
    formed.

    A worker's group follows from its name, so it stays in its group whoever dies.
    """

    def __init__(self, count: int, workers: int) -> None:
        """Divide the run's `workers` into `count` groups; 0: each worker is a contributor by itself."""
        self._count, self._workers = count, workers
        self._groups: dict[int, list[int]] = {}  # ranks of the members, by the contributor's name
        self._channels: list[Channel] = []  # of this worker's group; none without groups

    def open(self, session: Channel, device: torch.device) -> list[Channel]:
        """Connect to the members of this worker's group; return the channels, for the ring to close.

        Args:
            session: the channel to all workers, all of which make this call.
            device: where gradients lie.
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
        if name >= self._workers:  # a newcomer, beyond those with which the run began
            return name % self._count
        return name * self._count // self._workers

    @property
    def own(self) -> int:
        """The name of this worker's contributor."""
        return self._contributor_of(self._place.name)

    @property
    def grouped(self) -> bool:
        """True if workers are in groups."""
        return self._count > 0

    @property
    def contributors(self) -> Contributors:
        """The contributors in the ring as it stands, and this worker's among them."""
        return Contributors(self.own, tuple(sorted(self._groups)))

    @property
    def leads(self) -> bool:
        """True on the worker that talks to others for its contributor."""
        return self._groups[self.own][0] == self._place.rank

    def leader_of(self, contributor: int) -> int:
        """Return the rank, in the ring of all, of the worker that talks to others for `contributor`."""
        return self._groups[contributor][0]

    def giver_of(self, rank: int, newcomers: Sequence[int]) -> int:
        """Return the rank of the member whose state a newcomer takes: one of its own group, else rank 0.

        Args:
            rank: the newcomer's rank.
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
        """The group's channel for small vectors and byte strings, on the CPU."""
        return self._channels[-1]

    @property
    def index(self) -> int:
        """The index of this worker's contributor among the living ones, by name."""
        return self.contributors.names.index(self.own)

    def __len__(self) -> int:
        """Return the number of living contributors."""
        return len(self._groups)

    def describe(self) -> list[list[int]]:
        """Return the names of each contributor's workers."""
        return [[self._place.name_of(rank) for rank in self._groups[each]] for each in sorted(self._groups)]


class InnerRing:
    """A group's ring, over which its members sum gradients. `Ring` is the ring of all workers."""

    is_awaited = False  # the ring of all workers lets newcomers in, at an exchange

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
        """True on a worker that has come late and has not entered."""
        return self._ring.outside

    @property
    def generation(self) -> int:
        """A number that rises whenever the group's channels are new."""
        return self._ring.generation

    @property
    def data(self) -> Channel:
        return self._replicas.data

    @property
    def agreement(self) -> Channel:
        return self._replicas.words

    def meet(self) -> None:
        """Meet new members of the ring of all workers, if there are any."""
        self._ring.meet()

    def admit(self) -> None:
        """Do nothing: newcomers enter at an exchange."""

    def round(
        self,
        what: str,
        act: Callable[[], _Result],
        iteration: int = -1,
        where: Callable[[], Stand | None] | None = None,
    ) -> _Result:
        """Make a round of the ring of all workers, in which each group does its own `act` (see
        `Ring.round`)."""
        return self._ring.round(what, act, iteration, where)

    def sum(
        self, values: Sequence[float], what: str, where: Callable[[], Stand | None] | None = None
    ) -> list[float]:
        """Return the sums of the group members' `values`."""
        return self.round(what, lambda: sum_values(self.agreement, values, what), where=where)


AnyRing: TypeAlias = Ring | InnerRing
