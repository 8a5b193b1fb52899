"""Delay compensation: a gradient is brought to the parameters that it is applied to.

A contribution's gradient g was computed at parameters w_then, and its step is made from others, w_now. To
first order the gradient there is g + H (w_now - w_then), and lambda * g * g stands for the diagonal of H.
Source: Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation", ICML 2017;
docs/server.md, "Stale contributions".
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

Contributor: TypeAlias = tuple[int, int]  # worker, incarnation


def compensated(gradients: Tensor, now: Tensor, then: Tensor, factor: float) -> Tensor:
    """g + factor * g * g * (now - then), element-wise; all of one shape and dtype.

    Half precision is computed in single: squares of gradients would vanish.
    """
    wide = torch.promote_types(gradients.dtype, torch.float32)
    g, moved = gradients.to(wide), now.to(wide) - then.to(wide)
    return moved.mul_(g).mul_(g).mul_(factor).add_(g).to(gradients.dtype)


class Origins:
    """The parameters that each contributor went on from, chunk by chunk: those right after its latest
    contributions were applied. `kept` are how many of each: one more than it may have in flight.

    Both that and what is forgotten follow from the log alone, so that a journal leads to the same.
    """

    def __init__(self, kept: int) -> None:
        self._kept = kept
        # chunk -> contributor -> its clock, which is how many of its iterations are in -> values
        self._chunks: dict[int, dict[Contributor, dict[int, Tensor]]] = {}

    def find(self, chunk: int, who: Contributor, clock: int) -> Tensor | None:
        """A chunk as `who` got it at that clock; None for the first contribution of one who has just come."""
        return self._chunks.get(chunk, {}).get(who, {}).get(clock)

    def note(self, chunk: int, who: Contributor, clock: int, values: Tensor) -> None:
        """`who` goes on from these values, of which a copy is kept, in the memory of one that is not needed
        any more."""
        held = self._chunks.setdefault(chunk, {}).setdefault(who, {})
        memory = held.pop(min(held)) if len(held) >= self._kept else torch.empty_like(values)
        held[clock] = memory.copy_(values)

    def forget(self, chunk: int, gone: set[Contributor]) -> None:
        """These contribute no more."""
        for who in gone:
            self._chunks.get(chunk, {}).pop(who, None)

    def contributors(self, chunk: int) -> set[Contributor]:
        """Those of whom a chunk is kept."""
        return set(self._chunks.get(chunk, ()))

    def tensors(self, chunk: int) -> dict[str, Tensor]:
        """Copies of what is kept of a chunk, by a name; `restore` takes them."""
        return {
            f"{worker}.{incarnation}.{clock}": values.clone()
            for (worker, incarnation), held in self._chunks.get(chunk, {}).items()
            for clock, values in held.items()
        }

    def restore(self, chunk: int, tensors: dict[str, Tensor]) -> None:
        """Keep copies of what `tensors` gave, and nothing else of the chunk. Raises ValueError for names
        that it never gives."""
        self._chunks.pop(chunk, None)
        for name, values in tensors.items():
            worker, incarnation, clock = map(int, name.split("."))
            held = self._chunks.setdefault(chunk, {}).setdefault((worker, incarnation), {})
            held[clock] = values.clone()
