"""The session with a parameter server where scripts differ; where there is one, against plain PyTorch.

Hub and shards run in this process, on threads; workers in the pool's processes, or here where one is enough.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from run_command import wait_for
from torch import Tensor, nn

import atoll
from atoll.core.config import Chunks, Config, Run, Sync
from atoll.core.errors import (
    AtollError,
    DeadlineError,
    NonFiniteGradientError,
    PeerLostError,
    PrepareError,
    UserError,
)
from atoll.core.memory import Memory
from atoll.net.keys import make_keys, write_keys
from atoll.train.api.place import Place
from atoll.train.api.session import Session
from atoll.train.members import hub_client
from atoll.train.sync.server import Server
from support.pool import JobFailedError, WorkerPool
from support.served import ServedRun, served_worker

CHUNKS = Chunks(size="2KiB")  # several for a tiny model
AT_ONCE = 30.0  # seconds: half of what the deadline (sync.timeout) would take
PATIENCE = 5.0  # where a worker dies; less, and one that a busy machine holds up counts as dead too


def config(consistency: Any = "bsp", **sync: Any) -> Config:
    return Config(
        run=Run(strategy="server"),
        chunks=CHUNKS,
        sync=Sync(**{"timeout": "60s", "consistency": consistency, **sync}),
    )


@contextmanager
def joined(address: str, rank: int, consistency: Any = "bsp", **sync: Any) -> Iterator[Session]:
    with served_worker(address, rank), atoll.join(config(consistency, **sync)) as session:
        yield session


class Net(nn.Module):
    """Layers that train, one that is frozen, and one that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(5, 33), nn.Linear(33, 33), nn.Linear(33, 7)
        self.frozen, self.unused = nn.Linear(33, 33).requires_grad_(False), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.middle(self.first(x).tanh()).tanh()
        after: Tensor = self.last(hidden + self.frozen(hidden))
        return after


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    return torch.optim.Adam(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 0.01}], lr=0.003
    )


OPTIMIZERS = {"sgd": sgd, "adam": adam}


def make(optimizer: str = "sgd") -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net().double()
    return model, OPTIMIZERS[optimizer](model)


def share(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(2 + (rank + step) % 3, 5, generator=generator, dtype=torch.float64)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


Edit = Callable[[Net, int], None]  # (model, step)


def no_edit(_model: Net, _step: int) -> None:
    """The gradients stay as they are."""


def plain_steps(
    model: Net, optimizer: torch.optim.Optimizer, ranks: list[int], steps: range, edit: Edit = no_edit
) -> None:
    """Train in this process alone on the shares of all `ranks`."""
    for step in steps:
        shares = [share(rank, step) for rank in ranks]
        optimizer.zero_grad()
        for x in shares:
            (loss_of(model, x) * len(x) / sum(map(len, shares))).backward()
        edit(model, step)
        optimizer.step()


def plain(world: int, steps: int, edit: Edit = no_edit) -> list[Tensor]:
    model, optimizer = make()
    plain_steps(model, optimizer, list(range(world)), range(steps), edit)
    return values(model)


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def assert_alike(results: list[list[Tensor]], expected: list[Tensor], tolerance: float = 1e-12) -> None:
    for result in results:
        for ours, theirs in zip(result, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


def train(
    place: Place, address: str, steps: range, edit: Edit = no_edit, sync: dict[str, Any] | None = None
) -> list[Tensor]:
    """The usual loop; the parameters after the session."""
    model, optimizer = make()
    with joined(address, place.rank, **(sync or {})) as session:
        session.prepare(model, optimizer)
        for step in steps:
            optimizer.zero_grad()
            loss_of(model, share(session.rank, step)).backward()
            edit(model, step)
            optimizer.step()
    return values(model)


def one_line(said: str) -> str:
    assert "\n" not in said
    return said


# -- gradients that the script edits under bsp -------------------------------------------------------------


def clips(model: Net, _step: int) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def edits_one_chunk(model: Net, _step: int) -> None:
    assert model.first.weight.grad is not None
    model.first.weight.grad.mul_(3.0)


def replaces_and_removes(model: Net, step: int) -> None:
    model.last.bias.grad = torch.full((7,), 0.1, dtype=torch.float64)
    if step % 2:
        model.middle.weight.grad = None


def gives_one_to_the_unused(model: Net, step: int) -> None:
    if step == 2:
        model.unused.bias.grad = torch.ones(4, dtype=torch.float64)


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("edit", [clips, edits_one_chunk, replaces_and_removes, gives_one_to_the_unused])
def test_bsp_steps_with_gradients_as_the_script_leaves_them(pool: WorkerPool, edit: Edit, lazy: bool) -> None:
    with ServedRun(2, shards=2) as served:
        pool.submit(train, served.address, range(4), edit, {"lazy": lazy}, world=2)
        expected = plain(2, 4, edit)
        assert_alike(pool.collect(), expected)
    assert not served.failures


def clips_by_session_then_edits(place: Place, address: str) -> list[Tensor]:
    model, optimizer = make()
    with joined(address, place.rank) as session:
        session.prepare(model, optimizer)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, share(session.rank, step)).backward()
            session.clip_grad_norm_(0.05)
            edits_one_chunk(model, step)
            if step % 2:
                session.clip_grad_norm_(0.04)
            optimizer.step()
    return values(model)


def clips_and_edits(model: Net, step: int) -> None:
    clips(model, step)
    edits_one_chunk(model, step)
    if step % 2:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.04)


