"""Shares: each member's number of a tick's samples; pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

# (tick, samples, members) -> each member's number of samples, which add up to `samples`. The answer must be
# equal on all members, and equal again for a tick that was dealt before.
Shares: TypeAlias = Callable[[int, int, Sequence[int]], Sequence[int]]


def split(size: int, weights: Mapping[int, float]) -> dict[int, int]:
    """Split `size` samples in proportion to `weights`, by the largest remainder; the lower member wins a
    tie."""
    whole = sum(weights.values())
    exact = {member: size * weights[member] / whole for member in sorted(weights)}
    parts = {member: int(value) for member, value in exact.items()}
    rest = sorted(parts, key=lambda member: (parts[member] - exact[member], member))
    for member in rest[: size - sum(parts.values())]:
        parts[member] += 1
    return parts
