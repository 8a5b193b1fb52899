"""Conditions on one choice of a run: the cells of the table of needs are made of these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from atoll.axes.choices import Choices, defaults


class Condition(Protocol):
    """A test of the choice called `name`."""

    def holds(self, name: str, choices: Choices) -> bool:
        """True where the choice is one that the condition speaks of."""

    def words(self, name: str) -> str:
        """The condition for people, in Markdown: "`sync.lazy` = true"."""


class Is:
    """The choice is one of these values."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def holds(self, name: str, choices: Choices) -> bool:
        return choices[name] in self.values

    def words(self, name: str) -> str:
        return f"`{name}` = {_either(self.values)}"


class IsNot:
    """The choice is none of these values; a fact that nobody gave is none of them either."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def holds(self, name: str, choices: Choices) -> bool:
        return choices[name] not in self.values

    def words(self, name: str) -> str:
        return f"`{name}` other than {_either(self.values)}"


@dataclass(frozen=True)
class Given:
    """Something was given: a number above 0, a text, true."""

    def holds(self, name: str, choices: Choices) -> bool:
        return bool(choices[name])

    def words(self, name: str) -> str:
        return f"`{name}` given"


@dataclass(frozen=True)
class Missing:
    """Nothing was given: the opposite of `Given`."""

    def holds(self, name: str, choices: Choices) -> bool:
        return not choices[name]

    def words(self, name: str) -> str:
        return f"no `{name}`"


@dataclass(frozen=True)
class Changed:
    """A key of the configuration has another value than its default."""

    def holds(self, name: str, choices: Choices) -> bool:
        return bool(choices[name] != defaults()[name])

    def words(self, name: str) -> str:
        return f"`{name}` other than its default"


@dataclass(frozen=True)
class Above:
    """The number is above that of another choice."""

    other: str

    def holds(self, name: str, choices: Choices) -> bool:
        return bool(choices[name] > choices[self.other])

    def words(self, name: str) -> str:
        return f"`{name}` above `{self.other}`"


@dataclass(frozen=True)
class NoDivisor:
    """The number, where it is not 0, does not divide that of another choice."""

    other: str

    def holds(self, name: str, choices: Choices) -> bool:
        return bool(choices[name] and choices[self.other] % choices[name])

    def words(self, name: str) -> str:
        return f"`{name}` that does not divide `{self.other}`"


def _either(values: Sequence[Any]) -> str:
    texts = [f"`{str(value).lower() if isinstance(value, bool) else value}`" for value in values]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"
