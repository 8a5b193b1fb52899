"""The two figures: that what is said of the claims follows from the costs, and what is written."""

from __future__ import annotations

import json
import math
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.cli.app import main
from atoll.core.errors import UserError
from atoll.plan import figures
from atoll.plan.claims import SCHEMES, AgainstLatency, AgainstNodes, Claim, Values, as_text, find

values = st.builds(
    lambda groups, members, size, bandwidth, compute, latency: Values(
        groups * members, groups, size, bandwidth, compute, (latency,)
    ),
    st.integers(1, 16),
    st.integers(1, 16),
    st.floats(1e3, 1e10),
    st.floats(1e6, 1e11),
    st.floats(0, 1e-8),
    st.floats(0, 0.2),
)


def best(given: Values, nodes: int, groups: int, latency: float) -> float:
    costs = given.costs(nodes, groups, latency)
    return min(getattr(costs, scheme) for scheme in SCHEMES)


@given(values)
@settings(deadline=None)
def test_lines_over_the_latency_are_the_costs(given: Values) -> None:
    lines = AgainstLatency(given, given.nodes, given.groups)
    for latency in (0.0, 1e-4, 1.0):
        costs = given.costs(given.nodes, given.groups, latency)
        for scheme in SCHEMES:
            assert lines.seconds(scheme, latency) == pytest.approx(getattr(costs, scheme), rel=1e-9)


@given(values)
@settings(deadline=None)
def test_where_two_lines_cross_they_cost_the_same_and_change_places(given: Values) -> None:
    for crossing in AgainstLatency(given, given.nodes, given.groups).crossings():
        at = given.costs(given.nodes, given.groups, crossing.at)
        assert getattr(at, crossing.upper) == pytest.approx(getattr(at, crossing.lower), rel=1e-6)
        beyond = given.costs(given.nodes, given.groups, 2 * crossing.at + 1)
        assert getattr(beyond, crossing.upper) < getattr(beyond, crossing.lower)


@given(values)
@settings(deadline=None)
def test_the_lowest_over_the_latency_is_the_lowest(given: Values) -> None:
    parts = AgainstLatency(given, given.nodes, given.groups).lowest()
    assert parts[0].start == 0
    assert parts[-1].end == math.inf
    assert all(one.end == other.start for one, other in pairwise(parts))
    for part in parts:
        for latency in (part.start, min(part.end, 2 * part.start + 1)):
            costs = given.costs(given.nodes, given.groups, latency)
            lowest = best(given, given.nodes, given.groups, latency)
            assert getattr(costs, part.scheme) == pytest.approx(lowest, rel=1e-6)


@given(values, st.sampled_from(["k", "N/k"]))
@settings(max_examples=40, deadline=None)
def test_the_lowest_over_the_workers_is_the_lowest(given: Values, fixed: str) -> None:
    lines = AgainstNodes(given, fixed, given.latencies[0])
    parts = lines.lowest()
    assert (parts[0].start, parts[-1].end) == (lines.nodes[0], lines.nodes[-1])
    for part in parts:
        for nodes in (int(part.start), int(part.end)):
            groups = given.groups if fixed == "k" else nodes * given.groups // given.nodes
            costs = given.costs(nodes, groups, given.latencies[0])
            assert getattr(costs, part.scheme) == best(given, nodes, groups, given.latencies[0])


def said(given: Values, panel: str, about: str) -> Claim:
    (claim,) = [
        each
        for each in find(given).claims
        if f"{each.figure}: {each.setting}" == panel and each.claim.startswith(about)
    ]
    return claim


@pytest.mark.check
@given(values)
@settings(max_examples=40, deadline=None)
def test_the_slopes_say_which_claims_stop(given: Values) -> None:
    """As the specification has it: the lead over the parameter server shrinks, always."""
    panel = f"latency: N = {given.nodes}, k = {given.groups}"
    n, k = given.nodes, given.groups
    assert said(given, panel, "PS-HRA's lead over the parameter server").holds == "nowhere"
    steepest = max(2 * (n - 1), 2 * n / k + 2 * k - 3, 2 * n / k + 1, 2)
    assert (said(given, panel, "the ring is the steepest").holds == "everywhere") == (
        2 * (n - 1) == steepest and n > 2
    )
    over_rings = said(given, panel, "PS-HRA's lead over the hierarchical ring").holds
    assert (over_rings == "nowhere") == (2 * k - 4 <= 0)


@given(values)
@settings(max_examples=40, deadline=None)
def test_with_k_kept_the_hierarchical_ring_is_ahead_or_behind_by_the_same_at_every_n(given: Values) -> None:
    lines = AgainstNodes(given, "k", given.latencies[0])
    leads = [costs["hierarchical"] - costs["ps_hra"] for costs in lines.costs]
    most = max(costs["hierarchical"] for costs in lines.costs)
    assert leads == pytest.approx([leads[0]] * len(leads), abs=1e-9 * most)
    k, a = given.groups, given.latencies[0]
    whole, added = given.size / given.bandwidth, given.size * given.compute
    assert leads[0] == pytest.approx((2 * k - 4) * a - (2 * whole + added) / k, abs=1e-9 * most)


