"""Ctrl-C at any moment of a step: nothing stays pinned or locked, and training goes on to the bit.

Python looks for signals as a function of its own begins and as one in C has returned. A profiler is called
at both, and raises a real SIGINT at a moment that a test names.
"""

from __future__ import annotations

import copy
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from atoll.core.memory import Memory
from atoll.memory import interrupts, planning, speculation
from atoll.memory.bandwidth import measure
from atoll.memory.fit import fit
from atoll.memory.fitted import Moving
from atoll.moves.timeline import Bandwidths

BLOCK = 4096
X = torch.ones(2, 32)
POINTS = 40  # moments of two steps that are tried
SWITCHING = ("torch/_dynamo/decorators.py", "torch/autograd/grad_mode.py")  # torch's switching of gradients


class Interrupt:
    """Raises SIGINT at the `at`th moment at which Python looks for signals; `count`: how many there were.

    In plain torch too, an interrupt within torch's own switching of gradients leaves them switched off (the
    end of `optimizer.step` is Python: `_use_grad_for_differentiable`). Such a moment is passed over for the
    next.
    """

    def __init__(self, at: int) -> None:
        self.at, self.count = at, 0

    def __enter__(self) -> Interrupt:
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, _: Any) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename != __file__:
            self.count += 1
            if self.count >= self.at > 0 and not frame.f_code.co_filename.endswith(SWITCHING):
                sys.setprofile(None)
                signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    rates = measure(torch.device("cpu"), None, str(tmp_path))
    monkeypatch.setattr(planning, "measure", lambda *_: rates)
    monkeypatch.setattr(interrupts, "_KEPT", interrupts._Kept())  # other tests may not have closed theirs
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is before


def made() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(8)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def fitted(folder: Path) -> tuple[nn.Sequential, torch.optim.Optimizer, Moving]:
    model, optimizer = made()
    memory = Memory(
        device=str(4 * BLOCK), host=str(12 * BLOCK), disk=f"{folder}:1MiB", chunk=str(BLOCK), step="host"
    )
    moving = fit(model, optimizer, memory=memory)
    assert isinstance(moving, Moving)
    return model, optimizer, moving


def train(model: nn.Module, optimizer: torch.optim.Optimizer, clip: Any, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(X).pow(2).mean().backward()
        clip()
        optimizer.step()


@pytest.mark.check
def test_after_ctrl_c_at_any_moment_training_goes_on(tmp_path: Path) -> None:
    model, optimizer, moving = fitted(tmp_path)

    def clip() -> None:
        moving.clip_grad_norm_(0.01)

    train(model, optimizer, clip)
    with Interrupt(0) as whole:
        train(model, optimizer, clip)
    for at in range(7, whole.count, whole.count // POINTS):
        with pytest.raises(KeyboardInterrupt), Interrupt(at):
            train(model, optimizer, clip, 3)
        assert torch.is_grad_enabled()
        train(model, optimizer, clip)
    moving._steps.wait_all()
    moving.engine._bringing.settle_all()
    assert [key for key, payload in moving._store._payloads.items() if payload.pinned_by] == []
    assert not any(moving.engine._pins.values())
    plain, its_optimizer = made()
    plain.load_state_dict(model.state_dict())
    its_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, clip)
    train(plain, its_optimizer, lambda: nn.utils.clip_grad_norm_(plain.parameters(), 0.01))
    moving.close()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


@pytest.mark.check
def test_after_ctrl_c_while_chunks_are_stepped_early_training_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rates = Bandwidths(to_device=1e9, to_host=1e9, host_steps=1.2e8, device_steps=1e9)
    monkeypatch.setattr(planning, "measure", lambda *_: rates)
    monkeypatch.setattr(speculation, "_ALWAYS", True)
    monkeypatch.setattr(speculation, "TRUST", 1)
    model, optimizer = made()
    memory = Memory(device=str(4 * BLOCK), host="1MiB", chunk=str(BLOCK), step="host")
    moving = fit(model, optimizer, memory=memory)
    assert isinstance(moving, Moving)
    assert moving.plan.early
    train(model, optimizer, lambda: None, 4)
    with Interrupt(0) as whole:
        train(model, optimizer, lambda: None)
    for at in range(7, whole.count, whole.count // (POINTS // 2)):
        with pytest.raises(KeyboardInterrupt), Interrupt(at):
            train(model, optimizer, lambda: None, 3)
        train(model, optimizer, lambda: None)
    moving._steps.wait_all()
    moving.engine._bringing.settle_all()  # what is brought is pinned meanwhile
    assert [key for key, payload in moving._store._payloads.items() if payload.pinned_by] == []
    assert moving.stats().stepped_early
    plain, its_optimizer = made()
    plain.load_state_dict(model.state_dict())
    its_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, lambda: None, 4)
    train(plain, its_optimizer, lambda: None, 4)
    moving.close()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


@pytest.fixture
def kept() -> Iterator[None]:
    assert interrupts.begin()
    yield
    interrupts.end()


@pytest.mark.usefixtures("kept")
def test_a_signal_within_is_raised_at_the_end_of_the_outermost() -> None:
    reached = []

    @interrupts.uninterrupted
    def inner() -> None:
        signal.raise_signal(signal.SIGINT)
        reached.append("inner")

    @interrupts.uninterrupted
    def outer() -> None:
        inner()
        reached.append("outer")

    with pytest.raises(KeyboardInterrupt):
        outer()
    assert reached == ["inner", "outer"]
    with pytest.raises(KeyboardInterrupt):  # outside nothing is kept
        signal.raise_signal(signal.SIGINT)
    interrupts.uninterrupted(reached.clear)()  # and nothing is left over
    assert reached == []


@pytest.mark.usefixtures("kept")
def test_a_second_signal_is_raised_at_once() -> None:
    @interrupts.uninterrupted
    def waits() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("not reached")

    with pytest.raises(KeyboardInterrupt):
        waits()
    interrupts.uninterrupted(lambda: None)()  # no third is left over


def test_a_handler_that_the_script_has_set_since_stays() -> None:
    def mine(*_: object) -> None:
        """The script's."""

    before = signal.getsignal(signal.SIGINT)
    assert interrupts.begin()
    signal.signal(signal.SIGINT, mine)
    interrupts.end()
    assert signal.getsignal(signal.SIGINT) is mine
    signal.signal(signal.SIGINT, before)


def test_where_ctrl_c_is_ignored_it_stays_so() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert not interrupts.begin()
    assert signal.signal(signal.SIGINT, before) is signal.SIG_IGN
