"""Stopped at any step, loaded at any number of workers: the run goes on as if it had not stopped."""

from __future__ import annotations

import contextlib
import io
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset

import atoll
from atoll.core.config import Chunks, Config, Sync
from atoll.core.errors import CheckpointError
from atoll.train.api.place import Place
from support.models import MODELS
from support.pool import JobFailedError, WorkerPool

CONFIG = Config(chunks=Chunks(size="2KiB"), sync=Sync(timeout="60s"))
STEPS = 9
GLOBAL_BATCH = 12


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Vectors and their classes; with `noise`, each reading draws from all three random-number generators."""

    def __init__(self, length: int, noise: bool) -> None:
        generator = torch.Generator().manual_seed(7)
        self.inputs = torch.randn(length, 7, generator=generator, dtype=torch.float64)
        self.targets = torch.randint(5, (length,), generator=generator)
        self.noise = noise

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = random.random() + np.random.rand() + float(torch.rand(())) if self.noise else 0.0
        return self.inputs[index] + 0.1 * noise, self.targets[index]


class Average:
    """An average of the weights, as scripts keep one: `session.register` saves it too."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.values = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self) -> None:
        for name, p in self.model.named_parameters():
            self.values[name].lerp_(p.detach(), 0.2)

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.values)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, value in state.items():
            self.values[name].copy_(value)


@dataclass
class Run:
    """What one worker has seen: the global loss of each step taken, and the end."""

    losses: list[float]
    end: dict[str, np.ndarray[Any, Any]]
    iteration: int


