"""The parameters of a chunk that new values change."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from atoll.tensors.binding import BoundChunk

_HEAD = 64  # elements
_FIRST_LOOKS, _THEN_EVERY = 8, 64


class ChangedParameters:
    """Compares new values of a chunk with the former values, parameter by parameter and bit by bit.

    A step leaves a parameter without a gradient alone, and tensors that autograd saved of this parameter stay
    valid. So only the versions of changed parameters may be raised. Nearly all parameters change in nearly
    all elements, so a look at each parameter's first element spares most of the comparison.
    """

    def __init__(self, bound: BoundChunk) -> None:
        self._bound = bound
        self._slots = [
            (slot.offset, slot.offset + slot.numel, parameter)
            for slot, parameter in zip(bound.chunk.slots, bound.parameters, strict=True)
            if slot.numel
        ]
        self._first = torch.tensor([begin for begin, _, _ in self._slots], dtype=torch.int64)

    def between(self, former: Tensor | None, new: Tensor) -> list[nn.Parameter]:
        """Return the parameters whose values differ between `former` and `new`, both 1-D.

        If `former` is None or has another size, return all.
        """
        if former is None or former.numel() != new.numel():
            return [parameter for _, _, parameter in self._slots]
        inside = self._first[self._first < new.numel()]
        heads = _differ(former[inside], new[inside])
        return [
            parameter
            for index, (begin, end, parameter) in enumerate(self._slots)
            if end > new.numel() or heads[index] or not same_bits(former[begin:end], new[begin:end])
        ]

    def names_between(self, former: Tensor, new: Tensor) -> list[str]:
        """Return the names of the parameters that `between` returns."""
        changed = set(map(id, self.between(former, new)))
        named = zip(self._bound.names, self._bound.parameters, strict=True)
        return [name for name, parameter in named if id(parameter) in changed]


class Looks:
    """Decides when values are compared with those that were written last.

    A write through `.data` raises no version, and a comparison reads all values. A script that makes such
    writes makes them in most steps: the first looks compare, and later ones seldom.
    """

    def __init__(self) -> None:
        self._made, self._always = 0, False

    @property
    def missed_some(self) -> bool:
        """True if earlier looks did not compare values."""
        return self._made > _FIRST_LOOKS and not self._always

    def compares(self) -> bool:
        """Count a look, and return whether it compares values."""
        self._made += 1
        return self._always or self._made <= _FIRST_LOOKS or self._made % _THEN_EVERY == 0

    def compare_always(self) -> None:
        """Compare in every look from now on: the script makes such writes."""
        self._always = True


def _differ(one: Tensor, other: Tensor) -> list[bool]:
    """Return for each element of two 1-D tensors whether its bits differ: NaN equals itself."""
    size = one.element_size()
    found = one.view(torch.uint8).ne(other.view(torch.uint8)).view(-1, size).any(1).tolist()
    return cast("list[bool]", found)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """True if two 1-D contiguous tensors hold equal bits."""
    one, other = one.view(torch.uint8), other.view(torch.uint8)
    if not torch.equal(one[:_HEAD], other[:_HEAD]):
        return False
    return not bool(one.ne(other).any())  # `ne` is vectorised, `torch.equal` is not
