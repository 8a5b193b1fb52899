"""The commit log by example: which contributions make a step, who is waited for, who enters, who meets."""

from __future__ import annotations

import re

import msgspec
import pytest

from atoll.core.stands import call, end, gradients
from atoll.core.weighing import KNOWN, NONE
from atoll.store.entries import (
    AnyEntry,
    Apply,
    Combine,
    Fenced,
    Idle,
    Joined,
    StepWithMean,
    WeightedContribution,
)
from atoll.store.log import CommitLog
from atoll.store.outcomes import Outcome
from atoll.store.pulls import PullRequest, Pulls
from atoll.store.shard import (
    ApplyChunks,
    ShardState,
)
from atoll.store.waits import deadlock
from atoll.wire import messages
from atoll.wire.messages import Commit, Committed, Pull, Used

LR = [{"lr": 0.1, "betas": [0.9, 0.999]}]


def commit(incarnation: int, iteration: int, weight: float = 1.0, used: int = -1) -> messages.Commit:
    parts = [Used(sampler=0, epoch=0, start=used, stop=used + 1)] if used >= 0 else []
    return messages.Commit(
        incarnation=incarnation, iteration=iteration, weight=weight, hyperparameters=LR, used=parts
    )


def say(incarnation: int, iteration: int, **changes: object) -> messages.Step:
    fields = {"scale": 1.0, "hyperparameters": LR, **changes}
    return messages.Step(incarnation=incarnation, iteration=iteration, **fields)  # type: ignore[arg-type]


def log_of(
    consistency: str, workers: int = 2, shards: int = 1, slack: int = 1, optimizers: int = 1
) -> CommitLog:
    """All have joined: worker w with incarnation w + 1."""
    log = CommitLog.begin(consistency, slack, workers, shards, optimizers=optimizers)
    for worker in range(workers):
        assert not log.handle_join(worker, worker + 1).refused
    return log


def contribute(log: CommitLog, worker: int, incarnation: int, iteration: int, weight: float = 1.0) -> None:
    assert not log.handle_staged(0, worker, incarnation, iteration).refused
    assert not log.handle_commit(worker, commit(incarnation, iteration, weight)).refused


# -- the log, BSP -----------------------------------------------------------------------------------------


def test_an_iteration_is_combined_when_all_are_staged_everywhere_and_stepped_when_all_have_said_so() -> None:
    log = log_of("bsp", shards=2)
    assert log.lines.entries == [
        Joined(worker=0, incarnation=1, clock=0),
        Joined(worker=1, incarnation=2, clock=0),
    ]
    log.handle_commit(0, commit(1, 0, weight=3.0))
    log.handle_commit(1, commit(2, 0, weight=1.0))
    log.handle_staged(0, 0, 1, 0)
    log.handle_staged(0, 1, 2, 0)
    log.handle_staged(1, 0, 1, 0)
    assert log.waiting_for() == ["worker 1's chunks of iteration 0, on shard 1"]
    outcome = log.handle_staged(1, 1, 2, 0)
    members = [
        WeightedContribution(worker=0, incarnation=1, weight=3.0, samples=0.0),
        WeightedContribution(worker=1, incarnation=2, weight=1.0, samples=0.0),
    ]
    assert outcome.entries == [Combine(iteration=0, members=members)]
    assert [(r.worker, r.incarnation, r.message) for r in outcome.replies] == [
        (0, 1, Committed(iteration=0, workers=[0, 1])),
        (1, 2, Committed(iteration=0, workers=[0, 1])),
    ]
    assert log.handle_step(0, say(1, 0, scale=0.5, edited=[2])).entries == []
    assert log.waiting_for() == ["worker 1, to step iteration 0"]
    stepped = log.handle_step(1, say(2, 0, scale=0.5, edited=[2]))
    assert stepped.entries == [
        StepWithMean(iteration=0, scale=0.5, hyperparameters=LR, edited=[2], editor=0, accepted=True)
    ]


def entering(outcome: Outcome) -> list[list[int]]:
    """Of each answer to a commit, who enters next."""
    return [r.message.entering for r in outcome.replies if isinstance(r.message, Committed)]


def test_who_comes_late_enters_with_the_iteration_that_all_members_were_told_of() -> None:
    log = log_of("bsp")
    assert log.comes_late(2, 9)
    assert not log.comes_late(1, 2)
    log.handle_join(2, 9)  # while iteration 0 is under way: all who make it are told
    contribute(log, 0, 1, 0)
    log.handle_staged(0, 1, 2, 0)
    outcome = log.handle_commit(1, commit(2, 0))
    assert entering(outcome) == [[2], [2]]
    log.handle_join(3, 10)  # too late for that: they have been told
    assert entering(log.handle_commit(0, commit(1, 0))) == [[2]]  # asked again, the same answer
    log.handle_step(0, say(1, 0))
    joined = log.handle_step(1, say(2, 0)).entries[1:]
    assert joined == [Joined(worker=2, incarnation=9, clock=1)]
    assert not log.comes_late(2, 9)
    for worker, incarnation in ((0, 1), (1, 2)):
        contribute(log, worker, incarnation, 1)
    log.handle_staged(0, 2, 9, 1)
    outcome = log.handle_commit(2, commit(9, 1))
    assert entering(outcome) == [[3], [3], [3]]
    log.handle_fence(3, 10)  # it dies before
    for worker, incarnation in ((0, 1), (1, 2), (2, 9)):
        outcome = log.handle_step(worker, say(incarnation, 1))
    assert not any(isinstance(entry, Joined) for entry in outcome.entries)
    assert set(log.live) == {0, 1, 2}


