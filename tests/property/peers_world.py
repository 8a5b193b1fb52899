"""Nodes of strategy `peers` in a virtual world: the real `Node`s, and doubles of their devices, payloads and
network, which delays, loses, repeats and reorders; nodes die, come back, stand still, and are cut off.

The world knows all, and checks at each step what must always hold: see `World`.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np

from atoll.core.stands import are_consistent, call, describe_mismatch, gradients
from atoll.peers import outputs
from atoll.peers.node import Node
from atoll.peers.settings import NodeSettings
from atoll.peers.views import first_view, majority
from atoll.peers.witness import Witness
from atoll.wire.peers import WITNESS, Key, PeerMessage, ScriptsDiffer
from atoll.wire.peerviews import Life, View, ViewMember
from atoll.wire.workerstand import WorkerStand
from support.sim.clock import VirtualClock

MEETS_EACH = 4  # iterations: the script meets at the beginning of each such one
STEP = 0.2  # seconds, of an iteration: the median
FAR = 0.2  # seconds, which no message takes: then it is lost
PATIENCE = 400.0  # seconds in which the world must have come together again
DOUBTS = 6.0  # seconds in which the others may remove a node that goes on again
GOES_ON = 5  # iterations that it makes after the last fault

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[PeerMessage] = msgspec.msgpack.Decoder(PeerMessage)

Kind = Literal["dies", "stops", "cut off", "slow", "device hangs"]


@dataclass(frozen=True)
class Fault:
    """What happens to a node, `after` seconds from the fault before it, and for how long. `cut off`: with
    `others` further ones, in order of node."""

    kind: Kind
    after: float
    who: int
    lasts: float = 1.0
    others: int = 0


@dataclass(frozen=True)
class OddScript:
    """The script of node `who` is not the others': at the beginning of iteration `at` it comes to a meeting
    of its own ("calls"), or leaves out the one that the others come to there or later ("skips")."""

    who: int
    at: int
    how: Literal["calls", "skips"]


@dataclass(frozen=True)
class Schedule:
    """A run: `slow` is by how much the last node is slower than the others. With an `odd` script it must end
    for all; without one, whatever else happens, it must not."""

    seed: int
    nodes: int
    stale_max: int
    faults: tuple[Fault, ...] = ()
    loss: float = 0.0
    repeats: float = 0.0
    slow: float = 1.0
    hub: bool = False  # it lives, and is a witness
    iterations: int = 8  # at least, before the first fault is over
    applying: float = 0.01  # seconds, of one Apply: the mean
    odd: OddScript | None = None


class WrongError(AssertionError):
    """What must not happen."""


@dataclass
class Process:
    """A node's process: its `Node`, the payloads that it keeps, and its device."""

    node: Node
    name: int
    payloads: set[Key] = field(default_factory=set)
    chain: int = 0  # of all that was applied here, in order
    applying: list[outputs.Apply] = field(default_factory=list)
    taken: int = 0  # W, of the device's parameters
    waits: bool = False  # the device, for a Grant
    meets: bool = False  # the script, for a Meet
    odd: bool = False  # the script has done what the others' do not
    computes: bool = False
    fresh: bool = True  # the device has not begun
    stands_until: float = 0.0
    hangs_until: float = 0.0
    wish: outputs.FetchState | None = None  # the latest, until the state is here
    alive: bool = True
    wakes: int = -1  # number of the clock's call
    wakes_at: float = float("inf")
    polled: int = 0


