"""A shard's state by example: what is staged, applied, refused and answered; entries as they travel."""

from __future__ import annotations

import msgspec
import pytest

from atoll.store.entries import (
    AnyEntry,
    Apply,
    Combine,
    Fenced,
    Joined,
    StepWithMean,
    WeightedContribution,
    decode_entry_untrusted,
    encode_entry,
)
from atoll.store.outcomes import StoreError
from atoll.store.pulls import PullRequest, Pulls
from atoll.store.shard import (
    ApplyChunks,
    CombineChunks,
    Release,
    ShardState,
    StepChunks,
)
from atoll.wire.messages import Pull, PullMean, Push, Replace

LR = [{"lr": 0.1, "betas": [0.9, 0.999]}]


def push(chunk: int, iteration: int = 0, incarnation: int = 1, chunks: int = 2) -> Push:
    return Push(
        incarnation=incarnation, iteration=iteration, chunk=chunk, chunks_in_all=chunks, present=b"\1"
    )


def joined(state: ShardState, *workers: int) -> ShardState:
    for worker in workers:
        state.handle_entry(Joined(worker=worker, incarnation=worker + 1, clock=0))
    return state


def applied(worker: int, iteration: int, incarnation: int = 1) -> Apply:
    return Apply(
        worker=worker,
        incarnation=incarnation,
        iteration=iteration,
        weight=1.0,
        samples=1.0,
        part=0.5,
        opens=False,
        closes=True,
        staleness=0.25,
        hyperparameters=LR,
    )


def combined(iteration: int) -> Combine:
    member = WeightedContribution(worker=0, incarnation=1, weight=1.0, samples=1.0)
    return Combine(iteration=iteration, members=[member])


def stepped(iteration: int, optimizer: int, *, stays: bool, edited: bool = False) -> StepWithMean:
    return StepWithMean(
        iteration=iteration,
        scale=1.0,
        hyperparameters=LR,
        edited=[3] * edited,
        editor=0 if edited else -1,
        accepted=True,
        optimizer=optimizer,
        stays=stays,
    )


def test_a_mean_that_stays_is_stepped_as_the_next_iteration() -> None:
    state = joined(ShardState.begin([3], "bsp", 0), 0)
    state.handle_push(0, push(3, chunks=1), 10)
    state.handle_entry(combined(0))
    (step,) = state.handle_entry(stepped(0, 1, stays=True))
    assert isinstance(step, StepChunks)
    assert (step.optimizer, step.stays) == (1, True)
    assert state.awaits_mean(1)  # a worker that asks for it gets another mean
    assert state.handle_replace(0, Replace(incarnation=1, iteration=1, chunk=3, present=b"\1"), 11).keep
    step, release = state.handle_entry(stepped(1, 0, stays=False, edited=True))
    assert isinstance(step, StepChunks)
    assert step.edited == {3: (11, b"\1")}
    assert release == Release([11])
    assert not state.handle_push(0, push(3, 1, chunks=1), 12).keep  # it was made with the mean that stayed
    assert state.handle_push(0, push(3, 2, chunks=1), 13).staged
    with pytest.raises(StoreError, match="steps iteration 2, of which no mean is here"):
        state.handle_entry(stepped(2, 0, stays=False))


@pytest.mark.parametrize("accepted", [True, False])
def test_written_values_come_before_the_step_and_without_one(accepted: bool) -> None:
    state = joined(ShardState.begin([3], "bsp", 0), 0)
    state.handle_push(0, push(3, chunks=1), 10)
    state.handle_entry(combined(0))
    written = Replace(incarnation=1, iteration=0, chunk=3, present=b"\1", values=True)
    entry = msgspec.structs.replace(stepped(0, 0, stays=False), written=[3], editor=0, accepted=accepted)
    assert state.handle_replace(0, written, 11).keep
    assert state.handle_replace(0, msgspec.structs.replace(written, values=False), 12).keep
    assert not state.handle_replace(0, written, 13).keep  # a repetition
    step, *release = state.handle_entry(entry)
    assert isinstance(step, StepChunks)
    assert (step.edited, step.written) == ({}, {3: (11, b"\1")})
    assert {handle for each in release for handle in each.handles} == {11, 12}  # type: ignore[union-attr]
    assert state.versions == {3: 1}


