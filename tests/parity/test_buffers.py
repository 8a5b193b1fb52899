"""A model's buffers on several workers: in a ring they are those of DistributedDataParallel, and everywhere
the run's own evaluation, its checkpoint and what is registered give the same numbers on all workers."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed import PrefixStore
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import atoll
from atoll.core.config import Config, Groups, Memory, Run, Sync
from atoll.train.api.place import Place
from support.pool import WorkerPool
from support.served import ServedRun, served_worker

pytestmark = pytest.mark.sampled

STEPS = 5


class Counting(nn.Module):
    """Keeps statistics in every way: by BatchNorm, by batch_norm's function, which writes past the version
    counter, in a buffer that is no part of the state, in an integer, and by putting another tensor in
    place."""

    latest: Tensor
    mean: Tensor
    variance: Tensor
    seen: Tensor
    constant: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1)
        self.deep = nn.Sequential(*(nn.Linear(16, 16) for _ in range(5)))
        self.register_buffer("mean", torch.zeros(16, dtype=torch.double))
        self.register_buffer("variance", torch.ones(16, dtype=torch.double))
        self.register_buffer("latest", torch.zeros(8, dtype=torch.double), persistent=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("constant", torch.arange(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.batch_norm(self.norm(self.first(x)), self.mean, self.variance, training=self.training)
        if self.training:
            self.seen += len(x)
            self.latest = x[-1].detach().clone()
        result: Tensor = self.last(self.deep(hidden))
        return result


def make() -> tuple[Counting, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Counting().double()
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def batch(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 8, generator=generator, dtype=torch.double) * (1 + 3 * rank)


def values(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: value.detach().clone() for name, value in (*model.named_parameters(), *model.named_buffers())
    }


def by_ddp(place: Place) -> list[dict[str, Tensor]]:
    """What each step leaves on this worker."""
    store = PrefixStore("ddp", place.store)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.world)
    try:
        return steps_by_ddp(place.rank)
    finally:
        dist.destroy_process_group()


def steps_by_ddp(rank: int) -> list[dict[str, Tensor]]:
    model, optimizer = make()
    wrapped, seen = DistributedDataParallel(model, broadcast_buffers=True), []
    for step in range(STEPS):
        wrapped(batch(step, rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(values(model))
    return seen


@pytest.fixture(scope="module")
def right(pool: WorkerPool) -> list[dict[str, Tensor]]:
    """Of worker 0: the others take its buffers before the next forward."""
    result: list[dict[str, Tensor]] = pool.run(by_ddp, world=2, deadline=60)[0]
    return result


def by_atoll(place: Place, config: Config) -> tuple[list[dict[str, Tensor]], list[float]]:
    """The same, and an average that follows the model."""
    with atoll.join(config, place=place) as session:
        model, optimizer = make()
        session.prepare(model, optimizer)
        assert all(tiers.shared is not None for tiers in session._state.tiers)
        average, seen = None, []
        if not session._state.tiers:  # such a model cannot be copied
            average = AveragedModel(model, use_buffers=True)
        for step in range(STEPS):
            model(batch(step, place.rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if average is not None:
                average.update_parameters(model)
            seen.append(values(model))
        return seen, [float(b.double().sum()) for b in average.buffers()] if average is not None else []


def worst(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


@pytest.mark.parametrize(("groups", "device"), [(0, ""), (2, ""), (0, "8KiB"), (2, "8KiB")])
def test_buffers_are_those_of_ddp(
    pool: WorkerPool, right: list[dict[str, Tensor]], groups: int, device: str
) -> None:
    config = Config(
        run=Run(strategy="hierarchical" if groups else "ring"),
        sync=Sync(timeout="60s"),
        groups=Groups(count=groups),
        memory=Memory(device=device, chunk="512" if device else "auto"),
    )
    found = pool.run(by_atoll, config, world=2)
    for seen, averages in found:
        assert max(map(worst, seen, right)) < 1e-12
        assert averages == found[0][1]


def without_a_batch(place: Place) -> tuple[list[float], list[int]]:
    """Worker 0 has no batch in the first step, and a state of another size on each worker."""
    with atoll.join(Config(sync=Sync(timeout="60s")), place=place) as session:
        model, optimizer = make()
        model.register_buffer("state", torch.zeros(1))
        session.prepare(model, optimizer)
        means, sizes = [], []
        for step in range(2):
            if place.rank or step:
                model(batch(step, place.rank)).square().mean().backward()
            model.state = torch.zeros(2 + place.rank)
            optimizer.step()
            optimizer.zero_grad()
            means.append(float(model.norm.running_mean.sum()))
            sizes.append(model.state.numel())
        return means, sizes


def test_buffers_are_the_first_worker_s_that_has_a_batch(pool: WorkerPool) -> None:
    one, other = pool.run(without_a_batch, world=2, deadline=60)
    plain = make()[0]
    plain(batch(0, 1))
    right = float(plain.norm.running_mean.sum())
    assert one[0][0] == other[0][0] == pytest.approx(right, abs=1e-12)
    assert one[0][1] == other[0][1]
    assert (one[1], other[1]) == ([2, 2], [3, 3])  # what is not of one shape stays each worker's own


def with_a_codebook(place: Place, transposed: bool, late: bool = False) -> list[float]:
    """A large buffer that is written past its version counter, as the codebooks of VQ-VAEs are: its first
    element after each step. `late`: written after backward."""
    with atoll.join(Config(sync=Sync(timeout="60s")), place=place) as session:
        model, optimizer = make()
        codes = torch.zeros(300, 400)
        model.register_buffer("codes", codes.T if transposed else codes)
        session.prepare(model, optimizer)
        seen = []
        for step in range(2):
            assert isinstance(model.codes, Tensor)
            if not late:
                model.codes.data.add_(1.0 + place.rank)
            model(batch(step, place.rank)).square().mean().backward()
            if late:
                model.codes.data.add_(1.0 + place.rank)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(float(model.codes[0, 0]))
        return seen


@pytest.mark.parametrize("transposed", [False, True])
def test_a_large_buffer_is_worker_0_s_too(pool: WorkerPool, transposed: bool) -> None:
    assert pool.run(with_a_codebook, transposed, world=2, deadline=60) == [[1.0, 2.0]] * 2


def test_a_change_after_backward_is_taken_in_the_next_iteration(pool: WorkerPool) -> None:
    assert pool.run(with_a_codebook, False, True, world=2, deadline=60) == [[1.0, 2.0], [2.0, 3.0]]


def one_loss(model: nn.Module, rank: int = 0, world: int = 1) -> Tensor:
    """This worker's part of the evaluation."""
    model.eval()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, 8, generator=generator, dtype=torch.double)[rank::world]
    with torch.no_grad():
        loss: Tensor = model(x).square().mean()
    model.train()
    return loss


