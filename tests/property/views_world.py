"""Nodes that decide on views under a virtual network: the real `Change` and `Witness`, and of everything else
the least: contributions without content, acknowledged, fetched, and applied by the rule.

Faults are a list; when they are used up the network is whole, delays are bounded, and nobody fails any
more.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from atoll.peers.change import Change
from atoll.peers.views import Joiner, Transition, ViewChangeSettings, Wish, first_view, majority
from atoll.peers.witness import Witness
from atoll.wire.peers import WITNESS
from atoll.wire.peerviews import (
    Accept,
    Accepted,
    Ballot,
    Held,
    Life,
    Prepare,
    Report,
    View,
    ViewDecided,
    ViewMember,
    ViewMessage,
)

STALE_MAX = 2
TICK = 0.1  # seconds between a node's heartbeats
SILENCE = 1.0  # until a node is suspected
FAULTS_END = 8.0
PATIENCE = 240.0  # after that, for things to go on

Kind = Literal["crash", "restart", "part", "heal", "suspect", "witness dies", "witness restarts"]


class Fault(NamedTuple):
    """`node` and `other` are taken modulo the number of nodes."""

    at: float
    kind: Kind
    node: int
    other: int = 0


@dataclass
class Beat:
    """A node's report, or None of one that only asks to join, by this token."""

    report: Report | None
    token: str = ""


@dataclass
class Want:
    """Whoever holds this sends it."""

    life: Life
    numbers: tuple[int, ...]


@dataclass
class Given:
    """A contribution."""

    life: Life
    number: int


@dataclass
class AskState:
    base: int


@dataclass
class State:
    """All iterations below `applied` are in it."""

    applied: int


AnyWord = ViewMessage | Beat | Want | Given | AskState | State


class Network:
    """Carries what is said with delays, and loses, doubles and reorders some while `loss` is above 0."""

    def __init__(self, rng: np.random.Generator, loss: float) -> None:
        self.now, self.loss, self.turns = 0.0, loss, 0
        self.side: dict[int, int] = defaultdict(int)  # of a partition
        self.least_delay = 0.005
        self._rng, self._count = rng, 0
        self._due: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, seconds: float, call: Callable[[], None]) -> None:
        """Do this later."""
        self._count += 1
        heapq.heappush(self._due, (self.now + seconds, self._count, call))

    def carry(self, sender: int, to: int, call: Callable[[], None]) -> None:
        """What `to` does when it hears it, unless it never does."""
        copies = 0 if self._rng.random() < self.loss else 1 + (self._rng.random() < self.loss)
        for _ in range(copies):
            delay = self.least_delay * (1 + 20 * self._rng.random() ** 4)
            self.at(delay, lambda: call() if self.side[sender] == self.side[to] else None)

    def step(self) -> bool:
        """The next thing happens, if there is one."""
        if not self._due:
            return False
        self.now, _, call = heapq.heappop(self._due)
        self.turns += 1
        call()
        return True


