"""Sites by example: who is passed over, whose samples come back, who may come in, how meetings are joined."""

from __future__ import annotations

import msgspec
import pytest

from atoll.core.config import Config, Run
from atoll.core.config import Server as ServerKeys
from atoll.core.errors import RunError, UserError
from atoll.launch.checks import check_run
from atoll.launch.workers import sites_of
from atoll.server.gathered import merge_untrusted, pack, unpack_untrusted
from atoll.server.siteplace import in_sites
from atoll.store.entries import Combine, Joined, StepWithMean
from atoll.store.leases import Leases, Progress
from atoll.store.log import CommitLog
from atoll.store.members import Membership
from atoll.wire import messages
from atoll.wire.messages import Lease, Used

# -- iterations that do not wait for a meeting -------------------------------------------------------------


def loose_log(workers: int, loose: bool = True) -> CommitLog:
    log = CommitLog.begin("bsp", 0, workers, 1, loose=loose)
    for worker in range(workers):
        assert not log.handle_join(worker, worker + 1).refused
    return log


def contribute(log: CommitLog, worker: int, iteration: int) -> list[object]:
    """What it writes when a worker (of incarnation worker + 1) has staged and committed."""
    commit = messages.Commit(incarnation=worker + 1, iteration=iteration, weight=1.0)
    staged = log.handle_staged(0, worker, worker + 1, iteration)
    outcome = log.handle_commit(worker, commit)
    assert not outcome.refused
    return [*staged.entries, *outcome.entries]


def step(log: CommitLog, worker: int, iteration: int) -> list[object]:
    said = messages.Step(incarnation=worker + 1, iteration=iteration, scale=1.0, hyperparameters=[])
    outcome = log.handle_step(worker, said)
    assert not outcome.refused
    return list(outcome.entries)


def members_of(entries: list[object]) -> list[list[int]]:
    return [[m.worker for m in entry.members] for entry in entries if isinstance(entry, Combine)]


def test_one_who_waits_in_a_meeting_is_passed_over_and_joins_anew() -> None:
    log = loose_log(3)
    assert members_of(contribute(log, 0, 0) + contribute(log, 1, 0) + contribute(log, 2, 0)) == [[0, 1, 2]]
    for worker in range(3):
        step(log, worker, 0)
    assert log.handle_idle(2, 3, True).entries == []
    assert contribute(log, 0, 1) == []  # worker 1 is waited for
    assert members_of(contribute(log, 1, 1)) == [[0, 1]]
    assert step(log, 0, 1) == []
    (stepped,) = step(log, 1, 1)
    assert isinstance(stepped, StepWithMean)
    log.handle_idle(1, 2, True)
    assert members_of(contribute(log, 0, 2)) == [[0]]
    assert [type(entry) for entry in step(log, 0, 2)] == [StepWithMean]
    assert log.next_iteration == 3
    # The meeting is over: all go on together.
    log.handle_idle(0, 1, True)
    log.handle_idle(0, 1, False)
    assert log.handle_idle(2, 3, False).entries == [Joined(worker=2, incarnation=3, clock=3)]
    assert log.handle_idle(1, 2, False).entries == [Joined(worker=1, incarnation=2, clock=3)]
    assert members_of(contribute(log, 1, 3) + contribute(log, 0, 3)) == []
    assert members_of(contribute(log, 2, 3)) == [[0, 1, 2]]


def test_a_mean_waits_for_the_word_of_a_member_in_a_meeting() -> None:
    """It has contributed, and meets before its step."""
    log = loose_log(2)
    contribute(log, 0, 0)
    contribute(log, 1, 0)
    log.handle_idle(0, 1, True)
    assert step(log, 1, 0) == []
    assert log.waiting_for() == ["worker 0, to step iteration 0"]
    log.handle_idle(0, 1, False)
    assert [type(entry) for entry in step(log, 0, 0)] == [StepWithMean]


def test_one_who_returns_between_mean_and_step_joins_with_the_next_iteration() -> None:
    log = loose_log(2)
    log.handle_idle(0, 1, True)
    assert members_of(contribute(log, 1, 0)) == [[1]]
    assert log.handle_idle(0, 1, False).entries == []
    assert log.next_iteration == 1
    entries = step(log, 1, 0)
    assert entries[1:] == [Joined(worker=0, incarnation=1, clock=1)]


def test_when_the_only_one_who_goes_on_dies_its_iteration_ends_with_it() -> None:
    log = loose_log(2)
    log.handle_idle(0, 1, True)
    contribute(log, 1, 0)
    entries = log.handle_fence(1, 2).entries
    assert [type(entry) for entry in entries][1:] == [StepWithMean]
    assert not log.is_over
    assert log.handle_idle(0, 1, False).entries == [Joined(worker=0, incarnation=1, clock=1)]
    assert members_of(contribute(log, 0, 1)) == [[0]]
    log.handle_fence(0, 1)
    assert log.is_over


