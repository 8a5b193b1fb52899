"""Nodes without a server, from `atoll run` and by hand: kills, the hub's end, returns, saving, bad input."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
from run_command import Command, cause_of, wait_for
from torch import nn
from torch.utils.data import DataLoader

import atoll
from atoll.core.config import (
    HUB_VARIABLE,
    JOINED_VARIABLE,
    RANK_VARIABLE,
    Config,
    LinkOptions,
    Run,
    Sync,
)
from atoll.core.errors import UserError
from atoll.net.keys import make_keys, write_keys
from atoll.train.api.place import Place
from support.pool import JobFailedError, WorkerPool
from support.served import ServedRun, served_worker

# Trains until there is a file `stop`, as all nodes agree each 32 iterations; then all compare what they hold.
SCRIPT = """
import hashlib, os, time
import torch
import atoll

torch.set_num_threads(1)
with atoll.join() as session:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.999**step)
    session.prepare(model, optimizer)
    begun = session.resume()
    while True:
        x = torch.randn(4, 8)
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        time.sleep(0.03)
        if session.iteration % 32 == 0 and session.reduce(float(os.path.exists("stop")), "max"):
            break
    session.save("saved")
    held = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    everyone = session.gather([session.rank, begun, session.iteration, scheduler.last_epoch, held])
    if session.is_main:
        print("HELD", __import__("json").dumps(everyone), flush=True)
"""


# Uses the gradients' mean before each step.
CLIPPED = SCRIPT.replace(
    "        optimizer.step()\n",
    "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n        optimizer.step()\n",
)
# One node alone uses it.
READ_ALONE = SCRIPT.replace(
    "        optimizer.step()\n",
    "        if session.is_main:\n"
    "            torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])\n"
    "        optimizer.step()\n",
)


def configured(directory: Path, more: str = "") -> dict[str, str]:
    path = directory / "peers.toml"
    path.write_text(f'[run]\nstrategy = "peers"\nrestarts = 1\n[sync]\ntimeout = "100s"\n{more}')
    return {"ATOLL_CONFIG": str(path)}


def nodes_of(command: Command) -> dict[int, psutil.Process]:
    """The workers that live, by node."""
    found = {}
    for process in command.alive():
        try:
            if "atoll.launch.worker" in process.cmdline():
                found[int(process.environ()["RANK"])] = process
        except psutil.Error:
            continue
    return found


def kill_hubs(command: Command, times: int) -> None:
    """Kill the hub, and so often in all as it is started again."""
    killed: set[int] = set()

    def hubs() -> list[psutil.Process]:
        found = []
        for process in command.alive():
            try:
                if "atoll.cli.hub" in process.cmdline() and process.pid not in killed:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    for _ in range(times):
        wait_for(hubs, "the hub")
        for hub in hubs():
            killed.add(hub.pid)
            hub.kill()


def said(command: Command, worker: int, event: str) -> list[dict[str, Any]]:
    path = command.directory / "run" / "workers" / f"{worker}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    events = [json.loads(line) for line in lines if line.endswith("}")]
    return [each for each in events if each["event"] == event]


def is_warned(command: Command, worker: int, start: str) -> bool:
    return any(each["message"].startswith(start) for each in said(command, worker, "warned"))


def is_back(command: Command, node: int) -> bool:
    """Whether a node that was left out takes part again: by itself, or, if that was in a meeting, started
    again."""
    entered = any(each["what"] == "entered" for each in said(command, node, "decided"))
    return entered or is_warned(command, node, f"node {node} was left out and came back: ")


def steps(command: Command, worker: int) -> int:
    return len(said(command, worker, "stepdone"))


@pytest.mark.parametrize(
    ("hubs", "script", "more"),
    [
        (1, SCRIPT, ""),
        pytest.param(4, SCRIPT, "", marks=pytest.mark.soak),
        pytest.param(1, CLIPPED, "stale_max = 0\n", marks=pytest.mark.soak),
        pytest.param(1, READ_ALONE, "stale_max = 0\n", marks=pytest.mark.soak),
    ],
    ids=["once", "often", "clipped", "read by one"],
)
def test_a_node_is_killed_and_comes_back_with_the_hub_dead(
    command: Command, hubs: int, script: str, more: str
) -> None:
    launched = command.start(script, workers=3, environment=configured(command.directory, more))
    wait_for(lambda: min(steps(command, node) for node in range(3)) > 8, "the first iterations")
    kill_hubs(command, hubs)  # three times it is started again
    nodes_of(command)[1].kill()
    wait_for(lambda: is_back(command, 1), "node 1 to come back")
    so_far = steps(command, 1)
    wait_for(lambda: steps(command, 1) > so_far + 8, "node 1 to train on")
    (command.directory / "stop").touch()
    out, err = launched.communicate(timeout=100)
    assert launched.returncode == 0, err
    (line,) = [line for line in out.splitlines() if line.startswith("HELD ")]
    everyone = json.loads(line.removeprefix("HELD "))
    assert [node for node, *_ in everyone] == [0, 1, 2]
    assert [begun > 8 for _, begun, *_ in everyone] == [False, True, False]
    assert len({(iteration, epoch, held) for _, _, iteration, epoch, held in everyone}) == 1
    assert everyone[0][2] == everyone[0][3]  # the scheduler came with the script's state
    assert "node 1 was left out: " in err
    assert "node 1 came in: " in err
    gone = "the hub ended with status -9, 4 times by now; the nodes know one another, and go on without it"
    assert (gone in err) == (hubs == 4)
    assert re.search("^atoll: lost, and came back: .*worker 1 at ", err, re.MULTILINE)
    summary = command.summary()
    assert [node["node"] for node in summary["nodes"]] == [0, 1, 2]
    assert all(node["staleness_most"] <= 4 for node in summary["nodes"])
    assert (command.directory / "saved" / "model.safetensors").exists()


@pytest.mark.soak
def test_where_a_majority_dies_the_run_ends_with_a_line_that_says_the_way_out(command: Command) -> None:
    path = command.directory / "peers.toml"
    path.write_text('[run]\nstrategy = "peers"\n[sync]\ntimeout = "20s"\n')
    launched = command.start(SCRIPT, workers=3, environment={"ATOLL_CONFIG": str(path)})
    wait_for(lambda: min(steps(command, node) for node in range(3)) > 8, "the first iterations")
    workers = nodes_of(command)
    for node in (1, 2):
        workers[node].kill()
    _, err = launched.communicate(timeout=100)
    assert launched.returncode == 1, err
    assert cause_of(err).startswith("atoll: worker 1 was killed by SIGKILL")
    last = err.splitlines()[-1]
    assert last.startswith("atoll: then node 0 waited 20.")
    assert "it waits for a majority of the 3 nodes of view 0: there is none without node 1 and node 2" in last
    assert "if they are lost, go on from a checkpoint" in last


@pytest.mark.soak
@pytest.mark.parametrize(
    ("script", "more"), [(SCRIPT, ""), (CLIPPED, "stale_max = 0\n")], ids=["", "clipped"]
)
def test_one_that_stands_still_is_left_out_and_takes_up_where_the_others_are(
    command: Command, script: str, more: str
) -> None:
    launched = command.start(script, workers=3, environment=configured(command.directory, more))
    wait_for(lambda: min(steps(command, node) for node in range(3)) > 8, "the first iterations")
    worker = nodes_of(command)[2]
    stopped = [worker, *worker.children()]
    for process in stopped:
        process.send_signal(signal.SIGSTOP)
    wait_for(lambda: is_warned(command, 0, "node 2 was left out: "), "the others to leave node 2 out")
    so_far = steps(command, 0)
    wait_for(lambda: steps(command, 0) > so_far + 8, "the others to go on")
    for process in stopped:
        process.send_signal(signal.SIGCONT)
    wait_for(lambda: is_back(command, 2), "node 2 to come back")
    so_far = steps(command, 2)
    wait_for(lambda: steps(command, 2) > so_far + 8, "node 2 to train again")
    (command.directory / "stop").touch()
    out, err = launched.communicate(timeout=100)
    assert launched.returncode == 0, err
    (line,) = [line for line in out.splitlines() if line.startswith("HELD ")]
    everyone = json.loads(line.removeprefix("HELD "))
    assert len(everyone) == 3
    assert len({(iteration, epoch, held) for _, _, iteration, epoch, held in everyone}) == 1


def settings(**sync: Any) -> Config:
    return Config(run=Run(strategy="peers"), sync=Sync(**{"timeout": "60s", **sync}))


def train(session: atoll.Session, model: nn.Module, steps: int) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    session.prepare(model, optimizer)
    for step in range(steps):
        one_step(session, model, optimizer, step)
    return {"rank": session.rank, "iteration": session.iteration, "state": optimizer.state_dict()}


def one_step(session: atoll.Session, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    torch.manual_seed(100 * step + session.rank)
    x = torch.randn(4, 3)
    (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def a_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def assert_same_state(state: dict[str, Any], expected: dict[str, Any]) -> None:
    assert state["param_groups"] == expected["param_groups"]
    assert list(state["state"]) == list(expected["state"])
    for number, theirs in expected["state"].items():
        ours = state["state"][number]
        assert set(ours) == set(theirs)
        assert all(torch.equal(ours[key], value) for key, value in theirs.items())


def saves_and_loads(place: Place, folder: str, state: dict[str, Any]) -> list[Any]:
    """Four iterations, a checkpoint, two more; then all again from the checkpoint, here and alone. The
    optimizer has a `state` before the session has it, and loads another one and this one again after."""
    found = []
    with atoll.join(settings(stale_max=2), place=place) as session:
        model = a_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        optimizer.load_state_dict(state)
        session.prepare(model, optimizer)
        assert_same_state(optimizer.state_dict(), state)
        other = {**state, "param_groups": [{**group, "lr": 9.0} for group in state["param_groups"]]}
        optimizer.load_state_dict(other)
        assert_same_state(optimizer.state_dict(), other)
        optimizer.load_state_dict(state)
        assert_same_state(optimizer.state_dict(), state)
        for step in range(4):
            one_step(session, model, optimizer, step)
        session.save(folder)
        found.append([p.detach().clone() for p in model.parameters()])
        one_step(session, model, optimizer, 4)
        session.load(folder)
        found.append([p.detach().clone() for p in model.parameters()])
        assert session.iteration == 4
        one_step(session, model, optimizer, 4)
        session.barrier()
        found.append([p.detach().clone() for p in model.parameters()])
        found.append([optimizer.state_dict()["state"][0]["step"].item()])
    return found


def test_a_checkpoint_is_of_one_iteration_and_loads_on_nodes_and_alone(
    pool: WorkerPool, tmp_path: Path
) -> None:
    model = a_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(3):
        model(torch.ones(4, 3)).square().mean().backward()
        optimizer.step()
    first, second = pool.run(saves_and_loads, str(tmp_path / "saved"), optimizer.state_dict(), world=2)
    for one, other in zip(first, second, strict=True):
        assert all(
            torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(one, other, strict=True)
        )
    assert all(torch.equal(a, b) for a, b in zip(first[0], first[1], strict=True))
    assert first[3] == [3.0 + 5.0]
    with atoll.join(Config(), place=Place()) as session:
        model = a_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        session.prepare(model, optimizer)
        session.load(tmp_path / "saved")
        assert session.iteration == 4
        assert all(torch.equal(a, b) for a, b in zip(first[0], model.parameters(), strict=True))
        assert optimizer.state_dict()["state"][0]["step"].item() == 3.0 + 4.0


def with_another_model(place: Place) -> None:
    with atoll.join(settings(), place=place) as session:
        train(session, nn.Linear(3, 1 + place.rank), 1)


def with_another_configuration(place: Place) -> None:
    with atoll.join(settings(stale_max=2 + place.rank), place=place) as session:
        train(session, a_model(), 1)


@pytest.mark.parametrize(
    ("job", "said"),
    [
        (
            with_another_model,
            "the workers differ: parameter 'weight' is (1, 3) float32, param group 0 on worker",
        ),
        (
            with_another_configuration,
            "the configuration's 'sync.stale_max' is 2 on worker 0 and 3 on worker 1",
        ),
    ],
)
def test_nodes_that_differ_are_refused_before_they_train(pool: WorkerPool, job: Any, said: str) -> None:
    with pytest.raises(JobFailedError) as caught:
        pool.run(job, world=2)
    for failure in caught.value.failures.values():
        assert failure.kind == "PrepareError"
        assert said in failure.message
        assert "\n" not in failure.message


def test_two_nodes_with_one_name_and_a_wrong_key_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("right", "wrong"):
        write_keys(tmp_path / name, make_keys())
    with ServedRun(2, shards=0, keys=tmp_path / "right") as served:
        with served_worker(served.address, 0, tmp_path / "wrong"), pytest.raises(UserError) as caught:
            atoll.join(settings())
        assert "refuses this key" in str(caught.value)
    store = torch.distributed.HashStore()
    taken = Place(rank=0, world=2, store=store)
    store.set("peers/0", '{"incarnation":1,"address":"tcp://127.0.0.1:1","token":"another"}')
    monkeypatch.delenv(HUB_VARIABLE, raising=False)
    with pytest.raises(UserError, match="there are two nodes 0: the other one listens at tcp://127.0.0.1:1"):
        atoll.join(settings(), place=taken)


def test_a_node_that_lives_keeps_its_name_in_the_runs_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOLL_RUN_DIRECTORY", str(tmp_path))
    monkeypatch.setenv(RANK_VARIABLE, "0")
    with ServedRun(1, shards=0) as served:
        monkeypatch.setenv(HUB_VARIABLE, served.address)
        with atoll.join(settings()) as session:
            train(session, a_model(), 2)
            assert json.loads((tmp_path / "nodes" / "0.json").read_text())["node"] == 0
            # POSIX locks are a process's: another process is refused.
            code = "import atoll; atoll.join()"
            config = tmp_path / "peers.toml"
            config.write_text('[run]\nstrategy = "peers"\n')
            # As one that was started beside this process, not by it.
            environment = {"ATOLL_CONFIG": str(config), JOINED_VARIABLE: ""}
            status, err = run_python(code, environment)
            assert (status, err.count("\n")) == (2, 1), err
            assert "node 0 of the run in " in err
            assert " is alive already" in err


def run_python(code: str, environment: dict[str, str]) -> tuple[int, str]:
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )
    return ended.returncode, ended.stderr


def trains_on_batches(place: Place, folder: str, transport: str) -> list[list[float]]:
    """One epoch of 60 samples in batches of 8 over all nodes, saved and loaded in its middle: which samples
    each iteration of this node was of."""
    data = torch.arange(60.0).reshape(60, 1)
    config = settings(stale_max=1, global_batch=8)
    link = LinkOptions(transport=transport, reliable=transport == "ltp")  # type: ignore[arg-type]
    config = msgspec.structs.replace(config, link=link)
    seen: list[list[float]] = []
    with atoll.join(config, place=place) as session:
        torch.manual_seed(0)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
        session.prepare(model, optimizer)
        batches = session.batches(data, seed=3)
        loader = DataLoader(data, batch_sampler=batches)
        for part in range(2):
            for batch in loader:
                model(batch).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                seen.append(batch.flatten().tolist())
                if part == 0 and len(seen) == 3:
                    session.save(folder)
                    break
            if part == 0:
                session.load(folder)
        session.barrier()
        assert session.iteration == 8
    return seen


@pytest.mark.parametrize("transport", ["tcp", pytest.param("ltp", marks=pytest.mark.soak)])
def test_batches_are_dealt_once_and_go_on_from_a_checkpoint(
    pool: WorkerPool, tmp_path: Path, transport: str
) -> None:
    nodes = pool.run(trains_on_batches, str(tmp_path / "saved"), transport, world=2)
    assert [len(seen) for seen in nodes] == [8, 8]
    given = sorted(value for seen in nodes for batch in seen for value in batch)
    assert given == [float(value) for value in range(60)]
