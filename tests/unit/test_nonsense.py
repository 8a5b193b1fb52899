"""Contributions that weigh far too much: who they are of is said, and nothing of them counts."""

import itertools
from types import SimpleNamespace

import msgspec
import pytest

from atoll.core.weighing import MOST, MOST_AT_ONCE, Usual, beyond, median_of
from atoll.store.entries import Apply, Combine
from atoll.store.log import CommitLog
from atoll.store.outcomes import Outcome
from atoll.wire import messages as m

HUGE = (1e300, float(16 * MOST) + 1)


def log_of(consistency: str, workers: int = 3, optimizers: int = 1) -> CommitLog:
    log = CommitLog.begin(consistency, 4, workers, 1, optimizers=optimizers)
    for worker in range(workers):
        log.handle_join(worker, worker + 1)
    return log


def contribute(
    log: CommitLog,
    worker: int,
    iteration: int,
    weight: float = 16.0,
    samples: float = 16.0,
    alike: float = 1.0,
    weights: list[float] | None = None,
) -> Outcome:
    log.handle_staged(0, worker, worker + 1, iteration)
    commit = m.Commit(
        incarnation=worker + 1,
        iteration=iteration,
        weight=weight,
        samples=samples,
        alike=alike,
        weights=weights or [],
    )
    return log.handle_commit(worker, commit)


def train(log: CommitLog, iterations: range, workers: int = 3) -> None:
    for iteration, worker in itertools.product(iterations, range(workers)):
        assert not contribute(log, worker, iteration).refused
        if log.consistency == "bsp" and worker == workers - 1:
            step_all(log, iteration, workers)


def step_all(log: CommitLog, iteration: int, workers: int) -> None:
    for worker in range(workers):
        step = m.Step(incarnation=worker + 1, iteration=iteration, scale=1.0, hyperparameters=[])
        assert not log.handle_step(worker, step).refused


@pytest.mark.parametrize("huge", HUGE)
@pytest.mark.parametrize("what", ["weight", "samples", "alike"])
@pytest.mark.parametrize("consistency", ["asp", "ssp"])
def test_an_asynchronous_contribution_that_weighs_far_too_much_is_refused(
    consistency: str, what: str, huge: float
) -> None:
    log = log_of(consistency)
    train(log, range(3))
    lines = len(log.lines.entries)
    refused = contribute(log, 1, 3, **{what: huge}).refused
    assert refused.startswith("worker 1's gradients of iteration 3 come with a ")
    assert f"of {huge:g}, more than 1,000 times the median of {1 if what == 'alike' else 16}" in refused
    assert "\n" not in refused
    assert len(log.lines.entries) == lines
    assert not contribute(log, 1, 3).refused  # it may say what is right
    assert isinstance(log.lines.entries[-1], Apply)


@pytest.mark.parametrize(
    ("first", "huge"), [*((False, huge) for huge in HUGE), (True, 1e300), (True, 16 * MOST_AT_ONCE + 1)]
)
@pytest.mark.parametrize("who", range(3))
def test_a_synchronous_contribution_that_weighs_far_too_much_is_refused_in_the_first_iteration_too(
    who: int, first: bool, huge: float
) -> None:
    log = log_of("bsp")
    train(log, range(0 if first else 3))
    iteration = log.next_iteration
    for worker in range(3):
        done = contribute(log, worker, iteration, huge if worker == who else 16.0)
    assert [reply.worker for reply in done.replies] == [who]
    refusal = done.replies[0].message
    assert isinstance(refusal, m.Refused)
    assert f"worker {who}'s gradients of iteration {iteration} come with a weight" in refusal.reason
    assert not any(isinstance(entry, Combine) and entry.iteration == iteration for entry in log.lines.entries)
    assert log.waiting_for() == [f"worker {who}, to commit iteration {iteration}"]
    log.handle_fence(who, who + 1)  # its process has ended: the others go on
    combined = log.lines.entries[-1]
    assert isinstance(combined, Combine)
    assert [member.worker for member in combined.members] == [each for each in range(3) if each != who]


@pytest.mark.parametrize("weights", [[HUGE[1], 16.0], [16.0, 1e300]])
@pytest.mark.parametrize("who", range(3))
def test_a_model_of_several_that_weighs_far_too_much_is_refused(who: int, weights: list[float]) -> None:
    log = log_of("bsp", optimizers=2)
    train(log, range(3))
    for worker in range(3):
        done = contribute(log, worker, 3, weights=weights if worker == who else [8.0, 16.0])
    assert [(each.worker, type(each.message)) for each in done.replies] == [(who, m.Refused)]
    assert f"a weight of {max(weights):g}, more than 1,000 times the median of 16" in str(done.replies)
    for worker in [who]:  # it may say what is right
        contribute(log, worker, 3, weights=[8.0, 16.0])
    assert isinstance(log.lines.entries[-1], Combine)


