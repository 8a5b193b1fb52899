"""The probe's queue, case by case: what becomes of a worker in each state, whatever comes."""

from __future__ import annotations

import math

import pytest

from atoll.core.errors import DeadlineError, UserError
from atoll.groups.probe import Formed, GivenUp, Late, ProbeEvent, ProbeQueue


def queue(workers: int = 4, groups: int = 2, patience: float = 60.0, tolerance: float = 0.1) -> ProbeQueue:
    return ProbeQueue(100.0, range(workers), groups, patience=patience, tolerance=tolerance)


def groups_in(outcomes: list[ProbeEvent]) -> list[tuple[int, ...]]:
    return [outcome.group for outcome in outcomes if isinstance(outcome, Formed)]


def in_state(state: str) -> ProbeQueue:
    """A queue of three in which worker 0 is in this state."""
    made = queue(3, 1)
    if state == "stranger":
        return queue(3, 1)
    if state == "queued":
        made.handle_probed(101.0, 0, 0.1)
    elif state == "grouped":
        for worker in range(3):
            made.handle_probed(101.0, worker, 0.1)
    elif state == "given up":
        made.handle_probed(101.0, 1, 0.1)
    elif state == "left":
        made.handle_left(101.0, 0)
        made.handle_probed(101.0, 1, 0.1)
    made.poll(101.0 if state != "given up" else 160.0)
    return made


@pytest.mark.parametrize(
    ("state", "what", "after"),
    [
        ("probing", "begun", "probing"),
        ("probing", "probed", "queued"),
        ("probing", "left", "gone"),
        ("probing", "time", "given up"),
        ("queued", "begun", "queued"),
        ("queued", "probed", "queued"),
        ("queued", "left", "gone"),
        ("queued", "time", "grouped"),  # with those that are left when the others are given up
        ("grouped", "begun", "grouped"),
        ("grouped", "probed", "grouped"),
        ("grouped", "left", "gone"),
        ("grouped", "time", "grouped"),
        ("given up", "begun", "given up"),
        ("given up", "probed", "late"),
        ("given up", "left", "gone"),
        ("given up", "time", "given up"),
        ("left", "begun", "probing"),
        ("left", "probed", "refused"),
        ("left", "left", "gone"),
        ("left", "time", "gone"),
    ],
)
def test_each_state_and_what_comes(state: str, what: str, after: str) -> None:
    made = in_state(state)
    now = 110.0 if state != "given up" else 161.0
    told: list[ProbeEvent] = []
    if what == "begun":
        made.handle_begun(now, 0)
    elif what == "probed" and after == "refused":
        with pytest.raises(UserError, match="worker 0 reports a probe that it has not begun"):
            made.handle_probed(now, 0, 0.2)
        return
    elif what == "probed":
        made.handle_probed(now, 0, 0.2)
    elif what == "left":
        made.handle_left(now, 0)
    elif state == "probing":
        made.handle_probed(now, 1, 0.1)
        told += made.poll(160.0)
    elif what == "time":
        told += made.poll(160.0)
    told += made.poll(now)
    assert (0 in made.begun) == (after == "probing")
    assert (0 in made.queue) == (after == "queued")
    assert any(0 in group for group in made.formed) == (after == "grouped")
    assert (0 in made.left_out) == (after in ("given up", "late"))
    assert any(isinstance(each, Late) and each.worker == 0 for each in told) == (after == "late")
    given_up = any(isinstance(each, GivenUp) and each.worker == 0 for each in told)
    assert given_up == (after == "given up" and state == "probing")


def test_a_full_queue_leaves_when_nobody_else_can_be_as_fast() -> None:
    made = queue()
    made.handle_probed(110.0, 3, 0.1)
    assert made.poll(110.0) == []
    made.handle_probed(110.5, 0, 0.11)
    assert made.poll(110.5) == []
    assert made.next_deadline() == pytest.approx(111.55)  # the slower of the two took 10.5 s
    assert groups_in(made.poll(111.55)) == [(0, 3)]
    assert sorted(made.begun) == [1, 2]
    made.handle_probed(140.0, 2, 0.4)
    made.handle_probed(140.0, 1, 0.4)
    assert groups_in(made.poll(140.0)) == [(1, 2)]  # all have reported: there is nobody to wait for
    assert made.over
    assert made.next_deadline() is None
    assert made.seconds_per_sample == {0: 0.11, 1: 0.4, 2: 0.4, 3: 0.1}


