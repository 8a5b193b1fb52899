"""Silent members whose processes live: `core/liveness.py`, and who goes by it, under a virtual clock."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.liveness import (
    AGAIN_SECONDS,
    Judgement,
    Reading,
    Vouching,
    own_origin,
    parent_of,
    read_process,
)
from atoll.hub.decisions import Decisions, read_decisions
from atoll.hub.options import HubOptions
from atoll.hub.vouching import Vouchers
from atoll.peers.settings import NodeSettings
from atoll.peers.watch import IDLE, Watch
from atoll.store.members import Membership
from atoll.wire.peerviews import Life

DEADLINE = 30.0
PID, STARTED = 2**30, 77  # of no process of this machine
HERE = f"{own_origin().split(':')[0]}:{PID}:{STARTED}"
SHARE = 0.02  # of a CPU, that a starved process gets


@contextlib.contextmanager
def process(*command: str) -> Iterator[int]:
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield child.pid
    finally:
        child.kill()
        child.wait()


def seen(pid: int, states: str) -> Reading:
    """The reading of a process once its first thread is in one of these states."""
    until = time.monotonic() + DEADLINE
    while (reading := read_process(pid)) is None or reading.states[0] not in states:
        assert time.monotonic() < until, reading
        time.sleep(0.01)
    return reading


def test_what_the_system_says_of_a_process() -> None:
    with process("sleep", "600") as pid:
        asleep = seen(pid, "S")
        assert asleep.cpu < 1
        assert not asleep.ended
        os.kill(pid, signal.SIGSTOP)
        assert not seen(pid, "T").ended
        os.kill(pid, signal.SIGKILL)
        assert seen(pid, "Z").ended
    assert read_process(pid) is None
    with process("sh", "-c", "while :; do :; done") as pid:
        first = seen(pid, "R")
        until = time.monotonic() + DEADLINE
        while seen(pid, "R").cpu <= first.cpu:
            assert time.monotonic() < until
        assert seen(pid, "R").started == first.started


def test_the_parent_of_a_process() -> None:
    with process("sleep", "600") as pid:
        child = f"{own_origin().split(':')[0]}:{pid}:{seen(pid, 'SRD').started}"
        assert parent_of(child) == own_origin()
    assert parent_of(child) == ""
    assert parent_of("0123:1:1") == ""
    assert parent_of("") == ""


def test_where_a_process_is() -> None:
    machine, pid, started = own_origin().split(":")
    reading = read_process(os.getpid())
    assert reading is not None
    assert (int(pid), int(started), len(machine)) == (os.getpid(), reading.started, 16)


class Machine:
    """Processes of this machine, under a clock of its own: `state` and the `share` of a CPU that they get."""

    def __init__(self) -> None:
        self.now, self.cpu = 100.0, 5.0
        self.state, self.share, self.ended = "R", SHARE, False
        self.started = STARTED

    def read(self, pid: int) -> Reading | None:
        assert pid == PID
        return Reading(
            f"S{self.state}" if self.state in "RD" else self.state, self.cpu, self.started, self.ended
        )

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.cpu += self.share * seconds

    def vouching(self) -> Vouching:
        return Vouching(self.read, lambda: self.now)


def judgements(machine: Machine, count: int, silence: float = 4.0, most: float = 10.0) -> list[Judgement]:
    vouching, found = machine.vouching(), []
    for _ in range(count):
        found.append(vouching.judge(HERE, silence, most))
        machine.pass_time(AGAIN_SECONDS)
        silence += AGAIN_SECONDS
    return found


def test_who_gets_no_cpu_is_borne_for_as_long_as_that_lasts() -> None:
    found = judgements(Machine(), 1000)
    assert all(each.alive for each in found)
    assert found[0].why == ""  # what it does is seen between two looks
    assert (
        found[1].why
        == "its process is alive and got 0.01 s of CPU in the last 0.5 s: the machine is overloaded"
    )


def test_who_computes_is_borne_for_as_long_as_anybody() -> None:
    machine = Machine()
    machine.share = 1.0
    found = judgements(machine, 20, silence=4.0, most=10.0)
    assert [each.alive for each in found] == [True] * 12 + [False] * 8  # up to a silence of 10 s
    assert found[12].why.endswith("s: it computes, and lets none of its threads speak")
    machine.state = "D"
    assert judgements(machine, 20)[12] == Judgement(
        False, found[12].why.split(":")[0] + ": it waits for a disk"
    )


def test_who_waits_and_says_nothing_is_dead_once_that_is_seen_twice() -> None:
    machine = Machine()
    machine.state, machine.share = "S", 0.0
    found = judgements(machine, 3)
    assert [each.alive for each in found] == [True, False, False]
    assert found[1].why == "its process is alive, waits, and says nothing"


def test_who_has_just_spoken_is_not_taken_for_one_that_hangs() -> None:
    machine = Machine()
    vouching = machine.vouching()
    for _ in range(9):  # it is seen asleep each second time, for its thread ran in between
        machine.state = "S" if machine.state == "R" else "R"
        judgement = vouching.judge(HERE, 4.0, 10.0)
        assert judgement.alive
        assert "waits" not in judgement.why, "one quiet look is no reason to wait on, and nobody tells of it"
        machine.pass_time(AGAIN_SECONDS)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"ended": True}, "its process has ended"),
        ({"started": STARTED + 1}, "its process has ended"),  # another one has its number
        ({"state": "T"}, "its process stands still (SIGSTOP)"),
    ],
)
def test_who_is_dead_or_stopped_is_known_at_the_first_look(change: dict[str, object], why: str) -> None:
    machine = Machine()
    for name, value in change.items():
        setattr(machine, name, value)
    assert judgements(machine, 1) == [Judgement(False, why)]


@pytest.mark.parametrize(
    "origin",
    ["", "x", "a:b:c", f"{own_origin().split(':')[0]}:1", own_origin(), "a:²:1"],
    ids=["empty", "a word", "letters", "no start", "this process", "a raised digit"],
)
def test_of_whom_nothing_is_known(origin: str) -> None:
    assert Machine().vouching().judge(origin, 4.0, 10.0) == Judgement(False)


def test_who_is_on_another_machine() -> None:
    judgement = Machine().vouching().judge(f"0123:{PID}:{STARTED}", 4.0, 10.0)
    assert judgement == Judgement(
        False, "it is on another machine: if that is only overloaded, raise hub.patience"
    )


class HubWorld:
    """The hub's part: members of this machine, that are heard each 0.25 s until they are silent."""

    def __init__(self, folder: Path, workers: int = 2) -> None:
        self.machine = Machine()
        self.members = Membership(workers, patience=10.0, shards=0, heartbeat=0.25)
        self.decisions = Decisions(folder)
        self.vouchers = Vouchers(self.members.roll, self.decisions, self.machine.vouching())
        self.folder, self.dead = folder, {}
        for _ in range(workers):
            admission = self.members.handle_hello(self.machine.now, "worker")
            self.members.roll.known[admission.incarnation].origin = HERE

    def go_on(self, seconds: float, *heard: int) -> None:
        """Let time pass; these are heard."""
        for _ in range(round(seconds / 0.25)):
            self.machine.pass_time(0.25)
            for incarnation in heard:
                assert self.members.roll.hear(self.machine.now, incarnation)
            for incarnation, reason in self.members.roll.poll_deaths(self.machine.now):
                if not self.vouchers.spares(self.machine.now, incarnation):
                    self.dead[incarnation] = f"{reason}{self.vouchers.seen(incarnation)}"
                    self.members.workers.leave(incarnation)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubWorld]:
    world = HubWorld(tmp_path)
    world.go_on(20.0, 1, 2)
    yield world
    world.decisions.close()