@dataclass
class Peer:
    """A process: a member, or one that asks to be."""

    world: World
    node: int
    token: str
    view: View | None = None
    change: Change | None = None
    life: Life | None = None
    has_state: bool = True
    up: bool = True
    k: int = 0
    applied: int = 0
    store: dict[Life, set[int]] = field(default_factory=lambda: defaultdict(set))
    known: dict[Life, dict[Life, int]] = field(default_factory=dict)  # what each is known to hold
    heard: dict[int, float] = field(default_factory=dict)
    joiners: dict[int, Joiner] = field(default_factory=dict)
    falsely: dict[int, float] = field(default_factory=dict)  # suspected until then
    frozen: dict[Life, int] | None = None
    newest: View | None = None  # that it knows of, from an earlier life in this process too

    # -- what it knows ------------------------------------------------------------------------------------

    def entries(self) -> tuple[ViewMember, ...]:
        assert self.view is not None
        return (*self.view.members, *self.view.removed)

    @property
    def is_ready(self) -> bool:
        """It has its state, and all that its view began with: who else had that may be gone."""
        return self.has_state and self.change is not None and self.change.ready

    def holds(self, entry: ViewMember) -> int:
        """All of it below this."""
        count = entry.first
        if self.has_state:
            count = max(count, self.applied)
        while count in self.store[entry.life]:
            count += 1
        is_member = self.view is not None and entry in self.view.members
        return count if is_member or not self.has_state else min(count, max(entry.held, entry.first))

    def report(self) -> Report:
        assert self.view is not None
        assert self.life is not None
        held = tuple(Held(entry.life, self.holds(entry)) for entry in self.entries())
        if not self.has_state:
            held = tuple(Held(each.life, 0) for each in held)
        return Report(self.life, self.view.number, self.k, self.applied, 0, held)

    def acknowledged(self) -> dict[Life, int]:
        """What it says that it holds: nothing more once it has promised."""
        assert self.change is not None
        holds = {held.life: held.iterations for held in self.report().held}
        if not self.change.promised or self.frozen is None:
            self.frozen = holds
        return self.frozen

    # -- views --------------------------------------------------------------------------------------------

    def install(self, view: View) -> None:
        if self.view is not None and view.number <= self.view.number:
            return
        self.world.check_view(view)
        if self.newest is None or view.number > self.newest.number:
            self.newest = view
        mine = next((member for member in view.members if member.life.node == self.node), None)
        if self.life is None:
            if mine is None or mine.token != self.token:
                return
            self.life, self.k, self.has_state = mine.life, mine.first, False
        elif mine is None or mine.life != self.life:
            self.world.restart(self, self.newest)  # removed: it comes again, as the same process
            return
        before = set() if self.view is None else self.lives()
        self.view, self.frozen = view, None
        self.change = Change(self.node, view, ViewChangeSettings(0.1, 0.05, STALE_MAX + 1), self.world.rng)
        tokens = {member.token for member in view.members}
        self.joiners = {node: each for node, each in self.joiners.items() if each.token not in tokens}
        for entry in view.removed:
            self.store[entry.life] = {number for number in self.store[entry.life] if number < entry.held}
        for node, _ in self.lives() - before:
            self.heard[node] = self.world.net.now

    def take(self, step: Transition) -> None:
        for to, message in step.sends:
            self.world.say(self.node, to, message)
        if step.decided is not None:
            self.install(step.decided)

    def wish(self) -> Wish:
        assert self.view is not None
        now, remove = self.world.net.now, {}
        for member in self.view.members:
            node = member.life.node
            silent = now - self.heard.get(node, 0.0) > SILENCE or self.falsely.get(node, 0.0) > now
            if node != self.node and silent:
                remove[node] = "silent"
        return Wish(remove, tuple(self.joiners.values()))

    # -- what it does -------------------------------------------------------------------------------------

    def tick(self) -> None:
        if not self.up:
            return
        self.world.net.at(TICK * (0.8 + 0.4 * self.world.rng.random()), self.tick)
        if self.view is None:
            for node in range(self.world.nodes):
                if node != self.node:
                    self.world.say(self.node, node, Beat(None, self.token))
            return
        assert self.change is not None
        assert self.life is not None
        self.take(self.change.handle_wish(self.world.net.now, self.wish(), self.report()))
        if self.view is None:
            return
        if not self.has_state:
            base = next(member.base for member in self.view.members if member.life == self.life)
            for member in self.view.members:
                self.world.say(self.node, member.life.node, AskState(base))
        elif self.k - self.applied <= STALE_MAX:
            self.store[self.life].add(self.k)
            self.k += 1
            self.give(self.life, self.k - 1)
        beat = Beat(self.report_as_acknowledged())
        for member in self.view.members:
            if member.life.node != self.node:
                self.world.say(self.node, member.life.node, beat)
        self.fetch()
        self.apply()

    def report_as_acknowledged(self) -> Report:
        report = self.report()
        held = tuple(Held(life, count) for life, count in self.acknowledged().items())
        return Report(report.life, report.view, report.iteration, report.applied, 0, held)

    def give(self, life: Life, number: int) -> None:
        assert self.view is not None
        for member in self.view.members:
            if member.life.node != self.node and self.world.rng.random() < 0.8:
                self.world.say(self.node, member.life.node, Given(life, number))

    def fetch(self) -> None:
        """What it lacks up to where anybody is, from a member; and what a change wants, from who has it."""
        assert self.view is not None
        assert self.change is not None
        wanted = [(fetch.held.life, fetch.held.iterations, fetch.source) for fetch in self.change.wanted]
        for entry in self.entries():
            most = max([known.get(entry.life, 0) for known in self.known.values()] + [entry.held])
            wanted.append((entry.life, most, None))
        firsts = {entry.life: self.holds(entry) for entry in self.entries()}
        others = [member.life.node for member in self.view.members if member.life.node != self.node]
        for life, below, source in wanted:
            missing = tuple(
                number for number in range(firsts.get(life, 0), below) if number not in self.store[life]
            )
            if missing and others and self.has_state:
                to = source if source is not None else others[int(self.world.rng.integers(len(others)))]
                self.world.say(self.node, to, Want(life, missing))

    def apply(self) -> None:
        assert self.view is not None
        assert self.life is not None
        if not self.has_state:
            return
        self.known[self.life] = self.acknowledged()
        while True:
            number, lives = self.applied, []
            for entry in self.entries():
                member = entry in self.view.members
                if entry.first > number or (not member and entry.held <= number):
                    continue
                holders = sum(
                    self.known.get(other.life, {}).get(entry.life, 0) > number for other in self.view.members
                )
                if holders < majority(self.view) or number not in self.store[entry.life]:
                    return
                lives.append(entry.life)
            self.applied += 1
            self.world.check_applied(number, tuple(sorted(lives)))

    # -- what it hears ------------------------------------------------------------------------------------

    def hear(self, sender: int, word: AnyWord) -> None:
        if not self.up:
            return
        if isinstance(word, (Want, Given, AskState, State)):
            self.hear_content(sender, word)
        elif isinstance(word, Beat):
            self.hear_beat(sender, word)
        elif self.change is None:
            if isinstance(word, ViewDecided):
                self.install(word.view)
            elif isinstance(word, (Prepare, Accept)):
                self.tell_newest(sender, word.view.number)
        else:
            self.heard[sender] = self.world.net.now
            self.take(self.change.handle_message(self.world.net.now, sender, word, self.report()))
            self.poll()

    def hear_beat(self, sender: int, beat: Beat) -> None:
        if self.view is None or self.change is None:
            if beat.report is not None and self.newest is not None:
                self.tell_newest(sender, beat.report.view)
            return
        if beat.report is None:
            if not any(member.token == beat.token for member in self.view.members):
                self.joiners[sender] = Joiner(sender, beat.token, "")
            else:
                self.world.say(self.node, sender, ViewDecided(view=self.view))
        elif beat.report.view < self.view.number:
            self.tell_newest(sender, beat.report.view)
        elif beat.report.view == self.view.number and beat.report.life in self.lives():
            self.heard[sender] = self.world.net.now
            known = self.known.setdefault(beat.report.life, {})
            for held in beat.report.held:
                known[held.life] = max(known.get(held.life, 0), held.iterations)
            self.apply()

    def tell_newest(self, to: int, number: int) -> None:
        if self.newest is not None and number < self.newest.number:
            self.world.say(self.node, to, ViewDecided(view=self.newest))

    def lives(self) -> set[Life]:
        assert self.view is not None
        return {member.life for member in self.view.members}

    def hear_content(self, sender: int, word: Want | Given | AskState | State) -> None:
        if isinstance(word, Want):
            for number in word.numbers:
                if number in self.store[word.life]:
                    self.world.say(self.node, sender, Given(word.life, number))
        elif isinstance(word, AskState):
            if self.view is not None and self.has_state and self.applied >= word.base:
                self.world.say(self.node, sender, State(self.applied))
        elif isinstance(word, State):
            if not self.has_state and self.view is not None:
                self.applied, self.has_state = word.applied, True
        else:
            self.store[word.life].add(word.number)
            self.poll()

    def poll(self) -> None:
        if self.up and self.change is not None:
            self.take(self.change.poll(self.world.net.now, self.report()))
            self.wake()

    def wake(self) -> None:
        if self.change is not None and self.change.deadline < np.inf:
            change, wait = self.change, max(self.change.deadline - self.world.net.now, 1e-4)
            self.world.net.at(wait, lambda: self.poll() if self.change is change else None)


