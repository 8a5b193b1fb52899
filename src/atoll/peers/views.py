"""Views: the numbered lists of the nodes that take part, and the views that may follow one.

`change.py` explains how the next view is decided, and why nothing is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from atoll.wire.peers import WITNESS
from atoll.wire.peerviews import Ballot, Held, Life, Promised, Report, View, ViewMember, ViewMessage

_NONE = Ballot(0, 0)  # below every proposer's ballot


@dataclass(frozen=True)
class Joiner:
    """A node that asks to join. `token` names this process alone; other nodes reach it at `address`."""

    node: int
    token: str
    address: str


@dataclass(frozen=True)
class Wish:
    """The changes that a member wishes: nodes to remove, each with the reason, and nodes that ask to join."""

    remove: Mapping[int, str] = field(default_factory=dict)
    join: Sequence[Joiner] = ()


@dataclass
class ViewChangeSettings:
    """Settings of a change of the view.

    Voters answer within `answer` seconds, and a proposer stands back for `backoff` seconds before it begins
    again; both are measured (`pace.py`) and may be set at any time. A newcomer's first iteration is `ahead`
    above the voters'; with stale_max + 1 no member can be past it.
    """

    answer: float
    backoff: float
    ahead: int = 1


@dataclass(frozen=True)
class Fetch:
    """The contributions to hold, of one stream (0 of the other), and the node of a member that has them;
    None: any member."""

    held: Held
    source: int | None


@dataclass(frozen=True)
class Transition:
    """The messages to send, each with its node (WITNESS: the hub); the view that follows, if known now;
    and the decisions made here, in words."""

    sends: tuple[tuple[int, ViewMessage], ...] = ()
    decided: View | None = None
    reasons: tuple[str, ...] = ()


@dataclass
class Acceptor:
    """The promise and vote of one voter on what follows one view."""

    promised: Ballot = _NONE
    accepted: tuple[Ballot, View] | None = None

    def promise(self, ballot: Ballot) -> bool:
        """Promise a ballot, and so take part in no lower one; False if a higher one is promised."""
        if ballot < self.promised:
            return False
        self.promised = ballot
        return True

    def vote(self, ballot: Ballot, following: View) -> bool:
        """Accept `following` in a ballot; False if a higher ballot is promised."""
        if not self.promise(ballot):
            return False
        self.accepted = (ballot, following)
        return True

    def said(self, view: View, report: Report) -> Promised:
        """Return the promise as a message, for a proposer."""
        return Promised(
            founding=view.founding,
            view=view.number,
            ballot=self.promised,
            accepted=self.accepted,
            report=report,
        )


def first_view(founding: int, members: Iterable[ViewMember]) -> View:
    """Return the view that a run begins with: number 1, all members from their first iterations on."""
    ordered = tuple(sorted(members, key=lambda member: member.life))
    return View(founding, 1, ordered, last={member.life.node: member.life.incarnation for member in ordered})


def majority(view: View) -> int:
    """Return the number of voters that decide what follows `view`, which is also the number of members
    that must hold what is applied in it."""
    return len(view.members) // 2 + 1


def voters(view: View) -> set[int]:
    """Return the nodes that vote on what follows `view`; in a view of two members, these and the witness."""
    nodes = {member.life.node for member in view.members}
    return nodes | {WITNESS} if len(nodes) == 2 else nodes


def next_view(view: View, wish: Wish, reports: Sequence[Report], ahead: int) -> View:
    """Return the view that follows `view` by the reports of a majority, with `wish` granted. Of the nodes
    that ask to join, as many as possible at a time are let in."""
    joiners = {joiner.node: joiner for joiner in reversed(wish.join)}
    out = wish.remove.keys() | joiners.keys()
    top = _top(reports)
    entries = [_with_top(member, top) for member in view.members]
    staying = [member for member in entries if member.life.node not in out]
    removed = [member for member in entries if member.life.node in out]
    voted = {report.life for report in reports} & {member.life for member in staying}
    while len(staying) > 1 and joiners and len(voted) < (len(staying) + len(joiners)) // 2 + 1:
        joiners.popitem()  # otherwise a majority might have no state
    removed = [each for each in view.removed if not _is_done(each, staying, reports)] + removed
    highest = max(
        [report.iteration for report in reports]
        + [held.iterations for held in top.values()]
        + [member.first for member in view.members]
    )
    last = dict(view.last)
    for node, joiner in sorted(joiners.items()):
        last[node] = last.get(node, -1) + 1
        newcomer = ViewMember(
            Life(node, last[node]),
            first=highest + ahead,
            held=highest + ahead,
            meetings=max(report.met for report in reports),
            base=max(report.applied for report in reports),
            address=joiner.address,
            token=joiner.token,
        )
        staying.append(newcomer)
    members = tuple(sorted(staying, key=lambda member: member.life))
    return View(view.founding, view.number + 1, members, tuple(removed), last)


def describe(before: View, after: View, reasons: Mapping[int, str] = {}) -> str:
    """Return the changes between two views, in words."""
    was, now = ({member.life for member in view.members} for view in (before, after))
    words = [
        f"node {each.life.node} is out{_because(reasons.get(each.life.node))}: its iterations below "
        f"{each.held} count"
        for each in after.removed
        if each.life in was - now
    ]
    words += [
        f"node {member.life.node} is in from iteration {member.first}"
        for member in after.members
        if member.life not in was
    ]
    nodes = ", ".join(str(member.life.node) for member in after.members)
    return f"view {after.number}, nodes {nodes}: {'; '.join(words) or 'the same members'}"


def _because(reason: str | None) -> str:
    return f" ({reason})" if reason else ""


def _top(reports: Iterable[Report]) -> dict[Life, Held]:
    """Return the most that any report holds of each life."""
    top: dict[Life, Held] = {}
    for report in reports:
        for held in report.held:
            best = top.get(held.life, held)
            top[held.life] = Held(
                held.life, max(best.iterations, held.iterations), max(best.meetings, held.meetings)
            )
    return top


def _with_top(member: ViewMember, top: Mapping[Life, Held]) -> ViewMember:
    held = top.get(member.life)
    if held is None:
        return member
    return ViewMember(
        member.life,
        member.first,
        max(member.held, held.iterations),
        max(member.meetings, held.meetings),
        member.base,
        member.address,
        member.token,
    )


def _is_done(removed: ViewMember, staying: Sequence[ViewMember], reports: Sequence[Report]) -> bool:
    """True if all who stay report to have applied all of a removed member's contributions that count."""
    applied = {report.life: report for report in reports}
    return all(
        member.life in applied
        and applied[member.life].applied >= removed.held
        and applied[member.life].met >= removed.meetings
        for member in staying
    )


def lacking(report: Report, entries: Iterable[ViewMember]) -> list[Held]:
    holds = {held.life: held for held in report.held}
    found = []
    for entry in entries:
        held = holds.get(entry.life, Held(entry.life, entry.first))
        if held.iterations < entry.held:
            found.append(Held(entry.life, entry.held))
        if held.meetings < entry.meetings:
            found.append(Held(entry.life, 0, entry.meetings))
    return found


def lacking_of(view: View, report: Report, following: View) -> list[Held]:
    """Return what a member of `view` does not hold of what `following` begins with. Newcomers have given
    nothing yet."""
    known = {member.life for member in (*view.members, *view.removed)}
    entries = (*following.members, *following.removed)
    return lacking(report, (entry for entry in entries if entry.life in known))
