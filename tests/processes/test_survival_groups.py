"""Groups of workers under kill -9, with real processes: the run goes on within some seconds, no acknowledged
contribution is lost, and none counts twice. What is checked of each run stands in `mortal_groups.py`."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeAlias

import pytest
from hub_parts import HubProcess
from mortal_groups import DEADLINE, MOVING, Case, Fault, Plan, set_pause, settings, workers_of
from mortal_shards import Kill, MortalRun
from run_command import wait_for

from atoll.core import points
from atoll.groups.drift import Rules
from atoll.hub.planner import GroupingSettings
from atoll.server import main as server
from support.served import ServedRun

WORKERS, GROUPS = 4, ((0, 1), (2, 3))
HEARTBEAT = 0.25
AT_ONCE = 4  # cases that run beside one another
STOPPED = 2.0  # seconds

Run: TypeAlias = Callable[[Path], None]


def without(*dead: int) -> list[list[int]]:
    """The groups of those who are left."""
    return [rest for group in GROUPS if (rest := [who for who in group if who not in dead])]


@contextlib.contextmanager
def run_of(
    folder: Path,
    consistency: str,
    uplink: str = "leader",
    *faults: Fault,
    hub: GroupingSettings | None = None,
    pauses: Sequence[float] = (),
    **more: bool,
) -> Iterator[Case]:
    """Four workers who are to be in two groups, a hub and two shards; `pauses` are by rank, in seconds.
    `more` is the Plan's."""
    folder.mkdir()
    hub = hub or settings(GROUPS, consistency)
    for who, pause in enumerate(pauses):
        set_pause(folder, who, pause)
    with ServedRun(WORKERS, 2, heartbeat=HEARTBEAT, folder=folder / "hub", grouping=hub) as served:
        plan = Plan(served.address, consistency, uplink, faults, folder, **more)
        with workers_of(plan, folder / "hub", WORKERS) as made:
            yield made
    assert not served.failures


def finish(made: Case, survivors: Sequence[int], again: Sequence[int] = ()) -> None:
    """Let a run end, and look at all its accounts. Who came `again` had to start first."""
    results = made.end(survivors)
    made.check(results, range(WORKERS))
    made.check_went_on([who for who in survivors if who not in again])


def all_survive(folder: Path, cases: dict[str, Run]) -> None:
    """Several beside one another; all that failed is told."""
    with ThreadPoolExecutor(AT_ONCE) as threads:
        ends = {name: threads.submit(case, folder / name) for name, case in cases.items()}
        failures = {name: error for name, end in ends.items() if (error := end.exception()) is not None}
    assert not failures, "\n".join(f"{name}: {error!r}" for name, error in failures.items())


def some_die(consistency: str, uplink: str, *faults: Fault, **more: bool) -> tuple[str, Run]:
    """A case, by its name: those who are struck die, and the others go on. `more` is the Plan's."""

    def run(folder: Path) -> None:
        dead = sorted({fault.who for fault in faults})
        with run_of(folder, consistency, uplink, *faults, **more) as made:
            for fault in faults:
                made.wait_fired(fault)
            made.wait_for(lambda: len(made.decisions("worker died")) == len(dead), "the deaths to be known")
            made.wait_until_together(without(*dead))
            finish(made, [who for who in range(WORKERS) if who not in dead])

    struck = "-".join(str(fault) for fault in faults)
    return f"{consistency}-{uplink}-{struck}", run


LEADS, DOES_NOT = True, False
ASYNCHRONOUS = ("group.pushed", "group.committed", "group.answered")
IN_STEP = (*ASYNCHRONOUS, "group.stepped")
OF_RINGS = ("ring.sent", "ring.all_sent", "ring.agreed", "ring.confirmed", "ring.published", "ring.stepped")
AT_POINTS = [
    some_die("asp", "leader", Fault(1, "group.committed", LEADS)),
    some_die("asp", "members", Fault(2, "group.pushed", DOES_NOT)),
    some_die("bsp", "leader", Fault(0, "group.committed", LEADS)),
    some_die("bsp", "members", Fault(3, "group.stepped", LEADS)),
]
ON_THE_WAY = [
    some_die("asp", "members", Fault(3, "group.ring")),
    some_die("bsp", "leader", Fault(1, "group.formed")),
    some_die("bsp", "members", Fault(2, "group.arrived")),
]


def test_members_are_killed_at_points_of_an_iteration(tmp_path: Path) -> None:
    all_survive(tmp_path, dict(AT_POINTS))