def test_values_that_were_not_sent_cannot_be_written() -> None:
    state = joined(ShardState.begin([3], "bsp", 0), 0)
    state.handle_push(0, push(3, chunks=1), 10)
    state.handle_entry(combined(0))
    entry = msgspec.structs.replace(stepped(0, 0, stays=False), written=[3], editor=0)
    with pytest.raises(StoreError, match="worker 0 has not sent what it made of chunk 3"):
        state.handle_entry(entry)


def test_a_mean_that_stays_makes_way_for_the_next_one() -> None:
    state = joined(ShardState.begin([3], "bsp", 0), 0)
    state.handle_push(0, push(3, chunks=1), 10)
    state.handle_entry(combined(0))
    state.handle_entry(stepped(0, 1, stays=True))
    assert state.handle_push(0, push(3, 1, chunks=1), 11).staged
    combine, _ = state.handle_entry(combined(1))
    assert isinstance(combine, CombineChunks)
    (step,) = state.handle_entry(stepped(1, 0, stays=True))
    assert isinstance(step, StepChunks)
    assert state.steps == 2


def test_a_contribution_is_staged_applied_and_released() -> None:
    state = joined(ShardState.begin([3, 5], "asp", 0), 0)
    pulls = Pulls(state)
    assert not state.handle_push(0, push(3), 10).staged
    assert state.handle_push(0, push(3), 11) == state.handle_push(0, push(3), 12)
    assert state.handle_push(0, push(5), 13).staged
    assert state.whole() == [(0, 1, 0)]
    assert not pulls.ask(PullRequest(0, Pull(incarnation=1, clock=1)))
    apply, release = state.handle_entry(applied(0, 0))
    assert apply == ApplyChunks(
        worker=0,
        incarnation=1,
        iteration=0,
        chunks={3: (10, b"\1"), 5: (13, b"\1")},
        part=0.5,
        opens=False,
        closes=True,
        hyperparameters=LR,
        staleness=0.25,
    )
    assert release == Release([10, 13])
    assert state.versions == {3: 1, 5: 1}
    assert pulls.take_ready() == [PullRequest(0, Pull(incarnation=1, clock=1))]
    assert pulls.take_ready() == []
    assert (state.clock_of(0), state.staleness_of(0)) == (1, 0.25)
    late = state.handle_push(0, push(3), 14)
    assert (late.keep, late.refused) == (False, "")


def test_a_shard_refuses_what_it_cannot_keep() -> None:
    state = joined(ShardState.begin([3, 5], "asp", 0, limit=2), 0)
    pulls = Pulls(state)
    assert "does not hold chunk 4" in state.handle_push(0, push(4), 1).refused
    assert "announced" in state.handle_push(0, push(3, chunks=3), 1).refused
    assert "announced" in state.handle_push(0, push(3, chunks=0), 1).refused
    assert state.handle_push(0, push(3, 0), 1).keep
    assert "announced" in state.handle_push(0, push(5, 0, chunks=1), 1).refused
    assert state.handle_push(0, push(3, 1), 2).keep
    assert "in flight" in state.handle_push(0, push(3, 2), 3).refused
    assert state.handle_push(7, push(3, 9, incarnation=8), 4).keep  # its Joined is on its way
    assert state.handle_push(7, push(3, 10, incarnation=8), 5).keep
    assert "in flight" in state.handle_push(7, push(3, 11, incarnation=8), 6).refused
    assert state.handle_entry(Fenced(worker=7, incarnation=8)) == [Release([4, 5])]
    assert "fenced" in state.handle_push(7, push(3, 9, incarnation=8), 7).refused
    assert not pulls.ask(PullRequest(7, Pull(incarnation=8, clock=0)))
    assert "fenced" in state.refusal(7, 8)
    assert pulls.waiting() == []


