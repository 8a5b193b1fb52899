"""What a chunk's stay on the device is made of, and what stands in for its parameters while it is away."""

from __future__ import annotations

from concurrent.futures import Future

import torch
from torch import Tensor

from atoll.memory.arena import Block
from atoll.memory.gradients import TrainedChunk
from atoll.tensors.binding import carve


class Stay:
    """A chunk at a place on the device: `memory` is its values, (extent,); `views[i]` lies there for slot i
    and has a storage of its own. Made once for each place that a chunk comes to, and used again."""

    def __init__(self, each: TrainedChunk, block: Block) -> None:
        self.each, self.block = each, block
        self.memory = block.view(each.chunk.extent, each.dtype)
        parts = [each.part(self.memory, slot) for slot in range(len(each.parameters))]
        self.views = [carve(part, 0, part) for part in parts]
        self.storages = [view.untyped_storage() for view in self.views]
        self.addresses = [storage.data_ptr() for storage in self.storages]
        self._ids = [storage._cdata for storage in self.storages]
        self.coming: Future[None] | None = None  # what brings the values, until they are used
        self.ready = False  # the values are here, and the parameters lie here
        self.versions: list[int] = []  # the parameters', when the values here were those in host memory
        self.given_out = False  # may have been written into, and autograd's count would not tell
        self._unheld = 0  # uses of all storages by the engine and the parameters alone

    def begin(self, versions: list[int]) -> None:
        """The values and the parameters are here."""
        self.versions, self.given_out = versions, False
        self._unheld = self._uses()
        self.ready, self.coming = True, None

    @property
    def is_viewed(self) -> bool:
        """Whether anybody but the engine and the parameters has a view."""
        return self._uses() > self._unheld

    def _uses(self) -> int:
        # The count tells what no public function does: whether memory may be taken away.
        return sum(map(torch._C._storage_Use_Count, self._ids))


def stand_ins(each: TrainedChunk) -> list[Tensor]:
    """For each slot a tensor of the parameter's shape over a single element of all one bits, which is NaN in
    every floating dtype: what lies there while the chunk is away."""
    numel, size = len(each.parameters), each.dtype.itemsize
    ones = torch.full((numel * size,), 255, dtype=torch.uint8, device=each.device).view(each.dtype)
    return [carve(ones, index, ones[0]).expand(like.shape) for index, like in enumerate(each.likes)]
