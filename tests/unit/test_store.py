"""The store's decisions by example: what is said, refused and answered, in plain cases."""

from __future__ import annotations

import re

import msgspec
import pytest

from atoll.core.errors import UserError
from atoll.core.stands import call, end, gradients
from atoll.store.entries import (
    Apply,
    Combine,
    Entry,
    Fenced,
    Idle,
    Joined,
    Member,
    Step,
    decode_entry_untrusted,
    encode_entry,
)
from atoll.store.leases import Leases
from atoll.store.log import CommitLog
from atoll.store.members import Membership
from atoll.store.outcomes import Outcome, StoreError
from atoll.store.pulls import Asked, Pulls
from atoll.store.shard import (
    ApplyChunks,
    CombineChunks,
    Release,
    ShardState,
    StepChunks,
)
from atoll.store.waits import deadlock
from atoll.wire import messages
from atoll.wire.messages import Commit, Committed, Lease, Leased, Pull, PullMean, Push, Replace, Used

LR = [{"lr": 0.1, "betas": [0.9, 0.999]}]


def commit(incarnation: int, iteration: int, weight: float = 1.0, used: int = -1) -> messages.Commit:
    parts = [Used(sampler=0, epoch=0, start=used, stop=used + 1)] if used >= 0 else []
    return messages.Commit(
        incarnation=incarnation, iteration=iteration, weight=weight, hyperparameters=LR, used=parts
    )


def say(incarnation: int, iteration: int, **changes: object) -> messages.Step:
    fields = {"scale": 1.0, "hyperparameters": LR, **changes}
    return messages.Step(incarnation=incarnation, iteration=iteration, **fields)  # type: ignore[arg-type]


def log_of(consistency: str, workers: int = 2, shards: int = 1, slack: int = 1) -> CommitLog:
    """All have joined: worker w with incarnation w + 1."""
    log = CommitLog.begin(consistency, slack, workers, shards)
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
        Member(worker=0, incarnation=1, weight=3.0, samples=0.0),
        Member(worker=1, incarnation=2, weight=1.0, samples=0.0),
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
        Step(iteration=0, scale=0.5, hyperparameters=LR, edited=[2], editor=0, accepted=True)
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

    def lines(iteration: int, grouping: int) -> list[Entry]:
        log.handle_staged(0, 0, 1, iteration)
        entries = log.handle_commit(0, grouped(1, iteration, grouping)).entries
        return [entry for entry in entries if not isinstance(entry, Apply)]

    assert lines(0, 0) == []
    assert lines(1, 1) == [Idle(worker=0, incarnation=1, idle=True)]
    assert log.handle_commit(0, grouped(1, 1, 1)).entries == []  # said again, and counted before
    assert lines(2, 1) == [Idle(worker=0, incarnation=1, idle=False)]  # it has stayed where it was
    assert lines(3, 1) == []
    # Who comes with a grouping is not told of it.
    log.handle_join(7, 20)
    log.handle_staged(0, 7, 20, 0)
    entries = log.handle_commit(7, grouped(20, 0, 1)).entries
    assert [type(entry) for entry in entries] == [Apply]


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
    assert isinstance(log.handle_step(0, say(1, 0)).entries[0], Step)
    assert log.handle_commit(2, commit(3, 1)).refused
    assert log.handle_join(2, 3).refused


