"""The layout: order, groups, sizes, and what it says of bad input."""

from __future__ import annotations

import time

import msgspec
import pytest

from atoll.chunks import ChunkGroup, ChunkMap, ParameterSpec, lay_out
from atoll.core.errors import ConfigError, PrepareError

MIB = 2**20


def spec(name: str, *shape: int, dtype: str = "float32", **features: object) -> ParameterSpec:
    return ParameterSpec(name, shape, dtype, **features)  # type: ignore[arg-type]


def names(layout: ChunkMap) -> list[list[str]]:
    return [[layout.specs[slot.parameter].name for slot in chunk.slots] for chunk in layout.chunks]


def gpt2(layers: int, width: int) -> list[ParameterSpec]:
    """The parameters of GPT-2 (Radford et al., 2019), as Hugging Face's GPT2LMHeadModel registers them."""
    shapes: list[tuple[str, tuple[int, ...]]] = [("wte", (50257, width)), ("wpe", (1024, width))]
    for i in range(layers):
        block = {
            "ln_1.weight": (width,), "ln_1.bias": (width,),
            "attn.c_attn.weight": (width, 3 * width), "attn.c_attn.bias": (3 * width,),
            "attn.c_proj.weight": (width, width), "attn.c_proj.bias": (width,),
            "ln_2.weight": (width,), "ln_2.bias": (width,),
            "mlp.c_fc.weight": (width, 4 * width), "mlp.c_fc.bias": (4 * width,),
            "mlp.c_proj.weight": (4 * width, width), "mlp.c_proj.bias": (width,),
        }  # fmt: skip
        shapes += [(f"h.{i}.{name}", shape) for name, shape in block.items()]
    shapes += [("ln_f.weight", (width,)), ("ln_f.bias", (width,))]
    return [spec(name, *shape) for name, shape in shapes]


def llama(
    layers: int, width: int, keys: int, hidden: int, vocabulary: int, *, bias: bool = False
) -> list[ParameterSpec]:
    """The parameters of Llama 3 (and, with `bias`, of Qwen2.5), in bfloat16."""
    shapes: list[tuple[str, tuple[int, ...]]] = [("embed", (vocabulary, width))]
    for i in range(layers):
        block: dict[str, tuple[int, ...]] = {"q": (width, width), "k": (keys, width), "v": (keys, width)}
        if bias:
            block |= {"q_bias": (width,), "k_bias": (keys,), "v_bias": (keys,)}
        block |= {
            "o": (width, width),
            "gate": (hidden, width),
            "up": (hidden, width),
            "down": (width, hidden),
        }
        block |= {"norm_1": (width,), "norm_2": (width,)}
        shapes += [(f"layers.{i}.{name}", shape) for name, shape in block.items()]
    shapes += [("norm", (width,)), ("head", (vocabulary, width))]
    return [spec(name, *shape, dtype="bfloat16") for name, shape in shapes]


KNOWN = {
    "GPT-2": (gpt2(12, 768), 124_439_808),
    "GPT-2 XL": (gpt2(48, 1600), 1_557_611_200),
    "Llama-3-8B": (llama(32, 4096, 1024, 14336, 128256), 8_030_261_248),
    "Llama-3-70B": (llama(80, 8192, 1024, 28672, 128256), 70_553_706_496),
    "Qwen2.5-14B": (llama(48, 5120, 1024, 13824, 152064, bias=True), 14_770_033_664),
}


@pytest.mark.parametrize("model", KNOWN)
def test_known_models_waste_next_to_nothing_and_are_laid_out_at_once(model: str) -> None:
    specs, parameters = KNOWN[model]
    assert sum(s.numel for s in specs) == parameters  # the shapes are the published model's
    start = time.process_time()
    layout = lay_out(specs)
    seconds = time.process_time() - start
    assert layout.waste <= 0.001
    assert seconds < 1.0
    assert layout.chunk_bytes <= layout.used_bytes / 16 or layout.chunk_bytes <= 2 * MIB


@pytest.mark.parametrize(("model", "published"), [("Llama-3-8B", 0.0002), ("Qwen2.5-14B", 0.0064)])
def test_waste_is_not_above_what_is_published(model: str, published: float) -> None:
    assert lay_out(KNOWN[model][0]).waste <= published


@pytest.mark.parametrize("model", ["GPT-2", "GPT-2 XL", "Llama-3-8B", "Qwen2.5-14B"])
def test_most_bytes_lie_in_chunks_of_the_common_size(model: str) -> None:
    layout = lay_out(KNOWN[model][0])
    alike = sum(c.nbytes for c in layout.chunks if c.nbytes == layout.chunk_bytes)
    assert alike >= layout.nbytes / 2


@pytest.mark.usefixtures("no_collections")
def test_a_model_with_thousands_of_parameters_is_laid_out_in_a_second() -> None:
    """A mixture of experts: 48 layers of 64 experts with 3 matrices each."""
    specs = [
        spec(f"{layer}.{expert}.{matrix}", 2048, 1408, dtype="bfloat16", feature="experts")
        for layer in range(48)
        for expert in range(64)
        for matrix in range(3)
    ]
    start = time.process_time()
    assert lay_out(specs).waste <= 0.001
    assert time.process_time() - start < 1.0


