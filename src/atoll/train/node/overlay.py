"""Local parameters: the global ones, and over them what the contributions that are pending would make of
them, uncommitted.

For each pending iteration in order, the optimizer's step with the mean of the contributions that are there;
then the parameters are taken back to a part of the way: those contributions' samples over a full batch's.
When all of an iteration's are there the part is 1, and the result is what applying will give, bit for bit.
Source: S0, "Overlay".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from atoll.train.node.globals import Contribution, GlobalParameters


@dataclass(frozen=True)
class Pending:
    """Contributions to an iteration that is not applied yet, in order of node; `part` of a full batch."""

    iteration: int
    contributions: Sequence[Contribution]
    part: float


def pending(iteration: int, contributions: Sequence[Contribution], batch: float, members: int) -> Pending:
    """What is there of an iteration to which `members` contribute, `batch` samples in all (0: not known; each
    counts for the same)."""
    ...


class Overlay:
    """Writes local parameters over `globals_`."""

    def __init__(self, globals_: GlobalParameters) -> None: ...

    def write(self, into: Mapping[int, Tensor], waiting: Sequence[Pending]) -> None:
        """Write every trainable chunk's local parameters to `into` (see HostMemory.buffer); `waiting` are the
        pending iterations in order, none of them applied; without any it is the global parameters. Global
        parameters and the optimizer's state are as before afterwards."""
        ...
