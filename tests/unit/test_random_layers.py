"""Which models draw random numbers in their forwards, as far as their layers tell."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from atoll.train.gradients.masks import digest_of_generators, has_random_layers


class DropPath(nn.Module):
    """As timm has it."""

    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.drop_prob = drop_prob


@pytest.mark.parametrize(
    "module",
    [
        nn.Dropout(),
        nn.Dropout2d(0.1),
        nn.AlphaDropout(0.1),
        nn.LSTM(4, 4, num_layers=2, dropout=0.1),
        nn.MultiheadAttention(4, 2, dropout=0.1),
        nn.TransformerEncoderLayer(4, 2, dropout=0.1),
        DropPath(0.1),
    ],
    ids=lambda module: type(module).__name__,
)
def test_layers_that_drop_values_are_seen_while_they_train(module: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(4, 4), module)
    assert has_random_layers(model.modules())
    assert has_random_layers(model.modules(), training=True)
    assert not has_random_layers(model.eval().modules(), training=True)


@pytest.mark.parametrize(
    "module",
    [nn.Dropout(0.0), nn.LSTM(4, 4), nn.MultiheadAttention(4, 2), DropPath(0.0), nn.BatchNorm1d(4)],
    ids=lambda module: type(module).__name__,
)
def test_layers_that_drop_nothing_are_none(module: nn.Module) -> None:
    assert not has_random_layers([nn.Linear(4, 4), *module.modules()])


def test_a_digest_tells_generators_apart_by_seed_and_by_what_they_have_drawn() -> None:
    before = torch.get_rng_state()
    try:
        found = []
        for seed, drawn in ((0, 0), (0, 1), (1, 0)):
            torch.manual_seed(seed)
            torch.rand(drawn)
            found.append(digest_of_generators(torch.device("cpu")))
        torch.manual_seed(0)
        assert digest_of_generators(torch.device("cpu")) == found[0]
        assert len(set(found)) == 3
    finally:
        torch.set_rng_state(before)