def test_workers_that_step_differently_are_told_what_differs() -> None:
    log = log_of("bsp")
    contribute(log, 0, 1, 0)
    contribute(log, 1, 2, 0)
    log.handle_step(0, say(1, 0))
    for changes, words in [
        ({"scale": 0.25}, "scale is 0.25 and 1.0"),
        ({"accepted": False}, "accepted is False and True"),
        ({"edited": [1]}, r"edited chunks are \[1\] and \[\]"),
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
    assert isinstance(step, Step)
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
    assert isinstance(step, Step)
    assert step.editor == 0


def test_the_run_begins_when_as_many_are_there_as_it_begins_with() -> None:
    log = CommitLog.begin("asp", 0, 3, 1)
    log.handle_join(0, 1)
    assert log.waiting_for() == ["2 of 3 workers, to join"]
    log.handle_join(1, 2)
    assert log.handle_fence(1, 2).entries == [Fenced(worker=1, incarnation=2)]
    gone = "(of those who came, worker 1 died or left before the run began)"
    assert log.waiting_for() == [f"2 of 3 workers, to join {gone}"]
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
    assert Pulls(empty).ask(Asked(0, Pull(incarnation=1, clock=1)))


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
    missing = "1 of 2 workers, to join (of those who came, workers 0, 5 died or left before the run began)"
    assert log.met_by() == [missing]
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


# -- a shard ----------------------------------------------------------------------------------------------


def push(chunk: int, iteration: int = 0, incarnation: int = 1, chunks: int = 2) -> Push:
    return Push(
        incarnation=incarnation, iteration=iteration, chunk=chunk, chunks_in_all=chunks, present=b"\1"
    )


def joined(state: ShardState, *workers: int) -> ShardState:
    for worker in workers:
        state.handle_entry(Joined(worker=worker, incarnation=worker + 1, clock=0))
    return state


def applied(worker: int, iteration: int, incarnation: int = 1) -> Apply:
    return Apply(
        worker=worker,
        incarnation=incarnation,
        iteration=iteration,
        weight=1.0,
        samples=1.0,
        part=0.5,
        opens=False,
        closes=True,
        staleness=0.25,
        hyperparameters=LR,
    )


def test_a_contribution_is_staged_applied_and_released() -> None:
    state = joined(ShardState.begin([3, 5], "asp", 0), 0)
    pulls = Pulls(state)
    assert not state.handle_push(0, push(3), 10).staged
    assert state.handle_push(0, push(3), 11) == state.handle_push(0, push(3), 12)
    assert state.handle_push(0, push(5), 13).staged
    assert state.whole() == [(0, 1, 0)]
    assert not pulls.ask(Asked(0, Pull(incarnation=1, clock=1)))
    apply, release = state.handle_entry(applied(0, 0))
    assert apply == ApplyChunks(
        worker=0,
        incarnation=1,
        iteration=0,
        chunks={3: (10, b"\1"), 5: (13, b"\1")},
        part=0.5,
        opens=False,
        closes=True,
        hyperparameters=LR,
        staleness=0.25,
    )
    assert release == Release([10, 13])
    assert state.versions == {3: 1, 5: 1}
    assert pulls.take_ready() == [Asked(0, Pull(incarnation=1, clock=1))]
    assert pulls.take_ready() == []
    assert (state.clock_of(0), state.staleness_of(0)) == (1, 0.25)
    late = state.handle_push(0, push(3), 14)
    assert (late.keep, late.refused) == (False, "")


def test_a_shard_refuses_what_it_cannot_keep() -> None:
    state = joined(ShardState.begin([3, 5], "asp", 0, limit=2), 0)
    pulls = Pulls(state)
    assert "does not hold chunk 4" in state.handle_push(0, push(4), 1).refused
    assert "announced" in state.handle_push(0, push(3, chunks=3), 1).refused
    assert "announced" in state.handle_push(0, push(3, chunks=0), 1).refused
    assert state.handle_push(0, push(3, 0), 1).keep
    assert "announced" in state.handle_push(0, push(5, 0, chunks=1), 1).refused
    assert state.handle_push(0, push(3, 1), 2).keep
    assert "in flight" in state.handle_push(0, push(3, 2), 3).refused
    assert state.handle_push(7, push(3, 9, incarnation=8), 4).keep  # its Joined is on its way
    assert state.handle_push(7, push(3, 10, incarnation=8), 5).keep
    assert "in flight" in state.handle_push(7, push(3, 11, incarnation=8), 6).refused
    assert state.handle_entry(Fenced(worker=7, incarnation=8)) == [Release([4, 5])]
    assert "fenced" in state.handle_push(7, push(3, 9, incarnation=8), 7).refused
    assert not pulls.ask(Asked(7, Pull(incarnation=8, clock=0)))
    assert "fenced" in state.refusal(7, 8)
    assert pulls.waiting() == []


def test_a_log_that_counts_what_is_not_here_is_an_error() -> None:
    state = joined(ShardState.begin([3, 5], "asp", 0), 0)
    state.handle_push(0, push(3), 1)
    with pytest.raises(StoreError, match="not staged here"):
        state.handle_entry(applied(0, 0))
    with pytest.raises(StoreError, match="not its next"):
        state.handle_entry(applied(2, 0))
    step = Step(iteration=0, scale=1.0, hyperparameters=LR, edited=[], editor=-1, accepted=True)
    with pytest.raises(StoreError, match="no mean"):
        state.handle_entry(step)


def test_a_mean_is_pulled_edited_and_stepped() -> None:
    state = joined(ShardState.begin([3], "bsp", 0), 0, 1)
    pulls = Pulls(state)
    mean = PullMean(incarnation=1, iteration=0)
    for worker in (0, 1):
        assert state.handle_push(worker, push(3, 0, worker + 1, chunks=1), worker).staged
    assert not pulls.ask(Asked(0, mean))
    early = Replace(incarnation=1, iteration=0, chunk=3, present=b"\1")
    assert "no mean" in state.handle_replace(0, early, 9).refused
    members = [Member(worker=w, incarnation=w + 1, weight=1.0 + w, samples=2.0) for w in (0, 1)]
    combine, release = state.handle_entry(Combine(iteration=0, members=members))
    assert combine == CombineChunks(0, [(1.0, {3: (0, b"\1")}), (2.0, {3: (1, b"\1")})], 3.0, 4.0, alike=2.0)
    assert release == Release([0, 1])
    assert pulls.take_ready() == [Asked(0, mean)]
    assert state.handle_replace(0, early, 9).keep
    assert not state.handle_replace(0, early, 10).keep
    step = Step(iteration=0, scale=0.5, hyperparameters=LR, edited=[3], editor=0, accepted=True)
    state.handle_entry(Fenced(worker=0, incarnation=1))  # what it made of the mean stays
    stepped = state.handle_entry(step)
    assert stepped == [StepChunks(0, 0.5, LR, {3: (9, b"\1")}, True), Release([9])]
    assert pulls.ask(Asked(1, Pull(incarnation=2, clock=1)))
    assert not pulls.ask(Asked(1, PullMean(incarnation=2, iteration=0)))
    assert state.versions == {3: 1}


def test_a_step_that_lacks_an_edited_chunk_is_an_error_and_one_left_out_changes_no_version() -> None:
    state = joined(ShardState.begin([3], "bsp", 0), 0)
    for iteration in (0, 1):
        state.handle_push(0, push(3, iteration, chunks=1), iteration)
    member = Member(worker=0, incarnation=1, weight=1.0, samples=1.0)
    state.handle_entry(Combine(iteration=0, members=[member]))
    missing = Step(iteration=0, scale=1.0, hyperparameters=LR, edited=[3], editor=0, accepted=True)
    with pytest.raises(StoreError, match="has not sent"):
        state.handle_entry(missing)
    left_out = Step(iteration=0, scale=1.0, hyperparameters=LR, edited=[3], editor=0, accepted=False)
    assert state.handle_entry(left_out) == [StepChunks(0, 1.0, LR, {}, False)]
    assert state.versions == {3: 0}
    assert state.steps == 1


def test_ssp_holds_the_fast_back_until_the_slow_have_come_along_or_gone() -> None:
    state = joined(ShardState.begin([3], "ssp", 1), 0, 1)
    pulls = Pulls(state)
    for iteration in range(2):
        state.handle_push(0, push(3, iteration, chunks=1), iteration)
        state.handle_entry(applied(0, iteration))
        pull = Pull(incarnation=1, clock=iteration + 1)
        assert pulls.ask(Asked(0, pull)) == (iteration == 0)
    pulls.ask(Asked(0, Pull(incarnation=1, clock=1)))  # a late duplicate displaces nothing
    assert pulls.waiting() == [Asked(0, Pull(incarnation=1, clock=2))]
    state.handle_entry(Fenced(worker=1, incarnation=2))
    assert pulls.take_ready() == [Asked(0, Pull(incarnation=1, clock=2))]


def test_a_late_duplicate_of_a_pull_leaves_the_one_that_waits() -> None:
    state = joined(ShardState.begin([3], "asp", 0), 0)
    pulls = Pulls(state)
    state.handle_push(0, push(3, 0, chunks=1), 1)
    state.handle_entry(applied(0, 0))
    assert not pulls.ask(Asked(0, Pull(incarnation=1, clock=2)))
    assert pulls.ask(Asked(0, Pull(incarnation=1, clock=1)))
    assert pulls.waiting() == [Asked(0, Pull(incarnation=1, clock=2))]


def test_who_joins_is_answered_when_it_takes_part() -> None:
    state = joined(ShardState.begin([3], "ssp", 1), 0)
    pulls = Pulls(state)
    assert not pulls.ask(Asked(5, Pull(incarnation=9, clock=0)))
    state.handle_entry(Joined(worker=5, incarnation=9, clock=4))
    assert pulls.take_ready() == []  # worker 0 is at 0: four behind
    state.handle_entry(Fenced(worker=0, incarnation=1))
    assert pulls.take_ready() == [Asked(5, Pull(incarnation=9, clock=0))]
    assert state.clock_of(5) == 4


# -- entries ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "entry",
    [
        Joined(worker=1, incarnation=2, clock=3),
        Combine(iteration=1, members=[Member(worker=0, incarnation=1, weight=2.0, samples=3.0)]),
        Step(iteration=1, scale=0.5, hyperparameters=LR, edited=[1], editor=-1, accepted=False),
        applied(0, 3),
        Fenced(worker=1, incarnation=2),
    ],
)
def test_entries_come_back_as_they_went(entry: Entry) -> None:
    raw = encode_entry(entry)
    assert decode_entry_untrusted(raw) == entry
    for bad in (raw[:-1], raw + b"\0", b"", b"\xc1", b"\x81\xa1e\xa4evil", bytes([0x91] * 5000)):
        with pytest.raises(StoreError, match="no line of a log"):
            decode_entry_untrusted(bad)


