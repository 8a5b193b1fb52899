"""Shards over loopback whose links lose blocks of the gradients: what is trained, what each is told, and what
a shard that is started again has of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from losing import by_chance
from shard_cluster import Run, Worker, gradients
from torch import Tensor

from atoll.net.endpoint import Server
from atoll.server.journal import Folder, Journal
from atoll.server.payloads import payload_of
from atoll.server.recovery import encode_image, find
from atoll.server.shard import Shard
from atoll.store.losses import ChunkLoss
from atoll.wire import messages as m
from atoll.wire.lost import spans_of
from atoll.wire.messages import LostBlocks, run_of

pytestmark = pytest.mark.quick

WEIGHTS = (1.0, 3.0, 2.0)


def lost_of(push: m.Push, payload: memoryview) -> LostBlocks | None:
    """A third of the blocks of most, by chance, the same each time that it is sent."""
    return loss_of(push, payload.nbytes // 4)


def loss_of(push: m.Push, extent: int) -> LostBlocks | None:
    what = f"{push.incarnation} {push.iteration} {push.chunk} {push.share} {push.shares}"
    return by_chance(what, extent, "zero" if push.iteration % 3 == 2 else "borne")


def expected_loss(worker: Worker, iteration: int, chunk: int, share: int = 0, shares: int = 1) -> Any:
    push = m.Push(
        incarnation=worker.incarnation,
        iteration=iteration,
        chunk=chunk,
        chunks_in_all=1,
        present=b"",
        share=share,
        shares=shares,
    )
    start, stop = run_of(worker.model.layout.chunks[chunk].extent, share, shares)
    return loss_of(push, stop - start)


def delivered(worker: Worker, iteration: int, chunk: int) -> tuple[Tensor, Tensor]:
    """What has come of a chunk of its gradients, and where: float64, and 0 or 1."""
    flat = worker.model.flat(chunk, gradients(10 * iteration + worker.rank)).double()
    there = torch.ones_like(flat)
    lost = expected_loss(worker, iteration, chunk)
    for first, last in spans_of(lost, len(flat)) if lost is not None else ():
        flat[first:last] = 0
        there[first:last] = 0 if lost.how == "borne" else 1
    return flat, there


def in_parameters(run: Run, flats: dict[int, Tensor]) -> list[Tensor]:
    """Chunks' values by parameter."""
    found = [torch.zeros_like(each) for each in run.model.every]
    for chunk, flat in flats.items():
        for slot in run.model.layout.chunks[chunk].slots:
            part = flat[slot.offset : slot.offset + slot.numel]
            found[slot.parameter].detach().copy_(part.reshape(found[slot.parameter].shape))
    return [each.detach() for each in found]


def answers(worker: Worker, kind: type[m.Mean] | type[m.Parameters]) -> dict[int, Any]:
    """An answer for each chunk, by chunk: message and values."""
    found = {}
    for shard in range(worker.model.shards):
        for _ in worker.model.held(shard):
            message, payload = worker.expect(shard, kind)
            assert payload is not None
            found[message.chunk] = message, torch.frombuffer(payload, dtype=torch.float32)
    return found


