"""Building a model that does not fit: each parameter leaves host memory as soon as others need the room.

Source: S2, "What users of rival systems suffer from": host memory blown up by initialisation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from atoll.core.memory import Memory


class InitialisedParameter(nn.Parameter):
    """A parameter made under `init`. Its value lies in ordinary memory or in the disk's file, and is brought
    back for any use; the class becomes `nn.Parameter` again when `take` has taken its value."""

    def stored_value(self) -> Tensor:
        """The value, in memory of its own that nobody else has, on the parameter's device."""
        raise NotImplementedError

    def store_value(self, value: Tensor) -> None:
        """Copy `value`, of the same shape and dtype, to where the parameter's value lies."""


@contextmanager
def init(memory: Memory) -> Iterator[None]:
    """Build models within: their parameters together never hold more than the budgets of `memory`.

    Values are to the bit those of a plain construction. What exceeds the host's budget lies in a file in the
    disk's folder until `fit` takes it. Raises UserError, with the least budget that would do, where a
    parameter does not fit, and where there is no disk and all of them do not.
    """
    raise NotImplementedError
    yield


def take(parameter: nn.Parameter, into: Tensor) -> None:
    """Copy a parameter's value into `into`, of its numel and dtype, wherever it lies, and let go of its own:
    the parameter is a plain `nn.Parameter` then, without a value (NaN, strides 0), until `data` is set.

    A plain parameter's value is copied, and let go of likewise.
    """
    raise NotImplementedError


def resident_bytes(parameters: Sequence[nn.Parameter]) -> int:
    """How many bytes of these lie in memory now: chunks with the most go first into an arena, so that the
    arena and what is not in it yet are together never more than the model."""
    raise NotImplementedError
