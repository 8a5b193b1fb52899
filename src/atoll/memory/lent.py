"""A model that is stepped elsewhere: a lender keeps its values in host memory, and takes its gradients.

The lender steps the model, and lends new values from time to time (`LentModel.take`). Between two loans the
values do not change, so a device under a budget reads its chunks from them and writes nothing back. Values
that a script writes lie in payloads of their own, outside all budgets, until new values come. The lender's
chunks and the device's differ in size; each parameter has a place in both. Source: docs/memory.md, "Lent
values".
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias

import msgspec
import torch
from torch import Tensor, nn

from atoll.chunks import ChunkMap, lay_out_memory
from atoll.core.memory import Budgets, MemoryFigures
from atoll.memory import planning
from atoll.memory.engine import parameter_bytes
from atoll.memory.fitted import Moving
from atoll.memory.gradients import ChunkGradients, GradientSlot, ModelGradients, TrainedChunk
from atoll.memory.home import Home, HostHome, copied
from atoll.memory.initialising import let_go
from atoll.memory.interrupts import uninterrupted
from atoll.memory.leaving import Leaving
from atoll.memory.payloads import VALUES, Key, Payloads, TensorPayloads
from atoll.memory.proxies import LostSource
from atoll.memory.states import ChunkStates
from atoll.memory.stays import Stay
from atoll.memory.stepqueue import StepQueue
from atoll.memory.untilread import Hiding, gone
from atoll.moves.search import MemoryPlan
from atoll.tensors.binding import laid
from atoll.tensors.changed import same_bits

Flats: TypeAlias = Mapping[int, Tensor]  # by the lender's chunk: values or gradients, (extent,)


class Turns:
    """The lender's payloads "gradient", in slots of memory that are written in turn: one fills while another
    is read.

    A chunk's gradient that lies in an earlier slot is copied to the present one when it is next pinned, since
    whoever reads a gradient may also write to it. It is the `Payloads` of all chunks. Its methods may be
    called from several threads.
    """

    def __init__(self, slot: Flats) -> None:
        self._slot = slot
        self._at: dict[int, Tensor] = {}  # by chunk with a gradient: where the gradient lies
        self._lock = threading.Lock()

    def turn(self, slot: Flats) -> None:
        """Write gradients to `slot` from now on. Nobody may read that slot any more."""
        with self._lock:
            self._slot = slot

    def add(self, key: Key, numel: int, dtype: torch.dtype) -> None:
        """Do nothing: all chunks are there already."""

    def pin(
        self, key: Key, *, writes: bool = False, overwrites: bool = False
    ) -> AbstractContextManager[Tensor]:
        del writes
        chunk = key[0]
        with self._lock, torch.no_grad():
            now = self._slot[chunk]
            before, self._at[chunk] = self._at.get(chunk, now), now
            if before.data_ptr() != now.data_ptr() and not overwrites:
                now.copy_(before)
            return nullcontext(now)

    def drop(self, key: Key) -> None:
        with self._lock:
            self._at.pop(key[0], None)


class Loan:
    """The values that are lent now, and each parameter's place in the lender's chunks."""

    def __init__(self, chunk_map: ChunkMap, flats: Flats) -> None:
        self.chunk_map, self._flats = chunk_map, dict(flats)

    def lend(self, flats: Flats) -> None:
        """Replace the values of the chunks in `flats`."""
        self._flats.update(flats)

    def run(self, parameter: int) -> Tensor:
        """Return a parameter's values, by its number: 1-D, in the order of memory. Nobody may write there."""
        chunk, slot = self.chunk_map.places[parameter]
        place = self.chunk_map.chunks[chunk].slots[slot]
        return self._flats[chunk][place.offset : place.offset + place.numel]


