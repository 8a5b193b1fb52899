"""Messages of chunks, the agreement that rides along, and the norm that spares the check for NaN."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import atoll
from atoll.chunks import lay_out
from atoll.core.config import Chunks, Config, Sync
from atoll.core.errors import NonFiniteGradientError
from atoll.core.stands import Epoch
from atoll.core.weighing import GUESSED
from atoll.tensors.binding import bind_model, specs_of
from atoll.train.api.place import Seat
from atoll.train.checkpoint.buffers import ModelBuffers
from atoll.train.gradients.agreement import Ballot
from atoll.train.gradients.alike import Treatments
from atoll.train.gradients.clipping import GradientNorm
from atoll.train.gradients.messages import Bucket, Tail, lay_messages
from atoll.train.gradients.reducer import Calls
from atoll.train.gradients.samples import ContributionWeight
from atoll.train.group.rounds import Ring
from support.pool import ring_of_one


def messages_of(
    sizes: list[tuple[int, torch.dtype]], chunk: int, at_least: int, more: int = 0
) -> list[Bucket]:
    """The messages of parameters of these sizes (elements) in chunks of `chunk` bytes."""
    parameters = {f"p{i}": nn.Parameter(torch.ones(n, dtype=kind)) for i, (n, kind) in enumerate(sizes)}
    layout = lay_out(specs_of(parameters, dict.fromkeys(parameters.values(), "0")), chunk_bytes=chunk)
    return lay_messages(bind_model(layout, parameters), at_least, more)


def test_neighbours_share_a_message_until_it_is_large_enough() -> None:
    messages = messages_of([(256, torch.float32)] * 10, chunk=1024, at_least=2500)
    assert [len(message.chunks) for message in messages] == [3, 3, 3, 1]
    for message in messages:
        flat = message.gradients
        for number, chunk in enumerate(message.chunks):
            chunk.published.flat.fill_(number + 1)
        assert sorted(set(flat.tolist())) == [number + 1 for number in range(len(message.chunks))]


def test_dtypes_do_not_share_a_message_and_chunks_begin_at_cache_lines() -> None:
    messages = messages_of(
        [(3, torch.float32), (5, torch.float64), (7, torch.float32)], chunk=64, at_least=2**20
    )
    assert len({message.memory.dtype for message in messages}) == 2
    for message in messages:
        for chunk in message.chunks:
            assert (chunk.published.flat.data_ptr() - message.memory.data_ptr()) % 64 == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tail_holds_an_agreement_and_leaves_the_gradients_alone(dtype: torch.dtype) -> None:
    (message,) = messages_of([(100, dtype)], chunk=1024, at_least=1)
    message.gradients.fill_(3.0)
    tail, said = Tail(message), [1.0, 2.0, 0.5]
    tail.write(said)
    assert (heard := tail.heard(3)) == [1.0, 2.0, 0.5]
    said[0] = 7.0
    tail.write(said)
    assert tail.heard(3) is heard
    assert heard == [7.0, 2.0, 0.5]
    message.memory[message.gradients.numel() + 2] += 1.0  # what another member has said
    assert tail.heard(3) is not heard
    assert tail.heard(3) == [7.0, 2.0, 1.5]
    tail.write([7.0, math.inf, 1e300])  # which float32 does not hold
    assert tail.heard(3) == [7.0, math.inf, float(torch.tensor(1e300, dtype=dtype))]
    assert message.gradients.eq(3.0).all()


def test_what_a_member_says_and_hears_is_what_it_is_though_it_is_packed_once() -> None:
    """A ballot that has said much before says and hears in each state what one says that is new."""
    owner = SimpleNamespace(steps=0, count_alike=False, bytes_sent=0)
    (message,) = messages_of([(5, torch.float32), (7, torch.float32)], chunk=1024, at_least=1, more=3)
    bounds, settings = [message.chunks[0].bound], {"lr": 0.1}
    first, second = bounds[0].parameters
    model, at = nn.BatchNorm1d(3), [Epoch()]
    calls = Calls(
        arm=lambda: None,
        contribution=lambda _: ContributionWeight(0.0, 0.0),
        committed=lambda _own, samples: samples,
        leaving=lambda: None,
        epoch=lambda: at[-1],
        buffers=ModelBuffers(model),
    )
    treatments = Treatments(lambda: [dict(settings)], bounds[0].parameters)
    ring = Ring(Seat(ring_of_one()), torch.device("cpu"), 10.0)
    kept, tail, dirty = Ballot(ring, owner, calls, treatments), Tail(message), [0.0]

    def same(own: ContributionWeight, awaited: bool = False) -> None:
        owner.steps += 1
        said = kept.said(own, bounds, dirty, awaited=awaited)
        new = Ballot(ring, owner, calls, treatments)
        assert said == new.said(own, bounds, dirty, awaited=awaited)
        tail.write(said)
        summed = tail.heard(len(said))
        agreed, right = kept.agreed(own, summed, bounds, 1), new.agreed(own, list(summed), bounds, 1)
        for name in (
            "steps",
            "contribution",
            "with_gradients",
            "newcomers",
            "alike",
            "dirty",
            "present",
            "buffers",
        ):
            assert getattr(agreed, name) == getattr(right, name), name
        treatments.stepped(owner.steps)

    for _ in range(2):
        same(ContributionWeight(4.0, 4.0))
        same(ContributionWeight(4.0, 4.0))
        first.grad = torch.zeros(first.shape)
        same(ContributionWeight(4.0, 4.0))
        second.grad = torch.zeros(second.shape)
        same(ContributionWeight(4.0, 3.0))
        same(ContributionWeight(4.0, 3.0, GUESSED))
        same(ContributionWeight(4.0, 3.0, GUESSED), awaited=True)
        dirty[0] = 1.0
        same(ContributionWeight(4.0, 3.0))
        dirty[0] = 0.0
        treatments.clipped(1.0, 2.0)
        same(ContributionWeight(0.0, 0.0))
        treatments.shown()
        second.grad.add_(1.0)
        treatments.steps()
        same(ContributionWeight(2.0, 2.0))
        settings["lr"] /= 2
        treatments.steps()
        same(ContributionWeight(2.0, 2.0))
        at.append(Epoch(len(at), "train.py:3"))
        same(ContributionWeight(2.0, 2.0))
        model.running_mean.add_(1.0)  # type: ignore[operator, union-attr]
        same(ContributionWeight(2.0, 2.0))
        first.grad = second.grad = None


def with_gradients(*values: list[float]) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.zeros(len(value))) for value in values]
    for parameter, value in zip(parameters, values, strict=True):
        parameter.grad = torch.tensor(value)
    return parameters


def named(parameters: list[nn.Parameter]) -> dict[str, nn.Parameter]:
    return {f"p{index}": parameter for index, parameter in enumerate(parameters)}


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.1, 5.0, 100.0])
def test_clipping_is_torch_s_to_the_bit(max_norm: float, norm_type: float) -> None:
    values = ([3.0, 4.0], [0.3, -1.7, 1e-3])
    own, plain = with_gradients(*values), with_gradients(*values)
    before = GradientNorm(named(own)).clip(max_norm, norm_type, False)
    assert torch.equal(before, nn.utils.clip_grad_norm_(plain, max_norm, norm_type))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(own, plain, strict=True))  # type: ignore[arg-type]


def test_a_finite_norm_speaks_for_the_gradients_until_they_change() -> None:
    parameters = with_gradients([1.0], [2.0, 3.0])
    norm = GradientNorm(named(parameters))
    assert not norm.says_finite()
    norm.clip(1.0, 2.0, False)
    assert norm.says_finite()
    assert parameters[1].grad is not None
    parameters[1].grad.mul_(2)
    assert not norm.says_finite()
    norm.clip(100.0, 2.0, False)
    parameters[0].grad = torch.tensor([math.nan])
    assert not norm.says_finite()
    norm.clip(100.0, 2.0, False)
    assert not norm.says_finite()


@pytest.mark.parametrize("norm_type", [0.0, -1.0, -math.inf])
def test_a_norm_that_does_not_see_every_value_says_nothing(norm_type: float) -> None:
    norm = GradientNorm(named(with_gradients([1.0, math.inf])))
    norm.clip(1e9, norm_type, False)
    assert not norm.says_finite()


@pytest.mark.parametrize("place", [ring_of_one, None], ids=["ring", "alone"])
@pytest.mark.parametrize("clip", [True, False], ids=["clipped", "unclipped"])
def test_nan_is_found_with_and_without_clipping(place: Any, clip: bool) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with atoll.join(Config(), place=place and place()) as session:
        session.prepare(model, optimizer)
        model(torch.ones(1, 3)).sum().backward()
        assert model.weight.grad is not None
        model.weight.grad[0, 0] = math.nan
        if clip:
            session.clip_grad_norm_(1.0)
        with pytest.raises(NonFiniteGradientError, match=r"'weight' on worker 0|once it was summed"):
            optimizer.step()


@pytest.mark.parametrize("place", [ring_of_one, None], ids=["ring", "alone"])
def test_a_nan_put_in_after_clipping_is_found_and_the_step_skipped(place: Any) -> None:
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with atoll.join(Config(sync=Sync(nonfinite="skip")), place=place and place()) as session:
        session.prepare(model, optimizer)
        model(torch.ones(1, 3)).sum().backward()
        session.clip_grad_norm_(1.0)
        assert model.weight.grad is not None
        model.weight.grad[0, 0] = math.nan
        optimizer.step()
        assert torch.equal(model.weight, before)
        assert session.iteration == 1
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        assert not torch.equal(model.weight, before)


def test_half_precision_agrees_by_a_sum_of_its_own() -> None:
    model = nn.Linear(4, 4).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with atoll.join(Config(chunks=Chunks(size="1KiB")), place=ring_of_one()) as session:
        session.prepare(model, optimizer)
        for _ in range(3):
            model(torch.ones(301, 4, dtype=torch.bfloat16)).float().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert session._state.prepared[0].reducer.sum.scaling.reference == 301  # which bfloat16 cannot hold
