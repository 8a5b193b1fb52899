"""`atoll run --strategy server` with real processes that die: what counts, what is said, how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
from killed_runs import services
from run_command import DEADLINE, Command, cause_of, wait_for

SAMPLES, EPOCHS, BATCH = 150, 2, 3
DYING = 1  # the worker that is killed
LAST = 6  # the iteration after which it does nothing any more, if it was not killed before

# Each line of a worker's notes is one iteration: the samples of the batch, noted before it is committed.
UNEVEN = f"""
import json, os, time
import torch
import atoll

torch.manual_seed(0)
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn({SAMPLES}, 4), torch.arange({SAMPLES}))
with atoll.join() as session, open(f"notes-{{session.rank}}", "w", buffering=1) as notes:
    place = [os.environ.get("ATOLL_" + name) for name in ("RUN", "RANK", "KEY_FILE")]
    assert place[:2] == ["run", str(session.rank)] and place[2] != "no.key", place
    assert os.environ["MASTER_ADDR"] == "127.0.0.1"  # for a process group of the script's own
    assert int(os.environ["MASTER_PORT"]) > 0
    session.prepare(model, optimizer)
    sampler = session.sampler(data, seed=5)
    loader = torch.utils.data.DataLoader(data, batch_size={BATCH}, sampler=sampler)
    for epoch in range({EPOCHS}):
        sampler.set_epoch(epoch)
        for x, indices in loader:
            time.sleep(0.02 if session.rank == 2 else 0.2)
            while session.rank == {DYING} and session.iteration >= {LAST}:
                time.sleep(0.1)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            print(json.dumps(indices.tolist()), file=notes)
            optimizer.step()
            session.log(loss=float(epoch))
"""


def served(
    command: Command,
    script: str,
    *options: str,
    workers: int,
    shards: int = 2,
    sites: int = 0,
    environment: dict[str, str] | None = None,
) -> subprocess.Popen[str]:
    """`atoll run --strategy server`, started."""
    # The command's own arguments would come behind the script's name: its options go into the file.
    settings = [f"[run]\nstrategy = 'server'\nshards = {shards}\nsites = {sites}", "[sync]", *options]
    (command.directory / "atoll.toml").write_text("\n".join(settings))
    return command.start(script, workers=workers, environment=environment)


def notes(command: Command, rank: int) -> list[list[int]]:
    path = command.directory / f"notes-{rank}"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def decisions(command: Command) -> list[dict[str, Any]]:
    path = command.directory / "run" / "service" / "decisions.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.soak
def test_with_uneven_speeds_and_a_death_each_sample_of_an_epoch_counts_once(command: Command) -> None:
    """And another run, which the shell takes part in, does not disturb: its hub, keys, name and rank are none
    of those that the command starts."""
    foreign = {
        "ATOLL_HUB": "tcp://127.0.0.1:1",
        "ATOLL_KEY_FILE": "no.key",
        "ATOLL_RUN": "r",
        "ATOLL_RANK": "7",
    }
    options = ("consistency = 'asp'", "[hub]", "patience = '5s'")
    process = served(command, UNEVEN, *options, workers=3, environment=foreign)
    wait_for(lambda: len(notes(command, DYING)) >= 3, "the slow worker's first iterations")
    os.kill(command.worker_pid(DYING), signal.SIGKILL)
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, err
    assert f"worker {DYING} was killed by SIGKILL; the others go on without it" in err

    told = decisions(command)
    (died,) = [each for each in told if each["what"] == "worker died"]
    assert died["choice"].startswith(f"worker {DYING},")
    assert "its connections are broken" in died["reason"]
    (fenced,) = [each for each in told if each["what"] == "fenced" and each["choice"] == died["choice"]]
    counted = int(fenced["reason"].split()[0])  # "N iterations of it count; ..."
    over = [each["what"] for each in told if each["choice"] == "over"]
    assert over == [f"epoch {epoch} of sampler 0" for epoch in range(EPOCHS)]

    noted = {rank: notes(command, rank) for rank in range(3)}
    assert counted in (len(noted[DYING]) - 1, len(noted[DYING]))  # the last one may have come too late
    noted[DYING] = noted[DYING][:counted]
    count = Counter(index for lines in noted.values() for batch in lines for index in batch)
    assert count == Counter(dict.fromkeys(range(SAMPLES), EPOCHS))
    # The faster one has taken more: by far, whatever else the machine does.
    assert len(noted[2]) > 1.5 * len(noted[0])
    summary = command.summary()
    assert [each["message"] for each in summary["events"] if each["event"] == "warned"]
    assert [each["worker"] for each in summary["each_worker"]] == [0, 1, 2]


STEADY = """
import time
import torch
import atoll

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 300), torch.nn.Linear(300, 300))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with atoll.join() as session:
    session.prepare(model, optimizer)
    while True:
        optimizer.zero_grad()
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
        time.sleep(0.01)
