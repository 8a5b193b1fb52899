"""What a session tells whoever drives it. Each has its reason, one line."""

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
    """The other end has been heard."""

    session: int
    reason: str


@dataclass(frozen=True)
class Arrived:
    """A transfer is handed on. `present` and `high` are by block of `block` elements (the last one may have
    fewer), in the order of place; `values`, (elements,), are in memory of their own. `nonzero`, by block, is
    how many elements of a high one are not 0, in its sender's words; NOT_SAID of the others."""

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
    usable_after: float  # seconds from its first datagram until it was of use
    reason: str


@dataclass(frozen=True)
class Delivered:
    """The receiver's word on a transfer that this end sent: which blocks were missing, by place, and what
    took their place. The values that were sent may be written to again."""

    transfer: int
    chunk: int
    iteration: int
    missing: Mask
    fill: Filled
    reason: str


@dataclass(frozen=True)
class Refused:
    """A transfer that came is not taken: it contradicts itself, or passes a bound. Nothing else is lost."""

    transfer: int
    reason: str


@dataclass(frozen=True)
class Migrated:
    """The other end is to be reached at another address."""

    stripe: int
    path: Hashable
    reason: str


@dataclass(frozen=True)
class StripeChanged:
    """From now on a stripe is not used, for it is silent; or again, for it has answered."""

    stripe: int
    used: bool
    reason: str


@dataclass(frozen=True)
class Asked:
    """The other end has so many bytes to send and asks for a share of this end's link (atoll.ltp.grants)."""

    size: int
    reason: str


@dataclass(frozen=True)
class Lost:
    """The session has ended: the other end is silent, or has said so, or this end closed it. Transfers that
    were not handed on, either way, are named: what was sent in them is to be kept for the next session."""

    session: int
    reason: str
    sent: tuple[int, ...] = ()  # transfers whose fate this end will not learn
    dropped: tuple[int, ...] = ()  # that had come in part


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
    """A session in figures. Rates in bytes per second, times in seconds; counts since it began."""

    rate: float
    estimate: float
    rtt: float
    min_rtt: float
    loss: float
    target: float
    in_flight: int  # bytes
    sent: int  # datagrams
    lost: int  # datagrams, those that were repaired too
    retransmitted: int  # datagrams
    repaired: int  # blocks that the code gave back here
    borne: int  # blocks absent from what was handed on here
    filled: int
    reason: str  # of the rate
    target_reason: str
