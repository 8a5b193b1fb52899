"""A node's own ballots on the view that follows its view."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from atoll.peers.views import (
    Acceptor,
    Transition,
    ViewChangeSettings,
    Wish,
    describe,
    lacking_of,
    majority,
    next_view,
    voters,
)
from atoll.wire.peers import WITNESS
from atoll.wire.peerviews import (
    MOST_ROUND,
    Accept,
    Accepted,
    Ballot,
    Held,
    Outbid,
    Prepare,
    Promised,
    Report,
    View,
    ViewDecided,
    ViewMessage,
    does_follow,
)

_DOUBLINGS = 3  # of a wait, at most, one with each round
_TIMES = 4  # a voter is asked within the time for its answer: a message may be lost


class Saying:
    """Collects a member's messages about what follows `view`, until they are taken. `decided` is the view
    that follows, once known."""

    def __init__(self, view: View) -> None:
        self.decided: View | None = None
        self._view = view
        self._sends: list[tuple[int, ViewMessage]] = []
        self._reasons: list[str] = []

    def send(self, to: int, message: ViewMessage) -> None:
        self._sends.append((to, message))

    def answer(self, to: int, kind: type[Accepted] | type[Outbid], ballot: Ballot) -> None:
        self.send(to, kind(founding=self._view.founding, view=self._view.number, ballot=ballot))

    def tell(self, nodes: Iterable[int], message: ViewMessage) -> None:
        self._sends += [(node, message) for node in sorted(nodes)]

    def reason(self, line: str) -> None:
        """Add the reason of a decision."""
        self._reasons.append(line)

    def take(self) -> Transition:
        step = Transition(tuple(self._sends), self.decided, tuple(self._reasons))
        self._sends, self._reasons = [], []
        return step


class Rounds:
    """The rounds of ballots about one view: the highest seen, and the time at which this node begins a
    ballot of its own (`attempt_at`; infinity: it does not)."""

    def __init__(self) -> None:
        self.attempt_at = math.inf
        self._highest = 0

    def note(self, ballot: Ballot) -> None:
        """Make this node's own ballots higher than `ballot`. A round that leaves no room for a higher one
        is ignored."""
        if ballot.round < MOST_ROUND:
            self._highest = max(self._highest, ballot.round)

    def begin(self) -> int:
        """Return the round of a ballot of this node, higher than any seen."""
        self._highest += 1
        return self._highest

    def wait(self, seconds: float) -> float:
        """Return a wait that doubles with each round, so that even a slow network gets enough time."""
        return seconds * 2.0 ** min(max(self._highest - 1, 0), _DOUBLINGS)


class Wishes:
    """A member's wish to change `view`; `wish` may be set at any time."""

    def __init__(self, view: View) -> None:
        self.wish = Wish()
        self._view, self._has_witness = view, WITNESS in voters(view)

    @property
    def is_any(self) -> bool:
        """True if the wish changes anything and can come true."""
        possible = self.possible()
        return bool(possible.remove or possible.join)

    def possible(self) -> Wish:
        """Return the wish without nodes that it cannot concern; an empty wish if too few voters would be
        left to decide."""
        nodes = {member.life.node for member in self._view.members}
        tokens = {member.token for member in self._view.members if member.token}
        join = [joiner for joiner in self.wish.join if joiner.token not in tokens]
        remove = {node: why for node, why in self.wish.remove.items() if node in nodes}
        out = remove.keys() | ({joiner.node for joiner in join} & nodes)
        left = len(nodes) - len(out)
        if not left or left + self._has_witness < majority(self._view):
            return Wish()
        return Wish(remove, join)


@dataclass
class _Proposal:
    """A node's own ballot. `following` is known once enough voters have promised; it is `told` to the
    voters once this node holds what that view begins with."""

    ballot: Ballot
    until: float  # when the ballot is given up, or makes do with a majority
    late: float  # when the last voters are asked too
    again: float  # when voters that have not answered are asked again
    promises: dict[int, Promised] = field(default_factory=dict)
    following: View | None = None
    told: bool = False
    asked_last: bool = False
    accepted: set[int] = field(default_factory=set)


