"""Groups at a hub, served for real: workers tell their pace, are put into groups, move, lease, and die; and
the hub is killed at each step of it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hub_parts import (
    DEADLINE,
    HEARTBEAT,
    FakeLog,
    HubProcess,
    Service,
    asked,
    client,
    hub_of,
    wait_for,
)

from atoll.core.errors import UserError
from atoll.groups import formation
from atoll.groups.chooser import Score, ScoreFunction
from atoll.groups.drift import Rules
from atoll.hub.planner import GroupingSettings, WorkerMeasurements
from atoll.net.endpoint import Client
from atoll.net.requests import RefusedError
from atoll.testing import faults
from atoll.testing.faults import Fault
from atoll.wire.messages import VERSION, Commit, Committed, Cut, Grouped, Hello, Leased, Used, Welcome

BY_SPEED = GroupingSettings(2, "speed", patience=20.0, regroup=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


class Run:
    """A hub, its log, and workers that are this process's."""

    def __init__(self, hub: Any, workers: int) -> None:
        self.hub, self.clients = hub, [client(hub, timeout=20.0) for _ in range(workers)]
        self.log = FakeLog(hub.address)
        self.welcomes = [each.join(rank) for rank, each in enumerate(self.clients)]
        self.pool = ThreadPoolExecutor(workers + 2)

    def paces(self, *paces: float) -> None:
        for each, pace in zip(self.clients, paces, strict=True):
            each.iteration = 4
            each.set_pace(pace)  # 0: its probe is under way

    def told(self, grouping: int, *ranks: int) -> None:
        """Wait until these know of it."""
        for rank in ranks:
            wait_for(lambda rank=rank: self.clients[rank].grouping >= grouping, f"worker {rank}'s grouping")

    def asks(self, rank: int, iteration: int = 4, held: list[Used] | None = None) -> Future[Grouped]:
        each = self.clients[rank]
        return self.pool.submit(each.join_group, each.grouping, iteration, held or [])

    def moved(self, *ranks: int) -> list[Grouped]:
        """These ask for their groups, and say that they have moved."""
        answers = [asked.result(DEADLINE) for asked in [self.asks(rank) for rank in ranks]]
        for rank, answer in zip(ranks, answers, strict=True):
            assert answer.group, answer.reason
            self.clients[rank].in_group(answer.contributor)
        return answers

    def key(self, rank: int) -> tuple[int, int]:
        return rank, self.welcomes[rank].incarnation

    def leave(self) -> None:
        """All workers do, while the hub is there: else each would wait for it."""
        for each in self.clients:
            with contextlib.suppress(Exception):
                each.goodbye()
            each.close()
        self.clients.clear()

    def close(self) -> None:
        self.leave()
        self.log.close()
        self.pool.shutdown(wait=False)


@contextlib.contextmanager
def run_of(folder: Path, workers: int, grouping: GroupingSettings, **options: Any) -> Iterator[Run]:
    with hub_of(folder, workers=workers, grouping=grouping, **options) as service:
        run = Run(service, workers)
        try:
            yield run
        finally:
            run.close()


def test_neighbours_in_speed_become_groups_and_their_old_selves_are_fenced(folder: Path) -> None:
    with run_of(folder, 4, BY_SPEED) as run:
        run.paces(0.1, 0.0, 0.1, 0.0)
        run.told(1, 0, 2)
        run.paces(0.1, 0.4, 0.1, 0.4)
        fast = run.moved(0, 2)
        assert [each.contributor for each in fast] == [4, 4]
        assert fast[0].workers == fast[1].workers == [0, 2]
        assert fast[0].group == fast[1].group > 0
        assert fast[0].life == fast[1].life > max(each.incarnation for each in run.welcomes)
        wait_for(lambda: run.log.fenced == {run.key(0), run.key(2)}, "the fences of those who moved")
        run.told(2, 1, 3)
        slow = run.moved(1, 3)
        assert slow[0].contributor == 5
        assert slow[0].group != fast[0].group
        wait_for(lambda: len(run.log.fenced) == 4, "the fences of the others")
        choices = [each.choice for each in run.hub.decisions("groups")]
        assert choices[:2] == ["workers 0 2", "workers 1 3"]
        assert all("samples/s by their probe" in each.reason for each in run.hub.decisions("groups")[:2])