class World:
    """Founding nodes 0 to `nodes` - 1, and the hub, on one schedule."""

    def __init__(self, nodes: int, faults: Sequence[Fault], loss: float, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes = nodes
        self.net = Network(self.rng, loss)
        self.witness: Witness | None = Witness()
        self._kept = self.witness.state
        self.peers: dict[int, Peer] = {}
        self.views: dict[int, View] = {}
        self.contributors: dict[int, tuple[Life, ...]] = {}
        self._votes: dict[tuple[int, Ballot], set[int]] = {}
        self._proposed: dict[tuple[int, Ballot], View] = {}
        self._tokens = 0
        view = first_view(1, [ViewMember(Life(node, 0), token=f"first {node}") for node in range(nodes)])
        for node in range(nodes):
            peer = Peer(self, node, f"first {node}", life=Life(node, 0))
            peer.install(view)
            self.peers[node] = peer
            self.net.at(TICK * self.rng.random(), peer.tick)
        for fault in faults:
            self.net.at(fault.at, lambda fault=fault: self._fail(fault))  # type: ignore[misc]

    # -- what must hold -----------------------------------------------------------------------------------

    def check_view(self, view: View) -> None:
        assert self.views.setdefault(view.number, view) == view, "two views of one number"
        nodes = [member.life.node for member in view.members]
        assert nodes == sorted(set(nodes))

    def note_vote(self, voter: int, word: Accept | Accepted) -> None:
        """What a majority has accepted is chosen, whether or not anybody lives to know it."""
        if isinstance(word, Accepted):
            view, ballot = self.views[word.view], word.ballot
        else:
            view, ballot = word.view, word.ballot
            self._proposed[view.number, ballot] = word.next
            if all(member.life.node != voter for member in word.next.members):
                return  # it proposes its own removal, and accepts it last
        votes = self._votes.setdefault((view.number, ballot), set())
        votes.add(voter)
        if len(votes) >= majority(view):
            self.check_view(self._proposed[view.number, ballot])

    def check_applied(self, number: int, lives: tuple[Life, ...]) -> None:
        assert self.contributors.setdefault(number, lives) == lives, f"iteration {number} has two contents"

    # -- what happens -------------------------------------------------------------------------------------

    def say(self, sender: int, to: int, word: AnyWord) -> None:
        if isinstance(word, (Accept, Accepted)):
            self.note_vote(sender, word)
        self.net.carry(sender, to, lambda: self._deliver(sender, to, word))

    def _deliver(self, sender: int, to: int, word: AnyWord) -> None:
        if to != WITNESS:
            self.peers[to].hear(sender, word)
        elif self.witness is not None:
            assert isinstance(word, (Prepare, Accept))
            answer = self.witness.handle(sender, word)
            self._kept = self.witness.state
            if answer is not None:
                self.say(WITNESS, sender, answer)

    def _fail(self, fault: Fault) -> None:
        node, other = fault.node % self.nodes, fault.other % self.nodes
        peer = self.peers[node]
        if fault.kind == "crash":
            peer.up = False
        elif fault.kind == "restart":
            self.restart(peer)
        elif fault.kind == "part":
            self.net.side[node] = 1 - self.net.side[node]
        elif fault.kind == "heal":
            self.net.side.clear()
        elif fault.kind == "suspect":
            peer.falsely[other] = self.net.now + 2.0
        elif fault.kind == "witness dies":
            self.witness = None
        else:
            self.witness = Witness(self._kept)

    def restart(self, peer: Peer, newest: View | None = None) -> None:
        """The process is gone, and another of its node comes, which asks to join; or the same one, which
        knows this view."""
        peer.up = False
        self._tokens += 1
        self.peers[peer.node] = Peer(self, peer.node, f"again {self._tokens}", newest=newest)
        self.net.at(0.2, self.peers[peer.node].tick)

    def run(self) -> None:
        """Until the faults are used up."""
        while self.net.now < FAULTS_END and self.net.step():
            pass
        self.net.loss = 0.0
        self.net.side.clear()

    def goes_on(self) -> bool:
        """Whether, from now on, W rises by 5 at all who are members, and all who live are."""
        last = max(len(self.contributors), 1)
        end = self.net.now + PATIENCE
        while self.net.now < end and self.net.step():
            living = [peer for peer in self.peers.values() if peer.up]
            if self.net.turns % 1000 == 0 and not self.has_majority():
                return False
            if all(peer.applied >= last + 5 and peer.has_state for peer in living):
                return True
        return False

    def has_majority(self) -> bool:
        """Whether of the newest view that was chosen enough members live, and are ready, to decide what
        follows it; and somebody living knows it, or enough live who chose it."""
        view = self.views[max(self.views)]
        living = [peer for peer in self.peers.values() if peer.up]
        is_known = any(peer.newest is not None and peer.newest.number >= view.number for peer in living)
        before = self.views.get(view.number - 1)
        is_known = is_known or (before is not None and self._has_voters(before))
        return is_known and self._has_voters(view)

    def _has_voters(self, view: View) -> bool:
        members = {member.life for member in view.members}
        count = sum(peer.up and peer.is_ready and peer.life in members for peer in self.peers.values())
        return count > 0 and count + (self.witness is not None and len(members) == 2) >= majority(view)