# -- leases -----------------------------------------------------------------------------------------------


def lease(count: int, incarnation: int = 1, length: int = 10, epoch: int = 0) -> Lease:
    return Lease(incarnation=incarnation, sampler=0, epoch=epoch, length=length, count=count)


def leased(start: int, stop: int, over: bool = False) -> Leased:
    return Leased(sampler=0, epoch=0, start=start, stop=stop, over=over)


def test_a_dead_workers_lease_returns_but_for_what_it_used() -> None:
    leases = Leases()
    assert leases.handle_lease(0, 1, lease(6)) == leased(0, 6)
    assert leases.handle_lease(1, 2, lease(6)) == leased(6, 10)
    leases.handle_used(1, 2, [Used(sampler=0, epoch=0, start=6, stop=10)])
    assert leases.handle_lease(1, 2, lease(6)) == leased(0, 0)  # worker 0 may yet fail
    assert leases.handle_fenced(0, 1, [Used(sampler=0, epoch=0, start=1, stop=3)]) == 4
    assert leases.handle_fenced(0, 1, []) == 0
    assert leases.handle_lease(1, 2, lease(6)) == leased(0, 1)
    assert leases.handle_lease(1, 2, lease(6)) == leased(3, 6)
    assert leases.handle_lease(1, 2, lease(6)) == leased(0, 0, over=True)
    progress = leases.progress(0, 0)
    assert (progress.used, progress.leased, progress.free) == (6, 4, 0)
    with pytest.raises(UserError, match="fenced"):
        leases.handle_lease(0, 1, lease(1))


