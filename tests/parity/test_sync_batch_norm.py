"""nn.SyncBatchNorm has the statistics of the joint batch, or is refused: never is it a plain BatchNorm in
silence."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore

import atoll
from atoll.core.errors import MismatchError, PrepareError
from atoll.train.data.moredata import MoreData
from atoll.train.gradients.syncnorm import SyncNorms
from support.cases import kept_for
from support.pool import JobFailedError, WorkerPool
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


ELSEWHERE = [kind for kind in KINDS if kind not in ("ring", "hierarchical", "tiers")]


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=[] if k in ("elastic", "server") else pytest.mark.soak) for k in ELSEWHERE],
)
def test_where_no_ring_gives_a_joint_batch_it_is_refused_by_name(pool: WorkerPool, kind: str) -> None:
    for said in run_at(pool, kind, prepare, world=2):
        assert said == (
            "module '1' is an nn.SyncBatchNorm, which on a CPU takes strategy 'ring' or 'hierarchical' "
            "without run.elastic: use these, or nn.BatchNorm, whose statistics are those of each worker's "
            "own batch, or a norm that needs none of the batch (nn.GroupNorm, nn.LayerNorm)"
        )


class Normed(nn.Module):
    """A network with two layers of BatchNorm, one of them over images."""

    def __init__(self, of_images: type[nn.Module], of_rows: type[nn.Module], momentum: float | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(2, 3, 3)
        self.over_images = of_images(3, momentum=momentum)
        self.second = nn.Linear(3 * 4 * 4, 5)
        self.over_rows = of_rows(5, affine=False)
        self.last = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.over_images(self.first(x)).tanh().flatten(1)
        result: Tensor = self.last(self.over_rows(self.second(hidden)))
        return result


def rows(step: int, sizes: tuple[int, ...]) -> list[Tensor]:
    """Return each worker's batch of a step, of different scales."""
    generator = torch.Generator().manual_seed(step)
    return [
        torch.randn(size, 2, 6, 6, generator=generator, dtype=torch.float64) * (1 + 2 * rank) + rank
        for rank, size in enumerate(sizes)
    ]


def step(net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> dict[str, Tensor]:
    net(x).sub(1).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def together(
    session: atoll.Session, sizes: tuple[int, ...], momentum: float | None, alike: bool
) -> list[dict[str, Tensor]]:
    net = Normed(nn.SyncBatchNorm, nn.SyncBatchNorm, momentum).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    session.prepare(net, optimizer)
    seen = []
    for number in range(4):
        if alike:
            session.weight(1)
        seen.append(step(net, optimizer, rows(number, sizes)[session.rank]))
    again = copy.deepcopy(net)
    assert type(again.over_rows) is nn.SyncBatchNorm
    again.eval(), net.eval()
    x = rows(9, (3,))[0]
    assert torch.equal(again(x), net(x))
    return seen


@pytest.mark.parametrize("sizes", [(4, 4), (5, 2)])
@pytest.mark.parametrize("kind", kept_for(pytest.mark.check, ("ring", "hierarchical", "tiers"), ("ring",)))
def test_in_a_ring_the_batch_is_the_joint_one(pool: WorkerPool, kind: str, sizes: tuple[int, int]) -> None:
    for momentum in (0.1, None):
        net = Normed(nn.BatchNorm2d, nn.BatchNorm1d, momentum).double()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        right = [step(net, optimizer, torch.cat(rows(number, sizes))) for number in range(4)]
        for seen in run_at(pool, kind, together, sizes, momentum, False):
            for one, other in zip(seen, right, strict=True):
                for name, value in other.items():
                    torch.testing.assert_close(one[name], value, rtol=0.0, atol=1e-12, msg=name)


def parallel(sizes: tuple[int, ...]) -> list[dict[str, Tensor]]:
    """Train on the joint batch with the mean of the workers' losses, which all count alike."""
    net = Normed(nn.BatchNorm2d, nn.BatchNorm1d, 0.1).double()
    optimizer, seen = torch.optim.SGD(net.parameters(), lr=0.05), []
    for number in range(4):
        errors = net(torch.cat(rows(number, sizes))).sub(1).square()
        torch.stack([part.mean() for part in errors.split(sizes)]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append({name: value.detach().clone() for name, value in net.state_dict().items()})
    return seen


def test_workers_that_count_alike_have_the_mean_of_their_losses(pool: WorkerPool) -> None:
    for seen in run_at(pool, "ring", together, (5, 2), 0.1, True):
        for one, other in zip(seen, parallel((5, 2)), strict=True):
            for name, value in other.items():
                torch.testing.assert_close(one[name], value, rtol=0.0, atol=1e-12, msg=name)


def with_uneven_data(session: atoll.Session) -> tuple[dict[str, Tensor], str, bytes]:
    net = Normed(nn.SyncBatchNorm, nn.SyncBatchNorm, 0.1).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    session.prepare(net, optimizer)
    own = [each for number in range(3) if (each := rows(number, (4, 4))[session.rank]) is not None]
    for x in session.epoch_of(own[: 3 - session.rank]):
        last = step(net, optimizer, x)
    file = io.BytesIO()
    torch.save(net, file)
    session.close()
    return last, type(net.over_rows).__name__, file.getvalue()


def test_a_repeated_batch_is_no_part_of_the_statistics(pool: WorkerPool) -> None:
    net = Normed(nn.BatchNorm2d, nn.BatchNorm1d, 0.1).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for number in range(3):
        right = step(net, optimizer, torch.cat(rows(number, (4, 4))[: 2 - number // 2]))
    for seen, kind, file in run_at(pool, "ring", with_uneven_data):
        for name, value in right.items():
            torch.testing.assert_close(seen[name], value, rtol=0.0, atol=1e-12, msg=name)
        assert kind == "SyncBatchNorm"
        assert type(torch.load(io.BytesIO(file), weights_only=False).over_rows) is nn.SyncBatchNorm


def leave_out(session: atoll.Session) -> None:
    net = Normed(nn.SyncBatchNorm, nn.SyncBatchNorm, 0.1).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    session.prepare(net, optimizer)
    if session.rank == 0:
        step(net, optimizer, rows(0, (4, 4))[0])
    else:
        optimizer.step()


def test_a_worker_without_a_batch_ends_the_run_at_once(pool: WorkerPool) -> None:
    with pytest.raises(JobFailedError) as raised:
        run_at(pool, "ring", leave_out)
    for failure in raised.value.failures.values():
        assert failure.kind == MismatchError.__name__
        assert "worker 0 is in nn.SyncBatchNorm(sum of a float64 tensor of shape (4,)) (" in failure.message
        assert "worker 1 is at the gradients of step 0 (" in failure.message


def test_alone_the_batch_is_the_whole_one() -> None:
    assert alone(prepare) == ""


def test_on_a_gpu_it_needs_a_group_of_all_workers() -> None:
    with pytest.raises(PrepareError, match=r"^module '1' is .*there is none, .*init_process_group"):
        SyncNorms(with_norm(), GPU, 2, MoreData(), joint=False)


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
def test_a_group_of_the_session_s_size_is_let_be() -> None:
    SyncNorms(with_norm(), GPU, 1, MoreData(), joint=False)
    with pytest.raises(PrepareError, match=r"the group has 1 of the session's 2 workers"):
        SyncNorms(with_norm(), GPU, 2, MoreData(), joint=False)
