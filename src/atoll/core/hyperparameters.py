"""Comparison of workers' hyperparameters, with one line on the first difference.

Hyperparameters are a list with one mapping for each param group, in the form of
`wire.messages.plain_hyperparameters`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec

Groups: TypeAlias = Sequence[Mapping[str, Any]]

# Keys that select torch's implementation of a step, not its result.
IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
# Keys that a scheduler may set. OneCycleLR and CyclicLR set the momentum too.
SCHEDULED = frozenset({"lr", "momentum", "betas"})

# The factor by which a GradScaler divides all gradients; 1 without one. Compared like a hyperparameter of the
# first param group.
GRADIENT_SCALE = "gradient scale"


class Difference(NamedTuple):
    """The first hyperparameter in which two workers differ, with each worker's value."""

    group: int
    key: str
    first: Any
    second: Any

    def turned(self) -> Difference:
        """Return this difference with the two workers exchanged."""
        return self._replace(first=self.second, second=self.first)


def first_difference(first: Groups, second: Groups, but: Collection[str] = ()) -> Difference | None:
    """Return the first hyperparameter that differs, or None. Keys in `but` are not compared."""
    if len(first) != len(second):
        return Difference(min(len(first), len(second)), "params", len(first), len(second))
    for index, (one, other) in enumerate(zip(first, second, strict=True)):
        for key in sorted({*one, *other} - set(but)):
            if not _same(one.get(key), other.get(key)):
                return Difference(index, key, one.get(key), other.get(key))
    return None


def unscheduled_difference(first: Groups, second: Groups) -> Difference | None:
    """Return the first difference that no learning-rate scheduler explains, or None.

    For workers that go at their own pace: their schedulers may be at different steps. A scheduler marks its
    param groups; then the keys in SCHEDULED are not compared.
    """
    is_scheduled = any("initial_lr" in group for group in (*first, *second))
    return first_difference(first, second, SCHEDULED if is_scheduled else ())


def difference_line(first: str, second: str, step: int, found: Difference) -> str:
    """Describe a difference in one line, with its remedy.

    Args:
        first: the first worker, as "worker 0".
        second: the second worker.
        step: the optimizer step at which they differ.
        found: the difference.
    """
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
    """True if two values are equal. NaN equals NaN, and a tuple equals a list of its elements."""
    if one is other or (type(one) is type(other) and not isinstance(one, (list, tuple)) and one == other):
        return True
    return msgspec.msgpack.encode(one, enc_hook=str) == msgspec.msgpack.encode(other, enc_hook=str)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return repr(tuple(value)) if isinstance(value, list) else repr(value)
