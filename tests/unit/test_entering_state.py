"""A session's state from one worker's memory to another's: whole, or nothing of it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import atoll
from atoll.core.config import Chunks, Config
from atoll.core.errors import CheckpointError
from atoll.tensors.checkpoint import pack, unpack
from atoll.train.api.place import Place
from atoll.train.api.session import Session
from support.pool import ring_of_one

CONFIG = Config(chunks=Chunks(size="2KiB"))
PLACES = [None, ring_of_one]


class Average:
    """An average of the weights, as scripts keep one."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.values = [p.detach().clone() for p in model.parameters()]

    def update(self) -> None:
        for value, p in zip(self.values, self.model.parameters(), strict=True):
            value.lerp_(p.detach(), 0.2)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for value, saved in zip(self.values, state["values"], strict=True):
            value.copy_(saved)


class Script:
    """A training script with all that a session holds."""

    def __init__(self, session: Session, seed: int = 0, width: int = 8, scheduled: bool = True) -> None:
        torch.manual_seed(seed)
        self.session = session
        self.model = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 2)).double()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        session.prepare(self.model, self.optimizer)
        self.scheduler = CosineAnnealingLR(self.optimizer, 20) if scheduled else None
        self.average = Average(self.model)
        session.register(average=self.average)
        self.sampler = session.sampler(range(24), seed=5)
        generator = torch.Generator().manual_seed(1)
        self.data = torch.randn(24, 3, generator=generator, dtype=torch.float64)

    def train(self, steps: int) -> list[float]:
        losses = []
        while len(losses) < steps:
            indices = iter(self.sampler)
            while len(losses) < steps and (batch := [i for _, i in zip(range(4), indices, strict=False)]):
                loss = self.model(self.data[batch]).square().mean()
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                if self.scheduler is not None:
                    self.scheduler.step()
                self.average.update()
                losses.append(loss.item())
        return losses

    def all(self) -> list[Tensor]:
        state = self.optimizer.state_dict()["state"].values()
        moments = [v for s in state for v in s.values()]
        return [*(t.clone() for t in (*self.model.state_dict().values(), *moments, *self.average.values))]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("place", PLACES)
def test_a_newcomer_goes_on_as_the_other_does(place: Callable[[], Place] | None) -> None:
    """Bit for bit, with buffers, schedule, registered objects and the place in the epoch."""
    own = place() if place else None
    with atoll.join(CONFIG, place=own) as session:
        living = Script(session)
        living.train(3)
        raw = session._state.capture()
        held = living.all()
        there = session._state.places()
        # The sampler's iteration was broken off above; what is left of its epoch is what a newcomer deals.
        session._state.deal_anew([there], 0, 1)
    with atoll.join(CONFIG, place=place() if place else None) as session:
        newcomer = Script(session, seed=9)
        session._state.restore(raw, 0)
        session._state.deal_anew([there], 0, 1)
        assert session.iteration == 3
        assert same(newcomer.all(), held)
        assert newcomer.optimizer.param_groups[0]["lr"] == living.optimizer.param_groups[0]["lr"]
        assert [*newcomer.sampler] == [*living.sampler]
        assert newcomer.scheduler is not None
        assert newcomer.scheduler.last_epoch == 3


def test_the_random_state_is_derived_and_not_the_others() -> None:
    with atoll.join(CONFIG) as session:
        Script(session)
        torch.manual_seed(7)
        raw, following = session._state.capture(), torch.rand(3)
    drawn = []
    for rank in (1, 2, 1):
        with atoll.join(CONFIG) as session:
            Script(session)
            session._state.restore(raw, rank)
            drawn.append(torch.rand(3))
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], following)


def other_width(session: Session) -> Script:
    return Script(session, width=9)


def no_schedule(session: Session) -> Script:
    return Script(session, scheduled=False)


def other_optimizer(session: Session) -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).double()
    session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def no_sampler(session: Session) -> Script:
    script = Script(session)
    session._state.samplers.clear()
    return script


def other_data(session: Session) -> Script:
    script = Script(session)
    session._state.samplers.clear()
    session.sampler(range(25), seed=5)
    return script


