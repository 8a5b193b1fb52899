"""Properties of the layout in blocks, and of the file of shapes, for whatever Hypothesis can think of."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from atoll.chunks import ChunkGroup, ParameterSpec, itemsize, lay_out_memory, parse_shapes
from atoll.chunks import memory as memory_layout
from atoll.core.errors import UserError

PAGE = 4096


@st.composite
def models(draw: st.DrawFn) -> list[ParameterSpec]:
    """Up to 40 parameters, from scalars and empty ones to some of many pages."""
    sizes = st.integers(0, 200) | st.sampled_from([1, 16, 64, 1024])
    shapes = st.lists(sizes, max_size=2).map(tuple)
    return [
        ParameterSpec(
            f"p{i}",
            draw(shapes),
            draw(st.sampled_from(["float32", "bfloat16", "uint8", "complex128"])),
            draw(st.booleans()),
            draw(st.sampled_from(["", "no decay"])),
            draw(st.sampled_from(["", "experts"])),
        )
        for i in range(draw(st.integers(0, 40)))
    ]


@st.composite
def bounds(draw: st.DrawFn) -> dict[str, int]:
    given = {"alignment": draw(st.sampled_from([16, 64, 512, 4096]))}
    if draw(st.booleans()):
        return {**given, "chunk_bytes": draw(st.integers(1, 2**17))}
    smallest = draw(st.integers(1, 2**16))
    return {**given, "smallest": smallest, "largest": draw(st.integers(smallest, 2**18))}


def features(spec: ParameterSpec) -> ChunkGroup:
    return ChunkGroup(spec.dtype, spec.settings, spec.trainable, spec.feature)


@pytest.mark.check
@given(models(), bounds())
def test_every_parameter_lies_in_exactly_one_place_of_its_group(
    specs: list[ParameterSpec], given: dict[str, int]
) -> None:
    layout = lay_out_memory(specs, **given)
    slots = [(chunk, slot) for chunk in layout.chunks for slot in chunk.slots]
    assert sorted(slot.parameter for _, slot in slots) == list(range(len(specs)))
    for chunk, slot in slots:
        assert slot.numel == specs[slot.parameter].numel
        assert layout.groups[chunk.group] == features(specs[slot.parameter])
        assert layout.places[slot.parameter] == (chunk.id, chunk.slots.index(slot))


@pytest.mark.check
@given(models(), bounds())
def test_nothing_overlaps_and_all_is_aligned(specs: list[ParameterSpec], given: dict[str, int]) -> None:
    layout = lay_out_memory(specs, **given)
    for chunk in layout.chunks:
        size = itemsize(chunk.dtype)
        end = 0
        for slot in chunk.slots:  # in the reverse of registration
            assert slot.offset >= end
            assert slot.offset * size % given["alignment"] == 0
            end = slot.offset + slot.numel
        assert end <= chunk.numel
        order = [slot.parameter for slot in chunk.slots]
        assert order == sorted(order, reverse=True)


@pytest.mark.check
@given(models(), bounds())
def test_a_chunk_lies_in_one_block_or_holds_one_oversize_parameter(
    specs: list[ParameterSpec], given: dict[str, int]
) -> None:
    layout = lay_out_memory(specs, **given)
    assert layout.chunk_bytes % PAGE == 0
    for chunk in layout.chunks:
        assert chunk.nbytes > 0
        assert chunk.nbytes % PAGE == 0
        # No more is stored than alignment and whole pages ask for.
        own = sum(specs[slot.parameter].nbytes + given["alignment"] for slot in chunk.slots)
        assert chunk.nbytes < own + PAGE
        assert layout.blocks_of(chunk) == -(-chunk.nbytes // layout.chunk_bytes)
        if chunk.oversize:
            assert len(chunk.slots) == 1
            assert layout.blocks_of(chunk) > 1
        else:
            assert layout.blocks_of(chunk) == 1


@pytest.mark.check
@given(models(), bounds())
def test_waste_is_what_no_parameter_owns(specs: list[ParameterSpec], given: dict[str, int]) -> None:
    layout = lay_out_memory(specs, **given)
    block = layout.chunk_bytes
    arena = np.zeros(layout.blocks * block, dtype=bool)
    begin = 0
    for chunk in layout.chunks:
        size = itemsize(chunk.dtype)
        for slot in chunk.slots:
            arena[begin + slot.offset * size : begin + (slot.offset + slot.numel) * size] = True
        begin += layout.blocks_of(chunk) * block
    assert begin == len(arena)
    assert layout.block_waste == (float((~arena).mean()) if len(arena) else 0.0)


@pytest.mark.check
@given(models(), bounds(), st.randoms(use_true_random=False))
def test_the_map_is_a_function_of_the_specs(
    specs: list[ParameterSpec], given: dict[str, int], random: Any
) -> None:
    """Not of what was laid out before, nor of names."""
    first = lay_out_memory(specs, **given)
    lay_out_memory(specs[::-1], **given)
    assert lay_out_memory([msgspec.structs.replace(spec) for spec in specs], **given) == first
    order = list(range(len(specs)))
    random.shuffle(order)
    other = lay_out_memory(
        [msgspec.structs.replace(spec, name=f"q{n}") for n, spec in zip(order, specs, strict=True)], **given
    )
    assert (other.chunk_bytes, other.chunks, other.places) == (first.chunk_bytes, first.chunks, first.places)


@given(
    st.lists(st.lists(st.integers(0, 200), max_size=40), min_size=1, max_size=3),
    st.lists(st.integers(1, 64), min_size=1, max_size=10, unique=True),
)
def test_the_search_counts_the_blocks_that_the_layout_takes(
    groups: list[list[int]], pages: list[int]
) -> None:
    """Sizes in units of 512 bytes, the alignment."""
    sizes = np.array(sorted(page * PAGE for page in pages), dtype=np.int64)
    specs = [
        ParameterSpec(f"{number}.{index}", (size * 512,), "uint8", settings=str(number))
        for number, group in enumerate(groups)
        for index, size in enumerate(group)
    ]
    taken = sum(memory_layout._blocks(np.array(group[::-1], dtype=np.int64) * 512, sizes) for group in groups)
    assert np.asarray(taken).tolist() == [
        lay_out_memory(specs, chunk_bytes=int(size)).blocks for size in sizes
    ]


@given(
    st.lists(st.sampled_from([3, 8, 20, 21, 64]), min_size=1, max_size=24),
    st.integers(1, 64),
)
@settings(max_examples=200)
def test_no_size_that_is_tried_wastes_less(sizes: list[int], pages: int) -> None:
    """But for a thousandth, which is a tie."""
    specs = [ParameterSpec(f"p{i}", (size * PAGE,), "uint8") for i, size in enumerate(sizes)]
    chosen = lay_out_memory(specs, smallest=PAGE, largest=64 * PAGE)
    named = lay_out_memory(specs, chunk_bytes=pages * PAGE)
    assert chosen.block_waste <= named.block_waste + 0.0011


def test_every_size_is_tried_where_there_are_few() -> None:
    """Up to 64 pages; the test above lives by it. Beyond, there are fractions, runs and a grid."""
    group = {ChunkGroup("uint8", "", True, ""): [0]}
    specs = [ParameterSpec("p", (64 * PAGE,), "uint8")]
    found = memory_layout._search(specs, group, PAGE, 64 * PAGE, 512)
    assert found.sizes.tolist() == [pages * PAGE for pages in range(1, 65)]


VALID = st.fixed_dictionaries(
    {
        "shape": st.lists(st.integers(0, 2**20), max_size=3),
        "dtype": st.sampled_from(["float32", "bfloat16", "bool"]),
    },
    optional={"feature": st.text(max_size=8), "trainable": st.booleans(), "settings": st.text(max_size=8)},
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=10,
)


@given(st.lists(VALID, min_size=1, max_size=8))
def test_a_file_of_shapes_is_read_as_it_was_written(entries: list[dict[str, Any]]) -> None:
    named = [{"name": f"p{index}", **entry} for index, entry in enumerate(entries)]
    specs = parse_shapes(json.dumps(named).encode(), "shapes.json")
    for spec, entry in zip(specs, named, strict=True):
        assert spec == ParameterSpec(**{**entry, "shape": tuple(entry["shape"])})


def check_read_or_refused(data: bytes, entry: int | None = None) -> None:
    try:
        parse_shapes(data, "shapes.json")
    except UserError as error:
        text = str(error)
        assert len(text.splitlines()) == 1
        assert text.startswith("shapes.json")
        assert entry is None or f"entry {entry}" in text
    else:
        assert entry is None


@given(st.binary(max_size=60))
@example(b"[" * 100_000)
@example(b"\xef\xbb\xbf[]")
@example(b'[{"name": "a", "shape": [1' + b"0" * 5000 + b'], "dtype": "float32"}]')
@example(b'[{"name": "a", "shape": [NaN], "dtype": "float32"}]')
def test_any_bytes_are_read_or_refused_in_one_line(data: bytes) -> None:
    check_read_or_refused(data)


@given(VALID, st.sampled_from(["name", "shape", "dtype", "feature", "trainable", "settings", "x"]), ANYTHING)
def test_any_field_is_read_or_refused_in_one_line(entry: dict[str, Any], key: str, value: Any) -> None:
    given = [{"name": "p", **entry}, {"name": "q", **entry, key: value}]
    check_read_or_refused(json.dumps(given).encode())


@given(VALID, st.sampled_from(["name", "shape", "dtype"]))
def test_a_missing_field_is_named_with_its_entry(entry: dict[str, Any], key: str) -> None:
    whole = {"name": "p", **entry}
    lacking = {field: value for field, value in {**whole, "name": "q"}.items() if field != key}
    with pytest.raises(UserError, match=rf"shapes.json: entry 2.*'{key}' is missing"):
        parse_shapes(json.dumps([whole, lacking]).encode(), "shapes.json")
