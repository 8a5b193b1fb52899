"""Workers that load say what they have read: where it is not the same, all are told who has which."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from atoll.core.errors import CheckpointError
from atoll.train.checkpoint.resume import TrainingState


class Met:
    """The workers of a run of two, as worker `rank` meets them: `others` is what the other one says."""

    def __init__(self, rank: int, others: Any = None) -> None:
        self.place, self.ranks, self.is_first = SimpleNamespace(rank=rank, world=2), [0, 1], rank == 0
        self._others, self.said = others, ""

    def gather(self, value: Any, _what: str) -> list[Any]:
        self.said = json.dumps(value)  # as over a channel
        both = [json.loads(self.said), json.loads(self.said if self._others is None else self._others)]
        return both if self.place.rank == 0 else both[::-1]


def state(met: Met, iteration: int = 0) -> TrainingState:
    made = TrainingState(met.place, torch.device("cpu"))  # type: ignore[arg-type]
    made.iteration = iteration
    return made


def saved(folder: Path, iteration: int, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    state(met := Met(0), iteration).save(met, folder)  # type: ignore[arg-type]
    return folder


def load_both(first: Path, second: Path) -> list[str]:
    """What both are told where worker 0 loads `first`, and worker 1 `second`; which iteration they are at."""
    told = []
    read = Met(0), Met(1)
    for met, folder in zip(read, (first, second), strict=True):
        state(met).load(met, folder)  # type: ignore[arg-type]  # alone: it says what it would to another
    for met, folder in ((Met(0, read[1].said), first), (Met(1, read[0].said), second)):
        loading = state(met)
        try:
            loading.load(met, folder)  # type: ignore[arg-type]
            told.append(str(loading.iteration))
        except CheckpointError as error:
            assert loading.iteration == 0
            told.append(str(error))
    return told


def test_the_same_in_two_places_is_loaded(tmp_path: Path) -> None:
    first = saved(tmp_path / "a", 20)
    copy = tmp_path / "b"
    copy.mkdir()
    for file in first.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert load_both(first, copy) == ["20", "20"]


@pytest.mark.parametrize(
    ("iteration", "has"),
    [
        (40, "a checkpoint of iteration 40 in {}, worker 0 of 20"),
        (20, "another checkpoint of iteration 20 in {} than worker 0"),
    ],
)
def test_all_are_told_of_another_one(tmp_path: Path, iteration: int, has: str) -> None:
    first, second = saved(tmp_path / "a", 20), saved(tmp_path / "b", iteration, seed=1)
    assert load_both(first, second) == [f"worker 1 has {has.format(second)}: give all the same"] * 2
