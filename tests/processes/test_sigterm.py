"""SIGTERM, as a batch system sends it: the script's own handler runs, and has time to save."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from run_command import DEADLINE, Command, cause_of, wait_for

TRAINS = """
import os, signal, sys, time, torch, atoll
stop, begun = [], time.monotonic()
def ask(*_):
    stop.append(time.monotonic())
    print("asked", len(stop), flush=True)
signal.signal(signal.SIGTERM, ask)
with atoll.join() as session:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session.prepare(model, optimizer)
    session.resume()
    while time.monotonic() - begun < 100:
        model(torch.ones(4, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if session.reduce(float(bool(stop)), "max"):
            time.sleep(SECONDS)
            session.save("checkpoint")
            print("saved at", session.iteration, flush=True)
            break
        time.sleep(0.02)
"""
WAITS = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
open(f"there-{os.environ['RANK']}", "w").close()
"""
STRATEGIES = [
    ("ring",),
    ("server",),
    *(
        pytest.param(each, marks=pytest.mark.soak)
        for each in (
            ("ring", "run.elastic=true"),
            ("hierarchical", "groups.count=1"),
            ("server", "run.restarts=1"),
            ("ps-hra", "sync.consistency=bsp", "groups.count=1", "groups.links=0"),
            ("peers",),
            ("peers", "groups.count=1"),
        )
    ),
]


def options(strategy: str, *settings: str) -> list[str]:
    return ["--strategy", strategy, *(part for each in settings for part in ("--set", each))]


def log(command: Command, worker: int) -> str:
    return (command.directory / "run" / "logs" / f"worker-{worker}.log").read_text()


@pytest.mark.parametrize("given", STRATEGIES, ids=" ".join)
def test_a_script_that_handles_it_saves_in_its_time(command: Command, given: tuple[str, ...]) -> None:
    """The hub, the shards and the nodes' CPU sides are there until it has; in a ring it takes longer than
    what ends at Ctrl-C is given."""
    script = TRAINS.replace("SECONDS", "6" if given == ("ring",) else "1")
    process = command.start(script, options=options(*given))
    wait_for(lambda: command.steps() > 3 or process.poll() is not None, "a few steps")
    process.terminate()
    process.terminate()  # as `timeout` does: to the process, and to its group
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 143, err
    assert err.splitlines()[-1] == "atoll: stopped by SIGTERM"
    for worker in range(2):
        assert log(command, worker).count("asked") == 1
        assert "saved at" in log(command, worker)
    assert (command.directory / "checkpoint" / "manifest.json").exists()
    assert command.alive() == []


@pytest.mark.parametrize(
    "given",
    [
        ("server",),
        pytest.param(("ring",), marks=pytest.mark.soak),
        pytest.param(("ring", "run.elastic=true"), marks=pytest.mark.soak),
        pytest.param(("peers",), marks=pytest.mark.soak),
    ],
    ids=" ".join,
)
def test_all_processes_are_asked_at_once(command: Command, given: tuple[str, ...]) -> None:
    """As systemd asks: hub and shards are there until the scripts have saved all the same."""
    process = command.start(TRAINS.replace("SECONDS", "1"), options=options(*given))
    wait_for(lambda: command.steps() > 3 or process.poll() is not None, "a few steps")
    for each in command.alive():
        each.terminate()
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 143, err
    assert err.splitlines()[-1] == "atoll: stopped by SIGTERM"
    for worker in range(2):
        assert "saved at" in log(command, worker)
    assert command.alive() == []


@pytest.mark.soak
@pytest.mark.parametrize(
    "given", [("ring",), ("ring", "run.elastic=true"), ("server",), ("peers",)], ids=" ".join
)
def test_a_worker_alone_is_asked_and_its_script_decides(command: Command, given: tuple[str, ...]) -> None:
    process = command.start(TRAINS.replace("SECONDS", "1"), options=options(*given))
    wait_for(lambda: command.steps() > 3 or process.poll() is not None, "a few steps")
    os.kill(command.worker_pid(1), signal.SIGTERM)
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, err
    assert [log(command, worker).count("asked") for worker in range(2)] == [0, 1]
    assert all("saved at" in log(command, worker) for worker in range(2))


@pytest.mark.parametrize("elastic", [False, True])
def test_scripts_end_as_they_choose_and_who_takes_too_long_is_named(command: Command, elastic: bool) -> None:
    """Worker 0 ends with a status of its own; worker 1 is not told again because of that, and is killed."""
    script = WAITS + (
        "while os.environ['RANK'] == '1' or not os.path.exists('go'): time.sleep(0.05)\nsys.exit(5)\n"
    )
    settings = ["run.grace=3s", *["run.elastic=true"] * elastic]
    process = command.start(script, options=options("ring", *settings))
    wait_for(lambda: len(there(command)) == 2 or process.poll() is not None, "both")
    process.terminate()
    wait_for(lambda: "asked" in log(command, 0) and "asked" in log(command, 1), "their handlers")
    (command.directory / "go").touch()
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 143
    assert err.splitlines()[-1] == (
        "atoll: stopped by SIGTERM; worker 1 was killed, for not ending within run.grace"
    )
    assert [log(command, worker).count("asked") for worker in range(2)] == [1, 1]
    assert command.alive() == []


def there(command: Command) -> list[Path]:
    return list(command.directory.glob("there-*"))


def test_an_error_of_the_handler_is_told_and_a_second_signal_ends_the_rest(command: Command) -> None:
    script = WAITS + (
        "while os.environ['RANK'] == '1' or not os.path.exists('go'): time.sleep(0.05)\n"
        "raise OSError('no room for the checkpoint')\n"
    )
    process = command.start(script, options=options("ring", "run.elastic=true"))
    wait_for(lambda: len(there(command)) == 2 or process.poll() is not None, "both")
    process.terminate()
    wait_for(lambda: "asked" in log(command, 0) and "asked" in log(command, 1), "their handlers")
    (command.directory / "go").touch()
    wait_for(lambda: "no room for the checkpoint" in log(command, 0), "the error")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 143
    assert "OSError: no room for the checkpoint" in err
    assert "atoll: stopped by SIGTERM; worker 0 ended with OSError at train.py:" in err
    assert command.alive() == []


def test_scripts_without_a_handler_end_at_once(command: Command) -> None:
    script = "import os, time\nopen(f\"there-{os.environ['RANK']}\", 'w').close()\ntime.sleep(600)\n"
    process = command.start(script)
    wait_for(lambda: len(there(command)) == 2 or process.poll() is not None, "both")
    process.terminate()
    _, err = process.communicate(timeout=20)  # and run.grace is 30 s
    assert (process.returncode, err) == (143, "atoll: stopped by SIGTERM\n")


LEAVES = """
import os
import signal

import torch
import atoll


class Stopped:
    def __enter__(self):
        pass

    def __exit__(self, *error):
        os.kill(os.getpid(), signal.SIGTERM)


model = torch.nn.Linear(4, 3)
with Stopped(), atoll.join() as session:
    session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    session.barrier()
    if session.rank == 1:
        raise ValueError("no label for 'cat'")
    session.barrier()
"""


def test_an_error_is_told_though_its_worker_is_stopped_while_it_leaves(command: Command) -> None:
    """Another one has lost touch, and torchrun stops all."""
    status, _, err = command.run(LEAVES)
    assert status == 1, err
    assert re.match(
        r"atoll: worker 1 ended with ValueError at train\.py:\d+, after [^:]+: no label for 'cat'; ",
        cause_of(err),
    ), err