def test_the_session_s_clipping_before_and_after_an_edit(pool: WorkerPool) -> None:
    with ServedRun(2, shards=2) as served:
        pool.submit(clips_by_session_then_edits, served.address, world=2)
        expected = plain(2, 4, clips_and_edits)
        assert_alike(pool.collect(), expected)


def edits_unlike(place: Place, address: str) -> list[Tensor]:
    def edit(model: Net, _step: int) -> None:
        gradient = (model.first if place.rank else model.last).weight.grad
        assert gradient is not None
        gradient.mul_(2.0)

    return train(place, address, range(2), edit)


def test_workers_that_edit_unlike_chunks_are_told_so(pool: WorkerPool) -> None:
    with ServedRun(2) as served, pytest.raises(JobFailedError) as caught:
        pool.run(edits_unlike, served.address, world=2)
    (failure,) = caught.value.failures.values()  # the other one goes on alone
    assert failure.kind == "UserError"
    line = "would step iteration 0 differently: their scripts have changed the gradients (p.grad) of"
    assert line in one_line(failure.message)


# -- checkpoints -------------------------------------------------------------------------------------------

State = dict[str, Any]


def resumes(
    place: Place, address: str, optimizer_name: str, sync: dict[str, Any], load: str, save: str, steps: range
) -> tuple[list[Tensor], State, int]:
    """Load unless there is nothing to, train, save; parameters, optimizer state, and the iteration."""
    model, optimizer = make(optimizer_name)
    # Each worker begins with other values: worker 0's count, or the checkpoint's.
    for parameter in model.parameters() if place.rank or load else ():
        parameter.data.add_(0.1)
    with joined(address, place.rank, **sync) if address else atoll.join(Config(), place=place) as session:
        session.prepare(model, optimizer)
        if load:
            session.load(load)
        for step in steps:
            optimizer.zero_grad()
            loss_of(model, share(session.rank, step)).backward()
            optimizer.step()
        state = optimizer.state_dict()
        if save:
            session.save(save)
        model.state_dict()
        return values(model), state, session.iteration


def assert_same_state(state: State, expected: State) -> None:
    """As plain torch's: keys, dtypes, shapes, and values to 1e-9."""
    assert list(state) == list(expected)
    assert [list(group) for group in state["param_groups"]] == [list(g) for g in expected["param_groups"]]
    assert state["param_groups"] == expected["param_groups"]
    assert set(state["state"]) == set(expected["state"])
    for index, theirs in expected["state"].items():
        ours = state["state"][index]
        assert set(ours) == set(theirs)
        for key, value in theirs.items():
            if isinstance(value, Tensor):
                assert (ours[key].dtype, ours[key].shape) == (value.dtype, value.shape), (index, key)
                torch.testing.assert_close(ours[key], value, rtol=0, atol=1e-9)
            else:
                assert ours[key] == value


