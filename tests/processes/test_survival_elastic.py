"""An elastic ring under `atoll run`: its hub and its workers are killed, and those that remain go on."""

from __future__ import annotations

import json
import os
import re
import signal

import pytest
from killed_runs import HUB, STEADY, hub_decisions, kill, start
from run_command import DEADLINE, Command, wait_for


@pytest.mark.soak
def test_an_elastic_ring_trains_through_its_hubs_death(command: Command) -> None:
    process = start(command, STEADY.replace("STEPS", "200"), run="elastic = true\n[hub]\npatience = '5s'")
    wait_for(lambda: command.steps() > 3, "a few steps")
    kill(command, *HUB)
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, err
    assert "the hub was killed by SIGKILL, and is started again (1 of 3)" in err
    assert command.summary()["steps"] == 200
    assert command.summary()["strategy"] == "ring"
    left = [each for each in hub_decisions(command) if each["what"] == "worker left"]
    assert len(left) <= 2  # the launcher may end the hub before it has heard both
    assert not [each for each in hub_decisions(command) if each["what"] == "worker died"]


@pytest.mark.soak
@pytest.mark.parametrize("hub", [False, True])
def test_an_elastic_ring_goes_on_without_a_worker_that_was_killed(command: Command, hub: bool) -> None:
    """And with its hub killed at the same time: it is started again, and forms the next ring."""
    process = start(command, STEADY.replace("STEPS", "300"), run="elastic = true\n[hub]\npatience = '5s'")
    wait_for(lambda: command.steps() > 3, "a few steps")
    os.kill(command.worker_pid(1), signal.SIGKILL)
    if hub:
        kill(command, *HUB)

    def steps_of(file: str) -> int:
        path = command.directory / "run" / file
        return max((json.loads(line).get("iteration", 0) for line in path.open()), default=0)

    made = steps_of("workers/1.jsonl")
    wait_for(lambda: steps_of("metrics.jsonl") > made + 10, "lines of metrics")
    assert steps_of("workers/0.jsonl") < 300  # lines do not wait for the dead one's steps
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, err
    assert "worker 1 was killed by SIGKILL; the others go on without it" in err
    assert ("the hub was killed by SIGKILL, and is started again (1 of 3)" in err) == hub
    assert command.summary()["steps"] == 300
    rings = [each["choice"] for each in hub_decisions(command) if each["what"] == "ring"]
    assert rings == ["ring 1 of 2 workers", "ring 2 of 1 workers"]


# The others wait in the middle until the third life has joined: else they could be done before it comes.
ENTERS = (
    (
        STEADY.replace("STEPS", "200")
        .replace(
            "with atoll.join()", "decisions = pathlib.Path('run/service/decisions.jsonl')\nwith atoll.join()"
        )
        .replace("    while", "    session.resume()\n    while")
        .replace("import time\n", "import os, pathlib, time\n")
    )
    + """
        while session.iteration == 60 and decisions.read_text().count('"worker joined"') < 3:
            time.sleep(0.02)
        if session.rank == 0:
            print("after", session.iteration, flush=True)
"""
)


def test_a_worker_that_was_killed_is_started_again_and_enters(command: Command) -> None:
    """It was the first: the next one's output is passed on, for that one counts itself as the first now."""
    process = start(command, ENTERS, run="elastic = true\nrestarts = 1\n[hub]\npatience = '5s'")
    wait_for(lambda: command.steps() > 3, "a few steps")
    os.kill(command.worker_pid(0), signal.SIGKILL)
    out, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, err
    assert "worker 0 was killed by SIGKILL, and is started again (1 of 1)" in err
    assert "atoll: hub: worker died: worker 0, incarnation" in err
    assert err.count("output: worker 1's follows (worker 0 was lost; ") == 1
    counts = [int(line.split()[1]) for line in out.splitlines()]
    assert (counts[0], counts[-1], len(set(counts))) == (1, 200, len(counts))
    assert len(counts) >= 199  # what worker 0 was about to print is lost
    (told,) = [line for line in err.splitlines() if line.startswith("atoll: lost, and came back: ")]
    assert re.fullmatch(r".*: worker 0 at \S+ s, back after \S+ s", told)
    rings = [each["choice"] for each in hub_decisions(command) if each["what"] == "ring"]
    assert rings == ["ring 1 of 2 workers", "ring 2 of 1 workers", "ring 3 of 2 workers"]
    assert command.summary()["steps"] == 200


# Whoever is started again joins when the other has left.
TOO_LATE = (
    STEADY.replace("STEPS", "60")
    .replace("import time\n", "import pathlib, time\n")
    .replace(
        "with atoll.join()",
        """if pathlib.Path("killed").exists():
    while not pathlib.Path("finished").exists():
        time.sleep(0.02)
with atoll.join()""",
    )
    + '\npathlib.Path("finished").touch()\n'
)


@pytest.mark.soak
def test_who_is_started_again_when_the_others_have_finished_is_not_waited_for(command: Command) -> None:
    process = start(command, TOO_LATE, run="elastic = true\nrestarts = 1\n[hub]\npatience = '5s'")
    wait_for(lambda: command.steps() > 3, "a few steps")
    (command.directory / "killed").touch()
    os.kill(command.worker_pid(0), signal.SIGKILL)
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, err
    assert "worker 0 was started again, and the others have finished without it" in err
    assert command.summary()["steps"] == 60
