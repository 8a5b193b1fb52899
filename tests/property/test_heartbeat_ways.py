"""The way of heartbeats under a virtual clock: workers and their launcher are stopped, killed, late and cut
off, and no living worker looks dead, and no dead one alive."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from atoll.store.heartbeats import CONFIRM_SECONDS, GATHER_SECONDS, Batches, Route, Ways
from atoll.store.members import Membership
from atoll.store.roll import suspect_seconds
from atoll.wire.messages import MOST_BEATS, Beat, Heartbeat, Heartbeats, ToLauncher

RUN, LAUNCHER = "r", "l"
STEP = 0.01  # seconds of virtual time: the way of a message, and the rhythm of each process
LEAST, PATIENCE = 3.0, 6.0  # seconds of silence that the hub bears
ROOM = 8  # heartbeats that wait for a launcher which reads nothing

Spans = list[tuple[float, float]]


@dataclass
class Machine:
    """What happens on a machine: when the launcher begins, dies, stands still, is cut off from the hub; for
    each worker when it stands still, and when it dies."""

    begins: float = 0.0
    dies: float = math.inf
    stops: Spans = field(default_factory=list)
    cuts: Spans = field(default_factory=list)
    slow: float = 0.0  # seconds between two turns of the launcher
    worker_stops: list[Spans] = field(default_factory=lambda: [[], [], []])
    worker_dies: list[float] = field(default_factory=lambda: [math.inf] * 3)


def inside(now: float, spans: Spans) -> bool:
    return any(begin <= now < end for begin, end in spans)


class Worker:
    def __init__(self, incarnation: int, heartbeat: float) -> None:
        self.incarnation, self.route = incarnation, Route(heartbeat)
        self.confirmed: deque[int] = deque()
        self.alive_until = 0.0  # when it ran last
        self.direct: list[float] = []  # when it spoke to the hub itself
        self.longest_stop = 0.0


class World:
    """A machine of workers, and the hub, in steps of virtual time."""

    def __init__(self, machine: Machine, heartbeat: float = 0.25) -> None:
        self.machine, self.heartbeat, self.now, self.steps = machine, heartbeat, 0.0, 0
        self.members = Membership(3, PATIENCE, 0, heartbeat=heartbeat, least=LEAST)
        self.workers: list[Worker] = []
        for _ in machine.worker_dies:
            admitted = self.members.handle_hello(0.0, "worker", launcher=LAUNCHER)
            self.workers.append(Worker(admitted.incarnation, heartbeat))
        self.batches: Batches[int] = Batches(RUN, LAUNCHER)
        self.to_launcher: deque[tuple[int, ToLauncher]] = deque()
        self.to_hub: deque[tuple[float, Heartbeat | Heartbeats]] = deque()
        self.answers: deque[int] = deque()
        self.messages: list[float] = []  # when the launcher spoke to the hub
        self.was_cut = False
        self.turn_at = 0.0
        self.dead: dict[int, float] = {}

    def run(self, until: float) -> None:
        while self.now < until:
            self.steps += 1
            self.now = self.steps * STEP
            for index, worker in enumerate(self.workers):
                stops = self.machine.worker_stops[index]
                if self.now < self.machine.worker_dies[index] and not inside(self.now, stops):
                    worker.longest_stop = max(worker.longest_stop, self.now - worker.alive_until)
                    self.turn_of(index, worker)
                    worker.alive_until = self.now
            self.turn_of_launcher()
            self.turn_of_hub()

    @property
    def has_launcher(self) -> bool:
        return self.machine.begins <= self.now < self.machine.dies

    def turn_of(self, index: int, worker: Worker) -> None:
        while worker.confirmed:
            worker.route.confirm(worker.confirmed.popleft())
        ways = worker.route.look(self.now, launcher=self.has_launcher)
        if ways is None:
            return
        direct = ways.direct
        if ways.number:
            if len(self.to_launcher) < ROOM:
                said = ToLauncher(RUN, ways.number, self.now, Beat(worker.incarnation))
                self.to_launcher.append((index, said))
            else:
                worker.route.refuse()
                direct = True
        if direct:
            worker.direct.append(self.now)
            self.to_hub.append((self.now, Heartbeat(run=RUN, incarnation=worker.incarnation)))

    def turn_of_launcher(self) -> None:
        if not self.has_launcher or inside(self.now, self.machine.stops) or self.now < self.turn_at:
            return
        self.turn_at = self.now + self.machine.slow
        cut = inside(self.now, self.machine.cuts)
        if cut and not self.was_cut:
            self.batches.forget()
            self.answers.clear()
        self.was_cut = cut
        while self.to_launcher:
            index, said = self.to_launcher.popleft()
            self.batches.take(self.now, index, said)
        while self.answers:
            for index, number in self.batches.confirm(self.answers.popleft(), []):
                self.workers[index].confirmed.append(number)
        if not cut and (message := self.batches.poll(self.now)) is not None:
            self.messages.append(self.now)
            self.to_hub.append((self.now, message))

    def turn_of_hub(self) -> None:
        while self.to_hub and self.to_hub[0][0] < self.now:
            _, message = self.to_hub.popleft()
            if isinstance(message, Heartbeat):
                self.members.roll.hear(self.now, message.incarnation)
            else:
                for beat in message.beats:
                    self.members.roll.hear(self.now, beat.incarnation, age=beat.age)
                self.answers.append(message.number)
        for incarnation, _ in self.members.roll.poll_deaths(self.now):
            self.members.workers.leave(incarnation)
            self.dead[incarnation] = self.now
        self.check()

    def check(self) -> None:
        for worker in self.workers:
            silence = self.members.roll.silence_of(self.now, worker.incarnation)
            if silence is None:
                continue
            # A launcher vouches for nobody: the hub has heard nothing that was not said.
            assert self.now - silence <= worker.alive_until + 2 * STEP, worker.incarnation
            if worker.longest_stop <= 2 * STEP and worker.alive_until == self.now:
                # What others suspect of a living worker never kills it.
                assert silence < suspect_seconds(self.heartbeat), (worker.incarnation, silence)


def spans(most: float) -> st.SearchStrategy[Spans]:
    each = st.tuples(st.floats(0, 20), st.floats(0, most)).map(lambda span: (span[0], span[0] + span[1]))
    return st.lists(each, max_size=3)


never = st.just(math.inf)
machines = st.builds(
    Machine,
    begins=st.sampled_from([0.0, 0.0, 3.3, 9.0]),
    dies=never | st.floats(0, 20),
    stops=spans(12.0),
    cuts=spans(12.0),
    slow=st.sampled_from([0.0, 0.0, 0.05, 0.2, 0.24, 0.3, 1.0]),
    worker_stops=st.lists(st.just([]) | spans(8.0), min_size=3, max_size=3),
    worker_dies=st.lists(never | st.floats(0, 20), min_size=3, max_size=3),
)


@pytest.mark.check
@settings(max_examples=60, deadline=None)
@given(machine=machines, heartbeat=st.sampled_from([0.1, 0.25, 0.8]))
def test_the_living_are_heard_and_the_dead_are_not(machine: Machine, heartbeat: float) -> None:
    world = World(machine, heartbeat)
    world.run(30.0)
    for index, worker in enumerate(world.workers):
        silent_for = world.now - worker.alive_until
        # Without a launcher a worker is silent for a heartbeat; one that fails adds the time for an answer.
        if max(worker.longest_stop, silent_for) + heartbeat + CONFIRM_SECONDS + 3 * STEP < LEAST:
            assert worker.incarnation not in world.dead, (index, machine)
        if silent_for > PATIENCE + 3 * STEP:
            assert worker.incarnation in world.dead, (index, machine)


def deaths_of(machine: Machine) -> dict[int, float]:
    world = World(machine)
    world.run(30.0)
    return world.dead


@pytest.mark.parametrize("how", ["stopped", "killed"])
@pytest.mark.parametrize("launcher", ["well", "stops a moment before", "stops a moment later, and goes on"])
def test_a_death_is_known_as_early_as_without_a_launcher(how: str, launcher: str) -> None:
    at = 7.13
    lives = {"worker_dies": [at, math.inf, math.inf]} if how == "killed" else {}
    stops = {"worker_stops": [[(at, math.inf)], [], []]} if how == "stopped" else {}
    alone = deaths_of(Machine(begins=math.inf, **lives, **stops))  # type: ignore[arg-type]
    pauses: dict[str, Spans] = {"stops a moment before": [(6.9, 12.0)]}
    still = pauses.get(launcher, [(7.14, 9.5)] if "later" in launcher else [])
    there = deaths_of(Machine(stops=still, **lives, **stops))  # type: ignore[arg-type]
    assert there.keys() == alone.keys() == {1}
    # Where heartbeats come at other times, the last one may come a whole one later.
    assert there[1] <= alone[1] + 0.25 + 2 * STEP


def test_a_launcher_that_is_well_speaks_for_all_its_workers_in_one_message() -> None:
    world = World(Machine())
    world.run(10.0)
    assert all(len(worker.direct) == 1 for worker in world.workers)  # the first one
    assert len(world.messages) <= 10.0 / world.heartbeat + 2


def test_workers_speak_for_themselves_while_the_launcher_does_not() -> None:
    world = World(Machine(stops=[(5.0, 15.0)]))
    world.run(25.0)
    assert not world.dead
    for worker in world.workers:
        own = [at for at in worker.direct if at > 1.0]
        assert own[0] <= 5.0 + world.heartbeat + CONFIRM_SECONDS + STEP
        assert len([at for at in own if 6.0 < at < 15.0]) == pytest.approx(9.0 / world.heartbeat, abs=2)
        assert own[-1] <= 15.0 + 2 * world.heartbeat + STEP  # and then by the launcher again


@given(
    heard=st.floats(0, 1e7),
    beats=st.integers(0, 3),
    off=st.integers(-2, 2),
    state=st.sampled_from(["heard", "suspected", "broken"]),
)
@example(heard=7.12, beats=1, off=0, state="heard")
@settings(max_examples=300, deadline=None)
def test_a_look_at_a_silence_ends_however_the_times_are_rounded(
    heard: float, beats: int, off: int, state: str
) -> None:
    """At the very moment when a silence is as long as is borne, sums may be rounded this way or that."""
    members = Membership(1, PATIENCE, 0, heartbeat=0.25, least=LEAST)
    member = members.handle_hello(heard, "worker").incarnation
    for each in range(beats):
        members.roll.hear(heard + 0.1 * each, member)
    if state == "suspected":
        members.roll.suspect(heard, member)
    elif state == "broken":
        members.roll.note_broken(member, True)
    due = members.roll.next_deadline()
    assert due is not None
    for _ in range(abs(off)):
        due = math.nextafter(due, math.inf if off > 0 else -math.inf)
    is_dead = bool(members.roll.poll_deaths(due))
    assert is_dead == (off >= 0)


# -- the parts alone ---------------------------------------------------------------------------------------


def said(number: int, at: float, incarnation: int = 1, run: str = RUN) -> ToLauncher:
    return ToLauncher(run, number, at, Beat(incarnation, iteration=number))


def test_without_a_launcher_each_heartbeat_goes_to_the_hub() -> None:
    route = Route(0.25)
    for now in (1.1, 1.35, 1.6):
        assert route.look(now, launcher=False) == Ways(0, True)
        assert route.look(now + 0.2, launcher=False) is None
        assert route.next_look() == now + 0.25


def test_what_is_not_confirmed_in_time_goes_to_the_hub_too() -> None:
    route = Route(1.0)
    assert route.look(10.2, launcher=True) == Ways(1, True)
    route.confirm(1)
    assert route.look(11.0, launcher=True) == Ways(2, False)
    assert route.look(11.2, launcher=True) is None
    assert route.next_look() == 11.0 + CONFIRM_SECONDS
    assert route.look(11.0 + CONFIRM_SECONDS, launcher=True) == Ways(0, True)
    assert route.look(11.5, launcher=True) is None  # once
    assert route.look(12.0, launcher=True) == Ways(3, True)  # in doubt, both ways
    route.confirm(2)
    assert route.look(13.0, launcher=True) == Ways(4, True)  # the latest is what counts
    route.confirm(4)
    assert route.look(14.0, launcher=True) == Ways(5, False)
    route.refuse()
    assert route.look(14.9, launcher=True) is None


def test_a_new_connection_is_made_known_at_once() -> None:
    route = Route(1.0)
    route.look(10.0, launcher=True)
    route.confirm(1)
    route.renew()
    assert route.look(10.1, launcher=True) == Ways(2, True)


def test_nobody_confirms_what_was_not_said() -> None:
    route = Route(1.0)
    route.look(10.0, launcher=True)
    route.confirm(2**60)
    assert route.look(11.0, launcher=True) == Ways(2, True)


def test_a_launcher_passes_on_the_latest_of_each_and_how_long_ago_it_was_said() -> None:
    batches: Batches[str] = Batches(RUN, LAUNCHER)
    assert batches.poll(5.0) is None
    batches.take(5.0, "a", said(1, 1.0))  # it stood still meanwhile
    batches.take(5.0, "a", said(2, 2.0))
    batches.take(5.0, "a", said(1, 1.5))  # late
    batches.take(5.0, "b", said(7, 5.5, incarnation=2))  # of a clock that is ahead
    batches.take(5.0, "c", said(7, 5.0, incarnation=3, run="another"))
    assert batches.poll(5.0) is None
    assert batches.next_deadline() == 5.0 + GATHER_SECONDS
    message = batches.poll(5.0 + GATHER_SECONDS)
    assert message is not None
    assert [each.incarnation for each in message.beats] == [1, 2]
    assert [each.iteration for each in message.beats] == [2, 7]
    assert message.beats[0].age == pytest.approx(3.0 + GATHER_SECONDS)
    assert message.beats[1].age == 0.0
    assert (message.run, message.launcher, message.number) == (RUN, LAUNCHER, 1)
    assert batches.confirm(1, [2]) == [("a", 2)]
    assert batches.confirm(1, []) == []  # said twice
    assert batches.confirm(99, []) == []


def test_what_a_launcher_keeps_is_bounded() -> None:
    batches: Batches[int] = Batches(RUN, LAUNCHER)
    for incarnation in range(MOST_BEATS + 10):
        batches.take(0.0, 0, said(1, 0.0, incarnation=incarnation))
    message = batches.poll(1.0)
    assert message is not None
    assert len(message.beats) == MOST_BEATS
    for number in range(2, 1000):
        batches.take(float(number), 0, said(number, float(number)))
        batches.poll(number + 1.0)
    assert batches.confirm(1, []) == []
    assert batches.confirm(999, []) == [(0, 999)]
    batches.take(1000.0, 0, said(1000, 1000.0))
    batches.poll(1001.0)
    batches.forget()
    assert batches.confirm(1000, []) == []


def test_an_old_word_that_comes_late_clears_nobody_of_a_suspicion() -> None:
    members = Membership(1, PATIENCE, 0, heartbeat=0.25, least=LEAST)
    member = members.handle_hello(0.0, "worker").incarnation
    members.roll.hear(1.0, member)
    members.roll.suspect(1.5, member)
    members.roll.hear(2.0, member, age=1.4)
    assert members.roll.poll_deaths(1.0 + suspect_seconds(0.25))
    members.roll.hear(2.1, member, age=0.2)
    assert members.roll.silence_of(2.1, member) == pytest.approx(0.2)
    assert not members.roll.poll_deaths(1.9 + LEAST - 0.1)
