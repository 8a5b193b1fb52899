"""Deals a dataset's indices to the workers, and knows its place in the epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from atoll.core.errors import CheckpointError, UserError


class ShardedSampler(Sampler[int]):
    """One worker's indices of a dataset, in an order drawn anew each epoch from the seed.

    Order and dealing are those of torch's DistributedSampler: worker r takes every `world`-th index of the
    epoch's permutation. So the workers' k-th batches together are a contiguous run of it, whatever their
    number, and a place in the epoch is one number: how many samples all workers have consumed.

    The epoch goes on by itself: an iteration that follows a whole one is of the next epoch. Every worker
    gets equally many indices: the permutation's beginning fills up the end, or, with `drop_last`, what does
    not go round is left out.
    """

    def __init__(
        self,
        dataset: Sized | int,
        *,
        rank: int,
        world: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        on_index: Callable[[ShardedSampler], None] | None = None,
    ) -> None:
        """`dataset` may be its length. `on_index` is called with the sampler before each index that it gives.

        Raises UserError for a dataset without a length, and for a rank outside the world.
        """
        if not 0 <= rank < world:
            raise UserError(f"a sampler for rank {rank} of {world} workers: ranks go from 0 to {world - 1}")
        self.rank, self.world = rank, world
        self.shuffle, self.drop_last = shuffle, drop_last
        self.given = 0  # indices that this worker got since the iteration started
        self.consumed = 0  # samples of the epoch that this worker has trained on since the iteration started
        self._length = _length(dataset)
        self._seed, self._epoch = int(seed), 0
        self._offset = 0  # where in the epoch's permutation the iteration started, or will start
        self._whole = False  # whether the iteration has given its last index
        self._on_index = on_index

    @property
    def epoch(self) -> int:
        """The epoch that is being iterated over; between two, the one that has ended."""
        return self._epoch

    @property
    def resumed(self) -> bool:
        """Whether the iteration begins inside an epoch, where a checkpoint was made."""
        return self._offset > 0

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration one of `epoch`, from its start; an epoch just loaded keeps its place."""
        if epoch != self._epoch or self._whole:
            self._begin(int(epoch))

    def __iter__(self) -> Iterator[int]:
        if self._whole:
            self._begin(self._epoch + 1)
        self.given = self.consumed = 0
        return self._give(self._order(), self._offset, len(self))

    def __len__(self) -> int:
        """Indices that this worker gets from the iteration in progress, else from the next one."""
        left = self._length - (0 if self._whole else self._offset)
        return left // self.world if self.drop_last else -(-left // self.world)

    def state_dict(self, consumed: int) -> dict[str, Any]:
        """The place in the epoch, `consumed` samples by all workers after the iteration started.

        It is independent of the number of workers.
        """
        offset = min(self._offset + consumed, self._length)
        return {
            "seed": self._seed,
            "epoch": self._epoch,
            "offset": offset,
            "length": self._length,
            "shuffle": self.shuffle,
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError where `state` is of another dataset or another order than this sampler's."""
        epoch, offset, length = (_whole_number(state, key) for key in ("epoch", "offset", "length"))
        _whole_number(state, "seed")
        if length != self._length:
            raise CheckpointError(
                f"the checkpoint's sampler is of a dataset of {length} samples, and this dataset has "
                f"{self._length}"
            )
        if state.get("shuffle") != self.shuffle:
            raise CheckpointError(
                f"the checkpoint's sampler has shuffle={state.get('shuffle')}, and this one "
                f"shuffle={self.shuffle}"
            )
        if offset > length or min(epoch, offset) < 0:
            raise CheckpointError(
                f"the checkpoint's sampler is at sample {offset} of epoch {epoch}, which is none"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at the place in `state`: the next iteration gives what is left of its epoch, else the next
        epoch.

        The seed is the saved one. Raises CheckpointError as `check_state` does.
        """
        self.check_state(state)
        self._seed = state["seed"]
        self._begin(state["epoch"])
        self._offset = state["offset"]
        if self._offset and not len(self):
            self._begin(state["epoch"] + 1)

    def _begin(self, epoch: int) -> None:
        self._epoch, self._offset, self._whole = epoch, 0, False
        self.given = self.consumed = 0

    def _order(self) -> torch.Tensor:
        """The epoch's permutation of all indices, int64, shape (length,)."""
        if not self.shuffle:
            return torch.arange(self._length)
        generator = torch.Generator()
        generator.manual_seed(self._seed + self._epoch)
        return torch.randperm(self._length, generator=generator)

    def _give(self, order: torch.Tensor, offset: int, count: int) -> Iterator[int]:
        self._whole = count == 0
        if not count:
            return
        positions = (offset + self.rank + self.world * torch.arange(count)) % self._length
        indices: list[int] = order[positions].tolist()
        for position, index in enumerate(indices, start=1):
            # The last index is out before a loader asks for more: a loop that breaks there has had the epoch.
            self._whole = position == count
            self.given = position
            if self._on_index is not None:
                self._on_index(self)
            yield index


def _length(dataset: Sized | int) -> int:
    if isinstance(dataset, int):
        if dataset < 0:
            raise UserError(f"a dataset of {dataset} samples; give the dataset or its length, 0 or more")
        return dataset
    try:
        return len(dataset)
    except TypeError:
        raise UserError(
            f"a {type(dataset).__name__} has no length, so it cannot be dealt to workers; "
            "give one with __len__, or its length"
        ) from None


def _whole_number(state: Mapping[str, Any], key: str) -> int:
    value = state.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise CheckpointError(f"the checkpoint's sampler has {key} {value!r}, which is not a whole number")
    return value
