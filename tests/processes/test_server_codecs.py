"""Shards to which gradients come by a codec: what they train, keep and refuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from losing import by_chance
from shard_cluster import Run, Worker, gradients, mean_of
from torch import Tensor

from atoll.exchange.codecs import codec_named
from atoll.exchange.coding import Coding
from atoll.net.endpoint import Server
from atoll.server.journal import Folder, Journal
from atoll.server.recovery import encode_image, find
from atoll.server.shard import Shard
from atoll.wire import messages as m
from atoll.wire.lost import LostBlocks, missing_of

pytestmark = pytest.mark.quick

CODING = Coding(codec_named("bfloat16"))
BY = {"codec": "bfloat16"}


def push(worker: Worker, iteration: int, tensors: list[Tensor], share: int = 0, shares: int = 1) -> None:
    """All chunks of these gradients, or a share of each, as the codec writes them."""
    for chunk, shard in worker.model.shard_of.items():
        flat = worker.model.flat(chunk, tensors)
        start, stop = m.run_of(flat.numel(), share, shares)
        message = m.Push(
            incarnation=worker.incarnation,
            iteration=iteration,
            chunk=chunk,
            chunks_in_all=len(worker.model.held(shard)),
            present=bytes([1] * worker.model.slots(chunk)),
            share=share,
            shares=shares,
            late=True,
        )
        worker.send(shard, message, CODING.encode(flat[start:stop], iteration + chunk))


def read(tensors: list[Tensor]) -> list[Tensor]:
    return [each.to(torch.bfloat16).float() for each in tensors]


def test_bsp_is_plain_torch_with_the_mean_of_what_was_read(start: Callable[..., Run]) -> None:
    run = start(2, 2, setup=BY)
    for iteration in range(3):
        for worker in run.workers:
            push(worker, iteration, gradients(10 * iteration + worker.rank))
            worker.commit(iteration, 1.0 + worker.rank)
        mean = mean_of([read(gradients(10 * iteration + rank)) for rank in range(2)], [1.0, 2.0])
        for worker in run.workers:
            for chunk, (values, _) in worker.means(iteration).items():
                assert torch.equal(values, run.model.flat(chunk, mean)), "a mean comes as it is"
            worker.say_step(iteration)
            worker.ask(iteration + 1)
        run.model.step_plain(mean)
        for worker in run.workers:
            worker.assert_has(worker.parameters(iteration + 1))


def test_asp_is_plain_torch_with_what_was_read_of_a_group_s_shares(start: Callable[..., Run]) -> None:
    run = start(2, 1, consistency="asp", setup=BY)
    (worker,) = run.workers
    for iteration in range(3):
        for share in (1, 0, 2):
            push(worker, iteration, gradients(iteration), share, 3)
        worker.commit(iteration, hyperparameters=run.model.hyperparameters())
        worker.ask(iteration + 1)
        run.model.step_plain(read(gradients(iteration)))
        worker.assert_has(worker.parameters(iteration + 1))


def test_zeros_stand_for_what_a_link_has_lost_and_its_sender_is_told_which_elements(
    start: Callable[..., Run],
) -> None:
    """The link's blocks are of bytes, the answer's of elements."""

    def loses(sent: m.Push, payload: memoryview) -> LostBlocks | None:
        return by_chance(str(sent.chunk), payload.nbytes, "zero")

    loses.dtype = torch.uint8  # type: ignore[attr-defined]
    run = start(1, 1, setup=BY, loses=loses)
    (worker,) = run.workers
    push(worker, 0, gradients(0))
    worker.commit(0)
    worker.send(0, m.PullMean(incarnation=1, iteration=0))
    gone = 0
    for _ in run.model.chunks:
        mean, payload = worker.expect(0, m.Mean)
        assert payload is not None
        extent = run.model.layout.chunks[mean.chunk].extent
        expected = run.model.flat(mean.chunk, read(gradients(0)))
        lost = by_chance(str(mean.chunk), 2 * extent, "zero")
        assert mean.lost == (LostBlocks(lost.block // 2, lost.missing, "zero") if lost is not None else None)
        if mean.lost is not None:
            missing = missing_of(mean.lost, extent).repeat(mean.lost.block)[:extent]
            expected[torch.from_numpy(missing)] = 0
            gone += int(missing.sum())
        assert torch.equal(torch.frombuffer(payload, dtype=torch.float32), expected)
    assert gone > 100


@pytest.mark.parametrize("consistency", ["bsp", "asp"])
def test_a_shard_that_is_started_again_has_the_same_bits(
    start: Callable[..., Run], tmp_path: Path, consistency: str
) -> None:
    """Its journal holds what was read: the second iteration is staged, and not counted."""
    folder = Folder(tmp_path, "test", 0)
    journal = Journal(folder, 0)
    journal.begin_segment(fresh=True)
    run = start(1, 1, consistency=consistency, setup=BY, journal=lambda _: journal)
    (worker,) = run.workers
    hyperparameters = run.model.hyperparameters() if consistency == "asp" else []
    push(worker, 0, gradients(0))
    worker.commit(0, hyperparameters=hyperparameters)
    if consistency == "bsp":
        worker.means(0)
        worker.say_step(0)
    worker.ask(1)
    values = worker.parameters(1)
    push(worker, 1, gradients(1))
    worker.heard()
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


@pytest.mark.parametrize("size", [None, 0, 1, 3, "raw", "more"])
def test_bytes_that_are_no_run_by_the_codec_are_refused_by_name(start: Callable[..., Run], size: Any) -> None:
    run = start(1, 1, consistency="asp", setup={**BY, "finite": True})
    (worker,) = run.workers
    extent = run.model.layout.chunks[0].extent
    bytes_of = {"raw": 4 * extent, "more": 2 * extent + 2}
    count = bytes_of.get(size, size)
    given = m.Push(
        incarnation=1, iteration=0, chunk=0, chunks_in_all=len(run.model.chunks),
        present=bytes([1] * run.model.slots(0)),
    )  # fmt: skip
    worker.send(0, given, None if count is None else bytes(count))
    assert worker.refused() == (
        f"chunk 0 of iteration 0: {count or 0} bytes, and {extent} elements take {2 * extent} by sync.codec "
        "'bfloat16'"
    )
    push(worker, 0, gradients(0))  # what is right is taken
    worker.commit(0, hyperparameters=run.model.hyperparameters())
    worker.expect(0, m.Committed)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_comes_as_such_and_is_refused(start: Callable[..., Run], value: float) -> None:
    run = start(1, 1, consistency="asp", setup={**BY, "finite": True})
    (worker,) = run.workers
    tensors = gradients(0)
    tensors[2].view(-1)[-1] = value
    push(worker, 0, tensors)
    assert "pushed a gradient of 'p2' with NaN or infinity" in worker.refused()


def test_workers_with_unlike_codecs_are_refused_in_one_line(start: Callable[..., Run]) -> None:
    run = start(1, 2, setup=BY)
    other, line = run.again(1, 3), "worker 1 has sync.codec 'float32', and worker 0 has 'bfloat16': a run's "
    line += "gradients are written by one codec; set sync.codec to the same on all"
    other.send(0, m.Ready(digest="e", codec="float32"))
    assert other.refused() == line
    other.send(0, run.model.setup(0, workers=2, digest="e", codec="float32"))
    assert other.refused() == line


def test_a_shard_imports_no_codec_that_its_operator_has_not_named(start: Callable[..., Run]) -> None:
    run = start(1, 1)
    (worker,) = run.workers
    worker.send(0, run.model.setup(0, workers=1, digest="e", codec="antigravity"))
    assert worker.refused() == (
        "sync.codec 'antigravity' is none of Atoll's own ('bfloat16', 'float32'), and of others this process "
        "may load none: its operator names the one that it may, by --codec NAME"
    )
