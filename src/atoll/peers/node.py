"""A node's state machine: what it has made, what it holds, what may be applied, and what it waits for."""

from __future__ import annotations

import math

import numpy as np

from atoll.peers.contributions import Contributions
from atoll.peers.delivery import Delivery, Dropping
from atoll.peers.entrance import Asking, Entrance
from atoll.peers.fetching import Fetching
from atoll.peers.joiners import Joiners
from atoll.peers.membership import Membership
from atoll.peers.outbox import Outbox
from atoll.peers.outputs import Drop, Output, SendPart
from atoll.peers.ownscript import OwnScript
from atoll.peers.pace import Limit
from atoll.peers.progress import Progress
from atoll.peers.reporting import Reporting
from atoll.peers.requests import Requests
from atoll.peers.scripts import Scripts
from atoll.peers.settings import NodeSettings
from atoll.peers.standing import Due, NodeStanding, name_of
from atoll.peers.suspicion import Suspicion
from atoll.peers.synchronise import Synchronisation
from atoll.peers.waits import NodeWaits
from atoll.peers.watch import Judge, Watch, unseen
from atoll.wire.peers import (
    AbortRound,
    AnswerRound,
    AskJoin,
    AskRound,
    EndRound,
    FetchParts,
    JoinOver,
    Key,
    NodeReport,
    PeerMessage,
    RefuseRound,
    ScriptsDiffer,
)
from atoll.wire.peerviews import Accept, Accepted, Life, Outbid, Prepare, Promised, Report, View, ViewDecided
from atoll.wire.workerstand import WorkerStand

_OF_VIEWS = (Prepare, Promised, Accept, Accepted, Outbid)


