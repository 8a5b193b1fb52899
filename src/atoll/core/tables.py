"""Reading of one table of a TOML file key by key; each error is one line that names the place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from atoll.core.errors import ConfigError
from atoll.core.texts import nearest
from atoll.core.units import format_seconds, parse_seconds

_Number = TypeVar("_Number", int, float)
_LONGEST_SHOWN = 60  # characters of a value, in an error
_LONGEST_QUANTITY = 40  # characters of a number with its unit


class Table:
    """One table of a file, named `place` in errors: `link 2 (paris - berlin)`; empty for the whole file.

    Raises ConfigError for a key that is not `known`; so does each method for a wrong value.
    """

    def __init__(self, values: Any, place: str, known: Sequence[str]) -> None:
        self.values: dict[str, Any] = values
        self.place = place
        if not isinstance(values, dict):
            raise self.error("", f"{shown(values)} stands where a table should")
        for key in values:
            if key not in known:
                hint = nearest(key, known) or f"; known: {', '.join(known)}"
                raise self.error("", f"no key {shown(key)}{hint}")

    def error(self, key: str, message: str) -> ConfigError:
        """Return the error to raise about `key`, or about the whole table if `key` is empty."""
        return ConfigError(": ".join(part for part in (self.place, key, message) if part))

    def need(self, key: str, message: str) -> Any:
        """Return the key's value; raises ConfigError with `message` if it is missing."""
        if key not in self.values:
            raise self.error("", message)
        return self.values[key]

    def given(self, key: str) -> str:
        """Return the key's value as in the file, for an error."""
        return shown(self.values.get(key, 0)).strip("'")

    def tables(self, key: str, prefix: str = "") -> list[Any]:
        """Return the entries of `[[key]]`."""
        values = self.values.get(key, [])
        if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
            raise self.error(key, f"write each one as [[{prefix}{key}]], in two brackets, and its keys below")
        return values

    def integer(self, key: str, default: int, low: int, high: int) -> int:
        """Return a whole number from `low` to `high`."""
        value = self.values.get(key, default)
        if type(value) is not int or not low <= value <= high:
            bounds = f"{low} to {'2^63 - 1' if high == 2**63 - 1 else high}"
            raise self.error(key, f"{shown(value)} is not a whole number from {bounds}")
        return value

    def number(self, key: str, default: float, low: float, high: float, hint: str) -> float:
        """Return a number from `low` to `high`; `hint` ends the error with the right form."""
        value = self.values.get(key, default)
        if type(value) not in (int, float) or not low <= value <= high:  # NaN is in no range
            raise self.error(key, f"{shown(value)} {hint}")
        return float(value)

    def probability(self, key: str) -> float:
        """Return a number from 0 to 1, by default 0."""
        hint = "is not a probability; write a number from 0 to 1 (3 % is 0.03)"
        return self.number(key, 0.0, 0.0, 1.0, hint)

    def span(self, key: str, high: float, default: float = 0.0) -> float:
        """Return a span of time, from 0 to `high` seconds."""
        if key not in self.values:
            return default
        seconds = self.quantity(key, parse_seconds)
        if seconds > high:
            raise self.error(key, f"{self.given(key)} is too long; at most {format_seconds(high)} can be had")
        return seconds

    def quantity(self, key: str, parse: Callable[[str | float], _Number]) -> _Number:
        """Return `parse` of the key's value, which must be there."""
        value = self.values[key]
        if type(value) is str:
            value = value if len(value) <= _LONGEST_QUANTITY else f"{value[: _LONGEST_QUANTITY - 4]} ..."
        elif type(value) not in (int, float) or abs(value) > 1e30:
            value = shown(value)  # no parser takes this text, and the error says what would be right
        try:
            return parse(value)
        except ConfigError as error:
            raise self.error(key, str(error)) from None


def shown(value: Any) -> str:
    """Return a value from the file as a text that is short enough for a line."""
    if type(value) is int and abs(value) >= 10**30:  # Python refuses to print 5000 digits
        return "a number of over 30 digits"
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 4]} ..."
