"""Copies between the device's arena and the host's.

All such copies go through these functions, so that a test of speed can replace them by a link of a known rate
(`tests/support/links.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(target: Tensor, source: Tensor) -> None:
    """Copy `source`, in host memory, into `target` on the device."""
    target.copy_(source)


def to_host(target: Tensor, source: Tensor, *, adds: bool = False) -> None:
    """Copy `source`, on the device, into `target` in host memory; with `adds`, add it to the content of
    `target`."""
    if adds:
        target.add_(source.to(target.device))
    else:
        target.copy_(source)


def is_needless(device: torch.device) -> bool:
    """True if the device's memory is the host's, so that fetched parts may arrive there directly."""
    return device.type == "cpu"