def test_the_reason_is_for_a_person() -> None:
    made = queue()
    for worker, seconds in ((0, 0.1), (1, 0.1), (2, 0.1), (3, 0.4)):
        made.handle_probed(100 + 100 * seconds, worker, seconds)
    first, second = made.poll(140.0)
    assert first.reason == "0, 1: 10 samples/s by their probe, group 1 of 2; 2 behind them in the queue"
    assert second.reason == "2, 3: 2.5 to 10 samples/s by their probe, group 2 of 2"


def test_of_those_in_the_queue_the_fastest_leave_and_like_ones_by_rank() -> None:
    made = queue(5, 2)
    for worker, seconds in ((4, 0.1), (2, 0.5), (1, 0.105), (3, 0.1), (0, 0.5)):
        made.handle_probed(110.0, worker, seconds)
    assert groups_in(made.poll(110.0)) == [(1, 3, 4), (0, 2)]


def test_a_death_makes_groups_smaller_and_at_last_fewer() -> None:
    made = queue(5, 3)  # groups of 2, 2 and 1
    made.handle_probed(101.0, 0, 0.01)
    made.handle_left(101.0, 1)
    made.handle_left(101.0, 2)
    assert groups_in(made.poll(101.2)) == [(0,)]
    made.handle_left(102.0, 3)
    made.handle_probed(103.0, 4, 0.02)
    assert groups_in(made.poll(103.0)) == [(4,)]
    assert made.formed == [(0,), (4,)]
    made.handle_left(104.0, 4)
    assert made.formed == [(0,)]


def test_who_comes_in_time_is_of_the_queue_and_who_comes_later_is_placed_beside_it() -> None:
    made = queue(2, 2)
    made.handle_begun(150.0, 7)
    made.handle_probed(105.0, 0, 0.05)
    made.handle_probed(155.0, 7, 0.05)  # as fast, and as long for its probe
    made.handle_begun(160.0, 8)  # when the first have had their time
    made.handle_probed(161.0, 8, 0.05)
    told = made.poll(161.0)
    assert groups_in(told) == [(0,), (7,)]
    assert [type(each) for each in told] == [Late, GivenUp, Formed, Formed]
    assert (
        "worker 8 finished its probe 1 min 1 s after the start, when the groups were made" in told[0].reason
    )
    assert told[1].reason == (
        "the run begins without worker 1: its probe did not end within 1 min 0 s, and in a group it would "
        "hold up the others; it enters if it reports"
    )


def test_a_silent_probe_holds_up_only_the_last_group_and_only_until_its_deadline() -> None:
    made = queue(4, 2)
    for worker in (0, 1, 2):
        made.handle_probed(110.0, worker, 0.1)
    assert groups_in(made.poll(111.5)) == [(0, 1)]
    assert made.next_deadline() == 160.0
    assert made.poll(159.9) == []
    silent, rest = made.poll(160.0)
    assert isinstance(silent, GivenUp)
    assert groups_in([rest]) == [(2,)]


def test_where_nobody_reports_in_time_there_are_no_groups() -> None:
    made = queue(2, 1, patience=5.0)
    with pytest.raises(DeadlineError) as caught:
        made.poll(105.0)
    assert str(caught.value) == (
        "no worker has ended its probe within 5.0 s (waited for workers 0, 1): its batches take longer than "
        "the probe may"
    )
    assert [each.worker for each in made.poll(105.0) if isinstance(each, GivenUp)] == [0, 1]
    assert made.over


@pytest.mark.parametrize(
    ("workers", "groups", "said"),
    [
        (4, 0, "0 groups: there must be at least 1"),
        (4, -1, "-1 groups: there must be at least 1"),
        (4, 5, "5 groups of 4 workers: a group has at least one, so at most 4"),
        (0, 1, "1 groups of 0 workers"),
    ],
)
def test_groups_that_cannot_be_are_one_line(workers: int, groups: int, said: str) -> None:
    with pytest.raises(UserError) as caught:
        queue(workers, groups)
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_a_time_that_is_none_is_refused_and_changes_nothing(seconds: float) -> None:
    made = queue()
    with pytest.raises(UserError, match=r"worker 1 reports .* s a sample; it must be finite and above 0"):
        made.handle_probed(101.0, 1, seconds)
    assert sorted(made.begun) == [0, 1, 2, 3]
    with pytest.raises(UserError, match="patience 0 s must be above 0"):
        queue(patience=0.0)
