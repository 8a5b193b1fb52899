"""Delay compensation: corrects a stale gradient for the parameters that it is applied to.

A contribution's gradient g was computed at parameters w_then, and its step starts from w_now. To first order
the gradient there is g + H (w_now - w_then), and lambda * g * g stands for the diagonal of H.
Source: Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation", ICML 2017;
docs/server.md, "Stale contributions".
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

Contributor: TypeAlias = tuple[int, int]  # worker, incarnation


def compensated(gradients: Tensor, now: Tensor, then: Tensor, factor: float) -> Tensor:
    """Return g + factor * g * g * (now - then), element-wise; all tensors have one shape and dtype.

    Half precision is computed in single precision, since squares of gradients would underflow.
    """
    wide = torch.promote_types(gradients.dtype, torch.float32)
    g, moved = gradients.to(wide), now.to(wide) - then.to(wide)
    return moved.mul_(g).mul_(g).mul_(factor).add_(g).to(gradients.dtype)


class Origins:
    """Chunk values that each contributor computed its latest gradients from.

    They are the values right after one of its contributions was applied. `kept` is the number of copies for
    each contributor and chunk: one more than its contributions in flight. Only entries of the log take and
    drop copies, so replaying a journal gives equal ones.
    """

    def __init__(self, kept: int) -> None:
        self._kept = kept
        # chunk -> contributor -> its clock (the number of its iterations that were applied) -> values
        self._chunks: dict[int, dict[Contributor, dict[int, Tensor]]] = {}

    def find(self, chunk: int, who: Contributor, clock: int) -> Tensor | None:
        """Return the chunk's values at clock `clock` of contributor `who`.

        None before the first contribution of a newcomer.
        """
        return self._chunks.get(chunk, {}).get(who, {}).get(clock)

    def note(self, chunk: int, who: Contributor, clock: int, values: Tensor) -> None:
        """Keep a copy of the values that `who` goes on from, in place of the oldest copy."""
        copies = self._chunks.setdefault(chunk, {}).setdefault(who, {})
        memory = copies.pop(min(copies)) if len(copies) >= self._kept else torch.empty_like(values)
        copies[clock] = memory.copy_(values)

    def forget(self, chunk: int, gone: set[Contributor]) -> None:
        """Drop the copies of contributors that are gone."""
        for who in gone:
            self._chunks.get(chunk, {}).pop(who, None)

    def contributors(self, chunk: int) -> set[Contributor]:
        """Return the contributors with copies of a chunk."""
        return set(self._chunks.get(chunk, ()))

    def tensors(self, chunk: int) -> dict[str, Tensor]:
        """Return clones of a chunk's copies, by names that `restore` understands."""
        return {
            f"{worker}.{incarnation}.{clock}": values.clone()
            for (worker, incarnation), copies in self._chunks.get(chunk, {}).items()
            for clock, values in copies.items()
        }

    def restore(self, chunk: int, tensors: dict[str, Tensor]) -> None:
        """Replace a chunk's copies by clones of `tensors`, the result of an earlier call of `tensors`.

        Raises ValueError for other names.
        """
        self._chunks.pop(chunk, None)
        for name, values in tensors.items():
            worker, incarnation, clock = map(int, name.split("."))
            copies = self._chunks.setdefault(chunk, {}).setdefault((worker, incarnation), {})
            copies[clock] = values.clone()
