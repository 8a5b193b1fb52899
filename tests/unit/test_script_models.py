"""The script's models that train as one: their module, and the passes of the script's loop over them."""

from __future__ import annotations

import pytest
from torch import nn
from torch.optim import SGD

from atoll.train.api.origin import Origin
from atoll.train.api.scriptmodel import Given, LoopOverModels, one_module
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
    passes, said = LoopOverModels(), list[bool]()
    for each in loop * 4:
        if isinstance(each, frozenset):
            said.append(passes.reduced(each))
        else:
            passes.stepped()
    length = len(loop) - 1
    assert said[:length] == [False] * length  # how long it is is not known
    assert said[length:] == ([False] * (length - 1) + [True]) * 3


def test_a_pass_without_a_batch_is_as_long_as_the_others() -> None:
    passes, said = LoopOverModels(), list[bool]()
    for each in [*GAN, *GAN, *WITHOUT_BATCH, *GAN]:
        if isinstance(each, frozenset):
            said.append(passes.reduced(each))
        else:
            passes.stepped()
    assert said == [False, False, *([False, True] * 3)]


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
