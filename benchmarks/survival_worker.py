"""One worker of benchmarks/survival.py, which starts it, kills it and starts it again.

    python benchmarks/survival_worker.py atoll|torchft|torchft-mended RANK LOG

The same model, data and optimizer for both; what is around the loop is each one's own way, as its
documentation shows it. A line of LOG for each event: {"event", "step", "world", "sum", "time"}: "started"
when the script runs, "tried" before each forward, "made" after each step that counts, "sum" being the
parameters' CRC-32.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, LAYERS, BATCH = 256, 4, 64


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    model = nn.Sequential(*layers)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def batch(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(BATCH, WIDTH, generator=generator)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = (model(x) - x.roll(1, 1)).square().mean()
    return loss


class Log:
    def __init__(self, path: str, rank: int) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._rank = rank

    def __call__(self, event: str, step: int = -1, world: int = 0, model: nn.Module | None = None) -> None:
        line = {
            "event": event,
            "rank": self._rank,
            "pid": os.getpid(),
            "step": step,
            "world": world,
            "sum": 0 if model is None else sum_of(model),
            "time": time.monotonic(),
        }
        os.write(self._file, json.dumps(line).encode() + b"\n")


def sum_of(model: nn.Module) -> int:
    found = 0
    for parameter in model.parameters():
        found = zlib.crc32(parameter.detach().contiguous().view(torch.uint8).numpy(), found)  # type: ignore[arg-type]
    return found


def atoll(rank: int, log: Log) -> None:
    """A ring through a hub, by $ATOLL_HUB; who comes late enters with the state of a living worker."""
    import atoll

    with atoll.join() as session:
        model, optimizer = model_and_optimizer()
        model, optimizer = session.prepare(model, optimizer)
        session.resume()
        while True:
            step = session.iteration
            log("tried", step)
            loss_of(model, batch(step, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
            log("made", step, session.world, model)


def torchft(rank: int, log: Log, mended: bool = False) -> None:
    """As torchft's train_ddp.py: a replica of one worker; the lighthouse is $TORCHFT_LIGHTHOUSE.

    In 0.2.0 a survivor whose all-reduce fails under Gloo ends with an AssertionError in the hook of its
    DistributedDataParallel, whose future is not made before the wait that fails. `mended` has a hook without
    that mistake: the error is the manager's already, which then does not let the step count.
    """
    from torch.distributed import TCPStore
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    class Mended(DistributedDataParallel):
        @staticmethod
        def _comm_hook(state, bucket):  # type: ignore[no-untyped-def] # torch refuses annotations as text
            state.allreduce(bucket.buffer()).wait()
            done: torch.futures.Future[Tensor] = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

    model, inner = model_and_optimizer()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        replica_id=f"worker_{rank}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        hostname="127.0.0.1",
        timeout=timedelta(seconds=10),
    )
    wrapped = (Mended if mended else DistributedDataParallel)(manager, model)
    optimizer = Optimizer(manager, inner)
    while True:
        step = manager.current_step()
        log("tried", step)
        optimizer.zero_grad()
        loss_of(wrapped, batch(step, rank)).backward()
        optimizer.step()
        if manager.current_step() > step:
            log("made", manager.current_step() - 1, manager.num_participants(), model)


def main() -> None:
    torch.set_num_threads(1)
    system, rank, path = sys.argv[1:]
    log = Log(path, int(rank))
    log("started")
    systems: dict[str, Callable[[int, Log], None]] = {
        "atoll": atoll,
        "torchft": torchft,
        "torchft-mended": partial(torchft, mended=True),
    }
    systems[system](int(rank), log)


if __name__ == "__main__":
    main()
