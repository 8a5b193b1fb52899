"""A group's channels, and its collectives as numbered rounds: what lets a ring go on without a lost member.

Every collective of a ring that met at a hub is a round, which ends with a confirmation: a barrier that nobody
passes before all hold the round's result (train/group/confirmation.py). When the ring breaks, each member
tells the hub its round, and whether it holds its result; the hub forms the next ring, and says which round
it makes next (store/regroup.py): so a member either takes what it holds, or makes the round again, from what
it has kept, in memory that the old ring does not know.
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
from atoll.train.group.handover import State, hand_over
from atoll.train.group.hierarchy import Hierarchy
from atoll.train.group.ordering import RingOrder
from atoll.train.group.ringbytes import sum_values
from atoll.train.group.scriptplaces import Judge, ScriptPlaces
from atoll.wire.messages import Reformed

_Result = TypeVar("_Result")
MOVING = "moving to another group"  # what a ring is doing that is left for another


class Member(Protocol):
    """What forms rings anew (`train/group/rendezvous.py`: HubRing)."""

    def reform(self, round: int, *, holds: bool, admits: bool, fresh: bool) -> Reformed:
        """Wait for all living members to want the next ring; raises RunError where there is none."""

    def enter(self) -> Reformed:
        """Wait to be let into the ring that is under way."""

    def place_in(self, ring: Reformed) -> Place:
        """This worker's place in it."""

    def is_awaited(self) -> bool:
        """Whether newcomers wait to enter."""


@dataclass(frozen=True)
class Regrouped:
    """How a ring went on: `lost`, `left` and `entered` are workers by name, `seconds` how long it took."""

    group: int
    world: int
    lost: list[int]
    left: list[int]
    entered: list[int]
    seconds: float
    what: str  # what the ring was doing
    again: bool  # whether that is made again


@dataclass
class RoundMark:
    """Whether this worker is `inside` a round of its ring, for those who wait for something else in it."""

    inside: bool = False


