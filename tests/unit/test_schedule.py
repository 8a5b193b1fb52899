"""Schedules by samples on a worker that is alone: every scheduler against plain torch, and mistakes."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

import atoll
from atoll.core.config import Config
from atoll.core.errors import UserError
from atoll.train.api.place import Place
from atoll.train.api.schedule import length_of, position_of
from atoll.train.api.session import Session
from atoll.train.checkpoint.resume import TrainingState

STEPS, BATCH = 12, 4
TOTAL = STEPS * BATCH
Maker = Callable[[torch.optim.Optimizer], Any]


def halves(step: int) -> float:
    return 0.5 ** (step // 3)


# Each scheduler of torch.optim.lr_scheduler, made for STEPS steps; whether it has a length of its own.
MAKERS: dict[str, tuple[Maker, bool]] = {
    "LambdaLR": (lambda o: schedulers.LambdaLR(o, halves), False),
    "MultiplicativeLR": (lambda o: schedulers.MultiplicativeLR(o, lambda _: 0.9), False),
    "StepLR": (lambda o: schedulers.StepLR(o, 3), False),
    "MultiStepLR": (lambda o: schedulers.MultiStepLR(o, [2, 7]), False),
    "ConstantLR": (lambda o: schedulers.ConstantLR(o, 0.25, 4), False),
    "LinearLR": (lambda o: schedulers.LinearLR(o, 1.0, 0.1, STEPS), True),
    "warm-up": (lambda o: schedulers.LinearLR(o, 0.1, 1.0, 4), False),
    "ExponentialLR": (lambda o: schedulers.ExponentialLR(o, 0.9), False),
    "PolynomialLR": (lambda o: schedulers.PolynomialLR(o, STEPS, 2.0), True),
    "CosineAnnealingLR": (lambda o: schedulers.CosineAnnealingLR(o, STEPS), True),
    "CosineAnnealingWarmRestarts": (lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3, 2), False),
    "CyclicLR": (lambda o: schedulers.CyclicLR(o, 0.01, 0.1, 4), False),
    "OneCycleLR": (lambda o: schedulers.OneCycleLR(o, [0.1, 0.2], STEPS), True),
    "SequentialLR": (
        lambda o: schedulers.SequentialLR(
            o, [schedulers.LinearLR(o, 0.1, 1.0, 4), schedulers.CosineAnnealingLR(o, STEPS - 4)], [4]
        ),
        True,
    ),
    "ChainedScheduler": (
        lambda o: schedulers.ChainedScheduler(
            [schedulers.ConstantLR(o, 0.5, 3), schedulers.CosineAnnealingLR(o, STEPS)]
        ),
        True,
    ),
    "SWALR": (lambda o: torch.optim.swa_utils.SWALR(o, 0.01, 5), False),
}
Settings = list[list[Any]]  # of each param group: what a scheduler may set


def build(rate: Any = 0.1) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": copy.copy(rate)}]
    return model, torch.optim.SGD(groups, lr=rate, momentum=0.9)


def settings(optimizer: torch.optim.Optimizer) -> Settings:
    return [[float(group["lr"]), group["momentum"]] for group in optimizer.param_groups]


def plain(maker: Maker, steps: int = STEPS, rate: Any = 0.1) -> Iterator[Settings]:
    """What each step of plain torch is made with, and at last what comes after them."""
    model, optimizer = build(rate)
    scheduler = maker(optimizer)
    for _ in range(steps):
        yield settings(optimizer)
        model(torch.ones(BATCH, 3)).sum().backward()
        optimizer.step()
        scheduler.step()
    yield settings(optimizer)


def step(
    session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, batches: int = 1, size: int = BATCH
) -> None:
    for batch in range(batches):
        with nullcontext() if batch == batches - 1 else session.no_sync():
            model(torch.ones(size, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture
def session() -> Iterator[Session]:
    with atoll.join(Config(), place=Place()) as session:
        yield session


@pytest.mark.parametrize("name", MAKERS)
def test_one_step_an_iteration_is_what_plain_torch_does(session: Session, name: str) -> None:
    maker, has_length = MAKERS[name]
    model, optimizer = session.prepare(*build())
    scheduler = maker(optimizer)
    assert length_of(scheduler) == (STEPS if has_length else None)
    session.schedule(scheduler, total=TOTAL, steps=None if has_length else STEPS)
    for expected in list(plain(maker))[:-1]:
        assert settings(optimizer) == expected
        step(session, model, optimizer)
    assert settings(optimizer) == list(plain(maker))[-1]
    for _ in range(3):  # it ends there
        step(session, model, optimizer)
    assert settings(optimizer) == list(plain(maker))[-1]


def test_a_rate_that_is_a_tensor(session: Session) -> None:
    maker, _ = MAKERS["CosineAnnealingLR"]
    model, optimizer = session.prepare(*build(torch.tensor(0.1)))
    session.schedule(maker(optimizer), total=TOTAL)
    for expected in list(plain(maker, rate=torch.tensor(0.1)))[:-1]:
        assert settings(optimizer) == expected
        step(session, model, optimizer)


def test_accumulated_batches_count_once_each(session: Session) -> None:
    maker, _ = MAKERS["CosineAnnealingLR"]
    model, optimizer = session.prepare(*build())
    session.schedule(maker(optimizer), total=4 * TOTAL)
    for expected in list(plain(maker))[:-1]:
        assert settings(optimizer) == expected
        step(session, model, optimizer, batches=4)


def test_one_step_an_epoch(session: Session) -> None:
    model, optimizer = session.prepare(*build())
    scheduler = schedulers.StepLR(optimizer, 1, 0.5)
    session.schedule(scheduler, total=TOTAL, steps=3)
    made = []
    for _ in range(STEPS):
        made.append(position_of(scheduler))
        step(session, model, optimizer)
    assert made == [epoch for epoch in range(3) for _ in range(STEPS // 3)]


def test_unequal_batches_make_the_steps_that_their_samples_are_worth(session: Session) -> None:
    model, optimizer = session.prepare(*build())
    scheduler = schedulers.CosineAnnealingLR(optimizer, STEPS)
    session.schedule(scheduler, total=TOTAL)
    made = []
    for size in (1, 1, 1, 1, 8, 12, 30):
        step(session, model, optimizer, size=size)
        made.append(position_of(scheduler))
    assert made == [0, 0, 0, 1, 3, 6, 12]


def test_a_checkpoint_has_the_count(tmp_path: Path) -> None:
    maker, _ = MAKERS["SequentialLR"]
    expected = list(plain(maker))
    for first, last in ((0, 5), (5, STEPS)):
        with atoll.join(Config(), place=Place()) as session:
            model, optimizer = session.prepare(*build())
            session.schedule(maker(optimizer), total=TOTAL)
            assert session.resume(tmp_path / "checkpoint") == first
            for at in range(first, last):
                assert settings(optimizer) == expected[at]
                step(session, model, optimizer)
            session.save(tmp_path / "checkpoint")


def test_a_checkpoint_without_a_count_goes_on_where_the_scheduler_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an Atoll that did not count samples; the script stepped the scheduler then."""
    maker, _ = MAKERS["CosineAnnealingLR"]
    with monkeypatch.context() as patch, atoll.join(Config(), place=Place()) as session:
        own_state = TrainingState._own_state
        counts = ("consumed", "schedules")
        patch.setattr(
            TrainingState,
            "_own_state",
            lambda self: {key: value for key, value in own_state(self).items() if key not in counts},
        )
        model, optimizer = session.prepare(*build())
        scheduler = maker(optimizer)
        for _ in range(5):
            step(session, model, optimizer)
            scheduler.step()
        session.save(tmp_path / "checkpoint")
    expected = list(plain(maker))
    with atoll.join(Config(), place=Place()) as session:
        model, optimizer = session.prepare(*build())
        session.schedule(maker(optimizer), total=TOTAL)
        assert session.resume(tmp_path / "checkpoint") == 5
        for at in range(5, STEPS):
            assert settings(optimizer) == expected[at]
            step(session, model, optimizer)


