"""Delay compensation at a shard: by hand, for several contributors to steps that are made anew, and over a
snapshot, a standby's copy and a contributor that is gone."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor, nn

from atoll.chunks import lay_out
from atoll.core.errors import UserError
from atoll.server.model import Model, ModelState
from atoll.server.payloads import payload_of
from atoll.server.snapshot import Snapshots, latest, restore
from atoll.store.entries import Apply, Fenced, Joined
from atoll.tensors.binding import specs_of
from atoll.tensors.compensation import Origins, compensated
from atoll.tensors.wholechunk import THEN, OpenRecord
from atoll.wire.lost import spans_of
from atoll.wire.messages import LostBlocks, Push, SetChunk, Setup, plain_hyperparameters

RATE, FACTOR, SIZE = 0.5, 2.0, 6


def setup(**changes: object) -> Setup:
    parameter = nn.Parameter(torch.zeros(SIZE))
    optimizer = torch.optim.SGD([parameter], lr=RATE)
    layout = lay_out(specs_of({"p": parameter}, {parameter: "0"}), chunk_bytes=2**12)
    fields = {
        "digest": "d",
        "layout": msgspec.Raw(msgspec.msgpack.encode(layout)),
        "chunks": [0],
        "optimizers": [{"name": "torch.optim.sgd.SGD", "groups": 1}],
        "hyperparameters": plain_hyperparameters(optimizer.param_groups),
        "consistency": "asp",
        "slack": 0,
        "workers": 2,
        "shards": 1,
        "compensation": FACTOR,
        "pipeline": 1,
        **changes,
    }
    return msgspec.convert(fields, Setup)


def model_of(values: Tensor | None = None, **changes: object) -> Model:
    made = Model(setup(**changes), 0)
    if values is not None:
        assert not made.set_chunk(SetChunk(chunk=0, values=[{}]), payload_of(values))
        assert not made.finish()
        for worker in (0, 1):
            made.state.handle_entry(Joined(worker=worker, incarnation=worker + 3, clock=0))
    return made


def gradient(number: int) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(number))


def contribute(
    model: Model,
    worker: int,
    iteration: int,
    number: int,
    *,
    part: float = 1.0,
    opens: bool = True,
    closes: bool = True,
    behind: int = 0,
    incarnation: int = 0,
    lost: LostBlocks | None = None,
) -> Tensor:
    """A contribution, as the log counts it; the chunk's values after it."""
    incarnation = incarnation or worker + 3
    push = Push(
        incarnation=incarnation, iteration=iteration, chunk=0, chunks_in_all=1, present=b"\1", lost=lost
    )
    sent = gradient(number)
    for start, stop in spans_of(lost, SIZE) if lost is not None else ():
        sent[start:stop] = 0
    assert model.push(worker, push, payload_of(sent)) == ("", True)
    entry = Apply(
        worker=worker,
        incarnation=incarnation,
        iteration=iteration,
        weight=1.0,
        samples=1.0,
        part=part,
        opens=opens,
        closes=closes,
        staleness=0.0,
        hyperparameters=model.setup.hyperparameters,
        behind=behind,
    )
    for action in model.state.handle_entry(entry):
        model.act(action, lambda _chunk: None, lambda _chunk: None)
    return model.optimizer.values(0).clone()


def made_up(number: int, now: Tensor, then: Tensor) -> Tensor:
    g = gradient(number)
    return g + FACTOR * g * g * (now - then)


def test_a_gradient_is_brought_to_the_parameters_that_its_step_is_made_from() -> None:
    start = gradient(99)
    model = model_of(start)
    first = contribute(model, 0, 0, 1, closes=False)  # of 0, which has nothing to be late by
    torch.testing.assert_close(first, start - RATE * gradient(1))
    second = contribute(model, 1, 0, 2, part=0.5, opens=False)
    torch.testing.assert_close(second, start - RATE * (gradient(1) + gradient(2)) / 2)
    # 0 goes on from `first`, and the next step is made from `second`.
    third = contribute(model, 0, 1, 3, closes=False)
    mine = made_up(3, second, first)
    torch.testing.assert_close(third, second - RATE * mine)
    # 0 again, to the same step: it went on from `third`, and that step is made from `second`, too.
    fourth = contribute(model, 0, 2, 4, part=0.5, opens=False)
    torch.testing.assert_close(fourth, second - RATE * (mine + made_up(4, second, third)) / 2)
    # One that was in flight: computed before `fourth` came, at `third`.
    fifth = contribute(model, 0, 3, 5, behind=1)
    torch.testing.assert_close(fifth, fourth - RATE * made_up(5, fourth, third))
    late = contribute(model, 1, 1, 6)
    torch.testing.assert_close(late, fifth - RATE * made_up(6, fifth, second))


def test_of_what_was_lost_nothing_is_made_up() -> None:
    """A lost block's zeros stay zeros, however far its parameters have moved on."""
    start = gradient(99)
    model = model_of(start)
    first = contribute(model, 0, 0, 1)
    second = contribute(model, 1, 0, 2)
    third = contribute(model, 0, 1, 3, lost=LostBlocks(2, b"\5", "borne"))
    expected = second - RATE * made_up(3, second, first)
    assert torch.equal(third[[0, 1, 4, 5]], second[[0, 1, 4, 5]])
    torch.testing.assert_close(third[2:4], expected[2:4])


