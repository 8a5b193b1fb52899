"""Every engine deals each sample of an epoch once, whatever its workers do; see `dealing_worlds`."""

from __future__ import annotations

from collections import Counter

import pytest
from dealing_worlds import Change, Lessees, Team, drawn_shares, run
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core.errors import RunError
from atoll.train.data.dealing import Deal, DealPosition

CHANGES = st.lists(
    st.builds(
        Change,
        st.integers(0, 6),
        st.lists(st.integers(0, 5), max_size=2),
        st.integers(0, 2),
        st.booleans(),
    ),
    max_size=4,
)
LENGTHS, WORLDS, BATCHES, AHEAD = st.integers(1, 60), st.integers(1, 5), st.integers(1, 12), st.integers(0, 3)
SEEDS = st.integers(0, 2**16)


@pytest.mark.check
@settings(max_examples=150)
@given(LENGTHS, WORLDS, BATCHES, AHEAD, CHANGES, SEEDS)
def test_each_sample_counts_once_while_shares_change_in_every_tick(
    length: int, world: int, batch: int, ahead: int, changes: list[Change], seed: int
) -> None:
    """Members leave, die and come, with a loader that fetches ahead; some take nothing of a tick."""
    team = Team(length, world, 0, batch, ahead, seed=3, shares=drawn_shares(seed))
    run(team, changes, 2)
    run(team, [], 1)
    assert team.counts == Counter(dict.fromkeys(range(length), 3))


@pytest.mark.check
@settings(max_examples=200)
@given(LENGTHS, WORLDS, BATCHES, AHEAD, CHANGES, SEEDS)
def test_each_sample_counts_once_while_members_agree_on_other_shares_in_every_iteration(
    length: int, world: int, batch: int, ahead: int, changes: list[Change], seed: int
) -> None:
    """Who comes new takes over what was agreed; who stays forgets it as members change."""
    team = Team(length, world, 0, batch, ahead, seed=3, shares=drawn_shares(seed), agreed=True)
    run(team, changes, 2)
    run(team, [], 1)
    assert team.counts == Counter(dict.fromkeys(range(length), 3))


@settings(max_examples=100)
@given(LENGTHS, WORLDS, BATCHES, SEEDS)
def test_a_global_batch_is_the_same_whatever_the_shares(
    length: int, world: int, batch: int, seed: int
) -> None:
    even = Team(length, world, 0, batch, 0, seed=3)
    uneven = Team(length, world, 0, batch, 0, seed=3, shares=drawn_shares(seed))
    run(even, [], 2)
    run(uneven, [], 2)
    assert even.batches == uneven.batches


@pytest.mark.check
@settings(max_examples=100)
@given(
    LENGTHS,
    WORLDS,
    BATCHES,
    AHEAD,
    CHANGES,
    SEEDS,
    st.lists(st.tuples(st.integers(1, 6), WORLDS), max_size=3),
)
def test_a_run_that_is_resumed_again_and_again_has_each_sample_once(
    length: int,
    world: int,
    batch: int,
    ahead: int,
    changes: list[Change],
    seed: int,
    stops: list[tuple[int, int]],
) -> None:
    """Saved after some iterations, and gone on with by another number of workers, several times."""
    team = Team(length, world, 0, batch, ahead, seed=3, shares=drawn_shares(seed))
    for after, next_world in stops:
        for member in team.members:
            member.begin()
        for iteration in range(after):
            due = next((change for change in changes if change.after == iteration), None)
            if not team.iterate(due):
                break
        places = [member.sampler.place() for member in team.members]
        state = team.members[0].sampler.state_dict(places)
        counts = team.counts
        team = Team(length, next_world, 0, batch, ahead, seed=3, shares=drawn_shares(seed + 1))
        team.counts = counts
        for member in team.members:
            member.sampler.load_state_dict(state)
    run(team, [], 1)
    epochs = team.members[0].sampler.epoch + 1
    assert team.counts == Counter(dict.fromkeys(range(length), epochs))


