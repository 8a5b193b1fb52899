"""The channels of a ring: all are opened, or none, and all are closed.

A ring's channels are made anew whenever the ring is formed. `RingChannels` opens those of the ring of all
workers. `channel_of`, `opening` and `words_beside` also serve the groups within it (`train/group/inner.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from atoll.train.api.place import Place
from atoll.train.group.channel import BrokenRingError, Channel, Sums
from atoll.train.group.confirmation import Confirmations
from atoll.train.group.hierarchy import Hierarchy
from atoll.train.group.memberlinks import MemberLinks
from atoll.train.group.ordering import RingOrder
from atoll.train.group.shortsums import MEMBERS, ShortSums
from atoll.train.group.solo import SoloChannel

_CPU = torch.device("cpu")


class Inside(Protocol):
    """Groups within a ring, each with channels of its own (`train/group/inner.py`: Replicas)."""

    def open(self, session: Channel, device: torch.device) -> list[Channel]:
        """Connect to the members of this worker's group, as the ring is formed."""

    def giver_of(self, rank: int, newcomers: Sequence[int]) -> int:
        """Return the rank of the member whose state the newcomer of rank `rank` takes."""


@contextmanager
def opening() -> Iterator[list[Channel]]:
    """Yield a list for channels as they are opened. Abandon them if the ring breaks meanwhile."""
    opened: list[Channel] = []
    try:
        yield opened
    except BrokenRingError:
        for channel in opened:
            channel.abandon()
        raise


def channel_of(place: Place, purpose: str, timeout: float, device: torch.device) -> Channel:
    """Connect to the other members of `place`; return a SoloChannel if the place has no store."""
    if place.store is None:
        return SoloChannel(place, timeout)
    return Channel(place, purpose, timeout, device)


def words_beside(data: Channel, purpose: str, device: torch.device, opened: list[Channel]) -> Channel:
    """Return a channel on the CPU over the members of `data`.

    Args:
        data: the members' channel for gradients. It is returned if gradients lie on the CPU.
        purpose: the name of the channel, if one is opened.
        device: where gradients lie.
        opened: takes the channel that is opened.
    """
    if device.type != "cpu":
        opened.append(channel_of(data.place, purpose, data.timeout, _CPU))
    return data if device.type == "cpu" else opened[-1]


@dataclass(frozen=True)
class Opened:
    """The channels of a ring as it stands.

    Attributes:
        data: carries chunks.
        agreement: carries small vectors, on the CPU.
        session: carries what workers report to one another outside iterations, on the CPU.
        confirmations: the barriers that end rounds; None for a worker alone, and for a ring that does not
            survive losses.
        member_links: the connections for short sums; None where sums go over the ring whatever their length.
        all: all channels, with those of this worker's group within the ring.
    """

    data: Sums
    agreement: Channel
    session: Channel
    confirmations: Confirmations | None
    member_links: MemberLinks | None
    all: Sequence[Channel]


class RingChannels:
    """The opening of a ring's channels, each time that the ring is formed.

    Args:
        device: where gradients lie.
        timeout: the deadline of each wait, in seconds.
        hierarchy: forms sums group by group; None: one ring.
        order: chooses the order in which sums pass the members; None: the order of ranks.
        inside: groups within the ring, whose channels are opened with the ring's.
        confirms: True if members confirm the results that they hold.

    Attributes:
        current: the channels of the ring as it stands; None before it is formed, and after it has broken.
        generation: the number of rings that were formed.
    """

    def __init__(
        self,
        device: torch.device,
        timeout: float,
        *,
        hierarchy: Hierarchy | None,
        order: RingOrder | None,
        inside: Inside | None,
        confirms: bool,
    ) -> None:
        self._device, self._timeout = device, timeout
        self._hierarchy, self._order, self._inside = hierarchy, order, inside
        self._confirms = confirms
        self._waited_before = 0.0  # on channels that were let go
        self.current: Opened | None = None
        self.generation = 0

    def open(self, place: Place) -> None:
        """Connect to the other members of `place`.

        Raises BrokenRingError if a member is lost meanwhile, and DeadlineError if one does not come.
        """
        timeout, device, alone = self._timeout, self._device, place.store is None
        with opening() as opened:
            opened.append(session := channel_of(place, "session", timeout, _CPU))
            if self._hierarchy is None or alone:
                ring = channel_of(place, "ring", timeout, device)
            else:
                ring = self._hierarchy.open(session, device)
            opened.append(ring)
            data: Sums = ring
            if self._order is not None and not alone:
                data = self._order.open(session, ring, opened)
            ring = opened[1]  # a channel in another order may have taken its place
            agreement = words_beside(ring, "agreement", device, opened)
            if self._inside is not None:
                opened += self._inside.open(session, device)
            links = None
            if self._hierarchy is None and device.type == "cpu" and 1 < place.world <= MEMBERS:
                others = set(range(place.world)) - {place.rank}
                links = MemberLinks(agreement, others, "to send short tensors to one another")
                if not links.without:
                    data = ShortSums(data, ring, links)
            try:
                confirmations = Confirmations(agreement) if self._confirms and not alone else None
            except BaseException:
                if links is not None:
                    links.close()
                raise
        self.current = Opened(data, agreement, session, confirmations, links, opened)
        self.generation += 1

    @property
    def seconds_waited(self) -> float:
        """The seconds of all waits so far, on all channels."""
        here = [] if self.current is None else self.current.all
        return self._waited_before + sum(channel.seconds_waited for channel in here)

    def close(self) -> None:
        """End the channels, and give up collectives that are under way."""
        for channel in self._taken():
            channel.close()

    def abandon(self) -> None:
        """Let the channels of a broken ring go."""
        for channel in self._taken():
            channel.abandon()

    def _taken(self) -> Sequence[Channel]:
        self._waited_before = self.seconds_waited
        current, self.current = self.current, None
        if current is None:
            return ()
        for beside in (current.confirmations, current.member_links):
            if beside is not None:
                beside.close()
        return current.all
