"""Changes of gradients between a backward and the step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from atoll.chunks import lay_out
from atoll.tensors.binding import bind_model, specs_of
from atoll.train.gradients.watch import EditWatch


def watched() -> tuple[nn.Module, EditWatch]:
    net = nn.Linear(3, 2)
    parameters = dict(net.named_parameters())
    chunks = bind_model(lay_out(specs_of(parameters, dict.fromkeys(parameters.values(), "0"))), parameters)
    net(torch.ones(1, 3)).sum().backward()
    watch = EditWatch(chunks)
    watch.note()
    return net, watch


def test_nothing_was_changed() -> None:
    net, watch = watched()
    assert watch.first_edited(False) == ""
    net.weight.grad = None
    assert watch.first_edited(False) == ""  # dropped, not changed


@pytest.mark.parametrize("how", ["clip", "write", "replace"])
def test_a_change_is_found_by_name(how: str) -> None:
    net, watch = watched()
    if how == "clip":
        nn.utils.clip_grad_norm_([net.weight], 0.1)
    elif how == "write":
        net.weight.grad.mul_(2)  # type: ignore[union-attr]
    else:
        net.weight.grad = torch.ones(2, 3)
    assert watch.first_edited(False) == "weight"
    watch.note()
    assert watch.first_edited(False) == ""


def test_a_scaler_writes_once() -> None:
    net, watch = watched()
    for parameter in net.parameters():
        parameter.grad.mul_(0.5)  # type: ignore[union-attr]
    assert watch.first_edited(True) == ""
    net.bias.grad.mul_(0.5)  # type: ignore[union-attr]
    assert watch.first_edited(True) == "bias"
