"""The run's workers by rank, and the assignment of ranks."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping
from types import MappingProxyType

from atoll.store.admission import Admission
from atoll.store.roll import Member, Roll

RANKS = 2**17  # most workers


class RankedWorkers:
    """Workers by rank, of a run that begins with `count` of them.

    In a ring, the ranks are those below `count` until the ring is formed (`open`); otherwise any number may
    come.

    Args:
        ring: True if the run has no shards.

    Attributes:
        members: workers by rank.
        not_ranks: numbers of groups, which no worker may have as its rank.
        vacancies: grows whenever a rank becomes free, or a ring opens for late workers.
    """

    def __init__(self, roll: Roll, count: int, *, ring: bool) -> None:
        self._roll, self.count, self._ring = roll, count, ring
        self.members: dict[int, Member] = {}
        self.not_ranks: Collection[int] = ()
        self.vacancies = 0
        self._open = False
        self._ranks: dict[int, int] = {}  # by incarnation
        self._tokens: dict[str, Member] = {}
        self._freed: list[int] = []  # a heap of ranks that were given back; some may be taken again
        self._fresh = 0  # all ranks below it are taken, or in `_freed`

    @property
    def open(self) -> bool:
        """True while a ring is under way that late workers may enter with any rank."""
        return self._open

    @open.setter
    def open(self, is_open: bool) -> None:
        self.vacancies += is_open and not self._open
        self._open = is_open

    def admit(self, now: float, wish: int, token: str, launcher: str) -> Admission:
        """Admit a worker with its wish for a rank; -1 for any."""
        there = self.called(token)
        if there is not None:
            return there
        if wish in self.members:
            return Admission(refused=f"rank {wish} is taken: its worker lives")
        if wish in self.not_ranks:
            return Admission(refused=f"{wish} is the number of a group, and so no rank; wish for another one")
        rank = wish if wish >= 0 else self._lowest_free()
        if self._ring and rank >= self.count and not self.open:
            return Admission(refused=self._beyond(wish))
        if rank >= RANKS:
            return Admission(refused=f"rank {rank} is beyond {RANKS - 1}, the highest")
        member = self._index(self._roll.new(now, "worker", rank, token=token, launcher=launcher))
        reason = "the rank it wished for" if wish >= 0 else "the lowest free rank"
        return Admission(rank, member.incarnation, reason=reason)

    def _index(self, member: Member) -> Member:
        self.members[member.place] = member
        self._ranks[member.incarnation] = member.place
        if member.token:
            self._tokens[member.token] = member
        return member

    def _lowest_free(self) -> int:
        """Return the lowest free rank."""
        while self._freed and self._freed[0] in self.members:
            heapq.heappop(self._freed)
        while self._fresh in self.members:
            self._fresh += 1
        lowest = min([*self._freed[:1], self._fresh])
        while lowest in self.members or lowest in self.not_ranks:
            lowest += 1
        return lowest

    def _beyond(self, wish: int) -> str:
        """Return why a worker cannot be in the run's ring."""
        what = f"there is no rank {wish}" if wish >= 0 else "all of them are there"
        return f"the run is a ring of {self.count} workers, and {what}; `atoll hub --workers` sets how many"

    def must_wait(self, wish: int) -> bool:
        """True if a worker with this wish (-1: any rank) has to wait until another one leaves or dies."""
        if wish >= 0 or not self._ring or self.open:
            return wish in self.members
        return len(self.members) >= self.count

    def leave(self, incarnation: int) -> int | None:
        """Remove a worker. Return its rank, which is free then, or None if the worker is not there."""
        member = self._roll.get(incarnation, "worker")
        if member is None:
            return None
        del self.members[member.place], self._ranks[incarnation]
        if self._tokens.get(member.token) is member:
            del self._tokens[member.token]
        self._roll.remove(member)
        heapq.heappush(self._freed, member.place)
        self.vacancies += 1
        return member.place

    def called(self, token: str) -> Admission | None:
        """Return the admission of the present worker with this token; None if there is none."""
        member = self._tokens.get(token)
        if member is None:
            return None
        return Admission(member.place, member.incarnation, reason="it is there already")

    def live(self) -> dict[int, int]:
        """Return the present workers: rank -> incarnation."""
        return {rank: member.incarnation for rank, member in sorted(self.members.items())}

    @property
    def ranks(self) -> Mapping[int, int]:
        """The ranks of the present workers, by incarnation. The mapping changes with them."""
        return MappingProxyType(self._ranks)

    def rank_of(self, incarnation: int) -> int | None:
        """Return the rank of a present worker; None if it is not there."""
        return self._ranks.get(incarnation)

    def restore(self, members: dict[int, Member]) -> None:
        """Replace all workers by these."""
        self.members, self._ranks, self._tokens, self._freed, self._fresh = {}, {}, {}, [], 0
        for member in members.values():
            self._index(member)
