"""The payloads of what workers contribute, by handle, until they are applied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from atoll.tensors.payload import tensor_of


class InFlight:
    """What is in flight. `handles` is how many were kept."""

    def __init__(self, handles: int = 0, held: Mapping[int, memoryview] | None = None) -> None:
        self.handles, self.held = handles, dict(held or {})

    def __len__(self) -> int:
        return len(self.held)

    @property
    def next(self) -> int:
        """The handle that the next one gets."""
        return self.handles + 1

    def keep(self, payload: memoryview | None) -> None:
        """Hold this under the next handle."""
        self.handles += 1
        self.held[self.handles] = payload if payload is not None else memoryview(b"")

    def join(self, handles: Sequence[int]) -> None:
        """Hold these, end to end, under the latest handle alone."""
        whole = b"".join([self.held.pop(handle) for handle in handles])
        self.held[self.handles] = memoryview(whole)

    def release(self, handles: Sequence[int]) -> None:
        """Let these go."""
        for handle in handles:
            self.held.pop(handle, None)

    def gradients(self, handle: int, dtype: torch.dtype) -> Tensor:
        """A chunk's gradients, (extent,)."""
        return tensor_of(self.held[handle], dtype)
