"""The blocks of a gradient that were lost on its way, as reported by its link.

A block is a run of the payload's elements that one datagram carries. A lost block does not count (it is
*borne*: absent), or other values take its place and count. Source: docs/ltp.md, "Lost blocks".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

BORNE, ZERO = "borne", "zero"
FILLED = (ZERO, "last", "rescaled")  # values that count in place of a lost block

Spans: TypeAlias = npt.NDArray[np.int64]  # (n, 2): runs of elements, begin and end, in order, none empty


class LostBlocks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The lost blocks of a payload, whose blocks have `block` elements each (the last may be shorter). Bit
    i of `missing`, the lowest of a byte first, is set if block i is lost. `how` names the values in their
    place: "borne" (zeros that do not count), "zero", "last" or "rescaled"."""

    block: Annotated[int, Meta(ge=1, lt=2**53)]
    missing: Annotated[bytes, Meta(max_length=2**26)]
    how: Annotated[str, Meta(max_length=16)]

    @property
    def counts(self) -> bool:
        """True if the values in the lost blocks count in a mean, like delivered ones."""
        return self.how != BORNE


def flaw(lost: LostBlocks, extent: int) -> str:
    """Return why `lost` cannot be of a payload of `extent` elements; empty if it can."""
    blocks = -(-extent // lost.block) if lost.block > 0 else 0
    if lost.how not in (BORNE, *FILLED):
        return f"lost blocks are {BORNE}, {', '.join(FILLED)}, and not {lost.how[:16]!r}"
    if lost.block < 1 or len(lost.missing) != -(-blocks // 8):
        return f"{len(lost.missing)} bytes for what is lost of {extent} elements in blocks of {lost.block}"
    if blocks % 8 and lost.missing[-1] >> blocks % 8:
        return f"a block beyond the {blocks} that there are is said to be lost"
    return ""


def missing_of(lost: LostBlocks, extent: int) -> npt.NDArray[np.bool_]:
    """Return a mask of the lost blocks of a payload of `extent` elements."""
    bits = np.unpackbits(np.frombuffer(lost.missing, np.uint8), bitorder="little")
    return bits[: -(-extent // lost.block)].astype(np.bool_)


def spans_of(lost: LostBlocks, extent: int, start: int = 0) -> Spans:
    """Return the spans of the lost blocks of a payload of `extent` elements whose first is element
    `start`."""
    begins = np.flatnonzero(missing_of(lost, extent)) * lost.block
    return start + np.stack([begins, np.minimum(begins + lost.block, extent)], axis=1)


def lost_within(spans: Iterable[Spans], start: int, stop: int, how: str) -> LostBlocks | None:
    """Return the parts of the elements `start` to `stop` that lie in these spans, in blocks of one
    element; None: nothing."""
    covered = np.zeros(stop - start + 1, np.int32)  # by how many more spans than the element before
    for each in spans:
        within = each.clip(start, stop) - start
        np.add.at(covered, within[:, 0], 1)
        np.add.at(covered, within[:, 1], -1)
    missing = covered[:-1].cumsum() > 0
    if not missing.any():
        return None
    return LostBlocks(1, np.packbits(missing, bitorder="little").tobytes(), how)
