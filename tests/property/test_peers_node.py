"""Nodes of strategy `peers` over random schedules: what must always hold, whatever comes late, is lost, twice
or out of order, whoever dies, comes back, stands still or is cut off (`peers_world.World` checks)."""

from __future__ import annotations

import random
from typing import Literal

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from peers_world import Fault, Kind, OddScript, Schedule, World, run, settings_for

from atoll.peers.node import Node
from atoll.peers.outputs import Send
from atoll.wire.peers import NodeReport
from atoll.wire.peerviews import Ballot, Life, Prepare, Report, View, ViewDecided, ViewMember

FAULTS = st.builds(
    Fault,
    kind=st.sampled_from(["dies", "stops", "cut off", "slow", "device hangs"]),
    after=st.floats(0.0, 2.0),
    who=st.integers(0, 4),
    lasts=st.sampled_from([0.3, 1.0, 3.0, 6.0]),
    others=st.integers(0, 2),
)
SCHEDULES = st.builds(
    Schedule,
    seed=st.integers(0, 2**32 - 1),
    nodes=st.integers(1, 5),
    stale_max=st.sampled_from([0, 1, 2, 4]),
    faults=st.lists(FAULTS, max_size=4).map(tuple),
    loss=st.sampled_from([0.0, 0.05, 0.2]),
    repeats=st.sampled_from([0.0, 0.2]),
    slow=st.sampled_from([1.0, 4.0]),
    hub=st.booleans(),
)


def drawn(seed: int, most: int = 3, iterations: int = 6) -> Schedule:
    """A schedule of a seed: small ones, so that there can be many."""
    rng = random.Random(seed)
    faults = tuple(
        Fault(
            rng.choice(["dies", "dies", "stops", "cut off", "slow", "device hangs"]),
            rng.random() * 2,
            rng.randrange(5),
            rng.choice([0.3, 1.0, 3.0, 6.0]),
            rng.randrange(3),
        )
        for _ in range(rng.randrange(most + 1))
    )
    return Schedule(
        seed,
        nodes=rng.choice([1, 2, 2, 3, 3, 3, 4, 5]),
        stale_max=rng.choice([0, 1, 2, 4]),
        faults=faults,
        loss=rng.choice([0.0, 0.0, 0.05, 0.2]),
        repeats=rng.choice([0.0, 0.2]),
        slow=rng.choice([1.0, 4.0]),
        hub=rng.random() < 0.5,
        iterations=iterations,
    )


@pytest.mark.check
@settings(max_examples=100)
@given(schedule=SCHEDULES)
def test_what_must_always_hold(schedule: Schedule) -> None:
    run(schedule)


@pytest.mark.parametrize("start", range(0, 2000, 200))
@pytest.mark.check
def test_what_must_always_hold_over_many_small_schedules(start: int) -> None:
    for seed in range(start, start + 200):
        run(drawn(seed))


@pytest.mark.check
@settings(max_examples=100)
@given(
    seed=st.integers(0, 2**32 - 1),
    nodes=st.integers(2, 4),
    stale_max=st.sampled_from([0, 1, 4]),
    loss=st.sampled_from([0.0, 0.05]),
    repeats=st.sampled_from([0.0, 0.2]),
    slow=st.sampled_from([1.0, 4.0]),
    at=st.integers(1, 9),
    how=st.sampled_from(["calls", "skips"]),
)
# Three heartbeats of node 2 in a row are lost on their way to node 1.
@example(seed=0, nodes=4, stale_max=4, loss=0.05, repeats=0.0, slow=4.0, at=2, how="calls")
def test_a_script_that_is_not_the_others_ends_the_run_for_all_and_excludes_nobody(
    seed: int,
    nodes: int,
    stale_max: int,
    loss: float,
    repeats: float,
    slow: float,
    at: int,
    how: Literal["calls", "skips"],
) -> None:
    world = World(
        Schedule(seed, nodes, stale_max, (), loss, repeats, slow, odd=OddScript(seed % nodes, at, how))
    )
    world.end()
    assert len(set(world.ended.values())) >= 1
    assert all("session." in line for line in world.ended.values()), world.ended
    assert not world.counts["removed"], world.reasons
    # Where messages are lost, several in a row look like silence to one node; the others hear the sender.
    assert all(loss and reason.startswith("silent for") for reason in world.reasons), world.reasons


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("start", range(2000, 12000, 1000))
def test_what_must_always_hold_over_ten_thousand_schedules(start: int) -> None:
    for seed in range(start, start + 1000):
        run(drawn(seed))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("start", range(8))
