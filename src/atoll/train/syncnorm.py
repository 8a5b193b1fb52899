"""Check nn.SyncBatchNorm layers: they need a torch.distributed group, which Atoll does not make."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from atoll.core.errors import PrepareError


def check_sync_batch_norm(module: nn.Module, device: torch.device, workers: int) -> None:
    """Raise PrepareError for a layer that would use the statistics of this worker's batch alone.

    On a GPU the layer works if the script has made a process group of all `workers`. Without a group torch
    runs the layer as plain BatchNorm. On a CPU torch has no implementation.
    """
    for name, part in module.named_modules():
        if not isinstance(part, nn.SyncBatchNorm):
            continue
        what = f"module {name!r} is an nn.SyncBatchNorm"
        if device.type == "cpu":
            raise PrepareError(
                f"{what}, which torch has for GPUs alone; use nn.BatchNorm, whose statistics are those of "
                "each worker's own batch, or a norm that needs none of the batch (nn.GroupNorm, nn.LayerNorm)"
            )
        if not dist.is_initialized():
            found = "there is none, so the layer would be a plain BatchNorm"
        else:
            size = dist.get_world_size(part.process_group)
            found = f"the group has {size} of the session's {workers} workers" if size != workers else ""
        if found:
            raise PrepareError(
                f"{what}, which works over a torch.distributed process group, and {found}; call "
                'torch.distributed.init_process_group("nccl") after atoll.join and before session.prepare, '
                "or use nn.BatchNorm"
            )
