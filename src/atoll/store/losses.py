"""How a contribution's chunks have come, who sent what of them and what was lost: kept beside what has come,
and told to who sent it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from atoll.wire.lost import Spans, lost_within, spans_of
from atoll.wire.messages import Count, CountedRun, LostBlocks, run_of


class ChunkLoss(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of a chunk that came in `shares` runs: what was lost of those that have lost something, by share, and
    who sent them: where `members` does not say, member 0."""

    shares: Count = 1
    runs: dict[int, LostBlocks] = {}
    members: dict[int, Count] = {}


class Told(NamedTuple):
    """What an answer tells of the asker's contribution: `lost` and `counted` as wire's Mean."""

    lost: LostBlocks | None = None
    counted: Sequence[CountedRun] = ()


def absent(loss: ChunkLoss | None, extent: int) -> Spans:
    """The elements of a chunk of `extent` for which nothing stands that would count in a mean."""
    spans: list[Spans] = [np.zeros((0, 2), np.int64)]
    if loss is not None:
        spans += [_spans(loss, share, extent) for share in sorted(loss.runs) if not loss.runs[share].counts]
    return np.concatenate(spans)


def told_of(loss: ChunkLoss, extent: int, share: int, shares: int, member: int) -> Told:
    """What `member` is told that asks for the `share`-th of `shares` runs.

    Where the chunk came in other runs (a group's member has died since), what was lost is told in blocks of
    one element; where what became of them differs, as filled with zero: to one that holds back what was lost
    that is the same as borne.
    """
    if shares == loss.shares:
        own = loss.members.get(share, 0) == member
        return Told(loss.runs.get(share), () if own else _counted(loss))
    hows = {lost.how for lost in loss.runs.values()}
    spans = [_spans(loss, each, extent) for each in sorted(loss.runs)]
    how = hows.pop() if len(hows) == 1 else "zero"
    return Told(lost_within(spans, *run_of(extent, share, shares), how), _counted(loss))


def _counted(loss: ChunkLoss) -> list[CountedRun]:
    return [CountedRun(loss.members.get(share, 0), loss.runs.get(share)) for share in range(loss.shares)]


def _spans(loss: ChunkLoss, share: int, extent: int) -> Spans:
    start, stop = run_of(extent, share, loss.shares)
    return spans_of(loss.runs[share], stop - start, start)
