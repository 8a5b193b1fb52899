"""The choices of a run that are known so far: the keys of its configuration, and facts beside them."""

from __future__ import annotations

import functools
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec

from atoll.core.config import Config
from atoll.core.memory import Memory

NO_FACTS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Choices:
    """One run's choices by name: "sync.lazy" for a key of the configuration, "late" for a fact.

    A fact that nobody gave is None, which no condition but `IsNot` takes for a value.
    """

    values: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.values.get(name)

    def fill(self, text: str) -> str:
        """Replace each `{name}` in a text by what was chosen, as `str.format` does."""
        return _Fields().vformat(text, (), self.values)


class _Fields(string.Formatter):
    """Names may contain dots: "{sync.lazy}" is one name, and no attribute of another."""

    def get_field(self, field_name: str, _args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, str]:
        return kwargs[field_name], field_name


def choices_of(config: Config, facts: Mapping[str, Any] = NO_FACTS, memory: Memory | None = None) -> Choices:
    """The choices of a configuration, and facts beside them.

    Args:
        config: as it was read.
        facts: what else is known, by name.
        memory: budgets that were given to `session.prepare`; they take the place of `[memory]`.

    Raises ConfigError for budgets that cannot be read.
    """
    values = flatten(config)
    budgets = memory if memory is not None else config.memory if config.memory.is_given else None
    if budgets is not None:
        values.update({f"memory.{key}": value for key, value in msgspec.to_builtins(budgets).items()})
        steps_on = budgets.budgets("" if memory is not None else "memory.").pins.steps_on
        values["memory.step"] = "auto" if steps_on is None else steps_on
    values["link.lossy"] = config.link.transport == "ltp" and not config.link.reliable
    count = config.run.workers
    values["workers"] = f"{count} worker{'s' * (count > 1)}"
    return Choices(MappingProxyType({**values, **facts}))


def flatten(config: Config) -> dict[str, Any]:
    """Each key's value by its full name, such as "sync.lazy"."""
    return {
        f"{section}.{key}": value
        for section, values in msgspec.to_builtins(config).items()
        for key, value in values.items()
    }


@functools.cache
def defaults() -> Mapping[str, Any]:
    """Each key's default by its full name."""
    return MappingProxyType(flatten(Config()))
