"""`optimizer.state` in a session: a script reads and changes it as in plain PyTorch, wherever it lies."""

from __future__ import annotations

import copy
import functools
import io
from collections import defaultdict
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import torch
from kinds import check_equal
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer

import atoll
from atoll.core.errors import UserError
from atoll.train.sync.peersexchange import PeerExchange
from atoll.train.sync.peersparameters import LocalParameters
from atoll.wire.device import Published
from support.pool import JobFailedError, WorkerPool
from support.runs import KINDS, PACES, model, run_at, run_with

pytestmark = pytest.mark.sampled

WORLD, STEPS = 2, 5
ELSEWHERE = ("server", "ps-hra", "server tiers", "peers", "peers tiers")
APART = ("asp", "ssp", "ps-hra asp", "peers stale")  # workers at their own pace
Touch = Callable[[Optimizer, list[nn.Parameter]], Any]


def adamw(net: nn.Module) -> list[Optimizer]:
    last = list(net.parameters())[-2:]
    return [AdamW([{"params": list(net.parameters())[:-2]}, {"params": last, "betas": (0.5, 0.9)}], lr=0.01)]


def momentum(net: nn.Module) -> list[Optimizer]:
    return [SGD(net.parameters(), lr=0.1, momentum=0.9)]


def adafactor(net: nn.Module) -> list[Optimizer]:
    return [Adafactor(net.parameters(), lr=0.05)]


def two(net: nn.Module) -> list[Optimizer]:
    matrices = [p for p in net.parameters() if p.dim() == 2]
    return [Muon(matrices, lr=0.02), AdamW([p for p in net.parameters() if p.dim() != 2], lr=0.02)]


MAKES = {"AdamW": adamw, "momentum": momentum, "Adafactor": adafactor, "two": two}

# -- touches of a state that has tensors -------------------------------------------------------------------


def tensors_of(state: dict[str, Any]) -> list[Tensor]:
    return [value for value in state.values() if isinstance(value, Tensor) and value.dim()]


def prunes(optimizer: Optimizer, parameters: list[nn.Parameter]) -> None:
    for p in parameters:
        for moment in tensors_of(optimizer.state[p]):
            # A second moment of zero would let the last bits of a gradient grow.
            moment[moment.abs() < moment.abs().mean()] *= 0 if bool((moment < 0).any()) else 0.5


def writes_data(optimizer: Optimizer, parameters: list[nn.Parameter]) -> None:
    for moment in tensors_of(optimizer.state[parameters[0]]):
        moment.data.mul_(0.5)


def loops_over_values(optimizer: Optimizer, _parameters: list[nn.Parameter]) -> None:
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim():
                state[key] = value.to(torch.float64).clone() * 0.5


def loops_over_items(optimizer: Optimizer, _parameters: list[nn.Parameter]) -> None:
    for _, state in optimizer.state.items():
        for moment in tensors_of(state):
            moment.zero_()


def iterates(optimizer: Optimizer, _parameters: list[nn.Parameter]) -> None:
    for parameter in optimizer.state:
        for moment in tensors_of(optimizer.state.get(parameter)):
            moment.mul_(0.25)


def replaces_object(optimizer: Optimizer, _parameters: list[nn.Parameter]) -> None:
    optimizer.state = defaultdict(dict)


def replaces_by_some(optimizer: Optimizer, parameters: list[nn.Parameter]) -> None:
    optimizer.state = defaultdict(dict, {parameters[1]: optimizer.state[parameters[1]]})


def clears(optimizer: Optimizer, _parameters: list[nn.Parameter]) -> None:
    optimizer.state.clear()


def deletes(optimizer: Optimizer, parameters: list[nn.Parameter]) -> None:
    assert parameters[0] in optimizer.state
    del optimizer.state[parameters[0]]
    assert parameters[0] not in optimizer.state
    optimizer.state.pop(parameters[2])


def empties(optimizer: Optimizer, parameters: list[nn.Parameter]) -> None:
    optimizer.state[parameters[0]] = {}
    optimizer.state[parameters[1]].clear()


