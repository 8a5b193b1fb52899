"""Properties of how workers move from group to group (groups/formation.py), in a world where workers iterate,
ask, move, die, leave and come at any moment."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from atoll.groups.formation import (
    Empty,
    Formation,
    FormationEvent,
    FormationState,
    Formed,
    GivenUp,
    Opened,
    Placed,
    Stays,
)

WORKERS, PATIENCE = 4, 3.0

STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["steps"] * 6 + ["arrives"] * 4 + ["decide"] * 2 + ["dies", "leaves", "comes", "time"]
        ),
        st.integers(0, 5),
        st.integers(0, 2**16),
    ),
    min_size=10,
    max_size=120,
)


class Worker:
    """A worker that keeps to the protocol. `contributor` is whom it speaks for; while `asking` it waits."""

    def __init__(self, rank: int, life: int) -> None:
        self.rank, self.life = rank, life
        self.contributor = rank
        self.target: int | None = None
        self.asking: float | None = None  # since when
        self.grouping = self.iteration = 0


class World:
    """A formation, its workers, and what is checked after each step."""

    def __init__(self, lockstep: bool) -> None:
        self.now, self.lives = 0.0, itertools.count(1)
        self.lockstep = lockstep
        self.formation = Formation(WORKERS, lambda: next(self.lives), lockstep=lockstep)
        self.workers: dict[int, Worker] = {}
        self.numbers: set[int] = set()  # of contributors that were ever made
        self.keys: set[tuple[int, int]] = set()  # contributors that were ever known
        self.fenced: list[tuple[int, int]] = []
        self.outcomes: list[FormationEvent] = []
        for rank in range(WORKERS):
            self.comes(rank)

    # -- what happens -------------------------------------------------------------------------------------

    def happens(self, kind: str, who: int, what: int) -> None:
        if kind == "steps":
            self.steps(who)
        elif kind == "arrives":
            self.arrives(who)
        elif kind == "decide":
            self.decides(what)
        elif kind == "comes":
            self.comes(who)
        elif kind == "time":
            self.passes(what % 50 / 10)
        else:
            self.goes(who, kind == "leaves")

    def comes(self, rank: int) -> None:
        if rank in self.workers or rank in self.formation.numbers:
            return
        worker = self.workers[rank] = Worker(rank, next(self.lives))
        self.keys.add((rank, worker.life))
        self.take(self.formation.handle_joined(rank, worker.life))

    def goes(self, rank: int, finished: bool) -> None:
        if rank not in self.workers:
            return
        del self.workers[rank]
        self.take(self.formation.handle_left(self.now, rank, finished=finished))

    def steps(self, rank: int) -> None:
        """A worker ends an iteration, and asks if it is told to."""
        worker = self.workers.get(rank)
        if worker is None or worker.asking is not None or worker.target is not None:
            return
        worker.iteration += 1
        self.formation.handle_trains(rank)
        told = self.formation.grouping_of(rank)
        if told > worker.grouping:
            worker.grouping, worker.asking = told, self.now
            self.take(self.formation.handle_asked(self.now, rank, told, worker.iteration, PATIENCE))

    def arrives(self, rank: int) -> None:
        worker = self.workers.get(rank)
        if worker is None or worker.target is None:
            return
        target, worker.target = worker.target, None
        worker.contributor = target
        self.take(self.formation.handle_arrived(self.now, rank, target))
        self.take(self.formation.handle_arrived(self.now, rank, target))  # said again

    def decides(self, seed: int) -> None:
        """Any partition of those that live, or of some of them."""
        groups: dict[int, list[int]] = {}
        for rank in self.workers:
            seed, place = divmod(seed, 4)
            if place or self.lockstep:
                groups.setdefault(place, []).append(rank)
        if groups:
            self.take(self.formation.handle_decided(self.now, groups.values(), "so"))

    def passes(self, seconds: float) -> None:
        """Time, in which the machine is asked whenever it wants to be."""
        until = self.now + seconds
        for _ in range(1000):
            deadline = self.formation.next_deadline()
            if deadline is None or deadline > until:
                break
            self.now = max(self.now, deadline)
            self.take(self.formation.poll(self.now))
        else:
            raise AssertionError("it always has something to do")
        self.now = until

    def restarted(self) -> None:
        """The machine's state goes through the journal's bytes."""
        raw = msgspec.msgpack.encode(self.formation.state)
        self.formation = Formation(WORKERS, lambda: next(self.lives), lockstep=self.lockstep)
        self.formation.state = msgspec.msgpack.decode(raw, type=FormationState)

    # -- what follows -------------------------------------------------------------------------------------

    def take(self, outcomes: list[FormationEvent]) -> None:
        for outcome in outcomes:
            self.outcomes.append(outcome)
            if isinstance(outcome, Formed):
                self.form(outcome)
            elif isinstance(outcome, Stays):
                assert self.workers[outcome.worker].asking is not None
                self.workers[outcome.worker].asking = None
            elif isinstance(outcome, Empty):
                self.fence(outcome)
        self.check()

    def form(self, formed: Formed) -> None:
        assert formed.contributor not in self.numbers, "a number is used twice"
        assert formed.contributor not in {rank for rank, _ in self.keys}
        self.numbers.add(formed.contributor)
        self.keys.add((formed.contributor, formed.life))
        iterations = [self.workers[rank].iteration for rank in formed.workers]
        assert iterations == sorted(iterations, reverse=True)
        behind = sum(each < iterations[0] for each in iterations)
        assert formed.newcomers == behind
        for rank in formed.workers:
            worker = self.workers[rank]
            assert worker.asking is not None
            assert worker.target is None
            worker.asking, worker.target = None, formed.contributor

    def fence(self, empty: Empty) -> None:
        key = (empty.contributor, empty.life)
        assert key in self.keys
        assert key not in self.fenced, "fenced twice"
        self.fenced.append(key)
        spoken_for = {each for rank in self.workers for each in self.formation.contributors_of(rank)}
        assert key not in spoken_for, "fenced while it is spoken for"

    def check(self) -> None:
        for worker in self.workers.values():
            assert self.formation.contributors_of(worker.rank)[0][0] == worker.contributor
            if worker.asking is not None:
                assert self.now <= worker.asking + PATIENCE, "it waits for longer than it is ready to"

    def unfenced(self) -> set[tuple[int, int]]:
        return self.keys - set(self.fenced)


def run(lockstep: bool, steps: list[Any], restarts: bool) -> World:
    world = World(lockstep)
    for kind, who, what in steps:
        world.happens(kind, who, what)
        if restarts and what % 5 == 0:
            world.restarted()
    return world


def settle(world: World) -> None:
    """Everybody goes on with what it does, until there is nothing to do."""
    for _ in range(200):
        for rank in list(world.workers):
            world.arrives(rank)
            world.steps(rank)
        world.passes(1.0)
        deadline = world.formation.next_deadline()
        quiet = deadline is None and world.formation.settled()
        if quiet and all(each.asking is None and each.target is None for each in world.workers.values()):
            return
    raise AssertionError("it does not come to rest")


@pytest.mark.check
@settings(max_examples=400)
@given(st.booleans(), STEPS, st.booleans())
def test_each_worker_is_in_one_contributor_and_each_empty_one_is_fenced_once(
    lockstep: bool, steps: list[Any], restarts: bool
) -> None:
    world = run(lockstep, steps, restarts)
    settle(world)
    for kind in (Formed, GivenUp):
        event(f"{kind.__name__}: {any(isinstance(each, kind) for each in world.outcomes)}")
    # What is left are those for whom somebody speaks, and nobody else.
    spoken_for = {world.formation.contributors_of(rank)[0] for rank in world.workers}
    assert world.unfenced() == spoken_for
    groups = sorted(rank for group in world.formation.placed() for rank in group)
    assert groups == sorted(world.workers)


@pytest.mark.check
@settings(max_examples=300)
@given(STEPS)
def test_in_lock_step_the_old_go_when_nobody_is_on_the_way_any_more(steps: list[Any]) -> None:
    world = World(True)
    seen = 0
    for step in steps:
        before = {world.formation.contributors_of(rank)[0] for rank in world.workers}
        world.happens(*step)
        new, seen = world.fenced[seen:], len(world.fenced)
        moving = [worker for worker in world.workers.values() if worker.target is not None]
        asking = [worker for worker in world.workers.values() if worker.asking is not None]
        if step[0] in ("dies", "leaves", "comes"):
            continue  # whom nobody speaks for is fenced at once: the others may wait for its part
        assert not (new and (moving or asking)), "an old contributor goes while a worker is on its way"
        assert before.isdisjoint(new) or step[0] == "arrives"


def members(world: World) -> list[tuple[int, ...]]:
    return list(world.formation.placed().groups)


def test_a_group_comes_together_and_the_old_contributors_go() -> None:
    world = World(False)
    world.steps(0)
    world.steps(0)
    world.take(world.formation.handle_decided(0.0, [[0, 1], [2, 3]], "so"))
    assert [each for each in world.outcomes if isinstance(each, Opened)] == [
        Opened(1, ((0, 1), (2, 3)), "so")
    ]
    for rank in (1, 0):
        world.steps(rank)
    formed = next(each for each in world.outcomes if isinstance(each, Formed))
    assert (formed.contributor, formed.workers, formed.newcomers) == (4, (0, 1), 1)
    world.arrives(0)
    assert world.fenced == [(0, 1)]
    world.arrives(1)
    assert world.fenced == [(0, 1), (1, 2)]


def test_an_answer_that_was_lost_is_given_again() -> None:
    world = World(False)
    world.take(world.formation.handle_decided(0.0, [[0, 1]], "so"))
    world.steps(0)
    world.steps(1)
    assert world.formation.handle_asked(0.0, 0, 1, 1, PATIENCE) == [Placed(0, 4)]


def test_who_does_not_come_is_named_and_the_others_stay_and_it_is_tried_again() -> None:
    world = World(False)
    world.take(world.formation.handle_decided(0.0, [[0, 1]], "so"))
    world.steps(0)
    world.passes(PATIENCE)
    stays = next(each for each in world.outcomes if isinstance(each, Stays))
    assert stays == Stays(0, "worker 1 did not come to the end of an iteration in time")
    assert world.formation.grouping_of(0) == 1
    world.steps(1)  # late, and answered at once
    assert isinstance(world.outcomes[-1], Stays)
    world.passes(5.0)
    assert world.formation.grouping_of(0) == 2
    pauses = []
    for _ in range(4):
        world.steps(0)
        world.passes(PATIENCE)
        given_up = next(each for each in reversed(world.outcomes) if isinstance(each, GivenUp))
        pauses.append(given_up.again - world.now)
        world.passes(pauses[-1])
    assert pauses == [10.0, 20.0, 40.0, 80.0]


def group_of_three() -> World:
    """Three workers who have come together in their first group."""
    world = World(False)
    world.take(world.formation.handle_decided(0.0, [[0, 1, 2]], "so"))
    for rank in range(3):
        world.steps(rank)
    for rank in range(3):
        world.arrives(rank)
    return world


def test_those_left_of_a_group_become_another_contributor() -> None:
    world = group_of_three()
    world.goes(1, False)
    world.passes(2.0)
    for rank in (0, 2):
        world.steps(rank)
        assert world.workers[rank].asking is not None or world.workers[rank].target == 5
    for rank in (0, 2):
        world.arrives(rank)
    assert world.fenced[-1][0] == 4
    assert (0, 2) in members(world)


def test_at_the_end_of_a_session_no_group_is_made_anew() -> None:
    world = group_of_three()
    world.goes(1, True)
    assert world.formation.next_deadline() is None


def test_a_group_that_is_given_up_twice_waits_once_to_be_opened_again() -> None:
    """The same decision comes again while the first one's group forms."""
    world = World(False)
    for _ in range(2):
        world.take(world.formation.handle_decided(world.now, [[0, 1]], "so"))
    for _ in range(2):
        world.steps(0)
        world.passes(PATIENCE)
    assert len([each for each in world.outcomes if isinstance(each, GivenUp)]) == 2
    world.passes(20.0)
    world.steps(0)
    world.steps(1)
    assert world.workers[0].target == world.workers[1].target != None  # noqa: E711


def test_in_lock_step_a_rank_that_comes_again_while_its_old_self_is_not_fenced_yet() -> None:
    world = World(True)
    for rank in range(WORKERS):
        world.steps(rank)
    world.take(world.formation.handle_decided(0.0, [[0, 1], [2, 3]], "so"))
    for rank in range(WORKERS):
        world.steps(rank)
    world.arrives(2)
    assert not world.fenced  # the others are on their way
    world.goes(2, False)
    world.comes(2)
    assert world.fenced == [(2, 3)]
    settle(world)
    assert world.fenced.count((2, 3)) == 1
