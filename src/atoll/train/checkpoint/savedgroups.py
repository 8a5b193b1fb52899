"""The part of a checkpoint that groups of workers have for themselves: values and states of parameters that
each group owns (`atoll.memory.over`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from atoll.memory.othergroups import Held, check_held, state_of_member, values_of_member
from atoll.train.api.prepared import Prepared
from atoll.train.checkpoint.savedmodels import as_saved, of_model


def held(prepared: Sequence[Prepared]) -> list[Held]:
    """Return for each of the script's models the values and states of the other groups."""
    found = [{} if each.shared is None else each.shared.held_by_groups() for each in prepared]
    return [own for own, each in zip(found, prepared, strict=True) for _ in each.models]


def choose(
    prepared: Sequence[Prepared], rank: int, model: dict[str, Any], trees: dict[str, Any], where: str
) -> dict[str, Any]:
    """Return a checkpoint's `model` with the values of this worker's groups.

    The groups' optimizer state is put into `trees`. Raises CheckpointError if the checkpoint has other
    groups.
    """
    pairs = [(each, one) for each in prepared for one in each.models]
    saved = trees.get("groups", [{}] * len(pairs))
    first = 0  # the index of the model's first optimizer
    for index, ((each, one), its) in enumerate(zip(pairs, saved, strict=True)):
        check_held(its, {} if each.shared is None else each.shared.groups, where)
        if its:
            for number, names in enumerate(one.stepped_names, first):
                state = trees["optimizer"][number]
                trees["optimizer"][number] = state_of_member(its, rank, state, names)
            own = values_of_member(its, rank, of_model(model, index))
            model = {**model, **as_saved(own, index)}
        first += len(one.optimizers)
    return model
