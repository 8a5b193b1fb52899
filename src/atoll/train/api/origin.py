"""The signs that tell a session's models apart after a restart: models of equal shapes could load each
other's values.

A module has no name of its own. So a checkpoint records the name that the script gave each model
(`session.prepare(name=...)`), and further signs to compare a restarted script with: the variables that hold
the model, its class, the script's line, and a digest of the model's initial values.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import nn

from atoll.core.errors import CheckpointError
from atoll.core.scriptline import is_script, script_line
from atoll.tensors.torch_compat import own_modules, uncompiled

_MOST_ENTRIES = 64  # the most entries of a container that is searched
_SAMPLED = 16  # values of each parameter in the digest


class Origin(msgspec.Struct, frozen=True):
    """The signs by which a model is recognized after a restart.

    Attributes:
        name: the name that the script gave the model; "" for none.
        held_as: the variables, attributes and keys by which the script reaches the model.
        kind: the model's class.
        line: the script's line that prepared it.
        values: a digest of the values at `session.prepare`; empty if they are not in memory.
    """

    name: str
    held_as: list[str]
    kind: str
    line: str
    values: str


def origin_of(model: nn.Module, name: str) -> Origin:
    """Return the origin of a model that the script is about to prepare."""
    module: nn.Module = uncompiled(model)
    held_as = sorted(
        {held for each in {id(model): model, id(module): module}.values() for held in _names(each)}
    )
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    return Origin(name, held_as, kind, script_line(), _digest(module))


def positions_of(
    saved: Sequence[Origin], present: Sequence[Origin], is_alike: Callable[[int, int], bool], where: str
) -> list[int]:
    """Return each session model's index in the checkpoint: by name if both have names, else by order.

    Raises CheckpointError, whose message begins with `where`, if the names differ, or if two models of equal
    shapes were prepared in another order.

    Args:
        saved: the origins in the checkpoint.
        present: the origins of the session's models.
        is_alike: returns whether two of the session's models, by index, could load each other's values.
        where: the beginning of an error's message.
    """
    by_name = {origin.name: index for index, origin in enumerate(saved) if origin.name}
    named = [origin.name for origin in present if origin.name]
    if by_name and named:
        if sorted(by_name) != sorted(named):
            raise CheckpointError(
                f"{where}: holds the models {_listed(by_name)}, and the session has prepared "
                f"{_listed(named)}; give session.prepare(name=...) the names that were saved"
            )
        unnamed = iter(index for index, origin in enumerate(saved) if not origin.name)
        order = [by_name[origin.name] if origin.name else next(unnamed) for origin in present]
    else:
        order = list(range(len(present)))
    for second, later in enumerate(present):
        for first, earlier in enumerate(present[:second]):
            if (by_name and earlier.name and later.name) or not is_alike(first, second):
                continue
            exchange = _exchange((saved[order[first]], saved[order[second]]), (earlier, later))
            if exchange:
                raise CheckpointError(
                    f"{where}: two models of equal shapes were prepared in another order when it was saved "
                    f"({exchange}), so each would get the other's values; prepare them in the saved order, "
                    "and name them for the next checkpoint: session.prepare(model, optimizer, name=...)"
                )
    return order


_Pair = tuple[Origin, Origin]


def _exchange(saved: _Pair, present: _Pair) -> str:
    """Describe how two models have changed places, by the first sign that tells them apart; empty if they
    have not."""
    for what, sign in (("variables", _variables), ("classes", _class), ("initial values", _values)):
        (was_first, was_second), (first, second) = sign(*saved), sign(*present)
        straight = bool(was_first & first) and bool(was_second & second)
        crossed = bool(was_first & second) and bool(was_second & first)
        if straight != crossed:
            then, now = (f"{min(one)} before {min(other)}" for one, other in (sign(*saved), sign(*present)))
            return f"by their {what}: then {then}, now {now}" if crossed else ""
    lines = [origin.line.rpartition(":") for origin in (*saved, *present)]
    if len({file for file, _, _ in lines}) > 1 or not all(number.isdigit() for _, _, number in lines):
        return ""
    a, b, c, d = (int(number) for _, _, number in lines)
    if (a < b and c > d) or (a > b and c < d):
        return f"by their lines: then {saved[0].line} before {saved[1].line}, now {present[0].line} first"
    return ""


_Sign = tuple[set[str], set[str]]


def _variables(one: Origin, other: Origin) -> _Sign:
    return set(one.held_as) - set(other.held_as), set(other.held_as) - set(one.held_as)


def _class(one: Origin, other: Origin) -> _Sign:
    return ({one.kind}, {other.kind}) if one.kind != other.kind else (set(), set())


def _values(one: Origin, other: Origin) -> _Sign:
    known = one.values and other.values and one.values != other.values
    return ({one.values}, {other.values}) if known else (set(), set())


def _names(model: nn.Module) -> Iterator[str]:
    """Yield the script's names for `model`.

    These are variables in the frames of the script on this thread's stack, and keys and attributes of their
    values.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if is_script(frame.f_code.co_filename):
            for variable, value in list(frame.f_locals.items()):
                if value is model:
                    yield variable
                else:
                    yield from (f"{variable}{inner}" for inner in _inside(value, model))
        frame = frame.f_back


def _inside(holder: object, model: nn.Module) -> Iterator[str]:
    """Yield the keys and attributes by which `holder` holds the model.

    An index in a list is no name: names are there to check the order.
    """
    if type(holder) is dict:
        if len(holder) <= _MOST_ENTRIES:
            yield from (f"[{key!r}]" for key, value in holder.items() if value is model and type(key) is str)
        return
    for attributes in (getattr(holder, "__dict__", None), own_modules(holder)):
        if isinstance(attributes, dict) and len(attributes) <= _MOST_ENTRIES:
            yield from (f".{key}" for key, value in list(attributes.items()) if value is model)


@torch.no_grad()
def _digest(module: nn.Module) -> str:
    checksum = 0
    for parameter in module.parameters():
        if type(parameter) is not nn.Parameter or parameter.is_meta or parameter.is_sparse:
            return ""
        sampled = parameter.detach().flatten()[:_SAMPLED]
        checksum = zlib.crc32(repr(sampled.tolist()).encode(), checksum)
    return f"{checksum:08x}"


def _listed(names: Mapping[str, Any] | Sequence[str]) -> str:
    return " and ".join(repr(name) for name in sorted(names))
