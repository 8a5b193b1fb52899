"""Events that a session reports to its driver. Each has a reason, one line."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, TypeAlias, Union

import numpy as np
import numpy.typing as npt

from atoll.wire.datagrams import Bytes
from atoll.wire.linkcontrol import Filled, How

Values: TypeAlias = npt.NDArray[Any]
Mask: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Opened:
    """The first datagram from the other end arrived."""

    session: int
    reason: str


@dataclass(frozen=True)
class Arrived:
    """A transfer is complete enough and handed on.

    Args:
        values: (elements,), in memory of their own.
        present, high: by block of `block` elements, in the order of place; the last block may be shorter.
        nonzero: by block, elements other than 0 as the sender counted in high blocks; NOT_SAID for low ones.
    """

    transfer: int
    chunk: int
    iteration: int
    values: Values
    present: Mask
    high: Mask
    nonzero: npt.NDArray[np.uint16]
    block: int
    how: How  # the rule of atoll.ltp.closing
    fill: Filled
    usable_after: float  # seconds from its first datagram until it was usable
    reason: str


@dataclass(frozen=True)
class Delivered:
    """The receiver closed a transfer of this end: `missing` is by place, `fill` says what replaced these
    blocks.

    The sent values may be overwritten from now on.
    """

    transfer: int
    chunk: int
    iteration: int
    missing: Mask
    fill: Filled
    reason: str


@dataclass(frozen=True)
class Refused:
    """An arriving transfer was refused: it contradicts itself, or exceeds a bound. Other transfers go on."""

    transfer: int
    reason: str


@dataclass(frozen=True)
class Migrated:
    """The other end has a new address."""

    stripe: int
    path: Hashable
    reason: str


@dataclass(frozen=True)
class StripeChanged:
    """A stripe fell silent and is out of use, or answered and is back in use."""

    stripe: int
    used: bool
    reason: str


@dataclass(frozen=True)
class Asked:
    """The other end has `size` bytes to send and asks for a share of this end's link (atoll.ltp.grants)."""

    size: int
    reason: str


@dataclass(frozen=True)
class Lost:
    """The session ended: the other end is silent or closed it, or this end closed it.

    Unfinished transfers are named, so that their sender keeps the values for the next session.
    """

    session: int
    reason: str
    sent: tuple[int, ...] = ()  # sent transfers whose fate stays unknown
    dropped: tuple[int, ...] = ()  # transfers that had arrived in part


Event: TypeAlias = Union[Opened, Arrived, Delivered, Refused, Migrated, StripeChanged, Asked, Lost]


@dataclass(frozen=True)
class Burst:
    """Datagrams to seal and send: `frames` is (n, size), header, body and room for the seal at the end."""

    path: Hashable
    stripe: int
    frames: Bytes
    phase: int


@dataclass(frozen=True)
class Status:
    """Figures of a session. Rates in bytes per second, times in seconds; counts since it began."""

    rate: float
    estimate: float
    rtt: float
    min_rtt: float
    loss: float
    target: float
    in_flight: int  # bytes
    sent: int  # datagrams
    lost: int  # datagrams, restored ones included
    retransmitted: int  # datagrams
    repaired: int  # blocks restored from parity here
    borne: int  # blocks left out of transfers handed on here
    filled: int  # blocks filled here
    reason: str  # of the rate
    target_reason: str
