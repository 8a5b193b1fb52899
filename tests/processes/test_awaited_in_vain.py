"""A hub or a CPU side that does not come in time: the line says what its process does, and where."""

from __future__ import annotations

import os
import re
import signal

import pytest
from killed_runs import services
from run_command import DEADLINE, Command, cause_of, wait_for

# In the processes of which the command line has a word, an import never ends.
SITE = """
import sys
import time


class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            print("reads the disk", flush=True)
            time.sleep(600)


if {word!r} in sys.orig_argv:
    sys.meta_path.insert(0, Slow())
"""
HURRIES = """
if "run" in sys.orig_argv:
    import atoll.launch.hublaunch
    atoll.launch.hublaunch.START_SECONDS = 15.0
"""
LOG = r"its log is run/logs/hub\.log"
SLEEPS = r"its process is alive, waits, and says nothing"


def with_site(command: Command, word: str, module: str, more: str = "") -> dict[str, str]:
    (command.directory / "sitecustomize.py").write_text(SITE.format(word=word, module=module) + more)
    paths = [str(command.directory), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}


@pytest.mark.parametrize("stopped", [False, True], ids=["imports", "stopped"])
def test_a_hub_that_does_not_listen(command: Command, stopped: bool) -> None:
    environment = with_site(command, "hub", "atoll.hub.main", HURRIES)
    process = command.start("", options=["--strategy", "server"], environment=environment)
    log = command.directory / "run" / "logs" / "hub.log"
    wait_for(lambda: log.exists() and "reads the disk" in log.read_text(), "the hub's import")
    if stopped:
        services(command, "hub")[0].send_signal(signal.SIGSTOP)
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 1, err
    place = r"at \S+/sitecustomize\.py:\d+ \(find_spec\)"
    doing = r"its process stands still \(SIGSTOP\)" if stopped else f"{SLEEPS}, {place}"
    said = f"the hub did not listen within 15 s: {doing}; it said last: reads the disk; {LOG}"
    assert re.fullmatch(f"atoll: {said}", err.splitlines()[-1]), err
    assert not command.alive()


SHORT = """
import atoll
from atoll.train.members import peersintroduction
peersintroduction._START_SECONDS = 3.0
atoll.join()
"""


def test_a_cpu_side_that_does_not_begin(command: Command) -> None:
    environment = with_site(command, "atoll.cpuside.main", "atoll.cpuside.process")
    _, _, err = result = command.run(SHORT, options=["--strategy", "peers"], environment=environment)
    assert result[0] == 1, err
    place = r"at \S+/sitecustomize\.py:\d+ \(find_spec\)"
    said = rf"waited 3\.0 s for the CPU side of node \d \(process \d+\) on its start: {SLEEPS}, {place}"
    assert re.search(said, cause_of(err)), err
    assert not command.alive()
