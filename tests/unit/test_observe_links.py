"""What the records of a run say about its loss-tolerant links."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from matplotlib.image import imread

from atoll.core.events import LinkSeen, Started, StepDone
from atoll.launch.run import closing_lines
from atoll.observe.journal import Journal
from atoll.observe.links import MOST_LINES, link_lines
from atoll.observe.recorder import Recorder
from atoll.observe.report import draw
from atoll.observe.rundir import RunDirectory
from atoll.observe.summary import Summary, read_summary


def seen(worker: int, shard: int, time: float, **figures: float | int) -> LinkSeen:
    fixed: dict[str, float | int] = {
        "rate": 23e6, "estimate": 25e6, "rtt": 0.0412, "min_rtt": 0.04, "loss": 0.0123, "target": 0.01,
        "sent": 1000 + 10 * worker, "lost": 100 + worker, "retransmitted": 30, "repaired": 12, "borne": 34,
        "filled": 5, "held": 0.004, "bytes_in": 2**20, "bytes_out": 3 * 2**20,
    }  # fmt: skip
    return LinkSeen(
        time=time,
        worker=worker,
        who=f"worker {worker}",
        peer=f"shard {shard}",
        reason="no loss for 3 round trips",
        **{**fixed, **figures},  # type: ignore[arg-type]
    )


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    return directory


def recorded(run: RunDirectory, workers: int) -> Summary:
    for worker in range(workers):
        with Journal(run.journal(worker)) as journal:
            journal(Started(time=0.0, worker=worker, workers=workers, strategy="server", device="cpu", pid=1))
            for iteration in range(1, 4):
                journal(
                    StepDone(
                        time=float(iteration), worker=worker, iteration=iteration, samples=4, seconds=1.0,
                        waiting=0.25, bytes_sent=9,
                    )
                )  # fmt: skip
                journal(seen(worker, 0, float(iteration), borne=iteration))
    recorder = Recorder(run, workers, "server")
    recorder.poll()
    recorder.links.take(
        LinkSeen(time=3.0, worker=-1, who="site paris", peer="shard 0", site="paris", lost=10**6)
    )
    return recorder.close()


def test_the_summary_has_each_link_as_it_was_seen_last(run: RunDirectory) -> None:
    summary = recorded(run, 11)
    assert [link.name for link in summary.links[:4]] == [
        "site paris to shard 0", "worker 0 to shard 0", "worker 1 to shard 0", "worker 2 to shard 0",
    ]  # fmt: skip
    assert summary.links[-1].name == "worker 10 to shard 0"
    assert all(link.borne == 3 for link in summary.links[1:])
    plain = json.loads(run.summary.read_text())["links"][1]
    assert plain["rate"] == 23e6
    assert plain["held"] == 0.004
    assert plain["reason"] == "no loss for 3 round trips"
    assert read_summary(run.summary) == summary


def test_a_run_s_last_words_have_a_line_for_each_link(run: RunDirectory) -> None:
    summary = recorded(run, 2)
    lines = closing_lines(summary, run, drawn=False)
    assert (
        "atoll: link: worker 1 to shard 0: 3.0 MiB at 184 Mbit/s · delay 41.2 ms (least 40.0 ms) · loss "
        "1.23% (target 1.00%) · 101 of 1,010 datagrams lost · 12 blocks repaired · 3 borne · 5 filled · "
        "held back 0.40%"
    ) in lines
    assert any("link: site paris to shard 0: 0 B at 0 bit/s · loss 0.00%" in line for line in lines)


def test_of_many_links_those_that_lost_most_are_told(run: RunDirectory) -> None:
    summary = recorded(run, 20)
    lines = link_lines(summary)
    assert len(lines) == MOST_LINES + 1
    assert lines[0].startswith("link: site paris to shard 0")
    assert lines[-2].startswith("link: worker 19 to shard 0")
    assert lines[-1] == f"links: {21 - MOST_LINES} more, which lost less: see summary.json"


def test_the_picture_has_a_table_of_them(run: RunDirectory) -> None:
    recorded(run, 1)
    with_links = imread(draw(run)).shape[0]
    plain = json.loads(run.summary.read_text())
    plain["links"] = []
    run.summary.write_text(json.dumps(plain))
    assert imread(draw(run)).shape[0] < with_links


def test_a_run_over_tcp_says_nothing_of_links(run: RunDirectory) -> None:
    recorder = Recorder(run, 1, "server")
    summary = recorder.close()
    assert link_lines(summary) == []
    assert "links" not in json.loads(run.summary.read_text()) or summary.links == []
