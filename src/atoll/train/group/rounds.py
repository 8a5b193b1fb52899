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
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch

from atoll.core import points
from atoll.core.errors import CheckpointError, DeadlineError, MismatchError, RunError, UserError
from atoll.core.stands import Stand
from atoll.train.api.place import Place
from atoll.train.group.channel import BrokenRingError, Channel, Sums
from atoll.train.group.confirmation import Confirmations
from atoll.train.group.hierarchy import Hierarchy
from atoll.train.group.ordering import RingOrder
from atoll.train.group.solo import SoloChannel
from atoll.train.group.standing import Standing
from atoll.wire.messages import Reformed

_Result = TypeVar("_Result")
_CPU = torch.device("cpu")
MOVING = "moving to another group"  # what a ring is doing that is left for another


class Member(Protocol):
    """What forms rings anew (`train/group/rendezvous.py`: HubRing)."""

    @property
    def late(self) -> bool:
        """Whether the run's ring was formed without this worker."""

    def reform(self, round: int, *, holds: bool, admits: bool, fresh: bool) -> Reformed:
        """Wait for all living members to want the next ring; raises RunError where there is none."""

    def enter(self) -> Reformed:
        """Wait to be let into the ring that is under way."""

    def place_in(self, ring: Reformed) -> Place:
        """This worker's place in it."""

    def is_awaited(self) -> bool:
        """Whether newcomers wait to enter."""


class State(Protocol):
    """What a newcomer takes from a living member, and what changes with the members."""

    def capture(self) -> bytes: ...

    def restore(self, raw: bytes) -> None: ...

    def all_places(self, *, entered: bool = False) -> list[Any]:
        """Where each member is in its data; a collective."""

    def deal_anew(self, places: Sequence[Any], rank: int, world: int) -> None: ...


class Inside(Protocol):
    """Groups within a ring, each with channels of its own (`train/group/inner.py`: Replicas)."""

    def open(self, session: Channel, device: torch.device) -> list[Channel]:
        """Connect to the members of this worker's group, as the ring is formed."""

    def giver_of(self, rank: int, newcomers: Sequence[int]) -> int:
        """The rank whose state the newcomer of rank `rank` takes."""


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


@dataclass(frozen=True)
class _Channels:
    data: Sums
    agreement: Channel
    session: Channel
    confirmations: Confirmations | None  # where rings go on, and are of several
    inside: tuple[Channel, ...]  # of this worker's group within the ring
    all: Sequence[Channel]  # that were opened

    def close(self) -> None:
        if self.confirmations is not None:
            self.confirmations.close()
        for channel in self.all:
            channel.close()

    def abandon(self) -> None:
        if self.confirmations is not None:
            self.confirmations.close()
        for channel in self.all:
            channel.abandon()


