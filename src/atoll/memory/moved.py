"""Counts of moves between a model's places in memory, for `MemoryFigures`."""

from __future__ import annotations

from collections import Counter

from atoll.memory.gradients import TrainedChunk


class Moved:
    """Moves and their bytes so far, by direction ("to_device", "to_host", "from_members").

    Attributes:
        of_step: moves and bytes of the latest step.
    """

    def __init__(self) -> None:
        self.moves, self.nbytes = Counter[str](), Counter[str]()
        self._came: set[int] = set()  # chunks of which gradients have come since the last step
        self._latest = Counter[str](), Counter[str]()
        self.of_step: tuple[dict[str, int], dict[str, int]] = {}, {}

    def count(self, direction: str, each: TrainedChunk) -> None:
        """Count a move of a chunk's values."""
        self.moves[direction] += 1
        self.nbytes[direction] += each.chunk.extent * each.dtype.itemsize

    def fetched(self, nbytes: int) -> None:
        """Count a fetch of `nbytes` from another member."""
        self.moves["from_members"] += 1
        self.nbytes["from_members"] += nbytes

    def gradient_came(self, each: TrainedChunk, slot: int) -> None:
        """Count a gradient that leaves the device. All gradients of a chunk are one move a step."""
        self.nbytes["to_host"] += each.chunk.slots[slot].numel * each.dtype.itemsize
        if each.chunk.id not in self._came:
            self._came.add(each.chunk.id)
            self.moves["to_host"] += 1

    def step_ended(self) -> None:
        """Set `of_step` to the counts since the last step."""
        self._came.clear()
        moves, nbytes = self._latest
        self.of_step = dict(self.moves - moves), dict(self.nbytes - nbytes)
        self._latest = self.moves.copy(), self.nbytes.copy()
