"""What members made of the mean of an iteration: told by sums, and whoever made something else is named."""

from __future__ import annotations

import pytest

from atoll.train.alike import Treatment, Treatments, are_alike, difference


def made(*clips: tuple[float, float], edited: bool = False, iteration: int = 3) -> Treatments:
    treatments = Treatments()
    for clip in clips:
        treatments.clipped(*clip)
    treatments.edited = edited
    treatments.stepped(iteration)
    return treatments


def alike(*members: Treatments) -> bool:
    return are_alike([sum(each) for each in zip(*(member.said() for member in members), strict=True)])


@pytest.mark.parametrize("world", [1, 2, 5, 1000])
def test_those_who_do_alike_pass(world: int) -> None:
    for member in (made(), made((1.0, 2.0)), made((1.0, 2.0), (0.5, float("inf")), edited=True)):
        assert alike(*[member] * world)
        assert alike(Treatments(), *[member] * world)  # who was not there says nothing
    assert alike(Treatments(), Treatments())


@pytest.mark.parametrize(
    "other",
    [made(), made((2.0, 2.0)), made((1.0, 1.0)), made((1.0, 2.0), edited=True), made((1.0, 2.0), (1.0, 2.0))],
)
def test_one_that_does_not_is_seen(other: Treatments) -> None:
    for others in range(1, 9):
        assert not alike(other, *[made((1.0, 2.0))] * others)
        assert not alike(*[other] * others, made((1.0, 2.0)), Treatments())


def test_a_step_begins_anew() -> None:
    member = made((1.0, 2.0), edited=True)
    member.stepped(4)
    assert member.latest == Treatment(4, (), False)


def test_the_line_names_who_did_what() -> None:
    members = [None, Treatment(7, (), False), None, Treatment(7, ((0.5, float("inf")),), True)]
    line = difference(members, ["0", "1", "2", "3"])
    assert line.startswith(
        "iteration 7: worker 1 left the gradients as they were, and worker 3 changed the gradients and "
        "clipped the gradients to 0.5 (norm_type inf), so that their models differ now; all must do the same"
    )
