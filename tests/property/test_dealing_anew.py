"""Properties of dealing anew: whatever members come and go, each sample of an epoch counts once."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.train.data.sampler import BatchesSampler, DealtSampler, ShardedSampler


@dataclass
class Change:
    """After how many iterations, who is lost (by its place in the team, modulo), and how many come new.

    `redone`: the iteration in which they are lost is made again by those who live; else it is whole."""

    after: int
    lost: list[int]
    new: int
    redone: bool


LOST, NEW = st.lists(st.integers(0, 5), max_size=2), st.integers(0, 2)
CHANGES = st.lists(st.builds(Change, st.integers(0, 6), LOST, NEW, st.booleans()), max_size=4)
LENGTHS, WORLDS, AHEAD = st.integers(1, 60), st.integers(1, 5), st.integers(0, 3)


@dataclass
class Member:
    """A worker: a loader over its sampler that fetches `ahead` batches, and what it trains on now."""

    sampler: DealtSampler[Any]
    size: int  # of its batches; 0: the sampler gives batches
    ahead: int
    fetched: list[list[int]] = field(default_factory=list)
    batches: Iterator[list[int]] | None = None

    def begin(self) -> None:
        indices = iter(self.sampler)
        self.batches = self._batched(indices) if self.size else indices
        self.fetched = list(itertools.islice(self.batches, self.ahead))

    def _batched(self, indices: Iterator[int]) -> Iterator[list[int]]:
        while batch := list(itertools.islice(indices, self.size)):
            yield batch

    def next(self) -> list[int] | None:
        assert self.batches is not None
        self.fetched += itertools.islice(self.batches, 1)
        return self.fetched.pop(0) if self.fetched else None


class Team:
    """Workers in lockstep, and what whole iterations have counted of each epoch."""

    def __init__(self, length: int, world: int, size: int, batch: int, ahead: int, seed: int) -> None:
        self.length, self.size, self.batch, self.ahead, self.seed = length, size, batch, ahead, seed
        self.members = [self.member(rank, world) for rank in range(world)]
        self.counts: Counter[int] = Counter()  # over all epochs
        self.totals: list[int] = []  # samples in each iteration
        self.fills = 0  # samples given to fill up, at most

    def member(self, rank: int, world: int) -> Member:
        options: dict[str, Any] = {"rank": rank, "world": world, "seed": self.seed}
        if self.batch:
            return Member(BatchesSampler(self.length, batch=self.batch, **options), 0, self.ahead)
        return Member(ShardedSampler(self.length, **options), self.size, self.ahead)

    def iterate(self, change: Change | None) -> bool:
        """One iteration, in which the change comes; False where the epoch is over, for all alike."""
        taken = [member.next() for member in self.members if member.batches is not None]
        assert len({batch is None for batch in taken}) == 1, "workers make unlike numbers of iterations"
        if taken[0] is None:
            return False
        assert len(taken) == len(self.members), "who comes new begins too late"
        counted = [
            batch if member.sampler.count(len(batch or ())) else []
            for member, batch in zip(self.members, taken, strict=True)
        ]
        lost = {index % len(self.members) for index in change.lost} if change else set()
        lost = set() if len(lost) == len(self.members) else lost
        kept = [index for index in range(len(self.members)) if index not in lost]
        if change and change.redone:
            self._change(kept, change.new, set())
        for index in kept:
            self.counts.update(counted[index] or [])
        self.totals.append(sum(len(counted[index] or []) for index in kept))
        for member in [m for m in self.members if m.batches is not None]:
            member.sampler.committed()
        if change and not change.redone:
            self._change(kept, change.new, lost)
        if change and change.redone:
            # Those who come new make this iteration too.
            for member in [m for m in self.members if m.batches is None]:
                member.begin()
                batch = member.next() or []
                self.counts.update(batch if member.sampler.count(len(batch)) else [])
                member.sampler.committed()
        epoch = self.members[0].sampler.epoch
        for member in [m for m in self.members if m.batches is None]:
            if member.sampler.epoch == epoch:  # else it begins with the next, as the others do
                member.begin()
        return True

    def _change(self, kept: list[int], new: int, absent: set[int]) -> None:
        before = [self.members[index] for index in kept]
        state = json.loads(json.dumps(before[0].sampler.deal_state()))
        self.members = before + [self.member(0, 1) for _ in range(new)]
        places = [member.sampler.place() for member in before] + [None] * new
        for member in self.members[len(before) :]:
            member.sampler.load_deal_state(state)
        for rank, member in enumerate(self.members):
            member.sampler.deal_anew(json.loads(json.dumps(places)), rank, absent)


def run(team: Team, changes: list[Change], epochs: int) -> None:
    for _ in range(epochs):
        for member in team.members:
            member.begin()
        iteration = 0
        while True:
            due = next((change for change in changes if change.after == iteration), None)
            if due is not None:
                changes = [change for change in changes if change is not due]
            if not team.iterate(due):
                break
            iteration += 1


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 4), st.integers(0, 3), CHANGES)
def test_each_sample_counts_whatever_members_come_and_go(
    length: int, world: int, size: int, ahead: int, changes: list[Change]
) -> None:
    """Two epochs with changes, and one without: what a lost worker had at the end of one is in the next."""
    team = Team(length, world, size, 0, ahead, seed=3)
    run(team, changes, 2)
    run(team, [], 1)
    assert all(team.counts[index] >= 3 for index in range(length))


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 12), CHANGES)
def test_batches_are_of_one_size_and_each_sample_counts_once(
    length: int, world: int, batch: int, changes: list[Change]
) -> None:
    """Without fetching ahead, and when workers only come: exactly once, and always so many."""
    team = Team(length, world, 0, batch, 0, seed=3)
    changes = [Change(change.after, [], change.new, False) for change in changes]
    run(team, changes, 2)
    assert team.counts == Counter(dict.fromkeys(range(length), 2))
    whole, rest = divmod(length, batch)
    assert team.totals == ([batch] * whole + [rest] * bool(rest)) * 2


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 12), st.integers(0, 3), CHANGES)
def test_of_batches_each_sample_counts_exactly_once(
    length: int, world: int, batch: int, ahead: int, changes: list[Change]
) -> None:
    """Losses included, and fetched ahead: a fill weighs nothing, so nothing counts twice."""
    team = Team(length, world, 0, batch, ahead, seed=3)
    run(team, changes, 2)
    run(team, [], 1)
    assert team.counts == Counter(dict.fromkeys(range(length), 3))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 4), CHANGES)
def test_what_counts_twice_is_the_fill_at_the_end(
    length: int, world: int, size: int, changes: list[Change]
) -> None:
    """Without fetching ahead, an epoch repeats fewer samples than there are members, at its end and at each
    dealing anew."""
    team = Team(length, world, size, 0, 0, seed=3)
    changes = [Change(change.after, change.lost, change.new, False) for change in changes]
    run(team, changes, 1)
    most = max(world, len(team.members)) + sum(change.new for change in changes)
    run(team, [], 1)
    assert sum(team.counts.values()) - 2 * length < (2 + len(changes)) * most
    assert all(team.counts[index] >= 2 for index in range(length))


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 60), st.integers(1, 5), st.integers(1, 6), st.integers(0, 2), CHANGES, st.integers(1, 4)
)
def test_a_checkpoint_between_changes_gives_what_is_left_once(
    length: int, world: int, batch: int, ahead: int, changes: list[Change], after: int
) -> None:
    team = Team(length, world, 0, batch, ahead, seed=3)
    for member in team.members:
        member.begin()
    for iteration in range(after):
        due = next((change for change in changes if change.after == iteration), None)
        if not team.iterate(due):
            break
    places = json.loads(json.dumps([member.sampler.place() for member in team.members]))
    state = json.loads(json.dumps(team.members[0].sampler.state_dict(places)))
    resumed = Team(length, 2, 0, batch, 0, seed=3)
    for member in resumed.members:
        member.sampler.load_state_dict(state)
    resumed.counts = team.counts
    run(resumed, [], 1)
    expected = 1 if resumed.members[0].sampler.epoch == 0 else 2
    assert resumed.counts == Counter(dict.fromkeys(range(length), expected))