"""


@pytest.mark.soak
def test_a_shard_that_is_killed_again_and_again_ends_the_run_with_one_line(command: Command) -> None:
    process = served(command, STEADY, workers=2)
    wait_for(lambda: command.steps() > 3, "a few steps")
    killed: set[int] = set()

    def ended() -> bool:
        for each in command.alive():
            with contextlib.suppress(psutil.NoSuchProcess):
                if each.pid not in killed and "server-1" in each.cmdline():
                    killed.add(each.pid)
                    each.kill()
        return process.poll() is not None

    wait_for(ended, "the end")  # long before `sync.timeout`
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 1
    assert "shard 1 was killed by SIGKILL, and is started again (1 of 3)" in err
    assert err.splitlines()[-1].startswith("atoll: ")
    assert "Traceback" not in err
    assert command.alive() == []
    assert command.summary()["steps"] > 3


def test_a_worker_that_is_killed_before_the_run_begins_ends_it_at_once(command: Command) -> None:
    """The others would wait for one in its place, up to `sync.timeout`, and nobody will start one."""
    dies = "import os, signal\nif os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)\n"
    process = served(command, dies + STEADY, "timeout = '1h'", workers=2)
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 1, err
    last = cause_of(err)
    assert last.startswith("atoll: worker 1 was killed by SIGKILL before the run began")
    assert "the others go on" not in err
    assert command.alive() == []


def test_strategy_server_by_hand_needs_a_hub(tmp_path: Path) -> None:
    """The script on its own, and with a hub's address at which nobody listens."""
    (tmp_path / "train.py").write_text("import atoll\natoll.join()\n")
    (tmp_path / "atoll.toml").write_text("[run]\nstrategy = 'server'\n[sync]\ntimeout = '1s'\n")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")}
    started = [
        subprocess.Popen(
            [sys.executable, "train.py"],
            cwd=tmp_path,
            env={**clean, **extra},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for extra in ({}, {"ATOLL_HUB": "tcp://127.0.0.1:1"}, {"ATOLL_HUB": "127.0.0.1"})
    ]
    ends = [(*each.communicate(timeout=DEADLINE), each.returncode) for each in started]
    expected = [
        (2, "atoll: strategy 'server' needs a hub, and ATOLL_HUB is not set; start the run with `atoll run"),
        (1, "atoll: waited 1.0 s for hub at tcp://127.0.0.1:1 on a rank in the run"),
        (2, "atoll: hub: '127.0.0.1' is no address; write tcp://HOST:PORT"),
    ]
    for (out, err, status), (code, said) in zip(ends, expected, strict=True):
        assert (out, status) == ("", code), err
        assert err.startswith(said)
        assert err.count("\n") == 1


SITES = """
import time
from pathlib import Path
import torch
import atoll

torch.manual_seed(0)
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with atoll.join() as session:
    session.prepare(model, optimizer)
    while not Path("enough").exists():
        optimizer.zero_grad()
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
        time.sleep(0.02)
"""


@pytest.mark.soak
def test_a_site_whose_shard_is_killed_too_often_is_left_out_and_the_other_goes_on(command: Command) -> None:
    options = ("consistency = 'asp'", "[hub]", "patience = '3s'")
    process = served(command, SITES, *options, workers=2, shards=1, sites=2)
    wait_for(lambda: command.steps() > 3, "a few steps")
    killed: set[int] = set()

    def kill() -> bool:
        for each in services(command, "atoll.launch.service", "site-site0"):
            if each.pid not in killed:
                killed.add(each.pid)
                each.kill()
        return len(killed) == 4

    wait_for(kill, "the site's shard to be killed four times")
    steps = command.steps()
    wait_for(lambda: command.steps() > steps + 3, "the other site to go on")
    (command.directory / "enough").touch()
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, err
    assert "the shard of site 'site0' was killed by SIGKILL; the other sites go on without it" in err
    assert "Traceback" not in err
    assert command.alive() == []
