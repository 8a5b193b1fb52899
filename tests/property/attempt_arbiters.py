"""Arbiters of the model of attempts: they decide that an exchange counts. A log with shards, or CPU sides.

An exchange is named by a tuple. `("mean", i)` and `("step", i)` need every contributor (bsp);
`("push", contributor, i, fragment)` needs that contributor alone. A record says which commits counted.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attempt_stores import CHUNKS, CLIP, DIGIT, EDIT, EXTENT, Number, WrongError

if TYPE_CHECKING:
    from attempt_world import World

Id = tuple[Any, ...]
Run = Generator[Callable[[], bool] | None, None, Any]
NOTHING: Number = (0, 0)


@dataclass(frozen=True)
class Commit:
    """What a contributor says: the attempt, the samples in its sum, and the word on a step."""

    number: Number
    samples: tuple[int, ...] = ()
    word: str = "sum"  # "sum", "nothing"; of a step: "step", "edited", "follows"
    factor: int = 1
    grouping: int = 0  # the latest that its members know of


Record = dict[int, Commit]


def chunks_of(exchange: Id, fragments: int) -> tuple[int, ...]:
    """Return the chunks that an exchange carries."""
    if exchange[0] == "push" and fragments > 1:
        return (exchange[3],)
    return tuple(range(CHUNKS))


class Stage:
    """What came of one contribution's chunk: runs of one attempt."""

    def __init__(self, number: Number) -> None:
        self.number = number
        self.data: dict[int, int] = {}

    @property
    def whole(self) -> bool:
        return len(self.data) == EXTENT


class Shard:
    """One chunk at home. `fence`: runs of a lower attempt go when a higher one comes."""

    def __init__(self, world: World, chunk: int) -> None:
        self.world, self.chunk = world, chunk
        self.stages: dict[tuple[int, Id], Stage] = {}
        self.mean: dict[int, list[int]] = {}
        self.values = [0] * EXTENT
        self.clock = 0  # steps made
        self.history: dict[Id, list[int]] = {}  # values just after a push

    def push(self, contributor: int, exchange: Id, number: Number, start: int, values: list[int]) -> None:
        """Stage a run."""
        if exchange in self.world.arbiter.records:
            return
        fence = self.world.rules.fence_runs
        stage = self.stages.get((contributor, exchange))
        if stage is None or (fence and number > stage.number):
            stage = self.stages[contributor, exchange] = Stage(number)
        if fence and number < stage.number:
            return
        for place, value in enumerate(values, start):
            stage.data.setdefault(place, value)
        self.world.arbiter.advance()

    def has(self, contributor: int, exchange: Id, number: Number) -> bool:
        """Return whether all of this attempt's runs are here."""
        stage = self.stages.get((contributor, exchange))
        return (
            stage is not None and stage.whole and (stage.number == number or not self.world.rules.fence_runs)
        )

    def take(self, contributor: int, exchange: Id) -> list[int]:
        """Return a staged contribution."""
        stage = self.stages[contributor, exchange]
        return [stage.data[place] for place in range(EXTENT)]

    def restart(self) -> None:
        """Lose what the log does not tell of yet."""
        records = self.world.arbiter.records
        self.stages = {key: stage for key, stage in self.stages.items() if key[1] in records}


