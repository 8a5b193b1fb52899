"""The states of the prepared models' reducers in a checkpoint, which has one for each of the script's models.

Models that train as one have one reducer, whose steps are those of all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from atoll.train.api.prepared import Prepared


def saved_states(prepared: Sequence[Prepared]) -> list[dict[str, Any]]:
    """Return the states for a checkpoint file."""
    return [state for each in prepared for state in _of_models(each, each.reducer.state_dict())]


def member_states(prepared: Sequence[Prepared]) -> list[dict[str, Any]]:
    """Return the states for a worker that enters between two iterations."""
    return [state for each in prepared for state in _of_models(each, each.reducer.member_state())]


def load(prepared: Sequence[Prepared], saved: Sequence[Mapping[str, Any]]) -> None:
    """Load `saved_states`."""
    for each, states in _of_prepared(prepared, saved):
        _load_steps(each, states)
        in_all = sum(model.steps_made for model in each.models)
        each.reducer.load_state_dict({**states[0], "steps": in_all})


def check_members(prepared: Sequence[Prepared], saved: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError or KeyError if `load_members` could not take `saved`."""
    for each, states in _of_prepared(prepared, saved):
        for state in states:
            each.reducer.check_member_state(state)


def load_members(prepared: Sequence[Prepared], saved: Sequence[Mapping[str, Any]]) -> None:
    """Take another worker's `member_states`."""
    for each, states in _of_prepared(prepared, saved):
        each.reducer.load_member_state(states[0])
        _load_steps(each, states)


def _of_models(prepared: Prepared, state: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a reducer's `state` for each of the models, with that model's own number of steps."""
    if len(prepared.models) == 1:
        return [state]
    return [{**state, "steps": each.steps_made} for each in prepared.models]


def _of_prepared(
    prepared: Sequence[Prepared], saved: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[Prepared, list[Mapping[str, Any]]]]:
    """Yield each prepared model with its part of the saved states."""
    rest = iter(saved)
    for each in prepared:
        yield each, list(itertools.islice(rest, len(each.models)))


def _load_steps(prepared: Prepared, states: Sequence[Mapping[str, Any]]) -> None:
    for each, state in zip(prepared.models, states, strict=True):
        each.steps_made = state["steps"]