def test_without_levels_bsp_waits_for_everyone() -> None:
    log = loose_log(2, loose=False)
    log.handle_idle(0, 1, True)
    assert contribute(log, 1, 0) == []
    assert log.waiting_for() == ["worker 0, to commit iteration 0"]


# -- sites whose workers are gone --------------------------------------------------------------------------


def follow(log: CommitLog, worker: int, iteration: int) -> list[object]:
    """A site whose workers died with the mean says what the others say."""
    said = messages.Step(
        incarnation=worker + 1,
        iteration=iteration,
        scale=1.0,
        hyperparameters=[],
        accepted=False,
        follows=True,
    )
    outcome = log.handle_step(worker, said)
    assert not outcome.refused
    return list(outcome.entries)


@pytest.mark.parametrize("first", [True, False])
def test_one_who_follows_holds_nobody_up_and_contradicts_nobody(first: bool) -> None:
    log = loose_log(2, loose=False)
    contribute(log, 0, 0)
    contribute(log, 1, 0)
    if first:
        assert follow(log, 0, 0) == []
        assert log.waiting_for() == ["worker 1, to step iteration 0"]
        entries = step(log, 1, 0)
    else:
        assert step(log, 1, 0) == []
        entries = follow(log, 0, 0)
    assert entries == [
        StepWithMean(
            iteration=0, scale=1.0, hyperparameters=[], edited=[], editor=-1, accepted=True, nobody=False
        )
    ]
    assert follow(log, 0, 0) == []  # said again, when it is over
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(log), type=CommitLog)
    assert members_of(contribute(again, 0, 1) + contribute(again, 1, 1)) == [[0, 1]]


def test_where_all_follow_the_step_is_left_out() -> None:
    log = loose_log(2, loose=False)
    contribute(log, 0, 0)
    contribute(log, 1, 0)
    assert follow(log, 0, 0) == []
    (left_out,) = follow(log, 1, 0)
    assert isinstance(left_out, StepWithMean)
    assert (left_out.accepted, left_out.nobody) == (False, True)


# -- leases ------------------------------------------------------------------------------------------------


def test_what_a_site_s_log_counts_stays_leased_until_the_global_one_speaks() -> None:
    leases = Leases()

    def lease(worker: int, count: int) -> messages.Leased:
        asked = Lease(incarnation=worker + 1, sampler=0, epoch=0, length=20, count=count)
        return leases.handle_lease(worker, worker + 1, asked)

    def used(start: int, stop: int) -> list[Used]:
        return [Used(sampler=0, epoch=0, start=start, stop=stop)]

    lease(0, 10)
    leases.handle_used(0, 1, used(0, 2))
    assert leases.handle_fenced(0, 1, used(0, 6), final=False) == 4
    assert leases.progress(0, 0) == Progress(used=2, leased=4, free=14)
    assert (given := lease(1, 20)).start == 6  # what came back goes first
    assert given.stop == 20
    assert not lease(1, 20).over  # four may yet come back
    leases.handle_used(0, 1, used(2, 4))
    assert leases.handle_fenced(0, 1, used(0, 4)) == 2  # the site is gone, and two it never sent up
    assert leases.progress(0, 0) == Progress(used=4, leased=14, free=2)
    assert (lease(1, 20).start, lease(1, 20).over) == (4, True)


# -- who may come in ---------------------------------------------------------------------------------------


def test_sites_have_one_shard_each_and_end_for_good() -> None:
    members = Membership(3, patience=5.0, sites={"paris": 2, "berlin": 1})

    def come(site: str, address: str = "tcp://a:1", now: float = 0.0) -> str:
        return members.handle_hello(now, "site", address=address, site=site).refused

    first = members.handle_hello(0.0, "site", address="tcp://a:1", site="berlin")
    assert (first.worker, first.incarnation) == (1, 1)  # the site's index
    assert members.handle_hello(1.0, "site", address="tcp://a:1", site="berlin").incarnation == 1
    assert come("berlin", "tcp://b:1") == "site 'berlin' has a shard already, at tcp://a:1"
    assert come("rome") == "there is no site 'rome': the run has paris, berlin"
    assert come("paris", "") == "the shard of site 'paris' does not say where it is"
    assert (members.sites.address("berlin"), members.sites.address("paris")) == ("tcp://a:1", "")
    assert not members.handle_hello(0.0, "worker", site="berlin").refused
    assert members.roll.hear(4.0, 1)
    assert 1 not in dict(members.roll.poll_deaths(8.9))
    reason = dict(members.roll.poll_deaths(9.0))[1]
    assert members.sites.leave(1) == "berlin"
    assert "at tcp://a:1 was silent for 5.0 s" in reason
    assert come("berlin") == "site 'berlin' has ended, and cannot come back"
    said = members.handle_hello(9.0, "worker", site="berlin").refused
    assert said == "site 'berlin' has ended, and takes no workers any more"
    paris = members.handle_hello(9.0, "site", address="tcp://a:2", site="paris")
    assert members.sites.leave(99) == ""
    assert members.sites.leave(paris.incarnation) == "paris"
    assert members.sites.address("paris") == ""
    assert "has no sites" in Membership(1, 5.0).handle_hello(0.0, "site", address="a", site="x").refused


