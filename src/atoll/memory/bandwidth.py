"""Bandwidths and step speeds of this machine, measured in some tenths of a second.

Each figure is the best of a few trials of the engine's own operations: other processes slow a trial down, and
nothing makes one faster than the machine.
"""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from atoll.core.errors import ConfigError
from atoll.memory import copies
from atoll.memory.disk import open_nameless, try_direct
from atoll.moves.timeline import Bandwidths
from atoll.tensors.elementwise import copy_for

_MOVED = 2**26  # bytes of a copy: larger than every cache
_SMALL = 4096  # bytes of a copy that takes little more than the latency
_WRITTEN = 2**25  # bytes written to the disk
_ELEMENTS = 2**22  # elements that are stepped
_MATRIX = (256, 256)  # that is stepped as a whole tensor, which may take many operations an element
_LEAST = 2**20  # bytes that a measurement takes in any case
_TRIALS, _SMALL_TRIALS = 3, 20


def measure(
    device: torch.device,
    optimizer: torch.optim.Optimizer | None = None,
    folder: str = "",
    most: int = 2 * _MOVED,
    by_tensor: bool = False,
) -> Bandwidths:
    """Return the bandwidths between `device`, host memory and disk, and the pace of the optimizer's steps on
    host and device.

    Args:
        optimizer: the optimizer to time; AdamW if None.
        folder: the disk's folder; empty for no disk.
        most: bytes of each kind of memory that may be taken for a moment; at least 1 MiB is.
        by_tensor: the optimizer steps whole tensors.

    Raises ConfigError if the folder cannot be written to.
    """
    most = max(most, _LEAST)
    to_device, to_host, latency = _copies(device, min(_MOVED, most // 2))
    to_disk, from_disk = _disk(folder, min(_WRITTEN, most)) if folder else (0.0, 0.0)
    # 16 bytes an element: value, gradient and, as a rule, two states, in single precision.
    elements = min(_ELEMENTS, most // 16)
    shape = _MATRIX if by_tensor else (elements,)
    on_host = _steps(optimizer, torch.device("cpu"), shape)
    shared = device.type == "cpu"
    return Bandwidths(
        to_device=to_device,
        to_host=to_host,
        to_disk=to_disk,
        from_disk=from_disk,
        host_steps=on_host,
        device_steps=on_host if shared else _steps(optimizer, device, shape),
        latency=latency,
        shared=shared,
    )


def _copies(device: torch.device, nbytes: int) -> tuple[float, float, float]:
    """Return the bytes/s to the device and to the host, and the latency of a copy in seconds."""
    # With an accelerator the host's arena is page-locked too (memory/arena.py).
    there = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    here = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=device.type != "cpu")

    def seconds(copy: Callable[..., None], target: Tensor, source: Tensor, trials: int) -> float:
        def copy_all() -> None:
            copy(target, source)
            settle(device)

        return _least(copy_all, trials)

    latency = seconds(copies.to_device, there[:_SMALL], here[:_SMALL], _SMALL_TRIALS)
    to_device = nbytes / max(seconds(copies.to_device, there, here, _TRIALS) - latency, 1e-9)
    to_host = nbytes / max(seconds(copies.to_host, here, there, _TRIALS) - latency, 1e-9)
    return to_device, to_host, latency


def _steps(optimizer: torch.optim.Optimizer | None, device: torch.device, shape: tuple[int, ...]) -> float:
    """Return the elements/s that the optimizer (AdamW if None) steps on `device`, of a parameter of this
    shape."""
    parameter = nn.Parameter(torch.zeros(shape, device=device))
    parameter.grad = torch.ones_like(parameter)
    if optimizer is None:
        probe: torch.optim.Optimizer = torch.optim.AdamW([parameter], fused=True)
    else:
        probe = copy_for(optimizer, optimizer.param_groups[0], [parameter])

    def step() -> None:
        type(probe).step(probe)
        settle(device)

    step()  # the first step makes the state
    return parameter.numel() / max(_least(step, _TRIALS), 1e-9)


def step_seconds(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> list[float]:
    """Return how long the optimizer's step of each parameter as a whole takes on the host: 0 for others'
    parameters.

    One step of each shape is timed, after a first one that makes the state.
    """
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    known: dict[object, float] = {}

    def seconds(like: nn.Parameter) -> float:
        group = groups.get(id(like))
        key = id(group), tuple(like.shape), like.dtype
        if group is not None and key not in known:
            parameter = nn.Parameter(torch.zeros(like.shape, dtype=like.dtype))
            parameter.grad = torch.ones_like(parameter)
            probe = copy_for(optimizer, group, [parameter])
            type(optimizer).step(probe)
            known[key] = _least(lambda: type(optimizer).step(probe), 1)
        return known.get(key, 0.0)

    return list(map(seconds, parameters))


def _disk(folder: str, nbytes: int) -> tuple[float, float]:
    """Return the bytes/s written to and read from a file in `folder`, past the page cache if the file system
    allows it."""
    nbytes = nbytes // _LEAST * _LEAST
    with mmap.mmap(-1, nbytes) as memory:
        memory.write(os.urandom(_LEAST) * (nbytes // _LEAST))  # zeros may be stored as nothing
        try:
            file = open_nameless(Path(folder))
            try:
                return _write_and_read(file, memory)
            finally:
                os.close(file)
        except OSError as error:
            raise ConfigError(
                f"memory.disk: {folder} cannot be written to: {error.strerror}; name another folder"
            ) from None


def _write_and_read(file: int, memory: mmap.mmap) -> tuple[float, float]:
    try_direct(file)  # as the disk tier does; without it the page cache is used

    def write() -> None:
        if os.pwrite(file, memory, 0) != len(memory):
            raise OSError(errno.ENOSPC, "no space is left")
        os.fdatasync(file)

    def read() -> None:
        os.posix_fadvise(file, 0, len(memory), os.POSIX_FADV_DONTNEED)
        os.preadv(file, [memory], 0)

    return len(memory) / _least(write, _TRIALS), len(memory) / _least(read, _TRIALS)


def _least(action: Callable[[], None], trials: int) -> float:
    """Return the seconds of the fastest of some trials."""
    least = float("inf")
    for _ in range(trials):
        began = time.perf_counter()
        action()
        least = min(least, time.perf_counter() - began)
    return least


def settle(device: torch.device) -> None:
    """Wait until the device has done what was queued on it. A CPU queues nothing."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
