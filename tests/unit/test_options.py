"""Structs of options: what their docstrings say of each field, and what texts become."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import pytest

from atoll.core.config import keys_of_sections
from atoll.core.errors import ConfigError
from atoll.core.options import RATE, SPAN, Mark, Option, options_of, summary_of
from atoll.hub.options import HubOptions
from atoll.server.options import ServerOptions


class Given(msgspec.Struct, frozen=True):
    """Options of a test.

    More about them.

    Args:
        name: What it is called,
            on two lines.
        wait: How long.
        mode: One of two.
    """

    name: Annotated[str, Mark("NAME", variable="THE_NAME")]
    wait: Annotated[float | None, SPAN] = None
    mode: Literal["fast", "slow"] = "fast"
    rate: Annotated[float, RATE] = 1.25e8


def test_a_struct_says_what_its_options_are() -> None:
    assert summary_of(Given) == "Options of a test.\n\nMore about them."
    name, wait, mode, rate = options_of(Given).values()
    assert (name.meaning, name.flag, name.word) == ("What it is called, on two lines.", "--name", "NAME")
    assert name.default is msgspec.NODEFAULT
    assert (wait.kind, wait.word, wait.meaning, wait.shown_default) == (float, "SPAN", "How long.", "")
    assert (mode.choices, mode.shown_default) == (("fast", "slow"), "fast")
    assert (rate.meaning, rate.shown_default) == ("", "1e+09bit/s")
    assert rate.value_of(rate.shown_default) == rate.default


@pytest.mark.parametrize(
    ("option", "given", "said"),
    [
        ("wait", "soon", "--wait: 'soon' is not a span of time; write it like 90s, 200ms or 5min"),
        ("wait", "0s", "--wait 0s: must be more than 0"),
        ("mode", "fats", "--mode fats: no such choice 'fats'; did you mean 'fast'? (one of: fast, slow)"),
    ],
)
def test_a_wrong_text_is_one_line_that_names_the_option(option: str, given: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        options_of(Given)[option].value_of(given)
    assert str(caught.value) == said


SECTIONS = [(f"[{section}]", keys) for section, keys in keys_of_sections().items()]
STRUCTS = [(kind.__name__, options_of(kind)) for kind in (HubOptions, ServerOptions)]


@pytest.mark.parametrize(("where", "options"), [*SECTIONS, *STRUCTS], ids=lambda each: str(each)[:20])
def test_every_option_is_explained(where: str, options: dict[str, Option]) -> None:
    assert [name for name, option in options.items() if not option.meaning.endswith((".", ")"))] == []
