"""Checks of the codec contract (`axes/codec.py`: Codec) on a probe: a codec may be foreign code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch import Tensor

from atoll.core.texts import one_line
from atoll.exchange.seeds import seed_of

MOST_BLOCK = 2**16  # elements
MOST_GROWTH = 4  # times the bytes of float32
_ROUNDS = 128  # contributions of one gradient, with error feedback
_MOST_HELD = 64.0  # gradients of which an element may be held back after them


class _FlawError(Exception):
    """A codec's fault, in words that follow the codec's name."""


def flaw_of(codec: Any, name: str) -> str:
    """Return the first breach of the contract, in words that follow the codec's name; empty for none."""
    try:
        _check_shape(codec, name)
        for each in (
            _check_sizes,
            _check_bytes,
            _check_values,
            _check_blocks,
            _check_not_finite,
            _check_held,
        ):
            each(codec)
    except _FlawError as flaw:
        return str(flaw)
    except Exception as error:  # code from outside may raise anything
        return f"failed on a probe: {one_line(f'{type(error).__name__}: {error}', 300)}"
    return ""


def _check_shape(codec: Any, name: str) -> None:
    for method in ("size", "encode", "decode"):
        if not callable(getattr(codec, method, None)):
            raise _FlawError(f"has no method {method!r}: it is no codec")
    said = getattr(codec, "name", None)
    if said != name:
        raise _FlawError(f"says that its name is {said!r}: give it the entry point's name")
    if not isinstance(getattr(codec, "lossless", None), bool):
        raise _FlawError("must say by lossless, True or False, whether decode gives back every bit")
    block = getattr(codec, "block", None)
    if type(block) is not int or not 1 <= block <= MOST_BLOCK:
        raise _FlawError(f"has block = {block!r}: the elements of a block are from 1 to {MOST_BLOCK}")


def _lengths(block: int) -> list[int]:
    """Return numbers of elements around the ends of blocks, odd ones among them."""
    return sorted({1, 2, 3, max(1, block - 1), block, block + 1, 2 * block, 3 * block + block // 2 + 1})


def _check_sizes(codec: Any) -> None:
    whole = codec.size(codec.block)
    for elements in [0, *_lengths(codec.block)]:
        size = codec.size(elements)
        if type(size) is not int:
            raise _FlawError(f"has a size of {elements} elements that is no int: {size!r}")
        blocks, rest = divmod(elements, codec.block)
        part = codec.size(rest) if rest else 0
        if size != blocks * whole + part or (rest and not 1 <= part <= whole):
            raise _FlawError(
                f"takes {size} bytes for {elements} elements, and its blocks of {codec.block} take {whole} "
                f"each and {part} for the last {rest}: a run has the bytes of its blocks, one after the other"
            )
    if not 1 <= whole <= MOST_GROWTH * 4 * codec.block + 64:
        raise _FlawError(f"takes {whole} bytes for a block of {codec.block} elements: 4 each is float32")


def _probe(elements: int, seed: int = 0) -> Tensor:
    """Return (elements,) numbers of many sizes and both signs, with some zeros."""
    index = torch.arange(elements, dtype=torch.float64) + 17 * seed + 1
    values = torch.sin(index * 12.9898) * torch.exp(4 * torch.cos(index * 0.37))
    values[torch.arange(elements) % 7 == 3] = 0
    return values.to(torch.float32)


def encoded(codec: Any, values: Tensor, seed: int = 0, fill: int = 0) -> memoryview:
    """Return the encoded bytes of a run, in memory that held `fill` in each byte before."""
    memory = numpy.full(codec.size(values.numel()), fill, numpy.uint8)
    codec.encode(values.clone(), memory.data, seed)
    return memory.data


def decoded(codec: Any, raw: memoryview, elements: int) -> Tensor:
    into = torch.full((elements,), 7.0)
    codec.decode(raw, into)
    return into


def _check_bytes(codec: Any) -> None:
    for elements in _lengths(codec.block):
        for seed in (0, 1):
            values = _probe(elements)
            if bytes(encoded(codec, values, seed)) != bytes(encoded(codec, values, seed, fill=0xFF)):
                raise _FlawError(
                    f"writes other bytes for the same {elements} elements and seed, or not all of them: what "
                    "is sent twice must be the same"
                )


def _check_values(codec: Any) -> None:
    for elements in _lengths(codec.block):
        values = _probe(elements)
        found = decoded(codec, encoded(codec, values), elements)
        if codec.lossless and not torch.equal(found.view(torch.int32), values.view(torch.int32)):
            raise _FlawError(f"says that it is lossless, and {elements} elements come back with other bits")
        if not found.isfinite().all():
            raise _FlawError(f"reads NaN or infinity where {elements} numbers were written")
        if bool((found[values == 0] != 0).any()):
            raise _FlawError("reads a zero as another number: zeros stand where a parameter has no gradient")


def _check_blocks(codec: Any) -> None:
    elements, block, size = 3 * codec.block, codec.block, codec.size(codec.block)
    raw = encoded(codec, _probe(elements))
    before = decoded(codec, raw, elements)
    for lost in range(3):
        rest = memoryview(bytearray(raw))
        rest[lost * size : (lost + 1) * size] = bytes(size)
        others = torch.arange(elements) // block != lost
        if not torch.equal(before[others], decoded(codec, rest, elements)[others]):
            raise _FlawError(
                f"reads other blocks otherwise where block {lost} is lost: each block of {block} elements "
                "must be readable by itself"
            )


def _places(block: int) -> Iterator[int]:
    yield from sorted({0, min(1, block - 1), block // 2, block - 1})


def _check_not_finite(codec: Any) -> None:
    block = codec.block
    for wrong in (float("nan"), float("inf"), float("-inf")):
        for place in _places(block):
            for seed in (0, 1):
                values = _probe(2 * block)
                values[block + place] = wrong
                found = decoded(codec, encoded(codec, values, seed), 2 * block)
                if found[block:].isfinite().all():
                    raise _FlawError(
                        f"hides {wrong}: a block that holds it, at element {place}, is read as finite; let "
                        "the block be read as one with NaN"
                    )


def _check_held(codec: Any) -> None:
    """Check that a codec with error feedback writes everything in the end: what is held back of an element
    stays bounded.

    Gradients that come only in each second or third contribution are checked too.
    """
    gradient = _probe(2 * codec.block + 1).sign() + 0.5  # -0.5, 0.5 or 1.5
    for stride in (1, 2, 3):
        held = torch.zeros_like(gradient)
        for number in range(0, stride * _ROUNDS, stride):
            added = gradient + held
            held = added - decoded(codec, encoded(codec, added, seed_of(number)), added.numel())
        most = float((held / gradient).abs().max())
        if not most <= _MOST_HELD:
            raise _FlawError(
                f"does not write all of a gradient in the end: after {_ROUNDS} contributions with error "
                f"feedback an element holds back {most:.0f} gradients; each must have its turn within "
                f"{_MOST_HELD:.0f}"
            )
