"""A ring that begins with one worker, sessions with several models, and rings whose members cannot connect to
confirm: each loses members, with real processes and kills."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from run_command import wait_for
from test_survival_ring import (
    DEADLINE,
    STEPS,
    STRIKE,
    Fault,
    assert_went_on,
    case,
    let_in,
    loss_of,
    make,
    members_of,
    plain,
    trains,
    weight_of,
)
from torch import Tensor, nn

from atoll.core import points
from atoll.train.api.session import Session
from atoll.train.group.confirmation import Confirmations, steps
from atoll.train.group.memberlinks import MemberLinks

# -- one worker alone, through a hub ------------------------------------------------------------------------


def begins_alone(session: Session, who: int, folder: Path) -> dict[str, Any]:
    """One trains; in iteration 1 a second one enters, with which it makes the others up to STRIKE."""
    result = takes_in(session, who, folder, {1: 2})
    return result | {"confirms": confirms_by(session)}


def takes_in(session: Session, who: int, folder: Path, grows: dict[int, int]) -> dict[str, Any]:
    """As `trains`; in iteration i it waits for a newcomer, where the ring has fewer than `grows[i]`."""
    model, optimizer = make()
    session.prepare(model, optimizer)
    first = session.resume()
    ring = session._runtime.ring
    assert ring is not None
    counted: list[float] = []
    for step in range(first, STEPS):
        if session.world < grows.get(step, 0):
            (folder / f"{who}.stops").touch()
            wait_for(lambda: ring.is_awaited, "a newcomer", DEADLINE / 2)
        optimizer.zero_grad()
        session.weight(2.0**who)
        loss_of(model, who, step).backward()
        counted.append(weight_of(session))
        optimizer.step()
    return {
        "first": first,
        "counted": counted,
        "parameters": [p.detach().tolist() for p in model.parameters()],
    }


def confirms_by(session: Session) -> list[int]:
    """The workers that could not connect."""
    assert session._runtime.ring is not None
    channels = session._runtime.ring.channels.current
    assert channels is not None
    assert channels.confirmations is not None
    return channels.confirmations.member_links.without


def test_one_begins_alone_another_enters_and_the_first_is_killed(tmp_path: Path) -> None:
    fault = Fault(0, "ring.all_sent", iteration=STRIKE)
    with case(tmp_path / "run", begins_alone, fault, workers=1) as made:
        let_in(made)
        made.killed(0)
        result = made.result(1)
        assert made.told("ring") == ["ring 1 of 1 workers", "ring 2 of 2 workers", "ring 3 of 1 workers"]
    assert "error" not in result, result["error"]
    assert result["first"] == 2
    assert members_of(result["counted"][0]) == [0, 1]
    assert members_of(result["counted"][STRIKE - 2]) in ([1], [0, 1])
    assert [members_of(weight) for weight in result["counted"][STRIKE - 1 :]] == [[1]] * (STEPS - STRIKE - 1)
    assert (result["world"], result["rank"], result["confirms"]) == (1, 0, [])
    counted = [1.0] * 2 + result["counted"]  # and as plain PyTorch does
    for ours, theirs in zip(result["parameters"], plain(counted), strict=True):
        torch.testing.assert_close(torch.tensor(ours, dtype=torch.float64), theirs, rtol=0, atol=1e-9)


def scales(session: Session, who: int, folder: Path, *, registers: bool) -> dict[str, Any]:
    """One's GradScaler has doubled its scale when a second worker enters, whose own has not."""
    model, optimizer = make()
    session.prepare(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    if registers:
        session.register(scaler=scaler)
    ring = session._runtime.ring
    assert ring is not None
    for step in range(session.resume(), STEPS):
        if step == 2 and who == 0:
            (folder / f"{who}.stops").touch()
            wait_for(lambda: ring.is_awaited, "a newcomer", DEADLINE / 2)
        optimizer.zero_grad()
        scaler.scale(loss_of(model, who, step)).backward()
        scaler.step(optimizer)
        scaler.update()
    return {"scale": scaler.get_scale()}


@pytest.mark.parametrize("registers", [True, False])
def test_a_newcomer_has_the_scale_of_the_others_or_all_are_told_so(tmp_path: Path, registers: bool) -> None:
    with case(tmp_path / "run", partial(scales, registers=registers), workers=1) as made:
        let_in(made)
        results = [made.result(who) for who in range(2)]
    if registers:
        scale = 64.0 * 2 ** (STEPS // 2)
        assert results == [result | {"scale": scale} for result in results]
        return
    for result in results:
        assert "worker 0 divides gradients by 128, worker 1 by 64 at step" in result["error"]
        assert "session.register(scaler=scaler)" in result["error"]


def test_one_alone_through_a_hub_trains_to_the_bit_as_one_without(tmp_path: Path) -> None:
    with case(tmp_path / "run", trains, workers=1) as made:
        result = made.result(0)
        assert made.told("ring") == ["ring 1 of 1 workers"]
    assert result["counted"] == [1.0] * STEPS
    model, optimizer = make()
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, 0, step).backward()
        optimizer.step()
    assert result["parameters"] == [p.detach().tolist() for p in model.parameters()]


# -- several models in a session ----------------------------------------------------------------------------


def make_second() -> tuple[nn.Module, torch.optim.Optimizer]:
    model, _ = make()
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def trains_two(session: Session, who: int, folder: Path) -> dict[str, Any]:
    """Two models: two backwards an iteration in the even ones, one for both in the odd ones. The weights of
    both say who counted in each."""
    models = [make(), make_second()]
    for model, optimizer in models:
        session.prepare(model, optimizer)
    first = session.resume()
    counted: list[list[float]] = []
    for step in range(first, STEPS):
        for model, optimizer in models:
            optimizer.zero_grad()
            session.weight(2.0**who, model)
        losses = [loss_of(model, who, step) for model, _ in models]
        if step % 2:
            torch.stack(losses).sum().backward()
        else:
            for loss in losses:
                loss.backward()
        counted.append([prepared.reducer.sum.scaling.reference for prepared in session._state.prepared])  # type: ignore[attr-defined]
        for _, optimizer in models:
            optimizer.step()
    parameters = [[p.detach().tolist() for p in model.parameters()] for model, _ in models]
    return {"first": first, "counted": counted, "parameters": parameters}


def plain_two(counted: list[list[float]]) -> list[list[Tensor]]:
    """Parameters of both after the same steps in one process, from the contributions that counted in each."""
    models = [make(), make_second()]
    for step, weights in enumerate(counted):
        for (model, optimizer), weight in zip(models, weights, strict=True):
            optimizer.zero_grad()
            for who in members_of(weight):
                (loss_of(model, who, step) * 2.0**who / weight).backward()
            optimizer.step()
    return [[p.detach() for p in model.parameters()] for model, _ in models]


def assert_two_went_on(results: list[dict[str, Any]], survivors: list[int]) -> None:
    for result in results:
        assert "error" not in result, result["error"]
        assert result["world"] == len(survivors)
        assert result["parameters"] == results[0]["parameters"]
        assert result["counted"] == results[0]["counted"][-len(result["counted"]) :]
    counted = results[0]["counted"]
    assert len(counted) == STEPS
    assert [members_of(weight) for weight in counted[-1]] == [survivors] * 2
    for ours, theirs in zip(results[0]["parameters"], plain_two(counted), strict=True):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(torch.tensor(one, dtype=torch.float64), other, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("point", "iteration", "nth"),
    [
        ("ring.sent", STRIKE, 1),  # of the first model, in a backward of both
        ("ring.published", STRIKE, 1),  # the first is whole, and the second is not
        ("ring.held", STRIKE, 2),
        ("ring.confirmed", STRIKE + 1, 1),  # two backwards: the second one has not begun
        ("ring.stepped", STRIKE, 1),  # the first has stepped
        ("ring.held", -1, 12),  # all know which models have new gradients
    ],
)
def test_two_models_go_on_without_a_member(tmp_path: Path, point: str, iteration: int, nth: int) -> None:
    with case(tmp_path / "run", trains_two, Fault(1, point, iteration, nth=nth)) as made:
        made.killed(1)
        results = [made.result(who) for who in (0, 2)]
    for result in results:
        assert "error" not in result, result["error"]
    assert_two_went_on(results, [0, 2])
    if iteration > 0:
        whole = [[members_of(weight) for weight in weights] for weights in results[0]["counted"]]
        assert whole[:iteration] == [[[0, 1, 2]] * 2] * iteration
        assert whole[iteration + 1 :] == [[[0, 2]] * 2] * (STEPS - iteration - 1)


@dataclass(frozen=True)
class TakesTurns:
    """Two models that are trained in turns, in this `order` of how they were prepared, and each with its own
    backward and step. In iteration 1 two wait for a third one (`let_in`)."""

    order: tuple[int, ...]

    def __call__(self, session: Session, who: int, folder: Path) -> dict[str, Any]:
        models = [make(), make_second()]
        for model, optimizer in models:
            session.prepare(model, optimizer)
        first = session.resume()
        ring = session._runtime.ring
        assert ring is not None
        counted: list[list[float]] = []
        for step in range(first, STEPS):
            if step == 1 and session.world < 3:
                (folder / f"{who}.stops").touch()
                wait_for(lambda: ring.is_awaited, "a newcomer", DEADLINE / 2)
            counted.append([])
            for number in self.order:
                model, optimizer = models[number]
                optimizer.zero_grad()
                session.weight(2.0**who, model)
                loss_of(model, who, step).backward()
                counted[-1].append(session._state.prepared[number].reducer.sum.scaling.reference)  # type: ignore[attr-defined]
                optimizer.step()
        parameters = [[p.detach().tolist() for p in model.parameters()] for model, _ in models]
        return {"first": first, "counted": counted, "parameters": parameters}


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (1, 1, 0), (0, 1, 1)])
def test_a_late_worker_enters_where_the_loop_over_two_models_begins(
    tmp_path: Path, order: tuple[int, ...]
) -> None:
    with case(tmp_path / "run", TakesTurns(order), workers=2) as made:
        let_in(made)
        results = [made.result(who) for who in range(3)]
        assert made.told("ring") == ["ring 1 of 2 workers", "ring 2 of 3 workers"]
    assert [result.get("first", result) for result in results] == [0, 0, 2]
    for result in results:
        assert result["parameters"] == results[0]["parameters"]
        assert result["counted"][-4:] == [[7.0] * len(order)] * 4
    assert results[0]["counted"][:2] == [[3.0] * len(order)] * 2


