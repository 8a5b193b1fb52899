"""Decisions on which nodes take part: numbered views, each decided by consensus of the one before.

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
    begins (`ViewMember.held`): it is the cut of whom it removes.
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

import numpy as np

from atoll.peers.proposing import Proposer, Rounds, Saying, Wishes
from atoll.peers.views import (
    Acceptor,
    Fetch,
    Transition,
    ViewChangeSettings,
    Wish,
    lacking,
    lacking_of,
    voters,
)
from atoll.wire.peerviews import (
    Accept,
    Accepted,
    Ballot,
    Outbid,
    Prepare,
    Report,
    View,
    ViewDecided,
    ViewMessage,
    does_follow,
)


class Change:
    """Decides which view follows `view`, at member `me`; a node creates one Change for each view that it
    installs.

    Each method takes `now` (seconds) and this node's current report. `promised`: this node acknowledges
    nothing more of `view`, to others or to itself. `ready`: this node holds all that `view` began with, and
    has a state (`has_state`; set once a newcomer's state has arrived); before that it has no vote. `wanted`
    lists what to fetch; call `poll` when some of it has arrived. `deadline` is when to poll next.
    """

    def __init__(self, me: int, view: View, settings: ViewChangeSettings, rng: np.random.Generator) -> None:
        self.view, self.settings = view, settings
        self.promised = self.ready = False
        self.has_state = True
        self.wanted: tuple[Fetch, ...] = ()
        self.deadline = math.inf
        self._rng, self._voters = rng, voters(view)
        self._acceptor, self._rounds, self._wishes = Acceptor(), Rounds(), Wishes(view)
        self._asked: tuple[int, Accept] | None = None  # not accepted yet: this node lacks something
        self._saying = Saying(view)
        self._proposer = Proposer(
            me, view, settings, rng, self._acceptor, self._rounds, self._wishes, self._saying
        )

    # -- input --------------------------------------------------------------------------------------------

    def handle_wish(self, now: float, wish: Wish, report: Report) -> Transition:
        """Replace this member's wish for the next view."""
        self._wishes.wish = wish
        if not self.promised and not self._wishes.is_any:
            self._rounds.attempt_at = math.inf
        elif self._rounds.attempt_at == math.inf:  # jitter: others may have the same wish now
            self._rounds.attempt_at = now + self.settings.backoff * float(self._rng.random())
        return self._step(now, report)

    def handle_message(self, now: float, sender: int, message: ViewMessage, report: Report) -> Transition:
        """Handle another voter's message. A message of a newer view is not answered: that view becomes
        `decided`, and the sender tries again."""
        if isinstance(message, ViewDecided):
            self._learn(message.view)
        elif isinstance(message, (Prepare, Accept)):
            self._handle_asked(now, sender, message, report)
        elif (message.founding, message.view) == (self.view.founding, self.view.number):
            self._note_round(sender, message.ballot)
            self._proposer.handle_answer(now, sender, message)
        return self._step(now, report)

    def _note_round(self, sender: int, ballot: Ballot) -> None:
        """Note the round of a voter's ballot; ignore nodes without a vote."""
        if sender in self._voters:
            self._rounds.note(ballot)

    def poll(self, now: float, report: Report) -> Transition:
        """Go on: time has passed, or this node holds more."""
        return self._step(now, report)

    # -- as a voter ---------------------------------------------------------------------------------------

    def _handle_asked(self, now: float, sender: int, message: Prepare | Accept, report: Report) -> None:
        if message.view.founding != self.view.founding:
            return
        if message.view.number > self.view.number:
            self._learn(message.view)
            return
        if message.view.number < self.view.number:
            self._saying.send(sender, ViewDecided(view=self.view))
            return
        self._note_round(sender, message.ballot)
        if isinstance(message, Accept) and not does_follow(self.view, message.next):
            return
        if sender not in self._voters or sender != message.ballot.node or not self._is_ready(report):
            return
        if not self._acceptor.promise(message.ballot):
            self._saying.answer(sender, Outbid, self._acceptor.promised)
            return
        self.promised = True
        wait = self._rounds.wait(self.settings.answer)
        self._rounds.attempt_at = now + wait * (2 + 2 * float(self._rng.random()))
        self._proposer.give_way(message.ballot)
        if self._asked is not None and self._asked[1].ballot < message.ballot:
            self._asked = None
        if isinstance(message, Prepare):
            self._saying.send(sender, self._acceptor.said(self.view, report))
        else:
            self._asked = (sender, message)

    def _accept(self, report: Report) -> None:
        """Accept the view that a proposer asked for, once this node holds all that the view begins with."""
        if self._asked is None:
            return
        sender, asked = self._asked
        if lacking_of(self.view, report, asked.next):
            return
        self._asked = None
        if self._acceptor.vote(asked.ballot, asked.next):
            self._saying.answer(sender, Accepted, asked.ballot)

    def _learn(self, view: View) -> None:
        if view.founding == self.view.founding and view.number > self.view.number:
            self._saying.decided = view

    # -- both ---------------------------------------------------------------------------------------------

    def _step(self, now: float, report: Report) -> Transition:
        if self._saying.decided is None:
            self._is_ready(report)
            self._accept(report)
            self._proposer.propose(now, report)
            has_none = self._saying.decided is None and self._proposer.proposal is None
            if has_none and now >= self._rounds.attempt_at:
                self._attempt(now, report)
            self.wanted = self._want(report)
            self.deadline = self._next_deadline(now)
        return self._saying.take()

    def _attempt(self, now: float, report: Report) -> None:
        if not self.promised and not self._wishes.is_any:
            self._rounds.attempt_at = math.inf
        elif self.ready:
            self.promised, self._asked = True, None
            self._proposer.begin(now, report)
            self._proposer.propose(now, report)

    def _next_deadline(self, now: float) -> float:
        if self._saying.decided is not None:
            return math.inf
        if self._proposer.proposal is not None:
            return self._proposer.deadline
        # An attempt that is due waits only for a new report, and a poll with a new report needs no deadline.
        attempt_at = self._rounds.attempt_at
        return attempt_at if attempt_at > now else now + self.settings.answer

    def _is_ready(self, report: Report) -> bool:
        if self.has_state and not self.ready:
            self.ready = not lacking(report, (*self.view.members, *self.view.removed))
        return self.ready

    def _want(self, report: Report) -> tuple[Fetch, ...]:
        """Return what this node is to fetch."""
        if not self.ready:
            found = lacking(report, (*self.view.members, *self.view.removed))
            return tuple(Fetch(held, None) for held in found)
        if self._asked is not None:
            sender, asked = self._asked
            return tuple(Fetch(held, sender) for held in lacking_of(self.view, report, asked.next))
        return tuple(Fetch(held, source) for held, source in self._proposer.wanted(report))
