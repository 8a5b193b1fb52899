"""Cases of a test of which only some are run each time."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def kept_for(mark: pytest.MarkDecorator, cases: Iterable[Any], often: Collection[Any]) -> list[Any]:
    """All cases, for `parametrize`; those that are not in `often` have `mark` (check or soak).

    A case is a value or, for several names, a tuple of values.
    """
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in often else (mark,))
        for case in cases
    ]
