"""Pairwise averaging (`examples/own_strategy.py`) with workers that are killed: who is left goes on, and
computes what plain PyTorch computes from the same pairs."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from run_command import wait_for
from test_survival_ring import DEADLINE, STEPS, STRIKE, Fault, case, loss_of, make
from torch import nn

import own_strategy
from atoll.exchange.synchronizer import Contributors
from atoll.train.api.session import Session

LAUNCHED, COLLECTED, COMMITTED = "exchange.launched", "exchange.collected", "exchange.committed"
Averaged = dict[str, dict[str, list[int]]]  # by step and chunk: the contributors


@dataclass(frozen=True)
class Trains:
    """Trains, and tells with whom values were exchanged. Before step `at`, counted from 0, all stop until a
    newcomer waits."""

    at: int = -1

    def __call__(self, session: Session, who: int, folder: Path) -> dict[str, Any]:
        model, optimizer = make()
        torch.manual_seed(7)
        session.prepare(model, optimizer)
        first, ring, averaged = session.resume(), session._runtime.ring, Averaged()
        assert ring is not None
        launch = own_strategy.PairAverage.launch

        def seen(self: own_strategy.PairAverage, contributors: Contributors) -> None:
            chunks = averaged.setdefault(str(self._step), {})
            chunks[str(self._run.chunk)] = list(contributors.names)
            launch(self, contributors)

        with mock.patch.object(own_strategy.PairAverage, "launch", seen):
            for step in range(first, STEPS):
                if step == self.at and first < step:
                    (folder / f"{who}.stops").touch()
                    wait_for(lambda: ring.is_awaited, "a newcomer", DEADLINE / 2)
                optimizer.zero_grad()
                loss_of(model, who, step).backward()
                optimizer.step()
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        chunks = {
            str(bound.chunk.id): [names[id(parameter)] for parameter in bound.parameters]
            for bound in session._state.prepared[0].chunks
        }
        values = {name: parameter.detach().tolist() for name, parameter in model.named_parameters()}
        group = session.group
        place = [group.index, group.count, group.rank, group.size]
        return {"first": first, "averaged": averaged, "chunks": chunks, "values": values, "group": place}


Replica = tuple[nn.Module, torch.optim.Optimizer]


def copied(replica: Replica) -> Replica:
    model, optimizer = make()
    model.load_state_dict(replica[0].state_dict())
    optimizer.load_state_dict(copy.deepcopy(replica[1].state_dict()))
    return model, optimizer


def plain(
    averaged: Averaged,
    chunks: dict[str, list[str]],
    members: list[dict[int, list[int]]],
    came: dict[int, tuple[int, int]] | None = None,
) -> dict[int, dict[str, torch.Tensor]]:
    """Each contributor's values after the same steps in one process.

    Args:
        averaged: with whom, as the workers tell.
        chunks: the parameters of each.
        members: for each step, the workers of each contributor whose gradients count.
        came: by contributor, the step before which it takes the state of another, and whose.
    """
    replicas: dict[int, Replica] = {name: make() for name in members[0]}
    for step in range(STEPS):
        for name, (at, giver) in (came or {}).items():
            if at == step:
                replicas[name] = copied(replicas[giver])
        for name, workers in members[step].items():
            model, optimizer = replicas[name]
            optimizer.zero_grad()
            for who in workers:
                (loss_of(model, who, step) / len(workers)).backward()
            optimizer.step()
        for chunk, parameters in chunks.items():
            names = averaged[str(step + 1)][chunk]
            before = {name: copy.deepcopy(replicas[name][0].state_dict()) for name in names}
            for name in names:
                partner = own_strategy.partner_of(Contributors(name, tuple(names)), 7, step + 1)
                if partner is not None:
                    state = replicas[name][0].state_dict()
                    for parameter in parameters:
                        state[parameter].copy_((before[name][parameter] + before[partner][parameter]) / 2)
    return {name: dict(model.named_parameters()) for name, (model, _) in replicas.items()}


def assert_as_plain(
    results: dict[int, dict[str, Any]],
    contributor_of: dict[int, int],
    members: list[dict[int, list[int]]],
    came: dict[int, tuple[int, int]] | None = None,
) -> Averaged:
    """All results are as in one process; returns with whom values were averaged."""
    for who, result in results.items():
        assert "error" not in result, (who, result["error"])
    first = results[min(results)]
    expected = plain(first["averaged"], first["chunks"], members, came)
    for who, result in results.items():
        assert result["chunks"] == first["chunks"]
        for step, chunks in result["averaged"].items():
            assert chunks == first["averaged"][step], who
        for name, values in result["values"].items():
            ours = torch.tensor(values, dtype=torch.float64)
            theirs = expected[contributor_of[who]][name]
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9, msg=lambda m: f"{who} {name}: {m}")  # noqa: B023
    averaged: Averaged = first["averaged"]
    return averaged


def one_dies(folder: Path, who: int, point: str, nth: int) -> None:
    """One of three workers dies at its `nth` exchange of step STRIKE."""
    everyone = [0, 1, 2]
    survivors = [each for each in everyone if each != who]
    with case(folder, Trains(), Fault(who, point, nth=nth), strategy="pairs") as made:
        made.killed(who)
        results = {each: made.result(each) for each in survivors}
    alone = {each: each for each in everyone}
    members = [{each: [each] for each in (everyone if step < STRIKE else survivors)} for step in range(STEPS)]
    averaged = assert_as_plain(results, alone, members)
    for step in range(1, STEPS + 1):
        for number, names in enumerate(averaged[str(step)].values(), start=1):
            if step < STRIKE or (step == STRIKE and number < nth + (point == COMMITTED)):
                assert names == everyone, (step, number)
            elif step > STRIKE or number > nth or point != COLLECTED:
                assert names == survivors, (step, number)  # else both may be: who collected may have told


CASES = [(1, LAUNCHED, 1), (0, LAUNCHED, 2), (2, COLLECTED, 1), (1, COMMITTED, 2)]


def each_dies(folder: Path, cases: list[tuple[int, str, int]]) -> None:
    with ThreadPoolExecutor(2) as threads:
        ends = {each: threads.submit(one_dies, folder / "-".join(map(str, each)), *each) for each in cases}
        failures = {each: error for each, end in ends.items() if (error := end.exception()) is not None}
    assert not failures, failures


def test_a_worker_that_dies_in_an_exchange_is_left_out(tmp_path: Path) -> None:
    each_dies(tmp_path, CASES)


@pytest.mark.soak
def test_each_worker_dies_at_each_point_of_an_exchange(tmp_path: Path) -> None:
    each_dies(
        tmp_path,
        [(who, at, nth) for who in range(3) for at in (LAUNCHED, COLLECTED, COMMITTED) for nth in (1, 2)],
    )


@pytest.mark.parametrize(
    ("who", "point"), [(2, LAUNCHED), (1, "ring.all_sent"), (2, COMMITTED)], ids=lambda each: str(each)
)
def test_a_group_goes_on_without_a_member_or_its_leader(tmp_path: Path, who: int, point: str) -> None:
    """Workers 0 and 1 are a group, 2 and 3 the other."""
    # A reduction has the number of steps before it.
    fault = Fault(who, point, iteration=STRIKE - (point == "ring.all_sent"))
    with case(tmp_path / "run", Trains(), fault, workers=4, groups=2, strategy="pairs") as made:
        made.killed(who)
        survivors = [each for each in range(4) if each != who]
        results = {each: made.result(each) for each in survivors}
    whole = {0: [0, 1], 1: [2, 3]}
    left = {name: [each for each in workers if each != who] for name, workers in whole.items()}
    # The first step without it. Who dies once all is sent has its last gradient counted if the survivors had
    # all of it before they lost its connection.
    possible = [STRIKE - 1, STRIKE] if point == "ring.all_sent" else [STRIKE]
    for first in possible:
        members = [whole if step < first else left for step in range(STEPS)]
        try:
            averaged = assert_as_plain(results, {0: 0, 1: 0, 2: 1, 3: 1}, members)
            break
        except AssertionError:
            if first == possible[-1]:
                raise
    assert all(names == [0, 1] for chunks in averaged.values() for names in chunks.values())
    sizes = {tuple(result["group"][i] for i in (0, 3)) for result in results.values()}
    assert sizes == {(who // 2, 1), (1 - who // 2, 2)}


def test_a_newcomer_is_a_replica_with_the_state_of_a_living_one(tmp_path: Path) -> None:
    with case(tmp_path / "run", Trains(at=2), workers=2, strategy="pairs") as made:
        for who in range(2):
            wait_for((made.folder / f"{who}.stops").exists, f"worker {who} to stop", DEADLINE)
        made.start(2)
        results = {who: made.result(who) for who in range(3)}
    assert results[2]["first"] == 3
    two, three = {0: [0], 1: [1]}, {0: [0], 1: [1], 2: [2]}
    members = [two if step < 3 else three for step in range(STEPS)]
    averaged = assert_as_plain(results, {0: 0, 1: 1, 2: 2}, members, {2: (3, 0)})
    assert [len(names) for chunks in averaged.values() for names in chunks.values()][-1] == 3


def test_a_newcomer_of_a_group_takes_the_state_of_its_group(tmp_path: Path) -> None:
    """The groups' optimizers have other states, of which the newcomer takes its own group's."""
    with case(tmp_path / "run", Trains(at=2), workers=3, groups=2, strategy="pairs") as made:
        for who in range(3):
            wait_for((made.folder / f"{who}.stops").exists, f"worker {who} to stop", DEADLINE)
        made.start(3)  # 0 and 1 are a group, 2 the other; 3 is the fourth, and 3 % 2 its group
        results = {who: made.result(who) for who in range(4)}
    assert results[3]["group"] == [1, 2, 1, 2]
    members = [{0: [0, 1], 1: [2] if step < 3 else [2, 3]} for step in range(STEPS)]
    assert_as_plain(results, {0: 0, 1: 0, 2: 1, 3: 1}, members)
