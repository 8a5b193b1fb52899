"""What of a contribution's chunks was lost on the way: kept beside what has come, and told to who sent it."""

from __future__ import annotations

import msgspec
import numpy as np

from atoll.wire.lost import Spans, lost_within, spans_of
from atoll.wire.messages import Count, LostBlocks, run_of


class ChunkLoss(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of a chunk that came in `shares` runs: what was lost of those that have lost something, by share."""

    shares: Count
    runs: dict[int, LostBlocks]


def absent(loss: ChunkLoss | None, extent: int) -> Spans:
    """The elements of a chunk of `extent` for which nothing stands that would count in a mean."""
    spans: list[Spans] = [np.zeros((0, 2), np.int64)]
    if loss is not None:
        spans += [_spans(loss, share, extent) for share in sorted(loss.runs) if not loss.runs[share].counts]
    return np.concatenate(spans)


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
