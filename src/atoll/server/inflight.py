"""Payloads of workers' contributions, by handle, until they are applied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from atoll.tensors.payload import tensor_of


class InFlight:
    """Retained payloads by handle. `handles` is the number of handles assigned so far."""

    def __init__(self, handles: int = 0, held: Mapping[int, memoryview] | None = None) -> None:
        self.handles, self.held = handles, dict(held or {})

    def __len__(self) -> int:
        return len(self.held)

    @property
    def next(self) -> int:
        """The next handle to be assigned."""
        return self.handles + 1

    def keep(self, payload: memoryview | None) -> None:
        """Retain a payload under the next handle."""
        self.handles += 1
        self.held[self.handles] = payload if payload is not None else memoryview(b"")

    def join(self, handles: Sequence[int]) -> None:
        """Concatenate the payloads of these handles under the latest handle."""
        whole = b"".join([self.held.pop(handle) for handle in handles])
        self.held[self.handles] = memoryview(whole)

    def release(self, handles: Sequence[int]) -> None:
        """Drop the payloads of these handles."""
        for handle in handles:
            self.held.pop(handle, None)

    def gradients(self, handle: int, dtype: torch.dtype, extent: int) -> Tensor:
        """Return a chunk's gradients, (extent,). They come without a payload where none is present."""
        payload = self.held[handle]
        return tensor_of(payload, dtype) if payload.nbytes else torch.zeros(extent, dtype=dtype)
