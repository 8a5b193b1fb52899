"""The order of a dataset's samples in each epoch, and saved places in the order."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Sized
from typing import Any

import torch
from torch import Tensor

from atoll.core.errors import CheckpointError, UserError
from atoll.train.data.runs import SampleRange


class SampleOrder:
    """The order of a dataset's `length` samples in each epoch.

    It is a permutation drawn from `seed` plus the epoch's number, or without `shuffle` the dataset's own
    order. A run (`train/data/runs.py`) is an epoch and a range of positions in that epoch's order.
    """

    def __init__(self, dataset: Sized | int, seed: int, shuffle: bool) -> None:
        """Order a dataset; `dataset` may be its length. Raises UserError for a dataset without a length."""
        self.length, self.seed, self.shuffle = _length_of(dataset), int(seed), shuffle
        self._drawn: dict[int, Tensor] = {}

    def of(self, epoch: int) -> Tensor:
        """Return the epoch's permutation of all indices, int64, (length,), and keep it."""
        if epoch not in self._drawn:
            self._drawn[epoch] = self.draw(epoch)
        return self._drawn[epoch]

    def draw(self, epoch: int) -> Tensor:
        """Return the epoch's permutation, int64, (length,), without keeping it."""
        if not self.shuffle:
            return torch.arange(self.length)
        generator = torch.Generator()
        generator.manual_seed(self.seed + epoch)
        return torch.randperm(self.length, generator=generator)

    def index(self, epoch: int, position: int) -> int:
        """Return the dataset's index at a position of an epoch."""
        return int(self.of(epoch)[position])

    def fill(self, epoch: int, samples: int) -> list[int]:
        """Return the dataset's indices of so many samples from an epoch's beginning."""
        return [self.index(epoch, number % self.length) for number in range(samples)]

    def keep(self, epochs: Collection[int] = ()) -> None:
        """Forget the permutations of all epochs but `epochs`."""
        self._drawn = {epoch: order for epoch, order in self._drawn.items() if epoch in epochs}

    def whole(self, epoch: int) -> list[SampleRange]:
        """Return the runs of a whole epoch."""
        return [(epoch, 0, self.length)] if self.length else []

    # -- saved places -------------------------------------------------------------------------------------

    def saved(self, left: Sequence[SampleRange], epoch: int) -> dict[str, Any]:
        """Return the state of a sampler that has `left` to deal in `epoch`."""
        left, offset = list(left), self.length
        if left and left[-1][0] == epoch and left[-1][2] == self.length:
            offset = left.pop()[1]
        state = self.facts(epoch, offset)
        return {**state, "left": [list(run) for run in left]} if left else state

    def facts(self, epoch: int, offset: int) -> dict[str, Any]:
        """Return the entries that every sampler's state has."""
        length, shuffle = self.length, self.shuffle
        return {"seed": self.seed, "epoch": epoch, "offset": offset, "length": length, "shuffle": shuffle}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError if `state` is of another dataset or another order."""
        epoch, offset, length = (_whole_number(state, key) for key in ("epoch", "offset", "length"))
        _whole_number(state, "seed")
        if length != self.length:
            raise CheckpointError(
                f"the checkpoint's sampler is of a dataset of {length} samples, and this dataset has "
                f"{self.length}"
            )
        if state.get("shuffle") != self.shuffle:
            raise CheckpointError(
                f"the checkpoint's sampler has shuffle={state.get('shuffle')}, and this one "
                f"shuffle={self.shuffle}"
            )
        if offset > length or min(epoch, offset) < 0:
            raise CheckpointError(
                f"the checkpoint's sampler is at sample {offset} of epoch {epoch}, which the dataset does "
                "not have"
            )
        self.check_runs(state.get("left", []))

    def check_runs(self, runs: Any) -> None:
        """Raise CheckpointError unless `runs` are runs of this order."""
        right = isinstance(runs, (list, tuple)) and all(
            isinstance(run, (list, tuple))
            and len(run) == 3
            and all(type(number) is int for number in run)
            and run[0] >= 0
            and 0 <= run[1] <= run[2] <= self.length
            for run in runs
        )
        if not right:
            raise CheckpointError("the checkpoint's sampler names samples that the dataset does not have")

    def has(self, item: Any) -> bool:
        """True if `item`, which was read from outside and may be anything, is an epoch and a position in
        it."""
        return (
            isinstance(item, (list, tuple))
            and len(item) == 2
            and all(type(number) is int for number in item)
            and item[0] >= 0
            and 0 <= item[1] < self.length
        )

    def load(self, state: Mapping[str, Any]) -> None:
        """Take the seed of `state`, which was checked."""
        self.seed = state["seed"]
        self._drawn.clear()


def left_in(state: Mapping[str, Any]) -> list[SampleRange]:
    """Return the runs left to deal in a state of `SampleOrder.saved`."""
    runs: list[SampleRange] = [(e, start, stop) for e, start, stop in state.get("left", [])]
    return [*runs, (state["epoch"], state["offset"], state["length"])]


def _length_of(dataset: Sized | int) -> int:
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
