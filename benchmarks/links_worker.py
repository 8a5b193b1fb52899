"""One worker of benchmarks/links.py, which starts it in a lab, by way of `atoll lab run`.

    python benchmarks/links_worker.py FOLDER PLAN

PLAN is JSON (`Plan`). It trains a small network, whose gradients are as large as the plan says, on random
numbers; the lab slows its computing down. FOLDER/RANK.json gets when each step was made.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import atoll
from runs import write_record

INPUTS = 16


@dataclass(frozen=True)
class Plan:
    """What a training is."""

    width: int  # of the hidden layers: width^2 parameters and a few more
    batch: int
    samples: int  # each used once, over all workers
    passes: int  # over the layers in each step, so that computing takes as long as it shall
    seed: int


@dataclass
class Record:
    """What FOLDER/RANK.json holds; times are in seconds since the epoch."""

    rank: int
    batch: int
    steps: list[float] = field(default_factory=list)  # when each was made


class Network(nn.Module):
    """Two layers and a head. The middle one is passed through as often as `passes` says."""

    def __init__(self, width: int, passes: int) -> None:
        super().__init__()
        self.first, self.middle, self.last = (
            nn.Linear(INPUTS, width),
            nn.Linear(width, width),
            nn.Linear(width, 1),
        )
        self._passes = passes

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(inputs))
        for _ in range(self._passes):
            hidden = torch.tanh(self.middle(hidden))
        found: torch.Tensor = self.last(hidden)
        return found


def main() -> None:
    folder, plan = Path(sys.argv[1]), Plan(**json.loads(sys.argv[2]))
    torch.set_num_threads(1)
    torch.manual_seed(plan.seed)
    data = TensorDataset(torch.randn(plan.samples, INPUTS), torch.randn(plan.samples, 1))
    with atoll.join() as session:
        record = Record(session.rank, plan.batch)
        model = Network(plan.width, plan.passes)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        session.prepare(model, optimizer)
        for inputs, wanted in DataLoader(data, plan.batch, sampler=session.sampler(data, seed=plan.seed)):
            nn.functional.mse_loss(model(inputs), wanted).backward()
            optimizer.step()
            optimizer.zero_grad()
            record.steps.append(time.time())
    write_record(folder, record.rank, record)


if __name__ == "__main__":
    main()
