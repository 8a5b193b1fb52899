"""The entering of a run under way, and the new deal of data when its members change, with a parameter server.

The parameters and the optimizer's state lie at the shards. The rest of the state comes from a living worker's
memory, with shard 0 as the mailbox. The newcomer asks; the worker that is asked answers at its next boundary
between two iterations. No worker waits for one that might be dead, since shard 0 then asks the next one. No
state is kept that could be stale, and workers need no connections to one another. Under `bsp` the answer
waits for the boundary at which the newcomer enters: the newcomer is a member of the next iteration, so the
others wait for its contribution.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from atoll.core.errors import CheckpointError, UserError
from atoll.core.points import reach
from atoll.exchange.link import LOG, ShardLink
from atoll.train.checkpoint.resume import TrainingState
from atoll.train.group.rounds import Ring
from atoll.train.members.attendance import Attendance
from atoll.train.members.workers import Workers
from atoll.wire.messages import AnyMessage, Arrive, Committed, GiveState, WantState

ENTERING = "entering"  # the name of a newcomer's messages, which are sent again until answered
_NEVER = 2**53  # later than any iteration
_IN_PASS = (
    "the other workers' scripts go on with gradients of an earlier backward, which a worker that enters now "
    "would lack; start this worker again: it can enter where all gradients begin anew"
)


class Entrance(Protocol):
    """The way of a late worker into the run."""

    @property
    def late(self) -> bool:
        """True for a worker that has come late and has not entered."""

    def begin(self) -> None:
        """Note that the workers have met. A late worker is alone until it enters."""

    def enter(self) -> bool:
        """Enter with the state of a living worker; return False if no other worker lives."""

    def ending(self) -> None:
        """Note that this worker has made all of its iterations. It still lets others in."""


class RingEntrance:
    """The way into a ring that is under way, at a point where its members admit newcomers (`Ring.admit`)."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring

    @property
    def late(self) -> bool:
        return self._ring.outside

    def begin(self) -> None:
        """Do nothing: the members met when the ring was formed."""

    def enter(self) -> bool:
        self._ring.enter()
        return True

    def ending(self) -> None:
        """Do nothing: the last round lets newcomers in."""


