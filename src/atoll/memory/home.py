"""Homes of chunks' values outside the device: payloads of host memory, which are stepped there.
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
    """What an `Engine` brings chunks from, and tells of what the script writes. All methods may be called
    from several threads."""

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

    def written(self, chunk: int) -> None:
        """The script has surely written to a chunk's values, wherever they lie."""
        del chunk  # nobody else has them

    def written_back(self, each: TrainedChunk) -> None:
        """What the script has written, or may have, was put into `values`."""

    def must_tell(self, chunk: int) -> bool:  # noqa: ARG002
        """True if writes past autograd's count (`p.data.mul_()`) are to be `written` too, for a checksum
        whenever the chunk's memory is given out."""
        return False


class HostHome(Home):
    """A home in payloads. `steps` are the optimizer's, and `states` what it keeps for the chunks that are
    stepped here. `sharing` is what other members hold of the chunks, if any do."""

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
        """Make room for a chunk's values, with anything in it."""
        self.payloads.add((each.chunk.id, VALUES), each.chunk.numel, each.dtype)

    def wait_stepped(self, chunk: int, *, tells: bool = True) -> None:
        self._steps.wait_stepped(chunk, tells=tells)

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
            self._sharing.written(chunk)

    def written_back(self, each: TrainedChunk) -> None:
        chunk = each.chunk.id
        self.edited.add(chunk)
        if chunk in self._states:
            self.wait_stepped(chunk)
            self._states[chunk].follow_values()

    def must_tell(self, chunk: int) -> bool:
        return self._sharing is not None and not self._sharing.holds_all(chunk)


def copied(each: TrainedChunk, slot: int, value: Tensor) -> Tensor:
    """Copy a parameter's value to ordinary memory of its device."""
    like = each.likes[slot]
    with torch.inference_mode(False), torch.no_grad():
        copy = torch.empty_strided(like.shape, like.stride(), dtype=each.dtype, device=each.device)
        return copy.copy_(value)
