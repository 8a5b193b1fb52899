"""What a CPU side tells its worker of slots that may be written again."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from peer_model import PeerModel

from atoll.cpuside.trained import Trained
from atoll.exchange.globalstate import pack_globals
from atoll.exchange.hostmemory import HostMemory, plan_memory
from atoll.tensors.shardoptimizer import full_name
from atoll.wire.device import Contribute, SetUp
from atoll.wire.nodes import About, Piece
from atoll.wire.peers import Key
from atoll.wire.peerviews import Life

SLOTS, BUFFERS = 3, 3


@pytest.fixture
def trained() -> Iterator[Trained]:
    with node("float32") as made:
        yield made


@contextlib.contextmanager
def node(codec: str) -> Iterator[Trained]:
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
    made = Trained(setup, [os.dup(memory.fd)], 0, lambda _: True, codec)
    yield made
    made.close()
    memory.close()


def contribute(trained: Trained, iteration: int) -> None:
    """Its own contribution to an iteration, which has been applied everywhere since."""
    trained.assembly.drop(keep(trained, iteration))


def keep(trained: Trained, iteration: int, weight: float = 1.0) -> Key:
    """Its own contribution to an iteration: what lies in the slot."""
    present = [bytes([1] * len(chunk.slots)) for chunk in trained.globals.layout.trainable]
    given = Contribute(
        iteration=iteration,
        taken=0,
        samples=1.0,
        weight=weight,
        present=present,
        hyperparameters=trained.setup.hyperparameters,
    )
    return trained.keep_own(Life(0, 1), given)


def test_after_another_node_s_state_the_worker_is_told_anew_what_is_free(trained: Trained) -> None:
    contribute(trained, 0)
    assert trained.freed(1) == 1
    assert trained.freed(1) is None, "that is no news"
    trained.take_over(pack_globals(trained.globals))
    assert trained.freed(1) == 1


def fill(trained: Trained, iteration: int) -> dict[int, torch.Tensor]:
    """Write whole numbers of sixteen bits into the slot, of which a bfloat16 drops some; by chunk, copies."""
    generator, found = torch.Generator().manual_seed(iteration), {}
    for chunk, flat in trained.memory.gradients(iteration).items():
        flat.copy_(torch.randint(-(2**15), 2**15, flat.shape, generator=generator))
        found[chunk] = flat.clone().double()
    return found


def hand_over(trained: Trained, key: Key, other: Trained) -> list[Piece]:
    """Send a contribution to another node; the pieces."""
    sent: list[tuple[About | Piece, Any]] = []
    trained.assembly.send(key, lambda message, payload: sent.append((message, payload)))  # type: ignore[arg-type]
    for message, payload in sent:
        other.assembly.add(message, None if payload is None else memoryview(bytes(payload)))
    return [message for message, _ in sent if isinstance(message, Piece)]


def test_by_a_codec_all_nodes_have_the_same_bits_and_what_it_drops_comes_later() -> None:
    """What is applied is the sum of the gradients less what is held back; and no gradient is held twice."""
    with node("bfloat16") as own, node("bfloat16") as other, node("bfloat16") as third:
        coded = {chunk.id for chunk in own.globals.layout.trainable if chunk.dtype == "float32"}
        assert coded
        given = {
            chunk: torch.zeros_like(own.globals.values(chunk), dtype=torch.float64) for chunk in own.chunks
        }
        applied = {chunk: flat.clone() for chunk, flat in given.items()}
        for iteration in range(5):
            gradients, counted = fill(own, iteration), iteration != 2
            key = keep(own, iteration)
            pieces = hand_over(own, key, other)
            assert {own.chunks[piece.chunk] for piece in pieces if piece.coded} == coded
            assert not any(piece.coded for piece in hand_over(other, key, third)), "passed on as it was read"
            (mine,), (theirs,), (last,) = (each.contributions([key]) for each in (own, other, third))
            for chunk in own.chunks:
                assert torch.equal(mine.gradients[chunk], theirs.gradients[chunk])
                assert torch.equal(mine.gradients[chunk], last.gradients[chunk])
                given[chunk] += gradients[chunk] * counted
                applied[chunk] += mine.gradients[chunk] * counted
            own.settle_own(iteration, counted=counted)
            held = own.feedback.state()
            assert held.keys() <= coded
            for chunk in coded:
                rest = held[chunk][0] if chunk in held else torch.zeros(())
                assert torch.equal(given[chunk], applied[chunk] + rest)
        assert held
        fill(own, 5)
        keep(own, 5)
        own.forget()
        assert all(torch.equal(own.feedback.state()[chunk][0], held[chunk][0]) for chunk in held)


def test_a_code_of_another_size_or_of_a_chunk_that_has_none_is_not_kept() -> None:
    with node("bfloat16") as own, node("float32") as plain:
        for receiver, size in ((own, 1), (own, 0), (plain, 2 * own.globals.values(own.chunks[0]).numel())):
            refused = receiver.assembly.refused
            piece = Piece(key=Key("iterations", 0, Life(1, 1)), chunk=0, coded=True)
            assert not receiver.assembly.add(piece, memoryview(bytes(size)))
            assert receiver.assembly.refused == refused + 1
            assert not receiver.assembly.has_some(piece.key)