# (workers, shards; 0: a ring, or alone)
SEVERAL, ALONE = [(2, 2), (3, 1), (2, 0), (1, 3)], [(1, 2), (1, 0), (1, 1)]


@pytest.mark.parametrize(
    ("optimizer", "sync", "parts"),
    [
        ("sgd", {}, [(2, 0), (3, 2)]),
        ("adam", {"lazy": True}, SEVERAL),
        ("adam", {"consistency": "asp"}, ALONE),
        ("sgd", {"consistency": "ssp", "lazy": True}, ALONE),
    ],
)
def test_a_checkpoint_goes_on_at_other_counts_and_over_a_ring(
    pool: WorkerPool, tmp_path: Path, optimizer: str, sync: dict[str, Any], parts: list[tuple[int, int]]
) -> None:
    model, stepper = make(optimizer)
    folders = ["", *(str(tmp_path / name) for name in "ab")]
    for part, (world, shards) in enumerate(parts):
        steps = range(3 * part, 3 * part + 3)
        load, save = folders[0] if part == 0 else folders[1 + (part + 1) % 2], folders[1 + part % 2]
        with ServedRun(world, shards=shards) if shards else nullcontext() as served:
            address = served.address if served is not None else ""
            pool.submit(resumes, address, optimizer, sync, load, save, steps, world=world)
            plain_steps(model, stepper, list(range(world)), steps)
            results = pool.collect()
        for parameters, state, iteration in results:
            assert_alike([parameters], values(model), 1e-9)
            assert_same_state(state, stepper.state_dict())
            assert iteration == steps.stop


def goes_back(place: Place, address: str, folder: str, sync: dict[str, Any]) -> tuple[list[Tensor], State]:
    """Save after two steps, make two more, load, and make the same two again."""
    model, optimizer = make("adam")
    with joined(address, place.rank, **sync) as session:
        session.prepare(model, optimizer)
        for part, steps in enumerate([range(2), range(2, 4), range(2, 4)]):
            for step in steps:
                optimizer.zero_grad()
                loss_of(model, share(session.rank, step)).backward()
                optimizer.step()
            if part == 0:
                session.save(folder)
            elif part == 1:
                state = optimizer.state_dict()  # lazy parameters come with it
                parameters = values(model)
                session.load(folder)
                assert session.iteration == 2
        assert_same_state(optimizer.state_dict(), state)
        assert_alike([values(model)], parameters)
    return values(model), state


@pytest.mark.parametrize(
    ("world", "sync"), [(2, {}), (2, {"lazy": True}), (1, {"consistency": "asp", "lazy": True})]
)
def test_a_load_in_mid_run_goes_back(
    pool: WorkerPool, tmp_path: Path, world: int, sync: dict[str, Any]
) -> None:
    with ServedRun(world, shards=2) as served:
        results = pool.run(goes_back, served.address, str(tmp_path / "saved"), sync, world=world)
    model, optimizer = make("adam")
    plain_steps(model, optimizer, list(range(world)), range(4))
    for parameters, state in results:
        assert_alike([parameters], values(model), 1e-9)
        assert_same_state(state, optimizer.state_dict())


# -- NaN ---------------------------------------------------------------------------------------------------


def meets_nan(
    place: Place, address: str, consistency: str, policy: str, clip: str, steps: int
) -> tuple[list[Tensor], str]:
    """Worker 1 (a lone worker: itself) has a NaN in iteration 1."""
    model, optimizer = make()
    said = ""
    try:
        with joined(address, place.rank, consistency, nonfinite=policy) as session:
            session.prepare(model, optimizer)
            for step in range(steps):
                optimizer.zero_grad()
                loss = loss_of(model, share(session.rank, step))
                bad = step == 1 and session.rank == session.world - 1
                (loss * float("nan") if bad else loss).backward()
                if clip == "session":
                    session.clip_grad_norm_(0.05)
                elif clip == "torch":
                    clips(model, step)
                optimizer.step()
    except NonFiniteGradientError as error:
        said = one_line(str(error))
    return values(model), said


