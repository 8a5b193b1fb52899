"""Decoding of bytes from outside, with one line for every error that msgspec raises; from any thread.

msgspec looks into a type when it is first decoded, and two threads that do so at once with one type crash the
process (0.22.0, tests/unit/test_decoding.py). So a decoder is made when its module is imported, or here, by
one thread at a time.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

from atoll.core.texts import one_line

_LONGEST = 200  # characters of msgspec's message
_Kind = TypeVar("_Kind")
_looking = threading.Lock()  # into types
_decoders: dict[tuple[Any, Any], Any] = {}  # by what makes them, and the type


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


def from_json(raw: Any, kind: type[_Kind]) -> _Kind:
    """Decode JSON as an object of `kind`. Raises msgspec.DecodeError for other bytes."""
    return json_decoder(kind).decode(raw)


def from_msgpack(raw: Any, kind: type[_Kind]) -> _Kind:
    """Decode MessagePack, any buffer, as an object of `kind`. Raises msgspec.DecodeError for other bytes."""
    decoder: msgspec.msgpack.Decoder[_Kind] = _decoder(msgspec.msgpack.Decoder, kind)
    return decoder.decode(raw)


def converted(value: Any, kind: type[_Kind], *, strict: bool = True) -> _Kind:
    """Return the plain `value` (of dicts, lists, numbers, text) as an object of `kind`. Not `strict`: text
    counts as the number that it shows. Raises msgspec.ValidationError for another value."""
    json_decoder(kind)
    return msgspec.convert(value, kind, strict=strict)


def json_decoder(kind: type[_Kind]) -> msgspec.json.Decoder[_Kind]:
    """Return the decoder of JSON for `kind`."""
    decoder: msgspec.json.Decoder[_Kind] = _decoder(msgspec.json.Decoder, kind)
    return decoder


def _decoder(make: Any, kind: Any) -> Any:
    found = _decoders.get((make, kind))
    if found is None:
        with _looking:
            found = _decoders[make, kind] = make(kind)
    return found
