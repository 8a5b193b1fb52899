"""Lost parts of a contribution's chunks: kept beside the parts that came, and reported to the sender."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from atoll.wire.lost import Spans, lost_within, spans_of
from atoll.wire.messages import Count, LostBlocks, run_of

_NONE = np.zeros((0, 2), np.int64)


class ChunkLoss(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The losses of a chunk.

    Attributes:
        shares: the number of runs in which the chunk came.
        runs: the lost blocks of the runs that lost some, by share.
    """

    shares: Count
    runs: dict[int, LostBlocks]


def absent(loss: ChunkLoss | None, extent: int, places: Sequence[tuple[int, int]] | None = None) -> Spans:
    """Return the elements of a chunk of `extent` that were lost, and count in no mean.

    Args:
        places: (begin, end) of the contribution's gradients, in order; None for the whole chunk. Elements
            outside are zeros, and count whether they came or not.
    """
    spans: list[Spans] = [_NONE]
    if loss is not None:
        spans += [_spans(loss, share, extent) for share in sorted(loss.runs) if not loss.runs[share].counts]
    whole = np.concatenate(spans)
    return whole if places is None or not len(whole) else _within(whole, places)


def _within(spans: Spans, places: Sequence[tuple[int, int]]) -> Spans:
    """Return the parts of the spans that lie in the places."""
    found: list[Spans] = [_NONE]
    for start, stop in places:
        first, last = np.searchsorted(spans[:, 1], start, "right"), np.searchsorted(spans[:, 0], stop)
        found.append(spans[first:last].clip(start, stop))
    return np.concatenate(found)


def told_of(loss: ChunkLoss, extent: int, share: int, shares: int) -> LostBlocks | None:
    """Return the lost blocks of the `share`-th of `shares` runs; None if nothing of it was lost.

    If the chunk came in another number of runs (a group's member has died since), they are blocks of one
    element. If the runs treated their losses differently, they are reported as filled with zero: a sender
    that holds losses back treats both kinds alike.
    """
    if shares == loss.shares:
        return loss.runs.get(share)
    hows = {lost.how for lost in loss.runs.values()}
    spans = [_spans(loss, each, extent) for each in sorted(loss.runs)]
    return lost_within(spans, *run_of(extent, share, shares), hows.pop() if len(hows) == 1 else "zero")


def _spans(loss: ChunkLoss, share: int, extent: int) -> Spans:
    start, stop = run_of(extent, share, loss.shares)
    return spans_of(loss.runs[share], stop - start, start)
