"""A server whose link loses blocks of the gradients that come, as it is told to: for the tests of shards."""

from __future__ import annotations

import dataclasses
import os
import random
import zlib
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch

from atoll.net.endpoint import Received
from atoll.net.tunnel import TunnelServer
from atoll.server.payloads import payload_of
from atoll.tensors.payload import tensor_of
from atoll.wire import messages as m
from atoll.wire.lost import spans_of
from atoll.wire.messages import decode_untrusted

Loses: TypeAlias = Callable[[m.Push, memoryview], m.LostBlocks | None]

BLOCK = 16  # elements


def by_chance(seed: str | memoryview, extent: int, how: str) -> m.LostBlocks | None:
    """A third of the blocks of a payload of so many elements, the same for the same seed."""
    chance = random.Random(zlib.crc32(seed.encode() if isinstance(seed, str) else seed))
    missing = [chance.random() < 1 / 3 for _ in range(-(-extent // BLOCK))]
    if not any(missing):
        return None
    return m.LostBlocks(BLOCK, np.packbits(missing, bitorder="little").tobytes(), how)


def lost_by_content(push: m.Push, payload: memoryview) -> m.LostBlocks | None:
    """A third of the blocks, by what is in the payload (float32): what is sent again loses the same."""
    return by_chance(payload, payload.nbytes // 4, "zero" if push.iteration % 3 == 2 else "borne")


def anew(push: m.Push, payload: memoryview, how: str = "borne") -> m.LostBlocks | None:
    """A third of the blocks (float32) of what has any gradients, others each time that it is sent."""
    return by_chance(str(os.urandom(8)), payload.nbytes // 4, how) if any(push.present) else None


def filled_anew(push: m.Push, payload: memoryview) -> m.LostBlocks | None:
    """The same, where zeros that count have taken their place."""
    return anew(push, payload, "zero")


class LosingServer(TunnelServer):
    """A server whose link loses what `loses` says of each push, of values of its `dtype` (float32)."""

    def __init__(self, loses: Loses, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._loses = loses

    def receive(self, timeout: float) -> Received | None:
        received = super().receive(timeout)
        if received is None or received.payload is None or b"Push" not in received.header:
            return received
        push = decode_untrusted(received.header)
        if not isinstance(push, m.Push):
            return received  # a primary's copy of one, to its standby
        lost = self._loses(push, received.payload)
        if lost is None:
            return received
        values = tensor_of(received.payload, getattr(self._loses, "dtype", torch.float32)).clone()
        for start, stop in spans_of(lost, values.numel()):
            values[start:stop] = 0
        return dataclasses.replace(received, payload=payload_of(values), lost=lost)
