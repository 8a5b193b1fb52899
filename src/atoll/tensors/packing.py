"""Optimizer states of any shape as one run of bytes and plain words.

An optimizer that steps whole tensors may keep row and column factors, lists of matrices, codes with scales,
numbers and None. `pack` lays all tensors of several parameters' states side by side; the words have the rest,
and say of each tensor its dtype, its shape and its place. Nothing is pickled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from atoll.core.errors import UserError
from atoll.tensors.dtypes import dtype_named, name_of_dtype
from atoll.tensors.lazy import LazyTensor, read_whole
from atoll.tensors.wrapped import class_named, flattened, is_wrapped, made_of, moved_to, name_of

PACKED = "packed"  # the key of the bytes, beside the keys of element-wise states
Words: TypeAlias = list[dict[str, Any]]  # for each parameter, its state, with words in place of tensors

_ALIGNMENT = 64  # bytes
_PLAIN = (bool, int, str, type(None))
_SEQUENCES = {"list": list, "tuple": tuple}
_KINDS = (Tensor, nn.Parameter)  # a subclass has more than its values


def pack(states: Sequence[dict[str, Any]]) -> tuple[Tensor, Words]:
    """Return the states' tensors as one tensor of bytes, and their words.

    Raises UserError for a state that is neither a plain tensor, one that is made of plain tensors
    (tensors/wrapped.py), a dtype, a number, text, None, nor a list, tuple or dict of these.
    """
    found: list[tuple[int, Tensor]] = []
    end = 0

    def words_of(value: Any, name: str) -> Any:
        nonlocal end
        value = read_whole(value)
        if type(value) in _KINDS and value.layout == torch.strided:
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = start + value.numel() * value.element_size()
            found.append((start, value))
            return {"tensor": name_of_dtype(value.dtype), "shape": list(value.shape), "at": start}
        if is_wrapped(value):
            parts, context = flattened(value)
            try:
                class_ = name_of(type(value))
            except ValueError as error:
                raise UserError(f"the optimizer keeps in its state {name!r} {error}") from None
            return {
                "wrapped": class_,
                "shape": list(value.shape),
                "stride": list(value.stride()),
                "parts": {key: words_of(part, name) for key, part in parts.items()},
                "context": words_of(context, name),
            }
        if isinstance(value, torch.dtype):
            return {"dtype": name_of_dtype(value)}
        if isinstance(value, torch.Size):
            value = tuple(value)
        if type(value) is float:  # JSON has no infinity
            return value if math.isfinite(value) else {"float": repr(value)}
        if type(value) in _PLAIN:
            return value
        for kind, made in _SEQUENCES.items():
            if type(value) is made:
                return {kind: [words_of(each, name) for each in value]}
        if isinstance(value, dict) and all(isinstance(key, (str, int)) for key in value):
            return {"dict": [[key, words_of(each, name)] for key, each in value.items()]}
        raise UserError(
            f"the optimizer keeps a {type(value).__name__} in its state {name!r}, which cannot be sent to "
            "another process; let it keep tensors, numbers, text, None, or lists and dicts of these"
        )

    words = [{key: words_of(value, key) for key, value in state.items()} for state in states]
    flat = torch.zeros(end, dtype=torch.uint8)
    for start, tensor in found:
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        flat[start : start + raw.numel()].copy_(raw)
    return flat, words


def unpack(flat: Tensor, words: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the states that `pack` has packed, with tensors of their own, on the CPU.

    Raises UserError for words that do not fit the bytes.
    """
    left = flat.numel()

    def read(name: str, shape: list[Any], start: int) -> Tensor:
        nonlocal left
        left -= _nbytes(name, shape)
        if left < 0:  # words that name one run many times would take memory
            raise UserError(f"no state of an optimizer: more than the {flat.numel()} bytes that have come")
        return _tensor(lambda: flat, name, shape, start)

    return _unpacked(words, read)


def unpack_lazily(
    read: Callable[[], Tensor], words: Sequence[Mapping[str, Any]], device: torch.device
) -> list[dict[str, Any]]:
    """Return the states that `pack` has packed, with tensors that are read when they are used.

    Args:
        read: returns the packed bytes.
        device: of the tensors; those of no dimension are on the CPU, as torch's step counts.

    Raises UserError for words that are no state. A tensor that does not fit the bytes raises it when it is
    read.
    """

    def lazy(name: str, shape: list[Any], start: int) -> Tensor:
        where = device if shape else torch.device("cpu")
        return LazyTensor(
            lambda: _tensor(read, name, shape, start).to(where), shape, _dtype(name, shape), where
        )

    return _unpacked(words, lazy)


def _unpacked(
    words: Sequence[Mapping[str, Any]],
    tensor: Callable[[str, list[Any], int], Tensor],
) -> list[dict[str, Any]]:
    """Return the states with these words; `tensor` makes a tensor of a dtype's name, a shape and a place."""

    def value_of(said: Any) -> Any:
        match said:
            case {"tensor": str(name), "shape": list(shape), "at": int(start)}:
                return tensor(name, shape, start)
            case {
                "wrapped": str(name),
                "shape": shape,
                "stride": stride,
                "parts": dict(parts),
                "context": told,
            }:
                inside = {key: value_of(part) for key, part in parts.items()}
                return made_of(class_named(name), inside, value_of(told), torch.Size(shape), tuple(stride))
            case {"dtype": str(name)}:
                return dtype_named(name)
            case {"float": str(text)} if text in ("inf", "-inf", "nan"):
                return float(text)
            case {"list": list(each)}:
                return [value_of(one) for one in each]
            case {"tuple": list(each)}:
                return tuple(value_of(one) for one in each)
            case {"dict": list(pairs)}:
                return {key: value_of(one) for key, one in pairs}
            case bool() | int() | float() | str() | None:
                return said
        raise UserError(f"no state of an optimizer: {str(said)[:60]}")

    try:
        return [{key: value_of(said) for key, said in state.items()} for state in words]
    except (AttributeError, RecursionError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"no state of an optimizer: {error}") from None


def moved(value: Any, device: torch.device) -> Any:
    """Return a state with its tensors on `device`. Tensors of no dimension stay, as torch's step counts."""
    if isinstance(value, Tensor):
        return moved_to(value, device) if value.ndim else value
    if type(value) in (list, tuple):
        return type(value)(moved(each, device) for each in value)
    return {key: moved(each, device) for key, each in value.items()} if type(value) is dict else value


def _dtype(name: str, shape: list[Any]) -> torch.dtype:
    if not all(isinstance(size, int) and size >= 0 for size in shape):
        raise UserError(f"no state of an optimizer: {name[:40]!r} of shape {str(shape)[:60]}")
    try:
        return dtype_named(name)
    except ValueError as error:
        raise UserError(f"no state of an optimizer: {error}") from None


def _nbytes(name: str, shape: list[Any]) -> int:
    return int(math.prod(shape)) * _dtype(name, shape).itemsize


def _tensor(read: Callable[[], Tensor], name: str, shape: list[Any], start: int) -> Tensor:
    dtype, flat = _dtype(name, shape), read()
    end = start + math.prod(shape) * dtype.itemsize
    if not 0 <= start <= end <= flat.numel():
        raise UserError(f"a state of {end} bytes, where {flat.numel()} have come")
    return flat[start:end].clone().view(dtype).reshape(shape)
