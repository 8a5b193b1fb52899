"""The assignment of devices to workers."""

from __future__ import annotations

import torch

from atoll.core.errors import ConfigError
from atoll.train.api.place import Place


def device_of(place: Place) -> torch.device:
    """Return the CUDA (or ROCm) device of this worker, or the CPU if there is none.

    Raises ConfigError if this machine has fewer devices than workers.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or accelerator.type != "cuda":  # others lack float64, DLPack or a c10d backend
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    if place.local_rank >= count:
        raise ConfigError(
            f"worker {place.rank} has no {accelerator.type} device of its own: this machine has {count}; "
            f"start {count} workers here, or hide the devices (CUDA_VISIBLE_DEVICES=) to train on the CPU"
        )
    torch.accelerator.set_device_index(place.local_rank)
    return torch.device(accelerator.type, place.local_rank)