def test_a_script_that_steps_it_too_is_told_so(session: Session) -> None:
    model, optimizer = session.prepare(*build())
    scheduler = schedulers.CosineAnnealingLR(optimizer, STEPS)
    session.schedule(scheduler, total=TOTAL)
    step(session, model, optimizer)
    scheduler.step()
    with pytest.raises(UserError, match=r"the script has stepped its CosineAnnealingLR \(test_schedule.py"):
        step(session, model, optimizer)


@pytest.mark.parametrize(
    ("make", "arguments", "said"),
    [
        (
            MAKERS["StepLR"][0],
            {"total": 5},
            "StepLR has no length of its own; say how many steps it",
        ),
        (MAKERS["ConstantLR"][0], {"total": 5}, "ConstantLR has no length of its own"),
        (MAKERS["warm-up"][0], {"total": 5}, "LinearLR has no length of its own"),
        (MAKERS["StepLR"][0], {"total": 5, "steps": 0}, "session.schedule(steps=0)"),
        (MAKERS["StepLR"][0], {"total": 0, "steps": 5}, "session.schedule(total=0)"),
        (schedulers.ReduceLROnPlateau, {"total": 5}, "scheduler.step(session.reduce(loss))"),
    ],
)
def test_what_cannot_be_driven_by_samples_is_refused(
    session: Session, make: Maker, arguments: dict[str, Any], said: str
) -> None:
    _, optimizer = session.prepare(*build())
    with pytest.raises(UserError, match=re.escape(said)):
        session.schedule(make(optimizer), **arguments)


