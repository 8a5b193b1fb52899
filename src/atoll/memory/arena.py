"""Arenas: one allocation for a tier, cut into blocks of one size; a large chunk takes several in a row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Block:
    """`count` blocks in a row from block `first`; `memory` is 1-D uint8, `count * block_bytes` long.

    `generation` counts how often block `first` has been taken; `Arena.is_current` compares it.
    """

    first: int
    count: int
    generation: int
    memory: Tensor


class Arena:
    """`nbytes // block_bytes` blocks on `device`; `what` names the tier in errors ("device", "host")."""

    def __init__(
        self,
        nbytes: int,
        block_bytes: int,
        device: torch.device | str = "cpu",
        what: str = "host",
        poison: bool | None = None,
        alignment: int = 64,
    ) -> None:
        raise NotImplementedError

    blocks: int
    block_bytes: int  # rounded up to `alignment`
    used: int  # bytes, as is all that follows
    peak: int

    def take(self, count: int = 1, at: int | None = None) -> Block:
        """`count` blocks in a row, from block `at` on if given (what moves.Cache has chosen)."""
        raise NotImplementedError

    def give(self, block: Block) -> None:
        """Take `block` back; under poison its bytes become 0xFF, which is NaN in every floating dtype."""
        raise NotImplementedError

    def is_current(self, block: Block) -> bool:
        """Whether `block` has not been given back since it was taken."""
        raise NotImplementedError