class Ring:
    """A group's channels: `data` carries chunks (on their device), `agreement` small vectors, `session` what
    workers tell one another outside iterations (both on the CPU).

    With a `member`, it goes on when it breaks: `place` and all channels are then new, `generation` is one
    higher, `state` and `told` hear of it. A worker that came late is alone (`outside`) until `enter`. With a
    `hierarchy`, `data` sums group by group. An `order` chooses in which order sums pass the members. `inside`
    are groups that train replicas of their own: their members' channels are opened with the ring's, and a
    newcomer takes the state of a member of its group.
    Raises DeadlineError when the other workers do not come within `timeout` seconds.
    """

    def __init__(
        self,
        place: Place,
        device: torch.device,
        timeout: float,
        member: Member | None = None,
        hierarchy: Hierarchy | None = None,
        *,
        order: RingOrder | None = None,
        compares: bool = False,
        inside: Inside | None = None,
    ) -> None:
        self.place, self.generation = place, 0
        self.stand: Stand | None = None
        self._compares = compares
        self._mismatch: MismatchError | None = None
        self.told_mismatch: Callable[[MismatchError], None] = lambda _mismatch: None
        self.ended: dict[int, Stand] = {}  # by name: members, of rings before this one too, that had ended
        self.judge_ended: Callable[[], MismatchError | None] = lambda: None  # whether the run ends by that
        self._confirmed_in = -1  # the generation of the latest round that all have confirmed
        self.state: State | None = None
        self.told: Callable[[Regrouped], None] = lambda _regrouped: None
        self.outside = member is not None and member.late
        self._device, self._timeout, self._member = device, timeout, member
        self._hierarchy, self._inner, self._order = hierarchy, inside, order
        self._fresh = self.outside  # it has no state yet
        self._number = 0  # of the round that is made now, or next
        self._holds = False  # all of its result
        self._inside = False  # a round, of which what is called now is a part
        self._members_are_new = False  # and have not met
        self._met: list[Any] | None = None  # the places, where the result that it holds is a meeting's
        self._waited_before = 0.0  # on channels that are no more
        self._channels: _Channels | None = None
        if self.outside:
            return
        try:
            self._open()
        except BrokenRingError as broken:
            if member is None:
                raise
            self._form_next(broken, "the other workers to connect")

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def world(self) -> int:
        return self.place.world

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each group that `data` sums in first, as the ring was formed last."""
        arranged = None if self._hierarchy is None else self._hierarchy.arranged
        return (tuple(range(self.world)),) if arranged is None else arranged.grouping.groups

    @property
    def data(self) -> Sums:
        return self._all.data

    @property
    def agreement(self) -> Channel:
        return self._all.agreement

    @property
    def session(self) -> Channel | None:
        """None where nobody can be talked to."""
        if self._mismatch is not None:
            raise self._mismatch
        return None if self._channels is None else self._channels.session

    @property
    def confirmations(self) -> Confirmations | None:
        """Those of the ring as it stands; None where it has no rounds, or stands not."""
        return None if self._channels is None else self._channels.confirmations

    @property
    def seconds_waited(self) -> float:
        """In all, on all channels."""
        seconds = self._waited_before
        if self._channels is not None:
            for channel in self._channels.all:
                seconds += channel.seconds_waited
        return seconds

    @property
    def _all(self) -> _Channels:
        if self._mismatch is not None:
            raise self._mismatch
        if self._channels is None:
            raise UserError(
                "this worker came when the run was under way; call session.resume() before the loop, after "
                "all that it puts back has been made"
            )
        return self._channels

    def close(self) -> None:
        """End the channels; what they were doing is given up."""
        channels, self._channels = self._channels, None
        if channels is not None:
            channels.close()

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
            where: returns this worker's place in its script as it waits; by default the ring's `stand`.
        """
        if self.outside or self._inside:
            return act()
        where = where or self._where
        if self._member is None:
            return self._round_once(act, where)
        while True:
            self._inside = True
            try:
                self._meet_new_members()
                self._begin(where)
                result = act()
                self._holds = True
                points.reach("ring.held", iteration)
                self._confirm(what)
            except BrokenRingError as broken:
                self._end()
                if not self._form_next(broken, what):
                    continue
            except MismatchError as mismatch:
                self._end_with(mismatch)
                raise
            else:
                self._passed(self._number + 1)
                self._confirmed_in = self.generation
            finally:
                self._end()
                self._inside = False
            points.reach("ring.confirmed", iteration)
            return result

    def _round_once(self, act: Callable[[], _Result], where: Callable[[], Stand | None]) -> _Result:
        """Run a collective once, on a ring that ends with its first loss."""
        self._inside = True
        self._number += 1
        self._begin(where)
        try:
            return act()
        except MismatchError as mismatch:
            self._end_with(mismatch)
            raise
        finally:
            self._end()
            self._inside = False

    # -- where the workers stand ---------------------------------------------------------------------------

    def _where(self) -> Stand | None:
        return self.stand

    def _begin(self, where: Callable[[], Stand | None]) -> None:
        if self.place.standing is not None:
            self.place.standing.begin(self._number, where)

    def _end(self) -> None:
        if self.place.standing is not None:
            self.place.standing.end()

    def leave(self, stand: Stand) -> None:
        """Record that this worker's script ends at `stand`; the other members may go on."""
        if self.place.standing is not None:
            self.place.standing.leave(stand)

    def check_ended(self) -> None:
        """Raise MismatchError where this worker waits for a member that has ended."""
        mismatch = self.judge_ended()
        if mismatch is not None:
            self._end_with(mismatch)
            raise mismatch

    def _raise_mismatch(self) -> None:
        """Raise MismatchError where a mismatch broke the ring.

        The others have ended with a mismatch, or a member has ended while this worker still needs it.
        """
        standing = self.place.standing
        if standing is None:
            return
        known = standing.known()
        self.ended |= standing.ended
        if known is not None:
            self._end_with(known)
            raise known
        if (
            not self._holds
        ):  # else who has ended took part in this round, which may be the last that it had to
            self.check_ended()

    def _end_with(self, mismatch: MismatchError) -> None:
        """End the ring with a mismatch: no later round waits for a member."""
        if self._mismatch is None:
            self.told_mismatch(mismatch)
        self._mismatch = mismatch
        self._abandon()

    @property
    def is_settled(self) -> bool:
        """Whether a round of this very ring has been confirmed. Before that, members of the ring before may
        have gone on from the latest round that this worker holds, and be gone now."""
        return self._member is None or self._confirmed_in == self.generation

    def sum(
        self, values: Sequence[float], what: str, where: Callable[[], Stand | None] | None = None
    ) -> list[float]:
        """Return the sums of the workers' `values`; see `round` for `where`."""

        def act() -> list[float]:
            summed = torch.tensor(values)
            self.agreement.wait(self.agreement.sum(summed), what)
            result: list[float] = summed.tolist()
            return result

        return self.round(what, act, where=where)

    def _confirm(self, what: str) -> None:
        confirmations = self._all.confirmations
        if confirmations is not None:  # else this worker is its group, or has no rounds
            confirmations.confirm(what)

    def _passed(self, number: int) -> None:
        self._number, self._holds, self._met = number, False, None

    def check(self) -> None:
        """Raises BrokenRingError within a round, where the hub has said that the ring has lost a member: what
        is waited for outside the ring may be that one's to bring."""
        if self._inside and self.place.watch is not None:
            self.place.watch()

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
        if not self._inside:
            self._meet_new_members()

    @property
    def late(self) -> bool:
        """Whether this worker came late, and has not entered."""
        return self.outside

    def begin(self) -> None:
        """The members have met as the ring was formed."""

    def ending(self) -> None:
        """Whoever comes now is let in by the last round."""

    def enter(self) -> bool:
        """Take part in the ring that is under way, and take over the training's state from a member. True."""
        assert self._member is not None
        began = time.monotonic()
        ring = self._member.enter()
        try:
            self._stand(ring, began, "entering", again=False)
        except BrokenRingError as broken:
            self._form_next(broken, "entering")
        self._meet_new_members()
        return True

    def move(self, ring: Reformed) -> None:
        """Leave this ring for `ring`, of other members, between two rounds. Its last `newcomers` take over
        the first one's state."""
        assert self._member is not None
        began = time.monotonic()
        self._abandon()
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
                self._raise_mismatch()
                self._abandon()
            points.reach("ring.broken")
            ring = self._member.reform(
                self._number,
                holds=self._holds,
                admits=broken is None,
                fresh=self._fresh and not self._holds,  # who holds the meeting has all that the others have
            )
            self._abandon()  # who admits newcomers waits with that until all are past the round before
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
        self.place, self.outside = self._member.place_in(ring), False
        self.ended = {name: stand for name, stand in self.ended.items() if name not in ring.workers}
        self._open()
        points.reach("ring.formed")
        self._members_are_new = True
        if ring.newcomers and self.state is not None:
            self._hand_over(self.state, ring.newcomers)
        entered = ring.workers[len(ring.workers) - ring.newcomers :]
        seconds = time.monotonic() - began
        self.told(Regrouped(ring.group, self.world, ring.lost, ring.left, entered, seconds, what, again))

    def _meet_new_members(self) -> None:
        """All members are at the beginning of the same round: the time to deal data anew. The meeting is a
        round of its own: else some might deal by it and others not, where the ring breaks at its end."""
        while self._members_are_new and self.state is not None:
            inside, self._inside = self._inside, True  # what the state tells the others is no other round
            try:
                self._met = self.state.all_places(entered=self._fresh)
                self._holds = True
                self._confirm("the members' places in their data")
            except BrokenRingError as broken:
                self._form_next(broken, "the members to meet")
            else:
                self._deal_anew(self._met)
                self._passed(self._number + 1)
                self._members_are_new = self._fresh = False
            finally:
                self._inside = inside

    def _deal_anew(self, places: Sequence[Any]) -> None:
        assert self.state is not None
        self.state.deal_anew(places, self.rank, self.world)

    def _hand_over(self, state: State, newcomers: int) -> None:
        """Send a member's state to newcomers, or the reason why it cannot be captured: the first member's, or
        that of a member of the newcomer's group."""
        came = range(self.world - newcomers, self.world)
        givers = {rank: 0 if self._inner is None else self._inner.giver_of(rank, came) for rank in came}
        for giver in sorted(set(givers.values())):
            self._give(state, giver, takes=givers.get(self.rank) == giver)

    def _give(self, state: State, giver: int, *, takes: bool) -> None:
        """Send the state of the member of rank `giver` to all; those that it is for take it."""
        raw, is_refused = b"", False
        if self.rank == giver:
            try:
                raw = state.capture()
            except CheckpointError as error:  # the newcomers' to know, and nothing that ends the others
                raw, is_refused = str(error).encode(), True
        what = f"the state of worker {self.place.name_of(giver)}, for those who enter"
        size = torch.tensor([len(raw), is_refused], dtype=torch.int64)
        channel = self._all.session
        channel.wait(channel.broadcast(size, giver), what)
        if self.rank == giver:
            payload = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        else:
            payload = torch.empty(int(size[0]), dtype=torch.uint8)
        channel.wait(channel.broadcast(payload, giver), what)
        if takes and size[1]:
            said = payload.numpy().tobytes().decode(errors="replace")
            raise CheckpointError(
                f"worker {self.place.name} cannot enter: no worker can give its state: {said}"
            )
        if takes:
            state.restore(payload.numpy().tobytes())

    def _open(self) -> None:
        place, timeout = self.place, self._timeout
        if self._compares and place.store is not None:
            names = tuple(place.name_of(rank) for rank in range(place.world))
            standing = Standing(place.store, place.rank, names, timeout)
            self.place = place = replace(place, standing=standing)
        if place.store is None:
            solo = SoloChannel(place, timeout)
            inside = [] if self._inner is None else self._inner.open(solo, self._device)
            self._channels = _Channels(solo, solo, solo, None, tuple(inside), [*inside, solo])
            self.generation += 1
            return
        opened: list[Channel] = []
        try:
            opened.append(session := Channel(place, "session", timeout, _CPU))
            if self._hierarchy is None:
                ring = Channel(place, "ring", timeout, self._device)
            else:
                ring = self._hierarchy.open(session, self._device)
            opened.append(ring)
            data: Sums = ring
            if self._order is not None:
                data = self._order.open(session, ring, opened)
            if self._device.type != "cpu":
                opened.append(Channel(place, "agreement", timeout, _CPU))
            agreement = opened[1] if self._device.type == "cpu" else opened[-1]
            inside = [] if self._inner is None else self._inner.open(session, self._device)
            opened += inside
            confirmations = Confirmations(agreement) if self._member is not None else None
        except BrokenRingError:
            for channel in opened:
                channel.abandon()
            raise
        self._channels = _Channels(data, agreement, session, confirmations, tuple(inside), opened)
        self.generation += 1

    def _abandon(self) -> None:
        self._waited_before = self.seconds_waited
        channels, self._channels = self._channels, None
        if channels is not None:
            channels.abandon()