@pytest.mark.parametrize("clip", ["", "session", "torch"])
def test_bsp_leaves_out_an_iteration_with_nan(pool: WorkerPool, clip: str) -> None:
    model, optimizer = make()
    edit = clips if clip else no_edit
    for step in (0, 2, 3):
        plain_steps(model, optimizer, [0, 1], range(step, step + 1), edit)
    with ServedRun(2, shards=2) as served:
        results = pool.run(meets_nan, served.address, "bsp", "skip", clip, 4, world=2)
    assert [said for _, said in results] == ["", ""]
    assert_alike([parameters for parameters, _ in results], values(model))


def test_bsp_stops_every_worker_at_a_nan_and_says_whose(pool: WorkerPool) -> None:
    with ServedRun(2) as served:
        results = pool.run(meets_nan, served.address, "bsp", "stop", "", 4, world=2)
    expected = plain(2, 1)
    for parameters, said in results:
        assert "iteration 1: the gradient of" in said
        assert "on worker 1 holds NaN" in said
        assert_alike([parameters], expected)


def test_asp_leaves_out_a_contribution_with_nan(pool: WorkerPool) -> None:
    model, optimizer = make()
    for step in (0, 2, 3):
        plain_steps(model, optimizer, [0], range(step, step + 1))
    with ServedRun(1, shards=2) as served:
        ((parameters, said),) = pool.run(meets_nan, served.address, "asp", "skip", "", 4, world=1)
    assert said == ""
    assert_alike([parameters], values(model))
    with ServedRun(2) as served:
        results = pool.run(meets_nan, served.address, "asp", "skip", "session", 4, world=2)
    assert [said for _, said in results] == ["", ""]
    assert all(bool(p.isfinite().all()) for parameters, _ in results for p in parameters)


@pytest.mark.parametrize("consistency", ["asp", "ssp"])
def test_a_nan_that_stops_one_worker_does_not_hold_up_the_others(pool: WorkerPool, consistency: str) -> None:
    """It says goodbye: nobody waits for the hub to miss it, which would take longer than `sync.timeout`."""
    with ServedRun(2, patience=600.0) as served:
        (parameters, first), (_, second) = pool.run(
            meets_nan, served.address, consistency, "stop", "", 12, world=2
        )
    assert first == ""
    assert "on worker 1 holds NaN" in second
    assert all(bool(p.isfinite().all()) for p in parameters)


# -- workers at their own pace, and their deaths -----------------------------------------------------------

SLACK = 2


def races(place: Place, address: str, folder: str, steps: int, dies_after: int) -> list[int]:
    """By how many iterations this worker was ahead of the slowest, whenever it began one.

    Each notes what it is about to commit, so that what others read there is at least what has been applied.
    Worker 0 is the slowest: it commits when the others have gone as far ahead of it as they may.
    """
    notes = [Path(folder) / str(rank) for rank in range(place.world)]

    def others_are_at(iteration: int) -> bool:
        return all(int(note.read_text()) >= min(iteration, steps) for note in notes[1:])

    model, optimizer = make()
    ahead: list[int] = []
    with served_worker(address, place.rank):
        session = atoll.join(config("ssp", slack=SLACK))
    session.prepare(model, optimizer)
    for step in range(steps):
        alive = [note for note in notes if note.exists() and not note.with_suffix(".dead").exists()]
        done = [int(text) for note in alive if (text := note.read_text())]
        ahead.append(step - min(done, default=0) if len(alive) == place.world else 0)
        optimizer.zero_grad()
        loss_of(model, share(place.rank, step)).backward()
        if place.rank == 0:
            wait_for(partial(others_are_at, step + SLACK + 1), "the others to be as far ahead as they may")
            time.sleep(0.02)  # in which they would go further, if they could
            if step == dies_after:
                notes[0].with_suffix(".dead").touch()
                assert session._runtime.member is not None
                session._runtime.member.hub.close()  # no heartbeat, and no goodbye
                return ahead
        note = notes[place.rank].with_suffix(".new")
        note.write_text(str(step + 1))
        note.replace(notes[place.rank])
        optimizer.step()
    session.close()
    return ahead