def test_a_newcomer_waits_for_the_end_of_a_pass_of_the_scripts_loop() -> None:
    log = log_of("bsp")
    log.handle_join(2, 9)
    for iteration, ends in enumerate((False, True)):
        for worker in (0, 1):
            log.handle_staged(0, worker, worker + 1, iteration)
            said = msgspec.structs.replace(commit(worker + 1, iteration), ends=ends)
            outcome = log.handle_commit(worker, said)
        assert entering(outcome) == ([[2], [2]] if ends else [[], []])
        for worker in (0, 1):
            outcome = log.handle_step(worker, say(worker + 1, iteration))
        assert any(isinstance(entry, Joined) for entry in outcome.entries) == ends


def test_a_newcomer_waits_on_where_the_step_before_is_left_out() -> None:
    """A backward without a step before it adds to the mean, which the newcomer would lack."""
    log = log_of("bsp")
    log.handle_join(2, 9)
    for iteration, accepted in enumerate((False, True)):
        for worker in (0, 1):
            contribute(log, worker, worker + 1, iteration)
        told = log.handle_commit(0, commit(1, iteration))  # asked again
        assert entering(told) == [[2]]
        for worker in (0, 1):
            outcome = log.handle_step(worker, say(worker + 1, iteration, accepted=accepted))
        assert any(isinstance(entry, Joined) for entry in outcome.entries) == accepted
    assert set(log.live) == {0, 1, 2}


def test_a_newcomer_enters_where_all_have_died_before_they_stepped() -> None:
    log = log_of("bsp")
    log.handle_join(2, 9)
    for worker in (0, 1):
        contribute(log, worker, worker + 1, 0)
    for worker in (0, 1):
        outcome = log.handle_fence(worker, worker + 1)
    assert any(isinstance(entry, Joined) for entry in outcome.entries)
    assert set(log.live) == {2}


@pytest.mark.parametrize("basis", [KNOWN, NONE])
def test_the_log_says_how_much_each_optimizers_gradients_weigh(basis: str) -> None:
    log = log_of("bsp", optimizers=2)
    for worker, weights in enumerate(([4.0, 2.0], [])):
        log.handle_staged(0, worker, worker + 1, 0)
        said = msgspec.structs.replace(commit(worker + 1, 0, weight=4.0), weights=weights, basis=basis)
        outcome = log.handle_commit(worker, said)
    (entry,) = outcome.entries
    assert isinstance(entry, Combine)
    assert [each.weights for each in entry.members] == [[4.0, 2.0] if basis == KNOWN else [1.0, 1.0], []]


def test_meetings_wait_for_a_newcomer_from_the_one_on_that_it_knows() -> None:
    log = log_of("asp")
    log.handle_join(2, 9)
    log.handle_meet(0, 1, 0, "a", 10)
    log.handle_entered(2, 9, 1)  # by worker 0, who waits in meeting 0 for worker 1
    assert [m.workers for m in log.handle_meet(1, 2, 0, "a", 11).met] == [[0, 1]]
    log.handle_meet(0, 1, 1, "b", 12)
    assert log.handle_meet(1, 2, 1, "b", 13).met == []
    assert log.waiting_for() == ["worker 2, to come to 'b'"]
    assert [m.workers for m in log.handle_meet(2, 9, 1, "b", 14).met] == [[0, 1, 2]]


def test_who_comes_when_nobody_lives_enters_at_once() -> None:
    log = log_of("bsp")
    log.handle_fence(0, 1)
    log.handle_fence(1, 2)
    assert Joined(worker=0, incarnation=9, clock=0) in log.handle_join(0, 9).entries


def test_a_commit_that_counts_already_is_answered_again() -> None:
    log = log_of("bsp", workers=1)
    contribute(log, 0, 1, 0)
    before = list(log.lines.entries)
    again = log.handle_commit(0, commit(1, 0))
    assert [reply.message for reply in again.replies] == [Committed(iteration=0, workers=[0])]
    assert log.lines.entries == before


def grouped(incarnation: int, iteration: int, grouping: int) -> messages.Commit:
    return msgspec.structs.replace(commit(incarnation, iteration), grouping=grouping)


def test_an_iterations_workers_are_told_the_grouping_that_all_of_them_know_of() -> None:
    log = log_of("bsp")
    for worker, grouping in ((0, 3), (1, 2)):
        log.handle_staged(0, worker, worker + 1, 0)
        outcome = log.handle_commit(worker, grouped(worker + 1, 0, grouping))
    told = Committed(iteration=0, workers=[0, 1], grouping=2)
    assert [reply.message for reply in outcome.replies] == [told, told]
    for worker in (0, 1):
        log.handle_step(worker, say(worker + 1, 0))
    kept = msgspec.msgpack.encode(log)
    again = msgspec.msgpack.decode(kept, type=CommitLog)
    for each in (log, again):  # asked again after the step, as by a group's next speaker
        assert [reply.message for reply in each.handle_commit(0, grouped(1, 0, 4)).replies] == [told]


