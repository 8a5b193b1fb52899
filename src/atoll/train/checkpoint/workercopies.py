"""Tensors of which each worker has a copy of its own, made equal on all workers."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from atoll.core.config import Buffers
from atoll.train.api.prepared import Prepared
from atoll.train.members.meetings import bytes_of
from atoll.train.members.workers import Workers


class WorkerCopies:
    """The buffers of the `prepared` models, and the tensors of `registered` modules.

    `prepared` and `registered` may grow.

    Attributes:
        buffers: `sync.buffers`, which says whose buffers all workers take.
    """

    def __init__(
        self, prepared: Sequence[Prepared], registered: Mapping[str, object], buffers: Buffers
    ) -> None:
        self._prepared, self._registered, self.buffers = prepared, registered, buffers

    def unify(self, workers: Workers, what: str, *, registered: bool = False) -> None:
        """Give all workers equal buffers, as `sync.buffers` says; with `registered`, also the first worker's
        tensors of registered modules.

        A collective. A tensor whose shape or dtype differs between workers stays each worker's own.
        """
        buffers = self._buffers() if self.buffers != "own" else {}
        named = buffers | (self._of_registered() if registered else {})
        if not named or workers.alone:
            return
        kinds = {name: f"{tensor.dtype} {list(tensor.shape)}" for name, tensor in named.items()}
        sums = {name: zlib.crc32(bytes_of(tensor)) for name, tensor in named.items()}
        digest = zlib.crc32(repr((kinds, sums)).encode())
        if len(set(workers.gather(digest, what))) > 1:
            everyone = workers.gather([kinds, sums], what)
            differing = [
                name
                for name in sorted(named)
                if all(other.get(name) == kinds[name] for other, _ in everyone)
                and any(other[name] != sums[name] for _, other in everyone)
            ]
            averaged = buffers if self.buffers == "mean" else {}
            means = [name for name in differing if name in averaged and named[name].is_floating_point()]
            workers.take_from_first([named[name] for name in differing if name not in means], what)
            for name in means:
                exact = named[name].detach().to(torch.float64)
                named[name].copy_(workers.reduce(exact, "mean", what=what))
        for prepared in self._prepared:
            prepared.buffers.settle()

    def _buffers(self) -> dict[str, Tensor]:
        """Return the buffers of all models by the model's number and the buffer's name."""
        return {
            f"{index} {name}": tensor
            for index, prepared in enumerate(self._prepared)
            for name, tensor in prepared.buffers.named().items()
        }

    def _of_registered(self) -> dict[str, Tensor]:
        """Return the tensors of registered modules that no prepared model has."""
        known = {id(p) for prepared in self._prepared for p in prepared.parameters.values()}
        return {
            f"{name} {key}": tensor.detach()
            for name, module in self._registered.items()
            if isinstance(module, nn.Module) and not lies_elsewhere(module)
            for key, tensor in [*module.named_parameters(), *module.named_buffers()]
            if id(tensor) not in known
        }


def lies_elsewhere(module: nn.Module) -> bool:
    """True for a module in memory budgets, whose parameters come and go."""
    return any(hasattr(parameter, "stored_value") for parameter in module.parameters())
