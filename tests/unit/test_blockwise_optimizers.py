"""Optimizers whose state is quantised in blocks, as 8-bit ones have it, are refused by name wherever
an optimizer is tried: they are element-wise for small parameters only."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import atoll
from atoll.chunks import lay_out
from atoll.core.config import Config
from atoll.core.errors import PrepareError, UserError
from atoll.core.memory import Memory
from atoll.memory.fit import fit
from atoll.memory.stepping import state_dtypes
from atoll.tensors import optimizer as tried
from atoll.tensors.binding import specs_of
from atoll.tensors.optimizer import elementwise_keys
from atoll.tensors.shardoptimizer import ShardOptimizer
from atoll.train.api.place import Place
from support.optimizers import SETTINGS, BlockwiseSGD
from support.pool import ring_of_one

LINE = (
    "optimizer BlockwiseSGD is not element-wise (it steps parameters of 4,096 elements and more by blocks, "
    "as 8-bit optimizers do), so it cannot step chunks; use one that is, such as torch.optim.AdamW or SGD"
)


@pytest.mark.parametrize("lr", [0.05, 1e-7, 0.0])
@pytest.mark.parametrize("whole_blocks", [False, True])
@pytest.mark.parametrize("least", [0, 1024, 4096, 16384])
@pytest.mark.parametrize("block", [64, 128, 256, 2048])
def test_every_kind_of_blocks_is_seen(block: int, least: int, whole_blocks: bool, lr: float) -> None:
    settings = {"block": block, "least": least, "whole_blocks": whole_blocks, "lr": lr}
    with pytest.raises(PrepareError, match="BlockwiseSGD is not element-wise"):
        elementwise_keys(BlockwiseSGD(nn.Linear(3, 3).parameters(), **settings))


def test_it_is_element_wise_where_it_never_quantises() -> None:
    assert elementwise_keys(BlockwiseSGD(nn.Linear(3, 3).parameters(), least=2**40)) == {"momentum"}


def prepared(place: Callable[[], Place]) -> None:
    model = nn.Linear(100, 100)
    with atoll.join(Config(), place=place()) as session:
        session.prepare(model, BlockwiseSGD(model.parameters()))


def fitted() -> None:
    model = nn.Linear(100, 100)
    fit(model, BlockwiseSGD(model.parameters()), memory=Memory(device="64KiB", host="1GiB"))


def at_a_shard() -> None:
    model = nn.Linear(100, 100)
    parameters = dict(model.named_parameters())
    layout = lay_out(specs_of(parameters, dict.fromkeys(parameters.values(), "0")), chunk_bytes=2**16)
    settings = {k: v for k, v in BlockwiseSGD(model.parameters()).param_groups[0].items() if k != "params"}
    path = "support.optimizers:BlockwiseSGD"
    ShardOptimizer(layout, [0], path.replace(":", "."), [settings], configured=path)


@pytest.mark.parametrize(
    "use",
    [
        lambda: prepared(Place),
        lambda: prepared(ring_of_one),
        fitted,
        at_a_shard,
        lambda: state_dtypes(BlockwiseSGD(nn.Linear(2, 2).parameters()), torch.float32),
    ],
    ids=["alone", "ring", "tiers", "shard", "planning"],
)
def test_it_is_refused_by_name_everywhere(use: Callable[[], None]) -> None:
    with pytest.raises((PrepareError, UserError)) as caught:
        use()
    assert str(caught.value).endswith(LINE)
    assert "\n" not in str(caught.value)


def test_optimizers_of_torch_pass_at_any_rate_of_learning() -> None:
    """Also where a warm-up has left nothing of the rate, and with tensors as rates."""
    for (name, variants), lr in itertools.product(SETTINGS.items(), (0.0, 1e-9, 1.0)):
        for settings in variants:
            elementwise_keys(
                getattr(torch.optim, name)(nn.Linear(2, 2).parameters(), **{**settings, "lr": lr})
            )
    rate = torch.tensor(0.0)
    optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters(), lr=rate)
    assert elementwise_keys(optimizer) == {"exp_avg", "exp_avg_sq"}
    assert float(rate) == 0.0


def test_param_groups_that_differ_in_their_rate_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[dict[str, Any]] = []
    real = tried.elementwise_state_keys
    monkeypatch.setattr(
        tried, "elementwise_state_keys", lambda o, group, d: tries.append(group) or real(o, group, d)
    )
    groups = [{"params": [nn.Parameter(torch.zeros(2))], "lr": 1e-4 * n} for n in range(1, 50)]
    groups += [{"params": [nn.Parameter(torch.zeros(2))], "betas": (0.8, 0.9)}]
    elementwise_keys(torch.optim.AdamW(groups))
    assert len(tries) == 2
