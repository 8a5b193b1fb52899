"""What a worker of the pool says on standard error, as a user would see it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def errors_to(file: Path) -> Iterator[None]:
    """What is said on standard error goes to `file` meanwhile."""
    before = os.dup(2)
    with file.open("wb") as said:
        os.dup2(said.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
