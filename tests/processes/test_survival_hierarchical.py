"""Rings in groups that lose members, leaders too: who is left forms groups anew, goes on, and computes what
plain PyTorch computes from exactly the contributions that counted."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from test_survival_ring import (
    IN_AN_ITERATION,
    STEPS,
    STRIKE,
    Fault,
    TakesIn,
    assert_went_on,
    case,
    let_in,
    members_of,
    trains,
)

from atoll.train.api.session import Session

WORKERS, GROUPS = 5, 2  # workers 0, 1, 2 with leader 0, and 3, 4 with leader 3
LEADERS = (0, 3)
INSIDE, BETWEEN = "hierarchy.inside", "hierarchy.between"
SUMS = 10  # of which the last is made in the middle of the run


def trains_in_groups(session: Session, who: int, folder: Path) -> dict[str, Any]:
    """As `trains`, and tells its group at the end."""
    result = trains(session, who, folder)
    return result | {"group": astuple(session.group)}


def one_dies(folder: Path, who: int, point: str) -> None:
    of_a_sum = point in (INSIDE, BETWEEN)
    fault = Fault(who, point, iteration=-1, nth=SUMS) if of_a_sum else Fault(who, point)
    with case(folder, trains_in_groups, fault, workers=WORKERS, groups=GROUPS) as made:
        survivors = [each for each in range(WORKERS) if each != who]
        made.killed(who)
        results = [made.result(each) for each in survivors]
    assert_went_on(results, survivors)
    # Two groups of two, whoever died: in order of rank.
    assert [result["group"] for result in results] == [
        [0, 2, 0, 2],
        [0, 2, 1, 2],
        [1, 2, 0, 2],
        [1, 2, 1, 2],
    ]
    counted = [members_of(weight) for weight in results[0]["counted"]]
    everyone = list(range(WORKERS))
    assert counted == sorted(counted, key=len, reverse=True)
    assert counted[0] == everyone
    assert all(members in (everyone, survivors) for members in counted)
    if not of_a_sum:
        assert counted[:STRIKE] == [everyone] * STRIKE
        assert counted[STRIKE + 1 :] == [survivors] * (STEPS - STRIKE - 1)


def each_dies(folder: Path, cases: list[tuple[int, str]]) -> None:
    with ThreadPoolExecutor(2) as threads:
        ends = {
            threads.submit(one_dies, folder / f"{who}-{point}", who, point): (who, point)
            for who, point in cases
        }
        failures = {which: error for end, which in ends.items() if (error := end.exception()) is not None}
    assert not failures, failures


def test_a_leader_and_a_member_are_killed_between_the_parts_of_a_sum(tmp_path: Path) -> None:
    each_dies(tmp_path, [(3, BETWEEN), (1, INSIDE)])


@pytest.mark.soak
def test_each_of_five_is_killed_at_each_point(tmp_path: Path) -> None:
    points = [*IN_AN_ITERATION, INSIDE]
    each_dies(tmp_path, [*product(range(WORKERS), points), *((who, BETWEEN) for who in LEADERS)])


class TakesInGroups(TakesIn):
    def __call__(self, session: Session, who: int, folder: Path) -> dict[str, Any]:
        before = session.group
        result = super().__call__(session, who, folder)
        return result | {"groups": [astuple(before), astuple(session.group)]}


def test_groups_are_made_anew_when_a_worker_enters(tmp_path: Path) -> None:
    """One that came late is alone until it enters."""
    with case(tmp_path / "run", TakesInGroups(), workers=2, groups=2) as made:
        let_in(made)
        results = [made.result(who) for who in range(3)]
        assert made.told("ring") == ["ring 1 of 2 workers", "ring 2 of 3 workers"]
    for result in results:
        assert "error" not in result, result["error"]
        assert (result["world"], result["parameters"]) == (3, results[0]["parameters"])
    before, after = zip(*(result["groups"] for result in results), strict=True)
    assert before == ([0, 2, 0, 1], [1, 2, 0, 1], [0, 1, 0, 1])
    assert after == ([0, 2, 0, 2], [0, 2, 1, 2], [1, 2, 0, 1])


@pytest.mark.soak
def test_fewer_are_left_than_groups_were_asked_for(tmp_path: Path) -> None:
    """Each is then a group, and at last the only one."""
    faults = (Fault(0, "ring.sent"), Fault(1, "ring.published"))
    with case(tmp_path / "run", trains_in_groups, *faults, workers=3, groups=3) as made:
        result = made.result(2)
    assert_went_on([result], [2])
    assert result["group"] == [0, 1, 0, 1]
