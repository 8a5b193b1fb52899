"""The places of a ring's members in their scripts: this worker's place, the members whose scripts have ended,
and the mismatch that ends the ring."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

from atoll.core.errors import MismatchError
from atoll.core.stands import Stand
from atoll.train.api.place import Place
from atoll.train.group.channels import RingChannels
from atoll.train.group.standing import Standing


class Judge(Protocol):
    """The decision about members whose scripts have ended. A judge is notified of the ring's end."""

    def judge_ended(self, ended: Mapping[int, Stand]) -> MismatchError | None:
        """Return this worker's error if it waits for a member that has ended; else None.

        `ended` has the places at which members' scripts ended, by the workers' names.
        """

    def tell_mismatch(self, mismatch: MismatchError) -> None:
        """Take notice that the ring has ended with `mismatch`."""


class ScriptPlaces:
    """The places of one ring's members in their scripts, through all rings that follow one another.

    Args:
        channels: the channels of the ring, which a mismatch ends.
        timeout: the deadline of each wait, in seconds.
        judge: decides about members that have ended; None: no member is missed.
        compares: True if members compare their places while they wait.

    Attributes:
        stand: this worker's place in its script while it is in a call that all workers make.
        ended: the places of members whose scripts have ended, by name, former rings included.
        mismatch: the error that ended the ring; None while the ring goes on.
    """

    def __init__(
        self, channels: RingChannels, timeout: float, judge: Judge | None, *, compares: bool
    ) -> None:
        self._channels, self._timeout, self._judge, self._compares = channels, timeout, judge, compares
        self._standing: Standing | None = None
        self.stand: Stand | None = None
        self.ended: dict[int, Stand] = {}
        self.mismatch: MismatchError | None = None

    def handle_forming(self, place: Place) -> Place:
        """Begin a ring in which this worker has `place`; return the place with the object that compares the
        members' places."""
        names = tuple(place.name_of(rank) for rank in range(place.world))
        self.ended = {name: stand for name, stand in self.ended.items() if name not in names}
        self._standing = None
        if self._compares and place.store is not None:
            self._standing = Standing(place.store, place.rank, names, self._timeout)
        return replace(place, standing=self._standing)

    def begin(self, number: int, where: Callable[[], Stand | None] | None) -> None:
        """Begin the round of this number. `where` returns this worker's place as it waits; None: `stand`."""
        if self._standing is not None:
            self._standing.begin(number, where or (lambda: self.stand))

    def end(self) -> None:
        """End the round, finished or failed."""
        if self._standing is not None:
            self._standing.end()

    def leave(self, stand: Stand) -> None:
        """Record that this worker's script ends at `stand`; the other members may go on."""
        if self._standing is not None:
            self._standing.leave(stand)

    def check_ended(self) -> None:
        """Raise MismatchError if this worker waits for a member that has ended."""
        mismatch = None if self._judge is None else self._judge.judge_ended(self.ended)
        if mismatch is not None:
            raise self.end_with(mismatch)

    def check_lost(self, *, holds: bool) -> None:
        """Raise MismatchError if a mismatch broke the ring.

        Either the other members have ended with a mismatch, or a member has ended that this worker still
        needs.

        Args:
            holds: True if this worker holds the round's result. Then a member that has ended took part in the
                round, which may have been its last.
        """
        if self._standing is None:
            return
        known = self._standing.known()
        self.ended |= self._standing.ended
        if known is not None:
            raise self.end_with(known)
        if not holds:
            self.check_ended()

    def end_with(self, mismatch: MismatchError) -> MismatchError:
        """End the ring, so that no later round waits for a member. Returns the mismatch."""
        if self.mismatch is None and self._judge is not None:
            self._judge.tell_mismatch(mismatch)
        self.mismatch = mismatch
        self._channels.abandon()
        return mismatch
