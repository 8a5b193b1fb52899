"""Trains a model under budgets and says what the process took: `python memory_bounds.py FAMILY FOLDER`.

A process of its own, since what it takes is looked at as a whole. The test imports the models.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import atoll
import atoll.memory
from atoll.core.heap import give_back_freed_memory, keep_freed_memory
from atoll.memory.fitted import GRADIENTS_UNDER_WAY

MIB = 2**20
STEPS = 3
DEVICE, HOST, DISK = 24 * MIB, 48 * MIB, 512 * MIB


class Block(nn.Module):
    """A transformer's layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # (batch, time, width)
        heads = [part.unflatten(-1, (8, -1)).transpose(1, 2) for part in self.qkv(self.first(x)).chunk(3, -1)]
        x = x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


def transformer(layers: int = 5) -> nn.Module:
    return nn.Sequential(nn.Linear(256, 512), *(Block(512) for _ in range(layers)), nn.Linear(512, 256))


def convolutions(layers: int = 5) -> nn.Module:
    inner = (
        nn.Sequential(nn.Conv2d(384, 384, 3, padding=1), nn.BatchNorm2d(384), nn.ReLU())
        for _ in range(layers)
    )
    return nn.Sequential(nn.Conv2d(3, 384, 3, padding=1), *inner, nn.AdaptiveAvgPool2d(1), nn.Flatten(1))


# By family: a model of so many layers, and its input.
FAMILIES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "transformer": (transformer, (6, 96, 256)),
    "convolutions": (convolutions, (12, 3, 12, 12)),
}


def step(model: nn.Module, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model(torch.randn(shape)).square().mean().backward()


def status(name: str) -> int:
    """In bytes."""
    return int(Path("/proc/self/status").read_text().split(name + ":")[1].split()[0]) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def activations(make: Any, shape: tuple[int, ...]) -> int:
    """The most that forward and backward of the plain model take of the process beside the parameters, where
    each gradient goes as it comes: an input of the formula."""
    keep_freed_memory(budget=DEVICE + HOST)
    model = make()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    give_back_freed_memory()  # else some of what they take was in the process before
    before = status("VmRSS")
    forget_peak()
    for _ in range(STEPS):
        step(model, shape)
        give_back_freed_memory()
    return status("VmHWM") - before


def main(family: str, folder: str) -> None:
    torch.set_num_threads(1)
    make, shape = FAMILIES[family]
    small = make(1)  # what torch takes once is not the budgets'
    optimizer = torch.optim.AdamW(small.parameters(), fused=True)
    step(small, shape)
    optimizer.step()
    del small, optimizer
    said: dict[str, Any] = {"activations": activations(make, shape)}
    give_back_freed_memory()
    before = status("VmRSS")
    forget_peak()
    memory = atoll.Memory(device=str(DEVICE), host=str(HOST), disk=f"{folder}:{DISK}")
    with atoll.memory.init(memory):
        model = make()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    fitted = atoll.memory.fit(model, optimizer, memory=memory)
    for _ in range(STEPS):
        step(model, shape)
        optimizer.step()
        optimizer.zero_grad()
    figures, plan = fitted.stats(), fitted.plan
    said |= {
        "peak": status("VmHWM") - before,
        "device": plan.blocks * plan.chunk_bytes,
        "host": plan.host_bytes,
        "gradients": GRADIENTS_UNDER_WAY * plan.chunk_bytes,
        "disk": figures.disk_peak,
        "payloads": 4 * len(fitted.chunk_map.chunks),
        "need": 4 * sum(parameter.nbytes for parameter in model.parameters()),
    }
    fitted.close()
    print(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
