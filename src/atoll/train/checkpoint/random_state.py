"""The states of random-number generators in checkpoints: captured, checked, and put back."""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of this worker's random-number generators, as JSON values.

    The generators are Python's, NumPy's, and torch's on the CPU and on `device`.
    """
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": _listed(random.getstate()),
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, cached],
        "torch": _hex(torch.get_rng_state()),
    }
    if device.type != "cpu":
        state[device.type] = _hex(torch.get_device_module(device).get_rng_state(device))
    return state


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Put back a `random_state`. A device of another type than the saved one keeps its generator."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_unhex(state["torch"]))
    if device.type != "cpu" and device.type in state:
        torch.get_device_module(device).set_rng_state(_unhex(state[device.type]), device)


def check_random_state(state: Any) -> None:
    """Raise ValueError if `derive_random_state` could not take `state`."""
    if not isinstance(state, dict) or not isinstance(state.get("torch"), str):
        raise ValueError("no state of random-number generators")


def derive_random_state(state: Mapping[str, Any], rank: int) -> None:
    """Seed this worker's generators from another worker's `state` and this worker's `rank`."""
    seed = zlib.crc32(f"{state['torch']}/{rank}".encode())
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _listed(value: Any) -> Any:
    return [_listed(part) for part in value] if isinstance(value, tuple) else value


def _hex(state: Tensor) -> str:
    return state.cpu().numpy().tobytes().hex()


def _unhex(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