class Log:
    """The log of shard 0, which is in a journal: what it has answered it knows for ever."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.shards = [Shard(world, chunk) for chunk in range(CHUNKS)]
        self.contributors: set[int] = set()
        self.promises: dict[tuple[int, Id], Number] = {}
        self.commits: dict[tuple[int, Id], Commit] = {}
        self.records: dict[Id, Record] = {}
        self.order: list[Id] = []

    def homes(self, chunk: int) -> list[Any]:
        """Return who takes a chunk's runs."""
        return [self.shards[chunk]]

    # -- what members ask

    def claim(self, contributor: int, exchange: Id, number: Number) -> Record | None:
        """Return the record; if there is none, no lower attempt can count any more."""
        record = self.records.get(exchange)
        if record is None:
            key = contributor, exchange
            self.promises[key] = max(self.promises.get(key, NOTHING), number)
            commit = self.commits.get(key)
            if commit is not None and commit.number < number and self.world.rules.void_lower:
                del self.commits[key]
        return record

    def claimed(self, member: Any, ring: Any, exchange: Id, number: Number) -> Run:
        """Ask as a member does: by a message, with an answer."""
        answers: list[Any] = []
        member.send("log", lambda: answers.append(self.claim(member.contributor, exchange, number)))
        yield from member.wait(ring, lambda: bool(answers), f"claim {exchange}")
        return answers[0]

    def committed(self, member: Any, exchange: Id, commit: Commit) -> None:
        """Send a commit."""
        contributor = member.contributor
        member.send("log", lambda: self.commit(contributor, exchange, commit))

    def confirmed(self, member: Any, ring: Any, exchange: Id, number: Number) -> Run:
        """Wait until the exchange has counted."""
        yield from member.wait(ring, lambda: exchange in self.records, f"counted {exchange}")
        return self.records[exchange]

    def record(self, exchange: Id) -> Record | None:
        return self.records.get(exchange)

    def values(self, chunk: int) -> list[int]:
        """Return what a pull gives now."""
        return list(self.shards[chunk].values)

    # -- what it decides

    def commit(self, contributor: int, exchange: Id, commit: Commit) -> None:
        """Take a commit, if it is not fenced."""
        key = contributor, exchange
        if exchange in self.records or (exchange[0] != "push" and contributor not in self.contributors):
            return
        if self.world.rules.refuse_lower and commit.number < self.promises.get(key, NOTHING):
            return
        before = self.commits.get(key)
        if before is None or commit.number >= before.number:
            self.commits[key] = commit
        self.advance()

    def fence(self, contributor: int) -> None:
        """Go on without a contributor that is gone."""
        if contributor in self.contributors:
            self.contributors.discard(contributor)
            self.commits = {
                key: commit
                for key, commit in self.commits.items()
                if key[0] != contributor or key[1][0] == "push"
            }
            self.advance()

    def advance(self) -> None:
        """Count what can be counted."""
        for exchange in [
            each for each in dict.fromkeys(key[1] for key in self.commits) if each not in self.records
        ]:
            record = self._whole(exchange)
            if record is not None:
                self._count(exchange, record)

    def _whole(self, exchange: Id) -> Record | None:
        record = {}
        for contributor in [exchange[1]] if exchange[0] == "push" else sorted(self.contributors):
            commit = self.commits.get((contributor, exchange))
            if commit is None:
                return None
            if commit.word in ("sum", "edited") and not all(
                self.shards[chunk].has(contributor, exchange, commit.number)
                for chunk in chunks_of(exchange, self.world.cell.fragments)
            ):
                return None
            record[contributor] = commit
        return record or None

    def _count(self, exchange: Id, record: Record) -> None:
        self.records[exchange] = record
        self.order.append(exchange)
        chunks = chunks_of(exchange, self.world.cell.fragments)
        for shard in (self.shards[chunk] for chunk in chunks):
            if exchange[0] == "step":
                self._step(shard, exchange, record)
                continue
            parts = [shard.take(who, exchange) for who, commit in record.items() if commit.word == "sum"]
            total = [sum(part[place] for part in parts) for place in range(EXTENT)]
            if exchange[0] == "mean":
                shard.mean[exchange[1]] = total
            else:
                shard.values = [old + new for old, new in zip(shard.values, total, strict=True)]
                shard.history[exchange] = list(shard.values)
        if exchange[0] == "step":
            self.world.hub.stepped(min(each.grouping for each in self.records["mean", exchange[1]].values()))

    @staticmethod
    def _step(shard: Shard, exchange: Id, record: Record) -> None:
        mean, speaker = shard.mean[exchange[1]], speaks(record)
        if speaker is not None and record[speaker].word == "edited":
            mean = shard.take(speaker, exchange)
            shard.values = [old + new for old, new in zip(shard.values, mean, strict=True)]
        elif speaker is not None:
            shard.values = [
                old + record[speaker].factor * new for old, new in zip(shard.values, mean, strict=True)
            ]
        shard.clock = exchange[1] + 1


def edited(value: int, edits: tuple[str, ...], iteration: int) -> int:
    """Return what the script's edits make of an element."""
    for edit in edits:
        value = value * CLIP if edit == "clip" else value + DIGIT ** (EDIT + iteration)
    return value


