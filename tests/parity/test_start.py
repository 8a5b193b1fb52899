"""What all workers begin with: worker 0's values, also of what is frozen, and a checkpoint's values in the
model's own dtype."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import atoll
from atoll.core.errors import PrepareError
from support.pool import WorkerPool
from support.runs import KINDS, alone, model, run_at

pytestmark = pytest.mark.sampled


def begin(session: atoll.Session) -> list[float]:
    """How far values are from worker 0's: those of trained parameters, the frozen one and a buffer after
    prepare, and that of the frozen one after a step."""
    net, first = model(seed=session.rank), model(seed=0)
    net[0].weight.requires_grad_(False)
    net.register_buffer("number", torch.full((3,), float(session.rank)))
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    session.prepare(net, optimizer)
    pairs = list(zip(net.parameters(), first.parameters(), strict=True))
    found = [max(float((own.detach() - right).abs().max()) for own, right in pairs[1:])]
    found.append(float((net[0].weight.detach() - first[0].weight).abs().max()))
    found.append(float(net.number.abs().max()))  # type: ignore[operator, union-attr]
    session.barrier()  # under asp a worker that comes later begins with what the others have stepped
    net(torch.ones(2, 32, dtype=torch.float64)).square().mean().backward()
    optimizer.step()
    found.append(float((net[0].weight.detach() - first[0].weight).abs().max()))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_all_begin_with_worker_0_s_values(pool: WorkerPool, kind: str) -> None:
    assert run_at(pool, kind, begin, world=2) == [[0.0] * 4] * 2


def unfreeze(session: atoll.Session) -> None:
    net = model()
    net[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    session.prepare(net, optimizer)
    net[0].weight.requires_grad_(True)
    net(torch.ones(2, 32, dtype=torch.float64)).square().mean().backward()
    with pytest.raises(PrepareError, match=r"'0\.weight' was frozen when session\.prepare saw it"):
        optimizer.step()


def test_a_parameter_that_was_frozen_is_not_trained_later() -> None:
    alone(unfreeze)


def save_and_load(session: atoll.Session, folder: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Save in double precision, or load into a model of another dtype: its parameters and its momentum."""
    net = model(seed=int(dtype != torch.float64), dtype=dtype)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    session.prepare(net, optimizer)
    if dtype == torch.float64:
        net(torch.ones(2, 32, dtype=dtype)).square().mean().backward()
        optimizer.step()
        session.save(folder)
    else:
        session.load(folder)
    momenta = [optimizer.state[p]["momentum_buffer"] for p in net.parameters()]
    return [each.detach().clone() for each in (*net.parameters(), *momenta)]


def test_a_checkpoint_of_another_dtype_is_rounded_as_torch_does(tmp_path: Path) -> None:
    saved = alone(save_and_load, str(tmp_path / "one"), torch.float64)
    for dtype in (torch.float32, torch.bfloat16):
        for own, right in zip(alone(save_and_load, str(tmp_path / "one"), dtype), saved, strict=True):
            assert own.dtype == dtype
            assert torch.equal(own, right.to(dtype))
