"""Lost parts of a contribution's chunks: kept beside the received ones, and reported to the sender."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from atoll.wire.lost import Spans, lost_within, spans_of
from atoll.wire.messages import Count, LostBlocks, run_of

_NONE = np.zeros((0, 2), np.int64)


class ChunkLoss(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of a chunk that came in `shares` runs: what was lost of those that have lost something, by share."""

    shares: Count
    runs: dict[int, LostBlocks]


def absent(loss: ChunkLoss | None, extent: int, places: Sequence[tuple[int, int]] | None = None) -> Spans:
    """The elements of a chunk of `extent` for which nothing stands that would count in a mean.

    `places`: where the contribution has gradients, begin and end, in order; None: everywhere. Zeros elsewhere
    are not sent for their values, and count whether they come or not.
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
    """What was lost of the `share`-th of `shares` runs.

    Where the chunk came in other runs (a group's member has died since), it is told in blocks of one element.
    Where what became of them differs, they are told as filled with zero: to one that holds back what was lost
    that is the same as borne.
    """
    if shares == loss.shares:
        return loss.runs.get(share)
    hows = {lost.how for lost in loss.runs.values()}
    spans = [_spans(loss, each, extent) for each in sorted(loss.runs)]
    return lost_within(spans, *run_of(extent, share, shares), hows.pop() if len(hows) == 1 else "zero")


def _spans(loss: ChunkLoss, share: int, extent: int) -> Spans:
    start, stop = run_of(extent, share, loss.shares)
    return spans_of(loss.runs[share], stop - start, start)