def speaks(record: Record) -> int | None:
    """Return whose word is the step's: None where nobody has one, so that the step is left out."""
    edited = [who for who, commit in record.items() if commit.word == "edited"]
    return min(edited or [who for who, commit in record.items() if commit.word == "step"], default=None)


class Side:
    """A CPU side: it accepts a commit when it has all of its runs, and tells who asked."""

    def __init__(self, world: World, name: int) -> None:
        self.world, self.name, self.alive = world, name, True
        self.promises: dict[Id, Number] = {}
        self.accepted: dict[
            Id, tuple[Number, Commit, list[list[int]]]
        ] = {}  # under which number, what, its bytes
        self.stages: dict[tuple[Id, int], Stage] = {}
        self.waiting: list[tuple[Id, Commit, Callable[[int], None]]] = []
        self.learned: dict[Id, Commit] = {}
        self.bodies: dict[Id, list[list[int]]] = {}

    def push(
        self, _contributor: int, exchange: Id, number: Number, start: int, values: list[int], chunk: int
    ) -> None:
        """Stage a run."""
        stage = self.stages.get((exchange, chunk))
        if stage is None or number > stage.number:
            stage = self.stages[exchange, chunk] = Stage(number)
        if number == stage.number:
            for place, value in enumerate(values, start):
                stage.data.setdefault(place, value)
        self._look()

    def prepare(self, exchange: Id, number: Number) -> tuple[Any, ...]:
        """Answer a claim: what it has learned, or has accepted."""
        if exchange in self.learned:
            return ("learned", self.learned[exchange])
        self.promises[exchange] = max(self.promises.get(exchange, NOTHING), number)
        return ("accepted", *self.accepted[exchange]) if exchange in self.accepted else ("open",)

    def commit(self, exchange: Id, commit: Commit, tell: Callable[[int], None]) -> None:
        """Accept a commit once all of its runs are here."""
        self.waiting.append((exchange, commit, tell))
        self._look()

    def _look(self) -> None:
        for each in list(self.waiting):
            exchange, commit, tell = each
            stages = [self.stages.get((exchange, chunk)) for chunk in range(CHUNKS)]
            found = [stage for stage in stages if stage and stage.whole and stage.number == commit.number]
            if len(found) == CHUNKS:
                self.waiting.remove(each)
                body = [[stage.data[place] for place in range(EXTENT)] for stage in found]
                self.accept(exchange, commit.number, commit, body, tell)

    def accept(
        self, exchange: Id, number: Number, commit: Commit, body: list[list[int]], tell: Callable[[int], None]
    ) -> None:
        """Take a commit under a number, unless a higher one was promised."""
        if number >= self.promises.get(exchange, NOTHING):
            self.promises[exchange] = number
            self.accepted[exchange] = (number, commit, body)
            tell(self.name)

    def learn(self, exchange: Id, commit: Commit, body: list[list[int]]) -> None:
        """Apply what a majority has accepted."""
        if exchange in self.learned:
            if self.learned[exchange].number != commit.number:
                raise WrongError(f"CPU side {self.name} learns two attempts of {exchange}")
            return
        self.learned[exchange], self.bodies[exchange] = commit, body


class _Home:
    """A CPU side as the home of one chunk."""

    def __init__(self, side: Side, chunk: int) -> None:
        self.side, self.chunk = side, chunk

    def push(self, contributor: int, exchange: Id, number: Number, start: int, values: list[int]) -> None:
        self.side.push(contributor, exchange, number, start, values, self.chunk)