class Ring:
    """A group's channels: `data` carries chunks (on their device), `agreement` small vectors, `session` what
    workers tell one another outside iterations (both on the CPU).

    With a `member`, it goes on when it breaks: the `seat`'s place and all channels are then new, `generation`
    is one higher, and `told` hears how it goes on. A worker that came late is alone (`outside`) until
    `enter`; newcomers take over a member's `state`. With a `hierarchy`, `data` sums group by group. An
    `order` chooses in which order sums pass the members. `inside` are groups that train replicas of their
    own: their members' channels are opened with the ring's, and a newcomer takes the state of a member of its
    group. `scripts` compares the members' scripts, and `judge` decides about those that have ended. `mark`
    says when this worker is within a round. Raises DeadlineError when the other workers do not come within
    `timeout` seconds.
    """

    def __init__(
        self,
        seat: Seat,
        device: torch.device,
        timeout: float,
        member: Member | None = None,
        hierarchy: Hierarchy | None = None,
        *,
        order: RingOrder | None = None,
        compares: bool = False,
        inside: Inside | None = None,
        state: State | None = None,
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
        self._state: State | None = None  # until the ring is formed for the first time: nobody has any
        self._told = told
        self._confirmed_in = -1  # the generation of the latest round that all have confirmed
        self._timeout, self._member, self._inner = timeout, member, inside
        self._fresh = self.outside  # it has no state yet
        self._number = 0  # of the round that is made now, or next
        self._holds = False  # all of its result
        self._members_are_new = False  # and have not met
        self._met: list[bytes] | None = None  # the places, where the result that it holds is a meeting's
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
        """This worker's, as it is now."""
        return self._seat.place

    @property
    def outside(self) -> bool:
        """True on a worker that has come late, and has not entered."""
        return self._seat.late

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def world(self) -> int:
        return self.place.world

    @property
    def generation(self) -> int:
        """Rises whenever the ring is formed."""
        return self.channels.generation

    @property
    def data(self) -> Sums:
        return self._all.data

    @property
    def agreement(self) -> Channel:
        return self._all.agreement

    @property
    def session(self) -> Channel | None:
        """None where nobody can be talked to."""
        return self._all.session if self.channels.current is not None or self.scripts.mismatch else None

    @property
    def seconds_waited(self) -> float:
        """In all, on all channels."""
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
        """End the channels; what they were doing is given up."""
        self.channels.close()

    # -- rounds -------------------------------------------------------------------------------------------

    def round(
        self,
        what: str,
        act: Callable[[], _Result],
        iteration: int = -1,
        where: Callable[[], Stand | None] | None = None,
    ) -> _Result:
        """Run a collective, `act`, and return its result. Collectives inside `act` belong to it.

        On a ring that goes on after losses, `act` is called again if the ring broke before all members had
        the result. So `act` must not change its inputs, and must give collectives new memory each time.

        Args:
            what: the collective in words, for errors.
            act: the collective.
            iteration: the iteration's number, where the collective belongs to one.
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
        """Whether a round of this very ring has been confirmed. Before that, members of the ring before may
        have gone on from the latest round that this worker holds, and be gone now."""
        return self._member is None or self._confirmed_in == self.generation

    def sum(
        self, values: Sequence[float], what: str, where: Callable[[], Stand | None] | None = None
    ) -> list[float]:
        """Return the sums of the workers' `values`; see `round` for `where`."""
        return self.round(what, lambda: sum_values(self.agreement, values, what), where=where)

    def _confirm(self, what: str) -> None:
        confirmations = self._all.confirmations
        if confirmations is not None:  # else this worker is its group, or has no rounds
            confirmations.confirm(what)

    def _passed(self, number: int) -> None:
        self._number, self._holds, self._met = number, False, None

    # -- the next ring ------------------------------------------------------------------------------------

    @property
    def is_awaited(self) -> bool:
        """Whether newcomers wait, as far as this worker knows."""
        return self._member is not None and not self.outside and self._member.is_awaited()

    def admit(self) -> None:
        """Let in the newcomers that wait: every member calls it between the same two rounds.

        Where the ring broke as the first of these ended, they are not let in this time: those who were here
        already were given the next ring without them, and wait for the others to meet.
        """
        if not self._members_are_new:
            self._form_next(None, "newcomers to enter")
        self._meet_new_members()

    def meet(self) -> None:
        """Meet new members, where there are some: called before the first collective that no round is around,
        since others may do that within the round that follows."""
        if not self._mark.inside:
            self._meet_new_members()

    def enter(self) -> None:
        """Take part in the ring that is under way, and take over the training's state from a member."""
        assert self._member is not None
        began = time.monotonic()
        ring = self._member.enter()
        try:
            self._stand(ring, began, "entering", again=False)
        except BrokenRingError as broken:
            self._form_next(broken, "entering")
        self._meet_new_members()

    def move(self, ring: Reformed) -> None:
        """Leave this ring for `ring`, of other members, between two rounds. Its last `newcomers` take over
        the first one's state."""
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
        """Form rings until one stands; whether the round's result is to be taken as it is held."""
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
                fresh=self._fresh and not self._holds,  # who holds the meeting has all that the others have
            )
            self.channels.abandon()  # who admits newcomers waits until all are past the round before
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
        """Take part in `ring`, as the hub has decided."""
        assert self._member is not None
        if ring.round > self._number and not (self._holds or self._fresh):
            raise RunError(
                f"worker {self.place.name}: ring {ring.group} goes on at round {ring.round}, and this worker "
                f"does not hold round {self._number}"
            )
        if ring.round > self._number and self._met is not None:
            self._deal_anew(self._met)  # as the others have, in the ring that was
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
        """All members are at the beginning of the same round: the time to deal data anew. The meeting is a
        round of its own: else some might deal by it and others not, where the ring breaks at its end."""
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

    def _hand_over(self, state: State, newcomers: int) -> None:
        """Send a member's state to newcomers, or the reason why it cannot be captured: the first member's, or
        that of a member of the newcomer's group."""
        came = range(self.world - newcomers, self.world)
        givers = {rank: 0 if self._inner is None else self._inner.giver_of(rank, came) for rank in came}
        for giver in sorted(set(givers.values())):
            hand_over(self._all.session, state, giver, takes=givers.get(self.rank) == giver)

    def _open(self, place: Place) -> None:
        self._seat.place = self.scripts.handle_forming(place)
        self.channels.open(self.place)
