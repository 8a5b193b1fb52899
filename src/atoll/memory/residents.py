"""The chunks that lie on the device, each at its place in the arena. Source: docs/memory.md, "Moves"."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from atoll.memory.arena import Arena
from atoll.memory.gradients import TrainedChunk
from atoll.memory.parameters import place_of, put, take_over
from atoll.memory.saved import ADDRESSES, Owner, Place
from atoll.memory.stays import Stay, stand_ins


class Residents:
    """Where parameters lie: at a place in the arena, or at stand-ins while their chunk is away.

    Args:
        owner: whose chunks they are, for the tensors that autograd saves.
    """

    def __init__(self, chunks: Mapping[int, TrainedChunk], arena: Arena, owner: Owner) -> None:
        self._chunks, self._arena, self._owner = chunks, arena, owner
        self.here: dict[int, Stay] = {}  # by chunk; those on their way too
        self._stays: dict[tuple[int, int], Stay] = {}  # by chunk and first block
        self._absent = {chunk: stand_ins(each) for chunk, each in chunks.items()}

    def take_over(self, each: TrainedChunk) -> None:
        """Let a chunk's parameters be Atoll's, whose chunk is away."""
        for slot, parameter in enumerate(each.parameters):
            place = Place(self._owner, each.chunk.id, slot)
            take_over(parameter, place)
            stand_in = self._absent[each.chunk.id][slot]
            put(parameter, stand_in)
            ADDRESSES.add(stand_in.untyped_storage().data_ptr(), place, absent=True)

    def blocks(self, chunk: int) -> int:
        """Number of the arena's blocks that a chunk takes."""
        each = self._chunks[chunk]
        return self._arena.blocks_for(each.chunk.numel * each.dtype.itemsize)

    def enter(self, chunk: int, place: int) -> Stay:
        """Give the chunk a place, without its values: it is not ready."""
        block = self._arena.take(self.blocks(chunk), at=place)
        stay = self._stays.get((chunk, place))
        if stay is None:
            # A script may be in inference mode; the parameters are to be trained afterwards.
            with torch.inference_mode(False), torch.no_grad():
                stay = self._stays[chunk, place] = Stay(self._chunks[chunk], block)
        stay.block = block
        self.here[chunk] = stay
        return stay

    def lay(self, stay: Stay) -> None:
        """The values are there: let the parameters lie there."""
        each = stay.each
        with torch.inference_mode(False):
            _put(each, stay.views)
        for slot, address in enumerate(stay.addresses):
            ADDRESSES.add(address, Place(self._owner, each.chunk.id, slot))
        stay.begin()

    def let_go(self, chunk: int) -> None:
        """Take a chunk's memory away, whatever is in it."""
        stay = self.here[chunk]
        self._take_away(stay)
        del self.here[chunk]
        self._arena.give(stay.block)

    def keep_ready(self) -> dict[int, int]:
        """Let all go that is not ready; return the first block of what stays, by chunk."""
        for chunk, stay in list(self.here.items()):
            if not stay.ready:
                self._take_away(stay)
                del self.here[chunk]
        self._arena.keep([stay.block for stay in self.here.values()])
        return {chunk: stay.block.first for chunk, stay in self.here.items()}

    def set_apart(self, stay: Stay, slot: int) -> None:
        """Let the parameter lie in new memory, with anything in it; who has views of the former keeps it."""
        ADDRESSES.remove(stay.addresses[slot])
        put(stay.each.parameters[slot], stay.set_apart(slot))
        ADDRESSES.add(stay.addresses[slot], Place(self._owner, stay.each.chunk.id, slot))

    def _take_away(self, stay: Stay) -> None:
        stay.ready = False  # first: what is cut short from here on is not written back
        for address in stay.addresses:
            ADDRESSES.remove(address)
        _put(stay.each, self._absent[stay.each.chunk.id])
        stay.coming = None
        if stay.is_apart:
            self._stays.pop((stay.each.chunk.id, stay.block.first), None)

    def forget(self) -> None:
        """Let go of everything; parameters that nobody gave back have no values any more."""
        for stand_in in itertools.chain(*self._absent.values()):
            ADDRESSES.remove(stand_in.untyped_storage().data_ptr())
        for stay in self.here.values():
            for address in stay.addresses:
                ADDRESSES.remove(address)
        self.here.clear()
        self._stays.clear()


def _put(each: TrainedChunk, memory: Iterable[Tensor]) -> None:
    """Let the parameters lie there, but for those that a `close` has given back before it failed."""
    for parameter, part in zip(each.parameters, memory, strict=True):
        if place_of(parameter) is not None:
            put(parameter, part)
