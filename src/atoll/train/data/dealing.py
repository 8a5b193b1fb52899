"""The deal of the rest of an epoch to workers, made anew when the workers change; pure.

Workers in lockstep make **ticks**: one index each (ShardedSampler), or one batch each (BatchesSampler). In a
tick each member takes its part of the next run of the **pool**. There is one exception: a member that was
given ticks before the deal, and has not committed them, has them *in hand* and makes these first. So all
members make equally many ticks. While nothing is in hand, a tick of all members is a contiguous run of the
pool, whatever their number, and however the run is shared out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from atoll.core.errors import RunError
from atoll.train.data.runs import Item, SampleRange, cut, kept, merged, positions, singles, ticks_of
from atoll.train.data.shares import Shares

Tick: TypeAlias = list[Item]  # the samples of one member in one tick; empty: a fill, a sample of weight 0


@dataclass(frozen=True)
class DealPosition:
    """A member's place in a deal.

    Attributes:
        rank: the member's rank in the deal.
        given: the ticks that its loader was given.
        used: the ticks that its backwards have used.
        committed: the ticks of whole iterations.
        before_last: the ticks of whole iterations without the last one.
        ended: True if its loader asks for nothing more in this epoch.
    """

    rank: int
    given: int
    used: int
    committed: int
    before_last: int
    ended: bool


# (sizes, runs) -> each member's number of samples, of those in `runs`, if `sizes` would be right for equal
# costs.
Weigh: TypeAlias = Callable[[Sequence[int], Sequence[SampleRange]], Sequence[int]]


class Deal:
    """The deal of the pool `runs` among `len(held)` members, of which each has ticks in hand.

    Args:
        runs: the pool.
        held: the ticks that each member has in hand.
        batch: the samples of a tick of all members; 0: one for each member.
        drop_last: True to leave out an incomplete last tick; else it is filled up.
        ended: True if a loader has ended the epoch: there are no ticks beyond those in hand.
        shares: returns each member's number of samples of a tick's batch; None: members take one sample each
            in turn.
        weigh: changes these numbers by the costs of the samples; None: all cost alike.

    Attributes:
        ticks: the number of ticks that each member makes: those in hand, and then as many as the pool takes.
        size: the number of samples in the pool.
        per_tick: the number of samples in a tick of all members.
    """

    def __init__(
        self,
        runs: Iterable[SampleRange],
        held: Sequence[Sequence[Tick]],
        batch: int = 0,
        drop_last: bool = False,
        ended: bool = False,
        shares: Shares | None = None,
        weigh: Weigh | None = None,
    ) -> None:
        self._shares, self._weigh = shares, weigh
        self.runs: list[SampleRange] = [run for run in runs if run[1] < run[2]]
        self.held = [list(ticks) for ticks in held]
        self.batch, self.drop_last, self.ended = batch, drop_last, ended
        self.world = len(self.held)
        self.size = positions(self.runs)
        self._in_hand = max(map(len, self.held))
        # For each tick that a member has in hand: the pool's part (begin, length), and the ranks that take it
        self._early: list[tuple[int, int, Sequence[int]]] = []
        self._taken = 0
        for tick in range(self._in_hand):
            free = [rank for rank, ticks in enumerate(self.held) if tick >= len(ticks)]
            there = sum(len(ticks[tick]) for ticks in self.held if tick < len(ticks))
            need = (max(0, batch - there) if free else 0) if batch else len(free)
            self._early.append((self._taken, need, free))
            self._taken += need
        self.per_tick = batch or self.world
        left = max(0, self.size - self._taken)
        more = ticks_of(left, self.per_tick, drop_last=drop_last)
        self.ticks = self._in_hand + (0 if ended else more)

    def slots(self, rank: int, tick: int) -> range:
        """Return the pool's slots that a member takes in a tick. Slots from `size` on are beyond the pool,
        and filled up.

        Raises RunError for shares that do not add up.
        """
        begin, need = self._taken, self.per_tick
        members: Sequence[int] = range(self.world)
        if tick < self._in_hand:
            begin, need, members = self._early[tick]
        else:
            begin += (tick - self._in_hand) * need
        if rank not in members:
            return range(0)
        place = members.index(rank)
        if self._shares is None:
            return range(begin + place, begin + need, len(members))
        there = max(0, min(need, self.size - begin))
        sizes = self._shares(tick, there, members)
        if sum(sizes) != there or min(sizes) < 0 or len(sizes) != len(members):
            raise RunError(f"shares of {list(sizes)} samples among {len(members)} workers, where {there} are")
        if self._weigh is not None and there:
            sizes = self._weigh(sizes, cut(cut(self.runs, begin)[1], there)[0])
        begin += sum(sizes[:place])
        return range(begin, begin + sizes[place])

    def all_slots(self, rank: int, ticks: int) -> Tensor:
        """Return all slots of the pool that a member takes in its first `ticks`; int64, 1-D."""
        singly = min(ticks, self._in_hand if self._shares is None else self.ticks)
        early = [s for t in range(singly) for s in self.slots(rank, t)]
        late = max(0, min(ticks, self.ticks) - max(singly, self._in_hand))
        begins = self._taken + self.per_tick * torch.arange(late)
        within = torch.arange(min(rank, self.per_tick), self.per_tick, self.world)
        slots = torch.cat([torch.tensor(early, dtype=torch.int64), (begins[:, None] + within).flatten()])
        return slots[slots < self.size]

    def tick(self, rank: int, tick: int) -> Tick:
        """Return the samples of a member in a tick; empty for a fill."""
        held = self.held[rank]
        if tick < len(held):
            return held[tick]
        return [self.item(slot) for slot in self.slots(rank, tick) if slot < self.size]

    def item(self, slot: int) -> Item:
        """Return the epoch and the position of a slot of the pool."""
        for epoch, start, stop in self.runs:
            if slot < stop - start:
                return epoch, start + slot
            slot -= stop - start
        raise IndexError(slot)

    @property
    def over(self) -> list[SampleRange]:
        """The runs that no tick takes because the epoch has `ended`; the next epoch begins with them."""
        return cut(self.runs, self._taken)[1] if self.ended else []

    def left(
        self, places: Sequence[DealPosition], given: bool = True, absent: Collection[int] = ()
    ) -> list[SampleRange]:
        """Return the runs that are still to be dealt if only the members at `places` live.

        Two kinds of ticks are not dealt again: those that the living were given (without `given`, only those
        that they have used), and those that the lost had used in whole iterations. Members are in lockstep,
        so the lost have committed as much as the living. But the ranks `absent` had no part in the last
        iteration.
        """
        keep = torch.ones(self.size, dtype=torch.bool)
        back: list[Item] = []
        committed = min((place.committed for place in places), default=0)
        before_last = min((place.before_last for place in places), default=0)
        by_rank = {place.rank: place for place in places}
        for rank, held in enumerate(self.held):
            place = by_rank.get(rank)
            if place is None:
                gone = before_last if rank in absent else committed
            else:
                gone = place.given if given else place.used
            keep[self.all_slots(rank, gone)] = False
            back += [item for tick in held[gone:] for item in tick]
        return merged([*kept(self.runs, keep), *singles(back)])

    def in_hand(self, place: DealPosition) -> list[Tick]:
        """Return the ticks that a member was given and has not committed. It trains on them in any case."""
        return [self.tick(place.rank, tick) for tick in range(place.committed, place.given)]
