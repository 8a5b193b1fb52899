"""Which nodes take part: numbered views, each decided by consensus among the members of the one before.

One `Change` decides what follows one view. It is single-decree Paxos: ballots are (round, node), a proposer
asks all voters of the old view to promise, takes over what was accepted in the highest ballot among the
promises of a majority, or else makes the next view from their reports, and has a majority accept it.

Who votes: the members of the old view, by life: a node that was started again knows nothing of it and is a
newcomer. In a view of exactly two members the hub is a third voter, the witness, which holds nothing; any two
of the three are a majority. So two halves never both decide, a half alone never does, and without the hub
both members are needed. In a view of any other size the witness has no vote.

Why nothing that somebody applied is ever lost. Iteration t is applied in a view only when of every member d
a majority of the view's members is known to hold (d, t).
 1. A voter stops acknowledging when it promises (`promised`): what it holds at that moment it reports, and
    what it comes to hold later it tells nobody until the next view. A majority that acknowledged (d, t) and a
    majority that promised have a member in common, which therefore reported (d, t). (In a view of two both
    members must hold it, and one of them is in any majority of voters.) So the highest that any promise
    reports is at least all that was or ever will be applied in the old view, and that is where the next view
    begins (`Member.held`): it is the cut of whom it removes.
 2. That is written in the view, and those after it begin no lower: a cut, once decided, never falls.
 3. A voter accepts the next view only when it holds all that this one begins with (`wanted`), so that this
    does not go with the proposer; and a member does not promise, propose or accept before it holds all that
    its view began with (`ready`). So whatever view is decided, some member of it can give the others what
    counts, also where newcomers with no state yet were most of the voters. Those who are not in the next
    view, and the witness, are asked last: what only they accept, the next view may lack.
 4. A newcomer's first iteration is above everything that a promise reports, so above all that was applied
    without it.
Who has promised waits for the next view, and sees to it that there is one: after a while it proposes itself,
and where the reason has gone meanwhile the next view has the same members.

Source: docs/peers.md, "When an iteration may be applied".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from atoll.wire.peers import WITNESS
from atoll.wire.peerviews import (
    MOST_ROUND,
    Accept,
    Accepted,
    Ballot,
    Held,
    Life,
    Member,
    Outbid,
    Prepare,
    Promised,
    Report,
    View,
    ViewDecided,
    ViewMessage,
    does_follow,
)

_NONE = Ballot(0, 0)  # below every proposer's
_DOUBLINGS = 3  # of a wait, at most
_TIMES = 4  # that a voter is asked within the time for its answer: a message may be lost


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


@dataclass
class _Proposal:
    """This node's own ballot. `following` is known once enough have promised; it is `told` to the voters when
    this node holds what it begins with."""

    ballot: Ballot
    until: float  # then it is given up, or makes do with a majority
    late: float  # then the last voters are asked too
    again: float  # then whoever has not answered is asked again
    promises: dict[int, Promised] = field(default_factory=dict)
    following: View | None = None
    told: bool = False
    asked_last: bool = False
    accepted: set[int] = field(default_factory=set)


class Change:
    """Decides what follows `view`, at its member `me`; a node makes one for each view that it comes to.

    Each method takes `now` in seconds and this node's report as it is then. `promised`: nothing more of
    `view` is to be acknowledged, to others or to oneself. `ready`: this node holds what `view` began with,
    and has a state at all (`has_state`: a newcomer's is set when it is here); before that it has no vote.
    `wanted` is what it should fetch; call `poll` when some of it has come. `deadline` is when to poll next.
    """

    def __init__(self, me: int, view: View, settings: Settings, rng: np.random.Generator) -> None:
        self.view, self.settings = view, settings
        self.promised = self.ready = False
        self.has_state = True
        self.wanted: tuple[Fetch, ...] = ()
        self.deadline = math.inf
        self._me, self._rng = me, rng
        self._life = next(member.life for member in view.members if member.life.node == me)
        self._voters = voters(view)
        self._acceptor = Acceptor()
        self._wish = Wish()
        self._proposal: _Proposal | None = None
        self._asked: tuple[int, Accept] | None = None  # not accepted yet: something is lacking
        self._attempt_at = math.inf
        self._round = 0  # the highest that was seen
        self._sends: list[tuple[int, ViewMessage]] = []
        self._decided: View | None = None
        self._reasons: list[str] = []

    # -- input --------------------------------------------------------------------------------------------

    def handle_wish(self, now: float, wish: Wish, report: Report) -> Step:
        """This is what this member wants changed from now on, instead of what it wanted before."""
        self._wish = wish
        if not self.promised and not self._is_wanted():
            self._attempt_at = math.inf
        elif self._attempt_at == math.inf:  # jitter: others may have the same wish now
            self._attempt_at = now + self.settings.backoff * float(self._rng.random())
        return self._step(now, report)

    def handle_message(self, now: float, sender: int, message: ViewMessage, report: Report) -> Step:
        """Another voter says something. Where that is of a newer view, this is `decided`, and the message is
        lost; who sent it tries again."""
        if isinstance(message, ViewDecided):
            self._learn(message.view)
        elif isinstance(message, (Prepare, Accept)):
            self._handle_asked(now, sender, message, report)
        elif (message.founding, message.view) == (self.view.founding, self.view.number):
            self._note_round(sender, message.ballot)
            self._handle_answer(now, sender, message)
        return self._step(now, report)

    def _note_round(self, sender: int, ballot: Ballot) -> None:
        """Ballots of this node's own are to be higher. Of who has no vote, or a round that leaves no room for
        a higher one, nothing is taken."""
        if sender in self._voters and ballot.round < MOST_ROUND:
            self._round = max(self._round, ballot.round)

    def poll(self, now: float, report: Report) -> Step:
        """Time has passed, or this node has come to hold more."""
        return self._step(now, report)

    # -- as a voter ---------------------------------------------------------------------------------------

    def _handle_asked(self, now: float, sender: int, message: Prepare | Accept, report: Report) -> None:
        if message.view.founding != self.view.founding:
            return
        if message.view.number > self.view.number:
            self._learn(message.view)
            return
        if message.view.number < self.view.number:
            self._sends.append((sender, ViewDecided(view=self.view)))
            return
        self._note_round(sender, message.ballot)
        if isinstance(message, Accept) and not does_follow(self.view, message.next):
            return
        if sender not in self._voters or sender != message.ballot.node or not self._is_ready(report):
            return
        if not self._acceptor.promise(message.ballot):
            self._send(sender, Outbid, self._acceptor.promised)
            return
        self.promised = True
        self._attempt_at = now + self._wait(self.settings.answer) * (2 + 2 * float(self._rng.random()))
        if self._proposal is not None and self._proposal.ballot < message.ballot:
            self._proposal = None
        if self._asked is not None and self._asked[1].ballot < message.ballot:
            self._asked = None
        if isinstance(message, Prepare):
            self._sends.append((sender, self._promise(report)))
        else:
            self._asked = (sender, message)

    def _promise(self, report: Report) -> Promised:
        return Promised(
            founding=self.view.founding,
            view=self.view.number,
            ballot=self._acceptor.promised,
            accepted=self._acceptor.accepted,
            report=report,
        )

    def _accept(self, report: Report) -> None:
        """Accept what was asked, once all that it begins with is here."""
        if self._asked is None:
            return
        sender, asked = self._asked
        if self._lacking(report, asked.next):
            return
        self._asked = None
        if self._acceptor.vote(asked.ballot, asked.next):
            self._send(sender, Accepted, asked.ballot)

    def _learn(self, view: View) -> None:
        if view.founding == self.view.founding and view.number > self.view.number:
            self._decided = view

    # -- as a proposer ------------------------------------------------------------------------------------

    def _handle_answer(self, now: float, sender: int, message: Promised | Accepted | Outbid) -> None:
        proposal = self._proposal
        if proposal is None or sender not in self._voters:
            return
        if isinstance(message, Promised) and not self._is_of_voter(sender, message):
            return
        if isinstance(message, Outbid):
            if message.ballot > proposal.ballot:
                self._stand_back(now, f"{_name(sender)} has promised more to node {message.ballot.node}")
        elif message.ballot != proposal.ballot:
            return
        elif isinstance(message, Accepted):
            proposal.accepted.add(sender)
        elif sender == WITNESS or message.report is not None:
            proposal.promises[sender] = message

    def _is_of_voter(self, sender: int, promised: Promised) -> bool:
        """Whether a voter can have promised this: with its own report, and with what can follow the view."""
        report, accepted = promised.report, promised.accepted
        is_own = report is None or report.life.node == sender
        return is_own and (accepted is None or does_follow(self.view, accepted[1]))

    def _begin(self, now: float, report: Report) -> None:
        """A ballot of one's own, higher than any that was seen."""
        self._round += 1
        ballot = Ballot(self._round, self._me)
        wait = self._wait(self.settings.answer)
        self._acceptor.promise(ballot)
        self.promised = True
        self._asked = None
        self._proposal = _Proposal(ballot, now + wait, math.inf, now + wait / _TIMES)
        self._proposal.promises[self._me] = self._promise(report)
        self._tell(self._voters - {self._me}, Prepare(view=self.view, ballot=ballot))
        wishes = [f"node {node} out ({why})" for node, why in self._wish.remove.items()]
        wishes += [f"node {joiner.node} in" for joiner in self._wish.join]
        reason = ", ".join(wishes) or "who began it has not ended it"
        self._reasons.append(f"what follows view {self.view.number} is proposed: {reason}")

    def _propose(self, now: float, report: Report) -> None:
        """Go on with this node's ballot as far as it goes."""
        proposal = self._proposal
        if proposal is None:
            return
        if proposal.following is None and self._has_promises(now, proposal):
            proposal.following = self._choose(proposal)
            proposal.until = now + 2 * self._wait(self.settings.answer)
        following = proposal.following
        if following is not None and not proposal.told and not self._lacking(report, following):
            self._ask(now, proposal, following)
        if following is not None and proposal.told:
            if not proposal.asked_last and now >= proposal.late:
                self._ask_last(proposal, following)
            if len(proposal.accepted) >= majority(self.view):
                self._decide(following)
                return
        if now >= proposal.again:
            self._ask_again(now, proposal)
        if now >= proposal.until:
            answered = proposal.accepted if proposal.told else proposal.promises.keys()
            names = ", ".join(_name(node) for node in sorted(self._voters - answered))
            lacks = following is not None and not proposal.told
            self._stand_back(now, "what it begins with did not come" if lacks else f"no answer from {names}")

    def _has_promises(self, now: float, proposal: _Proposal) -> bool:
        """All whose answer is hoped for have promised; when their time is over, a majority will do."""
        if len(proposal.promises) < majority(self.view):
            return False
        hoped = {member.life.node for member in self.view.members} - self._wish.remove.keys()
        return now >= proposal.until or hoped <= proposal.promises.keys()

    def _choose(self, proposal: _Proposal) -> View:
        """What was accepted in the highest ballot; where nothing was, a new view by reports and wishes."""
        accepted = [
            promise.accepted for promise in proposal.promises.values() if promise.accepted is not None
        ]
        if accepted:
            return max(accepted, key=lambda pair: pair[0])[1]
        reports = [promise.report for promise in proposal.promises.values() if promise.report is not None]
        return next_view(self.view, self._possible_wish(), reports, self.settings.ahead)

    def _ask(self, now: float, proposal: _Proposal, following: View) -> None:
        """This node holds all that the next view begins with: it accepts, and asks the others to."""
        proposal.told = True
        wait = self._wait(self.settings.answer)
        proposal.late, proposal.until = now + wait, now + 2 * wait
        staying = self._staying(following)
        self._ask_to_accept(proposal, following, staying)
        if len(staying) < majority(self.view):  # they cannot be enough
            self._ask_last(proposal, following)

    def _ask_again(self, now: float, proposal: _Proposal) -> None:
        """A question or its answer may have been lost: whoever has not answered is asked once more."""
        proposal.again = now + self._wait(self.settings.answer) / _TIMES
        if proposal.following is None:
            silent = self._voters - proposal.promises.keys()
            self._tell(silent, Prepare(view=self.view, ballot=proposal.ballot))
        elif proposal.told:
            nodes = self._voters if proposal.asked_last else self._staying(proposal.following)
            self._ask_to_accept(proposal, proposal.following, nodes - proposal.accepted)

    def _ask_last(self, proposal: _Proposal, following: View) -> None:
        proposal.asked_last = True
        self._ask_to_accept(proposal, following, self._voters - self._staying(following))

    def _ask_to_accept(self, proposal: _Proposal, following: View, nodes: set[int]) -> None:
        if self._me in nodes and self._acceptor.vote(proposal.ballot, following):
            proposal.accepted.add(self._me)
        self._tell(nodes - {self._me}, Accept(view=self.view, ballot=proposal.ballot, next=following))

    def _staying(self, following: View) -> set[int]:
        lives = {member.life for member in following.members}
        return {member.life.node for member in self.view.members if member.life in lives}

    def _decide(self, following: View) -> None:
        self._proposal = None
        self._decided = following
        nodes = {member.life.node for member in (*self.view.members, *following.members)}
        self._tell(nodes - {self._me}, ViewDecided(view=following))
        self._reasons.append(describe(self.view, following, self._wish.remove))

    def _stand_back(self, now: float, reason: str) -> None:
        """Give the ballot up, and begin again after a while, with jitter: so duels end."""
        self._proposal = None
        wait = self._wait(self.settings.backoff) * (0.5 + float(self._rng.random()))
        self._attempt_at = now + wait
        self._reasons.append(f"what follows view {self.view.number}: {reason}; again in {wait:.3g} s")

    # -- both ---------------------------------------------------------------------------------------------

    def _step(self, now: float, report: Report) -> Step:
        if self._decided is None:
            self._is_ready(report)
            self._accept(report)
            self._propose(now, report)
            if self._decided is None and self._proposal is None and now >= self._attempt_at:
                self._attempt(now, report)
            self._want(report)
            self.deadline = self._next_deadline(now)
        step = Step(tuple(self._sends), self._decided, tuple(self._reasons))
        self._sends, self._reasons = [], []
        return step

    def _attempt(self, now: float, report: Report) -> None:
        if not self.promised and not self._is_wanted():
            self._attempt_at = math.inf
        elif self.ready:
            self._begin(now, report)
            self._propose(now, report)

    def _next_deadline(self, now: float) -> float:
        if self._decided is not None:
            return math.inf
        if self._proposal is not None:
            last = self._proposal.late if not self._proposal.asked_last else math.inf
            return min(self._proposal.until, self._proposal.again, last)
        # What holds an attempt up ends with a report: who polls with a new one is not kept to a time.
        return self._attempt_at if self._attempt_at > now else now + self.settings.answer

    def _is_ready(self, report: Report) -> bool:
        if self.has_state and not self.ready:
            self.ready = not _lacking(report, (*self.view.members, *self.view.removed))
        return self.ready

    def _lacking(self, report: Report, following: View) -> list[Held]:
        """What this node does not hold of what `following` begins with; newcomers have given nothing yet."""
        known = {member.life for member in (*self.view.members, *self.view.removed)}
        entries = (*following.members, *following.removed)
        return _lacking(report, (entry for entry in entries if entry.life in known))

    def _want(self, report: Report) -> None:
        if not self.ready:
            lacking = _lacking(report, (*self.view.members, *self.view.removed))
            self.wanted = tuple(Fetch(held, None) for held in lacking)
        elif self._asked is not None:
            sender, asked = self._asked
            self.wanted = tuple(Fetch(held, sender) for held in self._lacking(report, asked.next))
        elif self._proposal is not None and self._proposal.following is not None:
            lacking = self._lacking(report, self._proposal.following)
            self.wanted = tuple(Fetch(held, _holder(self._proposal.promises, held)) for held in lacking)
        else:
            self.wanted = ()

    def _is_wanted(self) -> bool:
        """Whether the wish changes anything, and could come true."""
        wish = self._possible_wish()
        return bool(wish.remove or wish.join)

    def _possible_wish(self) -> Wish:
        """The wish, less what concerns nobody; nothing of it where too few voters would be left to decide."""
        nodes = {member.life.node for member in self.view.members}
        tokens = {member.token for member in self.view.members if member.token}
        join = [joiner for joiner in self._wish.join if joiner.token not in tokens]
        remove = {node: why for node, why in self._wish.remove.items() if node in nodes}
        out = remove.keys() | ({joiner.node for joiner in join} & nodes)
        left = len(nodes) - len(out)
        if not left or left + (WITNESS in self._voters) < majority(self.view):
            return Wish()
        return Wish(remove, join)

    def _wait(self, seconds: float) -> float:
        """It doubles with each round, so that a slow network is waited for in the end."""
        return seconds * 2.0 ** min(max(self._round - 1, 0), _DOUBLINGS)

    def _send(self, to: int, kind: type[Accepted] | type[Outbid], ballot: Ballot) -> None:
        self._sends.append((to, kind(founding=self.view.founding, view=self.view.number, ballot=ballot)))

    def _tell(self, nodes: Iterable[int], message: ViewMessage) -> None:
        self._sends += [(node, message) for node in sorted(nodes)]


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


def _lacking(report: Report, entries: Iterable[Member]) -> list[Held]:
    holds = {held.life: held for held in report.held}
    lacking = []
    for entry in entries:
        held = holds.get(entry.life, Held(entry.life, entry.first))
        if held.iterations < entry.held:
            lacking.append(Held(entry.life, entry.held))
        if held.meetings < entry.meetings:
            lacking.append(Held(entry.life, 0, entry.meetings))
    return lacking


def _holder(promises: Mapping[int, Promised], wanted: Held) -> int | None:
    """A voter that holds this much."""
    for node, promise in sorted(promises.items()):
        for held in promise.report.held if promise.report is not None else ():
            enough = held.iterations >= wanted.iterations and held.meetings >= wanted.meetings
            if held.life == wanted.life and enough:
                return node
    return None


def _name(node: int) -> str:
    return "the hub" if node == WITNESS else f"node {node}"
