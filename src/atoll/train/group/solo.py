"""The channel of a group of one worker: every collective is done at once."""

from __future__ import annotations

from typing import cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Work

from atoll.train.api.place import Place
from atoll.train.group.channel import Channel, Pending

_DONE = cast(Work, object())  # a collective for which nobody waits


class SoloChannel(Channel):
    """A `Channel` without a process group, for a place that has no store: nothing is sent anywhere."""

    def __init__(self, place: Place, timeout: float) -> None:
        assert place.world == 1
        self.place, self.purpose, self.timeout = place, "solo", timeout
        self.seconds_waited = 0.0

    @property
    def host(self) -> str:
        return self.place.host

    def look(self) -> None:
        """Do nothing: there is no member to lose."""

    def sum(self, tensor: Tensor) -> Work:  # noqa: ARG002
        return _DONE

    def reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType) -> Work:  # noqa: ARG002
        return _DONE

    def broadcast(self, tensor: Tensor, root: int = 0) -> Work:  # noqa: ARG002
        return _DONE

    def all_gather(self, tensor: Tensor) -> tuple[list[Tensor], Work]:
        return [tensor.clone()], _DONE

    def wait(self, work: Pending, what: str) -> float:  # noqa: ARG002
        return 0.0

    def close(self) -> None:
        """Do nothing: there are no connections."""

    abandon = close
