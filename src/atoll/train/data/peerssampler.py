"""The samplers of strategy `peers`, which share a dataset among nodes.

`PeerSampler` deals even parts. `PeerBatches` makes batches of one size over all nodes, with each node's part
in proportion to its speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from functools import partial
from typing import Any

import msgspec
from torch.utils.data import Sampler

from atoll.core.decoding import converted
from atoll.core.errors import CheckpointError, UserError
from atoll.train.data.given import GivenBatches
from atoll.train.data.order import SampleOrder, left_in
from atoll.train.data.peersdealing import PeerDeal
from atoll.train.data.runs import Item, SampleRange
from atoll.train.data.sampler import ShardedSampler


class PeerSampler(ShardedSampler):
    """One worker's indices of a dataset. Each epoch is dealt in even parts to the workers present at its
    beginning.

    A lost worker's part of an epoch is not trained on in that epoch. From the next epoch on the others get
    the part, until the worker returns. A worker that returns within an epoch that was dealt without it has no
    part in that epoch. It gets fills, which have weight 0 in the mean.
    """

    def __init__(
        self,
        dataset: Sized | int,
        *,
        worker: int,
        met: Callable[[], Sequence[int]],
        present: Callable[[], Sequence[int]],
        **options: Any,
    ) -> None:
        """Deal `dataset` to the workers that are present.

        Args:
            dataset: the dataset, or its length.
            worker: this worker's rank in the run.
            met: returns the ranks that took part in the latest collective.
            present: returns the ranks that take part in the iteration under way, equal on all workers at that
                iteration. Empty: unknown, and the members stay.
            options: options of DealtSampler.
        """
        self._worker, self._met, self._present = worker, met, present
        self._members = sorted({*met(), worker})
        self._in_hand = 0  # samples that count although the epoch is dealt without this worker
        rank, world = self._members.index(worker), len(self._members)
        super().__init__(dataset, rank=rank, world=world, **options)

    @property
    def members(self) -> list[int]:
        """The ranks of the workers to which the epoch is dealt."""
        return list(self._members)

    @property
    def takes_part(self) -> bool:
        """True if this worker has a part of the epoch."""
        return self._worker in self._members

    def __iter__(self) -> Iterator[int]:
        if (
            not self.ended and self._comeback.made is None and self._take_present()
        ):  # an epoch is begun once more
            self._set_deal(self._deal_of(self._deal.runs))
        return super().__iter__()

    def count(self, samples: float) -> float:
        before = self.consumed
        super().count(samples)
        return samples if self.takes_part else float(max(0, min(int(samples), self._in_hand - before)))

    def place(self) -> dict[str, Any]:
        return {**super().place(), "takes_part": self.takes_part}

    def state_dict(self, consumed: int | Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        if not isinstance(consumed, int):
            consumed = [place for place in consumed if place["takes_part"]]
        return super().state_dict(consumed)

    def lockstep_state(self) -> dict[str, Any]:
        """Return the state with the epoch's members, for a worker that returns within the epoch."""
        return {**super().lockstep_state(), "members": self.members}

    def check_state(self, state: Mapping[str, Any]) -> None:
        super().check_state(state)
        members = state.get("members", [])
        if not isinstance(members, list) or not all(type(each) is int and each >= 0 for each in members):
            raise CheckpointError(f"the sampler's epoch is dealt to workers {members!r}, who are none")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.check_state(state)
        self._deal_to(state.get("members") or self._met())
        super().load_state_dict(state)

    def return_to(self, state: Mapping[str, Any]) -> None:
        super().return_to(state)
        self._in_hand = self.given

    # Inside

    def _turn_to(self, epoch: int) -> None:
        self._take_present()
        super()._turn_to(epoch)

    def _take_present(self) -> bool:
        """Deal the next epoch to the workers present now; return True if they differ from the former
        members."""
        before = self._members
        self._deal_to(self._present() or before)
        return self._members != before

    def _deal_to(self, members: Sequence[int]) -> None:
        self._members, self._in_hand = sorted(members), 0
        self.rank = self._members.index(self._worker) if self.takes_part else 0
        self.world = len(self._members)


