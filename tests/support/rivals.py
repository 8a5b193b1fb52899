"""Scripts of tests/scripts under torch's own ways to train on several workers, for the table's last columns.

Both change a model in place, so that a script need not be written anew: DistributedDataParallel by torch's
`replicate`, which is the same class behind hooks, and FSDP2 by `fully_shard` on the whole model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

from atoll.core.errors import PrepareError
from atoll.train.api.place import Place

RIVALS = ("DDP", "FSDP2")
_TIMEOUT = timedelta(seconds=60)


class Rival:
    """A session of torch's own: what scripts call of Atoll's session, by DDP or FSDP2."""

    device = torch.device("cpu")

    def __init__(self, kind: str, place: Place) -> None:
        self.rank, self.world, self.is_main = place.rank, place.world, place.rank == 0
        self._kind, self._place = kind, place
        self._models: list[nn.Module] = []
        self._samplers: list[DistributedSampler[Any]] = []

    def prepare(self, model: nn.Module, optimizer: Any, **_: Any) -> tuple[nn.Module, Any]:
        """Have `model` replicated or sharded; an error of torch's counts as its refusal."""
        before = {id(p): name for name, p in model.named_parameters()}
        try:
            if self._kind == "DDP":
                from torch.distributed._composable.replicate import replicate

                replicate(model)
            else:
                from torch.distributed.fsdp import fully_shard

                fully_shard(model)
        except Exception as error:
            raise PrepareError(f"{type(error).__name__}: {error}") from error
        after = dict(model.named_parameters())
        for each in optimizer if isinstance(optimizer, Sequence) else [optimizer]:
            for group in each.param_groups:  # as if the script had made it afterwards
                group["params"] = [after[before[id(p)]] for p in group["params"]]
        self._models.append(model)
        return model, optimizer

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        for model in self._models:
            model.set_requires_gradient_sync(False)  # type: ignore[operator]
        yield
        for model in self._models:
            model.set_requires_gradient_sync(True)  # type: ignore[operator]

    def clip_grad_norm_(self, max_norm: float, model: nn.Module | None = None) -> Tensor:
        return nn.utils.clip_grad_norm_((model or self._models[0]).parameters(), max_norm)

    def weight(self, samples: float, model: nn.Module | None = None) -> None:
        pass  # all workers count alike

    def register(self, **objects: Any) -> None:
        pass

    def barrier(self) -> None:
        dist.barrier()

    def reduce(self, value: Any, op: str = "mean", weight: float | None = None) -> Any:
        found = value.detach().clone() if isinstance(value, Tensor) else torch.tensor(float(value))
        dist.all_reduce(found)
        found = found / self.world if op == "mean" else found
        return found if isinstance(value, Tensor) else float(found)

    def sampler(self, dataset: Any, seed: int = 0) -> DistributedSampler[Any]:
        self._samplers.append(DistributedSampler(dataset, self.world, self.rank, seed=seed))
        return self._samplers[-1]

    def epoch_of(self, loader: Any) -> Iterator[Any]:
        yield from loader
        for sampler in self._samplers:
            sampler.set_epoch(sampler.epoch + 1)

    def __enter__(self) -> Rival:
        place = self._place
        dist.init_process_group(
            "gloo", store=place.store, rank=place.rank, world_size=place.world, timeout=_TIMEOUT
        )
        return self

    def __exit__(self, *_: object) -> None:
        dist.destroy_process_group()