@pytest.mark.parametrize("late", [False, True])
def test_bsp_with_losses_is_plain_torch_with_the_mean_of_what_came(
    start: Callable[..., Run], late: bool
) -> None:
    """What comes later counts as a zero until then."""
    run = start(2, 3, loses=lost_of)
    told = 0
    for iteration in range(4):
        for worker, weight in zip(run.workers, WEIGHTS, strict=True):
            worker.push(iteration, gradients(10 * iteration + worker.rank), pull=True, late=late)
            worker.commit(iteration, weight)
        expected = {}
        for chunk in run.model.chunks:
            came = [delivered(worker, iteration, chunk) for worker in run.workers]
            if late:
                came = [(flat, torch.ones_like(there)) for flat, there in came]
            weighed = sum(weight * flat for weight, (flat, _) in zip(WEIGHTS, came, strict=True))
            total = sum(weight * there for weight, (_, there) in zip(WEIGHTS, came, strict=True))
            assert isinstance(weighed, Tensor)
            assert isinstance(total, Tensor)
            expected[chunk] = (weighed / total.clamp(min=1e-9)).float()
        for worker in run.workers:
            for chunk, (mean, values) in answers(worker, m.Mean).items():
                lost = expected_loss(worker, iteration, chunk)
                if lost is not None and late:
                    lost = msgspec.structs.replace(lost, how="zero")
                assert mean.lost == lost
                told += mean.lost is not None
                torch.testing.assert_close(values, expected[chunk], rtol=1e-6, atol=1e-7)
            worker.say_step(iteration)
            worker.ask(iteration + 1)
        run.model.step_plain(in_parameters(run, expected))
        for worker in run.workers:
            for chunk, (message, values) in answers(worker, m.Parameters).items():
                assert message.lost is None
                torch.testing.assert_close(values, run.model.flat(chunk), rtol=1e-5, atol=1e-6)
    assert told > 20


def test_asp_with_losses_is_plain_torch_with_zeros_for_what_was_lost(start: Callable[..., Run]) -> None:
    run = start(2, 1, consistency="asp", loses=lost_of)
    (worker,) = run.workers
    for iteration in range(4):
        worker.push(iteration, gradients(10 * iteration), pull=True)
        worker.commit(iteration, hyperparameters=run.model.hyperparameters())
        came = {chunk: delivered(worker, iteration, chunk)[0].float() for chunk in run.model.chunks}
        run.model.step_plain(in_parameters(run, came))
        for chunk, (message, values) in answers(worker, m.Parameters).items():
            assert (message.asked, message.clock) == (iteration + 1, iteration + 1)
            assert message.lost == expected_loss(worker, iteration, chunk)
            assert torch.equal(values, run.model.flat(chunk))
    worker.ask(3)  # asked for again, when more counts: what was lost of that one, not of the latest
    for chunk, (message, _) in answers(worker, m.Parameters).items():
        assert (message.asked, message.clock) == (3, 4)
        assert message.lost == expected_loss(worker, 2, chunk)