class ServedEntrance:
    """The way into a run with a parameter server, and a worker's part in letting others in.

    Args:
        shards: the link to the shards.
        attendance: this worker's view of the run.
        workers: the calls that all workers make.
        state: the state of training.
        compare: compares the models with those of the run, before this worker takes part.
        entered: fetches the parameters once this worker takes part, and returns the worker's next iteration.
        told_members: called with the number of living workers.
        elastic: True if all workers make the same iterations (`bsp`, without sites); then data is dealt anew
            among them when members change, in groups too.
        fixed: True if all workers make the same iterations and data is not dealt anew (`bsp` with sites).
            Then a newcomer takes a lost worker's rank, and that worker's part of the data.
        told_unlike: called with a warning if another worker has different hyperparameters.
    """

    def __init__(
        self,
        shards: ShardLink,
        attendance: Attendance,
        workers: Workers,
        state: TrainingState,
        compare: Callable[[], None],
        entered: Callable[[], int],
        told_members: Callable[[int], None],
        elastic: bool,
        fixed: bool = False,
        told_unlike: Callable[[str], None] = lambda _line: None,
    ) -> None:
        self._told_unlike = told_unlike
        self._shards, self._attendance, self._state = shards, attendance, state
        self._workers = workers
        self._compare, self._entered = compare, entered
        self._told_members, self._elastic = told_members, elastic
        self._fixed = fixed
        self._worker = attendance.place.rank
        self._members: list[int] = []  # the members' ranks in order; empty while unknown
        self._at: int | None = None  # the iteration that begins at this boundary; None: no boundary
        self._begins = True  # False: that iteration's gradients are added to those of the iteration before
        self._wanted: list[WantState] = []
        self._given: tuple[GiveState, memoryview | None] | None = None
        shards.on(WantState, self._handle_want)
        shards.on(GiveState, self._handle_give)

    @property
    def late(self) -> bool:
        return self._attendance.late

    def begin(self) -> None:
        """Take the workers that have met as the members. A late worker is alone until it enters."""
        if self._elastic:
            self._take_members(self._attendance.ranks)

    def name_of(self, rank: int) -> int:
        """Return the number of the worker that has this rank among those that share a batch."""
        if self._members:
            return self._members[rank]
        return self._worker if self.late else rank

    # Coming late

    def enter(self) -> bool:
        shards = self._shards
        self._compare()
        shards.send(LOG, Arrive(incarnation=shards.incarnation), until=ENTERING)
        reach("enter.arrived")
        iteration = self._entered()
        reach("enter.member", iteration)
        shards.send(LOG, WantState(iteration=iteration), until=ENTERING)
        shards.wait(
            lambda: self._given is not None,
            lambda: [LOG],
            f"a living worker's state before iteration {iteration}",
        )
        shards.answered(ENTERING)
        assert self._given is not None
        give, payload = self._given
        self._given = None
        self._attendance.enter(give.meeting, list(give.members) or [self._worker])
        if give.refused:
            raise CheckpointError(f"a living worker's state: {give.refused}")
        members = list(give.members) or [self._worker]
        if give.members:
            rank = members.index(self._worker) if self._elastic else None
            self._members = members if self._elastic else []
            self._state.restore(payload if payload is not None else b"", self._worker, rank, self._fixed)
        else:
            self._state.iteration = iteration
            self._state.count_from_here()
        if self._elastic:
            self._take_members(members)
        reach("enter.restored", iteration)
        return bool(give.members)

    def _handle_give(self, _shard: int, message: AnyMessage, payload: memoryview | None) -> None:
        assert isinstance(message, GiveState)
        self._given = message, payload

    # Letting others in

    def boundary(self, iteration: int, *, begins: bool) -> None:
        if self.late:
            raise UserError(
                "this worker comes late: the run is under way; call session.resume() before the loop, after "
                "session.prepare and all that it puts back (schedulers, samplers, session.register)"
            )
        self._at, self._begins = iteration, begins
        self._answer()

    def over(self) -> None:
        self._at = None

    def ending(self) -> None:
        """Note that this worker has made all its iterations: from now on any time is a boundary."""
        self._at, self._begins = _NEVER, True
        self._answer()

    def _handle_want(self, _shard: int, message: AnyMessage, _payload: memoryview | None) -> None:
        assert isinstance(message, WantState)
        self._wanted.append(message)
        self._answer()

    def _answer(self) -> None:
        """Give this worker's present state to the newcomers that are due."""
        at = self._at
        if at is None:
            return
        synchronous = self._elastic or self._fixed
        due = [want for want in self._wanted if not synchronous or want.iteration <= at]
        if not due:
            return
        self._wanted = [want for want in self._wanted if want not in due]
        refused, payload = "", memoryview(b"")
        try:
            if synchronous and not self._begins:
                raise CheckpointError(_IN_PASS)
            payload = memoryview(self._state.capture(self._fixed))
        except CheckpointError as error:  # the newcomer raises it; this worker goes on
            refused = str(error)[:4000]
        for want in due:
            reach("enter.giving", want.iteration)
            give = GiveState(
                worker=want.worker,
                life=want.life,
                meeting=self._attendance.number,
                members=self._members or [self._worker, want.worker],
                refused=refused,
            )
            self._shards.send(LOG, give, payload)
            reach("enter.given", want.iteration)

    # Changes of members

    def told(self, committed: Committed) -> None:
        members = list(committed.members or committed.workers)
        self._told_members(len(members))
        if committed.unlike:
            self._told_unlike(committed.unlike)
        if members and not self._shards.hello.site:  # a site's shard knows only its own workers
            self._attendance.saw(members)
        if self._elastic and (members != self._members or committed.entering):
            self._regroup(committed.iteration, members, list(committed.entering))

    def _regroup(self, iteration: int, members: list[int], entering: list[int]) -> None:
        """Meet all workers that have made this iteration, and deal the rest of their data anew."""
        what = f"the members' places in their data after iteration {iteration}"
        reach("members.meet", iteration)
        places = self._workers.gather(self._state.places(), what)
        there = dict(zip(self._attendance.ranks, places, strict=True))
        now = sorted({*there, *entering})
        absent = [rank for rank, worker in enumerate(self._members) if worker not in members]
        self._members = now
        self._state.deal_anew(
            [there.get(worker) for worker in now], now.index(self._worker), len(now), absent
        )
        reach("members.dealt", iteration)

    def _take_members(self, members: list[int]) -> None:
        self._members = members
        self._state.rank, self._state.world = members.index(self._worker), len(members)
