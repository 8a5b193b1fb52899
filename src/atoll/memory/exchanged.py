"""A model under budgets whose steps are made elsewhere: at the shards of a parameter server.

Here are its values and its gradients, in whatever tier there is room; no optimizer's state. Gradients leave,
and new values come, in pieces that are cut in another way than the chunks here: each worker cuts chunks by
its own budgets, and what is exchanged is cut alike on all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby

import msgspec
import torch
from torch import Tensor, nn

from atoll.chunks import Chunk, ChunkMap
from atoll.core.memory import Budgets, MemoryFigures
from atoll.memory.fitted import Moving
from atoll.memory.gradients import ChunkGradients, Gradients, Slot, TrainedChunk
from atoll.memory.payloads import SUM, VALUES, Payloads
from atoll.moves.search import MemoryPlan
from atoll.tensors.changed import same_bits
from atoll.tensors.torch_compat import version_of


class _WatchedSlot(Slot):
    """One parameter's gradient; what a script writes into it is noticed."""

    _chunk: _WatchedChunk

    @contextmanager
    def lend(self, *, overwrites: bool = False) -> Iterator[Tensor]:
        with super().lend(overwrites=overwrites) as gradient:
            before = version_of(gradient)
            yield gradient
            if version_of(gradient) != before:
                self._chunk.edited.add(self._index)


class _WatchedChunk(ChunkGradients):
    """What is known of one chunk's gradients, and in which slots (`edited`) the script has changed them
    since others were put in their place."""

    slot_kind = _WatchedSlot

    def __init__(self, trained: TrainedChunk, payloads: Payloads) -> None:
        self.edited: set[int] = set()
        super().__init__(trained, payloads)

    @contextmanager
    def _with_edits(self, *, writes: bool) -> Iterator[Tensor]:
        if self.kept:
            with self.borrow(writes=False) as flat:
                for index, kept in self.kept.items():
                    if not torch.equal(self.trained.part(flat, index), kept):
                        self.edited.add(index)  # through a view that the script has
        with super()._with_edits(writes=writes) as flat:
            yield flat

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

    def _held(self, trained: TrainedChunk, payloads: Payloads) -> ChunkGradients:
        return _WatchedChunk(trained, payloads)

    def watched(self, chunk: int) -> _WatchedChunk:
        """Those of a chunk."""
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
        self.written: set[int] = set()  # chunks whose values the script may have changed
        self.engine.edited = self.written.add

    def _gradients_of(self, trained: Sequence[TrainedChunk]) -> Gradients:
        return WatchedGradients(trained, lambda _: self._store, self._gradient_came, self._room)

    def _homes(
        self, parameters: Sequence[nn.Parameter]
    ) -> Iterator[tuple[TrainedChunk, list[tuple[int, int]]]]:
        """Where these lie: each chunk here with (index, slot) of those that lie there in a row."""
        placed = [(*self._places[id(parameter)], index) for index, parameter in enumerate(parameters)]
        for _, found in groupby(placed, key=lambda place: place[0].chunk.id):
            members = list(found)
            yield members[0][0], [(index, slot) for _, slot, index in members]

    # Gradients

    def put_sums(self, chunk: Chunk, parameters: Sequence[nn.Parameter], values: Tensor) -> None:
        """Keep a group's sums, (chunk.extent,), beside the gradients."""
        for each, members in self._homes(parameters):
            key = each.chunk.id, SUM
            if not self._store.has(key):
                self._store.add(key, each.chunk.numel, each.dtype)
            with self._store.pin(key, writes=True) as flat, torch.no_grad():
                for index, slot in members:
                    each.run(flat, slot).copy_(_run(chunk, values, index))

    def read_sums(self, chunk: Chunk, parameters: Sequence[nn.Parameter]) -> Tensor:
        """A copy of them, (chunk.extent,)."""
        values = torch.zeros(chunk.extent, dtype=parameters[0].dtype)
        for each, members in self._homes(parameters):
            with self._store.pin((each.chunk.id, SUM)) as flat, torch.no_grad():
                for index, slot in members:
                    _run(chunk, values, index).copy_(each.run(flat, slot))
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
        """Whether the script has changed one of these gradients since they were put."""
        for each, members in self._homes(parameters):
            watched = self.gradients.watched(each.chunk.id)
            if watched.kept:
                with watched.settled():  # looks what came of the views that the script has
                    pass
            if any(slot in watched.edited for _, slot in members):
                return True
        return False

    def are_finite(self) -> bool | None:
        """Whether all gradients are, by their global norm; None: that one is not, which says nothing."""
        norm = self.gradients.norm(self.gradients.measures or 2.0)
        return True if bool(torch.isfinite(norm)) else None

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> tuple[Tensor, float]:
        """Clip the gradients; the norm before, and what they were multiplied by."""
        norm = self.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)
        return norm, float(torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0))

    # Values

    def read_values(self, chunk: Chunk, parameters: Sequence[nn.Parameter], into: Tensor) -> None:
        """Copy the values of these to their slots of `into`, (chunk.extent,); see `write_back`."""
        for each, members in self._homes(parameters):
            with self._store.pin((each.chunk.id, VALUES)) as flat, torch.no_grad():
                for index, slot in members:
                    _run(chunk, into, index).copy_(each.run(flat, slot))

    def write_back(self) -> None:
        """Hand what the script has written into parameters to the tiers: `written` says in which chunks that
        may be."""
        self.engine.write_back()

    def is_written(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether the script may have changed the values of a chunk in which one of these lies."""
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
