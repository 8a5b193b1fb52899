"""What members made of the mean of an iteration: told by sums, and whoever made something else is named."""

from __future__ import annotations

import math

import pytest
import torch

from atoll.core.hyperparameters import difference_line, first_difference
from atoll.tensors.settings import settings_of
from atoll.train.gradients.alike import Treatment, Treatments, are_alike, difference


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


def test_unlike_hyperparameters_are_seen_and_named() -> None:
    members = []
    for rate in (0.1, 0.1, 0.05):
        member = Treatments(lambda rate=rate: [{"lr": rate, "betas": [0.9, 0.99]}])  # type: ignore[misc]
        member.steps()
        member.stepped(7)
        members.append(member)
    assert alike(*members[:2])
    assert not alike(*members)
    assert difference([member.latest for member in members], ["0", "1", "4"]) == (
        "worker 0 steps with lr 0.1, worker 4 with lr 0.05 at step 7 (param group 0): set it alike on every "
        "worker; a scheduler that follows the loss: call scheduler.step(session.reduce(loss))"
    )


def test_unlike_numbers_of_param_groups_are_named() -> None:
    one, two = ([{"lr": 0.1}] * count for count in (1, 2))
    found = first_difference(one, two)
    assert found is not None
    assert difference_line("worker 0", "worker 1", 3, found).startswith(
        "worker 0 steps 1 param groups, worker 1 2 at step 3"
    )
    assert (
        first_difference([{"lr": math.nan, "betas": (0.9, 0.99)}], [{"lr": math.nan, "betas": [0.9, 0.99]}])
        is None
    )


def test_what_a_script_keeps_in_a_group_is_no_hyperparameter() -> None:
    """Nor is how a step is computed."""
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([{"params": [parameter], "rank": 3}], lr=0.1, foreach=True)
    (group,) = settings_of(optimizer)
    assert group["lr"] == 0.1
    assert not group.keys() & {"rank", "foreach", "fused", "params"}


def stepped_by(*places: int) -> Treatments:
    treatments = Treatments()
    treatments.steps_by(places[0], follows=False)
    treatments.stepped(3)
    for place in places[1:]:
        treatments.followed()
        treatments.steps_by(place, follows=True)
    return treatments


def test_which_of_several_optimizers_have_stepped_is_compared() -> None:
    assert alike(stepped_by(0, 1), stepped_by(0, 1))
    assert not alike(stepped_by(0, 1), stepped_by(0, 2))
    assert not alike(stepped_by(0), stepped_by(1))
    line = difference([stepped_by(0, 1).latest, stepped_by(0, 2).latest], ["0", "1"])
    assert (
        "worker 0 stepped or clipped 1 times after that and made the steps of optimizers 0 and 1 in" in line
    )
    assert (
        "worker 1 stepped or clipped 1 times after that and made the steps of optimizers 0 and 2 in" in line
    )
