"""What the records of a run without a server say of its nodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from atoll.core.events import Decided, NodeSeen, Started, StepDone
from atoll.observe.journal import Journal
from atoll.observe.nodes import MOST_LINES, node_lines, views_of
from atoll.observe.recorder import Recorder
from atoll.observe.report import _draw_nodes, draw
from atoll.observe.rundir import RunDirectory
from atoll.observe.summary import Summary, read_summary


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    made = RunDirectory(tmp_path / "run")
    made.create()
    return made


def recorded(run: RunDirectory, nodes: int, views: int) -> Summary:
    """Node n is stale by 0, 1 and 2 + n iterations, and has started n rounds; all tell of each view."""
    for node in range(nodes):
        with Journal(run.journal(node)) as journal:
            journal(Started(time=0.0, worker=node, workers=nodes, strategy="peers", device="cpu", pid=1))
            for view in range(1, views):
                choice = f"view {view}: nodes 0, {view}"
                journal(Decided(time=0.5 * view, worker=node, what="members", choice=choice, reason="lost"))
            for iteration, stale in enumerate((0, 1, 2 + node), start=1):
                journal(
                    StepDone(
                        time=float(iteration), worker=node, iteration=iteration, samples=4, seconds=1.0,
                        waiting=0.25, bytes_sent=9, exchange=0.01, staleness=stale,
                    )
                )  # fmt: skip
            journal(NodeSeen(time=4.0, worker=node, applied=3, rounds=node, bytes_out=2**21))
    return Recorder(run, nodes, "peers").close()


def cells(summary: Summary) -> tuple[list[list[str]], str]:
    """The table's rows, the first of them its head, and what stands above."""
    panel = Figure().subplots()
    _draw_nodes(panel, summary)
    (table,) = panel.tables
    found = table.get_celld()
    rows = [
        [found[row, column].get_text().get_text() for column in range(12)] for row in range(len(found) // 12)
    ]
    return rows, panel.get_title(loc="left")


def test_the_picture_has_a_table_of_them(run: RunDirectory) -> None:
    summary = recorded(run, 3, views=3)
    assert summary == read_summary(run.summary)
    assert views_of(summary) == ["view 1: nodes 0, 1", "view 2: nodes 0, 2"]
    rows, title = cells(summary)
    assert title == "view 2: nodes 0, 2, after 2 changes"
    assert rows[0][:6] == ["node", "stale by", "95 %", "most", "exchange", "waiting"]
    for node in range(3):
        stale = [f"{(3 + node) / 3:.1f}", str(2 + node), str(2 + node)]
        rounds = [str(node), "0", "0", "0"]
        assert rows[1 + node] == [str(node), *stale, "1.0%", "25.0%", "3", *rounds, "2.0 MiB"]
    with_nodes = imread(draw(run)).shape[0]
    plain = json.loads(run.summary.read_text())
    plain["nodes"] = []
    run.summary.write_text(json.dumps(plain))
    assert imread(draw(run)).shape[0] < with_nodes


def test_without_a_change_all_were_in_one_view(run: RunDirectory) -> None:
    assert cells(recorded(run, 2, views=1))[1] == "all in one view"


def test_of_many_nodes_the_first_are_told(run: RunDirectory) -> None:
    lines = node_lines(recorded(run, MOST_LINES + 2, views=1))
    assert len(lines) == MOST_LINES + 1
    assert lines[0].startswith("node 0: stale by 1.0 iterations (95 %: 2, most 2) · exchange 1.0%")
    assert lines[-1] == "nodes: 2 more: see summary.json"