UNLIKE, PAUSES = ((0, 1, 2), (3,)), (0.06, 0.01, 0.01, 0.01)  # seconds for a batch of three


@pytest.mark.parametrize("who", [0, 1, 3])
def test_members_that_take_unlike_parts_go_on_without_one_that_is_killed(tmp_path: Path, who: int) -> None:
    """Each sample counts once an epoch. Parts of those who are left are even, then follow speeds. What a
    group takes of a batch of 12 samples is by the workers that live, in whatever group."""
    hub = settings(UNLIKE, "asp")
    with run_of(tmp_path / "run", "asp", hub=hub, pauses=PAUSES, shares=True) as made:
        made.wait_until_together(UNLIKE)
        made.wait_for(lambda: most(made, 0) < most(made, 1), "the slow worker to take less")
        made.wait_for(lambda: 9 in taken(made, UNLIKE[0]), "the three to take 9 samples")
        os.kill(made.pid(who), signal.SIGKILL)
        made.wait_for(lambda: made.decisions("worker died"), "the death to be known")
        left = [rest for group in UNLIKE if (rest := [other for other in group if other != who])]
        made.wait_until_together(left)
        if who != 0:
            made.wait_for(lambda: most(made, 0) < most(made, 2), "the slow worker to take less again")
        made.wait_for(lambda: 4 * len(left[0]) in taken(made, left[0]), "batches of 12 for three workers")
        finish(made, [other for group in left for other in group])


def taken(made: Case, whom: Sequence[int]) -> set[int]:
    """The samples that these workers took together in each of their latest iterations. Who has had batches of
    the time before in hand is some batches behind, of parts that may be others."""
    parts = [{line["iteration"]: len(line["indices"]) for line in made.lines(who)} for who in whom]
    common = sorted(set.intersection(*map(set, parts)))[-8:]
    return {sum(each[iteration] for each in parts) for iteration in common}


def with_shares() -> dict[str, Run]:
    """Members of unlike parts die in mid-epoch: those who have fetched ahead have asked for blocks of which
    the others have not had their parts, and those who have not leave parts of such blocks."""
    return dict(
        [
            some_die("asp", "leader", Fault(1, "group.committed", LEADS), shares=True),
            some_die("asp", "members", Fault(2, "group.pushed", DOES_NOT), shares=True),
            some_die("asp", "leader", Fault(3, "ring.sent"), shares=True),
            some_die("asp", "members", Fault(0, "group.ring"), shares=True),
        ]
    )


def test_members_with_blocks_in_hand_are_killed(tmp_path: Path) -> None:
    all_survive(tmp_path, with_shares())


def test_one_comes_again_into_a_group_of_unlike_parts(tmp_path: Path) -> None:
    one_comes_again("asp", tmp_path / "run", shares=True)


def most(made: Case, who: int) -> int:
    """The most samples in the latest three batches of a worker."""
    return max((len(line["indices"]) for line in made.lines(who)[-3:]), default=0)


IN_TIERS = [
    some_die("asp", "leader", Fault(1, "group.committed", LEADS), tiers=True),
    some_die("asp", "leader", Fault(2, "ring.all_sent"), tiers=True),
    some_die("asp", "members", Fault(0, "group.pushed", DOES_NOT), tiers=True),
]


def test_members_under_budgets_are_killed_at_points_of_an_iteration(tmp_path: Path) -> None:
    all_survive(tmp_path, dict(IN_TIERS))


# In tiers under bsp: each point of an iteration, and who is struck there, with which `sync.uplink`.
IN_LOCK_STEP = [
    ("leader", Fault(2, "ring.sent")),
    ("members", Fault(3, "ring.all_sent")),
    ("leader", Fault(0, "ring.agreed")),
    ("members", Fault(1, "ring.held", nth=1)),
    ("leader", Fault(2, "ring.held", nth=2)),
    ("members", Fault(3, "ring.held", nth=3)),
    ("leader", Fault(0, "ring.confirmed")),
    ("members", Fault(1, "ring.published")),
    ("leader", Fault(2, "ring.stepped")),
    ("members", Fault(3, "group.pushed", DOES_NOT)),
    ("leader", Fault(1, "group.committed", LEADS)),
    ("members", Fault(0, "group.handed")),
    ("leader", Fault(2, "group.answered", DOES_NOT)),
    ("members", Fault(3, "group.stepped", LEADS)),
]