@dataclass(frozen=True)
class TakesTurnsInOneList:
    """As `TakesTurns`, with both models in one list and their optimizers in another, as a GAN's script may
    have them: in no iteration both optimizers step."""

    order: tuple[int, ...]

    def __call__(self, session: Session, who: int, folder: Path) -> dict[str, Any]:
        models = [make(), make_second()]
        both = nn.ModuleList([model for model, _ in models])
        session.prepare(both, [optimizer for _, optimizer in models])
        first = session.resume()
        ring = session._runtime.ring
        assert ring is not None
        counted: list[list[float]] = []
        for step in range(first, STEPS):
            if step == 1 and session.world < 3:
                (folder / f"{who}.stops").touch()
                wait_for(lambda: ring.is_awaited, "a newcomer", DEADLINE / 2)
            counted.append([])
            for number in self.order:
                model, optimizer = models[number]
                optimizer.zero_grad()
                session.weight(2.0**who)
                loss_of(model, who, step).backward()
                counted[-1].append(session._state.prepared[0].reducer.sum.scaling.reference)  # type: ignore[attr-defined]
                optimizer.step()
        parameters = [[p.detach().tolist() for p in model.parameters()] for model, _ in models]
        return {"first": first, "counted": counted, "parameters": parameters}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_late_worker_enters_a_loop_whose_optimizers_never_step_one_mean(
    tmp_path: Path, order: tuple[int, ...]
) -> None:
    with case(tmp_path / "run", TakesTurnsInOneList(order), workers=2) as made:
        let_in(made)
        results = [made.result(who) for who in range(3)]
        assert made.told("ring") == ["ring 1 of 2 workers", "ring 2 of 3 workers"]
    assert [result.get("first", result) for result in results] == [0, 0, 2]
    for result in results:
        assert result["parameters"] == results[0]["parameters"]
        assert result["counted"][-4:] == [[7.0] * len(order)] * 4
    assert results[0]["counted"][:2] == [[3.0] * len(order)] * 2