def test_where_groups_contribute_an_iterations_workers_are_told_whose_gradients_it_has() -> None:
    """A group says it, and of a worker by itself its number does. Who is in no sum is not told of."""
    log = log_of("bsp", workers=3)
    said = {0: [4, 7], 1: [], 2: [2, 3]}
    for iteration, gone in enumerate((-1, 7)):
        for worker, members in said.items():
            log.handle_staged(0, worker, worker + 1, iteration)
            inside = [each for each in members if each != gone]
            own = msgspec.structs.replace(commit(worker + 1, iteration), members=inside)
            outcome = log.handle_commit(worker, own)
        told = [each for each in (1, 2, 3, 4, 7) if each != gone]
        expected = Committed(iteration=iteration, workers=[0, 1, 2], members=told)
        assert [reply.message for reply in outcome.replies] == [expected] * 3
        assert log.handle_commit(2, own).replies[0].message == expected  # asked again
        for worker in said:
            log.handle_step(worker, say(worker + 1, iteration))


def test_an_iterations_workers_hear_of_one_anothers_speed_and_again_from_a_log_that_was_restored() -> None:
    log = log_of("bsp", workers=3)
    said = {
        0: {4: [0.5, 8.0, 3.0, 1.0, 0.0, 9.0, 7.0], 7: [0.25, 8.0, 3.0, 1.0, 0.0]},
        1: {},
        2: {2: [1.0, 2.0, 3.0, 1.0, 6.0]},
    }
    for worker, speeds in said.items():
        log.handle_staged(0, worker, worker + 1, 0)
        own = msgspec.structs.replace(commit(worker + 1, 0), speeds=speeds)
        outcome = log.handle_commit(worker, own)
    expected = Committed(iteration=0, workers=[0, 1, 2], speeds={**said[0], **said[2]})
    assert [reply.message for reply in outcome.replies] == [expected] * 3
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(log), type=CommitLog)
    assert again.handle_commit(2, own).replies[0].message == expected


def test_a_contributor_is_told_its_own_grouping_and_the_latest_answer_again() -> None:
    log = log_of("asp")
    for iteration, grouping in ((0, 1), (1, 2)):
        log.handle_staged(0, 0, 1, iteration)
        (reply,) = log.handle_commit(0, grouped(1, iteration, grouping)).replies
        assert reply.message == Committed(iteration=iteration, workers=[0, 1], grouping=grouping)
    assert log.handle_commit(0, grouped(1, 1, 9)).replies == [reply]
    assert log.handle_commit(0, grouped(1, 0, 9)).replies[0].message == Committed(iteration=0)


def test_under_ssp_nobody_waits_for_one_that_waits_for_its_new_group() -> None:
    log = log_of("ssp")

    def lines(iteration: int, grouping: int) -> list[AnyEntry]:
        log.handle_staged(0, 0, 1, iteration)
        entries = log.handle_commit(0, grouped(1, iteration, grouping)).entries
        return [entry for entry in entries if not isinstance(entry, Apply)]

    assert lines(0, 0) == []
    assert lines(1, 1) == [Idle(worker=0, incarnation=1, idle=True)]
    assert log.handle_commit(0, grouped(1, 1, 1)).entries == []  # said again, and counted before
    assert lines(2, 1) == []  # with a pipeline it sends this before it moves
    assert lines(3, 1) == [Idle(worker=0, incarnation=1, idle=False)]  # it has stayed where it was
    assert lines(4, 1) == []
    # Who comes with a grouping is not told of it.
    log.handle_join(7, 20)
    log.handle_staged(0, 7, 20, 0)
    entries = log.handle_commit(7, grouped(20, 0, 1)).entries
    assert [type(entry) for entry in entries] == [Apply]


def test_under_ssp_a_move_outlasts_one_more_contribution_and_a_meeting() -> None:
    log = log_of("ssp")
    idle, goes_on = (Idle(worker=0, incarnation=1, idle=each) for each in (True, False))

    def lines(iteration: int, grouping: int, meets: bool = False) -> list[AnyEntry]:
        log.handle_staged(0, 0, 1, iteration)
        entries = log.handle_commit(0, grouped(1, iteration, grouping), meets=meets).entries
        return [entry for entry in entries if not isinstance(entry, Apply)]

    assert lines(0, 1) == [idle]
    assert lines(1, 1) == []  # it was told as it sent this, and moves once this counts
    assert log.handle_idle(0, 1, True).entries == []
    assert log.handle_idle(0, 1, False).entries == []  # a meeting is over, and it has yet to move
    assert lines(2, 1) == [goes_on]  # it has stayed where it was
    assert log.handle_idle(0, 1, True).entries == [idle]
    assert lines(3, 1, meets=True) == []  # it comes after the worker's part in the meeting
    assert lines(4, 2, meets=True) == [idle]  # said again: the worker will move
    assert log.handle_idle(0, 1, False).entries == []
    assert lines(5, 2) == []
    assert log.handle_idle(0, 1, True).entries == []
    assert lines(6, 2, meets=True) == []
    assert log.handle_idle(0, 1, False).entries == [goes_on]
    assert lines(7, 3) == [idle]
    assert lines(8, 4) == [idle]
    assert lines(9, 4) == []
    log.handle_fence(0, 1)
    assert not log.moving
    assert not log.idle


def steps(log: CommitLog, iteration: int, **how: object) -> list[AnyEntry]:
    """Have both workers say an equal Step; return what the log writes."""
    assert log.handle_step(0, say(1, iteration, **how)).entries == []
    return log.handle_step(1, say(2, iteration, **how)).entries


def test_several_optimizers_step_one_mean_one_after_another() -> None:
    log = log_of("bsp")
    for worker in (0, 1):
        contribute(log, worker, worker + 1, 0)
    for iteration, (optimizer, stays) in enumerate(((1, True), (0, True), (2, False))):
        (entry,) = steps(log, iteration, optimizer=optimizer, stays=stays)
        assert isinstance(entry, StepWithMean)
        assert (entry.optimizer, entry.stays) == (optimizer, stays)
    assert entry.iteration == 2
    for worker in (0, 1):
        contribute(log, worker, worker + 1, 3)
    assert isinstance(log.lines.entries[-1], Combine)