class World:
    """Checked at each step: a device never computes on parameters staler than stale_max; whoever applies
    iteration t has applied the same contributions before it as everybody else, and each one once; what is
    applied is held by a majority of the view; a minority, cut off, applies nothing; a meeting is of the same
    parts everywhere. At the end: all nodes are back and go on (`come_together`)."""

    def __init__(self, schedule: Schedule, settings: NodeSettings | None = None) -> None:
        self.schedule = schedule
        self.rng = random.Random(schedule.seed)
        self.settings = settings or settings_for(schedule.stale_max)
        self.clock = VirtualClock()
        self.processes: dict[int, Process] = {}
        self.chains: dict[int, int] = {0: 0}  # by W
        self.applied: dict[int, tuple[Key, ...]] = {}  # by iteration
        self.meetings: dict[int, tuple[Key, ...]] = {}
        self.held: defaultdict[Life, set[Key]] = defaultdict(set)  # ever
        self.bases: dict[Life, int] = {}
        self.firsts: dict[Life, int] = {}
        self.cuts: dict[Life, int] = {}
        self.apart: frozenset[int] = frozenset()  # these are cut off from the others
        self.limits: dict[Life, int] = {}  # of those with a minority, the first that they must not apply
        self._limits_at = -1
        self.doubtful: dict[int, float] = {}  # by node, until when the others may remove it
        self.slowed: dict[int, float] = {schedule.nodes - 1: schedule.slow}
        self.witness = Witness()
        self.counts: defaultdict[str, int] = defaultdict(int)
        self.reasons: list[str] = []  # why nodes were suspected
        self.suspected: list[tuple[int, str]] = []  # who suspected whom
        self.steps = 0
        self.ended: dict[int, str] = {}  # by node, why its run has ended: who stands where
        self.places: dict[Key, WorkerStand] = {}  # where the scripts of those stood who came to a meeting
        self.most_held = 0.0  # of each contributor
        self._tokens = 0
        self.trace: list[str] | None = None
        view = first_view(1, [ViewMember(Life(node, 1)) for node in range(schedule.nodes)])
        self.bases |= {member.life: 0 for member in view.members}
        self.firsts |= {member.life: 0 for member in view.members}
        for node in range(schedule.nodes):
            made = Node(Life(node, 1), view, self.settings, self._generator(), 0.0)
            self._begin(Process(made, node))

    def _generator(self) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64(self.rng.getrandbits(32)))

    @property
    def now(self) -> float:
        return self.clock.now

    # -- processes ----------------------------------------------------------------------------------------

    def _begin(self, process: Process) -> None:
        self.processes[process.name] = process
        self._later(0.01 * self.rng.random(), process, "poll", None)

    def comes(self, name: int, known: View | None = None) -> None:
        """A node comes (back): a process of its own, that knows nothing, or the one that was removed, which
        knows a view."""
        self._tokens += 1
        contacts = list(range(self.schedule.nodes))
        token = f"token {self._tokens}"
        node = Node.joining(
            name, token, f"at {name}", contacts, self.settings, self._generator(), self.now, known
        )
        self._begin(Process(node, name))

    def dies(self, name: int) -> None:
        process = self.processes[name]
        process.alive = False
        self.clock.cancel(process.wakes)

    def _later(self, delay: float, process: Process, what: str, arg: Any) -> None:
        self.clock.call_at(self.now + delay, lambda: self._comes_in(process, what, arg))

    def _comes_in(self, process: Process, what: str, arg: Any) -> None:
        """Something for a process: now, or when it runs again."""
        if not process.alive:
            return
        if self.now < process.stands_until:
            self._later(process.stands_until - self.now, process, what, arg)
            return
        self._do(process, what, arg)

    def _do(self, process: Process, what: str, arg: Any) -> None:
        self.steps += 1
        node, now = process.node, self.now
        if self.trace is not None and what != "poll":
            self.trace.append(f"{now:8.3f} {process.name} <- {what} {arg}")
        if what == "poll":
            process.wakes_at = float("inf")
            process.polled += 1
            done = node.poll(now)
        elif what == "message":
            sender, raw = arg
            done = node.handle_message(now, sender, _decoder.decode(raw))
        elif what == "part":
            done = self._part(process, arg)
        elif what == "applied":
            done = self._applied(process, arg)
        elif what == "computed":
            done = self._computed(process, arg)
        elif what == "state":
            wish, iteration, chain = arg
            if wish is not process.wish:
                return
            process.wish, process.taken, process.chain = None, iteration, chain
            done = node.handle_state(now, iteration)
        elif what == "no state":
            done = node.handle_state_failed(now, arg.source, "it did not answer")
        else:
            assert what == "fetch state"
            self._fetch_state(process, arg)
            return
        self._act(process, done)
        self._drive(process)
        self._wake(process)
        self._check_held(process)

    def _check_held(self, process: Process) -> None:
        """Memory is bounded; and what the node counts as held is what is kept, but for what is on its way."""
        view = process.node.view
        held = sum(1 for key in process.payloads if key.stream == "iterations")
        contributors = len(view.members) + len(view.removed)
        most = self.settings.most_held(contributors)
        if process.alive and contributors and held > most:
            raise WrongError(f"node {process.name} holds {held} contributions, where {most} is the most")
        if contributors:
            share = held / contributors
            self.most_held = max(self.most_held, share)

    def _wake(self, process: Process) -> None:
        deadline = process.node.deadline
        if deadline <= self.now and process.polled > 100:
            raise WrongError(f"node {process.name}: a timer is not reset: {process.node.timers()}")
        if deadline > self.now:
            process.polled = 0
        if deadline != process.wakes_at:
            self.clock.cancel(process.wakes)
            process.wakes_at = deadline
            if deadline < float("inf"):
                call = lambda: self._comes_in(process, "poll", None)  # noqa: E731
                process.wakes = self.clock.call_at(deadline, call)

    # -- what a node wants done ---------------------------------------------------------------------------

    def _act(self, process: Process, done: Sequence[outputs.Output]) -> None:
        for output in done:
            if self.trace is not None:
                self.trace.append(f"{self.now:8.3f} {process.name} -> {output}")
            if isinstance(output, outputs.Send):
                # Whoever ends the run closes its connections behind the word, and loses nothing of it.
                is_last = isinstance(output.message, ScriptsDiffer)
                self._send(process.name, output.to, _encoder.encode(output.message), is_last)
            elif isinstance(output, outputs.SendPart):
                if output.key not in process.payloads:
                    raise WrongError(f"node {process.name} gives {output.key}, which it has not")
                self._send_part(process.name, output)
            elif isinstance(output, outputs.Apply):
                self._check_apply(process, output)
                process.applying.append(output)
                if len(process.applying) == 1:
                    self._later(self._applying(), process, "applied", output)
            elif isinstance(output, outputs.Meet):
                self._check_meeting(process, output)
            elif isinstance(output, outputs.Drop):
                process.payloads -= set(output.keys)
            elif isinstance(output, outputs.Grant):
                self._granted(process, output)
            elif isinstance(output, outputs.FetchState):
                process.wish = output  # the latest counts
                self._later(0.0, process, "fetch state", (output, 0))
            elif isinstance(output, outputs.ViewChanged):
                self._learn_view(process, output)
            elif isinstance(output, outputs.Removed):
                self.counts["removed"] += 1
                self.dies(process.name)
                self._return_at(self.now + 0.1, process, output.view)
            elif isinstance(output, outputs.Differ):
                self._differs(process, output.line)
            elif isinstance(output, outputs.Note):
                self.counts[output.what] += 1
                if output.what == "suspected":
                    self.reasons.append(output.reason)
                    self.suspected.append((process.name, output.about))

    def _return_at(self, when: float, process: Process, known: View | None = None) -> None:
        """A node comes back, where it has not done so in the meantime."""

        def returns() -> None:
            if self.processes[process.name] is process:
                self.comes(process.name, known)

        self.clock.call_at(when, returns)

    def _learn_view(self, process: Process, output: outputs.ViewChanged) -> None:
        if process.fresh and process.node.life.incarnation > 1 and process.node.applied:
            self.counts["joined"] += 1
        for member in output.view.members:
            self.bases.setdefault(member.life, member.base)
            self.firsts.setdefault(member.life, member.first)
        for each in output.view.removed:
            if self.cuts.setdefault(each.life, each.held) != each.held:
                raise WrongError(f"the cut of {each.life} was {self.cuts[each.life]}, and is {each.held}")

    # -- the network --------------------------------------------------------------------------------------

    def _delay(self) -> float:
        """Mostly a few milliseconds; the order changes."""
        return (
            min(self.rng.expovariate(200.0), FAR) + (self.rng.random() < 0.02) * FAR * self.rng.random() / 2
        )

    def _is_lost(self, a: int, b: int) -> bool:
        return (a in self.apart) != (b in self.apart) or self.rng.random() < self.schedule.loss

    def _copies(self) -> int:
        return 1 + (self.rng.random() < self.schedule.repeats)

    def _send(self, a: int, b: int, raw: bytes, is_sure: bool = False) -> None:
        if b == WITNESS:
            self._ask_witness(a, raw)
            return
        for _ in range(self._copies()):
            if is_sure or not self._is_lost(a, b):
                self.clock.call_at(self.now + self._delay(), lambda: self._arrives(a, b, "message", (a, raw)))

    def _send_part(self, a: int, output: outputs.SendPart) -> None:
        for _ in range(self._copies()):
            if not self._is_lost(a, output.to):
                when = self.now + self._delay() + self.rng.expovariate(200.0)
                self.clock.call_at(when, lambda: self._arrives(a, output.to, "part", output.key))

    def _arrives(self, a: int, b: int, what: str, arg: Any) -> None:
        """Whoever is there under that name now gets it."""
        if (a in self.apart) == (b in self.apart):
            self._comes_in(self.processes[b], what, arg)

    def _ask_witness(self, a: int, raw: bytes) -> None:
        if not self.schedule.hub or a in self.apart:
            return
        answer = self.witness.handle(a, _decoder.decode(raw))  # type: ignore[arg-type]
        if answer is not None:
            back, when = (WITNESS, _encoder.encode(answer)), self.now + 2 * self._delay()
            self.clock.call_at(when, lambda: self._comes_in(self.processes[a], "message", back))

    def _part(self, process: Process, key: Key) -> list[outputs.Output]:
        node = process.node
        if node.refusal(key):
            self.counts["refused: " + node.refusal(key).split(" ")[0]] += 1
            return []
        process.payloads.add(key)
        if process.node.is_member:
            self.held[node.life].add(key)
        return node.handle_part(self.now, key, since=self._since(key))

    def _since(self, key: Key) -> int:
        if key.stream == "iterations":
            return 0
        return meetings_before(self.firsts[key.life])

    def _fetch_state(self, process: Process, arg: tuple[outputs.FetchState, int]) -> None:
        wish, tries = arg
        if wish is not process.wish:
            return
        giver = self.processes[wish.source]
        knows = any(member.life == process.node.life for member in giver.node.view.members)
        reached = (wish.source in self.apart) == (process.name in self.apart)
        runs = giver.alive and self.now >= giver.stands_until and giver.node.is_whole
        if reached and runs and knows and giver.node.applied >= wish.base:
            delay = self.rng.expovariate(5.0)
            self._later(delay, process, "state", (wish, giver.node.applied, giver.chain))
        elif tries >= 10:
            self._do(process, "no state", wish)
        else:
            self._later(0.2, process, "fetch state", (wish, tries + 1))

    # -- the devices and the script -----------------------------------------------------------------------

    def _drive(self, process: Process) -> None:
        """The script goes on as far as it can."""
        node = process.node
        if not process.alive or process.computes or process.waits or process.meets or not node.is_whole:
            return
        process.fresh = False
        k = node.iteration
        number = meetings_before(k)
        if self._skips(process):
            process.odd = True  # it takes itself to have been in it
        elif self._calls(process):
            process.odd = True
            self._meet(process, node.met, k, "session.save")
            return
        elif k % MEETS_EACH == 0 and self._next_meeting(process) == number:
            self._meet(process, number, k, "session.barrier")
            return
        if self.rng.random() < 0.5:
            process.taken = node.applied  # what is there is taken, and nothing waited for
        if k - process.taken > self.settings.stale_max and node.applied > process.taken:
            process.taken = node.applied
        if k - process.taken > self.settings.stale_max:
            process.waits = True
            stand = WorkerStand(process.name, gradients(max(0, k - 1), "train.py:3"))
            self._act(process, node.handle_wanted(self.now, k, k - self.settings.stale_max, stand))
            self._drive(process)
            return
        process.computes = True
        seconds = STEP * self.rng.lognormvariate(0.0, 0.3) * self.slowed.get(process.name, 1.0)
        hangs = max(0.0, process.hangs_until - self.now)
        if k - process.taken > self.settings.stale_max:
            raise WrongError(f"node {process.name} computes iteration {k} on parameters of {process.taken}")
        self._later(seconds + hangs, process, "computed", k)

    def _meet(self, process: Process, number: int, k: int, name: str) -> None:
        process.meets = True
        key = Key("meetings", number, process.node.life)
        process.payloads.add(key)
        self.held[process.node.life].add(key)
        self.places[key] = WorkerStand(process.name, call(name, "train.py:5"))
        self._act(process, process.node.handle_met(self.now, number, k, self.places[key]))
        self._drive(process)

    def _is_odd(self, process: Process, how: str) -> bool:
        odd = self.schedule.odd
        if odd is None or odd.who != process.name or odd.how != how:
            return False
        return process.node.iteration >= odd.at

    def _calls(self, process: Process) -> bool:
        """Whether an odd script comes to a meeting of its own now."""
        return not process.odd and process.node.iteration % MEETS_EACH > 0 and self._is_odd(process, "calls")

    def _skips(self, process: Process) -> bool:
        """Whether an odd script leaves this beginning's meeting out."""
        node = process.node
        is_due = node.iteration % MEETS_EACH == 0 and self._next_meeting(process) == meetings_before(
            node.iteration
        )
        return is_due and self._is_odd(process, "skips")

    def _differs(self, process: Process, line: str) -> None:
        """The process ends, as its run does."""
        if self.schedule.odd is None:
            raise WrongError(f"node {process.name} finds scripts that differ, and all are alike: {line}")
        self.ended[process.name] = line
        self.dies(process.name)

    def _next_meeting(self, process: Process) -> int:
        """Whether the meeting at this beginning has been: the next one's number."""
        k = process.node.iteration
        return process.node.met if process.node.has_met else meetings_before(k)

    def _granted(self, process: Process, grant: outputs.Grant) -> None:
        if not process.waits or grant.applied > process.node.applied:
            raise WrongError(f"node {process.name}: {grant}")
        process.waits = False
        process.taken = process.node.applied

    def _computed(self, process: Process, k: int) -> list[outputs.Output]:
        process.computes = False
        key = Key("iterations", k, process.node.life)
        process.payloads.add(key)
        self.held[process.node.life].add(key)
        return process.node.handle_contributed(self.now, k)

    def _applying(self) -> float:
        return self.rng.expovariate(1 / self.schedule.applying)

    def _applied(self, process: Process, output: outputs.Apply) -> list[outputs.Output]:
        process.applying.pop(0)
        if process.applying:
            self._later(self._applying(), process, "applied", process.applying[0])
        chain = hash((process.chain, output.iteration, output.keys))
        process.chain = chain
        w = output.iteration + 1
        if self.chains.setdefault(w, chain) != chain:
            raise WrongError(f"node {process.name} at W = {w} differs from the others")
        return process.node.handle_applied(self.now, output.iteration)

    # -- what must hold -----------------------------------------------------------------------------------

    def _check_apply(self, process: Process, output: outputs.Apply) -> None:
        who = f"node {process.name}, iteration {output.iteration}"
        if any(key not in process.payloads for key in output.keys):
            raise WrongError(f"{who}: not all of {output.keys} is here")
        nodes = [key.life.node for key in output.keys]
        if nodes != sorted(set(nodes)):
            raise WrongError(f"{who}: {output.keys} is not in order of node, each once")
        known = self.applied.setdefault(output.iteration, output.keys)
        if known != output.keys:
            raise WrongError(f"{who} applies {output.keys}, others {known}")
        node = process.node
        for key in output.keys:
            holders = self._holders(node.view, key)
            if len(holders) < majority(node.view):
                raise WrongError(f"{who} applies {key}, which only {holders} hold")
        if output.iteration >= self.limits.get(node.life, math.inf):
            raise WrongError(f"{who}: a minority, of view {node.view.number}, goes on")

    def _holders(self, view: View, key: Key) -> list[Life]:
        """The members that have held it, or came when it was settled."""
        lives = [member.life for member in view.members]
        return [life for life in lives if key in self.held[life] or key.number < self.bases[life]]

    def _limit(self) -> None:
        """Nodes have been apart for so long that no message between them is on its way. One that is with a
        minority of its view must not apply an iteration of its own that no majority has by now."""
        for process in self.processes.values():
            node, nodes = process.node, [m.life.node for m in process.node.view.members]
            side = [each for each in nodes if (each in self.apart) == (process.name in self.apart)]
            witness = self.schedule.hub and len(nodes) == 2 and process.name not in self.apart
            if process.alive and node.is_member and len(side) + witness < majority(node.view):
                t = max(node.applied, self.firsts[node.life])
                while len(self._holders(node.view, Key("iterations", t, node.life))) >= majority(node.view):
                    t += 1
                self.limits[node.life] = t

    def _check_meeting(self, process: Process, output: outputs.Meet) -> None:
        known = self.meetings.setdefault(output.number, output.keys)
        if known != output.keys:
            raise WrongError(f"node {process.name} meets in {output.keys}, others in {known}")
        if any(key not in process.payloads for key in output.keys):
            raise WrongError(f"node {process.name}: not all of {output.keys} is here")
        process.meets = False
        stands = [self.places[key] for key in output.keys]
        if not are_consistent(each.stand for each in stands):  # its runtime sees that
            line = describe_mismatch({each.worker: each.stand for each in stands})
            self._act(process, process.node.handle_differ(line))

    def check_once(self) -> None:
        """Each contribution of a node, up to its cut, was applied once; none later, none left out."""
        by_life: defaultdict[Life, list[int]] = defaultdict(list)
        for iteration, keys in sorted(self.applied.items()):
            for key in keys:
                if key.number != iteration:
                    raise WrongError(f"{key} is applied as iteration {iteration}")
                by_life[key.life].append(iteration)
        top = max(self.applied, default=-1) + 1
        if sorted(self.applied) != list(range(top)):
            raise WrongError(f"iterations {sorted(self.applied)} were applied")
        for life, first in self.firsts.items():
            stop = min(self.cuts.get(life, top), top)
            if by_life.get(life, []) != list(range(first, stop)):
                raise WrongError(
                    f"of {life} {by_life.get(life)} were applied, not those of [{first}, {stop})"
                )

    # -- the schedule -------------------------------------------------------------------------------------

    def run(self) -> None:
        """All faults, each in its turn, and then the time that nodes need to come together again."""
        at = 0.0
        for fault in self.schedule.faults:
            at += fault.after
            self.clock.advance(max(at, self.now))
            self.happens(fault)
        self.clock.advance(self.now + max((fault.lasts for fault in self.schedule.faults), default=0.0))
        self.come_together()
        self.check_once()

    def happens(self, fault: Fault) -> None:
        """A fault begins now; it ends by itself."""
        name = fault.who % self.schedule.nodes
        process = self.processes[name]
        until = self.now + fault.lasts
        self.counts[fault.kind] += 1
        if fault.kind == "dies" and process.alive and self._may_die(process):
            self.dies(name)
            self._return_at(until, process)
        elif fault.kind == "stops":
            process.stands_until = max(process.stands_until, until)
            self._doubt(name, until)
        elif fault.kind == "cut off" and not self.apart:
            names = range(name, name + 1 + fault.others % self.schedule.nodes)
            self.apart = frozenset(each % self.schedule.nodes for each in names)
            for each in self.apart:
                self._doubt(each, until)
            self._limits_at = self.clock.call_at(self.now + 4 * FAR, self._limit)
            self.clock.call_at(until, self._heal)
        elif fault.kind == "slow":
            self.slowed[name] = 5.0
            self._doubt(name, until)
            self.clock.call_at(until, lambda: self.slowed.update({name: 1.0}))
        elif fault.kind == "device hangs":
            process.hangs_until = until
            self._doubt(name, until)

    def _doubt(self, name: int, until: float) -> None:
        """The others may remove a node, until some time after this."""
        self.doubtful[name] = max(until + DOUBTS, self.doubtful.get(name, 0.0))

    def _may_die(self, process: Process) -> bool:
        """Whether a majority of each view that somebody is in would go on living, of nodes that hold what it
        began with: a majority that is dead takes with it what only it knew. Whom the others may be about to
        remove is not counted."""
        others = [each for each in self.processes.values() if each is not process and each.alive]
        sure = [each for each in others if self.doubtful.get(each.name, 0.0) < self.now]
        living = {each.node.life for each in sure if each.node.is_ready}
        views = [each.node.view for each in (*others, process) if each.node.is_member]
        if not process.node.is_member and any(len(living) < len(view.members) for view in views):
            return False  # it may be in the next view, which then has another dead one
        for view in views:
            lives = {member.life for member in view.members}
            witness = self.schedule.hub and len(lives) == 2
            if len(lives & living) + witness < len(lives) // 2 + 1:
                return False
        return bool(views)

    def _heal(self) -> None:
        self.apart = frozenset()
        self.limits.clear()
        self.clock.cancel(self._limits_at)

    def end(self) -> None:
        """With an odd script all nodes end, soon, and nobody is excluded. Raises WrongError otherwise."""
        odd = self.schedule.odd
        assert odd is not None
        while not self.processes[odd.who].odd:
            self.clock.advance(self.clock.next_event())
        until = self.now + PATIENCE
        while len(self.ended) < self.schedule.nodes:
            if self.clock.next_event() > until:
                raise WrongError(f"only nodes {sorted(self.ended)} end:\n{self.describe()}")
            self.clock.advance(self.clock.next_event())

    def come_together(self) -> None:
        """Delays are bounded and all nodes live: so W rises at all of them. Raises WrongError otherwise."""
        until = self.now + PATIENCE
        goal = max(max(self.chains) + GOES_ON, self.schedule.iterations)
        while not self._is_at(goal):
            if self.clock.next_event() > until:
                raise WrongError(f"nobody goes on to {goal}:\n{self.describe()}")
            self.clock.advance(self.clock.next_event())

    def _is_at(self, goal: int) -> bool:
        all_of = self.processes.values()
        return all(each.alive and each.node.is_whole and each.node.applied >= goal for each in all_of)

    def describe(self) -> str:
        lines = []
        for each in self.processes.values():
            node = each.node
            lines.append(
                f"{node.life} alive {each.alive} member {node.is_member} view {node.view.number} "
                f"{[m.life for m in node.view.members]} k {node.iteration} W {node.applied} met {node.met} "
                f"waits {each.waits} meets {each.meets} computes {each.computes}: {node.waits.lines()} "
                f"{node.sync.rounds.state} {node.timers()}"
            )
        return "\n".join(lines)


def meetings_before(k: int) -> int:
    """How many meetings the script has come to before iteration `k`'s beginning."""
    return -(-k // MEETS_EACH)


def settings_for(stale_max: int) -> NodeSettings:
    """Times that fit the world's."""
    return NodeSettings(
        stale_max=stale_max,
        heartbeat=0.5,
        silence=(1.6, 3.0),
        progress=(3.0, 8.0),
        round=(0.05, 1.0),
        backoff=(0.01, 0.5),
        rest=(0.2, 2.0),
        fetch=(0.05, 1.0),
        linger=5.0,
    )


def run(schedule: Schedule) -> World:
    """The world after the schedule, in which all held."""
    world = World(schedule)
    world.run()
    return world
