"""Replacements for characters that an output cannot show: a similar character, or the code."""

from __future__ import annotations

import codecs

SHOWN = "atoll.shown"  # the error handler of encodings that this module registers
_PLAIN = {"·": "-", "…": "...", "—": "-", "×": "x", "µ": "u", "±": "+-", "→": "->"}


def in_place_of(error: UnicodeError) -> tuple[str | bytes, int]:
    """Replace the characters that an encoding lacks.

    Python keeps a byte of a file name that is not UTF-8 as a lone surrogate; `\\xff` stands for the byte.
    """
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_shown, error.object[error.start : error.end])), error.end


def _shown(character: str) -> str:
    if character in _PLAIN:
        return _PLAIN[character]
    if "\udc80" <= character <= "\udcff":
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("ascii", "backslashreplace").decode("ascii")


codecs.register_error(SHOWN, in_place_of)


def encoded(text: str, encoding: str = "utf-8") -> bytes:
    """Encode `text` for a person. A character that the encoding lacks never raises."""
    return text.encode(encoding, SHOWN)