def test_ssp_keeps_workers_within_the_slack_and_goes_on_without_the_slowest(
    pool: WorkerPool, tmp_path: Path
) -> None:
    for rank in range(3):
        (tmp_path / str(rank)).write_text("0")
    with ServedRun(3, shards=2, patience=PATIENCE, folder=tmp_path / "served") as served:
        results = pool.run(races, served.address, str(tmp_path), 20, 12, world=3)
    slow, *others = results
    assert (len(slow), [len(ahead) for ahead in others]) == (13, [20, 20])
    assert max(slow) <= 0
    for ahead in others:
        assert max(ahead) == SLACK
    decisions = [
        json.loads(line) for line in (tmp_path / "served" / "decisions.jsonl").read_text().splitlines()
    ]
    (died,) = [each for each in decisions if each["what"] == "worker died"]
    assert died["choice"].startswith("worker 0")


def dies(place: Place, address: str, steps: int, dying: int, dies_before: int) -> list[Tensor]:
    """Under bsp; one worker is gone, without a word, before it contributes to an iteration."""
    model, optimizer = make()
    with served_worker(address, place.rank):
        session = atoll.join(config())
    session.prepare(model, optimizer)
    for step in range(steps):
        if place.rank == dying and step == dies_before:
            assert session._runtime.member is not None
            session._runtime.member.hub.close()
            return values(model)
        optimizer.zero_grad()
        loss_of(model, share(place.rank, step)).backward()
        optimizer.step()
    session.close()
    return values(model)


@pytest.mark.parametrize("dying", [0, pytest.param(2, marks=pytest.mark.soak)])
def test_bsp_goes_on_without_a_worker_that_dies(pool: WorkerPool, dying: int) -> None:
    left = [rank for rank in range(3) if rank != dying]
    model, optimizer = make()
    with ServedRun(3, shards=2, patience=PATIENCE) as served:
        pool.submit(dies, served.address, 4, dying, 2, world=3)
        plain_steps(model, optimizer, [0, 1, 2], range(2))
        at_death = values(model)
        plain_steps(model, optimizer, left, range(2, 4))
        results = pool.collect()
    assert_alike([results[dying]], at_death)
    assert_alike([results[rank] for rank in left], values(model))


def consumes(place: Place, address: str, consistency: str, lazy: bool, policy: str, epochs: int) -> list[int]:
    """The indices that this worker trained on; with a NaN now and then, which is left out and counts."""
    model, optimizer = make()
    seen: list[int] = []
    with joined(address, place.rank, consistency, lazy=lazy, nonfinite=policy) as session:
        session.prepare(model, optimizer)
        data = torch.utils.data.TensorDataset(torch.arange(47), torch.randn(47, 5, dtype=torch.float64))
        sampler = session.sampler(data, seed=3)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for indices, x in torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler):
                loss = loss_of(model, x)
                optimizer.zero_grad()
                (loss * float("nan") if policy == "skip" and 7 in indices else loss).backward()
                optimizer.step()
                seen += indices.tolist()
    return seen


@pytest.mark.parametrize(
    ("consistency", "lazy", "policy"), [("asp", False, "stop"), ("asp", True, "skip"), ("ssp", True, "stop")]
)
def test_each_sample_of_an_epoch_counts_once(
    pool: WorkerPool, tmp_path: Path, consistency: str, lazy: bool, policy: str
) -> None:
    """The last ones too: a worker that leaves has seen its last contribution counted."""

    def told_over() -> set[str]:
        lines = (tmp_path / "decisions.jsonl").read_text().splitlines()
        return {each["what"] for each in map(json.loads, lines) if each["choice"] == "over"}

    with ServedRun(2, shards=2, folder=tmp_path) as served:
        results = pool.run(consumes, served.address, consistency, lazy, policy, 3, world=2)
        epochs = {f"epoch {epoch} of sampler 0" for epoch in range(3)}
        wait_for(lambda: told_over() == epochs, "the hub to say that the epochs are over")
    count = Counter(index for seen in results for index in seen)
    assert count == Counter(dict.fromkeys(range(47), 3))


# -- lazy publication --------------------------------------------------------------------------------------


