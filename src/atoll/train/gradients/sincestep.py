"""A contribution to a step that several backwards have made."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from atoll.axes.choices import Choices
from atoll.axes.needs import check
from atoll.train.gradients.samples import ContributionWeight


class SinceStep:
    """The contribution of all reductions since the latest step, where gradients leave at the step.

    A weight is that of the batches whose gradients are left in `p.grad`; that of a batch counts once
    (`ContributionWeight.again`). Samples count once, also those of gradients that the script has dropped, as
    where each reduction counts them at once.

    Args:
        left: returns for each optimizer, by its place, True if gradients are left that were reduced before.
    """

    def __init__(self, left: Callable[[], Sequence[bool]]) -> None:
        self._left = left
        self._places: range | None = None  # of the optimizers
        self._latest = ContributionWeight(0.0, 0.0)
        self._weights: dict[int, float] = {}  # by the place of an optimizer that has not stepped them
        self._samples = 0.0

    def look(self) -> None:
        """Forget the weights of gradients that the script has dropped, before more gradients come."""
        if self._weights:
            left = self._left()
            self._weights = {place: weight for place, weight in self._weights.items() if left[place]}

    def drop_weights(self) -> None:
        """Forget all weights: the gradients that are left are the mean of all workers' by now."""
        self._weights.clear()

    def add(self, own: ContributionWeight, *, adds: bool = False) -> None:
        """Add the contribution of a reduction.

        Raises UserError for a batch of weight 0 whose gradients are among those that count: nobody can take
        them out. One without samples (an empty slice of a short last batch) adds what it does in plain
        PyTorch. `adds`: True if this reduction has added gradients of this worker's to those that are left.
        """
        weighs = own.weight > 0 or own.empty or own.by_optimizer
        if adds and not weighs and self._weights.get(0, 0.0) > 0:
            check("call", Choices({"call": "p.grad", "gradients": "weightless"}))
        # Who had no batch this time, such as a group with an empty slice, may be behind what is left:
        more = self._latest.alike > own.alike and any(self._weights.values())
        self._latest = msgspec.structs.replace(own, alike=self._latest.alike) if more else own
        self._samples += own.samples
        if self._places is None:
            self._places = range(len(self._left()))
        for place in self._places:
            new, before = own.of(place), self._weights.get(place, 0.0)
            self._weights[place] = before if new.again and before else before + new.weight

    @property
    def so_far(self) -> ContributionWeight:
        """The contribution to a step of the first optimizer, as it would be now."""
        return msgspec.structs.replace(
            self._latest, weight=self._weights.get(0, 0.0), samples=self._samples, by_optimizer=()
        )

    def take(self, place: int = 0, *, accepted: bool, follows: bool = False) -> ContributionWeight:
        """Return the contribution to the step of the optimizer at `place`, which ends the sum.

        Args:
            place: the optimizer's place among those of the model.
            accepted: False: the step is to be left out, so that it weighs nothing.
            follows: True if another optimizer has stepped these gradients before, which has counted the
                samples.
        """
        weight, samples = self._weights.pop(place, 0.0), 0.0
        if not follows:
            samples, self._samples = self._samples, 0.0
        return msgspec.structs.replace(
            self._latest, weight=weight if accepted else 0.0, samples=samples, by_optimizer=()
        )
