"""Options of a command, of a service, or of a section of the configuration, as the fields of a struct.

A struct's fields are the options. Its docstring has the meaning of each under `Args:`, for `--help` and for
the pages of the documentation. Annotations add a unit (`Unit`), and the form on a command line (`Mark`).
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from atoll.core.decoding import converted
from atoll.core.errors import ConfigError
from atoll.core.texts import nearest
from atoll.core.units import bytes_per_second, parse_bytes, parse_seconds

T = TypeVar("T", bound=msgspec.Struct)


class Unit(NamedTuple):
    """The unit of an option's text.

    Args:
        parse: returns the number in a text; raises ConfigError for others.
        of: the unit of that number ("seconds").
        word: the placeholder for the value in `--help`.
        zero: the error for a value of 0; empty if 0 is allowed.
        show: writes a number as a text that `parse` reads.
    """

    parse: Callable[[str | float], float]
    of: str
    word: str
    zero: str = "must be more than 0"
    show: Callable[[float], str] = "{:g}s".format


SPAN = Unit(parse_seconds, "seconds", "SPAN")
SPAN_OR_ZERO = Unit(parse_seconds, "seconds", "SPAN", zero="")
SIZE = Unit(parse_bytes, "bytes", "SIZE", show=lambda count: f"{count / 1e6:g}MB")
RATE = Unit(bytes_per_second, "bytes per second", "RATE", show=lambda rate: f"{rate * 8:g}bit/s")
RATE_OR_ZERO = Unit(bytes_per_second, "bytes per second", "RATE", zero="")


class Mark(NamedTuple):
    """The form of an option on a command line and in the environment, if type and name do not tell it.

    Args:
        word: the placeholder for the value in `--help`.
        flag: the flag, if it is not `--` and the field's name.
        variable: an environment variable that gives the option too.
        is_argument: the value is given without a flag.
        is_hidden: only a launcher gives the option.
        parse: returns the value of the given texts; raises UserError for others.
        key: the key of the configuration that the option sets.
        least: the smallest allowed whole number.
    """

    word: str = ""
    flag: str = ""
    variable: str = ""
    is_argument: bool = False
    is_hidden: bool = False
    parse: Callable[[Any], Any] | None = None
    key: str = ""
    least: int | None = None


class Option(NamedTuple):
    """One option, from a field of a struct."""

    name: str
    kind: Any  # the field's type, without None and annotations
    default: Any  # msgspec.NODEFAULT: the option must be given
    meaning: str
    unit: Unit | None
    mark: Mark

    @property
    def flag(self) -> str:
        """The name on a command line."""
        return self.mark.flag or f"--{self.name.replace('_', '-')}"

    @property
    def choices(self) -> tuple[str, ...]:
        """The words to choose from; empty if the option is no choice."""
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    @property
    def is_repeated(self) -> bool:
        """True if a command line may give the option several times."""
        origin = get_origin(self.kind)
        return origin in (list, dict) or (origin is tuple and self.mark.parse is None)

    @property
    def word(self) -> str:
        """The placeholder for the value in `--help`."""
        return self.mark.word or (self.unit.word if self.unit is not None else "")

    @property
    def shown_default(self) -> str:
        """The default as a text that `value_of` takes; empty if there is none or it is false or empty."""
        if self.default is msgspec.NODEFAULT or not self.default:
            return ""
        if self.unit is not None and not isinstance(self.default, str):
            return self.unit.show(self.default)
        return ",".join(self.default) if isinstance(self.default, tuple) else str(self.default)

    def check(self, given: Any) -> None:
        """Raise ConfigError, without the option's name, for a text that does not fit the unit."""
        if self.unit is None or given == self.default:
            return
        value = self.unit.parse(given)
        if value <= 0 and self.unit.zero:
            raise ConfigError(self.unit.zero)

    def value_of(self, given: Any) -> Any:
        """Return the value of a command line's text; raises UserError, one line that names the flag."""
        if given == "":
            name = self.word if self.mark.is_argument else self.flag
            raise ConfigError(f"{name}: the value is empty; give one, or leave the option out")
        if self.mark.parse is not None:
            return self.mark.parse(given)
        if self.unit is not None and isinstance(given, list):
            return tuple(map(self.value_of, given))
        if self.unit is not None:
            try:
                value = self.unit.parse(given)
            except ConfigError as error:
                raise ConfigError(f"{self.flag}: {error}") from None
            if value <= 0 and self.unit.zero:
                raise ConfigError(f"{self.flag} {given}: {self.unit.zero}")
            return value
        if self.choices and given not in self.choices:
            raise ConfigError(f"{self.flag} {given}: {no_such_choice(given, self.choices)}")
        return given


def no_such_choice(given: Any, choices: tuple[str, ...]) -> str:
    """Return `no such choice 'rign'; did you mean 'ring'? (one of: ring, server)`."""
    return f"no such choice {given!r}{nearest(str(given), choices)} (one of: {', '.join(choices)})"


@functools.cache
def options_of(struct: type[msgspec.Struct]) -> dict[str, Option]:
    """Return the options of a struct by name, in the order of its fields."""
    hints, meanings = get_type_hints(struct, include_extras=True), _meanings(struct)
    return {
        field.name: _option(field, hints[field.name], meanings.get(field.name, ""))
        for field in msgspec.structs.fields(struct)
    }


def _option(field: msgspec.structs.FieldInfo, hint: Any, meaning: str) -> Option:
    unit, mark = None, Mark()
    while get_origin(hint) is Annotated or NoneType in get_args(hint):
        if get_origin(hint) is Annotated:
            for each in hint.__metadata__:
                unit = each if isinstance(each, Unit) else unit
                mark = each if isinstance(each, Mark) else mark
            hint = hint.__origin__
        else:
            (hint,) = [each for each in get_args(hint) if each is not NoneType]
    default = field.default
    if field.default_factory is not msgspec.NODEFAULT:
        default = field.default_factory()
    return Option(field.name, hint, default, meaning, unit, mark)


def summary_of(struct: type) -> str:
    """Return the part of a struct's docstring before `Args:`."""
    return inspect.cleandoc(struct.__doc__ or "").partition("\nArgs:\n")[0].strip()


def _meanings(struct: type) -> dict[str, str]:
    """Return each field's meaning from a struct's docstring, on one line each."""
    text = inspect.cleandoc(struct.__doc__ or "").partition("\nArgs:\n")[2]
    entries = re.split(r"^    (\w+): ", text.partition("\n\n")[0], flags=re.MULTILINE)[1:]
    return {name: " ".join(text.split()) for name, text in zip(entries[::2], entries[1::2], strict=True)}


def as_argument(options: msgspec.Struct) -> str:
    """Write a struct as one argument of a process; in ASCII, since a folder's name may not be UTF-8."""
    return json.dumps(msgspec.to_builtins(options))


def from_argument(text: str, kind: type[T]) -> T:
    """Read a struct that `as_argument` wrote."""
    return converted(json.loads(text), kind)