def looks_at_once(place: Place, address: str, consistency: str) -> list[tuple[Tensor, Tensor, State]]:
    """What evaluation and both state_dicts show right after each step, in turn."""
    model, optimizer = make("adam")
    seen = []
    with joined(address, place.rank, consistency, lazy=True) as session:
        session.prepare(model, optimizer)
        reducer = session._state.prepared[0].reducer
        assert isinstance(reducer, Server)
        for step in range(6):
            optimizer.zero_grad()
            loss_of(model, share(session.rank, step)).backward()
            optimizer.step()
            assert reducer.parameters.on_their_way
            looks = [
                lambda: model(share(0, 99)).detach(),
                lambda: model.state_dict()["first.weight"].clone(),
                optimizer.state_dict,
            ]
            found: dict[int, Any] = {}
            with torch.no_grad():
                for index in (step % 3, (step + 1) % 3, (step + 2) % 3):
                    found[index] = looks[index]()
            seen.append((found[0], found[1], found[2]))
    return seen


@pytest.mark.parametrize(("consistency", "world"), [("bsp", 2), ("asp", 1)])
def test_lazy_parameters_are_there_when_they_are_looked_at(
    pool: WorkerPool, consistency: str, world: int
) -> None:
    with ServedRun(world, shards=2) as served:
        results = pool.run(looks_at_once, served.address, consistency, world=world)
    model, optimizer = make("adam")
    for step in range(6):
        plain_steps(model, optimizer, list(range(world)), range(step, step + 1))
        with torch.no_grad():
            expected = model(share(0, 99))
        for seen in results:
            output, weight, state = seen[step]
            torch.testing.assert_close(output, expected, rtol=0, atol=1e-9)
            torch.testing.assert_close(weight, model.first.weight.detach(), rtol=0, atol=1e-9)
            assert_same_state(state, optimizer.state_dict())
            assert list(state["state"]) == list(optimizer.state_dict()["state"])


@pytest.mark.parametrize("consistency", ["bsp", "asp"])
def test_a_lazy_session_leaves_the_last_parameters(pool: WorkerPool, consistency: str) -> None:
    with ServedRun(1, shards=2) as served:
        results = pool.run(
            train, served.address, range(3), no_edit, {"lazy": True, "consistency": consistency}, world=1
        )
    assert_alike(results, plain(1, 3))


# -- models and precisions ---------------------------------------------------------------------------------


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Linear(24, 24), nn.Linear(24, 3))


def partly_trained(model: nn.Module) -> torch.optim.Optimizer:
    """The third linear layer gets gradients, and no optimizer steps it."""
    assert isinstance(model, nn.Sequential)
    return torch.optim.AdamW(
        [*model[0].parameters(), *model[1].parameters(), *model[3].parameters()], lr=0.01
    )


def trains_in_bfloat16(place: Place, address: str, consistency: str) -> tuple[list[Tensor], list[Tensor]]:
    model = normed()
    optimizer = partly_trained(model)
    with joined(address, place.rank, consistency) as session:
        session.prepare(model, optimizer)
        for step in range(5):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(model, share(session.rank, step).float()).float()
            loss.backward()
            optimizer.step()
    return values(model), [buffer.clone() for buffer in model.buffers()]


@pytest.mark.parametrize(("consistency", "world"), [("bsp", 2), ("asp", 1)])
def test_autocast_batch_norm_and_a_layer_that_no_optimizer_trains(
    pool: WorkerPool, consistency: str, world: int
) -> None:
    with ServedRun(world, shards=2) as served:
        results = pool.run(trains_in_bfloat16, served.address, consistency, world=world)
    model = normed()
    untouched = [p.detach().clone() for p in model[4].parameters()]  # type: ignore[index]
    optimizer = partly_trained(model)
    own = [[b.clone() for b in model.buffers()] for _ in range(world)]
    for step in range(5):
        shares = [share(rank, step).float() for rank in range(world)]
        optimizer.zero_grad()
        total: list[Tensor] = [torch.zeros_like(p) for p in model.parameters()]
        for rank, x in enumerate(shares):
            for buffer, held in zip(model.buffers(), own[rank], strict=True):
                buffer.copy_(held)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(model, x).float()
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            own[rank] = [b.clone() for b in model.buffers()]
            for summed, gradient in zip(total, gradients, strict=True):
                summed += gradient * (len(x) / sum(map(len, shares)))
        for parameter, summed in zip(model.parameters(), total, strict=True):
            parameter.grad = summed
        optimizer.step()
    for parameters, buffers in results:  # at the session's end all have worker 0's buffers
        assert_alike([parameters], values(model), 0.0 if world == 1 else 2e-3)
        assert_alike([parameters[-2:]], untouched, 0.0)
        assert_alike([buffers], own[0], 0.0 if world == 1 else 2e-2)


