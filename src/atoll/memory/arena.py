"""Arenas: one allocation for a tier, cut into blocks of one size. A larger payload takes several blocks in a
row.

On the host, and on a device that is a CPU, the allocation is an anonymous mapping. It begins on a page, has
exactly the bytes that were asked for, and is page-locked in place (`Arena.lock_pages`). Pinned memory of
PyTorch's would be rounded up to a power of two: 2.25 GiB take 4.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.core.errors import RunError, UserError
from atoll.core.units import format_bytes

ALIGNMENT = 64  # bytes: a cache line, and the widest vector register
POISON_VARIABLE = "ATOLL_POISON"
_POISON = 0xFF  # in each byte: a NaN in every floating dtype, -1 in every signed one

_kept: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()  # memory that forked processes do not get
_of_parent: list[mmap.mmap] = []


def _leave_to_parent() -> None:
    """In a forked process, never unmap memory that it did not get: its own may lie at the same addresses."""
    _of_parent.extend(_kept)


os.register_at_fork(after_in_child=_leave_to_parent)


def exactly(nbytes: int) -> str:
    """Return a budget for people, to the byte, as a rounded one may be too little."""
    return f"{nbytes} bytes ({format_bytes(nbytes)})"


@dataclass(frozen=True, eq=False)
class Block:
    """`count` blocks in a row, from block `first` on.

    Attributes:
        generation: tells this use of the blocks from earlier and later ones, for `Arena.is_current`.
        memory: 1-D, uint8, `count * block_bytes` long.
    """

    first: int
    count: int
    generation: int
    memory: Tensor

    def view(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the first `numel` elements of the memory as `dtype`, 1-D."""
        return self.memory[: numel * dtype.itemsize].view(dtype)


