"""The codecs of `sync.codec` by name: Atoll's own, and those of entry points in the group `atoll.codecs`.

A codec of another package is checked when it is loaded (`exchange/codeccheck.py`).
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

import numpy
import torch
from torch import Tensor

from atoll.axes.codec import Codec
from atoll.core.config import CODEC_GROUP, PLAIN_CODEC
from atoll.core.errors import UserError
from atoll.core.texts import one_line
from atoll.exchange.codeccheck import flaw_of
from atoll.tensors.payload import tensor_of

_MOST_NAMED = 8  # names in a list of codecs in an error


class Float32:
    """The codec that writes float32 values unchanged."""

    name, lossless, block = PLAIN_CODEC, True, 1

    def size(self, elements: int) -> int:
        return 4 * elements

    def encode(self, values: Tensor, into: memoryview, seed: int) -> None:
        del seed
        _writable(into, torch.float32).copy_(values)

    def decode(self, encoded: memoryview, into: Tensor) -> None:
        into.copy_(tensor_of(encoded, torch.float32))


class BFloat16:
    """The codec that writes the upper half of each float32, rounded to the nearest, ties to even.

    NaN stays NaN. A value beyond the largest bfloat16 becomes infinity.
    """

    name, lossless, block = "bfloat16", False, 1

    def size(self, elements: int) -> int:
        return 2 * elements

    def encode(self, values: Tensor, into: memoryview, seed: int) -> None:
        del seed
        _writable(into, torch.bfloat16).copy_(values)

    def decode(self, encoded: memoryview, into: Tensor) -> None:
        into.copy_(tensor_of(encoded, torch.bfloat16))


OWN: dict[str, type[Codec]] = {each.name: each for each in (BFloat16, Float32)}


def codec_named(name: str, *, allowed: str | None = None) -> Codec:
    """Return the codec called `name`.

    Args:
        name: the name of one of Atoll's own codecs, or of an entry point in the group `atoll.codecs`.
        allowed: the only entry point that may be imported, which the operator of this process has named;
            None: any, as the process's own script has chosen it.

    Raises UserError for a codec that does not exist, that may not be imported, or that does not keep its
    contract.
    """
    if name in OWN:
        return OWN[name]()
    if allowed is not None and name != allowed:
        may = repr(allowed) if allowed else "none"
        raise UserError(
            f"sync.codec {one_line(name, 100)!r} is none of Atoll's own ({_listed(OWN)}), and of others this "
            f"process may load {may}: its operator names the one that it may, by --codec NAME"
        )
    found = entry_points(group=CODEC_GROUP)
    entry = next((each for each in found if each.name == name), None)
    if entry is None:
        raise UserError(
            f"sync.codec: there is no codec {one_line(name, 100)!r}: Atoll has {_listed(OWN)}, and installed "
            f"packages have {_listed({each.name for each in found})} (entry points of the group "
            f"{CODEC_GROUP}): install the package that has it on every machine, or correct the name"
        )
    return _loaded(entry)


def _loaded(entry: EntryPoint) -> Codec:
    """Return the codec of an entry point: an object, or a class that is called without arguments."""
    where = f"sync.codec: the codec {entry.name!r} ({entry.value})"
    try:
        made = entry.load()
        made = made() if isinstance(made, type) else made
    except Exception as error:  # code from outside may raise anything
        raise UserError(f"{where} cannot be loaded: {_line(error)}; mend it, or choose another") from error
    wrong = flaw_of(made, entry.name)
    if wrong:
        raise UserError(f"{where} {wrong} (docs/codecs.md)")
    codec: Codec = made
    return codec


def _line(error: Exception) -> str:
    return one_line(f"{type(error).__name__}: {error}", 300)


def _writable(memory: memoryview, dtype: torch.dtype) -> Tensor:
    """Return a tensor over memory that may be written to."""
    if not memory.nbytes:
        return torch.empty(0, dtype=dtype)
    return torch.from_numpy(numpy.frombuffer(memory, numpy.uint8)).view(dtype)


def _listed(names: object) -> str:
    texts = [repr(each) for each in sorted(names)]  # type: ignore[call-overload]
    more = len(texts) - _MOST_NAMED
    return ", ".join(texts[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "") or "none"
