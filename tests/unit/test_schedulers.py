"""Schedulers and registered objects in checkpoints: saved by order, or refused by name."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, LambdaLR, ReduceLROnPlateau, StepLR

import atoll
from atoll.core.errors import CheckpointError, UserError
from atoll.train.api.schedulers import by_class, schedulers_of


def prepared() -> tuple[atoll.Session, torch.optim.Optimizer]:
    session = atoll.join()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.prepare(model, optimizer)
    return session, optimizer


def of_two_kinds(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Several of a class, made by turns."""
    return [
        StepLR(optimizer, 2, gamma=0.5),
        ReduceLROnPlateau(optimizer, patience=1),
        StepLR(optimizer, 3, gamma=0.9),
        LambdaLR(optimizer, lambda step: 0.99**step),
        ReduceLROnPlateau(optimizer, patience=7),
        StepLR(optimizer, 5, gamma=0.1),
    ]


def states(schedulers: list[Any]) -> list[Any]:
    return [{key: str(value) for key, value in each.state_dict().items()} for each in schedulers]


@pytest.mark.filterwarnings("ignore:Detected call of")  # no step is made here
@pytest.mark.parametrize("order", [1, -1])
def test_schedulers_of_one_class_are_saved_in_the_order_in_which_they_were_made(
    tmp_path: Path, order: int
) -> None:
    session, optimizer = prepared()
    with session:
        made = of_two_kinds(optimizer)
        for count, scheduler in enumerate(made):
            for loss in range(count):
                scheduler.step(*[float(loss)] * isinstance(scheduler, ReduceLROnPlateau))
        session.save(tmp_path / "saved")
        assert by_class(made[::order]) == by_class(made)
        was = states(made)
    session, optimizer = prepared()
    with session:
        made = of_two_kinds(optimizer)
        assert states(made) != was
        _kept = made[::order]  # however the script holds them
        session.load(tmp_path / "saved")
        assert states(made) == was


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_checkpoint_with_one_of_a_class_is_as_it_was(tmp_path: Path) -> None:
    session, optimizer = prepared()
    with session:
        one = StepLR(optimizer, 2)
        one.step()
        session.save(tmp_path / "saved")
    state = json.loads((tmp_path / "saved" / "state.json").read_text())["trees"]["state"]
    assert state["schedulers"][0]["StepLR"]["last_epoch"] == 1


@pytest.mark.parametrize(("saved", "present"), [(2, 1), (1, 2), (3, 2), (2, 0)])
def test_another_number_of_one_class_is_one_line(tmp_path: Path, saved: int, present: int) -> None:
    session, optimizer = prepared()
    with session:
        _made = [StepLR(optimizer, 2) for _ in range(saved)]
        session.save(tmp_path / "saved")
    session, optimizer = prepared()
    with session:
        _made = [StepLR(optimizer, 2) for _ in range(present)]
        with pytest.raises(CheckpointError) as caught:
            session.load(tmp_path / "saved")
    said = f"holds the states of {saved} schedulers of class StepLR, and {present} drive"
    if not present:
        said = "holds the state of a StepLR, and no StepLR drives the optimizer; make it before session.load"
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_another_scheduler_holds_or_nobody_is_not_counted_and_copies_have_no_order() -> None:
    _session, optimizer = prepared()
    with _session:
        chained = ChainedScheduler([StepLR(optimizer, 2), StepLR(optimizer, 3)])
        StepLR(optimizer, 9)  # nobody holds it
        assert schedulers_of(optimizer) == [chained]
        one = StepLR(optimizer, 2)
        other = copy.copy(one)
        with pytest.raises(
            CheckpointError, match="2 schedulers of class StepLR drive the optimizer, and some"
        ):
            by_class([one, other])


class Odd:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        if isinstance(self.state, Exception):
            raise self.state
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"what": {1, 2}}, "registered 'odd': state['what']: a set cannot be saved; a checkpoint holds"),
        ({"a": [0, (1, print)]}, "registered 'odd': state['a'][1][1]: the function or class print cannot"),
        ({"a": {(1, 2): 3}}, "registered 'odd': state['a']: the key (1, 2) is a tuple; keys are text or"),
        ({3: object()}, "registered 'odd': state[3]: an object cannot be saved"),
        ([torch.empty(2, device="meta")], "registered 'odd': state[0]: the tensor is on the meta device"),
        ({"a": np.array([None])}, "registered 'odd': state['a']: a NumPy array of dtype object cannot"),
        (nn.Linear(1, 1), "registered 'odd': state: a Linear cannot be saved"),
    ],
    ids=[
        "a set",
        "a function",
        "a tuple for a key",
        "an object",
        "no values",
        "objects in NumPy",
        "a module",
    ],
)
def test_what_cannot_be_saved_is_refused_when_it_is_registered(state: Any, said: str) -> None:
    session, _ = prepared()
    with session, pytest.raises(UserError) as caught:
        session.register(odd=Odd(state))
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


def test_what_becomes_so_later_is_named_by_the_save(tmp_path: Path) -> None:
    session, _ = prepared()
    with session:
        odd = Odd(ValueError("not trained yet"))
        session.register(odd=odd, large=Odd(np.ones(4)))
        with pytest.raises(CheckpointError, match=r"registered 'odd': its state_dict\(\) raised ValueError"):
            session.save(tmp_path / "saved")
        odd.state = {"seen": set()}
        with pytest.raises(
            CheckpointError, match=r"^registered 'odd': state\['seen'\]: a set cannot be saved"
        ):
            session.save(tmp_path / "saved")
        odd.state = {"seen": [1]}
        session.save(tmp_path / "saved")
