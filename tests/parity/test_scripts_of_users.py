"""Scripts as users of PyTorch write them: over two workers each gives what one process gives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import atoll
from support.pool import WorkerPool
from support.runs import TOGETHER, run_at

WORLD = 2
STEPS = 7


class Tied(nn.Module):
    """An embedding whose weight is the last layer's too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.out(torch.tanh(self.embedding(words)))
        return out


class Recomputed(nn.Module):
    """A layer that backward computes again."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.out = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.0)), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(checkpoint(self.inside, x, use_reentrant=False))
        return out


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def sequences() -> nn.Sequential:
    return nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), nn.Linear(8, 1))


def drawn(step: int, rank: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def of_rows(net: nn.Module, step: int, rank: int) -> Tensor:
    loss: Tensor = net(drawn(step, rank, 4, 8)).square().mean()
    return loss


def of_words(net: nn.Module, step: int, rank: int) -> Tensor:
    words = drawn(step, rank, 6).mul(100).long().remainder(10)
    return cross_entropy(net(words), words.add(1).remainder(10))


def of_sequences(net: nn.Module, step: int, rank: int) -> Tensor:
    """Time comes first, and each worker's is of another length."""
    loss: Tensor = net(drawn(step, rank, 5 + 2 * rank, 3, 8)).square().mean()
    return loss


def in_bfloat16(net: nn.Module, step: int, rank: int) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        loss: Tensor = net(drawn(step, rank, 4, 8).float()).float().square().mean()
    return loss


def two_rates(net: nn.Module) -> Optimizer:
    first, _, last = net.children()
    return SGD([{"params": first.parameters(), "lr": 0.1}, {"params": last.parameters()}], lr=0.01)


# The model, its optimizer, and the loss of a worker's batch. `train` knows what else each script does.
SCRIPTS: dict[
    str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Optimizer], Callable[..., Tensor]]
] = {
    "accumulation with an odd last window": (perceptron, lambda net: SGD(net.parameters(), 0.1), of_rows),
    "averaged weights": (perceptron, lambda net: SGD(net.parameters(), 0.1), of_rows),
    "frozen in mid-run": (perceptron, lambda net: Adam(net.parameters(), 0.01, weight_decay=0.1), of_rows),
    "tied weights": (Tied, lambda net: AdamW(net.parameters(), 0.01), of_words),
    "sequences first": (sequences, lambda net: SGD(net.parameters(), 0.1), of_sequences),
    "autocast": (perceptron, lambda net: SGD(net.parameters(), 0.1), in_bfloat16),
    "checkpointing": (Recomputed, lambda net: SGD(net.parameters(), 0.1, momentum=0.9), of_rows),
    "gradients kept over steps": (perceptron, lambda net: SGD(net.parameters(), 0.01), of_rows),
    "rates set by hand": (perceptron, two_rates, of_rows),
    "maximize": (
        perceptron,
        lambda net: RMSprop(net.parameters(), 0.001, maximize=True, centered=True),
        of_rows,
    ),
}


def train(session: atoll.Session | None, script: str) -> list[Tensor]:
    """One worker's part, or all workers' by one process; returns the model's values."""
    build, optimizer_of, loss_of = SCRIPTS[script]
    torch.manual_seed(0)
    net = build() if script == "autocast" else build().double()
    optimizer = optimizer_of(net)
    if session is not None:
        session.prepare(net, optimizer)
    averaged = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for step in range(STEPS):
        steps = not script.startswith("accumulation") or step % 3 == 2 or step == STEPS - 1
        if script.startswith("frozen"):
            next(net.children()).requires_grad_(step not in (2, 3))
        if script.startswith("rates"):
            optimizer.param_groups[1]["lr"] = 0.01 * (step + 1)
        with contextlib.nullcontext() if session is None or steps else session.no_sync():
            ranks = range(WORLD) if session is None else [session.rank]
            torch.stack([loss_of(net, step, rank) for rank in ranks]).mean().backward()
        if steps:
            optimizer.step()
            averaged.update_parameters(net)
        if steps and not (script.startswith("gradients") and step % 2):
            optimizer.zero_grad(set_to_none=not script.startswith("gradients"))
    followed: Sequence[Any] = [net, averaged] if script.startswith("averaged") else [net]
    return [parameter.detach().clone() for each in followed for parameter in each.parameters()]


PAIRS = [
    pytest.param(kind, script, marks=[] if (i + j) % 4 == 0 else pytest.mark.soak)
    for i, kind in enumerate(kind for kind in TOGETHER if kind != "tiers")
    for j, script in enumerate(SCRIPTS)
]


@pytest.mark.parametrize(("kind", "script"), PAIRS)
def test_two_workers_train_as_one_process(pool: WorkerPool, kind: str, script: str) -> None:
    right = train(None, script)
    for found in run_at(pool, kind, train, script, world=WORLD):
        for value, expected in zip(found, right, strict=True):
            torch.testing.assert_close(value, expected, rtol=0, atol=1e-6 if script == "autocast" else 1e-12)
