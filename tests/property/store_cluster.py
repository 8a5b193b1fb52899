"""A store's cluster on one thread: one log, some shards, workers that come, go and die, and a network that
delivers in any order between channels, repeats itself, and loses what a dead worker had not sent yet."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from atoll.store import entries as log_entries
from atoll.store.log import CommitLog
from atoll.store.losses import absent
from atoll.store.outcomes import Outcome
from atoll.store.pulls import PullRequest, Pulls
from atoll.store.shard import ApplyChunks, CombineChunks, Release, ShardState, StepChunks
from atoll.wire import messages
from atoll.wire.messages import LostBlocks

LR = [{"lr": 0.1}]
Contribution = tuple[int, int, int]  # worker, incarnation, iteration
BLOCKS, BLOCK = 3, 2  # of each chunk, and elements of a block; the last has one
EXTENT = BLOCKS * BLOCK - 1
IN_FLIGHT = 2


@dataclass
class Worker:
    """One incarnation. `program` yields what it waits for: (type, clock or iteration), from every shard."""

    worker: int
    incarnation: int
    program: Iterator[tuple[str, int]] = field(default_factory=lambda: iter(()))
    wait: tuple[str, int] | None = None
    heard: dict[tuple[str, int], set[int]] = field(default_factory=dict)
    clock: int = 0
    finished: bool = False
    told: messages.Committed | None = None
    committed: set[int] = field(default_factory=set)


def in_order(state: CommitLog | ShardState) -> str:
    """The state in words, in which NaN equals itself, with its sets in order."""
    return repr(_plain(state))


def _plain(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return [_plain(getattr(value, name)) for name in value.__struct_fields__]
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, dict):
        return [(key, _plain(each)) for key, each in value.items()]
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value


class ShardRuntime:
    """Holds payloads by handle, as the real one holds tensors, and checks that no freed one is used."""

    def __init__(self, state: ShardState) -> None:
        self.state, self.pulls = state, Pulls(state)
        self.held: dict[int, tuple[Any, ...]] = {}
        self.entries: list[log_entries.Entry] = []
        self.counted: Counter[Contribution] = Counter()
        self.lost: dict[tuple[Contribution, int], LostBlocks | None] = {}  # of what counts, by chunk
        self._handles = 0

    def keep(self, *content: Any) -> int:
        self._handles += 1
        self.held[self._handles] = content
        return self._handles

    def act(self, entry: log_entries.Entry) -> None:
        self.entries.append(entry)
        for action in self.state.handle_entry(entry):
            if isinstance(action, Release):
                for handle in action.handles:
                    del self.held[handle]
            elif isinstance(action, CombineChunks):
                assert isinstance(entry, log_entries.Combine)
                assert [weight for weight, _ in action.contributions] == [m.weight for m in entry.members]
                for member, (_, parts) in zip(entry.members, action.contributions, strict=True):
                    self._count((member.worker, member.incarnation, entry.iteration), parts)
                self._check_mean(entry, action)
            elif isinstance(action, ApplyChunks):
                assert isinstance(entry, log_entries.Apply)
                self._count((entry.worker, entry.incarnation, entry.iteration), action.chunks)
            elif isinstance(action, StepChunks):
                assert isinstance(entry, log_entries.StepWithMean)
                for chunk, (handle, _) in action.edited.items():
                    assert self.held[handle] == ("replace", entry.editor, entry.iteration, chunk)

    def _count(self, who: Contribution, parts: dict[int, tuple[int, bytes]]) -> None:
        assert set(parts) == set(self.state.versions)
        for chunk, (handle, present) in parts.items():
            assert self.held[handle][:-1] == ("push", *who, chunk)
            assert present == bytes([who[0]])
            self.lost[who, chunk] = self.held[handle][-1]
        self.counted[who] += 1

    def _check_mean(self, entry: log_entries.Combine, action: CombineChunks) -> None:
        """Block by block, the weight of each counts whose copy that counts delivered it, or had it filled."""
        losses = action.losses or [{}] * len(entry.members)
        for chunk in self.state.versions:
            applied, expected = [0.0] * EXTENT, [0.0] * EXTENT
            for member, loss in zip(entry.members, losses, strict=True):
                lost = self.lost[(member.worker, member.incarnation, entry.iteration), chunk]
                gone = {at for start, stop in absent(loss.get(chunk), EXTENT) for at in range(start, stop)}
                for at in range(EXTENT):
                    applied[at] += member.weight * (at not in gone)
                    borne = lost is not None and lost.how == "borne" and lost.missing[0] >> at // BLOCK & 1
                    expected[at] += 0.0 if borne else member.weight
            assert applied == expected

    def check_told(self, worker: int, pull: messages.Pull | messages.PullMean) -> None:
        """The answer to a pull tells what was lost of the copy that counts."""
        mean = isinstance(pull, messages.PullMean)
        iteration = pull.iteration if isinstance(pull, messages.PullMean) else pull.clock - 1
        newest = max((k for w, i, k in self.counted if (w, i) == (worker, pull.incarnation)), default=-1)
        if not mean and (self.state.consistency == "bsp" or iteration <= newest - IN_FLIGHT):
            return  # it was told with the mean, or was asked for long ago and comes again
        for chunk in self.state.versions:
            who = worker, pull.incarnation, iteration
            assert self.state.lost_of(worker, pull, iteration, chunk, EXTENT) == self.lost.get((who, chunk))


class Cluster:
    """`target`: the clock at which workers leave in good order."""

    def __init__(
        self,
        rng: random.Random,
        consistency: str,
        slack: int,
        workers: int,
        shards: int,
        target: int,
        chunks: int,
        edits: bool,
        repeats: float,
        losses: float = 0.0,
    ) -> None:
        self.rng, self.losses = rng, losses
        self.consistency, self.slack, self.target = consistency, slack, target
        self.workers = workers
        self.edits, self.repeats = edits, repeats
        homes: list[list[int]] = [[c for c in range(chunks) if c % shards == s] for s in range(shards)]
        self.homes = homes
        holders = [shard for shard in range(shards) if homes[shard]]
        self.log = CommitLog.begin(consistency, slack, workers, shards, holders=holders)
        self.shards = [ShardRuntime(ShardState.begin(held, consistency, slack, IN_FLIGHT)) for held in homes]
        self.channels: dict[tuple[str, ...], deque[tuple[Any, bool]]] = {}
        self.alive: dict[int, Worker] = {}
        self.fences: list[tuple[int, int]] = []
        self.used: dict[tuple[int, int], set[int]] = {}
        self.reported: dict[tuple[int, int], set[int]] = {}
        self._sent = 0
        self._incarnations = 0
        for worker in range(workers):
            self.start(worker)

    @property
    def begun(self) -> bool:
        """Whether the run has begun, as the log tells it."""
        return any(isinstance(entry, log_entries.Joined) for entry in self.log.lines.entries)

    # -- workers ------------------------------------------------------------------------------------------

    def start(self, worker: int, moves: bool = False) -> None:
        """`moves`: as CommitLog.handle_join has it."""
        self._incarnations += 1
        new = Worker(worker, self._incarnations)
        new.program = self._run(new)
        self.alive[worker] = new
        self._send(new, 0, ("join", new.incarnation, moves))
        new.wait = next(new.program)

    def _send(self, worker: Worker, shard: int, message: Any) -> None:
        key = ("worker", str(worker.worker), str(worker.incarnation), str(shard))
        self.channels.setdefault(key, deque()).append((message, True))

    def _to_all(self, worker: Worker, message: Any) -> None:
        for shard in range(len(self.shards)):
            self._send(worker, shard, message)

    def _run(self, me: Worker) -> Iterator[tuple[str, int]]:
        """The training loop: a generator that yields what it waits for."""
        inc = me.incarnation
        self._to_all(me, messages.Pull(incarnation=inc, clock=0))
        yield ("start", 0)
        while self._goes_on(me):
            k = me.clock
            synchronous = self.consistency == "bsp"
            self._push(me, k)
            if synchronous:
                self._to_all(me, messages.PullMean(incarnation=inc, iteration=k))
                yield ("mean", k)
                edited = sorted(c for held in self.homes for c in held if (c + k) % 2) if self.edits else []
                for shard, held in enumerate(self.homes):
                    for chunk in set(held) & set(edited):
                        replace = messages.Replace(incarnation=inc, iteration=k, chunk=chunk, present=b"\1")
                        self._send(me, shard, replace)
                if edited:
                    self._to_all(me, messages.Ready(digest=str(k)))
                    yield ("ready", k)
                step = messages.Step(
                    incarnation=inc, iteration=k, scale=float("nan"), hyperparameters=LR, edited=edited
                )
                self._send(me, 0, step)
            self._to_all(me, messages.Pull(incarnation=inc, clock=k + 1))
            yield ("parameters", k + 1)
            assert k in me.committed or not synchronous
            me.clock = k + 1

    def _goes_on(self, me: Worker) -> bool:
        """Whether it makes another iteration."""
        return me.clock < self.target

    def _finish(self, me: Worker) -> None:
        """It has made its last iteration, and leaves."""
        self.fences.append((me.worker, me.incarnation))

    def _grouping(self, _me: Worker) -> int:
        """What its commit says that it knows of."""
        return 0

    def _push(self, me: Worker, k: int, behind: int = 0) -> None:
        sends = [(shard, chunk) for shard, held in enumerate(self.homes) for chunk in held]
        self.rng.shuffle(sends)
        for shard, chunk in sends:
            push = messages.Push(
                incarnation=me.incarnation,
                iteration=k,
                chunk=chunk,
                chunks_in_all=len(self.homes[shard]),
                present=bytes([me.worker]),
            )
            self._send(me, shard, push)
        self._sent += 1
        used = [messages.Used(sampler=0, epoch=0, start=self._sent, stop=self._sent + 1)]
        commit = messages.Commit(
            incarnation=me.incarnation,
            iteration=k,
            weight=float(self.rng.randint(0, 3)),
            hyperparameters=LR,
            used=used,
            grouping=self._grouping(me),
            behind=behind,
        )
        self._send(me, 0, commit)

    def _hear(self, worker: int, incarnation: int, what: str, clock: int, shard: int) -> None:
        me = self.alive.get(worker)
        if me is None or me.incarnation != incarnation or me.finished:
            return
        me.heard.setdefault((what, clock), set()).add(shard)
        while me.wait is not None and self._has_heard(me):
            me.heard = {key: who for key, who in me.heard.items() if key[1] >= me.clock}
            me.wait = next(me.program, None)
            if me.wait is None:
                me.finished = True
                self._finish(me)

    def _has_heard(self, me: Worker) -> bool:
        assert me.wait is not None
        if me.wait == ("start", 0):  # all shards must name the same beginning
            clocks = {key[1] for key in me.heard if key[0] == "parameters"}
            for clock in clocks:
                if len(me.heard["parameters", clock]) == len(self.shards):
                    assert len(clocks) == 1, "shards disagree on where a worker begins"
                    me.clock = clock
                    return True
            return False
        return len(me.heard.get(me.wait, ())) == len(self.shards)

    def kill(self, worker: int) -> None:
        """It dies between two messages: of what it was sending, each shard gets a beginning."""
        me = self.alive.pop(worker)
        for key, channel in self.channels.items():
            if key[:3] == ("worker", str(worker), str(me.incarnation)):
                for _ in range(self.rng.randint(0, len(channel))):
                    channel.pop()
        if not me.finished:
            self.fences.append((worker, me.incarnation))

    def restart(self) -> None:
        """Log and shards are killed and started again: each from its state as a journal has it. Workers ask
        again for what they wait for."""
        log = msgspec.msgpack.decode(msgspec.msgpack.encode(self.log), type=CommitLog)
        assert in_order(log) == in_order(self.log)
        self.log = log
        for runtime in self.shards:
            state = msgspec.msgpack.decode(msgspec.msgpack.encode(runtime.state), type=ShardState)
            assert in_order(state) == in_order(runtime.state)
            pulls = Pulls(state)
            for asked in runtime.pulls.waiting():
                assert not pulls.ask(asked)
            runtime.state, runtime.pulls = state, pulls

    # -- the network --------------------------------------------------------------------------------------

    def deliver_one(self) -> bool:
        """Deliver one message of any channel, or one fence; False where nothing is on its way."""
        keys = [key for key, channel in self.channels.items() if channel]
        choices = len(keys) + len(self.fences)
        if not choices:
            return False
        pick = self.rng.randrange(choices)
        if pick >= len(keys):
            self._fence(*self.fences.pop(pick - len(keys)))
            return True
        key = keys[pick]
        channel = self.channels[key]
        message, original = channel.popleft()
        if original and key[0] != "entries" and self.rng.random() < self.repeats:
            if self.rng.random() < 0.5:
                channel.appendleft((message, False))
            else:
                channel.append((message, False))
        self._deliver(key, message)
        return True

    def _deliver(self, key: tuple[str, ...], message: Any) -> None:
        if key[0] == "entries":
            self._entry(int(key[1]), message)
        elif key[0] == "staged":
            outcome = self.log.handle_staged(*message)
            assert not outcome.refused
            self._outcome(outcome)
        else:
            self._from_worker(int(key[1]), int(key[2]), int(key[3]), message)

    def _from_worker(self, worker: int, incarnation: int, shard: int, message: Any) -> None:
        runtime = self.shards[shard]
        outcome = None
        refused = ""
        if isinstance(message, tuple):
            outcome = self.log.handle_join(worker, message[1], moves=message[2])
        elif isinstance(message, messages.Commit):
            outcome = self.log.handle_commit(worker, message)
        elif isinstance(message, messages.Step):
            outcome = self.log.handle_step(worker, message)
        elif isinstance(message, messages.Push):
            refused = self._push_arrives(worker, shard, message)
        elif isinstance(message, messages.Replace):
            handle = runtime.keep("replace", worker, message.iteration, message.chunk)
            replaced = runtime.state.handle_replace(worker, message, handle)
            refused = replaced.refused
            if not replaced.keep:
                del runtime.held[handle]
        elif isinstance(message, messages.Ready):
            self._hear(worker, incarnation, "ready", int(message.digest), shard)
        elif isinstance(message, (messages.Pull, messages.PullMean)) and runtime.pulls.ask(
            PullRequest(worker, message)
        ):
            self._answer(shard, worker, message)
        if outcome is not None:
            refused = outcome.refused
            self._outcome(outcome)
        me = self.alive.get(worker)
        if me is not None and me.incarnation == incarnation and not me.finished:
            assert not refused, f"a live worker is refused: {refused}"

    def _push_arrives(self, worker: int, shard: int, push: messages.Push) -> str:
        runtime = self.shards[shard]
        if self.losses and self.rng.random() < self.losses:  # each copy loses what it loses
            how = self.rng.choice(["borne", "borne", "zero"])
            lost = LostBlocks(BLOCK, bytes([self.rng.randint(1, 2**BLOCKS - 1)]), how)
            push = msgspec.structs.replace(push, lost=lost)
        handle = runtime.keep("push", worker, push.incarnation, push.iteration, push.chunk, push.lost)
        pushed = runtime.state.handle_push(worker, push, handle)
        if not pushed.keep:
            del runtime.held[handle]
        if pushed.staged:
            channel = self.channels.setdefault(("staged", str(shard)), deque())
            channel.append(((shard, worker, push.incarnation, push.iteration), True))
        return pushed.refused

    def _entry(self, shard: int, entry: log_entries.Entry) -> None:
        runtime = self.shards[shard]
        runtime.act(entry)
        for asked in runtime.pulls.take_ready():
            self._answer(shard, asked.worker, asked.pull)

    def _answer(self, shard: int, worker: int, pull: messages.Pull | messages.PullMean) -> None:
        state = self.shards[shard].state
        self.shards[shard].check_told(worker, pull)
        if isinstance(pull, messages.PullMean):
            self._hear(worker, pull.incarnation, "mean", pull.iteration, shard)
            return
        clock = state.clock_of(worker)
        assert clock >= pull.clock
        self._check_clock_rule(shard, worker, clock)
        self._hear(worker, pull.incarnation, "parameters", clock, shard)

    def _check_clock_rule(self, shard: int, worker: int, clock: int) -> None:
        clocks = clocks_after(self.shards[shard].entries)
        if self.consistency == "bsp":
            steps = [
                e.iteration for e in self.shards[shard].entries if isinstance(e, log_entries.StepWithMean)
            ]
            assert clock == (steps[-1] + 1 if steps else 0)
        else:
            assert clocks[worker] == clock
        if self.consistency == "ssp":
            idle = idle_after(self.shards[shard].entries)
            assert all(each >= clock - self.slack for who, each in clocks.items() if who not in idle)

    def _fence(self, worker: int, incarnation: int) -> None:
        self._outcome(self.log.handle_fence(worker, incarnation))
        answer = self.log.used.of(worker, incarnation)
        used = {p for part in answer.used for p in range(part.start, part.stop)}
        assert used == self.used.get((worker, incarnation), set())
        again = self.log.handle_fence(worker, incarnation)
        assert again == Outcome()

    def _outcome(self, outcome: Outcome) -> None:
        for entry in outcome.entries:
            for shard in range(len(self.shards)):
                self.channels.setdefault(("entries", str(shard)), deque()).append((entry, True))
        for reply in outcome.replies:
            assert isinstance(reply.message, messages.Committed)
            me = self.alive.get(reply.worker)
            if me is not None and me.incarnation == reply.incarnation:
                me.committed.add(reply.message.iteration)
                me.told = reply.message
        for news in self.log.used.take_news():
            positions = {p for part in news.used for p in range(part.start, part.stop)}
            known = self.used.setdefault((news.worker, news.incarnation), set())
            assert not known & positions
            known |= positions


def clocks_after(entries: list[log_entries.Entry]) -> dict[int, int]:
    """Each live worker's clock, by the entries alone."""
    clocks: dict[int, int] = {}
    incarnations: dict[int, int] = {}
    for entry in entries:
        if isinstance(entry, log_entries.Joined):
            clocks[entry.worker], incarnations[entry.worker] = entry.clock, entry.incarnation
        elif isinstance(entry, log_entries.Apply):
            clocks[entry.worker] = entry.iteration + 1
        elif isinstance(entry, log_entries.Combine):
            clocks.update({member.worker: entry.iteration + 1 for member in entry.members})
        elif isinstance(entry, log_entries.Fenced) and incarnations.get(entry.worker, -1) in range(
            entry.incarnation + 1
        ):
            clocks.pop(entry.worker, None)
    return clocks


def idle_after(entries: list[log_entries.Entry]) -> set[int]:
    """The workers that nobody has to wait for, by the entries alone."""
    idle: set[int] = set()
    for entry in entries:
        if isinstance(entry, log_entries.Idle):
            (idle.add if entry.idle else idle.discard)(entry.worker)
        elif isinstance(entry, log_entries.Joined):
            idle.discard(entry.worker)
    return idle
