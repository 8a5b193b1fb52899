"""Detect workers that draw equal random numbers in their forwards, and so equal dropout masks.

Each worker should draw its own masks.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch
from torch import nn

RECIPE = "torch.manual_seed(seed + session.rank)"
ALIKE = (
    "all workers draw the same random numbers, so their dropout masks and random augmentation are alike; "
    f"call {RECIPE} after session.prepare, on every worker"
)


def has_random_layers(modules: Iterable[nn.Module], *, training: bool = False) -> bool:
    """True if a module drops values at random.

    A layer counts by its class name (`nn.Dropout`) or by an attribute (`dropout` of attention and recurrent
    layers, `drop_prob` of a DropPath). With `training`, only modules in training mode count.
    """
    return any(_is_random(module) for module in modules if module.training or not training)


def _is_random(module: nn.Module) -> bool:
    attributes = vars(module)
    drops = [value for name, value in attributes.items() if "drop" in name.lower()]
    if "drop" in type(module).__name__.lower():
        drops.append(attributes.get("p"))
    return any(isinstance(value, float) and 0 < value <= 1 for value in drops)


def digest_of_generators(device: torch.device) -> int:
    """Return a 32-bit digest of the states of torch's generators on the CPU and on `device`.

    Two workers with equal digests have drawn equal numbers and will draw equal numbers.
    """
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    digest = 0
    for state in states:
        digest = zlib.crc32(state.cpu().numpy().tobytes(), digest)
    return digest
