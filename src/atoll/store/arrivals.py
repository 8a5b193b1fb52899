"""How a contribution's chunks have come, who sent what of them and what was lost: kept beside what has come,
and told to who sent it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from atoll.wire.lost import Spans, lost_within, spans_of
from atoll.wire.messages import Count, CountedRun, LostBlocks, run_of

_NONE = np.zeros((0, 2), np.int64)


class Arrival(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of a chunk that came in `shares` runs: what was lost of those that have lost something, by share, and
    who sent them: where `members` does not say, member 0."""

    shares: Count = 1
    runs: dict[int, LostBlocks] = {}
    members: dict[int, Count] = {}


class Answered(NamedTuple):
    """What an answer tells of the asker's contribution: `lost` and `counted` as wire's Mean."""

    lost: LostBlocks | None = None
    counted: Sequence[CountedRun] = ()


def absent(came: Arrival | None, extent: int, places: Sequence[tuple[int, int]] | None = None) -> Spans:
    """The elements of a chunk of `extent` for which nothing stands that would count in a mean.

    `places`: where the contribution has gradients, begin and end, in order; None: everywhere. Zeros elsewhere
    are not sent for their values, and count whether they come or not.
    """
    spans: list[Spans] = [_NONE]
    if came is not None:
        spans += [_spans(came, share, extent) for share in sorted(came.runs) if not came.runs[share].counts]
    whole = np.concatenate(spans)
    return whole if places is None or not len(whole) else _within(whole, places)


def _within(spans: Spans, places: Sequence[tuple[int, int]]) -> Spans:
    """What of the spans lies in the places."""
    found: list[Spans] = [_NONE]
    for start, stop in places:
        first, last = np.searchsorted(spans[:, 1], start, "right"), np.searchsorted(spans[:, 0], stop)
        found.append(spans[first:last].clip(start, stop))
    return np.concatenate(found)


def told_of(came: Arrival, extent: int, share: int, shares: int, member: int) -> Answered:
    """What `member` is told that asks for the `share`-th of `shares` runs.

    Where the chunk came in other runs (a group's member has died since), what was lost is told in blocks of
    one element; where what became of them differs, as filled with zero: to one that holds back what was lost
    that is the same as borne.
    """
    if shares == came.shares:
        own = came.members.get(share, 0) == member
        return Answered(came.runs.get(share), () if own else _counted(came))
    hows = {lost.how for lost in came.runs.values()}
    spans = [_spans(came, each, extent) for each in sorted(came.runs)]
    how = hows.pop() if len(hows) == 1 else "zero"
    return Answered(lost_within(spans, *run_of(extent, share, shares), how), _counted(came))


def _counted(came: Arrival) -> list[CountedRun]:
    return [CountedRun(came.members.get(share, 0), came.runs.get(share)) for share in range(came.shares)]


def _spans(came: Arrival, share: int, extent: int) -> Spans:
    start, stop = run_of(extent, share, came.shares)
    return spans_of(came.runs[share], stop - start, start)
