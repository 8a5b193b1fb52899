"""Chunks that come and go are put right after an error or Ctrl-C, and no step is lost meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll.core.memory import Memory
from atoll.memory import fitted as fitted_module
from atoll.memory import residents
from atoll.memory.bringing import Bringing
from atoll.memory.fit import fit
from atoll.memory.fitted import Moving
from atoll.memory.stays import Stay

pytestmark = pytest.mark.usefixtures("poisoned")
BLOCK = 4096
X = torch.ones(2, 32)


def made() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(8)))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def fitted(blocks: int = 4) -> tuple[nn.Sequential, torch.optim.Optimizer, Moving]:
    model, optimizer = made()
    memory = Memory(device=str(blocks * BLOCK), host="1GiB", chunk=str(BLOCK), step="host")
    moving = fit(model, optimizer, memory=memory)
    assert isinstance(moving, Moving)
    return model, optimizer, moving


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(X).pow(2).mean().backward()
        optimizer.step()


def values(model: nn.Module) -> list[Tensor]:
    return [value.clone() for value in model.state_dict().values()]


def fail_once(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: BaseException, *, after: bool = False
) -> list[int]:
    """The next call raises, before or after it has done its work; what is given counts the failures."""
    plain, failures = getattr(owner, name), list[int]()

    def failing(*args: Any, **options: Any) -> Any:
        found = plain(*args, **options) if after or failures else None
        if not failures:
            failures.append(1)
            raise error
        return found

    monkeypatch.setattr(owner, name, failing)
    return failures


@pytest.mark.parametrize("where", ["in_order_of_use", "refresh"])
def test_a_step_is_not_lost_to_who_reads_meanwhile(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, moving = fitted()
    kept = model[0].weight.view(-1)
    owner: Any = fitted_module if where == "in_order_of_use" else moving.engine
    plain: Callable[..., Any] = getattr(owner, where)

    def read() -> None:
        values(model)
        for parameter in model.parameters():
            parameter.sum()

    def meanwhile(*args: Any) -> Any:
        thread = threading.Thread(target=read)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
        return plain(*args)

    monkeypatch.setattr(owner, where, meanwhile)
    train(model, optimizer, 3)
    other, its_optimizer = made()
    train(other, its_optimizer, 3)
    assert all(map(torch.equal, values(model), values(other)))
    assert torch.equal(kept, other[0].weight.view(-1))
    moving.close()


def test_a_step_whose_refresh_was_cut_short_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, moving = fitted()
    kept = model[0].weight.view(-1)
    fail_once(monkeypatch, moving.engine, "refresh", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        train(model, optimizer, 1)
    other, its_optimizer = made()
    train(other, its_optimizer, 1)
    assert all(map(torch.equal, values(model), values(other)))
    assert torch.equal(model(X), other(X))
    assert torch.equal(kept, other[0].weight.view(-1))
    moving.close()


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("engine", "_decide"),
        ("engine", "_write_back"),
        ("engine", "_prefetch"),
        ("residents", "_take_away"),
        ("residents", "enter"),
        ("residents", "lay"),
        ("bringing", "bring"),
        ("module", "_put"),
    ],
)
def test_a_move_that_was_cut_short_is_put_right(
    part: str, name: str, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer, moving = fitted()
    train(model, optimizer, 3)
    with torch.no_grad():
        model[0].weight.add_(1)
    expected = values(model)
    engine = moving.engine
    parts = {
        "engine": engine,
        "residents": engine._residents,
        "bringing": engine._bringing,
        "module": residents,
    }
    failures = fail_once(monkeypatch, parts[part], name, KeyboardInterrupt(), after=after)
    with pytest.raises(KeyboardInterrupt), torch.no_grad():
        model(model(X))
    assert failures
    monkeypatch.undo()
    assert not any(moving.engine._pins.values())
    with torch.no_grad():
        assert model(X).isfinite().all()
        assert model(X).isfinite().all()
    assert all(map(torch.equal, values(model), expected))
    train(model, optimizer, 1)
    moving.close()


def test_an_interrupted_wait_leaves_the_block_to_what_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, moving = fitted()
    train(model, optimizer, 3)
    expected, copy, gate = values(model), Bringing._copy, threading.Event()

    def slow(bringing: Bringing, stay: Stay, *, tells: bool) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert gate.wait(60)
        copy(bringing, stay, tells=tells)

    monkeypatch.setattr(Bringing, "_copy", slow)
    fail_once(monkeypatch, moving.engine._bringing, "settle", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt), torch.no_grad():
        model(X)
    gate.set()
    assert all(map(torch.equal, [p.detach().clone() for p in model.parameters()], expected))
    moving.close()


def test_what_is_written_through_a_view_of_a_view_stays() -> None:
    model, _, moving = fitted()
    with torch.no_grad():
        model[0].weight[0].data.fill_(7)
        model[1].weight.t().data.fill_(2)
        model[2].weight.detach().numpy()[:] = 3
        model(X)
        model(X)
    assert (model[0].weight[0] == 7).all()
    assert (model[1].weight == 2).all()
    assert (model[2].weight == 3).all()
    moving.close()


def test_a_close_that_failed_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, moving = fitted()
    train(model, optimizer, 1)
    expected, plain, calls = values(model), moving.engine.home.value, list[int]()

    def failing(*args: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 4:
            raise torch.OutOfMemoryError("no memory")
        return plain(*args)

    monkeypatch.setattr(moving.engine.home, "value", failing)
    with pytest.raises(torch.OutOfMemoryError):
        moving.close()
    moving.close()
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert all(map(torch.equal, model.parameters(), expected))
