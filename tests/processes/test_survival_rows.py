"""Rings that sum the rows of sparse gradients alone, and lose and gain members meanwhile."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from run_command import wait_for
from test_survival_ring import (
    DEADLINE,
    IN_AN_ITERATION,
    STEPS,
    STRIKE,
    Fault,
    _seeding,
    assert_as_plain_torch,
    case,
    each_dies,
    let_in,
    members_of,
    weight_of,
)
from torch import Tensor, nn

from atoll.train.api.session import Session

ROWS = 3_000
MANY = 2  # the iteration in which the workers have nearly all rows, so that the next one goes dense


class Table(nn.Module):
    """A table of which a batch has few rows, and a dense layer behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, 8, sparse=True)
        self.head = nn.Linear(8, 3)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids).tanh())


def make() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    with _seeding:
        torch.manual_seed(0)
        net = Table()
    return net, [torch.optim.Adagrad(net.parameters(), lr=0.1)]


def loss_of(net: nn.Module, who: int, step: int) -> Tensor:
    rows = ROWS if step == MANY else 6
    ids = torch.randint(0, ROWS, (rows,), generator=torch.Generator().manual_seed(100 * step + who))
    ids[0] = 7  # a row that all workers have
    return net(ids).square().mean()


def looks_up(session: Session, who: int, folder: Path, *, newcomer_at: int = -1) -> dict[str, Any]:
    """Worker r weighs 2 ** r: an iteration's sum of weights says who counted."""
    net, [optimizer] = make()
    session.prepare(net, optimizer)
    counted, sums = [], session._state.prepared[0].reducer.sum
    first = session.resume()
    for step in range(first, STEPS):
        if step == newcomer_at and first == 0:
            (folder / f"{who}.stops").touch()
            ring = session._runtime.ring
            assert ring is not None
            wait_for(lambda ring=ring: ring.is_awaited, "a newcomer", DEADLINE / 2)
        optimizer.zero_grad()
        session.weight(2.0**who)
        loss_of(net, who, step).backward()
        counted.append(weight_of(session))
        assert bool(sums.carrier.by_rows) == (step != MANY)  # type: ignore[attr-defined]
        optimizer.step()
    return {
        "first": first,
        "counted": counted,
        "parameters": [p.detach().tolist() for p in net.parameters()],
    }


def one_dies(folder: Path, who: int, point: str) -> None:
    with case(folder, looks_up, Fault(who, point), groups=2 if who == 1 else None) as made:
        made.killed(who)
        results = [made.result(each) for each in range(3) if each != who]
    assert_as_plain_torch(results, make, loss_of)
    assert members_of(results[0]["counted"][STRIKE - 1]) == [0, 1, 2]
    assert members_of(results[0]["counted"][-1]) == [each for each in range(3) if each != who]


def test_one_of_three_is_killed_at_each_point(tmp_path: Path) -> None:
    each_dies(tmp_path, [(number % 3, point) for number, point in enumerate(IN_AN_ITERATION)], one_dies)


def test_the_sum_of_the_rows_itself_breaks(tmp_path: Path) -> None:
    """The second message of an iteration is that of the rows."""
    with case(tmp_path / "run", looks_up, Fault(1, "ring.sent", nth=2)) as made:
        made.killed(1)
        results = [made.result(each) for each in (0, 2)]
    assert_as_plain_torch(results, make, loss_of)


@pytest.mark.parametrize("killed", [False, True])
def test_a_newcomer_sums_rows_from_its_first_iteration_on(tmp_path: Path, killed: bool) -> None:
    faults = [Fault(0, "ring.agreed", iteration=STRIKE + 1)] if killed else []
    script = partial(looks_up, newcomer_at=2)
    with case(tmp_path / "run", script, *faults, workers=2) as made:
        let_in(made)
        results = [made.result(each) for each in range(killed, 3)]
    assert_as_plain_torch(results, make, loss_of)
    assert members_of(results[0]["counted"][STRIKE]) == [0, 1, 2]
    # All workers have to know of it first. It begins where the others expect many rows, and it does not.
    assert results[-1]["first"] == STRIKE == MANY + 1
