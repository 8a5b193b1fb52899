"""Parameters and optimizer state as one run of bytes: for a node that comes late, and for checkpoints.

    8 bytes      the head's length, little-endian
    head         MessagePack: `Head`
    payloads     in the head's order, each at a multiple of 64 bytes

Nothing in it is unpickled; sizes are held against the layout before anything is allocated or copied.
"""

from __future__ import annotations

from typing import Any

import msgspec
from torch import Tensor

from atoll.tensors.binding import BoundChunk
from atoll.train.node.globals import GlobalParameters
from atoll.wire.base import Count, Hyperparameters


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A chunk's part: whether its values are there; which element-wise states, by dtype; each slot's numbers
    (None: this slot has no such element-wise state). Payloads: the values, then the states in order."""

    chunk: Count
    values: bool
    states: dict[str, str]
    slots: list[dict[str, Any]]


class Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is packed. `optimizer` is the class's full name, `digest` the global parameters' chain's."""

    iteration: Count
    digest: bytes
    optimizer: str
    hyperparameters: Hyperparameters
    parts: list[Part]


def pack_globals(globals_: GlobalParameters, *, values: bool = True) -> memoryview:
    """All of it (values, optimizer state, iteration, digest); without `values`, for a checkpoint, the
    optimizer's state alone. In memory of its own: what is applied afterwards does not change it."""
    ...


def pack_globals_into(globals_: GlobalParameters, fd: int, *, values: bool = False) -> int:
    """As `pack_globals`, into a file that another process has given; returns how many bytes."""
    ...


def most_bytes(globals_: GlobalParameters) -> int:
    """More than `pack_globals` ever gives for this layout and optimizer: a limit for what comes from outside."""
    ...


def unpack_globals(raw: memoryview, globals_: GlobalParameters) -> Head:
    """Put what was packed into `globals_`, of the same layout and optimizer: the iteration and digest too
    where values were packed. Raises UserError, one line, for anything else, and changes nothing then."""
    ...


def pack_optimizer(
    optimizer: Any, chunks: list[BoundChunk], elementwise: set[str], iteration: int
) -> memoryview:
    """At the worker: the user's optimizer's state (plain torch's, per parameter), for SetUp."""
    ...


def unpack_optimizer(raw: memoryview, optimizer: Any, chunks: list[BoundChunk]) -> dict[Tensor, dict[str, Any]]:
    """At the worker: each parameter's state as plain torch would have it, of what came with State."""
    ...
