"""A site's log, whose iterations do not wait for a meeting: workers with unlike numbers of iterations that
meet in between, and die, in any order. Nobody waits for ever, and the log never counts what is not staged."""

from __future__ import annotations

import random
from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.store.log import CommitLog
from atoll.store.outcomes import Outcome
from atoll.store.pulls import PullRequest, Pulls
from atoll.store.shard import ShardState
from atoll.wire import messages

MEETINGS = 3


class Site:
    """A log of iterations and one of meetings, as `server/site.py` has them, and a shard of one chunk."""

    def __init__(self, rng: random.Random, workers: int) -> None:
        self.rng = rng
        self.log = CommitLog.begin("bsp", 0, workers, 1, loose=True)
        self.meetings = CommitLog.begin("asp", 0, workers, 1)
        self.shard = ShardState.begin([0], "bsp", 0)
        self.pulls = Pulls(self.shard)
        self.committed: dict[int, int] = dict.fromkeys(range(workers), -1)
        self.clocks: dict[int, int] = dict.fromkeys(range(workers), 0)
        self.met = 0
        self.handles = 0
        self.programs = {worker: self.run(worker) for worker in range(workers)}
        for worker in range(workers):
            self.meetings.handle_join(worker, worker + 1)
            self.act(self.log.handle_join(worker, worker + 1))

    def act(self, outcome: Outcome) -> None:
        assert not outcome.refused, outcome.refused
        for entry in outcome.entries:
            self.shard.handle_entry(entry)
        for reply in outcome.replies:
            if isinstance(reply.message, messages.Committed):
                self.committed[reply.worker] = reply.message.iteration

    def hold(self, outcome: Outcome) -> None:
        """Meetings that are complete take place, and their workers go on where the others are."""
        for meeting in outcome.met:
            self.met = meeting.number + 1
            for worker in meeting.workers:
                self.act(self.log.handle_idle(worker, worker + 1, False))
            for worker in meeting.workers:
                self.clocks[worker] = max(self.clocks[worker], self.log.next_iteration)

    def run(self, worker: int) -> Iterator[bool]:
        """A worker's life; yields whether it can go on now."""
        me = worker + 1
        for number in range(MEETINGS):
            for _ in range(self.rng.randrange(4)):
                clock = self.clocks[worker]
                self.handles += 1
                push = messages.Push(incarnation=me, iteration=clock, chunk=0, chunks_in_all=1, present=b"\1")
                pushed = self.shard.handle_push(worker, push, self.handles)
                assert pushed.staged, pushed.refused
                self.act(self.log.handle_staged(0, worker, me, clock))
                yield True
                commit = messages.Commit(incarnation=me, iteration=clock, weight=1.0)
                self.act(self.log.handle_commit(worker, commit))
                while self.committed[worker] < clock:
                    yield False
                yield True
                step = messages.Step(incarnation=me, iteration=clock, scale=1.0, hyperparameters=[])
                self.act(self.log.handle_step(worker, step))
                yield True
                while not self.pulls.ask(PullRequest(worker, messages.Pull(incarnation=me, clock=clock + 1))):
                    yield False
                assert self.shard.clock_of(worker) == clock + 1
                self.clocks[worker] = clock + 1
                yield True
            self.act(self.log.handle_idle(worker, me, True))
            self.hold(self.meetings.handle_meet(worker, me, number, "", number * 100 + worker))
            yield True
            while self.met <= number:
                yield False
            yield True
        self.leave(worker)

    def leave(self, worker: int) -> None:
        """In good order, or by death."""
        self.hold(self.meetings.handle_fence(worker, worker + 1))
        self.act(self.log.handle_fence(worker, worker + 1))


@settings(max_examples=150)
@given(seed=st.integers(0, 2**32), workers=st.integers(1, 4), deaths=st.booleans())
def test_nobody_waits_for_ever_and_nothing_is_counted_that_is_not_there(
    seed: int, workers: int, deaths: bool
) -> None:
    rng = random.Random(seed)
    site = Site(rng, workers)
    waiting: set[int] = set()  # since somebody else last moved
    while site.programs:
        worker = rng.choice([each for each in site.programs if each not in waiting])
        if deaths and rng.random() < 0.02:
            del site.programs[worker]
            site.leave(worker)
            waiting.clear()
            continue
        try:
            moved = next(site.programs[worker])
        except StopIteration:
            del site.programs[worker]
            moved = True
        if moved:
            waiting.clear()
        else:
            waiting.add(worker)
            assert waiting != set(site.programs), site.log.waiting_for()
    assert site.log.is_over
