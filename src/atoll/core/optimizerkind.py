"""The description of an optimizer for the processes that step a model in place of the script."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class OptimizerKind(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of a model's optimizers: the full name of its class, and the number of its param groups.

    `by_tensor`: it steps whole tensors, of the shapes that the layout has.
    """

    name: Annotated[str, Meta(max_length=4096)]
    groups: Annotated[int, Meta(ge=0, lt=2**53)]
    by_tensor: bool = False
