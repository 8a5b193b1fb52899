"""The search for a plan: from a profile of the model, measured bandwidths and budgets, how memory is used.

S2, "Search for the plan". Each candidate is run through an event model of compute, copies each way and the
optimizer's steps (`moves/timeline.py`); the one with the shortest step wins.
"""

from __future__ import annotations

import msgspec

from atoll.chunks import ParameterSpec
from atoll.core.memory import Budgets


class Use(msgspec.Struct, frozen=True):
    """One call that needs parameters (indices of `Profile.specs`) at once, and the seconds that it computes
    and those up to the next. `backward` where it is backward's."""

    parameters: tuple[int, ...]
    seconds: float = 0.0
    backward: bool = False


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """A step of a model, as it computes without moves.

    `state_bytes` is what the optimizer keeps for each trained element; `master_bytes` what a copy of the
    values in a wider dtype takes of each (0: values are their own). `activations` are the bytes at the peak
    that lie on the device beside the arenas. `measured` False: seconds are not known, and are 0.
    """

    specs: tuple[ParameterSpec, ...]
    uses: tuple[Use, ...]
    state_bytes: int = 0
    master_bytes: int = 0
    activations: int = 0
    measured: bool = True


class Bandwidths(msgspec.Struct, frozen=True, kw_only=True):
    """What this machine moves and steps: bytes/s each way, elements/s that an optimizer steps, and the
    seconds that a move takes whatever its size. `shared`: the device is the CPU, whose cores compute and
    the host's steps share."""

    to_device: float
    to_host: float
    to_disk: float = 0.0
    from_disk: float = 0.0
    host_steps: float
    device_steps: float
    latency: float = 0.0
    shared: bool = False


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """A step by the event model, from the second on. Peaks are the arenas', in bytes; `nbytes` are by
    direction, as in `MemoryFigures`; `computing` are the seconds of compute in `seconds`."""

    seconds: float
    computing: float
    device_peak: int
    host_peak: int
    disk_peak: int
    nbytes: dict[str, int]
    moves: dict[str, int]


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How a model is held. `blocks` of `chunk_bytes` make the device's arena: `cache_blocks` of them are for
    chunks that come and go, the rest for the chunks in `resident`, which stay, and for gradient and state of
    those in `steps_on_device`. `fits`: all of it stays on the device, and nothing moves."""

    chunk_bytes: int
    blocks: int
    cache_blocks: int
    resident: tuple[int, ...]  # chunk ids of the layout with `chunk_bytes`
    steps_on_device: tuple[int, ...]  # which are resident too
    fits: bool
    host_bytes: int  # of the host's arena
    disk_bytes: int  # of the disk's file
    sharding: str  # "none" with one member
    predicted: Prediction
    reason: str


def search_plan(profile: Profile, bandwidths: Bandwidths, budgets: Budgets) -> MemoryPlan:
    """The plan with the highest predicted throughput that keeps within `budgets`, and to their pins.

    Deterministic. Raises UserError that names the tier and the least budget that would do.
    """
    raise NotImplementedError
