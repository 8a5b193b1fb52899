"""What a lab's links did over time: the file, and the picture of a run."""

from __future__ import annotations

import builtins
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lab_records import EMULATOR, LINK, journal

from atoll.core.errors import UserError
from atoll.lab import report, traffic
from atoll.lab.emulator import EmulatorCounters, LinkCounters
from atoll.lab.topology import parse_topology
from atoll.launch import labpicture

SITES = "".join(f'[[site]]\nname = "{name}"\n' for name in ("paris", "berlin", "oslo"))
TOPOLOGY = parse_topology(
    SITES
    + """
[[link]]
between = ["paris", "berlin"]
rate = "8Mbit/s"
loss = 0.01
[[link.change]]
at = 8
rate = "4Mbit/s"
[[link.outage]]
at = 3
for = 2
[[link]]
between = ["paris", "oslo"]
rate = "1Gbit/s"
[[link]]
between = ["berlin", "oslo"]
rate = "1Gbit/s"
"""
)


def counted(number: int, seconds: float) -> LinkCounters:
    """100 packets and 100 kB a second, of which one is lost; each has queued for 2 ms."""
    link, packets = TOPOLOGY.links[number], int(100 * seconds)
    return replace(
        LINK,
        source=link.source,
        target=link.target,
        offered_packets=packets,
        delivered_bytes=1000 * packets,
        lost_loss_packets=packets // 100,
        lost_queue_packets=0,
        lost_outage_packets=0,
        mean_queue_delay=0.002,
    )


def write_log(folder: Path, seconds: list[float]) -> None:
    log = traffic.TrafficLog(TOPOLOGY)
    for at in seconds:
        log.add(at, [counted(number, at) for number in range(6)])
    log.write(folder / traffic.TRAFFIC)


def test_moments_are_written_and_read(tmp_path: Path) -> None:
    write_log(tmp_path, [0.0, 1.0, 3.0])
    path = tmp_path / "links.jsonl"
    head = json.loads(path.read_text().splitlines()[0])
    assert head["links"][1] == ["berlin", "paris"]
    assert head["columns"][0] == "delivered_bytes"
    with path.open("a") as file:
        file.write("[4.0,[[1,")  # cut off
    moments = traffic.read(path)
    assert [moment.at for moment in moments] == [0.0, 1.0, 3.0]
    assert moments[1].rows[5] == traffic.Row(100_000, 100, 0, 1, 0, 0, 0.2)
    first, second = traffic.spans(moments, 2)
    assert (first.start, first.end, first.lost["loss"]) == (0.0, 1.0, 1)
    assert (second.rate, second.lost["loss"], second.lost["queue"]) == (800_000, 2, 0)
    assert second.queue_delay == pytest.approx(0.002)
    both = traffic.together([first, second])
    assert (both.start, both.end, both.rate, both.lost["loss"]) == (0.0, 3.0, 800_000, 3)


def test_a_long_lab_keeps_few_moments(tmp_path: Path) -> None:
    """As the sampler does: the next one comes when the log's interval has passed."""
    log = traffic.TrafficLog(parse_topology('[[site]]\nname = "a"\n'))
    at = 0.0
    while at < 10_000:
        log.add(at, [])
        at += log.interval
    log.write(tmp_path / "links.jsonl")
    times = [moment.at for moment in traffic.read(tmp_path / "links.jsonl")]
    assert 1000 < len(times) <= 2000
    assert log.interval == 8.0
    assert times == [8.0 * index for index in range(len(times))]
    assert times[-1] >= 10_000 - 8


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert traffic.read(tmp_path / "links.jsonl") == []


# -- the picture -------------------------------------------------------------------------------------------


def lab(
    folder: Path, computed: list[float], used: range = range(6), command: str = "torchrun train.py"
) -> None:
    """A lab of ten seconds, with three workers that train for eight of them."""
    (folder / "journals").mkdir()
    for worker in range(3 if computed else 0):
        journal(folder / "journals", worker, computed, 1.0, "ring gloo over 3 workers", 3)
    write_log(folder, [0.5 * index for index in range(21)])
    record = report.make(
        TOPOLOGY,
        command.split(),
        status=0,
        began=1000.0,
        seconds=10.0,
        links=[counted(number, 10.0 if number in used else 0.0) for number in range(6)],
        emulator=EmulatorCounters(**EMULATOR),
        dropped_before={},
        journals=folder / "journals",
    )
    report.write(record, folder)


def drawn(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The picture as SVG, its texts as text."""
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.setattr(labpicture, "PICTURE", "lab.svg")
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        return labpicture.redraw(folder).read_text(encoding="utf-8")


def test_the_picture_tells_what_happened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab(tmp_path, [0.5] * 8, range(4))
    said = drawn(tmp_path, monkeypatch)
    for text in (
        "torchrun train.py", "8 iterations", ">loss<", "s / iteration", "seconds since the start",
        "paris → berlin: 8 Mbit/s, 0 s, 1 % lost; carried 976.6 KiB, lost 10 of 1,000 packets (1.00%)",
        ">outage<", ">4 Mbit/s<", ">paris 0<", "computed 50%", "waiting for the links",
        "2 directions unused",
    ):  # fmt: skip
        assert text in said, text
    assert "oslo → berlin" not in said


def test_dollars_are_no_mathematics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab(tmp_path, [], command="sh -c kill -9 $$; echo $x_")
    assert "kill -9 $$; echo $x_" in drawn(tmp_path, monkeypatch)


def test_a_lab_without_training_has_a_picture_of_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab(tmp_path, [])
    said = drawn(tmp_path, monkeypatch)
    assert "oslo → berlin" in said
    assert "computing" not in said


def test_a_lab_in_which_nothing_happened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab(tmp_path, [], range(0))
    (tmp_path / "links.jsonl").unlink()
    assert "3 sites, 3 workers" in drawn(tmp_path, monkeypatch)


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab(tmp_path, [])
    real = builtins.__import__

    def missing(name: str, *rest: Any, **named: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(UserError, match=r"pip install 'atoll\[report\]'"):
        labpicture.redraw(tmp_path)


def test_where_a_workers_time_went(tmp_path: Path) -> None:
    journal(tmp_path, 0, [0.2, 0.4], 1.0, "ring gloo over 2 workers", 2)
    journal(tmp_path, 1, [0.6, 0.4], 1.0, "ring gloo over 2 workers", 2)
    told = report.read_journals(tmp_path, 2)
    shares = labpicture.shares(told[0], report.slowest(told), 1000.0, 4.0, 8)  # cells of half a second
    assert shares.computing == pytest.approx([0, 0, 0.2, 0.2, 0.4, 0.4, 0, 0])
    assert shares.slower == pytest.approx([0, 0, 0.4, 0.4, 0, 0, 0, 0])
    assert shares.links == pytest.approx([0, 0, 0.4, 0.4, 0.6, 0.6, 0, 0])
