"""What a CPU side tells its worker of slots that may be written again."""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec
import pytest
import torch
from peer_model import PeerModel

from atoll.cpuside.trained import Trained
from atoll.exchange.globalstate import pack_globals
from atoll.exchange.hostmemory import HostMemory, plan_memory
from atoll.tensors.shardoptimizer import full_name
from atoll.wire.device import Contribute, SetUp
from atoll.wire.peerviews import Life

SLOTS, BUFFERS = 3, 3


@pytest.fixture
def trained() -> Iterator[Trained]:
    model = PeerModel(torch.optim.SGD, [{"lr": 0.5}])
    memory = HostMemory.create(plan_memory(model.layout, SLOTS, BUFFERS))
    setup = SetUp(
        number=1,
        digest="d",
        layout=msgspec.Raw(msgspec.msgpack.encode(model.layout)),
        optimizer=full_name(torch.optim.SGD),
        hyperparameters=model.hyperparameters(),
        slots=SLOTS,
        buffers=BUFFERS,
    )
    made = Trained(setup, [os.dup(memory.fd)], 0, lambda _: True)
    yield made
    made.close()
    memory.close()


def contribute(trained: Trained, iteration: int) -> None:
    """Its own contribution to an iteration, which has been applied everywhere since."""
    present = [bytes([1] * len(chunk.slots)) for chunk in trained.globals.layout.trainable]
    given = Contribute(
        iteration=iteration,
        taken=0,
        samples=1.0,
        weight=1.0,
        present=present,
        hyperparameters=trained.setup.hyperparameters,
    )
    trained.assembly.drop(trained.keep_own(Life(0, 1), given))


def test_after_another_node_s_state_the_worker_is_told_anew_what_is_free(trained: Trained) -> None:
    contribute(trained, 0)
    assert trained.freed(1) == 1
    assert trained.freed(1) is None, "that is no news"
    trained.take_over(pack_globals(trained.globals))
    assert trained.freed(1) == 1
