"""A model under budgets whose steps are made elsewhere: at the shards of a parameter server.

Here are its values and its gradients, in whatever tier there is room; no optimizer's state. Gradients leave,
and new values come, in pieces that are cut in another way than the chunks here: each worker cuts chunks by
its own budgets, and what is exchanged is cut alike on all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import msgspec
import torch
from torch import Tensor, nn

from atoll.chunks import Chunk, ChunkMap
from atoll.core.memory import Budgets, MemoryFigures
from atoll.memory.fitted import Moving
from atoll.memory.gradients import ChunkGradients, Gradients, TrainedChunk
from atoll.memory.home import Home, HostHome
from atoll.memory.leaving import Leaving
from atoll.memory.payloads import SUM, VALUES, Payloads
from atoll.memory.states import ChunkStates
from atoll.memory.stepqueue import StepQueue
from atoll.moves.search import MemoryPlan
from atoll.tensors.changed import same_bits


class _WatchedChunk(ChunkGradients):
    """What is known of one chunk's gradients, and in which slots (`edited`) the script has changed them
    since others were put in their place."""

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
        """Let a slot's gradient be this, 1-D in the order of memory, whatever it was."""
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


class WatchedGradients(Gradients):
    """Gradients that others' may be put in the place of."""

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
        """The kind of norm that is taken as gradients come."""
        return self._measures


