"""Check nn.SyncBatchNorm layers: they need a torch.distributed group, which Atoll does not make."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from atoll.axes.choices import Choices
from atoll.axes.needs import check


def check_sync_batch_norm(module: nn.Module, device: torch.device, workers: int) -> None:
    """Raise PrepareError for a layer that would use the statistics of this worker's batch alone.

    On a GPU the layer works if the script has made a process group of all `workers`. Without a group torch
    runs the layer as plain BatchNorm. On a CPU torch has no implementation.
    """
    for name, part in module.named_modules():
        if not isinstance(part, nn.SyncBatchNorm):
            continue
        if not dist.is_initialized():
            group = "there is none, so the layer would be a plain BatchNorm"
        else:
            size = dist.get_world_size(part.process_group)
            group = "whole" if size == workers else f"the group has {size} of the session's {workers} workers"
        check("prepare", Choices({"module": name, "device": device.type, "process group": group}))
