"""Views: the numbered lists of the nodes that take part, and what may follow one.

How that is decided, and why nothing is lost: `change.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from atoll.wire.peers import WITNESS
from atoll.wire.peerviews import Ballot, Held, Life, Member, Promised, Report, View, ViewMessage

_NONE = Ballot(0, 0)  # below every proposer's


@dataclass(frozen=True)
class Joiner:
    """A node that asks to join; `token` is its own name for this life, `address` where others reach it."""

    node: int
    token: str
    address: str


@dataclass(frozen=True)
class Wish:
    """What a member would change: whom it wants removed, each with the reason, and who asks to join."""

    remove: Mapping[int, str] = field(default_factory=dict)
    join: Sequence[Joiner] = ()


@dataclass
class Settings:
    """`answer` is within how many seconds voters answer, and `backoff` how many a proposer stands back before
    it begins again; both are measured (`pace.py`) and may be set anew at any time. A newcomer's first
    iteration is `ahead` above the voters': with stale_max + 1 no member can be past it."""

    answer: float
    backoff: float
    ahead: int = 1


@dataclass(frozen=True)
class Fetch:
    """What a member must come to hold, of one stream (0 of the other), and which member of the view has it;
    None: whoever has."""

    held: Held
    source: int | None


@dataclass(frozen=True)
class Step:
    """What to send, to which node (WITNESS: the hub); the view that follows, where it is known now; and what
    was decided here, in words."""

    sends: tuple[tuple[int, ViewMessage], ...] = ()
    decided: View | None = None
    reasons: tuple[str, ...] = ()


@dataclass
class Acceptor:
    """What a voter has promised and accepted, for what follows one view."""

    promised: Ballot = _NONE
    accepted: tuple[Ballot, View] | None = None

    def promise(self, ballot: Ballot) -> bool:
        """Whether it takes part in this ballot, and so in no lower one."""
        if ballot < self.promised:
            return False
        self.promised = ballot
        return True

    def vote(self, ballot: Ballot, following: View) -> bool:
        """Whether it accepts."""
        if not self.promise(ballot):
            return False
        self.accepted = (ballot, following)
        return True

    def said(self, view: View, report: Report) -> Promised:
        """Return the promise to tell who asks what follows `view`."""
        return Promised(
            founding=view.founding,
            view=view.number,
            ballot=self.promised,
            accepted=self.accepted,
            report=report,
        )


def first_view(founding: int, members: Iterable[Member]) -> View:
    """The view that a run begins with: number 1, all from their first iterations on."""
    ordered = tuple(sorted(members, key=lambda member: member.life))
    return View(founding, 1, ordered, last={member.life.node: member.life.incarnation for member in ordered})


def majority(view: View) -> int:
    """How many voters decide what follows `view`, and how many members must hold what is applied in it."""
    return len(view.members) // 2 + 1


def voters(view: View) -> set[int]:
    """The nodes that vote on what follows; in a view of two with the witness."""
    nodes = {member.life.node for member in view.members}
    return nodes | {WITNESS} if len(nodes) == 2 else nodes


def next_view(view: View, wish: Wish, reports: Sequence[Report], ahead: int) -> View:
    """What follows `view` by the reports of a majority of its members, with `wish` granted; of those who ask
    to join as many as can be let in at a time."""
    joiners = {joiner.node: joiner for joiner in reversed(wish.join)}
    out = wish.remove.keys() | joiners.keys()
    top = _top(reports)
    entries = [_with_top(member, top) for member in view.members]
    staying = [member for member in entries if member.life.node not in out]
    removed = [member for member in entries if member.life.node in out]
    voted = {report.life for report in reports} & {member.life for member in staying}
    while len(staying) > 1 and joiners and len(voted) < (len(staying) + len(joiners)) // 2 + 1:
        joiners.popitem()  # or a majority might be left that has no state
    removed = [each for each in view.removed if not _is_done(each, staying, reports)] + removed
    highest = max(
        [report.iteration for report in reports]
        + [held.iterations for held in top.values()]
        + [member.first for member in view.members]
    )
    last = dict(view.last)
    for node, joiner in sorted(joiners.items()):
        last[node] = last.get(node, -1) + 1
        newcomer = Member(
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
    """What has changed from view to view, in words."""
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
    """The most that anybody holds of each life."""
    top: dict[Life, Held] = {}
    for report in reports:
        for held in report.held:
            best = top.get(held.life, held)
            top[held.life] = Held(
                held.life, max(best.iterations, held.iterations), max(best.meetings, held.meetings)
            )
    return top


def _with_top(member: Member, top: Mapping[Life, Held]) -> Member:
    held = top.get(member.life)
    if held is None:
        return member
    return Member(
        member.life,
        member.first,
        max(member.held, held.iterations),
        max(member.meetings, held.meetings),
        member.base,
        member.address,
        member.token,
    )


def _is_done(removed: Member, staying: Sequence[Member], reports: Sequence[Report]) -> bool:
    """Whether all who stay have said that they have applied all of a removed one that counts."""
    applied = {report.life: report for report in reports}
    return all(
        member.life in applied
        and applied[member.life].applied >= removed.held
        and applied[member.life].met >= removed.meetings
        for member in staying
    )


def lacking(report: Report, entries: Iterable[Member]) -> list[Held]:
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
    """What a member of `view` does not hold of what `following` begins with; newcomers have given nothing
    yet."""
    known = {member.life for member in (*view.members, *view.removed)}
    entries = (*following.members, *following.removed)
    return lacking(report, (entry for entry in entries if entry.life in known))