def test_a_mean_that_stays_makes_way_for_the_next_iterations() -> None:
    log = log_of("bsp")
    for worker in (0, 1):
        contribute(log, worker, worker + 1, 0)
    steps(log, 0, stays=True)
    log.handle_join(2, 3)
    for worker in (0, 1):
        contribute(log, worker, worker + 1, 1)
    assert log.lines.entries[-1].iteration == 1  # type: ignore[union-attr]
    steps(log, 1, stays=True)
    log.handle_commit(0, commit(1, 2))
    assert log.lines.entries[-1] == Joined(worker=2, incarnation=3, clock=2)
    assert log.waiting_for() == [
        "worker 0's chunks of iteration 2, on shard 0",
        "worker 1, to commit iteration 2",
        "worker 2, to commit iteration 2",
    ]


def test_workers_that_step_other_optimizers_are_told() -> None:
    log = log_of("bsp")
    for worker in (0, 1):
        contribute(log, worker, worker + 1, 0)
    log.handle_step(0, say(1, 0, optimizer=1, stays=True))
    line = "worker 1 makes the step of optimizer 0 of session.prepare's list, and worker 0 of optimizer 1"
    assert line in log.handle_step(1, say(2, 0, stays=True)).refused
    log.handle_step(1, say(2, 0, optimizer=1, stays=True))
    log.handle_step(0, say(1, 1))
    refused = log.handle_commit(1, commit(2, 1)).refused
    assert refused == (
        "worker 1 commits iteration 1, and worker 0 steps the mean before with one more optimizer: in "
        "synchronous training all workers step the same ones"
    )


def test_who_steps_a_mean_that_another_has_left_is_told() -> None:
    log = log_of("bsp")
    for worker in (0, 1):
        contribute(log, worker, worker + 1, 0)
    steps(log, 0, stays=True)
    log.handle_commit(0, commit(1, 1))
    assert "which has no mean yet" in log.handle_step(1, say(2, 1)).refused


def test_a_mean_that_stays_goes_with_the_last_of_its_workers() -> None:
    log = log_of("bsp")
    for worker in (0, 1):
        contribute(log, worker, worker + 1, 0)
    steps(log, 0, stays=True)
    log.handle_fence(0, 1)
    (entry,) = log.handle_step(1, say(2, 1, stays=True)).entries
    assert isinstance(entry, StepWithMean)
    log.handle_join(2, 3)
    assert log.handle_fence(1, 2).entries[-1] == Joined(worker=2, incarnation=3, clock=2)


def test_workers_that_write_other_values_are_told() -> None:
    log = log_of("bsp")
    for worker in (0, 1):
        contribute(log, worker, worker + 1, 0)
    log.handle_step(0, say(1, 0, written=[3], writes="a"))
    for how in ({"written": [3], "writes": "b"}, {}):
        refused = log.handle_step(1, say(2, 0, **how)).refused
        assert (
            "they have written different values into parameters, or one of them has written none" in refused
        )
    (entry,) = log.handle_step(1, say(2, 0, written=[3], writes="a")).entries
    assert isinstance(entry, StepWithMean)
    assert (entry.written, entry.editor) == ([3], 0)


def test_who_has_just_joined_need_not_have_written_what_the_others_have() -> None:
    log = log_of("bsp")
    for worker in (0, 1):
        contribute(log, worker, worker + 1, 0)
    log.handle_fence(0, 1)
    log.handle_step(1, say(2, 0))
    log.handle_join(0, 3)
    contribute(log, 1, 2, 1)
    log.handle_step(1, say(2, 1))
    contribute(log, 0, 3, 2)
    contribute(log, 1, 2, 2)
    log.handle_step(0, say(3, 2))
    (entry,) = log.handle_step(1, say(2, 2, written=[3], writes="a")).entries
    assert isinstance(entry, StepWithMean)
    assert (entry.written, entry.editor) == ([3], 1)
    for worker, incarnation in ((0, 3), (1, 2)):
        contribute(log, worker, incarnation, 3)
    log.handle_step(0, say(3, 3))
    assert "written different values" in log.handle_step(1, say(2, 3, written=[3], writes="a")).refused


UNLIKE = [
    {"optimizer": 1},
    {"stays": True},
    {"scale": 0.5},
    {"accepted": False},
    {"edited": [1]},
    {"hyperparameters": [{**LR[0], "lr": 0.2}]},
]


def log_with_a_newcomer(newcomer: int) -> CommitLog:
    """Worker `newcomer` of three has joined, as incarnation 9, with the iteration 1 that is combined."""
    log = log_of("bsp", workers=3)
    others = [worker for worker in range(3) if worker != newcomer]
    log.handle_fence(newcomer, newcomer + 1)
    log.handle_join(newcomer, 9)
    for worker in others:
        contribute(log, worker, worker + 1, 0)
    for worker in others:
        log.handle_step(worker, say(worker + 1, 0))
    for worker in others:
        contribute(log, worker, worker + 1, 1)
    contribute(log, newcomer, 9, 1)
    return log