def test_who_has_fewer_iterations_comes_last_and_is_a_newcomer(folder: Path) -> None:
    with run_of(folder, 2, GroupingSettings(1, patience=20.0, regroup=False)) as run:
        run.paces(0.1, 0.1)
        run.told(1, 0, 1)
        asked = [run.asks(0, 5), run.asks(1, 9)]
        answers = [each.result(DEADLINE) for each in asked]
        assert [(each.workers, each.newcomers) for each in answers] == [([1, 0], 1)] * 2


def test_a_group_leases_in_blocks_and_what_a_member_held_comes_along(folder: Path) -> None:
    with run_of(folder, 2, GroupingSettings(1, patience=20.0, regroup=False)) as run:
        mine = run.clients[0].lease(0, 0, 100, 10)
        run.paces(0.1, 0.1)
        run.told(1, 0, 1)
        held = [Used(sampler=0, epoch=0, start=mine.start + 6, stop=mine.stop)]
        run.log.used[run.key(0)] = [Used(sampler=0, epoch=0, start=mine.start, stop=mine.start + 6)]
        one, other = [each.result(DEADLINE) for each in (run.asks(0, held=held), run.asks(1))]
        parts = [
            run.clients[rank].lease(0, 0, 100, 5, contributor=one.contributor, block=1) for rank in (1, 0)
        ]
        assert [(each.start, each.stop, each.length) for each in parts] == [(15, 20, 5), (10, 15, 5)]
        with pytest.raises(RefusedError, match="by itself, and is one of 2 in group"):
            run.clients[0].lease(0, 0, 100, 5, contributor=one.contributor)
        with pytest.raises(RefusedError, match="samples of group 9, and is not in it"):
            run.clients[0].lease(0, 0, 100, 5, contributor=9, block=2)
        for rank in (0, 1):
            run.clients[rank].in_group(other.contributor)
        wait_for(lambda: run.log.fenced == {run.key(0), run.key(1)}, "the fences")
        wait_for(lambda: len(run.hub.decisions("fenced")) == 2, "what came of them")
        # What it held is the group's, and nothing of it is given twice.
        rest = [
            run.clients[rank].lease(0, 0, 100, 50, contributor=one.contributor, block=2) for rank in (0, 1)
        ]
        assert [(each.start, each.stop) for each in rest] == [(20, 60), (60, 100)]


def test_a_groups_batches_are_cut_as_its_first_asker_says_and_nonsense_leases_nothing(folder: Path) -> None:
    with run_of(folder, 2, GroupingSettings(1, patience=20.0, regroup=False)) as run:
        run.paces(0.1, 0.1)
        run.told(1, 0, 1)
        asked = [run.asks(rank) for rank in (0, 1)]
        group = asked[0].result(DEADLINE).contributor
        assert asked[1].result(DEADLINE).contributor == group

        def lease(rank: int, block: int, cut: Cut) -> Leased:
            return run.clients[rank].lease(0, 0, 100, 2, contributor=group, block=block, cut=cut)

        for cut, line in (
            (Cut({0: 7}), "cut in parts of which none is its own"),
            (Cut({0: 0, 1: 0}), "cut in parts of 0 samples"),
            (Cut({0: 2**31 - 1, 1: 2**31 - 1}), "cut in parts of 4294967294 samples"),
        ):
            with pytest.raises(RefusedError, match=line):
                lease(1, 1, cut)
        for rank in (1, 0):
            found = lease(rank, 1, Cut({0: 7, 1: 3 + 4 * (rank == 0), 5: 9}, 1))
            assert (found.start, found.stop, found.cut, found.workers) == (0, 20, Cut({0: 7, 1: 3}, 1), 2)


