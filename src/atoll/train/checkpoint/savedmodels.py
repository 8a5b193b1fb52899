"""The models in a checkpoint: the names of their values, and their order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from atoll.core.decoding import converted
from atoll.core.errors import CheckpointError
from atoll.train.api.origin import Origin, positions_of
from atoll.train.api.scriptmodel import ScriptModel


def as_saved(values: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return the values of a checkpoint's model number `index`, under their names in the checkpoint."""
    return {_prefix(index) + name: value for name, value in values.items()}


def of_model(saved: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return the values of one of a checkpoint's models, under the model's own names."""
    if index:
        prefix = _prefix(index)
        return {name.removeprefix(prefix): v for name, v in saved.items() if name.startswith(prefix)}
    return {name: v for name, v in saved.items() if not (name.startswith("model") and ":" in name)}


def _prefix(index: int) -> str:
    return "" if index == 0 else f"model{index}:"


def schedules_of_models(state: Mapping[str, Any]) -> list[Any]:
    """Return the saved schedules, each with its model's number; empty in a checkpoint from an older Atoll,
    which does not say whose they are."""
    saved = state.get("schedules", ())
    return list(saved) if all("model" in each for each in saved) else []


def in_own_order(
    models: Sequence[ScriptModel], model: dict[str, Any], trees: dict[str, Any], where: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a checkpoint's `model` and `trees` in the order of the session's `models`.

    Raises CheckpointError if names differ, or if models of equal shapes were prepared in another order.
    """
    order = positions(models, trees, where)
    if order == list(range(len(models))):
        return model, trees
    state = dict(trees["state"])
    of_optimizers = _of_optimizers(models, order)
    for key, by in (
        ("models", order),
        ("optimizers", of_optimizers),
        ("schedulers", of_optimizers),
        ("reducers", order),
        ("consumed", order),
    ):
        if key in state:
            state[key] = [state[key][index] for index in by]
    places = {index: number for number, index in enumerate(order)}
    schedules = [{**each, "model": places[each["model"]]} for each in schedules_of_models(state)]
    state["schedules"] = schedules or state.get("schedules", [])
    ordered = {**trees, "state": state}
    for key, by in (("optimizer", of_optimizers), ("groups", order)):
        if key in trees:
            ordered[key] = [trees[key][index] for index in by]
    values = dict[str, Any]()
    for number, index in enumerate(order):
        values |= as_saved(of_model(model, index), number)
    return values, ordered


def positions(models: Sequence[ScriptModel], trees: Mapping[str, Any], where: str) -> list[int]:
    """Return, for each of the session's `models`, its index in the checkpoint."""
    saved = trees["state"].get("models")
    if saved is None or len(saved) != len(models):  # of an older Atoll, or about to be refused
        return list(range(len(models)))
    try:
        origins = [converted(each, Origin) for each in saved]
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{where}: does not say what its models are: {error}") from None

    def alike(first: int, second: int) -> bool:
        return _are_alike(models[first], models[second])

    return positions_of(origins, [model.origin for model in models], alike, where)


def _of_optimizers(models: Sequence[ScriptModel], order: Sequence[int]) -> list[int]:
    """Return, for each of the session's optimizers, its index in a checkpoint whose models are in another
    order.

    Args:
        models: the session's models.
        order: for each of them its index in the checkpoint.
    """
    counts = {index: len(each.optimizers) for index, each in zip(order, models, strict=True)}
    first = {index: sum(counts[before] for before in range(index)) for index in counts}
    return [first[index] + number for index in order for number in range(counts[index])]


def _are_alike(one: ScriptModel, other: ScriptModel) -> bool:
    """True if two of the session's models could load each other's values."""
    shapes = [{n: tuple(p.shape) for n, p in each.parameters.items()} for each in (one, other)]
    kinds = [[type(optimizer) for optimizer in each.optimizers] for each in (one, other)]
    return shapes[0] == shapes[1] and kinds[0] == kinds[1]
