"""Commands whose parameters, `--help` and environment variables come from structs of options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import typer

from atoll.core.config import keys_of_sections
from atoll.core.options import Option, options_of


def command(do: Callable[..., None], *structs: type[msgspec.Struct]) -> Callable[..., None]:
    """Return a function for typer that calls `do` with a struct of each kind.

    The command's help is the docstring of `do`. The function raises UserError, one line that names the
    option, for a wrong value.
    """
    known = [
        {name: each for name, each in options_of(struct).items() if not each.mark.is_hidden}
        for struct in structs
    ]

    def run(**given: Any) -> None:
        do(
            *(
                struct(
                    **{
                        name: option.value_of(given[name])
                        for name, option in options.items()
                        if given[name] is not None and given[name] != []
                    }
                )
                for struct, options in zip(structs, known, strict=True)
            )
        )

    parameters = [_parameter(option) for options in known for option in options.values()]
    run.__name__, run.__doc__ = do.__name__, do.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def _parameter(option: Option) -> inspect.Parameter:
    """Return the parameter for typer. Quantities and choices are texts, which `Option.value_of` reads."""
    many = option.is_repeated
    is_text = option.mark.parse is not None or option.unit is not None or bool(option.choices)
    kind: Any = list[str] if many else str if is_text else option.kind
    default: Any = option.default
    details: dict[str, Any] = {"metavar": option.word or None, "help": help_of(option)}
    if default is msgspec.NODEFAULT:
        default = inspect.Parameter.empty
    elif many or is_text or default == "":
        kind, default = kind | None, None if many else option.shown_default or None
    if option.mark.least is not None:
        details["min"] = option.mark.least
    if option.mark.variable:
        details["envvar"] = option.mark.variable
    if option.mark.is_argument:
        annotation: Any = Annotated[kind, typer.Argument(**details)]
    else:
        flag = option.flag
        flag = f"{flag}/--no-{flag[2:]}" if default is True else flag
        annotation = Annotated[kind, typer.Option(flag, **details)]
    return inspect.Parameter(
        option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def help_of(option: Option) -> str:
    """Return an option's help text; for a key of the configuration, the first sentence of its meaning."""
    if not option.mark.key:
        return option.meaning
    section, _, name = option.mark.key.partition(".")
    key = keys_of_sections()[section][name]
    first = key.meaning.partition(". ")[0].rstrip(".") + "."
    return f"{first} One of {', '.join(key.choices)}." if key.choices else first