def test_parameters_without_a_gradient_count_as_zeros_whatever_is_lost(start: Callable[..., Run]) -> None:
    """Nobody has sent their zeros for their values: so the mean is what it is where nothing is lost."""

    def loses(push: m.Push, payload: memoryview) -> LostBlocks | None:
        return LostBlocks(payload.nbytes // 4, b"\1", "borne") if push.incarnation == 1 else None

    run = start(1, 2, loses=loses)
    one, two = run.workers
    one.push(0, gradients(1), missing=(0, 2, 4))
    two.push(0, gradients(2))
    one.commit(0, 3.0)
    two.commit(0, 1.0)
    expected = [g * (0.25 if i in (0, 2, 4) else 1.0) for i, g in enumerate(gradients(2))]
    for chunk, (values, _) in two.means(0).items():
        torch.testing.assert_close(values, run.model.flat(chunk, expected))


@pytest.mark.parametrize("consistency", ["bsp", "asp"])
def test_of_what_is_sent_twice_the_losses_of_the_copy_that_counts_are_told(
    start: Callable[..., Run], consistency: str
) -> None:
    copies: dict[int, int] = {}

    def loses(push: m.Push, payload: memoryview) -> LostBlocks:
        copies[push.chunk] = copies.get(push.chunk, -1) + 1
        return LostBlocks(payload.nbytes // 4, b"\1", "borne" if copies[push.chunk] == 0 else "zero")

    run = start(2, 1, consistency=consistency, loses=loses)
    (worker,) = run.workers
    worker.push(0, gradients(0))
    worker.push(0, gradients(0), pull=True)
    worker.commit(0, hyperparameters=run.model.hyperparameters() if consistency == "asp" else [])
    for chunk, (message, _) in answers(worker, m.Mean if consistency == "bsp" else m.Parameters).items():
        assert message.lost == LostBlocks(run.model.layout.chunks[chunk].extent, b"\1", "borne")
    assert set(copies.values()) == {1}


@pytest.mark.parametrize("consistency", ["bsp", "asp"])
def test_each_member_is_told_of_its_share(start: Callable[..., Run], consistency: str) -> None:
    run = start(2, 1, consistency=consistency, loses=lost_of)
    members = [run.workers[0], *(run.again(0, 1, member) for member in range(1, 3))]
    for share, member in enumerate(members):
        member.push(0, gradients(0), pull=True, share=share, shares=3)
    for member in members:
        for shard in range(2):
            member.heard(shard)
    members[0].commit(0, hyperparameters=run.model.hyperparameters() if consistency == "asp" else [])
    kind = m.Mean if consistency == "bsp" else m.Parameters
    lost = 0
    for share, member in enumerate(members):
        for chunk, (message, values) in answers(member, kind).items():
            assert message.lost == expected_loss(member, 0, chunk, share, 3)
            extent = run.model.layout.chunks[chunk].extent
            first, last = run_of(extent, share, 3)
            flat = run.model.flat(chunk, gradients(0))[first:last].clone()
            for begin, end in spans_of(message.lost, last - first) if message.lost is not None else ():
                flat[begin:end] = 0
                lost += end - begin
            assert consistency != "bsp" or torch.equal(values, flat)
    assert lost > 100


def test_a_worker_does_not_say_what_was_lost(start: Callable[..., Run]) -> None:
    run = start(1, 1)
    (worker,) = run.workers
    push = m.Push(
        incarnation=1,
        iteration=0,
        chunk=0,
        chunks_in_all=len(run.model.chunks),
        present=bytes(run.model.slots(0)),
        lost=LostBlocks(4, b"\1", "borne"),
    )
    worker.send(0, push, payload_of(run.model.flat(0, gradients(0))))
    assert "a Push does not say what was lost of it: the link does" in worker.refused()
    run.iterate(0)


def test_what_a_link_cannot_have_lost_is_refused(start: Callable[..., Run]) -> None:
    run = start(1, 1, loses=lambda push, _: LostBlocks(4, b"\1", "borne") if push.iteration == 0 else None)
    (worker,) = run.workers
    worker.push(0, gradients(0))
    assert "1 bytes for what is lost of" in worker.refused()


@pytest.mark.parametrize("consistency", ["bsp", "asp"])
@pytest.mark.parametrize("when", ["staged", "counted"])
def test_a_shard_that_is_started_again_knows_what_was_lost(
    start: Callable[..., Run], tmp_path: Path, consistency: str, when: str
) -> None:
    """From its journal alone; `when` it stops, one contribution is staged in part, or counts already."""
    folder = Folder(tmp_path, "test", 0)
    journal = Journal(folder, 0)
    journal.begin_segment(fresh=True)
    run = start(1, 1, consistency=consistency, loses=lost_of, journal=lambda _: journal)
    (worker,) = run.workers
    worker.push(0, gradients(0), pull=when == "counted")
    if when == "counted":
        worker.commit(0, hyperparameters=run.model.hyperparameters() if consistency == "asp" else [])
        answers(worker, m.Mean if consistency == "bsp" else m.Parameters)
    worker.heard()
    run.close()
    folder.close()
    before, _ = run.cluster.shards[0].revival.image()
    found = find(Folder(tmp_path, "test", 0))
    assert found is not None
    server = Server("tcp://127.0.0.1:0", None, limit=2**24, name="shard")
    again = Shard(0, server, run="test", workers=1)
    again.revival.recover(found)
    server.close()
    assert encode_image(again.revival.image()[0]) == encode_image(before)
    model = again.model
    assert model is not None
    staged = before.model.held.staged.get((0, 1), {})
    for chunk in model.chunks:
        lost = expected_loss(worker, 0, chunk)
        if when == "staged":
            assert staged[0].losses.get(chunk) == (ChunkLoss(1, {0: lost}) if lost else None)
        else:
            pull = model.pull_with(m.Push(incarnation=1, iteration=0, chunk=0, chunks_in_all=1, present=b""))
            assert model.lost_of(0, pull, chunk) == lost
