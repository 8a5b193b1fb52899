"""The script's models that train as one: their module; and the passes of the script's loop."""

from __future__ import annotations

import pytest
from torch import nn
from torch.optim import SGD

from atoll.train.api.jointmodels import ScriptLoop, one_module
from atoll.train.api.origin import Origin
from atoll.train.api.scriptmodel import Given
from atoll.train.data.batches import OtherBatches
from atoll.train.data.passes import Passes

# A loop's reductions, each with the models that have new gradients; "step" is one of the first model's.
CRITIC, BOTH = frozenset({1}), frozenset({0, 1})
GAN = [CRITIC, BOTH, "step"]
CRITIC_FIRST = [frozenset({0}), "step", BOTH]
WASSERSTEIN = [CRITIC, CRITIC, frozenset({0}), "step"]
WITHOUT_BATCH = [frozenset[int](), frozenset[int](), "step"]


@pytest.mark.parametrize("loop", [GAN, CRITIC_FIRST, WASSERSTEIN])
def test_a_pass_ends_where_the_one_before_has_ended(loop: list[object]) -> None:
    passes, said = ScriptLoop(), list[bool]()
    for each in loop * 4:
        if isinstance(each, frozenset):
            said.append(passes.reduced(each))
        else:
            passes.stepped()
    length = len(loop) - 1
    assert said[:length] == [False] * length  # how long it is is not known
    assert said[length:] == ([False] * (length - 1) + [True]) * 3


def test_a_pass_without_a_batch_is_as_long_as_the_others() -> None:
    passes, said = ScriptLoop(), list[bool]()
    for each in [*GAN, *GAN, *WITHOUT_BATCH, *GAN]:
        if isinstance(each, frozenset):
            said.append(passes.reduced(each))
        else:
            passes.stepped()
    assert said == [False, False, *([False, True] * 3)]


ONE = frozenset({0})
TWICE = [ONE, ONE, "step"]  # two backwards before a step; or an optimizer that steps every second time


@pytest.mark.parametrize("times", [1, 2, 3])
def test_with_one_model_a_pass_has_the_backwards_whose_gradients_add_up(times: int) -> None:
    loop = ScriptLoop()
    for turn in range(4):
        for part in range(times):
            assert loop.begins(ONE) == (part == 0)
            assert loop.reduced(ONE) == (turn > 0 and part == times - 1)
        loop.stepped()


def test_who_had_no_batch_as_its_loop_began_keeps_nobody_out() -> None:
    loop = ScriptLoop()
    for each in [frozenset[int](), *TWICE, *TWICE]:
        if isinstance(each, frozenset):
            assert loop.begins(each)
            loop.reduced(each)
        else:
            loop.stepped()


def ends_of(passes: list[list[object]]) -> list[str]:
    """What is said of each pass's reductions: "e" for the last one of its pass, else "-"."""
    loop, said = ScriptLoop(), list[str]()
    for each in passes:
        said.append("")
        for event in each:
            if isinstance(event, frozenset):
                said[-1] += "e" if loop.reduced(event) else "-"
            else:
                loop.stepped()
    return said


@pytest.mark.parametrize("loop", [GAN, CRITIC_FIRST, WASSERSTEIN])
@pytest.mark.parametrize("missing", [1, 2])
def test_who_had_no_batch_as_its_loop_began_leaves_it_to_others_to_say_where_passes_end(
    loop: list[object], missing: int
) -> None:
    first = list(loop)
    for place in range(missing):
        if isinstance(first[place], frozenset):
            first[place] = frozenset[int]()
    said = ends_of([first, *[loop] * 8])
    assert not any("e" in each for each in said)


@pytest.mark.parametrize("first", [0, 1])
def test_a_pass_that_is_longer_now_and_then_is_not_taken_to_end_early(first: int) -> None:
    """StyleGAN2's lazy regularisation: a second step of the critic in every 16th pass, and of the generator
    in every fourth."""
    passes: list[list[object]] = [
        [
            *([CRITIC] * (2 if number % 16 == 0 else 1)),
            *([BOTH, "step"] * (2 if number % 4 == 0 else 1)),
        ]
        for number in range(first, 64)
    ]
    said = ends_of(passes)
    known = 1 if first == 0 else 16  # from here on the longest has been seen
    for each, events in list(zip(said, passes, strict=True))[known:]:
        reductions = sum(isinstance(event, frozenset) for event in events)
        assert "e" not in each[:-1]
        assert each.endswith("e") == (reductions == 4)


def test_a_pass_that_is_longer_than_any_before_is_foreseen_wrongly_once() -> None:
    passes: list[list[object]] = [[*[CRITIC] * n, BOTH, "step"] for n in (2, 2, 5, 2, 2, 5, 2)]
    assert ends_of(passes) == ["---", "--e", "--e---", "---", "---", "-----e", "---"]


def test_after_a_warm_up_of_long_passes_the_short_ones_count() -> None:
    passes: list[list[object]] = [[*[CRITIC] * n, BOTH, "step"] for n in [20] * 3 + [2] * 40]
    said = ends_of(passes)
    assert "e" not in said[3]
    assert said[-1] == "--e"


def given(name: str) -> Given:
    model = nn.Linear(2, 2)
    origin = Origin(name, [], "", "", "")
    return Given(model, [SGD(model.parameters(), lr=0.1)], origin, OtherBatches(Passes()))


def test_models_lie_under_their_names_or_numbers() -> None:
    names = ["generator", "2", "a.b", "forward", "training", "critic"]
    models = [given(name) for name in names]
    module = one_module(models)
    assert [name for name, _ in module.named_children()] == ["generator", "1", "2", "3", "4", "critic"]
    assert [each for _, each in module.named_children()] == [each.module for each in models]
    assert one_module(models[:1]) is models[0].module
