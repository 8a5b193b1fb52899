"""Workers' reports on their speed: what a report holds, and when other shares hold."""

from __future__ import annotations

from functools import partial

import pytest

from atoll.core.config import Sync
from atoll.core.errors import RunError, UserError
from atoll.groups.shares import even
from atoll.train.data.sharereports import ShareReports
from atoll.train.data.shares import ShareSchedule
from atoll.train.data.sources import UnevenShares

TOTAL = 64


class Batches:
    """A sampler of which each iteration uses one tick of the schedule's samples."""

    def __init__(self, rank: int, world: int, ahead: int) -> None:
        self.rank, self.world, self._ahead = rank, world, ahead
        self.schedule = ShareSchedule(partial(even, TOTAL), world, 1)
        self.epoch, self.made, self.given = 0, 0, 0
        self.sizes: list[int] = []

    def next(self) -> int:
        while self.given <= self.made + self._ahead:
            parts = self.schedule(self.given, TOTAL, range(self.world))
            self.sizes.append(parts[self.rank])
            self.given += 1
        return self.sizes[self.made]

    def under_way(self) -> tuple[int, int]:
        return 1, self.sizes[self.made]


class Crew:
    """Workers with a clock each; `each` has a worker's seconds for a sample.

    They hear of one another over a ring, or else `by_log`.
    """

    def __init__(self, each: list[float], ahead: list[int], *, by_log: bool = False) -> None:
        self._by_log = by_log
        self.each, self.now, self.lines = each, [0.0] * len(each), list[str]()
        self.batches = [Batches(rank, len(each), fetches) for rank, fetches in enumerate(ahead)]
        self.reports = [self._report(rank) for rank in range(len(each))]
        for report, batches in zip(self.reports, self.batches, strict=True):
            report.follow(batches, batches.schedule, TOTAL)

    def _report(self, rank: int) -> ShareReports:
        return ShareReports(
            by_speed=True,
            waited=lambda: 0.0,
            chosen=lambda choice, reason, _change: self.lines.append(f"shares {choice} {reason}"),
            name_of=lambda rank: rank + 10,
            clock=lambda: self.now[rank],
        )

    def iterate(self) -> list[int]:
        """Make an iteration; return its sizes."""
        sizes = [batches.next() for batches in self.batches]
        for rank, size in enumerate(sizes):
            self.now[rank] += self.each[rank] * size
        world = len(sizes)
        if self._by_log:
            told = {rank + 10: report.report() for rank, report in enumerate(self.reports)}
            self.now = [max(self.now)] * world
            assert told == {rank + 10: report.report() for rank, report in enumerate(self.reports)}
            for rank, report in enumerate(self.reports):
                report.heard_each(told, rank + 10)
            self._made()
            return sizes
        said = [report.said(rank, world) for rank, report in enumerate(self.reports)]
        self.now = [max(self.now)] * world
        # What a ring that broke has asked for again is what was said before.
        assert said == [report.said(rank, world) for rank, report in enumerate(self.reports)]
        summed = [sum(each) for each in zip(*said, strict=True)]
        for rank, report in enumerate(self.reports):
            report.heard(summed, rank)
        self._made()
        return sizes

    def _made(self) -> None:
        for batches in self.batches:
            batches.made += 1


@pytest.mark.parametrize("by_log", [False, True])
def test_shares_follow_what_is_reported_and_add_up_with_unlike_loaders(by_log: bool) -> None:
    crew = Crew([0.01, 0.01, 0.04], ahead=[0, 2, 1], by_log=by_log)
    steps = [crew.iterate() for _ in range(16)]
    assert {sum(step) for step in steps} == {TOTAL}
    assert steps[0] == [22, 21, 21]
    assert steps[-1] == [28, 29, 7] or steps[-1] == [29, 28, 7]
    # Reported at iterations 1 and 2, chosen after the latter, said at 3; 2 batches were fetched by then.
    assert steps.index(steps[-1]) == 6
    (line,) = crew.lines
    assert line.startswith("shares 2")
    assert "worker 12 would finish after 0.84 s, and now the last one does after 0.2" in line


def test_nothing_is_said_before_there_are_batches() -> None:
    report = Crew([1.0, 1.0], [0, 0])._report(0)
    assert not any(report.said(0, 2))
    report.heard(report.said(0, 2), 0)
    assert report.report() == []
    report.heard_each({}, 10)


def test_an_iteration_without_some_worker_changes_nothing() -> None:
    """As the log answers it where a worker was lost."""
    crew = Crew([0.01, 0.01, 0.04], ahead=[0, 0, 0], by_log=True)
    for _ in range(2):
        crew.iterate()
    for _ in range(8):
        for batches in crew.batches:
            batches.next()
        told = {rank + 10: crew.reports[rank].report() for rank in (0, 2)}
        for rank in (0, 2):
            crew.reports[rank].heard_each(told, rank + 10)
    assert not crew.lines


