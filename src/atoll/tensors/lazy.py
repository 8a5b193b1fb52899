"""Tensors that have no memory: each is read where its values lie whenever something is done with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class LazyTensor(Tensor):
    """A read-only tensor of `shape` and `dtype` whose values `read()` gives, on `device`, each time anew.

    Any operation on it reads it, runs on what was read, and gives a plain tensor. It pickles and is
    deep-copied as a plain one. Raises UserError where an operation would write into it.
    """

    read: Callable[[], Tensor]

    @staticmethod
    def __new__(
        cls,
        read: Callable[[], Tensor],
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> LazyTensor:
        raise NotImplementedError


def read_whole(tensor: Tensor) -> Tensor:
    """A plain tensor with the values of `tensor`: itself, unless it is lazy."""
    raise NotImplementedError
