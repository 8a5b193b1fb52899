"""What a script keeps in a param group stays there; what a step may use and cannot be sent is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import atoll
from atoll.core.errors import UserError
from support.pool import JobFailedError, WorkerPool
from support.runs import KINDS, PACES, model, run_at

pytestmark = pytest.mark.sampled

KEPT: dict[str, Any] = {
    "text": "encoder",
    "tuple": ((1, 2.0), "a"),
    "list": [[1, 2], [3]],
    "none": None,
    "number": torch.tensor(1.5),
    "tensor": torch.ones(2),
    "dict": {"a": 1},
    "bytes": b"ab",
}
STEPPED_ELSEWHERE = ("server", "asp", "ps-hra", "peers", "server tiers", "peers tiers")


class Own(torch.optim.SGD):
    """A script's own optimizer, of which nobody knows what keys it reads."""


def train(session: atoll.Session, own: bool, keys: list[str]) -> bool:
    net = model()
    groups = [{"params": list(net.parameters()), **{key: KEPT[key] for key in keys}}]
    optimizer = (Own if own else torch.optim.SGD)(groups, lr=0.1, momentum=0.9)
    session.prepare(net, optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.ones(4, 32, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
    return all(optimizer.param_groups[0][key] is KEPT[key] for key in keys)


@pytest.mark.parametrize("kind", [*KINDS, *PACES])
def test_what_torchs_optimizers_do_not_know_stays_with_the_script(pool: WorkerPool, kind: str) -> None:
    assert run_at(pool, kind, train, False, list(KEPT)) == [True, True]


@pytest.mark.parametrize("kind", STEPPED_ELSEWHERE)
def test_what_an_optimizer_may_use_is_refused_by_name(pool: WorkerPool, kind: str) -> None:
    with pytest.raises(JobFailedError) as raised:
        run_at(pool, kind, train, True, ["text", "dict"])
    for failure in raised.value.failures.values():
        assert failure.kind == UserError.__name__, failure.message
        assert failure.message.startswith(
            "param_groups[0]['dict'] of the optimizer is a dict, and cannot be sent"
        )