@pytest.mark.parametrize(("uplink", "fault"), IN_LOCK_STEP, ids=lambda each: str(each).replace(" ", "-"))
def test_a_member_in_tiers_is_killed_where_all_are_in_lock_step(
    tmp_path: Path, uplink: str, fault: Fault
) -> None:
    """The script clips each mean and changes a part of it. Whoever is left makes the step of what it has made
    of the mean, and each sample counts once."""
    name, run = some_die("bsp", uplink, fault, tiers=True, edits=True)
    run(tmp_path / name)


def test_each_point_of_an_iteration_is_struck_in_lock_step() -> None:
    struck = {fault.point for _, fault in IN_LOCK_STEP}
    assert struck == {*IN_STEP, *OF_RINGS, "group.handed", "ring.held"}


def test_members_are_killed_while_they_move(tmp_path: Path) -> None:
    all_survive(tmp_path, dict(ON_THE_WAY))


# -- while a changed model is prepared ----------------------------------------------------------------------

WHILE_CHANGING = [
    some_die("bsp", "leader", Fault(0, "change.left", nth=2), changes=True),
    some_die("bsp", "members", Fault(3, "setup.ready", nth=3), changes=True, tiers=True),
    some_die("asp", "leader", Fault(1, "setup.ready", nth=3), changes=True),
    some_die("asp", "members", Fault(2, "change.left", nth=2), changes=True),
    some_die("bsp", "leader", Fault(0, "setup.sent", nth=2), changes=True, tiers=True),
    some_die("asp", "leader", Fault(0, "setup.sent", nth=3), changes=True),
]


@pytest.mark.parametrize("case", [pytest.param(run, id=name) for name, run in WHILE_CHANGING])
def test_members_are_killed_while_they_prepare_a_changed_model(tmp_path: Path, case: Run) -> None:
    """Who is left goes on with the changed model, and every contribution counts once."""
    case(tmp_path / "run")


# -- at every point ----------------------------------------------------------------------------------------

OF_LEADERS = ("group.committed", "group.stepped")  # and under `leader` also group.pushed


def faults_at(consistency: str, uplink: str, *, tiers: bool = False) -> list[Fault]:
    """One who speaks to the log, and one who does not, at each point of an iteration that they reach."""
    faults = []
    reached = IN_STEP if consistency == "bsp" else ASYNCHRONOUS
    for point in (*reached, "group.handed") if tiers and consistency == "bsp" else reached:
        alone = point in OF_LEADERS or (point, uplink) == ("group.pushed", "leader")
        faults += [
            Fault(len(faults) % WORKERS, point, leads) for leads in ((LEADS,) if alone else (LEADS, DOES_NOT))
        ]
    rounds = 3 if consistency == "bsp" else 2
    faults += [Fault(nth, "ring.held", nth=nth) for nth in range(1, rounds + 1)]
    faults += [Fault(number % WORKERS, point) for number, point in enumerate(OF_RINGS)]
    return faults


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("consistency", ["asp", "bsp"])
@pytest.mark.parametrize("uplink", ["leader", "members"])
def test_members_are_killed_at_every_point(tmp_path: Path, consistency: str, uplink: str) -> None:
    faults = faults_at(consistency, uplink)
    known = {fault.point for fault in faults} | set(MOVING) | {"ring.broken", "ring.formed"}
    of_some = {"group.stepped", "group.handed"}  # bsp, and under budgets
    assert {point for point in points.POINTS if point.startswith(("group.", "ring."))} <= known | of_some
    faults += [Fault(who, point) for point in MOVING for who in (0, 3)]
    all_survive(tmp_path, dict(some_die(consistency, uplink, fault) for fault in faults))


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("consistency", ["asp", "bsp"])
@pytest.mark.parametrize("uplink", ["leader", "members"])
def test_members_under_budgets_are_killed_at_every_point(
    tmp_path: Path, consistency: str, uplink: str
) -> None:
    faults = faults_at(consistency, uplink, tiers=True)
    faults += [Fault(who, point) for point in MOVING for who in (0, 3)]
    all_survive(tmp_path, dict(some_die(consistency, uplink, fault, tiers=True) for fault in faults))


# -- other parts, and other ways to be lost -----------------------------------------------------------------


def a_group_dies(consistency: str, folder: Path, *, tiers: bool = False) -> None:
    with run_of(folder, consistency, tiers=tiers) as made:
        made.wait_until_together(GROUPS)
        for who in GROUPS[0]:
            os.kill(made.pid(who), signal.SIGKILL)
        made.wait_for(lambda: len(made.decisions("worker died")) == 2, "the deaths to be known")
        made.wait_until_together(GROUPS[1:])
        finish(made, GROUPS[1])


