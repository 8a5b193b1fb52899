"""The groups of strategy `hierarchical`, from sites and ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.axes.needs import check_groups
from atoll.core.errors import ConfigError
from atoll.groups.hierarchy import arrange
from atoll.plan import cost

NOWHERE = [""]


@pytest.mark.parametrize(
    ("sites", "count", "groups"),
    [
        (NOWHERE * 4, 2, ((0, 1), (2, 3))),
        (NOWHERE * 5, 2, ((0, 1, 2), (3, 4))),
        (NOWHERE * 3, 1, ((0, 1, 2),)),
        (NOWHERE * 3, 3, ((0,), (1,), (2,))),
        (NOWHERE * 2, 3, ((0,), (1,))),  # a ring of three that has lost one
        (NOWHERE * 1, 0, ((0,),)),
        (["a"] * 4, 0, ((0, 1), (2, 3))),
        (["a", "b", "a", "b", "b"], 0, ((0, 2), (1, 3, 4))),
        (["a", "b", "a", "b", "b"], 2, ((0, 2), (1, 3, 4))),
        (["b", "a", "b", "a"], 3, ((0, 2), (1,), (3,))),
        (["a", "", "a"], 0, ((0, 2), (1,))),
    ],
)
def test_who_shares_a_group(sites: list[str], count: int, groups: tuple[tuple[int, ...], ...]) -> None:
    assert arrange(sites, count).grouping.groups == groups


@pytest.mark.parametrize(
    ("sites", "count", "reason"),
    [
        (NOWHERE * 4, 2, "groups.count is 2"),
        (NOWHERE * 2, 3, "groups.count is 3, and 2 workers are left"),
        (NOWHERE * 1, 3, "groups.count is 3, and 1 worker is left"),
        (NOWHERE * 4, 0, "groups.count is 0, and there is one site: the fewest steps for 4 workers"),
        (["a", "b", "a"], 0, "one for each site: 2 at a, 1 at b"),
        (["a", "", "a"], 2, "one for each site: 2 at a, 1 at no site"),
        (["b", "a", "b", "a"], 3, "groups.count is 3; in order of the 2 sites"),
    ],
)
def test_the_reason_is_told(sites: list[str], count: int, reason: str) -> None:
    assert arrange(sites, count).reason == reason


@given(st.lists(st.sampled_from(["", "a", "b", "c"]), min_size=1, max_size=40), st.integers(0, 50))
def test_each_worker_is_in_one_group(sites: list[str], count: int) -> None:
    arranged = arrange(sites, count)
    arranged.grouping.check(range(len(sites)))
    if count:
        assert len(arranged.grouping) == min(count, len(sites))
    if len(set(sites)) < 2 or count not in (0, len(set(sites))):
        assert max(arranged.grouping.sizes) - min(arranged.grouping.sizes) <= 1


@given(st.integers(1, 100))
def test_without_sites_no_number_of_groups_takes_fewer_steps(workers: int) -> None:
    def steps(sizes: tuple[int, ...]) -> int:
        return 2 * (max(sizes) - 1) + 2 * (len(sizes) - 1)

    sites = NOWHERE * workers
    assert steps(arrange(sites, 0).grouping.sizes) == min(
        steps(arrange(sites, count).grouping.sizes) for count in range(1, workers + 1)
    )


@given(st.integers(1, 20))
def test_the_steps_are_those_of_the_closed_form(side: int) -> None:
    """Of a square number of workers, with nothing to send: a latency for each step, and the broadcast's."""
    groups = len(arrange(NOWHERE * side**2, 0).grouping)
    assert groups == side
    costs = {"size": 0.0, "bandwidth": 1.0, "latency": 1.0, "compute": 0.0}
    assert cost.hierarchical(nodes=side**2, groups=groups, **costs) == 4 * (side - 1) + 1


def test_more_groups_than_workers_are_refused() -> None:
    check_groups(0, 1)
    check_groups(4, 4)
    with pytest.raises(ConfigError) as refused:
        check_groups(5, 4)
    assert str(refused.value) == (
        "groups.count (--groups): 5 groups for 4 workers: each has at least one, so give 1 to 4, or leave it "
        "out for as many as are best"
    )
