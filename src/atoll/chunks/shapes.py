"""Reader of a file with a model's shapes, which lets the layout be found without the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from atoll.chunks.specs import ParameterSpec, itemsize
from atoll.core.errors import PrepareError, UserError

_LARGEST_DIMENSION = 2**48
_MOST_DIMENSIONS = 64
_FIELDS = {
    "name": str,
    "shape": list,
    "dtype": str,
    "feature": str,
    "trainable": bool,
    "settings": str,
    "strides": list,
}
_REQUIRED = ("name", "shape", "dtype")
_WORDS = {str: "a text", list: "a list of whole numbers", bool: "true or false"}


def parse_shapes(data: bytes, file: str) -> list[ParameterSpec]:
    """Return the parameters in `data`, a JSON list of objects in the order of registration.

    An object has `name`, `shape` (a list of whole numbers, 0 or more) and `dtype` (torch's name), and may
    have `feature` (the process group that shards the parameter), `trainable` (by default true), `settings`
    (the key of its optimizer settings) and `strides` (in elements; none for a contiguous parameter). Raises
    UserError, one line that names `file` and the entry, counted from 1.
    """
    try:
        entries = json.loads(
            data.decode("utf-8"), parse_constant=_no_constant, object_pairs_hook=_without_twice
        )
    except PrepareError as error:
        raise UserError(f"{file}: {error}") from None
    except RecursionError:
        raise UserError(f"{file}: nested too deeply; a list of objects is right") from None
    except ValueError as error:
        raise UserError(f"{file} is not JSON: {' '.join(str(error).split())}") from None
    if not isinstance(entries, list):
        raise UserError(f"{file}: must be a list of parameters, with name, shape and dtype each")
    if not entries:
        raise UserError(f"{file}: the list is empty; give at least one parameter")
    specs: list[ParameterSpec] = []
    seen: dict[str, int] = {}
    for number, entry in enumerate(entries, 1):
        try:
            spec = _spec(entry)
            if spec.name in seen:
                raise PrepareError(
                    f"the name is that of entry {seen[spec.name]} too; give a tied parameter once"
                )
        except PrepareError as error:
            raise UserError(f"{file}: entry {number}{_named(entry)}: {error}") from None
        seen[spec.name] = number
        specs.append(spec)
    return specs


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is no number there")


def _without_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        of = f", of name {str(found['name'])[:200]!r}" if "name" in found else ""
        raise PrepareError(f"{twice[:200]!r} is given twice in one object{of}; give it once")
    return found


def _named(entry: object) -> str:
    name = entry.get("name") if isinstance(entry, dict) else None
    return f" ({name[:200]!r})" if isinstance(name, str) else ""


def _spec(entry: object) -> ParameterSpec:
    if not isinstance(entry, dict):
        raise PrepareError("must be an object with name, shape and dtype")
    for key in _REQUIRED:
        if key not in entry:
            raise PrepareError(f"{key!r} is missing")
    for key, value in entry.items():
        if key not in _FIELDS:
            raise PrepareError(f"{key[:200]!r} is unknown; known are {', '.join(_FIELDS)}")
        if not isinstance(value, _FIELDS[key]):
            raise PrepareError(f"{key} must be {_WORDS[_FIELDS[key]]}")
    if not entry["name"]:
        raise PrepareError("name is empty")
    itemsize(entry["dtype"])
    shape, strides = entry["shape"], entry.get("strides", [])
    _check_sizes("shape", shape)
    _check_sizes("strides", strides)
    if strides and len(strides) != len(shape):
        raise PrepareError(f"strides has {len(strides)} values, and shape {len(shape)}; give as many")
    fields: Mapping[str, Any] = {**entry, "shape": tuple(shape), "strides": tuple(strides)}
    return ParameterSpec(**fields)


def _check_sizes(what: str, sizes: list[object]) -> None:
    """Raise PrepareError if `sizes`, an entry's `what`, are no sizes."""
    if len(sizes) > _MOST_DIMENSIONS:
        raise PrepareError(f"{what} has {len(sizes)} dimensions; at most {_MOST_DIMENSIONS}")
    for size in sizes:
        if not isinstance(size, int) or isinstance(size, bool):
            raise PrepareError(f"{what} holds {_shortened(json.dumps(size))}; sizes are whole numbers")
        if size < 0:
            raise PrepareError(f"{what} holds {_shortened(str(size))}; sizes are 0 or more")
        if size > _LARGEST_DIMENSION:
            most = f"sizes are at most {_LARGEST_DIMENSION}"
            raise PrepareError(f"{what} holds {_shortened(str(size))}; {most}")


def _shortened(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]}..."