@pytest.mark.parametrize("changes", UNLIKE)
@pytest.mark.parametrize("spoken", range(3))
@pytest.mark.parametrize("newcomer", [0, 2])
def test_of_a_newcomer_and_the_others_that_step_differently_the_newcomer_is_refused(
    newcomer: int, spoken: int, changes: dict[str, object]
) -> None:
    log = log_with_a_newcomer(newcomer)
    order = [worker for worker in range(3) if worker != newcomer]
    order.insert(spoken, newcomer)
    refused = []
    for worker in order:
        is_new = worker == newcomer
        word = say(9, 1, **changes) if is_new else say(worker + 1, 1)
        outcome = log.handle_step(worker, word)
        assert not outcome.mismatch
        assert is_new or not outcome.refused
        refused += [outcome.refused] if outcome.refused else []
        for reply in outcome.replies:
            assert isinstance(reply.message, messages.Refused)
            assert (reply.worker, reply.incarnation, reply.message.request) == (newcomer, 9, "Step")
            refused.append(reply.message.reason)
        assert not outcome.entries
    (reason,) = refused
    assert f"worker {newcomer} " in reason
    assert log.waiting_for() == [f"worker {newcomer}, to step iteration 1"]
    again = say(9, 1, **changes)  # sent again, it is refused again
    assert log.handle_step(newcomer, again).refused
    entry = log.handle_fence(newcomer, 9).entries[-1]
    assert isinstance(entry, StepWithMean)
    assert (entry.optimizer, entry.scale, entry.accepted, entry.hyperparameters) == (0, 1.0, True, LR)


def test_the_word_of_a_newcomer_that_is_gone_counts_only_if_the_others_say_the_same() -> None:
    log = log_with_a_newcomer(0)
    log.handle_step(0, say(9, 1, optimizer=1))
    log.handle_fence(0, 9)
    assert not log.handle_step(1, say(2, 1)).refused
    (entry,) = log.handle_step(2, say(3, 1)).entries
    assert isinstance(entry, StepWithMean)
    assert entry.optimizer == 0


def test_each_optimizer_has_an_open_step_of_its_own() -> None:
    log = log_of("asp")
    seen = []
    for worker, iteration, optimizer in ((0, 0, 0), (0, 1, 1), (1, 0, 0), (1, 1, 1)):
        log.handle_staged(0, worker, worker + 1, iteration)
        told = msgspec.structs.replace(commit(worker + 1, iteration), optimizer=optimizer)
        (entry,) = log.handle_commit(worker, told).entries
        assert isinstance(entry, Apply)
        seen.append((entry.optimizer, entry.part, entry.opens, entry.closes))
    assert seen == [
        (0, 1.0, True, False),
        (1, 1.0, True, False),
        (0, 0.5, False, True),
        (1, 0.5, False, True),
    ]


def test_a_member_fenced_before_the_mean_is_left_out_and_one_fenced_after_counts() -> None:
    log = log_of("bsp", workers=3)
    for worker in range(3):
        log.handle_staged(0, worker, worker + 1, 0)
    log.handle_commit(0, commit(1, 0, used=10))
    log.handle_commit(1, commit(2, 0, used=20))
    outcome = log.handle_fence(1, 2)
    assert outcome.entries == [Fenced(worker=1, incarnation=2)]
    outcome = log.handle_commit(2, commit(3, 0, used=30))
    (combine,) = outcome.entries
    assert isinstance(combine, Combine)
    assert [member.worker for member in combine.members] == [0, 2]
    outcome = log.handle_fence(2, 3)
    assert log.used.of(1, 2).used == []
    assert log.used.of(2, 3).used == [Used(sampler=0, epoch=0, start=30, stop=31)]
    assert log.used.of(2, 3).iteration == 1
    assert isinstance(log.handle_step(0, say(1, 0)).entries[0], StepWithMean)
    assert log.handle_commit(2, commit(3, 1)).refused
    assert log.handle_join(2, 3).refused


def test_workers_that_step_differently_are_told_what_differs() -> None:
    log = log_of("bsp")
    contribute(log, 0, 1, 0)
    contribute(log, 1, 2, 0)
    log.handle_step(0, say(1, 0))
    for changes, words in [
        ({"scale": 0.25}, "worker 1 multiplies the gradients by 0.25, and worker 0 by 1: clip by session"),
        ({"accepted": False}, "worker 0 makes the step, and worker 1 leaves it out .* equally many"),
        ({"edited": [1]}, "changed the gradients .* of different parameters"),
        ({"hyperparameters": []}, "worker 0 steps 1 param groups, worker 1 0 at step 0"),
        ({"hyperparameters": [{**LR[0], "lr": 0.2}]}, r"worker 1 with lr 0.2 at step 0 \(param group 0\)"),
    ]:
        outcome = log.handle_step(1, say(2, 0, **changes))
        if "hyperparameters" in changes:  # all are to know
            assert re.match(f"worker 0 .*{words}|{words}", outcome.mismatch)
            assert not outcome.entries
            continue
        assert outcome.refused.startswith("worker 1 and worker 0")
        assert re.search(words, outcome.refused)
        assert not outcome.entries
    assert log.handle_step(1, say(2, 0)).entries


def test_equal_steps_may_hold_nan() -> None:
    log = log_of("bsp")
    contribute(log, 0, 1, 0)
    contribute(log, 1, 2, 0)
    log.handle_step(0, say(1, 0, scale=float("nan"), accepted=False))
    assert log.handle_step(1, say(2, 0, scale=float("nan"), accepted=False)).entries


