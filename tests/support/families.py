"""Nine families of models, each some 200 KB of parameters in many small modules, and their batches.

They are for memory that comes and goes: larger than the six of `models.py`, so that a quarter of one is still
several chunks, and between them they use parameters in all the ways that models do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.models import CONTEXT, VOCABULARY, TinyBlock, TinyGPT

IMAGE = 8
CLASSES = 5
WIDTH = 32


class ViT(nn.Module):
    """Images (batch, 3, IMAGE, IMAGE) to logits, by patches of 4 and a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH) * 0.1)
        self.positions = nn.Parameter(torch.randn(1, 1 + (IMAGE // 4) ** 2, WIDTH) * 0.1)
        self.blocks = nn.Sequential(*(TinyBlock(WIDTH, 4) for _ in range(4)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), patches], dim=1) + self.positions
        logits: Tensor = self.head(self.norm(self.blocks(x))[:, 0])
        return logits


class Residual(nn.Module):
    def __init__(self, maps: int) -> None:
        super().__init__()
        self.convolution1 = nn.Conv2d(maps, maps, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(maps)
        self.convolution2 = nn.Conv2d(maps, maps, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(maps)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.norm1(self.convolution1(x)), inplace=True)
        return F.relu(x + self.norm2(self.convolution2(hidden)))


class ResNet(nn.Module):
    """Images (batch, 3, IMAGE, IMAGE) to logits; BatchNorm after each convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.stages = nn.Sequential(*(Residual(16) for _ in range(8)))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.stages(F.relu(self.norm(self.stem(x)))).mean((2, 3)))
        return logits


class Experts(nn.Module):
    """Tokens (batch, CONTEXT) to logits; each token goes to one of eight experts, and some go unused."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.router = nn.Linear(WIDTH, 8)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(8)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        gates, chosen = self.router(x).softmax(-1).max(-1)
        mixed = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            mine = chosen == index
            if mine.any():
                mixed[mine] = expert(x[mine]) * gates[mine].unsqueeze(-1)
        logits: Tensor = self.head(x + mixed)
        return logits


class Recurrent(nn.Module):
    """Tokens (batch, CONTEXT) to logits, by LSTMs of one layer each."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(6))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = x + layer(x)[0]
        logits: Tensor = self.head(x)
        return logits


class Thrice(nn.Module):
    """Tokens (batch, CONTEXT) to logits; the same four blocks are used three times over."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(TinyBlock(WIDTH, 4) for _ in range(4)))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for _ in range(3):
            x = self.blocks(x)
        logits: Tensor = self.head(x)
        return logits


class LowRank(nn.Module):
    """A frozen linear layer in bfloat16 and what trains beside it, in single precision (LoRA)."""

    def __init__(self, inner: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.inner = inner.to(torch.bfloat16).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, inner.in_features) * 0.1)
        self.up = nn.Parameter(torch.randn(inner.out_features, rank) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        adapted: Tensor = self.inner(x.to(torch.bfloat16)).float() + x @ self.down.t() @ self.up.t()
        return adapted


def lora() -> nn.Module:
    """A GPT whose linear layers are frozen and adapted."""
    model = TinyGPT(width=WIDTH, heads=4, layers=4).requires_grad_(False)
    for block in model.blocks:
        assert isinstance(block, TinyBlock)
        block.qkv, block.out = LowRank(block.qkv), LowRank(block.out)  # type: ignore[assignment]
        block.mlp[0], block.mlp[2] = LowRank(block.mlp[0]), LowRank(block.mlp[2])  # type: ignore[arg-type]
    return model


class Assorted(nn.Module):
    """Tokens (batch, CONTEXT) to logits, through PyTorch's modules that treat their weights in ways of their
    own: attention in one call, renormed and reparametrised weights, recurrence over two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH, max_norm=1.0)
        self.attention = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True) for _ in range(4)
        )
        self.recurrent = nn.GRU(WIDTH, WIDTH // 2, num_layers=2, batch_first=True, bidirectional=True)
        self.convolution = nn.ConvTranspose1d(WIDTH, WIDTH, 3, padding=1)
        self.norm = nn.GroupNorm(4, WIDTH)
        self.slope = nn.PReLU(WIDTH)
        self.mixer = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.both = nn.Bilinear(WIDTH, WIDTH, 8)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.attention:
            x = layer(x)
        x = x + self.recurrent(x)[0]
        x = self.slope(self.norm(self.convolution(x.transpose(1, 2)))).transpose(1, 2)
        logits: Tensor = self.head(self.both(x, self.mixer(x)))
        return logits


FAMILIES: Mapping[str, Callable[[], nn.Module]] = MappingProxyType(
    {
        "gpt": lambda: TinyGPT(width=WIDTH, heads=4, layers=4),
        "tied": lambda: TinyGPT(width=WIDTH, heads=4, layers=4, tied=True),
        "vit": ViT,
        "resnet": ResNet,
        "experts": Experts,
        "lstm": Recurrent,
        "thrice": Thrice,
        "lora": lora,
        "assorted": Assorted,
    }
)


def build(name: str, seed: int = 0) -> nn.Module:
    """The model, its parameters drawn from `seed`; the global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return FAMILIES[name]()


def batch(name: str, step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a step for this family."""
    generator = torch.Generator().manual_seed(step)
    if name in ("vit", "resnet"):
        images = torch.randn(4, 3, IMAGE, IMAGE, generator=generator)
        return images, torch.randint(CLASSES, (4,), generator=generator)
    text = torch.randint(VOCABULARY, (4, CONTEXT + 1), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy, a scalar."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())