# -- members that cannot connect ----------------------------------------------------------------------------


def confirms(session: Session, who: int, folder: Path) -> dict[str, Any]:
    return trains(session, who, folder) | {"confirms": confirms_by(session)}


def deaf(who: int) -> None:
    """Worker 1 cannot listen."""

    def listens(links: MemberLinks, listen: Callable[..., Any] = MemberLinks._listen) -> socket.socket | None:
        if who == 1:
            links.trouble = "it cannot listen: no ports are left"
            return None
        found: socket.socket | None = listen(links)
        return found

    MemberLinks._listen = listens  # type: ignore[method-assign]


def test_where_one_cannot_connect_all_confirm_by_sums_until_it_is_gone(tmp_path: Path) -> None:
    """Worker 2 dies first, and the two that are left confirm by sums again; then the one that could not."""
    faults = (Fault(2, "ring.held", 1), Fault(1, "ring.held", STRIKE))
    with case(tmp_path / "run", confirms, *faults, prelude=deaf) as made:
        made.killed(2)
        made.killed(1)
        result = made.result(0)
        said = made.said(1)
    assert_went_on([result], [0])
    assert result["confirms"] == []
    assert said.count("worker 1: the ring's members confirm by all-reduce") == 1
    assert "it cannot listen: no ports are left" in said