class Exchanged(Moving):
    """What `fit_exchanged` gives: the model in chunks, whose gradients are read and whose values are written
    by whoever exchanges them, `Chunk` by `Chunk` of a layout of theirs.

    Values are written between `begin_values` and `end_values` alone, and not between a forward and the end of
    its backward.
    """

    gradients: WatchedGradients

    def __init__(
        self,
        model: nn.Module,
        budgets: Budgets,
        plan: MemoryPlan,
        chunk_map: ChunkMap,
    ) -> None:
        super().__init__(model, None, budgets, plan, chunk_map)
        self._places = {
            id(parameter): (each, slot)
            for each in self._trained
            for slot, parameter in enumerate(each.parameters)
        }

    def _gradients_of(self, trained: Sequence[TrainedChunk], beside: Mapping[int, nn.Parameter]) -> Gradients:
        return WatchedGradients(trained, self._store, self._steps, self._gradient_came, self._room, beside)

    def _home_of(self, states: Mapping[int, ChunkStates]) -> Home:
        self._values = HostHome(self._store, self._steps, states)
        return self._values

    @property
    def written(self) -> set[int]:
        """Chunks whose values the script may have changed since values were written here."""
        return self._values.edited

    def _homes(
        self, parameters: Sequence[nn.Parameter]
    ) -> Iterator[tuple[TrainedChunk, list[tuple[int, int]]]]:
        """Where these lie: each chunk here with (index, slot) of those that lie there in a row."""
        placed = [(*self._places[id(parameter)], index) for index, parameter in enumerate(parameters)]
        for _, found in groupby(placed, key=lambda place: place[0].chunk.id):
            members = list(found)
            yield members[0][0], [(index, slot) for _, slot, index in members]

    def _runs(
        self, kind: str, chunk: Chunk, parameters: Sequence[nn.Parameter], values: Tensor, *, writes: bool
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """For each parameter its run in a payload of this kind, and the one in `values`, (chunk.extent,)."""
        for each, members in self._homes(parameters):
            with self._store.pin((each.chunk.id, kind), writes=writes) as flat:
                for index, slot in members:
                    yield each.run(flat, slot), _run(chunk, values, index)

    # Gradients

    @torch.no_grad()
    def put_sums(self, chunk: Chunk, parameters: Sequence[nn.Parameter], values: Tensor) -> None:
        """Keep a group's sums, (chunk.extent,), beside the gradients."""
        for each, _ in self._homes(parameters):
            if not self._store.has((each.chunk.id, SUM)):
                self._store.add((each.chunk.id, SUM), each.chunk.numel, each.dtype)
        for here, given in self._runs(SUM, chunk, parameters, values, writes=True):
            here.copy_(given)

    @torch.no_grad()
    def read_sums(self, chunk: Chunk, parameters: Sequence[nn.Parameter]) -> Tensor:
        """A copy of them, (chunk.extent,)."""
        values = torch.zeros(chunk.extent, dtype=parameters[0].dtype)
        for here, read in self._runs(SUM, chunk, parameters, values, writes=False):
            read.copy_(here)
        return values

    def present(self, parameters: Sequence[nn.Parameter]) -> list[bool]:
        """Which of them have a gradient."""
        places = [self._places[id(parameter)] for parameter in parameters]
        return [self.gradients.watched(each.chunk.id).present[slot] for each, slot in places]

    def read_gradients(
        self, chunk: Chunk, parameters: Sequence[nn.Parameter], present: Sequence[bool], into: Tensor
    ) -> None:
        """Copy the gradients of those that are `present` to their slots of `into`, (chunk.extent,)."""
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
        """Let these be the gradients: the slots of `values`, (chunk.extent,), of those that are `present`,
        and None of the others."""
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
        """True if the script has changed one of these gradients since they were put."""
        for each, members in self._homes(parameters):
            watched = self.gradients.watched(each.chunk.id)
            if watched.kept:
                with watched.settled():  # looks what came of the views that the script has
                    pass
            if any(slot in watched.edited for _, slot in members):
                return True
        return False

    def are_finite(self) -> bool | None:
        """True if all gradients are finite, by their global norm; None if the norm is not, which decides
        nothing."""
        norm = self.gradients.norm(self.gradients.measures or 2.0)
        return True if bool(torch.isfinite(norm)) else None

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> tuple[Tensor, float]:
        """Clip the gradients; the norm before, and what they were multiplied by."""
        norm = self.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)
        return norm, float(torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0))

    # Values

    @torch.no_grad()
    def read_values(self, chunk: Chunk, parameters: Sequence[nn.Parameter], into: Tensor) -> None:
        """Copy the values of these to their slots of `into`, (chunk.extent,); see `write_back`."""
        for here, read in self._runs(VALUES, chunk, parameters, into, writes=False):
            read.copy_(here)

    def write_back(self) -> None:
        """Hand what the script has written into parameters to the tiers: `written` says in which chunks that
        may be."""
        self.engine.write_back()

    def is_written(self, parameters: Sequence[nn.Parameter]) -> bool:
        """True if the script may have changed the values of a chunk in which one of these lies."""
        return any(self._places[id(parameter)][0].chunk.id in self.written for parameter in parameters)

    def begin_values(self) -> None:
        """All values are about to change, as one."""
        self._before_step([each.chunk.id for each in self._trained])
        self._new: list[nn.Parameter] = []  # those whose values have changed

    def write_values(self, chunk: Chunk, parameters: Sequence[nn.Parameter], values: Tensor) -> None:
        """Let these have new values: the slots of `values`, (chunk.extent,)."""
        for each, members in self._homes(parameters):
            with self._store.pin((each.chunk.id, VALUES), writes=True) as flat, torch.no_grad():
                for index, slot in members:
                    own, new = each.run(flat, slot), _run(chunk, values, index)
                    if not same_bits(own, new):
                        own.copy_(new)
                        self._new.append(each.parameters[slot])

    def end_values(self, *, stepped: bool) -> None:
        """All have come; `stepped`: by a step that the script has made."""
        if self._new:  # for autograd, too, they are other values now
            torch.autograd.graph.increment_version(self._new)
        self._new = []
        self.written.clear()
        if stepped:
            self._after_step()
        else:
            self.engine.refresh(self._stepped)

    def _plain_bytes(self) -> int:
        return sum(parameter.nbytes for each in self.engine.chunks.values() for parameter in each.parameters)

    def stats(self) -> MemoryFigures:
        figures = super().stats()
        return msgspec.structs.replace(figures, host_peak=figures.host_peak + self.plan.staging_bytes)


def _run(chunk: Chunk, flat: Tensor, index: int) -> Tensor:
    """A slot's elements, 1-D, in the order of memory."""
    slot = chunk.slots[index]
    return flat[slot.offset : slot.offset + slot.numel]
