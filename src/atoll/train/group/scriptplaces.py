"""What a ring's member knows of its members' scripts: where this one stands, which have ended, and the
mismatch that ends the ring."""

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
    """Who decides about members that have ended, and hears of the ring's end."""

    def judge_ended(self, ended: Mapping[int, Stand]) -> MismatchError | None:
        """Return the error of this worker, if it waits for one of those that have `ended`, by name."""

    def tell_mismatch(self, mismatch: MismatchError) -> None:
        """The ring has ended with this."""


class ScriptPlaces:
    """The scripts of one ring's members, through all rings that follow one another.

    `stand` is this worker's place in its script, where it is in a call of all. `ended` are the places of
    members, by name, whose scripts have ended, of former rings too. `mismatch` ended the ring.

    Args:
        channels: of the ring, which a mismatch ends.
        timeout: of each wait, in seconds.
        judge: decides about members that have ended; None: they are missed by nobody.
        compares: whether members compare their places while they wait.
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
        """A ring is formed, in which this worker has `place`; returns it with what compares the places."""
        names = tuple(place.name_of(rank) for rank in range(place.world))
        self.ended = {name: stand for name, stand in self.ended.items() if name not in names}
        self._standing = None
        if self._compares and place.store is not None:
            self._standing = Standing(place.store, place.rank, names, self._timeout)
        return replace(place, standing=self._standing)

    def begin(self, number: int, where: Callable[[], Stand | None] | None) -> None:
        """Begin the round of this number. `where` gives this worker's place as it waits; None: `stand`."""
        if self._standing is not None:
            self._standing.begin(number, where or (lambda: self.stand))

    def end(self) -> None:
        """The round is over, or has failed."""
        if self._standing is not None:
            self._standing.end()

    def leave(self, stand: Stand) -> None:
        """Record that this worker's script ends at `stand`; the other members may go on."""
        if self._standing is not None:
            self._standing.leave(stand)

    def check_ended(self) -> None:
        """Raise MismatchError where this worker waits for a member that has ended."""
        mismatch = None if self._judge is None else self._judge.judge_ended(self.ended)
        if mismatch is not None:
            raise self.end_with(mismatch)

    def check_lost(self, *, holds: bool) -> None:
        """Raise MismatchError where a mismatch broke the ring: the others have ended with one, or a member
        has ended while this worker still needs it.

        Args:
            holds: whether this worker holds the round's result. Who has ended took part in that round then,
                which may be the last that it had to make.
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
        """End the ring: no later round waits for a member. Returns the mismatch."""
        if self.mismatch is None and self._judge is not None:
            self._judge.tell_mismatch(mismatch)
        self.mismatch = mismatch
        self._channels.abandon()
        return mismatch
