"""Pieces of a batch, whatever a DataLoader has made it of."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor

from atoll.train.gradients.samples import tensors_in


def samples_of(batch: Any, known: Collection[float]) -> int:
    """Return the number of samples by which a batch can be cut; 0 if it cannot.

    `known` has the numbers that the batch may have, as far as its sampler knows. Without one of them it is
    the first dimension of the batch's first tensor.
    """
    lengths = set(_lengths(batch, is_batch=True))
    for size in known:
        if size in lengths:
            return int(size)
    return next((tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim()), 0)


def cut_out(value: Any, start: int, stop: int, samples: int, *, is_batch: bool = True) -> Any:
    """Return samples `start` to `stop` of a batch of `samples`, in the batch's own form.

    A tensor whose first dimension is `samples` is cut there, and so is a list or tuple inside the batch that
    has an entry for each sample. Everything else is in each piece whole. `is_batch`: the value is the batch
    itself, so that a list is one of parts.
    """

    def cut(part: Any) -> Any:
        return cut_out(part, start, stop, samples, is_batch=False)

    if isinstance(value, Tensor):
        return value[start:stop] if value.dim() and value.shape[0] == samples else value
    if isinstance(value, Mapping):
        parts: Any = {key: cut(part) for key, part in value.items()}
        return parts if type(value) is dict else type(value)(parts)  # type: ignore[call-arg]
    if isinstance(value, (tuple, list)):
        if len(value) == samples and not is_batch:
            return value[start:stop]
        found = list(map(cut, value))
        return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: cut(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value


def _lengths(value: Any, *, is_batch: bool = False) -> Iterator[int]:
    """Yield the numbers of samples by which `cut_out` would cut parts of a batch."""
    if isinstance(value, Tensor):
        if value.dim():
            yield value.shape[0]
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _lengths(part)
    elif isinstance(value, (tuple, list)):
        if not is_batch:
            yield len(value)
        for part in value:
            yield from _lengths(part)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _lengths(getattr(value, field.name))
