"""A chunk's stay on the device, and the stand-ins for its parameters while it is away."""

from __future__ import annotations

import zlib
from concurrent.futures import Future

import torch
from torch import Tensor

from atoll.memory import copies
from atoll.memory.arena import Block
from atoll.memory.gradients import TrainedChunk
from atoll.memory.parameters import version
from atoll.tensors.binding import carve, run_of
from atoll.tensors.torch_compat import outside_dispatch_modes, storage_handle, storage_uses


class Stay:
    """A chunk at a place on the device. It is made once for each place that the chunk comes to, and used
    again.

    Attributes:
        memory: the values, (extent,).
        views: for each slot, a tensor at its place in `memory`, with a storage of its own.
        coming: the job that brings the values, until they are used.
        ready: True if the values are here, and the parameters lie here.
        versions: the parameters' versions when the values here equalled those in host memory.
        given_out: True if the values may have been written without a count of autograd's.
    """

    def __init__(self, each: TrainedChunk, block: Block) -> None:
        self.each, self.block = each, block
        self.memory = block.view(each.chunk.extent, each.dtype)
        slots = zip(each.chunk.slots, each.likes, strict=True)
        self.views = [carve(self.memory, slot.offset, like) for slot, like in slots]
        self.storages = [view.untyped_storage() for view in self.views]
        self.addresses = [storage.data_ptr() for storage in self.storages]
        self._ids = [storage_handle(storage) for storage in self.storages]
        self._seal: int | None = None  # a checksum that shows changes which autograd does not count
        self._left: list[torch.UntypedStorage] = []  # former storages of slots that were set apart
        self._apart: set[int] = set()  # slots whose values lie outside of the block
        self.coming: Future[None] | None = None
        self.ready = False
        self.versions: list[int] = []
        self.given_out = False
        self._unheld = 0  # uses of all storages when only the engine and the parameters have them
        self._unheld_by_slot: list[int] = []

    def begin(self) -> None:
        """Begin the stay: the values are here, and the parameters lie here."""
        self.versions, self.given_out, self._seal = self.written(), False, None
        self._unheld = self._uses()
        self._unheld_by_slot = list(map(storage_uses, self._ids))
        self.ready, self.coming = True, None

    def written(self) -> list[int]:
        """Return the number of writes into each parameter, by slot."""
        return [version(parameter) for parameter in self.each.parameters]

    @property
    def is_viewed(self) -> bool:
        """True if anybody besides the engine and the parameters has a view of this memory."""
        return self._uses() > self._unheld

    def is_slot_viewed(self, slot: int) -> bool:
        """True if anybody besides the engine and the parameters has a view of this slot's memory."""
        return storage_uses(self._ids[slot]) > self._unheld_by_slot[slot]

    def set_apart(self, slot: int) -> Tensor:
        """Return new, undefined memory for a slot, outside the block and the budget, until the chunk leaves.

        Whoever has views of the former memory keeps it. The caller points the parameter at the new memory.
        """
        like = self.each.likes[slot]
        with torch.inference_mode(False):
            view = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=self.memory.device)
        self._left.append(self.storages[slot])
        self._ids.append(self._ids[slot])
        self._unheld += 1  # `_left` holds the storage
        self._apart.add(slot)
        self.views[slot], self.storages[slot] = view, view.untyped_storage()
        self._ids[slot] = storage_handle(self.storages[slot])
        self.addresses[slot] = self.storages[slot].data_ptr()
        return view

    @property
    def is_apart(self) -> bool:
        """True if some slot lies outside the block: such a stay is not used again."""
        return bool(self._apart)

    def seal(self, *, anew: bool = False) -> None:
        """Take a checksum of the values: if none was taken yet, or, with `anew`, if one was."""
        if (self._seal is not None) == anew:
            self._seal = self._checksum()

    @property
    def is_seal_broken(self) -> bool:
        """True if the content differs from the checksum noted by `seal`."""
        return self._seal is not None and self._seal != self._checksum()

    def _checksum(self) -> int:
        found = 0
        with outside_dispatch_modes():
            for each in (self.memory, *(self.views[slot] for slot in sorted(self._apart))):
                found = zlib.crc32(run_of(each).view(torch.uint8).cpu().numpy().data, found)
        return found

    def bring(self, values: Tensor) -> None:
        """Copy the chunk's values, (extent,), to the places of its slots."""
        if not self._apart:
            copies.to_device(self.memory, values)
            return
        for slot in range(len(self.views)):
            self.bring_slot(slot, self.each.run(values, slot))

    def bring_slot(self, slot: int, values: Tensor) -> None:
        """Copy a slot's values, 1-D in the order of memory, to the slot's place."""
        here = self.each.run(self.memory, slot)
        if slot in self._apart:
            here = run_of(self.views[slot])
        copies.to_device(here, values)

    def return_to(self, values: Tensor) -> None:
        """Copy the values here into `values`, (extent,), in host memory."""
        copies.to_host(values, self.memory)
        for slot in self._apart:
            copies.to_host(self.each.part(values, slot), self.views[slot])

    def _uses(self) -> int:
        # No public function tells whether memory may be taken away; the use counts do.
        return sum(map(storage_uses, self._ids))


def stand_ins(each: TrainedChunk) -> list[Tensor]:
    """Return a tensor for each slot where its parameter lies while the chunk is away.

    It has the parameter's shape, over a single element of all one bits, which is NaN in every floating dtype.
    """
    numel, size = 2 * len(each.parameters), each.dtype.itemsize  # a complex element takes two
    ones = torch.full((numel * size,), 255, dtype=torch.uint8, device=each.device).view(each.dtype)
    elements = [torch.empty((), dtype=like.dtype, device="meta") for like in each.likes]
    shapes = [like.shape for like in each.likes]
    return [carve(ones, 2 * index, one).expand(shapes[index]) for index, one in enumerate(elements)]
