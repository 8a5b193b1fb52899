"""Optimizers with modes whose state lies elsewhere: it is fetched where the mode changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from atoll.tensors.modes import ShownInModes


class Turning(torch.optim.SGD):
    """Like schedule-free optimizers: `train()` and `eval()` turn the param groups' flag."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        for group in self.param_groups:
            group["train_mode"] = False

    def train(self) -> None:
        self._turn(True)

    def eval(self) -> None:
        self._turn(False)

    def _turn(self, to: bool) -> None:
        for group in self.param_groups:
            group["train_mode"] = to


def test_the_state_is_here_while_the_mode_changes_and_no_longer() -> None:
    optimizer, did = Turning(nn.Linear(2, 2).parameters(), lr=0.1), list[str]()
    shown = ShownInModes(optimizer, lambda: did.append("show"), lambda: did.append("forget"))
    optimizer.train()
    assert did == ["show", "forget"]
    optimizer.train()  # in each step of a loop
    assert did == ["show", "forget"]
    optimizer.eval()
    assert did == ["show", "forget"] * 2
    shown.remove()
    optimizer.train()
    assert did == ["show", "forget"] * 2
    assert "train" not in vars(optimizer)