class LentHome(Home):
    """The home of chunks that are lent.

    Values that the script has written lie in payloads of their own, in host memory outside all budgets, for
    as long as they differ from the lent ones.
    """

    def __init__(self, loan: Loan) -> None:
        self._loan, self._own = loan, HostHome(TensorPayloads(), StepQueue())
        self._written: dict[int, TrainedChunk] = {}  # chunks with values of the script, by id

    def take(self, each: TrainedChunk) -> None:
        self._own.add(each)
        for parameter in each.parameters:
            let_go(parameter)

    def wait_stepped(self, chunk: int, *, tells: bool = True) -> None:
        """Do nothing: no step is made here."""

    @contextmanager
    def values(self, each: TrainedChunk, *, writes: bool = False, tells: bool = True) -> Iterator[Tensor]:
        chunk = each.chunk.id
        if writes and chunk not in self._written:
            with self._own.values(each, overwrites=True) as values:
                for slot, place in enumerate(each.chunk.slots):
                    each.run(values, slot).copy_(self._loan.run(place.parameter))
            self._written[chunk] = each
        with self._own.values(each, writes=writes, tells=tells) as values:
            yield values

    def bring(self, stay: Stay, *, tells: bool = True) -> None:
        if stay.each.chunk.id in self._written:
            self._own.bring(stay, tells=tells)
            return
        for slot, place in enumerate(stay.each.chunk.slots):
            stay.bring_slot(slot, self._loan.run(place.parameter))

    def value(self, each: TrainedChunk, slot: int) -> Tensor:
        if each.chunk.id in self._written:
            return self._own.value(each, slot)
        like, lent = each.likes[slot], self._loan.run(each.chunk.slots[slot].parameter)
        return copied(each, slot, laid(lent, like))

    def written_back(self, each: TrainedChunk) -> None:
        if not any(True for _ in self._differing(each)):
            self._forget(each.chunk.id)

    def changed(self) -> list[str]:
        """Return the names of parameters whose written-back values differ from the lent ones."""
        return [each.names[slot] for each in self._written.values() for slot in self._differing(each)]

    def lend(self, chunks: Sequence[int], flats: Flats) -> None:
        """Replace the values of these chunks by `flats`. No copy from the former values may be under way."""
        self._loan.lend(flats)
        for chunk in self._written.keys() & set(chunks):
            self._forget(chunk)

    def _differing(self, each: TrainedChunk) -> Iterator[int]:
        """Yield the slots of a written chunk whose values differ from the lent ones."""
        with self._own.values(each) as values:
            for slot, place in enumerate(each.chunk.slots):
                # Compared by their bits, so that NaN equals NaN.
                lent, own = self._loan.run(place.parameter), each.run(values, slot)
                if not torch.equal(lent.view(torch.uint8), own.view(torch.uint8)):
                    yield slot

    def _forget(self, chunk: int) -> None:
        del self._written[chunk]
        self._own.payloads.drop((chunk, VALUES))


class LentSlot(GradientSlot):
    """One parameter's gradient, which becomes the mean before the script uses it."""

    _chunk: LentGradients

    @contextmanager
    def lend(self, *, overwrites: bool = False) -> Iterator[Tensor]:
        self._chunk.hiding.use(self._chunk.trained.chunk.id, self._index, overwrites=overwrites)
        with super().lend(overwrites=overwrites) as gradient:
            yield gradient

    def see(self) -> Tensor:
        if self._index in self._chunk.graphs:  # then the script gets a plain tensor, whose use is not seen
            self._chunk.hiding.use(self._chunk.trained.chunk.id, self._index)
        return super().see()

    def leave(self) -> None:
        chunk, proxy = self._chunk, self.proxy() if self.proxy is not None else None
        if proxy is not None and chunk.hiding.hides(chunk.trained.chunk.id, self._index):
            proxy.source = LostSource(gone())  # nobody asks for the mean of a gradient that is dropped
            self.proxy = None
        super().leave()


class LentGradients(ChunkGradients):
    """One chunk's gradients, which may be hidden from the script."""

    slot_kind = LentSlot

    def __init__(
        self,
        trained: TrainedChunk,
        payloads: Payloads,
        steps: StepQueue,
        leaving: Leaving,
        hiding: Hiding,
    ) -> None:
        super().__init__(trained, payloads, steps, leaving)
        self.hiding = hiding

    def show(self, mean: Tensor) -> None:
        """Overwrite the gradients by those of `mean`, (extent,), but for those that the script has
        overwritten."""
        with self.settled(writes=True) as flat:
            for slot, here in enumerate(self.present):
                if here and self.hiding.may_become(self.trained.chunk.id, slot):
                    self.trained.run(flat, slot).copy_(self.trained.run(mean, slot))
                    if slot in self.kept:
                        self.kept[slot].copy_(self.trained.part(flat, slot))
        self.norms.clear()
        self.changes += 1


