"""A lab's closing report: what it says of links, workers and the emulator, and when it is loud."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lab_records import EMULATOR, LINK, journal

from atoll.core.errors import UserError
from atoll.core.events import StepDone, Warned, encode
from atoll.lab import report
from atoll.lab.emulator import EmulatorCounters
from atoll.lab.topology import parse_topology

TOPOLOGY = parse_topology("""
seed = 5
[[site]]
name = "paris"
workers = 2
speed = [1.0, 0.25]
[[site]]
name = "berlin"
[[link]]
from = "paris"
to = "berlin"
rate = "8Mbit/s"
""")


def make(folder: Path, before: dict[str, int] | None = None, **emulator: Any) -> report.LabRecord:
    return report.make(
        TOPOLOGY,
        ["train", "it"],
        status=0,
        began=1000.0,
        seconds=2.0,
        links=[LINK],
        emulator=EmulatorCounters(**{**EMULATOR, **emulator}),
        dropped_before=before or {"paris": 0, "berlin": 0},
        journals=folder,
    )


def test_each_link_is_told_in_full(tmp_path: Path) -> None:
    record = make(tmp_path)
    report.write(record, tmp_path)
    written = json.loads((tmp_path / "lab.json").read_text())
    (link,) = written["links"]
    assert (link["source"], link["target"]) == ("paris", "berlin")
    assert link["lost"] == {"queue": 40, "loss": 30, "outage": 30, "lab": 0}
    assert link["offered"] == {"packets": 1000, "bytes": 1_000_000}
    assert link["rate"] == pytest.approx(452_500)
    assert link["share"] == pytest.approx(0.25)
    assert written["kept_up"] is True
    assert (written["seed"], written["command"]) == (5, ["train", "it"])
    line = next(line for line in report.shown(record).splitlines() if "paris -> berlin" in line)
    assert line == (
        "link paris -> berlin carried 883.8 KiB (3.62 Mbit/s, busy 25% of the time) and lost 100 of 1000 "
        "packets (10.00%): 40 by queue, 30 by loss, 30 by outage; 5 came twice, 3 came corrupted, 2 came out "
        "of order; they queued 12.0 ms on average, 50.0 ms at worst"
    )
    assert report.read(tmp_path) == record


def test_a_folder_without_a_lab(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"lab.json: cannot be read: No such file or directory$"):
        report.read(tmp_path)
    (tmp_path / "lab.json").write_text('{"command": []}')
    with pytest.raises(UserError, match="is not a lab's record: "):
        report.read(tmp_path)


def test_an_emulator_that_kept_up_is_told_quietly(tmp_path: Path) -> None:
    said = report.shown(make(tmp_path))
    assert (
        "905 packets, 12 us late on average, 99 % by less than 80 us, at worst 2.0 ms; 0.2 s of a core"
        in said
    )
    assert "***" not in said
    assert "priority" not in said


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"dropped": 7}, "it dropped 7 packets itself"),
        ({"behind_seconds": 3}, "in 3 seconds it was behind"),
        (
            {"before": {"paris": 9, "berlin": 0}},
            "packets were dropped before it could read them (9 in paris)",
        ),
    ],
)
def test_one_that_did_not_is_told_loudly(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    record = make(tmp_path, **given)
    assert not record.kept_up
    shown = report.shown(record)
    assert f"*** THE EMULATOR COULD NOT KEEP UP: {said} ***" in shown
    assert "worse than the topology says" in shown


def test_what_it_was_not_allowed_is_told(tmp_path: Path) -> None:
    said = report.shown(make(tmp_path, realtime=False))
    assert "no real-time priority" in said


def test_packets_to_nowhere_are_told(tmp_path: Path) -> None:
    assert "dropped: 4 packets" in report.shown(make(tmp_path, unrouted=4))


def test_an_emulator_that_was_killed_is_told(tmp_path: Path) -> None:
    record = report.make(
        TOPOLOGY,
        ["x"],
        status=1,
        began=1000.0,
        seconds=1.0,
        links=[],
        emulator=None,
        dropped_before={},
        journals=tmp_path / "none",
    )
    assert not record.kept_up
    assert "*** THE EMULATOR WAS KILLED" in report.shown(record)


def test_what_links_cost_the_training(tmp_path: Path) -> None:
    """From the workers' journals; a line that was cut off and events of other kinds do no harm."""
    step = StepDone(time=1.0, worker=0, iteration=1, samples=8.0, seconds=0.2, waiting=0.15, bytes_sent=2048)
    line = encode(step) + b"\n"
    warned = encode(Warned(time=1.0, worker=0, message="x")) + b"\n"
    (tmp_path / "1-44.jsonl").write_bytes(warned + line * 3 + line[:20])
    (tmp_path / "0-43.jsonl").write_bytes(line)
    (tmp_path / "2-45.jsonl").write_bytes(warned)
    (tmp_path / "9-46.jsonl").write_bytes(line)  # no such worker
    record = make(tmp_path)
    assert [(each.name, each.steps, each.speed) for each in record.workers] == [
        ("paris 0", 1, 1.0),
        ("paris 1", 3, 0.25),
    ]
    assert record.workers[1].waiting == pytest.approx(0.45)
    assert record.workers[1].waiting_for_slower is None, "nobody said that workers meet in each iteration"
    assert (
        "worker paris 1 at speed 0.25 made 3 iterations of 200.0 ms: it computed 50.0 ms (25%) and waited "
        "150.0 ms (75%) for others and the links; it sent 2.0 KiB in each"
    ) in report.shown(record)


@pytest.mark.parametrize(
    ("choice", "world", "told"),
    [
        ("ring gloo over 2 workers", 2, True),
        ("server bsp, shards: tcp://10.77.1.1:47701", 2, True),
        ("server asp, shards: tcp://10.77.1.1:47701", 2, False),
        ("ring none: one worker", 1, False),  # two runs, side by side
    ],
)
def test_waiting_for_a_slower_worker_is_no_cost_of_links(
    tmp_path: Path, choice: str, world: int, told: bool
) -> None:
    """The first computes for 0.2 and 0.4 s of each second, the other 0.6 and 0.3 s."""
    journal(tmp_path, 0, [0.2, 0.4], 1.0, choice, world)
    journal(tmp_path, 1, [0.6, 0.3], 1.0, choice, world)
    record = make(tmp_path)
    slower = [worker.waiting_for_slower for worker in record.workers]
    if not told:
        assert slower == [None, None]
        return
    assert slower == pytest.approx([0.4, 0.1])
    assert (
        "worker paris 0 made 2 iterations of 1.0 s: it computed 300.0 ms (30%) and waited 200.0 ms (20%) for "
        "slower workers and 500.0 ms (50%) for the links; it sent 2.0 KiB in each"
    ) in report.shown(record)
