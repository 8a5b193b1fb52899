"""`atoll run` with sites, of which a shard or a worker is killed, and started again."""

from __future__ import annotations

import os
import signal
from collections import Counter

import pytest
from killed_runs import HUB, STEADY, hub_decisions, kill, start
from run_command import DEADLINE, Command, wait_for
from test_survival_run import EPOCHS, LEASING, SAMPLES, notes

SITES = ("sites = 2", "[sync]", "consistency = 'asp'")


def assert_each_counts_once(command: Command) -> None:
    counts = Counter(index for batch in notes(command) for index in batch)
    assert counts == Counter(dict.fromkeys(range(SAMPLES), EPOCHS))
    assert not [each for each in hub_decisions(command) if each["what"] == "site died"]


@pytest.mark.soak
def test_a_site_s_shard_is_started_again_and_each_sample_counts_once(command: Command) -> None:
    process = start(command, LEASING, *SITES)
    wait_for(lambda: len(notes(command)) >= 6, "some batches")
    kill(command, "atoll.launch.service", "site-site0")
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, err
    assert "the shard of site site0 was killed by SIGKILL, and is started again (1 of 3)" in err
    assert "Traceback" not in err
    assert_each_counts_once(command)
    assert [each["what"] for each in hub_decisions(command)].count("site came back") == 1
    assert command.alive() == []


@pytest.mark.soak
def test_a_site_s_shard_a_global_one_and_the_hub_die_together(command: Command) -> None:
    process = start(command, LEASING, *SITES)
    wait_for(lambda: len(notes(command)) >= 6, "some batches")
    kill(command, "atoll.launch.service", "site-site0")
    kill(command, "atoll.launch.service", "server-0")
    kill(command, *HUB)
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, err
    assert err.count("is started again (1 of 3)") == 3
    assert_each_counts_once(command)


@pytest.mark.soak
def test_a_site_s_worker_is_started_again_and_ends_with_the_others(command: Command) -> None:
    """The only one of its site, under bsp."""
    script = STEADY.replace("    while", "    session.resume()\n    while").replace("STEPS", "300")
    process = start(command, script, "sites = 2", "restarts = 1")
    wait_for(lambda: command.steps() > 5, "a few steps")
    os.kill(command.worker_pid(1), signal.SIGKILL)
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, err
    assert "worker 1 was killed by SIGKILL, and is started again (1 of 1)" in err
    assert command.summary()["steps"] == 300