def test_a_million_steps(start: int) -> None:
    """Steps of all eight together: each is one call of a node."""
    steps, seed = 0, 10**6 * (start + 1)
    while steps < 125_000:
        steps += run(drawn(seed, most=8, iterations=20)).steps
        seed += 1


# Every schedule that ever failed, and what was wrong then.
FAILED = {
    "a member that is silent was looked for again and again": Schedule(
        0,
        4,
        0,
        (Fault("dies", 0.52, 7, 6.0, 1), Fault("slow", 0.72, 3, 1.0, 1), Fault("stops", 1.51, 4, 1.0, 1)),
        repeats=0.2,
        slow=4.0,
    ),
    "a change of the view was begun, and nobody ended it": Schedule(
        118, 2, 1, (Fault("dies", 1.41, 4, 0.3, 1), Fault("cut off", 1.77, 7, 3.0, 2))
    ),
    "voters were asked once, and waited for ever longer": Schedule(
        279,
        4,
        1,
        (Fault("dies", 0.98, 2, 3.0), Fault("cut off", 1.15, 3, 6.0)),
        loss=0.2,
        repeats=0.2,
        hub=True,
    ),
    "a newcomer took the state that it had asked for before": Schedule(
        646, 3, 2, (Fault("device hangs", 0.77, 5, 6.0),), loss=0.05, repeats=0.2, hub=True
    ),
    "a newcomer was let in and removed before it knew": Schedule(
        5076,
        3,
        1,
        (Fault("dies", 0.177, 1, 0.3, 2), Fault("cut off", 0.704, 4, 6.0), Fault("slow", 0.308, 5, 0.3, 1)),
        repeats=0.2,
        slow=4.0,
        hub=True,
    ),
    "a newcomer had come to a meeting early, and claimed the parts of those before": drawn(584),
    "what a newcomer had not made was taken for what it had applied": Schedule(
        5017, 3, 2, (Fault("dies", 0.9, 0, 1.0),), loss=0.05
    ),
    # it claimed parts of a meeting that another newcomer never makes, and no view could begin with them
    "a newcomer comes to its first meeting before another one does": Schedule(
        seed=20076,
        nodes=7,
        stale_max=1,
        faults=(
            Fault("stops", 0.1, 6, 4.5975115857587, 2),
            Fault("cut off", 0.6336151994912891, 4, 6.1235810971132825, 1),
        ),
        loss=0.3,
        repeats=0.3,
    ),
    # members that were through with a meeting counted its part as held, and the next view began with it
    "a newcomer is to hold its own part in a meeting that it was not in": drawn(10531),
    "a newcomer is to hold what nobody keeps any more": drawn(32076, most=8, iterations=20),
}


@pytest.mark.parametrize("schedule", FAILED.values(), ids=FAILED.keys())
def test_a_schedule_that_failed_once(schedule: Schedule) -> None:
    run(schedule)


def with_one_that_hangs(seed: int) -> Schedule:
    """One makes no iteration, or is silent, until long after the others have removed it; optimizers take up
    to as long as devices. No word is lost: three in a row would be a silence here."""
    rng = random.Random(seed)
    nodes = rng.choice([3, 4, 5])
    kind: Kind = "stops" if seed % 4 == 3 else "device hangs"
    return Schedule(
        seed,
        nodes,
        stale_max=rng.choice([0, 1, 2, 4]),
        faults=(Fault(kind, rng.uniform(0.3, 6.0), rng.randrange(nodes), rng.choice([6.0, 10.0, 20.0])),),
        repeats=rng.choice([0.0, 0.2]),
        slow=rng.choice([1.0, 1.0, 4.0]),
        hub=rng.random() < 0.5,
        iterations=25,
        applying=rng.choice([0.01, 0.15]),
    )


