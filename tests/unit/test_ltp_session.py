"""Two sessions with each other: what is sent is what is handed on, whatever is lost on the way."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from ltp_wire import Wire

from atoll.ltp.session import Arrived, Delivered

BLOCK = 330  # elements of float32 in a datagram of 1,400 B


def some_values(count: int = 40_000, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=count).astype(np.float32)


def every_fifth(count: int = 40_000) -> np.ndarray:
    high = np.zeros(-(-count // BLOCK), dtype=bool)
    high[::5] = True
    return high


def losing(share: float, seed: int = 3):
    rng = np.random.default_rng(seed)
    return lambda client, burst, now: rng.random(len(burst.frames)) < share


def check(arrived: Arrived, delivered: Delivered, values: np.ndarray) -> None:
    """High blocks complete and exact; of the low ones, what is missing here is what is told there."""
    present = np.repeat(arrived.present, arrived.block)[: len(values)]
    assert arrived.present[arrived.high].all()
    assert arrived.values[present].tobytes() == values[present].tobytes()
    assert (delivered.missing == ~arrived.present).all()
    assert (delivered.transfer, delivered.fill) == (arrived.transfer, arrived.fill)


@pytest.mark.parametrize("loss", [0.0, 0.02, 0.3])
@pytest.mark.parametrize("reliable", [False, True])
def test_transfers_arrive(loss: float, reliable: bool) -> None:
    wire = Wire(drop=losing(loss))
    for iteration in range(4):
        values = some_values(seed=iteration)
        wire.client.send(wire.now, 0, iteration, values, high=every_fifth(), reliable=reliable)
        wire.run(lambda count=iteration + 1: len(wire.got(True, Delivered)) == count)
        arrived, delivered = wire.got(False, Arrived)[-1], wire.got(True, Delivered)[-1]
        check(arrived, delivered, values)
        assert arrived.iteration == iteration
        if reliable or loss == 0.0:
            assert arrived.present.all()
    sent = [burst for client, burst in wire.sent if client]
    assert all(len(burst.frames) <= 178 for burst in sent)
    assert all(before.stripe == after.stripe == 0 for before, after in pairwise(sent))
