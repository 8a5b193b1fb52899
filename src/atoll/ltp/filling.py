"""Treatment of lost low-priority blocks: borne, or filled.

| lost low-priority blocks | settings.fill | treatment |
| --- | --- | --- |
| none | any | `none` |
| up to `fill_above` of them | any | `borne`: absent; the mean is taken over those who delivered the block |
| more | `zero` | `zero` |
| more | `last`, and the chunk came before | `last`: the last value of the block that came |
| more | `last`, never came before | `zero` |
| more | `rescale`, some low-priority block is there | `rescaled`: those times all / there; the lost are 0 |
| more | `rescale`, none is there | `zero` |

A borne block does not count in a mean, a filled one does. Rescaling keeps the expectation of each element
(which blocks are lost is chance), and so excludes error feedback, which would send the lost once more.
Source: docs/ltp.md, "Lost blocks".
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from atoll.ltp.blocks import Mask, Values, by_block, require_floats
from atoll.ltp.settings import Fill

How: TypeAlias = Literal["none", "borne", "zero", "last", "rescaled"]


@dataclass(frozen=True)
class Filling:
    """The treatment of a transfer's lost blocks, and why."""

    how: How
    reason: str

    @property
    def counts(self) -> bool:
        """True if the filled blocks count in a mean as delivered ones do."""
        return self.how not in ("none", "borne")


def choose_filling(lost: int, low: int, *, fill: Fill, fill_above: float, has_last: bool) -> Filling:
    """Choose the treatment for a transfer that lost `lost` of its `low` low-priority blocks.

    `has_last`: values of an earlier transfer of this chunk are kept.
    """
    if lost == 0:
        return Filling("none", "every block is there")
    counts = f"{lost} of {low} low-priority blocks lost"
    if lost <= fill_above * low:
        return Filling("borne", f"{counts}, at most {fill_above:.3g} of them: borne")
    counts += f", more than {fill_above:.3g} of them"
    if fill == "last":
        if has_last:
            return Filling("last", f"{counts}: filled with their last values")
        return Filling("zero", f"{counts}: filled with zero, for the chunk came never before")
    if fill == "rescale":
        if lost < low:
            return Filling("rescaled", f"{counts}: those there times {low / (low - lost):.4g}")
        return Filling("zero", f"{counts}: filled with zero, for there is none to rescale")
    return Filling("zero", f"{counts}: filled with zero")


def apply(
    how: How, values: Values, present: Mask, high: Mask, block: int, last: Values | None = None
) -> None:
    """Fill the lost blocks of `values`, (elements,), in place; their old contents do not matter.

    `present` and `high` are by block, (blocks,). Raises ValueError if `how` is "last" and `last` is missing
    or of another type or length, TypeError if values to rescale are not floating.
    """
    if how == "none":
        return
    lost = ~present
    if how == "last":
        if last is None or last.shape != values.shape or last.dtype != values.dtype:
            raise ValueError("filling with the last values needs these, of the same length and type")
        copy_blocks(values, last, lost, block)
        return
    fill_blocks(values, 0, lost, block)
    if how == "rescaled":
        low = ~high
        there = int((low & present).sum())
        _scale_blocks(values, low & present, int(low.sum()) / max(there, 1), block)


def copy_blocks(values: Values, source: Values, which: Mask, block: int) -> None:
    """Copy the blocks of `which` from `source` to `values`."""
    (full, rest), (full_source, rest_source) = by_block(values, block), by_block(source, block)
    full[which[: len(full)]] = full_source[which[: len(full)]]
    if len(rest) and which[-1]:
        rest[:] = rest_source


def fill_blocks(values: Values, value: float, which: Mask, block: int) -> None:
    """Set the elements of the blocks of `which` to `value`."""
    full, rest = by_block(values, block)
    full[which[: len(full)]] = value
    if len(rest) and which[-1]:
        rest[:] = value


def _scale_blocks(values: Values, which: Mask, factor: float, block: int) -> None:
    require_floats(values.dtype)
    factors = np.where(which, factor, 1.0).astype(values.dtype)
    full, rest = by_block(values, block)
    full *= factors[: len(full), None]
    if len(rest):
        rest *= factors[-1]


class LastValues:
    """The last delivered values of each chunk's blocks; 0 for a block that was never delivered.

    The receiver keeps them for filling with `last`. A sender may keep its own copy: both ends see the same
    transfers in the same order, and only delivered blocks change anything. A chunk that would exceed
    `most_bytes` in all is not kept.
    """

    def __init__(self, most_bytes: float = math.inf) -> None:
        self._most_bytes = most_bytes
        self._values: dict[Hashable, Values] = {}

    def of(self, chunk: Hashable) -> Values | None:
        """Return the chunk's last values, (elements,), read-only by convention; None if there are none."""
        return self._values.get(chunk)

    def keep(self, chunk: Hashable, values: Values, present: Mask, block: int) -> None:
        """Copy the delivered blocks of a transfer. A chunk whose length or type changed starts anew."""
        kept = self._values.get(chunk)
        if kept is None or kept.shape != values.shape or kept.dtype != values.dtype:
            self._values.pop(chunk, None)
            if values.nbytes + sum(each.nbytes for each in self._values.values()) > self._most_bytes:
                return
            kept = self._values[chunk] = np.zeros_like(values)
        copy_blocks(kept, values, present, block)

    def forget(self) -> None:
        """Forget all chunks at a new session, since the other end forgets them too."""
        self._values.clear()
