"""The closed forms of `atoll.plan.cost`: against the specification's, written here once more, term by term,
and against rings whose messages are followed one by one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.cli.app import main
from atoll.core.errors import UserError
from atoll.plan import cost

AT = {"nodes": 16, "size": 160e6, "bandwidth": 1.25e9, "latency": 1e-3, "compute": 1e-10}
SCHEMES: dict[str, Callable[..., float]] = {
    "parameter_server": cost.parameter_server,
    "ring": cost.ring,
    "hierarchical": cost.hierarchical,
    "ps_hra": cost.ps_hra,
}
GROUPED = ("hierarchical", "ps_hra")

quantities = st.fixed_dictionaries(
    {
        "size": st.floats(0, 1e12),
        "bandwidth": st.floats(1, 1e12),
        "latency": st.floats(0, 100),
        "compute": st.floats(0, 1e-3),
    }
)
nodes_and_groups = st.integers(1, 4096).flatmap(
    lambda nodes: st.tuples(st.just(nodes), st.integers(1, nodes))
)


def by_the_table(nodes: int, groups: int, **given: float) -> dict[str, Fraction]:
    """Each scheme's terms one by one, in exact fractions."""
    n, k = Fraction(nodes), Fraction(groups)
    s, b, a, c = (Fraction(given[name]) for name in ("size", "bandwidth", "latency", "compute"))
    m = n / k  # members of a group
    to_server = a + n * s / b
    ring_send, ring_add = a + s / (n * b), (s / n) * c
    group_send, group_add = a + k * s / (n * b), (k * s / n) * c
    leader_send, leader_add = a + s / (k * b), (s / k) * c
    broadcast = a + s / b
    return {
        "parameter_server": to_server + to_server + n * s * c,
        "ring": (n - 1) * (ring_send + ring_add) + (n - 1) * ring_send,
        "hierarchical": (m - 1) * (group_send + group_add)
        + (m - 1) * group_send
        + (k - 1) * (leader_send + leader_add)
        + (k - 1) * leader_send
        + broadcast,
        "ps_hra": (m - 1) * (group_send + group_add)  # reduce-scatter
        + (m - 1) * group_send  # all-gather
        + (2 * (a + s / b) + s * c)  # the server
        + broadcast,
    }


@given(nodes_and_groups, quantities)
@settings(deadline=None)
def test_each_scheme_is_the_table_s(counts: tuple[int, int], given: dict[str, float]) -> None:
    nodes, groups = counts
    expected = by_the_table(nodes, groups, **given)
    for name, scheme in SCHEMES.items():
        extra = {"groups": groups} if name in GROUPED else {}
        assert scheme(nodes=nodes, **extra, **given) == pytest.approx(float(expected[name]), rel=1e-12), name


@given(nodes_and_groups, quantities)
@settings(deadline=None)
def test_the_comparison_names_the_cheapest(counts: tuple[int, int], given: dict[str, float]) -> None:
    costs = cost.compare(nodes=counts[0], groups=counts[1], **given)
    assert getattr(costs, costs.best) == min(getattr(costs, name) for name in SCHEMES)


@given(st.integers(2, 64), st.integers(2, 64), quantities)
@settings(deadline=None)
def test_where_k_does_not_divide_n_the_time_lies_between_the_two_sizes_of_groups(
    nodes: int, groups: int, given: dict[str, float]
) -> None:
    if groups > nodes or nodes % groups == 0:
        return
    small, large = nodes // groups, nodes // groups + 1
    low, middle, high = (
        cost.ps_hra(nodes=n, groups=groups, **given) for n in (small * groups, nodes, large * groups)
    )
    assert low <= middle * (1 + 1e-12)
    assert middle <= high * (1 + 1e-12)


def followed(size: float, bandwidths: list[float], latencies: list[float], compute: float = 0.0) -> float:
    """When a ring's last message has come, each followed: member j sends over link j as soon as it has what
    it sends and the link is free; a latency holds up a message, not the link.
    """
    members = len(bandwidths)
    free, ready = [0.0] * members, [0.0] * members
    for step in range(2 * (members - 1)):
        came = [0.0] * members
        for member in range(members):
            free[member] = max(ready[member], free[member]) + size / members / bandwidths[member]
            came[(member + 1) % members] = free[member] + latencies[member]
        if step < members - 1:  # reduce-scatter
            came = [each + size / members * compute for each in came]
        ready = came
    return max(ready)


