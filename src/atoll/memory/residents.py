"""The chunks that lie on the device, each at its place in the arena. Source: docs/memory.md, "Moves"."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from atoll.memory.arena import Arena
from atoll.memory.gradients import TrainedChunk
from atoll.memory.parameters import place_of, put, take_over
from atoll.memory.saved import ADDRESSES, ChunkOwner, ParameterSlot
from atoll.memory.stays import Stay, stand_ins


class Residents:
    """The places of parameters: in the arena, or at stand-ins while their chunk is away.

    Args:
        owner: the engine, to which saved tensors of these chunks belong.

    Attributes:
        here: the stays of chunks that are resident or on their way, by chunk.
    """

    def __init__(self, chunks: Mapping[int, TrainedChunk], arena: Arena, owner: ChunkOwner) -> None:
        self._chunks, self._arena, self._owner = chunks, arena, owner
        self.here: dict[int, Stay] = {}
        self._stays: dict[tuple[int, int], Stay] = {}  # by chunk and first block
        self._absent = {chunk: stand_ins(each) for chunk, each in chunks.items()}

    def take_over(self, each: TrainedChunk) -> None:
        """Make a chunk's parameters `ChunkParameter`s that lie at stand-ins."""
        for slot, parameter in enumerate(each.parameters):
            place = ParameterSlot(self._owner, each.chunk.id, slot)
            take_over(parameter, place)
            stand_in = self._absent[each.chunk.id][slot]
            put(parameter, stand_in)
            ADDRESSES.add(stand_in.untyped_storage().data_ptr(), place, absent=True)

    def blocks(self, chunk: int) -> int:
        """Return the number of the arena's blocks that a chunk takes."""
        each = self._chunks[chunk]
        return self._arena.blocks_for(each.chunk.numel * each.dtype.itemsize)

    def enter(self, chunk: int, place: int) -> Stay:
        """Give the chunk a place, which does not have its values yet: the stay is not ready."""
        block = self._arena.take(self.blocks(chunk), at=place)
        stay = self._stays.get((chunk, place))
        if stay is None:
            # The script may be in inference mode now, and train the parameters later.
            with torch.inference_mode(False), torch.no_grad():
                stay = self._stays[chunk, place] = Stay(self._chunks[chunk], block)
        stay.block = block
        self.here[chunk] = stay
        return stay

    def lay(self, stay: Stay) -> None:
        """Point the parameters at their chunk's memory, which has the values by now."""
        each = stay.each
        with torch.inference_mode(False):
            _put(each, stay.views)
        for slot, address in enumerate(stay.addresses):
            ADDRESSES.add(address, ParameterSlot(self._owner, each.chunk.id, slot))
        stay.begin()

    def let_go(self, chunk: int) -> None:
        """Take a chunk off the device. What its memory holds is lost."""
        stay = self.here[chunk]
        self._take_away(stay)
        del self.here[chunk]
        self._arena.give(stay.block)

    def keep_ready(self) -> dict[int, int]:
        """Drop the stays that are not ready; return the first block of the others, by chunk."""
        for chunk, stay in list(self.here.items()):
            if not stay.ready:
                self._take_away(stay)
                del self.here[chunk]
        self._arena.keep([stay.block for stay in self.here.values()])
        return {chunk: stay.block.first for chunk, stay in self.here.items()}

    def set_apart(self, stay: Stay, slot: int) -> None:
        """Move a parameter to new, undefined memory. Whoever has views of the old memory keeps it."""
        ADDRESSES.remove(stay.addresses[slot])
        put(stay.each.parameters[slot], stay.set_apart(slot))
        ADDRESSES.add(stay.addresses[slot], ParameterSlot(self._owner, stay.each.chunk.id, slot))

    def _take_away(self, stay: Stay) -> None:
        stay.ready = False  # first: if this is cut short, the stay is not written back
        for address in stay.addresses:
            ADDRESSES.remove(address)
        _put(stay.each, self._absent[stay.each.chunk.id])
        stay.coming = None
        if stay.is_apart:
            self._stays.pop((stay.each.chunk.id, stay.block.first), None)

    def forget(self) -> None:
        """Forget all stays and stand-ins. Parameters that were not given back have no values any more."""
        for stand_in in itertools.chain(*self._absent.values()):
            ADDRESSES.remove(stand_in.untyped_storage().data_ptr())
        for stay in self.here.values():
            for address in stay.addresses:
                ADDRESSES.remove(address)
        self.here.clear()
        self._stays.clear()


def _put(each: TrainedChunk, memory: Iterable[Tensor]) -> None:
    """Point the parameters at `memory`, except those that an earlier `close` gave back before it failed."""
    for parameter, part in zip(each.parameters, memory, strict=True):
        if place_of(parameter) is not None:
            put(parameter, part)