def one_comes_again(consistency: str, folder: Path, **more: bool) -> None:
    """Killed in its group, a worker comes with the same rank, and is put beside the one that it left.

    It asks for the state late: under bsp when the others wait already for its part in the iteration with
    which it enters."""
    with run_of(folder, consistency, "leader", Fault(1, "group.answered"), **more) as made:
        made.wait_fired(Fault(1, "group.answered"))
        made.wait_for(lambda: made.decisions("worker died"), "the death to be known")
        made.start(1, lingers="enter.member")
        made.wait_until_together(GROUPS)
        finish(made, range(WORKERS), again=[1])


def one_stands_still(consistency: str, folder: Path) -> None:
    fault = Fault(1, "ring.agreed", what=signal.SIGSTOP)
    with run_of(folder, consistency, "members", fault) as made:
        made.wait_fired(fault)
        time.sleep(STOPPED)
        os.kill(made.pid(1), signal.SIGCONT)
        made.wait_until_together(GROUPS)
        finish(made, range(WORKERS))
        assert not made.decisions("worker died")
        assert len(made.decisions("group")) == len(GROUPS)  # nobody moved again


def the_hub_dies(at: str, consistency: str, folder: Path) -> None:
    """It is started again, and goes on with the groups: `at` is whether it dies while they are made."""
    folder.mkdir()
    options = {"workers": WORKERS, "groups": 2, "group_by": "speed", "consistency": consistency}
    with HubProcess(folder / "hub", **options) as hub, shard_of(hub.address, "r"):
        plan = Plan(hub.address, consistency, "leader", (), folder, run="r")
        with workers_of(plan, folder / "hub", WORKERS) as made:
            if at == "move":
                made.wait_for(lambda: made.decisions("groups"), "the groups to be made")
                hub.kill()
            made.wait_for(
                lambda: [len(group) for group in made.groups(range(WORKERS))] == [2, 2], "groups of two"
            )
            groups = made.groups(range(WORKERS))
            hub.kill()
            made.wait_until_all_go_on(range(WORKERS))
            made.wait_until_together(groups)
            finish(made, range(WORKERS))
            assert hub.starts == (3 if at == "move" else 2)
            assert not made.decisions("worker died")


@contextlib.contextmanager
def shard_of(address: str, run: str) -> Iterator[None]:
    """The only shard of a run, on a thread."""
    stop, ready = threading.Event(), threading.Event()
    thread = threading.Thread(
        target=server.serve,
        args=(0, address),
        kwargs={"run": run, "timeout": DEADLINE, "ready": lambda _address: ready.set(), "stop": stop},
        daemon=True,
    )
    thread.start()
    try:
        wait_for(ready.is_set, "the shard", DEADLINE)
        yield
    finally:
        stop.set()
        thread.join(DEADLINE)


def shards_die(
    consistency: str, uplink: str, points_of: Sequence[str], folder: Path, *, tiers: bool = False
) -> None:
    """Each in a group's exchange, and they go on in their folders."""
    kills = [Kill(0, point, 10 + 6 * number) for number, point in enumerate(points_of)]
    are_killed(consistency, uplink, kills, folder, tiers=tiers)


def are_killed(consistency: str, uplink: str, kills: Sequence[Kill], folder: Path, **more: bool) -> None:
    """These shards are killed, and go on in their folders. `more` is the Plan's."""
    folder.mkdir()
    hub = settings(GROUPS, consistency)
    with MortalRun(folder / "run", WORKERS, 2, kills, grouping=hub) as run:
        plan = Plan(run.address, consistency, uplink, (), folder, **more)
        with workers_of(plan, folder / "run" / "hub", WORKERS) as made:
            made.wait_for(lambda: len(run.fired) == len(kills), "the shards' deaths")
            made.wait_until_together(GROUPS)
            finish(made, range(WORKERS))
        assert not run.failures


@pytest.mark.parametrize(
    ("consistency", "uplink", "kills"),
    [
        ("bsp", "leader", [Kill(0, "shard.setup", 0, nth=4), Kill(1, "shard.setup", 0, nth=6)]),
        ("asp", "members", [Kill(0, "shard.setup", 0, nth=6), Kill(1, "shard.setup", 0, nth=2)]),
    ],
)
def test_shards_are_killed_while_a_changed_model_comes(
    tmp_path: Path, consistency: str, uplink: str, kills: list[Kill]
) -> None:
    are_killed(consistency, uplink, kills, tmp_path / "run", changes=True)


