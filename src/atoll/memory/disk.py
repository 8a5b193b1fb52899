"""The scratch file of the disk tier: blocks that threads read and write, each with a checksum."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor


class Transfer:
    """A read or a write that is under way."""

    done: bool

    def wait(self, seconds: float) -> None:
        """Until it is done; raises RunError (damage, a full disk), DeadlineError with its name."""
        raise NotImplementedError


class DiskFile:
    """`nbytes // block_bytes` blocks in a file without a name in `folder`, which goes with the process."""

    def __init__(self, folder: Path, nbytes: int, block_bytes: int, *, threads: int = 2) -> None:
        raise NotImplementedError

    blocks: int
    used: int  # bytes
    peak: int
    direct: bool  # past the page cache
    reason: str

    def take(self) -> int:
        """A free block."""
        raise NotImplementedError

    def give(self, slot: int) -> None:
        """Take it back."""
        raise NotImplementedError

    def read(self, slot: int, into: Tensor, after: Sequence[Transfer] = ()) -> Transfer:
        """Fill `into` (1-D uint8, at most a block) with what was written last, when all of `after` are done."""
        raise NotImplementedError

    def write(self, slot: int, source: Tensor, after: Sequence[Transfer] = ()) -> Transfer:
        """Write `source`, which nobody may change until the transfer is done."""
        raise NotImplementedError

    def close(self) -> None:
        """End the threads and the file."""
        raise NotImplementedError
