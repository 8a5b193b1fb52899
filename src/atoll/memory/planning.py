"""From a model and its optimizer to a plan: what `fit` asks before it takes any memory."""

from __future__ import annotations

import torch
from torch import nn

from atoll.core.memory import Budgets
from atoll.moves.search import MemoryPlan, Profile


def choose(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    budgets: Budgets,
    *,
    profile: Profile | None = None,
) -> MemoryPlan:
    """The plan for this model under `budgets`, by bandwidths measured now (well under a second).

    Without a `profile` (see `memory/profile.py`) uses are taken to go through the parameters in the order of
    registration and back, and to compute in no time: the plan with the least to move. Raises UserError with
    the least budget that would do, ConfigError where the disk's folder cannot be written to.
    """
    raise NotImplementedError