def test_a_member_that_does_not_come_costs_the_others_a_bounded_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formation, "FIRST_PAUSE", 0.5)
    settings = GroupingSettings(1, patience=2.5, regroup=False)
    with run_of(folder, 2, settings) as run:
        run.paces(0.1, 0.1)
        run.told(1, 0, 1)
        begun = time.monotonic()
        answer = run.asks(0).result(DEADLINE)
        assert answer.group == 0
        assert "worker 1 did not come to the end of an iteration in time" in answer.reason
        assert time.monotonic() - begun < 10.0
        assert run.clients[1].join_group(1, 4).group == 0  # late, and told at once
        run.told(2, 0, 1)  # and tried again
        assert [each.contributor for each in run.moved(0, 1)] == [3, 3]  # no number is used twice


def test_with_a_members_death_those_left_become_another_group(folder: Path) -> None:
    with run_of(folder, 3, GroupingSettings(1, patience=20.0, regroup=False)) as run:
        run.paces(0.1, 0.1, 0.1)
        run.told(1, 0, 1, 2)
        first = run.moved(0, 1, 2)[0]
        run.clients[1].close()
        run.told(2, 0, 2)
        again = run.moved(0, 2)
        assert again[0].workers == [0, 2]
        assert again[0].contributor == first.contributor + 1
        gone = (first.contributor, first.life)
        wait_for(lambda: gone in run.log.fenced, "the old group's fence")
        wait_for(
            lambda: any(f"group {gone[0]}" in each.choice for each in run.hub.decisions("fenced")), "words"
        )
        # The last member's end is the group's.
        run.clients[0].goodbye()
        run.clients[2].goodbye()
        last = (again[0].contributor, again[0].life)
        wait_for(lambda: last in run.log.fenced, "the last group's fence")


def test_each_groups_ring_goes_on_by_itself(folder: Path) -> None:
    """One loses a member; another a member that moves on to a third group, alone."""
    with run_of(folder, 4, GroupingSettings(2, "speed", patience=20.0, regroup=False)) as run:
        run.paces(0.1, 0.0, 0.1, 0.0)
        run.told(1, 0, 2)
        run.paces(0.1, 0.4, 0.1, 0.4)
        run.told(2, 1, 3)
        ring, other = run.moved(0, 2)[0].group, run.moved(1, 3)[0].group
        run.clients[2].close()
        wait_for(lambda: run.clients[0].news and run.clients[0].news.broken, "word of the broken ring")
        assert run.clients[0].news.group == ring  # type: ignore[union-attr]
        state = {"round": 3, "holds": True, "admits": False, "fresh": False}
        again = run.clients[0].reform(ring, 0, **state)  # type: ignore[arg-type]
        assert (again.workers, again.lost, again.round) == ([0], [2], 4)
        both = [
            run.pool.submit(run.clients[rank].reform, other, place, **state)
            for place, rank in ((0, 1), (1, 3))
        ]
        assert [each.result(DEADLINE).workers for each in both] == [[1, 3]] * 2


def test_groups_are_chosen_when_all_have_reported_and_a_late_worker_is_placed(folder: Path) -> None:
    with run_of(folder, 2, GroupingSettings(patience=20.0, regroup=False)) as run:
        run.paces(0.1, 0.1)
        run.told(1, 0, 1)
        assert run.moved(0, 1)[0].workers == [0, 1]
        reason = next(each.reason for each in run.hub.decisions("groups"))
        assert "is predicted to give 20 samples/s" in reason
        with client(run.hub) as late:
            rank = late.join().worker
            assert rank == 3  # 2 is the group's
            late.iteration = 4
            late.set_pace(0.1)
            run.clients.append(late)
            run.told(2, 0, 1, 2)
            answers = [each.result(DEADLINE) for each in (run.asks(0, 9), run.asks(1, 9), run.asks(2))]
            assert answers[0].workers == [0, 1, 3]
            assert answers[0].newcomers == 1
            run.clients.pop()


def test_workers_say_at_which_site_they_are_and_sites_are_groups(folder: Path) -> None:
    with hub_of(folder, workers=3, grouping=GroupingSettings(by="site", regroup=False)) as service:
        clients = [client(service) for _ in range(3)]
        for rank, site in enumerate(("paris", "berlin", "paris")):
            clients[rank].join(rank, site)
            clients[rank].iteration = 4
            clients[rank].set_pace(0.1)
        wait_for(lambda: service.decisions("groups"), "a grouping")
        (decision,) = service.decisions("groups")
        assert decision.choice == "workers 0 2"  # 1 is alone, as it was
        assert decision.reason.startswith("by site, as asked for: 30 samples/s are predicted")
        for each in clients:
            each.goodbye()
            each.close()


