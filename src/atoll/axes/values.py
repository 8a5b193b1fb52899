"""Frozen values that the protocols of the axes use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ElementRange:
    """Neighbouring elements of one chunk, from `start` up to `stop`; `stop` is not among them. They are
    counted from the chunk's first element."""

    chunk: int
    start: int
    stop: int