# -- mistakes ----------------------------------------------------------------------------------------------


def test_schedules_by_samples_are_of_one_model() -> None:
    with ServedRun(1) as served, joined(served.address, 0) as session:
        _, optimizer = session.prepare(*make())
        session.schedule(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9), 100)
        with pytest.raises(UserError, match="step each scheduler in the script") as caught:
            session.prepare(*make())
        one_line(str(caught.value))
    with ServedRun(1) as served, joined(served.address, 0) as session:
        for _ in range(2):
            _, optimizer = session.prepare(*make())
        with pytest.raises(UserError, match="samples are counted of all together") as caught:
            session.schedule(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9), 100)
        one_line(str(caught.value))


def test_models_of_one_session_have_one_set_of_budgets() -> None:
    with ServedRun(1) as served, joined(served.address, 0) as session:
        session.prepare(*make(), memory=Memory(device="1GiB"))
        session.prepare(*make())
        with pytest.raises(PrepareError, match="under one set of budgets") as caught:
            session.prepare(*make(), memory=Memory(device="2GiB"))
        one_line(str(caught.value))


@pytest.mark.parametrize(("consistency", "lazy"), [("bsp", True), ("asp", False), ("asp", True)])
def test_a_parameter_that_the_script_writes_is_named(consistency: str, lazy: bool) -> None:
    model, optimizer = make()
    with ServedRun(1) as served, joined(served.address, 0, consistency, lazy=lazy) as session:
        session.prepare(model, optimizer)
        loss_of(model, share(0, 0)).backward()
        optimizer.step()
        with torch.no_grad():
            model.middle.bias.clamp_(max=0.01)
        with pytest.raises(UserError, match=r"parameter 'middle.bias' was changed by the script") as caught:  # noqa: PT012
            loss_of(model, share(0, 1)).backward()
            optimizer.step()
        assert "session.load" in one_line(str(caught.value))


@pytest.mark.parametrize("consistency", ["bsp", "ssp", "asp"])
def test_with_lazy_parameters_a_method_in_place_of_the_model_is_told_so(consistency: str) -> None:
    model, optimizer = make()
    with ServedRun(1) as served, joined(served.address, 0, consistency, lazy=True) as session:
        session.prepare(model, optimizer)
        for step in range(2):
            loss = model.forward(share(0, step)).square().mean()
            if step:
                with pytest.raises(UserError, match="call the model itself") as caught:
                    loss.backward()
                one_line(str(caught.value))
            else:
                loss.backward()
                optimizer.step()


def prepares_another(place: Place, address: str) -> None:
    model, _ = make()
    if place.rank:
        model.last = nn.Linear(33, 8).double()
    with joined(address, place.rank) as session:
        session.prepare(model, sgd(model))


def test_workers_with_unlike_models_are_told_which_parameter(pool: WorkerPool) -> None:
    with ServedRun(2) as served, pytest.raises(JobFailedError) as caught:
        pool.run(prepares_another, served.address, world=2)
    assert set(caught.value.failures) == {0, 1}
    for failure in caught.value.failures.values():
        assert failure.kind == "PrepareError"
        assert "parameter 'last.weight' is (7, 33) float64" in one_line(failure.message)


