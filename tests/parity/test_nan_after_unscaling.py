"""A NaN that a script makes after `scaler.unscale_` falls under `sync.nonfinite`, whatever the optimizer is.

A GradScaler has looked for infinities before, and tells a fused optimizer's kernel that there were none.
"""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import atoll
from atoll.core.config import Config, Run, Sync
from atoll.core.memory import Memory
from atoll.train.api.place import Place
from support.pool import JobFailedError, WorkerPool
from support.served import ServedRun, served_worker

CHUNK, AT = 4096, 1


def budget(model: nn.Module) -> Memory:
    pages = sum(-(-parameter.nbytes // CHUNK) for parameter in model.parameters())
    return Memory(device=str(pages // 2 * CHUNK), chunk=str(CHUNK), step="host")


def train(place: Place, config: Config, how: str, tiers: bool, address: str) -> list[float]:
    """Whether any parameter is finite and has moved, after the step with a NaN, and at the end."""
    with (
        served_worker(address, place.rank) if address else nullcontext(),
        atoll.join(config, place=None if address else place) as session,
    ):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=how == "fused")
        session.prepare(model, optimizer, memory=budget(model) if tiers else None)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        seen = []
        for step in range(AT + 2):
            scaler.scale(model(torch.ones(4, 40)).square().mean()).backward()
            scaler.unscale_(optimizer)
            if step == AT:
                gradient = model[1].bias.grad
                assert gradient is not None
                gradient[3] = torch.nan
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen.append(model[1].bias.detach()[3].item())
        return seen


CASES: dict[str, tuple[str, int, bool]] = {
    "alone": ("ring", 1, False),
    "ring": ("ring", 2, False),
    "members": ("ring", 2, True),
    "server": ("server", 2, False),
    "peers": ("peers", 2, False),
}


@pytest.mark.parametrize("policy", ["stop", "skip"])
@pytest.mark.parametrize(
    ("where", "how"),
    [
        *((where, "fused") for where in CASES),
        ("ring", "loop"),
        pytest.param("server", "loop", marks=pytest.mark.soak),
        pytest.param("peers", "loop", marks=pytest.mark.soak),
    ],
)
def test_a_nan_made_after_unscaling_is_found(where: str, how: str, policy: str, pool: WorkerPool) -> None:
    strategy, world, tiers = CASES[where]
    more: dict[str, Any] = {"consistency": "bsp"} if strategy == "server" else {}
    sync = Sync(timeout="60s", nonfinite=policy, **more)  # type: ignore[arg-type]
    if strategy == "peers":
        sync = msgspec.structs.replace(sync, stale_max=0)
    config = Config(run=Run(strategy=strategy), sync=sync)  # type: ignore[arg-type]
    with ExitStack() as stack:
        address = stack.enter_context(ServedRun(workers=2, shards=2)).address if strategy == "server" else ""
        if policy == "stop":
            with pytest.raises(JobFailedError, match=r"iteration 1: the gradient of .* holds NaN"):
                pool.run(train, config, how, tiers, address, world=world)
            return
        for before, skipped, after in pool.run(train, config, how, tiers, address, world=world):
            assert before == skipped
            assert after != skipped
            assert after == after  # no NaN
