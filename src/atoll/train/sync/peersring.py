"""The way of a gradient where a node has several devices: over their ring to the node's mean, which the
leader hands to the node's one CPU side.

All devices wait for what the leader waits for, and take the very same local parameters: those of the buffer
that it says, which each reads from the memory that leader and CPU side share. The CPU side gets a buffer back
when all have copied it. Source: docs/peers.md, "Several devices a node".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import msgspec
import torch

from atoll.core.decoding import from_msgpack
from atoll.tensors.binding import BoundChunk
from atoll.train.gradients.reducer import Calls, check_steps
from atoll.train.gradients.samples import Contribution
from atoll.train.gradients.sums import MakeSum
from atoll.train.group.rounds import Ring
from atoll.train.sync.peersdevices import one_node_in_trouble
from atoll.train.sync.peersexchange import NodeParts, PeerExchange


class DevicesSum(Protocol):
    """A sum over the ring of a node's devices."""

    def made_apart(self) -> None:
        """What the others made of the mean of that iteration is theirs."""


class DevicesExchange(PeerExchange):
    """`p.grad` shows the node's mean after backward, and edits act on the node's contribution; all devices
    make the same ones."""

    acts_before_state_dict = False  # one device alone may look

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
        """`make_sum` makes a DevicesSum; with `keeps_own` each device still has its own gradients, once they
        are summed."""
        super().__init__(chunks, calls, parts, make_sum)
        self._ring, self._keeps_own = ring, keeps_own
        self._seconds = 0.0  # that this device has computed for the iteration

    def before_use(self, *arguments: object) -> None:
        """A forward that trains is one that all devices make; any other may be this device's alone."""
        if torch.is_grad_enabled():
            super().before_use(*arguments)

    def _say(self) -> bytes:
        return msgspec.msgpack.encode(self._seconds)

    def _node_pace(self) -> float:
        """The slowest device's, for all that the node has; 0 where none is known yet. A device without
        samples of its own says nothing."""
        seconds = [from_msgpack(said, float) for said in self._worker.devices.said]
        return max(seconds) / self._weighed.samples if self._weighed.samples > 0 else 0.0

    def reduce(self) -> None:
        self._come()
        with one_node_in_trouble():
            self._sum_up()

    def _is_whole(self, own: Contribution, of_group: Contribution) -> None:
        self._weigh(of_group)
        self._seconds = self._pace() * own.samples
        super()._is_whole(own, of_group)

    def blamed(self, rank: int, culprit: str) -> list[str]:  # noqa: ARG002  # what all have, once summed
        """The devices say whose gradients were not finite before they were summed, where they have them."""
        if not self._keeps_own:
            names = [culprit] if culprit else self.own_nonfinite()
            return [f"{name!r}, summed over the node's devices," for name in names[:1]]
        own = msgspec.msgpack.encode(self.own_nonfinite()[:1])
        said = self._worker.devices.gather(own, "the devices' gradients that are not finite")
        named = [from_msgpack(part, list[str]) for part in said]
        name_of = self._ring.place.name_of
        return [f"{name!r} on worker {name_of(each)}" for each, names in enumerate(named) for name in names]

    # A newcomer has no need of what a ring knows, which may be another node's: how many devices each has is
    # its own.

    def member_state(self) -> dict[str, Any]:
        return self.state_dict()

    def check_member_state(self, state: Mapping[str, Any]) -> None:
        check_steps(state)

    def load_member_state(self, state: Mapping[str, Any]) -> None:  # noqa: ARG002
        cast(DevicesSum, self.sum).made_apart()