def test_two_who_wait_for_each_other_do_not_wait() -> None:
    leases = Leases()
    leases.handle_lease(0, 1, lease(5))
    leases.handle_lease(1, 2, lease(5))
    assert not leases.handle_lease(0, 1, lease(1)).over
    assert leases.handle_lease(1, 2, lease(1)).over
    assert not leases.handle_lease(0, 1, lease(1)).over
    assert leases.handle_lease(0, 1, lease(1), patient=False).over


def test_all_must_have_the_same_data() -> None:
    leases = Leases()
    leases.handle_lease(0, 1, lease(5))
    with pytest.raises(UserError, match="12 samples in epoch 0, others have 10"):
        leases.handle_lease(1, 2, lease(5, length=12))
    assert leases.handle_lease(1, 2, lease(5, length=12, epoch=1)).stop == 5
    assert leases.handle_lease(1, 2, lease(5, length=0, epoch=2)).over


# -- membership -------------------------------------------------------------------------------------------


def test_a_lease_that_is_asked_for_twice_counts_once() -> None:
    leases = Leases()

    def ask(number: int, incarnation: int = 1) -> tuple[int, int]:
        lease = Lease(incarnation=incarnation, sampler=0, epoch=0, length=10, count=4, number=number)
        leased = leases.handle_lease(incarnation - 1, incarnation, lease)
        assert leased.number == number
        return leased.start, leased.stop

    assert [ask(1), ask(1), ask(1, 2), ask(2), ask(2)] == [(0, 4), (0, 4), (4, 8), (8, 10), (8, 10)]
    changes = leases.changes
    assert (ask(3), ask(3)) == ((0, 0), (0, 0))  # it waits for what the other has
    assert leases.changes == changes + 1
    leases.handle_fenced(1, 2, [])
    assert (ask(3), ask(3)) == ((4, 8), (4, 8))  # what gave nothing is asked again


