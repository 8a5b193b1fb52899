"""The factors that turn a ring's sum of gradients into the mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atoll.train.gradients.agreement import Agreement
from atoll.train.gradients.samples import ContributionWeight
from atoll.train.gradients.sums import SummedReducer

# Bounds on (sum / mean) of float16 gradients: beyond them the sum may overflow or lose small values.
_HALF_RANGE = (1 / 16, 2.0)


class Scaling:
    """A member's factors for its gradients before the sum, and for the sum.

    The mean's divisor is known only once all members have agreed. Until then gradients are divided by
    `reference`: the last iteration's sum of weights, or its number of workers if they counted alike.
    """

    def __init__(self, owner: SummedReducer, *, has_half: bool = False) -> None:
        """Begin without a reference. `has_half`: there are float16 gradients."""
        self._owner, self._has_half = owner, has_half
        self.reference = 1.0
        self._alike, self._by = False, 1.0  # this iteration's factor, until the agreement gives the right one

    def of(self, own: ContributionWeight) -> float:
        """Return the factor for this member's gradients before the sum."""
        return (own.counts_alike if self._alike else own.weight) / self._by

    def as_before(self, own: ContributionWeight, world: int) -> None:
        """Scale by the factor that was right in the last iteration; `world` is the number of members."""
        alike = self._owner.count_alike
        if world == 1 and own.weight > 0:  # a mean over one worker keeps the gradient, to the bit
            self.reference = own.counts_alike if alike else own.weight
        self._alike, self._by = alike, self.reference

    def is_wrong(self, agreed: Agreement) -> bool:
        """True if gradients must be summed again with another factor.

        There are two reasons. The gradients may have been scaled for the wrong mean: by samples instead of
        with all workers alike, or the reverse, while the two means differ. Or float16 may not hold the sum,
        as in the first iteration.
        """
        if self._alike == agreed.certainty.certain and not agreed.certainty.equal:
            return True
        part = agreed.workers_or_weight(self._alike) / self._by
        return self._has_half and part > 0 and not _HALF_RANGE[0] <= part <= _HALF_RANGE[1]

    def take(self, agreed: Agreement) -> None:
        """Scale by the mean on which the members have agreed."""
        self._alike, self._by = not agreed.certainty.certain, agreed.total

    def after(self, agreed: Agreement) -> float:
        """Return the factor for the sum, in an iteration whose weight is above 0. The next iteration is
        scaled by this one's divisor.

        If all weights are equal, both means are equal too, and gradients may be scaled for either.
        """
        self.reference = agreed.total
        return self._by / agreed.workers_or_weight(self._alike)

    def state_dict(self) -> dict[str, Any]:
        """Return the state with which a resumed run scales its sums as this one would, to the bit."""
        return {"reference": self.reference, "count_alike": self._owner.count_alike}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.reference = state.get("reference", 1.0)
        self._owner.count_alike = bool(state.get("count_alike", False))