class Node:
    """A node of a run under strategy `peers`. Each call takes `now` (seconds of a monotonic clock) and
    returns what is to be done, in order; `deadline` says when `poll` is due at the latest.

    The runtime keeps the payloads under their keys. Iteration numbers never go back: if a script loads an
    earlier checkpoint the runtime keeps the difference. Source: docs/peers.md.

    `waits` says what the node waits for, and `sync` has its synchronisation rounds.
    """

    def __init__(
        self,
        life: Life,
        view: View,
        settings: NodeSettings,
        rng: np.random.Generator,
        now: float,
        asking: Asking | None = None,
        known: View | None = None,
        judge: Judge = unseen,
    ) -> None:
        """Create a founding member of `view`; `poll` makes it begin.

        Its first iteration and its W are its `first` in the view. `judge` looks at the processes of silent
        members. `asking` and `known` are for `joining` alone. Raises ValueError if `life` is not in `view`.
        """
        entry = next((member for member in view.members if member.life == life), None)
        if asking is None and entry is None:
            raise ValueError(f"{name_of(life)} is not in view {view.number}")
        self.settings = settings
        at = self._at = NodeStanding(life, iteration=0 if entry is None else entry.first)
        out = self._out = Outbox()
        due = self._due = Due()
        held = self._held = Contributions(at, settings, out, due)
        self._script, self._scripts = OwnScript(), Scripts()
        self.watch, self._joiners = Watch(settings, judge), Joiners(at, settings, out)
        self._entrance = Entrance(at, held, settings, out, now, asking, known)
        self._progress = Progress(at, held, self._script, out, due, now)
        self._suspicion = Suspicion(
            at, held, self._script, self._scripts, self._progress, self.watch, self._joiners, due
        )
        self._delivery, self._dropping = Delivery(at, held, settings, out), Dropping(held, out)
        self._fetching = Fetching(Limit("a contribution's way", *settings.fetch, start=settings.heartbeat))
        self._requests = Requests(at, held, self._entrance, self._fetching, out, due)
        self._reporting = Reporting(
            at, held, self._script, self._scripts, self.watch, settings, out, due, now
        )
        self.sync = Synchronisation(life.node, settings, rng, held, out)
        self.waits = NodeWaits(at, held, self._script, self._suspicion, self._entrance)
        parts = (
            self._suspicion,
            self._dropping,
            self.sync,
            self._delivery,
            self._joiners,
            self._entrance,
        )
        self._membership = Membership(
            at, held, self._entrance, self._suspicion, self.sync, parts, settings, rng, out, due
        )
        if asking is None:
            self._membership.install(now, view, None)

    @classmethod
    def joining(
        cls,
        node: int,
        token: str,
        address: str,
        contacts: list[int],
        settings: NodeSettings,
        rng: np.random.Generator,
        now: float,
        known: View | None = None,
        judge: Judge = unseen,
    ) -> Node:
        """Create a node that asks `contacts` (node ids) until it is in a view; then it hands out ViewChanged
        and FetchState.

        `token` is a name that no other process has. `known` is the newest view that this process knows (from
        Removed): others may not know it, and its members may be gone.
        """
        asking = Asking(token, address, tuple(contact for contact in contacts if contact != node))
        return cls(Life(node, 0), View(0, 0, ()), settings, rng, now, asking, known, judge)

    # -- where it stands ----------------------------------------------------------------------------------

    @property
    def life(self) -> Life:
        """The node and its incarnation; a joiner's incarnation is 0 until it is in a view."""
        return self._at.life

    @property
    def view(self) -> View:
        """The newest view that the node has learned; empty for a joiner."""
        return self._at.view

    @property
    def iteration(self) -> int:
        """The iteration k that the node makes next."""
        return self._at.iteration

    @property
    def applied(self) -> int:
        """W_i: iterations whose Apply is done."""
        return self._held.applied

    @property
    def met(self) -> int:
        """Number of meetings that have taken place at this node."""
        return self._held.met

    @property
    def has_met(self) -> bool:
        """True once the node has been in a meeting of its own."""
        return self._held.has_met

    @property
    def is_member(self) -> bool:
        """False for a joiner that is in no view yet, and for a node that was removed."""
        return self._at.is_member

    @property
    def is_whole(self) -> bool:
        """True for a member that has its state; a joiner has none at first."""
        return self._at.is_whole

    @property
    def is_ready(self) -> bool:
        """True if the node holds all that its view began with, and so votes on the next. A majority that
        is not ready cannot go on without the others."""
        return self._membership.is_ready

    # -- the devices --------------------------------------------------------------------------------------

    def handle_contributed(self, now: float, iteration: int) -> list[Output]:
        """Record that the node's own contribution is whole in M_i: k becomes `iteration` + 1. Raises
        ValueError if `iteration` is not this node's next."""
        at = self._at
        if not at.is_whole:
            return self._out.take()  # what it computed counts nowhere
        if iteration != at.iteration:
            raise ValueError(
                f"{name_of(at.life)} contributes iteration {iteration}; its next is {at.iteration}"
            )
        at.iteration += 1
        self._delivery.give(Key("iterations", iteration, at.life))
        return self.poll(now)

    def handle_wanted(
        self, now: float, iteration: int, least: int, stand: WorkerStand | None = None
    ) -> list[Output]:
        """Record that devices wait for parameters of global iteration `least` or later to compute
        `iteration`.

        `least` is `iteration` - stale_max, or more where the script wants all iterations applied. A Grant
        answers, now or later. Until then synchronisation rounds start by the rules. A repeated call replaces
        the former one. `stand` is the script's place. Raises ValueError for a `least` above `iteration`.
        """
        if least > iteration:
            raise ValueError(f"iteration {iteration} cannot need global iteration {least}")
        self._script.want(now, iteration, least, stand)
        self._due.suspects_at = -math.inf
        return self.poll(now)

    def handle_applied(self, now: float, iteration: int) -> list[Output]:
        """Record that an Apply is done: W_i becomes `iteration` + 1. Raises ValueError if it was not this
        node's next Apply."""
        if iteration != self.applied or iteration >= self._held.iterations.ordered:
            raise ValueError(
                f"iteration {iteration} is applied at {name_of(self.life)}, whose W is {self.applied}"
            )
        self.sync.rest.note(self._progress.handle_applied(now, iteration))
        return self.poll(now)

    def handle_met(self, now: float, number: int, at: int, stand: WorkerStand | None = None) -> list[Output]:
        """Record that the node's own part of its `number`-th meeting is in M_i.

        `at` is the iteration at whose beginning the script last was. Members that joined later take part if
        their first iteration is `at` or before. A joiner's first `number` is the number that the others'
        scripts had when they came to the joiner's first iteration. `stand` is the script's place. Raises
        ValueError where `number` is not the node's next meeting.
        """
        if not self.is_member:
            return self._out.take()
        if self.waits.is_meeting or (self.has_met and number != self.met) or number < self.met:
            raise ValueError(f"{name_of(self.life)} comes to meeting {number}; its next is {self.met}")
        if not self.has_met:
            self._held.meet_first(number)
        self._script.come_to(now, number, at, stand)
        self._delivery.give(Key("meetings", number, self.life))
        self._due.suspects_at, self._due.report = -math.inf, True
        return self.poll(now)

    def handle_finished(self, now: float) -> list[Output]:
        """Record that the script has ended: it makes no other iteration and comes to no other meeting.
        Finished is handed out when every member has all that this one has made (or is gone), or after
        `linger` seconds."""
        if self._script.finished_at == math.inf:
            self._script.finish(now)
            self._due.report = True
        return self.poll(now)

    def handle_replaced(self, now: float) -> list[Output]:
        """Record that all scripts load a checkpoint. Newcomers that have not begun must join once more,
        since their state may be from before."""
        self._suspicion.handle_replaced()
        return self.poll(now)

    def handle_differ(self, line: str) -> list[Output]:
        """End the run: a meeting shows that scripts stand at inconsistent places. `line` describes them."""
        self._reporting.tell_differ(line)
        return self._out.take()

    def handle_state(self, now: float, iteration: int) -> list[Output]:
        """Record that a joiner's state, of global iteration `iteration`, has arrived: W_i is `iteration`
        now. Raises ValueError if it is older than was asked for."""
        if self._at.source is None or not self.is_member:
            return self._out.take()
        self._entrance.take_state(iteration)
        self._due.report = self._due.change = self._due.missing = True
        return self.poll(now)

    def handle_state_failed(self, now: float, source: int, reason: str) -> list[Output]:
        """Ask another member for a joiner's state: `source` does not give its own (in time)."""
        if self._at.source is not None and self.is_member:
            self._out.note("no state", f"node {source}", reason)
            self._entrance.ask_another(source)
        return self.poll(now)

    # -- the network --------------------------------------------------------------------------------------

    def handle_message(self, now: float, sender: int, message: PeerMessage) -> list[Output]:
        """Handle a message from a node, by its id (WITNESS: the hub). A message of an old view changes
        nothing and is answered by the newest view; one of another incarnation than the view's is dropped."""
        membership = self._membership
        if isinstance(message, AskJoin):
            self._joiners.handle_ask(now, sender, message)
        elif isinstance(message, JoinOver):
            if self._entrance.is_over(message):
                membership.leave("it was let in and removed again before it knew")
        elif isinstance(message, ViewDecided):
            if membership.may_tell(sender, message.view):
                membership.learn(message.view, now)
        elif not self.is_member:
            self._entrance.tell_known(sender, message)
        elif isinstance(message, _OF_VIEWS):
            if membership.may_say(sender, message):
                self.watch.handle_heard(now, sender)
                membership.handle_message(now, sender, message)
        elif self._reporting.is_current(now, sender, message.report):
            self.watch.handle_heard(now, sender)
            self._absorb(now, message.report)
            self._dispatch(now, sender, message)
        return self.poll(now)

    def _dispatch(self, now: float, sender: int, message: PeerMessage) -> None:
        if isinstance(message, NodeReport):
            if message.whole:
                self.watch.handle_whole(message.report.life)
            if message.finished:
                self.watch.handle_finished(message.report.life)
                self._due.suspects_at = -math.inf
            self._reporting.handle_report(message)
        elif isinstance(message, ScriptsDiffer):
            self._reporting.differ(message.line)
        elif isinstance(message, FetchParts):
            for key in dict.fromkeys(message.keys):  # each once
                if self._held.ledger(key).has(key):
                    self._out.add(SendPart(sender, key))
        elif isinstance(message, AskRound):
            self.sync.handle_ask(now, sender, message.round)
        elif isinstance(message, AnswerRound):
            self.sync.handle_answer(now, message)
        elif isinstance(message, RefuseRound):
            self.sync.handle_refusal(now, sender, message.round)
        elif isinstance(message, (EndRound, AbortRound)) and message.round.node != sender:
            pass  # a round is its starter's to end
        elif isinstance(message, EndRound):
            for report in message.reports:
                is_other = report.view == self.view.number and report.life in self._held.iterations.acks
                if is_other and self._held.is_possible(report):
                    self._absorb(now, report)
            self.sync.handle_over(message.round, f"ended: the least iteration is {message.iteration}")
        elif isinstance(message, AbortRound):
            self.sync.handle_over(message.round, "given up by its starter")

    def _absorb(self, now: float, report: Report) -> None:
        """Take over what a member holds and has done."""
        if self._held.absorb(report):
            self.watch.handle_iteration(now, report.life, report.iteration, report.applied)

    def refusal(self, key: Key) -> str:
        """Return why the payload of `key` is not taken now; empty if it is taken."""
        return self._held.refusal(key)

    def handle_heard(self, now: float, life: Life) -> None:
        """Record that anything, such as a chunk, has come from a node in this life."""
        if life in self._held.iterations.acks:
            self.watch.handle_heard(now, life.node)

    def handle_arriving(self, now: float, key: Key) -> list[Output]:
        """Record that part of the payload of `key` has arrived and the rest is on its way, so that `key`
        is not requested yet. If it will never be of use, a Drop follows."""
        self._dropping.handle_arriving(key)
        self._fetching.handle_arriving(now, key)
        return self._out.take()

    def handle_part(self, now: float, key: Key, since: int = 0) -> list[Output]:
        """Record that the whole payload of `key` is here, from whomever. `since`, for a part in a meeting:
        the first number of its node's meetings (0, but for joiners). A Drop follows if nobody needs it."""
        ledger = self._held.ledger(key)
        self._dropping.handle_arrived(key)
        if self.refusal(key):
            if not ledger.has(key):
                self._out.add(Drop((key,)))
            return self.poll(now)
        if key.stream == "meetings":
            ledger.settle(key.life, since)
            self._due.report = True
        self._held.hold(key)
        self._due.missing = True
        self._fetching.handle_arrived(now, key)
        if key.stream == "iterations":
            self.watch.handle_iteration(now, key.life, key.number + 1)
        return self.poll(now)

    # -- time ---------------------------------------------------------------------------------------------

    @property
    def deadline(self) -> float:
        """Time at which to call `poll`; infinity: no need to."""
        return min(self.timers().values(), default=math.inf)

    def timers(self) -> dict[str, float]:
        """Return each running timer by name, with the time at which it is due."""
        if self._at.is_over:
            return {}
        if not self.is_member:
            timers = {"ask to join": self._entrance.deadline}
        else:
            timers = {
                "heartbeat": self._reporting.heartbeat_at,
                "a member's silence or standstill": self._due.suspects_at,
                "own round": self.sync.rounds.until,
                "another's round": self.sync.rounds.flag_until,
                "fetch": self._fetching.deadline,
                "linger": self._reporting.ends_at,
                "change of the view": self._membership.deadline,
            }
        return {name: when for name, when in timers.items() if when < math.inf}

    def poll(self, now: float) -> list[Output]:
        """Return all that may be done by `now`."""
        at = self._at
        if at.is_over:
            return self._out.take()
        if not at.is_member:
            self._entrance.poll(now)
            return self._out.take()
        self._membership.poll(now)
        if at.is_member:
            self._membership.wish(now)
        if at.is_member:
            self._progress.poll(now)
            self._delivery.release()
            self._dropping.drop()
            self._progress.grant()
            self.sync.poll(now, self._script.wanted is not None)
            self._requests.poll(now)
            self._reporting.poll(now)
            self._reporting.compare_scripts()
            self._reporting.end(now)
        return self._out.take()