def test_chunks_fill_in_the_reverse_of_registration() -> None:
    layout = lay_out([spec(name, 16) for name in "abcde"], chunk_bytes=128)
    assert names(layout) == [["e", "d"], ["c", "b"], ["a"]]
    assert [[s.offset for s in c.slots] for c in layout.chunks] == [[0, 16], [0, 16], [0]]
    assert [c.numel for c in layout.chunks] == [32, 32, 16]  # the last is cut to what it uses


def test_an_oversize_parameter_gets_its_own_chunk_and_does_not_close_the_open_one() -> None:
    layout = lay_out([spec("a", 16), spec("big", 100), spec("b", 16)], chunk_bytes=128)
    assert names(layout) == [["big"], ["b", "a"]]  # backward completes the big one first
    assert layout.chunks[0].oversize
    assert layout.chunks[0].numel == 112  # 400 bytes, rounded up to 448
    assert not layout.chunks[1].oversize


def test_unlike_parameters_never_share_a_chunk() -> None:
    specs = [
        spec("weight", 8),
        spec("bias", 8, settings="no decay"),
        spec("half", 8, dtype="float16"),
        spec("frozen", 8, trainable=False),
        spec("expert", 8, feature="experts"),
        spec("head", 8),
    ]
    layout = lay_out(specs, chunk_bytes=MIB)
    assert names(layout) == [["expert"], ["half"], ["bias"], ["head", "weight"], ["frozen"]]
    assert [c.id for c in layout.trainable] == [0, 1, 2, 3]
    assert layout.groups[layout.chunks[layout.places[1][0]].group] == ChunkGroup(
        "float32", "no decay", True, ""
    )


def test_lookups() -> None:
    layout = lay_out([spec("a", 3), spec("b", 2, 5), spec("scalar")], chunk_bytes=128)
    for index, s in enumerate(layout.specs):
        chunk, number = layout.places[index]
        slot = layout.chunks[chunk].slots[number]
        assert slot.parameter == index
        assert slot.numel == s.numel
    assert [c.used for c in layout.chunks] == [11, 3]


def test_extent_is_what_a_transfer_needs() -> None:
    layout = lay_out([spec("a", 3), spec("b", 16)], chunk_bytes=MIB)
    (chunk,) = layout.chunks
    assert (chunk.extent, chunk.used, chunk.numel) == (19, 19, 32)


def test_empty_parameters_have_slots_and_their_chunk_has_storage() -> None:
    layout = lay_out([spec("a", 0), spec("b", 0, 4)])
    (chunk,) = layout.chunks
    assert [s.numel for s in chunk.slots] == [0, 0]
    assert chunk.numel == 16


def test_no_parameters_make_no_chunks() -> None:
    layout = lay_out([])
    assert layout.chunks == ()
    assert layout.waste == 0.0
    assert "0 parameters" in layout.describe()


def test_the_size_given_is_taken_and_rounded_up_to_the_alignment() -> None:
    assert lay_out([spec("a", 1000)], chunk_bytes=1000).chunk_bytes == 1024


def test_the_search_keeps_to_its_bounds() -> None:
    specs = gpt2(2, 64)
    for smallest, largest in ((4096, 8192), (MIB, MIB), (64, 2**24)):
        assert smallest <= lay_out(specs, smallest=smallest, largest=largest).chunk_bytes <= largest


def test_the_map_survives_its_wire_form() -> None:
    layout = lay_out(gpt2(2, 64))
    assert msgspec.json.decode(msgspec.json.encode(layout), type=ChunkMap) == layout


def test_describe_tells_groups_and_waste() -> None:
    text = lay_out(
        [spec("a", 4), spec("big", 4096), spec("frozen", 4, trainable=False)], chunk_bytes=128
    ).describe()
    assert text.splitlines()[0] == (
        "3 parameters (16.0 KiB) in 3 chunks of 128 B; 0.58% of the memory is unused"
    )
    assert "float32, trainable: 2 chunks, 16.1 KiB, 1 of them of one oversize parameter each" in text
    assert "float32, frozen: 1 chunk," in text


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([spec("a", 2), spec("a", 3)], "parameter 'a' is given twice"),
        ([spec("a", 2, dtype="quint8")], "parameter 'a': no chunk can hold dtype 'quint8'"),
        ([spec("a", 2, -1)], r"parameter 'a': shape \(2, -1\) has a negative size"),
    ],
)
def test_bad_specs_are_one_clear_line(specs: list[ParameterSpec], message: str) -> None:
    with pytest.raises(PrepareError, match=message) as caught:
        lay_out(specs)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "sizes",
    [
        {"chunk_bytes": 10},
        {"chunk_bytes": 0},
        {"chunk_bytes": -5},
        {"smallest": 0},
        {"smallest": 2**21, "largest": 2**20},
        {"alignment": 48},
        {"alignment": 8},
    ],
)
def test_sizes_without_meaning_are_one_clear_line(sizes: dict[str, int]) -> None:
    with pytest.raises(ConfigError) as caught:
        lay_out([spec("a", 2)], **sizes)
    assert "\n" not in str(caught.value)
    assert "bytes" in str(caught.value)