def test_another_optimizer_s_scheduler_is_refused(session: Session) -> None:
    session.prepare(*build())
    with pytest.raises(UserError, match="this scheduler's optimizer is not prepared"):
        session.schedule(schedulers.StepLR(build()[1], 3), total=5, steps=5)


def test_batches_of_unknown_size_count_evenly_and_are_told_of_once(
    session: Session, capfd: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = session.prepare(*build())
    scheduler = schedulers.CosineAnnealingLR(optimizer, STEPS)
    session.schedule(scheduler, total=TOTAL)
    for at in range(3):
        (model.weight.sum() + model.bias.sum()).backward()  # type: ignore[union-attr, operator]
        optimizer.step()
        assert position_of(scheduler) == at + 1
    assert capfd.readouterr().err.count("how many samples its batches have is not known") == 1


def test_a_scheduler_that_passes_its_end_is_told_of_once(
    session: Session, capfd: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = session.prepare(*build())
    scheduler = schedulers.CosineAnnealingLR(optimizer, 3)
    for at in range(6):
        step(session, model, optimizer)
        scheduler.step()
        assert (at >= 4) == ("is past its end" in capfd.readouterr().err) or at == 5
    assert length_of(scheduler) == 3


def test_a_meeting_between_backward_and_step_moves_no_rate(session: Session) -> None:
    """The samples of an iteration count once its step is made."""
    model, optimizer = session.prepare(*build())
    scheduler = schedulers.CosineAnnealingLR(optimizer, STEPS)
    session.schedule(scheduler, total=TOTAL)
    model(torch.ones(BATCH, 3)).sum().backward()
    session.reduce(1.0)
    session.barrier()
    assert position_of(scheduler) == 0
    optimizer.step()
    assert position_of(scheduler) == 1


def test_another_scheduler_of_the_script_is_still_watched(
    session: Session, capfd: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = session.prepare(*build())
    session.schedule(schedulers.LinearLR(optimizer, 1.0, 0.5, STEPS), total=TOTAL)
    other = schedulers.CosineAnnealingLR(optimizer, 2)
    for _ in range(5):
        step(session, model, optimizer)
        other.step()
    said = capfd.readouterr().err
    assert said.count("CosineAnnealingLR (test_schedule.py") == 1
    assert "LinearLR" not in said


def test_training_past_the_total_is_told_of_once(session: Session, capfd: pytest.CaptureFixture[str]) -> None:
    model, optimizer = session.prepare(*build())
    session.schedule(schedulers.CosineAnnealingLR(optimizer, 2), total=2 * BATCH)
    said = []
    for _ in range(4):
        step(session, model, optimizer)
        said.append(capfd.readouterr().err.count("12 samples, and total=8: the CosineAnnealingLR stays at"))
    assert said == [0, 0, 1, 0]


@pytest.mark.parametrize("shared", [False, True], ids=["a newcomer", "a member of a new group"])
def test_who_takes_another_s_state_has_its_place_in_the_schedule(shared: bool) -> None:
    maker, _ = MAKERS["SequentialLR"]
    expected, raw = list(plain(maker)), b""
    for first, last in ((0, 5), (5, STEPS)):
        with atoll.join(Config(), place=Place()) as session:
            model, optimizer = session.prepare(*build())
            session.schedule(maker(optimizer), total=TOTAL)
            state = session._state
            if raw:
                state.restore_shared(raw) if shared else state.restore(raw, 0, 0)
            for at in range(first, last):
                assert settings(optimizer) == expected[at]
                step(session, model, optimizer)
            raw = state.capture_shared() if shared else state.capture()
