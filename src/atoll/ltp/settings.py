"""What both ends of a session are set to. Every constant's reason stands in docs/ltp.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from atoll.core.errors import UserError
from atoll.wire.datagrams import DATAGRAM_BYTES, LEAST_DATAGRAM_BYTES, MOST_DATAGRAM_BYTES

Fill: TypeAlias = Literal["zero", "last", "rescale"]


@dataclass(frozen=True)
class Settings:
    """A session's. Raises UserError for shares and thresholds out of their range."""

    datagram_bytes: int = DATAGRAM_BYTES
    usable: float = 0.97  # share of the low-priority blocks with which a transfer is of use
    close_high: float = 1.0  # share of the high-priority blocks, restored ones too, at which the receiver says Early
    fill_above: float = 0.03  # loss of low-priority blocks up to which it is borne, and above which it is filled
    fill: Fill = "zero"
    target_loss: float = 0.01  # the safe value, where none can be fitted; never above `fill_above`
    redundancy: bool = True  # forward error correction of high-priority blocks
    repair_low: bool = True  # ask again for low-priority blocks while a transfer is not usable
    initial_rate: float = 1.25e6  # bytes per second, until something was measured
    idle_seconds: float = 30.0  # of silence, after which the other end is lost

    def __post_init__(self) -> None:
        for name in ("usable", "close_high", "fill_above", "target_loss"):
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:
                raise UserError(f"{name} = {value:g}: a share is between 0 and 1")
        if self.target_loss > self.fill_above:
            raise UserError(
                f"target_loss = {self.target_loss:g}: it must not pass fill_above, which is {self.fill_above:g}"
            )
        if not LEAST_DATAGRAM_BYTES <= self.datagram_bytes <= MOST_DATAGRAM_BYTES:
            raise UserError(
                f"datagram_bytes = {self.datagram_bytes}: between {LEAST_DATAGRAM_BYTES} and {MOST_DATAGRAM_BYTES}"
            )
