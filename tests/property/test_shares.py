"""Shares of a contribution at a shard: a group's members send runs of each chunk, members die, and those who
are left cut the chunks anew; in any order, a chunk is made of the runs of one cut, each once."""

from __future__ import annotations

import random
from collections import deque

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.store.actions import PushOutcome, Release
from atoll.store.entries import Fenced, Joined
from atoll.store.losses import ChunkLoss
from atoll.store.shard import ShardState
from atoll.wire.messages import LostBlocks, Push, run_of

Run = tuple[int, int, int, LostBlocks | None]  # chunk, share, shares, what was lost of this copy of it


class Group:
    """A shard, and the members of one contributor, each on a connection of its own."""

    def __init__(self, rng: random.Random, chunks: int, members: int) -> None:
        self.rng, self.chunks = rng, chunks
        self.state = ShardState.begin(range(chunks), "asp", 0)
        self.state.handle_entry(Joined(worker=5, incarnation=9, clock=0))
        self.held: dict[int, list[Run]] = {}  # what is held under a handle: runs, end to end
        self.handles = 0
        self.staged = 0
        self.channels: dict[int, deque[Push]] = {member: deque() for member in range(members)}
        self.living = list(range(members))
        self.cut()

    def cut(self) -> None:
        """Those who live send their shares of all chunks, one more time."""
        for share, member in enumerate(self.living):
            order = self.rng.sample(range(self.chunks), self.chunks)
            for chunk in order:
                push = Push(
                    incarnation=9,
                    iteration=0,
                    chunk=chunk,
                    chunks_in_all=self.chunks,
                    present=b"\1",
                    share=share,
                    shares=len(self.living),
                )
                self.channels[member].append(push)

    def die(self) -> None:
        """A member dies; a part of what it has sent still comes, at any time."""
        gone = self.rng.choice(self.living)
        self.living.remove(gone)
        for _ in range(self.rng.randint(0, len(self.channels[gone]))):
            self.channels[gone].pop()
        self.cut()

    def deliver(self) -> bool:
        waiting = [channel for channel in self.channels.values() if channel]
        if not waiting:
            return False
        channel = self.rng.choice(waiting)
        push = channel[0] if self.rng.random() < 0.2 else channel.popleft()  # some come twice
        if self.rng.random() < 0.5:  # each copy loses what it loses
            lost = LostBlocks(1, bytes([self.rng.randint(1, 255)]), self.rng.choice(["borne", "zero"]))
            push = msgspec.structs.replace(push, lost=lost)
        outcome = self.state.handle_push(5, push, self.handles + 1)
        assert not outcome.refused
        self.take((push.chunk, push.share, push.shares, push.lost), outcome)
        return True

    def take(self, run: Run, outcome: PushOutcome) -> None:
        """As a runtime does."""
        if outcome.keep:
            self.handles += 1
            self.held[self.handles] = [run]
        for handle in outcome.freed:
            del self.held[handle]
        if outcome.joins:
            assert self.handles in outcome.joins
            self.held[self.handles] = [each for h in outcome.joins for each in self.held.pop(h)]
        self.staged += outcome.staged

    def restart(self) -> None:
        kept = msgspec.msgpack.encode(self.state)
        self.state = msgspec.msgpack.decode(kept, type=ShardState)
        assert msgspec.msgpack.encode(self.state) == kept


@settings(max_examples=300)
@given(
    seed=st.integers(0, 2**32),
    chunks=st.integers(1, 3),
    members=st.integers(1, 5),
    deaths=st.sets(st.integers(0, 30), max_size=4),
    restarts=st.sets(st.integers(0, 40), max_size=3),
    fenced=st.booleans(),
)
def test_a_chunk_is_made_of_one_cuts_runs(
    seed: int, chunks: int, members: int, deaths: set[int], restarts: set[int], fenced: bool
) -> None:
    group = Group(random.Random(seed), chunks, members)
    turn, more = 0, True
    while more:
        if turn in restarts:
            group.restart()
        if turn in deaths and len(group.living) > 1:
            group.die()
        if fenced and turn == 10:
            break
        more = group.deliver()
        turn += 1
    if not fenced:
        assert group.staged == 1
        assert group.state.whole() == [(5, 9, 0)]
        for runs in group.held.values():
            chunk, _, shares, _ = runs[0]
            assert [run[:3] for run in runs] == [(chunk, share, shares) for share in range(shares)]
            lost = {share: run[3] for share, run in enumerate(runs) if run[3] is not None}
            expected = ChunkLoss(shares, lost) if lost else None
            assert group.state.staged[5, 9][0].losses.get(chunk) == expected
        assert sorted(runs[0][0] for runs in group.held.values()) == list(range(chunks))
    released = group.state.handle_entry(Fenced(worker=5, incarnation=9))
    handles = [handle for each in released if isinstance(each, Release) for handle in each.handles]
    assert sorted(handles) == sorted(group.held)


@given(extent=st.integers(0, 200), shares=st.integers(1, 300))
def test_runs_cover_a_chunk_once(extent: int, shares: int) -> None:
    runs = [run_of(extent, share, shares) for share in range(shares)]
    assert [each for start, stop in runs for each in range(start, stop)] == list(range(extent))
    assert all(start <= stop for start, stop in runs)
