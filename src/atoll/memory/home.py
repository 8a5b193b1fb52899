"""The homes of chunks' values outside the device: payloads in host memory, where the chunks are also stepped.
Source: docs/memory.md, "Moves"."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor

from atoll.memory.gradients import TrainedChunk
from atoll.memory.initialising import take
from atoll.memory.payloads import VALUES, Payloads
from atoll.memory.sharing import Sharing
from atoll.memory.states import ChunkStates
from atoll.memory.stays import Stay
from atoll.memory.stepqueue import StepQueue


class Home(Protocol):
    """The place outside the device that holds a chunk's values, as an `Engine` uses it.

    The engine brings chunks from here, writes the script's changes back to it, and reports them. All methods
    may be called from several threads.
    """

    def take(self, each: TrainedChunk) -> None:
        """Take over the values of a chunk's parameters. The parameters' own memory may then be freed."""

    def wait_stepped(self, chunk: int, *, tells: bool = True) -> None:
        """Wait until no step of a chunk is under way or to come, and raise the error of one that failed.

        Args:
            tells: False if the error is not raised to the script; the script is then still to be told.
        """

    def values(
        self, each: TrainedChunk, *, writes: bool = False, tells: bool = True
    ) -> AbstractContextManager[Tensor]:
        """Lend the chunk's values in host memory, (extent,), as its latest step has left them.

        Args:
            writes: True if the caller changes them.
            tells: as for `wait_stepped`.
        """

    def bring(self, stay: Stay, *, tells: bool = True) -> None:
        """Copy a chunk's values to its place on the device."""

    def value(self, each: TrainedChunk, slot: int) -> Tensor:
        """Return a copy of a parameter's value in ordinary memory of its device."""

    def written(self, chunk: int) -> None:
        """Note that the script has certainly written to a chunk's values, here or on the device."""
        del chunk  # by default no other member has the values

    def written_back(self, each: TrainedChunk) -> None:
        """Note that values which the script may have changed were copied into `values`."""

    @property
    def must_tell(self) -> bool:
        """True if `written` must also be called for writes that autograd does not count (`p.data.mul_()`).

        The engine then takes a checksum each time it gives out the chunk's memory.
        """
        return False


class HostHome(Home):
    """A home that keeps values in payloads.

    Args:
        payloads: hold the values.
        steps: the optimizer's steps.
        states: the optimizer's states of the chunks that are stepped here, by chunk.
        sharing: the group's parts of the chunks; None if no other member holds any.
    """

    def __init__(
        self,
        payloads: Payloads,
        steps: StepQueue,
        states: Mapping[int, ChunkStates] | None = None,
        sharing: Sharing | None = None,
    ) -> None:
        self.payloads, self._steps, self._states, self._sharing = payloads, steps, states or {}, sharing
        self.edited: set[int] = set()  # chunks whose values the script may have changed

    def take(self, each: TrainedChunk) -> None:
        self.add(each)
        with self._pinned(each, overwrites=True) as values:
            for slot, parameter in enumerate(each.parameters):
                take(parameter, each.run(values, slot))

    def add(self, each: TrainedChunk) -> None:
        """Add a chunk's payload "values" without writing to it."""
        self.payloads.add((each.chunk.id, VALUES), each.chunk.numel, each.dtype)

    def wait_stepped(self, chunk: int, *, tells: bool = True) -> None:
        self._steps.wait_stepped(chunk, tells=tells)

    @contextmanager
    def values(
        self, each: TrainedChunk, *, writes: bool = False, overwrites: bool = False, tells: bool = True
    ) -> Iterator[Tensor]:
        """Lend the values as `Home.values` does. With `overwrites` their content is undefined."""
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
        chunk, sharing = stay.each.chunk.id, self._sharing
        self.wait_stepped(chunk, tells=tells)
        if sharing is None or stay.is_apart or not sharing.fill(chunk, stay.memory):
            with self.values(stay.each, tells=tells) as values:
                stay.bring(values)

    def value(self, each: TrainedChunk, slot: int) -> Tensor:
        with self.values(each) as values:
            return copied(each, slot, each.part(values, slot))

    def written(self, chunk: int) -> None:
        if self._sharing is not None:
            self.wait_stepped(chunk)
            self._sharing.written(chunk)

    def written_back(self, each: TrainedChunk) -> None:
        chunk = each.chunk.id
        self.edited.add(chunk)
        if chunk in self._states:
            self.wait_stepped(chunk)
            self._states[chunk].follow_values()

    @property
    def must_tell(self) -> bool:
        return self._sharing is not None and self._sharing.members.count > 1


def copied(each: TrainedChunk, slot: int, value: Tensor) -> Tensor:
    """Return a copy of a parameter's value in ordinary memory of its device."""
    like = each.likes[slot]
    with torch.inference_mode(False), torch.no_grad():
        copy = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=each.device)
        return copy.copy_(value)
