"""A group's channels, and its collectives as numbered rounds, with which a ring goes on without a lost
member.

Every collective of a ring that met at a hub is a round. A round ends with a confirmation: a barrier that no
member passes before all hold the round's result (train/group/confirmation.py). When the ring breaks, each
member reports to the hub its round, and whether it holds the round's result. The hub forms the next ring, and
decides which round that ring makes next (store/regroup.py). So a member either takes the result that it
holds, or makes the round again, from inputs that it has kept, in memory that the old ring does not know.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from atoll.core import points
from atoll.core.errors import DeadlineError, MismatchError, RunError, UserError
from atoll.core.stands import Stand
from atoll.train.api.place import Place, Seat
from atoll.train.group.channel import BrokenRingError, Channel, Sums
from atoll.train.group.channels import Inside, Opened, RingChannels
from atoll.train.group.handover import HandoverState, hand_over
from atoll.train.group.hierarchy import Hierarchy
from atoll.train.group.ordering import RingOrder
from atoll.train.group.ringbytes import sum_values
from atoll.train.group.scriptplaces import Judge, ScriptPlaces
from atoll.wire.messages import Reformed

_Result = TypeVar("_Result")
MOVING = "moving to another group"  # the act of a ring whose members move to another one


class RingMembership(Protocol):
    """This worker at the hub, which forms the next ring (`train/group/rendezvous.py`: HubRing)."""

    def reform(self, round: int, *, holds: bool, admits: bool, fresh: bool) -> Reformed:
        """Wait until all living members want the next ring; return it. Raises RunError if there is none. See
        `HubRing.reform`."""

    def enter(self) -> Reformed:
        """Wait to be let into the ring that is under way; return it."""

    def place_in(self, ring: Reformed) -> Place:
        """Take this worker's place in `ring`, and return it."""

    def is_awaited(self) -> bool:
        """True if newcomers wait to enter."""


@dataclass(frozen=True)
class Regrouped:
    """A change of a ring's members.

    Attributes:
        group: the new ring's number.
        world: the number of its members.
        lost: the names of workers that were lost.
        left: the names of workers that left in good order.
        entered: the names of workers that entered.
        seconds: the time that the change took.
        what: the act of the ring when it changed, in words.
        again: True if the members make that act again.
    """

    group: int
    world: int
    lost: list[int]
    left: list[int]
    entered: list[int]
    seconds: float
    what: str
    again: bool


@dataclass
class RoundMark:
    """A mark that is `inside` while this worker is within a round of its ring. Waits of other kinds look at
    it."""

    inside: bool = False


