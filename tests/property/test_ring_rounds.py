"""Rings that go on, with the members' own code: for any order of deaths, of newcomers, and of what each had
got when another died, all who live come to the same end, and each iteration counts once, with each member
that was in it once. See `ring_world.py`."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ring_world import Fault, Schedule, World, run

KINDS = [
    *["dies", "tears", "comes"] * 4,
    *["hub restarts", "hub restarts", "cut", "given up", "leaves", "asks again"],
]
AT = ["open", "begin", "hold", "places", "places held", "state", "ask", "answer"]

FAULTS = st.one_of(
    st.builds(Fault, st.sampled_from(KINDS), st.just("any"), st.integers(0, 40), st.integers(0, 3)),
    st.builds(Fault, st.sampled_from(KINDS), st.sampled_from(AT), st.integers(0, 4), st.integers(0, 3)),
)
SCHEDULES = st.builds(
    Schedule,
    st.integers(2, 4),
    st.lists(FAULTS, max_size=8).map(tuple),
    st.binary(max_size=250),
    st.integers(1, 2),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0, 1, 2, 4]),
)


def at_random(seed: int) -> Schedule:
    """Hypothesis likes small ones; these are as long as they may be."""
    rng = random.Random(seed)

    def fault(known: bool) -> Fault:
        moment = rng.choice(AT) if known else "any"
        after = rng.randrange(4) if known else rng.choice([0, 0, 1, 2, 3, 5, 8, 13, 20, 40])
        return Fault(rng.choice(KINDS), moment, after, rng.randrange(4))  # type: ignore[arg-type]

    chaos = rng.choice([0.3, 0.6, 1.0])
    choices = [
        rng.randrange(256) if rng.random() < chaos else 0 for _ in range(rng.choice([0, 60, 150, 300]))
    ]
    return Schedule(
        rng.choice([2, 2, 3, 3, 3, 4]),
        tuple(fault(place % 2 == 1 or rng.random() < 0.4) for place in range(rng.randrange(8))),
        bytes(choices),
        rng.choice([1, 1, 2]),
        rng.random() < 0.5,
        rng.random() < 0.3,
        rng.random() < 0.5,
        rng.choice([0, 1, 2, 4]),
    )


def late(*choices: tuple[int, int]) -> bytes:
    """Choices at these steps, and all others 0."""
    steps = bytearray(max(step for step, _ in choices) + 1)
    for step, choice in choices:
        steps[step] = choice
    return bytes(steps)


# What has gone wrong once.

# One member had passed a round, and met the new members in the next one's; another took what it held, and
# sent the next iteration's first message before it met them: in one channel a confirmation met a message.
MESSAGE_BEFORE_MEETING = Schedule(3, (Fault("tears", "hold"),), late((25, 128)))
# The last to leave, of a ring that wants two: it holds the end's barrier, and was told that one is too few.
LAST_OF_TWO = Schedule(3, choices=late((176, 135), (177, 11)), at_least=2, rounds_between=True)
# The hub's journal was made compact while members waited for the others: the next hub did not know that they
# had asked, nor so the ring that was formed then.
FORGOTTEN_REPORT = Schedule(
    4,
    (Fault("leaves", "open", 3, 3), Fault("hub restarts", "state", 40, 3), Fault("dies", after=1, who=2)),
    compact_after=4,
)
# The same with newcomers: one was in the ring, and the next hub did not know it.
FORGOTTEN_NEWCOMER = Schedule(
    3,
    (
        Fault("dies", "places held", 5, 2),
        Fault("comes", "places held"),
        Fault("hub restarts", "open", 2, 1),
        Fault("comes", "begin", 2),
    ),
    rounds_between=True,
    compact_after=4,
)
# And the next one waited for a newcomer that was in no ring.
AWAITED_FOR_EVER = Schedule(
    4,
    (
        Fault("comes", after=13, who=1),
        Fault("comes", "places held", 2, 2),
        Fault("tears", after=1),
        Fault("comes", "open", 1, 3),
        Fault("hub restarts", "answer", 0, 2),
        Fault("comes", "answer", 3),
        Fault("hub restarts", "hold", 13, 1),
    ),
    own_agreement=True,
    compact_after=2,
)
# The last who had been there before died when it had met the newcomers: they had all that it had, and ended.
ONLY_NEWCOMERS_LEFT = Schedule(
    2, (Fault("dies", "hold"), Fault("comes", after=9), Fault("dies", "places held", 1, 1))
)
ONCE_WRONG = (
    MESSAGE_BEFORE_MEETING,
    LAST_OF_TWO,
    FORGOTTEN_REPORT,
    FORGOTTEN_NEWCOMER,
    AWAITED_FOR_EVER,
    ONLY_NEWCOMERS_LEFT,
)


@pytest.mark.check
@settings(max_examples=150)
@given(SCHEDULES)
def test_rings_go_on_to_the_same_end(schedule: Schedule) -> None:
    run(schedule)


@pytest.mark.parametrize("schedule", ONCE_WRONG)
def test_what_has_gone_wrong_once(schedule: Schedule) -> None:
    run(schedule)


@pytest.mark.check
@pytest.mark.parametrize("moment", ["open", "places", "places held", "state"])
@pytest.mark.parametrize("kind", ["dies", "tears"])
def test_a_second_fault_at_each_moment_of_a_meeting(kind: str, moment: str) -> None:
    first = Fault("comes") if moment == "state" else Fault("dies", "hold", 1)
    for after in range(8):
        for who in (0, 1):
            run_or_show(Schedule(4, (first, Fault(kind, moment, after, who))))  # type: ignore[arg-type]


@pytest.mark.check
@pytest.mark.parametrize("seed", range(4))
def test_long_schedules(seed: int) -> None:
    for number in range(25):
        run_or_show(at_random(1000 * seed + number))


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100))
def test_many_long_schedules(seed: int) -> None:
    for number in range(200):
        run_or_show(at_random(1_000_000 + 1000 * seed + number))


def run_or_show(schedule: Schedule) -> None:
    """Run it; where that fails, say which it was."""
    try:
        run(schedule)
    except Exception as error:
        raise AssertionError(f"{schedule} ended with {error}") from error


# -- the model itself ---------------------------------------------------------------------------------------


def iterations(world: World) -> list[list[int]]:
    """Who was in each."""
    (first, *others) = [member.state.results for member in world.members.values() if member.finished]
    assert all(other == first for other in others)
    return first


def test_without_faults_nothing_breaks() -> None:
    world = run(Schedule(3, rounds_between=True))
    assert iterations(world) == [[1, 2, 3]] * 4
    assert {group for group, _ in world.groups} == {1}


def test_newcomers_enter_where_nothing_fails_and_nothing_is_made_again() -> None:
    world = run(Schedule(2, (Fault("comes"), Fault("comes", after=1))))
    assert (iterations(world)[0], iterations(world)[-1]) == ([1, 2], [1, 2, 3, 4])
    assert [group for group, purpose in world.groups if purpose == "session"] == [1, 2]
    assert [len(member.state.deals) for member in world.members.values()] == [1] * 4


def test_a_death_in_the_middle_costs_that_members_part_alone() -> None:
    world = run(Schedule(3, (Fault("dies", "begin", 60),)))
    taken = iterations(world)
    assert taken[0] == [1, 2, 3]
    assert len(taken[-1]) == 2
    assert sorted(map(len, taken), reverse=True) == list(map(len, taken))


def test_the_first_member_dies_while_it_hands_over_the_state() -> None:
    world = run(Schedule(3, (Fault("comes"), Fault("dies", "state"))))
    assert world.fired[1].moment == "state"
    assert len(iterations(world)[-1]) == 3
