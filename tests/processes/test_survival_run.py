"""`atoll run` whose hub, shards and workers are killed, and started again."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections import Counter

import pytest
from killed_runs import HUB, STEADY, hub_decisions, kill, services, start
from run_command import DEADLINE, Command, cause_of, wait_for

SAMPLES, EPOCHS, BATCH = 90, 2, 3

LEASING = f"""
import json, time
import torch
import atoll

torch.manual_seed(0)
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn({SAMPLES}, 4), torch.arange({SAMPLES}))
with atoll.join() as session, open(f"notes-{{session.rank}}", "w", buffering=1) as notes:
    session.prepare(model, optimizer)
    sampler = session.sampler(data, seed=5)
    loader = torch.utils.data.DataLoader(data, batch_size={BATCH}, sampler=sampler)
    for epoch in range({EPOCHS}):
        sampler.set_epoch(epoch)
        for x, indices in loader:
            time.sleep(0.1)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            print(json.dumps(indices.tolist()), file=notes)
"""


# Its second epoch begins when the test has told so: who is started again may take longer than the first.
START_EPOCH = "sampler.set_epoch(epoch)"
WAIT = "while epoch and not os.path.exists('told'): time.sleep(0.05)"
assert LEASING.count(START_EPOCH) == 1
WAITING = "import os\n" + LEASING.replace(START_EPOCH, f"{START_EPOCH}\n        {WAIT}")


def notes(command: Command) -> list[list[int]]:
    return [json.loads(line) for path in command.directory.glob("notes-*") for line in path.open()]


@pytest.mark.parametrize("sites", [0, pytest.param(2, marks=pytest.mark.soak)])
def test_the_hub_is_started_again_and_each_sample_counts_once(command: Command, sites: int) -> None:
    """In the middle of leases, under asp."""
    process = start(command, WAITING, f"sites = {sites}", "[sync]", "consistency = 'asp'")

    def came_back(count: int) -> bool:
        return sum(each["choice"].startswith("goes on with") for each in hub_decisions(command)) == count

    for count, many in ((1, 6), (2, 20)):
        wait_for(lambda many=many: len(notes(command)) >= many, "some batches")
        kill(command, *HUB)
        wait_for(lambda count=count: came_back(count), "the hub's return")
    (command.directory / "told").touch()
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, err
    for count in (1, 2):
        assert err.count(f"the hub was killed by SIGKILL, and is started again ({count} of 3)") == 1
    counts = Counter(index for batch in notes(command) for index in batch)
    assert counts == Counter(dict.fromkeys(range(SAMPLES), EPOCHS))
    told = hub_decisions(command)
    assert sum(each["choice"].startswith("goes on with 2 workers") for each in told) == 2
    assert not [each for each in told if each["what"] in ("worker died", "shard died", "site died")]
    warned = [each for each in command.summary()["events"] if each["event"] == "warned"]
    assert [each["message"] for each in warned if "started again" in each["message"]]


@pytest.mark.soak
def test_a_hub_that_is_killed_again_and_again_ends_the_run_with_one_line(command: Command) -> None:
    process = start(command, STEADY.replace("STEPS", "10**6"))
    wait_for(lambda: command.steps() > 3, "a few steps")
    killed: set[int] = set()
    until = time.monotonic() + DEADLINE
    while process.poll() is None and time.monotonic() < until:
        for hub in services(command, *HUB):
            if hub.pid not in killed:
                killed.add(hub.pid)
                hub.kill()
        time.sleep(0.02)
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 1
    assert len(killed) == 4
    last = cause_of(err)
    assert last.startswith("atoll: the hub was killed by SIGKILL for the 4th time, and the run cannot go on")
    assert "run/logs/hub.log" in last
    assert "Traceback" not in err
    assert command.alive() == []


DIES_FIRST = """
import os, pathlib, signal
place = pathlib.Path("died-" + os.environ["RANK"])
if os.environ["RANK"] == "1" and not place.exists():
    place.touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.soak
def test_a_worker_that_is_killed_before_the_run_begins_is_started_again(command: Command) -> None:
    script = DIES_FIRST + STEADY.replace("STEPS", "5")
    process = start(command, script, "restarts = 1")
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, err
    assert "worker 1 was killed by SIGKILL, and is started again (1 of 1)" in err
    assert command.summary()["steps"] == 5


def test_a_script_s_own_error_is_not_started_again(command: Command) -> None:
    raises = "import os\nif os.environ['RANK'] == '1': raise SystemExit(7)\n"
    process = start(command, raises + STEADY.replace("STEPS", "10**6"), "restarts = 5")
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 7, err
    assert "started again" not in err


@pytest.mark.soak
def test_a_shard_is_started_again(command: Command) -> None:
    """In its own directory, with the same arguments, and the hub takes it in its place."""
    process = start(command, STEADY.replace("STEPS", "10**6"), "shards = 2")
    wait_for(lambda: command.steps() > 3, "a few steps")
    kill(command, "atoll.launch.service", "server-1")
    wait_for(
        lambda: (
            sum(each["choice"] == "shard 1" for each in hub_decisions(command)) > 1
            or process.poll() is not None
        ),
        "the shard's return",
    )
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=DEADLINE)
    assert "shard 1 was killed by SIGKILL, and is started again (1 of 3)" in err
    assert command.alive() == []