def test_links_are_measured_before_anybody_trains_and_are_known_after_a_restart(folder: Path) -> None:
    settings = GroupingSettings(by="joint", regroup=False, links=5.0, score_for=scored_by_links)
    with run_of(folder, 3, settings) as run:
        assert all(each.links for each in run.welcomes)
        for each in run.clients:
            each.wait_for_links()
            each.size, each.batch = 1000, 4.0
        (decision,) = run.hub.decisions("links")
        assert decision.choice == "1 of 1 links measured (3 workers on 1 machine)"
        assert "bit/s and" in decision.reason
        wait_for(lambda: all(each._links._server is None for each in run.clients), "the servers' end")  # type: ignore[union-attr]
        run.hub.close()
        run.hub = Service(folder, workers=3, grouping=settings, listen=run.hub.address)
        run.paces(0.1, 0.1, 0.1)
        run.told(1, 0, 1, 2)
        reason = run.hub.decisions("groups")[0].reason
        assert reason.startswith("1 of 1 links measured (3 workers on 1 machine); ")
        assert "limited by links of workers 0 1 2, 1000 bytes, 4 samples" in reason
        assert all(each.reason == decision.reason for each in run.hub.decisions("links"))  # not once more
        run.leave()
        run.hub.close()


def scored_by_links(known: WorkerMeasurements) -> ScoreFunction:
    """Says what it was given."""
    assert known.links is not None
    workers = " ".join(map(str, known.links.workers))
    said = f"links of workers {workers}, {known.size} bytes, {known.batch} samples"
    return lambda grouping: Score(6.0 - len(grouping), said)


def test_in_lock_step_all_move_and_the_old_go_together(folder: Path) -> None:
    settings = GroupingSettings(2, patience=20.0, regroup=False, consistency="bsp")
    with run_of(folder, 4, settings) as run:
        run.paces(0.1, 0.1, 0.4, 0.4)
        run.told(1, 0, 1, 2, 3)
        run.moved(0, 1)
        time.sleep(5 * HEARTBEAT)
        assert not run.log.fenced  # else an iteration could be made by a part
        run.moved(2, 3)
        wait_for(lambda: len(run.log.fenced) == 4, "the fences of all")


