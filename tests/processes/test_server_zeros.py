"""Shards to which gradients come without their zeros: what they train, answer, keep and refuse."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from shard_cluster import Run, Worker, gradients, mean_of
from torch import Tensor

from atoll.exchange.codecs import codec_named
from atoll.exchange.coding import Coding
from atoll.exchange.zeros import with_zeros, without_zeros
from atoll.net.endpoint import Server
from atoll.server.journal import Folder, Journal
from atoll.server.payloads import payload_of
from atoll.server.recovery import encode_image, find
from atoll.server.shard import Shard
from atoll.tensors.payload import tensor_of
from atoll.wire import messages as m
from atoll.wire.lost import LostBlocks

pytestmark = pytest.mark.quick

TALL = 4  # the parameter of shape (40, 16): its rows are blocks of the payload, or halves of them


def sparse(seed: int) -> list[Tensor]:
    """Gradients with few rows, one of them of -0.0."""
    found = []
    for number, dense in enumerate(gradients(seed)):
        each = torch.zeros_like(dense)
        if dense.dim() and number == TALL:
            rows = torch.randint(len(dense), (3,), generator=torch.Generator().manual_seed(seed))
            each[rows] = dense[rows]
            each[seed % len(dense)] = -0.0
        found.append(each)
    return found


def payload(worker: Worker, codec: str, chunk: int, tensors: list[Tensor], iteration: int) -> memoryview:
    flat = worker.model.flat(chunk, tensors)
    coding = Coding(codec_named(codec))
    return coding.encode(flat, iteration + chunk) if coding.writes("float32") else payload_of(flat)


def push(
    worker: Worker, iteration: int, tensors: list[Tensor], codec: str = "float32", shares: int = 1
) -> int:
    """Push all chunks, in runs if there are several `shares`; return the number of shortened payloads."""
    count, itemsize = 0, 2 if codec == "bfloat16" else 4
    for chunk, shard in worker.model.shard_of.items():
        whole = payload(worker, codec, chunk, tensors, iteration)
        for share in range(shares):
            start, stop = m.run_of(whole.nbytes // itemsize, share, shares)
            run = whole[start * itemsize : stop * itemsize]
            shortened = without_zeros(run)
            count += shortened is not None
            message = push_of(worker, chunk, iteration, shortened=shortened is not None)
            message = msgspec.structs.replace(message, share=share, shares=shares)
            worker.send(shard, message, run if shortened is None else shortened)
    return count


def push_of(worker: Worker, chunk: int, iteration: int = 0, **changes: Any) -> m.Push:
    shard = worker.model.shard_of[chunk]
    return m.Push(
        incarnation=worker.incarnation,
        iteration=iteration,
        chunk=chunk,
        chunks_in_all=len(worker.model.held(shard)),
        present=bytes([1] * worker.model.slots(chunk)),
        **changes,
    )


def means(worker: Worker, iteration: int) -> tuple[dict[int, Tensor], int]:
    """The mean of each chunk, and how many of them came without their zeros."""
    found, count = {}, 0
    for shard in range(worker.model.shards):
        worker.send(shard, m.PullMean(incarnation=worker.incarnation, iteration=iteration))
        for _ in worker.model.held(shard):
            mean, raw = worker.expect(shard, m.Mean)
            if mean.shortened:
                raw = with_zeros(raw, 4 * worker.model.layout.chunks[mean.chunk].extent)
            found[mean.chunk] = tensor_of(raw, torch.float32)
            count += mean.shortened
    return found, count


def bits(values: Tensor) -> Tensor:
    return values.view(torch.int32)


@pytest.mark.parametrize("shares", [1, 3])
@pytest.mark.parametrize("codec", ["float32", "bfloat16"])
def test_bsp_has_the_bits_of_the_dense_gradients(start: Callable[..., Run], codec: str, shares: int) -> None:
    run = start(2, 2, setup={"codec": codec})

    def read(tensors: list[Tensor]) -> list[Tensor]:
        return [each.to(torch.bfloat16).float() for each in tensors] if codec == "bfloat16" else tensors

    for iteration in range(3):
        for worker in run.workers:
            assert push(worker, iteration, sparse(10 * iteration + worker.rank), codec, shares)
            worker.commit(iteration, 1.0 + worker.rank)
        mean = mean_of([read(sparse(10 * iteration + rank)) for rank in range(2)], [1.0, 2.0])
        for worker in run.workers:
            values, shortened = means(worker, iteration)
            assert shortened
            for chunk, flat in values.items():
                assert torch.equal(bits(flat), bits(run.model.flat(chunk, mean)))
            worker.say_step(iteration)
            worker.ask(iteration + 1)
        run.model.step_plain(mean)
        for worker in run.workers:
            worker.assert_has(worker.parameters(iteration + 1))


def test_a_mean_of_dense_gradients_is_dense(start: Callable[..., Run]) -> None:
    run = start(1, 1)
    (worker,) = run.workers
    worker.push(0, sparse(0))
    worker.commit(0)
    assert means(worker, 0)[1] == 0


@pytest.mark.parametrize("codec", ["float32", "bfloat16"])
@pytest.mark.parametrize("consistency", ["bsp", "asp"])
def test_a_shard_that_is_started_again_has_the_same_bits(
    start: Callable[..., Run], tmp_path: Path, consistency: str, codec: str
) -> None:
    """Its journal goes without the zeros, too."""
    folder = Folder(tmp_path, "test", 0)
    journal = Journal(folder, 0)
    journal.begin_segment(fresh=True)
    run = start(1, 1, consistency=consistency, setup={"codec": codec}, journal=lambda _: journal)
    (worker,) = run.workers
    more = {"hyperparameters": run.model.hyperparameters()} if consistency == "asp" else {}
    push(worker, 0, sparse(0), codec)
    worker.commit(0, **more)
    if consistency == "bsp":
        means(worker, 0)
        worker.say_step(0)
    worker.ask(1)
    values, liar = worker.parameters(1), push_of(worker, 0, 1, shortened=True)
    for lie in ({"chunk": 99}, {"share": 3, "shares": 3}, {"present": b"\1" * 99}):
        worker.send(0, msgspec.structs.replace(liar, **lie), made(0))
    worker.heard()
    recorded = journal.size
    push(worker, 1, sparse(1), codec)
    worker.heard()
    assert journal.size - recorded < 4 * sum(chunk.extent for chunk in run.model.layout.chunks) / 2
    run.close()
    folder.close()
    before, parts = run.cluster.shards[0].revival.image()
    found = find(Folder(tmp_path, "test", 0))
    assert found is not None
    server = Server("tcp://127.0.0.1:0", None, limit=2**24, name="shard")
    again = Shard(0, server, run="test", workers=1)
    again.revival.recover(found)
    server.close()
    image, held = again.revival.image()
    assert encode_image(image) == encode_image(before)
    assert [(part, bytes(raw)) for part, raw in held] == [(part, bytes(raw)) for part, raw in parts]
    model = again.model
    assert model is not None
    for chunk, flat in values.items():
        assert torch.equal(model.optimizer.values(chunk), flat)


def made(*numbers: int, values: int = 0) -> bytes:
    return struct.pack(f"<{len(numbers)}I", *numbers) + bytes([7] * values)


@pytest.mark.parametrize("codec", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, "0 bytes of a payload without its zeros"),
        (b"", "0 bytes of a payload without its zeros"),
        (made(2**32 - 1), "4294967295 runs in 4 bytes"),
        (made(1, 5, 0), "an empty run in a payload without its zeros"),
        (made(2, 0, 1, 0, 1, values=128), "an empty run in a payload without its zeros"),
        (made(1, 2**32 - 1, 1, values=64), "runs up to block 4294967296 of a payload without its zeros"),
        (made(1, 0, 2, values=64), "64 bytes in the runs of a payload without its zeros, not 128"),
        (bytes(2**20), "1048576 bytes of a payload without its zeros"),
    ],
)
def test_bytes_that_no_worker_writes_are_refused_by_name(
    start: Callable[..., Run], codec: str, given: bytes | None, said: str
) -> None:
    run = start(1, 1, consistency="asp", setup={"codec": codec})
    (worker,) = run.workers
    chunk = run.model.layout.places[TALL][0]
    worker.send(0, push_of(worker, chunk, shortened=True), given)
    reason = worker.refused()
    assert reason.startswith(f"chunk {chunk} of iteration 0: {said}")
    assert reason.isprintable()
    push(worker, 0, sparse(0), codec)  # what is right is taken
    worker.commit(0, hyperparameters=run.model.hyperparameters())
    worker.expect(0, m.Committed)


def test_a_chunk_that_is_not_there_and_gradients_that_are_absent_are_refused_as_ever(
    start: Callable[..., Run],
) -> None:
    run = start(1, 1, consistency="asp")
    (worker,) = run.workers
    lie = push_of(worker, 0, shortened=True)
    for changes, said in (
        ({"chunk": 99}, "this shard does not hold chunk 99"),
        ({"share": 3, "shares": 3}, "share 3 of 3: shares are counted from 0 to 2"),
        (
            {"present": bytes(run.model.slots(0))},
            "chunk 0 of iteration 0: it has no gradient, and goes without",
        ),
        ({"present": b"\1" * 99}, f"chunk 0 has {run.model.slots(0)} parameters, not 99"),
    ):
        worker.send(0, msgspec.structs.replace(lie, **changes), made(0))
        assert worker.refused().startswith(said)


def test_what_goes_without_its_zeros_arrives_whole(start: Callable[..., Run]) -> None:
    """Where a link has lost a part of it, nobody knows which elements that were."""
    run = start(1, 1, loses=lambda push, _: LostBlocks(4, b"\1", "borne") if push.shortened else None)
    (worker,) = run.workers
    chunk = run.model.layout.places[TALL][0]
    worker.send(0, push_of(worker, chunk, shortened=True), made(0))
    assert worker.refused() == (
        f"chunk {chunk} of iteration 0: a part of it was lost, and it goes without its zeros"
    )
    run.iterate(0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_found_between_the_zeros(start: Callable[..., Run], value: float) -> None:
    run = start(1, 1, consistency="asp", setup={"finite": True})
    (worker,) = run.workers
    tensors = sparse(0)
    tensors[TALL][20, 3] = value
    push(worker, 0, tensors)
    assert f"pushed a gradient of 'p{TALL}' with NaN or infinity" in worker.refused()
