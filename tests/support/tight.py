"""Models that train with too little memory for them: budgets, optimizers and comparisons of such tests."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from atoll.core.memory import Memory
from atoll.memory import planning
from atoll.memory.bandwidth import measure
from atoll.moves.timeline import Bandwidths

CHUNK = 4096


@functools.cache
def rates() -> Bandwidths:
    """This machine's, measured once for all fits."""
    return measure(torch.device("cpu"), None, tempfile.gettempdir())


@contextmanager
def poisoned() -> Iterator[None]:
    """What is given back is NaN, and bandwidths are not measured anew."""
    known = rates()
    with patch.dict(os.environ, ATOLL_POISON="1"), patch.object(planning, "measure", lambda *_: known):
        yield


def memory(model: nn.Module, share: float, **more: Any) -> Memory:
    """A device budget of this share of all values, in whole blocks."""
    need = sum(-(-p.nbytes // CHUNK) for p in model.parameters() if p.nbytes >= CHUNK) * CHUNK
    need += sum(p.nbytes for p in model.parameters() if p.nbytes < CHUNK)
    device = str(int(need * share) // CHUNK * CHUNK)
    return Memory(**({"device": device, "chunk": str(CHUNK), "step": "host"} | more))


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


class Together(list[torch.optim.Optimizer]):
    """Optimizers of one model that a script steps one after another."""

    def step(self) -> None:
        for each in self:
            each.step()

    def zero_grad(self) -> None:
        for each in self:
            each.zero_grad()


def same(left: Any, right: Any) -> bool:
    """Whether all numbers are equal, all the way down; NaN equals NaN."""
    if isinstance(left, Tensor):
        equal = left.shape == right.shape and (left == right) | (left.isnan() & right.isnan())
        return bool(torch.as_tensor(equal).all())
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)