def test_who_joins_late_enters_with_the_next_iteration() -> None:
    log = log_of("bsp", workers=1)
    assert log.handle_join(1, 2).entries == []
    assert "waits to enter" in log.handle_commit(1, commit(2, 0)).refused
    contribute(log, 0, 1, 0)
    outcome = log.handle_step(0, say(1, 0))
    assert outcome.entries[1:] == [Joined(worker=1, incarnation=2, clock=1)]
    assert log.waiting_for() == ["worker 0, to commit iteration 1", "worker 1, to commit iteration 1"]


def test_a_rank_that_comes_anew_fences_what_it_was() -> None:
    log = log_of("bsp", workers=2)
    outcome = log.handle_join(1, 7)
    assert outcome.entries == [Fenced(worker=1, incarnation=2)]
    assert log.handle_fence(1, 2).entries == []
    assert log.handle_join(1, 2).refused
    assert log.live == {0: 1}


def test_an_iteration_whose_workers_all_died_begins_anew_and_a_mean_without_any_is_left_out() -> None:
    log = log_of("bsp", workers=1)
    log.handle_fence(0, 1)
    assert log.handle_join(0, 2).entries == [Joined(worker=0, incarnation=2, clock=0)]
    contribute(log, 0, 2, 0)
    outcome = log.handle_fence(0, 2)
    (_, step) = outcome.entries
    assert isinstance(step, StepWithMean)
    assert not step.accepted
    assert log.handle_join(0, 3).entries == [Joined(worker=0, incarnation=3, clock=1)]


def test_the_word_of_one_who_died_after_it_said_step_counts() -> None:
    log = log_of("bsp", workers=1)
    log.handle_join(1, 2)
    contribute(log, 0, 1, 0)
    log.handle_step(0, say(1, 0))
    contribute(log, 0, 1, 1)
    contribute(log, 1, 2, 1)
    log.handle_step(0, say(1, 1, edited=[4]))
    log.handle_fence(0, 1)
    assert log.handle_step(1, say(2, 1, edited=[5])).refused
    (step,) = log.handle_step(1, say(2, 1, edited=[4])).entries
    assert isinstance(step, StepWithMean)
    assert step.editor == 0


def test_the_run_begins_when_as_many_are_there_as_it_begins_with() -> None:
    log = CommitLog.begin("asp", 0, 3, 1)
    log.handle_join(0, 1)
    assert log.waiting_for() == ["worker 1 and worker 2 to join (1 of 3 workers are there)"]
    log.handle_join(1, 2)
    assert log.handle_fence(1, 2).entries == [Fenced(worker=1, incarnation=2)]
    there = "1 of 3 workers are there; worker 1 died or left before the run began"
    assert log.waiting_for() == [f"worker 1 and worker 2 to join ({there})"]
    many = CommitLog.begin("asp", 0, 10_000, 1)
    for worker in range(9_000):
        many.handle_fence(worker, 1)
    gone = "worker 0 and worker 1 and worker 2 and worker 3 and 8996 more died or left before the run began"
    assert many.waiting_for() == [f"10000 workers to join (0 of 10000 workers are there; {gone})"]
    assert log.handle_join(2, 3).entries == []
    assert [type(entry) for entry in log.handle_join(3, 4).entries] == [Joined, Joined, Joined]


# -- the log, SSP and ASP ---------------------------------------------------------------------------------


def applies(log: CommitLog) -> list[Apply]:
    return [entry for entry in log.lines.entries if isinstance(entry, Apply)]


def test_as_many_contributions_as_workers_make_one_step() -> None:
    log = log_of("asp", workers=3)
    for worker, iteration, weight in [(0, 0, 2.0), (0, 1, 6.0), (1, 0, 8.0), (0, 2, 2.0)]:
        contribute(log, worker, worker + 1, iteration, weight)
    found = [(entry.opens, entry.closes, entry.part) for entry in applies(log)]
    assert found == [(True, False, 1.0), (False, False, 0.75), (False, True, 0.5), (True, False, 1.0)]


def test_what_is_stale_weighs_less_in_its_step() -> None:
    log = log_of("asp", workers=3)
    for worker, iteration in [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (0, 4), (0, 5), (2, 0)]:
        contribute(log, worker, worker + 1, iteration, weight=2.0)
    jittered, late = applies(log)[4], applies(log)[7]
    assert jittered.staleness == 1.0  # four by others, two others live: 4 / 2 - 1
    assert jittered.part == 0.5  # as much as the one before it
    assert late.staleness == 2.5
    assert late.part == pytest.approx(1 / 3.5)


def test_contributions_without_weight_count_for_the_step_and_are_no_part_of_it() -> None:
    log = log_of("asp", workers=3)
    for worker, weight in [(0, 0.0), (1, 4.0), (2, 0.0)]:
        contribute(log, worker, worker + 1, 0, weight)
    found = [(entry.opens, entry.closes, entry.part) for entry in applies(log)]
    assert found == [(True, False, 0.0), (False, False, 1.0), (False, True, 0.0)]


def test_a_steps_learning_rate_is_the_mean_of_its_contributions() -> None:
    """Else the slowest worker, whose schedule is early, would make every step of its own a large one."""
    log = log_of("asp", workers=3)
    settings = [
        {"lr": 1, "betas": [0.9, 0.5], "fused": True, "steps": 3, "momentum": 0.25},
        {"lr": 0.5, "betas": (0.9, 1.0), "fused": False, "steps": 8, "momentum": None},
        {"lr": 0.0, "betas": [0.9, 0.5], "fused": False, "steps": 8, "nesterov": 0.5},
    ]
    for worker, (weight, group) in enumerate(zip([1.0, 3.0, 0.0], settings, strict=True)):
        log.handle_staged(0, worker, worker + 1, 0)
        incarnation, plain = worker + 1, [group]
        log.handle_commit(
            worker, Commit(incarnation=incarnation, iteration=0, weight=weight, hyperparameters=plain)
        )
    first, second, third = ([dict(each) for each in entry.hyperparameters] for entry in applies(log))
    assert first == [settings[0]]
    assert second == [{**settings[1], "lr": 0.625, "betas": [0.9, 0.875]}]
    assert third == [{**settings[2], "lr": 0.625, "betas": [0.9, 0.875]}]


