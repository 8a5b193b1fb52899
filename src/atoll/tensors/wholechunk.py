"""A chunk with its optimizer's state, as it is kept and sent: in snapshots, and to a shard's standby."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from atoll.tensors.shardoptimizer import ShardOptimizer, SlotValues

# Before the name of a tensor that an open step is made again from, or that a contributor went on from:
OPEN, THEN = "open.", "then."


class OpenRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A step that was open: in which slots it has gradients, and the slots' states before it."""

    present: list[bool]
    slots: list[dict[str, Any]]


@dataclass(frozen=True)
class WholeChunk:
    """All that a chunk is beside its values: each element-wise state of its optimizer, under "open." what an
    open step is made again from, and under "then." what contributors went on from; and its slots' numbers."""

    tensors: dict[str, Tensor]
    slots: SlotValues
    open: OpenRecord | None

    @classmethod
    def of(cls, optimizer: ShardOptimizer, chunk: int) -> WholeChunk:
        """Copies of what `optimizer` has of a chunk."""
        tensors, slots = optimizer.state(chunk)
        record, step = None, optimizer.open_step(chunk)
        if step is not None:
            tensors.update({OPEN + key: values for key, values in step[0].items()})
            record = OpenRecord(present=step[1], slots=step[2])
        if optimizer.origins is not None:
            then = optimizer.origins.tensors(chunk)
            tensors.update({THEN + key: values for key, values in then.items()})
        return cls(tensors, slots, record)

    def put_into(self, optimizer: ShardOptimizer, chunk: int, values: Tensor) -> None:
        """Have `optimizer` have the chunk so, with these values."""
        optimizer.set_values(chunk, values)
        optimizer.set_state(chunk, self.named(""), self.slots)
        if self.open is not None:
            optimizer.set_open_step(chunk, self.named(OPEN), self.open.present, self.open.slots)
        if optimizer.origins is not None:
            optimizer.origins.restore(chunk, self.named(THEN))

    def named(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names begin so, under the rest of their names; with "", those of the state."""
        return {
            key.removeprefix(prefix): values
            for key, values in self.tensors.items()
            if (key.startswith(prefix) if prefix else not key.startswith((OPEN, THEN)))
        }


def dtype_of(optimizer: ShardOptimizer, chunk: int, name: str) -> torch.dtype:
    """The dtype of one of a whole chunk's tensors, or of its values (""); raises UserError for others."""
    rest = name.removeprefix(OPEN)
    is_state = rest.startswith("state.") if name.startswith(OPEN) else not name.startswith(THEN)
    if name and is_state:
        return optimizer.state_dtype(chunk, rest.removeprefix("state."))
    return optimizer.dtype(chunk)
