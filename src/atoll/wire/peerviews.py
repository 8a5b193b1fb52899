"""Messages about views between the nodes of strategy `peers` and the hub as their witness.

A view is a numbered list of members; the next one is decided by consensus (`peers/change.py`). Every number
of contributions is a count: below 7 are 0 to 6. Source: docs/peers.md, "When an iteration may be applied".
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Annotated, NamedTuple, TypeAlias, Union

import msgspec
from msgspec import Meta

from atoll.wire.base import Count, Message, Name

NODES = 1024  # in a view, at most
MOST_ROUND = 2**52  # of a ballot, or of a count in a view; leaves room for higher ones


class Life(NamedTuple):
    """A node in one of its lives: a restart is a new incarnation."""

    node: Count
    incarnation: Count


class Ballot(NamedTuple):
    """A proposer's attempt; the higher one wins. Two nodes never make the same."""

    round: Count
    node: Count


class ViewStruct(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of the parts of these messages."""


class ViewMember(ViewStruct, frozen=True):
    """A node's place in a view: its contributions count from iteration `first` on.

    For a member, the view began with its contributions below `held` and its parts of meetings below
    `meetings`: a voter that lacks some of them does not vote. For a removed node these are its cut: only what
    is below counts. A newcomer takes a state at global iteration `base` or later; `token` is its name when it
    asked to join, and other nodes reach it at `address`.
    """

    life: Life
    first: Count = 0
    held: Count = 0
    meetings: Count = 0
    base: Count = 0
    address: Name = ""
    token: Name = ""


ViewMembers: TypeAlias = Annotated[tuple[ViewMember, ...], Meta(max_length=NODES)]


class View(ViewStruct, frozen=True):
    """`members` in node order, one of each node; `removed` are those whose contributions below their cuts
    some member may still lack; `last` is the highest incarnation that each node has ever had.

    `founding` numbers the run's beginning that the view descends from: a later one has a greater number.
    """

    founding: Count
    number: Count
    members: ViewMembers
    removed: ViewMembers = ()
    last: Annotated[dict[Count, Count], Meta(max_length=NODES)] = {}


class Held(ViewStruct, frozen=True):
    """All contributions of `life` below `iterations`, and its parts of meetings below `meetings`."""

    life: Life
    iterations: Count
    meetings: Count = 0


class Report(ViewStruct, frozen=True):
    """A member's progress in view number `view`: the `iteration` it contributes to next, the numbers of
    iterations `applied` and of meetings `met`, and what it holds whole or has applied (`held`), of all
    members and removed ones of that view."""

    life: Life
    view: Count
    iteration: Count
    applied: Count
    met: Count
    held: Annotated[tuple[Held, ...], Meta(max_length=2 * NODES)]


class Prepare(Message, frozen=True):
    """To the voters of `view`: take part in no lower ballot on what follows it. Answered by Promised, by
    Outbid, or by ViewDecided if the next view is known; not answered by a voter that lacks something that
    the view began with."""

    view: View
    ballot: Ballot


class Promised(Message, frozen=True):
    """A voter acknowledges nothing more of view number `view`, the old one. `accepted` is the view that it
    has accepted to follow, and in which ballot. The witness holds nothing, and has no `report`."""

    founding: Count
    view: Count
    ballot: Ballot
    accepted: tuple[Ballot, View] | None = None
    report: Report | None = None


class Accept(Message, frozen=True):
    """Accept `next` to follow `view`. Answered by Accepted once this voter holds what the next view begins
    with, or by Outbid, or by ViewDecided."""

    view: View
    ballot: Ballot
    next: View


class Accepted(Message, frozen=True):
    """A voter has accepted what follows view number `view`."""

    founding: Count
    view: Count
    ballot: Ballot


class Outbid(Message, frozen=True):
    """A refusal: this voter has promised the higher `ballot`."""

    founding: Count
    view: Count
    ballot: Ballot


class ViewDecided(Message, frozen=True):
    """A decided view: sent to its members, to those that it removes, and to senders of messages about an
    older one."""

    view: View


ViewMessage: TypeAlias = Union[Prepare, Promised, Accept, Accepted, Outbid, ViewDecided]


def flaw_of_view(view: View) -> str:
    """Return why no run has such a view; empty where one may."""
    nodes = [each.life.node for each in view.members]
    lives = [each.life for each in (*view.members, *view.removed)]
    counts = [view.founding, view.number, *view.last.values()]
    for each in (*view.members, *view.removed):
        counts += (each.life.incarnation, each.first, each.held, each.meetings, each.base)
    if not nodes:
        return "a view without members"
    if any(node >= NODES for node in (*nodes, *view.last)):
        return f"a view with a node beyond {NODES - 1}"
    if any(one >= other for one, other in itertools.pairwise(nodes)):
        return "a view whose members are not in order of node, one of each"
    if len(set(lives)) < len(lives):
        return "a view that has an incarnation twice"
    if any(view.last.get(each.life.node, -1) < each.life.incarnation for each in view.members):
        return "a view with a member of an incarnation that no node has had"
    return _flaw_of_counts("a view", counts)


def flaw_of_report(report: Report) -> str:
    """Return why no member makes this report; empty where one may."""
    counts = [report.view, report.iteration, report.applied, report.met, report.life.incarnation]
    for each in report.held:
        counts += (each.iterations, each.meetings)
    return _flaw_of_counts("a report", counts)


def does_follow(view: View, following: View) -> bool:
    """True where `following` may be what is decided after `view`."""
    return (following.founding, following.number) == (view.founding, view.number + 1)


def _flaw_of_counts(what: str, counts: Sequence[int]) -> str:
    """Return why a count is impossible; empty if all are possible. Counts rise from 0, so each must leave
    room for a higher one."""
    most = max(counts, default=0)
    return f"{what} with the number {most}, where {MOST_ROUND} is the most" if most > MOST_ROUND else ""
