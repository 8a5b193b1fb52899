"""Options of the two ends of a link measurement (`atoll link`)."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from atoll.core.config import KEYS_VARIABLE
from atoll.core.errors import UserError
from atoll.core.options import SIZE, SPAN, Mark
from atoll.wire.linktest import MOST_PORTS, MOST_TRANSFER

TRANSPORTS = "ltp, ltp:reliable, tcp, tcp:ALGORITHM (such as tcp:cubic)"


class LinkServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of the end that measures for others. Raises UserError for what cannot be.

    Args:
        listen: Transfers come to PORT + 1, by TCP and UDP; 0: any free.
        key_file: Keys that both sides have (atoll keys FILE); without, only this machine can be measured.
        stripes: UDP ports that a session uses.
        seal: Whether datagrams are encrypted; in doubt, they are.
    """

    listen: Annotated[str, Mark("HOST:PORT")] = "127.0.0.1:47710"
    key_file: Annotated[str, Mark("FILE", variable=KEYS_VARIABLE)] = ""
    stripes: Annotated[int, Mark("N")] = 1
    seal: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.stripes <= MOST_PORTS:
            raise UserError(f"--stripes {self.stripes}: from 1 to {MOST_PORTS}")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


class LinkTestOptions(msgspec.Struct, frozen=True):
    """One measurement of a link. Raises UserError, one line, for values out of range.

    Args:
        transports: Of ltp, ltp:reliable, tcp, tcp:ALGORITHM (of congestion control).
        size: Of one transfer; rounded up to whole float32 values.
        count: Transfers of each transport.
        warm: Transfers before those that count.
        high: Of the blocks, of high priority; for ltp.
        timeout: For the server to answer, or to be silent.
        deadline: For one transfer.
        budget: After which a transport makes no more transfers.
        seed: Of the values that are sent.
    """

    transports: Annotated[tuple[str, ...], Mark("NAMES", flag="--transport", parse=_names)] = ("ltp", "tcp")
    size: Annotated[int, SIZE, Mark(flag="--bytes")] = 20_000_000
    count: Annotated[int, Mark("N")] = 20
    warm: Annotated[int, Mark("N")] = 2
    high: Annotated[float, Mark("SHARE")] = 0.2
    timeout: Annotated[float, SPAN] = 10.0
    deadline: Annotated[float, SPAN] = 120.0
    budget: Annotated[float, SPAN] = 300.0
    seed: Annotated[int, Mark(is_hidden=True)] = 0

    def __post_init__(self) -> None:
        for transport in self.transports:
            if not re.fullmatch(r"ltp(:reliable)?|tcp(:[\w-]{1,15})?", transport):
                raise UserError(f"--transport {transport}: no such transport; there are {TRANSPORTS}")
        if not self.transports or len(set(self.transports)) < len(self.transports):
            raise UserError(f"--transport {','.join(self.transports)}: name each transport once")
        if not 1 <= self.size <= MOST_TRANSFER:
            raise UserError(f"--bytes {self.size}: from 1 to {MOST_TRANSFER}")
        if not 1 <= self.count <= 10_000:
            raise UserError(f"--count {self.count}: from 1 to 10000 transfers")
        if not 0 <= self.warm <= 1000:
            raise UserError(f"--warm {self.warm}: from 0 to 1000 transfers")
        if not 0 <= self.high <= 1:
            raise UserError(f"--high {self.high:g}: a share is between 0 and 1")
        for name in ("timeout", "deadline", "budget"):
            if not 0 < getattr(self, name) < 1e6:
                raise UserError(f"--{name} {getattr(self, name):g}: must be more than 0 seconds")