class HiddenGradients(ModelGradients):
    """The gradients of a lent model, which its lender may hide from the script until it uses one."""

    def __init__(self, hiding: Hiding, chunks: Sequence[TrainedChunk], *places: Any, **calls: Any) -> None:
        self._hiding = hiding
        super().__init__(chunks, *places, **calls)

    def _held(
        self, trained: TrainedChunk, payloads: Payloads, steps: StepQueue, leaving: Leaving
    ) -> ChunkGradients:
        return LentGradients(trained, payloads, steps, leaving, self._hiding)

    def show(self, chunk: int, mean: Tensor) -> None:
        """Overwrite a chunk's gradients by their mean."""
        held = self._chunks[chunk]
        assert isinstance(held, LentGradients)
        held.show(mean)


class LentModel(Moving):
    """A model within a device's budget whose values are lent, and whose steps are made elsewhere.

    Args:
        chunk_map: the lender's layout.
        values: the first values, of every chunk of the lender's.
        gradients: where gradients are left, by the lender's chunks.
        peak: bytes of host memory that values and gradients take.
        hiding: gradients that are hidden from the script.
    """

    def __init__(
        self,
        model: nn.Module,
        budgets: Budgets,
        plan: MemoryPlan,
        chunk_map: ChunkMap,
        values: Flats,
        gradients: Payloads,
        peak: int,
        hiding: Hiding,
    ) -> None:
        self._loan, self._left, self._peak = Loan(chunk_map, values), gradients, peak
        self._hiding = hiding
        self._lent_home = LentHome(self._loan)
        super().__init__(model, (), budgets, plan, layout_of(model, plan))

    def _home_of(self, states: Mapping[int, ChunkStates]) -> Home:  # noqa: ARG002
        return self._lent_home

    def _gradients_of(
        self, trained: Sequence[TrainedChunk], beside: Mapping[int, nn.Parameter]
    ) -> ModelGradients:
        del trained  # they lie by the lender's chunks
        parameters = dict(self.model.named_parameters())
        names, chunks = list(parameters), []
        for chunk in self._loan.chunk_map.trainable:
            held = [names[slot.parameter] for slot in chunk.slots]
            chunks.append(TrainedChunk(chunk, held, [parameters[name] for name in held]))
        self._hidden = HiddenGradients(
            self._hiding, chunks, self._left, self._steps, self._gradient_came, self._room, beside
        )
        return self._hidden

    def show_mean(self, chunk: int, mean: Tensor) -> None:
        """Overwrite the gradients of one of the lender's chunks by `mean`, (extent,), in host memory."""
        self._hidden.show(chunk, mean)

    @property
    def choices(self) -> list[tuple[str, str, str]]:
        mine = [each for each in super().choices if each[0] != "memory.host"]
        return [("memory.host", "lent", "who steps the model keeps its values in host memory"), *mine]

    def changed(self) -> list[str]:
        """Return the names of parameters that the script has changed since `take`, and not changed back."""
        with self.engine.lock:
            self.engine.write_back()
            return self._lent_home.changed()

    @uninterrupted
    def take(self, values: Flats) -> None:
        """Train on with new values: of the lender's trained chunks, or of all of its chunks.

        When it returns, nobody reads the former values.
        """
        is_all = len(values) == len(self._loan.chunk_map.chunks)
        taken = self.engine.chunks.values() if is_all else self._trained
        ids = [each.chunk.id for each in taken]
        self._owners.check()
        numbers = [
            (slot.parameter, parameter)
            for each in taken
            for slot, parameter in zip(each.chunk.slots, each.parameters, strict=True)
        ]
        former = [self._loan.run(number) for number, _ in numbers]
        self.engine.out_of_date(ids)
        with self.engine.lock:
            self._lent_home.lend(ids, values)
        changed = [
            parameter
            for (number, parameter), before in zip(numbers, former, strict=True)
            if not same_bits(before, self._loan.run(number))
        ]
        if changed:
            torch.autograd.graph.increment_version(changed)
        self.engine.refresh(ids)

    @uninterrupted
    def step_ended(self) -> None:
        """End a step of the script: its order of uses is expected of the next step."""
        self._step_ended()

    def _plain_bytes(self) -> int:
        return parameter_bytes(self.engine)

    def stats(self) -> MemoryFigures:
        return msgspec.structs.replace(super().stats(), host_peak=self._peak)


def layout_of(model: nn.Module, plan: MemoryPlan) -> ChunkMap:
    """Return the layout of the device's chunks. No step is made here, so parameters of different param groups
    share chunks."""
    return lay_out_memory(planning.specs_for(model, ()), chunk_bytes=plan.chunk_bytes)
