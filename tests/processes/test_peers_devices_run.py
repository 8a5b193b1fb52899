"""Nodes of several devices from `atoll run`: one of a node's workers is killed, the node is lost and comes
back as one, and the others go on meanwhile."""

from __future__ import annotations

import json

import psutil
from run_command import Command, wait_for
from test_peers_run import SCRIPT, configured, is_warned, nodes_of, said, steps


def entered(command: Command, worker: int) -> bool:
    return any(each["what"] == "entered" for each in said(command, worker, "decided"))


def worker_of(command: Command, worker: int) -> psutil.Process:
    """A worker's process: torchrun knows it by its node's first worker, and its number there."""
    for process in command.alive():
        try:
            place = process.environ()
            number = int(place.get("ATOLL_FIRST_WORKER", "-1")) + int(place.get("LOCAL_RANK", "-99"))
            if "atoll.launch.worker" in process.cmdline() and number == worker:
                return process
        except psutil.Error:
            continue
    raise AssertionError(f"worker {worker} does not live: {nodes_of(command)}")


def test_a_device_is_killed_and_its_node_comes_back(command: Command) -> None:
    environment = configured(command.directory)
    config = command.directory / "peers.toml"
    config.write_text(config.read_text() + "[groups]\ncount = 3\n")
    launched = command.start(SCRIPT, workers=6, environment=environment)
    wait_for(lambda: min(steps(command, worker) for worker in range(6)) > 8, "the first iterations")
    for killed, node in ((3, [2, 3]), (4, [4, 5])):  # a device that does not lead its node, and one that does
        worker_of(command, killed).kill()
        wait_for(lambda node=node: all(entered(command, each) for each in node), f"workers {node} to be back")
        so_far = steps(command, killed)
        wait_for(lambda of=killed, before=so_far: steps(command, of) > before + 8, "the node to train on")
        assert not said(command, 0, "failed")
    (command.directory / "stop").touch()
    out, err = launched.communicate(timeout=100)
    assert launched.returncode == 0, err
    (line,) = [line for line in out.splitlines() if line.startswith("HELD ")]
    everyone = json.loads(line.removeprefix("HELD "))
    assert [rank for rank, *_ in everyone] == list(range(6))
    assert [begun > 8 for _, begun, *_ in everyone] == [False, False, True, True, True, True]
    assert len({(iteration, epoch, held) for _, _, iteration, epoch, held in everyone}) == 1
    assert everyone[0][2] == everyone[0][3]  # the scheduler came with the script's state
    for node in (1, 2):
        assert f"node {node} was killed by SIGKILL, and is started again (1 of 1)" in err
        assert f"node {node} was left out: " in err
        assert f"node {node} came in: " in err
    assert not is_warned(command, 0, "node 0 was left out")
    assert "lost, and came back: node 1 at " in err
    nodes = command.summary()["nodes"]
    assert [(each["node"], each["devices"]) for each in nodes] == [(0, 2), (1, 2), (2, 2)]
    assert all(each["staleness_most"] <= 4 for each in nodes)
    assert (command.summary()["workers"], command.summary()["groups"]) == (6, 3)