class PeerBatches(Sampler[list[int]]):
    """One worker's part of batches with `batch` samples over all nodes, for `DataLoader(batch_sampler=...)`.

    A node's part is in proportion to its speed, which all nodes know (`PeerDeal`). The node's devices share
    the part as evenly as possible. A worker whose part of a batch is empty gets a fill: samples of weight 0
    in the mean.
    """

    def __init__(
        self,
        dataset: Sized | int,
        *,
        batch: int,
        node: int,
        nodes: Sequence[int],
        stale_max: int,
        iteration: Callable[[], int],
        device: int = 0,
        devices: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        ahead: int | None = None,
        least: int = 1,
        fill: Callable[[], int] = lambda: 1,
        on_index: Callable[[Any], None] | None = None,
        asked: Callable[[], None] = lambda: None,
    ) -> None:
        """Deal batches of a dataset to nodes. Raises UserError for an `ahead` below 0.

        Args:
            dataset: the dataset, or its length.
            batch: the samples of a batch of all nodes.
            node: this node's number.
            nodes: the nodes among which to deal.
            stale_max: the most iterations that a node may be ahead.
            iteration: returns the number of the iteration under way.
            device: this worker's number among its node's devices.
            devices: the number of the node's devices.
            seed: the seed of the order.
            shuffle: True to draw the order anew each epoch.
            drop_last: True to leave out a last batch that is not whole.
            ahead: the most batches beyond the next one for which a loader asks; None: 31.
            least: the least samples of a node that gets any; see `PeerDeal`.
            fill: returns the samples of a fill.
            on_index: called with the sampler before each batch.
            asked: called before each look for a next batch; may call `return_to`.
        """
        if ahead is not None and ahead < 0:
            raise UserError(f"session.batches with ahead={ahead}: batches fetched ahead are 0 or more")
        self.shuffle, self.drop_last = shuffle, drop_last
        self._order = SampleOrder(dataset, seed, shuffle)
        self._node, self._iteration, self._on_index, self._asked = node, iteration, on_index, asked
        self._device, self._devices = device, devices
        self._epoch = 0
        options = {} if ahead is None else {"ahead": ahead}
        self._deal = PeerDeal(
            self._order.whole(0), batch, nodes, stale_max, drop_last=drop_last, least=least, **options
        )
        self._fill = fill
        self._batches = GivenBatches(fill)  # batches that were given and are not used up
        self._loop = 0  # number of the latest loop over the batches
        self._in_loop = 0  # the batches that it has given
        self._told = False  # the latest loop was notified of its end
        self._whole = False  # the epoch has given its last batch
        self._start = self._order.whole(0)  # this deal's first pool: an interrupted iteration begins with it
        self._given = False  # True once a batch of this deal was given
        self._trained_on = False  # a backward has reached a batch of this deal
        self._within = False  # True after a load inside an epoch, until a batch is given
        self._returned = False  # `return_to` was called, in a loop that may not have ended

    @property
    def epoch(self) -> int:
        """The epoch under way; between two epochs, the one that has ended."""
        return self._epoch

    @property
    def resumed(self) -> bool:
        """True after the load of a checkpoint that was saved inside an epoch, until the first batch is
        given."""
        return self._within

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be one of `epoch`, from its start. An epoch just loaded keeps its place."""
        if epoch != self._epoch or self._whole:
            self._begin(int(epoch), carry=False)

    def __len__(self) -> int:
        """Return the number of batches of the latest loop, if no node is lost; before the first loop, that of
        the next one."""
        return self._in_loop + self._deal.ticks_left

    @property
    def ended(self) -> bool:
        """True if the loop that has just ended was the epoch's last.

        After a return inside the others' epoch it is False if the deal has batches of which the loop gave
        none: the next loop goes on with them.
        """
        if self._returned and not self._given:
            return self._whole or self._deal.tick(self._deal.used) is None
        return self._whole

    def __iter__(self) -> Iterator[list[int]]:
        self._asked()
        if self._returned and not self._given:
            self._whole = self.ended
            self._batches.begin()
        self._returned = False
        if self._whole:
            self._begin(self._epoch + 1, carry=not self.drop_last)
        elif self._given:
            self._deal.again(self._start, carry=False)
            self._begun()
        self._loop += 1
        self._in_loop, self._told = 0, False
        return _Batches(partial(self._next_of, self._loop))

    def _next_of(self, loop: int) -> list[int]:
        """Return the next batch for loop number `loop`.

        Raises StopIteration if the epoch has no more batches, or if another loop has begun.
        """
        if loop == self._loop:
            self._asked()
        if loop != self._loop or self._told:
            raise StopIteration
        dealt = self._deal.tick(self._deal.used + len(self._batches))
        if dealt is None:
            self._whole = self._told = True
            raise StopIteration
        items = self._own(dealt.part_of(self._node))
        samples = self._batches.give(len(items), len(self._batches))
        self._given = True
        self._in_loop += 1
        if self._on_index is not None:
            self._on_index(self)
        self._within = False
        return [self._order.index(*item) for item in items] or self._order.fill(self._epoch, samples)

    def _own(self, of_node: list[Item]) -> list[Item]:
        begin, end = (len(of_node) * each // self._devices for each in (self._device, self._device + 1))
        return of_node[begin:end]

    # Notifications

    def applied(self, iteration: int, paces: Mapping[int, float]) -> None:
        """Report an applied iteration (see `PeerDeal.applied`)."""
        self._deal.applied(iteration, paces)

    def next_sizes(self) -> set[float]:
        """Return the possible sizes of the next batch (see `DealtSampler.next_sizes`)."""
        return self._batches.next_sizes(len(self._batches))

    def count(self, samples: float) -> float:
        """Record that a backward has reached `samples` samples; return how many count in the mean."""
        given = len(self._batches)
        if self._batches.used(given) == given:  # a batch of an earlier deal, which the loader had in hand
            return samples
        self._trained_on = True
        return self._batches.count(samples, given)

    def committed(self) -> None:
        """Record the end of an iteration's backward: every batch used so far counts."""
        used = self._batches.used(len(self._batches))
        self._batches.use_up(used)
        self._deal.made(self._iteration(), self._deal.used + used)

    # The place in the epoch

    def place(self) -> dict[str, Any]:
        """Return nothing: each node knows the places of all nodes by itself."""
        return {}

    def state_dict(self, _places: int | Sequence[Mapping[str, Any]] = 0) -> dict[str, Any]:
        """Return the place in the epoch once all iterations so far are applied, in the form of DealtSampler's
        state."""
        return self._order.saved(self._deal.left(), self._epoch)

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError if `state` is of another dataset or another order than this sampler's."""
        self._order.check(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at the place in `state`, on every node.

        The next iteration gives the rest of its epoch, or the next epoch if nothing is left. Raises
        CheckpointError as `check_state` does.
        """
        self.check_state(state)
        self._epoch = state["epoch"]
        self._order.load(state)
        self._start = left_in(state)
        self._deal.begin(self._start)
        self._begun()
        self._within = state["offset"] != 0
        if self._order.length and not self._deal.ticks_left:
            self._begin(self._epoch + 1, carry=False)

    def deal_state(self) -> dict[str, Any]:
        """Return the deal, with which a late node deals as the others do."""
        start = [list(run) for run in self._start]
        over = self._whole and not self._trained_on  # False: the loader's batches are yet to be used
        return {**self.state_dict(), "deal": self._deal.state(), "start": start, "over": over}

    def check_deal_state(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError if `state` is no deal of this sampler's dataset and order."""
        self.check_state(state)
        try:
            PeerDeal([], 1, [self._node], 0).load(state["deal"])
            converted(state["start"], list[SampleRange])
        except (KeyError, msgspec.ValidationError) as error:
            raise CheckpointError(f"the sampler's deal is none: {error}") from None

    def load_deal_state(self, state: Mapping[str, Any], _rank: int | None = None) -> None:
        """Take over the deal of the node that gave `state`."""
        self.check_deal_state(state)
        self._epoch = state["epoch"]
        self._order.load(state)
        self._deal.load(state["deal"])
        self._start = [(epoch, start, stop) for epoch, start, stop in state["start"]]
        self._begun()
        self._whole = bool(state["over"])

    def return_to(self, state: Mapping[str, Any]) -> None:
        """Load the deal that the others have reached without this node, which may be inside a loop over its
        data.

        Batches that the loader has fetched count as the next ticks, as in `DealtSampler.return_to`. The loop
        goes on in the new deal. A loop that has ended goes on too, if it asks again: torch's DataLoader with
        workers asks whenever it hands out a batch.
        """
        batches = self._batches
        self._batches = GivenBatches(self._fill)
        self.load_deal_state(state)
        self._batches = batches
        self._returned, self._told = True, False

    # Inside

    def _begin(self, epoch: int, *, carry: bool) -> None:
        self._epoch = epoch
        self._order.keep()
        self._start = self._deal.again(self._order.whole(epoch), carry=carry)
        self._begun()

    def _begun(self) -> None:
        self._batches.begin()
        self._whole, self._in_loop = False, 0
        self._given = self._within = self._trained_on = False


class _Batches:
    """An iterator that may give more after it has ended, which a generator cannot: see
    `PeerBatches.return_to`."""

    def __init__(self, give: Callable[[], list[int]]) -> None:
        self._give = give

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        return self._give()
