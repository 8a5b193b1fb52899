"""Who is suspected of standing still, and who is not: `peers/watch.py`; and whose scripts wait in vain."""

from __future__ import annotations

import pytest

from atoll.core.stands import USE, call, gradients
from atoll.peers.scripts import Script, mismatch
from atoll.peers.settings import NodeSettings
from atoll.peers.watch import Watch
from atoll.wire.peers import ScriptWaits
from atoll.wire.peerviews import Life
from atoll.wire.workerstand import WorkerStand

ONE = Life(1, 1)
SETTINGS = NodeSettings(stale_max=2, silence=(50.0, 50.0), progress=(4.0, 10.0))


def watch() -> Watch:
    """Of one other, that has made iterations 0 to 4, one each second, and has applied as many; at 5.0."""
    made = Watch(SETTINGS)
    made.install(0.0, [ONE])
    for second in range(1, 6):
        made.handle_heard(float(second), ONE.node)
        made.handle_iteration(float(second), ONE, second, second)
    return made


def suspected_at(made: Watch, since: float, *, absent: bool = False) -> float:
    """When the other is suspected that is waited for since then; the deadline says so before."""
    awaited, not_come = ({}, {ONE: since}) if absent else ({ONE: since}, {})
    assert made.suspects(since, awaited, not_come) == {}
    due = made.deadline(awaited, not_come)
    assert made.suspects(due - 0.001, awaited, not_come) == {}
    assert made.suspects(due, awaited, not_come).keys() == {ONE.node}
    return due


def test_one_that_makes_no_iteration_has_its_limit_from_when_it_was_needed() -> None:
    assert suspected_at(watch(), 5.0) == 9.0
    assert suspected_at(watch(), 7.0) == 11.0
    assert suspected_at(watch(), 7.0, absent=True) == 17.0


def test_one_whose_global_iteration_rises_does_not_stand_still() -> None:
    made = watch()
    made.handle_iteration(6.0, ONE, 8, 5)
    made.handle_iteration(8.0, ONE, 8, 6)  # 8 - 6 is not above stale_max: it computes
    assert suspected_at(made, 6.0) == 12.0
    assert suspected_at(made, 6.0, absent=True) == 18.0


def test_one_that_waits_itself_has_longer_than_those_whom_it_waits_for() -> None:
    made = watch()
    made.handle_iteration(6.0, ONE, 8, 5)
    assert suspected_at(made, 6.0) == 20.0
    assert suspected_at(made, 6.0, absent=True) == 20.0
    made.handle_iteration(21.0, ONE, 8, 6)
    assert suspected_at(made, 21.0) == 25.0


def test_one_that_waits_in_a_meeting_is_not_suspected_while_it_is_heard() -> None:
    made = watch()
    assert made.suspects(49.0, {ONE: 5.0}, {}, {ONE}) == {}
    assert made.suspects(49.0, {}, {ONE: 5.0}, {ONE}) == {}
    assert made.suspects(49.0, {ONE: 5.0}, {}).keys() == {ONE.node}
    assert "silent" in made.suspects(55.0, {ONE: 5.0}, {}, {ONE})[ONE.node]


# -- scripts that wait for one another in vain: `peers/scripts.py` -----------------------------------------


TWO, THREE = Life(2, 1), Life(3, 1)


def in_meeting(worker: int, iteration: int, meeting: int, at: int) -> Script:
    stand = WorkerStand(worker, call("session.save", "train.py:9"))
    return Script(iteration, meeting, ScriptWaits(stand, meeting=meeting, at=at))


def using(worker: int, iteration: int, meeting: int) -> Script:
    """A script that uses a gradient of an iteration: a worker that waits in its step answers it."""
    stand = WorkerStand(worker, call(f"{USE} of iteration {iteration}", "train.py:7"))
    return Script(iteration, meeting, ScriptWaits(stand, meeting=meeting, at=iteration))


def wanting(worker: int, iteration: int, least: int, met: int = 3, first: int = 0) -> Script:
    stand = WorkerStand(worker, gradients(iteration - 1, "train.py:5"))
    return Script(iteration, met, ScriptWaits(stand, least=least), first)


@pytest.mark.parametrize(
    ("one", "other", "in_vain"),
    [
        (in_meeting(1, 4, 3, 4), wanting(2, 5, 5), True),
        (in_meeting(1, 4, 3, 4), wanting(2, 8, 4), False),  # all that it needs of the first is made
        (in_meeting(1, 4, 3, 4), wanting(2, 5, 5, met=4), False),  # that was before a meeting which is over
        (in_meeting(1, 4, 3, 4), wanting(2, 5, 5, first=5), False),  # it is no party to that meeting
        (in_meeting(1, 4, 3, 4), in_meeting(2, 4, 3, 4), False),  # they meet
        (wanting(1, 5, 5), wanting(2, 5, 5), False),
        (using(1, 4, 3), wanting(2, 5, 5), False),
        (in_meeting(1, 4, 3, 4), None, False),  # the other one computes
    ],
)
def test_who_waits_in_vain(one: Script, other: Script | None, in_vain: bool) -> None:
    for scripts in ({ONE: one, TWO: other}, {TWO: other, ONE: one}):
        said = mismatch(scripts, ())
        assert bool(said) == in_vain, said
        assert not mismatch(scripts, {TWO}), "a newcomer is removed, and ends nothing"
        assert not mismatch({**scripts, THREE: None}, ()), "the third may come to either"
        assert bool(mismatch({**scripts, THREE: wanting(3, 8, 4)}, ())) == in_vain
    if in_vain:
        assert said.startswith(
            "worker 1 is in session.save (train.py:9); worker 2 is at the gradients of step 4 (train.py:5). "
        )
