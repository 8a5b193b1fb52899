"""The host memory that a node's worker and its CPU side share: one file without a name.

    slot 0, slot 1, ...       the node's own gradients of iteration k, in slot k % slots
    buffer 0, buffer 1, ...   local parameters that the CPU side has published
    frozen                    the chunks that nothing trains, once

A slot, like a buffer, holds every trainable chunk in order, each at a multiple of 64 bytes. The file is
passed to the other process as a descriptor. It is gone when both processes are, however they ended.
Source: docs/peers.md, "What it takes".
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.chunks import Chunk, ChunkMap, itemsize
from atoll.core.errors import RunError
from atoll.core.units import format_bytes
from atoll.tensors.payload import bytes_in

ALIGNMENT = 64  # bytes: a cache line, and the widest vector register
PAGE = 4096  # bytes; slots and buffers begin on pages, so that no two share one
BUFFERS = 3  # one is read by the worker, one is announced, one is written


def slots_for(stale_max: int) -> int:
    """Return a worker's number of slots: for the global iteration, `stale_max` beyond it, and the next."""
    return stale_max + 2


@dataclass(frozen=True)
class ChunkPlace:
    """The place of a chunk's `numel` values, from byte `offset` of a run of several chunks."""

    chunk: int
    offset: int
    numel: int
    dtype: str

    @property
    def nbytes(self) -> int:
        return self.numel * itemsize(self.dtype)


@dataclass(frozen=True)
class MemoryPlan:
    """The layout of the host memory, in bytes. It is equal on every node for equal layouts of the model.

    Attributes:
        trained: the trainable chunks' places in a slot or a buffer, in the order of the layout.
        frozen: the other chunks' places in their region.
        run_bytes: bytes of a slot, or of a buffer.
    """

    slots: int
    buffers: int
    trained: tuple[ChunkPlace, ...]
    frozen: tuple[ChunkPlace, ...]
    run_bytes: int
    frozen_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of the shared memory."""
        return (self.slots + self.buffers) * self.run_bytes + self.frozen_bytes

    def slot(self, iteration: int) -> int:
        """Return the offset of the slot of an iteration's gradients."""
        return (iteration % self.slots) * self.run_bytes

    def buffer(self, index: int) -> int:
        """Return the offset of a buffer."""
        assert 0 <= index < self.buffers
        return (self.slots + index) * self.run_bytes


def plan_memory(layout: ChunkMap, slots: int, buffers: int = BUFFERS) -> MemoryPlan:
    """Return the plan of the shared memory for a model's layout."""
    trained, run_bytes = _in_a_row(layout.trainable)
    rest = [chunk for chunk in layout.chunks if not layout.groups[chunk.group].trainable]
    frozen, frozen_bytes = _in_a_row(rest)
    return MemoryPlan(slots, buffers, trained, frozen, run_bytes, frozen_bytes)


def _in_a_row(chunks: Sequence[Chunk]) -> tuple[tuple[ChunkPlace, ...], int]:
    runs, end = [], 0
    for chunk in chunks:
        run = ChunkPlace(chunk.id, _round_up(end, ALIGNMENT), chunk.extent, chunk.dtype)
        runs.append(run)
        end = run.offset + run.nbytes
    return tuple(runs), _round_up(end, PAGE)


def views(memory: Tensor, runs: Sequence[ChunkPlace]) -> dict[int, Tensor]:
    """Return the chunks in `memory`, (bytes,), by id: 1-D views of the chunks' dtypes."""
    return {
        run.chunk: memory[run.offset : run.offset + run.nbytes].view(getattr(torch, run.dtype))
        for run in runs
    }


