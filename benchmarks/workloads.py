"""The models that the benchmarks train, each with its optimizer and its batches.

The first is `examples/gpt.py` itself: its model, its default sizes, its text.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import atoll
from atoll.train.sync.server import Server
from common import MIB

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import gpt

Batch = tuple[Tensor, Tensor]  # inputs and targets
Block = Callable[[int], None]  # trains by one measured block of steps, given its number


@dataclass(frozen=True)
class Workload:
    """A model to train. `steps` is how many steps make one measured block; `clip` the norm to clip to."""

    name: str
    build: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    batches: Callable[[int, int], list[Batch]]  # (rank, how many)
    steps: int = 1
    clip: float | None = 1.0

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = batch
        return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())

    def make(self) -> nn.Module:
        """The model with its initial values: the same at every call."""
        torch.manual_seed(0)
        return self.build()

    def in_plain_pytorch(self, batches: Sequence[Batch]) -> tuple[nn.Module, Block]:
        """The model, and what trains it by one block of steps."""
        model = self.make()
        return model, self.trainer(model, self.optimizer(model), batches)

    def under_atoll(self, batches: Sequence[Batch], session: atoll.Session) -> tuple[nn.Module, Block]:
        """The same under `session`."""
        model = self.make()
        optimizer = self.optimizer(model)
        session.prepare(model, optimizer)
        return model, self.trainer(model, optimizer, batches, session)

    def trainer(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batches: Sequence[Batch],
        session: atoll.Session | None = None,
    ) -> Block:
        """A function that trains `model` by one block of steps, given the block's number."""

        def block(number: int) -> None:
            for step in range(number * self.steps, (number + 1) * self.steps):
                loss = self.loss(model, batches[step % len(batches)])
                loss.backward()  # type: ignore[no-untyped-call]
                if self.clip is not None:
                    if session is None:
                        nn.utils.clip_grad_norm_(model.parameters(), self.clip)
                    else:
                        session.clip_grad_norm_(self.clip)
                optimizer.step()
                optimizer.zero_grad()
                if session is not None:
                    session.log(loss=loss)

        return block


def fetch_newest(session: atoll.Session) -> None:
    """Put the parameters as the shards have them now into the (only) model of an asynchronous session."""
    exchange = session._state.prepared[0].reducer
    assert isinstance(exchange, Server)
    exchange.before_use()
    exchange.parameters.pull(exchange.steps)
    exchange.parameters.publish()


# -- the GPT of examples/gpt.py ----------------------------------------------------------------------------


@functools.cache
def _gpt_defaults() -> dict[str, int]:
    with mock.patch.object(sys, "argv", ["gpt.py"]):
        return dict(vars(gpt.arguments()))


def _gpt() -> nn.Module:
    sizes = _gpt_defaults()
    model: nn.Module = gpt.GPT(sizes["layers"], sizes["heads"], sizes["width"], sizes["context"])
    return model


@functools.cache
def _windows() -> gpt.Windows:
    text, _ = gpt.read_text(4 * MIB)
    return gpt.Windows(text, _gpt_defaults()["context"])


def _gpt_batches(rank: int, count: int, batch: int | None = None) -> list[Batch]:
    windows = _windows()
    batch = batch or _gpt_defaults()["batch"]
    draw = torch.Generator().manual_seed(rank)
    indices = torch.randint(len(windows), (count, batch), generator=draw).tolist()
    stacked = [torch.stack([windows[index] for index in row]) for row in indices]
    return [(window[:, :-1].contiguous(), window[:, 1:].contiguous()) for window in stacked]


def gpt_adamw(
    model: nn.Module, fused: bool | None = True, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.98)
) -> torch.optim.Optimizer:
    """In two param groups, as examples/gpt.py makes it."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=fused)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


# -- a small and a wide network of linear layers -----------------------------------------------------------


def digits_network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


def _wide() -> nn.Module:
    sizes = (nn.Linear(1024, 2048), nn.Linear(2048, 2048))
    return nn.Sequential(sizes[0], nn.ReLU(), sizes[1], nn.ReLU(), nn.Linear(2048, 10))


def _noise(features: int, batch: int) -> Callable[[int, int], list[Batch]]:
    def batches(rank: int, count: int) -> list[Batch]:
        draw = torch.Generator().manual_seed(rank)
        return [
            (torch.randn(batch, features, generator=draw), torch.randint(10, (batch,), generator=draw))
            for _ in range(count)
        ]

    return batches


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


GPT_FUSED = Workload("GPT, AdamW fused", _gpt, gpt_adamw, _gpt_batches)
GPT_ADAMW = Workload("GPT, AdamW", _gpt, functools.partial(gpt_adamw, fused=None), _gpt_batches)
GPT_SGD = Workload("GPT, SGD with momentum", _gpt, _sgd, _gpt_batches)
GPT_SMALL_BATCH = Workload(
    "GPT, 2 windows a batch", _gpt, gpt_adamw, functools.partial(_gpt_batches, batch=2), steps=2
)
DIGITS = Workload("digits (MLP, 17k parameters)", digits_network, _adamw, _noise(64, 32), steps=25, clip=None)
WIDE = Workload("wide MLP (6.3M parameters)", _wide, _sgd, _noise(1024, 32), steps=1)
TINY = Workload(
    "one linear layer (90 parameters)",
    lambda: nn.Linear(8, 10),
    _sgd,
    _noise(8, 4),
    steps=25,
    clip=None,
)
