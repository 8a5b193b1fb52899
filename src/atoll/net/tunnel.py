"""How a payload may be sent over a link that may lose parts of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Lossy:
    """How a payload may be sent: what of it is lost is told where it arrives."""

    chunk: int
    iteration: int
    dtype: str
    high: npt.NDArray[np.bool_] | None = None


def block_elements(dtype: str, settings: object) -> int:
    """Elements in a block of a lossy payload."""
    return 1200 // {"float64": 8, "float32": 4}.get(dtype, 2)
