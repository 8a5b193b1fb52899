"""A model that is stepped elsewhere: its values are lent, in host memory that somebody else keeps, and its
gradients are left there.

Who steps it lends the newest values from time to time (`LentModel.take`); until the next ones they do not
change. So a device under a budget reads its chunks from there, and writes nothing back: what a script writes
into parameters lies in memory of its own, outside of the budgets, until new values come. The lender's chunks
are its own: chunks of the device are of another size, and each parameter is found in both.
Source: docs/memory.md, "Lent values".
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeAlias

import msgspec
import torch
from torch import Tensor, nn

from atoll.chunks import ChunkMap, lay_out_memory
from atoll.core.memory import Budgets, MemoryFigures
from atoll.memory import planning
from atoll.memory.fitted import Moving
from atoll.memory.gradients import Gradients, TrainedChunk
from atoll.memory.home import Home, HostHome, copied
from atoll.memory.initialising import let_go
from atoll.memory.interrupts import uninterrupted
from atoll.memory.payloads import VALUES, Key, Payloads, TensorPayloads
from atoll.memory.states import ChunkStates
from atoll.memory.stays import Stay
from atoll.memory.stepqueue import StepQueue
from atoll.moves.search import MemoryPlan
from atoll.tensors.changed import same_bits

Flats: TypeAlias = Mapping[int, Tensor]  # by the lender's chunk: its values or gradients, (extent,)


class Turns:
    """The lender's payloads "gradient", in slots that are written in turn: while one is read, the next fills.

    `turn(slot)` says which it is from now on. What lies in another one is copied to it when it is pinned
    next: who has read a gradient may write to it too. Who calls `turn` sees to it that nobody else reads the
    slot any more by then. It is the `Payloads` of all chunks; calls may come from several threads.
    """

    def __init__(self, slot: Flats) -> None:
        self._slot = slot
        self._at: dict[int, Tensor] = {}  # by chunk that holds something: where it is
        self._lock = threading.Lock()

    def turn(self, slot: Flats) -> None:
        """From now on `slot` is written."""
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
    """Where each parameter lies in the lender's chunks, and the values that are lent now."""

    def __init__(self, chunk_map: ChunkMap, flats: Flats) -> None:
        self.chunk_map, self._flats = chunk_map, dict(flats)

    def lend(self, flats: Flats) -> None:
        """From now on, of these chunks, these values count."""
        self._flats.update(flats)

    def run(self, parameter: int) -> Tensor:
        """The values of a parameter, by its number, 1-D, in the order of memory; nobody may write there."""
        chunk, slot = self.chunk_map.places[parameter]
        place = self.chunk_map.chunks[chunk].slots[slot]
        return self._flats[chunk][place.offset : place.offset + place.numel]


class LentHome(Home):
    """The home of chunks that are lent. What the script has written is in payloads of its own, in host memory
    outside of all budgets, for as long as it differs from what is lent."""

    def __init__(self, loan: Loan) -> None:
        self._loan, self._own = loan, HostHome(TensorPayloads(), StepQueue())
        self._written: dict[int, TrainedChunk] = {}  # by chunk

    def take(self, each: TrainedChunk) -> None:
        self._own.add(each)
        for parameter in each.parameters:
            let_go(parameter)

    def wait_stepped(self, chunk: int, *, tells: bool = True) -> None:
        """Nothing is stepped here."""

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
        return copied(each, slot, lent.as_strided(like.shape, like.stride(), lent.storage_offset()))

    def written_back(self, each: TrainedChunk) -> None:
        if not any(True for _ in self._differing(each)):
            self._forget(each.chunk.id)

    def changed(self) -> list[str]:
        """The parameters whose values the script has changed, and not changed back, by what was written
        back."""
        return [each.names[slot] for each in self._written.values() for slot in self._differing(each)]

    def lend(self, chunks: Sequence[int], flats: Flats) -> None:
        """New values of these chunks; no copy from the former ones is under way."""
        self._loan.lend(flats)
        for chunk in self._written.keys() & set(chunks):
            self._forget(chunk)

    def _differing(self, each: TrainedChunk) -> Iterator[int]:
        """The slots of a written chunk that are not as they are lent."""
        with self._own.values(each) as values:
            for slot, place in enumerate(each.chunk.slots):
                # By their bits: NaN is itself.
                lent, own = self._loan.run(place.parameter), each.run(values, slot)
                if not torch.equal(lent.view(torch.uint8), own.view(torch.uint8)):
                    yield slot

    def _forget(self, chunk: int) -> None:
        del self._written[chunk]
        self._own.payloads.drop((chunk, VALUES))


class LentModel(Moving):
    """A model within a device's budget whose values are lent, and whose steps are made elsewhere.

    `chunk_map` is the lender's, `values` what it lends at first, of every chunk. `gradients` is where
    gradients are left, by the lender's chunks; `peak` what all of that takes of host memory, in bytes.
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
    ) -> None:
        self._loan, self._left, self._peak = Loan(chunk_map, values), gradients, peak
        self._lent_home = LentHome(self._loan)
        super().__init__(model, None, budgets, plan, layout_of(model, plan))

    def _home_of(self, states: Mapping[int, ChunkStates]) -> Home:  # noqa: ARG002
        return self._lent_home

    def _gradients_of(self, trained: Sequence[TrainedChunk], beside: Mapping[int, nn.Parameter]) -> Gradients:
        del trained  # they lie by the lender's chunks
        parameters = dict(self.model.named_parameters())
        names, chunks = list(parameters), []
        for chunk in self._loan.chunk_map.trainable:
            held = [names[slot.parameter] for slot in chunk.slots]
            chunks.append(TrainedChunk(chunk, held, [parameters[name] for name in held]))
        return Gradients(chunks, self._left, self._steps, self._gradient_came, self._room, beside)

    @property
    def choices(self) -> list[tuple[str, str, str]]:
        mine = [each for each in super().choices if each[0] != "memory.host"]
        return [("memory.host", "lent", "who steps the model keeps its values in host memory"), *mine]

    def changed(self) -> list[str]:
        """The parameters that the script has changed since they were taken, and not changed back."""
        with self.engine.lock:
            self.engine.write_back()
            return self._lent_home.changed()

    @uninterrupted
    def take(self, values: Flats) -> None:
        """Go on with these values of the lender's trained chunks, or of all of its chunks. When it returns,
        nobody reads the former ones."""
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
        """A step of the script is over: what it used is expected of the next."""
        self._step_ended()

    def _plain_bytes(self) -> int:
        return sum(parameter.nbytes for each in self.engine.chunks.values() for parameter in each.parameters)

    def stats(self) -> MemoryFigures:
        return msgspec.structs.replace(super().stats(), host_peak=self._peak)


def layout_of(model: nn.Module, plan: MemoryPlan) -> ChunkMap:
    """The chunks of the device: who steps where is nothing to them, so param groups share them."""
    return lay_out_memory(planning.specs_for(model, None), chunk_bytes=plan.chunk_bytes)
