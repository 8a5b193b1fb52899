"""Nodes' CPU sides as processes, driven by workers that are no sessions: no hub, real sockets, real kills."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fake_nodes import DEADLINE, FakeNode, FakeRun, plain

from atoll.core.errors import RunError, UserError
from atoll.net.keys import make_keys
from atoll.train.node.start import CpuSide
from atoll.wire import device as d

WORKER = """
import os, sys, time
from atoll.train.node.start import CpuSide
from atoll.wire.device import Begin
side = CpuSide(0)
side.send(Begin(run="r", node=0, incarnation=0, stale_max=0))
side.await_message(60.0, "its address")
child = os.fork() if "fork" in sys.argv else 1
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


@pytest.mark.parametrize("forks", [False, True])
def test_a_cpu_side_ends_when_its_worker_is_killed(forks: bool) -> None:
    before = shared_files()
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, *(["fork"] if forks else [])], stdout=subprocess.PIPE, text=True
    )
    try:
        assert worker.stdout is not None
        pid, child = map(int, worker.stdout.readline().split())
        worker.kill()
        wait_for(lambda: is_gone(pid), "the CPU side ends")
        if forks:
            os.kill(child, signal.SIGKILL)
    finally:
        worker.kill()
        worker.wait(DEADLINE)
    assert shared_files() == before


def test_a_worker_notices_at_once_that_its_cpu_side_was_killed() -> None:
    side = CpuSide(3)
    try:
        side.send(d.Begin(run="r", node=3, incarnation=0, stale_max=0))
        assert isinstance(side.await_message(DEADLINE, "its address")[0], d.Listening)
        os.kill(side.pid, signal.SIGKILL)
        began = time.monotonic()
        line = rf"the CPU side of node 3 \(process {side.pid}\) was killed by SIGKILL"
        with pytest.raises(RunError, match=line):
            wait_for(lambda: side.receive(0.1) is None and False, "the end is noticed")
        assert time.monotonic() - began < 5.0
        with pytest.raises(RunError, match="was killed by SIGKILL"):
            side.send(d.Want(iteration=0, least=0))
    finally:
        side.close()


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
        with pytest.raises(RunError, match="node 0 meets on this, and node 1 on that"):
            run.until(lambda: False, "they do not meet")


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


def test_who_stood_still_comes_back() -> None:
    """SIGSTOP for longer than the timeouts: the others go on, and it is a member anew in the same process."""
    with FakeRun(3, stale_max=1) as run:
        run.train(4)
        still, left = run.nodes[2], run.nodes[:2]
        os.kill(still.cpu.pid, signal.SIGSTOP)
        run.train(10, left)
        assert [each.node for each in left[0].views[-1].members] == [0, 1]
        os.kill(still.cpu.pid, signal.SIGCONT)
        end = time.monotonic() + DEADLINE
        until = 10
        while not still.returned:
            assert time.monotonic() < end, (still.told[-3:], left[0].told[-3:])
            for each in left:
                each.advance(until := max(until, each.iteration + 1))
            still.pump()
        assert still.returned[0].script.startswith(b"script of ")
        run.train(max(each.iteration for each in run.nodes) + 6)
        for chunk, flat in still.parameters.items():
            assert torch.equal(flat, left[0].parameters[chunk])
            assert torch.equal(flat, left[1].parameters[chunk])
        assert [each.node for each in left[0].views[-1].members] == [0, 1, 2]


def test_a_node_comes_late() -> None:
    with FakeRun(2, stale_max=1) as run:
        run.train(5)
        late = FakeNode(2, stale_max=1)
        run.nodes.append(late)
        late.introduce(run.places, late=True)
        late.set_up()
        end = time.monotonic() + DEADLINE
        while late.ready is None:
            assert time.monotonic() < end, late.told[-3:]
            for each in run.nodes[:2]:
                each.advance(each.iteration + 1)
            late.pump()
        run.train(max(each.iteration for each in run.nodes) + 6)
        for chunk, flat in late.parameters.items():
            assert torch.equal(flat, run.nodes[0].parameters[chunk])


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