class HostMemory:
    """The shared memory of `plan`, mapped here.

    Attributes:
        fd: the file's descriptor, this process's own.
        frozen: the chunks that nothing trains, by id.
    """

    def __init__(self, plan: MemoryPlan, fd: int, *, writes: bool = True) -> None:
        """Map memory that another process has made.

        Args:
            writes: False maps it for reading only.

        Raises RunError if the file's size is not the plan's.
        """
        size = os.fstat(fd).st_size
        if size != plan.nbytes:
            raise RunError(f"shared memory of {size} bytes, where this model's layout needs {plan.nbytes}")
        self.plan, self.fd = plan, fd
        memory = map_bytes(fd, size, writes=writes)
        self._slots = [views(memory[plan.slot(slot) :], plan.trained) for slot in range(plan.slots)]
        self._buffers = [views(memory[plan.buffer(each) :], plan.trained) for each in range(plan.buffers)]
        self.frozen = views(memory[size - plan.frozen_bytes :], plan.frozen)

    @classmethod
    def create(cls, plan: MemoryPlan) -> HostMemory:
        """Make new memory, filled with zeros. Raises RunError if the machine does not have as much."""
        return cls(plan, make_file(plan.nbytes, "the memory that a node's processes share"))

    @classmethod
    def opened(cls, plan: MemoryPlan, path: str) -> HostMemory:
        """Map the memory at another process's `path` for reading. Raises RunError if that fails."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise RunError(
                f"{path}: the memory that a node's devices share cannot be read: {error.strerror}; they are "
                "to be processes of one user on one machine, with Linux's /proc; or give each its own node"
            ) from None
        return cls(plan, fd, writes=False)

    @property
    def path(self) -> str:
        """The path at which other processes of this user find the memory."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def gradients(self, iteration: int) -> Mapping[int, Tensor]:
        """Return the node's own gradients of an iteration: each trainable chunk's, by its id."""
        return self._slots[iteration % self.plan.slots]

    def buffer(self, index: int) -> Mapping[int, Tensor]:
        """Return a buffer of local parameters: each trainable chunk's, by its id."""
        return self._buffers[index]

    def close(self) -> None:
        """Unmap the memory. It is freed when no process and no tensor has it any more."""
        self._slots, self._buffers, self.frozen = [], [], {}
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1


class Buffers:
    """The buffers that the CPU side may write. An announced buffer is the worker's until it releases it."""

    def __init__(self, buffers: int) -> None:
        self._announced = [False] * buffers

    def free(self) -> int | None:
        """Return a buffer that is not announced; None if the worker has yet to release one."""
        return next((index for index, taken in enumerate(self._announced) if not taken), None)

    def announce(self, index: int) -> None:
        self._announced[index] = True

    def release(self, index: int) -> None:
        self._announced[index] = False


def aligned(nbytes: int) -> Tensor:
    """Return new memory of this process, (bytes,), that begins on a multiple of 64 bytes."""
    memory = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8)
    start = -memory.data_ptr() % ALIGNMENT
    return memory[start : start + nbytes]


def make_file(nbytes: int, what: str) -> int:
    """Make a file of `nbytes` zeros without a name, in memory if the system has files there; return its
    descriptor.

    Raises RunError as `resize` does.
    """
    try:
        fd = os.memfd_create("atoll", os.MFD_CLOEXEC) if hasattr(os, "memfd_create") else _unlinked_file()
    except OSError as error:
        raise RunError(f"no file for {what}: {error.strerror}") from None
    try:
        resize(fd, nbytes, what)
    except RunError:
        os.close(fd)
        raise
    return fd


def resize(fd: int, nbytes: int, what: str) -> None:
    """Make a file `nbytes` long. All of it is reserved at once, so that no later write finds the machine
    without memory.

    Raises RunError, with `what` the file is for, if there is too little.
    """
    try:
        os.ftruncate(fd, nbytes)
        if nbytes and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        raise RunError(
            f"no {format_bytes(nbytes)} of memory for {what}: {error.strerror}; a smaller sync.stale_max "
            "needs less"
        ) from None


def _unlinked_file() -> int:
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def map_bytes(fd: int, nbytes: int, *, writes: bool = True) -> Tensor:
    """Map a file as a tensor of bytes, (nbytes,), shared with every process that maps the file.

    The mapping lives as long as the tensor or a view of it, whatever becomes of `fd`.

    Args:
        writes: False maps it for reading only: a write then ends the process.
    """
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    if writes:
        return torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)
    return bytes_in(mmap.mmap(fd, nbytes, prot=mmap.PROT_READ))


@dataclass(frozen=True)
class HostBytes:
    """A node's host memory by its parts, in bytes. docs/peers.md has the formula.

    It does not include what Python and torch themselves take.

    Attributes:
        shared: slots, buffers and frozen chunks.
        parameters: the global parameters.
        optimizer: the optimizer's state.
        twin: for the overlay of a node that is behind: the trained parameters and that state once more, and
            the values that are not shown yet.
        scratch: scratch memory of a step, and of the overlay.
        contributions: contributions that are received, and kept for others, at most.
    """

    shared: int
    parameters: int
    optimizer: int
    twin: int
    scratch: int
    contributions: int

    @property
    def total(self) -> int:
        own = self.parameters + self.optimizer + self.twin + self.scratch
        return self.shared + own + self.contributions


def host_bytes(plan: MemoryPlan, parameters: Mapping[str, int], most: int) -> HostBytes:
    """Return the host memory of a node.

    Args:
        parameters: the `nbytes` of its GlobalParameters.
        most: contributions that it holds at most (peers/settings.py: NodeSettings.most_held).
    """
    each = sum(run.nbytes for run in plan.trained)
    return HostBytes(plan.nbytes, contributions=most * each, **parameters)


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
