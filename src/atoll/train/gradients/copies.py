"""Check that all members of a ring hold equal values of the parameters that each of them steps.

Equal steps keep copies equal. What a script writes into its copy (new initial values, noise) is not seen, so
copies may differ in silence from then on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from atoll.tensors.binding import BoundChunk

# The difference of a sum, as a part of the norm, that rounding on unlike machines does not reach.
_TOLERANCE = 1e-3
# A part of a sum. A sum is at most the norm times the root of the number of elements, so for 10^10 elements
# this is still a tenth of the tolerance.
_ROUNDING = 1e-9


class Copies:
    """This member's copies of the parameters in `chunks`, each compared by its sum.

    Members that share a model in tiers have no copies.
    """

    def __init__(self, chunks: Sequence[BoundChunk]) -> None:
        self._chunks = chunks

    @property
    def _values(self) -> list[Tensor]:
        return [_real(parameter) for bound in self._chunks for parameter in bound.parameters]

    @torch.no_grad()
    def said(self) -> list[float]:
        """Return 1 if this member has no copies, and each parameter's sum. `line` reads the sums of all
        members' values."""
        parameters = [parameter for bound in self._chunks for parameter in bound.parameters]
        if any(hasattr(parameter, "stored_value") for parameter in parameters):
            return [1.0, *[0.0] * len(parameters)]
        sums = [value.sum(dtype=torch.float64) for value in self._values]
        return [0.0, *(torch.stack(sums).tolist() if sums else [])]

    @torch.no_grad()
    def line(self, own: Sequence[float], summed: Sequence[float], world: int) -> str:
        """Return the warning for members whose copies differ; "" for none. `own` is what `said` has returned,
        and `summed` its sum over all `world` members."""
        without, *sums = summed
        if without:
            return ""
        names = [name for bound in self._chunks for name in bound.names]
        differing = [
            name
            for name, value, here, total in zip(names, self._values, own[1:], sums, strict=True)
            if _differs(value, here, total / world)
        ]
        if not differing:
            return ""
        others = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
        return (
            f"the workers hold different values of parameter {differing[0]!r}{others}: after session.prepare "
            "the script has written other values on one worker than on another, such as initial values drawn "
            "anew; write equal values on every worker, or call session.prepare once more after the change, "
            "which gives all workers worker 0's"
        )


def _differs(value: Tensor, own: float, mean: float) -> bool:
    """Return True if `own`, the sum of `value`, is off the mean of all members by more than rounding."""
    difference = abs(own - mean)
    if difference <= _ROUNDING * abs(own):  # as almost always: a norm would double the comparison's time
        return False
    return difference > _TOLERANCE * float(torch.linalg.vector_norm(value, dtype=torch.float64))


def _real(parameter: Tensor) -> Tensor:
    value = parameter.detach()
    return torch.view_as_real(value) if value.is_complex() else value
