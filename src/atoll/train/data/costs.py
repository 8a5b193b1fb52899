"""Costs of samples, such as their lengths in tokens, by which batches are made and dealt; pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence, Sized
from typing import Any

import numpy as np

from atoll.core.config import Sync
from atoll.core.errors import UserError
from atoll.groups.shares import Whole

UNLIKE_COSTS = (
    "session.batches: this worker's cost is not that of the others, by which they deal: give every worker "
    "equal costs, in the dataset's order"
)
_MOST = 2**31  # the largest cost: products of sums of a batch's costs must be whole numbers of 64 bits


class Costs:
    """The cost of each sample of a dataset, in whole numbers, so that all workers deal alike.

    Attributes:
        values: the costs, int64, (samples,).
        mean: their mean.
    """

    def __init__(self, values: Any, dataset: Sized | int) -> None:
        """Take the costs of a dataset's samples. Raises UserError for anything else."""
        length = dataset if isinstance(dataset, int) else len(dataset)
        try:
            given = np.asarray(values)
        except (TypeError, ValueError) as error:
            raise UserError(f"session.batches: cost is no list of numbers: {error}") from None
        if given.shape != (length,):
            raise UserError(
                f"session.batches: cost has {given.size if given.ndim else 1} values, and the dataset has "
                f"{length} samples: give one for each"
            )
        if length and (given.dtype.kind not in "iu" or given.min() < 1 or given.max() >= _MOST):
            raise UserError(
                "session.batches: a cost is a whole number from 1 to 2**31, such as a sample's tokens; round "
                f"the costs given ({given.dtype}, from {given.min()} to {given.max()})"
            )
        self.values: Whole = given.astype("<i8")
        self.mean = int(self.values.sum()) / max(1, length)

    @property
    def digest(self) -> str:
        """A word that is equal for equal costs, on any processor."""
        return hashlib.sha256(self.values.tobytes()).hexdigest()[:16]


def batch_of(sync: Sync, costs: Costs | None) -> int:
    """Return the samples of all workers in a step. Raises UserError if `sync` does not say."""
    if sync.global_tokens:
        if costs is None:
            raise UserError(
                "sync.global_tokens makes batches by the samples' tokens: give session.batches their number, "
                "cost=lengths, or set sync.global_batch in its place"
            )
        return max(1, round(sync.global_tokens / max(1.0, costs.mean)))
    if sync.global_batch == 0:
        raise UserError(
            "session.batches makes batches of sync.global_batch samples over all workers, and that is "
            "not set; write --set sync.global_batch=256, say, or use session.sampler"
        )
    return sync.global_batch


def cut_by_cost(sizes: Sequence[int], costs: Whole, least: int) -> list[int]:
    """Return how many samples, in order, each member takes so that costs, not numbers, are as `sizes`.

    A member takes at least `least` samples, or as many as in `sizes` if these are fewer.

    Args:
        sizes: each member's number of samples, if all cost alike; they sum to n, (members,).
        costs: the samples' costs, (n,).
        least: the least samples of a member.
    """
    weights = np.array(sizes, dtype=np.int64)
    reached = np.concatenate([[0], np.cumsum(costs)])
    goals = np.cumsum(weights) * int(reached[-1]) // len(costs)
    after = np.searchsorted(reached, goals)
    before = np.maximum(after - 1, 0)
    ends = np.where(goals - reached[before] <= reached[after] - goals, before, after)
    # The ends without the members' least samples may only rise, to what is left beside these.
    needs = np.cumsum(np.minimum(weights, least))
    spare = np.maximum.accumulate(np.clip(ends - needs, 0, len(costs) - needs[-1]))
    spare[-1] = len(costs) - needs[-1]
    found: list[int] = np.diff(spare + needs, prepend=0).tolist()
    return found
