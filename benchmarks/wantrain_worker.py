"""One worker of benchmarks/wantrain.py, which starts it in a lab, by way of `atoll lab run`.

    python benchmarks/wantrain_worker.py FOLDER PLAN

PLAN is JSON (`Plan`). It trains the small GPT of `benchmarks/consistency.py`. FOLDER/RANK.json gets when each
step was made, and, from the first worker, the held-out loss at some of them.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Subset

import atoll
from runs import write_record
from workloads import gpt, gpt_adamw

CONTEXT = 64
TEXT = 4 * 2**20  # bytes
HELD_OUT = 512  # windows


@dataclass(frozen=True)
class Plan:
    """What a training is. It ends after `stop` of `steps` iterations: the learning rate goes by `steps`."""

    seed: int
    workers: int
    batch: int  # windows, of each worker
    steps: int
    stop: int
    look: int  # iterations between two looks at the held-out loss


@dataclass
class Record:
    """What FOLDER/RANK.json holds. Times are in seconds since the first step's end, looks left out."""

    rank: int
    steps: list[float] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)  # (iterations made, nats)
    bytes_model: int = 0


def main() -> None:
    folder, plan = Path(sys.argv[1]), Plan(**json.loads(sys.argv[2]))
    torch.set_num_threads(1)
    text, rest = gpt.read_text(TEXT)
    windows, others = gpt.Windows(text, CONTEXT), gpt.Windows(rest, CONTEXT)
    tested = torch.stack([others[i] for i in range(0, len(others), max(1, len(others) // HELD_OUT))])
    torch.manual_seed(plan.seed)
    model = gpt.GPT(layers=2, heads=4, width=64, context=CONTEXT)
    chosen = torch.randperm(len(windows))[: plan.workers * plan.batch * plan.steps].tolist()
    optimizer = gpt_adamw(model, lr=3e-3, betas=(0.9, 0.95))
    scheduler = LambdaLR(optimizer, lambda step: gpt.rate(step, step / plan.steps, warm_up=40))
    with atoll.join() as session:
        record = Record(session.rank, bytes_model=sum(4 * p.numel() for p in model.parameters()))
        session.prepare(model, optimizer)
        data = Subset(windows, chosen)
        looked, began = 0.0, 0.0
        for batch in DataLoader(data, plan.batch, sampler=session.sampler(data, seed=plan.seed)):
            gpt.loss_of(model, batch).backward()
            session.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            began = began or time.monotonic()
            record.steps.append(time.monotonic() - began - looked)
            made = len(record.steps)
            if made == plan.stop or made % plan.look == 0:
                start = time.monotonic()
                if session.rank == 0:
                    with torch.no_grad():
                        record.held_out.append((made, float(gpt.loss_of(model, tested))))
                session.barrier()  # so that nobody's looking is another's waiting
                looked += time.monotonic() - start
            if made == plan.stop:
                break
    write_record(folder, record.rank, record)


if __name__ == "__main__":
    main()
