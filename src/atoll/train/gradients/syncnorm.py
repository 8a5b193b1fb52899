"""nn.SyncBatchNorm layers: on a CPU their statistics are those of the joint batch of a ring's workers.

torch has the layer for GPUs alone, over a torch.distributed group. Here the workers sum their sums: first
those of the values, then those of the squared distances from the mean, so that nothing cancels. Backward sums
the gradients of the statistics, weighted as the workers' batches are in the mean of gradients.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atoll.axes.choices import Choices
from atoll.axes.needs import check
from atoll.core.scriptline import waiting_line
from atoll.core.stands import call
from atoll.train.data.moredata import MoreData
from atoll.train.gradients.samples import SampleCount
from atoll.train.members.workers import Workers, asked_of_reduce

_NAME = "nn.SyncBatchNorm"
_JOINT: WeakKeyDictionary[nn.Module, JointBatch] = WeakKeyDictionary()  # by layer


class JointBatch:
    """The joint batch of a ring's workers.

    Args:
        workers: the workers, whose run ends with its first loss.
        samples: this worker's samples, by which its gradients weigh.
        more: tells whether this worker's batch is a repeated one, which does not count.
    """

    def __init__(self, workers: Workers, samples: SampleCount, more: MoreData) -> None:
        self._workers, self._samples, self._more = workers, samples, more

    @property
    def counts(self) -> bool:
        """True if this worker's batch is part of the joint batch."""
        return not self._more.repeats

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of the workers' `values`, float64. A call that all workers make."""
        exact = values.detach().to(torch.float64)
        with self._workers.standing(call(_NAME, waiting_line(), asks=asked_of_reduce(exact, "sum"))):
            return self._workers.reduce(exact, "sum")

    def sum_gradients(self, gradient: Tensor) -> Tensor:
        """Return the sum of the workers' gradients, as this worker's gradient is to hold it.

        This worker's gradients are multiplied by its weight later, and so the sum is divided by the weight.
        """
        own = self._samples.contribution(has_gradient=True)
        weight = own.weight if self.counts else 0.0
        mine = gradient.to(torch.float64) if weight > 0 else torch.zeros_like(gradient, dtype=torch.float64)
        uncertain = mine.new_tensor([float(not own.is_certain)])
        said = torch.cat([(weight * mine).flatten(), mine.flatten(), uncertain])
        summed, size = self.sum(said), mine.numel()
        if weight <= 0:
            return torch.zeros_like(gradient)
        chosen = summed[size : 2 * size] if summed[-1] > 0 else summed[:size] / weight
        return chosen.view_as(gradient).to(gradient.dtype)


class _Sum(torch.autograd.Function):
    """The sum of the workers' values, in which gradients go back to all workers."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, batch: JointBatch) -> Tensor:
        ctx.batch = batch
        return batch.sum(values).to(values.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.batch.sum_gradients(gradients[0]), None


def _sum(values: Tensor, joint: JointBatch) -> Tensor:
    summed: Tensor = _Sum.apply(values, joint)  # type: ignore[no-untyped-call]
    return summed


class JointBatchNorm(nn.SyncBatchNorm):
    """An nn.SyncBatchNorm whose statistics in training are those of the joint batch. A copy of it, or a saved
    one, is torch's own layer."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return object.__new__, (nn.SyncBatchNorm,), self.__dict__.copy()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        joint = _JOINT[self]
        counts = float(joint.counts)
        along = [0, *range(2, input.dim())]
        shape = [1, -1, *[1] * (input.dim() - 2)]
        rows = counts * (input.numel() // input.shape[1])
        sums = _sum(torch.cat([counts * input.sum(along), input.new_tensor([rows])]), joint)
        rows_of_all = sums[-1].detach()
        mean = sums[:-1] / rows_of_all
        distance = input - mean.view(shape)
        variance = _sum(counts * distance.square().sum(along), joint) / rows_of_all
        self._track(mean.detach(), variance.detach() * (rows_of_all / (rows_of_all - 1)))
        normal = distance * (variance + self.eps).rsqrt().view(shape)
        if self.weight is None:
            return normal
        return normal * self.weight.view(shape) + self.bias.view(shape)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        """Let the running statistics follow those of the joint batch; `variance` is the unbiased one."""
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        part = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), part)
        self.running_var.lerp_(variance.to(self.running_var.dtype), part)


class SyncNorms:
    """The nn.SyncBatchNorm layers of one model. On a CPU they take joint statistics until `close`.

    `joint` is True if the run can sum these.
    """

    def __init__(
        self, module: nn.Module, device: torch.device, world: int, more: MoreData, *, joint: bool
    ) -> None:
        """Raise PrepareError for a layer that would use the statistics of this worker's batch alone.

        On a GPU the layer works if the script has made a process group of all workers, `world`. Without a
        group torch runs the layer as plain BatchNorm.
        """
        self._more, self._joint = more, joint and device.type == "cpu"
        self._layers: list[nn.SyncBatchNorm] = []
        for name, part in module.named_modules():
            if not isinstance(part, nn.SyncBatchNorm):
                continue
            self._layers.append(part)
            if not dist.is_initialized():
                group = "there is none, so the layer would be a plain BatchNorm"
            else:
                size = dist.get_world_size(part.process_group)
                group = "whole" if size == world else f"the group has {size} of the session's {world} workers"
            facts = {"module": name, "device": device.type, "process group": group, "joint": self._joint}
            check("prepare", Choices(facts))

    def join(self, workers: Workers, samples: SampleCount) -> None:
        """Let the layers take the joint batch's statistics; `samples` are those by which gradients weigh."""
        for layer in self._layers if self._joint else ():
            layer.__class__ = JointBatchNorm
            _JOINT[layer] = JointBatch(workers, samples, self._more)

    def close(self) -> None:
        """Let the layers be torch's own again."""
        for layer in self._layers:
            if isinstance(layer, JointBatchNorm):
                del _JOINT[layer]
                layer.__class__ = nn.SyncBatchNorm  # type: ignore[assignment]