@given(st.integers(2, 20), quantities)
@settings(max_examples=30, deadline=None)
def test_the_ring_s_cost_is_what_its_messages_take(members: int, given: dict[str, float]) -> None:
    alike = [given["bandwidth"]] * members, [given["latency"]] * members
    assert followed(given["size"], *alike, given["compute"]) == pytest.approx(
        cost.ring(nodes=members, **given), rel=1e-9
    )


@given(
    st.lists(st.sampled_from([1e-4, 1e-3, 0.04]), min_size=3, max_size=16),
    st.sampled_from([1e7, 1e9]),
    st.floats(1e3, 1e9),
)
@settings(max_examples=60, deadline=None)
def test_a_ring_over_uneven_links_takes_about_what_its_mean_latency_says(
    latencies: list[float], bandwidth: float, size: float
) -> None:
    """With the greatest latency in place of the mean it would be up to ten times as much."""
    members = len(latencies)
    mean = sum(latencies) / members
    seconds = cost.ring(nodes=members, size=size, bandwidth=bandwidth, latency=mean, compute=0)
    simulated = followed(size, [bandwidth] * members, latencies)
    assert 0.6 * simulated <= seconds <= 1.7 * simulated


def test_one_machine_s_devices_as_in_the_worked_example() -> None:
    switch: dict[str, Any] = {"devices": 4, "size": 160e6, "bandwidth": 16e9}
    assert cost.one_device(**switch) == pytest.approx(60e-3)
    assert cost.on_cpu(**switch) == pytest.approx(80e-3)
    assert cost.spread(**switch) == pytest.approx(15e-3)


def test_the_v100s_rings_as_in_the_worked_example() -> None:
    """Two rings, 1-2-3-4-5-6-7-8 of two links and 1-4-6-3-5-8-2-7 of one."""
    v100s: dict[str, Any] = {"devices": 8, "size": 160e6, "bandwidth": 18e9, "links": 2 + 1}
    assert cost.ring_of(**v100s) == pytest.approx(2 * 160e6 / (3 * 18e9))
    assert cost.ring_of(**v100s) == pytest.approx(5.93e-3, abs=5e-6)
    assert cost.ring_of(**v100s, exact=True) == pytest.approx(5.19e-3, abs=5e-6)


@given(st.integers(1, 64), st.floats(0, 1e12), st.floats(1, 1e12))
@settings(deadline=None)
def test_devices_cost_what_their_transfers_take(devices: int, size: float, bandwidth: float) -> None:
    transfer = size / bandwidth
    one: dict[str, Any] = {"devices": devices, "size": size, "bandwidth": bandwidth}
    assert cost.one_device(**one) == pytest.approx(transfer * (devices - 1) * 2)
    assert cost.on_cpu(**one) == pytest.approx(transfer * devices * 2)
    assert cost.spread(**one) == pytest.approx(transfer / devices * (devices - 1) * 2)
    assert cost.ring_of(**one, exact=True) == pytest.approx(cost.spread(**one))
    assert cost.ring_of(**one, links=2) == pytest.approx(transfer)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"nodes": 0}, "nodes = 0: must be a whole number, 1 or more"),
    ({"nodes": -4}, "nodes = -4: must be a whole number, 1 or more"),
    ({"nodes": 2.5}, "nodes = 2.5: must be a whole number, 1 or more"),
    ({"nodes": float("nan")}, "nodes = nan: must be a whole number, 1 or more"),
    ({"nodes": float("inf")}, "nodes = inf: must be a whole number, 1 or more"),
    ({"nodes": "16"}, "nodes = '16': must be a whole number, 1 or more"),
    ({"size": -1.0}, "size = -1: must be a number that is 0 or more"),
    ({"size": float("nan")}, "size = nan: must be a number that is 0 or more"),
    ({"bandwidth": 0}, "bandwidth = 0: must be a number above 0"),
    ({"bandwidth": float("inf")}, "bandwidth = inf: must be a number above 0"),
    ({"latency": -1e-3}, "latency = -0.001: must be a number that is 0 or more"),
    ({"compute": None}, "compute = None: must be a number that is 0 or more"),
]


