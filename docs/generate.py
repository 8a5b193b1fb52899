"""Write the generated pages of docs/reference: `python docs/generate.py`.

`configuration.md` has the keys of the configuration's structs, `commands.md` the options of the commands, and
`combinations.md` the table of needs.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import typer.main

from atoll.axes.cells import CELLS, Cell, CodecKind, LinkKind, refusal_of, strategy_of
from atoll.axes.needs import TABLE, Moment, Need
from atoll.cli.app import app
from atoll.core.config import Config, keys_of_sections
from atoll.core.options import Option, summary_of

REFERENCE = Path(__file__).parent / "reference"
_WIDTH = 100
HOW = "python docs/generate.py"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False)


# -- configuration.md ----------------------------------------------------------------------------------------

_KEYS_HEADING = """
This page is generated from the structs of `src/atoll/core/config.py` and `src/atoll/core/memory.py`. After a
change of a key run `python docs/generate.py`.
[configuration.md](../configuration.md) says where values come from.
"""
_KINDS = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "`true` or `false`",
    str | dict[str, float]: "text, or a number for each worker",
    int | str | dict[str, int]: "whole number, or one for each worker, or `auto`",
}


def _key_lines() -> Iterator[str]:
    yield "# Keys of the configuration"
    yield ""
    yield from _wrapped(" ".join(_KEYS_HEADING.split()))
    kinds = get_type_hints(Config)
    for section, keys in keys_of_sections().items():
        yield ""
        yield f"## {section}"
        yield ""
        said = summary_of(kinds[section]).partition("\n\n")[0]
        yield from _wrapped(" ".join(said.split()))
        yield ""
        yield "| key | value | default | meaning |"
        yield "| --- | --- | --- | --- |"
        for key, option in keys.items():
            default = msgspec.json.encode(option.default).decode()
            meaning = re.sub(r"\]\((?=[\w-]+\.md)", "](../", option.meaning).replace("|", "\\|")
            yield f"| `{section}.{key}` | {_key_value(option)} | `{default}` | {meaning} |"


def _key_value(option: Option) -> str:
    """What a key's value is: its unit, its choices or its type."""
    if option.unit is not None:
        return {"SPAN": "span of time", "SIZE": "size", "RATE": "rate"}[option.unit.word]
    if option.choices:
        return ", ".join(f"`{each}`" for each in option.choices)
    kind: Any = option.kind
    return _KINDS[kind]


# -- commands.md ---------------------------------------------------------------------------------------------

_COMMANDS_HEADING = """# Commands

This page is generated from the commands' options. After a change of one run `python
docs/generate.py`. Spans of time are written like `90s`, sizes like `2GiB` and rates like
`1Gbit/s`. Every command has `--help`. A command ends with status 0, with 1 if what it did failed,
and with 2 and one line if what it was given is wrong."""


def _command_lines(command: Any, name: str) -> Iterator[str]:
    """A command's section, then those of the commands below it."""
    below = getattr(command, "commands", {})
    if not below:
        arguments = [_option_name(each) for each in command.params if each.param_type_name == "argument"]
        yield ""
        yield f"## {name}"
        yield ""
        yield f"`{' '.join([name, '[OPTIONS]', *arguments])}`"
        yield ""
        yield re.sub(r"\s*\n\s*\n\s*", "\n\n", command.help or "").strip()
        yield ""
        yield "| option | default | meaning |"
        yield "| --- | --- | --- |"
        yield from map(_option_row, command.params)
    for each in sorted(below):
        yield from _command_lines(below[each], f"{name} {each}")


def _option_row(option: Any) -> str:
    default = "" if option.default in (None, "", [], False) or option.required else f"`{_default(option)}`"
    meaning = option.help or ""
    if option.envvar:
        meaning += f" Also from the variable `{option.envvar}`."
    if option.required:
        meaning += " Required."
    return f"| `{_option_name(option)}` | {default} | {meaning.strip()} |"


def _default(option: Any) -> str:
    return str(option.default).lower() if isinstance(option.default, bool) else str(option.default)


