"""Workers of a parameter server whose models lie in tiers: under bsp they train as without budgets, to
the bit, and as plain PyTorch does. Poison is on, so that no memory is used that was given back.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from test_members_parity import (
    STEPS,
    Case,
    Seen,
    differences,
    make,
    share_of,
    train_plain,
)
from torch import Tensor

import atoll
from atoll.core.config import Chunks, Config, Run, Sync
from atoll.core.memory import Memory
from atoll.memory.exchanged import Exchanged
from atoll.train.api.place import Place
from support.families import loss_of
from support.parity import MAX_NORM
from support.pool import WorkerPool
from support.served import ServedRun, served_worker
from support.tight import CHUNK, memory, poisoned


@dataclass
class Trained(Seen):
    """And what the optimizer kept."""

    states: dict[int, dict[str, Any]] = field(default_factory=dict)


def config(consistency: str = "bsp") -> Config:
    """In pieces that are no chunks of the tiers."""
    sync = Sync(timeout="60s", consistency=consistency)  # type: ignore[arg-type]
    return Config(run=Run(strategy="server"), chunks=Chunks(size="10000"), sync=sync)


def on_disk(case: Case, folder: str) -> Memory:
    """Half of the payloads in host memory, the rest on disk."""
    model, _ = make(case)
    pages = sum(-(-p.nbytes // CHUNK) * CHUNK for p in model.parameters())
    return memory(model, case.share, host=str(pages + 16 * CHUNK), disk=f"{folder}:64MiB")


def train(
    place: Place, case: Case, address: str, tiered: bool, consistency: str, folder: str = ""
) -> Trained:
    """What a user writes."""
    model, optimizer = make(case)
    seen = Trained()
    with poisoned(), served_worker(address, place.rank), atoll.join(config(consistency)) as session:
        given = None
        if tiered:
            given = on_disk(case, folder) if folder else memory(model, case.share)
        session.prepare(model, optimizer, memory=given)
        for step in range(STEPS):
            losses = []
            for micro in range(case.accumulation):
                last = micro == case.accumulation - 1
                with nullcontext() if last else session.no_sync():
                    inputs, targets = share_of(case, session.rank, step, micro)
                    session.weight(len(inputs))
                    loss = loss_of(model(inputs), targets)
                    (loss / case.accumulation).backward()
                    losses.append(loss.item())
            if case.clip:
                seen.norms.append(session.clip_grad_norm_(MAX_NORM).item())
            optimizer.step()
            optimizer.zero_grad()
            seen.losses.append([sum(losses)])
        seen.parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
        seen.buffers = [{name: b.clone() for name, b in model.named_buffers()}]
        states = optimizer.state_dict()["state"]
        seen.states = {
            index: {k: torch.as_tensor(v).clone() for k, v in state.items()}
            for index, state in states.items()
        }
        if tiered:
            (tiers,) = session._state.tiers
            assert isinstance(tiers.fitted, Exchanged)
            figures = tiers.fitted.stats()
            assert 0 < figures.device_peak <= figures.device_budget
            assert figures.moves["to_device"] > 0
            assert figures.steps == STEPS
            if folder:
                assert figures.host_budget is not None
                assert figures.host_peak <= figures.host_budget
                assert figures.moves["to_disk"] > 0
                assert figures.moves["from_disk"] > 0
    return seen


def train_both(
    place: Place, cases: Sequence[tuple[Case, str, str]], consistency: str, folder: str
) -> list[tuple[Trained, Trained]]:
    """Each case without budgets and with them."""
    return [
        (
            train(place, case, plain, False, consistency),
            train(place, case, tiered, True, consistency, folder),
        )
        for case, plain, tiered in cases
    ]


def unlike(a: Trained, b: Trained) -> list[str]:
    """What differs in any bit."""
    found = [what for what in ("losses", "norms") if getattr(a, what) != getattr(b, what)]
    pairs: dict[str, tuple[Tensor, Tensor]] = {k: (v, b.parameters[k]) for k, v in a.parameters.items()}
    pairs |= {k: (v, b.buffers[0][k]) for k, v in a.buffers[0].items()}
    assert list(a.states) == list(b.states)
    for index, state in a.states.items():
        assert sorted(state) == sorted(b.states[index])
        pairs |= {f"{index}.{key}": (value, b.states[index][key]) for key, value in state.items()}
    found += [
        k for k, (one, other) in pairs.items() if one.dtype != other.dtype or not torch.equal(one, other)
    ]
    return found


def check(
    pool: WorkerPool, workers: int, cases: Sequence[Case], consistency: str = "bsp", folder: str = ""
) -> None:
    runs = [[ServedRun(workers, shards=2) for _ in range(2)] for _ in cases]
    try:
        addresses = [[run.__enter__().address for run in pair] for pair in runs]
        jobs = [(case, *pair) for case, pair in zip(cases, addresses, strict=True)]
        pool.submit(train_both, jobs, consistency, folder, world=workers)
        plain = [train_plain(case, workers, apart=True) for case in cases]
        trained = pool.collect()
    finally:
        for pair in runs:
            for run in pair:
                run.stop()
    for number, case in enumerate(cases):
        seen = [each[number] for each in trained]
        for rank, (without, tiered) in enumerate(seen):
            assert not unlike(without, tiered), f"{case}, worker {rank}"
        found = differences(case, plain[number], [tiered for _, tiered in seen])
        assert not found, "\n".join(found)


BSP = [Case("lora", 0.75, 2, True)]
MORE = [
    Case("gpt", 0.5, 2, True),
    Case("resnet", 0.5, 1, True),
    Case("lstm", 0.75, 2, True),
    Case("thrice", 0.25, 1, True),
    Case("vit", 0.5),
    Case("tied", 0.25),
    Case("experts", 0.5, 2),
]


@pytest.mark.check
@pytest.mark.parametrize(
    "cases", [pytest.param(BSP, id="quick"), pytest.param(MORE, id="more", marks=pytest.mark.soak)]
)
def test_bsp_under_budgets_is_bsp_without_to_the_bit(pool: WorkerPool, cases: list[Case]) -> None:
    check(pool, 2, cases)


@pytest.mark.check
def test_with_a_disk_too(pool: WorkerPool, tmp_path: Path) -> None:
    check(pool, 2, [Case("gpt", 0.25, 2, True)], folder=str(tmp_path))


@pytest.mark.parametrize("consistency", ["asp", pytest.param("ssp", marks=pytest.mark.soak)])
def test_one_worker_alone_is_as_plain_pytorch(pool: WorkerPool, consistency: str) -> None:
    check(pool, 1, [Case("gpt", 0.5, 2, True)], consistency)
