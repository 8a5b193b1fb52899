"""Properties of regrouping: one slow-down is answered once, flapping causes no storm, nobody is lost."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from atoll.core.errors import UserError
from atoll.groups.chooser import ProbeMeasurements, Score, choose
from atoll.groups.drift import Proposal, Regrouper, Rules, ScoreAt, Speeds
from atoll.groups.grouping import Grouping

RULES = Rules(threshold=0.1, hold=10.0, interval=60.0, window=16, tolerance=0.1)
FAST = 0.1  # seconds per sample


def score(grouping: Grouping, speeds: Speeds) -> Score:
    """A ring waits for its slowest member; groups go on independently."""
    return Score(sum(len(group) * min(speeds[w] for w in group) for group in grouping))


class Chooser:
    """The joint chooser, with a count of how often it was asked."""

    def __init__(self, by: ScoreAt = score) -> None:
        self.asked, self.by = 0, by

    def __call__(self, speeds: Speeds):
        self.asked += 1
        return choose(ProbeMeasurements(speeds), lambda grouping: self.by(grouping, speeds), tolerance=0.05)


def costly(grouping: Grouping, speeds: Speeds) -> Score:
    """The same where each more group costs 15 %: with equal speeds one ring is best again."""
    return Score(score(grouping, speeds).samples_per_second * 0.85 ** (len(grouping) - 1))


def start(rules: Rules = RULES, speed: float = 1 / FAST, by: ScoreAt = score) -> Regrouper:
    """Four equal workers in one ring."""
    speeds = dict.fromkeys(range(4), speed)
    return Regrouper(0.0, Grouping([range(4)]), speeds, Chooser(by), by, rules=rules)


def run(
    regrouper: Regrouper, until: float, seconds: Callable[[float, int], float], now: float = 0.0
) -> list[tuple[float, Proposal]]:
    """Iterations of one sample a worker, each of which takes `seconds(now, worker)`, until the given time."""
    proposals = []
    ends = {worker: now + seconds(now, worker) for worker in regrouper.speeds}
    began = dict.fromkeys(ends, now)
    while True:
        worker = min(ends, key=lambda each: (ends[each], each))
        deadline = regrouper.next_deadline()
        if deadline is not None and deadline < ends[worker]:
            moment = max(deadline, now)
        else:
            moment = ends[worker]
            regrouper.handle_measured(moment, worker, moment - began[worker])
            began[worker], ends[worker] = moment, moment + seconds(moment, worker)
        if moment > until:
            return proposals
        now = moment
        proposal = regrouper.poll(now)
        if proposal is not None:
            assert proposal.grouping == regrouper.grouping
            proposal.grouping.check(regrouper.speeds)
            proposals.append((now, proposal))
        after = regrouper.next_deadline()
        assert after is None or after > now, "a deadline that polling does not take away"


@pytest.mark.check
@settings(max_examples=30)  # each is some minutes of training
@given(st.integers(0, 3), st.floats(1.5, 8), st.floats(20, 100), st.integers(0, 2**32))
def test_one_slow_down_is_answered_once(victim: int, factor: float, moment: float, seed: int) -> None:
    """With 5 % of noise, and steps that take ten times as long now and then."""
    random = Random(seed)

    def seconds(now: float, worker: int) -> float:
        slower = factor if worker == victim and now >= moment else 1.0
        return FAST * slower * random.uniform(0.95, 1.05) * (10 if random.random() < 0.02 else 1)

    regrouper = start()
    ((when, proposal),) = run(regrouper, moment + 400, seconds)
    assert proposal.grouping == Grouping([[victim], set(range(4)) - {victim}])
    half_a_window = RULES.window * FAST * factor
    assert moment + RULES.hold <= when <= moment + RULES.hold + 4 * half_a_window + 20 * FAST * factor
    assert f"worker {victim} computes" in proposal.reason
    # What is lost comes back: nobody waits for the slow one any more.
    gained = score(proposal.grouping, regrouper.speeds).samples_per_second
    assert gained >= 0.9 * (3 / FAST + 1 / (FAST * factor))


@pytest.mark.check
@settings(max_examples=30)  # each is an hour of training
@given(st.floats(0.5, 400), st.floats(0.1, 0.9), st.floats(2, 10), st.floats(0, 100))
@example(61.0, 0.5, 3.7531145448401606, 0.0)  # a pair of regroupings each ten minutes, with quiet between
def test_flapping_speeds_cause_no_storm(period: float, duty: float, factor: float, offset: float) -> None:
    """However fast or slowly one worker's speed goes up and down: the pauses between regroupings double."""

    def seconds(now: float, worker: int) -> float:
        slow = worker == 3 and ((now + offset) % period) < duty * period
        return 1.0 * (factor if slow else 1.0)

    span = 3600.0
    regrouper = start(speed=1.0, by=costly)
    proposals = run(regrouper, span, seconds)
    times = [moment for moment, _ in proposals]
    assert all(after - before >= RULES.interval - 1e-6 for before, after in pairwise(times))
    # 60 s, then 120, 240, ... while they follow one another within 16 pauses.
    assert len(proposals) <= 1 + math.log2(span / RULES.interval) + 2
    assert regrouper._choose.asked <= 2 * span / RULES.hold  # type: ignore[attr-defined]


