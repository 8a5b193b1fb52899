"""Nodes' CPU sides as processes, driven by workers that are no sessions: no hub, real sockets, real kills."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from fake_nodes import DEADLINE, FakeNode, FakeRun, Kill, plain

from atoll.core.errors import DeadlineError, GivenUpError, MismatchError, RunError, UserError
from atoll.core.points import POINTS
from atoll.cpuside import entering, giving, others, stage
from atoll.exchange.globalparameters import GlobalParameters
from atoll.exchange.hostmemory import make_file
from atoll.net.keys import make_keys
from atoll.wire import device as d
from atoll.wire import nodes as n
from support.served import ServedRun

MIB = 2**20

WORKER = """
import os, time
from atoll.train.sync.peersstart import CpuSide
from atoll.wire.device import Begin
side = CpuSide(0)
side.send(Begin(run="r", node=0, incarnation=0, stale_max=0))
side.await_message(60.0, "its address")
child = os.fork()
if child == 0:
    time.sleep(60)  # as a loader's process, it holds a copy of the socket
print(side.pid, child, flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def wait_for(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def shared_files() -> set[str]:
    return {each.name for each in Path("/dev/shm").glob("*atoll*")}


def test_a_cpu_side_ends_when_its_worker_is_killed() -> None:
    """Although a child of the worker's holds a copy of the socket."""
    before = shared_files()
    worker = subprocess.Popen([sys.executable, "-c", WORKER], stdout=subprocess.PIPE, text=True)
    child = 0
    try:
        assert worker.stdout is not None
        pid, child = map(int, worker.stdout.readline().split())
        worker.kill()
        wait_for(lambda: is_gone(pid), "the CPU side ends")
        assert not is_gone(child)
    finally:
        worker.kill()
        worker.wait(DEADLINE)
        if child:
            os.kill(child, signal.SIGKILL)
    assert shared_files() == before


def test_a_worker_notices_at_once_that_its_cpu_side_was_killed() -> None:
    node = FakeNode(3)
    try:
        os.kill(node.cpu.pid, signal.SIGKILL)
        began = time.monotonic()
        line = rf"the CPU side of node 3 \(process {node.cpu.pid}\) was killed by SIGKILL"
        with pytest.raises(RunError, match=line):
            wait_for(lambda: node.cpu.receive(0.1) is None and False, "the end is noticed")
        assert time.monotonic() - began < 5.0
        with pytest.raises(RunError, match=line):
            node.cpu.send(d.Want(iteration=0, least=0))
    finally:
        node.close()


@pytest.mark.parametrize(("count", "stale_max", "transport"), [(3, 0, "tcp"), (3, 4, "tcp"), (2, 2, "ltp")])
def test_nodes_train_alike(count: int, stale_max: int, transport: str) -> None:
    """All have the same bits, and within rounding plain PyTorch's: the gradients depend on nothing."""
    with FakeRun(count, stale_max=stale_max, transport=transport) as run:
        run.train(12)
        one, *others = run.nodes
        digests = [each.digest for each in one.applied]
        assert len(digests) == 12
        assert all(digests)
        for other in others:
            assert [each.digest for each in other.applied] == digests
            for chunk, flat in one.parameters.items():
                assert torch.equal(flat, other.parameters[chunk])
        expected = plain(one.model, 12, lambda _: range(count))
        for chunk, flat in one.parameters.items():
            torch.testing.assert_close(flat, expected[chunk])
        for each in run.nodes:
            assert max(each.computed_at) <= stale_max
            assert [part.node for part in each.applied[3].parts] == list(range(count))
            assert each.applied[3].parts[1].note == b"note of 1"
            assert each.applied[3].parts[1].samples == 2.0


def test_other_hyperparameters_are_told_of_once() -> None:
    with FakeRun(2) as run:
        groups = run.nodes[1].model.hyperparameters()
        other = [{**group, "lr": 0.7} for group in groups]
        run.nodes[1].model.hyperparameters = lambda: other  # type: ignore[method-assign]
        run.train(4)
        run.assert_equal()
        for node in run.nodes:
            (told,) = [each for each in node.told if each.what == "hyperparameters"]
            assert "node 1 gave other hyperparameters than node 0, whose counted" in told.reason


def checks_nothing() -> None:
    """In a CPU side: one that gives what no step takes."""
    GlobalParameters.check = lambda *_: None  # type: ignore[method-assign]


def without_rate(node: FakeNode) -> None:
    """Its worker gives hyperparameters of another form from now on."""
    wrong = [{**group, "lr": "much"} for group in node.model.hyperparameters()]
    node.model.hyperparameters = lambda: wrong  # type: ignore[method-assign]


def test_a_contribution_that_no_step_takes_counts_for_nothing_and_its_node_is_named() -> None:
    with FakeRun(3, stale_max=1, preludes={1: checks_nothing}) as run:
        run.train(3)
        without_rate(run.nodes[1])
        run.train(7)
        run.assert_equal()
        expected = plain(run.nodes[0].model, 7, lambda k: range(3) if k < 3 else (0, 2))
        for chunk, flat in run.nodes[0].parameters.items():
            torch.testing.assert_close(flat, expected[chunk])
        for node in run.nodes:
            (told,) = [each.reason for each in node.told if each.what == "refused"]
            assert told.startswith(
                "iteration 3: node 1's contribution: hyperparameter 'lr' was 0.1 and is now"
            )
        assert not any(view.view for node in run.nodes for view in node.views), "nobody was left out"


def test_a_worker_that_gives_what_no_step_takes_is_told_in_a_line() -> None:
    with FakeRun(2) as run:
        run.train(2)
        without_rate(run.nodes[1])
        run.nodes[1].advance(3)
        assert "node 1's contribution: hyperparameter 'lr' was 0.1 and is now 'much'" in ends_with(
            run.nodes[1]
        )


def gives_damaged_states() -> None:
    """In a CPU side: a bit of each state that it gives is another."""
    pack = giving.pack_globals

    def damaged(parameters: GlobalParameters) -> memoryview:
        raw = pack(parameters)
        raw[-1] ^= 1
        return raw

    giving.pack_globals = damaged


def test_a_damaged_state_is_refused_and_another_node_is_asked() -> None:
    with FakeRun(2, stale_max=1, preludes={0: gives_damaged_states}) as run:
        run.train(4)
        run.introduce_late(FakeNode(2, stale_max=1))
        run.train_until_all_are_in()
        run.train(run.furthest + 4)
        run.assert_equal()
        told = [(each.what, each.choice, each.reason) for each in run.nodes[2].told]
        ((_, about, reason),) = [each for each in told if each[0] == "refused"]
        assert about == "node 0's state"
        assert "is not as it was packed" in reason
        assert [choice for what, choice, _ in told if what == "state"] == ["from node 0", "from node 1"]


def test_nodes_meet() -> None:
    with FakeRun(3, set_up=False) as run:  # before any model
        for each in run.nodes:
            assert each.meet("the model", b"x" * 300_000 + bytes([each.node])) == 0
        run.until(lambda: all(0 in each.met for each in run.nodes), "they meet")
        for each in run.nodes:
            assert each.met[0].nodes == [0, 1, 2]
            assert [payload[-1] for payload in each.met[0].payloads] == [0, 1, 2]
            assert {len(payload) for payload in each.met[0].payloads} == {300_001}
        run.nodes[0].meet("this", b"")
        run.nodes[1].meet("that", b"")
        run.nodes[2].meet("this", b"")
        with pytest.raises(MismatchError, match="node 0 meets on this, and node 1 on that"):
            run.until(lambda: False, "they do not meet")


def test_too_large_a_part_in_a_meeting_is_not_kept() -> None:
    with FakeRun(2) as run:
        run.nodes[1].meet("a test", bytes(n.MOST_PART + 1))
        what = f"{n.MOST_PART + 1} bytes for a meeting, where {n.MOST_PART} is the most"
        run.until(lambda: any(each.reason == what for each in run.nodes[0].told), "it is told")


def test_two_of_three_go_on_when_one_is_killed() -> None:
    with FakeRun(3, stale_max=2) as run:
        run.train(6)
        dead = run.nodes[2]
        dead.advance(7)
        os.kill(dead.cpu.pid, signal.SIGKILL)
        left = run.nodes[:2]
        run.train(20, left)
        assert [each.node for each in left[0].views[-1].members] == [0, 1]
        for chunk, flat in left[0].parameters.items():
            assert torch.equal(flat, left[1].parameters[chunk])
        who = [[part.node for part in each.parts] for each in left[0].applied]
        assert who[:6] == [[0, 1, 2]] * 6
        assert who[7:] == [[0, 1]] * 13
        expected = plain(left[0].model, 20, lambda k: who[k])
        for chunk, flat in left[0].parameters.items():
            torch.testing.assert_close(flat, expected[chunk])


def test_where_a_majority_dies_at_once_the_rest_says_so_and_goes_no_further() -> None:
    with FakeRun(3, stale_max=1) as run:
        run.train(4)
        left, *dead = run.nodes
        for each in dead:
            os.kill(each.cpu.pid, signal.SIGKILL)
        run.nodes[1:] = []
        line = (
            "a majority of the 3 nodes of view 0: there is none without node 1 and node 2; if they are lost, "
            "go on from a checkpoint"
        )

        def is_said() -> bool:
            left.advance(100)
            return left.waiting.startswith(line)

        for _ in range(2):  # again and again: it may come to wait for something else meanwhile
            left.waiting = ""
            run.until(is_said, "it says so")
        for each in dead:
            each.close()
        assert (left.taken, left.iteration) == (4, 6)


def test_who_stood_still_comes_back() -> None:
    """SIGSTOP for longer than the timeouts: the others go on, and it is a member anew in the same process."""
    with FakeRun(3, stale_max=1) as run:
        run.train(4)
        still, left = run.nodes[2], run.nodes[:2]
        os.kill(still.cpu.pid, signal.SIGSTOP)
        run.train(10, left)
        assert [each.node for each in left[0].views[-1].members] == [0, 1]
        file = make_file(0, "the optimizer's state")
        still.cpu.send(d.WantState(), [file])  # it has an answer, whatever becomes of the node
        os.close(file)
        os.kill(still.cpu.pid, signal.SIGCONT)
        end = time.monotonic() + DEADLINE
        until = 10
        while not still.returned:
            assert time.monotonic() < end, (still.told[-3:], left[0].told[-3:])
            for each in left:
                each.advance(until := max(until, each.iteration + 1))
            still.pump()
        assert still.returned[0].script.startswith(b"script of ")
        assert [each.packed > 0 for each in still.states] == [True]
        run.train(max(each.iteration for each in run.nodes) + 6)
        for chunk, flat in still.parameters.items():
            assert torch.equal(flat, left[0].parameters[chunk])
            assert torch.equal(flat, left[1].parameters[chunk])
        assert [each.node for each in left[0].views[-1].members] == [0, 1, 2]


def test_a_node_whose_worker_stands_still_does_not_come_in_again_before_that_moves() -> None:
    """Its CPU side answers all the while; each time that it came in, the others would wait for it in vain."""
    with FakeRun(3, stale_max=1, timeout=10.0) as run:
        run.train(4)
        still, left = run.nodes[2], run.nodes[:2]
        run.train(20, left)
        assert [each.node for each in left[0].views[-1].members] == [0, 1]
        views = len(left[0].views)
        run.train(220, left)  # it would be there by the next few
        assert len(left[0].views) == views
        until, end = 220, time.monotonic() + DEADLINE
        while not still.returned:
            assert time.monotonic() < end, (still.told[-3:], left[0].told[-3:])
            for each in left:
                each.advance(until := max(until, each.iteration + 1))
            still.pump()
        run.train(max(each.iteration for each in run.nodes) + 4)
        run.assert_equal()


def leave(nodes: list[FakeNode], run: FakeRun) -> None:
    """Their sessions end, and they are gone."""
    for each in nodes:
        each.cpu.send(d.Leave(iteration=each.iteration))
    run.until(lambda: all(each.left for each in nodes), "they have left", nodes)
    for each in nodes:
        each.close()


def is_given_up(node: FakeNode) -> str:
    with pytest.raises(GivenUpError) as caught:
        wait_for(lambda: node.pump(0.05) is not None, "it is given up")
    return str(caught.value)


def test_who_was_left_out_has_the_optimizers_state_and_hears_of_the_end() -> None:
    """Its worker says nothing: it waits for the state. When it does, the others have ended their scripts."""
    with FakeRun(3, stale_max=1, timeout=10.0) as run:
        run.train(4)
        still, left = run.nodes[2], run.nodes[:2]
        still.sleeps = True
        run.train(6, left)
        file = make_file(0, "the optimizer's state")
        still.cpu.send(d.WantState(least=99), [file])
        os.close(file)
        run.until(lambda: bool(still.states), "it has the state")
        assert still.left_out
        leave(left, run)
        still.cpu.send(d.Awake())
        line = "node 2 cannot come in: the others have finished (node 0 and node 1), so what it waits for"
        assert is_given_up(still).startswith(line)


def test_who_waits_for_those_that_have_ended_says_so() -> None:
    with FakeRun(3, stale_max=0) as run:
        run.train(4)
        behind, left = run.nodes[2], run.nodes[:2]
        leave(left, run)
        behind.contribute()
        behind.cpu.send(d.Want(iteration=5, least=5))
        line = "node 2 is behind: the others have finished (node 0 and node 1), so what it waits for does not"
        assert is_given_up(behind).startswith(line)


def waits_shortly() -> None:
    others._NOBODY_SECONDS = 0.3  # type: ignore[assignment]


def test_where_nobody_listens_who_was_known_before_it_says_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        gone = d.NodeAt(1, 1, f"tcp://127.0.0.1:{taken.getsockname()[1]}")
    node = FakeNode(0, prelude=waits_shortly, timeout=DEADLINE)
    try:
        node.introduce([node.place, gone], late=True, known_from="run1/nodes")
        node.set_up()
        line = (
            r"none of the nodes known from run1/nodes answers; if the run is over, start in a new "
            r"run.directory, and go on with session.resume\(folder\) "
            r"\(nothing listens there; deadline sync.timeout, 60 s\)"
        )
        with pytest.raises(DeadlineError, match=line):
            wait_for(lambda: node.pump(0.05) is not None, "it says so")
    finally:
        node.close()


def test_a_node_comes_late() -> None:
    """With a script's state of several messages, as an average of the weights makes it."""
    with FakeRun(2, stale_max=1) as run:
        run.train(5)
        for each in run.nodes:
            each.script_size = 17 * MIB + each.node
        late = FakeNode(2, stale_max=1)
        run.introduce_late(late)
        run.train_until_all_are_in()
        assert late.ready is not None
        script = late.ready.script.rstrip(b"\0")
        givers = {b"script of %d at %d" % (node, late.ready.iteration): node for node in (0, 1)}
        assert len(late.ready.script) == len(script) + 17 * MIB + givers[script]
        run.train(run.furthest + 6)
        run.assert_equal()
        # Also what was applied before its state: the script may be of a member that had not heard of that.
        heard = [each.iteration for each in late.applied]
        assert heard == list(range(heard[0], heard[0] + len(heard)))
        assert heard[0] < late.ready.iteration
        known = {each.iteration: each.parts for each in run.nodes[0].applied}
        assert all(each.parts == known[each.iteration] for each in late.applied[:5])


def allows_no_scripts() -> None:
    entering.most_script = stage.most_script = lambda _state: 10  # type: ignore[assignment]


def test_a_script_that_takes_too_much_is_not_given_and_the_members_say_so() -> None:
    with FakeRun(2, stale_max=1, preludes=dict.fromkeys((0, 1), allows_no_scripts)) as run:
        run.train(5)
        late = FakeNode(2, stale_max=1)
        run.introduce_late(late)
        run.train_until_all_are_in()
        assert late.ready is not None
        assert late.ready.script == b""
        run.train(run.furthest + 3)
        for each in run.nodes[:2]:
            (said,) = [told.reason for told in each.told if told.what == "state"]
            assert re.fullmatch(
                r"a node that comes late gets no state of the script: it takes 1\d B, and 10 B is the most "
                "here; register less, or go on from a checkpoint",
                said,
            )
        run.assert_equal()


def test_all_are_set_up_anew_at_another_iteration() -> None:
    """A script loads an earlier checkpoint; who comes late counts as the others do."""
    with FakeRun(2, stale_max=1) as run:
        run.train(5)
        for each in run.nodes:
            each.set_up(number=2, iteration=3)
        run.until(lambda: all(each.ready for each in run.nodes), "all are ready")
        assert [each.iteration for each in run.nodes] == [3, 3]
        run.train(8)
        run.assert_equal()
        expected = plain(run.nodes[0].model, 8, lambda _: range(2), first=3)
        for chunk, flat in run.nodes[0].parameters.items():
            torch.testing.assert_close(flat, expected[chunk])
        assert [each.iteration for each in run.nodes[0].applied[5:]] == [3, 4, 5, 6, 7]
        run.introduce_late(FakeNode(2, stale_max=1))
        run.train_until_all_are_in()
        assert 8 < run.nodes[2].iteration <= run.furthest
        run.train(run.furthest + 3)
        run.assert_equal()


def set_up_anew(run: FakeRun, number: int, iteration: int) -> None:
    for each in run.nodes:
        each.set_up(number=number, iteration=iteration)
    run.until(lambda: all(each.ready for each in run.nodes), "all are ready")


def test_who_has_not_begun_as_a_checkpoint_is_loaded_comes_in_once_more() -> None:
    """It waits for a script that comes to its first iteration, and has the parameters of before; the members
    would wait for it to be set up with them, and all end with the deadline of that."""
    with FakeRun(2, stale_max=1) as run:
        run.train(5)
        members, late = list(run.nodes), FakeNode(2, stale_max=1)
        run.introduce_late(late)
        run.until(lambda: all(each.capture for each in members), "it is in a view")
        for each in members:
            each.set_up(number=2, iteration=3)
        run.until(lambda: all(each.ready for each in members), "the members are ready")
        assert any("while a checkpoint was loaded" in told.reason for each in members for told in each.told)
        run.train_until_all_are_in()
        run.train(run.furthest + 3)
        run.assert_equal()


def test_who_came_late_is_set_up_anew_with_the_others() -> None:
    """The worker of one that came late has counted fewer set-ups than the members'."""
    with FakeRun(2, stale_max=1) as run:
        run.train(3)
        set_up_anew(run, 2, 3)
        run.train(5)
        late = FakeNode(2, stale_max=1)
        run.introduce_late(late)
        run.train_until_all_are_in()
        run.train(run.furthest + 2)
        at = run.furthest
        for each in run.nodes:
            each.set_up(number=2 if each is late else 3, iteration=at)
        run.until(lambda: all(each.ready for each in run.nodes), "all are ready")
        run.train(at + 3)
        run.assert_equal()


@pytest.mark.soak
def test_who_was_left_out_before_its_set_up_comes_in() -> None:
    with FakeRun(3, stale_max=1, set_up=False) as run:
        still, left = run.nodes[2], run.nodes[:2]
        meet_all(run)
        os.kill(still.cpu.pid, signal.SIGSTOP)
        for each in left:
            each.set_up()
        run.until(lambda: all(each.ready for each in left), "the others are ready", left)
        run.train(4, left)
        os.kill(still.cpu.pid, signal.SIGCONT)
        end = time.monotonic() + DEADLINE
        while not any(each.what == "membership" for each in still.told):  # it hears what they speak of
            assert time.monotonic() < end, still.told
            for each in run.nodes:
                each.advance(each.iteration + 1)
            time.sleep(0.001)
        run.until(lambda: still.left_out, "its worker hears so: it may be in a meeting, which is over")
        still.set_up()
        run.train_until_all_are_in()
        assert still.ready is not None
        assert still.ready.incarnation > 0
        assert still.ready.script.startswith(b"script of ")
        run.train(run.furthest + 3)
        run.assert_equal()


def meet_all(run: FakeRun) -> None:
    """All hear one another."""
    numbers = [each.meet("the nodes", b"") for each in run.nodes]
    run.until(lambda: all(each.met.keys() >= {*numbers} for each in run.nodes), "they meet")


QUICK = ["node.gives", "node.sending"]  # the rest is for `make soak`


@pytest.mark.parametrize(
    "point",
    [
        point if point in QUICK else pytest.param(point, marks=pytest.mark.soak)
        for point in sorted(POINTS)
        if point.startswith("node.")
    ],
)
def test_a_node_is_killed_anywhere_and_comes_back(point: str) -> None:
    """The others go on, it comes back as another process, and all have the same bits each time."""
    kill = Kill(point, 4)
    victim = {"node.gives": 0, "node.took": 3}.get(point, 2)
    with FakeRun(3, stale_max=1, kills={victim: kill}) as run:
        run.train(4)
        if point in ("node.gives", "node.took", "node.view", "node.vote"):  # as somebody comes in
            run.introduce_late(FakeNode(3, stale_max=1, kill=kill if victim == 3 else None))
        # A round is started while one is waited for.
        makers = [each for each in run.nodes if each.node != 1] if point == "node.round" else None
        run.train_until_killed(next(each for each in run.nodes if each.node == victim), makers)
        run.train_until_all_are_in()
        run.train(run.furthest + 4)
        run.assert_equal()
        run.introduce_late(FakeNode(victim, stale_max=1, incarnation=1))
        run.train_until_all_are_in()
        run.train(run.furthest + 4)
        run.assert_equal()


def test_one_of_two_goes_on_where_the_hub_is_a_witness(tmp_path: Path) -> None:
    with ServedRun(2, 0, folder=tmp_path) as hub, FakeRun(2, stale_max=1, hub=hub.address) as run:
        run.train(4)
        dead = run.nodes.pop()
        os.kill(dead.cpu.pid, signal.SIGKILL)
        dead.close()
        run.train(8)
        assert [each.node for each in run.nodes[0].views[-1].members] == [0]


SEED, FAULTS = 18, 50


@pytest.mark.soak
def test_fifty_random_faults_in_one_run() -> None:
    """Of five nodes at least three train at any time; at the end all are there, with equal bits,
    and have applied the same contributions, each once."""
    chance = random.Random(SEED)
    with FakeRun(5, stale_max=2) as run:
        still: dict[int, float] = {}  # who stands still, and until when
        lives = dict.fromkeys(range(5), 0)
        seen: dict[int, list[d.AppliedContribution]] = {}
        for _ in range(FAULTS):
            settled = [each for each in run.members() if each.node not in still]
            if len(settled) >= 4:  # then a majority is left, whoever is left out meanwhile
                victim = chance.choice(settled)
                if chance.random() < 0.5:
                    os.kill(victim.cpu.pid, signal.SIGKILL)
                    run.nodes.remove(victim)
                    victim.close()
                    lives[victim.node] += 1
                    run.introduce_late(FakeNode(victim.node, stale_max=2, incarnation=lives[victim.node]))
                else:
                    os.kill(victim.cpu.pid, signal.SIGSTOP)
                    still[victim.node] = time.monotonic() + chance.uniform(0.5, 8.0)
            go_on(run, still, chance.uniform(0.1, 3.0))
            compare(run, seen)
        go_on(run, still, 10.0)
        assert not still
        run.train_until_all_are_in()
        run.train(run.furthest + 10)
        run.assert_equal()
        compare(run, seen)
        assert sorted(seen) == list(range(len(seen)))


def go_on(run: FakeRun, still: dict[int, float], seconds: float) -> None:
    """All who move make iterations; those whose time has come move again."""
    end = time.monotonic() + seconds
    while (now := time.monotonic()) < end:
        for each in run.nodes:
            if each.node in still and now > still[each.node]:
                os.kill(each.cpu.pid, signal.SIGCONT)
                del still[each.node]
            if each.node not in still:
                each.advance(each.iteration + 1)
        time.sleep(0.001)


def compare(run: FakeRun, seen: dict[int, list[d.AppliedContribution]]) -> None:
    """Each iteration is of the same contributions at all nodes, and each node applies it once; who comes back
    hears of the latest ones that are in the state that it takes over."""
    for each in run.nodes:
        made = [applied.iteration for applied in each.applied]
        assert sum(later <= earlier for earlier, later in pairwise(made)) <= len(each.returned)
        for applied in each.applied:
            assert seen.setdefault(applied.iteration, applied.parts) == applied.parts
        each.applied.clear()


def ends_with(node: FakeNode) -> str:
    """Its CPU side's error, which is the user's to mend: the first line."""
    end = time.monotonic() + DEADLINE
    try:
        while time.monotonic() < end:
            node.pump(0.05)
    except UserError as error:
        return "".join(str(error).splitlines(keepends=True)[:1])
    raise AssertionError(f"node {node.node} was not refused: {node.told}")


def refused(**second: object) -> str:
    """What the second of two nodes, which differs as told, ends with."""
    options = [{}, second]
    nodes = [FakeNode(node, **options[node]) for node in range(2)]  # type: ignore[arg-type]
    try:
        for each in nodes:
            each.introduce([other.place for other in nodes])
            each.set_up()
        return ends_with(nodes[1])
    finally:
        for each in nodes:
            each.close()


def test_other_models_and_keys_are_refused_in_a_line() -> None:
    keys = make_keys()
    strings = [keys.server_public, keys.server_secret, keys.client_public, keys.client_secret]
    assert "no key" in refused(keys=strings)
    with FakeRun(2, set_up=False) as run:
        run.nodes[0].set_up(digest="one")
        run.nodes[1].set_up(digest="another")
        assert "node 1 and node 0 train different models" in ends_with(run.nodes[1])
        assert "node 0 and node 1 train different models" in ends_with(run.nodes[0])


def test_who_comes_late_with_another_model_is_refused_in_a_line() -> None:
    """Whatever the number of set-ups that the members have made."""
    with FakeRun(2) as run:
        run.train(2)
        set_up_anew(run, 2, 2)
        late = FakeNode(2)
        try:
            late.introduce([*run.places, late.place], late=True)
            late.set_up(digest="another")
            assert "it trains another model" in ends_with(late)
            assert late.ready is None
        finally:
            late.close()
        run.train(4)
        views = [view for each in run.nodes for view in each.views]
        assert not any(member.node == 2 for view in views for member in view.members)


def test_two_nodes_with_one_name_are_refused_in_a_line() -> None:
    with FakeRun(2) as run:
        run.train(2)
        twin = FakeNode(1)
        try:
            twin.introduce([run.nodes[0].place, twin.place], late=True)
            twin.set_up()
            assert "two nodes with the name 1: the other one is at tcp://" in ends_with(twin)
        finally:
            twin.close()
        run.train(4)