def make_model(dropout: float) -> nn.Module:
    """With dropout also a BatchNorm, whose statistics depend on how a batch is shared out."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(24) if dropout else nn.LayerNorm(24)
    return nn.Sequential(nn.Linear(7, 24), norm, nn.Tanh(), nn.Dropout(dropout), nn.Linear(24, 5)).double()


def train(
    place: Place,
    folder: str,
    *,
    start: int,
    dropout: float = 0.0,
    length: int = 48,
    save_every_step: bool = False,
    stop: int = STEPS,
) -> Run:
    """Train up to step `stop` from the checkpoint of step `start`, or from nothing at 0."""
    with atoll.join(CONFIG, place=place) as session:
        model = make_model(dropout)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        session.prepare(model, optimizer)
        scheduler = OneCycleLR(optimizer, 0.02, total_steps=STEPS + 1)
        average = Average(model)
        session.register(average=average)
        dataset = Noisy(length, noise=dropout > 0)
        loader = DataLoader(dataset, GLOBAL_BATCH // session.world, sampler=session.sampler(dataset, seed=3))
        torch.manual_seed(100 + place.rank)
        random.seed(place.rank)
        np.random.seed(place.rank)
        losses: list[float] = []
        if start:
            session.load(Path(folder) / f"step-{start}")
        assert session.iteration == start
        while session.iteration < stop:
            for x, y in loader:
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                session.clip_grad_norm_(0.5)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                average.update()
                losses.append(session.reduce(loss.item(), weight=len(x)))
                if save_every_step:
                    session.save(Path(folder) / f"step-{session.iteration}")
                if session.iteration == stop:
                    break
        # Of buffers the checkpoint holds worker 0's, as a model saved from plain torch would.
        state = model.state_dict() if session.is_main else dict(model.named_parameters())
        end = {name: value.detach().clone().numpy() for name, value in state.items()}
        end |= {f"average.{name}": value.numpy() for name, value in average.values.items()}
        end["lr"] = np.array(optimizer.param_groups[0]["lr"])
        return Run(losses, end, session.iteration)


def run_whole(place: Place, folder: str, dropout: float, length: int) -> Run:
    return train(place, folder, start=0, dropout=dropout, length=length, save_every_step=True)


def go_on_from_each(place: Place, folder: str, starts: list[int], dropout: float, length: int) -> list[Run]:
    """One run from each checkpoint; each session meets under a name of its own."""
    runs = []
    for start in starts:
        store = place.store and torch.distributed.PrefixStore(f"from-{start}", place.store)
        own = Place(place.rank, place.world, place.local_rank, store)
        runs.append(train(own, folder, start=start, dropout=dropout, length=length))
    return runs


EVERY = list(range(1, STEPS))
SOME = [1, 4, 6]  # epochs are four or five steps: inside the first, at its end, inside the second


@pytest.mark.parametrize(
    ("world", "starts"), [(1, EVERY), (3, SOME), pytest.param(2, EVERY, marks=pytest.mark.soak)]
)
def test_the_same_number_of_workers_goes_on_bit_for_bit(
    pool: WorkerPool, tmp_path: Path, world: int, starts: list[int]
) -> None:
    """With dropout, noisy data and an epoch whose last batch is short: from each step on, nothing differs."""
    dropout, length = 0.3, 52
    whole = pool.run(run_whole, str(tmp_path), dropout, length, world=world)
    gone_on = pool.run(go_on_from_each, str(tmp_path), starts, dropout, length, world=world)
    for rank, runs in enumerate(gone_on):
        for start, run in zip(starts, runs, strict=True):
            where = f"worker {rank}, from step {start}"
            assert run.losses == whole[rank].losses[start:], where
            for name, value in run.end.items():
                assert np.array_equal(value, whole[rank].end[name]), f"{where}: {name}"


@pytest.mark.parametrize(
    ("before", "after", "starts"),
    [
        (1, 2, EVERY),
        (3, 2, SOME),
        *(pytest.param(*each, marks=pytest.mark.soak) for each in ((2, 1, EVERY), (2, 4, SOME))),
    ],
)
def test_another_number_of_workers_goes_on_to_the_same_loss(
    pool: WorkerPool, tmp_path: Path, before: int, after: int, starts: list[int]
) -> None:
    whole = pool.run(run_whole, str(tmp_path), 0.0, 48, world=before)[0]
    for runs in pool.run(go_on_from_each, str(tmp_path), starts, 0.0, 48, world=after):
        for start, run in zip(starts, runs, strict=True):
            assert run.losses == pytest.approx(whole.losses[start:], abs=1e-9), f"from step {start}"
            for name in run.end.keys() & whole.end.keys():
                difference = np.abs(run.end[name] - whole.end[name]).max()
                assert difference < 1e-9, f"from step {start}: {name} differs by {difference:.3g}"


# -- the checkpoint's files --------------------------------------------------------------------------------


def save_tiny(place: Place, name: str, folder: str) -> dict[str, np.ndarray[Any, Any]]:
    """Two steps of a parity model, then a checkpoint; the parameters as they were."""
    tiny = MODELS[name]
    with atoll.join(CONFIG, place=place) as session:
        model = tiny.build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        session.prepare(model, optimizer)
        for step in range(2):
            tiny.loss(model, tiny.batch(place.rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        session.save(folder)
        return {key: value.clone().numpy() for key, value in model.state_dict().items()}


@pytest.mark.parametrize("name", list(MODELS))
def test_the_parameters_open_in_plain_torch(pool: WorkerPool, tmp_path: Path, name: str) -> None:
    expected = pool.run(save_tiny, name, str(tmp_path / "checkpoint"), world=2)[0]
    model = MODELS[name].build(seed=1)
    file = tmp_path / "checkpoint" / "model.safetensors"
    model.load_state_dict(load_file(str(file)))
    for key, value in model.state_dict().items():
        assert np.array_equal(value.numpy(), expected[key]), key


def load_damaged(place: Place, folder: str) -> tuple[str, bool]:
    """What the load says, and whether the model is as it was."""
    with atoll.join(CONFIG, place=place) as session:
        model = MODELS["odd"].build(seed=5)
        session.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        before = {key: value.clone() for key, value in model.state_dict().items()}
        try:
            session.load(folder)
        except CheckpointError as error:
            same = all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
            return str(error), same
    return "it was loaded", False


@pytest.mark.parametrize("damage", ["cut", "flipped", "missing", "without manifest", "empty folder"])
def test_what_is_half_written_or_damaged_is_never_loaded(
    pool: WorkerPool, tmp_path: Path, damage: str
) -> None:
    folder = tmp_path / "checkpoint"
    pool.run(save_tiny, "odd", str(folder), world=2)
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    if damage == "cut":
        file.write_bytes(content[: len(content) // 2])
    elif damage == "flipped":
        content[-3] ^= 0x10
        file.write_bytes(content)
    elif damage == "missing":
        (folder / "optimizer.safetensors").unlink()
    elif damage == "without manifest":
        (folder / "manifest.json").unlink()
    else:
        for each in folder.iterdir():
            each.unlink()
    for said, same in pool.run(load_damaged, str(folder), world=2):
        assert str(folder) in said
        assert "\n" not in said
        assert same, "nothing of it was taken over"


def test_a_checkpoint_that_only_one_worker_can_read_is_loaded_by_none(
    pool: WorkerPool, tmp_path: Path
) -> None:
    pool.run(save_tiny, "odd", str(tmp_path / "checkpoint"), world=1)
    for said, same in pool.run(load_here_or_there, str(tmp_path), world=2):
        assert "nowhere" in said
        assert same


def load_here_or_there(place: Place, folder: str) -> tuple[str, bool]:
    return load_damaged(place, f"{folder}/{'checkpoint' if place.rank == 0 else 'nowhere'}")


def scripted(session: atoll.Session, *, seed: int, length: int = 10) -> tuple[nn.Module, list[Any]]:
    """What the script of the next test makes before it saves or loads; the list keeps the rest alive."""
    model = MODELS["frozen"].build(seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    session.prepare(model, optimizer)
    average = Average(model)
    session.register(average=average)
    scheduler = OneCycleLR(optimizer, 0.02, total_steps=10)
    return model, [optimizer, average, scheduler, session.sampler(range(length))]


def other_model(session: atoll.Session) -> tuple[nn.Module, list[Any]]:
    model = MODELS["odd"].build(seed=9)
    session.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    return model, []


def other_groups(session: atoll.Session) -> tuple[nn.Module, list[Any]]:
    model = MODELS["frozen"].build(seed=9)
    groups = [{"params": [p]} for p in model.parameters()]
    session.prepare(model, torch.optim.AdamW(groups, lr=0.01))
    return model, []


def bare(session: atoll.Session) -> tuple[nn.Module, list[Any]]:
    model = MODELS["frozen"].build(seed=9)
    _, optimizer = session.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    return model, [optimizer]


def without_sampler(session: atoll.Session) -> tuple[nn.Module, list[Any]]:
    model, (optimizer,) = bare(session)
    return model, [OneCycleLR(optimizer, 0.02, total_steps=10)]


def other_dataset(session: atoll.Session) -> tuple[nn.Module, list[Any]]:
    return scripted(session, seed=9, length=11)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (other_model, "'gain'"),
        (other_groups, "group"),
        (bare, "OneCycleLR"),
        (without_sampler, "sampler"),
        (other_dataset, "10 samples"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_checkpoint_of_another_script_is_refused_and_nothing_is_taken_over(
    tmp_path: Path, make: Any, said: str
) -> None:
    folder = str(tmp_path / "checkpoint")
    with atoll.join(CONFIG) as session:
        made = scripted(session, seed=0)
        session.save(folder)
    del made
    with atoll.join(CONFIG) as session:
        model, _alive = make(session)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        with pytest.raises(CheckpointError, match=said) as caught:
            session.load(folder)
        assert "\n" not in str(caught.value)
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        assert session.iteration == 0


def test_a_run_that_failed_leaves_its_workers_fit_for_the_next(pool: WorkerPool, tmp_path: Path) -> None:
    with pytest.raises(JobFailedError, match="step-4"):
        pool.run(go_on_from_each, str(tmp_path), [4], 0.0, 48, world=2)
    assert len(pool.run(run_whole, str(tmp_path), 0.0, 48, world=2)) == 2


def resumes(place: Place, folder: str, *, only_first: bool = False) -> int:
    """What `session.resume` returns, where every worker sees the folder, or (`only_first`) worker 0 alone."""
    seen = folder if not only_first or place.rank == 0 else folder + "-elsewhere"
    with atoll.join(CONFIG, place=place) as session:
        _made = scripted(session, seed=place.rank)
        return session.resume(seen)


def resume_twice(place: Place, folder: str) -> str:
    """What this worker prints where there is no checkpoint, however often the script asks."""
    said = io.StringIO()
    with atoll.join(CONFIG, place=place) as session, contextlib.redirect_stderr(said):
        _made = scripted(session, seed=place.rank)
        assert [session.resume(folder), session.resume(folder), session.resume()] == [0, 0, 0]
    assert "starting at step 0" in said.getvalue() or place.rank
    return said.getvalue()


@pytest.mark.parametrize("world", [1, 2])
def test_resume_goes_on_from_a_checkpoint_if_there_is_one(
    pool: WorkerPool, tmp_path: Path, world: int
) -> None:
    folder = str(tmp_path / "checkpoint")
    assert pool.run(resumes, folder, world=world) == [0] * world
    printed = [
        said.count("session.resume found no checkpoint in")
        for said in pool.run(resume_twice, folder, world=world)
    ]
    assert printed == [1] + [0] * (world - 1)
    Path(folder).mkdir()  # a folder without anything in it is no checkpoint yet
    assert pool.run(resumes, folder, world=world) == [0] * world
    with atoll.join(CONFIG) as session:
        model, _alive = scripted(session, seed=0)
        for _ in range(3):
            sum(p.sum() for p in model.parameters() if p.requires_grad).backward()
            session._state.prepared[0].optimizers[0].step()
        session.save(folder)
    assert pool.run(resumes, folder, world=world) == [3] * world
    (Path(folder) / "manifest.json").unlink()
    with pytest.raises(JobFailedError, match="not a whole checkpoint"):  # what is damaged is not passed over
        pool.run(resumes, folder, world=world)


def only_first_resumes(place: Place, folder: str) -> int:
    return resumes(place, folder, only_first=True)


def test_a_checkpoint_that_one_worker_does_not_see_is_none_to_begin_without(
    pool: WorkerPool, tmp_path: Path
) -> None:
    folder = str(tmp_path / "checkpoint")
    with atoll.join(CONFIG) as session:
        _made = scripted(session, seed=0)
        session.save(folder)
    with pytest.raises(JobFailedError, match="there is no checkpoint here"):
        pool.run(only_first_resumes, folder, world=2)