@pytest.mark.check
@given(st.integers(0, 2**32), st.floats(0, 0.2))
def test_noise_changes_nothing(seed: int, noise: float) -> None:
    random = Random(seed)
    regrouper = start()
    assert run(regrouper, 120, lambda _now, _worker: FAST * random.uniform(1 - noise, 1 + noise)) == []
    assert regrouper.grouping == Grouping([range(4)])


def test_a_gain_below_the_threshold_is_left_alone() -> None:
    """One of four 6 % slower than the others costs the ring 4 %."""
    regrouper = start(rules=Rules(threshold=0.1, hold=10, interval=60, tolerance=0.01))
    assert run(regrouper, 300, lambda _now, worker: FAST * (1.06 if worker == 2 else 1)) == []
    assert regrouper._choose.asked <= 2  # type: ignore[attr-defined]  # it looked, and then no more


def test_a_slow_down_that_passes_is_left_alone() -> None:
    regrouper = start()

    def seconds(now: float, worker: int) -> float:
        return FAST * (4 if worker == 1 and 50 <= now < 58 else 1)

    assert run(regrouper, 300, seconds) == []


def test_spells_that_follow_one_another_are_not_one_long_one() -> None:
    """Each shorter than the hold, from the first to the last longer."""
    regrouper = start()

    def seconds(now: float, worker: int) -> float:
        return FAST * (4 if worker == 1 and (50 <= now < 56 or 58 <= now < 66) else 1)

    assert run(regrouper, 300, seconds) == []
    regrouper = start()
    assert (
        len(run(regrouper, 300, lambda now, worker: FAST * (4 if worker == 1 and 50 <= now < 68 else 1))) == 1
    )


@pytest.mark.check
def test_slow_flapping_is_followed_ever_more_rarely() -> None:
    """Up and down every 200 s for eight hours: it would be 144 changes."""
    regrouper = start(speed=1.0, by=costly)
    proposals = run(
        regrouper, 8 * 3600.0, lambda now, worker: 4.0 if worker == 3 and now % 400 < 200 else 1.0
    )
    gaps = [after - before for (before, _), (after, _) in pairwise(proposals)]
    assert len(gaps) >= 5
    assert all(gap >= RULES.interval * 2**place for place, gap in enumerate(gaps[:6]))
    assert len(proposals) <= 16
    groupings = {proposal.grouping for _, proposal in proposals}
    assert groupings == {Grouping([range(4)]), Grouping([[0, 1, 2], [3]])}


def test_what_is_no_better_any_more_when_the_time_has_come_is_not_proposed() -> None:
    ring, better = Grouping([range(4)]), Grouping([[0, 1, 2], [3]])
    answers = [better, ring]
    regrouper = Regrouper(
        0.0,
        ring,
        dict.fromkeys(range(4), 10.0),
        lambda speeds: choose(ProbeMeasurements(speeds), lambda each: Score(float(each == answers[0]))),
        score,
        rules=Rules(hold=5, window=2),
    )
    for _ in range(2):
        regrouper.handle_measured(1.0, 3, 0.4)
    assert regrouper.poll(1.0) is None
    assert regrouper.next_deadline() == 6.0
    answers.pop(0)
    assert regrouper.poll(6.0) is None
    assert regrouper.grouping == ring