def test_speeds_that_drift_make_other_groups(folder: Path) -> None:
    rules = Rules(hold=0.2, interval=0.5, window=2)
    with run_of(folder, 2, GroupingSettings(patience=20.0, rules=rules)) as run:
        run.paces(0.1, 0.1)
        run.told(1, 0, 1)
        run.moved(0, 1)

        def drifts() -> bool:
            for each in run.clients:
                each.iteration += 1
            run.clients[1].set_pace(0.4)
            return run.clients[0].grouping == 2

        wait_for(drifts, "a grouping for the speeds that there are")
        run.told(2, 0, 1)
        answers = run.moved(0, 1)
        assert [each.workers for each in answers] == [[0], [1]]
        assert "worker 1 computes 2.5 samples/s, where it was 10" in run.hub.decisions("groups")[-1].reason


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"grouping": GroupingSettings(3)}, "--groups 3: from 1 to 2, the number of workers"),
        ({"grouping": GroupingSettings(2), "shards": 0}, "groups meet at a parameter server"),
        ({"grouping": GroupingSettings(2), "sites": {"a": 1, "b": 1}}, "--groups does not go with --site"),
    ],
)
def test_groups_that_cannot_be(folder: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Service(folder, workers=2, **options)


# -- a hub that is killed ---------------------------------------------------------------------------------

POINTS = ("hub.record", "hub.recorded", "hub.answered")
LENGTH = 600


class Member(threading.Thread):
    """A worker that leases samples and commits them to the log, and moves when it is told to, as a session
    does. It ends when its epoch is over."""

    def __init__(self, hub: HubProcess, log: FakeLog, rank: int, pace: float) -> None:
        super().__init__(daemon=True)
        self.hub, self.log, self.pace = client(hub, timeout=DEADLINE), log, pace  # type: ignore[arg-type]
        self.me = self.hub.join(rank)
        self.contributors = [(rank, self.me.incarnation)]
        self.known = self.block = self.iteration = 0
        self.error: BaseException | None = None
        self.to_log = self.as_contributor()

    def as_contributor(self) -> Client:
        """A connection to the log, which knows us as our contributor on it."""
        number, life = self.contributors[-1]
        link = Client(self.log.address, None, limit=2**20, name="shard 0")
        hello = Hello(
            version=VERSION, run="r", role="worker", worker=number, incarnation=life, member=self.me.worker
        )
        asked(link, hello, Welcome)
        return link

    def run(self) -> None:
        try:
            while self.trains():
                if self.hub.grouping > self.known:
                    self.moves()
        except BaseException as error:
            self.error = error

    def trains(self) -> bool:
        number, life = self.contributors[-1]
        in_group = len(self.contributors) > 1
        self.block += in_group
        place = {"contributor": number, "block": self.block} if in_group else {}
        leased = self.hub.lease(0, 0, LENGTH, 4, **place)
        if leased.start == leased.stop and leased.over:
            return False
        time.sleep(self.pace * (leased.stop - leased.start))
        used = [Used(sampler=0, epoch=0, start=leased.start, stop=leased.stop)]
        commit = Commit(incarnation=life, iteration=self.iteration, weight=1.0, used=used)
        asked(self.to_log, commit, Committed)
        self.iteration += 1
        self.hub.iteration = self.iteration
        if self.iteration >= 4:
            self.hub.set_pace(self.pace)
        return True

    def moves(self) -> None:
        self.known = self.hub.grouping
        answer = self.hub.join_group(self.known, self.iteration)
        if not answer.group:
            return
        self.contributors.append((answer.contributor, answer.life))
        self.to_log.close()
        self.to_log, self.block = self.as_contributor(), 0
        self.hub.in_group(answer.contributor)

    def close(self) -> None:
        self.hub.close()
        self.to_log.close()


@pytest.mark.parametrize(
    "at", [(2, 6), pytest.param((1, 2, 3, 4, 5, 8, 12, 20), marks=pytest.mark.soak)], ids=["few", "many"]
)
def test_groups_form_and_each_sample_counts_once_while_the_hub_is_killed(
    folder: Path, at: tuple[int, ...]
) -> None:
    plan = [Fault(point, iteration=write) for point in POINTS for write in at]
    with HubProcess(folder, workers=4, patience=5.0, groups=2, group_by="speed", plan=plan) as hub:
        log = FakeLog(hub.address)
        members = [Member(hub, log, rank, pace) for rank, pace in enumerate((0.004, 0.02, 0.004, 0.02))]
        for member in members:
            member.start()
        try:
            for member in members:
                member.join(2 * DEADLINE)
                assert not member.is_alive()
                if member.error is not None:
                    raise member.error
            assert log.counts(0) == Counter(range(LENGTH))
            made = {member.contributors[-1] for member in members if len(member.contributors) > 1}
            assert {number for number, _ in made} == {4, 5}, hub.log()
            alone = {member.contributors[0] for member in members}
            wait_for(lambda: log.fenced >= alone, "the fences of all old contributors")
            for member in members:
                member.hub.goodbye(finished=True)
            wait_for(lambda: log.fenced == alone | made, "the groups' fences")
        finally:
            for member in members:
                member.close()
            log.close()
        assert not faults.pending(hub.plan)
        assert hub.starts > len(plan)


def test_a_hub_of_other_groups_does_not_go_on(folder: Path) -> None:
    with hub_of(folder, workers=2, grouping=BY_SPEED):
        pass
    with pytest.raises(UserError, match="was started with --groups 2 by speed, asp and not 1 by speed, asp"):
        Service(folder, workers=2, grouping=GroupingSettings(1, "speed"))
