"""What the tests of processes share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from run_command import DEADLINE, Command

if TYPE_CHECKING:
    from shard_cluster import Run


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


@pytest.fixture
def start() -> Iterator[Callable[..., Run]]:
    """Makes runs of shards in threads, which end with the test."""
    from shard_cluster import Run

    made: list[Run] = []

    def make(*args: Any, **kwargs: Any) -> Run:
        made.append(Run(*args, **kwargs))
        return made[-1]

    yield make
    for run in made:
        run.close()
    for run in made:
        assert not run.cluster.errors, run.cluster.errors
