"""The layout of chunked memory: the published models' waste, groups, runs, shards, and bad input."""

from __future__ import annotations

import math
import re
import time
from pathlib import Path
from typing import Any

import pytest

from atoll.chunks import ChunkMap, ParameterSpec, lay_out_memory, memory, sizes_worth_trying
from atoll.core.errors import ConfigError, PrepareError
from atoll.moves import Cache
from support.shapes import PUBLISHED

DOCS = Path(__file__).parents[2] / "docs"
KIB = 2**10
MIB = 2**20
# The smallest size at which most bytes lie in chunks of one block, with less than 1 % of the blocks wasted.
ALIKE = {"GPT-2 XL": 40_960_000, "Llama-3-8B": 112 * MIB, "Llama-3-8B with LoRA": 112 * MIB}
# | GPT-2 XL | 1,557,611,200 | 4.88 MiB | 195 | 1,218 | 0.001 % | 0.018 % | 0.092 % |
ROW = re.compile(
    r"^\| ([^|]+?) \| ([\d,]+) \| ([\d.]+) MiB \| ([\d,]+) \| ([\d,]+) "
    r"\| ([\d.]+) % \| ([\d.]+) % \| ([\d.]+) % \|$",
    re.MULTILINE,
)


def spec(name: str, *shape: int, dtype: str = "float32", **features: Any) -> ParameterSpec:
    return ParameterSpec(name, shape, dtype, **features)


def layers(count: int, *sizes: int) -> list[ParameterSpec]:
    """`count` layers, each of parameters of `sizes` KiB."""
    return [
        spec(f"{layer}.{index}", size * 256) for layer in range(count) for index, size in enumerate(sizes)
    ]


def pages() -> str:
    found = [*DOCS.glob("memory*.md")]
    return "\n".join(page.read_text(encoding="utf-8") for page in found)


def names(layout: ChunkMap) -> list[list[str]]:
    return [[layout.specs[slot.parameter].name for slot in chunk.slots] for chunk in layout.chunks]


# The counts that are published with the models; of the last, the base's and the adapters'.
@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("GPT-2 XL", 1_557_611_200),
        ("Llama-3-8B", 8_030_261_248),
        ("Qwen2.5-14B", 14_770_033_664),
        ("Mixtral-8x7B", 46_702_792_704),
        ("Llama-3-8B with LoRA", 8_030_261_248 + 13_631_488),
    ],
)
def test_the_shapes_are_those_of_the_published_models(model: str, parameters: int) -> None:
    assert sum(spec.numel for spec in PUBLISHED[model]()) == parameters


def regular_waste(layout: ChunkMap) -> float:
    """Chunks of one size count whole, an oversize parameter's chunk in its own size."""
    total = sum(chunk.nbytes if chunk.oversize else layout.chunk_bytes for chunk in layout.chunks)
    return 1 - layout.used_bytes / total


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("model", PUBLISHED)
def test_published_models_waste_at_most_a_thousandth(model: str) -> None:
    """Of the blocks, by that measure and of what is stored; found in less than a second."""
    specs = PUBLISHED[model]()
    begin = time.process_time()
    layout = lay_out_memory(specs)
    assert time.process_time() - begin < 1.0
    assert max(layout.waste, regular_waste(layout), layout.block_waste) <= 0.001
    assert layout.chunk_bytes >= 4 * MIB


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("model", ["GPT-2 XL", "Llama-3-8B", "Llama-3-8B with LoRA"])
def test_small_blocks_bring_as_few_bytes_as_chunks_that_are_alike(model: str, share: float) -> None:
    """Nearly every parameter is a run of blocks then. The holes that runs leave cost about what larger chunks
    bring that is not asked for."""
    specs = PUBLISHED[model]()
    small, alike = lay_out_memory(specs), lay_out_memory(specs, chunk_bytes=ALIKE[model])
    assert sum(chunk.nbytes for chunk in alike.chunks if chunk.oversize) < 0.2 * alike.nbytes
    assert brought(small, share) <= 1.001 * brought(alike, share)


def brought(layout: ChunkMap, share: float) -> int:
    """Bytes brought in the third step through all parameters and back, the trained ones stepped elsewhere."""
    blocks = int(layout.used_bytes * share) // layout.chunk_bytes
    cache = Cache[int](blocks, {chunk.id: layout.blocks_of(chunk) for chunk in layout.chunks})
    uses = [*range(len(layout.specs)), *reversed(range(len(layout.specs)))]
    found = 0
    for step in range(3):
        for parameter in uses:
            decision = cache.handle_use(layout.places[parameter][0])
            if decision.bring and step == 2:
                found += layout.chunks[decision.chunk].nbytes
        for chunk in layout.trainable:
            cache.forget(chunk.id)
        cache.handle_step_ended()
    return found


def test_the_documentation_s_table_is_what_the_code_gives() -> None:
    rows = {row[0]: row[1:] for row in ROW.findall(pages())}
    assert list(rows) == list(PUBLISHED)
    for model, row in rows.items():
        layout = lay_out_memory(PUBLISHED[model]())
        assert row == (
            f"{sum(spec.numel for spec in layout.specs):,}",
            f"{layout.chunk_bytes / MIB:.2f}",
            f"{len(layout.chunks):,}",
            f"{layout.blocks:,}",
            f"{layout.waste * 100:.3f}",
            f"{regular_waste(layout) * 100:.3f}",
            f"{layout.block_waste * 100:.3f}",
        ), model


def test_the_documentation_s_constants_are_the_code_s() -> None:
    given = dict(re.findall(r"^\| `chunks/memory.py`: `(\w+)` \| ([\d^]+) \|", pages(), re.MULTILINE))
    assert len(given) == 4
    for name, value in given.items():
        assert getattr(memory, name) == eval(value.replace("^", "**")), name


