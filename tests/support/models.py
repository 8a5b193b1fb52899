"""Six tiny models that between them are awkward in the ways that real ones are, and their batches.

Every batch is a function of (seed, share, step, micro-batch) alone, so that a worker and a
reference in another process see the same numbers. Shares differ in size in two steps of three,
so that a mean that forgets to weight by samples is found out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 17
CONTEXT = 6
FEATURES = 7
CLASSES = 5
IMAGE = 5


class Batch(NamedTuple):
    """One micro-batch of one share; `samples` is the leading dimension of both tensors."""

    inputs: Tensor
    targets: Tensor
    branches: tuple[str, ...] = ()  # which of the branches `Branches` takes

    @property
    def samples(self) -> int:
        return int(self.inputs.shape[0])


class TinyBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, time, width))
        after: Tensor = x + self.mlp(self.norm2(x))
        return after


class TinyGPT(nn.Module):
    """Tokens (batch, CONTEXT) to logits (batch, CONTEXT, VOCABULARY); `tied` shares embedding and head."""

    def __init__(self, *, width: int = 8, heads: int = 2, layers: int = 1, tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.randn(CONTEXT, width) * 0.1)
        self.blocks = nn.Sequential(*(TinyBlock(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions)))
        return logits


class Frozen(nn.Module):
    """Vectors (batch, FEATURES) to logits (batch, CLASSES); the first layer and one bias do not train."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 16)
        self.second = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.last = nn.Linear(16, CLASSES)
        self.first.requires_grad_(False)
        self.second.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(self.norm(torch.tanh(self.second(torch.tanh(self.first(x))))))
        return logits


class Branches(nn.Module):
    """Vectors to logits, through the branches that the caller names; `never` is used by nobody."""

    names = ("always", "turns", "odd")

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(FEATURES, 12)
        self.never = nn.Linear(12, 3)
        self.branches = nn.ModuleDict({name: nn.Linear(12, CLASSES) for name in self.names})

    def forward(self, x: Tensor, branches: tuple[str, ...] = names) -> Tensor:
        hidden = torch.tanh(self.trunk(x))
        return torch.stack([self.branches[name](hidden) for name in branches]).sum(0)


class OddSizes(nn.Module):
    """Vectors to logits; odd shapes, a scalar, a single element and a parameter with no element at all."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.25))
        self.first = nn.Linear(FEATURES, 13)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.shift = nn.Parameter(torch.full((1,), 0.5))
        self.cube = nn.Parameter(torch.randn(3, 13, 1) * 0.3)
        self.last = nn.Linear(13, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)) * self.cube.prod(0).squeeze(-1) * self.gain + self.shift
        logits: Tensor = self.last(hidden) + self.empty.sum()
        return logits


class Normed(nn.Module):
    """Images (batch, 3, IMAGE, IMAGE) to logits (batch, CLASSES), with BatchNorm over maps and features.

    No bias before a BatchNorm: it has no true gradient, and AdamW would blow up its rounding noise.
    """

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 6, 3, bias=False)
        self.norm1 = nn.BatchNorm2d(6)
        self.hidden = nn.Linear(6 * (IMAGE - 2) ** 2, 10, bias=False)
        self.norm2 = nn.BatchNorm1d(10)
        self.last = nn.Linear(10, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        maps = torch.tanh(self.norm1(self.convolution(x)))
        logits: Tensor = self.last(torch.tanh(self.norm2(self.hidden(maps.flatten(1)))))
        return logits


def share_size(share: int, step: int, micro: int = 0) -> int:
    """Samples of a share's micro-batch: 3 for everyone in steps 0, 3, 6..., else 2 to 5 by share."""
    return 3 if step % 3 == 0 else 2 + (share + step + micro) % 4


def branches_used(share: int, step: int) -> tuple[str, ...]:
    """`turns` is one of four shares' in turn (so, in some steps, nobody's); `odd` is all's, each odd step."""
    used = ["always"]
    if share == step % 4:
        used.append("turns")
    if step % 2:
        used.append("odd")
    return tuple(used)


def _generator(seed: int, share: int, step: int, micro: int) -> torch.Generator:
    return torch.Generator().manual_seed(((seed * 1009 + share) * 100_003 + step) * 101 + micro)


@dataclass(frozen=True)
class TinyModel:
    """A model to build and the batches to train it on."""

    name: str
    make: Callable[[], nn.Module]
    kind: str  # what its inputs are: tokens, vectors or images

    def build(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
        """The model, its parameters drawn from `seed`; the global generator is left as it was."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make().to(dtype)

    def batch(
        self, share: int, step: int, micro: int = 0, *, seed: int = 0, dtype: torch.dtype = torch.float32
    ) -> Batch:
        """What share `share` sees in micro-batch `micro` of step `step`."""
        generator = _generator(seed, share, step, micro)
        samples = share_size(share, step, micro)
        if self.kind == "images":
            samples += 3  # BatchNorm over two or three samples divides by next to nothing
        if self.kind == "tokens":
            text = torch.randint(VOCABULARY, (samples, CONTEXT + 1), generator=generator)
            return Batch(text[:, :-1].contiguous(), text[:, 1:].contiguous())
        shape = (samples, 3, IMAGE, IMAGE) if self.kind == "images" else (samples, FEATURES)
        inputs = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        targets = torch.randint(CLASSES, (samples,), generator=generator)
        branches = branches_used(share, step) if self.make is Branches else ()
        return Batch(inputs, targets, branches)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean cross-entropy over the batch's samples, a scalar."""
        logits = model(batch.inputs, batch.branches) if batch.branches else model(batch.inputs)
        return F.cross_entropy(logits.flatten(0, -2), batch.targets.flatten())


MODELS: Mapping[str, TinyModel] = MappingProxyType(
    {
        model.name: model
        for model in (
            TinyModel("gpt", TinyGPT, "tokens"),
            TinyModel("tied", lambda: TinyGPT(tied=True), "tokens"),
            TinyModel("frozen", Frozen, "vectors"),
            TinyModel("unused", Branches, "vectors"),
            TinyModel("odd", OddSizes, "vectors"),
            TinyModel("batchnorm", Normed, "images"),
        )
    }
)
"""The parity models by name: GPT, tied, frozen, unused in some steps, odd sizes, BatchNorm."""