def puts_another(optimizer: Optimizer, parameters: list[nn.Parameter]) -> None:
    state = copy.deepcopy(optimizer.state[parameters[0]])
    for moment in tensors_of(state):
        moment.mul_(2)
    optimizer.state[parameters[0]] = state


def sets_step(optimizer: Optimizer, parameters: list[nn.Parameter]) -> None:
    for p in parameters:
        if "step" in optimizer.state[p]:
            optimizer.state[p]["step"].zero_()


def merges(optimizer: Optimizer, parameters: list[nn.Parameter]) -> None:
    """Write to parameters, and begin the state anew, as ReLoRA does."""
    with torch.no_grad():
        for p in parameters:
            p.mul_(1.01)
    optimizer.state.clear()


def reads(optimizer: Optimizer, parameters: list[nn.Parameter]) -> None:
    assert len(optimizer.state) == sum(map(len, (group["params"] for group in optimizer.param_groups)))
    assert set(optimizer.state) == {p for group in optimizer.param_groups for p in group["params"]}
    assert list(optimizer.state) == list(optimizer.state.keys())
    assert optimizer.state.get(nn.Parameter()) is None
    assert len(tensors_of(optimizer.state[parameters[0]])) > 0


CHANGES: dict[str, Touch] = {
    each.__name__: each
    for each in (
        prunes,
        writes_data,
        loops_over_values,
        loops_over_items,
        iterates,
        replaces_object,
        replaces_by_some,
        clears,
        deletes,
        empties,
        puts_another,
        sets_step,
        merges,
        reads,
    )
}


# -- the loop ------------------------------------------------------------------------------------------------


def batch(rank: int, step: int) -> Tensor:
    made = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 32, dtype=torch.float64, generator=made)


def shown(optimizer: Optimizer) -> list[list[Tensor]]:
    """Every tensor and number of the state, through `optimizer.state`."""
    known = [p for group in optimizer.param_groups for p in group["params"]]
    return [
        [torch.as_tensor(value).clone() for _, value in sorted(optimizer.state.get(p, {}).items())]
        for p in known
    ]


def step_of(net: nn.Module, optimizers: list[Optimizer], ranks: list[int], step: int) -> list[Tensor]:
    for rank in ranks:
        (net(batch(rank, step)).square().mean() / len(ranks)).backward()
    for each in optimizers:
        each.step()
        each.zero_grad()
    return [p.detach().clone() for p in net.parameters()]


def goes_on(
    net: nn.Module,
    optimizers: list[Optimizer],
    ranks: list[int],
    touches: list[str],
    meet: Callable[[], None] = lambda: None,
) -> list[Any]:
    """Touch the state after each of two steps, and before the first; tell what each step made of it.

    `meet` is called before parameters are written: under peers a node's are equal to the others' then.
    """
    of = [[p for group in each.param_groups for p in group["params"]] for each in optimizers]
    seen: list[Any] = []
    assert [len(each.state) for each in optimizers] == [0] * len(optimizers)
    for step in range(STEPS):
        seen.append(step_of(net, optimizers, ranks, step))
        if step in (1, 2):
            for touch in touches:
                if touch == merges.__name__:
                    meet()
                for optimizer, parameters in zip(optimizers, of, strict=True):
                    CHANGES[touch](optimizer, parameters)
            seen += [each for optimizer in optimizers for each in shown(optimizer)]
    seen += [each for optimizer in optimizers for each in shown(optimizer)]
    return seen


def train(session: atoll.Session, name: str, touches: list[str]) -> list[Any]:
    net = model()
    optimizers = MAKES[name](net)
    session.prepare(net, optimizers)
    return goes_on(net, optimizers, [session.rank], touches, session.barrier)


@functools.cache
def plain(world: int, name: str, touches: str) -> list[Any]:
    net = model()
    return goes_on(net, MAKES[name](net), list(range(world)), touches.split())


def check(found: list[Any], right: list[Any]) -> None:
    assert len(found) == len(right)
    for mine, plainly in zip(found, right, strict=True):
        assert len(mine) == len(plainly)
        if plainly:  # the state of a parameter that is begun anew has nothing
            check_equal(mine, plainly)


