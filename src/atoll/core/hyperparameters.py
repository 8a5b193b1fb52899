"""Hyperparameters that workers step with: whether they are equal, and the line that says where they are not.

Hyperparameters are a list with one mapping for each param group, as `wire.messages.plain_hyperparameters`
makes it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec

Groups: TypeAlias = Sequence[Mapping[str, Any]]

# How torch computes a step, which changes no number that is meant.
IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
# What a scheduler may set (OneCycleLR and CyclicLR move the momentum too), as optimizers and schedulers call
# it.
SCHEDULED = frozenset({"lr", "momentum", "betas"})

# By what a GradScaler divides all gradients: compared like a hyperparameter of the first param group. Without
# it, by 1.
GRADIENT_SCALE = "gradient scale"


class Difference(NamedTuple):
    """The first hyperparameter that two workers have differently, and what each has."""

    group: int
    key: str
    first: Any
    second: Any

    def turned(self) -> Difference:
        """The same difference with the two workers in the other order."""
        return self._replace(first=self.second, second=self.first)


def first_difference(first: Groups, second: Groups, but: Collection[str] = ()) -> Difference | None:
    """The first hyperparameter that differs, leaving out the keys in `but`; None where all are equal."""
    if len(first) != len(second):
        return Difference(min(len(first), len(second)), "params", len(first), len(second))
    for index, (one, other) in enumerate(zip(first, second, strict=True)):
        for key in sorted({*one, *other} - set(but)):
            if not _same(one.get(key), other.get(key)):
                return Difference(index, key, one.get(key), other.get(key))
    return None


def unscheduled_difference(first: Groups, second: Groups) -> Difference | None:
    """The first hyperparameter that differs between workers that go at their own pace: where a scheduler is
    attached, which marks its param groups, what it sets may be of different times."""
    is_scheduled = any("initial_lr" in group for group in (*first, *second))
    return first_difference(first, second, SCHEDULED if is_scheduled else ())


def difference_line(first: str, second: str, step: int, found: Difference) -> str:
    """In a line, what `first` and `second` ("worker 0", "worker 1") step with at `step`, and the way out."""
    if found.key == "params":
        return (
            f"{first} steps {found.first} param groups, {second} {found.second} at step {step}: make the "
            "same optimizer on every worker"
        )
    if found.key == GRADIENT_SCALE:
        one, other = (1.0 if scale is None else scale for scale in (found.first, found.second))
        return (
            f"{first} divides gradients by {_shown(one)}, {second} by {_shown(other)} at step {step}, so "
            "their sum is of gradients of different scales: make one GradScaler, call "
            "session.register(scaler=scaler), and use and update it alike on every worker"
        )
    way_out = "set it alike on every worker"
    if found.key in SCHEDULED:
        way_out += "; a scheduler that follows the loss: call scheduler.step(session.reduce(loss))"
    return (
        f"{first} steps with {found.key} {_shown(found.first)}, {second} with {found.key} "
        f"{_shown(found.second)} at step {step} (param group {found.group}): {way_out}"
    )


def _same(one: Any, other: Any) -> bool:
    """Equal; NaN equals itself here, and a tuple a list."""
    if one is other or (type(one) is type(other) and not isinstance(one, (list, tuple)) and one == other):
        return True
    return msgspec.msgpack.encode(one, enc_hook=str) == msgspec.msgpack.encode(other, enc_hook=str)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return repr(tuple(value)) if isinstance(value, list) else repr(value)