@dataclass
class Told:
    """What one worker saw: the losses of its own evaluations, after a barrier and after the save; the numbers
    of its average; what people were told; the sum of its buffers after the session's end."""

    losses: list[float]
    average: list[float]
    lines: list[str]
    latest: float = 0.0


def train_and_save(place: Place, config: Config, address: str, folder: str) -> Told:
    with (
        served_worker(address, place.rank) if address else nullcontext(),
        atoll.join(config, place=None if address else place) as session,
    ):
        told = Told([], [], [])
        session._records.warn = told.lines.append  # type: ignore[method-assign]
        model, optimizer = make()
        average = None if config.memory.device else AveragedModel(model, use_buffers=True)
        if average is not None:
            session.register(average=average)
        session.prepare(model, optimizer)
        for step in range(STEPS):
            model(batch(step, session.rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if average is not None:
                average.update_parameters(model)
        session.barrier()
        told.losses.append(float(session.reduce(one_loss(model, session.rank, session.world))))
        session.save(folder)
        told.losses.append(float(session.reduce(one_loss(model, session.rank, session.world))))
        if average is not None:
            told.average = [float(each.double().sum()) for each in average.state_dict().values()]
        for step in range(2):
            model(batch(STEPS + step, session.rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    if config.sync.consistency not in ("ssp", "asp"):
        told.latest = sum(float(buffer.double().sum()) for buffer in model.buffers())
    return told


def loaded(folder: Path) -> float:
    """The loss of the checkpoint in one process."""
    with atoll.join(Config()) as session:
        model, optimizer = make()
        session.prepare(model, optimizer)
        session.register(average=AveragedModel(model, use_buffers=True))
        state = load_file(folder / "model.safetensors")
        model.load_state_dict(state)
        return float(one_loss(model))


def check_saved(seen: list[Told], folder: Path, *, shared: bool) -> None:
    right = loaded(folder)
    for told in seen:
        assert told.losses == pytest.approx([right, right], abs=1e-12)
        assert told.average == seen[0].average
        assert told.latest == pytest.approx(seen[0].latest, abs=1e-12)
    lines = [line for line in seen[0].lines if "session.barrier() before an evaluation" in line]
    assert len(lines) == (not shared), seen[0].lines
    assert shared or "(mean, for one)" in lines[0]
    assert not any("evaluation" in line for told in seen[1:] for line in told.lines)


@pytest.mark.parametrize("device", ["", "8KiB"])
@pytest.mark.parametrize("strategy", ["ring", "hierarchical", "peers"])
def test_a_run_s_evaluation_is_its_checkpoint_s(
    pool: WorkerPool, strategy: str, device: str, tmp_path: Path
) -> None:
    config = Config(
        run=Run(strategy=strategy),
        sync=Sync(timeout="60s", stale_max=1) if strategy == "peers" else Sync(timeout="60s"),
        groups=Groups(count=2 * (strategy == "hierarchical")),
        memory=Memory(device=device, chunk="512") if device else Memory(),
    )
    seen = pool.run(train_and_save, config, "", str(tmp_path), world=2, deadline=60)
    check_saved(seen, tmp_path, shared=strategy != "peers")


@pytest.mark.parametrize(
    ("consistency", "device"),
    [
        ("bsp", ""),
        ("asp", "8KiB"),
        *(
            pytest.param(*case, marks=pytest.mark.soak)
            for case in (("bsp", "8KiB"), ("asp", ""), ("ssp", ""))
        ),
    ],
)
def test_a_served_run_s_evaluation_is_its_checkpoint_s(
    pool: WorkerPool, consistency: str, device: str, tmp_path: Path
) -> None:
    config = Config(
        run=Run(strategy="server"),
        sync=Sync(timeout="60s", consistency=consistency),
        memory=Memory(device=device, chunk="512") if device else Memory(),
    )
    with ServedRun(2, 2) as served:
        seen = pool.run(train_and_save, config, served.address, str(tmp_path), world=2, deadline=60)
    check_saved(seen, tmp_path, shared=False)
