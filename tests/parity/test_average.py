"""The session's average of a model equals torch's AveragedModel, wherever the model lies."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import atoll
from atoll.core.errors import PrepareError, UserError
from support.cases import kept_for
from support.pool import JobFailedError, WorkerPool
from support.runs import alone, model, run_at

pytestmark = pytest.mark.sampled

HERE = ("ring", "hierarchical", "elastic", "tiers")  # strategies and stores whose workers step
ELSEWHERE = ("server", "asp", "ps-hra", "peers", "server tiers", "peers tiers")
DECAY = 0.8


def batch(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 32, generator=generator, dtype=torch.float64)


def step(net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    net(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def train(session: atoll.Session, folder: str = "", resumes: bool = False) -> list[dict[str, Tensor]]:
    """Train three steps, three more after a load if `resumes`; return the average after each step."""
    net = model()
    average = session.average(net, DECAY)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    session.prepare(net, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    if resumes:
        session.load(folder)
    plain, seen = model(seed=1), []
    for number in range(3 * resumes, 3 + 3 * resumes):
        step(net, optimizer, batch(number, session.rank))
        scheduler.step()
        average.copy_to(plain)
        seen.append(copy.deepcopy(plain.state_dict()))
    if folder and not resumes:
        session.save(folder)
    session.barrier()
    return seen


def by_torch(world: int) -> list[dict[str, Tensor]]:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    average, seen = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(DECAY)), []
    for number in range(6):
        step(net, optimizer, torch.cat([batch(number, rank) for rank in range(world)]))
        scheduler.step()
        average.update_parameters(net)
        seen.append(copy.deepcopy(average.module.state_dict()))
    return seen


def check_close(found: list[dict[str, Tensor]], right: list[dict[str, Tensor]]) -> None:
    for one, other in zip(found, right, strict=True):
        for name, value in other.items():
            torch.testing.assert_close(one[name], value, rtol=0.0, atol=1e-12, msg=name)


@pytest.mark.parametrize("where", kept_for(pytest.mark.check, HERE, ("ring", "tiers")))
def test_the_average_is_torch_s_through_a_checkpoint_too(
    pool: WorkerPool, where: str, tmp_path: Path
) -> None:
    right = by_torch(2)
    for found in run_at(pool, where, train, str(tmp_path)):
        check_close(found, right[:3])
    for found in run_at(pool, where, train, str(tmp_path), True):
        check_close(found, right[3:])


@pytest.mark.parametrize("tiers", [False, True])
def test_alone_too(tiers: bool, tmp_path: Path) -> None:
    right = by_torch(1)
    check_close(alone(train, str(tmp_path), tiers=tiers), right[:3])
    check_close(alone(train, str(tmp_path), True, tiers=tiers), right[3:])


@pytest.mark.parametrize("where", kept_for(pytest.mark.check, ELSEWHERE, ("server",)))
def test_where_the_optimizer_steps_elsewhere_it_is_refused(pool: WorkerPool, where: str) -> None:
    with pytest.raises(JobFailedError) as raised:
        run_at(pool, where, train)
    for failure in raised.value.failures.values():
        assert failure.kind == PrepareError.__name__
        assert "use torch.optim.swa_utils.AveragedModel(model)" in failure.message


def mistakes(session: atoll.Session) -> list[str]:
    """Return the lines of mistakes, each of which leaves the session usable."""
    net, other, said = model(), nn.Linear(32, 32, dtype=torch.float64), []

    def try_out(call: Any, *arguments: Any) -> None:
        try:
            call(*arguments)
        except UserError as error:
            said.append(str(error))

    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    try_out(session.average, net, 1.0)
    unprepared = session.average(other, 0.9)
    average = session.average(net, 0.9)
    try_out(session.average, net, 0.9)
    try_out(average.copy_to, copy.deepcopy(net))
    try_out(session.prepare, net[0], torch.optim.SGD(net[0].parameters(), lr=0.1))
    scheduled = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(scheduled, 2)
    try_out(session.prepare, net, scheduled)
    session.prepare(net, optimizer)
    try_out(session.average, net, 0.9)
    try_out(average.copy_to, other)
    try_out(lambda: dict(unprepared.named_parameters()))
    return said


def test_an_average_of_another_model_is_one_line() -> None:
    assert [line.split(";")[0] for line in alone(mistakes)] == [
        "session.average: decay is 1.0, and must be at least 0 and less than 1",
        "session.average: this model has an average already",
        "this average's model is not prepared: give session.average and session.prepare one model",
        "session.average was given another module that shares parameters with this one",
        "session.average: a scheduler, or another wrapper, already has the optimizer's step",
        "session.average: this model is prepared already",
        "average.copy_to: '0.weight' of shape (32, 32) is missing in the module that it was given, which is "
        "of another model",
        "this average's model is not prepared: give session.average and session.prepare one model",
    ]


def test_the_optimizer_stays_the_script_s() -> None:
    """Its name is its own, hooks run once a step, and plain torch goes on from its state."""
    calls: list[str] = []

    def script(session: atoll.Session) -> dict[str, Any]:
        net = model()
        session.average(net, 0.9)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        optimizer.register_step_post_hook(lambda *_: calls.append("post"))
        session.prepare(net, optimizer)
        for number in range(2):
            step(net, optimizer, batch(number, 0))
        assert isinstance(optimizer, torch.optim.AdamW)
        assert type(optimizer).__qualname__ == "AdamW"
        return copy.deepcopy(optimizer.state_dict())

    state = alone(script)
    assert calls == ["post", "post"]
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    optimizer.load_state_dict(state)
    step(net, optimizer, batch(2, 0))