def test_a_step_has_enough_when_those_it_waited_for_are_gone() -> None:
    log = log_of("asp", workers=3)
    contribute(log, 0, 1, 0)
    contribute(log, 1, 2, 0)
    log.handle_fence(2, 3)
    contribute(log, 1, 2, 1)
    assert [(e.opens, e.closes) for e in applies(log)] == [(True, False), (False, False), (True, False)]
    log.handle_join(2, 9)
    log.handle_join(3, 10)
    for iteration in (1, 2, 3):  # it begins where the slowest is
        contribute(log, 2, 9, iteration)
    assert [e.closes for e in applies(log)][3:] == [False, False, True]  # four take part now
    log.handle_fence(2, 9)
    log.handle_fence(3, 10)
    log.handle_fence(1, 2)
    contribute(log, 0, 1, 1)
    assert (applies(log)[-1].opens, applies(log)[-1].closes) == (True, True)  # alone


def test_a_contribution_waits_for_all_shards_and_for_the_one_before() -> None:
    log = log_of("ssp", workers=1, shards=2)
    assert log.handle_commit(0, commit(1, 0)).entries == []
    assert log.handle_commit(0, commit(1, 1)).entries == []
    assert "in flight" in log.handle_commit(0, commit(1, 2)).refused
    assert "its next is 2" in log.handle_commit(0, commit(1, 5)).refused
    for shard in (0, 1):
        assert log.handle_staged(shard, 0, 1, 1).entries == []
    log.handle_staged(0, 0, 1, 0)
    assert log.waiting_for() == ["worker 0's chunks of iteration 0, on shard 1"]
    outcome = log.handle_staged(1, 0, 1, 0)
    assert [e.iteration for e in outcome.entries if isinstance(e, Apply)] == [0, 1]


def test_who_comes_back_begins_where_the_slowest_is() -> None:
    log = log_of("ssp", workers=2)
    for iteration in range(3):
        contribute(log, 0, 1, iteration)
    contribute(log, 1, 2, 0)
    assert log.handle_join(2, 9).entries == [Joined(worker=2, incarnation=9, clock=1)]
    log.handle_fence(2, 9)
    log.handle_fence(1, 2)
    assert log.handle_join(1, 3).entries == [Joined(worker=1, incarnation=3, clock=3)]
    log.handle_fence(0, 1)
    log.handle_fence(1, 3)
    assert log.handle_join(4, 4).entries == [Joined(worker=4, incarnation=4, clock=3)]


def test_what_has_no_place_in_the_log_is_refused() -> None:
    log = log_of("asp", workers=1)
    assert log.handle_commit(5, commit(9, 0)).refused == "worker 5 of incarnation 9 has not joined"
    assert log.handle_commit(0, commit(1, 0, weight=float("inf"))).refused
    assert log.handle_step(0, say(1, 0)).refused
    assert log.handle_staged(3, 0, 1, 0).refused
    assert len(log.lines.entries) == 1
    with pytest.raises(ValueError, match="bsp, ssp, asp"):
        CommitLog.begin("eventual", 0, 1, 1)


def test_shards_without_trainable_chunks_are_not_waited_for() -> None:
    log = CommitLog.begin("asp", 0, 1, 3, holders=[1])
    log.handle_join(0, 1)
    log.handle_commit(0, commit(1, 0))
    assert isinstance(log.handle_staged(1, 0, 1, 0).entries[0], Apply)
    empty = ShardState.begin([], "asp", 0)
    for entry in log.lines.entries:
        assert all(
            not action.chunks for action in empty.handle_entry(entry) if isinstance(action, ApplyChunks)
        )
    assert Pulls(empty).ask(PullRequest(0, Pull(incarnation=1, clock=1)))


def test_the_log_forgets_what_all_have() -> None:
    log = log_of("asp", workers=1)
    for iteration in range(5):
        contribute(log, 0, 1, iteration)
    log.lines.forget(4)
    assert log.lines.next_sequence == 6
    assert [sequence for sequence, _ in log.lines.after(4)] == [4, 5]
    assert log.lines.after(6) == []
    with pytest.raises(ValueError, match="forgotten"):
        log.lines.after(3)


def test_what_is_used_is_reported_once_and_told_whole_at_the_fence() -> None:
    log = log_of("asp", workers=1)
    for iteration, position in enumerate([4, 5, 9]):
        log.handle_staged(0, 0, 1, iteration)
        log.handle_commit(0, commit(1, iteration, used=position))
    (news,) = log.used.take_news()
    assert [(part.start, part.stop) for part in news.used] == [(4, 6), (9, 10)]
    assert log.used.take_news() == []
    log.handle_commit(0, commit(1, 3, used=11))  # not staged: does not count
    log.handle_fence(0, 1)
    assert [(part.start, part.stop) for part in log.used.of(0, 1).used] == [(4, 6), (9, 10)]


