"""The store: where the payloads of all chunks lie, in host memory or on disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from atoll.memory.arena import Arena
from atoll.memory.disk import DiskFile

Key = tuple[int, str]  # (chunk id, kind): kind is "values", "gradient", "master" or a key of optimizer state


class Store:
    """Payloads in `host`; with `disk`, what is not used soon lies there. All methods from any thread."""

    def __init__(self, host: Arena, disk: DiskFile | None = None, policy: str = "belady") -> None:
        raise NotImplementedError

    def add(self, key: Key, numel: int, dtype: torch.dtype) -> None:
        """A new payload, without a value yet: its first pin gives zeros. Takes no memory until then."""
        raise NotImplementedError

    @contextmanager
    def pin(self, key: Key, *, writes: bool = False, overwrites: bool = False) -> Iterator[Tensor]:
        """The payload in host memory, 1-D (`numel`) in its dtype; it lies still until the end of the block.

        `writes`: the caller changes it; `overwrites`: all of it, so that nothing is read for it first (what
        is there is undefined). Nested pins and pins of several threads are counted.
        """
        raise NotImplementedError

    def pin_now(self, key: Key, *, writes: bool = False, overwrites: bool = False) -> Tensor:
        """As `pin`, until `unpin(key)`."""
        raise NotImplementedError

    def unpin(self, key: Key) -> None:
        raise NotImplementedError

    def get(self, key: Key) -> Tensor:
        """A copy of the payload."""
        raise NotImplementedError

    def put(self, key: Key, source: Tensor) -> None:
        """Copy `source` (any shape and device, `numel` elements) in; adds the payload if it is new."""
        raise NotImplementedError

    def drop(self, key: Key) -> None:
        """What it holds is of no use any more (a gradient after its step): frees its memory without a write.
        The payload stays known; the next pin gives zeros."""
        raise NotImplementedError

    def prefetch(self) -> None:
        """Begin to read what is used next, as far as it costs no move; returns at once."""
        raise NotImplementedError

    def step_ended(self) -> None:
        """The order of uses is complete; from now on it is taken as cyclic."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError
