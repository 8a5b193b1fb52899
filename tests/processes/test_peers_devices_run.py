"""Nodes of several devices from `atoll run`: one of a node's workers is killed, the node is lost and comes
back as one, and the others go on meanwhile."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from run_command import Command, wait_for
from test_peers_run import SCRIPT, configured, is_warned, nodes_of, said, steps

import atoll
from atoll.core.config import HUB_VARIABLE, Config, Groups, Run, Sync
from atoll.core.errors import AtollError
from atoll.train.api.place import Place
from support.pool import WorkerPool
from support.served import ServedRun


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


@pytest.mark.parametrize(
    "killed",
    [
        pytest.param(3, id="one that does not lead its node", marks=pytest.mark.soak),
        pytest.param(2, id="the leader", marks=pytest.mark.soak),
        pytest.param(None, id="the CPU side", marks=pytest.mark.soak),
    ],
)
def test_a_device_is_killed_and_its_node_comes_back(command: Command, killed: int | None) -> None:
    environment = configured(command.directory)
    config = command.directory / "peers.toml"
    config.write_text(config.read_text() + "[groups]\ncount = 3\n")
    launched = command.start(SCRIPT, workers=6, environment=environment)
    wait_for(lambda: min(steps(command, worker) for worker in range(6)) > 8, "the first iterations")
    if killed is None:
        (side,) = worker_of(command, 2).children()
        side.kill()
    else:
        worker_of(command, killed).kill()
    wait_for(lambda: entered(command, 2) and entered(command, 3), "both of node 1's workers to be back")
    so_far = steps(command, 3)
    wait_for(lambda: steps(command, 3) > so_far + 8, "the node to train on")
    (command.directory / "stop").touch()
    out, err = launched.communicate(timeout=100)
    assert launched.returncode == 0, err
    (line,) = [line for line in out.splitlines() if line.startswith("HELD ")]
    everyone = json.loads(line.removeprefix("HELD "))
    assert [rank for rank, *_ in everyone] == list(range(6))
    assert [begun > 8 for _, begun, *_ in everyone] == [False, False, True, True, False, False]
    assert len({(iteration, epoch, held) for _, _, iteration, epoch, held in everyone}) == 1
    assert everyone[0][2] == everyone[0][3]  # the scheduler came with the script's state
    how = (
        "killed by SIGKILL"
        if killed is not None
        else f"of node 1 (process {side.pid}) was killed by SIGKILL)"
    )
    assert f"{how}, and is started again (1 of 1)" in err
    assert "node 1 was left out: " in err
    assert "node 1 came in: " in err
    assert not any(is_warned(command, 0, f"node {node} was left out") for node in (0, 2))
    assert "lost, and came back: node 1 at " in err
    nodes = command.summary()["nodes"]
    assert [(each["node"], each["devices"]) for each in nodes] == [(0, 2), (1, 2), (2, 2)]
    assert all(each["staleness_most"] <= 4 for each in nodes)
    assert (command.summary()["workers"], command.summary()["groups"]) == (6, 3)


@pytest.mark.soak
@pytest.mark.timeout(600)  # torchrun's agent alone gives a worker that stands still 30 s to end
@pytest.mark.parametrize("wakes", [True, False])
def test_a_device_stands_still_and_costs_its_node_alone(command: Command, wakes: bool) -> None:
    """SIGSTOP of a device that does not lead, whose CPU side answers all the while. The others leave its node
    out once, and do not wait for it again; it comes back when the device wakes, or, where its node's deadline
    comes first, when it is started again."""
    config = command.directory / "peers.toml"
    config.write_text(
        '[run]\nstrategy = "peers"\nrestarts = 1\n[sync]\ntimeout = "30s"\n[groups]\ncount = 3\n'
    )
    launched = command.start(SCRIPT, workers=6, environment={"ATOLL_CONFIG": str(config)})
    wait_for(lambda: min(steps(command, worker) for worker in range(6)) > 8, "the first iterations")
    still = worker_of(command, 3)
    still.send_signal(signal.SIGSTOP)
    wait_for(lambda: is_warned(command, 0, "node 1 was left out"), "the others to leave node 1 out")
    so_far = steps(command, 0)
    wait_for(lambda: steps(command, 0) > so_far + 100, "the others to go on")
    if wakes:
        still.send_signal(signal.SIGCONT)
    wait_for(lambda: is_in_again(command), "node 1 to be back", 240.0)
    so_far = steps(command, 3)
    wait_for(lambda: steps(command, 3) > so_far + 8, "node 1 to train on")
    (command.directory / "stop").touch()
    out, err = launched.communicate(timeout=100)
    assert launched.returncode == 0, err
    (line,) = [line for line in out.splitlines() if line.startswith("HELD ")]
    everyone = json.loads(line.removeprefix("HELD "))
    assert len({(iteration, epoch, held) for _, _, iteration, epoch, held in everyone}) == 1
    assert err.count("warning: node 1 was left out: ") == 1
    assert not any(is_warned(command, 0, f"node {node} was left out") for node in (0, 2))
    if not wakes:
        assert "node 1 cannot go on (worker 2 waited 40.0 s for worker 3 on " in err


def is_in_again(command: Command) -> bool:
    """Whether node 1 trains again: by itself, or started again."""
    return entered(command, 2) or is_warned(command, 2, "node 1 was left out and came back: ")


def has_trouble(place: Place, how: str) -> tuple[int, str]:
    """Forty iterations on three nodes of two devices; before the ninth, node 2's CPU side is killed, or one
    of its devices leaves its loop. How many a worker has made, and its error."""
    config = Config(run=Run(strategy="peers"), sync=Sync(timeout="30s", stale_max=2), groups=Groups(count=3))
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    made = 0
    try:
        with atoll.join(config, place=place) as session:
            session.prepare(model, optimizer)
            for step in range(40):
                if step == 8 and how == "killed" and place.rank == 4:
                    assert session._runtime.member is not None
                    os.kill(session._runtime.member._side.pid, signal.SIGKILL)  # type: ignore[union-attr]
                if step == 8 and how == "break" and place.rank == 5:
                    break
                model(torch.randn(4, 3)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                made += 1
    except AtollError as error:
        return made, f"{type(error).__name__}: {error}"
    return made, ""


@pytest.mark.parametrize("how", ["killed", pytest.param("break", marks=pytest.mark.soak)])
def test_a_nodes_trouble_is_its_own(pool: WorkerPool, how: str) -> None:
    """The others go on; its workers end in one line that says what happened."""
    *others, leader, device = pool.run(has_trouble, how, world=6)
    assert others == [(40, "")] * 4
    assert leader[0] == device[0] <= 8 + 3  # by then it waits for itself
    for _, line in (leader, device):
        assert "\n" not in line
        if how == "killed":
            assert re.fullmatch(
                r"GivenUpError: the CPU side of node 2 \(process \d+\) was killed by SIGKILL", line
            )
        else:
            assert "worker 4 is in the end of iteration 8's backward" in line or "worker 4, of its" in line
            assert "the end of the session, which it reached after 8 iterations" in line
            assert line.endswith("all of a node's devices make the same calls in the same order")


BY_HAND = """
import json, torch
import atoll

