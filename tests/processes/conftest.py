"""What the tests of processes share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from run_command import DEADLINE, Command


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    made = Command(tmp_path)
    yield made
    left = made.alive()
    for process in left:
        process.kill()
    for launched in made.started:
        launched.communicate(timeout=DEADLINE)
    assert not left, f"left behind: {left}"
