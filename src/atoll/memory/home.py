"""Where the values of chunks lie that are not on the device: in payloads of host memory, whose steps are made
there. Source: docs/memory.md, "Moves"."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor

from atoll.memory.gradients import TrainedChunk
from atoll.memory.initialising import take
from atoll.memory.payloads import VALUES, Payloads
from atoll.memory.stays import Stay


class Home(Protocol):
    """What an `Engine` brings chunks from. All methods may be called from several threads."""

    def take(self, each: TrainedChunk) -> None:
        """Take over the values of a chunk's parameters, whose own memory may be let go of."""

    def wait_stepped(self, chunk: int, *, tells: bool = True) -> None:
        """Wait for a chunk's optimizer step; raise what that has raised, with `tells=False` not to the
        script."""

    def values(
        self, each: TrainedChunk, *, writes: bool = False, tells: bool = True
    ) -> AbstractContextManager[Tensor]:
        """The chunk's values in host memory, (extent,), as its latest step has left them."""

    def bring(self, stay: Stay, *, tells: bool = True) -> None:
        """Copy a chunk's values to where it lies on the device."""

    def value(self, each: TrainedChunk, slot: int) -> Tensor:
        """A copy of a parameter's value in ordinary memory of its device."""

    def written_back(self, each: TrainedChunk) -> None:
        """What the script has written on the device was put into `values`."""


class HostHome:
    """A home in payloads."""

    def __init__(self, payloads: Payloads) -> None:
        self.payloads = payloads
        # Set by whoever makes the steps: waits for a chunk's.
        self.stepped: Callable[..., None] = lambda _, **__: None
        # Fills memory on the device with the values of a chunk, past the host; False: they come by there.
        self.fill: Callable[[int, Tensor], bool] = lambda _chunk, _memory: False

    def take(self, each: TrainedChunk) -> None:
        self.add(each)
        with self._pinned(each, overwrites=True) as values:
            for slot, parameter in enumerate(each.parameters):
                take(parameter, each.run(values, slot))

    def add(self, each: TrainedChunk) -> None:
        """Make room for a chunk's values, with anything in it."""
        self.payloads.add((each.chunk.id, VALUES), each.chunk.numel, each.dtype)

    def wait_stepped(self, chunk: int, *, tells: bool = True) -> None:
        self.stepped(chunk, tells=tells)

    @contextmanager
    def values(
        self, each: TrainedChunk, *, writes: bool = False, overwrites: bool = False, tells: bool = True
    ) -> Iterator[Tensor]:
        """As `Home.values`; with `overwrites` there may be anything in it."""
        self.wait_stepped(each.chunk.id, tells=tells)
        with self._pinned(each, writes=writes, overwrites=overwrites) as values:
            yield values

    @contextmanager
    def _pinned(
        self, each: TrainedChunk, *, writes: bool = False, overwrites: bool = False
    ) -> Iterator[Tensor]:
        key = each.chunk.id, VALUES
        with self.payloads.pin(key, writes=writes, overwrites=overwrites) as values:
            yield values[: each.chunk.extent]

    def bring(self, stay: Stay, *, tells: bool = True) -> None:
        self.wait_stepped(stay.each.chunk.id, tells=tells)
        if stay.is_apart or not self.fill(stay.each.chunk.id, stay.memory):
            with self.values(stay.each, tells=tells) as values:
                stay.bring(values)

    def value(self, each: TrainedChunk, slot: int) -> Tensor:
        with self.values(each) as values:
            return copied(each, slot, each.part(values, slot))

    def written_back(self, each: TrainedChunk) -> None:
        """The payloads have it."""


def copied(each: TrainedChunk, slot: int, value: Tensor) -> Tensor:
    """Copy a parameter's value to ordinary memory of its device."""
    like = each.likes[slot]
    with torch.inference_mode(False), torch.no_grad():
        copy = torch.empty_strided(like.shape, like.stride(), dtype=each.dtype, device=each.device)
        return copy.copy_(value)
