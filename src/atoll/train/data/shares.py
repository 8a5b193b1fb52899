"""Shares: each member's number of a tick's samples; pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

# (tick, samples, members) -> each member's number of samples; they add up to all of the tick's. All members
# must be given the same, also when they ask again for a tick that was dealt before.
Shares: TypeAlias = Callable[[int, int, Sequence[int]], Sequence[int]]


def split(size: int, weights: Mapping[int, float]) -> dict[int, int]:
    """Split `size` samples in proportion to `weights`, by largest remainder; ties to the lower member."""
    whole = sum(weights.values())
    exact = {member: size * weights[member] / whole for member in sorted(weights)}
    parts = {member: int(value) for member, value in exact.items()}
    rest = sorted(parts, key=lambda member: (parts[member] - exact[member], member))
    for member in rest[: size - sum(parts.values())]:
        parts[member] += 1
    return parts
