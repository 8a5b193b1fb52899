"""Settings of a session, on both ends. docs/ltp.md has the reason of each constant."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from atoll.core.errors import UserError
from atoll.wire.datagrams import DATAGRAM_BYTES, LEAST_DATAGRAM_BYTES, MOST_DATAGRAM_BYTES

Fill: TypeAlias = Literal["zero", "last", "rescale"]


@dataclass(frozen=True)
class LtpSettings:
    """Settings of a session. Raises UserError for a value out of range.

    Args:
        usable: share of the low-priority blocks with which a transfer is usable.
            close_high: share of the high-priority blocks, restorable ones included, at which the receiver
            says Early.
        fill_above: loss of low-priority blocks up to which it is borne, and above which it is filled.
        target_loss: loss to aim at where none can be fitted.
        repair_low: request low-priority blocks again while a transfer is not usable.
    """

    datagram_bytes: int = DATAGRAM_BYTES
    usable: float = 0.97
    close_high: float = 1.0
    fill_above: float = 0.03
    fill: Fill = "zero"
    target_loss: float = 0.01  # never above `fill_above`
    redundancy: bool = True  # forward error correction of high-priority blocks
    repair_low: bool = True
    initial_rate: float = 1.25e6  # bytes per second, until something was measured
    idle_seconds: float = 30.0  # of silence, after which the session ends

    def __post_init__(self) -> None:
        for name in ("usable", "close_high", "fill_above", "target_loss"):
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:
                raise UserError(f"{name} = {value:g}: a share is between 0 and 1")
        if self.target_loss > self.fill_above:
            raise UserError(
                f"target_loss = {self.target_loss:g}: it must not pass fill_above ({self.fill_above:g})"
            )
        if not LEAST_DATAGRAM_BYTES <= self.datagram_bytes <= MOST_DATAGRAM_BYTES:
            least, most = LEAST_DATAGRAM_BYTES, MOST_DATAGRAM_BYTES
            raise UserError(f"datagram_bytes = {self.datagram_bytes}: between {least} and {most}")
        if self.fill not in get_args(Fill):
            raise UserError(f"fill = {self.fill!r}: one of {', '.join(get_args(Fill))}")
        for name, unit in (("initial_rate", "bytes per second"), ("idle_seconds", "seconds")):
            value = getattr(self, name)
            if not 0.0 < value < math.inf:
                raise UserError(f"{name} = {value:g}: {unit}, more than 0 and finite")