@pytest.mark.soak
def test_a_run_goes_on_after_a_shard_s_death(command: Command) -> None:
    script = LEASING + "    session.save('checkpoint')\n"
    process = start(command, script, "shards = 2", "[sync]", "consistency = 'asp'")
    wait_for(lambda: len(notes(command)) >= 6, "some batches")
    kill(command, "atoll.launch.service", "server-0")  # which keeps the log
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, err
    assert "shard 0 was killed by SIGKILL, and is started again (1 of 3)" in err
    assert re.search(r"\natoll: hub: shard (came back|joined): shard 0 \(", err)
    assert re.search(r"\natoll: lost, and came back: shard 0 at \S+ s, back after \S+ s\n", err)
    assert err.count("is saved in checkpoint") == 1
    counts = Counter(index for batch in notes(command) for index in batch)
    assert counts == Counter(dict.fromkeys(range(SAMPLES), EPOCHS))


def stop(command: Command, *words: str) -> None:
    """SIGSTOP, for ever, to the one that is there."""
    (process,) = services(command, *words)
    process.send_signal(signal.SIGSTOP)


@pytest.mark.soak
def test_a_shard_that_stands_still_for_ever_is_named_killed_and_started_again(command: Command) -> None:
    """As soon as the hub has given it up, which is after the patience that it has measured."""
    options = ["shards = 2", "[chunks]", "size = '2KiB'"]
    process = start(command, STEADY.replace("STEPS", "100"), *options)
    wait_for(lambda: command.steps() > 3, "a few steps")
    stop(command, "atoll.launch.service", "server-1")
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, err
    assert command.summary()["steps"] == 100
    (died,) = [each for each in hub_decisions(command) if each["what"] == "shard died"]
    assert died["choice"] == "shard 1"
    assert "are borne" in died["reason"]
    order = [
        "shard 1 stands still (SIGSTOP), and the hub has given it up; it is killed",
        "lost shard 1 at tcp://",
        "is back, after",
    ]
    places = [err.find(line) for line in order]
    assert -1 not in places, (order, err)
    assert places == sorted(places), err
    assert "shard 1 was killed by SIGKILL, and is started again (1 of 3)" in err
    assert "lost, and came back: shard 1 at " in err


@pytest.mark.soak
def test_a_hub_that_stands_still_for_ever_is_started_again(command: Command) -> None:
    process = start(command, LEASING, "[sync]", "consistency = 'asp'", "[hub]", "patience = '4s'")
    wait_for(lambda: len(notes(command)) >= 6, "some batches")
    stop(command, *HUB)
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, err
    assert "the hub has stood still for 5 s (SIGSTOP); it is killed" in err
    assert "the hub was killed by SIGKILL, and is started again (1 of 3)" in err
    counts = Counter(index for batch in notes(command) for index in batch)
    assert counts == Counter(dict.fromkeys(range(SAMPLES), EPOCHS))


@pytest.mark.soak
def test_a_worker_that_stands_still_for_ever_is_left_out_and_the_run_ends(command: Command) -> None:
    process = start(command, STEADY.replace("STEPS", "100"), "[hub]", "patience = '2s'")
    wait_for(lambda: command.steps() > 3, "a few steps")
    os.kill(command.worker_pid(1), signal.SIGSTOP)
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, err
    assert "worker 1 stands still (SIGSTOP), and the hub has given it up; it is killed" in err
    assert "worker 1 was killed by SIGKILL; the others go on without it" in err
    assert "\natoll: lost for good: worker 1 at " in err
    assert command.summary()["steps"] == 100
    (died,) = [each for each in hub_decisions(command) if each["what"] == "worker died"]
    assert died["choice"].startswith("worker 1,")


# In every process that finds it on its path, the wall clock is an hour ahead in one second, and behind in the
# next. Not that of the kernel, which is everybody's; so what C++ reads is as it was.
JUMPS = """
import time
_time, _time_ns = time.time, time.time_ns


def _off():
    return 3600 if int(time.monotonic()) % 2 else -3600


time.time = lambda: _time() + _off()
time.time_ns = lambda: _time_ns() + _off() * 10**9
"""


@pytest.mark.soak
def test_wall_clocks_that_jump_in_every_process_do_not_matter(command: Command) -> None:
    """Hub, shards and workers, at other moments each; nobody is given up, and a death is still found."""
    (command.directory / "sitecustomize.py").write_text(JUMPS)
    path = os.pathsep.join([str(command.directory), *filter(None, [os.environ.get("PYTHONPATH")])])
    options = ["[hub]", "patience = '5s'"]
    steady = STEADY.replace("STEPS", "150")
    process = start(command, steady, *options, workers=3, environment={"PYTHONPATH": path})
    wait_for(lambda: command.steps() > 3, "a few steps")
    os.kill(command.worker_pid(2), signal.SIGKILL)
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, err
    assert command.summary()["steps"] == 150
    told = hub_decisions(command)
    assert any(abs(each["time"] - time.time()) > 3000 for each in told)  # it has jumped there
    (died,) = [each for each in told if each["what"].endswith(" died")]
    assert died["choice"].startswith("worker 2,")
