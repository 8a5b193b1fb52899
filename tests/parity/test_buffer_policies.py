"""The policies for buffers: worker 0's, the workers' mean, or each worker's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import atoll
from support.cases import kept_for
from support.pool import WorkerPool
from support.runs import model, run_at

WHERE = ("ring", "hierarchical", "tiers", "server", "asp", "ps-hra", "peers")


def train(session: atoll.Session, folder: str) -> tuple[dict[str, list[Tensor]], list[dict[str, Tensor]]]:
    """Train on batches of different scales.

    Returns every worker's own buffers before the barrier, and this worker's after the barrier and the save.
    """
    net = nn.Sequential(model(), nn.BatchNorm1d(4).double())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    session.prepare(net, optimizer)
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + session.rank)
        x = torch.randn(4 + session.rank, 32, generator=generator, dtype=torch.float64) * (1 + session.rank)
        net(x).square().mean().backward()
        if session.rank == 1 and step == 2:
            net.train()(x)  # one more batch for the running statistics of this worker alone
        optimizer.step()
        optimizer.zero_grad()
    own = {name: session.gather(buffer) for name, buffer in net.named_buffers()}
    seen = []
    for meet in (session.barrier, lambda: session.save(folder)):
        meet()
        seen.append({name: buffer.clone() for name, buffer in net.named_buffers()})
    return own, seen


@pytest.mark.parametrize("policy", ["rank 0", "mean", "own"])
@pytest.mark.parametrize("where", kept_for(pytest.mark.check, WHERE, ("ring",)))
def test_buffers_follow_the_policy(pool: WorkerPool, where: str, policy: str, tmp_path: Path) -> None:
    found = run_at(pool, where, train, str(tmp_path), sync={"buffers": policy})
    saved = load_file(tmp_path / "model.safetensors")
    for rank, (own, seen) in enumerate(found):
        assert set(own) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
        for name, each in own.items():
            assert not torch.equal(each[0], each[1]), name
            right = each[rank] if policy == "own" else each[0]
            if policy == "mean" and each[0].is_floating_point():
                right = torch.stack(each).mean(0)
            for buffers in seen:
                torch.testing.assert_close(buffers[name], right, rtol=0.0, atol=1e-12)
            of_first = right if policy == "mean" else each[0]
            torch.testing.assert_close(saved[name], of_first, rtol=0.0, atol=1e-12)
