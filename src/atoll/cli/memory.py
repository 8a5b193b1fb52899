"""`atoll memory layout`: the chunks of a model's parameters, from their shapes alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from atoll.cli import memory_plan
from atoll.cli.commands import command
from atoll.core.errors import ConfigError, PrepareError, UserError
from atoll.core.options import Mark, Unit
from atoll.core.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from atoll.chunks import ChunkMap

_SMALLEST = 2**22  # bytes
MOST_MEMBERS = 2**12  # with more, a chunk's parts would be smaller than a page


_BUDGET = Unit(parse_bytes, "bytes", "SIZE", zero="at least 1 byte; 4MiB is usual")


def register(app: typer.Typer) -> None:
    """Give `app` these commands."""
    memory = typer.Typer(help="Chunked memory: train what does not fit.", rich_markup_mode=None)
    memory.command("layout")(command(show_layout, _Layout))
    # Options after SCRIPT are the script's own.
    plan = command(memory_plan.show_plan, memory_plan.PlanOptions)
    memory.command("plan", context_settings={"allow_interspersed_args": False})(plan)
    app.add_typer(memory, name="memory")


def _members(text: str) -> int:
    if not text.isdecimal() or len(text) > 9 or int(text) < 1:
        raise ConfigError(f"--members {text}: a whole number, 1 or more")
    if int(text) > MOST_MEMBERS:
        raise ConfigError(f"--members {text}: from 1 to {MOST_MEMBERS} share a chunk")
    return int(text)


class _Layout(msgspec.Struct, frozen=True, kw_only=True):
    """The model to lay out, and the sizes of its chunks.

    Args:
        shapes: A list of objects: name, shape, dtype, and maybe feature, trainable and settings.
        members: Members that each chunk is split over.
        smallest: The smallest chunk, by default 4MiB: large enough to fill the links.
        chunk: The chunk size, in place of a search.
        as_json: Print it as one object, in bytes.
    """

    shapes: Annotated[str, Mark("SHAPES.json", is_argument=True)]
    members: Annotated[int, Mark("N", parse=_members)] = 1
    smallest: Annotated[int | None, _BUDGET] = None
    chunk: Annotated[int | None, _BUDGET] = None
    as_json: Annotated[bool, Mark(flag="--json")] = False


def show_layout(options: _Layout) -> None:
    """Print the chunk size, the chunks by group and the waste, for the parameters in SHAPES.json."""
    from atoll.chunks import lay_out_memory, parse_shapes

    if options.chunk is not None and options.smallest is not None:
        raise ConfigError("--chunk names the size, and --smallest is for a search; give one of them")
    shapes = Path(options.shapes)
    try:
        data = shapes.read_bytes()
    except OSError as error:
        raise UserError(f"{shapes}: cannot be read: {error.strerror or error}") from None
    try:
        specs = parse_shapes(data, str(shapes))
        chunk_map = lay_out_memory(specs, chunk_bytes=options.chunk, smallest=options.smallest or _SMALLEST)
    except PrepareError as error:
        raise UserError(f"{shapes}: {error}") from None
    figures = _figures(chunk_map, options.members)
    print(json.dumps(figures) if options.as_json else "\n".join(_lines(figures)))


def _figures(chunk_map: ChunkMap, members: int) -> dict[str, Any]:
    """Return the layout's figures: sizes in bytes, waste as fractions."""
    return {
        "chunk_bytes": chunk_map.chunk_bytes,
        "members": members,
        "parameters": len(chunk_map.specs),
        "used_bytes": chunk_map.used_bytes,
        "stored_bytes": chunk_map.nbytes,
        "member_bytes": _stored_by_each(chunk_map, members),
        "waste": chunk_map.waste,
        "chunks": len(chunk_map.chunks),
        "blocks": chunk_map.blocks,
        "block_waste": chunk_map.block_waste,
        "longest_run": max(map(chunk_map.blocks_of, chunk_map.chunks)),
        "groups": [_group(chunk_map, index) for index in range(len(chunk_map.groups))],
    }


def _stored_by_each(chunk_map: ChunkMap, members: int) -> int:
    """Return the bytes of values, in whole pages, at the member that stores most."""
    from atoll.chunks import itemsize
    from atoll.chunks.layout import round_up
    from atoll.moves.owners import split_evenly
    from atoll.moves.search import PAGE

    owned = split_evenly(
        [chunk.extent for chunk in chunk_map.chunks], [range(members)] * len(chunk_map.chunks)
    )
    stored = [0] * members
    for chunk, parts in zip(chunk_map.chunks, owned.parts, strict=True):
        for part in parts:
            stored[part.member] += round_up(part.numel * itemsize(chunk.dtype), PAGE)
    return max(stored)


def _group(chunk_map: ChunkMap, index: int) -> dict[str, Any]:
    group = chunk_map.groups[index]
    chunks = [chunk for chunk in chunk_map.chunks if chunk.group == index]
    return {
        "dtype": group.dtype,
        "trainable": group.trainable,
        "settings": group.settings,
        "feature": group.feature,
        "parameters": sum(len(chunk.slots) for chunk in chunks),
        "chunks": len(chunks),
        "oversize": sum(chunk.oversize for chunk in chunks),
        "blocks": sum(map(chunk_map.blocks_of, chunks)),
        "stored_bytes": sum(chunk.nbytes for chunk in chunks),
    }


def _lines(figures: dict[str, Any]) -> list[str]:
    size = figures["chunk_bytes"]
    run = figures["longest_run"]
    lines = [
        f"{_counted(figures['parameters'], 'parameter')}, {format_bytes(figures['used_bytes'])}, in "
        f"{_counted(figures['chunks'], 'chunk')} in blocks of {format_bytes(size)} ({size} bytes)",
        *(_group_line(group) for group in figures["groups"]),
        f"waste: {figures['block_waste']:.3%} of {_counted(figures['blocks'], 'block')} on the device, if "
        f"all lie there; {figures['waste']:.3%} of what is stored at home",
    ]
    if run > 1:
        lines.append(
            f"the largest parameter takes {run} blocks in a row, {format_bytes(run * size)} of the device"
        )
    if figures["members"] > 1:
        each = format_bytes(figures["member_bytes"])
        lines.append(f"each of {figures['members']} members stores {each} of it")
    return lines


def _group_line(group: dict[str, Any]) -> str:
    features = [group["dtype"], "trainable" if group["trainable"] else "frozen"]
    features += [f"{key} {group[key]!r}" for key in ("settings", "feature") if group[key]]
    oversize = group["oversize"]
    line = (
        f"  {', '.join(features)}: {_counted(group['parameters'], 'parameter')} in "
        f"{_counted(group['chunks'], 'chunk')}, {format_bytes(group['stored_bytes'])}, "
        f"{_counted(group['blocks'], 'block')}"
    )
    if oversize:
        line += f"; {oversize} of the chunks {'holds' if oversize == 1 else 'hold'} an oversize parameter"
    return line


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