@given(values)
@settings(max_examples=40, deadline=None)
def test_with_the_size_of_groups_kept_ps_hra_is_flat(given: Values) -> None:
    lines = AgainstNodes(given, "N/k", given.latencies[0])
    assert lines.seconds("ps_hra") == pytest.approx([lines.costs[0]["ps_hra"]] * len(lines.nodes))


def test_what_is_found_at_the_stated_values() -> None:
    """The values that docs/planning.md speaks of."""
    given = Values()
    assert said(given, "latency: N = 16, k = 4", "PS-HRA is the lowest").where.startswith(
        "from 17 ms to 535 ms"
    )
    large = said(given, "nodes: k = 4 kept, a = 1 ms", "PS-HRA is the lowest")
    assert (large.holds, large.where.split(";")[0]) == ("nowhere", "nowhere")
    large = said(given, "nodes: N/k = 4 kept, a = 1 ms", "PS-HRA is the lowest")
    assert (large.holds, large.where.split(";")[0]) == ("everywhere", "from N = 176 to N = 1024")
    premise = said(given, "nodes: N/k = 4 kept, a = 1 ms", "the server is free")
    assert (premise.holds, premise.where.split(":")[0]) == ("in part", "not from N = 20 to N = 1024")
    assert premise.where.endswith("it is the lowest nowhere")
    premise = said(given, "nodes: N/k = 4 kept, a = 50 ms", "the server is free")
    assert premise.where.endswith("it is the lowest from N = 12 to N = 120")
    assert said(given, "nodes: k = 4 kept, a = 50 ms", "the server is free").holds == "everywhere"


def test_the_text_names_each_setting_once() -> None:
    findings = find(Values())
    lines = as_text(Values(), findings.claims).splitlines()
    assert len([line for line in lines if line.startswith("Time against ")]) == len(findings.panels) == 7
    assert len([line for line in lines if ": holds " in line]) == len(findings.claims) == 3 * 6 + 4 * 6


def test_the_strip_below_a_panel_has_the_panel_s_axis() -> None:
    pytest.importorskip("matplotlib")
    given = Values()
    for figure in (figures._latency_figure(given, find(given)), figures._nodes_figure(given, find(given))):
        panels = [axes for axes in figure.axes if axes.get_title()]
        strips = [axes for axes in figure.axes if not axes.get_title()]
        assert len(panels) == len(strips) > 2
        for panel, strip in zip(panels, strips, strict=True):
            assert panel.get_xlim() == strip.get_xlim()
            assert panel.get_xscale() == strip.get_xscale() == "log"
            assert panel.get_position().x0 < strip.get_position().x1


def atoll(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["atoll", "plan", "figures", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.check
def test_the_command_writes_pictures_and_claims(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    image = pytest.importorskip("matplotlib.image")
    out = tmp_path / "new" / "figures"
    assert atoll(monkeypatch, "--out", str(out), "--nodes", "8", "--groups", "2", "--latency", "5ms") == 0
    names = ["latency.png", "nodes.png", "claims.txt", "claims.json"]
    assert capfd.readouterr() == ("".join(f"{out / name}\n" for name in names), "")
    for name in names[:2]:
        pixels = image.imread(out / name)[..., :3]
        assert pixels.shape[0] > 400
        assert 0.02 < (pixels < 0.9).any(axis=2).mean() < 0.5  # something is drawn, on white
    written = json.loads((out / "claims.json").read_text())
    assert written["values"]["nodes"] == 8
    assert len(written["panels"]) == 3 + 2
    assert len(written["claims"]) == 6 * 5
    assert {claim["holds"] for claim in written["claims"]} <= {"everywhere", "in part", "nowhere"}
    assert "a = 5 ms" in (out / "claims.txt").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--groups", "3"], "16 nodes in 3 groups: N/k is kept in one figure, so k must divide N"),
        (["--groups", "17"], "groups = 17: more than the 16 nodes; a group has at least one"),
        (["--groups", "0"], "groups = 0: must be a whole number, 1 or more"),
        (["--nodes", "4.5"], "--nodes: '4.5' is not a whole number"),
        (["--nodes", "2000"], "2000 nodes: the figures begin with 1024 at most"),
        (["--bytes", "0"], "bytes = 0: with nothing to send there is nothing to draw"),
        (["--latency", "1ms"] * 7, "7 latencies: a figure has room for 6"),
        (["--latency", "soon"], "--latency: 'soon' is not a span of time; write it like 90s, 200ms or 5min"),
    ],
)
def test_wrong_values_end_with_one_line_and_write_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    assert atoll(monkeypatch, "--out", str(tmp_path / "out"), *arguments) == 2
    assert capfd.readouterr() == ("", f"atoll: {said}\n")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "file").write_text("in the way")
    assert atoll(monkeypatch, "--out", str(tmp_path / "file" / "out")) == 2
    err = capfd.readouterr().err
    assert err == f"atoll: {tmp_path}/file/out: cannot write the figures: Not a directory\n"


def test_without_matplotlib_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in [name for name in sys.modules if name.startswith("matplotlib.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UserError, match=r"pip install 'atoll\[report\]'$"):
        figures.write(Values(), tmp_path / "out")
    assert atoll(monkeypatch, "--out", str(tmp_path / "out")) == 2
    err = capfd.readouterr().err
    assert err.endswith("the figures need the extra: pip install 'atoll[report]'\n")
    assert err.count("\n") == 1