torch.set_num_threads(1)
with atoll.join() as session:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.prepare(model, optimizer)
    for step in range(6):
        torch.manual_seed(10 * step + session.rank)
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    session.barrier()
    group = session.group
    held = [value for p in model.parameters() for value in p.flatten().tolist()]
    everyone = session.gather([session.rank, group.index, group.rank, group.size, held])
    if session.is_main:
        print("HELD", json.dumps(everyone), flush=True)
"""


def everyone_of(said: list[tuple[int, str, str]]) -> list[list[Any]]:
    assert [status for status, *_ in said] == [0] * len(said), said
    (line,) = [line for _, out, _ in said for line in out.splitlines() if "HELD " in line]
    return list(json.loads(line.partition("HELD ")[2]))


@pytest.mark.soak
def test_launches_of_torchrun_are_nodes_by_a_hub_and_groups_count_says_so_without(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(BY_HAND)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]

    def start(command: list[str], configuration: str, **variables: str) -> subprocess.Popen[str]:
        config = tmp_path / f"{len(list(tmp_path.iterdir()))}.toml"
        config.write_text('[run]\nstrategy = "peers"\n[sync]\ntimeout = "100s"\n' + configuration)
        return subprocess.Popen(
            command,
            cwd=tmp_path,
            env={**os.environ, "ATOLL_CONFIG": str(config), "OMP_NUM_THREADS": "1", **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ended(launches: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
        said = [launch.communicate(timeout=100) for launch in launches]
        return [(launch.returncode, *each) for launch, each in zip(launches, said, strict=True)]

    with ServedRun(2, shards=0) as served:
        named = {HUB_VARIABLE: served.address}
        two = start([*torchrun, "2", "train.py"], "", **named, ATOLL_RANK="0")
        one = start([sys.executable, "train.py"], "", **named, ATOLL_RANK="1")
        everyone = everyone_of(ended([two, one]))
    assert [each[:4] for each in everyone] == [[0, 0, 0, 2], [1, 0, 1, 2], [2, 1, 0, 1]]
    assert len({json.dumps(held) for *_, held in everyone}) == 1

    everyone = everyone_of(ended([start([*torchrun, "4", "train.py"], "[groups]\ncount = 2\n")]))
    assert [each[:4] for each in everyone] == [[0, 0, 0, 2], [1, 0, 1, 2], [2, 1, 0, 2], [3, 1, 1, 2]]
    assert len({json.dumps(held) for *_, held in everyone}) == 1

    ((status, _, err),) = ended([start([*torchrun, "2", "train.py"], "[groups]\ncount = 4\n")])
    assert status != 0
    assert "groups.count (--groups): 2 workers cannot be 4 nodes with as many devices each" in err
