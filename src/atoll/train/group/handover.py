"""The handover of the state of training from members of a ring to newcomers, as these enter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from atoll.core.errors import CheckpointError
from atoll.train.group.channel import Channel


class HandoverState(Protocol):
    """The state of training that a newcomer takes from a living member, and the places in the data, which are
    dealt anew."""

    def capture(self) -> bytes: ...

    def restore(self, raw: bytes, rank: int) -> None: ...

    def places(self, *, entered: bool = False) -> bytes:
        """Return this member's place in its data, encoded. A member that has just `entered` has no place
        yet."""

    def deal_anew(self, places: Sequence[bytes], rank: int, world: int) -> None:
        """Deal data anew, given all members' `places` by rank, this member's rank and the number of
        members."""


def hand_over(channel: Channel, state: HandoverState, giver: int, *, takes: bool) -> None:
    """Send a member's state to all, or the reason why it cannot be captured. A collective.

    Raises CheckpointError on the members that take the state, if it cannot be captured.

    Args:
        channel: the channel to all members.
        state: this member's state.
        giver: the rank of the member whose state is sent.
        takes: True if this member takes the state.
    """
    place = channel.place
    raw, is_refused = b"", False
    if place.rank == giver:
        try:
            raw = state.capture()
        except CheckpointError as error:  # newcomers raise it; the other members go on
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
