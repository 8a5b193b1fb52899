"""Properties of dealing anew: whatever members come and go, each sample of an epoch counts once."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from dealing_worlds import Change, Team, run
from hypothesis import given, settings
from hypothesis import strategies as st

LOST, NEW = st.lists(st.integers(0, 5), max_size=2), st.integers(0, 2)
CHANGES = st.lists(st.builds(Change, st.integers(0, 6), LOST, NEW, st.booleans()), max_size=4)
LENGTHS, WORLDS, AHEAD = st.integers(1, 60), st.integers(1, 5), st.integers(0, 3)


@pytest.mark.check
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


@pytest.mark.check
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
