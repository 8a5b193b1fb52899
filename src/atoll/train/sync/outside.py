"""Strategies of other packages: the search for them, and the coding of values for them."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points

import torch
from torch import Tensor

from atoll.axes.codec import Codec
from atoll.core.config import SYNCHRONIZERS
from atoll.core.errors import RunError, UserError
from atoll.core.texts import one_line
from atoll.exchange.coding import Coding, bytes_of
from atoll.exchange.synchronizer import Synchronizer
from atoll.tensors.payload import bytes_in
from atoll.wire.base import WireError


def synchronizer_named(name: str) -> Callable[[], Synchronizer]:
    """Return the maker of the synchronizer called `name`, which an installed package offers.

    Raises UserError if there is none, if it cannot be imported or made, or if it is no Synchronizer.
    """
    entry = next((each for each in entry_points(group=SYNCHRONIZERS) if each.name == name), None)
    if entry is None:
        raise UserError(
            f"run.strategy: no installed package has a strategy {name!r} (entry points of the group "
            f"{SYNCHRONIZERS}): install the package that has it for every worker, or correct the name"
        )
    where = f"run.strategy: strategy {name!r} ({entry.value})"
    try:
        make = entry.load()
        made = make()
    except Exception as error:  # code from outside may raise anything
        line = one_line(f"{type(error).__name__}: {error}", 300)
        raise UserError(f"{where} cannot be made: {line}; mend it, or choose another") from error
    methods = [each for each in dir(Synchronizer) if not each.startswith("_")]
    missing = [each for each in methods if not callable(getattr(made, each, None))]
    if missing:
        raise UserError(
            f"{where} is no Synchronizer: it lacks {', '.join(missing)} (docs/reference/synchronizer.md)"
        )
    found: Callable[[], Synchronizer] = make
    return found


class Coded:
    """The coding of values by the run's codec, which takes float32. Values of another dtype are written as
    they lie.

    See `exchange/synchronizer.py`: Coder.
    """

    def __init__(self, codec: Codec) -> None:
        self._coding = Coding(codec)

    def encode(self, values: Tensor, seed: int) -> Tensor:
        flat = values.detach().reshape(-1).contiguous()
        if self._coding.writes(_named(values.dtype)):
            return bytes_in(self._coding.encode(flat, seed))
        return flat.view(torch.uint8)

    def decode(self, payload: Tensor, like: Tensor) -> Tensor:
        size = self._coding.size(like.numel(), _named(like.dtype))
        if payload.numel() != size:
            raise RunError(
                f"a contributor sent {payload.numel()} bytes, and {like.numel()} values of {like.dtype} take "
                f"{size} by sync.codec {self._coding.name!r}"
            )
        if self._coding.writes(_named(like.dtype)):
            try:
                flat = self._coding.decode(bytes_of(payload.contiguous()), like.numel())
            except WireError as error:
                raise RunError(f"a contributor sent {error}") from None
        else:
            flat = payload.clone().view(like.dtype)
        return flat.reshape(like.shape)


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
