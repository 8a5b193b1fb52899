"""Gradients that lie in tiers of memory, summed over a ring: from tiers and into tiers, a chunk at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from atoll.core import points
from atoll.memory.exchanged import Exchanged
from atoll.tensors.binding import BoundChunk
from atoll.tensors.finite import is_finite
from atoll.tensors.gradienthooks import after_gradient
from atoll.train.gradients.agreement import Agreement, Ballot
from atoll.train.gradients.messages import BucketChunk, Rows
from atoll.train.gradients.ring import RingSum
from atoll.train.gradients.samples import ContributionWeight
from atoll.train.gradients.sums import OwnGradients, SummedReducer

Holder: TypeAlias = Callable[[], Exchanged]  # the model in its tiers


class TierCarrier(OwnGradients):
    """The carrier of gradients that lie in tiers.

    Sums are made when all gradients have come, from tiers and into tiers, one chunk at a time.

    Attributes:
        are_apart: True if the sums lie apart from this member's own gradients, which stay unchanged.
        present: the gradients that the sums have, by chunk, if they lie apart.
    """

    def __init__(
        self,
        ring_sum: RingSum,
        owner: SummedReducer,
        chunks: Sequence[BoundChunk],
        nodes: Sequence[Any],
        *,
        held: Holder,
        stays: bool,
    ) -> None:
        """Carry gradients of `chunks`. `stays`: the sums never replace this member's own gradients."""
        self._sum, self._owner, self.bounds = ring_sum, owner, list(chunks)
        self._held, self._stays = held, stays
        self._nonfinite: list[str] = []
        self.ids: list[int] = []  # there are no messages
        self.by_rows: list[int] = []
        self.chunks: dict[int, BucketChunk] = {}
        self.are_apart = False
        self.present: dict[int, list[bool]] = {}
        self._hooks = [after_gradient(node, owner.phase.came) for node in nodes]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self.bounds.clear()

    @property
    def gradients(self) -> OwnGradients:
        return self

    def flat_gradients(self, bound: BoundChunk) -> tuple[Tensor, tuple[bool, ...]]:
        present = self._held().present(bound.parameters)
        return gradient_from(self._held(), bound, present), tuple(present)

    def own_nonfinite(self, chunks: Sequence[BoundChunk]) -> list[str]:  # noqa: ARG002
        return list(self._nonfinite)

    def said(self) -> list[float]:
        return []

    def carry_rows(self, own: ContributionWeight, scale: float, agreed: Agreement, ballot: Ballot) -> None:
        """Do nothing: no gradient in tiers is sparse."""

    def measured(self) -> list[int]:
        return []

    def take_by_rows(self, ids: Sequence[int]) -> None:
        """Do nothing: there are no messages."""

    def leave_in(self, order: Sequence[int]) -> None:
        """Do nothing: chunks leave in the order in which they were laid out."""

    def anew(self) -> None:
        """Do nothing: there is no memory into which a former ring may still write."""

    def carry(self, scale: float, said: list[float]) -> None:
        """Sum all chunks over the members. This member's own gradients stay unchanged."""
        del said  # the report travels by itself
        self._nonfinite = []
        self.carry_again(scale, None)
        points.reach("ring.all_sent", self._owner.steps)

    def carry_again(self, scale: float, dirty: Sequence[bool] | None) -> None:
        del dirty
        channel = self._sum.ring.agreement  # in host memory, where the tiers are
        for bound in self.bounds:
            flat = self._own_of(bound, scale)
            work = channel.sum(flat)
            points.reach("ring.sent", self._owner.steps)
            named = f"chunk {bound.chunk.id} (with {bound.names[0]!r})"
            channel.wait(work, f"{named} in iteration {self._owner.steps}")
            self._owner.bytes_sent += channel.sends(flat.numel() * flat.element_size())
            self._held().put_sums(bound.chunk, bound.parameters, flat)

    def _own_of(self, bound: BoundChunk, scale: float) -> Tensor:
        """Return this member's gradients of a chunk, scaled, (extent,)."""
        if scale == 0:  # zero times NaN would be NaN
            return torch.zeros(bound.chunk.extent, dtype=bound.dtype)
        held = self._held()
        flat = gradient_from(held, bound, held.present(bound.parameters))
        note_nonfinite(bound, flat, self._nonfinite)
        return flat.mul_(scale) if scale != 1.0 else flat

    def publish(self, factor: float, present: Sequence[Sequence[bool]], rows: Rows, *, apart: bool) -> None:
        del rows
        held = self._held()
        self.are_apart = apart or self._stays
        for bound, here in zip(self.bounds, present, strict=True):
            flat = held.read_sums(bound.chunk, bound.parameters)
            if factor != 1.0:
                flat.mul_(factor)
            if self.are_apart:
                held.put_sums(bound.chunk, bound.parameters, flat)
                self.present[bound.chunk.id] = list(here)
            else:
                held.put_gradients(bound.chunk, bound.parameters, here, flat)


def note_nonfinite(bound: BoundChunk, flat: Tensor, names: list[str]) -> None:
    """Add to `names` the parameters of a chunk whose gradients, in `flat`, (extent,), hold NaN or
    infinity."""
    if is_finite(flat):
        return
    for name, slot in zip(bound.names, bound.chunk.slots, strict=True):
        if name not in names and not is_finite(flat[slot.offset : slot.offset + slot.numel]):
            names.append(name)


def gradient_from(held: Exchanged, bound: BoundChunk, present: Sequence[bool]) -> Tensor:
    """Return a copy of a chunk's gradients, (extent,), with zeros for absent ones."""
    flat = torch.zeros(bound.chunk.extent, dtype=bound.dtype)
    held.read_gradients(bound.chunk, bound.parameters, present, flat)
    return flat


def values_from(held: Exchanged, bound: BoundChunk) -> Tensor:
    """Return a copy of a chunk's values, (extent,)."""
    flat = torch.zeros(bound.chunk.extent, dtype=bound.dtype)
    held.read_values(bound.chunk, bound.parameters, flat)
    return flat