class Arena:
    """`nbytes // block_bytes` blocks on `device`.

    Calls must not overlap: threads that share an arena need a lock around them.

    Args:
        block_bytes: rounded up to `alignment`.
        what: the tier's name in errors: "device" or "host".
        poison: True fills blocks with NaN when they are given back, and checks that they still hold it when
            they are taken again. None: only if the environment has ATOLL_POISON=1.
        alignment: bytes; every block begins on a multiple of it.

    Attributes:
        used: bytes that are taken.
        peak: the most bytes that were taken at once.

    Raises UserError, with the least budget that would do, if not one block fits, and if the system does not
    have that much memory.
    """

    def __init__(
        self,
        nbytes: int,
        block_bytes: int,
        device: torch.device | str = "cpu",
        what: str = "host",
        poison: bool | None = None,
        alignment: int = ALIGNMENT,
    ) -> None:
        self.what, self.device = what, torch.device(device)
        self.block_bytes = -(-block_bytes // alignment) * alignment
        self.blocks = nbytes // self.block_bytes
        self.poison = os.environ.get(POISON_VARIABLE) == "1" if poison is None else poison
        if self.blocks < 1:
            raise UserError(
                f"memory.{what}: {nbytes} bytes are less than a block of the model; raise it to at least "
                f"{exactly(self.block_bytes)}"
            )
        self._mapping: mmap.mmap | None = None
        self._memory = self._allocate()
        if self.poison:
            self._memory.fill_(_POISON)
        self._free = [(0, self.blocks)]  # runs (first, count), by their first; no two of them touch
        self._counts: dict[int, int] = {}  # runs that are taken: number of blocks, by the first
        self._generations: Counter[int] = Counter()  # how often a run from this block on was taken
        self._locked: str | None = None
        self.used = self.peak = 0

    def _allocate(self) -> Tensor:
        try:
            if self.device.type == "cpu":
                flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
                self._mapping = mmap.mmap(-1, self.nbytes, flags=flags)
                if hasattr(mmap, "MADV_HUGEPAGE"):
                    with contextlib.suppress(OSError):  # a kernel without huge pages
                        self._mapping.madvise(mmap.MADV_HUGEPAGE)  # a fused AdamW step takes a sixth less
                return torch.frombuffer(self._mapping, dtype=torch.uint8)
            return torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        except (OSError, torch.OutOfMemoryError) as error:
            why = error.strerror if isinstance(error, OSError) else "the accelerator has not that much left"
            raise UserError(
                f"memory.{self.what}: {format_bytes(self.nbytes)} cannot be had on {self.device}: {why}; "
                "lower it to what is free there"
            ) from None

    @property
    def nbytes(self) -> int:
        """Bytes of the allocation."""
        return self.blocks * self.block_bytes

    def blocks_for(self, nbytes: int) -> int:
        """Return the number of blocks that hold `nbytes` bytes; at least one."""
        return max(1, -(-nbytes // self.block_bytes))

    def take(self, count: int = 1, at: int | None = None) -> Block:
        """Take `count` blocks in a row: from block `at` on if it is given, else in the smallest free run that
        holds them.

        Their content is undefined; under poison it is NaN. Raises UserError, with the least budget that would
        do, if no such run is free; ValueError if the blocks from `at` on are not; and RunError if a block was
        written to after it was given back.
        """
        place = self._find(count) if at is None else self._find_at(count, at)
        first, size = self._free[place]
        begin = first if at is None else at
        left = [(first, begin - first), (begin + count, first + size - begin - count)]
        self._free[place : place + 1] = [run for run in left if run[1]]
        memory = self._memory[begin * self.block_bytes : (begin + count) * self.block_bytes]
        self._check_poison(begin, memory)
        self._counts[begin] = count
        self._generations[begin] += 1
        self.used += memory.nbytes
        self.peak = max(self.peak, self.used)
        return Block(begin, count, self._generations[begin], memory)

    def _find(self, count: int) -> int:
        fitting = [(size, place) for place, (_, size) in enumerate(self._free) if size >= count]
        if fitting:
            return min(fitting)[1]
        free = sum(size for _, size in self._free) * self.block_bytes
        largest = max((size for _, size in self._free), default=0) * self.block_bytes
        # Free blocks at the end of the arena would be part of the run, so only the rest must be added.
        last = self._free[-1] if self._free else (0, 0)
        least = self.nbytes + (count - (last[1] if sum(last) == self.blocks else 0)) * self.block_bytes
        raise UserError(
            f"memory.{self.what}: no room for {format_bytes(count * self.block_bytes)} in a row: "
            f"{format_bytes(free)} of {format_bytes(self.nbytes)} are free, {format_bytes(largest)} of them "
            f"in a row; raise it to at least {exactly(least)}"
        )

    def _find_at(self, count: int, at: int) -> int:
        for place, (first, size) in enumerate(self._free):
            if first <= at and at + count <= first + size:
                return place
        raise ValueError(f"{self.what} tier: blocks {at} to {at + count - 1} are not all free")

    def give(self, block: Block) -> None:
        """Take `block` back. Under poison each of its bytes becomes 0xFF, which reads as NaN.

        The caller makes sure that nobody has a view of it: a view would show the next content. Raises
        ValueError for a block that was given back before.
        """
        if not self.is_current(block):
            raise ValueError(f"{self.what} tier: block {block.first} was given back before")
        del self._counts[block.first]
        self.used -= block.memory.nbytes
        if self.poison:
            block.memory.fill_(_POISON)
        place = sum(first < block.first for first, _ in self._free)
        self._free.insert(place, (block.first, block.count))
        self._join(place)
        self._join(place - 1)

    def keep(self, blocks: Iterable[Block]) -> None:
        """Repair the arena after a `take` or `give` that was cut short: only `blocks` are taken."""
        kept = sorted(blocks, key=lambda block: block.first)
        self._counts = {block.first: block.count for block in kept}
        self.used = sum(block.memory.nbytes for block in kept)
        self._free, begin = [], 0
        for first, count in [*self._counts.items(), (self.blocks, 0)]:
            if first > begin:
                self._free.append((begin, first - begin))
                if self.poison:
                    self._memory[begin * self.block_bytes : first * self.block_bytes].fill_(_POISON)
            begin = first + count

    def _join(self, place: int) -> None:
        """Join the free run at `place` with the next one, if they touch."""
        if 0 <= place < len(self._free) - 1:
            (first, count), (then, more) = self._free[place : place + 2]
            if first + count == then:
                self._free[place : place + 2] = [(first, count + more)]

    def is_current(self, block: Block) -> bool:
        """True if `block` has not been given back since it was taken."""
        taken = self._counts.get(block.first) == block.count
        return taken and self._generations[block.first] == block.generation

    def _check_poison(self, first: int, memory: Tensor) -> None:
        if self.poison and not bool((memory == _POISON).all()):
            byte = int((memory != _POISON).nonzero()[0])
            raise RunError(
                f"{self.what} tier: block {first + byte // self.block_bytes} was written to after it was "
                f"given back (at its byte {byte % self.block_bytes}), through a view that somebody kept"
            )

    def lock_pages(self) -> tuple[bool, str]:
        """Page-lock the memory in place, so that an accelerator copies from and to it by itself, until the
        arena ends.

        It works with the runtime of CUDA, and of ROCm under the same name. Other accelerators copy from
        pageable memory.

        Returns:
            Whether the memory is page-locked, and why.
        """
        if self._locked is None:
            self._locked = self._lock_pages()
        return not self._locked, self._locked or "it was registered with the accelerator's runtime"

    def _lock_pages(self) -> str:
        """Page-lock the memory. Return why it is not page-locked; empty if it is."""
        if self.device.type != "cpu":
            return "it is the accelerator's own memory"
        if not torch.cuda.is_available():
            return "there is no accelerator whose runtime registers memory"
        address = self._memory.data_ptr()
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = int(runtime.cudaHostRegister(address, self.nbytes, 1))  # 1: for all contexts
        if status:
            with contextlib.suppress(RuntimeError):  # the next operation reports the error again
                torch.zeros(1, device="cuda")
            return f"the accelerator's runtime would not register it (error {status})"
        weakref.finalize(self, runtime.cudaHostUnregister, address)
        return ""

    def release(self) -> None:
        """Let go of the memory; who has a view of it keeps it. Nothing can be taken any more."""
        self._memory = self._memory[:0].clone()
        self._mapping = None
        self._free, self._counts = [], {}

    def keep_from_children(self) -> None:
        """Leave the memory out of processes that are forked from this one.

        Otherwise each page that is written after a fork (a DataLoader's workers) would be held twice, and a
        direct read that is under way could land in the child's page.
        """
        if self._mapping is not None:
            self._mapping.madvise(mmap.MADV_DONTFORK)
            _kept.add(self._mapping)