def test_what_is_usual_goes_by_the_model_that_weighs_most() -> None:
    log = log_of("bsp", optimizers=2)
    for iteration in range(4):
        for worker in range(3):
            done = contribute(log, worker, iteration, 4.0, weights=[4.0, 4096.0])
        assert isinstance(log.lines.entries[-1], Combine), done.replies
        step_all(log, iteration, 3)
    assert {each[0] for each in log.these.usual.numbers} == {4096.0}


@pytest.mark.parametrize(
    ("weight", "weights"),
    [
        (0.0, [16.0, 0.0]),
        (0.0, [0.0, 1e300]),
        (16.0, [16.0]),
        (16.0, [16.0, 16.0, 16.0]),
        (16.0, [16.0, float("inf")]),
        (16.0, [16.0, float("nan")]),
    ],
)
def test_weights_of_models_that_cannot_be_are_refused(weight: float, weights: list[float]) -> None:
    log = log_of("bsp", optimizers=2)
    for worker in (0, 1):
        assert not contribute(log, worker, 0).refused
    refused = contribute(log, 2, 0, weight, weights=weights).refused
    assert refused.startswith("worker 2 commits with ")
    assert not any(isinstance(entry, Combine) for entry in log.lines.entries)
    assert not contribute(log, 2, 0, weights=[16.0, 0.0]).refused
    assert isinstance(log.lines.entries[-1], Combine)


def test_of_two_workers_the_one_with_the_smaller_weight_is_believed() -> None:
    log = log_of("bsp", 2)
    contribute(log, 0, 0, 1e300)
    done = contribute(log, 1, 0, 16.0)
    assert [reply.worker for reply in done.replies] == [0]


@pytest.mark.parametrize("consistency", ["bsp", "asp", "ssp"])
def test_what_is_usual_is_in_the_journal(consistency: str) -> None:
    log = log_of(consistency)
    train(log, range(2))
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(log), type=CommitLog)
    assert again == log
    assert len(again.these.usual.numbers) == 6
    if consistency != "bsp":
        assert contribute(again, 0, 2, 1e300).refused


def test_small_batches_at_an_epochs_end_and_a_worker_without_a_batch_are_borne() -> None:
    log = log_of("bsp")
    for worker in range(3):
        contribute(log, worker, 0, 1024.0)
    step_all(log, 0, 3)
    for worker, weight in enumerate([1.0, 0.0, 1024.0]):
        done = contribute(log, worker, 1, weight)
    assert isinstance(log.lines.entries[-1], Combine), done.replies


@pytest.mark.parametrize("before", [0, 3])
def test_of_two_workers_one_may_have_a_last_batch_of_one_sample(before: int) -> None:
    log = log_of("bsp", 2)
    for iteration in range(before):
        for worker in range(2):
            contribute(log, worker, iteration, 4096.0)
        step_all(log, iteration, 2)
    for worker, weight in enumerate([1.0, 4096.0]):
        done = contribute(log, worker, before, weight)
    assert isinstance(log.lines.entries[-1], Combine), done.replies


def test_workers_may_all_begin_to_weigh_more() -> None:
    log = log_of("bsp")
    train(log, range(2))
    for worker in range(3):
        contribute(log, worker, 2, 16.0 * 5000)
    assert isinstance(log.lines.entries[-1], Combine)


def given(*weights: float) -> dict[int, SimpleNamespace]:
    return {
        name: SimpleNamespace(weight=weight, samples=weight, alike=1.0, basis="known")
        for name, weight in enumerate(weights)
    }


@pytest.mark.parametrize(
    ("weights", "found"),
    [
        ([], []),
        ([1e300], []),
        ([1.0, 1e300], [1]),
        ([1.0, 4096.0], []),  # a last batch of one sample, or of one token that counts
        ([1.0, 1e6], []),
        ([1.0, 1e6 + 1], [1]),
        ([0.0, 0.0, 1e6 + 1], []),
        ([1.0, 1.0, 1.5, 1.4e6, 1e9], [3, 4]),  # what is left has no such weight either
        ([float("inf"), 1.0, 2.0], [0]),
        ([float("nan"), 1.0, 2.0], [0]),
    ],
)
def test_which_weights_of_an_iteration_are_left_out(weights: list[float], found: list[int]) -> None:
    assert sorted(beyond(given(*weights))) == found
    left = {name: each for name, each in given(*weights).items() if name not in found}
    assert not beyond(left)


def test_the_median_is_of_recent_contributions() -> None:
    usual = Usual()
    for weight in [1.0] * 100 + [50.0] * 64:
        usual.take(given(weight)[0])
    assert len(usual.numbers) == 64
    assert not usual.excess(given(50_000.0)[0])
    assert "median of 50" in usual.excess(given(50_001.0)[0])
    assert median_of([0.0, 3.0, 5.0]) == 3.0