def test_ranks_are_given_and_come_back_with_higher_incarnations() -> None:
    members = Membership(2, patience=5.0)
    first = members.handle_hello(0.0, "worker")
    assert (first.worker, first.incarnation) == (0, 1)
    assert members.handle_hello(0.0, "worker", wish=0).refused == "rank 0 is taken: its worker lives"
    assert members.handle_hello(1.0, "worker", wish=3).worker == 3
    assert members.handle_hello(1.0, "worker").worker == 1
    assert members.roll.next_deadline() == 5.0
    assert members.roll.hear(4.0, 1, iteration=7)
    assert members.roll.poll_deaths(5.9) == []
    one, three = members.roll.poll_deaths(6.0)
    assert (one[0], three[0]) == (3, 2)
    assert "worker 1 was silent for 5.0 s" in one[1]
    assert [members.workers.leave(incarnation) for incarnation in (3, 2)] == [1, 3]
    assert members.roll.poll_deaths(6.0) == []
    assert not members.roll.hear(6.0, 3)
    assert members.workers.live() == {0: 1}
    assert members.workers.members[0].iteration == 7
    assert members.workers.leave(1) == 0
    assert members.workers.leave(1) is None
    assert members.handle_hello(7.0, "worker", wish=0).incarnation == 4
    assert members.handle_hello(7.0, "worker", wish=10**9).refused
    assert members.workers.rank_of(4) == 0


def beaten(members: Membership, incarnation: int, until: float, every: float = 0.1) -> float:
    """A member that was heard regularly; when it was heard last."""
    now = 0.0
    while now + every <= until:
        now += every
        assert members.roll.hear(now, incarnation)
    return now


def test_who_was_heard_regularly_is_given_less_patience_and_never_less_than_a_stop_of_3_s() -> None:
    members = Membership(2, patience=60.0, heartbeat=0.1)
    for _ in range(2):
        members.handle_hello(0.0, "worker")
    last = beaten(members, 1, 5.0)
    assert members.roll.poll_deaths(last + 3.4) == []
    ((incarnation, reason),) = members.roll.poll_deaths(last + 3.6)
    assert incarnation == 1
    assert "worker 0 was silent for 3.6 s, and 3.5 s are borne" in reason
    assert dict(members.roll.poll_deaths(60.0)).keys() == {1, 2}  # of the other one nothing was known


def test_what_is_always_borne_can_be_more_than_that() -> None:
    members = Membership(1, patience=60.0, heartbeat=0.1, least=30.0)
    members.handle_hello(0.0, "worker")
    last = beaten(members, 1, 5.0)
    assert members.roll.poll_deaths(last + 29.9) == []
    assert members.roll.poll_deaths(last + 30.1)


def test_slow_heartbeats_are_borne() -> None:
    """A hub with a long patience asks for few: three of them may be missing at least."""
    members = Membership(1, patience=600.0, heartbeat=20.0)
    members.handle_hello(0.0, "worker")
    last = beaten(members, 1, 400.0, every=20.0)
    assert members.roll.poll_deaths(last + 59.0) == []
    assert members.roll.poll_deaths(last + 61.0)


def test_a_suspect_that_is_silent_for_two_heartbeats_is_dead() -> None:
    members = Membership(2, patience=60.0, heartbeat=1.0)
    for _ in range(2):
        members.handle_hello(0.0, "worker")
    assert not members.roll.suspect(1.0, 99)  # nobody
    assert not members.roll.suspect(1.0, 1)
    assert members.roll.next_deadline() == 2.0
    members.roll.hear(1.5, 1)  # it lives: the suspicion was wrong
    assert members.roll.poll_deaths(4.0) == []
    assert members.roll.suspect(4.0, 1)
    ((incarnation, reason),) = members.roll.poll_deaths(4.0)
    assert incarnation == 1
    assert "another member has lost touch with it" in reason


