"""nn.SyncBatchNorm is never a plain BatchNorm without a word."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore

import atoll
from atoll.core.errors import PrepareError
from atoll.train.gradients.syncnorm import check_sync_batch_norm
from support.pool import WorkerPool
from support.runs import KINDS, alone, model, run_at

GPU = torch.device("cuda")


def with_norm() -> nn.Sequential:
    return nn.Sequential(model(), nn.SyncBatchNorm(4).double())


def prepare(session: atoll.Session) -> str:
    net = with_norm()
    try:
        session.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    except PrepareError as error:
        session._leaving.leave()
        return str(error)
    net(torch.randn(4, 32, dtype=torch.float64)).square().mean().backward()
    return ""


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=[] if k in ("ring", "asp") else pytest.mark.soak) for k in KINDS],
)
def test_on_a_cpu_it_is_refused_by_name(pool: WorkerPool, kind: str) -> None:
    for said in run_at(pool, kind, prepare, world=2):
        assert said == (
            "module '1' is an nn.SyncBatchNorm, which torch has for GPUs alone; use nn.BatchNorm, whose "
            "statistics are those of each worker's own batch, or a norm that needs none of the batch "
            "(nn.GroupNorm, nn.LayerNorm)"
        )


def test_alone_the_batch_is_the_whole_one() -> None:
    assert alone(prepare) == ""


def test_on_a_gpu_it_needs_a_group_of_all_workers() -> None:
    with pytest.raises(PrepareError, match=r"^module '1' is .*there is none, .*init_process_group"):
        check_sync_batch_norm(with_norm(), GPU, 2)


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
def test_a_group_of_the_session_s_size_is_let_be() -> None:
    check_sync_batch_norm(with_norm(), GPU, 1)
    with pytest.raises(PrepareError, match=r"the group has 1 of the session's 2 workers"):
        check_sync_batch_norm(with_norm(), GPU, 2)
