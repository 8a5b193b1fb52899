"""What the members of a group tell one another in each iteration, and what the log told them together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from atoll.core.decoding import from_msgpack
from atoll.core.scriptline import waiting_line
from atoll.core.stands import gradients
from atoll.train.group.ringbytes import gather_bytes
from atoll.train.group.rounds import Ring
from atoll.wire.messages import Committed, Used


class Together:
    """The data that all members used, who of them only waited, and the grouping to move to."""

    def __init__(
        self,
        ring: Ring,
        used: Callable[[], list[Used]],
        *,
        grouping: Callable[[], int],
        move: Callable[[int], None],
    ) -> None:
        """Begin in a group of one.

        Args:
            used: returns the data that this member has used up in an iteration.
            grouping: returns the hub's latest grouping that this worker knows.
            move: called with a grouping after a step that was told to move to it.
        """
        self.ring, self._ask_used, self.grouping, self._move = ring, used, grouping, move
        self.contributors: list[int] = []  # that live, as the log last said: groups, and workers alone
        self.able: list[int] = []  # the members, by name, who did not only wait, in the latest iteration
        self.told = 0  # the grouping to move to
        self._heard = 0  # the latest that this group was told of: every word repeats it
        self._used: list[Used] = []  # by all members, in this iteration
        self._everyones: list[Used] = []  # as they said in the latest round
        self._own_used: list[Used] = []
        self._waits = False  # this member waits in a meeting for others of its group

    def begin(self) -> None:
        """This member has a part in the iteration."""
        self._own_used = self._ask_used()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within it this member only waits, and uses nothing."""
        self._waits, self._own_used = True, []
        try:
            yield
        finally:
            self._waits = False

    def tell_used(self, iteration: int) -> None:
        """Hear what all members have used, so that whoever is left can say it of those who are lost; and who
        of them only waits. A part of the round in which they sum."""
        parts = gather_bytes(
            self.ring.agreement,
            msgspec.msgpack.encode((self._own_used, self._waits)),
            f"the samples that the members used in iteration {iteration}",
        )
        said = [from_msgpack(part, tuple[list[Used], bool]) for part in parts]
        self._everyones = [used for each, _ in said for used in each]
        place = self.ring.place
        self.able = [place.name_of(rank) for rank, (_, waits) in enumerate(said) if not waits]

    def whole(self) -> None:
        """That round is confirmed."""
        self._used += self._everyones

    def take_used(self) -> list[Used]:
        """What all have used, which is the exchange's to say from now on."""
        used, self._used = self._used, []
        return used

    def hear(self, counted: Committed) -> None:
        """What the log said, as all members were told."""
        self.contributors = list(counted.workers) or self.contributors
        if counted.grouping > self._heard:
            self.told = self._heard = counted.grouping

    def after_step(self) -> None:
        """Go where the log's word says, if it says so."""
        told, self.told = self.told, 0
        if told:
            self._move(told)

    def joined(self) -> None:
        """This member is in a new group. Members may have moved by unlike decisions, and must all do the same
        after the same words."""
        self.told = self._heard = 0

    @contextmanager
    def stepping(self, iteration: int) -> Iterator[None]:
        """Within it, this member stands at the gradients of the iteration."""
        self.ring.scripts.stand = gradients(iteration, waiting_line())
        try:
            yield
        finally:
            self.ring.scripts.stand = None