def _option_name(option: Any) -> str:
    """`--workers N`, `--seal / --no-seal`, or an argument's word."""
    word = option.metavar or ("" if getattr(option, "is_flag", False) else option.name.upper())
    if option.param_type_name == "argument":
        return str(word)
    names = [*option.opts, *option.secondary_opts]
    return " ".join(filter(None, [" / ".join(names), "" if option.is_flag else word]))


# -- combinations.md -----------------------------------------------------------------------------------------

_MOMENTS: dict[Moment, str] = {
    "configuration": "When a configuration is read",
    "launch": "Before `atoll run` starts anything",
    "hub": "When `atoll hub` starts",
    "join": "When a worker joins its run",
    "prepare": "In `session.prepare`",
    "call": "In later calls of the script",
}
# What a row may speak of beside keys of the configuration.
FACTS = {
    "store": "where the model lies: `resident`, `tiered`, `sharded` or `lent`",
    "group": "who sums gradients first: `solo`, or a `ring` of workers",
    "sync": "what happens between contributors: `local`, `bsp`, `ssp`, `asp`, `peers` or `replicas`",
    "link.lossy": "whether the link may lose parts of gradients",
    "hub": "the address of the hub; empty without one",
    "shards": "the number of shards of the run that a worker joins",
    "sites": "the sites of that run",
    "cost": "whether `session.batches` is given the samples' costs",
    "second session": "whether a session of the process in the same run has come to its end before",
    "site": "the worker's site, where the run has shards for sites",
    "nodes differ": "whether the hub introduces another number of nodes",
    "several machines": "whether a node's devices are on several machines",
    "late": "whether the worker comes when the run is under way",
    "models": "how many models the session has prepared before",
    "several models": "whether other models train as one with the model",
    "several budgets": "whether models that train as one were given unlike budgets",
    "scheduled": "whether a schedule goes by samples",
    "several optimizers": "whether more than one optimizer steps the model",
    "complex": "whether parameters of the optimizer are complex",
    "coupled": "whether the optimizer looks at the gradients of all parameters in a step, as Prodigy does",
    "modes": "whether the optimizer has `train()` and `eval()`",
    "sparse": "why the optimizer cannot step dense gradients in place of sparse ones",
    "again": "whether the session has prepared the model before",
    "over": "a parameter that was given to `atoll.memory.over`",
    "fit": "who fits the model: `alone`, or members of `replicas`",
    "step share": "whether `memory.step` is a share",
    "module": "a module of the model that is an `nn.SyncBatchNorm`",
    "device": "the kind of device",
    "process group": "torch's default group: `whole`, or what it lacks",
    "joint": "whether the workers can sum the layer's statistics",
    "waits": "whether gradients wait for their step",
    "grouped": "whether workers have come together in groups at shards",
    "average": "whether `session.average` was called for the model",
    "bf16": "how `session.prepare` is to step bfloat16 parameters in float32",
    "dtype": "of a trained parameter",
    "unit": "what the optimizer steps by itself: `element` or `tensor`",
    "step": "the unit of steps that the script gave to `session.prepare`",
    "moves": "true if the optimizer sets `p.data` to another tensor",
    "closure": "`needed` if the optimizer cannot step without a closure of the script",
    "steps": "where the optimizer steps: at the `worker`, or at `home`, where the values live",
    "defined": "where the optimizer's class is defined, if no other process can import it there",
    "attribute": "a plain attribute of the optimizer, beside its param groups, that the script has set",
    "setting": "a value in the optimizer's param groups that is no plain value",
    "call": "what the script calls",
    "data": "how the script gets data: `dealt`, `leased`, by `nodes`, or its `own`",
    "drop_last": "an argument of the call",
    "gradients": "the gradients in `p.grad` that the script uses under strategy `peers`, or their moment",
}
_STORES = {
    "resident": "whole, on the device",
    "tiered": "in tiers of memory",
    "sharded": "in tiers, shared by the ring",
    "lent": "in tiers, lent by the CPU side",
}
_FIRST = (get_args(LinkKind)[0], get_args(CodecKind)[0])  # of a line
_SYNCS = {"local": "nothing", "peers": "peers", "replicas": "values, as it says"}


