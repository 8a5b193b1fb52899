"""Starting values of parameters that each group of workers has for itself (`atoll.memory.over`)."""

from __future__ import annotations

import torch
from torch import nn

from atoll.moves.owners import Groups
from atoll.train.members.workers import Workers


@torch.no_grad()
def take_from_groups(workers: Workers, parameter: nn.Parameter, groups: Groups) -> None:
    """Let the first worker of each group give its value of `parameter` to the group's other workers. A
    collective of all.

    Args:
        workers: all workers.
        parameter: the parameter, in place.
        groups: the ranks in each group.
    """
    if len(groups) == 1:
        workers.take_from_first([parameter], "worker 0's parameters")
        return
    rank = workers.place.rank
    for group in groups:
        # A worker receives the other groups' values too, and drops them: each broadcast uses all connections.
        mine = rank in group
        into = parameter if mine else torch.empty(parameter.shape, dtype=parameter.dtype)
        workers.take_from(group[0], [into], f"worker {group[0]}'s parameters")