@pytest.mark.check
@pytest.mark.parametrize("start", [0, pytest.param(20, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
def test_nobody_is_suspected_but_the_one_that_hangs(start: int) -> None:
    """Whoever waited for it has made no iteration either; when it is gone many are applied, one by one."""
    for seed in range(start, start + (20 if start == 0 else 1000)):
        schedule = with_one_that_hangs(seed)
        hangs = schedule.faults[0].who
        world = run(schedule)
        found = {(by, whom) for by, whom in world.suspected if by != hangs}
        assert {whom for _, whom in found} <= {f"node {hangs}"}, (schedule, found)


@pytest.mark.check
def test_what_the_properties_are_about_does_happen() -> None:
    """Rounds that end, that are refused and that meet, fetches, removals, returns, changes of views."""
    counts: dict[str, int] = {}
    for seed in range(1000, 1025):
        for what, count in run(drawn(seed, most=6)).counts.items():
            counts[what] = counts.get(what, 0) + count
    for what in ("round ended", "round refused", "round late", "round given up", "round over", "fetched"):
        assert counts.get(what, 0) >= 5, (what, counts)
    for what in ("removed", "joined", "suspected", "view", "dies", "cut off", "stops", "device hangs"):
        assert counts.get(what, 0) >= 3, (what, counts)


def test_without_faults_nobody_asks_for_anything_and_no_round_is_needed() -> None:
    for stale_max in (0, 4):
        world = run(Schedule(1, 4, stale_max, iterations=40))
        assert world.counts["round started"] <= 2, world.counts
        assert not world.counts["suspected"], world.counts
        assert not world.counts["view"], world.counts


@pytest.mark.parametrize(
    ("fault", "nodes", "waiting", "why"),
    [
        (Fault("dies", 2.0, 1, 60.0), 3, {1}, "silent"),
        (Fault("stops", 2.0, 1, 60.0), 3, {1}, "silent"),
        (Fault("device hangs", 2.0, 1, 60.0), 3, {1}, "no iteration"),
        (Fault("cut off", 2.0, 1, 60.0, others=1), 5, {1, 2}, "silent"),
        (Fault("dies", 2.0, 1, 60.0), 2, {1}, "silent"),
    ],
    ids=["dies", "stops", "device hangs", "two of five cut off", "one of two dies, with the hub"],
)
def test_the_majority_goes_on_within_the_limits_and_the_minority_does_not(
    fault: Fault, nodes: int, waiting: set[int], why: str
) -> None:
    world = World(Schedule(3, nodes, 2, (fault,), hub=nodes == 2, iterations=0))
    world.clock.advance(fault.after)
    world.happens(fault)
    limit = max(world.settings.silence[1], world.settings.progress[1])
    world.clock.advance(fault.after + limit + 5.0)
    assert world.reasons
    assert all(reason.startswith(why) for reason in world.reasons), world.reasons
    at = {name: each.node.applied for name, each in world.processes.items()}
    world.clock.advance(fault.after + limit + 15.0)
    for name, each in world.processes.items():
        if name not in waiting:
            assert each.node.applied > at[name] + 20, world.describe()
        elif fault.kind == "cut off":
            assert each.node.applied == at[name], world.describe()
    world.clock.advance(fault.after + fault.lasts)
    world.come_together()
    world.check_once()


def test_one_that_was_removed_tells_those_who_missed_the_view_that_did_it() -> None:
    """Who decided that view may be gone, and then nobody else knows it."""
    known = View(1, 3, (ViewMember(Life(1, 1)), ViewMember(Life(2, 1))))
    rng = np.random.default_rng(1)
    node = Node.joining(0, "again", "at 0", [1, 2], settings_for(2), rng, 0.0, known)
    node.poll(0.0)
    told = [Send(1, ViewDecided(view=known))]
    before = View(1, 2, (ViewMember(Life(0, 1)), *known.members))
    report = Report(Life(1, 1), 2, 0, 0, 0, ())
    assert node.handle_message(0.1, 1, NodeReport(report=report)) == told
    assert node.handle_message(0.1, 1, Prepare(view=before, ballot=Ballot(1, 1))) == told
    assert node.handle_message(0.1, 1, Prepare(view=known, ballot=Ballot(1, 1))) == []
