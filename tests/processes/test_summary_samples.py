"""The samples in the summary of a run of which a worker was killed: the workers' own files say how many."""

from __future__ import annotations

from collections import Counter

import pytest
from killed_runs import start
from run_command import DEADLINE, Command

LENGTH, EPOCHS, WORKERS = 101, 10, 3
HUB = "[hub]\npatience = '3s'"

# Worker 1 kills itself, so that no time passes between its last step and its end.
KILLED = f"""
import os, signal, time
import torch
from torch.utils.data import DataLoader
import atoll

data = [(torch.full((4,), float(index)), index) for index in range({LENGTH})]
model = torch.nn.Linear(4, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

def used(out, epoch, indices):
    os.write(out, "".join(f"{{epoch}} {{index}}\\n" for index in indices.tolist()).encode())

def end(session, at):
    if at == "KILLED_AT" and session.rank == 1 and session.iteration >= 20:
        os.kill(os.getpid(), signal.SIGKILL)

with atoll.join() as session:
    session.prepare(model, optimizer)
    DEALT
    session.resume()
    out = os.open(f"used-{{session.rank}}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    while dealt.epoch < {EPOCHS}:
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


@pytest.mark.parametrize(
    ("run", "sync", "killed_at"),
    [
        ("strategy = 'server'", OF_TWELVE, "backward"),  # the mean has the samples, and nobody steps there
        ("strategy = 'server'", OF_TWELVE, "step"),
        ("strategy = 'server'", "consistency = 'asp'", "step"),
        ("elastic = true", OF_TWELVE, "step"),
    ],
)
def test_the_samples_of_a_killed_worker_are_counted(
    command: Command, run: str, sync: str, killed_at: str
) -> None:
    script = KILLED.replace("KILLED_AT", killed_at).replace("DEALT", BATCHES if "batch" in sync else SAMPLER)
    process = start(command, script, f"restarts = 0\n[sync]\n{sync}\n{HUB}", run=run, workers=WORKERS)
    _, err = process.communicate(timeout=2 * DEADLINE)
    assert process.returncode == 0, err
    assert "worker 1 was killed by SIGKILL; the others go on without it" in err
    files = command.directory.glob("used-*.txt")
    used = Counter(line for file in files for line in file.read_text().splitlines())
    assert set(used.values()) == {1}
    summary = command.summary()
    assert "samples_exact" not in summary  # it is left out where it is true
    assert summary["samples"] == used.total() == LENGTH * EPOCHS
    assert f" steps of {used.total():,} samples in " in err
    assert sum(each["samples"] for each in summary["each_worker"]) <= used.total()