class Proposer:
    """Node `me`, one of the voters, as proposer. `proposal` is its ballot; None: it has none.

    Ballots, promises and accepted views are Paxos's (`change.py`).
    """

    def __init__(
        self,
        me: int,
        view: View,
        settings: ViewChangeSettings,
        rng: np.random.Generator,
        acceptor: Acceptor,
        rounds: Rounds,
        wishes: Wishes,
        saying: Saying,
    ) -> None:
        self.proposal: _Proposal | None = None
        self._me, self._view, self._voters = me, view, voters(view)
        self._settings, self._rng, self._acceptor = settings, rng, acceptor
        self._rounds, self._wishes, self._saying = rounds, wishes, saying

    @property
    def deadline(self) -> float:
        """Time at which to go on with the ballot; infinity: there is none."""
        proposal = self.proposal
        if proposal is None:
            return math.inf
        return min(proposal.until, proposal.again, math.inf if proposal.asked_last else proposal.late)

    def give_way(self, ballot: Ballot) -> None:
        """Give up a ballot of this node that is lower than one that it has promised."""
        if self.proposal is not None and self.proposal.ballot < ballot:
            self.proposal = None

    def wanted(self, report: Report) -> list[tuple[Held, int | None]]:
        """Return what this node lacks of the view that it would propose, each with the voter that has it."""
        if self.proposal is None or self.proposal.following is None:
            return []
        found = lacking_of(self._view, report, self.proposal.following)
        return [(held, _holder(self.proposal.promises, held)) for held in found]

    def handle_answer(self, now: float, sender: int, message: Promised | Accepted | Outbid) -> None:
        proposal = self.proposal
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
        """True if a voter can have promised this: its own report, and a view that can follow this one."""
        report, accepted = promised.report, promised.accepted
        is_own = report is None or report.life.node == sender
        return is_own and (accepted is None or does_follow(self._view, accepted[1]))

    def begin(self, now: float, report: Report) -> None:
        """Begin a ballot of this node, higher than any seen."""
        ballot = Ballot(self._rounds.begin(), self._me)
        wait = self._rounds.wait(self._settings.answer)
        self._acceptor.promise(ballot)
        self.proposal = _Proposal(ballot, now + wait, math.inf, now + wait / _TIMES)
        self.proposal.promises[self._me] = self._acceptor.said(self._view, report)
        self._saying.tell(self._voters - {self._me}, Prepare(view=self._view, ballot=ballot))
        wishes = [f"node {node} out ({why})" for node, why in self._wishes.wish.remove.items()]
        wishes += [f"node {joiner.node} in" for joiner in self._wishes.wish.join]
        reason = ", ".join(wishes) or "who began it has not ended it"
        self._saying.reason(f"what follows view {self._view.number} is proposed: {reason}")

    def propose(self, now: float, report: Report) -> None:
        """Go on with this node's ballot as far as it goes."""
        proposal = self.proposal
        if proposal is None:
            return
        if proposal.following is None and self._has_promises(now, proposal):
            proposal.following = self._choose(proposal)
            proposal.until = now + 2 * self._rounds.wait(self._settings.answer)
        following = proposal.following
        if following is not None and not proposal.told and not lacking_of(self._view, report, following):
            self._ask(now, proposal, following)
        if following is not None and proposal.told:
            if not proposal.asked_last and now >= proposal.late:
                self._ask_last(proposal, following)
            if len(proposal.accepted) >= majority(self._view):
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
        """True once all members that this node does not wish to remove have promised; after their time is
        over, a majority is enough."""
        if len(proposal.promises) < majority(self._view):
            return False
        hoped = {member.life.node for member in self._view.members} - self._wishes.wish.remove.keys()
        return now >= proposal.until or hoped <= proposal.promises.keys()

    def _choose(self, proposal: _Proposal) -> View:
        """Return the view accepted in the highest ballot; if none was, a new view by reports and wishes."""
        accepted = [
            promise.accepted for promise in proposal.promises.values() if promise.accepted is not None
        ]
        if accepted:
            return max(accepted, key=lambda pair: pair[0])[1]
        reports = [promise.report for promise in proposal.promises.values() if promise.report is not None]
        return next_view(self._view, self._wishes.possible(), reports, self._settings.ahead)

    def _ask(self, now: float, proposal: _Proposal, following: View) -> None:
        """Accept the next view, and ask the others to: this node holds all that the view begins with."""
        proposal.told = True
        wait = self._rounds.wait(self._settings.answer)
        proposal.late, proposal.until = now + wait, now + 2 * wait
        staying = self._staying(following)
        self._ask_to_accept(proposal, following, staying)
        if len(staying) < majority(self._view):  # those that stay are no majority
            self._ask_last(proposal, following)

    def _ask_again(self, now: float, proposal: _Proposal) -> None:
        """Repeat the question to voters that have not answered: it or the answer may be lost."""
        proposal.again = now + self._rounds.wait(self._settings.answer) / _TIMES
        if proposal.following is None:
            silent = self._voters - proposal.promises.keys()
            self._saying.tell(silent, Prepare(view=self._view, ballot=proposal.ballot))
        elif proposal.told:
            nodes = self._voters if proposal.asked_last else self._staying(proposal.following)
            self._ask_to_accept(proposal, proposal.following, nodes - proposal.accepted)

    def _ask_last(self, proposal: _Proposal, following: View) -> None:
        proposal.asked_last = True
        self._ask_to_accept(proposal, following, self._voters - self._staying(following))

    def _ask_to_accept(self, proposal: _Proposal, following: View, nodes: set[int]) -> None:
        if self._me in nodes and self._acceptor.vote(proposal.ballot, following):
            proposal.accepted.add(self._me)
        self._saying.tell(nodes - {self._me}, Accept(view=self._view, ballot=proposal.ballot, next=following))

    def _staying(self, following: View) -> set[int]:
        lives = {member.life for member in following.members}
        return {member.life.node for member in self._view.members if member.life in lives}

    def _decide(self, following: View) -> None:
        self.proposal = None
        self._saying.decided = following
        nodes = {member.life.node for member in (*self._view.members, *following.members)}
        self._saying.tell(nodes - {self._me}, ViewDecided(view=following))
        self._saying.reason(describe(self._view, following, self._wishes.wish.remove))

    def _stand_back(self, now: float, reason: str) -> None:
        """Give the ballot up, and begin again after a wait with jitter, so that duels end."""
        self.proposal = None
        wait = self._rounds.wait(self._settings.backoff) * (0.5 + float(self._rng.random()))
        self._rounds.attempt_at = now + wait
        self._saying.reason(f"what follows view {self._view.number}: {reason}; again in {wait:.3g} s")


def _holder(promises: Mapping[int, Promised], wanted: Held) -> int | None:
    """Return a voter that holds at least `wanted`, or None."""
    for node, promise in sorted(promises.items()):
        for held in promise.report.held if promise.report is not None else ():
            enough = held.iterations >= wanted.iterations and held.meetings >= wanted.meetings
            if held.life == wanted.life and enough:
                return node
    return None


def _name(node: int) -> str:
    return "the hub" if node == WITNESS else f"node {node}"
