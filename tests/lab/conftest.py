"""What the tests of labs share. Those that make one skip where none can be made, and say why."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest
from lab_command import Labs

from atoll.core.errors import AtollError
from atoll.lab import namespaces
from atoll.lab.emulator import available


@lru_cache(maxsize=1)
def obstacle() -> str:
    """Why this machine cannot have a lab; empty where it can."""
    try:
        return available() or (namespaces.find_way() and "")
    except AtollError as error:
        return str(error)


@pytest.fixture
def labs(tmp_path: Path) -> Iterator[Labs]:
    if reason := obstacle():
        pytest.skip(f"no lab can be made here: {reason}")
    made = Labs(tmp_path)
    yield made
    forgotten = [process for process in made.alive() if process.pid in {each.pid for each in made.started}]
    made.close()
    assert not forgotten, f"still running: {forgotten}"
