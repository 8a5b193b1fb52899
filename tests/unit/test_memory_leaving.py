"""Gradients on their way off the device, and chunks on their way to it, while the script goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll.core.memory import Memory
from atoll.memory import copies
from atoll.memory.bandwidth import measure
from atoll.memory.fit import fit
from atoll.memory.fitted import Moving
from atoll.memory.leaving import Leaving
from support.links import slow_link

pytestmark = pytest.mark.usefixtures("poisoned")
CPU = torch.device("cpu")
WIDTH, LAYERS = 32, 8
CHUNK = 4 * WIDTH * WIDTH  # bytes: a layer's weight
SECONDS = 60  # for what comes at once
X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))


def made() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def backward(model: nn.Module) -> None:
    model(X).pow(2).mean().backward()


def values(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


@contextmanager
def moving(model: nn.Module, optimizer: Any, blocks: int = 4) -> Iterator[Moving]:
    memory = Memory(device=str(blocks * CHUNK), host="64MiB", chunk=str(CHUNK), step="host")
    fitted = fit(model, optimizer, memory=memory)
    assert isinstance(fitted, Moving)
    with fitted:
        yield fitted


def plain_after(steps: int) -> list[Tensor]:
    model, optimizer = made()
    for _ in range(steps):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


@contextmanager
def held_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Gradients do not arrive before the event is set."""
    go, copy = threading.Event(), copies.to_host

    def late(target: Tensor, source: Tensor, *, adds: bool = False) -> None:
        assert go.wait(SECONDS)
        copy(target, source, adds=adds)

    with monkeypatch.context() as patch:
        patch.setattr(copies, "to_host", late)
        try:
            yield go
        finally:
            go.set()


def test_a_step_that_is_begun_before_its_gradients_are_there_counts_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, optimizer = made()
    with moving(model, optimizer) as fitted:
        fitted.gradients._leaving.room = 2**30
        with held_up(monkeypatch) as go:
            backward(model)
            assert all(parameter.grad is not None for parameter in model.parameters())
            optimizer.step()  # neither waits for them
            assert not any(held.coming.done() for held in fitted.gradients._chunks.values() if held.coming)
            go.set()
            optimizer.zero_grad()
        backward(model)
        optimizer.step()
        assert all(map(torch.equal, values(model), plain_after(2)))


def test_what_is_accumulated_waits_for_the_step_before() -> None:
    model, optimizer = made()
    plain, other = made()
    with moving(model, optimizer):
        for each, stepper in ((model, optimizer), (plain, other)):
            for _ in range(3):  # never cleared
                backward(each)
                backward(each)
                stepper.step()
        assert all(map(torch.equal, values(model), values(plain)))


def test_a_gradient_that_did_not_arrive_is_told_of_where_it_is_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, optimizer = made()
    with moving(model, optimizer):

        def torn(*_: Any, **__: Any) -> None:
            raise OSError("no room for it")

        with monkeypatch.context() as patch:
            patch.setattr(copies, "to_host", torn)
            model[-1](X).sum().backward()  # one layer alone
            assert model[-1].weight.grad is not None
            with pytest.raises(OSError, match="no room for it"):
                model[-1].weight.grad.clone()
        model[-1].weight.grad = None  # it is gone, and so is the error
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
        assert all(map(torch.equal, values(model), plain_after(1)))


def test_a_step_with_a_gradient_that_did_not_arrive_fails_for_its_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, optimizer = made()
    with moving(model, optimizer) as fitted:

        def torn(*_: Any, **__: Any) -> None:
            raise OSError("no room for it")

        with monkeypatch.context() as patch:
            patch.setattr(copies, "to_host", torn)
            model[-1](X).sum().backward()
            optimizer.step()
            with pytest.raises(OSError, match="no room for it"):
                model[-1](X)
        assert torch.isfinite(model[0](X)).all()
        fitted.close()
    assert model[-1].weight.grad is None


def test_a_lost_gradient_that_nobody_was_told_of_is_raised_once_all_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, _ = made()
    with moving(model, None) as fitted:

        def torn(*_: Any, **__: Any) -> None:
            raise OSError("no room for it")

        monkeypatch.setattr(copies, "to_host", torn)
        model[-1](X).sum().backward()
        with pytest.raises(OSError, match="no room for it"):
            fitted.close()
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
    assert model[-1].weight.grad is None


def test_no_more_than_the_room_is_on_its_way() -> None:
    leaving, go = Leaving(room=8), threading.Event()
    done: list[int] = []

    def job(number: int) -> Callable[[], None]:
        return lambda: (go.wait(SECONDS), done.append(number), None)[2]

    for number in range(3):
        leaving.carry(job(number), 4, CPU)  # 8 beside the latest
    fourth = threading.Thread(target=lambda: leaving.carry(job(3), 4, CPU))
    fourth.start()
    fourth.join(0.05)
    assert fourth.is_alive()  # it waits: the bytes before it are more than the room
    go.set()
    fourth.join(SECONDS)
    leaving.close()
    assert done == [0, 1, 2, 3]


def test_chunks_of_the_next_step_come_while_the_script_does_other_things() -> None:
    model, optimizer = made()
    with moving(model, optimizer) as fitted:
        for _ in range(3):
            backward(model)
            optimizer.step()
            optimizer.zero_grad()
        before = fitted.engine.waited
        until = time.monotonic() + SECONDS
        while not all(stay.coming.done() for stay in fitted.engine._resident.values() if stay.coming):
            assert time.monotonic() < until
            time.sleep(0.001)
        assert len(fitted.engine._resident) == 4  # all that there is room for
        model[0](X)
        assert fitted.engine.waited - before < 0.05


def test_a_use_of_another_chunk_waits_for_those_that_fill_the_device_on_their_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, optimizer = made()
    with moving(model, optimizer) as fitted:
        backward(model)
        go, copy = threading.Event(), copies.to_device

        def late(target: Tensor, source: Tensor) -> None:
            assert go.wait(SECONDS)
            copy(target, source)

        monkeypatch.setattr(copies, "to_device", late)
        optimizer.step()
        assert [stay.ready for stay in fitted.engine._resident.values()] == [False] * 4
        threading.Timer(1.0, go.set).start()
        assert torch.isfinite(model[-1](X)).all()  # which is none of the four


def test_a_link_has_its_rate_and_is_measured_at_it() -> None:
    source = torch.ones(2**18)
    with slow_link(to_device=50e6, to_host=25e6) as (there, back):
        began = time.perf_counter()
        for copy in (copies.to_device, copies.to_host):
            target = torch.zeros(2**18)
            copy(target, source)
            assert torch.equal(target, source)
        copies.to_host(target, source, adds=True)
        assert torch.equal(target, 2 * source)
        took = time.perf_counter() - began
        assert took >= source.nbytes * (1 / 50e6 + 2 / 25e6)
        moved = 2**19
        rates = measure(CPU, None, "", most=2 * moved)
        # The latency that is taken off is long on a busy machine.
        for rate, line in ((rates.to_device, there), (rates.to_host, back)):
            assert moved / rate + rates.latency >= 0.9999 * moved / line.rate
    assert copies.to_device is not there
