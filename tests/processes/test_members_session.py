"""Sessions whose workers hold one model between them: checkpoints, mistakes, NaN, and a worker that is
killed."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import torch
from member_lives import outcomes
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import atoll
from atoll.core.config import Config, Groups, Run, Sync
from atoll.core.errors import AtollError
from atoll.core.memory import Memory
from atoll.memory import fitted
from atoll.observe.summary import read_summary
from atoll.train.api.place import Place
from atoll.train.api.session import Session
from support.pool import WorkerPool

WIDTH = 32
BUDGET = Memory(device="48KiB", chunk="8448", step="host")  # of 90 KB of parameters, in 11 chunks
ASYMMETRIC = msgspec.structs.replace(BUDGET, sharding="asymmetric")
DATA = TensorDataset(torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
CONFIG = Config(sync=Sync(timeout="60s", global_batch=8))


def build(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    parts = [part for _ in range(10) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = nn.Sequential(*parts).double()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


@dataclass
class Trained:
    """The model and its optimizer's state as a worker sees them, at the checkpoint and at the end."""

    saved: dict[str, Tensor] = field(default_factory=dict)
    end: dict[str, Tensor] = field(default_factory=dict)


def seen(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    values = {name: value.clone() for name, value in model.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        values |= {f"{index}.{key}": torch.as_tensor(value).clone() for key, value in state.items()}
    return values


def in_groups(count: int, config: Config = CONFIG) -> Config:
    """The same under strategy `hierarchical`."""
    run = msgspec.structs.replace(config.run, strategy="hierarchical")
    return msgspec.structs.replace(config, run=run, groups=Groups(count=count))


def train(
    place: Place, folder: str, first: int, last: int, memory: Memory | None, groups: int = 0
) -> Trained:
    """From step `first`, at which the checkpoint is, to `last`, which leaves one where the first is 0. The
    batches are global, so that any number of workers trains as one, in any number of `groups`."""
    model, optimizer = build()
    trained = Trained()
    with atoll.join(in_groups(groups) if groups else CONFIG, place=place) as session:
        session.prepare(model, optimizer, memory=memory)
        batches = session.batches(DATA, seed=3)
        if first:
            assert session.resume(folder) == first
            trained.saved = seen(model, optimizer)
        loader = iter(DataLoader(DATA, batch_sampler=batches))
        for _ in range(first, last):
            (inputs,) = next(loader)
            optimizer.zero_grad()
            (model(inputs) - inputs).square().mean().backward()
            session.clip_grad_norm_(0.1)
            optimizer.step()
        if not first:
            session.save(folder)
        trained.end = seen(model, optimizer)
    return trained


def close(left: dict[str, Tensor], right: dict[str, Tensor], tolerance: float) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(
            right[name], value, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_a_checkpoint_of_four_goes_on_at_any_number_and_in_plain_torch(
    pool: WorkerPool, tmp_path: Path
) -> None:
    folder = str(tmp_path / "checkpoint")
    four = pool.run(train, folder, 0, 3, BUDGET, world=4)
    plain = load_file(f"{folder}/model.safetensors")
    for each in four:
        close(each.end, four[0].end, 0.0)
    close({name: four[0].end[name] for name in plain}, plain, 0.0)
    straight = train(Place(), str(tmp_path / "other"), 0, 6, None).end
    for workers, memory in ((4, BUDGET), (2, ASYMMETRIC), (1, BUDGET), (2, None)):
        for each in pool.run(train, folder, 3, 6, memory, world=workers):
            close(each.saved, four[0].end, 0.0)
            close(each.end, straight, 1e-9)
    alone = train(Place(), folder, 3, 6, BUDGET)  # with no ring at all
    close(alone.saved, four[0].end, 0.0)
    close(alone.end, straight, 1e-9)

    model, optimizer = build()
    model.load_state_dict(plain)
    with atoll.join(CONFIG, place=Place()) as session:  # and without budgets, its optimizer too
        session.prepare(model, optimizer)
        session.batches(DATA, seed=3)
        session.load(folder)
        close(seen(model, optimizer), four[0].end, 0.0)


def test_a_ring_s_checkpoint_goes_on_in_members(pool: WorkerPool, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    ring = pool.run(train, folder, 0, 3, None, world=2)
    straight = train(Place(), str(tmp_path / "other"), 0, 6, None).end
    for each in pool.run(train, folder, 3, 6, BUDGET, world=3):
        close(each.saved, ring[0].end, 0.0)
        close(each.end, straight, 1e-9)


# What a script may do, and what it may do wrong


def step(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, value: float = 1.0) -> None:
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(session.iteration * 10 + session.rank)
    inputs = value * torch.randn(2 + session.rank, WIDTH, generator=generator, dtype=torch.float64)
    (model(inputs) - inputs).square().mean().backward()
    optimizer.step()


def told(place: Place, case: Callable[[Place], Any]) -> Any:
    """What a case gives, or the line that it ends with."""
    try:
        return case(place)
    except AtollError as error:
        return f"{type(error).__name__}: {error}"


def one_has_no_budgets(place: Place) -> None:
    model, optimizer = build()
    with atoll.join(CONFIG, place=place) as session:
        session.prepare(model, optimizer, memory=BUDGET if place.rank == 0 else None)


def one_has_too_little(place: Place) -> None:
    model, optimizer = build()
    little = msgspec.structs.replace(BUDGET, device="4KiB")
    with atoll.join(CONFIG, place=place) as session:
        session.prepare(model, optimizer, memory=little if place.rank == 1 else BUDGET)


def nobody_weighs(place: Place) -> None:
    model, optimizer = build()
    with atoll.join(CONFIG, place=place) as session:
        session.prepare(model, optimizer, memory=BUDGET)
        session.weight(0)
        step(session, model, optimizer)


def one_gradient_is_nan(place: Place) -> None:
    model, optimizer = build()
    with atoll.join(CONFIG, place=place) as session:
        session.prepare(model, optimizer, memory=BUDGET)
        step(session, model, optimizer, value=float("nan") if place.rank == 1 else 1.0)


@pytest.mark.parametrize(
    ("case", "line"),
    [
        (
            one_has_no_budgets,
            "PrepareError: the workers differ: the configuration's 'memory' is given on worker 0 "
            "and not given on worker 1; give every worker the same configuration",
        ),
        (one_has_too_little, "UserError: worker 1: the budget of the device is too small: "),
        (nobody_weighs, "UserError: step 0: the workers' weights sum to 0; session.weight must be above 0"),
        (
            one_gradient_is_nan,
            "NonFiniteGradientError: iteration 0: the gradient of 'NAME', summed over the "
            "workers, holds NaN or infinity; set sync.nonfinite to 'skip'",
        ),
    ],
)
def test_a_mistake_is_the_same_line_on_every_worker(
    pool: WorkerPool, case: Callable[[Place], None], line: str
) -> None:
    lines = pool.run(told, case, world=3)
    assert re.sub(r"'\d+\.(weight|bias)', summed", "'NAME', summed", lines[0]).startswith(line)
    assert "\n" not in lines[0]
    assert lines == [lines[0]] * 3


def skips(place: Place) -> list[bool]:
    """Whether the parameters are the same after a step whose gradient was NaN on one worker, and whether they
    are not after the next."""
    model, optimizer = build()
    config = msgspec.structs.replace(CONFIG, sync=Sync(timeout="60s", nonfinite="skip"))
    with atoll.join(config, place=place) as session:
        session.prepare(model, optimizer, memory=BUDGET)
        before = seen(model, optimizer)
        step(session, model, optimizer, value=float("nan") if place.rank == 1 else 1.0)
        same = [torch.equal(before[name], p.detach()) for name, p in model.named_parameters()]
        step(session, model, optimizer)
        return [*same, *(not torch.equal(before[name], p.detach()) for name, p in model.named_parameters())]


def three_steps(place: Place, directory: str, memory: Memory) -> dict[str, Tensor]:
    model, optimizer = build()
    config = msgspec.structs.replace(CONFIG, run=Run(directory=directory))
    with atoll.join(config, place=place) as session:
        session.prepare(model, optimizer, memory=memory)
        for _ in range(3):
            step(session, model, optimizer)
        return seen(model, optimizer)


def test_both_shardings_have_the_same_bits(pool: WorkerPool, tmp_path: Path) -> None:
    """Over Gloo, where the parts of three are not alike, and weights are rounded."""
    folders = [str(tmp_path / name) for name in ("even", "whole")]
    even = pool.run(three_steps, folders[0], BUDGET, world=3)
    whole = pool.run(three_steps, folders[1], ASYMMETRIC, world=3)
    for values in (*even, *whole):
        close(values, even[0], 0.0)
    reasons = []
    for folder in folders:
        decided = [event for event in read_summary(Path(folder) / "summary.json").events if "choice" in event]
        reasons += [event["reason"] for event in decided if event["what"] == "memory"]
    assert "chunks are split evenly over the members" in reasons[0]
    assert "each chunk belongs to one member" in reasons[1]


def test_a_step_that_is_not_finite_is_left_out_by_all(pool: WorkerPool) -> None:
    for each in pool.run(skips, world=2):
        assert all(each)


def unlike_budgets(place: Place, directory: str) -> dict[str, Tensor]:
    """Each worker has its own; one has a disk."""
    disk = f"{directory}/disk{place.rank}"
    Path(disk).mkdir()
    given = {
        0: BUDGET,
        1: msgspec.structs.replace(BUDGET, device="32KiB"),
        2: msgspec.structs.replace(BUDGET, host="256KiB", disk=f"{disk}:10MiB"),
    }
    model, optimizer = build()
    config = msgspec.structs.replace(CONFIG, run=Run(directory=f"{directory}/run"))
    with atoll.join(config, place=place) as session:
        session.prepare(model, optimizer, memory=given[place.rank])
        for _ in range(3):
            step(session, model, optimizer)
        return seen(model, optimizer)


def test_each_worker_may_have_budgets_of_its_own(pool: WorkerPool, tmp_path: Path) -> None:
    first, *others = pool.run(unlike_budgets, str(tmp_path), world=3)
    for other in others:
        close(first, other, 0.0)
    summary = read_summary(tmp_path / "run" / "summary.json")
    assert [each.worker for each in summary.memory] == [0, 1, 2]
    assert [each.device_budget for each in summary.memory] == [48 * 2**10, 32 * 2**10, 48 * 2**10]
    for each in summary.memory:
        assert each.device_peak <= each.device_budget
        assert each.moves["from_members"] > 0
    assert summary.memory[2].host_peak <= 256 * 2**10


def fits_everywhere(place: Place, directory: str) -> dict[str, Tensor]:
    model, optimizer = build()
    config = msgspec.structs.replace(CONFIG, run=Run(directory=directory))
    with atoll.join(config, place=place) as session:
        session.prepare(model, optimizer, memory=Memory(device="64MiB"))
        assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
        step(session, model, optimizer)
        return seen(model, optimizer)


def test_what_fits_on_each_device_is_trained_in_whole_copies(pool: WorkerPool, tmp_path: Path) -> None:
    first, second = pool.run(fits_everywhere, str(tmp_path / "run"), world=2)
    close(first, second, 0.0)
    decided = [event for event in read_summary(tmp_path / "run" / "summary.json").events if "choice" in event]
    (choice,) = [event["choice"] for event in decided if event["what"] == "memory"]
    assert choice.endswith("everything fits")
    assert any(event["what"] == "chunks" for event in decided)


def built_in_tiers(place: Place, directory: str) -> dict[str, Tensor]:
    """Chunk by chunk, each worker from another seed, in less host memory than the model takes."""
    disk = f"{directory}/disk{place.rank}"
    Path(disk).mkdir()
    memory = msgspec.structs.replace(BUDGET, host="400KiB", disk=f"{disk}:10MiB")
    with atoll.memory.init(msgspec.structs.replace(memory, host="40KiB")):
        model, optimizer = build(seed=place.rank)
    with atoll.join(CONFIG, place=place) as session:
        session.prepare(model, optimizer, memory=memory)
        step(session, model, optimizer)
        return seen(model, optimizer)


def test_a_model_that_was_built_in_tiers_takes_worker_0_s_values(pool: WorkerPool, tmp_path: Path) -> None:
    (tmp_path / "built").mkdir()
    built = pool.run(built_in_tiers, str(tmp_path / "built"), world=2)
    plain = pool.run(in_a_ring, world=2)
    for each in built:
        close(plain[0], each, 1e-9)


def in_a_ring(place: Place) -> dict[str, Tensor]:
    """The same step without budgets."""
    model, optimizer = build()
    with atoll.join(CONFIG, place=place) as session:
        session.prepare(model, optimizer)
        step(session, model, optimizer)
        return seen(model, optimizer)


def two_models(place: Place) -> list[dict[str, Tensor]]:
    """Of which one worker uses one alone, in a step."""
    pairs = [build() for _ in range(2)]
    with atoll.join(CONFIG, place=place) as session:
        for model, optimizer in pairs:
            session.prepare(model, optimizer, memory=BUDGET)
        for turn in range(3):
            inputs = torch.full((2, WIDTH), 0.1 * (turn + place.rank), dtype=torch.float64)
            loss = pairs[0][0](inputs).square().mean()
            if place.rank == 0 or turn != 1:
                loss = loss + pairs[1][0](inputs).square().mean()
            loss.backward()
            for _, optimizer in pairs:
                optimizer.step()
                optimizer.zero_grad()
        return [seen(*pair) for pair in pairs]


def test_two_models_of_a_session(pool: WorkerPool) -> None:
    first, second = pool.run(two_models, world=2)
    for left, right in zip(first, second, strict=True):
        close(left, right, 0.0)
    assert not torch.equal(first[0]["0.weight"], first[1]["0.weight"])


def after_the_session(place: Place) -> list[str]:
    """What uses of the model come to, where nobody has room for all of it."""
    model, optimizer = build()
    short = patch.object(fitted, "available_bytes", lambda: 100_000)
    with short, atoll.join(CONFIG, place=place) as session:
        session.prepare(model, optimizer, memory=BUDGET)
        step(session, model, optimizer)
        entries = model.state_dict()
    uses: list[Callable[[], Any]] = [
        lambda: model(torch.zeros(1, WIDTH, dtype=torch.float64)),
        lambda: [value.clone() for value in entries.values()],
        lambda: [parameter.sum() for parameter in model.parameters()],
        lambda: [value.clone() for value in model.state_dict().values()],
    ]
    return [told(place, lambda _, use=use: use()) for use in uses]


def test_a_use_after_the_session_says_where_it_belongs(pool: WorkerPool) -> None:
    """And never computes with what is not there."""
    for each in pool.run(after_the_session, world=2):
        for line in each:
            assert isinstance(line, str)
            assert "this one has left them without the whole of it: model and optimizer state would" in line
            assert "; read or save its values before that" in line
            assert "\n" not in line


# A worker that is killed


def dies_between_steps(place: Place) -> None:
    model, optimizer = build()
    with atoll.join(CONFIG, place=place) as session:
        session.prepare(model, optimizer, memory=BUDGET)
        for turn in range(1000):
            if place.rank == 2 and turn == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            step(session, model, optimizer)


def dies_in_backward(place: Place) -> None:
    """In the middle of its backward, while the others may be asking it for values."""
    model, optimizer = build()

    def die(_: Tensor) -> None:
        if place.rank == 2 and optimizer.state:
            os.kill(os.getpid(), signal.SIGKILL)

    with atoll.join(CONFIG, place=place) as session:
        session.prepare(model, optimizer, memory=BUDGET)
        next(model.parameters()).register_post_accumulate_grad_hook(die)
        for _ in range(1000):
            step(session, model, optimizer)


def raises(place: Place) -> None:
    """No signal: an error of its own script."""
    model, optimizer = build()
    with atoll.join(CONFIG, place=place) as session:
        session.prepare(model, optimizer, memory=BUDGET)
        for turn in range(1000):
            if place.rank == 2 and turn == 3:
                raise SystemExit(1)
            step(session, model, optimizer)


def dies_while_one_steps_and_one_reads(place: Place) -> None:
    """Worker 1 is within its third step. Worker 0 has made it, and waits in its next forward for what worker
    1 holds. Then worker 2 dies, which has made it too."""
    model, optimizer = build()
    assert place.store is not None
    store, waiting = place.store, timedelta(seconds=30)
    with atoll.join(CONFIG, place=place) as session:
        session.prepare(model, optimizer, memory=BUDGET)
        shared, turn = session._state.tiers[0].shared, 0
        assert shared is not None
        assert shared._stepping is not None
        stepper: Any = shared._stepping.steppers[0]
        stepped = stepper._after_step

        def within_step() -> None:
            if place.rank == 1 and turn == 3:
                store.wait(["dies"], waiting)
            stepped()

        def within_forward(*_: Any) -> None:
            if place.rank == 0 and turn == 4:
                store.set("reads", "")
            if place.rank == 2 and turn == 4:
                store.wait(["reads"], waiting)
                store.set("dies", "")
                os.kill(os.getpid(), signal.SIGKILL)

        model.register_forward_pre_hook(within_forward)
        with patch.object(stepper, "_after_step", within_step):
            while turn < 1000:
                turn += 1
                step(session, model, optimizer)


@pytest.mark.parametrize(
    "part", [dies_between_steps, dies_in_backward, raises, dies_while_one_steps_and_one_reads]
)
def test_a_worker_that_is_gone_ends_the_others_in_a_line(part: Callable[[Place], None]) -> None:
    for rank, (said, seconds) in outcomes(part, 3, silent=2).items():
        # Or by a member that has ended by now, for this reason:
        why = r"(worker \d has gone|.*the session ended before it)"
        gone = rf"RefusedError: worker {rank} cannot have worker \d's \S+ of .*: {why}"
        lost = f"PeerLostError: worker {rank} lost touch with another worker, waiting for "
        assert re.match(f"{lost}|{gone}", said), said
        assert "\n" not in said
        assert seconds < 60.0  # the deadline of every wait
