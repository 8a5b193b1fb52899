"""How a launch ends where a process does not."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from atoll.core.config import Config
from atoll.launch.served import ServedLaunch
from atoll.observe.rundir import RunDirectory

DEADLINE = 60.0


def test_a_process_that_does_not_end_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is stuck in the kernel and cannot be killed; here: one that nobody has killed yet."""

    def alone(launch: ServedLaunch) -> None:
        launch._workers.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))

    monkeypatch.setattr(ServedLaunch, "_start", alone)
    launch = ServedLaunch(RunDirectory(tmp_path), Config(), ["train.py"], {})
    try:
        began = time.monotonic()
        with pytest.raises(subprocess.TimeoutExpired):
            launch.wait(0.2)
        assert time.monotonic() - began < DEADLINE / 2
        assert launch.returncode is None
    finally:
        launch.kill()
    assert launch.wait(DEADLINE) == 1