def test_a_log_that_counts_what_is_not_here_is_an_error() -> None:
    state = joined(ShardState.begin([3, 5], "asp", 0), 0)
    state.handle_push(0, push(3), 1)
    with pytest.raises(StoreError, match="not staged here"):
        state.handle_entry(applied(0, 0))
    with pytest.raises(StoreError, match="not its next"):
        state.handle_entry(applied(2, 0))
    step = StepWithMean(iteration=0, scale=1.0, hyperparameters=LR, edited=[], editor=-1, accepted=True)
    with pytest.raises(StoreError, match="no mean"):
        state.handle_entry(step)


def test_a_mean_is_pulled_edited_and_stepped() -> None:
    state = joined(ShardState.begin([3], "bsp", 0), 0, 1)
    pulls = Pulls(state)
    mean = PullMean(incarnation=1, iteration=0)
    for worker in (0, 1):
        assert state.handle_push(worker, push(3, 0, worker + 1, chunks=1), worker).staged
    assert not pulls.ask(PullRequest(0, mean))
    early = Replace(incarnation=1, iteration=0, chunk=3, present=b"\1")
    assert "no mean" in state.handle_replace(0, early, 9).refused
    members = [WeightedContribution(worker=w, incarnation=w + 1, weight=1.0 + w, samples=2.0) for w in (0, 1)]
    combine, release = state.handle_entry(Combine(iteration=0, members=members))
    assert combine == CombineChunks(0, [(1.0, {3: (0, b"\1")}), (2.0, {3: (1, b"\1")})], 3.0, 4.0, alike=2.0)
    assert release == Release([0, 1])
    assert pulls.take_ready() == [PullRequest(0, mean)]
    assert state.handle_replace(0, early, 9).keep
    assert not state.handle_replace(0, early, 10).keep
    step = StepWithMean(iteration=0, scale=0.5, hyperparameters=LR, edited=[3], editor=0, accepted=True)
    state.handle_entry(Fenced(worker=0, incarnation=1))  # what it made of the mean stays
    stepped = state.handle_entry(step)
    assert stepped == [StepChunks(0, 0.5, LR, {3: (9, b"\1")}, True), Release([9])]
    assert pulls.ask(PullRequest(1, Pull(incarnation=2, clock=1)))
    assert not pulls.ask(PullRequest(1, PullMean(incarnation=2, iteration=0)))
    assert state.versions == {3: 1}


def test_a_step_that_lacks_an_edited_chunk_is_an_error_and_one_left_out_changes_no_version() -> None:
    state = joined(ShardState.begin([3], "bsp", 0), 0)
    for iteration in (0, 1):
        state.handle_push(0, push(3, iteration, chunks=1), iteration)
    member = WeightedContribution(worker=0, incarnation=1, weight=1.0, samples=1.0)
    state.handle_entry(Combine(iteration=0, members=[member]))
    missing = StepWithMean(iteration=0, scale=1.0, hyperparameters=LR, edited=[3], editor=0, accepted=True)
    with pytest.raises(StoreError, match="has not sent"):
        state.handle_entry(missing)
    left_out = StepWithMean(iteration=0, scale=1.0, hyperparameters=LR, edited=[3], editor=0, accepted=False)
    assert state.handle_entry(left_out) == [StepChunks(0, 1.0, LR, {}, False)]
    assert state.versions == {3: 0}
    assert state.steps == 1


def test_ssp_holds_the_fast_back_until_the_slow_have_come_along_or_gone() -> None:
    state = joined(ShardState.begin([3], "ssp", 1), 0, 1)
    pulls = Pulls(state)
    for iteration in range(2):
        state.handle_push(0, push(3, iteration, chunks=1), iteration)
        state.handle_entry(applied(0, iteration))
        pull = Pull(incarnation=1, clock=iteration + 1)
        assert pulls.ask(PullRequest(0, pull)) == (iteration == 0)
    pulls.ask(PullRequest(0, Pull(incarnation=1, clock=1)))  # a late duplicate displaces nothing
    assert pulls.waiting() == [PullRequest(0, Pull(incarnation=1, clock=2))]
    state.handle_entry(Fenced(worker=1, incarnation=2))
    assert pulls.take_ready() == [PullRequest(0, Pull(incarnation=1, clock=2))]


