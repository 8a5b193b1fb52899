"""What members of a ring hand over to newcomers, as these enter: the state of training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from atoll.core.errors import CheckpointError
from atoll.train.group.channel import Channel


class State(Protocol):
    """What a newcomer takes from a living member, and what changes with the members."""

    def capture(self) -> bytes: ...

    def restore(self, raw: bytes, rank: int) -> None: ...

    def places(self, *, entered: bool = False) -> bytes:
        """Where this member is in its data; one that has `entered` is nowhere yet."""

    def deal_anew(self, places: Sequence[bytes], rank: int, world: int) -> None:
        """Deal data anew, by all members' `places`."""


def hand_over(channel: Channel, state: State, giver: int, *, takes: bool) -> None:
    """Send a member's state to all, or the reason why it cannot be captured. A collective.

    Args:
        channel: to all members.
        state: this member's.
        giver: the rank of the member whose state it is.
        takes: whether this member takes it.

    Raises CheckpointError on those who take it, where it cannot be captured.
    """
    place = channel.place
    raw, is_refused = b"", False
    if place.rank == giver:
        try:
            raw = state.capture()
        except CheckpointError as error:  # the newcomers' to know, and nothing that ends the others
            raw, is_refused = str(error).encode(), True
    what = f"the state of worker {place.name_of(giver)}, for those who enter"
    size = torch.tensor([len(raw), is_refused], dtype=torch.int64)
    channel.wait(channel.broadcast(size, giver), what)
    if place.rank == giver:
        payload = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    else:
        payload = torch.empty(int(size[0]), dtype=torch.uint8)
    channel.wait(channel.broadcast(payload, giver), what)
    if takes and size[1]:
        said = payload.numpy().tobytes().decode(errors="replace")
        raise CheckpointError(f"worker {place.name} cannot enter: no worker can give its state: {said}")
    if takes:
        state.restore(payload.numpy().tobytes(), place.rank)
