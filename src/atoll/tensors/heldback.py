"""Error feedback: of a gradient nothing is lost, only late. Source: S3, "Beyond the paper".

A sender keeps what the shard's answer says was lost of a contribution, and adds it to the next gradient of
the chunk. Element by element, times the contributions' weights, sent = applied + held back.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from atoll.chunks import Chunk

Missing: TypeAlias = npt.NDArray[np.bool_]  # (blocks,)


@dataclass(frozen=True)
class _Lost:
    """What was lost of a run of the chunk: `rows`, (lost, block), are the blocks `which` of it, and `rest`
    are elements of its last one, where that is shorter and was lost."""

    start: int  # the run's first element
    stop: int
    block: int
    which: Tensor
    rows: Tensor
    rest: Tensor


@dataclass
class _Sent:
    """A contribution on its way: what of the held went along, (extent,); None: nothing."""

    weight: float
    taken: Tensor | None
    lost: list[_Lost] = field(default_factory=list)


class HeldBack:
    """What is held back of one chunk, on the CPU and in the chunk's dtype.

    Several contributions may be on their way, each known by its `exchange`. What is held goes along with the
    next one and is held no more, unless that one turns out not to count (`made`). What is not finite is never
    held, for it would never leave again; `dropped` counts such elements.
    """

    def __init__(self, chunk: Chunk) -> None:
        self._chunk = chunk
        self._held: Tensor | None = None  # (extent,)
        self._weight = 1.0  # of the contributions that it is of
        self._sent: dict[Hashable, _Sent] = {}
        self.dropped = 0

    @property
    def held(self) -> Tensor | None:
        """What is held back, (extent,), to be read; None: nothing."""
        return self._held

    @property
    def size(self) -> float:
        """The sum of the absolute values of what is held."""
        return 0.0 if self._held is None else float(self._held.abs().sum(dtype=torch.float64))

    def clear(self) -> None:
        """Hold nothing, and forget what is on its way: the parameters are others now."""
        self._held = None
        self._sent.clear()

    def state(self) -> tuple[Tensor, float] | None:
        """What is held, (extent,), and the weight of the contributions that it is of; None: nothing. For a
        journal, while nothing is on its way."""
        return None if self._held is None else (self._held, self._weight)

    def restore(self, values: Tensor, weight: float) -> None:
        """Hold what `state` gave; `values` are copied."""
        self._held, self._weight = values.clone(), weight

    def outgoing(
        self,
        exchange: Hashable,
        gradient: Tensor,
        present: Sequence[bool | int],
        weight: float,
        *,
        start: int = 0,
    ) -> Tensor:
        """What to send of a contribution of `weight` > 0: the run of the chunk that is `gradient`, 1-D, from
        element `start` on, and what was held of it in the slots that are `present`. In new memory, or the
        gradient itself where nothing was held. What is held in these places goes along, once.
        """
        taken = self._take(present, start, start + gradient.numel(), weight)
        self._sent[exchange] = _Sent(weight, taken)
        return gradient if taken is None else gradient + taken[start : start + gradient.numel()]

    def taken(self, exchange: Hashable) -> Tensor | None:
        """What of the held went along with a contribution, (extent,), to be read; None: nothing. It is to be
        sent again, by whomever: the answer to that one counts."""
        sent = self._sent.get(exchange)
        if sent is None:
            return None
        sent.lost.clear()
        return sent.taken

    def outgoing_again(
        self,
        exchange: Hashable,
        gradient: Tensor,
        along: Tensor | None,
        weight: float,
        *,
        start: int = 0,
    ) -> Tensor:
        """What to send of a contribution that others may have sent before, theirs or this one being what
        counts: the run that is `gradient`, and `along`, (extent,), what all who send it had `taken`. So it is
        the same, whoever sends it. Nothing else that is held here goes along."""
        self._sent.setdefault(exchange, _Sent(weight, None))
        return gradient if along is None else gradient + along[start : start + gradient.numel()]

    def answered(
        self, exchange: Hashable, sent: Tensor, missing: Missing, block: int, *, start: int = 0
    ) -> None:
        """Of `sent`, the run from element `start` on, the blocks `missing`, of `block` elements, were lost.
        They are held once the contribution is `made`. An exchange that is not on its way is passed over."""
        flight = self._sent.get(exchange)
        if flight is None or not missing.any():
            return
        whole = sent.numel() // block
        which = torch.from_numpy(np.flatnonzero(missing[:whole]))
        rows = sent[: whole * block].view(whole, block)[which]
        rest = sent[whole * block :].clone() if len(missing) > whole and missing[-1] else sent[:0]
        flight.lost.append(_Lost(start, start + sent.numel(), block, which, rows, rest))

    def made(self, exchange: Hashable, accepted: bool = True) -> None:
        """The contribution counts, as far as it was not lost. Not `accepted`: it was in no step, and what
        went along with it is held as before."""
        sent = self._sent.pop(exchange, None)
        if sent is None:
            return
        if not accepted:
            if sent.taken is not None:
                held = self._hold(sent.weight)
                held += sent.taken * (sent.weight / self._weight)
            return
        for lost in sent.lost:
            self._add(lost, sent.weight)

    def _take(self, present: Sequence[bool | int], start: int, stop: int, weight: float) -> Tensor | None:
        """What goes along with a contribution, (extent,), zeros where nothing does; it is held no more.

        Held times its weight is what goes times the new one. Where the new weight is smaller, only as much
        goes as counted before: a last batch of few samples must not count many times over.
        """
        held, part = self._held, min(1.0, self._weight / weight)
        stays = max(0.0, 1.0 - weight / self._weight)
        if held is None:
            return None
        if all(present) and stop - start == held.numel() and not stays:
            self._held = None
            return held if part == 1 else held.mul_(part)
        taken = torch.zeros_like(held)
        for here in self._spans(present, start, stop):
            torch.mul(held[here], part, out=taken[here])
            held[here] *= stays
        if not held.any():
            self._held = None
        return taken

    def _spans(self, present: Sequence[bool | int], start: int, stop: int) -> Iterator[slice]:
        """Where the slots that are present lie within a run."""
        for slot, here in zip(self._chunk.slots, present, strict=True):
            first, last = max(start, slot.offset), min(stop, slot.offset + slot.numel)
            if here and first < last:
                yield slice(first, last)

    def _hold(self, weight: float) -> Tensor:
        if self._held is None:
            self._weight = weight
            self._held = torch.zeros(self._chunk.extent, dtype=getattr(torch, self._chunk.dtype))
        return self._held

    def _add(self, lost: _Lost, weight: float) -> None:
        run = self._hold(weight)[lost.start : lost.stop]
        factor = weight / self._weight
        whole = run.numel() // lost.block * lost.block
        blocks, rest = run[:whole].view(-1, lost.block), run[whole:]
        blocks[lost.which] = self._finite(blocks[lost.which] + lost.rows * factor)
        if lost.rest.numel():
            rest.copy_(self._finite(rest + lost.rest * factor))

    def _finite(self, values: Tensor) -> Tensor:
        """`values`, with 0 in the place of what is not finite."""
        wrong = ~torch.isfinite(values)
        self.dropped += int(wrong.sum())
        return values.masked_fill_(wrong, 0)