@settings(max_examples=100)
@given(LENGTHS, WORLDS, BATCHES, SEEDS)
def test_with_drop_last_no_sample_counts_twice_and_what_is_left_makes_no_batch(
    length: int, world: int, batch: int, seed: int
) -> None:
    team = Team(length, world, 0, batch, 0, seed=3, shares=drawn_shares(seed), drop_last=True)
    run(team, [], 1)
    assert team.totals == [batch] * (length // batch)
    assert set(team.counts.values()) <= {1}
    assert sum(team.counts.values()) == length // batch * batch


@pytest.mark.check
@settings(max_examples=150)
@given(LENGTHS, WORLDS, BATCHES, AHEAD, CHANGES, SEEDS)
def test_with_drop_last_an_epoch_leaves_out_less_than_a_batch_whoever_comes_and_goes(
    length: int, world: int, batch: int, ahead: int, changes: list[Change], seed: int
) -> None:
    team = Team(length, world, 0, batch, ahead, seed=3, shares=drawn_shares(seed), drop_last=True)
    run(team, changes, 2)
    run(team, [], 1)
    assert max(team.counts.values(), default=0) <= 3
    assert 3 * length - sum(team.counts.values()) <= 3 * (batch - 1)


@given(st.integers(0, 40), st.integers(1, 4), BATCHES, st.integers(0, 9), st.booleans(), SEEDS)
def test_what_is_left_is_all_that_was_not_given(
    size: int, world: int, batch: int, ticks: int, drop_last: bool, seed: int
) -> None:
    deal = Deal([(0, 0, size)], [[]] * world, batch, drop_last, shares=drawn_shares(seed))
    ticks = min(ticks, deal.ticks)
    taken = [item for tick in range(ticks) for rank in range(world) for item in deal.tick(rank, tick)]
    places = [DealPosition(rank, ticks, ticks, ticks, ticks, False) for rank in range(world)]
    left = [(e, p) for e, start, stop in deal.left(places) for p in range(start, stop)]
    assert sorted(taken + left) == [(0, position) for position in range(size)]


@pytest.mark.parametrize("sizes", [(1, 1), (4, 1), (2, 3, 0), (5, -1), ()])
def test_shares_that_are_no_parts_of_the_batch_are_refused(sizes: tuple[int, ...]) -> None:
    deal = Deal([(0, 0, 8)], [[], []], 4, shares=lambda _tick, _samples, _members: sizes)
    with pytest.raises(RunError, match="shares of"):
        deal.slots(0, 0)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("train"), st.integers(0, 4), st.booleans()),
        st.tuples(st.sampled_from(["die", "come"]), st.integers(0, 4), st.booleans()),
        st.tuples(st.just("save"), st.integers(0, 4), st.booleans()),
    ),
    max_size=60,
)


@settings(max_examples=200)
@given(st.integers(1, 80), st.integers(1, 5), st.integers(1, 7), STEPS)
def test_leased_samples_count_once_whoever_dies_comes_back_and_is_resumed(
    length: int, world: int, batch: int, steps: list[tuple[str, int, bool]]
) -> None:
    office = Lessees(length)
    for worker in range(world):
        office.come(worker)
    for what, number, commits in steps:
        living = sorted(office.samplers)
        worker = living[number % len(living)]
        if what == "train":
            office.iterate(worker, batch, commits=commits)
        elif what == "die" and len(living) > 1:
            office.die(worker)
        elif what == "come":
            office.come(max(living) + 1 if commits or number in living else number)
        elif what == "save":
            office.save()
            for each in range(number + 1):
                office.come(each)
    last = max(sampler.epoch for sampler in office.samplers.values())
    for _ in range(12 * length + 400):
        if all(sampler.epoch > last + 1 for sampler in office.samplers.values()):
            break
        for worker in office.samplers:
            office.iterate(worker, batch)
    assert {office.counts[epoch, place] for epoch in range(last + 1) for place in range(length)} == {1}
    assert max(office.counts.values()) == 1