def test_members_that_can_connect_do_so_before_and_after_a_break(tmp_path: Path) -> None:
    with case(tmp_path / "run", confirms, Fault(2, "ring.held")) as made:
        made.killed(2)
        results = [made.result(who) for who in (0, 1)]
    assert_went_on(results, [0, 1])
    assert [result["confirms"] for result in results] == [[], []]


def test_of_six_one_dies_between_the_two_steps_of_a_confirmation(tmp_path: Path) -> None:
    """Those to whom it is a partner in the second step hear no more of it; the others may be past that."""
    with case(tmp_path / "run", confirms, Fault(3, "test.between"), workers=6, prelude=dies_between) as made:
        made.killed(3)
        survivors = [0, 1, 2, 4, 5]
        results = [made.result(who) for who in survivors]
    assert_went_on(results, survivors)
    assert [members_of(weight) for weight in results[0]["counted"][: STRIKE + 1]] == [list(range(6))] * 4
    assert [result["confirms"] for result in results] == [[]] * 5


def dies_between(who: int) -> None:
    """In the confirmation of iteration STRIKE: there are two steps where six confirm."""
    if who != 3:
        return
    confirm, hear = Confirmations.confirm, Confirmations._hear
    heard: list[int] = []

    def confirms_it(confirmations: Confirmations, what: str) -> None:
        heard.clear()
        confirm(confirmations, what)

    def hears(confirmations: Confirmations, rank: int, word: bytes, what: str, began: float) -> None:
        hear(confirmations, rank, word, what, began)
        heard.append(rank)
        if f"iteration {STRIKE}" in what and len(heard) == len(steps(3, 6)[0].heard):
            points.reach("test.between", STRIKE)

    Confirmations.confirm = confirms_it  # type: ignore[method-assign]
    Confirmations._hear = hears  # type: ignore[method-assign]
