"""Gradients on their way over a link that may lose parts of them: which blocks must arrive, which did not,
and what is held back for the next one. Source: S3; docs/ltp-training.md.

Nothing here is known of the link itself. What the shard's answer says was lost is what counts: a contribution
may be sent twice, and then only one of the two counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.axes.choices import Choices
from atoll.axes.needs import check
from atoll.core.config import LinkOptions
from atoll.core.errors import RunError
from atoll.net.lossychunks import Priorities
from atoll.net.tunnel import Lossy
from atoll.tensors.binding import BoundChunk
from atoll.tensors.heldback import HeldBack
from atoll.wire.lost import BORNE, flaw, missing_of
from atoll.wire.messages import LostBlocks


@dataclass(frozen=True)
class Losses:
    """What was lost of the gradients to one shard since the beginning, in blocks, and how much of a gradient
    is held back now: the sum of its absolute values over that of the latest gradient's."""

    borne: int = 0
    filled: int = 0
    held: float = 0.0


@dataclass(frozen=True)
class _Sent:
    values: Tensor  # 1-D: a run of the chunk
    start: int  # its first element


class LossyPushes:
    """One model's, for the `chunks` that are trained. `shard_of` has each chunk's shard, by id, and
    `block_elements(dtype)` how many elements a block has on the link. Where the link loses nothing, gradients
    pass through as they are.

    Raises PrepareError for a chunk of which no part may be lost.
    """

    def __init__(
        self,
        chunks: Sequence[BoundChunk],
        shard_of: Mapping[int, int],
        options: LinkOptions,
        block_elements: Callable[[str], int],
    ) -> None:
        self._options, self._shard_of, self._block_elements = options, shard_of, block_elements
        self._held: dict[int, HeldBack] = {}
        if options.lossy:
            for bound in chunks:
                _check(bound, options)
        if options.holds_back:
            self._held = {bound.chunk.id: HeldBack(bound.chunk) for bound in chunks}
        self._priorities = Priorities(options.high)
        self._sent: dict[tuple[int, int], _Sent] = {}  # by exchange and chunk, until it is answered
        self._lost: dict[tuple[int, bool], int] = {}  # blocks by shard, and whether they were borne

    @property
    def holds_back(self) -> bool:
        """Whether what is lost of a contribution goes along with a later one."""
        return self._options.holds_back

    def outgoing(
        self,
        exchange: int,
        bound: BoundChunk,
        gradient: Tensor,
        present: Sequence[bool | int],
        weight: float,
        *,
        start: int = 0,
        along: Mapping[int, Tensor] | None = None,
    ) -> tuple[Tensor, Lossy | None]:
        """What to send of this contribution, and how: `gradient`, 1-D, is the run of the chunk from element
        `start` on. What is returned is on the CPU, and must stay as it is until `answered`. Other arguments
        as `HeldBack.outgoing`'s; `along`, by chunk, as `HeldBack.outgoing_again`'s, for a contribution that
        others may have sent before.

        A contribution that weighs nothing goes as it is, and so that nothing of it is lost: nobody misses it.
        """
        if not self._options.lossy or weight <= 0 or not any(present) or not gradient.numel():
            return gradient, None
        gradient = gradient.detach().to("cpu")  # where it is sent from
        chunk, sent = bound.chunk.id, gradient
        if chunk in self._held:
            held = self._held[chunk]
            if along is None:
                sent = held.outgoing(exchange, gradient, present, weight, start=start)
            else:
                sent = held.outgoing_again(exchange, gradient, along.get(chunk), weight, start=start)
        self._sent[exchange, chunk] = _Sent(sent, start)
        numbers = (sent.float() if sent.dtype == torch.bfloat16 else sent).numpy()
        high = self._priorities.high(chunk, numbers, self._block_elements(bound.chunk.dtype), start)
        return sent, Lossy(chunk=chunk, iteration=exchange, dtype=bound.chunk.dtype, high=high)

    def taken(self, exchange: int) -> dict[int, Tensor]:
        """What went along with a contribution that is to be sent again, by chunk, (extent,), to be read: see
        `HeldBack.taken`. Answers to what was sent before are passed over."""
        for key in [key for key in self._sent if key[0] == exchange]:
            del self._sent[key]
        found = {chunk: held.taken(exchange) for chunk, held in self._held.items()}
        return {chunk: taken for chunk, taken in found.items() if taken is not None}

    def answered(self, exchange: int, chunk: int, lost: LostBlocks | None) -> None:
        """The shard's answer says what of this contribution was lost. Told twice, it counts once. Raises
        RunError for what cannot be of it."""
        sent = self._sent.pop((exchange, chunk), None)
        if sent is None or lost is None:
            return
        elements = sent.values.numel()
        if wrong := flaw(lost, elements):
            raise RunError(
                f"shard {self._shard_of[chunk]}, of chunk {chunk} of iteration {exchange}: {wrong}"
            )
        missing = missing_of(lost, elements)
        size = max(1, self._block_elements(str(sent.values.dtype).removeprefix("torch.")) // lost.block)
        key = self._shard_of[chunk], chunk in self._held or lost.how == BORNE
        self._lost[key] = self._lost.get(key, 0) + -(-int(missing.sum()) // size)
        if chunk in self._held:
            self._held[chunk].answered(exchange, sent.values, missing, lost.block, start=sent.start)

    def made(self, exchange: int, accepted: bool = True) -> None:
        """All of this contribution counts that was not lost; not `accepted`: it is in no step."""
        for chunk in list(self._held):
            self.made_of(exchange, chunk, accepted)

    def made_of(self, exchange: int, chunk: int, accepted: bool = True) -> None:
        """The same of one chunk of it."""
        self._sent.pop((exchange, chunk), None)
        if chunk in self._held:
            self._held[chunk].made(exchange, accepted)

    def clear(self) -> None:
        """Other parameters were loaded: what was lost on the way to the old ones is not owed to them."""
        self._sent.clear()
        for held in self._held.values():
            held.clear()

    def losses(self, shard: int) -> Losses:
        """Of the gradients to one shard, up to now."""
        chunks = [chunk for chunk, place in self._shard_of.items() if place == shard]
        held = sum(self._held[chunk].size for chunk in chunks if chunk in self._held)
        whole = sum(self._priorities.size(chunk) for chunk in chunks)
        return Losses(
            borne=self._lost.get((shard, True), 0),
            filled=self._lost.get((shard, False), 0),
            held=held / whole if whole > 0 else 0.0,
        )


def _check(bound: BoundChunk, options: LinkOptions) -> None:
    facts = {"dtype": bound.chunk.dtype, "parameter": f"parameter {bound.names[0]!r}"}
    link = {"link.lossy": options.lossy, "link.fill": options.fill}
    check("prepare", Choices({**facts, **link}))