def test_what_the_hub_has_not_been_told_stays_small_while_it_is_gone() -> None:
    log = log_of("asp", workers=1)
    for iteration in range(2000):
        log.handle_staged(0, 0, 1, iteration)
        log.handle_commit(0, commit(1, iteration, used=iteration))
    (news,) = log.used.take_news()
    assert [(part.start, part.stop) for part in news.used] == [(0, 2000)]
    assert news.iteration == 2000


# -- meetings ---------------------------------------------------------------------------------------------


def test_a_meeting_takes_place_when_all_who_live_have_come() -> None:
    log = log_of("asp", workers=3)
    assert not log.handle_meet(2, 3, 0, "mean", 52).met
    assert not log.handle_meet(0, 1, 0, "mean", 50).met
    assert log.handle_meet(0, 1, 0, "mean", 99).released == [99]
    assert log.waiting_for() == ["worker 1, to come to 'mean'"]
    refused = log.handle_meet(1, 2, 0, "barrier", 51)
    assert "for 'barrier', others for 'mean'" in refused.refused
    assert refused.released == [51]
    outcome = log.handle_fence(2, 3)
    assert outcome.released == [52]
    assert not outcome.met
    (meeting,) = log.handle_meet(1, 2, 0, "mean", 51).met
    assert (meeting.workers, meeting.incarnations, meeting.handles) == ([0, 1], [1, 2], [50, 51])
    late = log.handle_join(2, 4)
    assert not late.refused
    assert "the next is 1" in log.handle_meet(2, 4, 0, "mean", 60).refused
    log.handle_meet(0, 1, 1, "mean", 70)
    assert log.handle_meet(1, 2, 1, "mean", 71).met  # who came late is not waited for before its first


def at(name: str, worker: int, line: str = "train.py:5") -> messages.WorkerStand:
    return messages.WorkerStand(worker, call(name, line))


def test_calls_of_other_lines_never_combine() -> None:
    log = log_of("asp")
    log.handle_meet(0, 1, 0, "reduce", 10, at("session.reduce", 0, "train.py:5"))
    outcome = log.handle_meet(1, 2, 0, "reduce", 11, at("session.reduce", 1, "train.py:7"))
    assert outcome.mismatch.startswith(
        "worker 0 is in session.reduce (train.py:5); worker 1 is in session.reduce (train.py:7). "
    )
    assert (outcome.refused, outcome.met, outcome.released) == ("", [], [11])


def test_who_came_after_another_had_ended_may_meet_without_it() -> None:
    """A worker that was started again when the others had ended has calls to make, and nobody to make them
    with; one that was there with it waits in vain."""
    log = log_of("asp")
    done = messages.WorkerStand(0, end(7, "train.py:9"))
    assert log.handle_end(0, 1, done).replies[0].message == messages.Ended()
    assert not log.handle_end(0, 1, done).mismatch  # said again
    log.handle_fence(0, 1)
    kept = msgspec.msgpack.encode(log)
    log = msgspec.msgpack.decode(kept, type=CommitLog)
    log.handle_join(2, 9)
    log.handle_entered(2, 9, 0)
    assert not log.handle_meet(2, 9, 0, "session.save", 10, at("session.save", 2)).mismatch
    said = log.handle_meet(1, 2, 0, "session.save", 11, at("session.save", 1)).mismatch
    assert said.startswith(
        "worker 0 is at the end of its session after 7 steps (train.py:9); workers 1 and 2 are in "
    )


def test_a_place_that_a_journal_does_not_have_is_no_mismatch() -> None:
    log, meetings = log_of("bsp"), log_of("asp")
    meetings.handle_meet(0, 1, 0, "session.save", 10, at("session.save", 0))
    log.handle_commit(1, commit(2, 0))
    assert not deadlock(meetings.meeting_waits(), log.iteration_waits())
    stand = messages.WorkerStand(1, gradients(0, "train.py:3"))
    log = log_of("bsp")
    log.handle_commit(1, msgspec.structs.replace(commit(2, 0), stand=stand))
    said = deadlock(meetings.meeting_waits(), log.iteration_waits())
    assert said.startswith(
        "worker 0 is in session.save (train.py:5); worker 1 is at the gradients of step 0 (train.py:3). "
    )


@pytest.mark.parametrize("consistency", ["bsp", "ssp", "asp"])
def test_who_dies_before_the_run_begins_is_waited_for_to_come_anew(consistency: str) -> None:
    log = CommitLog.begin(consistency, 1, 2, 1)
    log.handle_join(0, 1)
    log.handle_meet(0, 1, 0, "start", 50)
    assert log.handle_fence(0, 1).released == [50]
    log.handle_fence(5, 9)  # given up before it came here
    assert log.handle_join(1, 2).entries == []
    assert not log.handle_meet(1, 2, 0, "start", 51).met
    there = "1 of 2 workers are there; worker 0 and worker 5 died or left before the run began"
    assert log.met_by() == [f"worker 0 to join ({there})"]
    begun = [Joined(worker=0, incarnation=3, clock=0), Joined(worker=1, incarnation=2, clock=0)]
    assert log.handle_join(0, 3).entries == begun
    (meeting,) = log.handle_meet(0, 3, 0, "start", 52).met
    assert meeting.workers == [0, 1]
    log.handle_fence(0, 3)
    assert log.handle_meet(1, 2, 1, "next", 53).met  # once begun, nobody is waited for in vain


def test_a_fence_can_complete_a_meeting() -> None:
    log = log_of("bsp", workers=2)
    log.handle_meet(0, 1, 0, "save", 50)
    assert [meeting.workers for meeting in log.handle_fence(1, 2).met] == [[0]]