@pytest.mark.parametrize("case", [a_group_dies, one_comes_again], ids=lambda case: case.__name__)
def test_data_is_dealt_anew_in_lock_step(tmp_path: Path, case: Callable[[str, Path], None]) -> None:
    """Under bsp each sample of an epoch counts once, whoever is lost or comes back."""
    case("bsp", tmp_path / "run")


# -- speeds that change ------------------------------------------------------------------------------------

FAST, SLOW = 0.02, 0.08  # seconds of an iteration
FLAPS, FLAP_SECONDS = 12, 0.7
RULES = Rules(hold=1.0, interval=5.0, window=4)


def by_speed() -> GroupingSettings:
    """Groups by what is measured, and again when that has changed for a second."""
    return GroupingSettings(2, by="joint", consistency="asp", rules=RULES)


def one_becomes_slower(folder: Path) -> None:
    """Four times: it is put beside the slow ones, once, and nobody waits for it who does not have to."""
    with run_of(folder, "asp", hub=by_speed(), pauses=(FAST, FAST, SLOW, SLOW)) as made:
        made.wait_until_together(GROUPS)
        set_pause(folder, 1, SLOW)
        made.wait_until_together([[0], [1, 2, 3]])
        before = [len(made.lines(who)) for who in range(WORKERS)]

        def is_ahead() -> bool:
            since = [len(made.lines(who)) - before[who] for who in range(WORKERS)]
            return since[0] >= 2 * since[1] >= 20

        made.wait_for(is_ahead, "worker 0 to make twice as many iterations as the slow ones")
        finish(made, range(WORKERS))
        first, again = made.decisions("groups")
        assert "is predicted to give" in again.reason, again
        assert "worker 1 computes " in again.reason, again
        assert first.choice == "workers 0 1 | 2 3"


def one_flaps(folder: Path) -> None:
    """A worker that is slow every other moment causes no storm."""
    with run_of(folder, "asp", hub=by_speed(), pauses=(FAST, FAST, SLOW, SLOW)) as made:
        made.wait_until_together(GROUPS)
        began = time.monotonic()
        for number in range(FLAPS):
            set_pause(folder, 1, FAST if number % 2 else SLOW)
            until = time.monotonic() + FLAP_SECONDS
            made.wait_for(lambda until=until: time.monotonic() > until, "a flap to pass")
        lasted = time.monotonic() - began
        finish(made, range(WORKERS))
        assert len(made.decisions("groups")) <= 2 + lasted / RULES.interval


@pytest.mark.soak
def test_other_parts_are_lost_and_speeds_change(tmp_path: Path) -> None:
    cases: dict[str, Run] = {
        "group": partial(a_group_dies, "asp"),
        "again": partial(one_comes_again, "asp"),
        "still": partial(one_stands_still, "bsp"),
        "hub": partial(the_hub_dies, "move", "asp"),
        "shards": partial(shards_die, "asp", "members", ["shard.staged", "shard.stepped"]),
        "slower": one_becomes_slower,
    }
    all_survive(tmp_path, cases)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("consistency", ["asp", "bsp"])
def test_other_parts_are_lost_in_each_mode(tmp_path: Path, consistency: str) -> None:
    cases: dict[str, Run] = {
        "group": partial(a_group_dies, consistency),
        "again": partial(one_comes_again, consistency),
        "still": partial(one_stands_still, consistency),
        "hub": partial(the_hub_dies, "run", consistency),
        "hub in a move": partial(the_hub_dies, "move", consistency),
        "flaps": one_flaps,
    }
    of_shards = ["shard.staged", "shard.journalled", "shard.logged", "shard.stepped", "shard.answered"]
    for uplink in ("leader", "members"):
        cases[f"shards {uplink}"] = partial(shards_die, consistency, uplink, of_shards)
    all_survive(tmp_path, cases)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_other_parts_are_lost_under_budgets(tmp_path: Path) -> None:
    of_shards = ["shard.staged", "shard.journalled", "shard.logged", "shard.stepped", "shard.answered"]
    cases: dict[str, Run] = {
        "group": partial(a_group_dies, "asp", tiers=True),
        "group, bsp": partial(a_group_dies, "bsp", tiers=True),
        "again": partial(one_comes_again, "asp", tiers=True),
        "again, bsp": partial(one_comes_again, "bsp", tiers=True),
        "shards": partial(shards_die, "asp", "leader", of_shards, tiers=True),
        "shards, members": partial(shards_die, "asp", "members", of_shards, tiers=True),
        "shards, bsp": partial(shards_die, "bsp", "members", of_shards, tiers=True),
    }
    all_survive(tmp_path, cases)
