"""Safe forms of text for files and terminals: exceptions, keys and paths of a script may hold anything."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


def writable(text: str) -> str:
    """Return `text` as a plain str that UTF-8 can hold: a lone surrogate becomes its escape, "\\udc80".

    Python's file names hold lone surrogates where their bytes are no UTF-8 (PEP 383).
    """
    return str.encode(text, "utf-8", "backslashreplace").decode("utf-8")


def one_line(text: str, most: int) -> str:
    """Return `text` in one printable line of at most about `most` characters.

    Of several lines the first and the last are kept: the last line of a nested traceback has its error.
    Control characters become escapes, for they would move the terminal's cursor.
    """
    lines = [line for line in (each.strip() for each in shortened(text, 4 * most).splitlines()) if line]
    kept = lines if len(lines) < 2 else [lines[0], *(["..."] if len(lines) > 2 else []), lines[-1]]
    shown = "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in " ".join(kept)
    )
    return shown if len(shown) <= most else f"{shown[: most * 2 // 3]} ... {shown[-(most // 3) :]}"


def shortened(text: str, most: int, rest: str = "") -> str:
    """Return `text`, or its beginning and its end if it has more than `most` characters.

    `rest` names the place of the whole text, such as "the log has all".
    """
    if len(text) <= most:
        return writable(text)
    head, tail = most // 2, most - most // 2
    left_out = f"{len(text) - most:,} characters left out{'; ' if rest else ''}{rest}"
    return writable(f"{text[:head]}\n... ({left_out}) ...\n{text[-tail:]}")


def nearest(word: str, known: Sequence[str]) -> str:
    """Return `; did you mean 'x'?` for the known word most like `word`, or ""."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""
