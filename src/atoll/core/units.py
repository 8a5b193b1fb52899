"""Parsing and formatting of sizes, spans of time and rates ("2GiB", "90s", "1Gbit/s")."""

from __future__ import annotations

import math
import re

from atoll.core.errors import ConfigError

_BYTES = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_SECONDS = {"": 1.0, "US": 1e-6, "MS": 1e-3, "S": 1.0, "M": 60.0, "MIN": 60.0, "H": 3600.0, "D": 86400.0}
# Without "bps", which tc reads as bytes and others as bits, and without bare numbers, which say neither.
_BITS_PER_SECOND = {
    f"{prefix}BIT{per}": scale
    for prefix, scale in (("", 1), ("K", 10**3), ("M", 10**6), ("G", 10**9), ("T", 10**12))
    for per in ("/S", "")
}
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z/]*)\s*\Z")


def parse_bytes(text: str | float) -> int:
    """Return the number of bytes in `2GiB`, `500 MB` or `4096`; raises ConfigError for other texts."""
    value, unit = _split(text, _BYTES, "a size", "2GiB, 500MB or 4096")
    return round(value * _BYTES[unit])


def parse_seconds(text: str | float) -> float:
    """Return the seconds in `90s`, `200ms`, `5min` or `1.5`; raises ConfigError for other texts."""
    value, unit = _split(text, _SECONDS, "a span of time", "90s, 200ms or 5min")
    return value * _SECONDS[unit]


def parse_rate(text: str | float) -> float:
    """Return the bits per second in `1Gbit/s`, `100 Mbit/s` or `56kbit`; raises ConfigError for others."""
    value, unit = _split(text, _BITS_PER_SECOND, "a rate", "1Gbit/s, 100Mbit/s or 56kbit/s")
    return value * _BITS_PER_SECOND[unit]


def bytes_per_second(text: str | float) -> float:
    """Return the bytes per second of a rate in bits, such as `1Gbit/s`; raises ConfigError for others."""
    return parse_rate(text) / 8


def format_bytes(count: float) -> str:
    """Format a size: `1.5 KiB` for 1536."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def format_seconds(seconds: float) -> str:
    """Format a span of time: `3 min 12 s` for 192.4, `12.3 ms` for 0.0123."""
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def format_rate(bits_per_second: float) -> str:
    """Format a rate: `125 Mbit/s` for 1.25e8."""
    for unit, scale in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits_per_second >= scale:
            return f"{bits_per_second / scale:.4g} {unit}"
    return f"{bits_per_second:.4g} bit/s"


def _split(
    text: str | float, units: dict[str, float] | dict[str, int], what: str, such_as: str
) -> tuple[float, str]:
    match = _QUANTITY.match(str(text))
    unit = match[2].upper() if match else ""
    if match is None or unit not in units or not math.isfinite(float(match[1]) * units[unit]):
        raise ConfigError(f"{text!r} is not {what}; write it like {such_as}")
    return float(match[1]), unit
