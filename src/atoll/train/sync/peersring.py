"""The way of a gradient in a node of several devices: over their ring to the node's mean, and to the one CPU
side.

All devices wait for whatever the leader waits for, and take equal local parameters: those of the buffer that
the leader names, which each device reads from the memory shared with the CPU side. The CPU side gets a buffer
back when all devices have copied it. Source: docs/peers.md, "Several devices a node".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, cast

import msgspec
import torch

from atoll.core.decoding import from_msgpack
from atoll.tensors.binding import BoundChunk
from atoll.train.gradients.reducer import Calls, check_steps
from atoll.train.gradients.samples import ContributionWeight
from atoll.train.gradients.sums import MakeSum
from atoll.train.group.rounds import Ring
from atoll.train.sync.peersdevices import one_node_in_trouble
from atoll.train.sync.peersexchange import NodeParts, PeerExchange


class DevicesSum(Protocol):
    """A sum over the ring of a node's devices."""

    def made_apart(self) -> None:
        """Forget the last treatment: the other devices stepped that iteration's mean."""


class DevicesExchange(PeerExchange):
    """The exchange of a node with several devices.

    Where nodes are at different iterations (`sync.stale_max` above 0), `p.grad` shows the node's mean after
    backward, and edits act on the node's contribution. All devices must make equal edits.
    """

    acts_before_state_dict = False  # one device alone may ask for the state_dict

    def __init__(
        self,
        chunks: Sequence[BoundChunk],
        calls: Calls,
        parts: NodeParts,
        make_sum: MakeSum,
        ring: Ring,
        *,
        keeps_own: bool,
    ) -> None:
        """Exchange over `ring`. `make_sum` makes a DevicesSum. With `keeps_own` each device keeps its own
        gradients after the sum."""
        super().__init__(chunks, calls, parts, make_sum)
        self._ring, self._keeps_own = ring, keeps_own
        self._seconds = 0.0  # seconds that this device has computed for the iteration

    def before_use(self, of: Collection[int] | None = None, *arguments: object) -> None:
        """Act before a forward that trains, which all devices make. Any other forward may be this device's
        alone."""
        if torch.is_grad_enabled():
            super().before_use(of, *arguments)

    def _say(self) -> bytes:
        return msgspec.msgpack.encode(self._seconds)

    def _node_pace(self) -> float:
        """Return the slowest device's seconds divided by the node's samples; 0 if none is known yet.

        A device without samples of its own does not count.
        """
        seconds = [from_msgpack(said, float) for said in self._worker.devices.said]
        return max(seconds) / self._weighed.samples if self._weighed.samples > 0 else 0.0

    def reduce(self) -> None:
        self._come()
        with one_node_in_trouble():
            self._sum_up()
        self._show()

    def _is_whole(self, own: ContributionWeight, of_group: ContributionWeight) -> None:
        self._weigh(of_group)
        self._seconds = self._pace() * own.samples
        super()._is_whole(own, of_group)

    def blamed(self, rank: int, culprit: str) -> list[str]:  # noqa: ARG002  # the sum is equal on all devices
        """Return words that name the devices whose own gradients were not finite, if devices keep those; else
        the parameter."""
        if not self._keeps_own:
            names = [culprit] if culprit else self.own_nonfinite()
            return [f"{name!r}, summed over the node's devices," for name in names[:1]]
        own = msgspec.msgpack.encode(self.own_nonfinite()[:1])
        said = self._worker.devices.gather(own, "the devices' gradients that are not finite")
        named = [from_msgpack(part, list[str]) for part in said]
        name_of = self._ring.place.name_of
        return [f"{name!r} on worker {name_of(each)}" for each, names in enumerate(named) for name in names]

    # A newcomer takes no ring's state: the giver may be another node, with another number of devices.

    def member_state(self) -> dict[str, Any]:
        return self.state_dict()

    def check_member_state(self, state: Mapping[str, Any]) -> None:
        check_steps(state)

    def load_member_state(self, state: Mapping[str, Any]) -> None:  # noqa: ARG002
        cast(DevicesSum, self.sum).made_apart()
