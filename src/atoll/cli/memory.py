"""`atoll memory layout`: the chunks that a model's parameters would lie in, from their shapes alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from atoll.chunks import ChunkMap, itemsize, lay_out_memory, parse_shapes
from atoll.chunks.layout import round_up
from atoll.cli import memory_plan
from atoll.core.errors import ConfigError, PrepareError, UserError
from atoll.core.units import format_bytes, parse_bytes
from atoll.moves.owners import split_evenly
from atoll.moves.search import PAGE

_SMALLEST = "4MiB"
MOST_MEMBERS = 2**12  # more, and a chunk's parts are less than a page


def register(app: typer.Typer) -> None:
    """Give `app` these commands."""
    memory = typer.Typer(help="Chunked memory: train what does not fit.", rich_markup_mode=None)
    memory.command("layout")(show_layout)
    # Options after SCRIPT are the script's own.
    memory.command("plan", context_settings={"allow_interspersed_args": False})(memory_plan.show_plan)
    app.add_typer(memory, name="memory")


# Texts, so that a wrong one is told of in the same way as everywhere else.
def show_layout(
    shapes: Annotated[
        Path,
        typer.Argument(
            metavar="SHAPES.json",
            help="A list of objects: name, shape, dtype, and maybe feature, trainable and settings.",
        ),
    ],
    members: Annotated[str, typer.Option(metavar="N", help="Members that each chunk is split over.")] = "1",
    smallest: Annotated[
        str, typer.Option(metavar="SIZE", help="The smallest chunk: what fills the links.")
    ] = _SMALLEST,
    chunk: Annotated[
        str, typer.Option(metavar="SIZE", help="The chunk size, in place of a search.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print it as one object, in bytes.")] = False,
) -> None:
    """Print the chunk size, the chunks by group and the waste, for the parameters in SHAPES.json."""
    count = _whole("--members", members)
    if count > MOST_MEMBERS:
        raise ConfigError(f"--members {members}: from 1 to {MOST_MEMBERS} share a chunk")
    least = _size("--smallest", smallest)
    size = None if chunk == "auto" else _size("--chunk", chunk)
    if size is not None and smallest != _SMALLEST:
        raise ConfigError("--chunk names the size, and --smallest is for a search; give one of them")
    try:
        data = shapes.read_bytes()
    except OSError as error:
        raise UserError(f"{shapes}: cannot be read: {error.strerror or error}") from None
    try:
        specs = parse_shapes(data, str(shapes))
        chunk_map = lay_out_memory(specs, chunk_bytes=size, smallest=least)
    except PrepareError as error:
        raise UserError(f"{shapes}: {error}") from None
    figures = _figures(chunk_map, count)
    print(json.dumps(figures) if as_json else "\n".join(_lines(figures)))


def _whole(option: str, text: str) -> int:
    if not text.isdecimal() or len(text) > 9 or int(text) < 1:
        raise ConfigError(f"{option} {text}: a whole number, 1 or more")
    return int(text)


def _size(option: str, text: str) -> int:
    try:
        size = parse_bytes(text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from None
    if size < 1:
        raise ConfigError(f"{option} {text}: at least 1 byte; 4MiB is usual")
    return size


def _figures(chunk_map: ChunkMap, members: int) -> dict[str, Any]:
    """Sizes in bytes, waste as fractions."""
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
    """Bytes of whole pages that the member with most stores of values."""
    held = split_evenly(
        [chunk.extent for chunk in chunk_map.chunks], [range(members)] * len(chunk_map.chunks)
    )
    stored = [0] * members
    for chunk, parts in zip(chunk_map.chunks, held.parts, strict=True):
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
