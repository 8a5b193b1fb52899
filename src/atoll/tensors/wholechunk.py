"""A chunk with its optimizer state, in the form that snapshots hold and a shard sends to its standby."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from atoll.tensors.shardoptimizer import ShardOptimizer, SlotValues

# Prefixes of tensors' names: inputs of an open step, and values that a contributor went on from.
OPEN, THEN = "open.", "then."


class OpenRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An open step: which slots have gradients, and each slot's numbers before the step."""

    present: list[bool]
    slots: list[dict[str, Any]]


@dataclass(frozen=True)
class WholeChunk:
    """Everything that belongs to a chunk except its values.

    Attributes:
        tensors: element-wise optimizer states by key; with the prefix "open.", the inputs of an open step
            (`ShardOptimizer.open_step`); with "then.", the values that contributors went on from (`Origins`).
        slots: for each slot, the optimizer states that are one number.
        open: the open step, if there is one.
    """

    tensors: dict[str, Tensor]
    slots: SlotValues
    open: OpenRecord | None

    @classmethod
    def of(cls, optimizer: ShardOptimizer, chunk: int) -> WholeChunk:
        """Return a copy of the state that `optimizer` has for a chunk."""
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
        """Set the chunk's `values` and this state in `optimizer`."""
        optimizer.set_values(chunk, values)
        optimizer.set_state(chunk, self.named(""), self.slots)
        if self.open is not None:
            optimizer.set_open_step(chunk, self.named(OPEN), self.open.present, self.open.slots)
        if optimizer.origins is not None:
            optimizer.origins.restore(chunk, self.named(THEN))

    def named(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors with this prefix, by the rest of their names; for "", those without any."""
        return {
            key.removeprefix(prefix): values
            for key, values in self.tensors.items()
            if (key.startswith(prefix) if prefix else not key.startswith((OPEN, THEN)))
        }


def dtype_of(optimizer: ShardOptimizer, chunk: int, name: str) -> torch.dtype:
    """Return the dtype of a tensor in `WholeChunk.tensors`; for an empty name, that of the chunk's values.

    Raises UserError for a state that the optimizer does not keep.
    """
    rest = name.removeprefix(OPEN)
    is_state = rest.startswith("state.") if name.startswith(OPEN) else not name.startswith(THEN)
    if name and is_state:
        return optimizer.state_dtype(chunk, rest.removeprefix("state."))
    return optimizer.dtype(chunk)