@pytest.mark.parametrize(("wrong", "said"), WRONG)
@pytest.mark.parametrize("name", SCHEMES)
def test_a_wrong_value_is_told_in_one_line(name: str, wrong: dict[str, Any], said: str) -> None:
    extra = {"groups": 1} if name in GROUPED else {}
    with pytest.raises(UserError) as error:
        SCHEMES[name](**{**AT, **extra, **wrong})
    assert str(error.value) == said


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        (17, "groups = 17: more than the 16 nodes; a group has at least one"),
        (0, "groups = 0: must be a whole number, 1 or more"),
        (-1, "groups = -1: must be a whole number, 1 or more"),
        (float("nan"), "groups = nan: must be a whole number, 1 or more"),
    ],
)
@pytest.mark.parametrize("name", GROUPED)
def test_a_wrong_number_of_groups_is_told_in_one_line(name: str, groups: float, said: str) -> None:
    with pytest.raises(UserError) as error:
        SCHEMES[name](**AT, groups=groups)
    assert str(error.value) == said


def test_devices_are_checked_as_nodes_are() -> None:
    for wrong, said in (
        ({"devices": 0}, "devices = 0"),
        ({"size": -1}, "size = -1"),
        ({"bandwidth": 0}, "bandwidth = 0"),
    ):
        for place in (cost.one_device, cost.on_cpu, cost.spread, cost.ring_of):
            with pytest.raises(UserError, match=f"^{said}: must be"):
                place(**{"devices": 4, "size": 1.0, "bandwidth": 1.0, **wrong})
    with pytest.raises(UserError, match=r"^links = 0: must be a number above 0$"):
        cost.ring_of(devices=4, size=1, bandwidth=1, links=0)


def atoll(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["atoll", "plan", "cost", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


OPTIONS = {
    "--nodes": "16",
    "--groups": "4",
    "--bytes": "160e6",
    "--bandwidth": "1.25e9",
    "--latency": "1e-3",
    "--compute": "1e-10",
}


def options(**changed: str) -> list[str]:
    given = {**OPTIONS, **{f"--{name}": value for name, value in changed.items()}}
    return [word for pair in given.items() for word in pair]


def test_the_command_prints_the_four_and_the_best(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert atoll(monkeypatch, *options(), "--json") == 0
    printed = json.loads(capfd.readouterr().out)
    expected = {name: float(each) for name, each in by_the_table(groups=4, **AT).items()}  # type: ignore[arg-type]
    assert printed.pop("best") == min(expected, key=expected.__getitem__) == "ring"
    assert list(printed) == list(SCHEMES)
    assert printed == pytest.approx(expected, rel=1e-12)


def test_without_json_it_is_a_table(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with_units = {"bytes": "160MB", "bandwidth": "10Gbit/s", "latency": "1ms"}
    assert atoll(monkeypatch, *options(**with_units)) == 0
    assert capfd.readouterr().out.splitlines() == [
        "parameter server       4.354 s",
        "ring                    285 ms   best",
        "hierarchical ring       549 ms",
        "ps-hra                  613 ms",
    ]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"groups": "17"}, "groups = 17: more than the 16 nodes; a group has at least one"),
        ({"groups": "0"}, "groups = 0: must be a whole number, 1 or more"),
        ({"groups": "four"}, "--groups: 'four' is not a number"),
        ({"nodes": "nan"}, "nodes = nan: must be a whole number, 1 or more"),
        ({"nodes": "-4"}, "nodes = -4: must be a whole number, 1 or more"),
        ({"bytes": "-1"}, "--bytes: '-1' is not a size; write it like 2GiB, 500MB or 4096"),
        ({"bandwidth": "0"}, "bandwidth = 0: must be a number above 0"),
        (
            {"bandwidth": "10Gb"},
            "--bandwidth: '10Gb' is not a rate; write it like 1Gbit/s, 100Mbit/s or 56kbit/s",
        ),
        ({"latency": "soon"}, "--latency: 'soon' is not a span of time; write it like 90s, 200ms or 5min"),
        ({"compute": "-1"}, "compute = -1: must be a number that is 0 or more"),
    ],
)
def test_wrong_options_end_with_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    changed: dict[str, str],
    said: str,
) -> None:
    assert atoll(monkeypatch, *options(**changed)) == 2
    assert capfd.readouterr() == ("", f"atoll: {said}\n")


def test_a_missing_option_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert atoll(monkeypatch, *options()[2:]) == 2
    assert capfd.readouterr() == ("", "atoll: Missing option '--nodes'.\n")
