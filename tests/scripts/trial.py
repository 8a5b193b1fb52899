"""Small parts that the scripts of this folder share: one script trains with plain torch, or with Atoll.

    with join() as session:
        model, optimizer = session.prepare(model, optimizer)

`python sgd.py` trains in this process with plain torch. `atoll run --workers 2 sgd.py` trains the same model
on the same batches with Atoll: `join` is then `atoll.join`. What a script has shown of itself (`keep_loss`,
`keep`) is printed at its end, and the driver (`tests/support/table.py`) compares it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

WORKERS = 2  # whose batches one process trains on, where a batch must be seen worker by worker


class Plain:
    """A session of plain torch: one process, which changes neither models nor optimizers."""

    rank, world, is_main, device = 0, 1, True, torch.device("cpu")

    def __init__(self) -> None:
        self.iteration = 0
        self._models: list[nn.Module] = []
        self._samplers: list[DistributedSampler[Any]] = []

    def prepare(self, model: nn.Module, optimizer: Any, **_: Any) -> tuple[nn.Module, Any]:
        self._models.append(model)
        for p in model.parameters():
            _begun.setdefault(id(p), (p, p.detach().clone()))
        return model, optimizer

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def clip_grad_norm_(self, max_norm: float, model: nn.Module | None = None) -> Tensor:
        return nn.utils.clip_grad_norm_((model or self._models[0]).parameters(), max_norm)

    def weight(self, samples: float, model: nn.Module | None = None) -> None:
        pass

    def register(self, **objects: Any) -> None:
        pass

    def barrier(self) -> None:
        pass

    def reduce(self, value: Any, op: str = "mean", weight: float | None = None) -> Any:
        return value

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def sampler(self, dataset: Any, seed: int = 0) -> DistributedSampler[Any]:
        self._samplers.append(DistributedSampler(dataset, num_replicas=1, rank=0, seed=seed))
        return self._samplers[-1]

    def epoch_of(self, loader: Any) -> Iterator[Any]:
        yield from loader
        for sampler in self._samplers:
            sampler.set_epoch(sampler.epoch + 1)

    def __enter__(self) -> Plain:
        return self

    def __exit__(self, *_: object) -> None:
        if joins is None:
            show()


# The driver sets these for the script that it runs next.
joins: Callable[[], Any] | None = None
losses: list[float] = []
values: dict[str, Tensor] = {}
starts: dict[str, Tensor] = {}  # of plain torch: with what those of `values` that it trains began
_begun: dict[int, tuple[Tensor, Tensor]] = {}  # by the parameter's id: the parameter, and its values then


def join() -> Any:
    """Return a session: Atoll's where Atoll runs the script, else one of plain torch."""
    if joins is not None:
        return joins()
    if "ATOLL_CONFIG" in os.environ:
        import atoll

        return atoll.join()
    return Plain()


def start(how: Callable[[], Any] | None) -> None:
    """Forget the script before, and have the next one join in this way."""
    global joins
    joins = how
    for each in (losses, values, starts, _begun):
        each.clear()
    torch.manual_seed(0)


def keep_loss(loss: Any) -> None:
    """Keep this worker's loss of an iteration; one process's is the mean of the workers'."""
    losses.append(float(loss.detach() if isinstance(loss, Tensor) else loss))


def keep(session: Any, **models: Any) -> None:
    """Keep the values with which a script ends, once they are the newest on every worker."""
    session.barrier()
    gathered = getattr(session, "whole", None)  # of a rival that shards parameters
    for name, model in models.items():
        is_model = isinstance(model, nn.Module)
        held = dict(model.named_parameters()) if is_model else {"": model}
        with gathered(model) if gathered and is_model else contextlib.nullcontext():
            for key, value in held.items():
                whole = value.full_tensor() if hasattr(value, "full_tensor") else torch.as_tensor(value)
                full = f"{name}.{key}" if key else name
                values[full] = whole.detach().clone()
                if id(value) in _begun:
                    starts[full] = _begun[id(value)][1]


def show() -> None:
    print("losses", *(f"{loss:.6f}" for loss in losses))
    for name, value in values.items():
        print(f"{name} {tuple(value.shape)}: sum {float(value.abs().sum()):.9g}")


def mine(session: Any, *batch: Any) -> Any:
    """Return this worker's rows of a batch that all workers know: every `session.world`-th."""
    found = [each[session.rank :: session.world] for each in batch]
    return found[0] if len(found) == 1 else found


def shares(session: Any, batch: Any) -> list[Any]:
    """Return the parts of the batch that pass through the model one by one: this worker's, or every one's."""
    ranks = range(WORKERS) if session.world == 1 else [session.rank]
    return [batch[rank::WORKERS] for rank in ranks]


def drawn(seed: int, *shape: int) -> Tensor:
    """Return the same random numbers on every worker."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def classes(seed: int, rows: int, count: int = 4) -> Tensor:
    """Return the same random labels on every worker."""
    return torch.randint(count, (rows,), generator=torch.Generator().manual_seed(seed))


def batch(step: int, rows: int = 8) -> tuple[Tensor, Tensor]:
    """Return a batch of eight features and four classes that a model can learn, the same on every worker."""
    x = drawn(step, rows, 8)
    return x, x[:, :4].argmax(1)


def perceptron(*widths: int) -> nn.Sequential:
    """Return linear layers with a tanh between them, in float64: by default too large for the budgets."""
    torch.manual_seed(0)
    sizes = widths or (8, 32, 32, 32, 32, 32, 4)
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).double()