def test_nothing_is_made_up_without_a_factor_or_under_bsp() -> None:
    model = model_of(gradient(99), compensation=0.0)
    for iteration in range(3):
        before = model.optimizer.values(0).clone()
        after = contribute(model, 0, iteration, iteration, behind=min(1, iteration))
        torch.testing.assert_close(after, before - RATE * gradient(iteration))
    assert model.own.origins is None
    assert model_of(consistency="bsp").own.origins is None


def test_who_is_gone_is_forgotten_and_who_comes_anew_begins_anew() -> None:
    model = model_of(gradient(99))
    contribute(model, 0, 0, 1)
    contribute(model, 1, 0, 2)
    origins = model.own.origins
    assert origins is not None
    assert origins.contributors(0) == {(0, 3), (1, 4)}
    model.state.handle_entry(Fenced(worker=1, incarnation=4))
    model.state.handle_entry(Joined(worker=1, incarnation=9, clock=1))
    contribute(model, 0, 1, 3)
    assert origins.contributors(0) == {(0, 3)}
    before = model.optimizer.values(0).clone()
    after = contribute(model, 1, 1, 4, incarnation=9)
    torch.testing.assert_close(after, before - RATE * gradient(4))
    assert {name.rpartition(".")[0] for name in origins.tensors(0)} == {"0.3", "1.9"}


def test_no_more_is_kept_than_may_be_in_flight() -> None:
    for pipeline in (0, 1):
        model = model_of(gradient(99), pipeline=pipeline)
        for iteration in range(5):
            contribute(model, 0, iteration, iteration)
        assert model.own.origins is not None
        assert list(model.own.origins.tensors(0)) == [f"0.3.{5 - kept}" for kept in range(pipeline, -1, -1)]


def state_of(model: Model) -> ModelState:
    """What it remembers, as a journal has it."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(model.remembered()[0]), type=ModelState)


def of_snapshot(model: Model, folder: Path) -> Model:
    snapshots = Snapshots(folder, run="r", shard=0, seconds=9.0, failed=pytest.fail)
    heading = model.heading("r", 0, 4)
    snapshots.take(model.own, {0: 4}, heading)
    until = time.monotonic() + 30
    while (found := latest(folder)) is None:
        assert time.monotonic() < until
        snapshots.poll(0.0, model.own, {}, lambda: heading)
        time.sleep(0.001)
    fresh = model_of()
    restore(found, fresh.own)
    fresh.remember(state_of(model), {})
    return fresh


def of_copy(model: Model, _folder: Path) -> Model:
    """As a standby takes it: server/mirror.py sends these."""
    fresh = model_of()
    fresh.remember(state_of(model), {})
    fresh.awaited = {0}
    elements, slots = model.own.state(0)
    opened = model.own.open_step(0)
    assert model.own.origins is not None
    assert opened is not None
    tensors = {"": model.optimizer.values(0), **elements}
    tensors |= {"open." + key: flat for key, flat in opened[0].items()}
    tensors |= {THEN + key: flat for key, flat in model.own.origins.tensors(0).items()}
    payloads = {key: payload_of(flat) for key, flat in tensors.items()}
    fresh.receive(0, payloads, slots, OpenRecord(present=opened[1], slots=opened[2]))
    return fresh


@pytest.mark.parametrize("take", [of_snapshot, of_copy])
def test_what_contributors_went_on_from_is_restored_to_the_bit(take: object, tmp_path: Path) -> None:
    model = model_of(gradient(99))
    contribute(model, 0, 0, 1)
    contribute(model, 1, 0, 2)
    contribute(model, 0, 1, 3, closes=False)
    fresh = take(model, tmp_path)  # type: ignore[operator]
    for each in (model, fresh):
        contribute(each, 1, 1, 4, part=0.5, opens=False)
        contribute(each, 0, 2, 5, behind=1)
    assert torch.equal(model.optimizer.values(0), fresh.optimizer.values(0))
    (one, other) = (each.own.origins.tensors(0) for each in (model, fresh))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_half_precision_is_computed_in_single() -> None:
    g, now, then = (torch.full((3,), value, dtype=torch.float16) for value in (1e-4, 1.5, 1.0))
    made = compensated(g, now, then, 1e4)
    assert made.dtype == torch.float16
    torch.testing.assert_close(made, torch.full((3,), 1.5e-4, dtype=torch.float16), rtol=1e-2, atol=0)


def test_what_is_no_name_of_an_origin_is_refused() -> None:
    with pytest.raises(ValueError, match="invalid literal|not enough"):
        Origins(1).restore(0, {"0.x.1": torch.zeros(1)})


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"staleness": "wieght"}, "no such scaling"), ({"pipeline": 2}, "out of range")],
)
def test_a_setup_that_no_shard_can_follow_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        model_of(**changes)
