"""Mutations of datagrams that stand in an arena, whole arrays at a time: what two storms of them share."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from atoll.wire.datagrams import Bytes

Rows = npt.NDArray[np.int64]


def change_bytes(rng: np.random.Generator, frames: Bytes, bits: Rows, some: Rows, extremes: Rows) -> None:
    """In place: of these rows a bit of the headers, of those a few bytes anywhere, of the last a field at an
    extreme."""
    width = frames.shape[1]
    frames[bits, rng.integers(0, 64, len(bits))] ^= (1 << rng.integers(0, 8, len(bits))).astype(np.uint8)
    for _ in range(5):
        frames[some, rng.integers(0, width, len(some))] = rng.integers(0, 256, len(some))
    start, length = rng.integers(0, 64, len(extremes)), rng.choice([1, 2, 4, 8], len(extremes))
    inside = (np.arange(width) >= start[:, None]) & (np.arange(width) < (start + length)[:, None])
    values = rng.choice([0, 1, 0x7F, 0x80, 0xFF], len(extremes)).astype(np.uint8)
    frames[extremes] = np.where(inside, values[:, None], frames[extremes])
