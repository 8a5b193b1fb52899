"""What a site's contributions lose on their way to the global shards: which blocks must arrive, and what is
held back for the next one. Source: S3, "Beyond the paper".

One contribution is under way at a time, known by the iteration that it is to. What was lost of it is held
once all of it is over; so answers that come twice, and a contribution that is sent up once more by a shard
that was started again, change nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from atoll.chunks import Chunk
from atoll.core.config import LinkOptions
from atoll.core.errors import RunError, UserError
from atoll.ltp.blocks import FLOATS, Importance, block_count, mean_abs
from atoll.net.tunnel import Lossy
from atoll.tensors.heldback import HeldBack
from atoll.wire.lost import flaw
from atoll.wire.messages import LostBlocks

_MAY_BE_LOST = (*(str(dtype) for dtype in FLOATS), "bfloat16")


class SiteLosses:
    """Of one model's trainable `chunks`, over a link as `link` says. Raises UserError for chunks of a type
    that such a link cannot carry."""

    def __init__(self, chunks: Sequence[Chunk], link: LinkOptions) -> None:
        self._link = link
        wrong = next((chunk.dtype for chunk in chunks if chunk.dtype not in _MAY_BE_LOST), "")
        if link.lossy and wrong:
            raise UserError(
                f"the model has {wrong} parameters, and between sites link.transport 'ltp' may lose parts of "
                f"{', '.join(_MAY_BE_LOST)} alone: set link.reliable to true, or link.transport to tcp"
            )
        self._dtypes = {chunk.id: chunk.dtype for chunk in chunks}
        self._held = {chunk.id: HeldBack(chunk) for chunk in chunks} if link.holds_back else {}
        self._importance: dict[int, Importance] = {}
        self._exchange = -1  # the iteration of the contribution that is under way
        self._sent: dict[int, Tensor] = {}  # of it, by chunk: as it was sent
        self._lost: dict[int, LostBlocks] = {}  # of it, by chunk
        self._sizes: dict[int, float] = {}  # by chunk: of the latest sent, the sum of absolute values
        self._blocks: dict[tuple[int, bool], int] = {}  # lost since the beginning, by chunk; whether borne

    def outgoing(self, exchange: int, chunk: int, values: Tensor, present: bytes, weight: float) -> Tensor:
        """What is sent of a chunk's gradients, (extent,): with what was held back of it. Asked once more of
        the same contribution, it gives the same.

        What weighs nothing, or has no gradients, goes as it is.
        """
        if not self.may_lose(present, weight):
            return values
        self._exchange = exchange
        if chunk in self._held:
            values = self._held[chunk].outgoing(exchange, values, present, weight)
        self._sent[chunk] = values
        return values

    @property
    def are_possible(self) -> bool:
        """Whether the link may lose anything."""
        return self._link.lossy

    def may_lose(self, present: bytes, weight: float) -> bool:
        """Whether parts of such a contribution may be lost."""
        return self._link.lossy and weight > 0 and any(present)

    def how(self, chunk: int, block: int) -> Lossy | None:
        """How the chunk may be sent that `outgoing` has given, in blocks of `block` elements: those with the
        largest mean |g|, smoothed over iterations, must arrive. None: all of it must."""
        sent = self._sent.get(chunk)
        if sent is None:
            return None
        numbers = (sent.float() if sent.dtype == torch.bfloat16 else sent).numpy()
        importance = self._importance.get(chunk)
        if importance is None:
            importance = self._importance[chunk] = Importance(block_count(len(numbers), block))
        means = mean_abs(numbers, block)
        importance.update(means)
        self._sizes[chunk] = float(means[np.isfinite(means)].sum()) * block
        share = self._link.high if self._link.high is not None else importance.derived_share()[0]
        return Lossy(
            chunk=chunk, iteration=self._exchange, dtype=self._dtypes[chunk], high=importance.high(share)
        )

    def told(self, exchange: int, chunk: int, lost: LostBlocks | None) -> None:
        """A global shard's answer says what was lost of the contribution that is under way. Raises RunError
        for what cannot be of it."""
        if lost is None or exchange != self._exchange or chunk not in self._sent:
            return
        if wrong := flaw(lost, self._sent[chunk].numel()):
            raise RunError(f"the answer to chunk {chunk} of iteration {exchange} makes no sense: {wrong}")
        self._lost[chunk] = lost

    def made(self, accepted: bool = True) -> None:
        """The contribution that is under way counts, as far as it was not lost; not `accepted`: it is in no
        step. It is over."""
        for chunk, lost in self._lost.items():
            sent = self._sent[chunk]
            bits = np.unpackbits(np.frombuffer(lost.missing, np.uint8), bitorder="little")
            missing = bits[: block_count(sent.numel(), lost.block)].astype(bool)
            key = chunk, not lost.counts
            self._blocks[key] = self._blocks.get(key, 0) + int(missing.sum())
            if chunk in self._held:
                self._held[chunk].answered(self._exchange, sent, missing, lost.block)
        for held in self._held.values():
            held.made(self._exchange, accepted)
        self._sent.clear()
        self._lost.clear()

    def of(self, chunks: Collection[int]) -> tuple[int, int, float]:
        """Of these chunks: blocks that were lost and borne, and filled, since the beginning; what is held now
        as a share of the latest contribution, both as sums of absolute values."""
        borne, filled = (
            sum(self._blocks.get((chunk, kind), 0) for chunk in chunks) for kind in (True, False)
        )
        held = sum(self._held[chunk].size for chunk in chunks if chunk in self._held)
        sent = sum(self._sizes.get(chunk, 0.0) for chunk in chunks)
        return borne, filled, held / sent if sent > 0 else 0.0

    # -- a journal's --------------------------------------------------------------------------------------

    def state(self) -> dict[int, tuple[Tensor, float]]:
        """What is held back, by chunk, and the weight that it is of; nothing is under way."""
        found = {chunk: held.state() for chunk, held in self._held.items()}
        return {chunk: state for chunk, state in found.items() if state is not None}

    def restore(self, state: Mapping[int, tuple[Tensor, float]]) -> None:
        """Be as `state` says."""
        for chunk, (values, weight) in state.items():
            if chunk in self._held:
                self._held[chunk].restore(values, weight)
