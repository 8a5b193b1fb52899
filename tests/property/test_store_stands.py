"""Scripts that differ always end with a line that says so, and scripts that are alike never do."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from script_world import STEP, ScriptWorld

WORDS = [STEP, STEP, STEP, "save", "reduce", "barrier"]
SCRIPTS = st.lists(st.sampled_from(WORDS), max_size=8)


@pytest.mark.parametrize("consistency", ["bsp", "ssp", "asp"])
@settings(max_examples=100)
@given(
    seed=st.integers(0, 2**32),
    script=SCRIPTS,
    workers=st.integers(1, 4),
    deaths=st.integers(0, 3),
    restarts=st.integers(0, 3),
)
def test_scripts_that_are_alike_run_to_their_end(
    consistency: str, seed: int, script: list[str], workers: int, deaths: int, restarts: int
) -> None:
    world = ScriptWorld(random.Random(seed), consistency, [script] * workers)
    world.run(deaths, restarts)
    assert not world.mismatch
    assert not world.stuck, world.stuck


@pytest.mark.parametrize("consistency", ["ssp", "asp"])
@settings(max_examples=100)
@given(
    seed=st.integers(0, 2**32),
    script=SCRIPTS,
    more=st.lists(st.integers(0, 4), min_size=2, max_size=4),
    restarts=st.integers(0, 3),
)
def test_at_their_own_pace_steps_may_be_unequally_many(
    consistency: str, seed: int, script: list[str], more: list[int], restarts: int
) -> None:
    """A worker makes `more` steps before each of its calls: all the same come together."""
    scripts = [
        [each for word in script for each in ([STEP] * extra if word != STEP else []) + [word]]
        for extra in more
    ]
    world = ScriptWorld(random.Random(seed), consistency, scripts)
    world.run(restarts=restarts)
    assert not world.mismatch
    assert not world.stuck, world.stuck


@pytest.mark.parametrize("consistency", ["bsp", "ssp", "asp"])
@settings(max_examples=200)
@given(
    seed=st.integers(0, 2**32),
    script=SCRIPTS,
    other=SCRIPTS,
    workers=st.integers(2, 4),
    restarts=st.integers(0, 3),
)
def test_scripts_that_differ_end_for_all_and_never_combine(
    consistency: str, seed: int, script: list[str], other: list[str], workers: int, restarts: int
) -> None:
    """Worker 0 has the `other` script. Under ssp and asp only the calls must be the same."""
    world = ScriptWorld(random.Random(seed), consistency, [other] + [script] * (workers - 1))
    world.run(restarts=restarts)
    one, two = (
        words if consistency == "bsp" else [word for word in words if word != STEP]
        for words in (script, other)
    )
    assert bool(world.mismatch) == (one != two), world.mismatch
    if one == two:
        assert not world.stuck, world.stuck
    else:
        assert "worker 0 is " in world.mismatch
    for each in world.workers.values():  # every meeting was for the same at all who were in it
        assert each.met == world.workers[0].met[: len(each.met)] or len(each.met) > len(world.workers[0].met)
