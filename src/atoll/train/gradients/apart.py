"""Parameters that groups of workers have of their own (`atoll.memory.over`), as they begin."""

from __future__ import annotations

import torch
from torch import nn

from atoll.moves.owners import Groups
from atoll.train.members.workers import Workers


@torch.no_grad()
def take_from_groups(workers: Workers, parameter: nn.Parameter, groups: Groups) -> None:
    """Let each group's first worker give its value to the others of it. A collective of all."""
    if len(groups) == 1:
        workers.take_from_first([parameter], "worker 0's parameters")
        return
    rank = workers.place.rank
    for group in groups:
        # Others' values are heard too, and dropped: one broadcast at a time, over the connections there are.
        mine = rank in group
        into = parameter if mine else torch.empty(parameter.shape, dtype=parameter.dtype)
        workers.take_from(group[0], [into], f"worker {group[0]}'s parameters")