def test_who_has_no_connection_any_more_is_given_a_second_to_come_back() -> None:
    members = Membership(2, patience=60.0, heartbeat=0.25)
    members.handle_hello(0.0, "worker")
    members.roll.note_broken(99, True)  # nobody
    members.roll.note_broken(1, True)
    assert members.roll.next_deadline() == 1.5
    assert members.roll.hear(1.4, 1)  # over another connection
    assert members.roll.poll_deaths(4.0) == []
    members.roll.note_broken(1, True)
    members.roll.note_broken(1, False)
    assert members.roll.poll_deaths(4.0) == []
    members.roll.note_broken(1, True)
    ((incarnation, reason),) = members.roll.poll_deaths(4.0)
    assert incarnation == 1
    assert "was silent for 2.6 s, and its connections are broken" in reason


def test_after_the_callers_own_absence_silence_is_counted_anew() -> None:
    members = Membership(1, patience=5.0)
    members.handle_hello(0.0, "worker", token="a")
    members.roll.suspect(1.0, 1)
    other = Membership(1, patience=5.0)
    other.restore(100.0, members.state())
    for each in (members, other):
        each.roll.hear_all(100.0)
        assert each.roll.poll_deaths(104.9) == []
        assert [incarnation for incarnation, _ in each.roll.poll_deaths(105.0)] == [1]
        assert each.handle_hello(101.0, "worker", token="a").incarnation == 1  # its answer was lost
        assert each.handle_hello(101.0, "worker", token="b").incarnation == 2


def test_shards_are_known_by_index() -> None:
    members = Membership(1, patience=5.0, shards=2)
    one = members.handle_hello(0.0, "shard", shard=1, address="tcp://a:1")
    assert not one.refused
    assert members.shards.addresses() is None
    assert "at tcp://a:1" in members.handle_hello(0.0, "shard", shard=1, address="tcp://b:1").refused
    assert members.handle_hello(1.0, "shard", shard=1, address="tcp://a:1").incarnation == one.incarnation
    assert members.handle_hello(1.0, "shard", shard=2, address="tcp://a:2").refused
    assert members.handle_hello(1.0, "shard", shard=0).refused
    assert members.handle_hello(1.0, "king").refused
    zero = members.handle_hello(2.0, "shard", shard=0, address="tcp://a:0")
    assert members.shards.addresses() == ["tcp://a:0", "tcp://a:1"]
    members.roll.hear(6.0, zero.incarnation)
    assert [incarnation for incarnation, _ in members.roll.poll_deaths(6.0)] == [one.incarnation]
    assert members.shards.leave(one.incarnation) == 1
    assert members.shards.addresses() is None
    assert members.shards.live() == [0]
    assert members.shards.leave(one.incarnation) is None
    assert members.shards.leave(zero.incarnation) == 0
    assert members.shards.live() == []


def test_questions_for_some_chunks_are_joined_until_they_are_answered() -> None:
    state = ShardState.begin([0, 1, 2], "bsp", 0)
    pulls = Pulls(state)
    state.handle_entry(Joined(worker=0, incarnation=1, clock=0))
    for chunks in ([0], [2], [2]):
        assert not pulls.ask(Asked(0, Pull(incarnation=1, clock=1, chunks=chunks)))
        assert not pulls.ask(Asked(0, PullMean(incarnation=1, iteration=0, chunks=chunks)))
    assert [asked.pull.chunks for asked in pulls.waiting()] == [[0, 2], [0, 2]]
    for chunks in ([], [1]):  # all, and so that one too
        assert not pulls.ask(Asked(0, Pull(incarnation=1, clock=1, chunks=chunks)))
        assert [asked.pull.chunks for asked in pulls.waiting()] == [[], [0, 2]]


def test_a_shard_counts_the_samples_that_the_log_counts() -> None:
    """Before its journal is read again, and after it."""
    state = joined(ShardState.begin([3], "asp", 0, consumed=100.0), 0)
    assert state.handle_push(0, push(3, chunks=1), 1).staged
    state.handle_entry(applied(0, 0))
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=ShardState)
    assert again.consumed == state.consumed == 100.0 + applied(0, 0).samples
    other = joined(ShardState.begin([], "bsp", 0), 0, 1)  # a shard without chunks follows the log too
    members = [Member(worker=each, incarnation=each + 1, weight=1.0, samples=4.0) for each in (0, 1)]
    other.handle_entry(Combine(iteration=0, members=members))
    assert other.consumed == 8.0
