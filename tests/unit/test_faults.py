"""Plans of faults: what fires, where, how often; and the table of points against the code."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from atoll.core import points
from atoll.core.errors import UserError
from atoll.testing import faults
from atoll.testing.faults import Fault

SOURCE = Path(points.__file__).parents[1]
DEADLINE = 60.0


@pytest.fixture(autouse=True)
def _points(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(points.POINTS, "test.here", "a place in a test")
    monkeypatch.setitem(points.POINTS, "test.there", "another")
    yield
    points.install(None)


def test_a_fault_fires_at_its_point_iteration_and_process(tmp_path: Path) -> None:
    plan = faults.write(
        tmp_path / "plan.json",
        [
            Fault("test.here", "note", iteration=3, role="shard", index=1),
            Fault("test.here", "note", iteration=3, role="shard", index=0),
            Fault("test.there", "note", rank=1),
        ],
    )
    faults.install(plan, "shard 1")
    for iteration in range(5):
        points.reach("test.here", iteration)
        points.reach("test.there", iteration)
    faults.install(plan, "worker 1")
    points.reach("test.here", 3)
    points.reach("test.there")
    assert [(f.fault, f.point, f.iteration, f.who) for f in faults.fired(plan)] == [
        (0, "test.here", 3, "shard 1"),
        (2, "test.there", -1, "worker 1"),
    ]
    assert faults.pending(plan) == [Fault("test.here", "note", iteration=3, role="shard", index=0)]


def test_it_fires_as_often_as_it_says_over_all_processes_and_threads(tmp_path: Path) -> None:
    plan = faults.write(tmp_path / "plan.json", [Fault("test.here", "note", times=5)])
    assert faults.pending(plan)
    faults.install(plan, "hub")
    threads = [threading.Thread(target=points.reach, args=("test.here",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    faults.install(plan, "hub")  # as one that is started again
    for _ in range(7):
        points.reach("test.here")
    assert len(faults.fired(plan)) == 5
    assert not faults.pending(plan)


def test_a_plan_that_is_written_anew_has_not_fired(tmp_path: Path) -> None:
    plan = faults.write(tmp_path / "plan.json", [Fault("test.here", "note")])
    faults.install(plan, "hub")
    points.reach("test.here")
    assert faults.fired(plan)
    faults.write(plan, faults.read(plan))
    assert not faults.fired(plan)


@pytest.mark.parametrize(
    ("fault", "who", "fits"),
    [
        (Fault("test.here"), "hub", True),
        (Fault("test.here", role="hub"), "hub", True),
        (Fault("test.here", role="hub", index=0), "hub", False),
        (Fault("test.here", role="shard"), "shard 3", True),
        (Fault("test.here", role="shard"), "worker 3", False),
        (Fault("test.here", index=3), "worker 3", True),
        (Fault("test.here", rank=3), "worker 3", True),
        (Fault("test.here", rank=3), "shard 3", False),
        (Fault("test.here", rank=3), "worker 4", False),
        (Fault("test.here", role="site", index="paris"), "site paris", True),
        (Fault("test.here", role="site", index="berlin"), "site paris", False),
    ],
)
def test_whom_it_fits(fault: Fault, who: str, fits: bool) -> None:
    assert fault.fits(who) is fits


def test_who_a_process_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (faults.WHO_VARIABLE, "RANK", "ATOLL_RANK"):
        monkeypatch.delenv(variable, raising=False)
    assert faults._who() == "worker 0"
    monkeypatch.setenv("ATOLL_RANK", "4")
    assert faults._who() == "worker 4"
    monkeypatch.setenv("RANK", "2")
    assert faults._who() == "worker 2"
    monkeypatch.setenv(faults.WHO_VARIABLE, "shard 1")
    assert faults._who() == "shard 1"
    monkeypatch.setenv(faults.WHO_VARIABLE, "Shard-1")
    with pytest.raises(UserError, match="ATOLL_FAULTS_WHO=Shard-1: write it as a role and an index"):
        faults._who()


def test_sleep_and_a_full_disk(tmp_path: Path) -> None:
    plan = faults.write(
        tmp_path / "plan.json", [Fault("test.here", "full"), Fault("test.there", "sleep", seconds=0.01)]
    )
    faults.install(plan, "hub")
    with pytest.raises(OSError, match="No space left on device"):
        points.reach("test.here")
    points.reach("test.here")
    points.reach("test.there")
    assert not faults.pending(plan)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not a plan of faults"),
        ('[{"point": "test.here", "action": "burn"}]', "not a plan of faults: Invalid enum value 'burn'"),
        ('[{"point": "test.here", "who": "hub"}]', "unknown field `who`"),
        ('[{"point": "test.hear"}]', "fault 0: there is no point 'test.hear'; did you mean test.here?"),
        ('[{"point": "test.here", "times": 0}]', "fault 0: seconds must be at least 0, and times at least 1"),
        ('[{"point": "test.here", "seconds": -1}]', "fault 0: seconds must be"),
    ],
)
def test_a_plan_that_is_wrong(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(UserError, match="plan.json") as raised:
        faults.install(tmp_path / "plan.json", "hub")
    assert said in str(raised.value)


def run(plan: Path, program: list[str], who: str = "worker 0") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "atoll.testing.faults", str(plan), "--", *program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, faults.WHO_VARIABLE: who},
    )


def test_killed_once_then_started_again(tmp_path: Path) -> None:
    """The firing is on disk before the deed, and who comes again is spared."""
    plan = faults.write(tmp_path / "plan.json", [Fault("faults.start", role="shard", index=1)])
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint(__name__, *sys.argv[1:])\n")
    outcomes = []
    for who in ("shard 0", "shard 1", "shard 1"):
        process = run(plan, [str(script), "a", "--b"], who)
        said, error = process.communicate(timeout=DEADLINE)
        assert not error
        outcomes.append((process.returncode, said))
        if process.returncode:
            assert [(f.pid, f.who) for f in faults.fired(plan)] == [(process.pid, "shard 1")]
    assert outcomes == [(0, "__main__ a --b\n"), (-signal.SIGKILL, ""), (0, "__main__ a --b\n")]
    assert not faults.pending(plan)


def test_stopped_for_a_while_and_for_ever(tmp_path: Path) -> None:
    plan = faults.write(
        tmp_path / "plan.json",
        [Fault("faults.start", "stop", seconds=0.3, rank=0), Fault("faults.start", "stop", rank=1)],
    )
    script = tmp_path / "script.py"
    script.write_text("print('went on')\n")
    wakes, stays = (run(plan, [str(script)], f"worker {rank}") for rank in range(2))
    assert wakes.communicate(timeout=DEADLINE) == ("went on\n", "")
    # Both wait for a condition: the firing is written before the stop.
    deadline = threading.Event()
    for _ in range(int(DEADLINE * 20)):
        if psutil.Process(stays.pid).status() == psutil.STATUS_STOPPED:
            break
        deadline.wait(0.05)
    assert psutil.Process(stays.pid).status() == psutil.STATUS_STOPPED
    assert not faults.pending(plan)
    stays.send_signal(signal.SIGCONT)
    assert stays.communicate(timeout=DEADLINE) == ("went on\n", "")


def test_a_module_and_arguments_that_are_wrong(tmp_path: Path) -> None:
    plan = faults.write(tmp_path / "plan.json", [])
    # A module as -m runs it: the command line itself.
    process = run(plan, ["-m", "atoll.cli.app", "hub", "--workers", "1", "--patience", "0s"])
    assert process.communicate(timeout=DEADLINE) == ("", "atoll: --patience 0s: must be more than 0\n")
    assert process.returncode == 2
    for program in ([], ["-m"], [str(tmp_path / "missing.py")]):
        process = run(plan, program)
        _, error = process.communicate(timeout=DEADLINE)
        assert process.returncode == 2
        assert len(error.splitlines()) == 1
        assert error.startswith(("atoll: usage: python -m atoll.testing.faults", f"atoll: {tmp_path}"))


def reached() -> dict[str, str]:
    """Each point that the code reaches: its name, and where."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("reach", "points.reach"):
                where = f"{path.relative_to(SOURCE)}:{node.lineno}"
                name = node.args[0]
                assert isinstance(name, ast.Constant), f"{where}: the name of a point is a plain text"
                found[str(name.value)] = where
    return found


@pytest.mark.check
def test_the_table_of_points_is_that_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(points.POINTS, "test.here")
    monkeypatch.delitem(points.POINTS, "test.there")
    assert reached().keys() == points.POINTS.keys()
    assert all("." in name and meaning for name, meaning in points.POINTS.items())


def test_without_a_plan_nothing_happens() -> None:
    points.reach("test.here", 1)
    points.reach("a point that is not listed")