def test_a_choice_waits_for_a_worker_that_is_in_the_next_epoch_already() -> None:
    crew = Crew([0.01, 0.04], ahead=[0, 0])
    while not crew.lines:
        crew.iterate()
    crew.batches[1].epoch = 1
    for _ in range(2):
        assert crew.iterate() == [32, 32]
    crew.batches[1].epoch = 0
    assert crew.iterate() == [32, 32]
    assert crew.iterate() in ([51, 13], [52, 12])


def test_members_that_change_make_shares_even_until_speeds_are_known_again() -> None:
    crew = Crew([0.01, 0.04], ahead=[0, 0])
    for _ in range(8):
        crew.iterate()
    for report, batches in zip(crew.reports, crew.batches, strict=True):
        report.forget()
        batches.schedule.reset(2)
        batches.sizes, batches.made, batches.given = [], 0, 0
    assert [crew.iterate() for _ in range(4)] == [[32, 32]] * 4
    crew.iterate()
    assert crew.iterate() in ([51, 13], [52, 12])


def test_a_loader_that_is_given_batches_during_the_agreement_is_one_clear_line() -> None:
    crew = Crew([0.01, 0.04], ahead=[0, 0])
    while not crew.lines:
        crew.iterate()
    batches = crew.batches[1]
    for each in crew.batches:
        each.next()
    said = [report.said(rank, 2) for rank, report in enumerate(crew.reports)]
    batches.given += 2
    with pytest.raises(RunError, match="by another thread than the training loop's"):
        crew.reports[1].heard([sum(each) for each in zip(*said, strict=True)], 1)


def test_caps_that_do_not_hold_a_batch_once_workers_are_lost_give_way_with_a_line() -> None:
    lines: list[str] = []
    sync = Sync(memory_cap={"1": 4, "2": 9, "3": 9})
    shares = UnevenShares(sync, lambda world: [1, 2, 3][:world], None, lines.append, fixed=False)
    schedule = shares.schedule(20, 3, 2)
    assert schedule is not None
    assert schedule(0, 20, range(3)) == [4, 8, 8]
    assert schedule(0, 7, range(3)) == [1, 3, 3]
    # Two have batches of 5 and 8 in hand, and the third takes the rest, as far as its cap lets it.
    assert schedule(0, 4, [0]) == [4]
    assert schedule(0, 7, [0]) == [7]
    schedule.reset(2)
    assert schedule(0, 20, range(2)) == [10, 10]
    (line,) = lines
    assert line.startswith("sync.memory_cap leaves 13 samples to 2 workers, and sync.global_batch is 20")
    schedule.reset(3)
    assert schedule(0, 20, range(3)) == [4, 8, 8]
    assert len(lines) == 1


def test_a_cap_of_a_worker_that_is_not_there_is_refused_where_none_may_enter() -> None:
    sync = Sync(memory_cap={"4": 4})
    for fixed in (False, True):
        shares = UnevenShares(sync, lambda world: list(range(world)), None, print, fixed=fixed)
        if fixed:
            with pytest.raises(UserError, match=r"memory_cap has a cap for worker 4, and the run has 2"):
                shares.schedule(20, 2, 2)
        else:
            assert shares.schedule(20, 2, 2) is not None


@pytest.mark.parametrize("by_log", [False, True])
def test_a_cap_that_a_worker_has_found_is_heard_by_all_and_kept_by_new_members(by_log: bool) -> None:
    crew = Crew([0.01, 0.01, 0.01], ahead=[0, 2, 1], by_log=by_log)
    crew.iterate()
    crew.reports[1].lower(9)
    steps = [crew.iterate() for _ in range(6)]
    assert {sum(step) for step in steps} == {TOTAL}
    assert steps[-1] in ([28, 9, 27], [27, 9, 28])
    # Reported with the first of these, said with the next one; 2 batches were fetched by then.
    assert steps.index(steps[-1]) == 4
    (line,) = crew.lines
    assert line.endswith("of 64 samples worker 11 has no memory for more")
    for report, batches in zip(crew.reports, crew.batches, strict=True):
        report.forget()
        batches.schedule.reset(3)
        batches.sizes, batches.made, batches.given = [], 0, 0
    assert [crew.iterate() for _ in range(6)][-1][1] == 9


def test_an_iteration_with_samples_that_are_computed_again_tells_nothing_of_speed() -> None:
    crew = Crew([0.01, 0.04], ahead=[0, 0])
    report = crew.reports[1]
    crew.iterate()
    crew.batches[1].next()
    report.lower(60)
    assert report.report()[:2] == [0.0, 0.0]
    assert report.report()[4] == 60
