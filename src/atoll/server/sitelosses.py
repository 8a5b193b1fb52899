"""What a site's contributions lose on their way to the global shards: which blocks must arrive, and what is
held back for the next one. Source: S3, "Beyond the paper".

One contribution is under way at a time, known by the iteration that it is to. What was lost of it is held
once all of it is over; so answers that come twice, and a contribution that is sent up once more by a shard
that was started again, change nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from atoll.axes.choices import Choices
from atoll.axes.needs import check
from atoll.chunks import Chunk
from atoll.core.config import LinkOptions
from atoll.core.errors import RunError
from atoll.net.lossychunks import Priorities
from atoll.net.tunnel import Lossy
from atoll.tensors.heldback import HeldBack
from atoll.wire.lost import flaw, missing_of
from atoll.wire.messages import LostBlocks


class SiteLosses:
    """Of one model's trainable `chunks`, over a link as `link` says. Raises UserError for chunks of a type
    that such a link cannot carry."""

    def __init__(self, chunks: Sequence[Chunk], link: LinkOptions) -> None:
        self._link = link
        for chunk in chunks:
            facts = {"dtype": chunk.dtype, "parameter": f"a parameter in chunk {chunk.id}"}
            check("prepare", Choices({**facts, "link.lossy": link.lossy, "link.fill": link.fill}))
        self._dtypes = {chunk.id: chunk.dtype for chunk in chunks}
        self._held = {chunk.id: HeldBack(chunk) for chunk in chunks} if link.holds_back else {}
        self._priorities = Priorities(link.high)
        self._exchange = -1  # the iteration of the contribution that is under way
        self._sent: dict[int, Tensor] = {}  # of it, by chunk: as it was sent
        self._lost: dict[int, LostBlocks] = {}  # of it, by chunk
        self._blocks: dict[tuple[int, bool], int] = {}  # lost since the beginning, by chunk; whether borne

    def outgoing(self, exchange: int, chunk: int, values: Tensor, present: bytes, weight: float) -> Tensor:
        """What is sent of a chunk's gradients, (extent,): with what was held back of it. Asked once more of
        the same contribution, it gives the same.

        What weighs nothing, or has no gradients, goes as it is.
        """
        if not self.may_lose(present, weight):
            return values
        if exchange == self._exchange and chunk in self._sent:
            return self._sent[chunk]
        self._exchange = exchange
        if chunk in self._held:
            values = self._held[chunk].outgoing(exchange, values, present, weight)
        self._sent[chunk] = values
        return values

    @property
    def holds_back(self) -> bool:
        """Whether what is lost of a contribution goes along with a later one."""
        return self._link.holds_back

    @property
    def are_possible(self) -> bool:
        """Whether the link may lose anything."""
        return self._link.lossy

    def may_lose(self, present: bytes, weight: float) -> bool:
        """Whether parts of such a contribution may be lost."""
        return self._link.lossy and weight > 0 and any(present)

    def how(self, chunk: int, block: int) -> Lossy | None:
        """How the chunk may be sent that `outgoing` has given, in blocks of `block` elements. None: all of it
        must arrive."""
        sent = self._sent.get(chunk)
        if sent is None:
            return None
        numbers = (sent.float() if sent.dtype == torch.bfloat16 else sent).numpy()
        high = self._priorities.high(chunk, numbers, block)
        return Lossy(chunk=chunk, iteration=self._exchange, dtype=self._dtypes[chunk], high=high)

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
            missing = missing_of(lost, sent.numel())
            key = chunk, chunk in self._held or not lost.counts
            self._blocks[key] = self._blocks.get(key, 0) + int(missing.sum())
            if chunk in self._held:
                self._held[chunk].answered(self._exchange, sent, missing, lost.block)
        for held in self._held.values():
            held.made(self._exchange, accepted)
        self._sent.clear()
        self._lost.clear()

    def of(self, chunks: Collection[int]) -> tuple[int, int, float]:
        """Of these chunks: blocks that were lost and borne (or come later), and filled for good, since the
        beginning; what is held now as a share of the latest contribution, both as sums of absolute values."""
        borne, filled = (
            sum(self._blocks.get((chunk, kind), 0) for chunk in chunks) for kind in (True, False)
        )
        held = sum(self._held[chunk].size for chunk in chunks if chunk in self._held)
        sent = sum(self._priorities.size(chunk) for chunk in chunks)
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
