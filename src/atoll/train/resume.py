"""What a checkpoint holds beside the model's tensors, and how each part is put back."""

from __future__ import annotations

import gc
import random
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from atoll.core.errors import CheckpointError


def random_state(device: torch.device) -> dict[str, Any]:
    """This worker's random-number generators: Python's, NumPy's, torch's on the CPU and on `device`.
    JSON can hold it."""
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
    """The inverse of `random_state`; a device of another kind than the one saved on keeps its generator."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_unhex(state["torch"]))
    if device.type != "cpu" and device.type in state:
        torch.get_device_module(device).set_rng_state(_unhex(state[device.type]), device)


def derive_random_state(state: Mapping[str, Any], rank: int) -> None:
    """Seed a worker that the checkpoint does not know, from worker 0's state and its rank."""
    seed = zlib.crc32(f"{state['torch']}/{rank}".encode())
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def schedulers_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The learning-rate schedulers that drive `optimizer`, leaving out those that another one holds.

    torch keeps no list of them on the optimizer, so the garbage collector is asked who there is; that takes
    some ten milliseconds, at a save or a load.
    """
    kinds = (torch.optim.lr_scheduler.LRScheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    gc.collect()  # a scheduler that the script has let go of must not count
    # By type(o): isinstance would ask every proxy and deprecated alias in the process for its __class__.
    found = [
        o
        for o in gc.get_objects()
        if issubclass(type(o), kinds) and getattr(o, "optimizer", None) is optimizer
    ]
    held = {id(child) for scheduler in found for child in getattr(scheduler, "_schedulers", ())}
    return [scheduler for scheduler in found if id(scheduler) not in held]


def scheduler_states(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of each scheduler of `optimizer`, under its class's name. Raises CheckpointError when
    two share one."""
    states: dict[str, Any] = {}
    for scheduler in schedulers_of(optimizer):
        name = type(scheduler).__name__
        if name in states:
            raise CheckpointError(
                f"two schedulers of class {name} drive the optimizer, so a checkpoint cannot tell "
                "them apart; "
                "join them in torch.optim.lr_scheduler.ChainedScheduler"
            )
        states[name] = scheduler.state_dict()
    return states


def load_scheduler_states(optimizer: torch.optim.Optimizer, states: Mapping[str, Any]) -> None:
    """Put scheduler states back. Raises CheckpointError where the script's schedulers are not those
    that were saved."""
    present = {type(scheduler).__name__: scheduler for scheduler in schedulers_of(optimizer)}
    for name, state in states.items():
        if name not in present:
            raise CheckpointError(
                f"the checkpoint holds the state of a {name}, and no {name} drives the optimizer; "
                "make it before session.load"
            )
        present[name].load_state_dict(state)


def check_model(module: nn.Module, saved: Mapping[str, Any], where: str) -> None:
    """Raise CheckpointError for the first name or shape of `saved` that does not fit the module."""
    current = module.state_dict()
    for name, value in current.items():
        if name not in saved:
            raise CheckpointError(f"{where}: holds no {name!r}, which the model has; it is of another model")
        if isinstance(value, Tensor) and value.shape != saved[name].shape:
            raise CheckpointError(
                f"{where}: {name!r} is {tuple(saved[name].shape)} there and {tuple(value.shape)} in the model"
            )
    for name in saved:
        if name not in current:
            raise CheckpointError(f"{where}: holds {name!r}, which the model lacks; it is of another model")


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], where: str) -> None:
    """`optimizer.load_state_dict`, with one line where the optimizer is another one."""
    try:
        optimizer.load_state_dict(dict(state))
    except ValueError as error:
        raise CheckpointError(f"{where}: its optimizer does not fit this one: {error}") from None


def _listed(value: Any) -> Any:
    return [_listed(part) for part in value] if isinstance(value, tuple) else value


def _hex(state: Tensor) -> str:
    return state.cpu().numpy().tobytes().hex()


def _unhex(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
