"""Groups of workers under kill -9, with real processes: the run goes on, no acknowledged contribution is lost,
and none counts twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from mortal_groups import Fault, Plan, settings, workers_of

from atoll.testing.served import ServedRun

WORKERS, GROUPS = 4, ((0, 1), (2, 3))
HEARTBEAT = 0.25
AT_ONCE = 4  # cases that run beside one another


def without(dead: Sequence[int]) -> list[list[int]]:
    return [rest for group in GROUPS if (rest := [who for who in group if who not in dead])]


def survives(folder: Path, consistency: str, uplink: str, *faults: Fault) -> None:
    """Those who are struck die, and the others go on."""
    dead = {fault.who for fault in faults}
    folder.mkdir()
    hub = settings(GROUPS, consistency)
    with ServedRun(WORKERS, 2, heartbeat=HEARTBEAT, folder=folder / "hub", grouping=hub) as served:
        plan = Plan(served.address, consistency, uplink, faults, folder)
        with workers_of(plan, folder / "hub", WORKERS) as made:
            survivors = [who for who in range(WORKERS) if who not in dead]
            for fault in faults:
                made.wait_fired(fault)
            made.wait_for(lambda: len(made.decisions("worker died")) == len(dead), "the deaths to be known")
            made.wait_until_together(without(sorted(dead)))
            results = made.end(survivors)
            made.check(results, range(WORKERS))
            made.check_went_on(survivors)
        assert not served.failures


def all_survive(folder: Path, cases: dict[str, Callable[[Path], None]]) -> None:
    """Several beside one another; all that failed is told."""
    with ThreadPoolExecutor(AT_ONCE) as threads:
        ends = {name: threads.submit(case, folder / name) for name, case in cases.items()}
        failures = {name: error for name, end in ends.items() if (error := end.exception()) is not None}
    for name, error in failures.items():
        print(f"{name}: {error}")
    assert not failures, failures


def case_of(consistency: str, uplink: str, *faults: Fault) -> tuple[str, Callable[[Path], None]]:
    struck = "-".join(f"{each.who}{each.point}{each.nth}{'' if each.leads is None else each.leads}" for each in faults)
    name = f"{consistency}-{uplink}-{struck}"
    return name, lambda folder: survives(folder, consistency, uplink, *faults)


FEW = [
    case_of("asp", "leader", Fault(1, "group.committed", leads=True)),
    case_of("asp", "members", Fault(2, "group.pushed", leads=False)),
    case_of("asp", "leader", Fault(3, "ring.held", nth=2)),
    case_of("bsp", "leader", Fault(0, "group.committed", leads=True)),
    case_of("bsp", "members", Fault(3, "group.stepped", leads=True)),
    case_of("bsp", "leader", Fault(2, "group.answered", leads=False)),
    case_of("asp", "members", Fault(0, "ring.sent"), Fault(1, "ring.agreed")),
]


def test_members_are_killed_at_points_of_an_iteration(tmp_path: Path) -> None:
    all_survive(tmp_path, dict(FEW))


MOVES = [
    case_of("asp", "leader", Fault(0, "group.leaving")),
    case_of("asp", "members", Fault(3, "group.ring")),
    case_of("bsp", "leader", Fault(1, "group.formed")),
    case_of("bsp", "members", Fault(2, "group.arrived")),
    case_of("asp", "leader", Fault(2, "group.joined")),
]


def test_members_are_killed_while_they_move(tmp_path: Path) -> None:
    all_survive(tmp_path, dict(MOVES))
