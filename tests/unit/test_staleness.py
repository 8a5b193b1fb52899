"""How stale a contribution is, and what of it is scaled by that (store/streams.py)."""

from __future__ import annotations

import msgspec
import pytest

from atoll.store.entries import Apply
from atoll.store.log import CommitLog
from atoll.wire.messages import Commit


class Run:
    """A log of live workers 0, 1, ..., of incarnations one higher."""

    def __init__(self, workers: int, scaled: str = "weight") -> None:
        self.log = CommitLog.begin("asp", 0, workers, 1, scaled=scaled)
        self.clocks = [0] * workers
        for worker in range(workers):
            assert not self.log.handle_join(worker, worker + 1).refused

    def contribute(self, worker: int, behind: int = 0, rate: object = 0.1) -> Apply:
        iteration = self.clocks[worker]
        self.clocks[worker] += 1
        commit = Commit(
            incarnation=worker + 1,
            iteration=iteration,
            weight=1.0,
            hyperparameters=[{"lr": rate, "eps": 1.0}],
            behind=behind,
        )
        assert not self.log.handle_staged(0, worker, worker + 1, iteration).refused
        (entry,) = self.log.handle_commit(worker, commit).entries
        assert isinstance(entry, Apply)
        return entry


def test_what_is_in_flight_makes_one_global_iteration_more() -> None:
    run = Run(3)
    for turn in range(2):
        for worker in range(3):
            run.contribute(worker, behind=turn)
    for _ in range(3):  # each was computed one exchange before what the worker has now
        assert [run.contribute(worker, behind=1).staleness for worker in range(3)] == [1.0, 1.0, 1.0]
    assert run.contribute(0).staleness == 0.0  # after a barrier, say: nothing was in flight
    assert run.contribute(0, behind=1).staleness == 0.0  # two in a row: no other contributed more
    assert run.contribute(1, behind=1).staleness == 1.5


def test_one_alone_is_late_by_its_own_contribution() -> None:
    run = Run(1)
    assert [run.contribute(0, behind).staleness for behind in (0, 1, 1, 0, 1)] == [0, 1, 1, 0, 1]


@pytest.mark.parametrize(
    ("scaled", "part", "rate"),
    [
        # The open step has one of worker 0; then comes worker 1's, after five: 5 / 1 - 1 too late.
        ("weight", (1 / 4) / (1 + 1 / 4), 0.1),
        ("rate", 1 / 2, (0.1 + 0.1 / 4) / 2),
        ("none", 1 / 2, 0.1),
    ],
)
def test_what_of_a_stale_contribution_is_scaled(scaled: str, part: float, rate: float) -> None:
    run = Run(2, scaled)
    for _ in range(5):
        opened = run.contribute(0)
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(run.log), type=CommitLog)
    again = Run(2, scaled)
    again.log, again.clocks = (state), list(run.clocks)
    assert opened.opens
    for each in (run, again):
        late = each.contribute(1)
        assert (late.opens, late.closes, late.staleness) == (False, True, 4.0)
        assert late.part == pytest.approx(part)
        assert late.hyperparameters == [{"lr": pytest.approx(rate), "eps": 1.0}]


def test_what_all_are_late_by_scales_nothing() -> None:
    run = Run(2)
    for worker in (0, 1, 0, 1, 0, 1):
        late = run.contribute(worker, behind=int(run.clocks[worker] > 0))
    assert (late.staleness, late.part) == (1.0, 0.5)
    for _ in range(3):
        run.contribute(0, behind=1)
    late = run.contribute(1, behind=1)  # 3 too late, of which the exchange in flight is 1
    assert late.staleness == 3.0
    assert late.part == pytest.approx((1 / 2) / (1 + 1 / 2))


def test_a_rate_that_is_none_is_left_alone() -> None:
    run = Run(2, "rate")
    for _ in range(5):
        run.contribute(0)
    late = run.contribute(1, rate="fast")
    assert late.hyperparameters == [{"lr": "fast", "eps": 1.0}]
