"""What a step does beside the arithmetic: calls, locks and events, counted and not timed."""

from __future__ import annotations

import inspect
import math
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import atoll
from atoll.core import events
from atoll.core.config import Config
from atoll.observe.journal import JournalReader
from atoll.observe.rundir import DIRECTORY_VARIABLE
from atoll.tensors import torch_patches
from atoll.tensors.torch_compat import version_of
from atoll.tensors.torch_scaling import seem_finite
from atoll.train.api import records
from support.pool import ring_of_one

SOURCE = str(Path(atoll.__file__).parent) + "/"
MOST = {"alone": 103, "ring": 335}  # Python functions of Atoll's in a step of six parameters


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))


def calls_of(act: Callable[[], object]) -> dict[str, int]:
    """How often `act` calls each of Atoll's Python functions."""
    found: dict[str, int] = {}

    def called(frame: Any, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(SOURCE):
            found[frame.f_code.co_name] = found.get(frame.f_code.co_name, 0) + 1

    sys.setprofile(called)
    try:
        act()
    finally:
        sys.setprofile(None)
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the session keeps its records; no step is so late that its records are told."""
    # Sessions that other tests have not left would still hear of each zero_grad and backward.
    monkeypatch.setattr(torch_patches, "_backward_watchers", [])
    monkeypatch.setattr(torch_patches, "_watched_backward", None)
    monkeypatch.setattr(torch.autograd, "backward", inspect.unwrap(torch.autograd.backward))
    monkeypatch.setattr(torch_patches, "_told_of_zeros", [])
    monkeypatch.setattr(torch.optim.Optimizer, "zero_grad", torch_patches._zero_of_optimizer)
    monkeypatch.setattr(nn.Module, "zero_grad", torch_patches._zero_of_module)
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    monkeypatch.setattr(records, "LATE_SECONDS", math.inf)
    monkeypatch.setattr(records, "FLUSH_SECONDS", threading.TIMEOUT_MAX)
    return tmp_path


def stepping(session: atoll.Session) -> Callable[[], None]:
    """A step of a network under the session, the first three of which are made."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session.prepare(model, optimizer)
    batch = torch.ones(5, 8)

    def step() -> None:
        loss = model(batch).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        session.log(loss=loss)

    for _ in range(3):
        step()
    return step


@pytest.mark.parametrize("kind", ["alone", "ring"])
def test_a_step_makes_few_calls(folder: Path, kind: str) -> None:
    with atoll.join(Config(), place=ring_of_one() if kind == "ring" else None) as session:
        step = stepping(session)
        found = calls_of(step)
    assert sum(found.values()) <= MOST[kind], " ".join(f"{name}:{count}" for name, count in found.items())


def test_a_step_alone_takes_no_lock_writes_no_event_and_hooks_no_gradient(folder: Path) -> None:
    with atoll.join(Config()) as session:
        step = stepping(session)
        journal = session._records._journal
        assert journal is not None
        journal._lock = mock.MagicMock(wraps=threading.RLock())
        found = calls_of(step)
        assert not journal._lock.__enter__.called
        assert not {"emit", "encode", "flush", "on_gradient", "arm", "_end", "round"} & found.keys()
        journal._lock = threading.RLock()


def test_every_step_is_in_the_journal_in_order(folder: Path) -> None:
    with atoll.join(Config()) as session:
        step = stepping(session)
        step()
        session.expect(9)  # an event of its own: what came before it is told before it
        step()
    (path,) = folder.rglob("*.jsonl")
    told = list(JournalReader(path).read())
    steps = [event for event in told if isinstance(event, events.StepDone)]
    assert [each.iteration for each in steps] == [1, 2, 3, 4, 5]
    assert [each.samples for each in steps] == [5.0] * 5
    assert [each.time for each in steps] == sorted(each.time for each in steps)
    expected = next(event for event in told if isinstance(event, events.Expected))
    assert told.index(steps[3]) < told.index(expected) < told.index(steps[4])


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_quick_look_finds_what_is_not_finite_and_changes_nothing(wrong: float, dtype: torch.dtype) -> None:
    least, most = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    values = torch.tensor([0.0, -0.0, least / 2, -least, most, -most, 1.5], dtype=dtype)
    for place in (0, 3, 6):
        tensors = [values.clone(), values.clone()]
        before, versions = [each.clone() for each in tensors], [version_of(each) for each in tensors]
        assert seem_finite(tensors)
        assert seem_finite(tensors)
        assert all(torch.equal(_bits(a), _bits(b)) for a, b in zip(tensors, before, strict=True))
        assert [version_of(each) for each in tensors] == versions
        tensors[1][place] = wrong
        assert not seem_finite(tensors)
        assert seem_finite(before)  # what was found is forgotten


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


@pytest.mark.parametrize("width", [8, 400], ids=["gathered", "by parameter"])
def test_alone_accumulated_batches_and_absent_gradients_train_as_in_plain_torch(width: int) -> None:
    def train(session: atoll.Session | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(width, width), nn.Linear(width, width)])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if session is not None:
            session.prepare(model, optimizer)
        for step in range(6):
            for part in range(2):
                model[(step // 2) % 2](torch.full((3, width), 1.0 + part)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=step != 2)
        return [parameter.detach().clone() for parameter in model.parameters()]

    with atoll.join(Config()) as session:
        own = train(session)
    assert all(torch.equal(a, b) for a, b in zip(own, train(None), strict=True))


def test_a_script_that_pauses_has_its_steps_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may evaluate for an hour: the command and the next `kill -9` must not wait for the next step."""
    monkeypatch.setattr(records, "FLUSH_SECONDS", 0.01)
    with atoll.join(Config()) as session:
        stepping(session)
        (path,) = folder.rglob("*.jsonl")
        until = time.monotonic() + 30.0
        while path.read_text().count("stepdone") < 3:
            assert time.monotonic() < until, "waited 30 s for the steps in the journal"
            time.sleep(0.01)