def nothing_registered(session: Session) -> Script:
    script = Script(session)
    session._state.registered.clear()
    return script


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            other_width,
            r"the state of a living worker: '0.weight' is \(8, 3\) there and \(9, 3\) in the model",
        ),
        (no_schedule, "holds the state of a CosineAnnealingLR, and no .* before session.resume"),
        (other_optimizer, "holds the state of AdamW, and the session has prepared SGD"),
        (no_sampler, "holds the state of 1 samplers, and the session has made 0"),
        (other_data, "of a dataset of 24 samples, and this dataset has 25"),
        (nothing_registered, r"call session.register\(average=...\) before session.resume"),
    ],
)
def test_what_does_not_fit_is_one_line_and_changes_nothing(
    make: Callable[[Session], Any], message: str
) -> None:
    with atoll.join(CONFIG) as session:
        living = Script(session)
        living.train(2)
        raw = session._state.capture()
    with atoll.join(CONFIG) as session:
        kept = make(session)  # its scheduler too
        model = session._state.prepared[0].module
        before = [t.clone() for t in model.state_dict().values()]
        with pytest.raises(CheckpointError, match=message) as caught:
            session._state.restore(raw, 0)
        assert "\n" not in str(caught.value)
        assert same(list(model.state_dict().values()), before)
        assert session.iteration == 0
        del kept


def captured() -> bytes:
    with atoll.join(CONFIG) as session:
        Script(session).train(2)
        return session._state.capture()


@pytest.fixture(scope="module")
def raw() -> bytes:
    return captured()


def test_damage_anywhere_is_one_line_and_changes_nothing(raw: bytes) -> None:
    generator = torch.Generator().manual_seed(0)
    with atoll.join(CONFIG) as session:
        script = Script(session)
        before = script.all()
        places = torch.randint(len(raw), (60,), generator=generator).tolist()
        cut = [raw[:length] for length in (0, 5, 8, 100, len(raw) - 1)]
        flipped = [
            raw[:place] + bytes([raw[place] ^ 0x41]) + raw[place + 1 :] for place in (*range(24), *places)
        ]
        for damaged in (*cut, *flipped, raw + b"x"):
            with pytest.raises(CheckpointError, match="^the state of a living worker") as caught:
                session._state.restore(damaged, 0)
            assert "\n" not in str(caught.value)
        assert same(script.all(), before)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.pop("samplers"),
        lambda state: state.update(iteration=-1),
        lambda state: state.update(iteration="3"),
        lambda state: state["reducers"][0].update(steps=None),
        lambda state: state["samplers"][0].update(held=[[[[0, 99]]]]),
        lambda state: state["samplers"][0].update(held=[]),
        lambda state: state["samplers"][0].update(runs=[[0, 0, 2**60]]),
        lambda state: state["samplers"][0].update(epoch=math.inf),
        lambda state: state.update(random=[]),
        lambda state: state.update(schedulers=3),
        lambda state: state.pop("loaded"),
        lambda state: state.update(loaded=-1.0),
        lambda state: state.update(loaded="7.5"),
        lambda state: state.update(loaded=math.nan),
        lambda state: state.update(loaded=10**400),
    ],
)
def test_a_state_that_is_none_is_refused_before_anything_is_changed(
    raw: bytes, change: Callable[[Any], Any]
) -> None:
    model, trees = unpack(raw, "it")
    change(trees["state"])
    with atoll.join(CONFIG) as session:
        script = Script(session)
        before = script.all()
        with pytest.raises(CheckpointError):
            session._state.restore(pack(model=model, trees=trees), 0)
        assert same(script.all(), before)
        assert session.iteration == 0


def test_sizes_are_held_against_what_is_there() -> None:
    """A head that promises much allocates nothing."""
    head = json.dumps(
        {"format": "atoll checkpoint", "version": 1, "parts": [["model.safetensors", 2**62, 0]]}
    ).encode()
    with pytest.raises(CheckpointError, match="the sizes of its parts differ from its header"):
        unpack(len(head).to_bytes(8, "little") + head + b"\0" * 64, "it")
    with pytest.raises(CheckpointError, match="that are not a checkpoint"):
        unpack((2**62).to_bytes(8, "little") + b"\0" * 64, "it")
