"""Samplers for workers in lockstep: they deal a dataset's indices, and save the place in the epoch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import chain
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler

from atoll.core.errors import CheckpointError, RunError, UserError
from atoll.groups.shares import Whole
from atoll.train.data.costs import UNLIKE_COSTS, Costs, cut_by_cost
from atoll.train.data.dealing import Deal, DealPosition, Tick, Weigh
from atoll.train.data.given import Given, GivenBatches, GivenIndices
from atoll.train.data.order import SampleOrder, left_in
from atoll.train.data.runs import SampleRange, cut, merged, singles
from atoll.train.data.shares import Shares, ShareSchedule

_AT_ONCE = 4096  # ticks that are looked up together
Thing = TypeVar("Thing", int, list[int])


class Comeback:
    """The iterations of a worker since its return into a deal.

    Attributes:
        made: their number, until the loop over the data has ended; None without a return.
        each: the most ticks of one iteration so far.
    """

    def __init__(self) -> None:
        self.made: int | None = None
        self.each = 0

    def committed(self, ticks: int) -> None:
        """Record a whole iteration of `ticks` ticks."""
        self.each = max(self.each, ticks)
        if self.made is not None:
            self.made += 1

    def beyond(self, ticks: int) -> int:
        """Return the number of iterations made beyond those left of the epoch, in a deal of `ticks` ticks;
        below 0 if some are left."""
        return self.made - -(-ticks // self.each) if self.made and self.each else -1


class DealtSampler(Sampler[Thing], Generic[Thing]):
    """The base of samplers for workers in lockstep: the order, the deal, and the place in the deal.

    The order of each epoch is drawn from the seed. An iteration that follows a whole one is of the next
    epoch. A **deal** begins with an epoch, with a load, and with each change of members. `given` and other
    counts of ticks begin with it.

    Attributes:
        rank: this worker's rank in the deal.
        world: the number of members.
        given: the ticks given in this deal.
    """

    _batch = 0  # samples in a tick of all workers; 0: one for each
    _shares: Shares | None = None
    _schedule: ShareSchedule | None = None  # `_shares`, if they change by what members agree on
    _weigh: Weigh | None = None

    def __init__(
        self,
        dataset: Sized | int,
        *,
        rank: int,
        world: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        on_index: Callable[[Any], None] | None = None,
        taken: Given | None = None,
    ) -> None:
        """Deal a dataset. Raises UserError for a dataset without a length, and for a rank outside the world.

        Args:
            dataset: the dataset, or its length.
            rank: this worker's rank.
            world: the number of workers.
            seed: the seed of the order.
            shuffle: True to draw the order anew each epoch.
            drop_last: True to leave out an incomplete last tick; else it is filled up.
            on_index: called with the sampler before each index, or batch, that it gives.
            taken: counts the indices or batches given and used; None: single indices.
        """
        if not 0 <= rank < world:
            raise UserError(f"a sampler for rank {rank} of {world} workers: ranks go from 0 to {world - 1}")
        self.rank, self.world = rank, world
        self.shuffle, self.drop_last = shuffle, drop_last
        self.given = 0
        self._taken = GivenIndices() if taken is None else taken
        self._committed = 0  # ticks of whole iterations
        self._before_last = 0  # ticks of whole iterations without the last one
        self._before = 0  # ticks of this iteration in earlier deals
        self._comeback = Comeback()
        self._order = SampleOrder(dataset, seed, shuffle)
        self._epoch = 0
        self._whole = False  # True once the iteration has given its last tick
        self._iterating = 0  # number of the active iteration; 0: none
        self._iterations = 0
        self._on_index = on_index
        self._deal: Deal = self._deal_of(self._order.whole(self._epoch))

    @property
    def epoch(self) -> int:
        """The epoch under way; between two epochs, the one that has ended."""
        return self._epoch

    @property
    def resumed(self) -> bool:
        """True if the deal is not a whole epoch, as after the load of a checkpoint that was saved inside
        one."""
        return self._deal.runs != self._order.whole(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be one of `epoch`, from its start. An epoch just loaded keeps its place."""
        if epoch != self._epoch or self._whole:
            self._turn_to(int(epoch))

    @property
    def ended(self) -> bool:
        """True if the loop that has just ended was the epoch's last.

        It is False if this worker returned inside the others' epoch while its loader was still ending an
        earlier one: the next loop goes on there.
        """
        return self._whole or self._comeback.beyond(self._deal.ticks) >= 0

    def __iter__(self) -> Iterator[Thing]:
        if self.ended:
            self._turn_to(self._epoch + 1)
        elif self._comeback.made:  # the loop in which the worker returned ended inside the epoch
            self._skip(self._comeback.made)
        self._comeback.made = None
        self._start()
        self._iterations += 1
        self._iterating = self._iterations
        return self._give(self._iterations)

    def __len__(self) -> int:
        """Return the number of indices or batches that this worker gets in the iteration in progress, else in
        the next."""
        deal = (
            self._deal_of(self._order.whole(self._epoch))
            if self._whole and not self._iterating
            else self._deal
        )
        return deal.ticks + (self._before if deal is self._deal else 0)

    # The place in the deal

    def place(self) -> dict[str, Any]:
        """Return this worker's place in the deal, as JSON values, for a checkpoint or a new deal."""
        return {
            "epoch": self._epoch,
            "rank": self.rank,
            "given": self.given,
            "used": self._taken.used(self.given),
            "committed": self._committed,
            "before_last": self._before_last,
            "ended": self._whole and not self._iterating,
            "whole": self._whole,
            "idle": not self._taken.consumed and (self._whole or not self._iterating),
        }

    @property
    def consumed(self) -> int:
        """The number of samples that this worker has trained on since the iteration began."""
        return self._taken.consumed

    def committed(self) -> None:
        """Record a whole iteration: every tick used so far counts."""
        self._before_last, self._committed = self._committed, self._taken.used(self.given)
        self._comeback.committed(self._committed - self._before_last)

    def count(self, samples: float) -> float:
        """Record that a backward has reached `samples` samples; return how many count in the mean."""
        return self._taken.count(samples, self.given)

    def next_sizes(self) -> set[float]:
        """Return the possible sizes of the next batch, as far as this sampler knows."""
        return self._taken.next_sizes(self.given)

    def state_dict(self, consumed: int | Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the place in the epoch, independent of the number of workers.

        `consumed` has every worker's `place`, or is the number of samples that all workers have consumed.
        """
        if isinstance(consumed, int):
            left = cut(self._deal.runs, consumed)[1]
        else:
            left = self._deal.left([_place(place) for place in consumed], given=False)
        return self._order.saved(left, self._epoch)

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError if `state` is of another dataset or another order than this sampler's."""
        self._order.check(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at the place in `state`.

        The next iteration gives the rest of its epoch, or the next epoch if nothing is left. The seed is the
        saved one. Raises CheckpointError as `check_state` does.
        """
        self.check_state(state)
        self._epoch = state["epoch"]
        self._order.load(state)
        _share_anew(self._schedule, self.world)
        self._set_deal(self._deal_of(left_in(state)))
        if self._order.length and not self._deal.ticks:
            self._begin(self._epoch + 1)

    def return_to(self, state: Mapping[str, Any]) -> None:
        """Load the place that the others have reached without this worker (their `lockstep_state`).

        The worker may be inside a loop over its data. It trains in any case on the ticks that its loader has
        fetched. These count as the first ticks of the new deal, so all workers make equally many iterations
        of the epoch. The loop may end at another iteration than the others' loops: if the loader has fetched
        more than the epoch has left, or all of an earlier epoch. Then the next loop begins at the place of
        the others by then.
        """
        in_hand, used = self.given - self._committed, self._taken.used(self.given) - self._committed
        sizes = self._taken.sizes(self._committed)
        self.load_state_dict(state)
        self.given, self._comeback.made = in_hand, 0
        self._taken.begin(sizes, used)

    def _turn_to(self, epoch: int) -> None:
        """Begin an epoch, and skip those of its iterations that were made after a return."""
        made = max(0, self._comeback.beyond(self._deal.ticks))
        self._begin(epoch)
        self._skip(made)

    def _skip(self, made: int) -> None:
        """Skip `made` iterations of this deal."""
        if made:
            deal = self._deal
            self._set_deal(self._deal_of(cut(deal.runs, made * self._comeback.each * deal.per_tick)[1]))

    # Dealing anew

    def deal_anew(
        self, places: Sequence[Mapping[str, Any] | None], rank: int, absent: Collection[int] = ()
    ) -> None:
        """Deal the rest of the epoch to new members. Every member makes this call, at the same point of the
        same iteration.

        A member keeps the ticks that it was given, including all that its loader has fetched ahead. The ticks
        that a lost member had not committed are dealt again; if a loader has ended its loop, at the beginning
        of the next epoch. Raises RunError if members are in different epochs.

        Args:
            places: each member's `place` by new rank; None for a newcomer.
            rank: this worker's new rank.
            absent: the former ranks that had no part in the last whole iteration.
        """
        known = {index: _place(place) for index, place in enumerate(places) if place is not None}
        if all(place["idle"] for place in places if place is not None):
            over = any(place["whole"] for place in places if place is not None)
            self._deal_idle(rank, len(places), over and rank not in known)
            return
        epochs = {place["epoch"] for place in places if place is not None}
        if epochs != {self._epoch}:
            raise RunError(
                f"workers are in different epochs of their data ({', '.join(map(str, sorted(epochs)))}); "
                "every worker must make equally many iterations"
            )
        held: list[list[Tick]] = [
            self._deal.in_hand(known[index]) if index in known else [] for index in range(len(places))
        ]
        own = known.get(rank)
        left = self._deal.left(list(known.values()), absent=absent)
        ended = any(place.ended for place in known.values())
        self._deal = self._deal_of(left, held, ended)
        self.rank, self.world = rank, len(places)
        _share_anew(self._schedule, self.world)
        used = 0 if own is None else own.used - own.committed
        self._before += 0 if own is None else own.committed
        self.given, self._committed, self._before_last = len(held[rank]), 0, 0
        self._taken.begin([len(tick) for tick in self._deal.held[rank]], used)
        self._whole = self.given >= self._deal.ticks if not ended else own is not None and own.ended
        if own is None and not self._deal.ticks:  # a newcomer begins with the next epoch
            self._begin(self._epoch + 1)
        self._order.keep({run[0] for run in self._deal.runs})

    def _deal_idle(self, rank: int, world: int, over: bool) -> None:
        """Give the whole deal again, since no worker has trained on it: the sampler may be one for
        evaluation.

        With `over`, for a newcomer after the epoch, begin the next one.
        """
        whole, self.rank, self.world = self._whole, rank, world
        _share_anew(self._schedule, world)
        self._set_deal(self._deal_of(self._deal.runs))
        self._whole = whole
        if over:
            self._begin(self._epoch + 1)

    def lockstep_state(self) -> dict[str, Any]:
        """Return the place that all members have reached with whole iterations, in the form of `state_dict`.

        It is for a worker that takes a lost member's place in an unchanged deal.
        """
        return self.state_dict(self._committed * self._deal.per_tick)

    def deal_state(self) -> dict[str, Any]:
        """Return the deal, with which a newcomer deals as the others do."""
        deal = self._deal
        return {
            **self.state_dict(0),
            "runs": [list(run) for run in deal.runs],
            "held": [[[list(item) for item in tick] for tick in ticks] for ticks in deal.held],
            "ended": deal.ended,
            "over": self._whole and not self.given,
            "shares": [] if self._schedule is None else self._schedule.state(),
        }

    def check_deal_state(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError if `state` is no deal of this sampler's dataset and order."""
        self.check_state(state)
        self._order.check_runs(state.get("runs"))
        held = state.get("held")
        right = isinstance(held, list) and 0 < len(held) <= _MOST_WORKERS
        for ticks in held if isinstance(held, list) else ():
            right = right and isinstance(ticks, list) and all(isinstance(tick, list) for tick in ticks)
            items = [item for tick in ticks for item in tick] if right else []
            right = right and all(map(self._order.has, items))
        if not right or not all(isinstance(state.get(key), bool) for key in ("ended", "over")):
            raise CheckpointError("the sampler's deal names workers or samples that are none")
        if self._schedule is not None:
            self._schedule.check(state.get("shares"), len(state["held"]))

    def load_deal_state(self, state: Mapping[str, Any], rank: int | None = None) -> None:
        """Take part in another worker's deal as member `rank`, with nothing in hand; None: as no member,
        until `deal_anew`."""
        self.check_deal_state(state)
        self._epoch = state["epoch"]
        self._order.load(state)
        held = [[[(e, p) for e, p in tick] for tick in ticks] for ticks in state["held"]]
        runs = [(e, start, stop) for e, start, stop in state["runs"]]
        self._set_deal(self._deal_of(runs, held, state["ended"]))
        if self._schedule is not None:
            self._schedule.load(state["shares"])
        self.rank, self.world = (0 if rank is None else rank), len(held)
        if rank is not None and (state["over"] or not self._deal.ticks):  # begin with the next epoch
            self._begin(self._epoch + 1)

    # Inside

    def _deal_of(
        self, runs: Sequence[SampleRange], held: Sequence[Sequence[Tick]] | None = None, ended: bool = False
    ) -> Deal:
        held = [[]] * self.world if held is None else held
        return Deal(runs, held, self._batch, self.drop_last, ended, self._shares, self._weigh)

    def _set_deal(self, deal: Deal) -> None:
        self._deal, self._whole, self._comeback.made = deal, False, None
        if self._schedule is not None:
            self._schedule.begin()
        self._start()
        self._order.keep()

    def _start(self) -> None:
        """Give the deal from its beginning."""
        self.given = self._committed = self._before_last = self._before = 0
        self._taken.begin()

    def _begin(self, epoch: int) -> None:
        over: list[SampleRange] = self._deal.over
        self._epoch = epoch
        self._set_deal(self._deal_of(merged([*over, *self._order.whole(self._epoch)])))

    def _give(self, iteration: int) -> Iterator[Thing]:
        try:
            self._whole = self.given >= self._deal.ticks
            while self.given < self._deal.ticks and self._iterating == iteration:
                deal = self._deal
                for each in self._look_up(deal, self.given, min(self.given + _AT_ONCE, deal.ticks)):
                    # Set before the yield: a loop that breaks at the last batch has had the epoch.
                    self.given += 1
                    self._whole = self.given >= self._deal.ticks
                    if self._on_index is not None:
                        self._on_index(self)
                    yield each
                    if self._deal is not deal or self._iterating != iteration:
                        break
        finally:
            if self._iterating == iteration:
                self._iterating = 0

    @abstractmethod
    def _look_up(self, deal: Deal, start: int, stop: int) -> list[Thing]:
        """Return what this worker gives in one or more ticks, from tick `start` on and before tick `stop`:
        indices, or batches."""


class ShardedSampler(DealtSampler[int]):
    """One worker's indices of a dataset, in an order drawn anew each epoch from the seed.

    The order and the deal are those of torch's DistributedSampler: worker r takes every `world`-th index of
    the epoch's permutation. So the workers' k-th batches together are a contiguous run of the permutation,
    whatever the number of workers. A place in the epoch is one number: the samples that all workers have
    consumed.

    Every worker gets equally many indices: the end is filled up from the permutation's beginning, or with
    `drop_last` the remainder is left out. When members change, `deal_anew` deals the rest of the epoch again.
    """

    def _look_up(self, deal: Deal, start: int, stop: int) -> list[int]:
        in_hand = max(map(len, deal.held))
        found: list[int] = []
        for tick in range(start, min(stop, in_hand)):
            found.append(self._one(deal, tick))
        if stop > in_hand:
            start = max(start, in_hand)
            first, rows = deal.slots(self.rank, start)[0], torch.arange(stop - start)
            found += self._indices(deal, first + self.world * rows).tolist()
        return found

    def _one(self, deal: Deal, tick: int) -> int:
        """Return the index of a tick in which some members have ticks in hand."""
        items = deal.tick(self.rank, tick)
        if items:
            return self._order.index(*items[0])
        slots = deal.slots(self.rank, tick)
        return self._order.index(self._epoch, (slots[0] - deal.size if slots else 0) % self._order.length)

    def _indices(self, deal: Deal, slots: Tensor) -> Tensor:
        """Return the dataset's indices in `slots`, int64; slots beyond the pool get the epoch's beginning
        again."""
        found = self._order.of(self._epoch)[(slots - deal.size) % self._order.length]
        begin = 0
        for epoch, start, stop in deal.runs:
            here = (slots >= begin) & (slots < begin + stop - start)
            if bool(here.any()):
                found[here] = self._order.of(epoch)[slots[here] - begin + start]
            begin += stop - start
        return found


def _share_anew(schedule: ShareSchedule | None, world: int) -> None:
    """Forget what the members have agreed on shares."""
    if schedule is not None:
        schedule.reset(world)


class BatchesSampler(DealtSampler[list[int]]):
    """One worker's part of batches with `batch` samples over all workers, for
    `DataLoader(batch_sampler=...)`.

    The k-th batches of all workers together are the k-th `batch` samples of the epoch's order. Shares are
    even, and the first ranks take the remainder. The last batch may have fewer samples; with `drop_last` it
    is left out. A worker whose part of a batch is empty gets a fill: samples of weight 0 in the mean.
    """

    def __init__(
        self,
        dataset: Sized | int,
        *,
        batch: int,
        shares: Shares | None = None,
        schedule: ShareSchedule | None = None,
        costs: Costs | None = None,
        least: int = 1,
        fill: Callable[[], int] = lambda: 1,
        **options: Any,
    ) -> None:
        """Deal batches. Raises UserError for a `batch` below 1.

        Args:
            dataset: the dataset, or its length.
            batch: the samples in a batch of all workers.
            shares: returns each worker's part; None: even parts.
            schedule: parts that change by what workers agree on, in place of `shares`.
            costs: the samples' costs, which parts follow in place of their number; None: all cost alike.
            least: the least samples of a worker that gets any by costs.
            fill: returns the samples of a fill.
            options: those of DealtSampler.
        """
        if batch < 1:
            raise UserError(f"a global batch of {batch} samples; it must be 1 or more")
        self._batch, self._shares, self._schedule = batch, schedule or shares, schedule
        self._batches, self._costs, self._least = GivenBatches(fill), costs, least
        if costs is not None:
            self._weigh = self._cut_by_cost
        super().__init__(dataset, taken=self._batches, **options)

    def deal_state(self) -> dict[str, Any]:
        return {**super().deal_state(), "costs": self._digest}

    def check_deal_state(self, state: Mapping[str, Any]) -> None:
        super().check_deal_state(state)
        if state.get("costs") != self._digest:
            raise CheckpointError(UNLIKE_COSTS)

    @property
    def _digest(self) -> str:
        return "" if self._costs is None else self._costs.digest

    def under_way(self) -> tuple[int, float]:
        """Return the ticks of this deal that backwards have used in this iteration, and their samples: as
        many as would cost as much on the average."""
        first, ticks = self._committed, self._batches.used(self.given) - self._committed
        if self._costs is None:
            return ticks, float(sum(self._batches.sizes(first)[:ticks]))
        runs = [singles(self._deal.tick(self.rank, tick)) for tick in range(first, first + ticks)]
        return ticks, int(self._costs_of(chain(*runs)).sum()) / self._costs.mean

    def _costs_of(self, runs: Iterable[SampleRange]) -> Whole:
        assert self._costs is not None
        found = [self._costs.values[self._order.of(epoch)[start:stop].numpy()] for epoch, start, stop in runs]
        return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)

    def _cut_by_cost(self, sizes: Sequence[int], runs: Sequence[SampleRange]) -> Sequence[int]:
        return cut_by_cost(sizes, self._costs_of(runs), self._least)

    def _look_up(self, deal: Deal, start: int, stop: int) -> list[list[int]]:
        return [self._batch_of(deal, tick) for tick in range(start, min(stop, start + 1))]

    def _batch_of(self, deal: Deal, tick: int) -> list[int]:
        items = deal.tick(self.rank, tick)
        samples = self._batches.give(len(items), tick)
        return [self._order.index(*item) for item in items] or self._order.fill(self._epoch, samples)


_MOST_WORKERS = 4096
_FIELDS = ("rank", "given", "used", "committed", "before_last")


def _place(place: Mapping[str, Any]) -> DealPosition:
    numbers = {field: int(place[field]) for field in _FIELDS}
    return DealPosition(**numbers, ended=bool(place["ended"]))
