"""What several test modules share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from atoll.testing.pool import WorkerPool


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """One set of worker processes for the whole test run: importing torch costs seconds, a job does not."""
    import torch

    from atoll.testing.pool import WorkerPool

    torch.set_num_threads(1)  # as the workers do: the order of a sum depends on it
    with WorkerPool() as workers:
        yield workers
