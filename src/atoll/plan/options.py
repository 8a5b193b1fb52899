"""Options of the planner's commands: machines and links as numbers."""

from __future__ import annotations

from typing import Annotated

import msgspec

from atoll.core.errors import ConfigError
from atoll.core.options import Mark, Unit
from atoll.core.units import bytes_per_second, parse_bytes, parse_seconds


def _number(text: str | float) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{text!r} is not a number") from None


def _whole(text: str | float) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{text!r} is not a whole number") from None


def _bandwidth(text: str | float) -> float:
    """Return bytes/s: a bare number is bytes/s, as in the formulas; with a unit it is bits/s, as links are
    sold."""
    try:
        return float(text)
    except ValueError:
        return bytes_per_second(text)


# The formulas check the range of values.
NUMBER = Unit(_number, "", "", zero="", show="{:g}".format)
WHOLE = Unit(_whole, "", "", zero="", show="{:g}".format)
GRADIENTS = Unit(parse_bytes, "bytes", "", zero="", show=lambda size: f"{size / 1e6:g}MB")
BANDWIDTH = Unit(_bandwidth, "bytes per second", "", zero="", show=lambda rate: f"{rate * 8e-9:g}Gbit/s")
LATENCY = Unit(parse_seconds, "seconds", "", zero="", show=lambda seconds: f"{seconds * 1e3:g}ms")


class CostOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Machines for which costs are compared.

    Args:
        nodes: Workers.
        groups: Groups, of N/K workers.
        size: Gradients of a worker: 160e6, 160MB.
        bandwidth: Of a link: 1.25e9 (bytes/s), or in bits: 10Gbit/s.
        latency: From one worker to another: 1e-3 (seconds), 1ms.
        compute: Seconds to add up a byte, such as 1e-10.
    """

    nodes: Annotated[float, NUMBER, Mark("N")]
    groups: Annotated[float, NUMBER, Mark("K")]
    size: Annotated[float, GRADIENTS, Mark("S", flag="--bytes")]
    bandwidth: Annotated[float, BANDWIDTH, Mark("B")]
    latency: Annotated[float, LATENCY, Mark("A")]
    compute: Annotated[float, NUMBER, Mark("C")]
