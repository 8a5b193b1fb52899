"""Who is suspected of standing still, and who is not: `peers/watch.py`."""

from __future__ import annotations

from atoll.peers.settings import Settings
from atoll.peers.watch import Watch
from atoll.wire.peerviews import Life

ONE = Life(1, 1)
SETTINGS = Settings(stale_max=2, silence=(50.0, 50.0), progress=(4.0, 10.0))


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