def stays_away(place: Place, address: str, consistency: str) -> str:
    """Worker 1 goes on only when worker 0's deadline has passed."""
    assert place.store is not None
    model, optimizer = make()
    try:
        with joined(address, place.rank, consistency, slack=0) as session:
            session.prepare(model, optimizer)
            if place.rank == 0 and session._runtime.member is not None:
                session._runtime.member.shards.timeout = 1.0  # joining on a busy machine may take longer
            if place.rank == 1:
                place.store.wait(["given up"])
            for step in range(2):
                optimizer.zero_grad()
                loss_of(model, share(place.rank, step)).backward()
                optimizer.step()
    except AtollError as error:
        place.store.set("given up", "1")
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("consistency", "what"),
    [
        ("bsp", "the mean of chunks 0, 1, 2 and 1 more in iteration 0"),
        ("ssp", "chunks 0, 1, 2 and 1 more of the parameters after iteration 0"),
    ],
)
def test_a_wait_that_passes_its_deadline_says_where_on_what_and_how_long(
    pool: WorkerPool, consistency: str, what: str
) -> None:
    with ServedRun(2) as served:
        first, second = pool.run(stays_away, served.address, consistency, world=2)
    waited = re.match(
        rf"DeadlineError: worker 0 waited (\d+\.\d) s for {what}: shard 0 at tcp://127\.0\.0\.1:\d+ waits "
        r"for worker 1, to commit iteration 0.* \(deadline sync\.timeout, 1 s; ",
        one_line(first),
    )
    assert waited, first
    assert float(waited[1]) >= 1.0
    assert second == ""  # the other one goes on


def test_shards_that_end_are_named_at_once() -> None:
    model, optimizer = make()
    with ServedRun(1, shards=2) as served, served_worker(served.address, 0):
        session = atoll.join(config())
        session.prepare(model, optimizer)
        loss_of(model, share(0, 0)).backward()
        optimizer.step()
        served.stop()
        began = time.monotonic()
        with pytest.raises(PeerLostError) as caught, session:
            loss_of(model, share(0, 1)).backward()
    assert time.monotonic() - began < AT_ONCE
    # Both end; which of them is seen first is chance.
    assert re.search(r"worker 0 lost shard [01] at tcp://127\.0\.0\.1:\d+: ", one_line(str(caught.value)))


def test_without_its_hub_training_goes_on_while_leases_last_and_both_are_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_client, "SILENCE", 1.0)
    model, optimizer = make()
    chosen = Config(
        run=Run(strategy="server", directory=str(tmp_path / "run")),
        chunks=CHUNKS,
        sync=Sync(consistency="asp", timeout="5s"),
    )
    data = torch.utils.data.TensorDataset(torch.randn(200, 5, dtype=torch.float64))
    journal, trained = tmp_path / "run" / "workers" / "0.jsonl", 0
    with (  # noqa: PT012
        ServedRun(1, shards=2) as served,
        served_worker(served.address, 0),
        pytest.raises(DeadlineError) as caught,
        atoll.join(chosen) as session,
    ):
        session.prepare(model, optimizer)
        sampler = session.sampler(data, seed=0)
        for (x,) in torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler):
            optimizer.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()
            trained += 1
            if trained == 2:
                served.stop_hub()
                wait_for(lambda: "warned" in journal.read_text(), "word that the hub is gone")
    assert trained > 2
    waited = rf"waited 5\.0 s for hub at {served.address} on samples of epoch 0 "
    waited += r"\(deadline sync\.timeout, 5 s; (the connection was lost|nothing listens there)\)"
    assert re.fullmatch(waited, one_line(str(caught.value)))
    said = rf"worker 0: the hub at {served.address} has not answered for \d+\.\d s \(.*\); "
    said += "training goes on while leased samples last"
    events = [json.loads(line) for line in journal.read_text().splitlines()]
    (warned,) = [event for event in events if event["event"] == "warned"]
    assert re.fullmatch(said, warned["message"])
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("atoll: ")]
    assert re.fullmatch(f"atoll: {said}", line)


def test_a_run_with_keys_takes_whoever_has_them_and_nobody_else(tmp_path: Path) -> None:
    for name in ("right", "wrong"):
        write_keys(tmp_path / name, make_keys())
    model, optimizer = make()
    with ServedRun(1, shards=2, keys=tmp_path / "right") as served:
        for keys, said in ((tmp_path / "wrong", "refuses this key"), (None, "wants a key")):
            began = time.monotonic()
            with served_worker(served.address, 0, keys), pytest.raises(UserError, match=said) as caught:
                atoll.join(config())
            assert one_line(str(caught.value)).startswith("hub at tcp://127.0.0.1:")
            assert time.monotonic() - began < AT_ONCE
        with served_worker(served.address, 0, tmp_path / "right"), atoll.join(config()) as session:
            session.prepare(model, optimizer)
            loss_of(model, share(0, 0)).backward()
            optimizer.step()
    assert_alike([values(model)], plain(1, 1), 0.0)