class Ring:
    """A group's channels, and its rounds.

    With a `member` the ring goes on when it breaks. Then the seat's place and all channels are new, and
    `generation` is one higher. A worker that came late is alone (`outside`) until it calls `enter`. The
    constructor raises DeadlineError if the other workers do not come within `timeout` seconds.

    Args:
        seat: holds this worker's place; the ring replaces the place when it is formed anew.
        device: where gradients lie.
        timeout: the deadline of each wait, in seconds.
        member: forms the next ring; None: the ring ends with its first loss.
        hierarchy: lets `data` sum group by group.
        order: chooses the order in which sums pass the members.
        compares: True if members compare their places in their scripts while they wait.
        inside: groups that train replicas of their own. Their channels are opened with the ring's, and a
            newcomer takes the state of a member of its own group.
        state: the state of training, which newcomers take over from a member.
        told: called with this ring and the change after each change of members.
        judge: decides about members whose scripts have ended.
        mark: shows whether this worker is within a round.

    Attributes:
        channels: opens and closes the channels.
        scripts: compares the members' places in their scripts.
        data: carries chunks, on their device.
        agreement: carries small vectors, on the CPU.
        session: carries what workers report to one another outside iterations, on the CPU.
    """

    def __init__(
        self,
        seat: Seat,
        device: torch.device,
        timeout: float,
        member: RingMembership | None = None,
        hierarchy: Hierarchy | None = None,
        *,
        order: RingOrder | None = None,
        compares: bool = False,
        inside: Inside | None = None,
        state: HandoverState | None = None,
        told: Callable[[Ring, Regrouped], None] = lambda _ring, _regrouped: None,
        judge: Judge | None = None,
        mark: RoundMark | None = None,
    ) -> None:
        self._seat, self._mark = seat, mark or RoundMark()
        self.channels = RingChannels(
            device,
            timeout,
            hierarchy=hierarchy,
            order=order,
            inside=inside,
            confirms=member is not None,
        )
        self.scripts = ScriptPlaces(self.channels, timeout, judge, compares=compares)
        self._state: HandoverState | None = None  # None until the first ring is formed: nobody has a state
        self._told = told
        self._confirmed_in = -1  # the ring's generation in the latest confirmed round
        self._timeout, self._member, self._inner = timeout, member, inside
        self._fresh = self.outside  # True while this worker has no state
        self._number = 0  # the number of the round that is made now, or next
        self._holds = False  # True if this worker holds all of the round's result
        self._members_are_new = False  # True until the ring's new members have met
        self._met: list[bytes] | None = None  # the members' places, if the result held is a meeting's
        if not self.outside:
            self._form()
        self._state = state

    def _form(self) -> None:
        """Form the run's first ring."""
        try:
            self._open(self.place)
        except BrokenRingError as broken:
            if self._member is None:
                raise
            self._form_next(broken, "the other workers to connect")

    @property
    def place(self) -> Place:
        """This worker's place in the ring as it stands."""
        return self._seat.place

    @property
    def outside(self) -> bool:
        """True on a worker that has come late and has not entered."""
        return self._seat.late

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def world(self) -> int:
        return self.place.world

    @property
    def generation(self) -> int:
        """A number that rises whenever the ring is formed."""
        return self.channels.generation

    @property
    def data(self) -> Sums:
        return self._all.data

    @property
    def agreement(self) -> Channel:
        return self._all.agreement

    @property
    def session(self) -> Channel | None:
        """The channel for reports outside iterations; None if this worker can talk to no other."""
        return self._all.session if self.channels.current is not None or self.scripts.mismatch else None

    @property
    def seconds_waited(self) -> float:
        """The seconds of all waits so far, on all channels."""
        return self.channels.seconds_waited

    @property
    def _all(self) -> Opened:
        if self.scripts.mismatch is not None:
            raise self.scripts.mismatch
        if self.channels.current is None:
            raise UserError(
                "this worker came when the run was under way; call session.resume() before the loop, after "
                "all that it puts back has been made"
            )
        return self.channels.current

    def close(self) -> None:
        """End the channels, and give up collectives that are under way."""
        self.channels.close()

    # -- rounds -------------------------------------------------------------------------------------------

    def round(
        self,
        what: str,
        act: Callable[[], _Result],
        iteration: int = -1,
        where: Callable[[], Stand | None] | None = None,
    ) -> _Result:
        """Run a collective, `act`, and return its result. Collectives inside `act` belong to the round.

        On a ring that survives losses, `act` is called again if the ring broke before all members had the
        result. So `act` must not change its inputs, and must give collectives new memory each time.

        Args:
            what: the collective in words, for errors.
            act: the collective.
            iteration: the iteration's number, if the collective belongs to one.
            where: returns this worker's place in its script as it waits; by default `scripts.stand`.
        """
        if self.outside or self._mark.inside:
            return act()
        if self._member is None:
            return self._round_once(act, where)
        while True:
            self._mark.inside = True
            try:
                self._meet_new_members()
                self.scripts.begin(self._number, where)
                result = act()
                self._holds = True
                points.reach("ring.held", iteration)
                self._confirm(what)
            except BrokenRingError as broken:
                self.scripts.end()
                if not self._form_next(broken, what):
                    continue
            except MismatchError as mismatch:
                self.scripts.end_with(mismatch)
                raise
            else:
                self._passed(self._number + 1)
                self._confirmed_in = self.generation
            finally:
                self.scripts.end()
                self._mark.inside = False
            points.reach("ring.confirmed", iteration)
            return result

    def _round_once(self, act: Callable[[], _Result], where: Callable[[], Stand | None] | None) -> _Result:
        """Run a collective once, on a ring that ends with its first loss."""
        self._mark.inside = True
        self._number += 1
        self.scripts.begin(self._number, where)
        try:
            return act()
        except MismatchError as mismatch:
            self.scripts.end_with(mismatch)
            raise
        finally:
            self.scripts.end()
            self._mark.inside = False

    @property
    def is_settled(self) -> bool:
        """True if a round of the present ring has been confirmed.

        Before that, members of the former ring may have gone on from the latest round that this worker holds,
        and may be lost by now.
        """
        return self._member is None or self._confirmed_in == self.generation

    def sum(
        self, values: Sequence[float], what: str, where: Callable[[], Stand | None] | None = None
    ) -> list[float]:
        """Return the sums of the workers' `values`; see `round` for `where`."""
        return self.round(what, lambda: sum_values(self.agreement, values, what), where=where)

    def _confirm(self, what: str) -> None:
        confirmations = self._all.confirmations
        if confirmations is not None:  # None: this worker is alone, or its ring has no rounds
            confirmations.confirm(what)

    def _passed(self, number: int) -> None:
        self._number, self._holds, self._met = number, False, None

    # -- the next ring ------------------------------------------------------------------------------------

    @property
    def is_awaited(self) -> bool:
        """True if newcomers wait to enter, as far as this worker knows."""
        return self._member is not None and not self.outside and self._member.is_awaited()

    def admit(self) -> None:
        """Let in the newcomers that wait. Every member calls this between the same two rounds.

        If the ring broke as the first of these rounds ended, newcomers do not enter this time. Some members
        then have the next ring already, without newcomers, and wait for the others to meet.
        """
        if not self._members_are_new:
            self._form_next(None, "newcomers to enter")
        self._meet_new_members()

    def meet(self) -> None:
        """Meet new members, if there are any. Call this before the first collective that is not within a
        round.

        Other members may make that collective within the round that follows.
        """
        if not self._mark.inside:
            self._meet_new_members()

    def enter(self) -> None:
        """Enter the ring that is under way, and take over the state of training from a member."""
        assert self._member is not None
        began = time.monotonic()
        ring = self._member.enter()
        try:
            self._stand(ring, began, "entering", again=False)
        except BrokenRingError as broken:
            self._form_next(broken, "entering")
        self._meet_new_members()

    def move(self, ring: Reformed) -> None:
        """Leave this ring for `ring`, which has other members, between two rounds.

        The last `ring.newcomers` of its workers take over the state of its first worker.
        """
        assert self._member is not None
        began = time.monotonic()
        self.channels.abandon()
        self._number, self._holds, self._met = ring.round, False, None
        self._fresh = ring.workers.index(self.place.name) >= len(ring.workers) - ring.newcomers
        try:
            self._stand(ring, began, MOVING, again=False)
        except BrokenRingError as broken:
            self._form_next(broken, MOVING)
        self._meet_new_members()

    def _form_next(self, broken: BrokenRingError | None, what: str) -> bool:
        """Form rings until one stands. Return True if the round's result counts as this worker holds it."""
        assert self._member is not None
        began, number = time.monotonic(), self._number
        while True:
            if broken is not None:
                self.scripts.check_lost(holds=self._holds)
                self.channels.abandon()
            points.reach("ring.broken")
            ring = self._member.reform(
                self._number,
                holds=self._holds,
                admits=broken is None,
                fresh=self._fresh and not self._holds,  # a member that holds the meeting's result has a state
            )
            self.channels.abandon()  # to admit newcomers, wait until all have passed the last round
            try:
                self._stand(ring, began, what, again=broken is not None and ring.round == number)
                return self._number > number
            except BrokenRingError as another:
                broken = another
                tried = time.monotonic() - began
                if tried > self._timeout:
                    raise DeadlineError(
                        f"worker {self.place.name} tried for {tried:.1f} s to form the next ring, for {what} "
                        f"(deadline sync.timeout, {self._timeout:g} s): {another}"
                    ) from another

    def _stand(self, ring: Reformed, began: float, what: str, *, again: bool) -> None:
        """Take part in `ring`, as the hub has decided. Raises RunError if this worker lacks a result that the
        others have."""
        assert self._member is not None
        if ring.round > self._number and not (self._holds or self._fresh):
            raise RunError(
                f"worker {self.place.name}: ring {ring.group} goes on at round {ring.round}, and this worker "
                f"does not hold round {self._number}"
            )
        if ring.round > self._number and self._met is not None:
            self._deal_anew(self._met)  # as the others have done in the former ring
            self._fresh = False
        self._passed(ring.round)
        self._seat.late = False
        self._open(self._member.place_in(ring))
        points.reach("ring.formed")
        self._members_are_new = True
        if ring.newcomers and self._state is not None:
            self._hand_over(self._state, ring.newcomers)
        entered = ring.workers[len(ring.workers) - ring.newcomers :]
        seconds = time.monotonic() - began
        changed = Regrouped(ring.group, self.world, ring.lost, ring.left, entered, seconds, what, again)
        if self._state is not None:
            self._told(self, changed)

    def _meet_new_members(self) -> None:
        """Let all members meet at the beginning of one round, and deal data anew.

        The meeting is a round of its own. Otherwise some members might deal by it and others not, if the ring
        broke at its end.
        """
        while self._members_are_new and self._state is not None:
            inside, self._mark.inside = self._mark.inside, True
            what = "the members' places in their data"
            try:
                self._met = self._all.session.gather(self._state.places(entered=self._fresh), what)
                self._holds = True
                self._confirm(what)
            except BrokenRingError as broken:
                self._form_next(broken, "the members to meet")
            else:
                self._deal_anew(self._met)
                self._passed(self._number + 1)
                self._members_are_new = self._fresh = False
            finally:
                self._mark.inside = inside

    def _deal_anew(self, places: Sequence[bytes]) -> None:
        assert self._state is not None
        self._state.deal_anew(places, self.rank, self.world)

    def _hand_over(self, state: HandoverState, newcomers: int) -> None:
        """Send a member's state to newcomers, or the reason why it cannot be captured.

        The giver is the first member, or with groups a member of the newcomer's group.
        """
        came = range(self.world - newcomers, self.world)
        givers = {rank: 0 if self._inner is None else self._inner.giver_of(rank, came) for rank in came}
        for giver in sorted(set(givers.values())):
            hand_over(self._all.session, state, giver, takes=givers.get(self.rank) == giver)

    def _open(self, place: Place) -> None:
        self._seat.place = self.scripts.handle_forming(place)
        self.channels.open(self.place)
