"""`atoll run --replicas 2`, whose shards are killed: the standby goes on, and who was killed is the next."""

from __future__ import annotations

import contextlib
from collections import Counter

import psutil
import pytest
from killed_runs import hub_decisions, start
from run_command import DEADLINE, Command, wait_for
from test_survival_run import BATCH, EPOCHS, LEASING, SAMPLES, WAITING, notes


def process_of(command: Command, shard: int, second: bool) -> psutil.Process:
    """One of a shard's two processes, once it is there."""
    found: list[psutil.Process] = []

    def look() -> bool:
        found.clear()
        for process in command.alive():
            with contextlib.suppress(psutil.NoSuchProcess):
                name = f"{'second' if second else 'server'}-{shard}"
                if {"atoll.launch.service", name} <= set(process.cmdline()):
                    found.append(process)
        return bool(found)

    wait_for(look, f"a process of shard {shard}")
    return found[0]


def in_sync(command: Command, shard: int) -> int:
    """How often a standby of this shard was in sync."""
    told = [each for each in hub_decisions(command) if each["what"] == f"shard {shard}"]
    return sum(each["choice"] == "its standby is in sync" for each in told)


@pytest.mark.soak
def test_both_processes_of_a_shard_are_killed_one_after_the_other(command: Command) -> None:
    """Under asp, and the hub's directory has no part in it."""
    process = start(
        command, WAITING, "shards = 1", "[server]", "replicas = 2", "[sync]", "consistency = 'asp'"
    )
    for count, second in ((1, False), (2, True)):
        wait_for(lambda count=count: in_sync(command, 0) >= count, "a standby in sync")
        wait_for(lambda count=count: len(notes(command)) >= 8 * count, "some batches")
        process_of(command, 0, second).kill()
    (command.directory / "told").touch()
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, err
    assert "killed by SIGKILL, and is started again (1 of 3)" in err
    counts = Counter(index for batch in notes(command) for index in batch)
    assert counts == Counter(dict.fromkeys(range(SAMPLES), EPOCHS))
    assert len(notes(command)) >= EPOCHS * SAMPLES // BATCH


@pytest.mark.soak
@pytest.mark.parametrize("how", ["no room", "damaged"])
def test_a_process_of_a_shard_that_ends_with_an_error_is_left_out(command: Command, how: str) -> None:
    """The primary's journal takes no more, or it is killed and finds its directory damaged."""
    process = start(
        command, WAITING, "shards = 1", "[server]", "replicas = 2", "[sync]", "consistency = 'asp'"
    )
    wait_for(lambda: in_sync(command, 0) >= 1, "a standby in sync")
    wait_for(lambda: len(notes(command)) >= 8, "some batches")
    folder = command.directory / "run" / "service" / "shard-0"
    half = process_of(command, 0, second=False)
    if how == "damaged":
        (folder / "shard.json").write_text("{")
        half.kill()
        status, said = 2, "run/service/shard-0/shard.json: not a shard's: "
    else:  # no file of its own may grow beyond what its journal has by now, which is more than its log
        size = max(path.stat().st_size for path in folder.glob("journal-*.bin"))
        half.rlimit(psutil.RLIMIT_FSIZE, (size, size))
        status, said = 1, "File too large"
    journal = command.directory / "run" / "workers" / "0.jsonl"
    wait_for(lambda: "the other one goes on alone" in journal.read_text(), "word of the one that is left out")
    (command.directory / "told").touch()
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, err
    (line,) = [each for each in err.splitlines() if "the other one goes on alone" in each]
    assert f"the first process of shard 0 ended with status {status}: " in line
    assert said in line
    counts = Counter(index for batch in notes(command) for index in batch)
    assert counts == Counter(dict.fromkeys(range(SAMPLES), EPOCHS))


def test_sites_have_no_standbys(command: Command) -> None:
    process = start(command, LEASING, "sites = 2", "[server]", "replicas = 2")
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 2
    assert err.splitlines()[-1].startswith(
        "atoll: server.replicas (--replicas): 2 processes for each shard do not go with"
    )