def test_a_second_slow_down_long_after_is_answered_too() -> None:
    regrouper = start()

    def seconds(now: float, worker: int) -> float:
        return FAST * (4 if (worker == 1 and now >= 50) or (worker == 2 and now >= 500) else 1)

    proposals = run(regrouper, 900, seconds)
    assert [each.grouping for _, each in proposals] == [
        Grouping([[0, 2, 3], [1]]),
        Grouping([[0, 3], [1, 2]]),
    ]
    assert [moment // 60 for moment, _ in proposals] == [1, 8]


actions = st.lists(
    st.tuples(
        st.sampled_from(["measured"] * 8 + ["left", "joined", "restart"]),
        st.integers(0, 9),
        st.sampled_from([0.1, 0.1, 0.1, 0.4, 1.0]),
        st.floats(0, 15),
    ),
    max_size=120,
)


@given(actions)
def test_whoever_comes_and_goes_each_member_is_in_exactly_one_group(
    happens: list[tuple[str, int, float, float]],
) -> None:
    rules = Rules(hold=5, interval=20, window=4)
    regrouper, members, now = start(rules=rules), {0, 1, 2, 3}, 0.0
    for what, worker, value, pause in happens:
        now += pause
        if what == "joined" and worker not in members:
            before = regrouper.grouping
            proposal = regrouper.handle_joined(now, worker, value)
            members.add(worker)
            assert proposal.grouping.without(worker) == before  # nobody else changes groups
        elif what == "left":
            regrouper.handle_left(now, worker)
            members.discard(worker)
        elif what == "measured":
            regrouper.handle_measured(now, worker, value)
        elif what == "restart":
            regrouper = Regrouper(now, regrouper.grouping, regrouper.speeds, Chooser(), score, rules=rules)
        proposal_or_none = regrouper.poll(now)
        deadline = regrouper.next_deadline()
        assert deadline is None or deadline > now
        assert set(regrouper.speeds) == members
        regrouper.grouping.check(members)
        assert proposal_or_none is None or proposal_or_none.grouping == regrouper.grouping


def test_who_comes_is_placed_where_it_helps_most() -> None:
    regrouper = Regrouper(
        0.0, Grouping([[0, 1], [2, 3]]), {0: 10.0, 1: 10.0, 2: 2.0, 3: 2.0}, Chooser(), score, rules=RULES
    )
    fast = regrouper.handle_joined(1.0, 4, 0.1)
    assert fast.grouping == Grouping([[0, 1, 4], [2, 3]])
    assert (
        fast.reason == "worker 4 joins with 10 samples/s and is best with 0 1: 34 samples/s predicted in all"
    )
    slow = regrouper.handle_joined(2.0, 5, 2.0)
    assert slow.grouping == Grouping([[0, 1, 4], [2, 3], [5]])
    assert "is best in a group of its own" in slow.reason
    with pytest.raises(UserError, match="worker 5 is in a group already"):
        regrouper.handle_joined(3.0, 5, 2.0)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_time_that_is_none_is_refused(value: float) -> None:
    regrouper = start()
    with pytest.raises(UserError, match="worker 1 reports .* s a sample; it must be finite and above 0"):
        regrouper.handle_measured(0.0, 1, value)
    with pytest.raises(UserError, match="worker 7 reports .* s a sample; it must be finite and above 0"):
        regrouper.handle_joined(0.0, 7, value)
    regrouper.handle_measured(0.0, 9, 1.0)  # of one that has left: left aside
    assert regrouper.speeds == dict.fromkeys(range(4), 10.0)


@pytest.mark.parametrize(
    "wrong", [{"threshold": 0.0}, {"hold": -1.0}, {"interval": 0.0}, {"tolerance": 0.0}, {"window": 1}]
)
def test_rules_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError):
        Rules(**wrong)  # type: ignore[arg-type]
