"""The samples in the summary of a run of which a worker was killed: the workers' own files say how many."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from killed_runs import start
from run_command import DEADLINE, Command

LENGTH, EPOCHS, WORKERS = 101, 10, 3
WITHOUT_REST = 96  # samples that fill all batches
HUB = "[hub]\npatience = '3s'"
LOST = r"(worker|node) 1 was killed by SIGKILL; the others go on without it"

# Worker 1 kills itself, so that no time passes between its last step and its end.
KILLED = """
import os, signal, time
import torch
from torch.utils.data import DataLoader
import atoll

data = [(torch.full((4,), float(index)), index) for index in range(LENGTH)]
model = torch.nn.Linear(4, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

def used(out, epoch, indices):
    os.write(out, "".join(f"{epoch} {index}\\n" for index in indices.tolist()).encode())

def end(session, at):
    if at == "KILLED_AT" and session.rank == 1 and session.iteration >= 20:
        os.kill(os.getpid(), signal.SIGKILL)

with atoll.join() as session:
    session.prepare(model, optimizer)
    DEALT
    session.resume()
    out = os.open(f"used-{session.rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    while dealt.epoch < EPOCHS:
        epoch = dealt.epoch
        for x, indices in loader:
            model(x).square().mean().backward()
            if "KILLED_AT" == "backward":
                used(out, epoch, indices)
            end(session, "backward")
            optimizer.step()
            if "KILLED_AT" == "step":
                used(out, epoch, indices)
            optimizer.zero_grad()
            end(session, "step")
            time.sleep(0.005)
        dealt.set_epoch(epoch + 1)
"""
BATCHES = "loader = DataLoader(data, batch_sampler=(dealt := session.batches(data, seed=0)))"
SAMPLER = "loader = DataLoader(data, batch_size=4, sampler=(dealt := session.sampler(data, seed=0)))"
OF_TWELVE = "global_batch = 12"

# Both workers load a checkpoint and kill themselves once they have reported their samples; the shards go on
# with the workers that follow.
ALL_KILLED = """
import os, signal, time
import torch
import atoll

def has_reported(session):
    with open(f"run/workers/{session.rank}.jsonl") as journal:
        lines = journal.readlines()
    steps = [number for number, line in enumerate(lines) if '"stepdone"' in line]
    return len(steps) == 25 and any('"samplescounted"' in line for line in lines[steps[-1] :])

model = torch.nn.Linear(4, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
with atoll.join() as session:
    session.prepare(model, optimizer)
    session.resume()
    lived = f"lived-{session.rank}"
    is_first, step = not os.path.exists(lived), 0
    open(lived, "w").close()
    out = os.open(f"used-{session.rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    while session.iteration < 60:
        model(torch.ones(5, 4)).square().mean().backward()
        optimizer.step()
        os.write(out, b"5\\n")
        optimizer.zero_grad()
        step += 1
        if is_first and step == 10:
            session.save("saved")
        elif is_first and step == 15:
            session.load("saved")
        elif is_first and step == 25:
            while not has_reported(session):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("run", "sync", "killed_at"),
    [
        ("strategy = 'server'", OF_TWELVE, "backward"),  # the mean has the samples, and nobody steps there
        ("strategy = 'server'", OF_TWELVE, "step"),
        ("strategy = 'server'", "consistency = 'ssp'", "step"),
        ("strategy = 'server'", "consistency = 'asp'", "step"),
        ("elastic = true", OF_TWELVE, "step"),
    ],
)
def test_the_samples_of_a_killed_worker_are_counted(
    command: Command, run: str, sync: str, killed_at: str
) -> None:
    used, err = end_of(command, run, sync, killed_at, LENGTH)
    assert set(used.values()) == {1}
    assert used.total() == LENGTH * EPOCHS
    check_summary(command, used.total(), err)


@pytest.mark.parametrize(
    ("run", "sync", "workers"),
    [
        ("strategy = 'ps-hra'", OF_TWELVE, 3),
        ("strategy = 'ps-hra'", "consistency = 'asp'", 3),
        ("strategy = 'peers'", OF_TWELVE, 3),
        ("strategy = 'peers'", f"{OF_TWELVE}\nstale_max = 2", 3),
        ("strategy = 'server'\nsites = 2", "", 4),
        ("strategy = 'server'\nsites = 2", "consistency = 'asp'", 4),
    ],
)
def test_the_samples_of_a_killed_member_are_counted(
    command: Command, run: str, sync: str, workers: int
) -> None:
    """A member of a group, a node or a site's worker; batches are full, since padding does not count."""
    used, err = end_of(command, run, sync, "step", WITHOUT_REST, workers)
    if run == "strategy = 'ps-hra'" and "asp" in sync:
        # A group whose members change pads batches, each time with the data's first sample, which weighs 0.
        first = sum(used[f"{epoch} 0"] for epoch in range(EPOCHS))
        others, samples = used.total() - first, int(command.summary()["samples"])
        assert others <= samples <= others + min(first, EPOCHS)
        check_summary(command, samples, err)
    else:
        check_summary(command, used.total(), err)


def end_of(
    command: Command, run: str, sync: str, killed_at: str, length: int, workers: int = WORKERS
) -> tuple[Counter[str], str]:
    """Run until worker 1 is killed and the others end.

    Return how often each sample was used in each epoch, and the command's lines.
    """
    script = KILLED.replace("KILLED_AT", killed_at).replace("LENGTH", str(length))
    script = script.replace("EPOCHS", str(EPOCHS))
    script = script.replace("DEALT", BATCHES if "batch" in sync else SAMPLER)
    process = start(command, script, f"restarts = 0\n[sync]\n{sync}\n{HUB}", run=run, workers=workers)
    _, err = process.communicate(timeout=2 * DEADLINE)
    assert process.returncode == 0, err
    assert re.search(LOST, err), err
    return Counter(lines_of(command)), err


def lines_of(command: Command) -> list[str]:
    """Return what the workers have written of the samples that they have used."""
    files = command.directory.glob("used-*.txt")
    return [line for file in files for line in file.read_text().splitlines()]


def check_summary(command: Command, used: int, err: str) -> None:
    """Assert that the records count exactly the samples that were `used`."""
    summary = command.summary()
    assert "samples_exact" not in summary  # it is left out where it is true
    assert summary["samples"] == used
    assert f" steps of {used:,} samples in " in err
    assert sum(each["samples"] for each in summary["each_worker"]) <= used


@pytest.mark.parametrize("consistency", ["bsp", "asp"])
def test_workers_that_follow_when_all_were_killed_count_no_sample_twice(
    command: Command, consistency: str
) -> None:
    """The shards' count includes the samples before the load."""
    options = f"restarts = 2\n[sync]\nconsistency = '{consistency}'\n{HUB}"
    process = start(command, ALL_KILLED, options, run="strategy = 'server'", workers=2)
    _, err = process.communicate(timeout=2 * DEADLINE)
    assert process.returncode == 0, err
    used, summary = sum(map(int, lines_of(command))), command.summary()
    assert summary["samples_exact"] is False
    assert summary["samples"] == used  # each had been reported before the kill
    assert f" steps of at least {summary['samples']:,.0f} samples in " in err
