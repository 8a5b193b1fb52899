"""Error feedback: nothing is lost, only late. Source: S3, "Beyond the paper".

The sender keeps what the receiver reported missing, less what was filled in for it, and adds it to the next
gradient of the chunk. Block by block, sent = applied + held back.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from atoll.core.errors import UserError
from atoll.ltp.blocks import Mask, Values, block_count, by_block, require_floats
from atoll.ltp.filling import How
from atoll.ltp.settings import Fill


class Feedback:
    """What is held back of one chunk of `extent` elements, `block` of them in a block.

    Several transfers of the chunk may be on their way: what is held goes along with the next one, and is held
    no more. Raises UserError for rescaling, which makes up for the losses by itself.
    """

    def __init__(
        self, extent: int, block: int, dtype: npt.DTypeLike = np.float32, fill: Fill = "zero"
    ) -> None:
        if fill == "rescale":
            raise UserError("fill = rescale and error feedback exclude each other: losses would count twice")
        self._dtype: np.dtype[Any] = np.dtype(dtype)
        require_floats(self._dtype)
        self._extent, self._block = extent, block
        blocks = block_count(extent, block)
        self._held = np.zeros((blocks, block), self._dtype)  # its last row may reach beyond the extent
        self._holds = np.zeros(blocks, bool)  # which blocks are not 0: only these cost time
        self.dropped = 0  # elements that were not held, since they were not finite

    @property
    def held(self) -> Values:
        """What is held back, (extent,): a view, to be read."""
        return self._held.reshape(-1)[: self._extent]

    def restore(self, held: Values) -> None:
        """Go on from what a checkpoint has kept of `held`."""
        self._require(held)
        self._held.reshape(-1)[: self._extent] = held
        self._holds[:] = self._held.any(axis=1)

    def outgoing(self, gradient: Values, out: Values | None = None) -> Values:
        """What is to be sent: the gradient and what was held, (extent,), in new memory or in `out`, which may
        be the gradient itself. From now on nothing is held."""
        self._require(gradient)
        if out is None:
            sent = gradient.copy()
        else:
            self._require(out)
            sent = out
            if out is not gradient:
                sent[:] = gradient
        full, rest = by_block(sent, self._block)
        holds = self._holds[: len(full)]
        full[holds] += self._held[: len(full)][holds]
        if len(rest) and self._holds[-1]:
            rest += self._held[-1, : len(rest)]
        self._held[self._holds] = 0
        self._holds[:] = False
        return sent

    def delivered(self, sent: Values, missing: Mask, fill: How, filled: Values | None = None) -> None:
        """A transfer is over: hold what of `sent`, (extent,), is `missing`, (blocks,), less what filled it.

        `fill` is what the receiver says; with `last`, `filled` are those values, (extent,) (`LastValues`).
        What is not finite is not held, for it would never leave again, but counted in `dropped`. A transfer
        that was lost as a whole is one with every block missing, and borne.
        """
        self._require(sent)
        if missing.shape != self._holds.shape or missing.dtype != np.bool_:
            raise ValueError(
                f"missing is {missing.dtype} of shape {missing.shape}, not a bool for each of the "
                f"{len(self._holds)} blocks"
            )
        if fill == "rescaled":
            raise UserError("the receiver has rescaled: rescaling and error feedback exclude each other")
        if fill == "last" and filled is None:
            raise ValueError("with fill = last the values that took the missing blocks' place must be given")
        full, rest = by_block(sent, self._block)
        lost = missing[: len(full)]
        short = full[lost]
        short_rest = rest.copy() if len(rest) and missing[-1] else rest[:0]
        if fill == "last" and filled is not None:
            self._require(filled)
            filled_full, filled_rest = by_block(filled, self._block)
            short -= filled_full[lost]
            short_rest -= filled_rest[: len(short_rest)]
        self.dropped += _drop_nonfinite(short) + _drop_nonfinite(short_rest)
        self._held[: len(full)][lost] += short
        if len(short_rest):
            self._held[-1, : len(short_rest)] += short_rest
        self._holds |= missing

    def _require(self, values: Values) -> None:
        if values.shape != (self._extent,) or values.dtype != self._dtype:
            raise ValueError(
                f"{values.dtype} of shape {values.shape}, where the chunk has {self._extent} of {self._dtype}"
            )


def _drop_nonfinite(values: Values) -> int:
    """Set to 0, in place, what is not finite; how many that were."""
    wrong = ~np.isfinite(values)
    values[wrong] = 0
    return int(wrong.sum())
