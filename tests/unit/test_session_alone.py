"""The session of one worker: what it refuses, and what it leaves as it was."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import atoll
from atoll.core.config import Config, Run
from atoll.core.errors import BindingError, CheckpointError, PrepareError, UserError
from atoll.core.events import Logged
from atoll.observe.journal import JournalReader
from atoll.observe.rundir import RunDirectory
from atoll.train.api.place import Place
from atoll.train.api.records import MOST_LOGGED
from atoll.train.api.schedulers import schedulers_of
from atoll.train.api.session import Session


def prepared() -> tuple[Session, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = atoll.join(Config(), place=Place())
    session.prepare(model, optimizer)
    return session, model, optimizer


@pytest.mark.parametrize(
    "call",
    [
        lambda s: s.reduce(1.0),
        lambda s: s.gather(1),
        lambda s: s.barrier(),
        lambda s: s.save("nowhere"),
        lambda s: s.prepare(nn.Linear(1, 1), torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1)),
    ],
)
def test_a_closed_session_says_so(call: Any) -> None:
    session, _, _ = prepared()
    session.close()
    with pytest.raises(UserError, match="the session is closed"):
        call(session)


def test_a_parameter_that_is_replaced_is_found() -> None:
    _, model, _ = prepared()
    assert isinstance(model, nn.Linear)
    model.weight = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(BindingError, match="'weight' was replaced by another Parameter"):
        model(torch.ones(1, 4))


def test_two_models_that_share_a_parameter_are_refused() -> None:
    session, model, _ = prepared()
    both = nn.Sequential(model, nn.Linear(4, 1))
    with pytest.raises(PrepareError, match="'0.weight' belongs to another prepared model too"):
        session.prepare(both, torch.optim.SGD(both.parameters(), lr=0.1))


def test_a_prepared_model_can_be_saved_whole_and_comes_back_plain() -> None:
    _, model, _ = prepared()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    back = torch.load(file, weights_only=False)
    assert torch.equal(back(torch.ones(1, 4)), model(torch.ones(1, 4)))


@pytest.mark.parametrize("weight", [-1, float("inf"), float("nan")])
def test_a_weight_is_a_finite_number(weight: float) -> None:
    session, _, _ = prepared()
    with pytest.raises(UserError, match="a weight is a number of at least 0"):
        session.weight(weight)


@pytest.mark.parametrize("value", ["x", None, torch.ones(2)])
def test_only_numbers_are_logged(value: Any) -> None:
    session, _, _ = prepared()
    with pytest.raises(UserError, match="session.log"):
        session.log(loss=value)


def test_what_is_logged_within_a_step_is_kept_up_to_a_bound(tmp_path: Any) -> None:
    """An evaluation logs for each of its batches, and makes no step."""
    with atoll.join(Config(run=Run(directory=str(tmp_path)))) as session:
        for count in range(2 * MOST_LOGGED + 10):
            session.log(count=count)
        assert len(session._records._logged) == 10
    events = JournalReader(RunDirectory(tmp_path).journal(0)).read()
    assert [event.values["count"] for event in events if isinstance(event, Logged)] == [
        float(count) for count in range(2 * MOST_LOGGED + 10)
    ]


def test_no_sync_may_end_around_a_prepare() -> None:
    session, _, _ = prepared()
    other = nn.Linear(2, 2)
    with session.no_sync():
        session.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1))


def test_a_batch_seen_twice_by_the_model_is_consumed_once(tmp_path: Any) -> None:
    """As in a siamese network: the checkpoint's place in the epoch counts samples, not forwards."""
    session, model, optimizer = prepared()
    data = TensorDataset(torch.randn(10, 4))
    sampler = session.sampler(data, seed=1)
    seen: list[Tensor] = []
    for (x,) in DataLoader(data, batch_size=2, sampler=sampler):
        (model(x) - model(-x)).square().sum().backward()
        optimizer.step()
        seen.append(x)
        if len(seen) == 2:
            break
    session.save(tmp_path / "checkpoint")
    again = atoll.join(Config(), place=Place())
    model2 = nn.Linear(4, 4)
    again.prepare(model2, torch.optim.SGD(model2.parameters(), lr=0.1))
    rest = again.sampler(data, seed=1)
    again.load(tmp_path / "checkpoint")
    left = [x for (x,) in DataLoader(data, batch_size=2, sampler=rest)]
    assert torch.cat([*seen, *left]).unique(dim=0).shape == data.tensors[0].shape


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: Any) -> None:
    session, model, _ = prepared()
    session.save(tmp_path / "checkpoint")
    session.close()
    again = atoll.join(Config(), place=Place())
    again.prepare(model, torch.optim.Adam(model.parameters()))
    with pytest.raises(CheckpointError, match="holds the state of SGD, and the session has prepared Adam"):
        again.load(tmp_path / "checkpoint")


def test_a_scheduler_that_was_let_go_of_does_not_count() -> None:
    _, _, optimizer = prepared()
    assert schedulers_of(optimizer) == []
    kept = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    assert schedulers_of(optimizer) == [kept]
    gone = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    gone.itself = gone  # type: ignore[attr-defined]  # so that only the garbage collector ends it
    del gone
    assert schedulers_of(optimizer) == [kept]
    both = torch.optim.lr_scheduler.ChainedScheduler([kept])
    assert schedulers_of(optimizer) == [both]


def test_what_is_no_model_or_no_optimizer_is_named() -> None:
    session, layer = Session(Config(), Place()), nn.Linear(1, 1)
    sgd = torch.optim.SGD(layer.parameters(), lr=0.1)
    with pytest.raises(
        PrepareError, match=r"a torch\.optim\.Optimizer, or a list of several, and was given a Linear"
    ):
        session.prepare(layer, layer)  # type: ignore[type-var]
    with pytest.raises(
        PrepareError, match=r"one nn\.Module as its model, and was given a tuple; put several"
    ):
        session.prepare((layer, layer), sgd)  # type: ignore[arg-type]
    session.prepare(layer, sgd)
