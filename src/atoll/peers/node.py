"""A node: what it has made, what it holds, what may be applied, and what it waits for."""

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
from atoll.peers.settings import Settings
from atoll.peers.standing import Due, Standing, name_of
from atoll.peers.suspicion import Suspicion
from atoll.peers.synchronise import Synchronisation
from atoll.peers.waits import Waits
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
    """A node of a run under strategy `peers`. Each call takes `now` (seconds of a clock that only rises) and
    gives what is to be done, in order; `deadline` says when `poll` is due at the latest.

    Payloads are the runtime's, under their keys. Iterations are numbered without ever going back: where a
    script loads an earlier checkpoint the runtime keeps the difference. Source: docs/peers.md.

    `waits` says what the node waits for, and `sync` has its synchronisation rounds.
    """

    def __init__(
        self,
        life: Life,
        view: View,
        settings: Settings,
        rng: np.random.Generator,
        now: float,
        asking: Asking | None = None,
        known: View | None = None,
        judge: Judge = unseen,
    ) -> None:
        """A founding member of `view`; `poll` makes it begin. Its first iteration is its `first` in the view,
        and so is its W. `judge` looks at the processes of silent members. Raises ValueError where it is not
        in `view`. (`asking` and `known` are `joining`'s own.)"""
        entry = next((member for member in view.members if member.life == life), None)
        if asking is None and entry is None:
            raise ValueError(f"{name_of(life)} is not in view {view.number}")
        self.settings = settings
        at = self._at = Standing(life, iteration=0 if entry is None else entry.first)
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
        self.waits = Waits(at, held, self._script, self._suspicion, self._entrance)
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
        settings: Settings,
        rng: np.random.Generator,
        now: float,
        known: View | None = None,
        judge: Judge = unseen,
    ) -> Node:
        """One that asks to be in the next view, at any of `contacts` (node ids), until it is: then it hands
        out ViewChanged, and FetchState. `token` is a name that no other process has. `known` is the newest
        view that this process knows, of Removed: others may have not heard of it, and its members be gone."""
        asking = Asking(token, address, tuple(contact for contact in contacts if contact != node))
        return cls(Life(node, 0), View(0, 0, ()), settings, rng, now, asking, known, judge)

    # -- where it stands ----------------------------------------------------------------------------------

    @property
    def life(self) -> Life:
        """Its own; of a joiner incarnation 0, until it is in a view."""
        return self._at.life

    @property
    def view(self) -> View:
        """The newest that it is in."""
        return self._at.view

    @property
    def iteration(self) -> int:
        """k, that it makes next."""
        return self._at.iteration

    @property
    def applied(self) -> int:
        """W_i: iterations whose Apply is done."""
        return self._held.applied

    @property
    def met(self) -> int:
        """The meetings that have taken place here."""
        return self._held.met

    @property
    def has_met(self) -> bool:
        """Whether it has been in a meeting of its own."""
        return self._held.has_met

    @property
    def is_member(self) -> bool:
        """False for a joiner that is in no view yet, and for a node that was removed."""
        return self._at.is_member

    @property
    def is_whole(self) -> bool:
        """Whether it is a member that has its state: a joiner has none at first."""
        return self._at.is_whole

    @property
    def is_ready(self) -> bool:
        """Whether it holds all that its view began with, and so votes on the next. A majority that is not
        ready cannot go on without the others."""
        return self._membership.is_ready

    # -- the devices --------------------------------------------------------------------------------------

    def handle_contributed(self, now: float, iteration: int) -> list[Output]:
        """The node's own contribution is in M_i, whole; k becomes `iteration` + 1. Raises ValueError where it
        is not this node's next."""
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
        """An Apply is done: W_i is `iteration` + 1."""
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
        """The script has ended: no other iteration and no other meeting. Finished is handed out when every
        member has all that this one has made (or has gone), or `linger` seconds have passed."""
        if self._script.finished_at == math.inf:
            self._script.finish(now)
            self._due.report = True
        return self.poll(now)

    def handle_replaced(self, now: float) -> list[Output]:
        """What is trained was replaced, as the scripts of all members load a checkpoint: a newcomer that has
        not begun is to come in once more, for its state may be of before."""
        self._suspicion.handle_replaced()
        return self.poll(now)

    def handle_differ(self, line: str) -> list[Output]:
        """End the run: a meeting shows that scripts stand at inconsistent places. `line` describes them."""
        self._reporting.tell_differ(line)
        return self._out.take()

    def handle_state(self, now: float, iteration: int) -> list[Output]:
        """A joiner: the state is here, and stands at global iteration `iteration`, which is W_i now. Raises
        ValueError for one that is older than was asked for."""
        if self._at.source is None or not self.is_member:
            return self._out.take()
        self._entrance.take_state(iteration)
        self._due.report = self._due.change = self._due.missing = True
        return self.poll(now)

    def handle_state_failed(self, now: float, source: int, reason: str) -> list[Output]:
        """A joiner: `source` does not give its state (in time)."""
        if self._at.source is not None and self.is_member:
            self._out.note("no state", f"node {source}", reason)
            self._entrance.ask_another(source)
        return self.poll(now)

    # -- the network --------------------------------------------------------------------------------------

    def handle_message(self, now: float, sender: int, message: PeerMessage) -> list[Output]:
        """A message from a node, by its id (WITNESS: the hub). One of an old view changes nothing, and is
        answered by the newest; one of another incarnation than the view's is dropped."""
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
        """What a member holds and has done."""
        if self._held.absorb(report):
            self.watch.handle_iteration(now, report.life, report.iteration, report.applied)

    def refusal(self, key: Key) -> str:
        """Why the payload of `key` is not taken now, as Contributions.refusal."""
        return self._held.refusal(key)

    def handle_heard(self, now: float, life: Life) -> None:
        """Anything has come from a node in this life: a chunk, say."""
        if life in self._held.iterations.acks:
            self.watch.handle_heard(now, life.node)

    def handle_arriving(self, now: float, key: Key) -> list[Output]:
        """Some of the payload of `key` has come, and the rest is on its way: it need not be asked for yet.
        Where that will never be of use, what is here comes back in a Drop."""
        self._dropping.handle_arriving(key)
        self._fetching.handle_arriving(now, key)
        return self._out.take()

    def handle_part(self, now: float, key: Key, since: int = 0) -> list[Output]:
        """The payload of `key` is here, whole, from whomever. `since`, of a part in a meeting: the first
        number of its node's meetings (0, but for joiners). What nobody needs comes back in a Drop."""
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
        """When to call `poll`; infinity: no need to."""
        return min(self.timers().values(), default=math.inf)

    def timers(self) -> dict[str, float]:
        """Each timer that runs, by name, and when it is due."""
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
        """Do all that may be done by `now`."""
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
