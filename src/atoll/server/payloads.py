"""Chunks as payloads of messages, and the weighted mean of received gradients."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy
import torch
from torch import Tensor

from atoll.wire.lost import Spans

WeightedGradients: TypeAlias = tuple[
    float, Tensor, bytes
]  # a contribution's weight, gradients, and presence by slot


def payload_of(flat: Tensor) -> memoryview:
    """Return the memory of a 1-D contiguous tensor on the CPU, not copied."""
    raw: memoryview = flat.view(torch.uint8).numpy().data
    return raw


class Lent:
    """A chunk's values, shared without a copy by messages that are being sent.

    ZeroMQ drops a payload once the system has all of it; until then the memory must not change.
    """

    def __init__(self, flat: Tensor) -> None:
        self._flat = flat
        self._held: weakref.ref[numpy.ndarray[Any, Any]] | None = None

    def payload(self) -> memoryview:
        """Return the memory as a message's payload."""
        array = self._held() if self._held is not None else None
        if array is None:
            array = self._flat.view(torch.uint8).numpy()
            self._held = weakref.ref(array)
        return array.data

    @property
    def is_held(self) -> bool:
        """True if a message is still being sent."""
        return self._held is not None and self._held() is not None


def weighted_mean(parts: Sequence[WeightedGradients], absent: Sequence[Spans] = ()) -> tuple[Tensor, bytes]:
    """Weighted mean of a chunk's gradients, and for each slot whether any contribution has a gradient.

    Summed in order, in the chunk's dtype, each part times its share of the weight; so the mean of one part
    equals that part to the bit. Without any weight the mean is zero, and no slot has a gradient.

    `absent` has, for each part, spans of lost elements, which hold zeros. There the mean is over the other
    parts, by their weights, or 0 if none is left. Only these elements are computed in this way.
    """
    total = sum(weight for weight, _, _ in parts)
    counted = [part for part in parts if part[0] > 0]
    if not counted:
        return torch.zeros_like(parts[0][1]), bytes(len(parts[0][2]))
    if len(counted) == 1:
        return counted[0][1], counted[0][2]
    mean = counted[0][1] * (counted[0][0] / total)
    for weight, gradients, _ in counted[1:]:
        mean.add_(gradients, alpha=weight / total)
    gaps = [spans for (weight, _, _), spans in zip(parts, absent, strict=bool(absent)) if weight > 0]
    if any(len(spans) for spans in gaps):
        _mean_over_the_others(mean, counted, gaps)
    present = bytes(any(flags) for flags in zip(*(part[2] for part in counted), strict=True))
    return mean, present


def _mean_over_the_others(mean: Tensor, parts: Sequence[WeightedGradients], absent: Sequence[Spans]) -> None:
    """Put into `mean`, at elements that some part lacks, the mean over the other parts.

    Span ends cut the chunk into pieces in which the same parts are absent; shares are computed by piece, sums
    by element. Half precision is summed in single precision.
    """
    ends = numpy.unique(numpy.concatenate([spans.reshape(-1) for spans in absent]))
    begins, ends = ends[:-1], ends[1:]
    missing = numpy.stack([_covers(spans, begins) for spans in absent])  # (parts, pieces)
    some = missing.any(axis=0)
    begins, ends, missing = begins[some], ends[some], missing[:, some]
    weights = numpy.array([weight for weight, _, _ in parts])[:, None] * ~missing
    shares = weights / numpy.maximum(weights.sum(axis=0), numpy.finfo(numpy.float64).tiny)
    sizes = ends - begins
    firsts = numpy.repeat(begins - (sizes.cumsum() - sizes), sizes)
    where = torch.from_numpy(firsts + numpy.arange(len(firsts)))
    wide = torch.promote_types(mean.dtype, torch.float32)
    rows = torch.zeros(len(where), dtype=wide)
    for (_, gradients, _), share in zip(parts, shares, strict=True):
        by_element = torch.from_numpy(numpy.repeat(share, sizes)).to(wide)
        rows.addcmul_(gradients.index_select(0, where).to(wide), by_element)
    mean.index_copy_(0, where, rows.to(mean.dtype))


def _covers(spans: Spans, at: Spans) -> Any:
    """For each element of `at`, True if one of the sorted spans contains it."""
    last = (
        numpy.searchsorted(spans[:, 0], at, side="right") - 1
    )  # the last span that begins at or before the element
    return (last >= 0) & (at < numpy.append(spans[:, 1], 0)[last])
