"""Nested state as JSON and named tensors; a round trip gives equal dicts, lists, tuples and numbers.

A value that JSON lacks becomes an object with the key "$": {"$": "tuple", "items": [...]}. Unlike a pickle,
the result cannot run code when it is read.
"""

from __future__ import annotations

import base64
import collections
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atoll.core.errors import CheckpointError
from atoll.tensors.dtypes import dtype_named, name_of_dtype
from atoll.tensors.tensorfile import as_complex, check_tensor, storage_key
from atoll.tensors.wrapped import class_named, flattened, is_wrapped, made_of, name_of

_MAPPINGS: dict[str, Callable[[list[tuple[Any, Any]]], dict[Any, Any]]] = {
    "dict": dict,
    "OrderedDict": collections.OrderedDict,
    "Counter": lambda items: collections.Counter(dict(items)),
}
_ALLOWED = "numbers, text, bytes, None, lists, tuples, dicts, tensors, dtypes and NumPy arrays"


class Encoder:
    """Turns one tree into JSON values, and collects its tensors in `tensors`, named after their places."""

    def __init__(self, *, only_checks: bool = False) -> None:
        """With `only_checks`, copy nothing, and name places in Python's form ("state['step']")."""
        self._only_checks = only_checks
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[object, str] = {}  # storage keys: a tensor that occurs twice is stored once

    def encode(self, value: object, where: str) -> Any:
        """Return the JSON value for `value`, whose place in the tree is `where` ("state.0.step").

        Raises CheckpointError, naming the place, for a value that a checkpoint cannot hold.
        """
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float and isinstance(value, float):
            return value if math.isfinite(value) else {"$": "float", "value": repr(value)}
        if kind is list and isinstance(value, list):
            return [self.encode(item, self._inside(where, i)) for i, item in enumerate(value)]
        if kind in (tuple, torch.Size) and isinstance(value, tuple):
            items = [self.encode(item, self._inside(where, i)) for i, item in enumerate(value)]
            return {"$": "tuple", "items": items}
        if kind in (dict, collections.OrderedDict, collections.Counter) and isinstance(value, dict):
            return self._mapping(value, where)
        if isinstance(value, Tensor):
            return self._tensor(value, where)
        if isinstance(value, torch.dtype):
            return {"$": "dtype", "name": name_of_dtype(value)}
        if kind is bytes and isinstance(value, bytes):
            if self._only_checks:
                return None
            return {"$": "bytes", "data": base64.b64encode(value).decode()}
        if isinstance(value, (np.ndarray, np.generic)):
            return self._array(value, where)
        raise CheckpointError(
            f"{where}: {_described(value)} cannot be saved; a checkpoint holds {_ALLOWED}: "
            "leave it out of the state, or give it as one of these"
        )

    def _mapping(self, value: Mapping[Any, Any], where: str) -> Any:
        items = []
        for key, item in value.items():
            if type(key) not in (str, int):
                raise CheckpointError(
                    f"{where}: the key {key!r} is {_described(key)}; keys are text or whole numbers"
                )
            items.append((key, self.encode(item, self._inside(where, key))))
        if type(value) is dict and all(type(key) is str for key, _ in items) and "$" not in value:
            return dict(items)
        return {"$": type(value).__name__, "items": [list(item) for item in items]}

    def _inside(self, where: str, key: str | int) -> str:
        return f"{where}[{key!r}]" if self._only_checks else f"{where}.{key}"

    def _tensor(self, value: Tensor, where: str) -> Any:
        if is_wrapped(value):
            return self._wrapped(value, where)
        if value.is_sparse:
            return self._sparse(value.detach().coalesce(), where)
        check_tensor(value, where)
        if self._only_checks:
            return None
        key = storage_key(value)
        if key not in self._names:
            name, copies = where, 1
            while name in self.tensors:  # keys with dots can give two places one name
                copies += 1
                name = f"{where}#{copies}"
            self._names[key] = name
            self.tensors[name] = value
        kind = "complex" if value.is_complex() else "tensor"
        return {"$": kind, "name": self._names[key]}

    def _sparse(self, value: Tensor, where: str) -> Any:
        """Return the JSON value for a coalesced tensor of indices and values, such as SGD's momentum where
        gradients are sparse."""
        parts = {"indices": value.indices(), "values": value.values()}
        encoded = {key: self.encode(part, self._inside(where, key)) for key, part in parts.items()}
        return {"$": "sparse", "shape": list(value.shape), **encoded}

    def _wrapped(self, value: Tensor, where: str) -> Any:
        """Return the JSON value for a tensor that is made of other tensors, such as an 8-bit state."""
        parts, context = flattened(value)
        try:
            name = name_of(type(value))
        except ValueError as error:
            raise CheckpointError(f"{where}: {error}") from None
        return {
            "$": "wrapped",
            "class": name,
            "shape": list(value.shape),
            "stride": list(value.stride()),
            "parts": {key: self.encode(part, self._inside(where, key)) for key, part in parts.items()},
            "context": self.encode(context, where),
        }

    def _array(self, value: Any, where: str) -> Any:
        dtype = value.dtype
        if dtype.kind not in "biufcSU":
            raise CheckpointError(f"{where}: a NumPy array of dtype {dtype} cannot be saved")
        if self._only_checks:
            return None
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        return {"$": kind, "dtype": dtype.str, "shape": list(value.shape), "data": data}


def check_encodable(value: object, where: str) -> None:
    """Raise CheckpointError, naming the place, if `Encoder.encode` would refuse `value`; copies nothing."""
    Encoder(only_checks=True).encode(value, where)


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the tree that `Encoder.encode` made `value` from, with `tensors` by name.

    Raises ValueError or KeyError for other JSON.
    """
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "$" not in value:
        return {key: decode(item, tensors) for key, item in value.items()}
    kind = value["$"]
    if kind == "tuple":
        return tuple(decode(item, tensors) for item in value["items"])
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]([(key, decode(item, tensors)) for key, item in value["items"]])
    if kind == "float":
        return float(value["value"])
    if kind == "bytes":
        return base64.b64decode(value["data"], validate=True)
    if kind == "tensor":
        return tensors[value["name"]]
    if kind == "complex":
        return as_complex(tensors[value["name"]])
    if kind == "sparse":
        indices, values = decode(value["indices"], tensors), decode(value["values"], tensors)
        return torch.sparse_coo_tensor(indices, values, value["shape"], check_invariants=True).coalesce()
    if kind == "wrapped":
        parts = {key: decode(part, tensors) for key, part in value["parts"].items()}
        shape, context = torch.Size(value["shape"]), decode(value["context"], tensors)
        return made_of(_class_named(value["class"]), parts, context, shape, tuple(value["stride"]))
    if kind == "dtype":
        return dtype_named(value["name"])
    if kind in ("array", "scalar"):
        return _decoded_array(value)
    raise ValueError(f"a value of the unknown kind {kind!r}")


def _class_named(name: str) -> type[Tensor]:
    try:
        return class_named(name)
    except ValueError as error:
        raise CheckpointError(f"it has {error}") from None


def _decoded_array(value: Mapping[str, Any]) -> Any:
    dtype = np.dtype(value["dtype"])
    if dtype.kind not in "biufcSU":
        raise ValueError(f"a NumPy array of dtype {dtype}")
    data = base64.b64decode(value["data"], validate=True)
    array = np.frombuffer(data, dtype=dtype).reshape(value["shape"]).copy()
    return array if value["$"] == "array" else array[()]


def _described(value: object) -> str:
    if callable(value) and hasattr(value, "__name__"):
        return f"the function or class {value.__name__}"
    name = type(value).__qualname__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