@pytest.mark.parametrize("suspected", [False, True])
def test_a_worker_without_cpu_is_no_dead_worker(hub: HubWorld, suspected: bool) -> None:
    if suspected:
        hub.members.roll.suspect(hub.machine.now, 2)
    hub.go_on(300.0, 1)
    assert not hub.dead
    (told,) = read_decisions(hub.folder)
    assert (told.what, told.choice) == ("worker waited for", "worker 1, incarnation 2")
    assert told.reason.endswith(
        "its process is alive and got 0.01 s of CPU in the last 0.5 s: the machine is overloaded"
    )
    hub.go_on(10.0, 1, 2)  # it speaks again
    hub.go_on(60.0, 1)
    assert len(read_decisions(hub.folder)) == 2  # a line for each silence
    hub.machine.ended = True
    hub.go_on(0.5, 1)
    assert list(hub.dead) == [2]
    assert "was silent for" in hub.dead[2]
    assert hub.dead[2].endswith("; its process has ended")


@pytest.mark.parametrize("state", ["T", "ended"])
def test_a_worker_that_is_dead_or_stopped_is_given_up_as_early_as_ever(hub: HubWorld, state: str) -> None:
    hub.machine.state, hub.machine.ended = "T" if state == "T" else "S", state == "ended"
    hub.go_on(3.25, 1)
    assert not hub.dead
    hub.go_on(0.25, 1)
    assert list(hub.dead) == [2]


def test_what_is_seen_changes(hub: HubWorld) -> None:
    hub.go_on(30.0, 1)  # overloaded
    hub.machine.state, hub.machine.share = "S", 0.0
    hub.go_on(1.5, 1)
    assert hub.dead[2].endswith("; its process is alive, waits, and says nothing")


def test_a_longer_patience_raises_every_floor() -> None:
    """That of who was heard regularly, of a suspect, and of one whose connections are broken."""
    for patience, scale in ((5.0, 1.0), (10.0, 1.0), (40.0, 4.0)):
        options = HubOptions(workers=1, patience=patience)
        for fault, borne in (("", 3.5), ("suspected", 1.0), ("broken", 1.5)):
            members = Membership(1, patience, heartbeat=0.25, least=options.least_seconds)
            members.handle_hello(0.0, "worker")
            for beat in range(1, 81):
                members.roll.hear(beat / 4, 1)
            if fault == "suspected":
                members.roll.suspect(20.0, 1)
            if fault == "broken":
                members.roll.note_broken(1, True)
                borne = 1.5 if scale == 1.0 else (4.0 + 0.5) / scale
            assert members.roll.poll_deaths(20.0 + scale * borne - 0.01) == [], (patience, fault)
            assert members.roll.poll_deaths(20.0 + scale * borne + 0.01), (patience, fault)


