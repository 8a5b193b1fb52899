"""A member of a group in the model of attempts: the life of one iteration, as the design has it.

The states are COMPUTE, CONTRIBUTE, SHOWN, STEP and BOUNDARY. A group makes rounds, again after a death.
Exchanges with an arbiter are claimed, launched, collected and committed. Each `yield` gives way to others;
a predicate that is yielded blocks the member until it holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from attempt_arbiters import Commit, Id, Record, chunks_of
from attempt_rules import Rules
from attempt_stores import (
    CHUNKS,
    CLIP,
    DIGIT,
    EDIT,
    EXTENT,
    FAILED,
    GARBAGE,
    Buffer,
    Number,
    Residuals,
    Values,
    WrongError,
    owned,
)
from attempt_world import BrokenError, Cell, Plan, Ring, World

NEW = 10  # the number of a contributor that nobody was in before is so much higher

Run = Generator[Callable[[], bool] | None, None, Any]


@dataclass(frozen=True)
class Attempt:
    """One try of a round. `settled`: this ring has confirmed a round before."""

    ring: Ring
    key: tuple[int, str]
    settled: bool

    @property
    def number(self) -> Number:
        return self.ring.generation, 0


@dataclass(frozen=True)
class Ballot:
    """What all members have said in an attempt."""

    samples: tuple[int, ...]
    number: Number
    grouping: int


@dataclass
class Outcome:
    """The result of a CONTRIBUTE round."""

    samples: tuple[int, ...]
    number: Number
    grouping: int
    ring: Ring
    mean: Any = None


@dataclass
class Push:
    """An open exchange of a contributor alone, at one member."""

    id: Id
    due: int
    samples: tuple[int, ...]
    what: Buffer
    shown_in: int  # the ring generation in which the sum was shown
    launched: bool = False
    record: Record | None = None
    extra: dict[str, Any] = field(default_factory=dict)


class Member:
    """One worker, over a whole or a sharded store. See the module."""

    def __init__(self, world: World, k: int, ring: Ring | None) -> None:
        self.world, self.k, self.ring = world, k, ring
        self.cell, self.rules = world.cell, world.rules
        self.contributor = -1 if ring is None else ring.contributor
        self.actions = 0
        self.where = self.state = "start"
        self.iteration = 0
        self.grouping = self.decided = 0
        # rounds
        self.round_number, self.held, self.tries, self.broken_since = 0, False, 0, 0
        self.settled_in = 0  # the generation of the ring that has confirmed a round
        # memory
        self.local, self.reduced, self.mean = Buffer("LOCAL"), Buffer("REDUCED"), Buffer("MEAN")
        self.values = Values()
        self.anchor = [[0] * EXTENT for _ in range(CHUNKS)]
        for chunk in range(CHUNKS):
            self.values.write(chunk, 0, 0, [0] * EXTENT)
        self.residuals = Residuals(eager=not self.rules.residual_at_commit, lend=self.rules.lend_residual)
        # the iteration
        self.hand: list[int] = []  # samples whose gradients are in LOCAL
        self.given: dict[int, int] = {}  # sample -> iteration, of all that this member's round has confirmed
        self.passes, self.stale, self.assisting, self.is_spoiled = 0, False, False, False
        self.early: set[int] = set()
        self.factor, self.edits, self.lost = 1, 0, False
        # exchanges
        self.most_open = max(1, self.cell.fragments, self.cell.overlap + 1)
        self.open: list[Push] = []
        self.unanswered: dict[tuple[int, Id], Callable[[], list[Callable[[], None]]]] = {}
        self.votes: dict[Any, set[int]] = {}
        self.commits: dict[Any, Commit] = {}

    # -- what a member does with others

    def send(self, to: str, act: Callable[[], None]) -> None:
        """Send a message; it comes later, in order for each receiver."""
        self.world.network.setdefault((self.k, to), deque()).append(act)

    def send_again(self, chunk: int) -> None:
        """A shard was started again: say anew what it may have lost."""
        for (home, _), make in list(self.unanswered.items()):
            if home == chunk:
                for act in make():
                    self.send(f"home {chunk}", act)

    def point(self, where: str) -> Run:
        """A point at which this member may die."""
        self.where = where
        self.check_memory()
        yield None

    def check_memory(self) -> None:
        """MEAN takes LOCAL's memory; a snapshot lives while its exchange is open."""
        kinds = {each.kind for each in (self.local, self.reduced, self.mean) if each.data}
        snapshots = sum(push.what is not self.reduced for push in self.open)
        kinds |= {"SNAPSHOT"[: 8 * snapshots], "SNAPSHOT 2"[: 10 * (snapshots > 1)]} - {""}
        self.world.memory.setdefault(self.state, set()).add(frozenset(kinds))
        if self.local.data and not self.assisting:
            if self.mean.data:
                raise WrongError(f"{self.state}: LOCAL and MEAN are alive at once")
            if self.state in ("shown", "step"):
                raise WrongError(f"{self.state}: LOCAL is alive")
        if self.state == "compute" and self.mean.data:
            raise WrongError("MEAN is alive in COMPUTE")
        if len(self.open) > self.most_open:
            raise WrongError(f"{len(self.open)} snapshots are alive")

    def collect(self, ring: Ring, key: Any, value: Any) -> Run:
        """A collective: every member's value, in order of rank. It may fail at some members only."""
        given = ring.given.setdefault(key, {})
        if ring.broken and self.k not in given and len(given) < len(ring.members) - 1:
            raise BrokenError
        given.setdefault(self.k, value)
        self.where = f"{key}"
        self.check_memory()
        yield lambda: len(given) == len(ring.members) or ring.broken
        if len(given) < len(ring.members) or (ring.broken and self.world.pick(2)):
            raise BrokenError
        return [given[k] for k in ring.members]

    def tell(self, attempt: Attempt, label: Any, value: Any, turn: int | None = None) -> Run:
        """The leader's value, at all members."""
        ring = attempt.ring
        values = yield from self.collect(
            ring, (*attempt.key, label), value if self.leads(ring, turn) else None
        )
        return values[ring.members.index(self.leader(ring, turn))]

    def wait(self, ring: Ring, ready: Callable[[], bool], where: str) -> Run:
        """Wait for somebody outside the ring; not longer than the ring lives."""
        self.where = where
        yield lambda: ready() or ring.broken
        if not ready():
            raise BrokenError

    def leader(self, ring: Ring, turn: int | None = None) -> int:
        """Members speak for the ring in turn."""
        return ring.members[(self.iteration if turn is None else turn) % len(ring.members)]

    def leads(self, ring: Ring, turn: int | None = None) -> bool:
        return self.leader(ring, turn) == self.k

    def run_of(self, ring: Ring) -> tuple[int, int]:
        """The elements of each chunk that this member's store keeps."""
        return owned(ring.members, self.k) if self.cell.store == "parts" else (0, EXTENT)

    def round(self, name: str, act: Callable[[Attempt], Run], settles: bool = True) -> Run:
        """Make a round until all hold its result. `settles`: the act claims what is open."""
        world = self.world
        self.tries, before = 0, world.deaths
        while True:
            ring = self.ring
            attempt = Attempt(ring, (self.round_number, name), self.settled_in == ring.generation)
            self.tries += 1
            if self.tries > 1 + world.deaths - before + self.broken_since:
                raise WrongError(f"{name} is tried {self.tries} times, after {world.deaths - before} deaths")
            try:
                result = yield from act(attempt)
                self.held = True
                yield from self.point(f"{name} held")
                yield from self.collect(ring, (*attempt.key, "confirm"), None)
            except BrokenError:
                # A ring that has broken before this round is found out in it.
                self.broken_since = 1
                world.hub.report(self.k, self.round_number, self.held)
                self.where = f"{name}: waits for the next ring"
                yield lambda: self.k in world.hub.answers
                answer, self.ring = world.hub.answers.pop(self.k)
                if answer == "take":
                    if not self.held:
                        raise WrongError("takes a round that it does not hold") from None
                    self.round_number, self.held = self.round_number + 1, False
                    return result
                self.held = False
                continue
            self.round_number, self.held, self.broken_since = self.round_number + 1, False, 0
            if settles:
                self.settled_in = ring.generation
            return result

    # -- the life

    def life(self) -> Run:
        if self.ring is None:
            yield from self.enter()
        while self.iteration < self.cell.iterations:
            yield from self.compute()
            yield from self.contribute()
            if self.cell.sync == "bsp":
                yield from self.edit(self.mean)
                yield from self.step()
            elif self.cell.sync == "replicas":
                yield from self.edit(self.reduced)
                yield from self.local_step()
            else:
                yield from self.edit(self.reduced)
                yield from self.exchange_step()
            self.state = "boundary"
            yield from self.point("boundary")
            if self.iteration < self.cell.iterations and self.decided > self.grouping:
                stays = yield from self.change()
                if not stays:
                    return
        yield from self.drain(flush=True)

    # -- COMPUTE

    def compute(self) -> Run:
        i, world = self.iteration, self.world
        self.state = "compute"
        for buffer in (self.mean, self.reduced):
            if not self._is_pushed(buffer):
                buffer.held = False
                buffer.drop()
        self.assisting = (self.k, i) in self.cell.assists
        self.is_spoiled, self.stale, self.passes = False, False, 0
        self.early = set()
        self.factor, self.edits, self.lost = 1, 0, False
        seen: dict[tuple[int, int], int] = {}
        # Under local steps a chunk's clock counts its updates: steps, and mixes.
        self.expected = list(self.values.clock) if self.cell.sync == "replicas" else [i] * CHUNKS
        self.values.in_pass = self.expected
        for chunk in range(CHUNKS):
            yield from self.read(chunk, seen, "forward")
        world.shown.setdefault(("values", self.contributor, i), {})[self.k] = tuple(sorted(seen.items()))
        sample = world.dealer.take(self.k)
        for fails in [True, False] if (self.k, i) in self.cell.raises else [False]:
            for chunk in reversed(range(CHUNKS)):
                yield from self.read(chunk, seen, "backward")
                if fails and chunk == 0:
                    break  # the backward raises: the script begins it again
                self.accumulate(chunk, FAILED if fails else sample)
                self.leave_early(chunk)
            if fails:
                self.local.drop()
                if self.rules.raise_pass:
                    self.passes, self.stale = self.passes + 1, True
                    self.early = set()
        self.hand.append(sample)
        self.values.in_pass = None

    def _is_pushed(self, buffer: Buffer) -> bool:
        return any(push.what is buffer for push in self.open)

    def read(self, chunk: int, seen: dict[tuple[int, int], int], where: str) -> Run:
        """Gather a chunk's values at this iteration's clock, as forward and backward do."""
        yield from self.point(where)
        i, world, clock = self.iteration, self.world, self.expected[chunk]
        whom = self.ring.members if self.cell.store == "parts" else (self.k,)
        for holder in whom:
            start, stop = owned(self.ring.members, holder) if self.cell.store == "parts" else (0, EXTENT)
            values = None
            other = world.members[holder]
            if self.rules.version_wait or holder == self.k:
                self.where = f"{where} waits for member {holder}"
                yield (
                    lambda holder=holder, other=other: holder not in world.alive or other.is_at(chunk, clock)
                )
            if holder in world.alive and (other.values.clock[chunk] == clock or not self.rules.version_wait):
                values = other.values.run(chunk, start, stop)
            if values is None:
                yield from self.point(f"{where} asks the source")
                values = self.source(chunk, start, stop)
            for place, value in enumerate(values, start):
                if seen.setdefault((chunk, place), value) != value:
                    if self.cell.sync != "asp":
                        raise WrongError(f"forward and backward see unlike values of chunk {chunk}")
                    self.is_spoiled = True
        if self.cell.sync == "bsp":
            truth = self.source(chunk, 0, EXTENT)
            if [seen[chunk, place] for place in range(EXTENT)] != truth:
                raise WrongError(f"{where} of iteration {i} sees other values of chunk {chunk}")

    def is_at(self, chunk: int, clock: int) -> bool:
        """Whether this member's values are of a clock, and no mover is about to write some."""
        return self.values.clock[chunk] >= clock and not self.world.movers.get(self.k)

    def source(self, chunk: int, start: int, stop: int) -> list[int]:
        """Values from the arbiter's side."""
        if self.cell.sync == "bsp" and self.world.arbiter.shards[chunk].clock != self.iteration:
            raise WrongError("the source has gone on")
        return self.world.arbiter.values(chunk)[start:stop]

    def accumulate(self, chunk: int, sample: int) -> None:
        self.local.tag = "gradient"
        for place in range(EXTENT):
            self.local.data[chunk, place] = self.local.data.get((chunk, place), 0) + DIGIT**sample

    def leave_early(self, chunk: int) -> None:
        """What is complete may leave while backward goes on: into the ring's sum; alone, to its home."""
        ring = self.ring
        if self.assisting or ring.broken:
            return
        if len(ring.members) > 1:
            given = ring.given.setdefault((self.round_number, "contribute", "sum", chunk), {})
            given.setdefault(self.k, self.local.read("gradient", chunk, 0, EXTENT))
        elif self.cell.sync == "bsp" and chunk not in self.early:
            number = ring.generation, self.passes
            tag = ("sum", self.iteration, number)
            if tag != self.reduced.tag:
                self.reduced = Buffer("REDUCED")
            self.early.add(chunk)
            self.reduced.write(tag, chunk, 0, self.local.read("gradient", chunk, 0, EXTENT))
            self.push_run(("mean", self.iteration), number, self.reduced, tag, chunk, 0, EXTENT)

    # -- CONTRIBUTE

    def contribute(self) -> Run:
        self.state = "contribute"
        self.local.held = True
        outcome: Outcome = yield from self.round("contribute", self._contribute)
        world, exchange = self.world, ("mean", self.iteration)
        members = tuple(k for k in world.members if world.members[k].contributor == self.contributor)
        self.decided = max(self.decided, outcome.grouping)
        if not self.assisting:
            self.local.held = False
            self.local.drop()
            dropped = [sample for sample in self.hand if sample not in outcome.samples]
            if dropped and not self.is_spoiled:
                raise WrongError(f"member {self.k} goes on, and its samples {dropped} count nowhere")
            self.given.update((sample, self.iteration) for sample in self.hand if sample in outcome.samples)
            self.hand = []
            world.dealer.confirm(outcome.samples, members)
            world.dealer.leave_out((self.k, tuple(dropped), self.iteration), tuple(dropped))
        else:
            self.local.held = False
            world.dealer.confirm(outcome.samples, members)
        if self.cell.sync == "bsp":
            world.dealer.settle((self.contributor, exchange), outcome.samples)
            self.residuals.settle(exchange, outcome.number)
            self.answered(exchange)
            self.reduced.held = False
            self.reduced.drop()
            world.shown.setdefault(("mean", self.iteration), {})[self.k] = outcome.mean
        elif self.cell.sync == "replicas":
            world.dealer.settle((self.contributor, "local", self.iteration), outcome.samples)
        self.outcome = outcome

    def _contribute(self, attempt: Attempt) -> Run:
        exchange = ("mean", self.iteration)
        bsp, record, ballot = self.cell.sync == "bsp", None, None
        yield from self.begin_ring(attempt)
        if bsp and not attempt.settled and self.rules.claim:
            record = yield from self.claim(attempt, exchange, "claim mean")
        if record is None:
            ballot = yield from self.reduce(attempt)
            tag = ("sum", self.iteration, ballot.number)
            if not self.rules.local_kept and not self.assisting:
                self.local.held = False
                self.local.drop()
            if not bsp:
                return Outcome(ballot.samples, ballot.number, ballot.grouping, attempt.ring)
            yield from self.launch(attempt, exchange, ballot.number, self.reduced, tag)
            if self.leads(attempt.ring):
                commit = Commit(ballot.number, ballot.samples, grouping=ballot.grouping)
                self.world.arbiter.committed(self, exchange, commit)
                yield from self.point("committed")
        record = yield from self.confirmed(attempt, exchange, attempt.number)
        if not self.assisting or not self.rules.assist_keeps_local:
            self.local.held = False
            self.local.drop()  # its memory takes MEAN
        yield from self.pull_mean(attempt)
        mine = record[self.contributor]
        samples = mine.samples
        if not self.rules.same_record:
            present = [s for k in attempt.ring.members for s in self.world.members[k].hand]
            samples = tuple(sample for sample in samples if sample in present)
        grouping = min(commit.grouping for commit in record.values())
        if not self.rules.move_by_record:
            grouping = mine.grouping
        shards = self.world.arbiter.shards
        mean = tuple(tuple(shard.mean[self.iteration]) for shard in shards), tuple(sorted(record))
        return Outcome(samples, mine.number, grouping, attempt.ring, mean)

    def reduce(self, attempt: Attempt) -> Run:
        """LOCAL -> REDUCED over the ring, then the ballot."""
        ring, i = attempt.ring, self.iteration
        gives = not self.assisting and not (self.is_spoiled and self.rules.spoiled)
        if gives and self.is_spoiled:
            raise WrongError(f"member {self.k} contributes a gradient of values that changed meanwhile")
        # What has left early of a gradient that is not given after all is summed again, by all.
        self.stale |= self.is_spoiled and self.rules.spoiled_again
        if self.rules.renew:
            self.reduced = Buffer("REDUCED")
        else:
            self.reduced.held = False
        if not self.early:
            self.answered(("mean", i))
        sums = yield from self._sum(attempt, "sum", gives)
        words = yield from self.collect(
            ring,
            (*attempt.key, "ballot"),
            (tuple(self.hand) if gives else (), self.stale, self.passes, int(self.k in self.world.hub.heard)),
        )
        if any(stale for _, stale, _, _ in words):
            sums = yield from self._sum(attempt, "sum again", gives)
        number = ring.generation, max(passes for _, _, passes, _ in words)
        samples = tuple(sample for given, _, _, _ in words for sample in given)
        start, stop = self.run_of(ring)
        for chunk, total in enumerate(sums):
            self.world.sums[self.contributor, i, number, chunk] = total
            self.reduced.write(("sum", i, number), chunk, start, total[start:stop])
        yield from self.point("summed")
        return Ballot(samples, number, min(grouping for _, _, _, grouping in words))

    def _sum(self, attempt: Attempt, label: str, gives: bool) -> Run:
        sums = []
        for chunk in range(CHUNKS):
            mine = self.local.read("gradient", chunk, 0, EXTENT) if gives else [0] * EXTENT
            try:
                parts = yield from self.collect(attempt.ring, (*attempt.key, label, chunk), mine)
            except BrokenError:
                self.world.ghosts.append(lambda into=self.reduced, chunk=chunk: haunt(into, chunk))
                raise
            sums.append([sum(part[place] for part in parts) for place in range(EXTENT)])
        return sums

    def pull_mean(self, attempt: Attempt) -> Run:
        i, ring = self.iteration, attempt.ring
        start, stop = self.run_of(ring)
        self.mean.held = False
        self.mean.drop()
        for chunk in range(CHUNKS):
            shard = self.world.arbiter.shards[chunk]
            yield from self.wait(ring, lambda shard=shard: i in shard.mean, "pull mean")
            values = shard.mean[i][start:stop]
            if self.cell.store == "whole":
                values = yield from self.tell(attempt, ("spread", chunk), values)
            self.mean.write(("mean", i), chunk, start, values)
            yield from self.point("mean")

    # -- exchanges: claim, launch, collect

    def claim(self, attempt: Attempt, exchange: Id, label: str) -> Run:
        """Ask the arbiter, by the leader, whether an earlier attempt counted."""
        record, turn = None, turn_of(exchange)
        if self.leads(attempt.ring, turn):
            record = yield from self.world.arbiter.claimed(self, attempt.ring, exchange, attempt.number)
        return (yield from self.tell(attempt, (label, exchange), record, turn))

    def launch(self, attempt: Attempt, exchange: Id, number: Number, what: Buffer, tag: Any) -> Run:
        """Send what the store holds under the attempt's number: each member its part, or the leader all."""
        ring = attempt.ring
        what.held = self.rules.hold_sent
        for chunk in chunks_of(exchange, self.cell.fragments):
            if chunk in self.early and exchange == ("mean", self.iteration):
                continue
            if self.cell.store == "parts" or self.cell.speaker == "shares":
                start, stop = owned(ring.members, self.k)
            elif self.leads(ring, turn_of(exchange)):
                start, stop = 0, EXTENT
            else:
                continue
            self.push_run(exchange, number, what, tag, chunk, start, stop)
            yield from self.point(f"pushed {exchange}")
        if not self.rules.hold_sent and exchange[0] != "push":
            what.drop()

    def push_run(
        self, exchange: Id, number: Number, what: Buffer, tag: Any, chunk: int, start: int, stop: int
    ) -> None:
        """Send one run; it is said again, from the hold, when its home was started again."""
        contributor = self.contributor

        def make() -> list[Callable[[], None]]:
            values = what.read(tag, chunk, start, stop)
            if self.cell.codec and exchange[0] != "step":
                odd = self.iteration if exchange[0] == "mean" else exchange[2]
                values = self.residuals.encode(exchange, number, chunk, start, values, odd)
            homes = self.world.arbiter.homes(chunk)
            return [
                lambda home=home: home.push(contributor, exchange, number, start, values) for home in homes
            ]

        self.unanswered[chunk, exchange] = make
        for each, act in enumerate(make()):
            self.send(f"home {chunk}" if self.cell.sync != "peers" else f"side {each}", act)

    def answered(self, exchange: Id) -> None:
        """Nothing of this exchange is said again."""
        for key in [key for key in self.unanswered if key[1] == exchange]:
            del self.unanswered[key]

    def confirmed(self, attempt: Attempt, exchange: Id, number: Number) -> Run:
        """Wait until the exchange has counted: the leader does, and tells."""
        record, turn = None, turn_of(exchange)
        if self.leads(attempt.ring, turn):
            record = yield from self.world.arbiter.confirmed(self, attempt.ring, exchange, number)
        return (yield from self.tell(attempt, ("counted", exchange), record, turn))

    def begin_ring(self, attempt: Attempt) -> Run:
        """What the first round of a ring does before all else."""
        if attempt.settled:
            return
        ring, i = attempt.ring, self.iteration
        if self.cell.store == "parts" and self.cell.sync == "bsp" and self.state in ("shown", "step"):
            edits = yield from self.collect(ring, (*attempt.key, "edits before"), self.edits)
            yield from self._reshard(ring, any(edits))
        waiting = [push for push in self.open if not push.extra.get("new")]
        ids = yield from self.collect(ring, (*attempt.key, "open"), [push.id for push in waiting])
        if any(each != ids[0] for each in ids):
            raise WrongError(f"iteration {i}: unlike open exchanges {ids}")
        if self.rules.again:
            for push in waiting:
                yield from self.attempt_push(attempt, push)

    def _reshard(self, ring: Ring, edited: bool) -> Run:
        """Fetch the parts of MEAN that a dead member kept; its edits are lost."""
        start, stop = self.run_of(ring)
        if edited and self.rules.lost_edits:
            self.lost = True
        held, self.mean.held = self.mean.held, False
        for chunk in range(CHUNKS):
            for place in range(start, stop):
                if (chunk, place) not in self.mean.data and self.rules.reshard:
                    factor = self.factor if self.rules.rescale else 1
                    value = self.world.arbiter.shards[chunk].mean[self.iteration][place]
                    self.mean.data[chunk, place] = value * factor
            yield from self.point("reshard")
        self.mean.held = held

    # -- SHOWN

    def edit(self, shown: Buffer) -> Run:
        """What the script does with `p.grad`."""
        self.state = "shown"
        shown.held = False
        for number, edit in enumerate(self.cell.edits):
            yield from self.point("edits")
            if edit == "clip":
                yield from self.round(f"clip {number}", lambda attempt: self._norm(attempt, self._shown()))
                shown = self._shown()
                self.factor *= CLIP
                shown.data = {key: value * CLIP for key, value in shown.data.items()}
            elif not self.assisting:
                shown.data = {
                    key: value + DIGIT ** (EDIT + self.iteration) for key, value in shown.data.items()
                }
                self.edits += 1

    def _shown(self) -> Buffer:
        return self.mean if self.cell.sync == "bsp" else self.reduced

    def _norm(self, attempt: Attempt, shown: Buffer) -> Run:
        """Each member measures the runs that it keeps."""
        yield from self.begin_ring(attempt)
        ring = attempt.ring
        if self.cell.store == "whole":
            yield from self.collect(ring, (*attempt.key, "norm"), None)
            return
        start, stop = self.run_of(ring)
        own = [key for key in shown.data if start <= key[1] < stop]
        rows = yield from self.collect(ring, (*attempt.key, "norm"), own)
        if self.cell.sync != "bsp":
            return  # a part of a sum is gone: the contribution will be left out
        if sorted(key for row in rows for key in row) != [
            (c, p) for c in range(CHUNKS) for p in range(EXTENT)
        ]:
            raise WrongError("the norm does not cover the mean once")

    # -- STEP, bsp: at home

    def step(self) -> Run:
        self.state = "step"
        self.mean.held = True
        yield from self.round("step", self._step)
        self.answered(("step", self.iteration))
        self.mean.held = False
        self.iteration += 1
        if not self.rules.values_in_round:
            for chunk in range(CHUNKS):
                yield from self.point("values")
                self.take_values(chunk, *self.run_of(self.ring))

    def _step(self, attempt: Attempt) -> Run:
        i, ring, exchange = self.iteration, attempt.ring, ("step", self.iteration)
        yield from self.begin_ring(attempt)
        edits = yield from self.collect(ring, (*attempt.key, "edits"), self.edits)
        lost = self.lost or (len(set(edits)) > 1 and self.rules.edits_alike)
        word = "follows" if lost else "edited" if any(edits) else "step"
        if word == "edited":
            yield from self.launch(attempt, exchange, attempt.number, self.mean, ("mean", i))
        if self.leads(ring):
            # No claim: whichever attempt's word counts, all read the step from the record.
            self.world.arbiter.committed(
                self, exchange, Commit(attempt.number, word=word, factor=self.factor)
            )
            yield from self.point("said the step")
        yield from self.confirmed(attempt, exchange, attempt.number)
        if self.rules.values_in_round:
            for chunk in range(CHUNKS):
                yield from self.point("values")
                run = self.run_of(ring)
                if self.cell.movers:
                    self.mover(lambda chunk=chunk, run=run: self.take_values(chunk, *run, clock=i + 1))
                else:
                    self.take_values(chunk, *run, clock=i + 1)

    def mover(self, act: Callable[[], None]) -> None:
        self.world.movers.setdefault(self.k, deque()).append(act)

    def take_values(self, chunk: int, start: int, stop: int, clock: int | None = None) -> None:
        clock = self.iteration if clock is None else clock
        shard = self.world.arbiter.shards[chunk]
        if shard.clock != clock:
            raise WrongError("values are taken of another clock")
        self.values.write(chunk, clock, start, shard.values[start:stop])

    # -- STEP, asp and peers: `at_step` gives an exchange of the sum that was shown

    def exchange_step(self) -> Run:
        self.state = "step"
        i, what = self.iteration, self.reduced
        if self.cell.overlap:
            what = Buffer("SNAPSHOT")
            what.tag, what.data = self.reduced.tag, dict(self.reduced.data)
        what.held = True
        push = Push(
            ("push", self.contributor, i, 0),
            i + self.cell.overlap,
            self.outcome.samples,
            what,
            self.outcome.ring.generation,
        )
        push.extra["new"] = True
        self.open.append(push)
        yield from self.round("exchange", lambda attempt: self._exchange(attempt, push))
        push.extra["new"] = False
        for due in [each for each in self.open if each.due <= i]:
            self.commit(due)
        self.iteration += 1
        if not self.rules.values_in_round:
            yield from self.point("values")
            self.show_values(i + 1)

    def _exchange(self, attempt: Attempt, push: Push) -> Run:
        yield from self.begin_ring(attempt)
        yield from self.attempt_push(attempt, push, claims=not attempt.settled)
        for due in [each for each in self.open if each.due <= self.iteration]:
            due.record = yield from self.confirmed(attempt, due.id, attempt.number)
        if self.cell.slack is not None:
            if self.leads(attempt.ring):
                yield from self.wait(attempt.ring, lambda: self.world.is_within_slack(self.k), "slack")
            yield from self.tell(attempt, "slack", None)
        start, stop = self.run_of(attempt.ring)
        pulled = []
        for chunk in range(CHUNKS):
            yield from self.point("values")
            values = self.world.arbiter.values(chunk)[start:stop]
            if self.cell.store == "whole":
                values = yield from self.tell(attempt, ("spread values", chunk), values)
            pulled.append(values)
        self.pulled, self.pulled_at = pulled, start
        if self.rules.values_in_round:
            self.show_values(self.iteration + 1)

    def show_values(self, clock: int) -> None:
        for chunk, values in enumerate(self.pulled):
            self.values.write(chunk, clock, self.pulled_at, values)

    def attempt_push(self, attempt: Attempt, push: Push, claims: bool = True) -> Run:
        """Claim an open exchange; if it has not counted, launch it under this attempt's number."""
        if claims and self.rules.claim:
            record = yield from self.claim(attempt, push.id, "claim push")
            if record is not None:
                return
        yield from self._launch_push(attempt, push)

    def _launch_push(self, attempt: Attempt, push: Push) -> Run:
        number, word = attempt.number, "sum"
        if self.cell.store == "parts" and attempt.ring.generation != push.shown_in and self.rules.lost_sum:
            word = "nothing"  # a part of what was shown is gone, with the script's edits
        if word == "sum":
            self.answered(push.id)
            yield from self.launch(attempt, push.id, number, push.what, push.what.tag)
        push.launched = True
        if self.leads(attempt.ring, turn_of(push.id)):
            samples = push.samples if word == "sum" else ()
            self.world.arbiter.committed(self, push.id, Commit(number, samples, word=word))
            yield from self.point(f"committed {push.id}")

    def commit(self, push: Push) -> None:
        """Once, after the round is confirmed."""
        if push.record is None:
            raise WrongError(f"{push.id} is committed, and has no record")
        mine = push.record[push.id[1]]
        push.what.held = False
        self.open.remove(push)
        self.answered(push.id)
        self.residuals.settle(push.id, mine.number)
        if self.cell.sync == "replicas":
            return
        if mine.word == "nothing":
            if turn_of(push.id) < self.iteration:
                raise WrongError(f"{push.id} is left out, and its step has returned")
            for sample in [sample for sample in push.samples if sample in self.given]:
                del self.given[sample]
            self.world.dealer.leave_out(push.id, push.samples)
        else:
            self.world.dealer.settle(push.id, mine.samples)

    # -- STEP, replicas: at the worker; fragments are exchanged

    def local_step(self) -> Run:
        self.state = "step"
        for chunk in range(CHUNKS):
            yield from self.point("step")
            start, stop = self.run_of(self.ring)
            values = self.values.run(chunk, start, stop) or []
            summed = self.reduced.read(self.reduced.tag, chunk, start, stop)
            new = [old + each for old, each in zip(values, summed, strict=True)]
            self.values.write(chunk, self.values.clock[chunk] + 1, start, new)
        self.iteration += 1
        step, cell = self.iteration, self.cell
        yield from self.collect_due([push for push in self.open if push.due <= step], "due")
        for fragment in range(cell.fragments):
            if (step - fragment * cell.period // cell.fragments) % cell.period == 0:
                yield from self.launch_fragment(step, fragment, step + cell.overlap)
        if not cell.overlap:
            yield from self.collect_due(list(self.open), "due now")

    def launch_fragment(self, step: int, fragment: int, due: int) -> Run:
        """`after_step`: the difference to the anchor leaves from a snapshot, at once in a settled ring."""
        what, exchange = Buffer("SNAPSHOT"), ("push", self.contributor, step, fragment)
        for chunk in chunks_of(exchange, self.cell.fragments):
            start, stop = self.run_of(self.ring)
            values = self.values.run(chunk, start, stop) or []
            anchor = self.anchor[chunk][start:stop]
            difference = [value - old for value, old in zip(values, anchor, strict=True)]
            what.write(("difference", step), chunk, start, difference)
            for place, each in enumerate(difference, start):
                self.world.differences[exchange, chunk, place] = each
        push = Push(exchange, due, (), what, self.ring.generation)
        self.open.append(push)
        if self.settled_in == self.ring.generation and not self.ring.broken:
            attempt = Attempt(self.ring, (self.round_number, "after step"), True)
            yield from self._launch_push(attempt, push)

    def collect_due(self, pushes: list[Push], name: str) -> Run:
        """Collect exchanges in a round, and mix what has come once."""
        if not pushes:
            return

        def act(attempt: Attempt) -> Run:
            yield from self.begin_ring(attempt)
            for push in pushes:
                push.record = yield from self.confirmed(attempt, push.id, attempt.number)
                if not self.rules.commit_once:
                    self.mix(push)

        yield from self.round(name, act)
        for push in pushes:
            if self.rules.commit_once and self.cell.sync == "replicas":
                yield from self.point("mix")
                self.mix(push)
            self.commit(push)

    def mix(self, push: Push) -> None:
        """VALUES go on from the new global values; the anchor follows."""
        for chunk in chunks_of(push.id, self.cell.fragments):
            shared = self.world.arbiter.shards[chunk].history[push.id]
            start, stop = self.run_of(self.ring)
            sent = push.what.read(push.what.tag, chunk, start, stop)
            values = self.values.run(chunk, start, stop) or []
            anchor = self.anchor[chunk][start:stop]
            mixed = [
                new + value - old - delta
                for new, value, old, delta in zip(shared[start:stop], values, anchor, sent, strict=True)
            ]
            self.anchor[chunk] = list(shared)
            clock = self.values.clock[chunk] + int(self.rules.mix_is_newer)
            self.values.write(chunk, clock, start, mixed)

    def drain(self, flush: bool) -> Run:
        """Collect what is open; `flush`: of replicas, exchange all that was stepped since."""
        if self.cell.sync == "bsp":
            return
        yield from self.collect_due(list(self.open), "drain")
        if flush and self.cell.sync == "replicas":
            for fragment in range(self.cell.fragments):
                # A step's own number may be taken: the flush has one of its own.
                yield from self.launch_fragment(1000 + self.iteration, fragment, self.iteration)
            yield from self.collect_due(list(self.open), "flush")

    # -- BOUNDARY: members come, move and leave

    def change(self) -> Run:
        """Go to the next grouping; return whether this member stays in the run."""
        hub = self.world.hub
        plan, mine = hub.plan(self.decided), hub.plan(self.grouping)[self.contributor]
        if not self.rules.change_by_plan:
            mine = self.ring.members
        stay = plan[self.contributor] if self.contributor < len(plan) else ()
        if not set(mine) <= set(stay) and self.rules.drain_first:
            yield from self.drain(flush=True)
        self.grouping = self.decided
        if not any(self.k in group for group in plan):
            return False
        yield from self.enter()
        return True

    def enter(self) -> Run:
        """Meet the members of the next group, and take the state of one that was in it."""
        world = self.world
        self.state = self.where = "waits for its next group"
        yield None
        world.hub.gather(self.k)
        yield lambda: self.k in world.hub.answers
        _, ring = world.hub.answers.pop(self.k)
        was = self.contributor
        self.ring, self.contributor = ring, ring.contributor
        self.round_number, self.held, self.grouping, self.decided, self.broken_since = 0, False, 1, 1, 1
        yield from self.round("enter", lambda attempt: self._enter(attempt, was), settles=False)
        self.state = "boundary"

    def _enter(self, attempt: Attempt, was: int) -> Run:
        """Others may read from a newcomer as soon as they have passed the round: it has the state by then."""
        state = yield from self._meet(attempt, was)
        if was == self.contributor:
            return
        if state is None:
            state = self._state_at_home()
            if self.cell.sync != "bsp" and self.rules.new_contributor:
                # Those who were in the group may still speak for it: who takes their place is somebody else.
                self.contributor = attempt.ring.contributor + NEW
        self.iteration = state["iteration"]
        self.open = []
        if self.rules.give_open:
            for push in state["open"]:
                self.open.append(Push(push.id, push.due, push.samples, copy_of(push.what), push.shown_in))
        self.anchor = [list(values) for values in state["anchor"]]
        self.values = Values()
        self.values.clock = [self.iteration] * CHUNKS
        for chunk in range(CHUNKS if self.cell.store == "whole" else 0):
            self.values.write(chunk, self.iteration, 0, state["values"][chunk])

    def _meet(self, attempt: Attempt, was: int) -> Run:
        """The first member that was in the group before tells its state; None where there is none."""
        mine = None
        if was == self.contributor:
            mine = {
                "iteration": self.iteration,
                "open": list(self.open),
                "anchor": self.anchor,
                "values": [
                    self.source(chunk, 0, EXTENT)
                    if self.cell.sync == "bsp"
                    else self.values.run(chunk, 0, EXTENT)
                    for chunk in range(CHUNKS)
                ],
            }
        states = yield from self.collect(attempt.ring, (*attempt.key, "state"), mine)
        return next((state for state in states if state is not None), None)

    def _state_at_home(self) -> dict[str, Any]:
        """Nobody of the group is left, or all have ended: the arbiter has what it was given."""
        arbiter = self.world.arbiter
        steps = sum(exchange[0] == "step" for exchange in arbiter.records)
        values = [arbiter.values(chunk) for chunk in range(CHUNKS)]
        iteration = steps if self.cell.sync == "bsp" else self.cell.iterations
        return {"iteration": iteration, "open": [], "anchor": values, "values": values}


def begin(cell: Cell, plan: Plan, rules: Rules) -> World:
    """Return a run of one cell by one plan, which has not begun."""
    world = World(cell, plan, rules)
    for contributor, group in enumerate(cell.groups):
        ring = world.hub.form(contributor, tuple(group))
        for k in group:
            world.members[k] = Member(world, k, ring)
    for k in sorted(world.alive - world.members.keys()):
        world.members[k] = Member(world, k, None)
    world.lives = {k: member.life() for k, member in world.members.items()}
    return world


def turn_of(exchange: Id) -> int:
    """Return an exchange's iteration, by which its leader is found."""
    return int(exchange[2] if exchange[0] == "push" else exchange[1])


def haunt(into: Buffer, chunk: int) -> None:
    """A broken ring still writes into the memory that it was given."""
    if into.data:
        for place in range(EXTENT):
            if (chunk, place) in into.data:
                into.data[chunk, place] = DIGIT**GARBAGE


def copy_of(buffer: Buffer) -> Buffer:
    """Return a snapshot as a newcomer receives it."""
    copy = Buffer(buffer.kind)
    copy.data, copy.tag, copy.held = dict(buffer.data), buffer.tag, True
    return copy