def test_an_oversize_parameter_takes_a_run_of_blocks_and_stores_what_it_uses() -> None:
    layout = lay_out_memory([*layers(4, 64), spec("head", 150 * 256)], chunk_bytes=64 * KIB)
    assert names(layout) == [["head"], ["3.0"], ["2.0"], ["1.0"], ["0.0"]]
    head = layout.chunks[0]
    assert head.oversize
    assert layout.blocks_of(head) == 3
    assert head.nbytes == 152 * KIB  # whole pages
    assert layout.blocks == 7
    assert layout.block_waste == pytest.approx((3 * 64 - 150) / (7 * 64))
    assert layout.waste == pytest.approx(2 / (4 * 64 + 152))


def test_what_a_layer_leaves_over_its_neighbours_fill() -> None:
    """Layers of 64 + 24 KiB in chunks of 64: one after another each layer would take two."""
    layout = lay_out_memory(layers(4, 24, 64), chunk_bytes=64 * KIB)
    assert names(layout) == [["3.1"], ["2.1"], ["3.0", "2.0"], ["1.1"], ["0.1"], ["1.0", "0.0"]]
    assert layout.blocks == 6


def test_groups_are_chunked_each_by_itself_with_one_size_for_all() -> None:
    specs = [
        spec("a", 1000),
        spec("b", 1000, feature="experts"),
        spec("c", 1000, trainable=False),
        spec("d", 1000, dtype="bfloat16"),
        spec("e", 1000, settings="no decay"),
        spec("f", 1000),
    ]
    layout = lay_out_memory(specs, chunk_bytes=64 * KIB)
    assert sorted(names(layout)) == [["b"], ["c"], ["d"], ["e"], ["f", "a"]]
    assert names(layout)[-1] == ["c"]  # what is frozen comes last
    assert [layout.blocks_of(chunk) for chunk in layout.chunks] == [1] * 5


def test_the_size_is_the_smallest_of_those_with_the_least_waste() -> None:
    """Layers of 100 + 60 KiB: blocks of 100 would waste two fifths, and blocks of 160 are larger."""
    specs = layers(32, 60, 100)
    layout = lay_out_memory(specs, smallest=16 * KIB, largest=1024 * KIB)
    assert layout.chunk_bytes == 20 * KIB
    assert layout.block_waste == 0
    assert all(chunk.oversize for chunk in layout.chunks)
    # A plan weighs it against the smallest in which the chunks are alike.
    assert {20 * KIB, 160 * KIB} <= set(sizes_worth_trying(specs, smallest=16 * KIB, largest=1024 * KIB))


def test_the_lower_bound_is_kept() -> None:
    specs = PUBLISHED["Llama-3-8B"]()
    assert lay_out_memory(specs, smallest=200 * MIB).chunk_bytes >= 200 * MIB
    assert min(sizes_worth_trying(specs, smallest=200 * MIB)) >= 200 * MIB
    # A model that is smaller than the bound has one chunk, which stores no more than it uses.
    layout = lay_out_memory([spec("a", 1000)])
    assert layout.chunk_bytes == 4 * MIB
    assert layout.nbytes == 4096


def test_the_sizes_worth_trying_hold_the_choice_and_one_of_each_half_octave() -> None:
    specs = PUBLISHED["Llama-3-8B"]()
    sizes = sizes_worth_trying(specs)
    assert lay_out_memory(specs).chunk_bytes in sizes
    assert list(sizes) == sorted(set(sizes))
    octaves = [math.floor(2 * math.log2(size / sizes[0])) for size in sizes]
    assert set(octaves) == set(range(max(octaves) + 1))
    assert len(sizes) <= 2 * math.log2(256) + 2


def test_a_model_of_no_parameters_has_no_chunks() -> None:
    layout = lay_out_memory([])
    assert layout.chunks == ()
    assert layout.block_waste == 0


@pytest.mark.check
@pytest.mark.usefixtures("no_collections")
def test_many_small_parameters_are_laid_out_soon() -> None:
    specs = [spec(f"p{index}", 1 + index % 977) for index in range(20_000)]
    begin = time.process_time()
    assert lay_out_memory(specs).block_waste < 0.4
    assert time.process_time() - begin < 5.0


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([spec("a", 2), spec("a", 3)], "parameter 'a' is given twice"),
        ([spec("a", 2, dtype="quint8")], "parameter 'a': no chunk can hold dtype 'quint8'"),
        ([spec("a", 2, -1)], r"parameter 'a': shape \(2, -1\) has a negative size"),
        ([spec("a", 2), spec("b", 2**40, 2**40)], "parameter 'b': with it the model exceeds"),
    ],
)
def test_bad_specs_are_one_clear_line_here_too(specs: list[ParameterSpec], message: str) -> None:
    for do in (lay_out_memory, sizes_worth_trying):
        with pytest.raises(PrepareError, match=message) as caught:
            do(specs)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"chunk_bytes": 0}, "chunk size of 0 bytes"),
        ({"chunk_bytes": 2**41}, "chunk size of 2199023255552 bytes"),
        ({"smallest": 0}, "chunk sizes from 0 to"),
        ({"smallest": 2**21, "largest": 2**20}, "chunk sizes from 2097152 to 1048576 bytes"),
        ({"smallest": 2**41}, "chunk sizes from 2199023255552 to"),
        ({"alignment": 48}, "alignment of 48 bytes: must be a power of two"),
        ({"alignment": 8192}, "alignment of 8192 bytes"),
    ],
)
def test_bounds_without_meaning_are_one_clear_line(given: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        lay_out_memory([spec("a", 2)], **given)
    assert "\n" not in str(caught.value)