@pytest.mark.parametrize("name", ["AdamW", "momentum", "Adafactor"])
@pytest.mark.parametrize(
    ("kind", "touch"),
    [(k, t) for k in KINDS for t in CHANGES],
)
def test_a_touch_has_plain_torchs_effect(pool: WorkerPool, kind: str, touch: str, name: str) -> None:
    for found in run_at(pool, kind, train, name, [touch], world=1 if kind == "asp" else WORLD):
        check(found, plain(1 if kind == "asp" else WORLD, name, touch))


def announced_again(session: atoll.Session, then: str) -> list[Tensor]:
    """A CPU side announces the same parameters a second time, while the script's writes are in them."""
    announced, handle = [], LocalParameters._handle_published

    def noted(local: LocalParameters, message: Published) -> None:
        announced.append(message)
        handle(local, message)

    with patch.object(LocalParameters, "_handle_published", noted):
        net = model()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        session.prepare(net, optimizer)
        step_of(net, [optimizer], [session.rank], 0)
        session.barrier()
        before = [p.detach().clone() for p in net.parameters()]
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(1.01)
        exchange = session._state.prepared[0].reducer
        assert isinstance(exchange, PeerExchange)
        exchange.parameters._handle_published(announced[-1])
        if then == "state":
            optimizer.state.clear()
        elif then == "barrier":
            session.barrier()
        elif then == "reduce":
            session.reduce(1.0)
        for p, former in zip(net.parameters(), before, strict=True):
            assert torch.equal(p, former * 1.01)
            if then != "state":
                p.data.copy_(former)
        step_of(net, [optimizer], [session.rank], 1)
        session.barrier()
        return [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("kind", ["peers", "peers tiers", "peers stale"])
@pytest.mark.parametrize("then", ["state", "barrier", "reduce"])
def test_parameters_that_come_do_not_overwrite_the_scripts(pool: WorkerPool, kind: str, then: str) -> None:
    """A script may write an average of the weights for an evaluation, and then takes it back."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    step_of(net, [optimizer], [0], 0)
    if then == "state":
        merges(optimizer, list(net.parameters()))
    right = step_of(net, [optimizer], [0], 1)
    for found in run_at(pool, kind, announced_again, then, world=1):
        check_equal(found, right)


@pytest.mark.parametrize("touch", ["prunes", "clears", "deletes"])
@pytest.mark.parametrize("kind", ["server", "server tiers", "ps-hra"])
def test_each_of_several_optimizers_has_a_state_of_its_own(pool: WorkerPool, kind: str, touch: str) -> None:
    for found in run_at(pool, kind, train, "two", [touch], world=WORLD):
        check(found, plain(WORLD, "two", touch))


@pytest.mark.parametrize("touch", ["prunes", "deletes", "replaces_object"])
@pytest.mark.parametrize("tiers", [False, True])
@pytest.mark.parametrize("kind", APART[:3])
def test_a_single_worker_at_its_own_pace(pool: WorkerPool, kind: str, tiers: bool, touch: str) -> None:
    config = {**KINDS, **PACES}[kind]
    if tiers:
        config = msgspec.structs.replace(config, memory=KINDS["tiers"].memory)
    (found,) = run_with(pool, config, train, "AdamW", [touch], world=1, shards=1)
    check(found, plain(1, "AdamW", touch))


@pytest.mark.parametrize("touch", ["prunes", "empties"])
def test_parameters_that_come_late_are_taken_first(pool: WorkerPool, touch: str) -> None:
    right = plain(WORLD, "AdamW", touch)
    values = len(right[0])  # after a step they are still to come: the states alone are compared
    for found in run_at(pool, "server", train, "AdamW", [touch], world=WORLD, sync={"lazy": True}):
        check([each for each in found if len(each) < values], [each for each in right if len(each) < values])


def test_contributions_under_way_count_first(pool: WorkerPool) -> None:
    sync = {"consistency": "asp", "pipeline": 1}
    (found,) = run_at(pool, "server", train, "AdamW", ["empties"], world=1, sync=sync)
    assert [len(each) for each in found] == [len(each) for each in plain(1, "AdamW", "empties")]


# -- workers at their own pace -------------------------------------------------------------------------------


def apart(session: atoll.Session, touch: str, more: int, meets: bool) -> list[Any]:
    net = model()
    (optimizer,) = adamw(net)
    session.prepare(net, optimizer)
    for step in range(2 + more * session.rank):
        step_of(net, [optimizer], [session.rank], step)
    if meets:
        session.barrier()
    CHANGES[touch](optimizer, list(net.parameters()))
    held = shown(optimizer)
    step_of(net, [optimizer], [session.rank], 8)
    session.barrier()
    steps = [float(state.get("step", -1)) for state in optimizer.state.values()]
    return [held, [p.detach().clone() for p in net.parameters()], steps]


@pytest.mark.parametrize("touch", ["prunes", "deletes", "clears"])
@pytest.mark.parametrize("kind", APART)
def test_after_a_barrier_workers_at_their_own_pace_change_it(pool: WorkerPool, kind: str, touch: str) -> None:
    more = 0 if kind == "peers stale" else 3
    first, second = run_at(pool, kind, apart, touch, more, True, world=WORLD)
    check(first[0], second[0])
    check_equal(first[1], second[1])
    assert first[2] == second[2]
    if touch == "clears":
        assert max(first[2]) <= WORLD  # begun anew


def test_without_a_barrier_a_difference_is_a_line(pool: WorkerPool) -> None:
    with pytest.raises(JobFailedError, match="a change of optimizer.state: worker 1 has another state than"):
        run_at(pool, "asp", apart, "prunes", 3, False, world=WORLD)


# -- reads ---------------------------------------------------------------------------------------------------


def reads_alone(session: atoll.Session) -> list[Any]:
    net = model()
    (optimizer,) = adamw(net)
    session.prepare(net, optimizer)
    seen = []
    for step in range(STEPS):
        seen.append(step_of(net, [optimizer], [session.rank], step))
        if session.rank == 0:
            last = list(net.parameters())[-1]
            assert float(optimizer.state[last]["step"]) == step + 1
            assert len(optimizer.state) == len(list(net.parameters()))
            net(batch(0, 99)).sum()  # a forward that no other worker makes
    return seen


@pytest.mark.parametrize("kind", ELSEWHERE)
def test_one_worker_alone_may_read_it(pool: WorkerPool, kind: str) -> None:
    net = model()
    (optimizer,) = adamw(net)
    right = [step_of(net, [optimizer], list(range(WORLD)), step) for step in range(STEPS)]
    for found in run_at(pool, kind, reads_alone, world=WORLD):
        check(found, right)


def copies(session: atoll.Session) -> list[Any]:
    """Copy, pickle and save the optimizer, with a change that no step has seen, and leave the session."""
    net = model()
    (optimizer,) = adamw(net)
    with session:
        session.prepare(net, optimizer)
        for step in range(2):
            step_of(net, [optimizer], [session.rank], step)
        optimizer.state[next(net.parameters())]["exp_avg"].fill_(7)
        twin = copy.deepcopy(optimizer)
        buffer = io.BytesIO()
        torch.save(optimizer.state, buffer)
        saved = copy.deepcopy(optimizer.state_dict())
        assert type(twin.state) is defaultdict
        assert {type(each) for each in (*twin.state.values(), *saved["state"].values())} == {dict}
        sevens = [
            next(iter(twin.state.values()))["exp_avg"],
            saved["state"][0]["exp_avg"],
            next(iter(copy.copy(optimizer.state).values()))["exp_avg"],
        ]
    assert type(optimizer.state) is defaultdict
    return [len(buffer.getvalue()) > 0, *sevens, optimizer.state[next(net.parameters())]["exp_avg"].clone()]


@pytest.mark.parametrize("kind", ["server", "peers", "ps-hra", "server tiers"])
def test_copies_have_it_and_the_session_gives_it_back(pool: WorkerPool, kind: str) -> None:
    for found in run_at(pool, kind, copies, world=WORLD):
        assert found[0]
        for each in found[1:]:
            assert bool((each == 7).all())


def goes_back(session: atoll.Session, folder: str) -> list[Any]:
    """Change the state, save, train on, load, and train again."""
    net = model()
    (optimizer,) = adamw(net)
    session.prepare(net, optimizer)
    for step in range(2):
        step_of(net, [optimizer], [session.rank], step)
    prunes(optimizer, list(net.parameters()))
    session.save(folder)
    first = [step_of(net, [optimizer], [session.rank], step) for step in range(2, 4)]
    deletes(optimizer, list(net.parameters()))  # the load undoes it
    session.load(folder)
    again = [shown(optimizer)]
    prunes(optimizer, list(net.parameters()))
    prunes(optimizer, list(net.parameters()))
    session.load(folder)
    again.append(shown(optimizer))
    second = [step_of(net, [optimizer], [session.rank], step) for step in range(2, 4)]
    return [first, second, again]


@pytest.mark.parametrize("kind", ELSEWHERE)
def test_checkpoints_have_it(pool: WorkerPool, kind: str, tmp_path: Any) -> None:
    for first, second, again in run_at(pool, kind, goes_back, str(tmp_path), world=WORLD):
        check(first, second)
        check(again[0], again[1])


# -- what is refused -----------------------------------------------------------------------------------------


def refused(session: atoll.Session, how: str) -> str:
    net = model()
    (optimizer,) = adamw(net)
    session.prepare(net, optimizer)
    first = next(net.parameters())
    for step in range(2):
        step_of(net, [optimizer], [session.rank], step)
    if how == "state_dict":
        held = optimizer.state_dict()["state"][0]["exp_avg"]
    elif how == "outdated":
        held = optimizer.state[first]["exp_avg"]
        step_of(net, [optimizer], [session.rank], 2)
    elif how == "outdated entry":
        entries = optimizer.state[first]
        step_of(net, [optimizer], [session.rank], 2)
        entries["exp_avg"] = torch.zeros_like(entries["exp_avg"])
    elif how == "held on":  # one change counts, and the next one of the same dict can not
        entries = optimizer.state[first]
        entries["exp_avg"] = torch.zeros_like(entries["exp_avg"])
        step_of(net, [optimizer], [session.rank], 2)
        entries["exp_avg"] = torch.zeros_like(entries["exp_avg"])
    elif how == "unlike":
        optimizer.state[first]["exp_avg"].add_(1 + session.rank)
    elif how == "key":
        optimizer.state[first]["other"] = torch.zeros(3)
    elif how == "object":
        optimizer.state[first]["exp_avg"] = object()
    try:
        if how in ("state_dict", "outdated"):
            held.zero_()
        if how == "iteration":
            net(batch(session.rank, 3)).square().mean().backward()
            optimizer.state.clear()
            optimizer.step()
        else:
            step_of(net, [optimizer], [session.rank], 3)
    except UserError as error:
        return str(error)
    return ""


LINES = {
    "outdated": "a state of AdamW was changed that the script got before the last step",
    "outdated entry": "a state of AdamW was changed that the script got before the last step",
    "held on": "a state of AdamW was changed that the script got before the last step",
    "state_dict": "a state of AdamW was changed that the script got before the last step, or a tensor of its",
    "unlike": "a change of optimizer.state: worker 1 has another state than worker 0; make equal changes on",
    "key": "a change of optimizer.state: 'other' of the optimizer's parameter 0 is no state that",
    "object": "a change of optimizer.state: ",
    "iteration": "a change of optimizer.state between a backward and optimizer.step(): under",
}


@pytest.mark.parametrize("how", LINES)
@pytest.mark.parametrize("kind", ["server", "peers"])
def test_what_cannot_be_is_a_line(pool: WorkerPool, kind: str, how: str) -> None:
    for found in run_at(pool, kind, refused, how, world=WORLD):
        assert LINES[how] in found, found
        assert "\n" not in found


def changes_alone(session: atoll.Session) -> None:
    net = model()
    (optimizer,) = adamw(net)
    session.prepare(net, optimizer)
    step_of(net, [optimizer], [session.rank], 0)
    if session.rank == 0:
        optimizer.state.clear()
    step_of(net, [optimizer], [session.rank], 1)


@pytest.mark.parametrize("kind", ["server", "peers"])
def test_a_change_on_one_worker_alone_says_who_is_where(pool: WorkerPool, kind: str) -> None:
    with pytest.raises(JobFailedError, match="worker 0 is in a change of optimizer.state"):
        run_at(pool, kind, changes_alone, world=WORLD)