@pytest.mark.parametrize(
    ("workers", "sites", "expected"),
    [
        (4, 2, ["site0", "site0", "site1", "site1"]),
        (5, 2, ["site0", "site0", "site0", "site1", "site1"]),
        (3, 3, ["site0", "site1", "site2"]),
        (2, 0, ["", ""]),
    ],
)
def test_workers_are_split_evenly(workers: int, sites: int, expected: list[str]) -> None:
    config = Config(run=Run(workers=workers, sites=sites, strategy="server"))
    check_run(config)
    assert sites_of(config) == expected


def test_more_sites_than_workers_are_refused() -> None:
    with pytest.raises(UserError, match="3 sites for 2 workers"):
        check_run(Config(run=Run(workers=2, sites=3, strategy="server")))


def test_workers_are_started_again_only_where_one_may_die_alone() -> None:
    with pytest.raises(UserError, match="run.restarts: 2 restarts of a worker go with run.elastic"):
        check_run(Config(run=Run(workers=2, restarts=2)))
    check_run(Config(run=Run(workers=2, restarts=2, elastic=True)))
    check_run(Config(run=Run(workers=2, restarts=2, strategy="server")))


def test_what_a_hub_or_a_shard_would_refuse_is_refused_before() -> None:
    with pytest.raises(UserError, match=r"server.optimizer: Lion: write it as module:Class"):
        check_run(Config(run=Run(strategy="server"), server=ServerKeys(optimizer="Lion")))
    with pytest.raises(UserError, match="a run of 200000 workers: from 1 to 131072"):
        check_run(Config(run=Run(workers=200_000, elastic=True)))


def test_a_site_s_shard_comes_back_with_its_directory_and_is_the_same() -> None:
    members = Membership(2, patience=5.0, sites={"paris": 1, "berlin": 1})

    def come(now: float, address: str, token: str) -> tuple[int, str]:
        found = members.handle_hello(now, "site", address=address, site="paris", token=token)
        return found.incarnation, found.refused

    assert come(0.0, "tcp://a:1", "mine") == (1, "")
    assert come(1.0, "tcp://a:2", "other") == (0, "site 'paris' has a shard already, at tcp://a:1")
    assert come(1.0, "tcp://a:2", "") == (0, "site 'paris' has a shard already, at tcp://a:1")
    assert come(14.0, "tcp://b:1", "mine") == (1, "")  # three times the patience are borne
    assert members.sites.address("paris") == "tcp://b:1"
    again = Membership(2, patience=5.0, sites={"paris": 1, "berlin": 1})
    again.restore(20.0, members.state())
    assert again.roll.poll_deaths(34.9) == []
    assert [incarnation for incarnation, _ in again.roll.poll_deaths(35.0)] == [1]
    assert "paris" not in again.sites.ended
    assert again.sites.leave(1) == "paris"
    assert "paris" in again.sites.ended


# -- meetings and words ------------------------------------------------------------------------------------


def test_the_parts_of_sites_come_together_in_order_of_rank() -> None:
    parts = {0: b"zero", 1: b"", 2: b"\x00\x01", 5: b"five"}
    sites = [
        pack([2, 5], [memoryview(parts[2]), memoryview(parts[5])]),
        pack([0, 1], [memoryview(parts[0]), None]),
    ]
    merged = merge_untrusted(memoryview(b"".join(sites)), [len(site) for site in sites])
    assert [(worker, bytes(part)) for worker, part in merged] == sorted(parts.items())


@pytest.mark.parametrize("cut", [0, 3, 5, -1])
def test_a_part_that_is_none_is_an_error_of_one_line(cut: int) -> None:
    whole = pack([0, 1], [memoryview(b"abc"), memoryview(b"d")])
    with pytest.raises(RunError, match="^a site's part of a meeting ") as caught:
        unpack_untrusted(memoryview(whole)[:cut])
    assert "\n" not in str(caught.value)
    with pytest.raises(RunError, match="a meeting of sites names"):
        merge_untrusted(memoryview(whole), [len(whole) + 1])


def test_to_a_site_the_global_shards_workers_are_sites() -> None:
    names = ["paris", "berlin"]
    assert in_sites("worker 1's chunks of iteration 3, on shard 0", names) == (
        "site 'berlin''s chunks of iteration 3, on shard 0"
    )
    assert in_sites("worker 0 and worker 1 would step", names) == "site 'paris' and site 'berlin' would step"
    missing = "worker 0 to join (1 of 2 workers are there)"
    assert in_sites(missing, names) == "site 'paris' to join (1 of 2 sites are there)"
    assert in_sites("worker 7, to commit", names) == "worker 7, to commit"
