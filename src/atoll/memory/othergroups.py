"""Other groups' values of parameters that groups own (memory/over.py), for a checkpoint, which has those of
all groups."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor

from atoll.core.errors import CheckpointError
from atoll.memory.foreign import SharedStates
from atoll.memory.gradients import TrainedChunk
from atoll.memory.payloads import VALUES
from atoll.memory.sharing import FetchCache, Sharing
from atoll.tensors.lazy import LazyTensor

# For each parameter that groups own, by name: the groups, and each group's value and optimizer state. The
# entry of the group whose values are in the checkpoint's model and optimizer is None.
Held: TypeAlias = dict[str, dict[str, Any]]


def held_by_groups(sharing: Sharing, chunks: Sequence[TrainedChunk], trained: Collection[int]) -> Held:
    """Return the values and states of other groups, as tensors that are read when they are used.

    Args:
        trained: the chunks that an optimizer steps.
    """
    held: Held = {}
    for kind in sharing.grouping.kinds:
        groups, own = sharing.grouping.groups(kind), sharing.grouping.own(kind)
        if len(groups) == 1:
            continue
        seen = [sharing.grouping.seen_by(kind, sharing.holding, i) for i in range(len(groups))]
        others = [None if i == own else FetchCache(sharing, its.parts) for i, its in enumerate(seen)]
        for each in chunks:
            if sharing.grouping.kind(each.chunk.id) != kind:
                continue
            states = [
                None if other is None or each.chunk.id not in trained else SharedStates(each, sharing, other)
                for other in others
            ]
            for slot, name in enumerate(each.names):
                held[name] = {
                    "groups": [list(group) for group in groups],
                    "values": [other and _value(other, each, slot) for other in others],
                    "states": [its and _state(its, each, slot) for its in states],
                }
    return held


def _value(other: FetchCache, each: TrainedChunk, slot: int) -> Tensor:
    like = each.likes[slot]
    return LazyTensor(partial(_fetched, other, each, slot), like.shape, like.dtype)


def _fetched(other: FetchCache, each: TrainedChunk, slot: int) -> Tensor:
    """Return a copy of a parameter's value in another group, on the CPU."""
    return each.part(other.fetched(each, slot, VALUES, each.dtype), slot).clone()


def _state(states: SharedStates, each: TrainedChunk, slot: int) -> dict[str, Any]:
    shape = each.likes[slot].shape
    elements = {
        key: LazyTensor(partial(states.elements, slot, key), shape, each.dtype_of(slot, dtype))
        for key, dtype in states.kept(slot).items()
    }
    return {**states.numbers(slot), **elements}


def groups_of(sharing: Sharing, chunks: Sequence[TrainedChunk]) -> dict[str, list[list[int]]]:
    """Return the groups of each parameter that groups own, by name."""
    found = {}
    for each in chunks:
        groups = sharing.grouping.groups(sharing.grouping.kind(each.chunk.id))
        if len(groups) > 1:
            found.update({name: [list(group) for group in groups] for name in each.names})
    return found


def check_held(held: Mapping[str, Any], groups: Mapping[str, list[list[int]]], where: str) -> None:
    """Raise CheckpointError, naming the first parameter that differs, unless the checkpoint was written by
    these groups."""
    for name in [*groups, *held]:
        there, here = held.get(name, {}).get("groups"), groups.get(name)
        if there != here:
            raise CheckpointError(
                f"{where}: {name!r} is of {_words(there)}, and of {_words(here)} here (atoll.memory.over); "
                "prepare the same groups, or load model.safetensors alone, which has worker 0's"
            )


def _words(groups: object) -> str:
    return "all workers alike" if groups is None else f"the groups {groups}"


def values_of_member(held: Mapping[str, Any], rank: int, model: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's model with the values of this member's group; `held` is the checkpoint's."""
    chosen = _chosen(held, rank)
    return {**model, **{name: value for name, value, _ in chosen if value is not None}}


def state_of_member(
    held: Mapping[str, Any], rank: int, optimizer: Mapping[str, Any], names: Sequence[str]
) -> dict[str, Any]:
    """Return one optimizer's state in a checkpoint with the states of this member's group.

    Args:
        held: the checkpoint's `Held`.
        names: the optimizer's parameters, in the order of its param groups.
    """
    states = dict(optimizer["state"])
    numbers = {name: index for index, name in enumerate(names)}
    for name, value, state in _chosen(held, rank):
        if value is None or name not in numbers:  # this group's is in the optimizer, or another one steps it
            continue
        states.pop(numbers[name], None)
        if state:
            states[numbers[name]] = state
    return {**optimizer, "state": states}


def _chosen(held: Mapping[str, Any], rank: int) -> Iterator[tuple[str, Any, Any]]:
    for name, each in held.items():
        group = next(i for i, members in enumerate(each["groups"]) if rank in members)
        yield name, each["values"][group], each["states"][group]