class Majority:
    """Three CPU sides, of which one may die. What a majority has accepted counts (Lamport's Paxos, for each
    exchange by itself): a claim is its first phase, a commit its second."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.sides = [Side(world, name) for name in range(3)]
        self.contributors: set[int] = set()

    @property
    def records(self) -> dict[Id, Record]:
        """What any CPU side has learned."""
        found: dict[Id, Record] = {}
        for side in self.sides:
            for exchange, commit in side.learned.items():
                if exchange in found and found[exchange][exchange[1]].number != commit.number:
                    raise WrongError(f"CPU sides have learned two attempts of {exchange}")
                found[exchange] = {exchange[1]: commit}
        return found

    @property
    def order(self) -> list[Id]:
        return list(self.records)

    def homes(self, chunk: int) -> list[Any]:
        return [_Home(side, chunk) for side in self.sides]

    def _tell(self, member: Any, side: Side, act: Callable[[], None]) -> None:
        member.send(f"side {side.name}", lambda: act() if side.alive else None)

    def claimed(self, member: Any, ring: Any, exchange: Id, number: Number) -> Run:
        """Paxos' first phase; what one of the majority has accepted is proposed again, and so completed."""
        answers: dict[int, tuple[Any, ...]] = {}
        asked, enough = self.sides, 2
        if not self.world.rules.ask_majority:
            asked, enough = [side for side in self.sides if side.alive][:1], 1
        for side in asked:
            self._tell(
                member, side, lambda side=side: answers.update({side.name: side.prepare(exchange, number)})
            )
        yield from member.wait(ring, lambda: len(answers) >= enough, f"claim {exchange}")
        found = [each for each in answers.values() if each[0] == "learned"]
        if found:
            return {member.contributor: found[0][1]}
        accepted = [each for each in answers.values() if each[0] == "accepted"]
        if not accepted or not self.world.rules.adopt_accepted:
            return None
        _, _, commit, body = max(accepted, key=lambda each: each[1])
        votes: set[int] = set()
        for side in self.sides:
            self._tell(member, side, lambda side=side: side.accept(exchange, number, commit, body, votes.add))
        yield from member.wait(ring, lambda: len(votes) >= 2, f"complete {exchange}")
        self._teach(member, exchange, commit, body)
        return {member.contributor: commit}

    def _teach(self, member: Any, exchange: Id, commit: Commit, body: list[list[int]]) -> None:
        for side in self.sides:
            self._tell(member, side, lambda side=side: side.learn(exchange, commit, body))

    def committed(self, member: Any, exchange: Id, commit: Commit) -> None:
        votes = member.votes[exchange, commit.number] = set()
        for side in self.sides:
            self._tell(member, side, lambda side=side: side.commit(exchange, commit, votes.add))
        member.commits[exchange, commit.number] = commit

    def confirmed(self, member: Any, ring: Any, exchange: Id, number: Number) -> Run:
        """Wait for a majority, tell all, and wait until one has applied it."""
        if (exchange, number) in member.votes:
            votes = member.votes[exchange, number]
            yield from member.wait(ring, lambda: len(votes) >= 2, f"accepted {exchange}")
            holder = next(side for side in self.sides if side.accepted.get(exchange, ((0, 0),))[0] == number)
            commit, body = holder.accepted[exchange][1:]
            self._teach(member, exchange, commit, body)
        yield from member.wait(ring, lambda: self.record(exchange) is not None, f"applied {exchange}")
        return self.record(exchange)

    def record(self, exchange: Id) -> Record | None:
        for side in self.sides:
            if side.alive and exchange in side.learned:
                return {exchange[1]: side.learned[exchange]}
        return None

    def values(self, chunk: int) -> list[int]:
        """Return the sum of all that the living sides have learned: they tell each other."""
        bodies = {
            exchange: body for side in self.sides if side.alive for exchange, body in side.bodies.items()
        }
        return [sum(body[chunk][place] for body in bodies.values()) for place in range(EXTENT)]

    def dies(self, name: int) -> None:
        """A CPU side dies; a change of view gives the others what it had learned."""
        gone = self.sides[name]
        gone.alive = False
        for side in self.sides:
            for exchange, commit in gone.learned.items():
                if side.alive:
                    side.learn(exchange, commit, gone.bodies[exchange])

    def fence(self, contributor: int) -> None:
        self.contributors.discard(contributor)

    def advance(self) -> None:
        """Nothing waits here: CPU sides accept as runs come."""


def stepped_truth(log: Log, iteration: int) -> int:
    """Return what every element of the global values is at a clock, by the log's records alone."""
    total = 0
    for i in range(iteration):
        step, mean = log.records["step", i], log.records["mean", i]
        speaker = speaks(step)
        if speaker is not None:
            samples = sum(DIGIT**sample for commit in mean.values() for sample in commit.samples)
            edits = log.world.cell.edits
            total += (
                edited(samples, edits, i)
                if step[speaker].word == "edited"
                else samples * step[speaker].factor
            )
    return total
