"""Optimizers with modes, such as schedule-free ones, whose state lies elsewhere.

Their `train()` and `eval()` move the parameters by the state, so it must be here when they run. Source:
Defazio et al., "The Road Less Scheduled", 2024; docs/how-to/optimizers.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

MODES = ("train", "eval")


def has_modes(optimizer: torch.optim.Optimizer) -> bool:
    """True if the optimizer has `train()` and `eval()`."""
    return all(callable(getattr(optimizer, mode, None)) for mode in MODES)


class ShownInModes:
    """Calls `show()` before each `train()` and `eval()` of an optimizer that changes its mode, and `forget()`
    after it, until `remove`."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, show: Callable[[], None], forget: Callable[[], None]
    ) -> None:
        self._optimizer, self._show, self._forget = optimizer, show, forget
        own = vars(optimizer)
        self._wrapped = [mode for mode in MODES if has_modes(optimizer) and mode not in own]
        for mode in self._wrapped:
            setattr(optimizer, mode, self._shown_in(mode, getattr(optimizer, mode)))

    def remove(self) -> None:
        """Leave the optimizer its own methods."""
        for mode in self._wrapped:
            delattr(self._optimizer, mode)
        self._wrapped = []

    def _shown_in(self, mode: str, turn: Callable[..., Any]) -> Callable[..., Any]:
        def shown(*args: Any, **kwargs: Any) -> Any:
            if self._is_in(mode):  # a loop may call it in each step
                return turn(*args, **kwargs)
            self._show()
            found = turn(*args, **kwargs)
            self._forget()
            return found

        return shown

    def _is_in(self, mode: str) -> bool:
        """True if the param groups say that the optimizer is in this mode."""
        said = [group.get("train_mode") for group in self._optimizer.param_groups]
        return bool(said) and all(each is (mode == "train") for each in said)