@given(st.lists(st.tuples(st.sampled_from("RSDT"), st.floats(0, 1), st.booleans()), max_size=60))
def test_nobody_is_spared_for_ever_who_does_nothing(moments: list[tuple[str, float, bool]]) -> None:
    """Whatever was seen before, a process that waits is dead after two looks more, one that has ended after
    one."""
    for end in ("S", "ended"):
        machine = Machine()
        vouching = machine.vouching()
        for state, share, _ in moments:
            machine.state, machine.share = state, share
            vouching.judge(HERE, 4.0, 10.0)
            machine.pass_time(AGAIN_SECONDS)
        machine.state, machine.share, machine.ended = "S", 0.0, end == "ended"
        looks = []
        for _ in range(2):
            looks.append(vouching.judge(HERE, 4.0, 10.0).alive)
            machine.pass_time(AGAIN_SECONDS)
        assert not looks[-1]
        assert end == "S" or looks == [False, False]


# -- nodes of strategy `peers` ----------------------------------------------------------------------------


ONE = Life(1, 1)


def test_a_node_without_cpu_is_not_suspected() -> None:
    machine = Machine()
    vouching = machine.vouching()
    watch = Watch(NodeSettings(), lambda life, lack, silence, most: vouching.judge(HERE, silence, most))
    watch.install(machine.now, [ONE])
    for _ in range(80):
        machine.pass_time(0.25)
        watch.handle_heard(machine.now, ONE.node)
        assert watch.suspects(machine.now, {}, {}) == {}
    for _ in range(400):
        machine.pass_time(0.25)
        assert watch.suspects(machine.now, {}, {}) == {}
        assert watch.deadline({}, {}) <= machine.now + max(AGAIN_SECONDS, NodeSettings.silence[0])
    machine.ended = True
    machine.pass_time(AGAIN_SECONDS)
    (why,) = watch.suspects(machine.now, {}, {}).values()
    assert why.startswith("silent for 1 min 40 s; its process has ended; silence: 3.5 s;")


@pytest.mark.parametrize("what", ["awaited", "absent"])
@pytest.mark.parametrize("state", ["starved", "computes", "waits", "T", "ended"])
def test_a_node_that_is_heard_and_makes_no_iteration(state: str, what: str) -> None:
    """One that gets no CPU is waited for; else it is removed when its limit is over, as if nobody looked."""
    machine, lacks = Machine(), set()
    vouching, settings = machine.vouching(), NodeSettings(progress=(10.0, 20.0))

    def judge(_life: Life, lack: str, seconds: float, most: float) -> Judgement:
        lacks.add(lack)
        return vouching.judge(HERE, seconds, most)

    def suspects() -> dict[int, str]:
        watch.handle_heard(machine.now, ONE.node)
        awaited = {ONE: 100.0}
        return watch.suspects(machine.now, *((awaited, {}) if what == "awaited" else ({}, awaited)))

    watch = Watch(settings, judge)
    watch.install(machine.now, [ONE])
    for iteration in range(10):
        machine.pass_time(1.0)
        watch.handle_heard(machine.now, ONE.node)
        watch.handle_iteration(machine.now, ONE, iteration + 1, iteration + 1)
    began, limit = machine.now, 10.0 if what == "awaited" else 20.0
    while machine.now < began + limit - 0.5:
        machine.pass_time(0.25)
        assert suspects() == {}
    if state == "starved":
        for _ in range(400):
            machine.pass_time(0.25)
            assert suspects() == {}
        assert watch.deadline({ONE: began}, {}) <= machine.now + AGAIN_SECONDS
        assert lacks == {IDLE}
        machine.state, machine.share = "S", 0.0  # the machine is idle again, and the script hangs
    elif state == "computes":
        machine.share = 1.0
    elif state == "waits":
        machine.state, machine.share = "S", 0.0
    else:
        machine.state, machine.ended = state[0].upper(), state == "ended"
    machine.pass_time(0.5)
    found = suspects()
    for _ in range(2):
        machine.pass_time(AGAIN_SECONDS)
        found = found or suspects()
    assert "no iteration for" in found[1] if what == "awaited" else "it has come to no meeting" in found[1]


def test_while_a_node_itself_stands_still_nobody_is_silent() -> None:
    watch = Watch(NodeSettings(silence=(3.5, 3.5)))
    watch.install(0.0, [ONE])
    watch.handle_heard(1.0, ONE.node)
    watch.handle_absence(60.0, 58.5)
    assert watch.suspects(60.0, {}, {}) == {}
    assert watch.suspects(63.0, {}, {}).keys() == {1}
    watch.handle_absence(64.0, 1000.0)  # never beyond now
    assert watch.suspects(67.4, {}, {}) == {}
