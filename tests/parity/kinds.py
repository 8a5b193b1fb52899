"""What tests of one script at every strategy and store share."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest
from torch import Tensor

from support.runs import KINDS


def in_step(quick: Collection[str]) -> list[Any]:
    """Return a parameter for each kind of run whose workers step together; `quick` ones are no soak tests."""
    return [
        pytest.param(kind, marks=[] if kind in quick else pytest.mark.soak) for kind in KINDS if kind != "asp"
    ]


def check_equal(found: Sequence[Tensor], right: Sequence[Tensor]) -> None:
    """Check that values differ in the order of additions at most."""
    assert max(float((a - b).abs().max()) for a, b in zip(found, right, strict=True)) <= 1e-12
