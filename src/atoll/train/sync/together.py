"""The reports of a group's members to one another in each iteration, and the log's answers to the group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import numpy

from atoll.core.decoding import from_msgpack
from atoll.core.errors import UserError
from atoll.core.scriptline import waiting_line
from atoll.core.stands import gradients
from atoll.train.gradients.samples import ContributionWeight
from atoll.train.group.ringbytes import gather_bytes
from atoll.train.group.rounds import Ring
from atoll.wire.messages import Committed, Speeds, Used

_NOTHING = ContributionWeight(0.0, 0.0)
_UNLIKE = (
    "the members of a group weigh the session's models in unlike proportions, and sum them by one weight of "
    "each member: give all models batches in one proportion on every worker, call session.weight(1, model) "
    "for each of them before each backward, or set run.strategy to server"
)


class Together:
    """The data that all members used, the members that did not only wait, and the grouping to move to.

    Attributes:
        ring: the group's ring.
        grouping: returns the hub's latest grouping that this worker knows.
        contributors: the living contributors, groups and workers alone, by the log's latest answer.
        able: the names of members that did not only wait in the latest iteration.
        told: the grouping to which the group must move; 0 for none.
    """

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
            ring: the group's ring.
            used: returns the data that this member has used up in an iteration.
            grouping: returns the hub's latest grouping that this worker knows.
            move: called with a grouping after a step whose answer told the group to move to it.
        """
        self.ring, self._ask_used, self.grouping, self._move = ring, used, grouping, move
        self.contributors: list[int] = []
        self.able: list[int] = []
        self.told = 0
        self._heard = 0  # the latest grouping in the log's answers, which repeat it
        self._used: list[Used] = []  # the data that all members used in this iteration
        self._everyones: list[Used] = []  # the data that all members reported in the latest round
        self._own_used: list[Used] = []
        self._own_speed: Speeds = {}
        self._speeds: list[Speeds] = []  # what the members reported in the latest round
        self._own = _NOTHING  # this member's contribution
        self._everyones_shares: list[list[float]] = []  # of the members that weigh, in the latest round
        self._waits = False  # True while this member waits in a meeting for others of its group

    def begin(self, speed: Speeds) -> None:
        """Begin an iteration in which this member trains, and reports its `speed`."""
        self._own_used, self._own_speed = self._ask_used(), speed

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Return a context in which this member only waits, and uses no data."""
        self._waits, self._own_used, self._own_speed, self._own = True, [], {}, _NOTHING
        try:
            yield
        finally:
            self._waits = False

    def weighs(self, own: ContributionWeight) -> ContributionWeight:
        """Take this member's contribution, and return it."""
        self._own = own
        return own

    def tell_used(self, iteration: int) -> None:
        """Exchange the data that members have used, their speeds, and which members only wait.

        So any remaining member can report the data of lost members. This is part of the round in which the
        members sum.
        """
        parts = gather_bytes(
            self.ring.agreement,
            msgspec.msgpack.encode((self._own_used, self._own_speed, self._waits, self._shares)),
            f"the samples that the members used in iteration {iteration}",
        )
        said = [from_msgpack(part, tuple[list[Used], Speeds, bool, list[float]]) for part in parts]
        self._everyones = [used for each, _, _, _ in said for used in each]
        self._speeds = [speeds for _, speeds, _, _ in said]
        place = self.ring.place
        self.able = [place.name_of(rank) for rank, (_, _, waits, _) in enumerate(said) if not waits]
        self._everyones_shares = [shares for _, _, _, shares in said if any(shares)]

    def whole(self) -> None:
        """Take the members' reports as final: the round is confirmed."""
        self._used += self._everyones

    @property
    def _shares(self) -> list[float]:
        """For each optimizer, the part of this member's weight that its model's gradients have; empty for a
        member without weight, and if there is one model."""
        own = self._own
        return [weight / own.weight for weight, *_ in own.by_optimizer] if own.weight > 0 else []

    def weights_of(self, of_group: ContributionWeight) -> list[float]:
        """Return, for each optimizer, the weight of its gradients in the contribution `of_group`; empty if
        none differs.

        The ring sums by one weight of each member. So it makes the mean of each model if members weigh models
        in one proportion. Raises UserError, on all of them, if they do not.
        """
        first, *others = self._everyones_shares or [[]]
        for each in others:
            if not numpy.allclose(first, each, rtol=1e-9):
                raise UserError(_UNLIKE)
        return [of_group.weight * share for share in first] if any(each != 1 for each in first) else []

    def take_used(self) -> list[Used]:
        """Return the data that all members have used, which the exchange reports from now on."""
        used, self._used = self._used, []
        return used

    @property
    def speeds(self) -> Speeds:
        """The members' reports on their speed in the latest iteration."""
        return {worker: report for each in self._speeds for worker, report in each.items()}

    def hear(self, counted: Committed) -> None:
        """Take the log's answer, which all members have."""
        self.contributors = list(counted.workers) or self.contributors
        if counted.grouping > self._heard:
            self.told = self._heard = counted.grouping

    def after_step(self) -> None:
        """Move to the grouping that the log's answer names, if it names a new one."""
        told, self.told = self.told, 0
        if told:
            self._move(told)

    def joined(self) -> None:
        """Forget groupings: this member is in a new group.

        Members may have moved by different decisions, but must act alike after equal answers.
        """
        self.told = self._heard = 0

    @contextmanager
    def stepping(self, iteration: int) -> Iterator[None]:
        """Return a context in which this member's place in its script is at the gradients of the
        iteration."""
        self.ring.scripts.stand = gradients(iteration, waiting_line())
        try:
            yield
        finally:
            self.ring.scripts.stand = None
