"""A model under budgets whose steps are made elsewhere: at the shards of a parameter server.

The model's values and gradients lie here, in whatever tier has room; the optimizer's state does not. There
are two layouts. Each worker cuts the chunks of its tiers by its own budgets. The chunks that are exchanged
are cut alike on all workers, so a gradient or a value is copied between the two, parameter by parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import msgspec
import torch
from torch import Tensor, nn

from atoll.chunks import Chunk, ChunkMap
from atoll.core.memory import Budgets, MemoryFigures
from atoll.memory.engine import parameter_bytes
from atoll.memory.fitted import Moving
from atoll.memory.gradients import ChunkGradients, ModelGradients, TrainedChunk
from atoll.memory.home import Home, HostHome
from atoll.memory.leaving import Leaving
from atoll.memory.payloads import SUM, VALUES, Payloads
from atoll.memory.states import ChunkStates
from atoll.memory.stepqueue import StepQueue
from atoll.moves.search import MemoryPlan
from atoll.tensors.changed import same_bits


class _WatchedChunk(ChunkGradients):
    """One chunk's gradients, with a record of the script's changes.

    Attributes:
        edited: slots whose gradient the script has changed since `put_gradients` last replaced it.
    """

    def __init__(self, trained: TrainedChunk, payloads: Payloads, steps: StepQueue, leaving: Leaving) -> None:
        self.edited: set[int] = set()
        super().__init__(trained, payloads, steps, leaving)

    def note_edit(self, index: int) -> None:
        self.edited.add(index)

    def take_in(self, flat: Tensor, index: int, kept: Tensor) -> None:
        if not torch.equal(self.trained.part(flat, index), kept):
            self.edited.add(index)  # through a view that the script has
        super().take_in(flat, index, kept)

    def replace(self, index: int, gradient: Tensor) -> None:
        super().replace(index, gradient)
        self.edited.add(index)

    def forget(self, index: int) -> None:
        if self.present[index]:
            self.edited.add(index)
        super().forget(index)

    def become(self, index: int, run: Tensor, measures: float | None) -> None:
        """Replace a slot's gradient, or its absence, by `run`: 1-D, (numel,), in the order of memory.

        Args:
            measures: the order of the norm that is taken of the new gradient; None for no norm.
        """
        self.arrive()
        with self.borrow(writes=True) as flat:
            part = self.trained.part(flat, index)
            self.trained.run(flat, index).copy_(run)
            if index in self.kept:
                self.kept[index].copy_(part)
            self.norms.pop(index, None)
            if measures is not None:
                self.norms[index] = torch.linalg.vector_norm(part, measures)
        self.present[index] = True


class WatchedGradients(ModelGradients):
    """Gradients that can be replaced by exchanged ones, and that record what the script changes."""

    def _held(
        self, trained: TrainedChunk, payloads: Payloads, steps: StepQueue, leaving: Leaving
    ) -> ChunkGradients:
        return _WatchedChunk(trained, payloads, steps, leaving)

    def watched(self, chunk: int) -> _WatchedChunk:
        """Return the watched gradients of a chunk."""
        each = self._chunks[chunk]
        assert isinstance(each, _WatchedChunk)
        return each

    @property
    def measures(self) -> float | None:
        """The order of the norm that is taken of each gradient as it arrives; None for no norm."""
        return self._measures


class Exchanged(Moving):
    """The model that `fit_exchanged` returns: whoever exchanges it reads its gradients and writes its values.

    Methods take a `Chunk` of the exchange's layout and that chunk's parameters, in the order of its slots.
    Values may be written only between `begin_values` and `end_values`, and not between a forward and the end
    of its backward.
    """

    gradients: WatchedGradients

    def __init__(
        self,
        model: nn.Module,
        budgets: Budgets,
        plan: MemoryPlan,
        chunk_map: ChunkMap,
    ) -> None:
        super().__init__(model, (), budgets, plan, chunk_map)
        self._places = {
            id(parameter): (each, slot)
            for each in self._trained
            for slot, parameter in enumerate(each.parameters)
        }

    def _gradients_of(
        self, trained: Sequence[TrainedChunk], beside: Mapping[int, nn.Parameter]
    ) -> ModelGradients:
        return WatchedGradients(trained, self._store, self._steps, self._gradient_came, self._room, beside)

    def _home_of(self, states: Mapping[int, ChunkStates]) -> Home:
        self._values = HostHome(self._store, self._steps, states)
        return self._values

    @property
    def written(self) -> set[int]:
        """The chunks here whose values the script may have changed since the last `end_values`."""
        return self._values.edited

    def _homes(
        self, parameters: Sequence[nn.Parameter]
    ) -> Iterator[tuple[TrainedChunk, list[tuple[int, int]]]]:
        """Yield each chunk here that holds some of `parameters`, with (index in `parameters`, slot in the
        chunk) pairs.

        Neighbours in `parameters` that lie in one chunk are yielded together; a chunk may be yielded more
        than once.
        """
        placed = [(*self._places[id(parameter)], index) for index, parameter in enumerate(parameters)]
        for _, found in groupby(placed, key=lambda place: place[0].chunk.id):
            members = list(found)
            yield members[0][0], [(index, slot) for _, slot, index in members]

    def _runs(
        self, kind: str, chunk: Chunk, parameters: Sequence[nn.Parameter], values: Tensor, *, writes: bool
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield two 1-D views for each parameter: its elements in the payload `kind` here, and in `values`,
        (chunk.extent,)."""
        for each, members in self._homes(parameters):
            with self._store.pin((each.chunk.id, kind), writes=writes) as flat:
                for index, slot in members:
                    yield each.run(flat, slot), _run(chunk, values, index)

    # Gradients

    @torch.no_grad()
    def put_sums(self, chunk: Chunk, parameters: Sequence[nn.Parameter], values: Tensor) -> None:
        """Keep the group's summed gradients of a chunk, `values` (chunk.extent,), beside the member's own
        gradients."""
        for each, _ in self._homes(parameters):
            if not self._store.has((each.chunk.id, SUM)):
                self._store.add((each.chunk.id, SUM), each.chunk.numel, each.dtype)
        for here, given in self._runs(SUM, chunk, parameters, values, writes=True):
            here.copy_(given)

    @torch.no_grad()
    def read_sums(self, chunk: Chunk, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Return a copy, (chunk.extent,), of the sums that `put_sums` kept."""
        values = torch.zeros(chunk.extent, dtype=parameters[0].dtype.to_real())
        for here, read in self._runs(SUM, chunk, parameters, values, writes=False):
            read.copy_(here)
        return values

    def present(self, parameters: Sequence[nn.Parameter]) -> list[bool]:
        """Return one flag for each parameter: whether it has a gradient."""
        places = [self._places[id(parameter)] for parameter in parameters]
        return [self.gradients.watched(each.chunk.id).present[slot] for each, slot in places]

    def read_gradients(
        self, chunk: Chunk, parameters: Sequence[nn.Parameter], present: Sequence[bool], into: Tensor
    ) -> None:
        """Copy the gradients of the parameters flagged in `present` to their slots of `into`,
        (chunk.extent,)."""
        for each, members in self._homes(parameters):
            wanted = [(index, slot) for index, slot in members if present[index]]
            if not wanted:
                continue
            with self.gradients.watched(each.chunk.id).settled() as flat, torch.no_grad():
                for index, slot in wanted:
                    _run(chunk, into, index).copy_(each.run(flat, slot))

    def put_gradients(
        self, chunk: Chunk, parameters: Sequence[nn.Parameter], present: Sequence[bool], values: Tensor
    ) -> None:
        """Replace the parameters' gradients: by the slots of `values`, (chunk.extent,), where `present`, else
        by None."""
        measures = self.gradients.measures
        for each, members in self._homes(parameters):
            watched = self.gradients.watched(each.chunk.id)
            for index, slot in members:
                if present[index]:
                    with torch.no_grad():
                        watched.become(slot, _run(chunk, values, index), measures)
                else:
                    watched.forget(slot)
                watched.edited.discard(slot)

    def edited(self, parameters: Sequence[nn.Parameter]) -> bool:
        """True if the script has changed one of these gradients since `put_gradients`."""
        for each, members in self._homes(parameters):
            watched = self.gradients.watched(each.chunk.id)
            if watched.kept:
                with watched.settled():  # takes in changes made through the script's views
                    pass
            if any(slot in watched.edited for _, slot in members):
                return True
        return False

    def are_finite(self) -> bool | None:
        """True if the gradients' global norm is finite; None if it is not, since it may overflow though all
        gradients are finite."""
        norm = self.gradients.norm(self.gradients.measures or 2.0)
        return True if bool(torch.isfinite(norm)) else None

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> tuple[Tensor, float]:
        """Clip the gradients; return the norm before, and the factor that they were multiplied by."""
        norm = self.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)
        return norm, float(torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0))

    # Values

    @torch.no_grad()
    def read_values(self, chunk: Chunk, parameters: Sequence[nn.Parameter], into: Tensor) -> None:
        """Copy the parameters' values from the tiers to their slots of `into`, (chunk.extent,); call
        `write_back` first."""
        for here, read in self._runs(VALUES, chunk, parameters, into, writes=False):
            read.copy_(here)

    def write_back(self) -> None:
        """Copy what the script has written into parameters on the device to the tiers, and add those chunks
        to `written`."""
        self.engine.write_back()

    def is_written(self, parameters: Sequence[nn.Parameter]) -> bool:
        """True if one of these parameters lies in a chunk whose values the script may have changed."""
        return any(self._places[id(parameter)][0].chunk.id in self.written for parameter in parameters)

    def begin_values(self) -> None:
        """Begin to replace the values: the copies on the device are out of date from here on."""
        self._before_step([each.chunk.id for each in self._trained])
        self._new: list[nn.Parameter] = []  # those whose values have changed

    def write_values(self, chunk: Chunk, parameters: Sequence[nn.Parameter], values: Tensor) -> None:
        """Write the slots of `values`, (chunk.extent,), into the parameters' values."""
        for each, members in self._homes(parameters):
            with self._store.pin((each.chunk.id, VALUES), writes=True) as flat, torch.no_grad():
                for index, slot in members:
                    own, new = each.run(flat, slot), _run(chunk, values, index)
                    if not same_bits(own, new):
                        own.copy_(new)
                        self._new.append(each.parameters[slot])

    def end_values(self, *, stepped: bool) -> None:
        """Finish the replacement: raise the changed parameters' autograd version, and refresh their copies on
        the device.

        Args:
            stepped: True if an optimizer step of the script made the new values.
        """
        if self._new:  # for autograd, too, they are other values now
            torch.autograd.graph.increment_version(self._new)
        self._new = []
        self.written.clear()
        if stepped:
            self._after_step()
        else:
            self.engine.refresh(self._stepped)

    def _plain_bytes(self) -> int:
        return parameter_bytes(self.engine)

    def stats(self) -> MemoryFigures:
        figures = super().stats()
        return msgspec.structs.replace(figures, host_peak=figures.host_peak + self.plan.staging_bytes)


def _run(chunk: Chunk, flat: Tensor, index: int) -> Tensor:
    """Return a slot's elements of `flat`, (chunk.extent,): 1-D, in the order of memory."""
    slot = chunk.slots[index]
    return flat[slot.offset : slot.offset + slot.numel]
