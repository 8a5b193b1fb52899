"""Decoding of bytes from outside, with one line for every error that msgspec raises."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from atoll.core.texts import one_line

_LONGEST = 200  # characters of msgspec's message
_Kind = TypeVar("_Kind")


def decoded(
    decoder: msgspec.msgpack.Decoder[_Kind] | msgspec.json.Decoder[_Kind],
    raw: Any,
    error: type[Exception],
    what: str,
) -> _Kind:
    """Decode `raw`, any buffer. Raises `error`, one line that begins with `what`, for other bytes."""
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as wrong:
        raise error(f"{what}: {one_line(str(wrong), _LONGEST)}") from None