def _cell_lines() -> Iterator[str]:
    yield "# What can be combined"
    yield ""
    yield from _wrapped(
        "This page is generated from the table of needs (`src/atoll/axes/needs.py`), which is the one place "
        "where Atoll refuses a combination. After a change of the table run `python docs/generate.py`."
    )
    yield ""
    yield from _wrapped(
        "A way of training is one choice along each axis: where the model lies, who sums first, what happens "
        "between those who contribute, what carries the chunks, and by what codec gradients are written "
        "(`sync.codec`; parameters and means always travel in their own dtype)."
    )
    yield ""
    yield "## Which cells train"
    yield ""
    yield from _wrapped(
        "With budgets of memory the model lies in tiers; without them it lies whole on the device. `ring` "
        "under \"who sums first\" is a ring's workers, a group of `ps-hra`, or a node's devices under "
        "`peers`. A cell names the row below that refuses the combination."
    )
    yield ""
    links = get_args(LinkKind)
    answers = [*links, "another codec"]
    yield f"| strategy | who sums first | between contributors | the model lies | {' | '.join(answers)} |"
    yield f"|{' --- |' * (4 + len(answers))}"
    for first in [cell for cell in CELLS if (cell.link, cell.codec) == _FIRST]:
        row = [cell for cell in CELLS if _one_choice(cell, first)]
        between = _SYNCS.get(first.sync, f"shards, `{first.sync}`")
        alone = " (one worker)" if first.sync == "local" and first.group == "solo" else ""
        name = "of another package" if first.sync == "replicas" else f"`{strategy_of(first)}`"
        cells = [f"{name}{alone}", f"`{first.group}`", between, _STORES[first.store]]
        yield f"| {' | '.join([*cells, *map(_answer, row)])} |"
    yield ""
    yield from _wrapped(
        "`hierarchical` is a ring's cell: its groups are a way of summing over the same ring. With "
        "`run.sites` each site is one contributor. The last column is of a codec other than `float32` over "
        "`tcp`; over the other links such a cell trains where both columns say so."
    )
    yield ""
    yield "## Words for what is no key"
    yield ""
    yield from _wrapped(
        "Rows name keys of the [configuration](../configuration.md), options of `atoll hub`, and:"
    )
    yield ""
    yield from (f"- `{name}`: {meaning}" for name, meaning in FACTS.items())
    for moment, title in _MOMENTS.items():
        yield ""
        yield f"## {title}"
        yield ""
        yield "| row | combination | what Atoll says |"
        yield "| --- | --- | --- |"
        for need in TABLE:
            if moment in need.moments:
                yield f'| <a id="{need.name}"></a>{need.name} | {_condition(need)} | {_sentence(need)} |'


def _one_choice(cell: Cell, first: Cell) -> bool:
    """Whether a cell is the first one of its line, or has another link or another codec."""
    alike = (cell.store, cell.group, cell.sync) == (first.store, first.group, first.sync)
    return alike and (cell.link == first.link or cell.codec == first.codec)


def _answer(cell: Cell) -> str:
    need = refusal_of(cell)
    return "trains" if need is None else f"[{need.name}](#{need.name})"


def _condition(need: Need) -> str:
    return "; ".join(condition.words(name) for name, condition in need.cell.items())


def _sentence(need: Need) -> str:
    """The reason with a name in angle brackets for each thing that was chosen."""
    return re.sub(r"\{([^{}!:]+)(![rs])?(:[^{}]*)?\}", r"*<\1>*", need.reason).replace("|", "\\|")


# -- the pages -----------------------------------------------------------------------------------------------


def page_of_keys() -> str:
    """Return configuration.md."""
    return "\n".join(_key_lines()) + "\n"


def page_of_commands() -> str:
    """Return commands.md."""
    return "\n".join([_COMMANDS_HEADING, *_command_lines(typer.main.get_command(app), "atoll")]) + "\n"


def page_of_cells() -> str:
    """Return combinations.md."""
    return "\n".join(_cell_lines()) + "\n"


if __name__ == "__main__":
    for name, page in (
        ("configuration.md", page_of_keys),
        ("commands.md", page_of_commands),
        ("combinations.md", page_of_cells),
    ):
        (REFERENCE / name).write_text(page(), encoding="utf-8")
