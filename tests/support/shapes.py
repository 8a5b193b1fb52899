"""The shapes of published models, from their configurations: parameters in the order of registration.

Nothing is allocated. The names are those of the checkpoints that are published, so that a header of one
can be compared with this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from atoll.chunks import ParameterSpec


@dataclass(frozen=True)
class Decoder:
    """The configuration of a decoder with RMSNorm, grouped-query attention and a gated feed-forward.

    `experts` 0 is a dense feed-forward; `bias` is that of query, key and value; `tied`: the output layer is
    the embedding.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    experts: int = 0
    bias: bool = False
    tied: bool = False
    dtype: str = "bfloat16"


# From config.json of meta-llama/Meta-Llama-3-8B, Qwen/Qwen2.5-14B and mistralai/Mixtral-8x7B-v0.1.
LLAMA_3_8B = Decoder(layers=32, width=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128256)
QWEN_2_5_14B = Decoder(layers=48, width=5120, heads=40, kv_heads=8, ffn=13824, vocabulary=152064, bias=True)
MIXTRAL_8X7B = Decoder(layers=32, width=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=32000, experts=8)


def decoder(config: Decoder) -> list[ParameterSpec]:
    """The parameters of such a model; experts' have the feature `experts`."""
    width, kv_width = config.width, config.width // config.heads * config.kv_heads
    specs: list[ParameterSpec] = []

    def add(name: str, *shape: int, feature: str = "") -> None:
        specs.append(ParameterSpec(name, shape, config.dtype, feature=feature))

    def add_gated(prefix: str, names: Sequence[str], feature: str = "") -> None:
        for name in names:
            down = name in ("down_proj", "w2")
            shape = (width, config.ffn) if down else (config.ffn, width)
            add(f"{prefix}.{name}.weight", *shape, feature=feature)

    add("model.embed_tokens.weight", config.vocabulary, width)
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}"
        for name, rows in (("q", width), ("k", kv_width), ("v", kv_width)):
            add(f"{prefix}.self_attn.{name}_proj.weight", rows, width)
            if config.bias:
                add(f"{prefix}.self_attn.{name}_proj.bias", rows)
        add(f"{prefix}.self_attn.o_proj.weight", width, width)
        if config.experts:
            add(f"{prefix}.block_sparse_moe.gate.weight", config.experts, width)
            for expert in range(config.experts):
                add_gated(f"{prefix}.block_sparse_moe.experts.{expert}", ("w1", "w2", "w3"), "experts")
        else:
            add_gated(f"{prefix}.mlp", ("gate_proj", "up_proj", "down_proj"))
        add(f"{prefix}.input_layernorm.weight", width)
        add(f"{prefix}.post_attention_layernorm.weight", width)
    add("model.norm.weight", width)
    if not config.tied:
        add("lm_head.weight", config.vocabulary, width)
    return specs


def gpt2(
    layers: int = 48,
    width: int = 1600,
    vocabulary: int = 50257,
    positions: int = 1024,
    *,
    dtype: str = "float32",
) -> list[ParameterSpec]:
    """A GPT-2, by default XL (openai-community/gpt2-xl); the output layer is the embedding."""
    specs: list[ParameterSpec] = []

    def add(name: str, *shape: int) -> None:
        specs.append(ParameterSpec(f"transformer.{name}", shape, dtype))

    add("wte.weight", vocabulary, width)
    add("wpe.weight", positions, width)
    for layer in range(layers):
        for name, rows, columns in (
            ("ln_1", 0, width),
            ("attn.c_attn", width, 3 * width),
            ("attn.c_proj", width, width),
            ("ln_2", 0, width),
            ("mlp.c_fc", width, 4 * width),
            ("mlp.c_proj", 4 * width, width),
        ):
            add(f"h.{layer}.{name}.weight", *([rows, columns] if rows else [columns]))
            add(f"h.{layer}.{name}.bias", columns)
    add("ln_f.weight", width)
    add("ln_f.bias", width)
    return specs


def with_adapters(
    base: Sequence[ParameterSpec],
    rank: int = 16,
    targets: Sequence[str] = ("q_proj", "k_proj", "v_proj", "o_proj"),
    dtype: str = "float32",
) -> list[ParameterSpec]:
    """`base`, frozen, with an adapter (LoRA) of two trainable matrices after each weight of `targets`."""
    specs: list[ParameterSpec] = []
    for spec in base:
        specs.append(msgspec.structs.replace(spec, trainable=False))
        module, _, kind = spec.name.rpartition(".")
        if kind == "weight" and module.rpartition(".")[2] in targets:
            rows, columns = spec.shape
            specs.append(ParameterSpec(f"{module}.lora_A.weight", (rank, columns), dtype))
            specs.append(ParameterSpec(f"{module}.lora_B.weight", (rows, rank), dtype))
    return specs


# The models of which the documentation gives the waste, by name.
PUBLISHED: dict[str, Callable[[], list[ParameterSpec]]] = {
    "GPT-2 XL": gpt2,
    "Llama-3-8B": lambda: decoder(LLAMA_3_8B),
    "Qwen2.5-14B": lambda: decoder(QWEN_2_5_14B),
    "Mixtral-8x7B": lambda: decoder(MIXTRAL_8X7B),
    "Llama-3-8B with LoRA": lambda: with_adapters(decoder(LLAMA_3_8B)),
}
