"""Chunks as bytes: a tensor as what goes into a message, and the mean of what came."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy
import torch
from torch import Tensor

from atoll.wire.lost import Spans

Part: TypeAlias = tuple[float, Tensor, bytes]  # a contribution's weight, gradients, and presence by slot


def payload_of(flat: Tensor) -> memoryview:
    """The memory of a 1-D contiguous tensor on the CPU, as it is."""
    raw: memoryview = flat.view(torch.uint8).numpy().data
    return raw


class Lent:
    """Values that are sent from where they lie, by messages which are let go of one by one.

    ZeroMQ drops a payload once all of it is the system's; until then the memory must not change.
    """

    def __init__(self, flat: Tensor) -> None:
        self._flat = flat
        self._held: weakref.ref[numpy.ndarray[Any, Any]] | None = None

    def payload(self) -> memoryview:
        """The memory, as a message's payload."""
        array = self._held() if self._held is not None else None
        if array is None:
            array = self._flat.view(torch.uint8).numpy()
            self._held = weakref.ref(array)
        return array.data

    @property
    def is_held(self) -> bool:
        """Whether some message is not sent yet."""
        return self._held is not None and self._held() is not None


def weighted_mean(parts: Sequence[Part], absent: Sequence[Spans] = ()) -> tuple[Tensor, bytes]:
    """The mean of a chunk's gradients by weight, and in which slots anyone had one.

    In order, in the chunk's own dtype, each times its share of the weight; so one contribution's mean is
    itself, to the bit. Without weight, nobody had anything.

    `absent`, of each part: elements that did not come, where zeros stand. There the mean is over the others,
    by their weights, and 0 where nobody is left; only these elements are computed otherwise.
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


def _mean_over_the_others(mean: Tensor, parts: Sequence[Part], absent: Sequence[Spans]) -> None:
    """Put into `mean`, wherever some part is absent, the mean of those that are not.

    Between two neighbouring ends of spans, of whichever part, the same parts are absent. What is computed is
    by these pieces, and then by their elements. Half precision is summed in single.
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
    """For each of these elements, whether it lies in one of the spans, which are in order."""
    last = numpy.searchsorted(spans[:, 0], at, side="right") - 1  # that begins there or before
    return (last >= 0) & (at < numpy.append(spans[:, 1], 0)[last])