def test_a_late_duplicate_of_a_pull_leaves_the_one_that_waits() -> None:
    state = joined(ShardState.begin([3], "asp", 0), 0)
    pulls = Pulls(state)
    state.handle_push(0, push(3, 0, chunks=1), 1)
    state.handle_entry(applied(0, 0))
    assert not pulls.ask(PullRequest(0, Pull(incarnation=1, clock=2)))
    assert pulls.ask(PullRequest(0, Pull(incarnation=1, clock=1)))
    assert pulls.waiting() == [PullRequest(0, Pull(incarnation=1, clock=2))]


def test_who_joins_is_answered_when_it_takes_part() -> None:
    state = joined(ShardState.begin([3], "ssp", 1), 0)
    pulls = Pulls(state)
    assert not pulls.ask(PullRequest(5, Pull(incarnation=9, clock=0)))
    state.handle_entry(Joined(worker=5, incarnation=9, clock=4))
    assert pulls.take_ready() == []  # worker 0 is at 0: four behind
    state.handle_entry(Fenced(worker=0, incarnation=1))
    assert pulls.take_ready() == [PullRequest(5, Pull(incarnation=9, clock=0))]
    assert state.clock_of(5) == 4


@pytest.mark.parametrize(
    "entry",
    [
        Joined(worker=1, incarnation=2, clock=3),
        Combine(
            iteration=1, members=[WeightedContribution(worker=0, incarnation=1, weight=2.0, samples=3.0)]
        ),
        StepWithMean(iteration=1, scale=0.5, hyperparameters=LR, edited=[1], editor=-1, accepted=False),
        applied(0, 3),
        Fenced(worker=1, incarnation=2),
    ],
)
def test_entries_come_back_as_they_went(entry: AnyEntry) -> None:
    raw = encode_entry(entry)
    assert decode_entry_untrusted(raw) == entry
    for bad in (raw[:-1], raw + b"\0", b"", b"\xc1", b"\x81\xa1e\xa4evil", bytes([0x91] * 5000)):
        with pytest.raises(StoreError, match="no line of a log"):
            decode_entry_untrusted(bad)


def test_questions_for_some_chunks_are_joined_until_they_are_answered() -> None:
    state = ShardState.begin([0, 1, 2], "bsp", 0)
    pulls = Pulls(state)
    state.handle_entry(Joined(worker=0, incarnation=1, clock=0))
    for chunks in ([0], [2], [2]):
        assert not pulls.ask(PullRequest(0, Pull(incarnation=1, clock=1, chunks=chunks)))
        assert not pulls.ask(PullRequest(0, PullMean(incarnation=1, iteration=0, chunks=chunks)))
    assert [asked.pull.chunks for asked in pulls.waiting()] == [[0, 2], [0, 2]]
    for chunks in ([], [1]):  # all, and so that one too
        assert not pulls.ask(PullRequest(0, Pull(incarnation=1, clock=1, chunks=chunks)))
        assert [asked.pull.chunks for asked in pulls.waiting()] == [[], [0, 2]]


def test_a_shard_counts_the_samples_that_the_log_counts() -> None:
    """Before its journal is read again, and after it."""
    state = joined(ShardState.begin([3], "asp", 0, consumed=100.0), 0)
    assert state.handle_push(0, push(3, chunks=1), 1).staged
    state.handle_entry(applied(0, 0))
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=ShardState)
    assert again.consumed == state.consumed == 100.0 + applied(0, 0).samples
    other = joined(ShardState.begin([], "bsp", 0), 0, 1)  # a shard without chunks follows the log too
    members = [
        WeightedContribution(worker=each, incarnation=each + 1, weight=1.0, samples=4.0) for each in (0, 1)
    ]
    other.handle_entry(Combine(iteration=0, members=members))
    assert other.consumed == 8.0
