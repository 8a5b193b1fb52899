"""Moves of training workers from their present groups to newly decided ones.

A group of workers is one **contributor** to the server shards, with a number unique in the run and an
incarnation (its `life`). A worker that joins is a contributor by itself. A decision **opens** groups: their
members are notified, and each **asks** for its group at the end of an iteration. Once all living members have
asked, the group is **formed**: they build a ring, register the new contributor with the shards, and report
that they have **arrived**. A contributor without members is to be fenced.

With `lockstep` (bulk-synchronous runs) every decision moves all workers, and old contributors are fenced only
when no worker is moving any more, so that no iteration is made by a part of the workers. A dead worker is
fenced at once in both modes: the workers that have not moved prevent such an iteration.

Waiting is bounded: a group that does not come together is given up, its members stay where they are, and it
is opened again later, after growing pauses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from atoll.groups.grouping import Grouping, show

FIRST_PAUSE, LONGEST_PAUSE = 5.0, 320.0  # seconds before an abandoned group is opened again
LOST_SECONDS = 1.0  # from a member's death until the others are regrouped: more may die


@dataclass(frozen=True)
class Opened:
    """Groups to form. `grouping` is the number of the decision."""

    grouping: int
    groups: tuple[tuple[int, ...], ...]
    reason: str


@dataclass(frozen=True)
class Formed:
    """A group has come together.

    `workers` are in order of progress, the furthest first; the last `newcomers` of them take its state.
    """

    grouping: int
    contributor: int
    life: int
    workers: tuple[int, ...]
    newcomers: int


@dataclass(frozen=True)
class Placed:
    """A worker asked again for a group that was already formed with it."""

    worker: int
    contributor: int


@dataclass(frozen=True)
class Stays:
    """A worker that asked stays in its present contributor."""

    worker: int
    reason: str


@dataclass(frozen=True)
class GivenUp:
    """A group did not come together; it is opened again at time `again`."""

    grouping: int
    group: tuple[int, ...]
    reason: str
    again: float


@dataclass(frozen=True)
class Empty:
    """A contributor has no members any more, and is to be fenced."""

    contributor: int
    life: int


FormationEvent: TypeAlias = Opened | Formed | Placed | Stays | GivenUp | Empty


@dataclass
class ContributorState:
    """A contributor: its members, and the workers on their way to it."""

    life: int
    members: list[int] = field(default_factory=list)
    coming: list[int] = field(default_factory=list)
    lost_since: float | None = None  # since a member died or moved: its part of the leases lies idle
    over: bool = False  # a member has ended its session, and the others are about to


@dataclass
class WorkerState:
    """A worker: `contributor` is its present one, `target` its next one."""

    life: int
    contributor: int
    target: int | None = None
    told: int = 0  # number of the latest grouping for it
    trains: bool = False  # has made iterations
    given_up: str = ""  # why its latest group was given up


@dataclass
class FormingState:
    """A group to be formed. `number` is that of its contributor.

    `wanted` are its members; `asked` has the iterations of those that asked.
    """

    grouping: int
    number: int
    wanted: list[int]
    asked: dict[int, int] = field(default_factory=dict)
    until: float | None = None  # when it is given up; None before anybody asked


@dataclass
class DecisionState:
    """Groups that wait to be opened, not before `due`."""

    groups: list[list[int]]
    reason: str
    due: float = 0.0


@dataclass
class FormationState:
    """State of `Formation` as plain data: times in the caller's seconds, workers by rank.

    `abandoned` are contributors (number, life) that all members have left, and that may not be fenced yet.
    """

    grouping: int
    next_number: int
    numbers: list[int]
    workers: dict[int, WorkerState]
    contributors: dict[int, ContributorState]
    forming: list[FormingState]
    waiting: list[DecisionState]
    again: DecisionState | None
    pause: float
    abandoned: list[tuple[int, int]] = field(default_factory=list)


class Formation:
    """The contributors of a run that begins with `workers` workers. Times are in the caller's seconds.

    `new_life` returns a unique incarnation. The `handle_` methods and `poll` return outcomes, in order.

    Attributes:
        state: all that a restart needs, and what it sets. It is not a copy: encode it at once.
    """

    def __init__(self, workers: int, new_life: Callable[[], int], *, lockstep: bool = False) -> None:
        self._new_life, self._lockstep = new_life, lockstep
        self.state = FormationState(0, workers, [], {}, {}, [], [], None, FIRST_PAUSE)

    # -- queries ------------------------------------------------------------------------------------------

    @property
    def numbers(self) -> list[int]:
        """Numbers of all groups that ever existed: no worker may have one as its rank."""
        return self.state.numbers

    def grouping_of(self, worker: int) -> int:
        """Return the latest grouping for a worker; 0 if the worker is not present."""
        known = self.state.workers.get(worker)
        return known.told if known is not None else 0

    def contributors_of(self, worker: int) -> list[tuple[int, int]]:
        """Return (number, life) of a worker's contributor, and of its next one."""
        known = self.state.workers.get(worker)
        if known is None:
            return []
        numbers = [known.contributor, *([known.target] if known.target is not None else [])]
        return [(number, self.state.contributors[number].life) for number in numbers]

    def members(self, contributor: int) -> tuple[int, ...]:
        """Return a contributor's members, and the workers on their way to it, in order of rank."""
        there = self.state.contributors.get(contributor)
        return tuple(sorted([*there.members, *there.coming])) if there is not None else ()

    def is_awaited(self, worker: int) -> bool:
        """Return True if a group waits for this worker to come, or is about to."""
        return any(
            worker in each.wanted and worker not in each.asked and len(each.wanted) > 1
            for each in self.state.forming
        )

    def settled(self) -> bool:
        """Return True if no worker is moving, or about to."""
        return not self.state.forming and not any(each.coming for each in self.state.contributors.values())

    def placed(self) -> Grouping:
        """Return the groups of all living workers; a moving one counts at its target."""
        return Grouping(self._groups_now())

    # -- workers ------------------------------------------------------------------------------------------

    def handle_joined(self, worker: int, life: int) -> list[FormationEvent]:
        """Add a worker, as a contributor by itself until it is placed."""
        state = self.state
        before = [key for key in state.abandoned if key[0] == worker]  # of a dead worker with this rank
        state.abandoned = [key for key in state.abandoned if key[0] != worker]
        state.workers[worker] = WorkerState(life, worker)
        state.contributors[worker] = ContributorState(life, [worker])
        state.next_number = max(state.next_number, worker + 1)
        return [Empty(*key) for key in before]

    def handle_left(self, now: float, worker: int, *, finished: bool = False) -> list[FormationEvent]:
        """Remove a worker that died, or ended its session (`finished`)."""
        state = self.state
        known = state.workers.pop(worker, None)
        if known is None:
            return []
        outcomes: list[FormationEvent] = []
        for number in dict.fromkeys([known.contributor, known.target]):
            there = state.contributors.get(number) if number is not None else None
            if number is None or there is None:
                continue
            there.members = [member for member in there.members if member != worker]
            there.coming = [member for member in there.coming if member != worker]
            there.over = there.over or finished
            there.lost_since = now
            if not there.members and not there.coming:
                outcomes.append(Empty(number, state.contributors.pop(number).life))
        for forming in list(state.forming):
            if worker in forming.wanted:
                forming.wanted.remove(worker)
                forming.asked.pop(worker, None)
                outcomes += self._form_if_whole(forming)
        for decision in [*state.waiting, *([state.again] if state.again is not None else [])]:
            rests = ([each for each in group if each != worker] for group in decision.groups)
            decision.groups = [rest for rest in rests if rest]
        return [*outcomes, *self._fence_left()]

    def handle_trains(self, worker: int) -> None:
        """Note that a worker makes iterations. In lock step a decision leaves out the others, which would be
        waited for."""
        if worker in self.state.workers:
            self.state.workers[worker].trains = True

    # -- decisions ----------------------------------------------------------------------------------------

    def handle_decided(
        self, now: float, groups: Iterable[Iterable[int]], reason: str
    ) -> list[FormationEvent]:
        """Take a decision: form these groups; workers in none of them stay where they are.

        The groups are opened once none of their workers is moving. Waiting decisions that concern only these
        workers are dropped.
        """
        state = self.state
        decision = DecisionState([sorted(group) for group in Grouping(groups)], reason, now)
        touched = _workers_of(decision)
        state.waiting = [each for each in state.waiting if not _workers_of(each) <= touched]
        self._forget_again(touched)
        state.waiting.append(decision)
        return self._open_waiting(now)

    # -- workers' messages --------------------------------------------------------------------------------

    def handle_asked(
        self, now: float, worker: int, grouping: int, iteration: int, patience: float
    ) -> list[FormationEvent]:
        """A worker asks for its group.

        Args:
            grouping: number of the latest decision that the worker knows of.
            iteration: number of iterations that it has completed.
            patience: seconds that it is ready to wait.
        """
        state = self.state
        known = state.workers.get(worker)
        if known is None:
            return []
        if known.target is not None:
            return [Placed(worker, known.target)]
        forming = next((each for each in state.forming if worker in each.wanted), None)
        if forming is None:
            return [Stays(worker, known.given_up or "no new group is planned for it")]
        if grouping < forming.grouping:
            forming.asked.pop(worker, None)
            return [Stays(worker, known.given_up or f"grouping {forming.grouping} has replaced it")]
        forming.asked[worker] = iteration
        together = [each for each in state.forming if self._lockstep and each.grouping == forming.grouping]
        for each in together or [forming]:
            each.until = now + patience if each.until is None else each.until
        return [*self._form_if_whole(forming), *self._fence_left()]

    def handle_arrived(self, now: float, worker: int, contributor: int) -> list[FormationEvent]:
        """Record that a worker now speaks only for its new contributor. May be repeated."""
        state = self.state
        known = state.workers.get(worker)
        if known is None or known.target != contributor:
            return []
        old, new = state.contributors[known.contributor], state.contributors[contributor]
        old.members.remove(worker)
        old.lost_since = now
        new.coming.remove(worker)
        new.members.append(worker)
        if not old.members and not old.coming:
            state.abandoned.append((known.contributor, old.life))
            del state.contributors[known.contributor]
        known.contributor, known.target = contributor, None
        return [*self._fence_left(), *self._open_waiting(now)]

    # -- time ---------------------------------------------------------------------------------------------

    def poll(self, now: float) -> list[FormationEvent]:
        """Give up late groups, and open those that are due."""
        state = self.state
        late = [each for each in state.forming if each.until is not None and each.until <= now]
        outcomes: list[FormationEvent] = []
        for forming in late:
            outcomes += self._give_up(now, forming)
        if late:
            state.pause = min(2 * state.pause, LONGEST_PAUSE)
            outcomes += self._fence_left()
        return [*outcomes, *self._open_waiting(now)]

    def next_deadline(self) -> float | None:
        """Return when `poll` may next have outcomes without other events; None for never."""
        state = self.state
        ends = [each.until for each in state.forming if each.until is not None]
        ends += [each.due for each in state.waiting if self._may_open(each)]
        if state.again is not None and self._may_open(state.again):
            ends.append(state.again.due)
        ends += [since + LOST_SECONDS for since, _ in self._lost()]
        return min(ends, default=None)

    # -- opening ------------------------------------------------------------------------------------------

    def _open_waiting(self, now: float) -> list[FormationEvent]:
        """Open all decisions that are due and whose workers are not moving."""
        state = self.state
        outcomes: list[FormationEvent] = []
        for decision in list(state.waiting):
            if self._may_open(decision):
                state.waiting.remove(decision)
                self._forget_again(_workers_of(decision))
                outcomes += self._open(decision)
        if state.again is not None and state.again.due <= now and self._may_open(state.again):
            again, state.again = state.again, None
            outcomes += self._open(again)
        for since, members in self._lost():
            if since + LOST_SECONDS <= now and not self._is_busy(members):
                reason = "a member is gone: its samples are free once the others form a new group"
                outcomes += self._open(DecisionState([list(members)], reason))
        return outcomes

    def _forget_again(self, workers: set[int]) -> None:
        """Drop groups to be opened again that contain some of these workers."""
        state = self.state
        if state.again is None:
            return
        state.again.groups = [group for group in state.again.groups if workers.isdisjoint(group)]
        if not state.again.groups:
            state.again, state.pause = None, FIRST_PAUSE

    def _may_open(self, decision: DecisionState) -> bool:
        return not self._is_busy(_workers_of(decision))

    def _is_busy(self, workers: Iterable[int]) -> bool:
        """Return True if one of these workers is moving or about to; in lock step, if any worker is."""
        if self._lockstep:
            return not self.settled()
        busy = {worker for each in self.state.forming for worker in each.wanted}
        busy |= {worker for worker, known in self.state.workers.items() if known.target is not None}
        return not busy.isdisjoint(workers)

    def _lost(self) -> list[tuple[float, tuple[int, ...]]]:
        """Return the contributors that lost a member, by their remaining members, without those already
        planned for."""
        planned = {worker for each in self.state.waiting for worker in _workers_of(each)}
        return [
            (there.lost_since, tuple(there.members))
            for there in self.state.contributors.values()
            if there.lost_since is not None
            and there.members
            and not there.over
            and not self._is_busy(there.members)
            and planned.isdisjoint(there.members)
        ]

    def _open(self, decision: DecisionState) -> list[FormationEvent]:
        state = self.state
        living = [[worker for worker in group if worker in state.workers] for group in decision.groups]
        groups = [group for group in living if group and not self._is_there(group)]
        if not groups:
            return []
        if self._lockstep:
            groups += self._rest(groups)
        state.grouping += 1
        notified = list(state.workers) if self._lockstep else [worker for group in groups for worker in group]
        for worker in notified:
            state.workers[worker].told = state.grouping
            state.workers[worker].given_up = ""
        # Numbered in order of the groups, not of their formation: shards add up in order of number.
        numbers = range(state.next_number, state.next_number + len(groups))
        state.forming += [
            FormingState(state.grouping, number, group) for number, group in zip(numbers, groups, strict=True)
        ]
        state.next_number += len(groups)
        state.numbers += numbers
        return [Opened(state.grouping, tuple(map(tuple, groups)), decision.reason)]

    def _is_there(self, group: Sequence[int]) -> bool:
        """Return True if exactly these workers are a contributor already, which has lost nobody."""
        there = self.state.contributors[self.state.workers[group[0]].contributor]
        return sorted(there.members) == sorted(group) and not there.coming and there.lost_since is None

    def _rest(self, groups: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return the present groups of the training workers that are in none of `groups`."""
        resting = {worker for worker, known in self.state.workers.items() if not known.trains}
        moved = resting | {worker for group in groups for worker in group}
        return [rest for group in self._groups_now() if (rest := [w for w in group if w not in moved])]

    def _groups_now(self) -> list[list[int]]:
        together: dict[int, list[int]] = {}
        for worker, known in self.state.workers.items():
            where = known.contributor if known.target is None else known.target
            together.setdefault(where, []).append(worker)
        return [sorted(group) for group in together.values()]

    # -- forming ------------------------------------------------------------------------------------------

    def _form_if_whole(self, forming: FormingState) -> list[FormationEvent]:
        state = self.state
        if len(forming.asked) < len(forming.wanted):
            return []
        state.forming.remove(forming)
        if not forming.wanted:
            return []
        if state.again is None:
            state.pause = FIRST_PAUSE
        order = sorted(forming.asked, key=lambda worker: (-forming.asked[worker], worker))
        most = forming.asked[order[0]]
        number, life = forming.number, self._new_life()
        state.contributors[number] = ContributorState(life, coming=list(order))
        for worker in order:
            state.workers[worker].target = number
        newcomers = sum(forming.asked[worker] < most for worker in order)
        return [Formed(forming.grouping, number, life, tuple(order), newcomers)]

    def _give_up(self, now: float, forming: FormingState) -> list[FormationEvent]:
        state = self.state
        state.forming.remove(forming)
        missing = [worker for worker in sorted(forming.wanted) if worker not in forming.asked]
        who = " and ".join(f"worker {worker}" for worker in missing)
        group = tuple(sorted(forming.wanted))
        reason = f"{who} did not come to the end of an iteration in time"
        for worker in forming.wanted:
            state.workers[worker].given_up = reason
        again = state.again or DecisionState([], "")
        again.groups = [other for other in again.groups if set(other).isdisjoint(group)] + [list(group)]
        again.due = now + state.pause
        again.reason = f"another attempt: {show(Grouping(again.groups))}"
        state.again = again
        stays = [Stays(worker, reason) for worker in sorted(forming.asked)]
        return [GivenUp(forming.grouping, group, reason, again.due), *stays]

    def _fence_left(self) -> list[FormationEvent]:
        """Fence contributors that all members have left; in lock step only when no worker is moving any
        more."""
        if self._lockstep and not self.settled():
            return []
        abandoned, self.state.abandoned = self.state.abandoned, []
        return [Empty(*key) for key in abandoned]


def _workers_of(decision: DecisionState) -> set[int]:
    return {worker for group in decision.groups for worker in group}
